"""A kernel of a few lines for Triton's interpreter, which versions of NumPy have broken.

Some made it return zeros without a word; from 2.4 on Triton before 3.7 cannot count to a number that it is given.

Owns: one kernel. Run as ``TRITON_INTERPRET=1 python -m smoke.canary``; silence is success.
"""

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]


@triton.jit  # type: ignore[untyped-decorator]
def multiply(source, target, count, block: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Write the source, times how many numbers it has, into the target."""
    offsets = tl.arange(0, block)
    inside = offsets < count
    total = tl.zeros([block], tl.float32)
    for _ in range(count):
        total += tl.load(source + offsets, mask=inside)
    tl.store(target + offsets, total, mask=inside)


def main() -> None:
    """Multiply 1, 2, 3 by three. Raises ``RuntimeError`` if anything else comes out."""
    source, target = torch.tensor([1.0, 2.0, 3.0]), torch.zeros(4)
    multiply[(1,)](source, target, 3, block=4)
    if target.tolist() != [3.0, 6.0, 9.0, 0.0]:
        raise RuntimeError(f"the interpreter computed {target.tolist()} instead of [3, 6, 9, 0]")


if __name__ == "__main__":
    main()
