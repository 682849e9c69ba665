"""The checks of L12: one model, many processes. Parts of matrices, a router's belief, ranks that end together."""
