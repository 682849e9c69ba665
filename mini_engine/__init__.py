"""mini_engine: an LLM inference engine to read in an afternoon, and the reference solution of its course."""
