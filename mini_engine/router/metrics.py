"""The metrics of all workers as one text, each with the label ``worker``, and the router's own."""

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from mini_engine.router.fleet import Fleet


class Merged(Collector):
    """The metrics of a moment."""

    def __init__(self, fleet: Fleet, texts: Mapping[str, str]) -> None:
        """Take the ``texts`` of those workers that have answered."""
        self.fleet = fleet
        self.texts = texts

    def collect(self) -> Iterable[Metric]:
        """Yield the workers' families, and then the router's."""
        families: dict[str, Metric] = {}
        for worker, text in self.texts.items():
            for each in text_string_to_metric_families(text):
                known = families.setdefault(each.name, Metric(each.name, each.documentation, each.type))
                known.samples += [s._replace(labels={"worker": worker, **s.labels}) for s in each.samples]
        yield from families.values()
        is_up = GaugeMetricFamily("router_worker_up", "Whether the worker is reached.", labels=["worker"])
        requests = CounterMetricFamily("router_requests", "Requests passed on to it.", labels=["worker"])
        lost = CounterMetricFamily("router_requests_lost", "Those that it did not end.", labels=["worker"])
        for worker in self.fleet.workers:
            is_up.add_metric([worker], worker in self.fleet.links)
            requests.add_metric([worker], self.fleet.num_requests[worker])
            lost.add_metric([worker], self.fleet.num_lost[worker])
        yield from (is_up, requests, lost)


def merged(fleet: Fleet, texts: Mapping[str, str]) -> bytes:
    """Return the metrics in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(Merged(fleet, texts))
    return generate_latest(registry)
