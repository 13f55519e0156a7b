"""What `Engine.submit` accepts: each argument is checked before anything waits for it."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fnet._util._nearest import did_you_mean
from fnet.models.generation._sampling import Sampling, check_options
from fnet.serve._engine._request import Mask

MOST_ALTERNATIVES = 20  # of a token, as in the API of OpenAI


class Options(NamedTuple):
    """The checked options of a request. `sampling` has a number for every option: one that is not
    used has the value that changes nothing."""

    max_tokens: int
    sampling: Sampling
    logit_bias: tuple[tuple[int, float], ...]
    penalized: bool
    seed: int
    stop: frozenset[int]
    log_probs: int
    adapter: str | None
    mask: Mask | None
    callback: Callable | None


_NEUTRAL = {
    "top_k": np.inf,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
OPTIONAL = (*_NEUTRAL, "logit_bias", "adapter", "mask", "callback")
_PENALTIES = "repetition_penalty", "presence_penalty", "frequency_penalty"


def prompt_of(tokens: Sequence[int], vocab_size: int) -> list[int]:
    """Returns a prompt as a list of ints.

    Raises:
        ValueError: it is empty, no sequence of integers, or has a token outside of the vocabulary.
    """
    array = np.asarray(tokens) if not isinstance(tokens, str) else np.zeros((0, 0))
    if array.ndim != 1 or not array.size or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(
            "submit: expected a prompt of at least one integer token, such as [1, 2, 3]; got "
            f"{_short(tokens)}"
        )
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"submit: tokens must be from 0 to {vocab_size - 1}; got {low if low < 0 else high}"
        )
    return array.tolist()


def options_of(
    *,
    max_tokens: Any,
    seed: Any,
    stop: Any,
    log_probs: Any,
    logit_bias: Any,
    adapter: Any,
    mask: Any,
    callback: Any,
    adapters: Collection[str],
    vocab_size: int,
    **chosen: Any,
) -> Options:
    """Returns the options of a request.

    Raises:
        ValueError: one of them is outside of its range, or of another kind.
    """
    for name, value in chosen.items():
        if value is None and name != "temperature":
            continue
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise ValueError(f"submit: {name} must be a number; got {_short(value)}")
    check_options("submit", **chosen)
    used = {name: _NEUTRAL[name] if x is None else x for name, x in chosen.items()}
    if adapter is not None and adapter not in adapters:
        there = f"the engine has {', '.join(sorted(adapters)) or 'none'}"
        nearest = did_you_mean(adapter, adapters) if isinstance(adapter, str) else ""
        raise ValueError(f"submit: unknown adapter {_short(adapter)}; {nearest or there}")
    for name, value, method in (("mask", mask, "allowed"), ("callback", callback, "__call__")):
        if value is not None and not callable(getattr(value, method, None)):
            raise ValueError(
                f"submit: {name} needs a method {method}, or must be None; got {_short(value)}"
            )
    biases = _biases(logit_bias, vocab_size)
    return Options(
        integer("submit: max_tokens", max_tokens, 1),
        Sampling(**{name: np.float32(x) for name, x in used.items()}),
        biases,
        bool(biases) or any(chosen[name] is not None for name in _PENALTIES),
        integer("submit: seed", seed, 0, 2**63 - 1),
        stops("submit", stop),
        integer("submit: log_probs", log_probs, 0, MOST_ALTERNATIVES),
        adapter,
        mask,
        callback,
    )


def integer(what: str, value: Any, low: int, high: int | None = None) -> int:
    """Returns an integer from `low` to `high`.

    Raises:
        ValueError: it is none.
    """
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not whole or value < low or (high is not None and value > high):
        span = f">= {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"{what} must be an integer {span}; got {_short(value)}")
    return int(value)


def _biases(biases: Any, vocab_size: int) -> tuple[tuple[int, float], ...]:
    if biases is None:
        return ()
    if not isinstance(biases, Mapping):
        raise ValueError(
            f"submit: logit_bias must be a mapping such as {{5: -100}}; got {_short(biases)}"
        )
    for token, bias in biases.items():
        integer("submit: a token of logit_bias", token, 0, vocab_size - 1)
        if isinstance(bias, bool) or not isinstance(bias, numbers.Real) or not -100 <= bias <= 100:
            raise ValueError(
                f"submit: logit_bias must have numbers from -100 to 100; got {_short(bias)}"
            )
    return tuple((int(token), float(bias)) for token, bias in biases.items())


def stops(caller: str, stop: Any) -> frozenset[int]:
    """Returns stop tokens as a set.

    Raises:
        ValueError: they are no sequence of integers.
    """
    tokens = stop.tolist() if isinstance(stop, np.ndarray) else stop
    if isinstance(tokens, str | bytes) or not isinstance(tokens, Collection):
        raise ValueError(
            f"{caller}: stop must be a sequence of tokens, such as (2,); got {_short(stop)}"
        )
    return frozenset(integer(f"{caller}: a stop token", token, 0) for token in tokens)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
