"""Benchmarks: one file each, the peer in the same process, the last line of output is JSON."""
