"""Estimates the rounding errors of a program, so that a comparison with another runtime can tell
them from faults.

No two runtimes round alike, and how far their results may be apart depends on the program: a logit
near 0 is the difference of large sums, and a deep network with random weights may amplify the last
bit to a visible change. Monte Carlo arithmetic measures this (Parker, 1997): the program runs
several times, and each time the operands and the result of each operation that rounds are changed
by about one unit in the last place.

Every bundle (file of an exported model) contains a copy of this module as rounding.py.
"""

import numpy as np

if __package__:
    from fnet.export.standalone import _interpret as interpret
else:
    import interpret

_RUNS = 6
_MARGIN = 8.0  # the allowed difference, in units of the largest that the runs show
_EXACT = set(
    """neg abs sign floor ceil is_finite not max min and or xor eq ne lt le gt ge select round broadcast
reshape iota transpose reverse concatenate pad slice dynamic_slice dynamic_update_slice gather sort top_k argmax argmin
reduce_max reduce_min reduce_and reduce_or reduce_xor cummax cummin window_max window_min size scan while cond clamp
real imag population_count shift_left shift_right_logical shift_right_arithmetic nextafter total_lt total_le""".split()
)
_SUMS = {
    "dot",
    "convolution",
    "reduce_sum",
    "cumsum",
    "window_sum",
    "scatter",
    "window_select_add",
    "reduce_prod",
    "cumprod",
    "fft",
}


def spread(program, constants, inputs, sizes):
    """Returns, for each output of a program, by how much rounding may change each element.

    An element that is an integer, NaN or Inf has the spread Inf if it differs between the runs, and
    otherwise 0. The arguments are those of `interpret.run`.
    """
    runs = [interpret.run(program, constants, inputs, sizes, _Noisy(seed)) for seed in range(_RUNS)]
    return [_deviation(outputs) for outputs in zip(*runs)]


def perturbed(run, weights, inputs):
    """Returns by how much the outputs of `run(weights, inputs)` change if the last place of each
    weight and input does.

    This is coarser than `spread`, but as fast as `run`. It shows nothing for programs of integers,
    and nothing of what a long sum loses inside of the program.
    """
    runs = []
    for seed in range(_RUNS):
        draw = np.random.default_rng(seed)
        runs.append(
            list(
                map(
                    np.asarray,
                    run(
                        {name: _last_place(draw, x) for name, x in weights.items()},
                        [_last_place(draw, x) for x in inputs],
                    ),
                )
            )
        )
    return [_deviation(outputs) for outputs in zip(*runs)]


def _deviation(runs):
    same = np.all([np.equal(y, runs[0]) | ((y != y) & (runs[0] != runs[0])) for y in runs], 0)
    if runs[0].dtype.kind in "iub":
        return np.where(same, 0.0, np.inf)
    runs = np.stack([y.astype(np.complex128 if y.dtype.kind == "c" else np.float64) for y in runs])
    with np.errstate(invalid="ignore"):
        apart = np.ptp(runs.real, 0) + np.ptp(runs.imag, 0)
    return np.where(same, 0.0, np.where(np.isfinite(apart), _MARGIN * apart, np.inf))


def _last_place(draw, x):
    """Changes the last place of numbers, except of those with few digits, such as 0.5. These are
    meant to be exact, as where a program rounds."""
    x = np.asarray(x)
    if not _floating(x.dtype) or x.dtype.kind == "c":
        return x
    unit, wide = _unit(x.dtype), _wide(x.dtype)
    digits = round(-np.log2(unit))
    unused = (
        1 << digits - min(digits // 2, 11)
    ) - 1  # the bits that are 0 in numbers with few digits
    # A prime number of steps, repeated, is drawn much faster than one for each of 10^8 weights.
    steps = np.resize(
        draw.choice(np.array([-1, 0, 1]), 65537).astype(wide) * wide.type(unit), x.shape
    )
    with np.errstate(all="ignore"):
        return np.where(
            x.view(f"u{x.itemsize}") & unused == 0, x, (x * (1 + steps)).astype(x.dtype)
        )


def _floating(dtype):
    return dtype.kind in "fc" or (dtype.kind == "V" and "float" in dtype.name)


def _wide(dtype):
    """The dtype in which numbers are changed."""
    return dtype if dtype.kind in "fc" and dtype.itemsize > 2 else np.dtype(np.float32)


def _unit(dtype):
    """The distance of 1 and the next larger number."""
    if dtype.kind in "fc":
        return float(np.finfo(dtype).eps)
    import ml_dtypes

    return float(ml_dtypes.finfo(dtype).eps)


class _Noisy:
    """Computes operations whose operands and results are changed by about one unit in the last
    place."""

    def __init__(self, seed):
        self.draw = np.random.default_rng(seed)

    def __call__(self, operation, compute, arrays, types):
        if operation in _EXACT:
            return compute(*arrays)
        if operation in _SUMS:
            arrays = self._operands(arrays, types)
        results = compute(*arrays)
        if operation == "convert" and not _narrows(arrays[0].dtype, types[0][0]):
            return results
        return [self._changed(np.asarray(y), dtype) for y, (dtype, _) in zip(results, types)]

    def _operands(self, arrays, types):
        """Changes the smallest operand of a sum, which is enough. The error of a sum grows with its
        number of terms."""
        floating = [i for i, x in enumerate(arrays) if _floating(x.dtype)]
        if not floating:
            return arrays
        i = min(floating, key=lambda i: arrays[i].size)
        terms = max(x.size for x in arrays) / max(np.prod(types[0][1]), 1)
        changed = self._changed(arrays[i], arrays[i].dtype, 1 + min(terms, 1e6) ** 0.5 / 8)
        return [changed if j == i else x for j, x in enumerate(arrays)]

    def _changed(self, x, dtype, factor=1.0):
        if not _floating(dtype):
            return x
        wide = x.astype(_wide(x.dtype), copy=False)
        step = self.draw.uniform(-1, 1, x.shape) * (factor * _unit(dtype))
        return np.where(np.isfinite(wide), wide + wide * step.astype(wide.dtype), wide).astype(
            x.dtype
        )


def _narrows(old, new):
    return _floating(old) and _floating(new) and _unit(new) > _unit(old)
