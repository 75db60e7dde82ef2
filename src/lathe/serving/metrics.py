"""Prometheus metrics of /metrics. The server process hands out the batches, so it needs nothing from the workers."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
PATHS = ("/", "/predict", "/health", "/metrics", "/info")


class Metrics:
    """The server's metrics. `waiting` and `ready` return the queue's length and the number of workers that are up."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, waiting: Callable[[], float], ready: Callable[[], float]) -> None:
        self.registry = CollectorRegistry()
        latency = "From a request's headers to its answer, of POST /predict answered with 200"
        handed = "From handing a batch to a worker to its answers"
        kept = self.registry
        self.latency = Histogram("lathe_request_seconds", latency, buckets=SECONDS, registry=kept)
        self.compute = Histogram("lathe_batch_seconds", handed, buckets=SECONDS, registry=kept)
        self.batch = Histogram(
            "lathe_batch_samples", "Samples of a batch that a worker computed at once", buckets=ROWS, registry=kept
        )
        self.answers = Counter("lathe_responses", "Answers by path and status", ["path", "status"], registry=kept)
        self.restarts = Counter(
            "lathe_worker_restarts", "Workers that died or hung and were started again", registry=kept
        )
        Gauge("lathe_queue", "Requests that wait for a worker", registry=kept).set_function(waiting)
        Gauge("lathe_workers", "Workers that are up", registry=kept).set_function(ready)

    def answered(self, path: str, status: int) -> None:
        self.answers.labels(path if path in PATHS else "other", str(status)).inc()

    def text(self) -> bytes:
        """Return the metrics in Prometheus's text format."""
        return generate_latest(self.registry)
