"""Oracles: transformers (``peer``) and slow float64 loops over single rows. They look like no solution on purpose."""
