"""The checks of L8. A file's letter is that of the first task that it is about."""
