"""The checks of L7.K: bytes that an automaton forces, and the tokens that may be appended for them.

Owns: automata and languages of a few sentences, a grammar object that follows sentences, and what is forced: by
comparing everything that can still be said.
"""

import json
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from torch import Tensor

from smoke.checks.l5.spec_text import tokenizer
from smoke.checks.l7 import spec_sentences as specs
from smoke.framework.check import Failure, Registry, Values
from smoke.framework.compare import differences
from smoke.framework.prepared import prepared

REGISTRY = Registry()
DEAD = -1
LONGEST = 14  # bytes of the words that are looked at
LONG_CHAIN = 3000  # bytes: more than functions may call themselves

# Edges --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Automaton:
    """Edges by state, byte by byte, and the accepting states. From every state an accepting one can be reached."""

    edges: tuple[dict[int, int], ...]
    accepting: tuple[bool, ...]

    def words(self, state: int, longest: int = LONGEST) -> set[bytes]:
        """Return every word up to a length that is accepted from ``state`` on."""
        found = set()
        open_ends = {(b"", state)}
        for _ in range(longest + 1):
            found |= {word for word, place in open_ends if self.accepting[place]}
            open_ends = {
                (word + bytes([byte]), after) for word, place in open_ends for byte, after in self.edges[place].items()
            }
        return found


def chain(words: Sequence[bytes]) -> Automaton:
    """Return the tree of a few words as an automaton."""
    begins = sorted(
        {word[:count] for word in words for count in range(len(word) + 1)}, key=lambda begin: (len(begin), begin)
    )
    number = {begin: index for index, begin in enumerate(begins)}
    edges = [{each[-1]: number[each] for each in begins if each[:-1] == begin and each} for begin in begins]
    return Automaton(tuple(edges), tuple(begin in words for begin in begins))


def automata(seed: int) -> dict[str, Automaton]:
    """Return trees of words, loops, and drawn automata of up to six states."""
    found = {
        "one word": chain([b"name"]),
        "two that agree at first": chain([b'{"apple', b'{"anise']),
        "one begins the other": chain([b"ab", b"abcd"]),
        "the empty word and another": chain([b"", b"abc"]),
        "bytes of characters": chain(["aé".encode(), "aè".encode()]),
        "byte zero and byte 255": chain([b"a\x00\xff", b"a\x00\xffb"]),
        "a loop with a way out": Automaton(({97: 1}, {98: 0, 99: 2}, {}), (False, False, True)),
        "a loop over an accepting state": Automaton(({97: 1}, {98: 2}, {99: 0}), (False, True, False)),
        "edges of two bytes to one state": Automaton(
            ({97: 1}, {98: 2, 99: 2}, {100: 3}, {}), (False, False, False, True)
        ),
    }
    for number in range(30):
        rng = random.Random(f"automaton {seed} {number}")
        count = rng.randint(2, 6)
        edges = [
            {rng.choice([97, 98, 99]): rng.randrange(count) for _ in range(rng.choice([1, 1, 1, 2]))}
            for _ in range(count)
        ]
        accepting = [rng.random() < 0.25 for _ in range(count - 1)] + [True]
        drawn = Automaton(tuple(edges), tuple(accepting))
        if all(drawn.words(state) for state in range(count)):
            found[f"drawn {number}"] = drawn
    return found


def compiled_of(transitions: Any, accepting: Sequence[bool]) -> Any:
    """Return the candidate's automaton; its vocabulary does not matter."""
    from mini_engine.grammar.automata.automaton import Dfa
    from mini_engine.grammar.automata.trie import TokenTrie
    from mini_engine.grammar.fsm import CompiledGrammar
    from mini_engine.grammar.tokens import TokenTable

    table = TokenTable((b"", b"a"), frozenset({0}))
    return CompiledGrammar(Dfa(transitions, np.array(accepting)), table, TokenTrie(table.token_bytes))


def edges_probe(seed: int) -> Values:
    """Ask every state of every automaton, in a drawn order and twice, and the start of a long chain."""
    values: Values = {}
    for name, automaton in automata(seed).items():
        transitions = np.full((len(automaton.edges), 256), DEAD, dtype=np.int32)
        for state, edges in enumerate(automaton.edges):
            for byte, after in edges.items():
                transitions[state, byte] = after
        compiled = compiled_of(transitions, automaton.accepting)
        states = [*range(len(automaton.edges))] * 2
        random.Random(seed).shuffle(states)
        asked = [[state, list(compiled.jump(state))] for state in states]
        values[name] = sorted(asked)
    chain_of_a = np.full((LONG_CHAIN + 1, 256), DEAD, dtype=np.int32)
    chain_of_a[:-1, 97] = np.arange(1, LONG_CHAIN + 1)
    forced = compiled_of(chain_of_a, [False] * LONG_CHAIN + [True]).jump(0)
    values["a long chain"] = len(forced) if set(forced) == {97} else 0
    return values


def edges_verdict(seed: int, got: Values) -> list[Failure]:
    """Compare all words that can follow."""
    failures = differences(LONG_CHAIN, got["a long chain"], None, f"a chain of {LONG_CHAIN} bytes, bytes that follow")
    for name, automaton in automata(seed).items():
        for state, jump in got[name]:
            common = specs.agreement(automaton.words(state))
            failures += differences(list(common), jump, None, f"{name}, bytes that follow from state {state}")
        failures += differences(2 * len(automaton.edges), len(got[name]), None, f"{name}: answers")
    return failures


REGISTRY.add(
    "L7.K.edges",
    "From a state those bytes are forced in which every text that can follow agrees, up to where one could end.",
    edges_probe,
    edges_verdict,
)

WHOLE = [
    b"",
    b"abc",
    "aé".encode(),
    "€".encode(),
    "a😀".encode(),
    "é".encode()[1:],
    "😀b".encode()[2:],
    b"\xff",
    b"a\n",
]


def cut_bytes() -> list[bytes]:
    """Return every beginning of these."""
    return list(dict.fromkeys(each[:count] for each in WHOLE for count in range(len(each) + 1)))


def characters_probe(seed: int) -> Values:
    """Read bytes that were cut anywhere."""
    from mini_engine.grammar.jump import whole_characters

    return {str(list(each)): whole_characters(each) for each in cut_bytes()}


def characters_verdict(seed: int, got: Values) -> list[Failure]:
    """Cut until it can be read; what begins inside a character cannot."""
    return differences({str(list(each)): specs.characters(each) for each in cut_bytes()}, got, None, "the bytes")


REGISTRY.add(
    "L7.K.characters",
    "Of forced bytes the whole characters are spelled: not one of which a part is forced, and none if they begin "
    "inside of one.",
    characters_probe,
    characters_verdict,
)

# Tokens -------------------------------------------------------------------------------------------------------------


def write_row(mask: Tensor, row: int, allowed: Collection[int]) -> None:
    """Write a row of a bitmask, bit by bit. Mutates the mask."""
    mask[row] = 0
    for token in allowed:
        mask[row, token // 32] |= 1 << token % 32 if token % 32 < 31 else -(1 << 31)


def build_sentences(sentences: Sequence[str], stops: Sequence[int] = (), spellings: tuple[bytes, ...] = ()) -> Any:
    """Build a grammar object that lets one of these sentences be said; ``spellings``: of another vocabulary."""
    from mini_engine.grammar.base import GrammarObject, TokenRefusedError, check_rollback

    class Sentences(GrammarObject):
        """The bytes that were said, and after how many tokens which of them."""

        def __init__(self, marks: Sequence[bytes] = (b"",), ended: bool = False) -> None:
            super().__init__()
            self.marks = list(marks)
            self.ended = ended

        def allowed(self) -> set[int]:
            return set() if self.ended else allowed_after(tuple(sentences), self.marks[-1], tuple(stops), spellings)

        def accept_token(self, token_id: int) -> None:
            if token_id not in self.allowed():
                raise TokenRefusedError(f"token {token_id}")
            self.ended = token_id in stops
            self.marks.append(self.marks[-1] + (spellings or specs.token_bytes())[token_id])

        def rollback(self, count: int) -> None:
            check_rollback(count, len(self.marks) - 1)
            self.ended = self.ended and count == 0
            del self.marks[len(self.marks) - count :]

        def is_terminated(self) -> bool:
            return self.ended

        def is_complete(self) -> bool:
            return self.ended or b"" in specs.rests(sentences, self.marks[-1])

        def fill_vocab_mask(self, mask: Tensor, row: int) -> None:
            write_row(mask, row, self.allowed())

        def copy(self) -> Any:
            return type(self)(self.marks, self.ended)

        def try_jump_forward(self) -> bytes:
            return b"" if self.ended else specs.forced(sentences, self.marks[-1])

    return Sentences()


@cache
def allowed_after(
    sentences: tuple[str, ...], said: bytes, stops: tuple[int, ...], spellings: tuple[bytes, ...]
) -> set[int]:
    """Return what may come next; looked up if it was asked before."""
    return specs.allowed(sentences, said, stops, spellings)


@dataclass(frozen=True)
class Jump:
    """A language, what was said of it, token by token, and how many tokens may be appended."""

    sentences: tuple[str, ...]
    ids: tuple[int, ...]
    most: int = 99


PEOPLE = tuple(
    json.dumps({"name": name, "age": age, "color": color})
    for name in ("Mila", "Milo", "Zoe")
    for age in (7, 71)
    for color in ("red", "green", "grey")
)
FRUIT = ('{"apple": 1}', '{"anise": 2}')
LANGUAGES: dict[str, tuple[str, ...]] = {
    "one sentence": ("Once upon a time there was a little fox.",),
    "people": PEOPLE,
    "fruit": FRUIT,
    "one goes on where the other ends": ("The owl said hello.", "The owl said hello. The fox did not."),
    "a word that may be longer": ("The answer is wonder", "The answer is wonderful", "The answer is wondering"),
    "letters beyond ASCII": ("Müller trägt Öl 😀 fort", "Müller trägt Öl 😁 weg"),
    "a letter that is written in two": ("cafe\u0301 is open", "cafe\u0301 is shut"),
    "spaces and line breaks": ('{\n    "a":   1,\n\n    "b": [2]\n}', '{\n    "a":   1,\n\n    "b": [3]\n}'),
    "digits": ("0123456789 and more", "0123456789 and less"),
    "a text that reads like a special token": ("Say <|im_end|> now", "Say <|im_end|> again"),
}


def spell(text: str) -> list[int]:
    """Return the tokens of a text."""
    return list(tokenizer().encode(text, add_special_tokens=False).ids)


def spell_bytes(text: str) -> list[int]:
    """Return a token for every byte of a text."""
    single = {each[0]: token for token, each in enumerate(specs.token_bytes()) if len(each) == 1}
    return [single[byte] for byte in text.encode()]


@prepared
def jumps(seed: int) -> dict[str, Jump]:
    """Return places in every language: in canonical tokens, in single bytes and drawn; with and without a limit."""
    found = {}
    for name, sentences in LANGUAGES.items():
        rng = random.Random(f"jump {seed} {name}")
        ways = [spell(rng.choice(sentences)), spell_bytes(rng.choice(sentences)), drawn_way(sentences, rng)]
        if not specs.rests(sentences, specs.spelled(ways[0])):  # the tokenizer normalises it
            ways[0] = ways[1]
        for kind, ids in zip(("tokens", "bytes", "drawn tokens"), ways, strict=True):
            for place in sorted({0, *rng.sample(range(len(ids) + 1), min(9, len(ids) + 1))}):
                jump = Jump(sentences, tuple(ids[:place]), rng.choice([99, 99, 99, -1, 0, 1, 2]))
                found[f"{name}, {place} {kind}, at most {jump.most}"] = jump
    # Where it matters how far one looks back, there are several right answers.
    return {name: jump for name, jump in found.items() if not is_open(jump)}


def is_open(jump: Jump) -> bool:
    """Whether the tokenizer's answer depends on how many tokens it is shown in front of the forced text."""
    text = specs.characters(specs.forced(jump.sentences, specs.spelled(jump.ids)))
    spellings = {tuple(specs.canonical(jump.ids, text, count)) for count in (specs.LOOK_BACK, 4, 8) if text}
    return len(spellings) > 1


def drawn_way(sentences: Sequence[str], rng: random.Random) -> list[int]:
    """Return tokens that spell a sentence in some way."""
    ids: list[int] = []
    while fitting := sorted(specs.allowed(sentences, specs.spelled(ids), ())):
        ids.append(rng.choice(fitting))
    return ids


def tokens_probe(seed: int) -> Values:
    """Jump at every place, and look at the grammar before and after."""
    from mini_engine.grammar.jump import JumpForward
    from mini_engine.grammar.tokens import TokenTable

    table = TokenTable(specs.token_bytes(), frozenset())
    jumper = JumpForward(tokenizer(), table)
    values: Values = {}
    for name, jump in jumps(seed).items():
        grammar = build_sentences(jump.sentences)
        for token in jump.ids:
            grammar.accept_token(token)
        before = list(grammar.marks)
        taken = [int(token) for token in jumper.tokens(grammar, tuple(jump.ids), jump.most)]
        values[name] = {"taken": taken, "the grammar is where it was": grammar.marks == before}
    for name, (sentences, _) in JOINED.items():
        values[name] = [spelling.decode(errors="backslashreplace") for spelling in joined_tokens(sentences)]
    return values


# What a tokenizer joins that has a token for each byte, in this order; sentences, and which tokens may be appended.
JOINS = [(b"\xc3", b"\xa9"), ("é".encode(), "é".encode()), (b" ", b"\xf0"), (b"b", b"c"), (b"a", b"bc")]
JOINS += [(b"e", b"f"), (b"d", b"ef"), (b"d", b"e")]
JOINED: dict[str, tuple[tuple[str, ...], list[bytes]]] = {
    "a space, joined to the half of a character that is forced behind it": (("éé 😀", "éé 😁"), ["éé".encode()]),
    "two tokens, where a third one begins with both": (("abc", "abd"), []),
    "a token, where a longer one has a smaller id": (("def", "deg"), []),
    "a token of two bytes, where one of two characters may come": (("éé", "éa"), []),
    "two tokens, and the third one later": (("xab abc", "xab abd"), [b"x", b"a", b"b", b" "]),
}


def joined_tokens(sentences: tuple[str, ...]) -> list[bytes]:
    """Jump from the beginning, with the tokenizer of ``JOINS``; return how the tokens are spelled."""
    from mini_engine.grammar.jump import JumpForward
    from mini_engine.grammar.tokens import TokenTable

    spellings = (*(bytes([number]) for number in range(256)), *(left + right for left, right in JOINS))
    letter = {number: character for character, number in specs.byte_of_character().items()}
    names = ["".join(letter[number] for number in spelling) for spelling in spellings]
    merges = [(names[spellings.index(left)], names[spellings.index(right)]) for left, right in JOINS]
    joining = Tokenizer(BPE({name: token for token, name in enumerate(names)}, merges))
    joining.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    grammar = build_sentences(sentences, spellings=spellings)
    return [spellings[t] for t in JumpForward(joining, TokenTable(spellings, frozenset())).tokens(grammar, [], 99)]


def tokens_verdict(seed: int, got: Values) -> list[Failure]:
    """Take canonical tokens as long as nothing longer could stand there."""
    failures = []
    num_taken = 0
    for name, jump in jumps(seed).items():
        want = specs.appended(jump.sentences, jump.ids, jump.most)
        num_taken += len(want)
        text = f"{name}: tokens after {specs.spelled(jump.ids).decode(errors='replace')!r}"
        failures += differences(words(want), words(got[name]["taken"]), None, text)
        failures += differences(want, got[name]["taken"], None, text) if not failures else []
        failures += differences(
            True, got[name]["the grammar is where it was"], None, f"{name}: the grammar is where it was"
        )
    assert num_taken > 100, "the languages force too little"
    for name, (sentences, spelled) in JOINED.items():
        case = f"{name}: tokens that begin {' or '.join(map(repr, sentences))}"
        failures += differences([each.decode() for each in spelled], got[name], None, case)
    return failures


def words(ids: Sequence[int]) -> list[str]:
    """Return tokens as texts that can be read."""
    return [specs.token_bytes()[token].decode(errors="backslashreplace") for token in ids]


REGISTRY.add(
    "L7.K.tokens",
    "Forced text comes in the tokens that the tokenizer would take, none that it would merge with what stands before, "
    "none that could have been longer, at most so many; the grammar is where it was.",
    tokens_probe,
    tokens_verdict,
)

# What stands before a text, and the text; by hand. ``None``: what the tokenizer gives for the text alone.
SPELLINGS: dict[str, tuple[list[int], str]] = {
    "nothing before": ([], "Once upon a time"),
    "a quote before": (spell('{"'), 'name": 7'),
    "half of a word before": (spell_bytes("On"), "ce upon"),
    "a space before": (spell_bytes("a "), "time"),
    "inside a character before": (spell_bytes("xé")[-1:], " and on"),
    "a character in three tokens before": (spell_bytes("€"), " and on"),
    "a special token before": ([1020], "Once"),
    "words, a special token and a word before": ([*spell("Once"), 1023, *spell("On")], "ce upon"),
    "a word and a special token before": ([*spell("On"), 1023], "ce upon"),
    "an empty text": (spell("Once"), ""),
}


def spellings_probe(seed: int) -> Values:
    """Spell texts after others."""
    from mini_engine.grammar.jump import JumpForward
    from mini_engine.grammar.tokens import TokenTable

    table = TokenTable(specs.token_bytes(), frozenset())
    jumper = JumpForward(tokenizer(), table)
    values = {name: [int(token) for token in jumper.spell(ids, text)] for name, (ids, text) in SPELLINGS.items()}
    # Many a tokenizer puts a special token before each text, which does not belong into the middle of an answer.
    beginning = Tokenizer.from_str(tokenizer().to_str())
    beginning.post_processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1020)])
    return {**values, "a tokenizer that marks the beginning": JumpForward(beginning, table).spell([], "Once upon")}


def spellings_verdict(seed: int, got: Values) -> list[Failure]:
    """Spell both together, and ask for the first again."""
    want = {name: specs.canonical(ids, text) for name, (ids, text) in SPELLINGS.items()}
    want["a tokenizer that marks the beginning"] = spell("Once upon")
    return differences(want, got, None)


REGISTRY.add(
    "L7.K.spellings",
    "Text after text has the tokens of both together, if those of the first stay what they are.",
    spellings_probe,
    spellings_verdict,
)
