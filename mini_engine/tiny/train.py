"""Train the embedded model: ``python -m mini_engine.tiny.train`` writes the same weights from the same seed.

The model is ``Qwen3ForCausalLM`` of transformers, so that its folder loads there, and the engine has to match it.
Training takes about 50 minutes on two CPU cores (bf16 autocast), and resumes from its last checkpoint.
"""

import itertools
import json
import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Self

import numpy as np
import torch
import typer
from tokenizers import Tokenizer
from tqdm import tqdm
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from mini_engine.tiny import corpus
from mini_engine.tiny.tokenizer import VOCAB_SIZE, save_tokenizer, train_tokenizer

SEED = 0
TOKENS_PER_STEP = 8192
STEPS_PER_BLOCK = 100  # the corpus is drawn block by block, each from its own seed, so that a run can resume
MUON_LR = 0.02
ADAM_LR = 3e-3
WARMUP = 100


@dataclass(frozen=True)
class Phase:
    """A stretch of training with fresh optimisers: ``steps``, the text, and a factor on the learning rates."""

    steps: int
    mixture: corpus.Mixture
    lr_factor: float


# The second phase teaches to copy names of any spelling, and asks more of the small facts.
PHASES = (
    Phase(6000, corpus.Mixture(), lr_factor=1.0),
    Phase(600, corpus.Mixture(corpus.make_odd_name, weights=(30, 20, 50)), lr_factor=0.5),
)


def model_config(tokenizer: Tokenizer) -> Qwen3Config:
    """Return the shape: 5 layers, 6 query and 2 key-value heads of 32, tied head; 1.2 M parameters."""
    return Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        num_hidden_layers=5,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=384,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(corpus.IM_END),
        pad_token_id=tokenizer.token_to_id(corpus.END_OF_TEXT),
    )


def pack_rows(tokenizer: Tokenizer, documents: Iterator[str], count: int, length: int) -> np.ndarray:
    """Fill ``count`` rows of ``length`` ids with documents, each row starting with a new one -> [count, length]."""
    rows = np.empty((count, length), dtype=np.int64)
    encoded = (e.ids for chunk in batched(documents, 512) for e in tokenizer.encode_batch(chunk))
    for row in rows:
        ids: list[int] = []
        while len(ids) < length:
            ids.extend(next(encoded))
        row[:] = ids[:length]
    return rows


def batched(items: Iterator[str], size: int) -> Iterator[list[str]]:
    """Cut an endless iterator into lists of ``size``."""
    while chunk := list(itertools.islice(items, size)):
        yield chunk


def batches(tokenizer: Tokenizer, phase: Phase, first_step: int, seed: str) -> Iterator[torch.Tensor]:
    """Yield one [rows, length] batch a step. Rows are 256 long, and 512 in the last fifth, for far positions."""
    for block in range(first_step // STEPS_PER_BLOCK, -(-phase.steps // STEPS_PER_BLOCK)):
        length = 512 if block * STEPS_PER_BLOCK >= 0.8 * phase.steps else 256
        per_step = TOKENS_PER_STEP // length
        # Seeds are spaced so that no block shares its documents with another or with the tokenizer's sample.
        documents = corpus.documents(random.Random(f"{seed}/{block}").getrandbits(64), phase.mixture)
        rows = pack_rows(tokenizer, documents, per_step * STEPS_PER_BLOCK, length)
        yield from torch.from_numpy(rows).split(per_step)


def make_optimizers(model: Qwen3ForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for the embedding and the norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=MUON_LR, weight_decay=0.01),
        torch.optim.AdamW(others, lr=ADAM_LR, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def lr_scale(step: int, steps: int) -> float:
    """Warm up linearly, stay flat for 40 % of the run, then fall linearly to zero."""
    return min(1.0, (step + 1) / WARMUP, (steps - step) / (0.6 * steps))


def train_step(
    model: Qwen3ForCausalLM, optimizers: list[torch.optim.Optimizer], batch: torch.Tensor, scale: float
) -> float:
    """Take one step on ``batch`` [rows, length] and return the mean next-token loss in nats. Mutates the model."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(input_ids=batch, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer, lr in zip(optimizers, (MUON_LR, ADAM_LR), strict=True):
        for group in optimizer.param_groups:
            group["lr"] = lr * scale
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.detach())


def save_model(model: Qwen3ForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the Hugging Face folder: config, generation config, fp32 safetensors, tokenizer."""
    model.generation_config = GenerationConfig(
        eos_token_id=[tokenizer.token_to_id(corpus.IM_END), tokenizer.token_to_id(corpus.END_OF_TEXT)],
        pad_token_id=tokenizer.token_to_id(corpus.END_OF_TEXT),
    )
    model.save_pretrained(folder)
    save_tokenizer(tokenizer, folder, model.config.max_position_embeddings)


@dataclass
class Progress:
    """Where a run stands; saved every block, so that it can resume."""

    phase: int
    step: int  # within the phase

    def save(self, file: Path, model: Qwen3ForCausalLM, optimizers: list[torch.optim.Optimizer]) -> None:
        """Write everything that the next step depends on to ``file``, at once or not at all."""
        states = [optimizer.state_dict() for optimizer in optimizers]
        state = {"phase": self.phase, "step": self.step, "model": model.state_dict(), "optimizers": states}
        torch.save(state, file.with_suffix(".part"))
        file.with_suffix(".part").replace(file)

    @classmethod
    def load(cls, file: Path, model: Qwen3ForCausalLM, optimizers: list[torch.optim.Optimizer]) -> Self:
        """Read ``file`` into ``model`` and ``optimizers`` (mutates both), or start at the beginning without one."""
        if not file.exists():
            return cls(phase=0, step=0)
        state = torch.load(file, weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        return cls(state["phase"], state["step"])


def run(out: Path, phases: Sequence[Phase], seed: int) -> None:
    """Train from the last checkpoint in ``out/.training`` (or from nothing) and save the folder ``out``."""
    torch.manual_seed(seed)
    tokenizer = train_tokenizer(seed)
    model = Qwen3ForCausalLM(model_config(tokenizer))
    optimizers = make_optimizers(model)
    state_file = out / ".training" / "state.pt"
    state_file.parent.mkdir(parents=True, exist_ok=True)
    progress = Progress.load(state_file, model, optimizers)
    for index in range(progress.phase, len(phases)):
        if index > progress.phase:
            progress = Progress(index, 0)
            optimizers = make_optimizers(model)
        run_phase(model, optimizers, tokenizer, phases[index], progress, state_file, seed)
    save_model(model, tokenizer, out)
    steps = sum(phase.steps for phase in phases)
    record = {"seed": seed, "steps": steps, "tokens": steps * TOKENS_PER_STEP, "torch": torch.__version__}
    (out / "training.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    shutil.rmtree(state_file.parent)


def run_phase(
    model: Qwen3ForCausalLM,
    optimizers: list[torch.optim.Optimizer],
    tokenizer: Tokenizer,
    phase: Phase,
    progress: Progress,
    state_file: Path,
    seed: int,
) -> None:
    """Take the remaining steps of one phase. Mutates the model, the optimisers and the progress."""
    name = f"phase {progress.phase + 1}"
    # The first phase's blocks are named by the seed alone.
    text_seed = f"{seed}/phase{progress.phase}" if progress.phase else f"{seed}"
    with tqdm(total=phase.steps, initial=progress.step, desc=name, unit="step") as bar:
        for batch in batches(tokenizer, phase, progress.step, text_seed):
            loss = train_step(model, optimizers, batch, phase.lr_factor * lr_scale(progress.step, phase.steps))
            progress.step += 1
            bar.update()
            if progress.step % STEPS_PER_BLOCK == 0:
                bar.set_postfix(loss=f"{loss:.3f}")
                progress.save(state_file, model, optimizers)


def main(
    out: Annotated[Path, typer.Option(help="Folder to write.")] = Path("tiny-model"),
    shorten: Annotated[int, typer.Option(help="Divide the steps by this, for a quick try.", min=1)] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the corpus and of the initial weights.")] = SEED,
) -> None:
    """Train the embedded model from scratch on the corpus that this package writes."""
    blocks = [max(1, phase.steps // STEPS_PER_BLOCK // shorten) for phase in PHASES]
    run(out, [replace(phase, steps=n * STEPS_PER_BLOCK) for phase, n in zip(PHASES, blocks, strict=True)], seed)


if __name__ == "__main__":
    typer.run(main)
