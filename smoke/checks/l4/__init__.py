"""The checks of L4. A file's letter is that of the first task that it is about."""
