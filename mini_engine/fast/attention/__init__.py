"""Attention that reads keys and values where they lie, instead of copying them."""
