"""A kernel of a few lines for Triton's interpreter, which versions of NumPy have broken.

Some made it return zeros without a word; from 2.4 on Triton before 3.7 cannot count to a number that it is given.

Owns: one kernel, which the tests of kernels try on their own device. Run as ``TRITON_INTERPRET=1 python -m
smoke.runner.canary``; silence is success.
"""

import numpy as np
import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]


@triton.jit  # type: ignore[untyped-decorator]
def canary_kernel(source, target, count, block: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Write the running sums of the source, times how many numbers it has, into the target."""
    offsets = tl.arange(0, block)
    inside = offsets < count
    value = tl.load(source + offsets, mask=inside, other=0.0)
    total = tl.zeros([block], tl.float32)
    for _ in range(count):
        total += tl.cumsum(value, axis=0)
    tl.store(target + offsets, total, mask=inside)


def main(device: str = "cpu") -> None:
    """Run the kernel on five numbers. Raises ``RuntimeError``, naming versions, unless what it should comes out."""
    try:
        target = torch.full((8,), -1.0, device=device)
        canary_kernel[(1,)](torch.arange(1.0, 6.0, device=device), target, 5, block=8)
        found = str(target.tolist())
    except Exception as error:  # whatever a broken installation raises
        found = repr(error)
    if found != "[5.0, 15.0, 30.0, 50.0, 75.0, -1.0, -1.0, -1.0]":
        versions = f"Triton {triton.__version__} with NumPy {np.__version__}"
        raise RuntimeError(
            f"{versions} cannot run a kernel of a few lines (Triton before 3.7 needs numpy<2.4): {found}"
        )


if __name__ == "__main__":
    main()
