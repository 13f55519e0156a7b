"""Counters and histograms in the text format of Prometheus."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from fnet.serve._engine._stats import Histogram, Stats

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
    "fnet_engine_waiting": "texts that wait for a slot",
    "fnet_engine_active": "texts that are generated, those included whose prompt is read",
    "fnet_engine_slots": "texts that can be generated together",
    "fnet_engine_finished_total": "texts that have ended, by reason",
    "fnet_engine_refused_total": "texts for which the queue was full",
    "fnet_engine_prompt_tokens_total": "tokens of prompts",
    "fnet_engine_cached_tokens_total": "tokens of prompts that were in the prefix cache",
    "fnet_engine_generated_tokens_total": "tokens that were generated",
    "fnet_engine_cache_bytes": "bytes of the keys and values of all slots",
    "fnet_engine_cache_used_ratio": "part of them that is in use, from 0 to 1",
    "fnet_engine_prefix_bytes": "bytes of the prefix cache",
    "fnet_engine_prefix_blocks": "blocks of the prefix cache",
    "fnet_engine_prefix_hits_total": "prompts whose beginning was in the prefix cache",
    "fnet_engine_first_token_seconds": "time from a request to its first token",
    "fnet_engine_between_tokens_seconds": "time between two tokens of a text",
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

    def text(
        self,
        values: list[tuple[str, dict, float]],
        histograms: Iterable[tuple[str, dict, Histogram]] = (),
    ) -> str:
        """Returns all metrics as text: the counters and histograms of the `Metrics` object, and
        those that others keep, values and histograms as (name, labels, value)."""
        with self._lock:
            lines = {name: [] for name in _HELP}
            for (name, labels), value in sorted(self._counts.items()):
                lines[name].append(f"{name}{_braces(labels)} {value:.15g}")
            for (name, labels), counts in sorted(self._histograms.items()):
                limits = _BUCKETS[name.rsplit("_", 1)[1]]
                lines[name] += _buckets(name, labels, limits, counts[:-1], counts[-1])
        for name, labels, held in histograms:
            pairs = tuple(labels.items())
            lines[name] += _buckets(name, pairs, held.limits, held.counts, held.sum)
        for name, labels, value in values:
            lines[name].append(f"{name}{_braces(labels.items())} {value:.15g}")
        result = []
        for name, found in lines.items():
            kind = (
                "counter"
                if name.endswith("_total")
                else "gauge"
                if name in {value[0] for value in values}
                else "histogram"
            )
            if found:
                result += [f"# HELP {name} {_HELP[name]}", f"# TYPE {name} {kind}", *found]
        return "\n".join(result) + "\n"


def of_engine(model: str, stats: Stats) -> list[tuple[str, dict, float]]:
    """Returns the counts of a language model's engine, as (name, labels, value)."""
    labels = {"model": model}
    found = {
        "waiting": stats.waiting,
        "active": stats.active,
        "slots": stats.slots,
        "refused_total": stats.refused,
        "prompt_tokens_total": stats.prompt_tokens,
        "cached_tokens_total": stats.cached_tokens,
        "generated_tokens_total": stats.generated_tokens,
        "cache_bytes": stats.cache_bytes,
        "cache_used_ratio": stats.cache_used,
        "prefix_bytes": stats.prefix_bytes,
        "prefix_blocks": stats.prefix_blocks,
        "prefix_hits_total": stats.prefix_hits,
    }
    ended = [
        ("fnet_engine_finished_total", {**labels, "reason": reason}, count)
        for reason, count in stats.finished.items()
    ]
    return [*((f"fnet_engine_{name}", labels, value) for name, value in found.items()), *ended]


def times(model: str, stats: Stats) -> list[tuple[str, dict, Histogram]]:
    """Returns the times of a language model's engine, as (name, labels, histogram)."""
    labels = {"model": model}
    return [
        ("fnet_engine_first_token_seconds", labels, stats.first_token),
        ("fnet_engine_between_tokens_seconds", labels, stats.between_tokens),
    ]


def _buckets(name, labels, limits, counts, total) -> list[str]:
    """Returns the lines of a histogram, whose `counts` are those between two limits."""
    lines, count = [], 0
    for limit, more in zip([*limits, "+Inf"], counts):
        count += more
        lines.append(f"{name}_bucket{_braces([*labels, ('le', limit)])} {count}")
    return [
        *lines,
        f"{name}_sum{_braces(labels)} {total:.9g}",
        f"{name}_count{_braces(labels)} {count}",
    ]


def _braces(labels) -> str:
    escaped = lambda x: str(x).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    inside = ",".join(f'{name}="{escaped(value)}"' for name, value in labels)
    return f"{{{inside}}}" if inside else ""
