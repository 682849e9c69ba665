"""The backend ``fsm`` from a regular expression to a mask, each step against something that is not ours.

Oracles: ``re.fullmatch`` and ``re.search``, and a walk token by token. Lesson 7 checks what students write of it.
"""

import gc
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

import mini_engine.tiny
from mini_engine.grammar import fsm
from mini_engine.grammar.automata.automaton import DEAD, compile_node
from mini_engine.grammar.automata.regex import parse_pattern, parse_regex
from mini_engine.grammar.automata.syntax import to_regex
from mini_engine.grammar.automata.trie import TokenTrie
from mini_engine.grammar.base import GrammarError, GrammarOptions, TooManyStatesError
from mini_engine.grammar.fsm import FsmBackend
from mini_engine.grammar.masks import (
    apply_bitmask,
    apply_bitmask_on_cpu,
    pack_allowed,
    unpack_allowed,
)
from mini_engine.grammar.tokens import TokenTable
from tests.support.engines import EXAMPLES

TOKENIZER = Tokenizer.from_file(str(Path(mini_engine.tiny.__file__).parent / "model" / "tokenizer.json"))
STOP, OTHER_STOP, V = 1021, 1019, 1030  # <|im_end|>, <|endoftext|>; a head that is padded from 1024 to 1030 columns
TABLE = TokenTable.from_tokenizer(TOKENIZER, V, frozenset({STOP, OTHER_STOP}))
BACKEND = FsmBackend(TABLE)
quick = settings(max_examples=EXAMPLES, deadline=None)

# --- regular expressions ---------------------------------------------------------------------------------------------

ALPHABET = "abAB01_ -.\n\r\té一😀ſK\x00\x7f\u2028\u00a0\ufeff"
ATOMS = [
    *"abAB1_é一😀",
    *r"\. \- \\ \n \t \x61 \u4e00 \d \D \w \W \s \S . [ab] [^a] [a-z0-9] [\d_] [^\s\w] [^\D1] [Z-b] []a] ()".split(),
    *["[^a-zé\n]", "[一-龥😀-🙏]", r"[\]^-]", "(?#note)"],
]
REPEATS = ["*", "+", "?", "{2}", "{0,2}", "{1,3}", "{,2}", "{2,}", "*?", "+?", "??", "{1,2}?"]
GROUPS = ["(%s)", "(?:%s)", "(?i:%s)", "(?s:%s)", "(?-i:%s)"]


def larger(inner):
    return st.one_of(
        st.builds("".join, st.lists(inner, min_size=2, max_size=3)),
        st.builds("(?:{})".format, st.builds("|".join, st.lists(inner | st.just(""), min_size=2, max_size=3))),
        st.builds("(?:{}){}".format, inner, st.sampled_from(REPEATS)),
        st.builds(lambda group, text: group % text, st.sampled_from(GROUPS), inner),
    )


INNER = st.recursive(st.sampled_from(ATOMS), larger, max_leaves=7)
PATTERNS = st.builds(
    lambda flag, begin, parts, end: flag + begin + "|".join(parts) + end,
    st.sampled_from(["", "", "", "(?i)", "(?s)", "(?is)"]),
    st.sampled_from(["", "", "^", r"\A"]),
    st.lists(INNER, min_size=1, max_size=2),
    st.sampled_from(["", "", "$", r"\Z"]),
)


def expect(error, *words):
    assert any(word in str(error) for word in words), error


def automaton(node):
    """Of a tree, or nothing where the language is empty."""
    try:
        return compile_node(node)
    except GrammarError as error:
        return expect(error, "no text at all")


def numbered(dfa):
    """The automaton with its states in the order in which texts come to them, shorter and smaller ones first."""
    order = [0]
    for state in order:
        order += [after for after in dict.fromkeys(dfa.transitions[state].tolist()) if after not in {DEAD, *order}]
    place = np.append(np.argsort(order), DEAD)
    return place[dfa.transitions[order]].tolist(), dfa.accepting[order].tolist()


def steps_to_end(dfa):
    """How many bytes each state is away from an accepting one; the dead one, for ever away, is last."""
    steps = np.append(np.where(dfa.accepting, 0, np.inf), np.inf)
    while True:
        nearer = np.minimum(steps[:-1], steps[dfa.transitions].min(axis=1) + 1)
        if np.array_equal(nearer, steps[:-1]):
            return steps
        steps[:-1] = nearer


def sample(dfa, steps, draw, most):
    """Walk the automaton for a while and then to the nearest end, and read off a text."""
    out = bytearray()
    state = 0
    while not (dfa.accepting[state] and (len(out) >= most or draw.random() < 0.2)):
        after = dfa.transitions[state]
        if (after == DEAD).all():
            break
        stray = len(out) < most and draw.random() < 0.7
        out.append(int(draw.choice(np.flatnonzero(after != DEAD if stray else steps[after] == steps[after].min()))))
        state = int(after[out[-1]])
    return out.decode()


def texts_near(dfa, draw, count):
    """Texts of the language, texts that differ from one by a character, and texts of nothing in particular."""
    steps = steps_to_end(dfa) if dfa else None
    for _ in range(count):
        text = sample(dfa, steps, draw, draw.randrange(12)) if dfa else ""
        place = draw.randrange(len(text) + 1)
        new = draw.choice(ALPHABET)
        yield from (text, text[:place] + new + text[place:], text[:place] + new + text[place + 1 :])
        yield text[:place] + text[place + 1 :]
        yield "".join(draw.choice(ALPHABET) for _ in range(draw.randrange(5)))


def short_enough(text):
    return len(text) <= 14  # Python backtracks: longer ones may take for ever


@quick
@given(PATTERNS, st.integers(0, 10**6))
def test_a_regex_is_the_language_of_fullmatch(pattern, seed):
    node = parse_regex(pattern)
    dfa = automaton(node)
    draw = random.Random(seed)
    again = automaton(parse_regex(to_regex(node)))
    for text in filter(short_enough, texts_near(dfa, draw, 6)):
        expected = re.fullmatch(pattern, text, re.ASCII) is not None
        assert bool(dfa and dfa.matches(text)) == expected, (pattern, text)
        assert (re.fullmatch(to_regex(node), text) is not None) == expected, (pattern, to_regex(node), text)
    # Written out and read again it is the same smallest automaton, state for state.
    assert (dfa is None) == (again is None)
    assert not dfa or numbered(dfa) == numbered(again)


SPACES = "\t-\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
JAVASCRIPT = {".": "[^\n\r\u2028\u2029]", r"\s": f"[{SPACES}]", r"\S": f"[^{SPACES}]", "$": r"\Z"}
SEARCHED = ["a.c", r"^\S+$", r"\s", "^.$", "ab|a.|^a|b$", r"^[^\d]{2}$", r"^(ab)?\w$", r"\W", "é|^$", r"^\D+$", "x$"]


@pytest.mark.parametrize("pattern", SEARCHED)
def test_a_pattern_is_found_by_python_and_by_javascript(pattern):
    """Every text of the tree is found by ``re``, Unicode and ASCII, and by JavaScript's reading of it."""
    dfa = automaton(parse_pattern(pattern))
    draw = random.Random(0)
    as_javascript = re.sub(r"\[[^\]]*\]|\\.|[.$]", lambda m: JAVASCRIPT.get(m[0], m[0]), pattern)
    found = 0
    for text in texts_near(dfa, draw, 100):
        verdicts = [
            re.search(pattern, text) is not None,
            re.search(pattern, text, re.ASCII) is not None,
            re.search(as_javascript, text, re.ASCII) is not None,
        ]
        found += dfa.matches(text)
        assert all(verdicts) or not dfa.matches(text), (pattern, text, verdicts)
        if all(verdicts) and text.isascii() and not text.endswith("\n") and "\r" not in text:
            assert dfa.matches(text), f"nothing is left out where nobody differs: {pattern!r} {text!r}"
    assert found > 20


def test_alternatives_that_are_found_anywhere_share_what_is_around_them():
    """With a loop of its own around each of them, which have been found so far would be a state: 2^17 of them."""
    kinds = [f"INTERVAL_{kind}" for kind in range(17)]
    dfa = automaton(parse_pattern("|".join(kinds)))
    assert dfa.num_states < 60
    assert all(dfa.matches(f"a {kind} b") for kind in kinds)
    assert not dfa.matches("INTERVAL_x")


@quick
@given(INNER, st.integers(0, 10**6))
def test_a_pattern_never_allows_what_search_does_not_find(inner, seed):
    try:
        dfa = automaton(parse_pattern(inner))
    except GrammarError as error:
        return expect(error, "ignores case", "JavaScript reads otherwise")
    for text in filter(short_enough, texts_near(dfa, random.Random(seed), 4)):
        if dfa and dfa.matches(text):
            assert all(re.search(inner, text, flag) for flag in (re.ASCII, re.UNICODE)), (inner, text)


RARE = ["(?x) a  b # both", "^^a$$", "^a|b$", "a||b", r"\x00", "(?i)[^k]", r"[^\ud800-\udfff]", r"\N{DIGIT ONE}"]


@pytest.mark.parametrize("pattern", RARE)
def test_what_is_rarely_written_is_the_language_of_fullmatch_too(pattern):
    dfa = compile_node(parse_regex(pattern))
    for text in ("", "a", "b", "ab", "xb", "a b", "a\n", "\0", "0", "1", "k", "K", "\u212a", "\uffff"):
        assert dfa.matches(text) == bool(re.fullmatch(pattern, text, re.ASCII)), text


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(ab", "position 0"),
        ("ab**", "multiple repeat at position 3"),
        ("ab\\", "position 2"),
        (r"a\p{L}", r"\\p at position 1"),
        ("a{4294967295}", "too large"),
        ("a(?=b)", "look-ahead"),
        ("(?<!a)b", "negative look-ahead and look-behind"),
        (r"(a)\1", "references to groups"),
        ("(a)?(?(1)b|c)", "conditions on groups"),
        ("(?>a)b", "atomic groups"),
        ("a++b", "possessive repeats"),
        (r"\bword", "word boundaries"),
        ("a$b", "anchors"),
        ("a|(b$)", "anchors"),
        (r"[^\d\D]", "no text at all"),
        (r"[\ud800-\udfff]", "no text at all"),
        ("a\0b", "NUL"),
        ("(" * 400 + "a" + ")" * 400, "nests too deeply"),
        ("(?:a" * 2000 + ")?" * 2000, "nests too deeply"),
    ],
)
def test_what_is_no_regular_expression_says_where_or_why(pattern, reason):
    """Groups 331 to 500 deep were read by Python's parser and ended as a RecursionError in ours."""
    with pytest.raises(GrammarError, match=reason) as refused:
        BACKEND.compile(("regex", pattern))
    assert len(str(refused.value)) < 300, "a long pattern is not quoted in full"


@pytest.mark.parametrize("group", ["({})", "(?:{})*", "(?i:{})", "(?:a|{})", "(?:a{})?"])
def test_any_depth_is_compiled_or_refused(group):
    before, after = group.split("{}")
    for depth in (100, 340, 640):
        try:
            grammar = BACKEND.compile(("regex", before * depth + "a" + after * depth))
        except GrammarError as error:
            expect(error, "too deep")
        else:
            assert grammar.compiled.dfa.matches("a" * (depth + 1) if group == "(?:a{})?" else "a")


TOO_LARGE = [
    "[a-z]{1,100000}",
    "(((a{1,50}b){1,50}c){1,50})",
    "(a|b)*a(a|b){14}",
    "a{0,4294967294}",
    "(a?){1,5000}",
    "(a{0,100}){0,100}",
    "(aa*){1,5000}",
    "(|){1,4294967294}",
]


@pytest.mark.parametrize("pattern", TOO_LARGE)
def test_bounds_that_are_too_large_are_refused_soon(pattern):
    """``(a?){1,5000}`` has no more than 5,001 states, but finding them took hours and all memory."""
    backend = FsmBackend(TABLE, GrammarOptions(max_states=2000))
    start = time.thread_time()
    with pytest.raises(TooManyStatesError, match=r"more than 2000 states.*shorten") as refused:
        backend.compile(("regex", pattern))
    assert refused.value.limit == 2000
    assert time.thread_time() - start < 3


@pytest.mark.parametrize("pattern", ["(){1,4294967294}", "(){0,4294967294}", "((((){1,1000}){1,1000}){1,1000}){9,}"])
def test_repeats_of_nothing_are_nothing(pattern):
    """Each copy of the empty text was added: four thousand million times none."""
    dfa = compile_node(parse_regex(pattern))
    assert (dfa.num_states, dfa.matches(""), dfa.matches("a")) == (1, True, False)


# --- bytes and automata ----------------------------------------------------------------------------------------------


def test_a_long_chain_is_minimised_in_linear_time():
    """A round over all states for each of 15,000 took minutes."""
    start = time.thread_time()
    assert compile_node(parse_regex("[a-z]{1,15000}")).num_states == 15001
    assert time.thread_time() - start < 5


# --- tokens and masks ------------------------------------------------------------------------------------------------


def allowed_tokens(grammar):
    mask = grammar.allocate_vocab_mask(V, 1)
    grammar.fill_vocab_mask(mask, 0)
    return unpack_allowed(mask[0], V).nonzero()[:, 0].tolist()


def test_one_compiled_grammar_serves_eight_threads(monkeypatch):
    monkeypatch.setattr(fsm, "KEPT_BYTES", 5 * 4 * 33)  # so that masks are dropped while others read
    start = FsmBackend(TABLE).compile(("regex", r'"[^"\\]{0,20}"|[0-9]+(\.[0-9]+)?'))

    def path(seed):
        grammar = start.copy()
        draw = random.Random(seed)
        seen = []
        for _ in range(30):
            seen.append(allowed_tokens(grammar))
            if not seen[-1]:
                break
            grammar.accept_token(draw.choice(seen[-1]))
        return seen

    alone = [path(seed) for seed in range(16)]
    start.compiled.masks.clear()
    start.compiled.jumps.clear()
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(path, range(16))) == alone


def paths_by_length(tokens, table):
    """How many beginnings of tokens, by length, differ in more than bytes that every state takes to the same place.

    Those with a byte that no state takes do not count.
    """
    columns = [tuple(table[:, byte].tolist()) for byte in range(256)]
    beginnings = {text[:end] for text in tokens for end in range(1, len(text) + 1)}
    paths = {tuple(columns[byte] for byte in text) for text in beginnings}
    lengths = [len(path) for path in paths if all(set(column) != {DEAD} for column in path)]
    return [lengths.count(length) for length in range(1, max(lengths, default=0) + 1)]


@quick
@given(st.lists(st.binary(max_size=5), min_size=1, max_size=60), st.integers(0, 10**6), st.integers(1, 5))
def test_the_walk_of_the_trie_is_a_walk_per_token(tokens, seed, num_states):
    """Tokens with equal bytes, inside each other, empty; automata that are nearly full, and nearly empty."""
    draw = np.random.default_rng(seed)
    table = draw.integers(0, num_states, (num_states, 256)).astype(np.int32)
    table[draw.random(table.shape) < draw.choice([0.02, 0.5, 0.9])] = DEAD
    table[:, draw.random(256) < draw.choice([0.0, 0.5])] = DEAD  # bytes that no state takes,
    table = table[:, draw.integers(0, 256, 256) % draw.choice([3, 256])]  # and bytes that no state tells apart
    trie = TokenTrie(tuple(tokens))
    merged = trie.merged(table)
    assert [len(level.parents) for level in merged.levels] == paths_by_length(tokens, table)
    for state in range(num_states):
        expected = []
        for text in tokens:
            after = state
            for byte in text:
                after = int(table[after, byte]) if after != DEAD else DEAD
            expected.append(bool(text) and after != DEAD)
        assert trie.allowed(table, state).tolist() == expected
        assert merged.allowed(table, state).tolist() == expected


@pytest.mark.parametrize("size", [1, 31, 32, 33, 64, 65, 200])
def test_the_fast_way_to_write_a_mask_is_the_plain_one(size):
    allowed = torch.rand(3, size) < 0.5
    logits = torch.randn(3, size)
    plain, fast = logits.clone(), logits.clone()
    apply_bitmask(plain, pack_allowed(allowed))
    apply_bitmask_on_cpu(fast, pack_allowed(allowed))
    assert fast.equal(plain)
    assert plain.equal(torch.where(allowed, logits, -torch.inf))


@pytest.mark.parametrize("was_enabled", [True, False])
def test_compiling_leaves_the_search_for_cycles_as_it_was(was_enabled, monkeypatch):
    seen = []

    def compile_seen(node, most):
        seen.append(gc.isenabled())
        return compile_node(node, most)

    monkeypatch.setattr(fsm, "compile_node", compile_seen)
    (gc.enable if was_enabled else gc.disable)()
    try:
        BACKEND.compile(("regex", "[a-z]+"))
        with pytest.raises(TooManyStatesError):
            FsmBackend(TABLE, GrammarOptions(max_states=20)).compile(("regex", "[a-z]{21}"))
        assert gc.isenabled() == was_enabled
    finally:
        gc.enable()
    assert seen == [False, False]
