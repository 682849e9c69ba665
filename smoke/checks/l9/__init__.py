"""The checks of L9. A file's letter is that of the first task that it is about."""
