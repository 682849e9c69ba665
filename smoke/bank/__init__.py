"""The pitfalls, wheats and hints of each lesson, and the proof that the suite catches the one and accepts the other."""
