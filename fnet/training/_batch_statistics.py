"""Recomputes the running statistics of a model from given batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fnet.training.optim._averaging import widened

_NEAR = 1e-3
_NO_AVERAGE = 1 - 1e-6  # a leaf that keeps so much of its old value counts or stays


def batch_statistics(
    f: Callable, params: Any, state: Any, batches: Iterable[Any], *, key: Any = None
) -> Any:
    """Recomputes the running statistics of a model, such as those of BatchNorm, from given batches.

    They are valid only for the parameters with which they were computed, so recompute them after
    you average, prune or quantize these. The new statistic, such as the mean of an activation, is
    the mean of its values in the batches.

    This works for any model whose state has running averages `new = m * old + (1 - m) * statistic`,
    also divided by `1 - m ** counter`, be it when they are updated (Haiku's BatchNorm) or when they
    are used (Equinox's BatchNorm with mode="batch"). Which arrays are averages, and their m, is
    found by calling the model with several states. m may differ from element to element and from
    batch to batch: a mean of each class, which a batch without the class leaves unchanged (m = 1),
    becomes the mean over the batches with the class.

    Args:
        f: the model, called as `f(params, *batch, state=state, key=key, train=True)`, which returns
          (output, new state). If the state contains counters, f is also called with train=False.
        params: the parameters.
        state: the state of the model, for example from the training run. The old running averages
          are not used. Other leaves, such as counters, are returned unchanged; bools are those
          after an update.
        batches: the batches, all of the same size. A batch is a tuple of the arguments of f after
          `params`, or the argument itself if there is only one.
        key: a PRNG key for f. Default None.

    Returns:
        The state with the new statistics.

    Raises:
        ValueError: `batches` is empty, a statistic of a batch is not finite, the new state has
          another structure than `state`, or an array of the state is neither a running average nor
          independent of the others.

    Source: Izmailov et al. (2018), section 3.2; PyTorch's `torch.optim.swa_utils.update_bn`.

    >>> model = nn.BatchNorm()
    >>> params, state = model.init(jax.random.key(0), jnp.ones((1, 1)))
    >>> batches = [jnp.array([[1.0], [3.0]]), jnp.array([[5.0], [7.0]])]
    >>> tr.batch_statistics(model, params, state, batches)["mean"].round(3).tolist()
    [4.0]
    """
    probe, total, share = None, None, None
    for number, batch in enumerate(batches):
        batch = batch if isinstance(batch, tuple) else (batch,)
        if probe is None:
            probe = _Probe(f, params, state, batch, {} if key is None else {"key": key})
            total = share = [np.zeros(x.shape) for x in probe.zeros]
        new, weights = probe.update(batch, number)
        total, share = (
            list(map(np.add, total, new)),
            [old + 1 - weight for old, weight in zip(share, weights)],
        )
    if probe is None:
        raise ValueError("batch_statistics: expected at least one batch; got none")
    return probe.state(total, share)


class _Probe:
    """Finds out what each floating-point array of a state is, by updates of different old states
    with one batch.

    Attributes:
        zeros: for each floating-point array, zeros; float32 in place of 16-bit dtypes.
    """

    def __init__(self, f, params, state, batch, options):
        self.f, self.params, self.batch, self.options = f, params, batch, options
        paths, self.structure = jax.tree_util.tree_flatten_with_path(state)
        self.paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths]
        self.leaves = [leaf for _, leaf in paths]
        self.floats = [
            i
            for i, leaf in enumerate(self.leaves)
            if jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
        ]
        self.zeros = [jnp.zeros_like(widened(self.leaves[i])) for i in self.floats]
        self._update, self._derive = jax.jit(self._updated), jax.jit(self._derived)
        new, self.others, exact = self._derive(batch)
        self.base = self._finite(new, 0)
        self._measure(exact)

    def update(self, batch, number):
        """Returns the new values of zeros after batch `number`, and the weights of the old values."""
        new, _, exact = self._derive(batch)
        new, weights = self._finite(new, number), [np.asarray(x, np.float64) for x in exact]
        if not all(self.exact):  # for example, if the model stops the gradient of its state
            fills = [self._level(i) for i in range(len(self.zeros))]
            runs = self._run(fills, batch)
            weights = [
                weight if exact else (run - base) / fill
                for weight, exact, run, base, fill in zip(weights, self.exact, runs, new, fills)
            ]
        for i, (kind, weight) in enumerate(zip(self.kinds, weights)):
            if isinstance(
                kind, float | np.ndarray
            ):  # what is near is equal, but for rounding errors
                weights[i] = np.where(np.abs(weight - kind) < _NEAR, kind, weight)
                if (weights[i] < -_NEAR).any() or (weights[i] > 1 + _NEAR).any():
                    raise ValueError(
                        f"batch_statistics: batch {number} changes '{self._path(i)}' in another "
                        "way than batch 0: expected running averages, new = m * old + (1 - m) * "
                        "statistic"
                    )
        return new, weights

    def _path(self, i):
        return self.paths[self.floats[i]]

    def _finite(self, arrays, number):
        arrays = [np.asarray(x, np.float64) for x in arrays]
        for i, x in enumerate(arrays):
            if not np.isfinite(x).all():
                raise ValueError(
                    f"batch_statistics: the statistics '{self._path(i)}' of "
                    f"{f'batch {number}' if number else 'the first batch'} are not finite"
                )
        return arrays

    def _whole(self, floats, leaves=None):
        leaves = list(self.leaves if leaves is None else leaves)
        for i, x in zip(self.floats, floats):
            leaves[i] = x
        return self.structure.unflatten(leaves)

    def _updated(self, floats, batch):
        new = self.f(self.params, *batch, state=self._whole(floats), train=True, **self.options)[1]
        if jax.tree.structure(new) != self.structure:
            raise ValueError(
                "batch_statistics: expected f to return (output, new state) with the structure of "
                f"state {self.structure}; got {jax.tree.structure(new)}"
            )
        leaves = jax.tree.leaves(new)
        others = {i: x for i, x in enumerate(leaves) if i not in self.floats}
        return [leaves[i].astype(zero.dtype) for i, zero in zip(self.floats, self.zeros)], others

    def _derived(self, batch):
        """Returns the new values of zeros, the other arrays, and the derivatives of the new values
        with respect to the old ones, which have no rounding errors of the statistics."""
        ones = [jnp.ones_like(x) for x in self.zeros]
        new, weights, others = jax.jvp(
            lambda floats: self._updated(floats, batch), (self.zeros,), (ones,), has_aux=True
        )
        return new, others, weights

    def _run(self, fills, batch):
        floats = [
            jnp.broadcast_to(jnp.asarray(fill, x.dtype), x.shape)
            for x, fill in zip(self.zeros, fills)
        ]
        return [np.asarray(x, np.float64) for x in self._update(floats, batch)[0]]

    def _measure(self, exact):
        """Finds the kind of each array: its weights m if it is an average (a float if they are
        equal), (array, c) if it is c times an average, None if it depends on itself alone, in
        another way."""
        fills = [
            [self._level(i) * draw for i, draw in enumerate(draws)]
            for draws in np.random.default_rng(0).uniform(1, 2, (2, len(self.zeros)))
        ]
        runs = [self._run(each, self.batch) for each in fills]
        self.kinds, self.exact = [], []
        for i, base in enumerate(self.base):
            first, second = ((run[i] - base) / fill[i] for run, fill in zip(runs, fills))
            derivative = np.asarray(exact[i], np.float64)
            self.exact.append(bool((np.abs(derivative - first) < _NEAR).all()))
            weights = derivative if self.exact[i] else first
            self.kinds.append(
                _kind(weights, base) if (np.abs(first - second) < _NEAR).all() else None
            )
        for i, kind in enumerate(self.kinds):
            if kind is None and self._depends_on_others(i, fills[0][i], runs[0][i]):
                self.kinds[i] = self._multiple(i, [self.base, *runs])

    def _level(self, i):
        """A value of each element that is of the size of its statistic, so that none is lost beside
        the other."""
        base = np.abs(self.base[i])
        sizes = np.where(base > 0, base, base.max(initial=0.0) or 1.0)
        return np.maximum(2.0 ** np.ceil(np.log2(sizes)), 2.0**-100)

    def _depends_on_others(self, i, fill, full):
        alone = [fill if i == j else 0.0 for j in range(len(self.zeros))]
        return not np.isclose(
            self._run(alone, self.batch)[i], full, rtol=1e-5, atol=1e-5 * self._level(i)
        ).all()

    def _multiple(self, i, runs):
        """Returns (j, c) if the new value of array i is c times the new value of the average j in
        all runs."""
        for j, kind in enumerate(self.kinds):
            if (
                not isinstance(kind, float)
                or kind >= _NO_AVERAGE
                or runs[0][i].shape != runs[0][j].shape
            ):
                continue
            sums = (
                sum((run[i] * run[j]).sum() for run in runs),
                sum((run[j] ** 2).sum() for run in runs),
            )
            factor = sums[0] / sums[1] if sums[1] else 0.0
            if factor and all(
                np.allclose(run[i], factor * run[j], rtol=1e-4, atol=1e-5) for run in runs
            ):
                return j, factor
        raise ValueError(
            f"batch_statistics: '{self._path(i)}' depends on other arrays of the state, and is "
            "not a debiased average of one of them: expected running averages, new = m * old + "
            "(1 - m) * statistic, of statistics that do not depend on the state"
        )

    def state(self, total, share):
        """Returns the state with the averages, from the sums of the updates of zeros and of 1 - m
        over the batches."""
        values = [widened(self.leaves[i]) for i in self.floats]
        biased = list(values)  # for a model that divides averages by 1 - m ** counter
        for i, kind in enumerate(self.kinds):
            if isinstance(kind, float | np.ndarray):
                moves = share[i] > 1 - _NO_AVERAGE
                new = total[i] / np.where(moves, share[i], 1.0)
                values[i] = jnp.asarray(
                    np.where(moves, new, np.asarray(values[i], np.float64)), values[i].dtype
                )
                biased[i] = values[i] * jnp.asarray(1 - kind ** self._counter(), values[i].dtype)
        for i, kind in enumerate(self.kinds):
            if isinstance(kind, tuple):  # factor = 1 / (1 - m ** (counter + 1)), see Haiku
                j, factor = kind
                values[i] = biased[i] = values[j]
                values[j] = biased[j] = values[j] * (1 - (1 - 1 / factor) / self.kinds[j])
        is_bool = lambda x: jnp.issubdtype(jnp.result_type(x), jnp.bool_)
        leaves = [self.others[i] if is_bool(x) else x for i, x in enumerate(self.leaves)]
        for chosen in (values, biased):
            if self._independent_of_counters(chosen, leaves, values):
                cast = [
                    x.astype(jnp.result_type(self.leaves[i])) for i, x in zip(self.floats, chosen)
                ]
                return self._whole(cast, leaves)
        raise ValueError(
            "batch_statistics: the output of the model depends on the counters of its state in an "
            "unknown way: expected averages that are divided by 1 - m ** counter, and equal "
            "counters"
        )

    def _counters(self):
        """The integers of the state that an update changes."""
        return [
            i
            for i, x in self.others.items()
            if jnp.issubdtype(jnp.result_type(x), jnp.integer)
            and not np.array_equal(x, self.leaves[i])
        ]

    def _counter(self):
        counts = {int(n) for i in self._counters() for n in np.ravel(self.leaves[i])}
        return counts.pop() if len(counts) == 1 else 0

    def _independent_of_counters(self, floats, leaves, averages):
        """Whether, without training, the outputs with these arrays equal those for `averages` after
        many updates."""
        counters = self._counters()
        if not counters:
            return True
        many = [
            jnp.full_like(x, jnp.iinfo(jnp.result_type(x)).max // 2) if i in counters else x
            for i, x in enumerate(leaves)
        ]
        outputs = [
            self.f(self.params, *self.batch, state=self._whole(*each), train=False, **self.options)
            for each in ((floats, leaves), (averages, many))
        ]
        pairs = zip(
            *(jax.tree.leaves(each[0] if isinstance(each, tuple) else each) for each in outputs)
        )
        return all(np.allclose(a, b, rtol=1e-3, atol=1e-4, equal_nan=True) for a, b in pairs)


def _kind(weights, base):
    """Returns the weights of the old values of an array if it is an average. `base` is the update
    of zeros."""
    middle = float(np.median(weights)) if weights.size else 1.0
    if not (np.abs(weights - middle) > _NEAR).any():
        return float(weights.ravel()[0]) if weights.size else 1.0
    moves = weights < _NO_AVERAGE
    return (
        weights
        if (weights > -_NEAR).all() and (weights < 1 + _NEAR).all() and (base[moves] != 0).any()
        else None
    )
