"""What a prompt is: the ids that transformers gives, and an error for everything else, in its place."""

from collections import deque
from functools import cache
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from mini_engine.checkpoint import TINY_MODEL, load_tokenizer
from mini_engine.cli.batch_lines import LineReader
from mini_engine.cli.cache import read_prompts
from mini_engine.prompts import each_prompt, encode_chat, encode_prompt, encode_text, opening_ids
from mini_engine.sampler.params import SamplingParams

TINY = load_tokenizer(TINY_MODEL)
TEXT = "once upon a time"
TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message.content }}</s>{% endfor %}"


def metaspace() -> Tokenizer:
    """As Llama's: the first word of a text has a space before it, also behind special tokens."""
    own = Tokenizer(models.WordLevel({word: n for n, word in enumerate(["<unk>", *"▁once ▁upon ▁a ▁time".split()])}))
    own.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    own.decoder = decoders.Metaspace(prepend_scheme="first")
    return own


TOKENIZERS = {"metaspace": metaspace, "bytes": lambda: Tokenizer.from_file(str(TINY_MODEL / "tokenizer.json"))}


@cache
def tokenizer_with(kind: str, single: str) -> PreTrainedTokenizerBase:
    """What AutoTokenizer makes of a tokenizer whose post-processor puts special tokens around a text."""
    own = TOKENIZERS[kind]()
    own.add_special_tokens(["<s>", "</s>"])
    named = [(name, own.token_to_id(name)) for name in ("<s>", "</s>")]
    own.post_processor = processors.TemplateProcessing(single=single, special_tokens=named)
    made = PreTrainedTokenizerFast(tokenizer_object=own, bos_token="<s>", eos_token="</s>")
    made.chat_template = TEMPLATE
    with TemporaryDirectory() as folder:
        made.save_pretrained(folder)
        return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize(("single", "around"), [("<s> $A", 1), ("<s> $A </s>", 2), ("$A </s>", 1), ("$A", 0)])
def test_a_text_has_the_special_tokens_that_transformers_adds(kind, single, around):
    tokenizer = tokenizer_with(kind, single)
    ids, piece = tokenizer(TEXT).input_ids, tokenizer(TEXT, add_special_tokens=False).input_ids
    assert len(ids) == len(piece) + around
    assert encode_prompt(tokenizer, TEXT) == ids
    reader = LineReader(tokenizer, SamplingParams())
    assert reader.request(TEXT)[0] == reader.request('{"prompt": "once upon a time"}')[0] == ids
    assert read_prompts([TEXT], None, tokenizer) == [(ids, TEXT)]
    assert encode_text(tokenizer, TEXT) == piece
    assert opening_ids(tokenizer) == [tokenizer.bos_token_id] * single.startswith("<s>")


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_a_tokenizer_that_adds_none_has_the_same_ids_as_without(text):
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    assert encode_prompt(TINY, text) == tokenizer(text, add_special_tokens=False).input_ids == tokenizer(text).input_ids
    assert opening_ids(TINY) == []


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("single", ["<s> $A", "<s> $A </s>"])
def test_a_chat_has_those_of_its_template_alone(kind, single):
    tokenizer, chat = tokenizer_with(kind, single), [{"role": "user", "content": TEXT}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    assert ids.count(tokenizer.bos_token_id) == 1
    assert encode_prompt(tokenizer, chat) == encode_chat(tokenizer, chat, think=True) == ids
    assert LineReader(tokenizer, SamplingParams(), chat=True).request(TEXT)[0] == ids


def test_what_transformers_makes_of_a_prompt_is_that_prompt():
    chat = [{"role": "user", "content": "Who is Ida?"}]
    for kind in (None, "np", "pt"):
        for made, prompt in (
            (TINY("Once there was", return_tensors=kind), "Once there was"),
            (TINY.apply_chat_template(chat, add_generation_prompt=True, return_tensors=kind), chat),
        ):
            assert [encode_prompt(TINY, each) for each in each_prompt(made)] == [encode_prompt(TINY, prompt)]
            assert [encode_prompt(TINY, each) for each in each_prompt([made])] == [encode_prompt(TINY, prompt)]


@pytest.mark.parametrize("kind", [None, "np", "pt"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_batch_of_transformers_is_several_prompts_without_their_padding(kind, side):
    texts = ["Once there was a fox", "a", "The owl"]
    tokenizer = load_tokenizer(TINY_MODEL)
    tokenizer.padding_side = side
    made = tokenizer(texts, padding=True, return_tensors=kind)
    assert [encode_prompt(TINY, each) for each in each_prompt(made)] == [TINY(text).input_ids for text in texts]


CHAT = [{"role": "user", "content": "a"}]
LISTS = [  # what is given, and its prompts
    ("a", ["a"]),
    (np.str_("a"), [np.str_("a")]),
    (CHAT, [CHAT]),
    ([CHAT, CHAT], [CHAT, CHAT]),
    ([5, 6], [[5, 6]]),
    ((5, 6), [(5, 6)]),
    (range(5, 7), [range(5, 7)]),
    ([np.int64(5), 6], [[np.int64(5), 6]]),
    ([5, True], [[5, True]]),
    ([5, 6.5], [[5, 6.5]]),
    ([[5], [6]], [[5], [6]]),
    ([5, "a"], [5, "a"]),
    ([None, None], [None, None]),
    ([2.5, 2.5], [2.5, 2.5]),
    (deque(["a", "b"]), ["a", "b"]),
    ([], []),
    ({"role": "user"}, [{"role": "user"}]),
    ([{"role": "user"}, "a"], [{"role": "user"}, "a"]),
    ([{"input_ids": [5]}, {"input_ids": [6]}], [{"input_ids": [5]}, {"input_ids": [6]}]),
    (None, [None]),
    (5, [5]),
    (b"a", [b"a"]),
    ({"a", "b"}, [{"a", "b"}]),
]


@pytest.mark.parametrize(("given", "prompts"), LISTS, ids=[type(given).__name__ for given, _ in LISTS])
def test_what_is_one_prompt_and_what_is_a_list_of_them(given, prompts):
    assert each_prompt(given) == prompts


GOOD = [
    ([5, 6], [5, 6]),
    ((5, 6), [5, 6]),
    ([np.int64(5), np.uint8(6)], [5, 6]),
    ({"input_ids": [5, 6]}, [5, 6]),
    ({"input_ids": [[5, 6]], "attention_mask": [[1, 1]]}, [5, 6]),
    ({"input_ids": torch.tensor([5, 6]), "attention_mask": None}, [5, 6]),
    ({"input_ids": [torch.tensor([5, 6])]}, [5, 6]),
    (np.str_("The owl"), TINY("The owl").input_ids),
]


@pytest.mark.parametrize(("prompt", "ids"), GOOD, ids=[type(prompt).__name__ for prompt, _ in GOOD])
def test_a_prompt_becomes_plain_ids(prompt, ids):
    got = encode_prompt(TINY, prompt)
    assert got == ids
    assert all(type(token) is int for token in got)


BAD = [
    (None, "None, of type NoneType"),
    (float("nan"), "nan, of type float"),
    (5, "5, of type int"),
    (np.int64(5), "of type int64"),
    (True, "True, of type bool"),
    (b"Once", "of type bytes"),
    (bytearray(b"Once"), "of type bytearray"),
    (memoryview(b"Once"), "of type memoryview"),
    ((each for each in "ab"), "of type generator"),
    ({5, 6}, "of type set"),
    ({}.keys(), "of type dict_keys"),
    (torch.tensor([5, 6]), "of type Tensor; give .*tolist"),
    (np.array([5, 6]), "of type ndarray; give .*tolist"),
    ([5, True], "the prompt holds True at 1"),
    ([5, np.True_], "the prompt holds .*True.* at 1"),
    ([5.0, 6], "the prompt holds 5.0 at 0"),
    ([5, None], "the prompt holds None at 1"),
    ([5, "6"], "the prompt holds '6' at 1"),
    ([[5, 6]], "the prompt holds .5, 6. at 0"),
    ([torch.tensor(5)], "the prompt holds tensor"),
    ({"role": "user", "content": "a"}, "without input_ids; a chat is a list of messages"),
    ({}, "without input_ids"),
    ({"input_ids": [5], "pixel_values": [0.5]}, "'pixel_values'"),
    ({"input_ids": None}, "input_ids is None"),
    ({"input_ids": 5}, "input_ids is 5"),
    ({"input_ids": "ab"}, "input_ids is 'ab'"),
    ({"input_ids": [5.5]}, "input_ids holds 5.5 at 0"),
    ({"input_ids": torch.tensor([5.0])}, "input_ids holds 5.0 at 0"),
    ({"input_ids": [[5], [6]]}, "input_ids holds .5. at 0"),
    ({"input_ids": [5, 6], "attention_mask": [1]}, "attention_mask is .1.; give"),
    ({"input_ids": [5, 6], "attention_mask": [1, 2]}, "attention_mask"),
    ([{"role": 5, "content": "a"}], "message 0 of the chat has the role 5"),
    ([{"content": "a"}], "has the role None"),
    ([*CHAT, {"role": "user", "content": float("nan")}], "message 1 of the chat has the content nan"),
    ([{"role": "user"}], "has the content None"),
    ([{"role": "user", "content": ["a"]}], "has the content"),
    ([{"role": "user", "content": "a"}, "b"], "the prompt holds .* at 0"),
    ("\ud800", "not a character"),
]


@pytest.mark.parametrize(("prompt", "message"), BAD, ids=[type(prompt).__name__ for prompt, _ in BAD])
def test_what_is_no_prompt_is_a_value_error_that_shows_it(prompt, message):
    with pytest.raises(ValueError, match=message):
        encode_prompt(TINY, prompt)
