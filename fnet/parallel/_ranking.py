"""The order of candidates: which are compiled, which one is chosen, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fnet.cost._roofline import seconds_text
from fnet.parallel._plan import Candidate

CLOSE = 1.05  # times or bytes up to this factor of the minimum count as equal
WRONG = 1.25  # from this factor on, a compiled program contradicts its estimate
LATER = "not compiled"
UNKNOWN = "unknown until compiled: may send far more"


def best(fit: Sequence[Candidate], memory: float | None) -> Candidate:
    """Selects one of the candidates that fit into memory: of those that take about the least time,
    of those that send about the fewest bytes, the first that leaves half of the memory free, or
    else the one that needs the least. Where a time is unknown, the bytes decide before the time."""
    for cost in _criteria(fit):
        least = min(map(cost, fit))
        fit = [each for each in fit if cost(each) <= CLOSE * least]
    return next(
        (each for each in fit if not memory or each.peak <= memory / 2),
        min(fit, key=lambda each: each.peak),
    )


def ranked(candidates: Sequence[Candidate], memory: float | None, room: float) -> list[Candidate]:
    """Returns candidates with the best first. Those that need more than the fraction `room` of the
    memory by their estimates come last."""
    fits = lambda each: not memory or each.peak <= room * memory
    order: list[Candidate] = []
    for group in (
        [each for each in candidates if fits(each)],
        [each for each in candidates if not fits(each)],
    ):
        # What unpinned activations send is known only once compiled; with pins, the estimate holds.
        rest = sorted(
            group, key=lambda each: each.options.state == "fsdp" and not each.options.pins
        )
        while rest:
            order.append(best(rest, memory))
            rest = [each for each in rest if each is not order[-1]]
    return order


def contradicted(compiled: Candidate, estimated: Candidate, following: Candidate) -> bool:
    """Whether a compiled program is so much worse than its estimate that the following candidate is
    better by its own estimate."""
    cost = _criteria([compiled, estimated, following])[0]
    return cost(compiled) > WRONG * cost(estimated) and CLOSE * cost(following) < cost(compiled)


def verdict(each: Candidate, chosen: Candidate, judged: Sequence[Candidate]) -> str:
    """States why a candidate was chosen, or why not."""
    fit = [other for other in judged if not other.verdict]
    if each is chosen:
        others = [other for other in fit if other is not chosen]
        if others:
            return "chosen: " + _advantage(chosen, others)
        if any(other.verdict.startswith(LATER) for other in judged):
            return "chosen: the best estimate of what fits"
        return "chosen: the only one that fits" if len(judged) > 1 else "chosen"
    return _disadvantage(each, chosen)


def not_compiled(each: Candidate, place: int, first: Candidate) -> str:
    """States why a candidate that may fit was not compiled. `first` is the best by its estimate."""
    return f"{LATER}: ranked {place} by its estimate ({_disadvantage(each, first)})"


def sent(each: Candidate) -> float:
    if each.compiled and each.compiled.ledger is not None:
        return each.compiled.ledger.sent
    return each.estimate.ledger.sent + each.estimate.between.sent


def _seconds(each: Candidate) -> float:
    return each.time.seconds or 0.0


def _criteria(candidates: Sequence[Candidate]) -> list[Callable[[Candidate], float]]:
    known = all(None not in each.time[:3] for each in candidates)
    return [_seconds, sent] if known else [sent, _seconds]


def _advantage(chosen: Candidate, others: Sequence[Candidate]) -> str:
    first, _ = _criteria([chosen, *others])
    if first is _seconds and all(_seconds(chosen) * CLOSE < _seconds(other) for other in others):
        return "fastest of what fits"
    if first is sent and all(sent(chosen) <= sent(other) for other in others):
        return "sends least of what fits"
    rival = next((o for o in others if first(o) <= CLOSE * first(chosen)), others[0])
    lead = "about the fastest" if first is _seconds else "sends about the least"
    return f"{lead}, and {_merit(chosen, rival)}"


def _disadvantage(each: Candidate, chosen: Candidate) -> str:
    first, _ = _criteria([each, chosen])
    if first is _seconds and _seconds(each) > CLOSE * _seconds(chosen):
        if not _seconds(chosen):
            return f"takes {seconds_text(_seconds(each))}"
        return f"takes {_seconds(each) / _seconds(chosen):.2f} times as long"
    if sent(each) > CLOSE * sent(chosen):
        if not sent(chosen):
            return "sends more"
        return f"sends {sent(each) / sent(chosen):.2f} times as much"
    same = "is as fast" if first is _seconds else "sends as much"
    return f"{same}; {chosen.strategy} {_merit(chosen, each)}"


def _merit(chosen: Candidate, other: Candidate) -> str:
    """Returns a text that states the advantage of `chosen` over another candidate that is about as
    good by the first criterion."""
    if _seconds(other) > CLOSE * _seconds(chosen):
        return "takes less time at best"
    if sent(other) > CLOSE * sent(chosen):
        return "sends less"
    return "needs less memory" if other.peak > chosen.peak else "is simpler"
