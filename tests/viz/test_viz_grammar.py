"""What L7's figures show agrees with brute force and transformers; the figures draw what they are given."""

import functools
import itertools
import json
import random
from itertools import pairwise

import jsonschema
import matplotlib
import pytest
import torch
from matplotlib.patches import Circle, FancyArrowPatch

from mini_engine.checkpoint import TINY_MODEL, load_tokenizer
from mini_engine.config import EngineConfig
from mini_engine.grammar.automata.automaton import Dfa, compile_node
from mini_engine.grammar.automata.regex import parse_regex
from mini_engine.grammar.backends import BUILT_IN
from mini_engine.grammar.fsm import FsmBackend
from mini_engine.grammar.tokens import TokenTable
from mini_engine.llm import load_driver, make_engine
from mini_engine.outputs import Delta, RequestOutput, StepOutput
from mini_engine.sampler.params import SamplingParams
from mini_engine.viz import grammar, peer, scheduling, tokens
from mini_engine.viz.figure import Figure, style
from mini_engine.viz.grammar.automata import Arrow
from mini_engine.viz.grammar.measure import Jumps, Language, MaskedStep, Timing
from tests.support.figures import bar_lengths, check_drawn, check_figures, checked_texts, texts

TWELVE = (b'"', b"n", b"o", b":", b"1", b'"n', b'":', b'o":1', b"\xc3", b"\xa9", b"", b"")
NAMES = ['"', "n", "o", ":", "1", '"n', '":', 'o":1', "C3", "A9", "</think>", "end"]
NO = '"(no|né)":1+'
PERSON = {
    "type": "object",
    "required": ["name", "age"],
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "city": {"enum": ["Oslo", "Rome", "Lima"]},
    },
}
# Lists of words, whose prefixes say what is forced, and what may come.
LANGUAGES = [
    ["yes", "no", "maybe"],
    ["a"],
    ["né", "nè", "no"],
    ["霍格沃茨", "霍比特人", "x"],
    ["foo", "foobar", "foobarbaz", "quxbar"],
    ["abcde", "xbcde", "xbcdef"],
]


def dfa(pattern: str) -> Dfa:
    return compile_node(parse_regex(pattern))


def random_words(seed: int) -> list[str]:
    dice = random.Random(seed)
    return sorted({"".join(dice.choices("abé", k=dice.randint(1, 6))) for _ in range(dice.randint(1, 7))})


ALL_WORDS = [*LANGUAGES, *map(random_words, range(4))]


# ------------------------------------------------------------------------------------------------------------- automata


def follow(arrows: tuple[Arrow, ...], data: bytes) -> tuple[int, bytes]:
    """Walk as far as whole arrows go -> the state, and what is left."""
    state = 0
    while data:
        ahead = [
            arrow
            for arrow in arrows
            if arrow.source == state
            and len(arrow.data) <= len(data)
            and all(byte in own for byte, own in zip(data, arrow.data, strict=False))
        ]
        if not ahead:
            break
        (arrow,) = ahead
        state = arrow.target
        data = data[len(arrow.data) :]
    return state, data


@pytest.mark.parametrize("words", ALL_WORDS, ids=" ".join)
@pytest.mark.parametrize("compressed", [False, True])
def test_a_diagram_reads_the_words_and_nothing_else(words, compressed):
    made = grammar.diagram(dfa("|".join(words)), compressed)
    alphabet = sorted(set("".join(words)) | {"z"})
    tried = {*words, *("".join(own) for size in range(1, 4) for own in itertools.product(alphabet, repeat=size))}
    for word in tried:
        state, left = follow(made.arrows, word.encode())
        assert (not left and state in made.accepting) == (word in words), word


@pytest.mark.parametrize("words", ALL_WORDS, ids=" ".join)
def test_bold_arrows_are_what_all_words_have_in_common(words):
    """Brute force: what is forced behind a prefix is the longest common beginning of the words' rests."""
    made = grammar.diagram(dfa("|".join(words)), compressed=True)
    spelled = [word.encode() for word in words]
    for prefix in {word[:end] for word in spelled for end in range(len(word) + 1)}:
        rests = [word[len(prefix) :] for word in spelled if word.startswith(prefix)]
        wanted = functools.reduce(
            lambda a, b: bytes(x for x, _ in itertools.takewhile(lambda p: p[0] == p[1], zip(a, b, strict=False))),
            rests,
        )
        state, left = follow(made.arrows, prefix)
        if left:
            continue  # inside a chain that was joined: the picture has no state there
        forced = b""
        while bold := [arrow for arrow in made.arrows if arrow.source == state and arrow.is_forced]:
            forced += bytes(byte for own in bold[0].data for byte in own)
            state = bold[0].target
        assert forced == wanted, prefix


@pytest.mark.parametrize(
    "pattern", [NO, "a*b*", r'"[^"\\]*"', "(ab|c)*d", r"-?(0|[1-9][0-9]*)(\.[0-9]+)?", "(a|b)*a(a|b){2}"]
)
@pytest.mark.parametrize("compressed", [False, True])
def test_layout_leads_to_the_right_and_nothing_lies_on_top_of_another(pattern, compressed):
    made = grammar.diagram(dfa(pattern), compressed)
    assert made.places[0][0] == 0
    assert {arrow.source for arrow in made.arrows} | {arrow.target for arrow in made.arrows} | {0} == set(made.places)
    spots = [*made.places.values()]
    for arrow, way in zip(made.arrows, made.ways, strict=True):
        if not way:
            assert made.places[arrow.target][0] <= made.places[arrow.source][0]
            continue
        assert (way[0], way[-1]) == (made.places[arrow.source], made.places[arrow.target])
        assert [column for column, _ in way] == list(range(way[0][0], way[-1][0] + 1))
        spots += way[1:-1]
    for column in range(made.num_columns):
        lines = sorted(line for own, line in spots if own == column)
        assert lines, "a column is empty"
        assert lines[0] >= 0
        assert all(b - a > 0.97 for a, b in pairwise(lines))


@pytest.mark.parametrize(
    ("members", "label"),
    [
        ("0123456789", "0-9"),
        ("ab", "a b"),
        ("a", "a"),
        (" ", "␣"),
        ("\n", "0A"),
        ("-", "-"),
        ("".join(chr(code) for code in range(128) if chr(code) not in '"\\'), 'ASCII but " \\'),
        ("".join(map(chr, range(128))), "ASCII"),
    ],
)
def test_labels_of_sets(members, label):
    assert grammar.automata.byte_set_label(frozenset(members.encode())) == label


# ---------------------------------------------------------------------------------------------------------------- masks


@pytest.fixture(scope="module")
def driver():
    return load_driver(TINY_MODEL, EngineConfig(batch_invariant=True))


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(TINY_MODEL)


def twelve_tokens() -> TokenTable:
    return TokenTable(TWELVE, frozenset({11}))


# -------------------------------------------------------------------------------------------------------------- answers


def masked_step(token: int, probs: list[float], allowed: list[int]) -> MaskedStep:
    return MaskedStep(token, torch.tensor(probs, dtype=torch.float64).log(), torch.tensor(allowed).bool())


def test_a_mask_that_bans_nothing_moves_nothing():
    step = masked_step(0, [0.1] * 10, [1] * 10)
    assert step.divergence_bits == 0
    assert step.distance == pytest.approx(0)


@pytest.fixture(scope="module")
def answer(driver, tokenizer):
    prompt = tokens.chat_ids(tokenizer, "Tell me a story about a fox named Mila.")
    params = SamplingParams(max_new_tokens=60, json_schema=PERSON)
    return prompt, params, grammar.follow_answer(driver, tokenizer.backend_tokenizer, prompt, params)


def test_a_followed_answer_is_the_engines_with_the_distributions_of_transformers(driver, tokenizer, answer):
    prompt, params, steps = answer
    ids = [step.token_id for step in steps]
    engine = make_engine(scheduling.with_options(driver, grammar_backend="xgrammar"), tokenizer.backend_tokenizer)
    assert ids == engine.generate([prompt], params)[0][0].token_ids
    jsonschema.validate(json.loads(tokenizer.decode(ids[:-1])), PERSON)
    logits = peer.Peer(TINY_MODEL).logits([*prompt, *ids])[len(prompt) - 1 :]
    for step, row in zip(steps, logits, strict=False):
        torch.testing.assert_close(step.logprobs, row.double().log_softmax(0), rtol=1e-4, atol=1e-4)
        assert step.preferred == int(row.argmax())
        assert int(step.after.argmax()) == step.token_id, "greedy takes the likeliest that is allowed"
        assert float(step.after.sum()) == pytest.approx(1)


# ------------------------------------------------------------------------------------------------------ small languages


def by_spellings(theirs, prompt, table, words):
    """Every spelling of every text, each through transformers as a whole -> mass, conditioned, masked, by text."""
    spelled = [word.encode() for word in words]

    def spellings(rest):
        yield from [[]] if not rest else []
        for token, own in enumerate(table.token_bytes):
            if own and rest.startswith(own):
                yield from ([token, *tail] for tail in spellings(rest[len(own) :]))

    def may_come(prefix):
        found = [
            t for t, own in enumerate(table.token_bytes) if own and any(w.startswith(prefix + own) for w in spelled)
        ]
        return found + sorted(table.stop_ids) * (prefix in spelled)

    free, masked = dict.fromkeys(words, 0.0), dict.fromkeys(words, 0.0)
    for word in words:
        for ids in spellings(word.encode()):
            probs = theirs.logits([*prompt, *ids])[len(prompt) - 1 :].double().softmax(-1)
            for stop in table.stop_ids:
                one = other = 1.0
                for place, token in enumerate([*ids, stop]):
                    prefix = b"".join(table.token_bytes[before] for before in ids[:place])
                    one *= float(probs[place, token])
                    other *= float(probs[place, token] / probs[place, may_come(prefix)].sum())
                free[word] += one
                masked[word] += other
    return free, masked


def test_probabilities_of_texts_by_brute_force_over_spellings(driver, tokenizer):
    words = ["a", "ab", "abé"]
    prompt = tokens.chat_ids(tokenizer, "Is Mila a fox?")
    table = TokenTable.from_tokenizer(tokenizer.backend_tokenizer, driver.vocabulary.size, driver.eos_token_ids)
    made = grammar.enumerate_language(driver, tokenizer.backend_tokenizer, prompt, words)
    free, masked = by_spellings(peer.Peer(TINY_MODEL), prompt, table, words)
    mass = sum(free.values())
    assert made.mass == pytest.approx(mass, rel=1e-3)
    assert made.conditioned == pytest.approx([free[word] / mass for word in words], rel=1e-3)
    assert made.masked == pytest.approx([masked[word] for word in words], rel=1e-3)
    assert sum(made.masked) == pytest.approx(1)
    assert made.distance == pytest.approx(sum(abs(free[w] / mass - masked[w]) for w in words) / 2, rel=1e-3)
    greedy = SamplingParams(max_new_tokens=9, regex="|".join(words))
    engine = make_engine(scheduling.with_options(driver, grammar_backend="fsm"), tokenizer.backend_tokenizer)
    assert made.greedy == engine.generate([prompt], greedy)[0][0].text


def test_too_large_a_language_is_refused(driver, tokenizer, monkeypatch):
    monkeypatch.setattr(grammar.measure, "MOST_PREFIXES", 3)
    with pytest.raises(ValueError, match="more than 3 beginnings; take fewer"):
        grammar.enumerate_language(driver, tokenizer.backend_tokenizer, [1], ["abcdef"])


# -------------------------------------------------------------------------------------------------------------- timings


def test_backends_without_their_library_are_left_out(monkeypatch):
    assert sorted(grammar.installed_backends()) == sorted(BUILT_IN)
    monkeypatch.setattr(
        grammar.measure, "find_spec", lambda name: None if name in ("outlines_core", "xgrammar") else name
    )
    assert grammar.installed_backends() == ["fsm", "llguidance"]


def test_timings_are_the_best_of_their_repeats(monkeypatch):
    tries = iter([(3.0, [5.0, 1.0], [2.0, 2.0]), (4.0, [4.0, 2.0], [1.0, 3.0])])
    monkeypatch.setattr(grammar.measure, "time_once", lambda backend, key, tokens: next(tries))
    made = grammar.time_backends(["fsm"], twelve_tokens(), {"x": (("regex", "a"), [1])}, repeats=2)
    assert made == [Timing("x", "fsm", 3.0, [4.0, 1.0], [1.0, 2.0])]


# ------------------------------------------------------------------------------------------------------------- figures

STEPS = [
    masked_step(0, [0.02, 0.9, 0.04, 0.04], [1, 0, 1, 0]),
    masked_step(1, [0.1, 0.8, 0.05, 0.05], [1, 1, 1, 1]),
    masked_step(3, [0.25, 0.25, 0.25, 0.25], [0, 0, 0, 1]),
]
TAKEN, WISHES = ["{", "$x$", "end"], ["M", "$x$", "{"]


def jumps(name: str, forced: list[bool], chunks: list[int], deltas: list[int]) -> Jumps:
    log = [
        StepOutput(i, 0.0, {}, [Delta("r", 1, "")] * count, [("r", 0, rows)], {}, [], 1, 0, 0, 0)
        for i, (rows, count) in enumerate(zip(chunks, deltas, strict=True))
    ]
    return Jumps(name, RequestOutput("r", [1], text="abc"), forced, log)


RUNS = [jumps("slow", [False] * 3, [5, 1, 1], [1, 1, 1]), jumps("fast", [False, True, False], [5, 2], [2, 1])]
LANGUAGE = Language(["yes", "no"], 3e-14, [0.25, 0.75], [0.8, 0.2], "yes", 9)
TIMINGS = [
    Timing("a", "fsm", 0.002, [1e-5, 3e-5, 2e-5], [1e-6, 2e-6, 3e-6]),
    Timing("a", "llguidance", 0.001, [1e-5] * 3, [1e-5] * 3),
    Timing("b", "fsm", 0.1, [1e-4], [1e-6]),
    Timing("b", "llguidance", 0.001, [1e-5] * 3, [1e-5] * 3),
]
MASKS = torch.tensor([[0, 1, 1, 0], [0, 0, 1, 0], [1, 0, 0, 1]]).bool()


@pytest.fixture(scope="module")
def figures() -> dict[str, Figure]:
    return {
        "automaton_chart": grammar.automaton_chart(
            {
                "Bytes": grammar.diagram(dfa(NO)),
                "Chains": grammar.diagram(dfa(NO), compressed=True),
                "A string": grammar.diagram(dfa(r'"[^"\\]*"')),
            }
        ),
        "mask_table": grammar.mask_table(
            grammar.state_masks(FsmBackend(twelve_tokens()).compile(("regex", NO)).compiled),
            NAMES,
            ['"n', "n", "", '":1', 'A9 ":1', ":1", "1", ""],
        ),
        "mask_picture": grammar.mask_picture(MASKS, [b"b", b"a", b"", b"\x80"], [0, 2, 0]),
        "backend_chart": grammar.backend_chart(TIMINGS),
        "mask_chart": grammar.mask_chart(STEPS, TAKEN, WISHES),
        "shift_chart": grammar.shift_chart({"A": (STEPS, TAKEN), "B": (STEPS[1:2], TAKEN[1:2])}),
        "before_after": grammar.draw_answers.before_after(STEPS[0], [1, 0, 2], ["M", "{", "$"], "Step 0"),
        "jump_chart": grammar.jump_chart(RUNS, [["a", "b", "c"]] * 2),
        "language_chart": grammar.language_chart({"Q": LANGUAGE, "R": LANGUAGE}),
    }


def test_every_figure_is_tested_and_readable(figures):
    check_figures(figures, grammar.draw, grammar.draw_answers, grammar.draw_automata)


def test_figures_draw_and_say_what_they_are_given(figures):
    drawn = {
        "shift_chart": (
            [4.0589, 2],
            "A: 3 steps, 6.06 bits in all, 2 above 1 bit; most at step 0 ('{') with 4.06",
        ),
        "jump_chart": ([1, 2, 3], "fast: 3 tokens, 1 of them forced, in 2 forward passes with 7 rows: 'abc'."),
        "language_chart": ([25, 75, 80, 20], "Conditioned and masked: 'yes' 25.0% and 80.0%, 'no' 75.0% and 20.0%"),
        "backend_chart": (
            [2, 100, 20, 1],
            "a in fsm: compile 2.0 ms, a mask 20.0 µs at first (at most 30), 2.0 µs",
        ),
    }
    check_drawn(figures, drawn)


def test_automaton_draws_states_labels_and_bold_arrows(figures):
    made = [grammar.diagram(dfa(NO)), grammar.diagram(dfa(NO), compressed=True)]
    for axes, own in zip(figures["automaton_chart"].figure.axes, made, strict=False):
        circles = [patch for patch in axes.patches if isinstance(patch, Circle)]
        assert len(circles) == len(own.places) + len(own.accepting), "two circles for a state that accepts"
        assert sum(patch.get_gid() == "accepting" for patch in circles) == len(own.accepting) == 1
        edges = [patch for patch in axes.patches if isinstance(patch, FancyArrowPatch) and patch.get_gid() != "start"]
        bold = [patch for patch in edges if patch.get_linewidth() > 2]
        assert (len(edges), len(bold)) == (len(own.arrows), own.num_forced)
        labels = sorted(text.get_text() for text in axes.texts if text.get_gid() == "label")
        assert labels == sorted(arrow.label for arrow in own.arrows)
        numbers = sorted(int(text.get_text()) for text in axes.texts if text.get_gid() == "number")
        assert numbers == sorted(own.places)
    assert "Bytes: 8 states, 1 accepting; 9 edges, 6 of them forced: '\"', 'n'" in figures["automaton_chart"].summary
    assert "Chains: 5 states, 1 accepting; 6 edges, 3 of them forced: '\"n', '\":1', 'A9'." in (
        figures["automaton_chart"].summary
    )


def test_labels_of_an_automaton_do_not_cover_its_states(figures):
    canvas = figures["automaton_chart"].figure
    with style():
        canvas.draw_without_rendering()
    for axes in canvas.axes:
        circles = [patch.get_window_extent() for patch in axes.patches if isinstance(patch, Circle)]
        for text in axes.texts:
            if text.get_gid() == "label":
                own = matplotlib.text.Text.get_window_extent(text)
                assert not any(own.overlaps(circle) for circle in circles), text


def test_every_label_of_a_fan_stands_on_its_own_arrow_only():
    """Eight ways leave the state inside a string, and four meet again behind it."""
    canvas = grammar.automaton_chart({"A string": grammar.diagram(dfa(r'"[^"\\]*"'))}).figure
    with style():
        canvas.draw_without_rendering()
    (axes,) = canvas.axes
    labels = [text for text in axes.texts if text.get_gid() == "label"]
    boxes = [matplotlib.text.Text.get_window_extent(text) for text in labels]
    edges = [p for p in axes.patches if isinstance(p, FancyArrowPatch) and p.get_gid() in ("edge", "forced")]
    paths = [edge._get_path_in_displaycoord()[0][0] for edge in edges]
    assert len(labels) == len(edges) == 17
    for text, box in zip(labels, boxes, strict=True):
        met = sum(path.intersects_bbox(box, filled=False) for path in paths)
        assert met == (text.get_weight() != "bold"), text  # that of a forced arrow stands above it
        assert sum(box.overlaps(other) for other in boxes) == 1, text


def test_an_automaton_that_is_too_wide_is_refused():
    with pytest.raises(ValueError, match=r"'Long' would be .* inches wide, above 9\.2; draw it compressed"):
        grammar.automaton_chart({"Long": grammar.diagram(dfa("abcdefghijklmnopqrst"))})
    assert grammar.automaton_chart({"Long": grammar.diagram(dfa("abcdefghijklmnopqrst"), compressed=True)})


def test_mask_table_has_the_bits_and_the_numbers_of_the_lesson(figures):
    (axes,) = figures["mask_table"].figure.axes
    words = [text.get_text() for text in axes.texts if text.get_gid() == "word"]
    assert words[::2] == ["33", "2", "388", "65", "512", "8", "16", "2064"]
    bits = "".join(text.get_text() for text in axes.texts if text.get_gid() == "bit")
    rows = [bits[i : i + 12][::-1] for i in range(0, 96, 12)]  # drawn from token 0 on, which stands on the right
    assert rows == [f"{int(word):012b}" for word in words[::2]]
    places = [text.get_position()[0] for text in axes.texts if text.get_gid() == "bit"][:12]
    assert places == [11.5 - token for token in range(12)]
    assert "State 7: '1', 'end'; the word is 2064." in figures["mask_table"].summary
    negative = grammar.mask_table(torch.eye(32, dtype=torch.bool)[31:], [f"t{i}" for i in range(32)], [""])
    assert "-2147483648" in texts(negative)


def test_mask_picture_sorts_tokens_by_their_bytes(figures):
    picture, bars = figures["mask_picture"].figure.axes
    assert picture.images[0].get_array().tolist() == [[1, 0, 0, 1], [0, 0, 0, 1], [0, 1, 1, 0]]  # a, b, 80, special
    assert bar_lengths(bars, horizontal=True) == [2, 1, 2]
    (visits,) = bars.lines
    assert visits.get_ydata().tolist() == [0.5, 2.5, 0.5]
    assert [label.get_text() for label in picture.get_xticklabels()] == ["a", "80"]
    assert figures["mask_picture"].summary == (
        "3 states, 3 different masks. 41.7% of the 12 bits are set; 1 state with a single token, the widest with 2. "
        "An answer visits 2 of them in 3 steps."
    )


def test_mask_chart_draws_what_is_allowed_and_what_was_wanted(figures):
    top, bottom = figures["mask_chart"].figure.axes
    assert bar_lengths(top, horizontal=False) == [2, 4, 1]
    heights = bar_lengths(bottom, horizontal=False)
    assert heights == pytest.approx([6, 100, 25, 94, 0, 75])
    assert [bar.get_y() for bar in bottom.patches] == pytest.approx([0, 0, 0, 6, 100, 25]), "one stands on the other"
    before, after = (line.get_ydata() for line in bottom.lines)
    assert before == pytest.approx([2, 80, 25])
    assert after == pytest.approx([100 / 3, 80, 100])
    preferred = [(text.get_text(), text.get_position()[0]) for text in bottom.texts if text.get_gid() == "preferred"]
    assert preferred == [("M", 0), ("{", 2)]
    assert figures["mask_chart"].summary == (
        "3 steps, 1 to 4 tokens allowed, 1 times a single one. At 2 steps the model wanted another token. The least "
        "mass is allowed at step 0: 0.06, where it wanted 'M' and '{' is taken."
    )


# --------------------------------------------------------------------------------------------------------------- slider


def test_slider_redraws_the_step_it_is_moved_to(answer, tokenizer):
    _, _, steps = answer
    slider, picture = grammar.step_slider(steps, tokenizer, first=3).children
    assert (slider.value, slider.min, slider.max) == (3, 0, len(steps) - 1)
    assert "Step 3, after " in picture.value
    slider.value = 0
    assert "Step 0, the beginning" in picture.value
    assert "After the mask: 2 tokens" in picture.value
    late = grammar.draw_step(steps, tokenizer, len(steps) - 1)
    assert "after " in late.summary
    checked_texts(late)
