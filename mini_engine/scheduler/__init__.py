"""L5: which requests run in a step, with how many tokens and on which pages. Pure Python."""
