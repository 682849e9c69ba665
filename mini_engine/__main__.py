"""``python -m mini_engine``: the same as the command ``mini-engine``."""

from mini_engine.overlay import main

if __name__ == "__main__":
    main()
