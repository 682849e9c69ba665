"""The checks of the grammar object (L7.F): its masks, its way through an answer, ends, ways back, copies.

Owns: languages whose automata are written down, histories of tokens, and what is seen after each step. The verdict
reads every answer anew from its first byte on. No model, no expression, no schema.
"""

import random
from collections.abc import Callable
from typing import Any

import torch

from smoke.checks.l7.a_masks import SIZES, draw_allowed, words
from smoke.checks.l7.e_tokens import NUMBERS
from smoke.checks.l7.spec_regular import (
    Answer,
    Language,
    Operation,
    Rows,
    draw_operations,
    happen,
    table_of,
    table_of_words,
)
from smoke.framework.check import Failure, Registry, Values, noting
from smoke.framework.compare import bitwise, differences
from smoke.framework.prepared import prepared

REGISTRY = Registry()

TAIL = (0x80, 0xBF)
ANY_TEXT = table_of(
    [
        {(0, 0x7F): 0, (0xC2, 0xDF): 1, 0xE0: 2, (0xE1, 0xEF): 3, 0xED: 4, 0xF0: 5, (0xF1, 0xF3): 6, 0xF4: 7},
        {TAIL: 0},
        {(0xA0, 0xBF): 1},
        {TAIL: 1},
        {(0x80, 0x9F): 1},
        {(0x90, 0xBF): 3},
        {TAIL: 3},
        {(0x80, 0x8F): 3},
    ]
)
WORDS = "y ye yes n no o es s t terday yesterday est er no"
TEXTS = f"{WORDS} 0 1 2 3 4 5 6 7 8 9 , 1, ,2 12,3 1 12 ,, a a b ab é ét € yé a1, x 😀"
PARTS = [  # of characters
    bytes.fromhex(part)
    for part in "c3 a9 a974 e2 e282 ac 82ac f09f 9880 ff 00 20 0a ed a080 ed9fbf c0 f48fbfbf".split()
]
STOP_IDS = (2, 63)
UNSPELLED = (2, 5, 31, 63)
NUM_PADDING = 4
NOTHING = 5  # a special token


def vocabulary() -> list[bytes]:
    """Return the tokens of a head: stop ids at 2 and 63, special ones at 5 and 31, padding at its end."""
    tokens = [*(text.encode() for text in TEXTS.split()), *PARTS]
    for place in UNSPELLED:
        tokens.insert(place, b"")
    return tokens + [b""] * NUM_PADDING


@prepared
def languages() -> dict[str, Language]:
    """Return the languages of the checks. With 64 tokens, every bit of both words is a token."""
    tokens = vocabulary()
    automata: dict[str, tuple[Rows, list[bool]]] = {
        "words": table_of_words(["yes", "no", "yesterday", "été"]),
        "numbers": (NUMBERS, [False, True, False]),
        "any text": (ANY_TEXT, [True, *[False] * 7]),
        "pairs of a": (table_of([{"a": 1}, {"a": 0}]), [True, False]),
        "any number of a, one state": (table_of([{"a": 0}]), [True]),
        "as many 1s as you like, no end": (table_of([{"1": 0}, {}]), [False, True]),
    }
    found: dict[str, Language] = {}
    for name, (rows, accepting) in automata.items():
        found[name] = Language(rows, accepting, tokens, frozenset(STOP_IDS))
        found[f"{name}, 64 tokens"] = Language(rows, accepting, tokens[:64], frozenset(STOP_IDS))
        found[f"{name}, one stop id"] = Language(rows, accepting, tokens, frozenset({63}))
        found[f"{name}, no stop id"] = Language(rows, accepting, tokens[:40], frozenset())
    return found


def compiled_of(language: Language) -> Any:
    """Return the candidate's automaton with its vocabulary; the trie counts how often it is walked."""
    import numpy as np

    from mini_engine.grammar.automata.automaton import Dfa
    from mini_engine.grammar.automata.trie import TokenTrie
    from mini_engine.grammar.fsm import CompiledGrammar
    from mini_engine.grammar.tokens import TokenTable

    class CountingTrie(TokenTrie):
        num_walks = 0

        def allowed(self, transitions: Any, state: int) -> Any:
            self.num_walks += 1
            return super().allowed(transitions, state)

    tokens = tuple(language.token_bytes)
    dfa = Dfa(np.array(language.rows, dtype=np.int32), np.array(language.accepting, dtype=np.bool_))
    return CompiledGrammar(dfa, TokenTable(tokens, language.stop_ids), CountingTrie(tokens))


def grammar_of(language: Language) -> Any:
    """Return the candidate's grammar object, at its beginning."""
    from mini_engine.grammar.fsm import FsmGrammar

    return FsmGrammar(compiled_of(language))


def pack_probe(seed: int) -> Values:
    """Pack booleans of every size."""
    from mini_engine.grammar.fsm import pack_words

    values: Values = {}
    for size in SIZES:
        for name, allowed in rows_to_pack(seed, size).items():
            packed = pack_words(allowed.numpy())
            values[f"{size} tokens, {name}"] = [str(packed.dtype), [int(word) for word in packed]]
    return values


def rows_to_pack(seed: int, size: int) -> dict[str, torch.Tensor]:
    """Return rows of one size."""
    last = torch.arange(size) == size - 1
    return {"drawn": draw_allowed(seed + size, size), "the last": last, "all": last | ~last, "none": last & ~last}


def pack_spec(seed: int) -> Values:
    """Write the number whose bits are the tokens."""
    return {
        f"{size} tokens, {name}": ["int32", words(allowed).tolist()]
        for size in SIZES
        for name, allowed in rows_to_pack(seed, size).items()
    }


def masks_probe(seed: int) -> Values:
    """Ask for the mask of every state of every language, twice."""
    values: Values = {}
    for name, language in languages().items():
        compiled = compiled_of(language)
        first = [[int(word) for word in compiled.mask(state)] for state in range(len(language.rows))]
        again = [[int(word) for word in compiled.mask(state)] for state in range(len(language.rows))]
        values[name] = [first, again, str(compiled.mask(0).dtype)]
    return values


def masks_spec(seed: int) -> Values:
    """Ask token by token."""
    values: Values = {}
    for name, language in languages().items():
        rows = [language.words_after(state) for state in range(len(language.rows))]
        values[name] = [rows, rows, "int32"]
    return values


GARBAGE = 0x5A5A5A5A  # in a mask that was used before


def see(grammar: Any, num_words: int) -> list[Any]:
    """Return whether it has ended, whether it is complete, and its mask, filled into a row between two others."""
    mask = torch.full((3, num_words), GARBAGE, dtype=torch.int32)
    grammar.fill_vocab_mask(mask, 1)
    if bool((mask[::2] != GARBAGE).any()):
        return ["other rows of the mask were changed"]
    return [grammar.is_terminated(), grammar.is_complete(), mask[1].tolist()]


def do(grammars: list[Any], operation: Operation) -> str:
    """Do one operation and return the name of the error that it raised, empty if it did not."""
    kind, who, what = operation
    try:
        if kind == "copy":
            grammars.append(grammars[who].copy())
        else:
            (grammars[who].accept_token if kind == "accept" else grammars[who].rollback)(what)
    except (ValueError, LookupError) as error:
        return type(error).__name__
    return ""


History = tuple[str, list[Operation]]  # the name of a language, and what happens
Histories = Callable[[int], dict[str, History]]


def history_probe(histories: Histories) -> Callable[[int], Values]:
    """Return a probe that lives through histories and looks at every answer after each operation."""

    def probe(seed: int) -> Values:
        values: Values = {}
        for name, (language_name, history) in histories(seed).items():
            language = languages()[language_name]
            grammars = [grammar_of(language)]
            num_words = -(-len(language.token_bytes) // 32)
            seen: Values = {"before": see(grammars[0], num_words)}
            with noting() as done:
                for number, operation in enumerate(history, start=1):
                    done.append(operation)
                    raised = do(grammars, operation)
                    seen[step_name(number, operation)] = [raised, [see(grammar, num_words) for grammar in grammars]]
            values[f"{name} ({language_name})"] = seen
        return values

    return probe


def step_name(number: int, operation: Operation) -> str:
    """Name a step: what happens to which of the grammars, and all that is seen after it."""
    kind, who, what = operation
    action = kind if kind == "copy" else f"{kind} {what}"
    return f"step {number:02}, {action} on grammar {who}: [error, [ended, complete, mask] of each]"


def history_spec(histories: Histories) -> Callable[[int], Values]:
    """Return a spec that lives through the same histories."""

    def spec(seed: int) -> Values:
        values: Values = {}
        for name, (language_name, history) in histories(seed).items():
            answers = [Answer(languages()[language_name])]
            seen: Values = {"before": answers[0].observed()}
            for number, operation in enumerate(history, start=1):
                raised = happen(answers, operation)
                seen[step_name(number, operation)] = [raised, [answer.observed() for answer in answers]]
            values[f"{name} ({language_name})"] = seen
        return values

    return spec


def tokens_of(*spellings: str | bytes) -> list[Operation]:
    """Return the operations that accept tokens of these spellings, the first of each; "stop" and "stop 2" end."""
    ids = {token: index for index, token in reversed(list(enumerate(vocabulary())))}
    ends = {"stop": STOP_IDS[1], "stop 2": STOP_IDS[0]}
    found = []
    for one in spellings:
        token = (
            ends[one] if isinstance(one, str) and one in ends else ids[one if isinstance(one, bytes) else one.encode()]
        )
        found.append(("accept", 0, token))
    return found


def back(count: int, who: int = 0) -> Operation:
    """Return the operation that undoes tokens."""
    return ("rollback", who, count)


def ends(seed: int) -> dict[str, History]:
    """Return answers that end where they may and where they may not, and what comes after an end."""
    return {
        "a word": ("words", tokens_of("yes", "stop")),
        "the other stop id": ("words", tokens_of("no", "stop 2")),
        "too early": ("words", tokens_of("ye", "stop", "s", "stop")),
        "at once": ("words", tokens_of("stop", "stop 2")),
        "a word that could go on": ("words", tokens_of("yes", "terday", "stop")),
        "nothing": ("pairs of a", tokens_of("stop")),
        "nothing, and one state": ("any number of a, one state", tokens_of("stop", "a", "stop")),
        "twice": ("numbers", tokens_of("1", "stop", "stop")),
        "half a pair": ("pairs of a", tokens_of("a", "stop", "a", "stop")),
        "goes on after its end": ("numbers", tokens_of("1", "stop", "2", ",", "stop 2")),
        "a comma before the end": ("numbers", tokens_of("1,", "stop", "2", "stop")),
        "never": ("as many 1s as you like, no end", tokens_of("1", "1", "stop")),
        "one stop id": ("numbers, one stop id", [*tokens_of("12", "stop 2", "stop")]),
        "no stop id": ("numbers, no stop id", [*tokens_of("1", ","), ("accept", 0, 2)]),
    }


def refusals(seed: int) -> dict[str, History]:
    """Return tokens that may not come, after which everything is as it was."""
    size = len(vocabulary())
    strange = [("accept", 0, token) for token in (-1, -2, -size, size, size + 5, NOTHING, 31, size - 1)]
    return {
        "wrong tokens": ("words", tokens_of("a", "o", "ye", "no", "ye", "s", "x", "terday")),
        "ids that are no text": ("any text", [*strange, *tokens_of("a"), *strange, *tokens_of("stop"), *strange]),
        "ids that are no text, 64 tokens": ("any text, 64 tokens", [*strange, ("accept", 0, 64), ("accept", 0, 63)]),
        "half right": ("numbers", tokens_of("12", ",,", "a1,", ",2", ",,", "12,3")),
        "right only as a whole": ("words", tokens_of("es", "yesterday", "est", "stop")),
    }


def rollbacks(seed: int) -> dict[str, History]:
    """Return ways back: nothing, one, all, too many, across an end, and forth again."""
    word = tokens_of("ye", "s", "terday")
    stop = tokens_of("stop")
    return {
        "none": ("words", [back(0), *word, back(0), back(0)]),
        "one by one": ("words", [*word, back(1), back(1), back(1)]),
        "all at once, and again": ("words", [*word, back(3), *word, back(2), *tokens_of("s", "stop")]),
        "too many": ("words", [back(1), *word, back(4), back(-1), back(3), back(1)]),
        "across the end": ("words", [*word, *stop, back(1), *stop, back(2), *stop]),
        "all, the end too": ("words", [*tokens_of("no", "stop"), back(2), *tokens_of("yes", "stop"), back(3), back(0)]),
        "after a refused token": ("numbers", [*tokens_of("1", "a", ",", ","), back(1), *tokens_of("2"), back(1)]),
        "the end of nothing": ("pairs of a", [*stop, back(1), *tokens_of("a", "a", "stop"), back(2), back(1)]),
    }


def copies(seed: int) -> dict[str, History]:
    """Return copies in several states, after which each goes its own way."""

    def other(operations: list[Operation], who: int = 1) -> list[Operation]:
        return [(kind, who, what) for kind, _, what in operations]

    copy: Operation = ("copy", 0, 0)
    stop = tokens_of("stop")
    no = tokens_of("no", "stop")
    return {
        "at the beginning": ("words", [copy, *tokens_of("no"), *other(tokens_of("ye", "s")), *tokens_of("stop")]),
        "on the way": ("words", [*tokens_of("ye"), copy, *tokens_of("s", "stop"), *other(tokens_of("s", "terday"))]),
        "back on one of them": ("numbers", [*tokens_of("1", ","), copy, back(2), *other([*tokens_of("2"), back(3)])]),
        "after the end": ("words", [*no, copy, back(1), *other([*stop, back(1), back(2)])]),
        "two of them": ("words", [*tokens_of("y"), copy, copy, *other(tokens_of("es"), 2), back(1), back(1, 1)]),
    }


SHARED = {"a copy's compiled grammar is the same": True, "its statistics are the same": False}


def copies_probe(seed: int) -> Values:
    """Live through copies, and look what a copy has in common with its original."""
    grammar = grammar_of(languages()["words"])
    twin = grammar.copy()
    shared = [twin.compiled is grammar.compiled, twin.stats is grammar.stats]
    return history_probe(copies)(seed) | dict(zip(SHARED, shared, strict=True))


def parts(seed: int) -> dict[str, History]:
    """Return answers whose tokens begin and end inside a character, or reach over several words of the language."""
    return {
        "two halves": ("words", tokens_of(b"\xc3", "stop", b"\xa9", "t", b"\xc3", b"\xa9", "stop")),
        "overlapping": ("words", tokens_of(b"\xc3", b"\xa9t", b"\xc3\xa9", "stop")),
        "three bytes": ("any text", tokens_of(b"\xe2", "a", b"\x82\xac", b"\xe2\x82", "stop", b"\xac", "stop")),
        "four bytes": ("any text", tokens_of(b"\xf0\x9f", b"\xc3", b"\x98\x80", b"\xf0\x9f\x98\x80", "stop")),
        "no text": ("any text", tokens_of(b"\xff", b"\xa9", b"\xc0", b"\xed", b"\xa0\x80", b"\xac", b"\x00")),
        "several numbers": ("numbers", tokens_of("12,3", ",2", "1,", "2", ",2", "1,", "stop")),
    }


@prepared
def drawn_histories(seed: int) -> dict[str, History]:
    """Draw a history for each language."""
    rng = random.Random(f"histories {seed}")
    return {f"drawn {name}": (name, draw_operations(rng, language, 30)) for name, language in languages().items()}


BEFORE = {"all bits set": -1, "no bit set": 0, "bits of an earlier step": GARBAGE}
ROWS_BETWEEN = "the other rows are as they were"
TWIN_LATER = "the copy's row, after the caller wrote into the first row"


def fill_probe(seed: int) -> Values:
    """Fill rows, write into what was filled, and fill again: what a caller does to a mask is its own affair."""
    values: Values = {}
    for name, language in languages().items():
        first = grammar_of(language)
        size = -(-len(language.token_bytes) // 32)
        twin = first.copy()
        mask = torch.zeros(4, size, dtype=torch.int32)
        for before, value in BEFORE.items():
            mask.fill_(value)
            first.fill_vocab_mask(mask, 0)
            twin.fill_vocab_mask(mask, 3)
            rows = {"row 0": mask[0].tolist(), "row 3, by a copy": mask[3].tolist()}
            between = bool((mask[1:3] == value).all())
            mask[0] = 7
            rows[TWIN_LATER] = mask[3].tolist()
            values[f"{name}, a mask with {before}"] = {**rows, ROWS_BETWEEN: between}
        values[f"{name}, what fill_vocab_mask returns"] = first.fill_vocab_mask(mask, 2) is None
    return values


def fill_verdict(seed: int, got: Values) -> list[Failure]:
    """Expect the mask of the start, every time, and name the first token whose bit is wrong."""
    failures: list[Failure] = []
    for name, language in languages().items():
        start = language.words_after(0)
        for before, value in BEFORE.items():
            case = f"{name}, a mask with {before}"
            rows = dict(got[case])
            failures += differences(True, rows.pop(ROWS_BETWEEN), None, f"{case}, {ROWS_BETWEEN}")
            for row, words_got in rows.items():
                failures += wrong_bit(f"{case}, {row}", start, words_got, value)
        case = f"{name}, what fill_vocab_mask returns"
        failures += differences(True, got[case], None, f"{case} is None")
    return failures


def wrong_bit(case: str, expected: list[int], got: list[int], before: int) -> list[Failure]:
    """Compare the words of a row that held ``before`` in each word: name the first token whose bit is wrong."""
    for place, (want, have) in enumerate(zip(expected, got, strict=True)):
        wrong = want ^ have
        if wrong:
            bit = (wrong & -wrong).bit_length() - 1
            note = f"word {place} should be {want} and is {have}"
            if have == want | before:
                note += ": the row still has bits that it held before the call; write every word of the row anew"
            elif have == before:
                note += ", as before the call: this word of the row was not written"
            meaning = ("0, it may not come first", "1, it may come first")
            is_set = want >> bit & 1
            return [Failure(case, f"the bit of token {32 * place + bit}", meaning[is_set], str(1 - is_set), note)]
    return []


BOUNDS = ("as many as it likes", "as many as are visited", "three", "one")  # of the masks that are kept


@prepared
def observed_on(way: list[Operation]) -> list[Any]:
    """Return what is to be seen after each operation."""
    answers = [Answer(languages()["words"])]
    seen = []
    for operation in way:
        happen(answers, operation)
        seen.append(answers[0].observed())
    return seen


def memo_probe(seed: int) -> Values:
    """Visit the same states with many requests and count the walks, with room for all masks and for few."""
    from mini_engine.grammar.fsm import FsmGrammar

    language = languages()["words"]
    ways = [tokens_of("yes", "terday"), tokens_of("ye", "s", "t"), tokens_of("no"), tokens_of(b"\xc3", b"\xa9t")]
    values: Values = {}
    num_visited = 0
    for name in BOUNDS:
        compiled = compiled_of(language)
        wrong = 0
        largest = 0
        most = {"as many as are visited": num_visited, "three": 3, "one": 1}.get(name, compiled.most_masks)
        compiled.most_masks = most
        for way in ways * 10:
            grammars = [FsmGrammar(compiled)]
            for operation, wanted in zip(way, observed_on(way), strict=True):
                do(grammars, operation)
                wrong += see(grammars[0], 3) != wanted
                largest = max(largest, len(compiled.masks))
        num_visited = max(num_visited, largest)
        num_walks = compiled.trie.num_walks if most >= num_visited else 0
        values[f"{name}, wrong masks"] = wrong
        values[f"{name}, walks"] = "few" if num_walks <= len(language.rows) else f"{num_walks} walks"
        values[f"{name}, kept"] = "few" if largest <= most else f"{largest} masks"
    return values


def memo_spec(seed: int) -> Values:
    """No mask is wrong; no state is walked twice if there is room for all, and the bound is kept if there is not."""
    return {
        f"{name}, {part}": value
        for name in BOUNDS
        for part, value in (("wrong masks", 0), ("walks", "few"), ("kept", "few"))
    }


REGISTRY.add(
    "L7.F.pack",
    "Rows of every size pack to int32 words, the first token in the lowest bit, 0 after the last token.",
    pack_probe,
    bitwise(pack_spec),
)
REGISTRY.add(
    "L7.F.masks",
    "A state's mask is what may come, token by token; stop ids where it accepts, other tokens without bytes never.",
    masks_probe,
    bitwise(masks_spec),
)
REGISTRY.add(
    "L7.F.fill",
    "A mask is copied into its row alone, over whatever stood there, and what the caller writes changes no later one.",
    fill_probe,
    fill_verdict,
)
REGISTRY.add(
    "L7.F.memo",
    "A state is walked once for all requests, and no more masks are kept than allowed.",
    memo_probe,
    bitwise(memo_spec),
)
REGISTRY.add(
    "L7.F.ends",
    "A stop token is taken where the text is complete, and nothing after it; complete stays complete.",
    history_probe(ends),
    bitwise(history_spec(ends)),
)
REGISTRY.add(
    "L7.F.refusals",
    "A token that may not come is refused and changes nothing: wrong bytes, special ids, ids outside the vocabulary.",
    history_probe(refusals),
    bitwise(history_spec(refusals)),
)
REGISTRY.add(
    "L7.F.rollbacks",
    "Tokens are undone exactly, 0 of them and across an end too; more than there are is an error that changes nothing.",
    history_probe(rollbacks),
    bitwise(history_spec(rollbacks)),
)
REGISTRY.add(
    "L7.F.copies",
    "A copy is in the same state, can go as far back, shares the masks alone, and neither changes the other.",
    copies_probe,
    bitwise(lambda seed: history_spec(copies)(seed) | SHARED),
)
REGISTRY.add(
    "L7.F.parts",
    "Tokens may begin and end inside a character and reach over several parts of the text.",
    history_probe(parts),
    bitwise(history_spec(parts)),
)
REGISTRY.add(
    "L7.F.histories",
    "Drawn histories of tokens, refusals, ways back and copies are lived through as by reading everything anew.",
    history_probe(drawn_histories),
    bitwise(history_spec(drawn_histories)),
)
