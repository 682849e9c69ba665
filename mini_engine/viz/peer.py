"""The peer that the engine is compared with: the same checkpoint in transformers."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig


class Peer:
    """``AutoModelForCausalLM`` of a folder. ``kernel``: "eager" or "sdpa", transformers' attention implementation."""

    def __init__(self, folder: Path, dtype: str = "float32", kernel: str = "sdpa") -> None:
        """Load the checkpoint, weights in ``dtype``."""
        # Loaded in the dtype, never converted afterwards: ``.to(bfloat16)`` would round the rotary frequencies too.
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation=kernel, local_files_only=True
        ).eval()

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """Return the logits [T, V] of one sequence."""
        logits: Tensor = self.model(input_ids=torch.tensor([list(token_ids)])).logits[0]
        return logits

    @torch.inference_mode()
    def greedy(self, token_ids: Sequence[int], max_new_tokens: int, eos_token_ids: frozenset[int]) -> list[int]:
        """Return the ids that ``generate(do_sample=False)`` appends, the end-of-sequence id included."""
        prompt = torch.tensor([list(token_ids)])
        options = GenerationConfig(
            do_sample=False, max_new_tokens=max_new_tokens, eos_token_id=sorted(eos_token_ids) or None, pad_token_id=0
        )
        out = self.model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=options)
        ids: list[int] = out[0, prompt.shape[1] :].tolist()
        return ids
