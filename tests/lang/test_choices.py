"""Scores of choices against transformers, as lm-eval computes a log-likelihood."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from mini_engine import LLM, lang
from mini_engine.checkpoint import TINY_MODEL
from mini_engine.lang.choices import best_choice, greedy_scores


def test_choices_that_begin_alike_tie_there_without_batch_invariance():
    @lang.program
    def pick(s):
        s += "Mila found a" + lang.select("what", [" silver bell in the garden", " silver", " silver key"], "greedy")

    answer = pick.run(backend=LLM(**lang.ALWAYS_SHARE)).answer("what")
    assert len({row[0] for row in answer.logprobs}) == 1
    assert answer.value == " silver"  # it goes on with its mean, and the others with unlikely tokens


def test_scores_are_the_log_likelihoods_of_transformers(llm):
    prompt = "One day, a cat named"
    choices = [" Tom", " Mila found a red ball", " was very"]

    @lang.program
    def pick(s, method):
        s += prompt + lang.select("which", choices, method)

    peer = AutoModelForCausalLM.from_pretrained(TINY_MODEL)

    def likelihoods(context, continuation):
        ids = [*context, *continuation]
        with torch.inference_mode():
            rows = peer(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        return [float(rows[i - 1, ids[i]]) for i in range(max(len(context), 1), len(ids))]

    encode = llm.tokenizer.encode
    conditional = [likelihoods(encode(prompt), encode(choice)) for choice in choices]
    alone = [[0.0, *likelihoods([], encode(choice))] for choice in choices]
    for method in ("mean", "greedy", "unconditional"):
        answer = pick.run(method, backend=llm).answer("which")
        for own, expected in zip(answer.logprobs, conditional, strict=True):
            assert own == pytest.approx(expected, abs=5e-5)  # single tokens, in float32
        assert answer.scores["mean"] == pytest.approx(list(map(np.mean, conditional)), abs=1e-5)
        added = [float(np.mean(np.subtract(a, b))) for a, b in zip(conditional, alone, strict=True)]
        assert answer.scores["unconditional"] == pytest.approx(added, abs=1e-5)
        expected = {
            "mean": int(np.argmax(answer.scores["mean"])),
            "unconditional": int(np.argmax(added)),
            "greedy": best_choice(greedy_scores(conditional)),
        }
        assert answer.value == choices[expected[method]]
