"""L7: grammar masks: which tokens may come next, so that the text is valid."""
