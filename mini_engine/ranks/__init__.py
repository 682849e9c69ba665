"""One model in several processes, its ranks: each has some rows of every matrix, and they exchange activations."""
