"""The search for a counterexample: two inputs that differ at one position only, and whose outputs
differ at another."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fnet.introspect._drawn import filled

_HOSTILE = ("another value", "NaN", "Inf", "1e30", "-0.0")


@dataclasses.dataclass(frozen=True)
class Counterexample:
    """Two inputs that differ at one position, and whose outputs differ at another.

    Attributes:
        changed: the position of the input that was changed.
        affected: the position of the output that changed with it.
        value: what the input was changed to: "another value", "NaN", "Inf", "1e30" or "-0.0".
        inputs: the arrays of both inputs.
        outputs: the arrays of both outputs.
    """

    changed: int
    affected: int
    value: str
    inputs: tuple[list, list] = dataclasses.field(repr=False)
    outputs: tuple[list, list] = dataclasses.field(repr=False)

    def __str__(self) -> str:
        return f"{self.value} at position {self.changed} changes position {self.affected}"


def find(
    f: Callable[..., Sequence],
    arrays: Sequence,
    sources: dict[int, int],
    targets: Mapping[int, Any],
    leak: Callable[[Any, np.ndarray], int | None],
    first: tuple[int, int] | None,
) -> tuple[Counterexample | None, int]:
    """Returns a counterexample, or None, and the number of trials.

    Args:
        f: the function, of arrays to arrays.
        arrays: the inputs; those that are only described are drawn.
        sources: {input: axis} whose position is changed.
        targets: {output: axis} whose positions are compared.
        leak: `leak((output, axis, j), differs)`, the position of an output that must not depend on
            input position j but differs, or None. `differs` is a function of axes: where any bit
            differs along them.
        first: a pair (output position, input position) to begin with.
    """
    run = jax.jit(lambda *inputs: list(f(*inputs)))
    rng = np.random.default_rng(0)
    trials = 0
    for inputs in _drawn(arrays, sources, rng):
        before = _numbers(run(*inputs))
        size = next(np.shape(inputs[k])[axis] for k, axis in sources.items())
        positions = list(dict.fromkeys([*([first[1]] if first else []), size - 1, 0, size // 2]))
        for j in positions:
            for value in _HOSTILE:
                changed = _changed(inputs, sources, j, value, rng)
                if changed is None:
                    continue
                trials += 1
                after = _numbers(run(*changed))
                for k, axis in targets.items():
                    differs = functools.partial(_differs, before[k], after[k])
                    wrong = leak((k, axis, j), differs)
                    if wrong is not None:
                        pairs = (inputs, changed), (before, after)
                        return Counterexample(j, wrong, value, *pairs), trials
    return None, trials


def _numbers(outputs: Sequence) -> list[np.ndarray]:
    """The results as arrays; keys as their words."""
    keys = jax.dtypes.prng_key
    plain = [jax.random.key_data(y) if jax.dtypes.issubdtype(y.dtype, keys) else y for y in outputs]
    return [np.asarray(y) for y in plain]


def _drawn(arrays: Sequence, sources: dict[int, int], rng: np.random.Generator) -> Iterator[list]:
    given = not any(isinstance(x, jax.ShapeDtypeStruct) for x in arrays)
    for _ in range(1 if given else 2):
        yield [filled(x, rng) for x in arrays]


def _changed(
    inputs: list, sources: dict[int, int], j: int, value: str, rng: np.random.Generator
) -> list | None:
    """The inputs with another value at one position, or None if no input can have it."""
    changed, differs = list(inputs), False
    for k, axis in sources.items():
        x = inputs[k]
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
            continue
        array = np.array(x)
        index = (slice(None),) * axis + (j,)
        old = array[index]
        if value == "another value":
            if array.dtype.kind in "iu":
                other = array.take(
                    (j + 1 + rng.integers(max(array.shape[axis] - 1, 1))) % array.shape[axis], axis
                )
                new = np.where((other == old).all(), np.where(old == 0, 1, old - 1), other)
            elif array.dtype == bool:
                new = ~old
            else:
                new = (rng.normal(size=old.shape) * 3).astype(array.dtype)
        elif jnp.issubdtype(x.dtype, jnp.floating):
            new = np.full(old.shape, float(value), array.dtype)
        else:
            continue
        array[index] = new
        differs = differs or array.tobytes() != np.asarray(x).tobytes()
        changed[k] = jnp.asarray(array)
    return changed if differs else None


def _differs(a: np.ndarray, b: np.ndarray, axes: Sequence[int]) -> np.ndarray:
    """For each position along some axes, whether any bit differs. NaN equals NaN."""
    a, b = (np.moveaxis(x, axes, range(len(axes))) for x in (a, b))
    shape = a.shape[: len(axes)]
    if a.dtype.kind not in "biuf":
        a, b = a.astype(np.float32), b.astype(np.float32)
    same = a == b
    if a.dtype.kind == "f":
        same = (same & (np.signbit(a) == np.signbit(b))) | (np.isnan(a) & np.isnan(b))
    return ~same.reshape((*shape, -1)).all(-1)
