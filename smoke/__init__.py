"""The acceptance suite of the course: checks, oracles, starters, the pitfall bank and the commands around them.

Owns: everything that decides whether a lesson is done. The engine (``mini_engine``) must not know it.
"""
