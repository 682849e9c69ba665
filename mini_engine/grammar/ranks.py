"""L7: several processes that serve one model must agree which requests may run.

Compiles end at different moments in different processes. If one scheduled a request a step before the others, their
batches would differ and a collective operation in the model would wait for ever.
"""

from typing import Any

import torch.distributed as dist

from mini_engine.grammar.queue import Gather, Report


def make_gather(group: Any = None) -> Gather:
    """Return what collects a report from every rank of ``group`` (``None``: all). Every rank must call it as often."""

    def gather(report: Report) -> list[Report]:
        reports: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(reports, report, group)
        return reports

    return gather
