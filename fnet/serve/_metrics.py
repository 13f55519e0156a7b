"""Counters and histograms in the text format of Prometheus."""

from __future__ import annotations

import threading

_BUCKETS = {
    "seconds": (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
    "rows": (1, 2, 4, 8, 16, 32, 64, 128),
}
_HELP = {
    "fnet_requests_total": "requests, by status",
    "fnet_request_seconds": "time from the body to the response",
    "fnet_batch_rows": "rows that were computed together",
    "fnet_compute_seconds": "time of the computation of a batch",
    "fnet_unbatched_requests_total": "requests computed alone, by cause: rows, padding, condition",
    "fnet_queue_requests": "requests that wait",
    "fnet_generated_tokens_total": "tokens of generated texts",
    "fnet_programs": "compiled programs",
}


class Metrics:
    """The metrics of one server. Metrics whose names end with _total are counters. The other
    metrics are histograms."""

    def __init__(self):
        self._lock = threading.Lock()
        self._counts: dict[tuple, float] = {}
        self._histograms: dict[tuple, list] = {}

    def add(self, name: str, value: float = 1, **labels: str) -> None:
        key = name, tuple(sorted(labels.items()))
        with self._lock:
            self._counts[key] = self._counts.get(key, 0) + value

    def observe(self, name: str, value: float, **labels: str) -> None:
        key, limits = (name, tuple(sorted(labels.items()))), _BUCKETS[name.rsplit("_", 1)[1]]
        with self._lock:
            counts = self._histograms.setdefault(key, [0] * (len(limits) + 2))
            counts[-1] += value
            counts[next((i for i, limit in enumerate(limits) if value <= limit), len(limits))] += 1

    def text(self, gauges: list[tuple[str, dict, float]]) -> str:
        """Returns all metrics as text. The returned text contains the counters and histograms of
        the `Metrics` object, and `gauges`, a list of (name, labels, value)."""
        with self._lock:
            lines = {name: [] for name in _HELP}
            for (name, labels), value in sorted(self._counts.items()):
                lines[name].append(f"{name}{_braces(labels)} {value:g}")
            for (name, labels), counts in sorted(self._histograms.items()):
                total = 0
                for limit, count in zip([*_BUCKETS[name.rsplit("_", 1)[1]], "+Inf"], counts):
                    total += count
                    lines[name].append(f"{name}_bucket{_braces([*labels, ('le', limit)])} {total}")
                lines[name] += [
                    f"{name}_sum{_braces(labels)} {counts[-1]:.9g}",
                    f"{name}_count{_braces(labels)} {total}",
                ]
        for name, labels, value in gauges:
            lines[name].append(f"{name}{_braces(labels.items())} {value:g}")
        result = []
        for name, found in lines.items():
            kind = (
                "counter"
                if name.endswith("_total")
                else "gauge"
                if name in {g[0] for g in gauges}
                else "histogram"
            )
            if found:
                result += [f"# HELP {name} {_HELP[name]}", f"# TYPE {name} {kind}", *found]
        return "\n".join(result) + "\n"


def _braces(labels) -> str:
    escaped = lambda x: str(x).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    inside = ",".join(f'{name}="{escaped(value)}"' for name, value in labels)
    return f"{{{inside}}}" if inside else ""
