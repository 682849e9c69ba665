"""The checks of L10: drafts. Nothing of an answer may change, and nobody may wait for them."""
