"""A three-number kernel for Triton's interpreter: some versions of NumPy make it return zeros without a word.

Owns: one kernel. Run as ``TRITON_INTERPRET=1 python -m smoke.canary``; silence is success.
"""

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]


@triton.jit  # type: ignore[untyped-decorator]
def double(source, target, count, block: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Write twice the source into the target."""
    offsets = tl.arange(0, block)
    inside = offsets < count
    tl.store(target + offsets, tl.load(source + offsets, mask=inside) * 2, mask=inside)


def main() -> None:
    """Double 1, 2, 3. Raises ``RuntimeError`` if anything else comes out."""
    source, target = torch.tensor([1.0, 2.0, 3.0]), torch.zeros(4)
    double[(1,)](source, target, 3, block=4)
    if target.tolist() != [2.0, 4.0, 6.0, 0.0]:
        raise RuntimeError(f"the interpreter computed {target.tolist()} instead of [2, 4, 6, 0]")


if __name__ == "__main__":
    main()
