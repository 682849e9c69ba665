"""The masks of ``fsm`` against those of xgrammar and llguidance, token by token, at every step of random walks.

The libraries read the expression themselves, so that the parser is compared too; their adapters, which read it with
ours, are compared beside them. Where the dialects differ, a table says how, and a test keeps the table true.
"""

import random
import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer

import mini_engine.tiny
from mini_engine.grammar.base import GrammarError, TokenRefusedError
from mini_engine.grammar.fsm import FsmBackend
from mini_engine.grammar.masks import unpack_allowed
from mini_engine.grammar.tokens import TokenTable

pytest.importorskip("xgrammar")
pytest.importorskip("llguidance")
from mini_engine.grammar.libraries.llguidance import EVERY_SPELLING, LLGuidanceBackend, LLGuidanceGrammar
from mini_engine.grammar.libraries.xgrammar import XGrammarBackend, XGrammarGrammar

pytestmark = pytest.mark.filterwarnings("ignore:Possible .*set:FutureWarning")  # Python's, of [[ and &&
TOKENIZER = Tokenizer.from_file(str(Path(mini_engine.tiny.__file__).parent / "model" / "tokenizer.json"))
STOP, V = 1021, 1024
TABLE = TokenTable.from_tokenizer(TOKENIZER, V, frozenset({STOP}))
FSM, XGRAMMAR, LLGUIDANCE = FsmBackend(TABLE), XGrammarBackend(TABLE), LLGuidanceBackend(TABLE)
BYTE = {spelling[0]: token for token, spelling in enumerate(TABLE.token_bytes) if len(spelling) == 1}

# No \d \w \s . (?i) here: they mean something else elsewhere, see DIALECTS.
SHARED = [
    # numbers and other small words
    r"[0-9]+(\.[0-9]+)?",
    r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?",
    r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    # optional tails, where the text may end and may go on
    r"foo(bar(baz)?)?",
    r"(ab)+c?",
    r"(x|xy)(yz|z)?",
    r"(a|ab)(c|bcd)(d*)",
    # alternations of words that begin alike
    r"yes|no|maybe|yesterday|none",
    r"(little|big|tiny) (girl|boy|dog|cat)s?( named [A-Z][a-z]{1,8})?\.",
    # classes
    r"[a-z]+([-'][a-z]+)*",
    r"[^a-z]{1,3}",
    r"[^\n]{1,20}\n",
    r'"([^"\\]|\\["\\/bfnrt])*"',
    r"[\]\[^-]+",
    r"\x41\x42?",
    r"[\t\n\r ]+",
    # bounded repeats
    r"([a-z]{1,4} ){2,5}[a-z]{1,4}",
    r"(([a-c]{1,2}x){1,2}y){1,3}",
    r"(a|b)*a(a|b){4}",
    r"[a-z]{2}|[a-z]{4}|[a-z]{6}",
    # beyond ASCII
    r"[à-öø-ÿ]+",
    r"[一-龥]+[。！？]",
    r"[a-zé-ÿ一-龥😀-🙏]{2,6}",
    r"[Ѐ-ӿ]+( [Ѐ-ӿ]+){0,2}",
    r"\u00e9[\u4e00-\u4e10]?",
    r"[߾-ࠂ]{2}",
    r"[\u0000-\u007f]{1,4}",
    r"[^\u0000-\u007f]{1,2}",
    # structure
    r'\{"name": "[a-z]+", "age": [0-9]{1,3}(, "ok": (true|false))?\}',
    r"[a-z]+@[a-z]+(\.[a-z]+)*\.(com|org|net)",
    r"- [^\n]+(\n- [^\n]+){0,3}",
]
# Read by ours into what all three understand.
ADAPTED = [
    r"\d{1,3}(,\d{3}){0,2}",
    r"\w+(\s\w+)*",
    r"[^\d\s]{1,4}",
    r"(?i)once upon",
    "a.b",
    "(?s)a.b",
    r"^(a|ab)(c|bcd)$",
]
# Pattern, text, then whether fsm, xgrammar and llguidance take it when each reads the pattern itself.
YES, NO, REFUSED = "takes it", "does not", "refuses the pattern"
DIALECTS = [
    # fsm is Python's re.ASCII. xgrammar is JavaScript without Unicode, as far as it goes, llguidance Rust with Unicode.
    (".", "\n", NO, YES, NO),  # xgrammar: any character at all
    ("(?s).", "\n", YES, REFUSED, YES),  # xgrammar has no flags
    (r"\d", "٣", NO, NO, YES),
    (r"[^\d]", "٣", YES, YES, NO),
    (r"\w", "é", NO, NO, YES),
    (r"\W", "é", YES, YES, NO),
    (r"\s", "\u00a0", NO, YES, YES),
    (r"\s", "\u2003", NO, YES, YES),
    (r"\s", "\u0085", NO, NO, YES),  # a space to Unicode and not to JavaScript
    (r"\S", "\u00a0", YES, NO, NO),
    ("(?i)k", "K", YES, REFUSED, YES),
    ("(?i)k", "\u212a", NO, REFUSED, YES),  # the sign of Kelvin is a k to Unicode
    ("(?i)s", "ſ", NO, REFUSED, YES),
    # Anchors: xgrammar ignores ^ and $ wherever they are, and takes \A and \Z for letters.
    ("^ab$", "ab", YES, YES, YES),
    ("a^b", "ab", REFUSED, YES, REFUSED),
    (r"\Aa\Z", "a", YES, NO, REFUSED),
    # Classes.
    ("[^a]", b"\xed\xa0\x80", NO, YES, NO),  # xgrammar lets half a surrogate pair pass, which is no UTF-8
    ("[]a]", "]", YES, REFUSED, YES),
    ("[^]a]", "b", YES, NO, YES),  # to JavaScript [^] is any character, and "a]" follows
    ("[[:alpha:]]", ":]", YES, YES, NO),  # llguidance has the classes of POSIX
    ("[[:alpha:]]", "x", NO, NO, YES),
    ("[a-c&&b-d]", "&", YES, YES, NO),  # and intersections
    (r"\p{L}", "é", REFUSED, REFUSED, YES),
    # Groups and repeats.
    ("(?P<n>a)", "a", YES, REFUSED, YES),
    ("(?#why)a", "a", YES, REFUSED, REFUSED),
    ("a{,2}", "aa", YES, REFUSED, REFUSED),
    ("a{", "a{", YES, REFUSED, REFUSED),
    ("a**", "aa", REFUSED, REFUSED, YES),
    ("a++", "aa", REFUSED, REFUSED, YES),  # a repeat of a repeat to llguidance, possessive to Python
    ("a+?", "aa", YES, YES, YES),
    ("a(?=b)b", "ab", REFUSED, REFUSED, REFUSED),
    (r"(a)\1", "aa", REFUSED, REFUSED, REFUSED),
    (r"a\b", "a", REFUSED, REFUSED, REFUSED),
    # Escapes.
    (r"\0", "\0", YES, YES, REFUSED),
    (r"\07", "\a", YES, NO, REFUSED),
    (r"\cA", "\x01", REFUSED, YES, REFUSED),
    (r"\u{61}", "a", REFUSED, YES, YES),
    (r"\N{DIGIT ONE}", "1", YES, REFUSED, REFUSED),
]
counted = {"xgrammar": 0, "llguidance": 0}


def raw_xgrammar(pattern):
    compiled = XGRAMMAR.compiler.compile_regex(pattern)
    return XGrammarGrammar(XGRAMMAR.library.GrammarMatcher(compiled), TABLE)


def raw_llguidance(pattern):
    lark = f"start: /{LLGUIDANCE.library.regex_to_lark(pattern, '')}/"
    matcher = LLGUIDANCE.library.LLMatcher(LLGUIDANCE.tokenizer, EVERY_SPELLING + lark, log_level=0)
    if matcher.is_error():
        raise GrammarError(matcher.get_error())
    return LLGuidanceGrammar(matcher, TABLE, LLGUIDANCE.fill)


def allowed(grammar):
    mask = grammar.allocate_vocab_mask(V, 1)
    grammar.fill_vocab_mask(mask, 0)
    return set(unpack_allowed(mask[0], V).nonzero()[:, 0].tolist())


def verdict(reader, pattern, text):
    """Whether the text is one of the pattern's, byte by byte."""
    try:
        grammar = reader(pattern)
    except (GrammarError, RuntimeError):
        return REFUSED
    try:
        for byte in text if isinstance(text, bytes) else text.encode():
            grammar.accept_token(BYTE[byte])
    except TokenRefusedError:
        return NO
    return YES if grammar.is_complete() else NO


def spell(tokens):
    return {token: TABLE.token_bytes[token] for token in sorted(tokens)[:8]}


def walk_together(pattern, others, seed, steps=24):
    """Take one random path through all grammars and compare the masks before each token.

    Long tokens are rare and end the text soon, single bytes lead inside characters: both are drawn.
    """
    draw = random.Random(seed)
    grammar = FSM.compile(("regex", pattern))
    path = b""
    for _ in range(steps):
        expected = allowed(grammar)
        for name, other in others.items():
            found = allowed(other)
            assert found == expected, (
                f"{pattern!r} after {path!r}: {name} has {spell(found - expected)} more, {spell(expected - found)} less"
            )
            assert other.is_complete() == grammar.is_complete()
            counted[name.split()[0]] += 1
        text = sorted(expected - {STOP})
        short = [token for token in text if len(TABLE.token_bytes[token]) == 1]
        token = draw.choice(short if short and draw.random() < 0.5 else text) if text else STOP
        if STOP in expected and draw.random() < 0.08:
            token = STOP
        for one in (grammar, *others.values()):
            one.accept_token(token)
        path += TABLE.token_bytes[token]
        if token == STOP:
            assert all(one.is_terminated() for one in (grammar, *others.values()))
            break


@pytest.mark.parametrize(("pattern", "text", "ours", "xgrammar", "llguidance"), DIALECTS)
def test_where_dialects_differ(pattern, text, ours, xgrammar, llguidance):
    """A row that is no longer true means that a library has changed: then the adapters may become simpler."""
    assert verdict(lambda text: FSM.compile(("regex", text)), pattern, text) == ours
    assert verdict(raw_xgrammar, pattern, text) == xgrammar
    assert verdict(raw_llguidance, pattern, text) == llguidance


@pytest.mark.parametrize(("pattern", "text", "ours"), [row[:3] for row in DIALECTS if row[2] != REFUSED])
def test_ours_is_the_dialect_of_python(pattern, text, ours):
    if isinstance(text, str):
        assert (re.fullmatch(pattern, text, re.ASCII) is not None) == (ours == YES)


@pytest.mark.parametrize(("pattern", "text", "ours"), [row[:3] for row in DIALECTS])
@pytest.mark.parametrize("backend", [XGRAMMAR, LLGUIDANCE], ids=["xgrammar", "llguidance"])
def test_the_adapters_have_one_dialect(backend, pattern, text, ours):
    """A client does not see which library serves it."""
    assert verdict(lambda text: backend.compile(("regex", text)), pattern, text) == ours


@pytest.mark.parametrize("pattern", SHARED)
def test_three_readers_of_an_expression_make_the_same_masks(pattern):
    for seed in range(5):
        others = {"xgrammar": raw_xgrammar(pattern), "llguidance": raw_llguidance(pattern)}
        walk_together(pattern, others, seed)


@pytest.mark.parametrize("pattern", [*SHARED[::5], *ADAPTED])
def test_the_adapters_make_the_same_masks(pattern):
    for seed in range(2):
        others = {"xgrammar adapter": XGRAMMAR, "llguidance adapter": LLGUIDANCE}
        walk_together(pattern, {name: one.compile(("regex", pattern)) for name, one in others.items()}, seed, 12)


def test_enough_was_compared(request):
    """Thousands of masks of each library, counted by the tests above: only a run of the whole file can tell."""
    if sum("three_readers" in item.name for item in request.session.items) < len(SHARED):
        pytest.skip("a part of the file was chosen")
    assert min(counted.values()) >= 1000, counted
