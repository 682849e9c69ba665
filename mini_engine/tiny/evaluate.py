"""How good the embedded model is: ``python -m mini_engine.tiny.evaluate``, on prompts that training never saw.

Every prompt names people whose names are held out (``corpus.is_held_out``). So a right answer is copied from the prompt
and not remembered. The greedy driver of the course generates the answers. transformers samples the texts at a
temperature, because sampling is a later lesson.
"""

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from mini_engine.checkpoint import TINY_MODEL, load_tokenizer
from mini_engine.config import EngineConfig
from mini_engine.driver import GreedyDriver
from mini_engine.llm import load_driver
from mini_engine.tiny import corpus
from mini_engine.tiny.corpus import Task

MAX_NEW_TOKENS = 350


@dataclass(frozen=True)
class Figure:
    """One measured share: its name, ``right`` of ``total``, and the least share that is good enough."""

    name: str
    right: int
    total: int
    wanted: float

    @property
    def reached(self) -> bool:
        """Whether the share is at least ``wanted``."""
        return self.right >= self.wanted * self.total


def answer_of(text: str) -> str:
    """Return what follows the think block."""
    return text.rsplit(corpus.THINK_END, maxsplit=1)[-1].strip()


def uses_name_and_animal(task: Task, text: str) -> bool:
    """Whether a story holds the name and the animal of its prompt, as whole words."""
    words = set(re.findall(r"\w+", answer_of(text)))
    return {task.facts["name"], task.facts["animal"]} <= words


def parses(task: Task, text: str) -> bool:
    """Whether the answer is exactly one JSON object."""
    try:
        return isinstance(json.loads(answer_of(text)), dict)
    except json.JSONDecodeError:
        return False


def every_field_right(task: Task, text: str) -> bool:
    """Whether a record's answer is valid JSON with exactly the fields of the prompt."""
    return parses(task, text) and json.loads(answer_of(text)) == task.facts


def gives_the_fact(task: Task, text: str) -> bool:
    """Whether the answer to a question holds the asked word."""
    return str(task.facts["answer"]) in answer_of(text)


def generate_answers(
    driver: GreedyDriver, tokenizer: PreTrainedTokenizerBase, tasks: Sequence[Task], name: str
) -> list[str]:
    """Answer every task greedily through the chat template."""
    answers = []
    for task in tqdm(tasks, desc=name, unit="prompt"):
        messages = [{"role": "user", "content": task.prompt}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        generation = driver.generate(tokenizer.encode(text, add_special_tokens=False), MAX_NEW_TOKENS)
        answers.append(tokenizer.decode(generation.token_ids, skip_special_tokens=True))
    return answers


def measure(folder: Path, count: int, seed: int) -> list[Figure]:
    """Ask ``count`` prompts of each kind and count the right answers."""
    driver = load_driver(folder, EngineConfig(compute="packed"))
    tokenizer = load_tokenizer(folder)
    kinds: list[tuple[str, Callable[..., Task], dict[str, tuple[Callable[[Task, str], bool], float]]]] = [
        ("stories", corpus.story_task, {"a story uses its name and animal": (uses_name_and_animal, 0.9)}),
        (
            "records",
            corpus.record_task,
            {
                "a record is valid JSON": (parses, 0.98),
                "a record has every field right": (every_field_right, 0.8),
            },
        ),
        ("facts", corpus.facts_task, {"a fact is given back": (gives_the_fact, 0.5)}),
    ]
    figures = []
    for name, make, questions in kinds:
        rng = random.Random(f"evaluate/{seed}/{name}")
        tasks = [make(rng, held_out=True) for _ in range(count)]
        answers = generate_answers(driver, tokenizer, tasks, name)
        for question, (is_right, wanted) in questions.items():
            right = sum(is_right(task, answer) for task, answer in zip(tasks, answers, strict=True))
            figures.append(Figure(question, right, count, wanted))
    return figures


def sample_texts(folder: Path, count: int, seed: int) -> list[tuple[str, str]]:
    """Sample ``count`` continuations at temperature 0.7, top_p 0.9 with transformers -> (prompt, text) each."""
    torch.manual_seed(seed)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    rng = random.Random(f"samples/{seed}")
    samples = []
    for index in range(count):
        if index % 2:
            prompt = corpus.story_task(rng, held_out=True).prompt
            messages = [{"role": "user", "content": prompt}]
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, enable_thinking=False
            )
        else:
            cast = corpus.make_cast(rng, held_out=True)
            text = prompt = f"Once upon a time there was {corpus.with_article(cast.animal)} named {cast.name}"
        inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
        out = model.generate(
            **inputs, do_sample=True, temperature=0.7, top_p=0.9, top_k=0, max_new_tokens=MAX_NEW_TOKENS
        )
        generated = tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        samples.append((prompt, " ".join(generated.split())))
    return samples


def main(
    model: Annotated[Path, typer.Option(help="Folder of the model.")] = TINY_MODEL,
    count: Annotated[int, typer.Option(help="Prompts of each kind.", min=1)] = 200,
    samples: Annotated[int, typer.Option(help="Texts to sample at temperature 0.7.", min=0)] = 20,
    seed: Annotated[int, typer.Option(help="Seed of the prompts.")] = 0,
) -> None:
    """Measure the embedded model; exit with 1 if a figure is below what is wanted. Last line: JSON."""
    figures = measure(model, count, seed)
    for figure in figures:
        share = f"{figure.right}/{figure.total} = {figure.right / figure.total:.1%}"
        typer.echo(f"{figure.name:36} {share:18} wanted {figure.wanted:.0%}  {'ok' if figure.reached else 'BELOW'}")
    for prompt, text in sample_texts(model, samples, seed):
        typer.echo(f"\n> {prompt}\n{text}")
    shares = {figure.name: figure.right / figure.total for figure in figures}
    typer.echo(json.dumps({"seed": seed, "count": count, "shares": shares}))
    if not all(figure.reached for figure in figures):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
