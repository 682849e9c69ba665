"""The embedded model: its corpus, its tokenizer, its training and its weights."""
