"""L7: the constraints of an engine with grammars.

Owns: each request's grammar, what is checked when a request comes, and the parts that serve it: backend, store, queue,
thoughts, jumps. Must not know: batches, pages, text that is shown.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import cached_property
from itertools import takewhile

from tokenizers import Tokenizer
from torch import Tensor

from mini_engine.config import EngineConfig
from mini_engine.constraints import ConstraintError, GrammarStats
from mini_engine.grammar.backends import make_backend
from mini_engine.grammar.base import GrammarObject, GrammarOptions
from mini_engine.grammar.jump import JumpForward
from mini_engine.grammar.queue import Gather, GrammarQueue
from mini_engine.grammar.reasoner import ReasonerGrammar, ThoughtIds
from mini_engine.grammar.rows import make_mask
from mini_engine.grammar.store import GrammarStore
from mini_engine.grammar.tokens import TokenTable, inner
from mini_engine.sampler.batch import TorchOps
from mini_engine.sampler.params import SamplingParams
from mini_engine.sampler.processors.base import Vocabulary
from mini_engine.scheduler.request import Request
from mini_engine.texts import is_thought_open, thought_ids


class GrammarService:
    """Serves the grammars of one engine: L5's ``Constraints``. Backend and threads are created when first needed.

    A request's grammar is kept here until the request ends, and not with its pages: a preemption does not touch it.
    """

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer | None,
        vocabulary: Vocabulary,
        clock: Callable[[], float] = time.perf_counter,
        gather: Gather | None = None,
    ) -> None:
        """Serve as ``config`` says.

        ``gather``: how several processes that serve one model agree whose grammars are ready.
        """
        self.config = config
        self.tokenizer = tokenizer
        self.vocab_size = vocabulary.size
        self.stop_ids = vocabulary.eos_token_ids
        self.clock = clock
        self.gather = gather
        self.grammars: dict[str, GrammarObject] = {}  # of the requests that have begun
        self.thoughts: dict[str, bool | None] = {}  # of those that wait: whether a thought is open, None without one

    @cached_property
    def table(self) -> TokenTable:
        """The bytes of every token. Raises ``ValueError`` if there is no tokenizer or its tokens have none."""
        if self.tokenizer is None:
            raise ValueError("grammars need a tokenizer and this engine has none; give it one")
        return TokenTable.from_tokenizer(self.tokenizer, self.vocab_size, self.stop_ids)

    @cached_property
    def store(self) -> GrammarStore:
        """What compiles. Raises ``ValueError`` for a backend whose library is not installed."""
        options = GrammarOptions(self.config.json_whitespace)
        return GrammarStore(make_backend(self.config.grammar_backend, self.table, options), self.clock)

    @cached_property
    def queue(self) -> GrammarQueue[GrammarObject]:
        """Who waits for a compile."""
        return GrammarQueue(self.store, self.config.grammar_timeout_s, self.clock, self.gather)

    @cached_property
    def jumps(self) -> JumpForward:
        """What spells forced text."""
        assert self.tokenizer is not None, "the table would have been refused"
        return JumpForward(inner(self.tokenizer, self.table), self.table)

    @property
    def num_waiting(self) -> int:
        """How many requests wait for their grammars."""
        return len(self.queue.waiting) if "queue" in vars(self) else 0  # asking must not bring it into being

    def check(self, params: SamplingParams) -> None:
        """Raise ``ValueError`` for a grammar that this engine cannot serve for such a request, whatever it says."""
        if params.grammar is None:
            return
        if not self.stop_ids:
            raise ValueError("a grammar ends with an end-of-sequence id and this model has none; give it eos_token_ids")
        self.store.backend.check_kind(params.grammar[0])
        self.check_logprobs(params)

    def prepare(self, params: SamplingParams) -> Future[GrammarObject] | None:
        """Begin to compile the grammar of ``params``; ``None`` if there is none or it is kept already. Mutates.

        The future raises ``GrammarError`` for one that cannot be compiled. Raises ``ValueError`` as ``check`` does.
        """
        self.check(params)
        if params.grammar is None or self.store.cached(params.grammar) is not None:
            return None
        return self.store.compile(params.grammar)

    def submit(self, request: Request) -> bool:
        """Let a request with a grammar wait for it; return whether it has one. Mutates."""
        if request.params.grammar is None:
            return False
        self.queue.submit(request.request_id, request.params.grammar)
        assert self.tokenizer is not None, "the table would have been refused"
        may_think = request.params.reasoning
        self.thoughts[request.request_id] = is_thought_open(self.tokenizer, request.prompt_ids) if may_think else None
        return True

    def admit(self, wait_s: float) -> tuple[list[str], dict[str, str]]:
        """Return whose grammars are ready, and who failed and why, waiting up to ``wait_s`` for the first. Mutates."""
        ready, failed = self.queue.poll(wait_s)
        for name, grammar in ready:
            self.grammars[name] = self.begin(grammar, self.thoughts.pop(name))
        return [name for name, _ in ready], failed

    def begin(self, grammar: GrammarObject, is_open: bool | None) -> GrammarObject:
        """Return the grammar as a request begins with it: after a thought that ``is_open`` or may come, if any may."""
        if is_open is None:
            return grammar
        assert self.tokenizer is not None, "without one no thought is known"
        ids = thought_ids(self.tokenizer)
        assert ids is not None, "without marks no thought is known"
        return ReasonerGrammar(grammar, ThoughtIds(*ids, frozenset(self.stop_ids)), is_open)

    def drop(self, request: Request) -> bool:
        """Forget a request that waits for its grammar, or whose grammar failed; return whether it did. Mutates."""
        if request.request_id not in self.thoughts:
            return False
        del self.thoughts[request.request_id]
        self.queue.drop(request.request_id)
        return True

    def close(self) -> None:
        """Compile nothing any more; what is under way ends, and its threads after it."""
        if "store" in vars(self):  # closing must not bring it into being
            self.store.close()

    def mask(self, requests: Sequence[Request]) -> Callable[[Tensor, TorchOps], None] | None:
        """Return what masks a step's rows, one for each of ``requests``; ``None`` if there is nothing to mask."""
        if not self.grammars:
            return None
        return make_mask([self.grammars.get(request.request_id) for request in requests], self.stop_ids)

    def accept(self, request: Request, token_id: int) -> bool:
        """Take a token into the request's grammar; return whether it was the last. Mutates.

        Raises ``ConstraintError``.
        """
        grammar = self.grammars.get(request.request_id)
        if grammar is None:
            return False
        try:
            grammar.accept_token(token_id)
        except ConstraintError:  # a backend whose mask and acceptance differ
            raise
        except Exception as error:  # a backend may be foreign code
            raise ConstraintError(f"its grammar raised {error!r}") from error
        return grammar.is_terminated()

    def forced(self, request: Request) -> Iterator[int]:
        """Yield the tokens that must follow, if ``jump_forward`` is on and the request does without logits for them.

        Never the last token that the answer may have, nor one that stops it: the model is asked for those. Those that
        are taken are counted in the grammar's ``stats``. Raises ``ConstraintError``.
        """
        grammar = self.grammars.get(request.request_id)
        params = request.params
        if grammar is None or not self.config.jump_forward or not self.needs_no_logits(params):
            return
        try:
            most = params.max_new_tokens - request.num_output_tokens - 1
            tokens = self.jumps.tokens(grammar, request.output_ids, most)
            tokens = self.jumps.settled(grammar, request.output_ids, tokens) if tokens else []
        except Exception as error:  # a backend may be foreign code
            raise ConstraintError(f"its grammar raised {error!r}") from error
        for token in takewhile(lambda token: token not in params.stop_token_ids, tokens):
            grammar.stats.num_forced_tokens += 1
            yield token

    def finish(self, request: Request) -> tuple[GrammarStats, bool] | None:
        """Forget a request that has ended; return what its grammar cost and whether its text is whole. Mutates."""
        grammar = self.grammars.pop(request.request_id, None)
        if grammar is None:
            return None
        grammar.finished = True
        # A stop string, or a stop token that does not end the grammar, leaves less text than the grammar has seen.
        is_cut = request.matched is not None and not grammar.is_terminated()
        return grammar.stats, grammar.is_complete() and not is_cut

    def needs_no_logits(self, params: SamplingParams) -> bool:
        """Whether tokens may be appended to an answer before their logits are computed, which is in the next step.

        Not where something else than the grammar may ban them, nor where their log-probabilities are reported and would
        be processed ones, or might not come, as a stop string may end the request before. A rule of the request alone:
        tokens that are appended use no draw, so an answer to a seed would depend on whatever else this asked.
        """
        if params.bad_words or params.allowed_token_ids is not None or params.logits_processors:
            return False
        return params.logprobs is None or (params.logprobs_mode == "raw" and not params.stop)

    def check_logprobs(self, params: SamplingParams) -> None:
        """Raise ``ValueError`` if log-probabilities of forced tokens are wanted and might never be computed.

        A preempted request may find its tokens in the prefix cache; then nothing computes their rows again.
        """
        may_skip_rows = self.config.preemption and self.config.prefix_cache is not None
        if may_skip_rows and self.config.jump_forward and params.logprobs is not None and self.needs_no_logits(params):
            raise ValueError(
                f"logprobs is {params.logprobs}, and with jump_forward, preemption and prefix_cache all on the rows of "
                "forced tokens may never be computed; turn one of the three off, or leave logprobs out"
            )
