"""The two ways in which transformers serves many requests: ``generate`` in static batches, and continuous batching.

The peers run under good conditions: SDPA attention, and prompts and lengths known beforehand. No end-of-sequence id
stops them. Every token has the time at which it was computed.
"""

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from mini_engine.attention.allocator import pages_needed
from mini_engine.bench.workload import Answer, Job, PaddedWaste, Run
from mini_engine.scheduler.request import RequestTimes

STATIC, CONTINUOUS = "transformers static", "transformers continuous"
PAGE_TOKENS = 32  # of continuous batching; 16 to 256 make no difference on a CPU


class TokenClock(BaseStreamer):
    """A streamer that records when each token arrives. ``generate`` passes it the prompt first."""

    def __init__(self) -> None:
        """Start with no times."""
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """Record the time of a call."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Do nothing at the end."""


def generate_greedily(
    model: PreTrainedModel, ids: torch.Tensor, new_tokens: int, clock: TokenClock, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Call ``generate`` on ``ids`` [N, T] without an end-of-sequence id -> ids [N, T + new_tokens].

    ``mask`` [N, T]: 0 for padding; by default nothing is padded.
    """
    out: torch.Tensor = model.generate(
        ids,
        attention_mask=torch.ones_like(ids) if mask is None else mask,
        do_sample=False,
        max_new_tokens=new_tokens,
        streamer=clock,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out


class StaticPeer:
    """``generate`` over the requests that have arrived, at most ``size`` at a time, until the longest answer ends."""

    def __init__(self, model: PreTrainedModel, size: int) -> None:
        """Serve with ``model``."""
        self.model = model
        self.size = size

    def open(self) -> None:
        """Do nothing: every batch makes its own cache."""

    def close(self) -> None:
        """Do nothing: the caches are freed."""

    def serve(self, jobs: Sequence[Job]) -> Run:
        """Serve ``jobs``, in the order of arrival."""
        began = time.perf_counter()
        left = deque(jobs)
        waste = PaddedWaste()
        answers: list[Answer] = []
        while left:
            sleep_until(began + left[0].arrival_s)
            now = time.perf_counter() - began
            batch: list[Job] = []
            while left and left[0].arrival_s <= now and len(batch) < self.size:
                batch.append(left.popleft())
            waste.add(batch)
            answers += self.generate(batch, began)
        return Run(began, answers, kv_waste=waste.mean)

    def generate(self, jobs: Sequence[Job], began: float) -> list[Answer]:
        """Run one batch, padded on the left, and cut each answer to its number of tokens."""
        longest = max(len(job.prompt_ids) for job in jobs)
        pads = [longest - len(job.prompt_ids) for job in jobs]
        ids = torch.tensor([[0] * pad + job.prompt_ids for pad, job in zip(pads, jobs, strict=True)])
        mask = torch.arange(longest) >= torch.tensor(pads)[:, None]
        clock = TokenClock()
        started = time.perf_counter()
        out = generate_greedily(self.model, ids, max(job.new_tokens for job in jobs), clock, mask.long())
        times = clock.times[1:]
        return [
            Answer(
                row[longest:][: job.new_tokens].tolist(),
                RequestTimes(began + job.arrival_s, started, times[job.new_tokens - 1], times[: job.new_tokens]),
            )
            for row, job in zip(out, jobs, strict=True)
        ]


class ContinuousPeer:
    """The continuous batching of transformers, which runs in its own thread."""

    def __init__(self, model: PreTrainedModel, size: int, tokens_per_step: int, pool_tokens: int) -> None:
        """Serve with ``model``: at most ``size`` requests and ``tokens_per_step`` tokens a step, and a fixed cache.

        Raises ``ImportError`` if this version of transformers has no continuous batching.
        """
        from transformers import ContinuousBatchingConfig

        self.model = model
        # Prompts are not shared, and looking for equal ones takes time.
        self.config = ContinuousBatchingConfig(
            page_size=PAGE_TOKENS,
            num_blocks=pages_needed(pool_tokens, PAGE_TOKENS),
            max_requests_per_batch=size,
            max_batch_tokens=tokens_per_step,
            allow_block_sharing=False,
        )
        self.manager: Any = None

    def open(self) -> None:
        """Make the cache and start the thread."""
        settings = GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=1)
        self.manager = self.model.init_continuous_batching(settings, self.config)
        self.manager.warmup()
        self.manager.start()

    def close(self) -> None:
        """Stop the thread and drop the cache."""
        self.manager.stop()
        self.manager.destroy()
        self.manager = None

    def serve(self, jobs: Sequence[Job]) -> Run:
        """Serve ``jobs``, in the order of arrival. Raises ``RuntimeError`` if the thread dies."""
        began = time.perf_counter()
        names = []
        for job in jobs:
            sleep_until(began + job.arrival_s)
            names.append(
                self.manager.add_request(job.prompt_ids, max_new_tokens=job.new_tokens, record_timestamps=True)
            )
        outputs: dict[str, Any] = {}
        while len(outputs) < len(jobs):
            output = self.manager.get_result(timeout=1.0)
            if output is None and not self.manager.is_running():
                raise RuntimeError(f"the generation thread died: {self.manager.background_thread_status.fatal_error}")
            if output is not None and output.error is not None:
                raise RuntimeError(f"{output.request_id} failed: {output.error}")
            if output is not None and output.is_finished():
                outputs[output.request_id] = output
        return Run(began, [answer(outputs[name], began, job) for name, job in zip(names, jobs, strict=True)])


def answer(output: Any, began: float, job: Job) -> Answer:
    """Return a finished request of continuous batching as an ``Answer``. Its clock is ``perf_counter`` too."""
    started, finished = output.lifespan
    return Answer(output.generated_tokens, RequestTimes(began + job.arrival_s, started, finished, output.timestamps))


def sleep_until(moment: float) -> None:
    """Return when ``time.perf_counter()`` has reached ``moment``."""
    left = moment - time.perf_counter()
    if left > 0:
        time.sleep(left)


@torch.inference_mode()
def gap_at_difference(
    model: PreTrainedModel, prompt: Sequence[int], ours: Sequence[int], theirs: Sequence[int]
) -> float:
    """Return how far apart the logits of two tokens are where two answers first differ; 0.0 for equal answers.

    The logits are those of the peer, for the sequence alone and without padding. The unit is their standard deviation.
    """
    split = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
    if split is None:
        return 0.0
    logits = model(torch.tensor([[*prompt, *ours[:split]]]), logits_to_keep=1).logits[0, -1].float()
    return float(((logits.max() - logits[[ours[split], theirs[split]]].min()) / logits.std()).item())
