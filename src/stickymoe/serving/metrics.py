"""What a server has done, in the format of Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from stickymoe.serving.worker import Worker


class WorkerCollector(Collector):
    """Reads the totals of the workers when it is asked."""

    def __init__(self, workers: Mapping[str, Worker]) -> None:
        self._workers = workers

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        workers = self._workers.items()
        answers = CounterMetricFamily("stickymoe_requests", "Answers by how they ended", labels=("model", "end"))
        for name, worker in workers:
            for end, n in worker.totals.ended.items():
                answers.add_metric((name, end), n)
        yield answers
        for key, text in (
            ("prompt_tokens", "Tokens of prompts"),
            ("tokens", "Generated tokens"),
            ("hits", "Requested experts that were in a slot"),
            ("misses", "Requested experts that were not in a slot"),
            ("bytes_read", "Bytes of experts read from the store"),
            ("stall_s", "Seconds that texts waited for experts"),
        ):
            metric = {"hits": "expert_hits", "misses": "expert_misses", "stall_s": "stall_seconds"}.get(key, key)
            counter = CounterMetricFamily(f"stickymoe_{metric}", text, labels=("model",))
            for name, worker in workers:
                counter.add_metric((name,), getattr(worker.totals, key))
            yield counter
        for key, text in (
            ("waiting", "Requests that wait"),
            ("running", "Answers that run"),
            ("tokens_per_s", "Generated tokens per second at the moment"),
        ):
            gauge = GaugeMetricFamily(
                f"stickymoe_{'tokens_per_second' if key == 'tokens_per_s' else key}", text, labels=("model",)
            )
            for name, worker in workers:
                gauge.add_metric((name,), getattr(worker, key))
            yield gauge
        resident = GaugeMetricFamily("stickymoe_resident_bytes", "Bytes of slots and dense weights", labels=("model",))
        for name, worker in workers:
            resident.add_metric((name,), worker.engine.resident_bytes)
        yield resident
