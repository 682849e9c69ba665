"""Specs of L7's queue: which request waits for which compile, by lists that are searched from the start.

Owns: a desk of waiting requests and the jobs that they wait for. Nothing is computed here: orders say when a job
begins, ends or fails. Must not know: the engine, futures.
"""

import random
from dataclasses import dataclass, field

Order = list[str | float]


@dataclass
class Job:
    """A compile: "queued", "running", "done", "failed" or "cancelled"."""

    key: str
    state: str = "queued"


@dataclass
class Guest:
    """A waiting request: since when it waits too long, and its job, ``None`` if its grammar was there at once."""

    name: str
    key: str
    deadline: float
    job: Job | None


@dataclass
class Desk:
    """The whole world of the queue. ``kept``: keys whose grammars are there. ``cancelled``: keys that were given up."""

    timeout_s: float
    now: float = 0.0
    guests: list[Guest] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)
    kept: set[str] = field(default_factory=set)
    cancelled: list[str] = field(default_factory=list)
    num_timeouts: int = 0

    def job(self, key: str) -> Job | None:
        """Return the job under way for a key."""
        return next((job for job in self.jobs if job.key == key and job.state in ("queued", "running")), None)

    def submit(self, name: str, key: str) -> None:
        """Let a request wait: for nothing, for a job under way, or for a new one."""
        job = None
        if key not in self.kept:
            job = self.job(key)
            if job is None:
                job = Job(key)
                self.jobs.append(job)
        self.guests.append(Guest(name, key, self.now + self.timeout_s, job))

    def end(self, key: str, state: str) -> None:
        """Begin, finish or fail the job under way, if there is one; what is finished is kept."""
        job = self.job(key)
        if job is not None:
            job.state = state
            self.kept |= {key} if state == "done" else set()

    def poll(self) -> tuple[list[str], dict[str, str]]:
        """Return who is ready, in the order of arrival, and who failed and why: "failed" or "late"."""
        ready = [guest.name for guest in self.guests if guest.job is None or guest.job.state == "done"]
        failed = {guest.name: "failed" for guest in self.guests if guest.job and guest.job.state == "failed"}
        for guest in self.guests:
            if guest.name not in ready and guest.name not in failed and self.now >= guest.deadline:
                failed[guest.name] = "late"
                self.num_timeouts += 1
        for name in [*ready, *failed]:
            self.drop(name)
        return ready, failed

    def drop(self, name: str) -> None:
        """Let a request go; a job that has not begun goes with the last who waits for it."""
        gone = [guest for guest in self.guests if guest.name == name]
        self.guests = [guest for guest in self.guests if guest.name != name]
        for guest in gone:
            job = guest.job
            if job is not None and job.state == "queued" and all(other.job is not job for other in self.guests):
                job.state = "cancelled"
                self.cancelled.append(job.key)


def orders(seed: int, timeout_s: float) -> list[Order]:
    """Draw a day at the desk."""
    rng = random.Random(f"desk {seed}")
    found = list[Order]()
    number = 0
    keys = ["a", "b", "c", "d"][: rng.randint(1, 4)]
    kinds = ["submit"] * 4 + ["poll"] * 4 + ["finish", "finish", "fail", "begin", "begin", "tick", "drop"]
    for _ in range(rng.randint(8, 40)):
        what = rng.choice(kinds)
        if what == "submit":
            found.append(["submit", f"r{number}", rng.choice(keys)])
            number += 1
        elif what == "tick":
            found.append(["tick", rng.choice([0.25, 0.5, 1.0]) * timeout_s])
        elif what == "drop":
            found.append(["drop", f"r{rng.randrange(number + 1)}"])
        elif what == "poll":
            found.append(["poll"])
        else:
            found.append([what, rng.choice(keys)])
    return [*found, ["poll"], ["tick", timeout_s], ["poll"]]
