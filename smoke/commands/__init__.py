"""The commands of ``python -m smoke``, one file per command or family. Each defines ``register(app)``."""
