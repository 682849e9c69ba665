"""Beside L8: what lies between the matrix products of a step, as plain loops that Numba compiles for the CPU."""
