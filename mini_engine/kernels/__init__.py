"""L8: Triton kernels, each beside its torch reference.

One file is one operation: the kernel (``@triton.jit``), its launcher with shape checks, and ``*_reference``, the same
signature in plain torch. ``launch`` says where kernels can run, ``registry`` chooses kernel or reference for each
operation, ``model``, ``attention`` and ``sampler`` put them into the engine's seams.

Triton reads ``TRITON_INTERPRET`` when it is imported: set to 1, kernels run on CPU tensors in Python, a thousand times
slower and with a debugger. Import from the modules: this package re-exports nothing, so that an engine without kernels
never imports Triton.
"""
