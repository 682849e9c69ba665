"""Workers that are actors of Ray, without engines. They need the extra ``ray``."""

import asyncio

import psutil
import pytest

from .conftest import Router
from .fake import Fake
from .test_front import BODY, PATH, alone, identity_in, without_counts

pytest.importorskip("ray")
pytestmark = pytest.mark.slow  # Ray begins in half a minute


def paced():
    return Fake(pace=0.02)


def actors_running():
    found = psutil.process_iter(["cmdline"])  # None of one that has just ended
    return [each for each in found if "ray::AppActor" in " ".join(each.info["cmdline"] or ())]


def test_actors_answer_as_servers_do_and_ray_starts_them_again(reader):
    from mini_engine.router.actors import actors

    async def test(workers):
        router = Router(workers, reader)
        async with router.fleet.watched():
            await router.until(lambda: len(router.fleet.links) == 2, 30)
            for stream in (True, False):
                _, _, got = await router.ask("POST", PATH, BODY | {"stream": stream})
                assert without_counts(got) == without_counts(await alone(BODY | {"stream": stream}, identity_in(got)))
            bodies = [BODY | {"prompt": f"{number} bears", "max_tokens": 200} for number in range(4)]
            asking = [asyncio.create_task(router.ask("POST", PATH, body)) for body in bodies]
            await router.until(lambda: all(router.fleet.policy.workers[each.name].queue for each in workers), 10)
            await asyncio.sleep(1)
            actors_running()[0].kill()
            for body, (_, _, got) in zip(bodies, await asyncio.gather(*asking), strict=True):
                assert without_counts(got) == without_counts(await alone(body, identity_in(got)))
            assert sum(router.fleet.num_lost.values()) >= 1
            await router.until(lambda: len(router.fleet.links) == 2, 60)
            async with router.opened("POST", PATH, BODY | {"max_tokens": 10_000}) as answer:
                await anext(answer.pieces)
            await router.until(lambda: not any(own.queue for own in router.fleet.policy.workers.values()))

    with actors(2, paced) as workers:
        asyncio.run(asyncio.wait_for(test(workers), 200))
    psutil.wait_procs(actors_running(), 10)
    assert not actors_running()
