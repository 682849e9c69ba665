"""mini_engine: a small LLM inference engine, and the reference solution of the course that builds it.

.. code-block:: python

    from mini_engine import LLM, SamplingParams

    llm = LLM()
    for answer in llm.generate(["Once upon a time"], SamplingParams(max_new_tokens=40)):
        print(answer.text)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mini_engine.config import EngineConfig
    from mini_engine.engine import Engine
    from mini_engine.llm import LLM
    from mini_engine.sampler.params import SamplingParams

    __version__: str

__all__ = ["LLM", "Engine", "EngineConfig", "SamplingParams", "__version__"]

# Imported when they are first used: importing torch takes seconds, and a student's folder may have to come first.
MODULES = {"LLM": "llm", "Engine": "engine", "EngineConfig": "config", "SamplingParams": "sampler.params"}


def __getattr__(name: str) -> Any:
    """Import one of the names above, or look up the version."""
    if name == "__version__":
        return installed_version()
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{MODULES[name]}"), name)


def installed_version() -> str:
    """Return the version that pip knows, which takes a moment to ask."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("mini-engine")
    except PackageNotFoundError:  # run from a folder that is not installed
        return "0+unknown"
