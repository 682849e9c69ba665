"""The stand-in for other CPUs changes bits, also in a new process, and a page that depends on them prints otherwise."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from tests.support.rounding import OTHERWISE, ROOT, rounded_otherwise

ROW = torch.randn(40, 3000, generator=torch.Generator().manual_seed(0))
SQUARE = ROW[:, :900].reshape(40, 30, 30)
COMPUTED = {
    "sum": lambda: ROW.sum(-1),
    "mean": lambda: ROW.mean(-1),
    "running sum": lambda: ROW.cumsum(-1),
    "softmax": lambda: ROW.softmax(-1),
    "log_softmax": lambda: ROW.log_softmax(-1),
    "logsumexp": lambda: torch.logsumexp(ROW, -1),
    "@": lambda: ROW @ ROW.T,
    "linear": lambda: torch.nn.functional.linear(ROW, ROW),
    "bmm": lambda: torch.bmm(SQUARE, SQUARE),
    "einsum": lambda: torch.einsum("bij,bjk->ik", SQUARE, SQUARE),
    "sum in float64": lambda: (ROW.double() / 3).sum(-1),
    "NumPy's product": lambda: torch.from_numpy(np.matmul(ROW.numpy(), ROW.numpy().T)),
}
# What the page of lesson 4 printed when it depended on a CPU.
PAGE = """
import torch
torch.manual_seed(0)
wide = torch.randn(20, 151_936) * 3
before = wide.softmax(-1).sort(-1, descending=True).values.cumsum(-1)[:, :-1]
lost = (before > 1.0).sum(-1)
print(f"{int((lost > 0).sum())} of 20 rows lose about {round(float(lost.float().mean()), -3):.0f} tokens each")
"""


@pytest.mark.parametrize("name", COMPUTED)
def test_another_rounding_changes_bits_and_no_values(name):
    here = COMPUTED[name]()
    with rounded_otherwise():
        there = COMPUTED[name]()
    assert here.dtype == there.dtype
    assert not torch.equal(here, there)
    torch.testing.assert_close(here, there, rtol=1e-3, atol=1e-3)
    assert torch.equal(COMPUTED[name](), here), "it ends with the context"


def test_integers_stay_what_they_are():
    with rounded_otherwise():
        counted = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32).sum(-1, dtype=torch.int32)
        assert counted.dtype == torch.int32
        assert counted.tolist() == [3, 7]
        assert torch.tensor([1, 2]).cumsum(0).tolist() == [1, 3]


def test_a_page_that_depends_on_rounding_prints_otherwise_in_a_new_process():
    there, here = (
        subprocess.run(
            [sys.executable, "-c", PAGE], env=os.environ | more, cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        for more in (OTHERWISE, {})
    )
    assert here.startswith("20 of 20 rows")
    assert there != here
