"""What L10's figures show agrees with a search through the text, with the engine and with exact chances."""

import random
from fractions import Fraction
from types import SimpleNamespace

import pytest

from mini_engine.config import EngineConfig
from mini_engine.llm import LLM
from mini_engine.outputs import StepOutput
from mini_engine.sampler.params import SamplingParams
from mini_engine.viz import drafts
from mini_engine.viz.drafts.measure import DraftedStep, GuessCount, Verified
from mini_engine.viz.figure import Figure
from tests.support.figures import bar_lengths, check_drawn, check_figures, columns_of

LETTERS = SimpleNamespace(decode=lambda ids: "".join(chr(97 + token) for token in ids))
STEPS = [
    DraftedStep((3,), ()),
    DraftedStep((1, 2, 4), (1, 2, 3, 0)),
    DraftedStep((0,), (7,)),
    DraftedStep((5, 6), (5, 6)),
]
COUNTS = {
    "3 tokens": {"short": GuessCount(10, 4, 3), "long": GuessCount(40, 10, 10)},
    "1 token": {"short": GuessCount(10, 8, 2), "long": GuessCount(40, 0, 0)},
}
WEIGHTS = (8, 4, 2, 1, 1)


def step(number, chunks, drafted, accepted) -> StepOutput:
    guessed = {name: (0,) * count for name, count in drafted.items()}
    return StepOutput(
        number, float(number), {}, [], chunks, {}, [], len(chunks), 0, 0, 0, drafts=guessed, accepted=accepted
    )


LOGS = {
    "two": [
        step(0, [("a", 0, 9), ("b", 0, 4)], {}, {}),
        step(1, [("a", 9, 1), ("b", 4, 1)], {"a": 3, "b": 3}, {"a": 2}),
        step(2, [("a", 12, 1)], {"a": 5}, {"a": 4}),
    ],
    "one": [step(0, [("c", 4, 1)], {}, {})],
}


@pytest.fixture(scope="module")
def figures() -> dict[str, Figure]:
    return {
        "step_chart": drafts.step_chart(STEPS, LETTERS),
        "guess_chart": drafts.guess_chart(COUNTS),
        "rows_chart": drafts.rows_chart(LOGS, 8),
        "chance_chart": drafts.chance_chart(WEIGHTS, {"one": Verified((50, 25, 12, 7, 6), 40)}),
    }


def test_every_figure_is_tested_and_readable(figures):
    check_figures(figures, drafts.draw)


def test_figures_draw_and_say_what_they_are_given(figures):
    drawn = {
        "step_chart": ([2], "4 steps give 7 tokens, and 4 of 7 drafted ones came. A step gives 1.75 tokens. Step 2 "),
        "guess_chart": ([40, 25, 75, 100, 80], "3 tokens: 4 of 10 tokens are guessed, 3 rightly."),
        "rows_chart": ([2, 4, 1], "two: 2 steps with 3 rows of their own, 6 drafted rows that came and 5 for nothing."),
        "chance_chart": ([50, 25, 12.5, 6.25, 12, 7, 6], "Drafts that are right: 40% (one)."),
    }
    check_drawn(figures, drawn)


def test_a_line_has_what_came_then_what_was_refused(figures):
    (axes,) = figures["step_chart"].figure.axes
    bars = {(bar.get_gid(), round(bar.get_y() + 0.4)): [] for bar in axes.patches}
    for bar in axes.patches:
        bars[bar.get_gid(), round(bar.get_y() + 0.4)].append(bar.get_x())
    assert [(kind, line, len(left)) for (kind, line), left in bars.items()] == [
        ("own", 0, 1),
        ("right", 1, 2),
        ("own", 1, 1),
        ("refused", 1, 2),
        ("own", 2, 1),
        ("refused", 2, 1),
        ("right", 3, 2),
    ]
    assert max(bars["right", 1]) < min(bars["own", 1]) < min(bars["refused", 1])
    assert [text.get_text() for text in axes.texts] == list("dbcedaahfg")


def test_rows_are_stacked_without_prompts(figures):
    top, bottom = figures["rows_chart"].figure.axes
    assert [bar_lengths(top, horizontal=False)[place] for place in range(6)] == [2, 1, 2, 4, 4, 1]
    assert bar_lengths(bottom, horizontal=False) == [1, 0, 0]


# ---------------------------------------------------------------------------------------------------- what is measured


@pytest.mark.parametrize("length", [1, 2, 3])
def test_guesses_are_those_of_a_search_through_the_text(length):
    dice = random.Random(length)
    for _ in range(30):
        text = [dice.randrange(3) for _ in range(dice.randint(4, 30))]
        start = dice.randrange(1, len(text))
        guessed = right = 0
        for place in range(max(start, length), len(text)):
            end = text[place - length : place]
            earlier = [p for p in range(length, place) if text[p - length : p] == end]
            if earlier:
                guessed += 1
                right += text[earlier[-1]] == text[place]
        assert drafts.count_guesses(text, start, length) == GuessCount(len(text) - start, guessed, right)
    assert sum([GuessCount(3, 2, 1), GuessCount(5, 4, 0)], drafts.NO_GUESSES) == GuessCount(8, 6, 1)


def test_steps_with_drafts_give_the_text_and_none_are_single():
    text = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 9]
    assert [one.came for one in drafts.steps_with(text, 4, 0)] == [(token,) for token in text[4:]]
    steps = drafts.steps_with(text, 4, 3)
    assert [one.came for one in steps] == [(1,), (2, 3, 4, 1), (2, 9)]
    assert [one.draft for one in steps] == [(), (2, 3, 4), (2, 3, 4)]
    assert [one.num_right for one in steps] == [0, 3, 1]


def test_steps_of_a_request_are_those_of_the_engine():
    asked = "Trozeka has an orange umbrella. Quvabo has a purple trumpet. What does Trozeka have?"
    prompt, rules = [{"role": "user", "content": asked}], SamplingParams(max_new_tokens=24)
    options = {"batch_invariant": True, "max_draft_rows": 6}
    steps, answer = drafts.drafted_steps(EngineConfig(drafts="ngram", **options), prompt, rules)
    (alone,) = LLM(config=EngineConfig(batch_invariant=True)).generate([prompt], rules)
    llm = LLM(config=EngineConfig(drafts="ngram", **options))
    (drafted,) = llm.generate([prompt], rules)
    assert [token for one in steps for token in one.came] == alone.token_ids == answer.token_ids
    assert len(steps) == len(llm.engine.log)
    assert sum(len(one.draft) for one in steps) == drafted.num_drafted > 0


@pytest.mark.parametrize("guess", [(0, 16, 0, 0, 0), (4, 4, 4, 2, 2), (1, 1, 2, 4, 8)])
def test_both_ways_give_the_models_distribution(guess):
    """A chi-square below 18.5 has a chance of 99.9 % at 4 degrees; how often a draft is right is known exactly."""
    chances = {
        "again": sum(Fraction(own, 16) * Fraction(other, 16) for own, other in zip(WEIGHTS, guess, strict=True)),
        "rejection": sum(Fraction(min(own, other), 16) for own, other in zip(WEIGHTS, guess, strict=True)),
    }
    for way, chance in chances.items():
        run = drafts.verified(WEIGHTS, guess, way, 20_000)
        assert run.num_draws == 20_000
        assert run.chi_square(WEIGHTS) < 18.5
        assert run.num_right / 20_000 == pytest.approx(float(chance), abs=0.015)
    assert Verified((60, 20, 10, 5, 5), 0).chi_square(WEIGHTS) == pytest.approx(2 + 1 + 0.5 + 0.25 * 2)


def test_the_slider_shows_rows_that_came_and_rows_for_nothing():
    texts = {"copy": {0: STEPS[:1], 3: STEPS}, "other": {0: STEPS[:1], 3: STEPS[:2]}}
    control, picture = drafts.length_slider(texts, first=3).children
    ((heading, lines),) = columns_of(picture.value)
    assert heading == "Drafts of 3 tokens"
    assert lines[0] == ("copy", pytest.approx(100 * 7 / 11, abs=0.1), pytest.approx(100 * 4 / 11, abs=0.1), lines[0][3])
    assert lines[0][3] == "1.75 tokens a step, 1.57 rows a token"
    control.value = 0
    assert columns_of(picture.value)[0][1][1][3] == "1.00 tokens a step, 1.00 rows a token"
