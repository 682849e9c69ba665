"""Grading: a folder of submissions in, scores and reports out, and nothing that a submission does may stop it.

Owns: what only an instructor needs. Must not know: what a check compares. ``candidate.Runner`` runs the code; here the
process that it runs in is confined, its results are kept, counted and written down.
"""
