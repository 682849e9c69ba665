"""Before any test is imported: how kernels run in this process, and how many threads it uses."""

import os

import torch

# Triton reads this when it is imported, once. With a GPU the kernels are compiled, else they run in its interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Several test processes (pytest -n) share the machine.
if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))
