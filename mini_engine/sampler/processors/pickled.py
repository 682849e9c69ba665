"""L4: processors as pickled code, the way SGLang sends them. Off unless the caller says that the code is trusted.

Unpickling runs whatever the sender wrote: a request that carries a pickled processor *is* a program (CVE-2026-7304 is
this door left open in SGLang's server). The registry needs none of it: a name and plain arguments say the same.
"""

import json

from mini_engine.sampler.processors.base import LogitsProcessor
from mini_engine.sampler.processors.registry import ProcessorType


def to_text(processor: ProcessorType) -> str:
    """Return the class, code and all, as text. Raises ``ModuleNotFoundError`` without the extra ``pickled``."""
    import dill

    return json.dumps({"callable": dill.dumps(processor, recurse=True).hex()})


def from_text(text: str, trust_pickled_code: bool = False) -> ProcessorType:
    """Return the class that ``to_text`` wrote, **running code of the author of the text**.

    Raises ``ValueError`` unless ``trust_pickled_code`` is set, and for a text that holds no processor.
    """
    if not trust_pickled_code:
        raise ValueError(
            "this processor is pickled code, and unpickling it runs that code with all your rights (CVE-2026-7304); "
            "register a class and send its name instead, or pass trust_pickled_code=True if you wrote the text yourself"
        )
    import dill

    try:
        processor = dill.loads(bytes.fromhex(json.loads(text)["callable"]))
    except Exception as error:  # a damaged pickle can fail in any way: it is a program
        raise ValueError(f"the text is not a pickled processor: {error}") from error
    if not (isinstance(processor, type) and issubclass(processor, LogitsProcessor)):
        raise ValueError(f"the text holds {processor!r}, which is no LogitsProcessor class")
    return processor
