"""L7: everything that the engine asks about grammars.

Owns: what is checked when a request comes, and the parts that serve it: backend, store, queue, thoughts, jumps. Must
not know: batches, pages, text that is shown.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import takewhile

from tokenizers import Tokenizer
from torch import Tensor

from mini_engine.config import EngineConfig
from mini_engine.grammar.backends import backend_name, make_backend
from mini_engine.grammar.base import GrammarObject, GrammarOptions, TokenRefusedError
from mini_engine.grammar.jump import JumpForward
from mini_engine.grammar.queue import Gather, GrammarQueue
from mini_engine.grammar.reasoner import ReasonerGrammar
from mini_engine.grammar.rows import make_mask
from mini_engine.grammar.store import GrammarStore
from mini_engine.grammar.tokens import TokenTable
from mini_engine.sampler.params import GrammarKey, SamplingParams
from mini_engine.sampler.processors.base import Vocabulary

THINK_END = "</think>"


class GrammarService:
    """Serves the grammars of one engine. Backend and threads come into being with the first request that needs them."""

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer | None,
        vocabulary: Vocabulary,
        clock: Callable[[], float],
        gather: Gather | None = None,
    ) -> None:
        """Serve as ``config`` says. Raises ``ValueError`` for an unknown backend."""
        self.config, self.tokenizer, self.vocab_size = config, tokenizer, vocabulary.size
        self.stop_ids, self.clock, self.gather = vocabulary.eos_token_ids, clock, gather
        self.backend_name = backend_name(config.grammar_backend)
        self.thinking: set[str] = set()  # of those who wait: whose grammars begin after a thought

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
        return GrammarStore(make_backend(self.backend_name, self.table, options), self.clock)

    @cached_property
    def queue(self) -> GrammarQueue[GrammarObject]:
        """Who waits for a compile."""
        return GrammarQueue(self.store, self.config.grammar_timeout_s, self.clock, self.gather)

    @cached_property
    def jumps(self) -> JumpForward:
        """What spells forced text."""
        assert self.tokenizer is not None, "the table would have been refused"
        return JumpForward(self.tokenizer, self.table)

    @property
    def num_waiting(self) -> int:
        """How many requests wait for their grammars."""
        return len(self.queue.waiting) if "queue" in vars(self) else 0  # asking must not bring it into being

    @property
    def is_waiting(self) -> bool:
        """Whether any request waits for its grammar."""
        return self.num_waiting > 0

    def check(self, key: GrammarKey, params: SamplingParams) -> None:
        """Raise ``ValueError`` for a grammar that this engine cannot serve for such a request, whatever it says."""
        if self.backend_name == "none":
            raise ValueError(
                f"the request has a {key[0]} and this engine has no grammar backend; set grammar_backend='auto' or "
                "another one in EngineConfig"
            )
        if not self.stop_ids:
            raise ValueError("a grammar ends with an end-of-sequence id and this model has none; give it eos_token_ids")
        self.store.backend.check_kind(key[0])
        if params.reasoning:
            self.think_end()
        self.check_logprobs(params)

    def think_end(self) -> int:
        """Return the id of the token that ends a thought. Raises ``ValueError`` if the tokenizer has none."""
        token = self.tokenizer.token_to_id(THINK_END) if self.tokenizer is not None else None
        if token is None:
            raise ValueError(f"reasoning=True needs a tokenizer with the token {THINK_END}; leave it out")
        return int(token)

    def submit(self, request_id: str, key: GrammarKey, reasoning: bool) -> None:
        """Let a request wait for its grammar. Mutates."""
        self.queue.submit(request_id, key)
        if reasoning:
            self.thinking.add(request_id)

    def poll(self, wait_s: float) -> tuple[list[tuple[str, GrammarObject]], dict[str, str]]:
        """Return whose grammars are ready, and who failed and why, waiting up to ``wait_s`` for the first. Mutates."""
        ready, failed = self.queue.poll(wait_s)
        wrapped = [(name, self.begin(grammar, name in self.thinking)) for name, grammar in ready]
        self.thinking -= {*failed, *(name for name, _ in ready)}
        return wrapped, failed

    def begin(self, grammar: GrammarObject, reasoning: bool) -> GrammarObject:
        """Return the grammar as a request begins with it: behind a thought if it thinks."""
        if reasoning:
            grammar = ReasonerGrammar(grammar, self.think_end())
        grammar.maybe_init_reasoning(reasoning)
        return grammar

    def drop(self, request_id: str) -> None:
        """Forget a request that waits, or that failed. Mutates."""
        self.thinking.discard(request_id)
        self.queue.drop(request_id)

    def close(self) -> None:
        """Compile nothing any more; what is under way ends, and its threads after it."""
        if "store" in vars(self):  # closing must not bring it into being
            self.store.close()

    def mask(self, grammars: Sequence[GrammarObject | None]) -> Callable[[Tensor], None] | None:
        """Return what masks the rows of a step, ``None`` if there is nothing to mask."""
        return make_mask(grammars, self.stop_ids) if any(grammar is not None for grammar in grammars) else None

    def accept(self, grammar: GrammarObject, token_id: int) -> bool:
        """Take a token into ``grammar`` and return whether it was the last. Raises ``TokenRefusedError``. Mutates."""
        try:
            grammar.accept_token(token_id)
        except TokenRefusedError:  # a backend whose mask and acceptance differ
            raise
        except Exception as error:  # another one is anybody's code
            raise TokenRefusedError(f"its grammar raised {error!r}") from error
        return grammar.is_terminated()

    def forced_tokens(self, grammar: GrammarObject, output_ids: Sequence[int], params: SamplingParams) -> list[int]:
        """Return the tokens that must follow, if ``jump_forward`` is on and the request does without logits for them.

        Never the last one that it may have, nor one that stops it: the model is asked for those.
        """
        if not (self.config.jump_forward and self.needs_no_logits(params)):
            return []
        forced = self.jumps.tokens(grammar, output_ids, params.max_new_tokens - len(output_ids) - 1)
        forced = self.jumps.settled(grammar, output_ids, forced) if forced else []
        return list(takewhile(lambda token: token not in params.stop_token_ids, forced))

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
