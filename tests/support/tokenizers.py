"""Tokenizers of every kind that checkpoints have, trained here on a few texts, and the folders that hold them."""

import itertools
import json
import string
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from mini_engine.checkpoint import load_tokenizer
from mini_engine.texts import THINK, THINK_END, TOOL_CALL, TOOL_CALL_END
from mini_engine.tiny import corpus
from mini_engine.tiny.tokenizer import build_tokenizer, text_pieces

BOS, EOS, END_OF_TURN = "<s>", "</s>", "<|im_end|>"
MARKS = [THINK, THINK_END, TOOL_CALL, TOOL_CALL_END]
TEMPLATE = """\
{{- bos_token -}}
{%- if tools -%}{%- for tool in tools -%}{{- tool | tojson + '<tool_call>' -}}{%- endfor -%}{%- endif -%}
{%- for message in messages -%}
  {{- '[' + message.role + '] ' + message.content + (eos_token if message.role == 'assistant' else '') -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '[assistant]' -}}{%- endif -%}
"""


def texts() -> list[str]:
    """Return what is learnt from: documents of the embedded model, and characters of several bytes."""
    pieces = [piece for text in itertools.islice(corpus.documents(0), 60) for piece in text_pieces(text)]
    return [*pieces, *['{"name": "été", "age": 7, "tags": ["日本", "naïve"]}\n'] * 20, string.printable[:94]]


def byte_level() -> Tokenizer:
    """As Qwen's and Llama 3's: a token is any bytes, spelled in GPT-2's characters."""
    raw = json.loads(build_tokenizer(iter(texts()), 500).to_str())
    return Tokenizer.from_str(json.dumps(raw | {"added_tokens": []}))


def byte_fallback(prepends: bool) -> Tokenizer:
    """As Llama 2's (a normalizer that ``prepends``) and Mistral's: pieces of text, and the bytes of all else."""
    learnt = Tokenizer(models.BPE())
    learnt.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    lines = [line for text in texts() for line in text.splitlines()]  # a line break is a byte, as in SentencePiece
    learnt.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=450, limit_alphabet=60, show_progress=False))
    model = json.loads(learnt.to_str())["model"]
    pieces = ["<unk>", BOS, EOS, *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    own = Tokenizer(
        models.BPE(
            {piece: number for number, piece in enumerate(pieces)},
            [tuple(pair) for pair in model["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    if prepends:
        own.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        own.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    strip = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    own.decoder = decoders.Sequence(strip)
    return own


def metaspace() -> Tokenizer:
    """As those of SentencePiece's other algorithm: pieces of text with their probabilities, and no bytes."""
    own = Tokenizer(models.Unigram())
    own.pre_tokenizer = pre_tokenizers.Metaspace()
    own.decoder = decoders.Metaspace()
    signs = sorted(set("".join(texts())) - {" "})
    own.train_from_iterator(
        texts(),
        trainers.UnigramTrainer(
            vocab_size=500,
            initial_alphabet=signs,
            special_tokens=["<unk>"],
            unk_token="<unk>",
            show_progress=False,
        ),
    )
    return own


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": byte_level,
    "prepended": lambda: byte_fallback(prepends=True),
    "byte fallback": lambda: byte_fallback(prepends=False),
    "metaspace": metaspace,
}


@cache
def tokenizer_of(kind: str, puts_bos: bool = True, template: str = TEMPLATE) -> PreTrainedTokenizerBase:
    """Return what is loaded from the folder of a tokenizer; its post-processor ``puts_bos`` before a text."""
    own = KINDS[kind]()
    own.add_special_tokens([BOS, EOS, END_OF_TURN])
    own.add_tokens([AddedToken(mark, normalized=False, special=False) for mark in MARKS])
    if puts_bos:
        own.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, own.token_to_id(BOS))]
        )
    made = PreTrainedTokenizerFast(tokenizer_object=own, bos_token=BOS, eos_token=EOS)
    made.chat_template = template
    with TemporaryDirectory() as folder:
        made.save_pretrained(folder)
        (Path(folder) / "config.json").write_text('{"model_type": "llama"}')
        return load_tokenizer(Path(folder))


def write_folder(folder: Path, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, stops: list[str]) -> None:
    """Write a checkpoint of random weights; ``stops``: the tokens that end a text."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    ids = [tokenizer.convert_tokens_to_ids(stop) for stop in stops]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
