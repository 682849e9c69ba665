"""Products: each way computes the product, the choice follows the stated rule, and what is found is kept."""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import combinations_with_replacement
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from mini_engine.checkpoint import resolve_folder
from mini_engine.config import EngineConfig
from mini_engine.fast import products
from mini_engine.fast.products import (
    WAYS,
    FastProjections,
    InvariantProjections,
    in_blocks,
    make_projections,
    onednn_fault,
    onednn_linear,
)
from mini_engine.invariant import findings
from mini_engine.invariant.probe import THREADS, row_numbers, thread_count
from mini_engine.linear import TorchProjections
from tests.conftest import skip_without_bfloat16


@pytest.fixture
def no_findings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine on which nothing was found yet; the folder for what will be."""
    monkeypatch.setenv("MINI_ENGINE_CACHE", str(tmp_path))
    return tmp_path


def packed_only(monkeypatch: pytest.MonkeyPatch) -> FastProjections:
    monkeypatch.setattr(products, "find_way", lambda *_: "packed")
    return FastProjections(("packed", "torch"))


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

    monkeypatch.setitem(WAYS, "packed", products.Way(WAYS["packed"].store, counted, is_compiled=True))
    return asked


def test_float32_products_have_few_numbers_of_rows_and_no_row_shows_it(
    onednn_rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, x = torch.randn(400, 350), torch.randn(200, 350)
    multiply = packed_only(monkeypatch).linear(weight)
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
    multiply = packed_only(monkeypatch).linear(weight)
    for rows in range(1, 10):
        assert torch.equal(multiply(x[:rows]), F.linear(x[:rows], weight)) or rows in (2, 3)
    assert onednn_rows == [1, 4, 4, 4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize(
    ("out_features", "in_features", "dtype", "name"),
    [
        (512, 256, torch.float32, "torch"),
        (513, 256, torch.float32, "packed"),
        (8, 8, torch.bfloat16, "packed"),
        (1024, 1024, torch.bfloat16, "packed"),
    ],
)
def test_the_way_follows_from_size_and_dtype(
    out_features: int, in_features: int, dtype: torch.dtype, name: str
) -> None:
    assert products.in_order_of_preference(out_features, in_features, dtype, ("packed", "torch"))[0] == name
    assert products.in_order_of_preference(out_features, in_features, dtype, ("torch",)) == ("torch",)


@pytest.mark.parametrize(("is_exact", "name"), [(True, "packed"), (False, "torch")])
def test_a_packed_product_in_bfloat16_has_the_bits_of_transformers_or_is_not_taken(
    is_exact: bool, name: str, monkeypatch: pytest.MonkeyPatch, no_findings: Path
) -> None:
    monkeypatch.setattr(
        products, "padded", lambda way, stored, bias: lambda x: F.linear(x, stored, bias) + (0 if is_exact else 1e-2)
    )
    monkeypatch.setattr(products, "pack_weight", lambda weight: weight)
    assert products.find_way(torch.randn(64, 32).bfloat16(), ("packed", "torch")) == name


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
    monkeypatch.setattr(InvariantProjections, "piece", lambda self, w, n: pieces.append(len(w)) or original(self, w, n))
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
        ([2, 6], 7, [6, 2]),
        ([2, 6], 23, [6, 6, 6, 6]),
        ([4, 16, 32, 64], 17, [16, 4]),
        ([4, 16, 32, 64], 25, [32]),
        ([4, 16, 32, 64], 33, [32, 4]),
        ([4, 16, 32, 64], 63, [64]),
        ([4, 16, 32, 64], 333, [64, 64, 64, 64, 64, 16]),
        ([64], 40, [64]),
    ):
        asked.clear()
        assert torch.equal(in_blocks(multiply, numbers)(x[:rows]), x[:rows] * 2)
        assert asked == expected


@pytest.mark.parametrize("numbers", [(2, 6), (4, 16, 24), (5,), (1, 2, 3, 4, 6, 8, 12, 16, 24)])
def test_blocks_are_those_that_take_the_least_time(numbers: tuple[int, ...]) -> None:
    """Against every choice of up to six blocks."""
    every = [cut for count in range(7) for cut in combinations_with_replacement(numbers, count)]
    for rows, sizes in enumerate(products.all_block_sizes(numbers)):
        costs = {sum(max(size, 4) + 4 for size in cut) for cut in every if sum(cut) >= rows}
        assert sum(max(size, 4) + 4 for size in sizes) == min(costs)
        assert rows <= sum(sizes) < rows + min(sizes, default=1)


def test_where_no_way_holds_the_model_is_refused(monkeypatch: pytest.MonkeyPatch, no_findings: Path) -> None:
    monkeypatch.setattr(products, "numbers_that_hold", lambda *_: [])
    with pytest.raises(
        ValueError, match=r"cannot be kept on this CPU.*24 x 16 float32.*torch, packed.*leave batch_inv"
    ):
        make_projections(EngineConfig(batch_invariant=True)).linear(torch.randn(24, 16))


@pytest.mark.parametrize(
    ("packed", "torch_holds", "chosen"),
    [
        ([1, 4, 64], [1, 4, 64], "packed"),
        ([4], [1, 4, 64], "packed"),
        ([], [4, 8], "torch"),
        ([1, 2], [4, 8], "torch"),
        ([1, 2], [1], "packed"),
    ],
)
def test_the_first_way_that_holds_for_a_block_is_taken(
    packed: list[int],
    torch_holds: list[int],
    chosen: str,
    monkeypatch: pytest.MonkeyPatch,
    no_findings: Path,
) -> None:
    held = {id(WAYS["packed"]): packed, id(WAYS["torch"]): torch_holds}
    monkeypatch.setattr(products, "numbers_that_hold", lambda way, *_: held[id(way)])
    found = products.find_blocks(1024, 256, torch.float32, ("packed", "torch"))
    assert found == (chosen, held[id(WAYS[chosen])])


def test_threads_that_were_not_tried_change_no_way_but_may_refuse(
    monkeypatch: pytest.MonkeyPatch, no_findings: Path
) -> None:
    """Another way would have other bits than the same model on two threads."""

    def numbers_that_hold(way: products.Way, *others: object) -> list[int]:
        return [] if way is WAYS["packed"] and others[-1] == [3] else [4, 8]

    monkeypatch.setattr(products, "numbers_that_hold", numbers_that_hold)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    with pytest.raises(ValueError, match="with 3 threads"):
        products.find_blocks(1024, 256, torch.float32, ("packed", "torch"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("out_features", "in_features"), [(128, 128), (1024, 512), (3072, 1024), (2100, 2050)])
def test_a_part_of_a_matrix_has_the_bits_of_the_whole(out_features: int, in_features: int, dtype: torch.dtype) -> None:
    """In two, four and unlike parts; the last size is computed in pieces of 1,024 output features."""
    torch.manual_seed(0)
    weight, x = torch.randn(out_features, in_features).to(dtype), torch.randn(37, in_features).to(dtype)
    projections = make_projections(EngineConfig(batch_invariant=True, dtype=str(dtype).removeprefix("torch.")))
    whole = projections.linear(weight)(x)
    for size in (out_features // 2, out_features // 4, out_features - 16):
        parts = [projections.linear(part, whole=out_features)(x) for part in weight.split(size)]
        assert torch.equal(torch.cat(parts, dim=-1), whole), (size, projections.choices)


def test_a_part_that_would_be_added_in_another_order_is_padded_to_the_whole(
    monkeypatch: pytest.MonkeyPatch, no_findings: Path
) -> None:
    asked: list[int] = []

    def multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Add column after column: on some CPUs no product of a library keeps a row's bits at this width."""
        asked.append(len(weight))
        columns = [own[:, None] * other for own, other in zip(x.T, weight.T, strict=True)]
        return functools.reduce(torch.add, columns if len(weight) != 16 else columns[::-1])

    monkeypatch.setitem(WAYS, "torch", products.Way(WAYS["torch"].store, multiply, is_compiled=False))
    weight, x = torch.randn(64, 70), torch.randn(5, 70)
    projections = InvariantProjections(("torch",))
    whole, part, like = (projections.linear(own, whole=64) for own in (weight, weight[48:], weight[32:]))
    asked.clear()
    assert torch.equal(part(x), whole(x)[:, 48:])
    assert torch.equal(like(x), whole(x)[:, 32:])
    assert asked == [64, 64, 32, 64]


PROCESS = """
import sys, torch
import torch.nn.functional as F
from transformers import Qwen3Config, Qwen3ForCausalLM
from mini_engine.config import EngineConfig, ModelConfig
from mini_engine.fast import products
from mini_engine.llm import build_model, load_driver, make_driver

turned, threads, file = sys.argv[1] == "turned", int(sys.argv[2]), sys.argv[3]
if turned:
    order = products.in_order_of_preference
    products.in_order_of_preference = lambda *given: order(*given)[::-1]
    # An old CPU adds up in the same order either way. This one adds as no CPU does.
    products.WAYS["torch"] = products.Way(
        lambda weight: weight.double(), lambda x, stored: F.linear(x.double(), stored).to(x.dtype), is_compiled=False
    )
shapes = {"hidden 512": (512, 8, 4, 64, 1536), "one layer of 0.6B": (1024, 16, 8, 128, 3072)}
found = {}
for dtype in ("float32", "bfloat16")[: 1 if turned else 2]:
    for invariant in (True, False)[: 1 if turned else 2]:
        torch.set_num_threads(threads if invariant else 1)
        engine = EngineConfig(dtype=dtype, compute="packed", batch_invariant=invariant)
        drivers = {"embedded": load_driver(engine=engine)}
        for name, (hidden, heads, kv_heads, head_dim, inner) in shapes.items():
            config = Qwen3Config(
                vocab_size=1024, hidden_size=hidden, num_hidden_layers=1, num_attention_heads=heads, head_dim=head_dim,
                num_key_value_heads=kv_heads, intermediate_size=inner, max_position_embeddings=256,
            )
            torch.manual_seed(0)
            weights = {k: v.to(getattr(torch, dtype)) for k, v in Qwen3ForCausalLM(config).state_dict().items()}
            model = build_model(ModelConfig.from_hf(config.to_dict()), weights, engine)
            drivers[name] = make_driver(model, engine)
        for name, driver in drivers.items():
            logits = [step.logits for step in driver.steps(list(range(5, 45)), 3)]
            found[f"{name} {dtype} {'invariant' if invariant else 'plain'}"] = torch.cat(logits)
torch.save(found, file)
"""


def test_two_processes_with_empty_caches_have_the_same_bits_on_one_thread_and_on_two(tmp_path: Path) -> None:
    """On two with invariance. A process whose order of preference is turned round has others: the test can fail."""

    def logits(name: str, threads: int, order: str = "stated") -> dict[str, torch.Tensor]:
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "MINI_ENGINE_CACHE": str(tmp_path / name)}
        words = ("-W", "ignore", "-c", PROCESS, order, str(threads), tmp_path / f"{name}.pt")
        subprocess.run([sys.executable, *words], check=True, env=environment)
        return torch.load(tmp_path / f"{name}.pt")

    first, again, turned = logits("a", 1), logits("b", 2), logits("c", 1, "turned")
    assert (len(first), len(again)) == (12, 12)
    for name, expected in first.items():
        assert torch.equal(again[name], expected), name
    name = "hidden 512 float32 invariant"
    assert not torch.equal(turned[name], first[name])


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


def test_what_was_found_on_one_thread_is_tried_again_on_three(
    monkeypatch: pytest.MonkeyPatch, no_findings: Path
) -> None:
    tried = []

    def rows_that_hold(compute: object, row: torch.Tensor, numbers: Sequence[int], threads: Sequence[int]) -> list[int]:
        tried.append(tuple(threads))
        return [8] if 3 in threads else list(numbers)

    monkeypatch.setattr(products, "rows_that_hold", rows_that_hold)
    shape = (24, 16, torch.float32, ("packed", "torch"))
    with thread_count(1):
        assert products.find_blocks(*shape)[1] == row_numbers(products.LARGEST_BLOCK)
    with thread_count(3):
        assert products.find_blocks(*shape) == products.find_blocks(*shape) == ("torch", [8])
    with thread_count(1):
        assert products.find_blocks(*shape)[1] == row_numbers(products.LARGEST_BLOCK)
    assert tried == [THREADS, THREADS, (3,)]
    assert len(list(no_findings.iterdir())) == 2


@pytest.mark.parametrize("text", ["{", "[]", '{"found": 3}'])
def test_a_broken_file_of_findings_costs_an_experiment(no_findings: Path, text: str) -> None:
    findings.path().write_text(text)
    assert findings.remembered("a", lambda: 1) == 1
    assert json.loads(findings.path().read_text())["found"]["a"]["result"] == 1


def test_a_folder_that_cannot_be_written_costs_nothing(monkeypatch: pytest.MonkeyPatch, no_findings: Path) -> None:
    (no_findings / "file").write_text("")
    monkeypatch.setenv("MINI_ENGINE_CACHE", str(no_findings / "file" / "below"))
    assert findings.remembered("a", lambda: 1) == 1
    assert findings.remembered("a", lambda: 2) == 1


def test_a_user_without_a_home_finds_anew(monkeypatch: pytest.MonkeyPatch, no_findings: Path) -> None:
    """As a container has it: no HOME, and an id that passwd does not know. No folder named ~ appears."""
    for name in ("HOME", "XDG_CACHE_HOME", "MINI_ENGINE_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    monkeypatch.chdir(no_findings)
    with pytest.raises(RuntimeError, match="home"):
        Path("~").expanduser()
    assert findings.remembered("a", lambda: 1) == 1
    assert findings.remembered("a", lambda: 2) == 1
    assert list(no_findings.iterdir()) == []
    monkeypatch.setenv("MINI_ENGINE_CACHE", str(no_findings))
    assert findings.path().parent == no_findings
    with pytest.raises(ValueError, match="~/model is not a folder"):
        resolve_folder("~/model")


def test_another_cap_is_another_machine(monkeypatch: pytest.MonkeyPatch, no_findings: Path) -> None:
    before = findings.path()
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2_TRIED")
    assert findings.path() != before


def test_a_build_without_onednn_falls_back_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "onednn_fault", lambda dtype: "this torch build has no oneDNN")
    weight, x = torch.randn(8, 4), torch.randn(3, 4)
    with pytest.warns(UserWarning, match="compute='packed' needs oneDNN; F.linear is used for float32"):
        linear = make_projections(EngineConfig(compute="packed")).linear(weight)
    assert torch.equal(linear(x), x @ weight.T)
    with pytest.warns(UserWarning, match="compute='packed' needs oneDNN"):
        family = make_projections(EngineConfig(compute="packed", batch_invariant=True))
    assert family == InvariantProjections(("torch",))
