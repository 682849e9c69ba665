"""Specs of L7's language in small: a few sentences, read as bytes, and what may follow a beginning of one.

Owns: bytes of the embedded tokenizer's tokens, allowed tokens by trying each, forced bytes by comparing sentences, and
tokens that may be appended for them. Must not know: the engine, automata.
"""

from collections.abc import Collection, Sequence
from functools import cache

from smoke.checks.l5.spec_text import tokenizer

LOOK_BACK = 2  # tokens in front of a text that it could merge with


def byte_of_character() -> dict[str, int]:
    """Return the byte for which each character of a byte-level vocabulary stands."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = sorted(set(range(256)) - set(shown))
    return {chr(byte): byte for byte in shown} | {chr(256 + index): byte for index, byte in enumerate(hidden)}


@cache
def token_bytes() -> tuple[bytes, ...]:
    """Return the bytes of every token of the embedded tokenizer, none for added ones."""
    byte_of = byte_of_character()
    added = set(tokenizer().get_added_tokens_decoder())
    found = [b""] * tokenizer().get_vocab_size()
    for token, number in tokenizer().get_vocab().items():
        if number not in added:
            found[number] = bytes(byte_of[character] for character in token)
    return tuple(found)


def spelled(ids: Sequence[int]) -> bytes:
    """Return the bytes of tokens in a row."""
    return b"".join(token_bytes()[token] for token in ids)


def rests(sentences: Sequence[str], said: bytes) -> list[bytes]:
    """Return what can follow ``said``, for every sentence that begins so."""
    whole = [sentence.encode() for sentence in sentences]
    return [sentence[len(said) :] for sentence in whole if sentence.startswith(said)]


def allowed(sentences: Sequence[str], said: bytes, stops: Sequence[int], spellings: Sequence[bytes] = ()) -> set[int]:
    """Return the tokens that may come next, by trying each one; ``spellings``: of another vocabulary."""
    left = rests(sentences, said)
    tokens = enumerate(spellings or token_bytes())
    fitting = {token for token, each in tokens if each and any(rest.startswith(each) for rest in left)}
    return fitting | (set(stops) if b"" in left else set())


def forced(sentences: Sequence[str], said: bytes) -> bytes:
    """Return the bytes that must follow: those in which all rests agree, none where a sentence could end."""
    return agreement(rests(sentences, said))


def agreement(words: Collection[bytes]) -> bytes:
    """Return the bytes in which all words begin alike."""
    first = min(words, default=b"")
    last = max(words, default=b"")  # what these two share, those in between do, too
    count = 0
    while count < min(len(first), len(last)) and first[count] == last[count]:
        count += 1
    return first[:count]


def characters(data: bytes) -> str:
    """Return the text of ``data`` without the character in which it ends; empty if it begins inside of one."""
    for cut in range(min(4, len(data) + 1)):
        try:
            return data[: len(data) - cut].decode()
        except UnicodeDecodeError:
            continue
    return ""


def canonical(ids: Sequence[int], text: str, look_back: int = LOOK_BACK) -> list[int]:
    """Return the tokens in which the tokenizer spells ``text`` after ``ids``, none if it merges the two."""
    before = list(ids[-look_back:])
    special = [place for place, token in enumerate(before) if not token_bytes()[token]]
    before = before[special[-1] + 1 :] if special else before  # nothing merges with a special token
    try:
        context = spelled(before).decode()
    except UnicodeDecodeError:
        before = []
        context = ""
    whole = list(tokenizer().encode(context + text, add_special_tokens=False).ids)
    return whole[len(before) :] if whole[: len(before)] == before else []


def appended(sentences: Sequence[str], ids: Sequence[int], most: int) -> list[int]:
    """Return the tokens that may be appended: of the forced text, up to the first that could have been a longer one."""
    said = spelled(ids)
    text = characters(forced(sentences, said))
    left = text.encode()
    taken = list[int]()
    for token in canonical(ids, text) if text else []:
        each = token_bytes()[token]
        longer = {t for t in allowed(sentences, said, ()) if len(token_bytes()[t]) > len(left)}
        if len(taken) >= most or not each or not left.startswith(each) or longer:
            break
        taken.append(token)
        said = said + each
        left = left[len(each) :]
    return taken
