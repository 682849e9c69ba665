"""L3's golden ids: a few generations of the embedded model that the repository keeps.

Owns: ``golden.json``, its check, and ``python -m smoke.checks.l3.golden``, which writes it anew from transformers after
the model was trained again. Kept ids are only worth something where another machine's rounding cannot change them, so
every token must lead by ``MIN_GAP``, and the check proves that it does.
"""

import json
from pathlib import Path

from smoke.checks.l3.driver import build_driver
from smoke.framework import peer
from smoke.framework.cases import embedded_case, embedded_eos_ids, prompts
from smoke.framework.check import DEFAULT_SEED, Failure, Registry, Values
from smoke.framework.compare import differences

REGISTRY = Registry()
GOLDEN = Path(__file__).parent / "golden.json"
# What the probe needs of the file, read before any candidate runs: a graded one cannot read the kept ids themselves.
ASKED = [
    (entry["prompt_ids"], len(entry["token_ids"]))
    for entry in (json.loads(GOLDEN.read_text()) if GOLDEN.is_file() else [])
]
MIN_GAP = 0.25  # between the two largest logits; float32 rounding moves a logit by about 1e-5
LENGTH, MIN_LENGTH = 24, 12
COUNT = 4


def golden_probe(seed: int) -> Values:
    """Generate from the prompts whose ids the repository keeps."""
    driver = build_driver(embedded_case(), eos=embedded_eos_ids())
    values: Values = {}
    for index, (prompt_ids, count) in enumerate(ASKED):
        done = driver.generate(prompt_ids, count)
        values[f"prompt {index}"] = [int(token) for token in done.token_ids]
    return values


def decide(prompt: list[int], count: int) -> tuple[list[int], float]:
    """Return transformers' ids and the smallest lead of any of them over its runner-up."""
    ids, logits = peer.generate(embedded_case(), "float32", tuple(prompt), count, tuple(embedded_eos_ids()))
    top = logits.topk(2).values
    return ids, float((top[:, 0] - top[:, 1]).min())


def golden_verdict(seed: int, got: Values) -> list[Failure]:
    """Ask for the kept ids, and ask the file for ids that are transformers' and lead by ``MIN_GAP``."""
    failures = []
    for index, entry in enumerate(json.loads(GOLDEN.read_text())):
        name = f"prompt {index}"
        failures += differences(entry["token_ids"], got[name], None, name)
        ids, gap = decide(entry["prompt_ids"], len(entry["token_ids"]))
        if ids != entry["token_ids"] or gap < MIN_GAP:
            remedy = "golden.json is not of this embedded model; write it anew: python -m smoke.checks.l3.golden"
            failures.append(Failure(name, "the kept ids", f"a lead of at least {MIN_GAP}", f"{gap:.3f}", remedy))
    return failures


REGISTRY.add(
    "L3.D.golden",
    "The ids that the repository keeps, chosen where the likeliest token is far ahead, are generated on this machine.",
    golden_probe,
    golden_verdict,
)


def main() -> None:
    """Write ``golden.json``: of many prompts, the few whose closest decision is the clearest."""
    found = []
    for prompt in prompts(DEFAULT_SEED + 1, 60):
        ids, gap = decide(prompt, LENGTH)
        if len(ids) >= MIN_LENGTH:  # a generation that ends at once proves little
            found.append((gap, prompt, ids))
    kept = [entry for entry in sorted(found, reverse=True) if entry[0] >= MIN_GAP][:COUNT]
    lines = ",\n".join(json.dumps({"prompt_ids": prompt, "token_ids": ids}) for _, prompt, ids in kept)
    GOLDEN.write_text(f"[\n{lines}\n]\n")
    print(f"{GOLDEN.name}: {len(kept)} prompts of {len(found)} long ones lead by {MIN_GAP} at every token")


if __name__ == "__main__":
    main()
