"""Running candidates: the reference with an overlay of files, each in a process of its own."""
