"""Grammars, stop strings, thoughts, calls and prompts with each kind of tokenizer, trained here.

What a token stands for is what the library's decoder writes for it behind other text; prompts are those of
transformers.
"""

import ast
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig

from mini_engine.cli.tables import token_text
from mini_engine.detokenizer import Detokenizer
from mini_engine.grammar.backends import make_backend
from mini_engine.grammar.base import GrammarOptions
from mini_engine.grammar.masks import unpack_allowed
from mini_engine.grammar.tokens import TokenizerNotSupportedError, TokenTable
from mini_engine.llm import LLM
from mini_engine.prompts import encode_chat, encode_prompt, encode_text
from mini_engine.sampler.params import SamplingParams
from mini_engine.server.hermes import CallReader
from mini_engine.server.steps import text_of
from mini_engine.server.thoughts import Thoughts
from mini_engine.server.token_text import TokenTexts
from mini_engine.texts import THINK, is_thought_open
from tests.support.tokenizers import BOS, END_OF_TURN, EOS, KINDS, texts, tokenizer_of, write_folder

LIBRARIES = {"xgrammar": "xgrammar", "llguidance": "llguidance", "outlines": "outlines_core", "fsm": "numpy"}
SENTENCES = ["été", "ét日 x", " a", "  a", "naïve: 7", 'n"\n']
CHAT = [{"role": "user", "content": "Who is Ida?"}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["été", "日本", "Ida\n"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def table_of(kind: str) -> TokenTable:
    tokenizer = tokenizer_of(kind)
    columns = tokenizer.backend_tokenizer.get_vocab_size() + 3  # a head is often longer
    return TokenTable.from_tokenizer(tokenizer.backend_tokenizer, columns, frozenset({tokenizer.eos_token_id}))


def spelling_of(kind: str, text: str) -> list[int]:
    """Return tokens that spell a text within another, the longest first."""
    table, rest, ids = table_of(kind), text.encode(), list[int]()
    longest_first = sorted(range(table.vocab_size), key=lambda token: -len(table.token_bytes[token]))
    while rest:
        ids.append(next(t for t in longest_first if table.token_bytes[t] and rest.startswith(table.token_bytes[t])))
        rest = rest[len(table.token_bytes[ids[-1]]) :]
    return ids


def decoded(kind: str, ids: list[int]) -> str:
    """Return what ids add to a text, as the library decodes them."""
    tokenizer = tokenizer_of(kind).backend_tokenizer
    before = tokenizer.encode("Once", add_special_tokens=False).ids
    return tokenizer.decode([*before, *ids]).removeprefix(tokenizer.decode(before))


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_in_a_row_have_the_bytes_that_the_decoder_writes(kind: str) -> None:
    table, drawn = table_of(kind), random.Random(0)
    own = [token for token, spelling in enumerate(table.token_bytes) if spelling]
    assert len(own) >= tokenizer_of(kind).backend_tokenizer.get_vocab_size() - 7
    rows = [[token] for token in own] + [drawn.choices(own, k=drawn.choice([2, 3, 6])) for _ in range(4000)]
    num_read = 0
    for ids in rows:
        spelled = b"".join(table.token_bytes[token] for token in ids)
        try:
            text = spelled.decode()
        except UnicodeDecodeError:
            assert "\ufffd" in decoded(kind, ids)
            continue
        num_read += 1
        assert decoded(kind, ids) == text
        alone = tokenizer_of(kind).backend_tokenizer.decode(ids)  # at the beginning a space may be left out
        assert text.endswith(alone)
        assert not text.removesuffix(alone).strip(" ")
    assert num_read > 900
    bytes_alone = {spelling for spelling in table.token_bytes if len(spelling) == 1}
    assert kind == "metaspace" or len(bytes_alone) == 256


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "metaspace"])
def test_a_grammar_library_reads_the_same_bytes(kind: str) -> None:
    xgrammar = pytest.importorskip("xgrammar")
    tokenizer, table = tokenizer_of(kind), table_of(kind)
    read = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=table.vocab_size, stop_token_ids=[0])
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    for token in range(table.vocab_size - 3):
        assert token in added or table.token_bytes[token] == read.decoded_vocab[token]


DEPENDENT = {
    "none": None,
    "words": decoders.WordPiece(),
    "ends of words": decoders.BPEDecoder(),
    "replaces across tokens": decoders.Sequence([decoders.Fuse(), decoders.Replace("aa", "b")]),
    "strips the end": decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 1)]),
}


@pytest.mark.parametrize("decoder", DEPENDENT)
def test_tokens_whose_text_depends_on_their_neighbours_are_refused(decoder: str) -> None:
    tokenizer = Tokenizer(models.WordLevel({"aa": 0, "a": 1, " ": 2}, unk_token="a"))
    if decoder != "none":
        tokenizer.decoder = DEPENDENT[decoder]
    with pytest.raises(TokenizerNotSupportedError, match="whose texts are those of its tokens in a row"):
        TokenTable.from_tokenizer(tokenizer, 3, frozenset())


def test_a_name_beyond_the_byte_characters_stands_for_itself() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "a b": 1, "日": 2, "Ġé": 3}, unk_token="a"))
    tokenizer.decoder = decoders.ByteLevel()
    read = TokenTable.from_tokenizer(tokenizer, 4, frozenset()).token_bytes
    assert read[:3] == tuple(tokenizer.decode([token]).encode() for token in range(3))
    assert read[3] == b" \xe9", "a part of a character"


@pytest.mark.parametrize("backend", LIBRARIES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_has_the_tokens_whose_text_goes_on_with_a_sentence(kind: str, backend: str) -> None:
    """By trying each: at the beginning, and after every token of some spelling of each sentence."""
    pytest.importorskip(LIBRARIES[backend])
    tokenizer, table = tokenizer_of(kind), table_of(kind)
    own = make_backend(backend, table, GrammarOptions())
    grammar = own.build("regex", "|".join(map(re.escape, SENTENCES)))
    for sentence in SENTENCES:
        ids = spelling_of(kind, sentence)
        for count in range(len(ids) + 1):
            said = b"".join(table.token_bytes[token] for token in ids[:count])
            rests = [each.encode()[len(said) :] for each in SENTENCES if each.encode().startswith(said)]
            wanted = {t for t, own in enumerate(table.token_bytes) if own and any(r.startswith(own) for r in rests)}
            mask = grammar.allocate_vocab_mask(table.vocab_size, 1)
            grammar.fill_vocab_mask(mask, 0)
            allowed = ~mask[0] if backend == "outlines" else unpack_allowed(mask, table.vocab_size)[0]
            ends = {tokenizer.eos_token_id} if b"" in rests else set()
            assert set(allowed.nonzero()[:, 0].tolist()) == wanted | ends
            if count < len(ids):
                grammar.accept_token(ids[count])
        grammar.rollback(len(ids))


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A kind, and the folder of a model with random weights that has such a tokenizer."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    path, tokenizer = tmp_path_factory.mktemp("model"), tokenizer_of(request.param)
    config = LlamaConfig(
        vocab_size=len(tokenizer) + 3,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        initializer_range=0.2,
    )
    write_folder(path, config, tokenizer, [EOS, END_OF_TURN])
    yield request.param, path
    torch.set_num_threads(before)


@pytest.mark.parametrize("backend", ["fsm", "xgrammar", "llguidance", "outlines"])
def test_an_answer_keeps_to_its_grammar_as_it_is_shown(folder: tuple[str, Path], backend: str) -> None:
    pytest.importorskip(LIBRARIES[backend])
    pattern = r"[a-zé ]{3,9}: (日本|naïve)\n"
    asked = [{"json_schema": SCHEMA}, {"regex": pattern}] * 4
    params = [SamplingParams(**each, seed=n, temperature=1.0, max_new_tokens=90) for n, each in enumerate(asked)]
    with LLM(folder[1], grammar_backend=backend, jump_forward=backend != "outlines") as llm:
        answers = llm.generate(["Once upon a time"] * 8, params)
        assert {answer.finish_reason for answer in answers} == {"stop"}
        for answer in answers[::2]:
            jsonschema.validate(json.loads(answer.text), SCHEMA)
        assert all(re.fullmatch(pattern, answer.text) for answer in answers[1::2])
        for answer in answers:
            whole = llm.tokenizer.decode([*answer.prompt_ids, *answer.token_ids], skip_special_tokens=True)
            assert whole == "Once upon a time" + answer.text


def test_forced_text_is_spelled_as_the_tokenizer_spells_it_behind_the_prompt(folder: tuple[str, Path]) -> None:
    """The model is asked for the first token, and wants the tokenizer's."""
    prompt, forced = "Once:\n", '{"name": "été", "tags": ["日本 naïve", "Once upon a time"]}'
    tokenizer = tokenizer_of(folder[0])
    whole, count = tokenizer.encode(prompt + forced), len(tokenizer.encode(prompt))
    pattern = re.sub(r"([\[\]{}])", r"\\\1", forced)
    params = SamplingParams(regex=pattern, logit_bias={whole[count]: 90.0}, max_new_tokens=90)
    with LLM(folder[1], grammar_backend="fsm", jump_forward=True) as llm:
        (answer,) = llm.generate(prompt, params)
    assert answer.text == forced
    assert answer.prompt_ids + answer.token_ids[:-1] == whole
    assert answer.grammar_stats is not None
    assert answer.grammar_stats.num_forced_tokens >= len(answer.token_ids) - 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_comes_whole_in_pieces_and_ends_before_a_stop_string(kind: str) -> None:
    tokenizer, drawn = tokenizer_of(kind), random.Random(1)
    for text in [*texts()[:12], 'He said: {"name": "été"} and 日本 naïve.']:
        ids = tokenizer.encode(text, add_special_tokens=False)
        cut = drawn.randint(1, max(1, len(ids) - 1))
        answer = tokenizer.decode(ids).removeprefix(tokenizer.decode(ids[:cut]))
        start = drawn.randrange(max(1, len(answer) - 3))
        for stop in (None, answer[start : start + 3] or "x"):
            detokenizer, shown = Detokenizer(tokenizer.backend_tokenizer, [stop] if stop else []), ""
            for token in ids[cut:]:
                shown += detokenizer.add(token)
                if detokenizer.matched is not None:
                    break
            assert shown + detokenizer.flush() == (answer.partition(stop)[0] if stop else answer)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_that_are_reported_have_the_bytes_of_the_answer(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    reported = TokenTexts(tokenizer)
    text = 'He said: {"name": "été"} and\n日本 naïve.'
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(map(reported.bytes_of, ids)).decode().removeprefix(" ") == text
    snow = tokenizer.encode("☃", add_special_tokens=False)
    if kind != "metaspace":
        assert [reported.text_of(token) for token in snow[-3:]] == ["bytes:\\xe2", "bytes:\\x98", "bytes:\\x83"]


def test_single_tokens_are_shown_with_their_spaces(folder: tuple[str, Path]) -> None:
    text = "Once upon a time,  two spaces"
    with LLM(folder[1]) as llm:
        ids = llm.tokenizer.encode(text, add_special_tokens=False)
        on_page = [text_of(llm.engine, [token]) for token in ids]
        in_tables = [ast.literal_eval(token_text(llm.tokenizer, token)) for token in ids]
    assert on_page == in_tables
    assert "".join(on_page).removeprefix(" ") == text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_open", [False, True])
def test_a_thought_is_taken_out_of_what_a_model_has_learnt_to_write(kind: str, is_open: bool) -> None:
    """Some tokenizers write a space behind a mark, where a text begins anew for them."""
    tokenizer = tokenizer_of(kind)
    backend = tokenizer.backend_tokenizer
    assert is_thought_open(backend, encode_text(tokenizer, f"Who?{THINK}\n" if is_open else "Who?")) is is_open
    assert is_thought_open(backend, encode_text(tokenizer, f"{THINK}\nhm</think>\n\n")) is None
    learnt = tokenizer.encode(f"{THINK}\nhm, so\n</think>\n\n I ask.", add_special_tokens=False)
    detokenizer, thoughts = Detokenizer(backend), Thoughts(is_open)
    split = [thoughts.add(detokenizer.add(token)) for token in learnt[is_open:]]
    split += [thoughts.add(detokenizer.flush()), thoughts.flush()]
    assert ["".join(part) for part in zip(*split, strict=True)] == ["hm, so", " I ask."]


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_is_read_from_the_tokens_that_its_grammar_allows(kind: str) -> None:
    written = 'I ask.\n<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>'
    detokenizer, reader = Detokenizer(tokenizer_of(kind).backend_tokenizer), CallReader(["f"])
    ids = spelling_of(kind, written)
    assert tokenizer_of(kind).convert_tokens_to_ids("<tool_call>") in ids
    pieces = [piece for token in ids for piece in reader.add(detokenizer.add(token))]
    assert "".join(piece.text for piece in pieces if piece.call is None) == "I ask."
    assert "".join(piece.text for piece in pieces if piece.call == 0) == '{"a": "é"}'
    assert [piece.name for piece in pieces if piece.name] == ["f"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("puts_bos", [True, False])
def test_a_prompt_has_one_bos_and_the_ids_of_transformers(kind: str, puts_bos: bool) -> None:
    tokenizer = tokenizer_of(kind, puts_bos)
    turns = [*CHAT, {"role": "assistant", "content": "A fox, été 日本."}, {"role": "user", "content": "  why?\n"}]
    for messages, more in ((CHAT, {}), (turns, {}), (turns, {"tools": [{"type": "function"}]})):
        ids = encode_chat(tokenizer, messages, True, **more)
        assert ids == tokenizer.apply_chat_template(messages, add_generation_prompt=True, **more)["input_ids"]
        assert ids.count(tokenizer.bos_token_id) == 1
        rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **more)
        assert encode_prompt(tokenizer, rendered) == ids, "a template's text sent as a completion"
    text = "Once upon a time"
    assert encode_prompt(tokenizer, text) == tokenizer(text)["input_ids"]
    assert encode_prompt(tokenizer, text).count(tokenizer.bos_token_id) == puts_bos
    assert encode_prompt(tokenizer, BOS + text).count(tokenizer.bos_token_id) == 1


def test_each_token_that_ends_a_text_ends_it(folder: tuple[str, Path]) -> None:
    stops = tokenizer_of(folder[0]).convert_tokens_to_ids([EOS, END_OF_TURN])
    with LLM(folder[1]) as llm:
        asked = [SamplingParams(logit_bias={stop: 90.0}, **more) for stop in stops for more in ({}, {"regex": "a*"})]
        answers = llm.generate(["Once upon a time"] * 4, asked)
    assert [answer.matched for answer in answers] == [stops[0]] * 2 + [stops[1]] * 2
    assert {answer.finish_reason for answer in answers} == {"stop"}
