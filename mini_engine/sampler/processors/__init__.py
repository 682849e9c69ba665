"""L4: everything that alters logits before the choice. Importing the package registers the processors it brings."""

from mini_engine.sampler.processors import disallowed, ngram, thinking

__all__ = ["disallowed", "ngram", "thinking"]
