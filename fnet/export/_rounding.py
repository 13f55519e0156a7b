"""Estimates the rounding errors of a program, so that a comparison with another runtime can tell them from faults.

No two runtimes round alike, and how far their results may be apart depends on the program: a logit near 0 is the
difference of large sums, and a deep network with random weights may amplify the last bit to a visible change. Monte
Carlo arithmetic measures this (Parker, 1997): the program runs several times, and each time the operands and the result
of each operation that rounds are changed by about one unit in the last place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fnet.export import _rebuild

_RUNS = 6
_MANY = 1 << 26
_MARGIN = 8.0      # the allowed difference, in units of the largest that the runs show
_EXACT = set("""neg abs sign floor ceil is_finite not max min and or xor eq ne lt le gt ge select round broadcast
reshape iota transpose reverse concatenate pad slice dynamic_slice dynamic_update_slice gather sort top_k argmax argmin
reduce_max reduce_min reduce_and reduce_or reduce_xor cummax cummin window_max window_min size scan while cond clamp
real imag population_count shift_left shift_right_logical shift_right_arithmetic nextafter""".split())
_SUMS = {"dot", "convolution", "reduce_sum", "cumsum", "window_sum", "scatter", "window_select_add", "reduce_prod",
         "cumprod"}


def spread(stable: Mapping[str, Any], constants: Sequence[Any], weights: Sequence[Any],
           sizes: Mapping[str, int]) -> Callable[[Sequence[Any]], list]:
    """Returns a function of inputs that returns, for each output, by how much rounding may change each element.

    An element that is an integer, NaN or Inf has the spread Inf if it differs between the runs, and otherwise 0.

    Args:
        stable, constants: the program, see `jaxpr.stable`.
        weights: the first inputs of the program.
        sizes: the values of its symbolic sizes.
    """
    @jax.jit
    def run(seed, constants, weights, inputs):
        noise = _Noise(seed)
        return _rebuild.sized(stable, constants, sizes, noise.operations()).body(stable, [*weights, *inputs])

    def measured(inputs):
        inputs = [jnp.asarray(x) for x in inputs]
        runs = [run(jnp.float32(i + 1), list(constants), list(weights), inputs) for i in range(_RUNS)]
        return [_deviation([np.asarray(y) for y in ys]) for ys in zip(*runs)]

    return measured


def _deviation(runs) -> np.ndarray:
    same = np.all([np.equal(y, runs[0]) | ((y != y) & (runs[0] != runs[0])) for y in runs], 0)
    if runs[0].dtype.kind in "iub":
        return np.where(same, 0.0, np.inf)
    runs = np.stack([y.astype(np.promote_types(y.dtype, np.float64)) for y in runs])
    with np.errstate(invalid="ignore"):
        apart = np.ptp(runs.real, 0) + np.ptp(runs.imag, 0)
    return np.where(same, 0.0, np.where(np.isfinite(apart), _MARGIN * apart, np.inf))


def _narrows(old, new) -> bool:
    both = all(jnp.issubdtype(dtype, jnp.floating) for dtype in (old, new))
    return both and jnp.finfo(new).nmant < jnp.finfo(old).nmant


def perturbed(run: Callable[[Mapping[str, Any], Sequence[Any]], list], weights: Mapping[str, Any],
              inputs: Sequence[Any], wanted: Sequence[Any]) -> list[np.ndarray]:
    """Returns by how much the outputs `wanted` of `run(weights, inputs)` change if the last place of each weight and
    input does. This is coarser than `spread`, but needs no stable form. It shows nothing for programs of integers, and
    nothing of what a long sum loses inside of the program."""
    runs = [list(map(np.asarray, wanted))]
    for seed in range(_RUNS if sum(x.size for x in weights.values()) < _MANY else 2):
        draw = np.random.default_rng(seed)
        runs.append(list(map(np.asarray, run({name: _last_place(draw, x) for name, x in weights.items()},
                                             [_last_place(draw, x) for x in inputs]))))
    return [_deviation(ys) for ys in zip(*runs)]


def _last_place(draw, x):
    """Changes the last place of numbers, except of those with few digits, such as 0.5. These are meant to be exact, as
    where a program rounds."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    x = np.asarray(x)
    step = draw.choice(np.array([-1, 0, 1], np.int8), x.shape)
    with np.errstate(all="ignore"):
        wide = x.astype(np.promote_types(x.dtype, np.float32) if x.dtype.kind == "f" else np.float32)
        digits = np.frexp(wide)[0] * min(2 ** (jnp.finfo(x.dtype).nmant // 2), 2 ** 11)
        changed = (wide + wide * (step * wide.dtype.type(jnp.finfo(x.dtype).eps))).astype(x.dtype)
        return np.where(digits == np.rint(digits), x, changed)


class _Noise:
    """Operations of the stable form whose operands and results are changed by about one unit in the last place."""

    def __init__(self, seed):
        self.seed, self.count = seed, 0

    def operations(self) -> dict[str, Callable]:
        return {name: function if name in _EXACT else self._noisy(name, function)
                for name, function in _rebuild.OPERATIONS.items()}

    def _noisy(self, name, function):
        def operation(run, options, types, *arrays):
            if options.get("kind") == "apply":    # JAX accepts no function there that uses `seed`
                run = _rebuild.Run(run.values, run.known, run.shape)
            if name in _SUMS:
                arrays = self._operands(arrays, types)
            results = function(run, options, types, *arrays)
            results = results if isinstance(results, (list, tuple)) else [results]
            if name == "convert" and not _narrows(arrays[0].dtype, types[0][0]):
                return results
            return [self._changed(y, dtype) for y, (dtype, _) in zip(results, types)]
        return operation

    def _operands(self, arrays, types):
        """Changes the smallest operand of a sum, which is enough. The error of a sum grows with its number of terms."""
        floating = [i for i, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.floating)]
        if not floating:
            return arrays
        i = min(floating, key=lambda i: arrays[i].size)
        terms = max(x.size for x in arrays) / max(np.prod(types[0][1]), 1)
        changed = self._changed(arrays[i], arrays[i].dtype, 1 + min(terms, 1e6) ** 0.5 / 8)
        return [changed if j == i else x for j, x in enumerate(arrays)]

    def _changed(self, x, dtype, factor=1.0):
        if not jnp.issubdtype(jnp.dtype(dtype), jnp.floating) or not x.size:
            return x
        self.count += 1
        wide = x.astype(np.float64 if x.dtype == np.float64 else np.float32)
        place = jnp.arange(x.size, dtype=jnp.float32).reshape(x.shape)
        angle = place * np.float32(12.9898) + self.seed * np.float32(78.233 + 37.719 * self.count)
        step = (jnp.cos(angle) * np.float32(factor * float(jnp.finfo(dtype).eps))).astype(wide.dtype)
        return jnp.where(jnp.isfinite(wide), wide + wide * step, wide).astype(x.dtype)
