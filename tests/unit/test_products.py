"""Products: each way computes the product, the choice follows the times, and what is found is kept."""

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from mini_engine.config import EngineConfig
from mini_engine.fast import products
from mini_engine.fast.products import (
    WAYS,
    FastProjections,
    InvariantProjections,
    in_blocks,
    make_plan,
    make_projections,
    onednn_fault,
    onednn_linear,
)
from mini_engine.invariant import findings
from mini_engine.linear import TorchProjections
from tests.conftest import skip_without_bfloat16


@pytest.fixture
def no_findings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine on which nothing was found yet; the folder for what will be."""
    monkeypatch.setenv("MINI_ENGINE_CACHE", str(tmp_path))
    for function in (findings.findings, findings.path):
        function.cache_clear()
    yield tmp_path
    for function in (findings.findings, findings.path):
        function.cache_clear()


def plan_for(monkeypatch: pytest.MonkeyPatch, *names: str) -> FastProjections:
    monkeypatch.setattr(products, "find_plan", lambda weight, usable: list(names))
    return FastProjections(("packed", "onednn", "torch"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_is_the_product(way: str, dtype: torch.dtype) -> None:
    """Close to float64; with several bfloat16 rows the very bits of ``F.linear``."""
    skip_without_bfloat16(dtype)
    assert onednn_fault(dtype) is None, "this build cannot pack; the fallback is tested elsewhere"
    torch.manual_seed(0)
    weight, x = torch.randn(1400, 100).to(dtype), torch.randn(7, 100).to(dtype)
    product = WAYS[way].multiply(x, WAYS[way].store(weight))
    exact = x.double() @ weight.double().T
    assert float((product.double() - exact).abs().max()) < (5e-5 if dtype == torch.float32 else 0.2)
    if dtype == torch.bfloat16:
        assert torch.equal(product, TorchProjections().linear(weight)(x))


@pytest.fixture
def onednn_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of every oneDNN product, in the order of the calls."""
    asked: list[int] = []

    def counted(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        asked.append(len(x))
        return onednn_linear(x, weight)

    for name in ("packed", "onednn"):
        monkeypatch.setitem(WAYS, name, products.Way(WAYS[name].store, counted, is_compiled=True))
    return asked


def test_float32_products_have_few_numbers_of_rows_and_no_row_shows_it(
    onednn_rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, x = torch.randn(400, 350), torch.randn(200, 350)
    multiply = plan_for(monkeypatch, "packed", "packed", "packed").linear(weight)
    whole = multiply(x)
    for rows in range(2, 200):
        torch.testing.assert_close(multiply(x[:rows]), whole[:rows], rtol=1e-5, atol=1e-4)
    assert len(set(onednn_rows)) == 20
    assert all(got <= max(4, asked + 3, asked * 5 / 4) for asked, got in enumerate(onednn_rows[1:], start=2))


def test_one_bfloat16_row_stays_alone_and_few_are_padded(
    onednn_rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_without_bfloat16(torch.bfloat16)
    weight, x = torch.randn(400, 350).bfloat16(), torch.randn(9, 350).bfloat16()
    multiply = plan_for(monkeypatch, "packed", "packed", "packed").linear(weight)
    for rows in range(1, 10):
        assert torch.equal(multiply(x[:rows]), F.linear(x[:rows], weight)) or rows in (2, 3)
    assert onednn_rows == [1, 4, 4, 4, 5, 6, 7, 8, 9]


def test_a_plan_with_two_ways_takes_each_for_its_number_of_rows(
    onednn_rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, x = torch.randn(512, 128), torch.randn(129, 128)
    multiply = plan_for(monkeypatch, "torch", "torch", "onednn").linear(weight)
    for rows in (1, 2, 16, 72):
        assert torch.equal(multiply(x[:rows]), F.linear(x[:rows], weight))
    assert not onednn_rows
    torch.testing.assert_close(multiply(x), x @ weight.T, rtol=1e-5, atol=1e-4)
    assert onednn_rows == [160]


def test_the_plan_is_the_fastest_and_the_usual_one_where_it_is_as_good() -> None:
    slow, fast = [2.0, 2.0, 2.0], [1.0, 1.0, 1.0]
    assert make_plan({"packed": fast, "onednn": slow, "torch": slow}) == ["packed"] * 3
    assert make_plan({"packed": slow, "onednn": [2, 2, 1], "torch": [1, 1, 3]}) == ["torch", "torch", "onednn"]
    assert make_plan({"packed": [1.05, 1.05, 1.05], "onednn": fast, "torch": fast}) == ["packed"] * 3
    assert make_plan({"onednn": slow, "torch": [1.9, 1.0, 1.9]}) == ["onednn", "torch", "onednn"]


@pytest.mark.parametrize("options", [{}, {"compute": "packed"}], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_has_the_same_bits_in_every_number_of_rows(dtype: str, options: dict[str, str]) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(400, 351).to(getattr(torch, dtype)), torch.randn(300, 351).to(getattr(torch, dtype))
    multiply = make_projections(EngineConfig(dtype=dtype, batch_invariant=True, **options)).linear(weight)
    whole = multiply(x)
    assert whole.shape == (300, 400)
    for rows in [*range(1, 70), *range(70, 140, 7), 255, 256, 257]:
        for start in (0, 300 - rows):
            assert torch.equal(multiply(x[start : start + rows]), whole[start : start + rows])
    assert multiply(x[:0]).shape == (0, 400)
    exact = x.double() @ weight.double().T
    assert float((whole.double() - exact).abs().max()) < (2e-4 if dtype == "float32" else 0.5)


def test_a_large_weight_is_computed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = torch.randn(100, 16), torch.randn(5, 16)
    monkeypatch.setattr(products, "LARGEST_PIECE", 16 * 30)
    pieces: list[int] = []
    original = InvariantProjections.piece
    monkeypatch.setattr(InvariantProjections, "piece", lambda self, w: pieces.append(len(w)) or original(self, w))
    product = make_projections(EngineConfig(batch_invariant=True)).linear(weight)(x)
    assert pieces == [16, 16, 16, 16, 16, 16, 4], "a power of two of output features, and what is left"
    torch.testing.assert_close(product, x @ weight.T)


def test_blocks_have_only_numbers_of_rows_that_hold() -> None:
    asked: list[int] = []

    def multiply(x: torch.Tensor) -> torch.Tensor:
        asked.append(len(x))
        return x * 2

    x = torch.randn(333, 3)
    for numbers, rows, expected in (
        ([2, 6], 1, [2]),
        ([2, 6], 2, [2]),
        ([2, 6], 3, [6]),
        ([2, 6], 8, [6, 2]),
        ([2, 6], 23, [6, 6, 6, 6]),
        ([4, 16, 32, 64], 17, [32]),
        ([4, 16, 32, 64], 33, [32, 4]),
        ([4, 16, 32, 64], 63, [32, 32]),
        ([4, 16, 32, 64], 333, [64, 64, 64, 64, 64, 16]),
        ([64], 40, [64]),
    ):
        asked.clear()
        assert torch.equal(in_blocks(multiply, numbers)(x[:rows]), x[:rows] * 2)
        assert asked == expected


def test_where_no_way_holds_the_model_is_refused(monkeypatch: pytest.MonkeyPatch, no_findings: Path) -> None:
    monkeypatch.setattr(products, "numbers_that_hold", lambda way, weight, numbers: [])
    with pytest.raises(
        ValueError, match=r"cannot be kept on this CPU.*24 x 16 float32.*packed, onednn, torch.*leave batch_inv"
    ):
        make_projections(EngineConfig(batch_invariant=True)).linear(torch.randn(24, 16))


def test_a_faster_way_that_does_not_hold_is_passed_over(monkeypatch: pytest.MonkeyPatch, no_findings: Path) -> None:
    times = {"packed": [1.0], "onednn": [2.0], "torch": [3.0]}
    monkeypatch.setattr(products, "time_ways", lambda weight, ways, numbers: {name: times[name] for name in ways})
    monkeypatch.setattr(
        products, "numbers_that_hold", lambda way, weight, numbers: [4, 8] if way is WAYS["torch"] else []
    )
    assert products.find_blocks(torch.randn(1024, 256), tuple(times)) == ("torch", [4, 8])


@pytest.mark.parametrize(("in_blocks", "chosen"), [(4.0, "torch"), (2.0, "packed")])
def test_a_way_that_holds_in_small_blocks_alone_is_timed_in_them(
    in_blocks: float, chosen: str, monkeypatch: pytest.MonkeyPatch, no_findings: Path
) -> None:
    whole = {"packed": [1.0], "onednn": [5.0], "torch": [3.0]}
    blocks = {"packed": [in_blocks], "torch": [3.0]}
    held = {"packed": [4, 32], "torch": [4, 128], "onednn": [4, 128]}
    times = iter((whole, blocks))
    monkeypatch.setattr(products, "time_ways", lambda weight, ways, numbers: next(times))
    names = {id(way): name for name, way in WAYS.items()}
    monkeypatch.setattr(products, "numbers_that_hold", lambda way, weight, numbers: held[names[id(way)]])
    assert products.find_blocks(torch.randn(1024, 256), tuple(whole)) == (chosen, held[chosen])


@pytest.mark.parametrize(("held", "chosen"), [([4, 128], "torch"), ([1, 2, 4, 64], "packed"), ([128], "packed")])
def test_a_small_weight_gets_the_way_with_the_shortest_call_if_that_holds(
    held: list[int], chosen: str, monkeypatch: pytest.MonkeyPatch, no_findings: Path
) -> None:
    times = {"packed": [1.0], "onednn": [3.0], "torch": [2.0]}
    monkeypatch.setattr(products, "time_ways", lambda weight, ways, numbers: {name: times[name] for name in ways})
    monkeypatch.setattr(
        products, "numbers_that_hold", lambda way, weight, numbers: held if way is WAYS["torch"] else numbers
    )
    assert products.find_blocks(torch.randn(24, 16), tuple(times))[0] == chosen


def test_the_fastest_way_is_found_by_timing_it(no_findings: Path) -> None:
    weight = torch.randn(64, 32)
    times = products.time_ways(weight, {name: products.whole(name) for name in WAYS}, (1, 16))
    assert {name: len(own) for name, own in times.items()} == {"packed": 2, "onednn": 2, "torch": 2}
    assert all(0 < seconds < math.inf for own in times.values() for seconds in own)


def test_an_experiment_runs_once_on_a_machine(no_findings: Path) -> None:
    runs: list[int] = []

    def experiment() -> list[int]:
        runs.append(1)
        return [4, 8]

    assert findings.remembered("a", experiment) == [4, 8]
    assert findings.remembered("a", experiment) == [4, 8]
    findings.findings.cache_clear()  # as another process would
    assert findings.remembered("a", experiment) == [4, 8]
    assert findings.remembered("b", experiment) == [4, 8]
    assert len(runs) == 2
    (file,) = no_findings.iterdir()
    stored = json.loads(file.read_text())
    assert {name: own["result"] for name, own in stored["found"].items()} == {"a": [4, 8], "b": [4, 8]}
    assert all(0 <= own["seconds"] < 1 for own in stored["found"].values())
    assert stored["machine"]["cpu"] == findings.cpu()


@pytest.mark.parametrize("text", ["{", "[]", '{"found": 3}'])
def test_a_broken_file_of_findings_costs_an_experiment(no_findings: Path, text: str) -> None:
    findings.path().write_text(text)
    assert findings.remembered("a", lambda: 1) == 1
    assert json.loads(findings.path().read_text())["found"]["a"]["result"] == 1


def test_a_folder_that_cannot_be_written_costs_nothing(monkeypatch: pytest.MonkeyPatch, no_findings: Path) -> None:
    (no_findings / "file").write_text("")
    monkeypatch.setenv("MINI_ENGINE_CACHE", str(no_findings / "file" / "below"))
    findings.path.cache_clear()
    assert findings.remembered("a", lambda: 1) == 1
    assert findings.remembered("a", lambda: 2) == 1


def test_another_cap_is_another_machine(monkeypatch: pytest.MonkeyPatch, no_findings: Path) -> None:
    before = findings.path()
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2_TRIED")
    for function in (findings.path, findings.machine):
        function.cache_clear()
    after = findings.path()
    findings.machine.cache_clear()
    assert before != after


def test_a_build_without_onednn_falls_back_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "onednn_fault", lambda dtype: "this torch build has no oneDNN")
    weight, x = torch.randn(8, 4), torch.randn(3, 4)
    with pytest.warns(UserWarning, match="compute='packed' needs oneDNN; F.linear is used for float32"):
        linear = make_projections(EngineConfig(compute="packed")).linear(weight)
    assert torch.equal(linear(x), x @ weight.T)
    with pytest.warns(UserWarning, match="compute='packed' needs oneDNN"):
        family = make_projections(EngineConfig(compute="packed", batch_invariant=True))
    assert family == InvariantProjections(("torch",))
