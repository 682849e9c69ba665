"""The checks of L8.L on whole answers: off is off to the bit, and on is the same engine.

Owns: engines over kernels and what their answers must be: transformers' with everything off, transformers' values and
the specs' choices with kernels, and the bits of a run alone with ``batch_invariant``. Models are tiny and answers
short: the interpreter needs milliseconds for every program.
"""

from collections.abc import Sequence
from typing import Any

from smoke.checks.l4.k_driver import choose, make_params
from smoke.checks.l4.spec_histories import Past
from smoke.checks.l5 import spec_text as text
from smoke.checks.l5.j_engine import MOST_STEPS, stacked
from smoke.checks.l7 import h_engine as l7_engine
from smoke.checks.l7.h_engine import STOPS, Guest
from smoke.framework import peer
from smoke.framework.cases import ModelCase, embedded_case, embedded_eos_ids, prompts, random_case, random_ids
from smoke.framework.check import Failure, Registry, Values
from smoke.framework.compare import differences

REGISTRY = Registry()
BENEATH = tuple(f"L8.{letter}" for letter in "ABCDEFGHIJK")
SECONDS = 60.0  # a step of the embedded model is a thousand programs
TOLERANCE = 2e-4  # of logits that other operations computed in another order


def tiny_case(seed: int, vocab_size: int = 70) -> ModelCase:
    """Return a random model of one layer, two heads over one, and sizes that are multiples of little."""
    shape = {
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 20,
        "hidden_size": 36,
        "intermediate_size": 44,
        "vocab_size": vocab_size,
        "tie_word_embeddings": True,
    }
    config = {**random_case("GQA 4:2, untied, odd sizes", seed).hf_config, **shape}
    return ModelCase(f"one layer, {vocab_size} ids", tuple(config.items()), seed + 77)


def build_engine(case: ModelCase, *, eos: Sequence[int] = (), with_text: bool = False, **options: Any) -> Any:
    """Build the candidate's engine as the command line does."""
    from mini_engine.config import EngineConfig, ModelConfig
    from mini_engine.llm import build_model, make_driver, make_engine

    config = EngineConfig(**options)
    model = build_model(ModelConfig.from_hf(case.hf_config), case.weights("float32"), config)
    return make_engine(make_driver(model, config, frozenset(eos)), text.tokenizer() if with_text else None)


def run(engine: Any, given: Sequence[list[int]], params: Sequence[dict[str, Any]]) -> list[Values]:
    """Run requests together -> the ids, logits and errors of each."""
    names = [engine.add_request(ids, make_params(options)) for ids, options in zip(given, params, strict=True)]
    deltas: dict[str, list[Any]] = {name: [] for name in names}
    for _ in range(MOST_STEPS):
        if not engine.has_work:
            break
        for delta in engine.step().deltas:
            deltas[delta.request_id].append(delta)
    answers = []
    for name in names:
        tokens = [delta for delta in deltas[name] if delta.token_id is not None]
        error = engine.take_output(name).error
        l7_engine.raise_missing(error)
        answers.append(
            {"ids": [int(d.token_id) for d in tokens], "logits": stacked([d.logits for d in tokens]), "error": error}
        )
    return answers


def near(case: ModelCase, prompt: list[int], answer: Values, where: str) -> list[Failure]:
    """Ask an answer for transformers' logits of its own ids."""
    if answer["error"] is not None or answer["logits"] is None:
        return [Failure(where, "", "an answer", str(answer["error"]))]
    want = peer.logits(case, "float32", "sdpa", [*prompt, *answer["ids"]])[len(prompt) - 1 : -1]
    return differences(want, answer["logits"], TOLERANCE, f"{where}, logits")


# Off ----------------------------------------------------------------------------------------------------------------

PLAIN = {"max_new_tokens": 8}


def off_probe(seed: int) -> Values:
    """Answer without kernels, by default and by name, and once more after another engine has run over kernels."""
    values: Values = {}
    given = [prompts(seed)[0]]
    eos = tuple(embedded_eos_ids())
    values["by default"] = run(build_engine(embedded_case(), eos=eos), given, [PLAIN])[0]
    before = build_engine(embedded_case(), eos=eos, compute="reference", batch_invariant=False)
    other = build_engine(tiny_case(seed), compute="triton")
    values["over kernels"] = run(other, [[3, 1]], [{"max_new_tokens": 1}])[0]["ids"]
    values["next to an engine over kernels"] = run(before, given, [PLAIN])[0]
    return values


def off_verdict(seed: int, got: Values) -> list[Failure]:
    """Ask for the bits of lesson 7, which are those of transformers."""
    eos = tuple(sorted(embedded_eos_ids()))
    ids, logits = peer.generate(embedded_case(), "float32", tuple(prompts(seed)[0]), PLAIN["max_new_tokens"], eos)
    want = {"ids": ids, "logits": logits, "error": None}
    failures = differences(1, len(got["over kernels"]), None, "on")
    for name in ("by default", "next to an engine over kernels"):
        failures += differences(want, got[name], None, name)
    return failures


REGISTRY.add(
    "L8.L.off",
    "With compute='reference' the engine gives the bits of lesson 7 and of transformers, also after one with kernels.",
    off_probe,
    off_verdict,
    needs=BENEATH,
    seconds=SECONDS,
)

# On -----------------------------------------------------------------------------------------------------------------


def greedy_probe(seed: int) -> Values:
    """Let two short prompts share the steps of the embedded model over kernels."""
    engine = build_engine(embedded_case(), compute="triton", max_running_requests=2)
    return {"answers": run(engine, short_prompts(seed), [{"max_new_tokens": 2}] * 2)}


def short_prompts(seed: int) -> list[list[int]]:
    """Return the beginnings of two prompts."""
    return [prompts(seed)[0][:5], prompts(seed)[3][:3]]


def greedy_verdict(seed: int, got: Values) -> list[Failure]:
    """Compare with transformers."""
    failures = []
    for prompt, answer in zip(short_prompts(seed), got["answers"], strict=True):
        ids, _ = peer.generate(embedded_case(), "float32", tuple(prompt), 2, ())
        failures += differences(ids, answer["ids"], None, f"prompt {prompt}, ids")
        failures += near(embedded_case(), prompt, answer, f"prompt {prompt}")
    return failures


REGISTRY.add(
    "L8.L.greedy",
    "Over kernels the embedded model gives transformers' tokens, and its logits to rounding.",
    greedy_probe,
    greedy_verdict,
    needs=BENEATH,
    seconds=SECONDS,
)

LENGTHS = (7, 3)
TWO = {"max_new_tokens": 2, "ignore_eos": True}


def invariant_prompts(seed: int) -> list[list[int]]:
    """Draw two prompts."""
    return [random_ids(70, length, seed + length) for length in LENGTHS]


def invariant_probe(seed: int) -> Values:
    """Run two requests in chunks of 4 tokens, and each alone in one piece."""
    case = tiny_case(seed)
    given = invariant_prompts(seed)
    chunks: dict[str, Any] = {"max_running_requests": 2, "max_tokens_per_step": 4, "page_size": 4}
    together = build_engine(case, compute="triton", batch_invariant=True, **chunks)
    invariant = build_engine(case, compute="triton", batch_invariant=True)
    return {"together": run(together, given, [TWO] * 2), "alone": [run(invariant, [ids], [TWO])[0] for ids in given]}


def invariant_verdict(seed: int, got: Values) -> list[Failure]:
    """Ask for the same bits, near those of transformers."""
    failures = []
    for index, prompt in enumerate(invariant_prompts(seed)):
        where = f"request {index}"
        failures += near(tiny_case(seed), prompt, got["alone"][index], f"{where}, alone")
        failures += differences(got["alone"][index], got["together"][index], None, f"{where}, in chunks with another")
    return failures


REGISTRY.add(
    "L8.L.invariant",
    "With batch_invariant an answer over kernels has the same bits alone and in chunks together with another.",
    invariant_probe,
    invariant_verdict,
    needs=BENEATH,
    seconds=SECONDS,
)

SAMPLED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.8, "seed": 7},
    {"temperature": 1.3, "seed": -5, "top_k": 9, "top_p": 0.8},
    {"temperature": 0.9, "seed": 2**40 + 7, "min_p": 0.1},
    {"temperature": 0.7, "seed": 3, "repetition_penalty": 2.0, "presence_penalty": 2.0},
    {"temperature": 0.7, "seed": 4, "repetition_penalty": 2.0, "presence_penalty": 2.0},
    {"temperature": 0.7, "seed": 5, "repetition_penalty": 2.0},
    {"repetition_penalty": 1.9, "frequency_penalty": 1.5},
    {},
)


def sampled_prompts(seed: int) -> list[list[int]]:
    """Draw a prompt for each set of parameters, long enough that its tokens matter where they are penalised."""
    lengths = [24 if "repetition_penalty" in options else 3 for options in SAMPLED]
    return [random_ids(70, length, seed + index) for index, length in enumerate(lengths)]


def sampled_probe(seed: int) -> Values:
    """Let requests with seeds, filters and penalties share the steps."""
    engine = build_engine(tiny_case(seed), compute="triton", max_running_requests=len(SAMPLED))
    return {"answers": run(engine, sampled_prompts(seed), [{**TWO, **options} for options in SAMPLED])}


def sampled_verdict(seed: int, got: Values) -> list[Failure]:
    """Choose every token anew from its logits, its past and its parameters."""
    failures = []
    for prompt, options, answer in zip(sampled_prompts(seed), SAMPLED, got["answers"], strict=True):
        failures += near(tiny_case(seed), prompt, answer, f"{options}")
        pasts = [Past(tuple(prompt), tuple(answer["ids"][:count])) for count in range(len(answer["ids"]))]
        want = [choose(row, past, options) for row, past in zip(answer["logits"].tolist(), pasts, strict=True)]
        failures += differences([2, want], [len(answer["ids"]), answer["ids"]], None, f"{options}, ids")
    return failures


REGISTRY.add(
    "L8.L.sampled",
    "Over kernels every token is the one that its logits, seed, filters and penalties ask for, whatever shares the "
    "step.",
    sampled_probe,
    sampled_verdict,
    needs=BENEATH,
    seconds=SECONDS,
)

GUESTS = (
    Guest(0, {"max_new_tokens": 5}, ("ab", "a cat")),
    Guest(1, {"max_new_tokens": 3}),
    Guest(4, {"max_new_tokens": 5, "temperature": 2.0, "seed": 8}, ("red", "blue")),
)


def grammar_probe(seed: int) -> Values:
    """Run two requests with a grammar and one without."""
    l7_engine.register_backend({})
    options = {"grammar_backend": "sentences", "max_running_requests": 4, "num_pages": 60}
    engine = build_engine(tiny_case(seed, 1024), eos=STOPS, with_text=True, compute="triton", **options)
    return {"answers": l7_engine.drive(engine, GUESTS, seed)["answers"]}


def grammar_verdict(seed: int, got: Values) -> list[Failure]:
    """Ask the constrained for their sentences, and every token for being the choice of the specs."""
    failures = []
    for index, (guest, answer) in enumerate(zip(GUESTS, got["answers"], strict=True)):
        case = f"request {index}"
        if guest.sentences:
            failures += l7_engine.judge_whole(guest, answer, seed, case)
        else:
            prompt = prompts(seed)[guest.prompt]
            failures += near(tiny_case(seed, 1024), prompt, {**answer, "error": answer["output"]["error"]}, case)
            greedy = [choose(row, Past(tuple(prompt)), {}) for row in answer["logits"].tolist()]
            failures += differences(greedy, answer["ids"], None, f"{case}, ids")
    return failures


REGISTRY.add(
    "L8.L.grammar",
    "A grammar's mask is written by the kernel: an answer is in its language, and one without a grammar is unchanged.",
    grammar_probe,
    grammar_verdict,
    needs=BENEATH,
    seconds=SECONDS,
)
