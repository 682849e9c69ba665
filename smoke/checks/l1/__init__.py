"""The checks of L1. A file's letter is that of the first task that it is about."""
