"""Ranks in processes of their own over gloo, and the model of one rank: against L1's model in one process."""

import multiprocessing
import os
import signal
import sys
import time

import pytest
import torch

from mini_engine.attention.dense import DenseAttention, sdpa_attention
from mini_engine.checkpoint import TINY_MODEL, load_config, load_weights
from mini_engine.config import EngineConfig
from mini_engine.model import Qwen3
from mini_engine.processes import gloo
from mini_engine.processes.gloo import run_ranks
from mini_engine.processes.group import RankLost
from mini_engine.processes.one_rank import OneRank, tell
from mini_engine.processes.together import check_same, in_step

PROMPT = [5, 17, 300, 42, 8, 77, 901]
ENDS = {
    "raises": (lambda: {}["q"], "rank 1: KeyError: 'q'"),
    "exits": (lambda: sys.exit(3), "rank 1: SystemExit: 3"),
    "is killed": (lambda: os.kill(os.getpid(), signal.SIGKILL), "rank 1: its process ended with status -9"),
}


def exchange(group):
    """Make both calls; return what this rank has then."""
    parts = group.all_gather(torch.full((2,), group.rank))
    told = torch.tensor([7, 8]) if group.rank == 0 else torch.zeros(2, dtype=torch.int64)
    group.broadcast(told)
    return [part.tolist() for part in parts], told.tolist(), group.rank, group.size, os.getpid()


def leaves(group, end):
    """Rank 1 ends between two exchanges."""

    def work():
        group.all_gather(torch.ones(1))
        if group.rank == 1:
            end()
        return group.all_gather(torch.ones(1))

    return in_step(group, work)


def hears(group, end):
    """What this rank hears of the end of rank 1."""
    try:
        leaves(group, end)
    except RankLost as fault:
        return str(fault)
    return "nothing"


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_exchange_in_processes_of_their_own(size):
    found = run_ranks(size, exchange)
    assert [each[:4] for each in found] == [
        ([[rank, rank] for rank in range(size)], [7, 8], own, size) for own in range(size)
    ]
    assert len({os.getpid(), *(each[4] for each in found)}) == size + 1


def test_no_rank_begins_before_all_have_joined(monkeypatch, tmp_path):
    """One that left at once would end the connections that another still makes."""
    join = gloo.dist.init_process_group

    def join_late(*args, rank, **kwargs):
        join(*args, rank=rank, **kwargs)
        if rank == 0:
            time.sleep(0.5)
            (tmp_path / "joined").touch()

    monkeypatch.setattr(gloo.dist, "init_process_group", join_late)
    assert run_ranks(2, lambda group: (tmp_path / "joined").exists()) == [True, True]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("how", ENDS)
def test_one_rank_ends_all_by_name_and_none_is_left(how, size):
    end, words = ENDS[how]
    began = time.monotonic()
    with pytest.raises(RankLost) as raised:
        run_ranks(size, leaves, end)
    assert str(raised.value) == words
    assert time.monotonic() - began < gloo.SECONDS / 2, "nobody waited for the limit"
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_hears_the_same_reason(size):
    assert run_ranks(size, hears, ENDS["raises"][0]) == ["rank 1: KeyError: 'q'"] * size


def test_a_rank_that_hangs_ends_all(monkeypatch):
    monkeypatch.setattr(gloo, "SECONDS", 1.0)
    with pytest.raises(RankLost, match="rank 1: its process ended with status -9"):
        run_ranks(2, leaves, lambda: time.sleep(600))
    assert multiprocessing.active_children() == []


def test_a_rank_that_disagrees_ends_all_by_name():
    with pytest.raises(RankLost, match=r"ValueError: ranks \[1\] have other ids"):
        run_ranks(2, lambda group: in_step(group, lambda: check_same(group, [3, group.rank])))


@pytest.mark.parametrize("size", [1, 2])
def test_ranks_compute_the_model(size):
    config = load_config(TINY_MODEL)
    model = Qwen3(config, load_weights(TINY_MODEL, config, EngineConfig()))
    with torch.inference_mode():
        logits = model(torch.tensor(PROMPT), torch.arange(len(PROMPT)), DenseAttention(sdpa_attention))[-1]
    for found in run_ranks(size, lambda group: OneRank(group).logits(PROMPT)):
        assert (found - logits).abs().max() < 1e-4


def test_every_rank_tells_the_story_and_keeps_its_part():
    ((alone, whole),) = run_ranks(1, tell, PROMPT, 5)
    told = run_ranks(2, tell, PROMPT, 5)
    assert [ids for ids, _ in told] == [alone, alone]
    shapes = load_config(TINY_MODEL).weight_shapes()
    numbers = {name: torch.Size(shape).numel() for name, shape in shapes.items()}
    table = numbers["model.embed_tokens.weight"]
    matrices = sum(numbers[name] for name, shape in shapes.items() if len(shape) == 2) - table
    norms = sum(numbers.values()) - matrices - table
    assert whole == 4 * sum(numbers.values())
    assert [held for _, held in told] == [4 * (matrices // 2 + norms + table + table // 2)] * 2
