"""The tokenizer of the embedded model: byte-level BPE with the special tokens and a chat template of Qwen3.

The splitting rule is the one that Qwen's tokenizers publish: words with one leading space, and single digits.
"""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from mini_engine.tiny import corpus

CONTROL_TOKENS = (corpus.END_OF_TEXT, corpus.IM_START, corpus.IM_END)
THINK_TOKENS = (corpus.THINK, corpus.THINK_END)  # one id each, but text to the reader: decoding never hides them
SPECIAL_TOKENS = CONTROL_TOKENS + THINK_TOKENS
VOCAB_SIZE = 1024
TRAINING_DOCUMENTS = 20_000

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Earlier answers lose their think block, the last one keeps it, and `enable_thinking=False` opens with an empty
# block: the three rules of Qwen3's template that a conversation depends on. Tools, calls and their results have its
# form too, though the model was trained without them.
CHAT_TEMPLATE = """\
{%- set turn = namespace(last_user=-1) -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}{%- set turn.last_user = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- if tools -%}
  {{- '<|im_start|>system\\n' -}}
  {%- if messages[0].role == 'system' -%}{{- messages[0].content + '\\n\\n' -}}{%- endif -%}
  {{- '# Tools\\n\\nYou may call functions. Their signatures are within <tools></tools>:\\n<tools>' -}}
  {%- for tool in tools -%}{{- '\\n' + tool | tojson -}}{%- endfor -%}
  {{- '\\n</tools>\\n\\nFor each call return its name and arguments as JSON within <tool_call></tool_call>:' -}}
  {{- '\\n<tool_call>\\n{"name": <name>, "arguments": <object>}\\n</tool_call><|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
  {%- set text = message.content or '' -%}
  {%- if message.role == 'assistant' and loop.index0 < turn.last_user and '</think>' in text -%}
    {%- set text = text.split('</think>')[-1].lstrip('\\n') -%}
  {%- endif -%}
  {%- if message.role == 'tool' -%}
    {%- if loop.first or loop.previtem.role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
    {{- '\\n<tool_response>\\n' + text + '\\n</tool_response>' -}}
    {%- if loop.last or loop.nextitem.role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
  {%- elif not (tools and loop.first and message.role == 'system') -%}
    {{- '<|im_start|>' + message.role + '\\n' + text -}}
    {%- for call in message.tool_calls or () -%}
      {%- if text or not loop.first -%}{{- '\\n' -}}{%- endif -%}
      {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
      {{- call.function.arguments | tojson + '}\\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\\n' -}}
  {%- if enable_thinking is defined and not enable_thinking -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}
{%- endif -%}
"""


def build_tokenizer(texts: Iterator[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Train a byte-level BPE of exactly ``vocab_size`` entries: 256 bytes, the merges, then the special tokens last."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # A special token is never learnt from: the pieces between them are.
    tokenizer.train_from_iterator((piece for text in texts for piece in text_pieces(text)), trainer)
    tokenizer.add_special_tokens(list(CONTROL_TOKENS))
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in THINK_TOKENS])
    return tokenizer


def text_pieces(text: str) -> list[str]:
    """Cut ``text`` at its special tokens and drop them."""
    for token in SPECIAL_TOKENS:
        text = text.replace(token, "\0")
    return [piece for piece in text.split("\0") if piece]


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``, which ``AutoTokenizer.from_pretrained`` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": corpus.IM_END,
        "pad_token": corpus.END_OF_TEXT,
        "additional_special_tokens": [corpus.IM_START],
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def train_tokenizer(seed: int) -> Tokenizer:
    """Train the embedded model's tokenizer on the first documents of the corpus."""
    return build_tokenizer(itertools.islice(corpus.documents(seed), TRAINING_DOCUMENTS))
