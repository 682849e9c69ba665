"""The check of L5.I's constraints: what limits an answer is asked about every token, and hears of the end."""

from typing import Any

from smoke.checks.l4.k_driver import make_params
from smoke.checks.l5 import spec_text as text
from smoke.checks.l5.i_ends import BY_HAND, EOS, HALF, give, is_over, outcome, pages_left, start, taken_deltas
from smoke.checks.l5.j_engine import build_engine
from smoke.framework.cases import embedded_case
from smoke.framework.check import Registry, Values
from smoke.framework.compare import bitwise

REGISTRY = Registry()

WORD = text.in_bytes("fox")
# What is allowed (-1: an error), the ids that come, and parameters.
GUIDED: dict[str, tuple[list[int], list[int], dict[str, Any]]] = {
    "it ends the answer": ([*WORD, EOS[0]], [*WORD, EOS[0]], {"ignore_eos": True}),
    "it goes on at the limit": ([*WORD, *WORD], WORD, {"max_new_tokens": len(WORD)}),
    "it refuses a token": (WORD, [*WORD[:1], WORD[0] + 1], {}),
    "it breaks": ([WORD[0], -1], WORD, {}),
    "a stop string cuts the answer": ([*WORD, EOS[0]], WORD, {"stop": ["x"]}),
    "the end completes a stop string": ([*HALF, EOS[0]], HALF, {"max_new_tokens": len(HALF), "stop": ["b\ufffd"]}),
}


def one_text(texts: dict[str, list[int]]) -> Any:
    """Return constraints that allow each request one text, by its id, and then end it. It is complete all the time."""
    from mini_engine.constraints import ConstraintError, GrammarStats, NoConstraints

    class OneText(NoConstraints):
        def __init__(self) -> None:
            self.left = texts
            self.waiting = set[str]()
            self.over = list[list[str]]()

        @property
        def num_waiting(self) -> int:  # type: ignore[override]
            return len(self.waiting)

        def check(self, params: Any) -> None:
            pass

        def submit(self, request: Any) -> bool:
            if request.params.grammar is not None:
                self.waiting.add(request.request_id)
            return request.params.grammar is not None

        def drop(self, request: Any) -> bool:
            known = request.request_id in self.waiting
            self.waiting.discard(request.request_id)
            return known

        def accept(self, request: Any, token_id: int) -> bool:
            left = self.left[request.request_id]
            wanted = left.pop(0)
            if wanted < 0:
                raise ConstraintError("it is broken")
            if token_id != wanted:
                raise ConstraintError(f"the grammar wants {wanted}")
            return not left

        def finish(self, request: Any) -> Any:
            self.over.append([request.request_id, request.finish_reason])
            return GrammarStats(num_masks=7), request.matched is None or not self.left.get(request.request_id, [1])

    return OneText()


def limits_probe(seed: int) -> Values:
    """Give requests that are limited their tokens, and abort one whose constraint is not ready yet."""
    texts: dict[str, list[int]] = {}
    constraints = one_text(texts)
    engine = build_engine(embedded_case(), eos=EOS, with_text=True, num_pages=8, constraints=constraints)
    values: Values = {}
    for case, (allowed, ids, params) in GUIDED.items():
        name = start(engine, [5, 6, 7], {"max_new_tokens": 20, **params})
        texts[name] = list(allowed)
        for token in ids:
            if not is_over(engine, name):
                give(engine, name, token)
        output = engine.entries[name].output
        values[case] = {
            "last delta": taken_deltas(engine)[-1],
            "complete": output.is_grammar_complete,
            "cost": output.grammar_stats is not None and output.grammar_stats.num_masks,
            "over": [reason for who, reason in constraints.over if who == name],
            "times": len(output.times.tokens),
            "pages not free": pages_left(engine),
            **outcome(engine, name),
        }
    name = str(engine.add_request([5], make_params({"max_new_tokens": 5, "regex": "a+"})))
    engine.abort(name)
    values["aborted before it was there"] = {
        "waits": bool(engine.has_work),
        "deltas": taken_deltas(engine),
        **outcome(engine, name),
    }
    engine.close()
    return values


def limits_spec(seed: int) -> Values:
    """Tell each case: ids, text, id and text of the last delta, reason, error, what matched, whether it is whole."""
    cases: dict[str, tuple[list[int], str, str, str, str | None, Any, bool]] = {
        "it ends the answer": ([*WORD, EOS[0]], "fox", "", "stop", None, EOS[0], True),
        "it goes on at the limit": (WORD, "fox", "x", "length", None, None, True),
        "it refuses a token": ([WORD[0], WORD[0] + 1], "f", "", "error", f"the grammar wants {WORD[1]}", None, True),
        "it breaks": (WORD[:2], "f", "", "error", "it is broken", None, True),
        "a stop string cuts the answer": (WORD, "fo", "", "stop", None, "x", False),
        "the end completes a stop string": (HALF, "a", "", "stop", None, "b\ufffd", False),
    }
    values: Values = {}
    for case, (ids, shown, last, reason, error, matched, complete) in cases.items():
        values[case] = {
            "last delta": {"id": ids[-1], "text": last, "finish_reason": reason, "error": error},
            "complete": complete,
            "cost": 7,
            "over": [reason],
            "times": len(ids),
            "pages not free": 0,
            "ids": ids,
            "text": shown,
            "matched": matched,
            "finish_reason": reason,
            "error": error,
        }
    values["aborted before it was there"] = {
        "waits": False,
        "deltas": [{"id": None, "text": "", "finish_reason": "abort", "error": None}],
        "ids": [],
        "text": "",
        "matched": None,
        "finish_reason": "abort",
        "error": None,
    }
    return values


REGISTRY.add(
    "L5.I.limits",
    "finish_reason is asked about every token, and one that it refuses ends its request; release hears of every end, "
    "and report_constraint when the reason is final.",
    limits_probe,
    bitwise(limits_spec),
    needs=BY_HAND,
)
