"""L4: processors by name. A name and a JSON object cross a process border; code does not."""

from collections.abc import Callable, Mapping
from typing import Any

from mini_engine.sampler.processors.base import History, LogitsProcessor, Vocabulary

ProcessorType = type[LogitsProcessor[Any]]
REGISTRY: dict[str, ProcessorType] = {}
# What the plain parameters of a request switch on; no registered processor may go by these names.
RESERVED = ("penalties", "min_new_tokens", "logit_bias", "allowed_token_ids", "bad_words", "grammar")


def register_processor(name: str) -> Callable[[ProcessorType], ProcessorType]:
    """Register the decorated class under ``name``. Raises ``ValueError`` if the name is taken."""

    def register(processor: ProcessorType) -> ProcessorType:
        if name in RESERVED:
            raise ValueError(f"{name!r} is a parameter of its own; choose another name for a logits processor")
        taken = REGISTRY.get(name)
        if taken is not None and (taken.__module__, taken.__qualname__) != (
            processor.__module__,
            processor.__qualname__,
        ):
            raise ValueError(f"the logits processor {name!r} is already {taken.__qualname__}; choose another name")
        REGISTRY[name] = processor
        return processor

    return register


def find_processor(name: str) -> ProcessorType:
    """Return the class registered as ``name``. Raises ``ValueError`` listing the names that exist."""
    if name not in REGISTRY:
        raise ValueError(f"there is no logits processor {name!r}; registered are {', '.join(sorted(REGISTRY))}")
    return REGISTRY[name]


def check_processors(chosen: Mapping[str, Mapping[str, Any]] | None, vocabulary: Vocabulary) -> None:
    """Raise ``ValueError`` if a request names an unknown processor or gives one arguments that it refuses."""
    for name, arguments in (chosen or {}).items():
        try:
            find_processor(name).start(History((), ()), arguments, vocabulary)
        except ValueError:
            raise
        except Exception as error:  # foreign code may raise anything
            raise ValueError(
                f"the logits processor {name!r} raised {error!r} for the arguments {dict(arguments)}; "
                "give others, or leave it out"
            ) from error
