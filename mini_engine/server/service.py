"""What every endpoint works with: the engine, what reads requests to it, and its metrics."""

import time
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from mini_engine.async_engine import AsyncEngine
from mini_engine.outputs import RequestOutput
from mini_engine.server.metrics import Metrics
from mini_engine.server.reader import Limits, Reader, Sizes
from mini_engine.view import EngineView


class Service(Reader):
    """One model behind the interface."""

    def __init__(
        self,
        engine: AsyncEngine,
        tokenizer: PreTrainedTokenizerBase,
        model_name: str,
        limits: Limits | None = None,
        defaults: Mapping[str, Any] | None = None,
        tool_parser: str | None = None,
    ) -> None:
        """Serve ``engine``; the rest is as for ``Reader``. Raises ``ValueError``."""
        self.engine = engine
        self.view = EngineView(engine.engine)
        sizes = Sizes(self.view.max_positions, self.view.model.vocab_size)
        super().__init__(tokenizer, model_name, sizes, limits, defaults, tool_parser)
        self.metrics = Metrics(engine, self.view, model_name)
        self.created = int(time.time())
        self.is_ending = False

    def ending(self, output: RequestOutput) -> dict[str, Any]:
        """Return what a choice says of its end: the stop string or token, null for the model's own.

        With what became of its grammar, and its receipt, where it has them.
        """
        matched = None if output.matched in self.view.eos_token_ids else output.matched
        receipt = {} if output.receipt is None else {"receipt": output.receipt}
        return {"stop_reason": matched, **output.grammar_as_json(), **receipt}

    def abort_all(self) -> None:
        """Abort every request. Mutates."""
        for name in list(self.engine.handles):
            self.engine.abort(name)
