"""``/metrics`` in the names of vLLM, so that dashboards made for it work."""

from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mini_engine.async_engine import AsyncEngine
from mini_engine.outputs import RequestOutput, StepOutput
from mini_engine.view import EngineView

SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
LONG_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
COUNTERS = {
    "prompt_tokens": "Tokens of prompts of answers that have ended.",
    "generation_tokens": "Tokens that were generated.",
    "prompt_tokens_cached": "Tokens of prompts that were not computed, because the prefix cache had them.",
    "num_preemptions": "How often a request was sent back to wait.",
    "spec_decode_num_draft_tokens": "Tokens that were guessed and computed.",
    "spec_decode_num_accepted_tokens": "Guessed tokens that came.",
}
HISTOGRAMS = {
    "time_to_first_token_seconds": ("From the arrival to the first token.", LONG_S),
    "inter_token_latency_seconds": ("Between two tokens of an answer.", SHORT_S),
    "request_time_per_output_token_seconds": ("An answer's mean time for a token after the first.", SHORT_S),
    "e2e_request_latency_seconds": ("From the arrival to the end.", LONG_S),
    "request_queue_time_seconds": ("From the arrival to the first step.", LONG_S),
}


class Metrics:
    """The numbers of one server, in a registry of its own."""

    def __init__(self, engine: AsyncEngine, view: EngineView, model_name: str) -> None:
        """Count what ``engine`` does from now on."""
        self.registry = CollectorRegistry()
        label = {"model_name": model_name}
        names = list(label)
        values = label
        self.counters = {
            name: Counter(f"vllm:{name}", text, names, registry=self.registry).labels(**values)
            for name, text in COUNTERS.items()
        }
        self.histograms = {
            name: Histogram(f"vllm:{name}", text, names, buckets=buckets, registry=self.registry).labels(**values)
            for name, (text, buckets) in HISTOGRAMS.items()
        }
        success = Counter(
            "vllm:request_success", "Answers that have ended.", [*names, "finished_reason"], registry=self.registry
        )
        self.ended = {reason: success.labels(model_name, reason) for reason in ("stop", "length", "abort", "error")}
        self.registry.register(State(view, model_name))
        engine.watchers.append(self.count_step)

    def count_step(self, output: StepOutput, ended: list[RequestOutput]) -> None:
        """Count what a step did, and the answers that ended with it. Mutates."""
        for answer in ended:
            self.count_answer(answer)
        self.counters["generation_tokens"].inc(sum(delta.token_id is not None for delta in output.deltas))
        self.counters["num_preemptions"].inc(len(output.preempted))
        self.counters["spec_decode_num_draft_tokens"].inc(sum(output.drafted.values()))
        self.counters["spec_decode_num_accepted_tokens"].inc(sum(output.accepted.values()))

    def count_answer(self, answer: RequestOutput) -> None:
        """Count an answer that has ended. Mutates."""
        times = answer.times
        assert times is not None, "the engine fills it in"
        assert answer.finish_reason is not None, "the answer has not ended"
        self.ended[answer.finish_reason].inc()
        self.counters["prompt_tokens"].inc(len(answer.prompt_ids))
        self.counters["prompt_tokens_cached"].inc(answer.num_cached_tokens)
        seconds = {
            "time_to_first_token_seconds": times.ttft_s,
            "request_time_per_output_token_seconds": times.tpot_s,
            "request_queue_time_seconds": times.queue_s,
            "e2e_request_latency_seconds": None if times.finished is None else times.finished - times.added,
        }
        for name, value in seconds.items():
            if value is not None:
                self.histograms[name].observe(value)
        for before, after in zip(times.tokens, times.tokens[1:], strict=False):
            self.histograms["inter_token_latency_seconds"].observe(after - before)

    def text(self) -> bytes:
        """Return all numbers in Prometheus' text format."""
        return generate_latest(self.registry)


class State(Collector):
    """What the engine is doing at the moment when it is asked."""

    def __init__(self, view: EngineView, model_name: str) -> None:
        """Look at an engine."""
        self.view = view
        self.model_name = model_name

    def collect(self) -> Iterable[Metric]:
        """Yield the gauges, and the counters of the prefix cache."""
        view = self.view
        yield self.metric(GaugeMetricFamily, "num_requests_running", "Requests in the batch.", len(view.running))
        yield self.metric(GaugeMetricFamily, "num_requests_waiting", "Requests that wait.", view.num_waiting)
        share = view.num_pages_in_use / view.num_pages
        yield self.metric(GaugeMetricFamily, "kv_cache_usage_perc", "Share of the pages in use, from 0 to 1.", share)
        if view.tree is not None:
            asked, hit = view.tree.stats.num_tokens, view.tree.stats.num_tokens_hit
            yield self.metric(CounterMetricFamily, "prefix_cache_queries", "Tokens looked up in the cache.", asked)
            yield self.metric(CounterMetricFamily, "prefix_cache_hits", "Tokens that the cache had.", hit)

    def metric(self, kind: Any, name: str, text: str, value: float) -> Metric:
        """Return one number."""
        family: Metric = kind(f"vllm:{name}", text, labels=["model_name"])
        family.add_metric([self.model_name], value)  # type: ignore[attr-defined]
        return family
