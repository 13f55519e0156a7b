"""Finds field values (such as a smaller width) for which a model computes the same as its pruned
version."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fnet import _jax
from fnet.compress._shrink._groups import Cut
from fnet.jaxpr import flatten

_MOST = 512  # combinations of fields that are tried


def smaller_model(
    f: Any, shrunk: Callable, args: tuple, kwargs: dict, removed: Mapping[str, Cut]
) -> Any:
    """Finds a model that has the same class as f and the same results as the pruned function
    `shrunk`.

    The returned model has smaller values of fields such as the width. A model is accepted if its
    traced program has the same operations and the same constants as the traced program of `shrunk`.
    If no such model is found, the result is None.

    Args:
        f: a model. If f is not a dataclass, the result is None.
        shrunk: the function without the channels, heads and hidden units that `shrink` has removed.
        args, kwargs: the arguments of `shrunk`, with arrays from which indices have been removed.
        removed: the removed and the remaining indices of each leaf, {key of the leaf: `Cut`}.
    """
    if not dataclasses.is_dataclass(f) or isinstance(f, type):
        return None
    new: dict[int, list[int]] = {}
    for cut in removed.values():
        for factors, kept in zip(cut.factors, cut.kept):
            left = [n if each is None else len(each) for n, each in zip(factors, kept)]
            for size, count in (*zip(factors, left), (math.prod(factors), math.prod(left))):
                if count < size and count not in new.setdefault(size, []):
                    new[size].append(count)
    options = {
        field.name: _options(getattr(f, field.name), new)
        for field in dataclasses.fields(f)
        if field.init
    }
    if not 1 < math.prod(map(len, options.values())) <= _MOST:
        return None
    wanted = None
    for values in itertools.islice(itertools.product(*options.values()), 1, None):
        candidate = dataclasses.replace(f, **dict(zip(options, values)))
        try:
            traced = _jax.make_jaxpr(lambda args, kwargs, f=candidate: f(*args, **kwargs))(
                args, kwargs
            )
        except (ValueError, TypeError):  # the parameters do not fit these fields
            continue
        wanted = wanted or _text(
            _jax.make_jaxpr(lambda args, kwargs: shrunk(*args, **kwargs))(args, kwargs)
        )
        if _text(traced) == wanted:
            return candidate
    return None


def _text(closed) -> str:
    """Returns all operations and constants of a program as text."""
    closed = flatten(closed)
    return "\n".join([str(closed.jaxpr), *(str(np.asarray(x).tolist()) for x in closed.consts)])


def _options(value, new) -> list:
    if isinstance(value, int) and not isinstance(value, bool):
        return [value, *new.get(value, [])]
    if (
        isinstance(value, tuple)
        and value
        and all(isinstance(n, int) and not isinstance(n, bool) for n in value)
    ):
        return [
            value,
            *(
                found
                for found in itertools.product(*(_options(n, new) for n in value))
                if found != value
            ),
        ]
    return [value]
