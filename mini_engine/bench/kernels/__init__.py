"""``mini-engine bench kernels``."""
