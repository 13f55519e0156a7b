"""Recomputes the running statistics of a model from given batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fnet.training._averaging import widened

_NEAR = 1e-3
_NO_AVERAGE = 1 - 1e-6    # a leaf that keeps so much of its old value counts or stays


def batch_statistics(f: Callable, params: Any, state: Any, batches: Iterable[Any], *, key: Any = None) -> Any:
    """Recomputes the running statistics of a model, such as those of BatchNorm, from the given batches.

    The running statistics of BatchNorm are valid only for the parameters with which they were computed. Therefore,
    recompute the statistics after you average, prune or quantize the parameters. Each statistic, such as the mean of an
    activation, is computed for each of the given batches, and the new running statistic is the mean of the results.

    The function works for any model whose state contains running averages `new = m * old + (1 - m) * statistic`, and
    for averages that are divided by `1 - m ** counter`, either when they are updated (Haiku's BatchNorm) or when they
    are used (Equinox's BatchNorm with mode="batch"). It finds m, and which arrays are averages, by calling the model
    with several states.

    Args:
        f: the model, a function that is called as `f(params, *batch, state=state, key=key, train=True)` and returns
            (output, new state). If the state contains counters, f is also called with train=False.
        params: the parameters.
        state: the state of the model, for example from the training run. The old values of the running averages in
            `state` are not used. Leaves of `state` that are not running averages, such as counters, are returned
            unchanged; bools are those after an update.
        batches: the batches, all of the same size. A batch is a tuple of the arguments of f after `params`. If f has
            only one argument after `params`, a batch may be this argument itself instead of a tuple of length 1.
        key: a PRNG key for f. Default None.

    Returns:
        The state of the model with the new statistics.

    Raises:
        ValueError: `batches` is empty, a statistic of the first batch is not finite, the new state has another
            structure than `state`, or an array of the state is neither a running average nor independent of the others.

    Source: Izmailov et al. (2018), section 3.2; PyTorch's `torch.optim.swa_utils.update_bn`.

    >>> model = nn.BatchNorm()
    >>> params, state = model.init(jax.random.key(0), jnp.ones((1, 1)))
    >>> batches = [jnp.array([[1.0], [3.0]]), jnp.array([[5.0], [7.0]])]
    >>> tr.batch_statistics(model, params, state, batches)["mean"].round(3).tolist()
    [4.0]
    """
    probe, total, count = None, None, 0
    for batch in batches:
        batch = batch if isinstance(batch, tuple) else (batch,)
        if probe is None:
            probe = _Probe(f, params, state, batch, {} if key is None else {"key": key})
            total = [jnp.zeros_like(x) for x in probe.zeros]
        total = list(map(jnp.add, total, probe.updated(probe.zeros, batch)))
        count += 1
    if not count:
        raise ValueError("batch_statistics: expected at least one batch; got none")
    return probe.state([x / count for x in total])


class _Probe:
    """Finds out what each floating-point array of a state is, by updates of different old states with one batch.

    Attributes:
        zeros: for each floating-point array, zeros; float32 in place of 16-bit dtypes.
    """

    def __init__(self, f, params, state, batch, options):
        self.f, self.params, self.batch, self.options = f, params, batch, options
        paths, self.structure = jax.tree_util.tree_flatten_with_path(state)
        self.paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths]
        self.leaves = [leaf for _, leaf in paths]
        self.floats = [i for i, leaf in enumerate(self.leaves) if jnp.issubdtype(jnp.result_type(leaf), jnp.floating)]
        self.zeros = [jnp.zeros_like(widened(self.leaves[i])) for i in self.floats]
        self._update = jax.jit(self._updated)
        after, self.others = self._update(self.zeros, batch)
        self.base = [np.asarray(x, np.float64) for x in after]
        for path, x in zip((self.paths[i] for i in self.floats), self.base):
            if not np.isfinite(x).all():
                raise ValueError(f"batch_statistics: the statistics '{path}' of the first batch are not finite")
        self._measure()

    def _whole(self, floats, leaves=None):
        leaves = list(self.leaves if leaves is None else leaves)
        for i, x in zip(self.floats, floats):
            leaves[i] = x
        return self.structure.unflatten(leaves)

    def _updated(self, floats, batch):
        new = self.f(self.params, *batch, state=self._whole(floats), train=True, **self.options)[1]
        if jax.tree.structure(new) != self.structure:
            raise ValueError("batch_statistics: expected f to return (output, new state) with the structure of state "
                             f"{self.structure}; got {jax.tree.structure(new)}")
        leaves = jax.tree.leaves(new)
        others = {i: x for i, x in enumerate(leaves) if i not in self.floats}
        return [leaves[i].astype(zero.dtype) for i, zero in zip(self.floats, self.zeros)], others

    def updated(self, floats, batch):
        return self._update(floats, batch)[0]

    def _measure(self):
        """Finds the kind of each array: its weight m if it is an average, (array, c) if it is c times an average, None
        if it depends on itself alone, in another way."""
        fills = [[self._level(i) * draw for i, draw in enumerate(draws)] for draws in
                 np.random.default_rng(0).uniform(1, 2, (2, len(self.zeros)))]
        runs = [self.updated([jnp.full_like(x, fill) for x, fill in zip(self.zeros, each)], self.batch)
                for each in fills]
        runs = [[np.asarray(x, np.float64) for x in run] for run in runs]
        exact = self._derivatives(fills[0])
        self.kinds = []
        for i, base in enumerate(self.base):
            weights = np.stack([(run[i] - base) / fill[i] for run, fill in zip(runs, fills)])
            middle = float(np.median(weights)) if weights.size else 1.0
            average = not (np.abs(weights - middle) > _NEAR).any()
            near = average and weights.size and (np.abs(exact[i] - middle) < _NEAR).all()
            self.kinds.append(float(exact[i].ravel()[0]) if near else middle if average else None)
        for i, kind in enumerate(self.kinds):
            if kind is None and self._depends_on_others(i, fills[0][i], runs[0][i]):
                self.kinds[i] = self._multiple(i, [self.base, *runs])

    def _level(self, i):
        return 2.0 ** np.ceil(np.log2(max(1.0, np.abs(self.base[i]).max(initial=0.0))))

    def _derivatives(self, fills):
        """The derivatives of the new values with respect to the old ones: without the rounding errors of statistics."""
        tangents = [jnp.full_like(x, fill) for x, fill in zip(self.zeros, fills)]
        moved = jax.jvp(lambda floats: self.updated(floats, self.batch), (self.zeros,), (tangents,))[1]
        return [np.asarray(x, np.float64) / fill for x, fill in zip(moved, fills)]

    def _depends_on_others(self, i, fill, full):
        alone = [jnp.full_like(x, fill) if i == j else x for j, x in enumerate(self.zeros)]
        return not np.allclose(self.updated(alone, self.batch)[i], full, rtol=1e-5, atol=1e-5 * self._level(i))

    def _multiple(self, i, runs):
        """Returns (j, c) if the new value of array i is c times the new value of the average j in all runs."""
        for j, kind in enumerate(self.kinds):
            if not isinstance(kind, float) or kind >= _NO_AVERAGE or runs[0][i].shape != runs[0][j].shape:
                continue
            sums = sum((run[i] * run[j]).sum() for run in runs), sum((run[j] ** 2).sum() for run in runs)
            factor = sums[0] / sums[1] if sums[1] else 0.0
            if factor and all(np.allclose(run[i], factor * run[j], rtol=1e-4, atol=1e-5) for run in runs):
                return j, factor
        raise ValueError(f"batch_statistics: '{self.paths[self.floats[i]]}' depends on other arrays of the state, and "
                         "is not a debiased average of one of them: expected running averages, new = m * old + "
                         "(1 - m) * statistic, of statistics that do not depend on the state")

    def state(self, means):
        """Returns the state whose averages are those that `means`, the means of the updates of zeros, imply."""
        values = [widened(self.leaves[i]) for i in self.floats]
        biased = list(values)                               # for a model that divides averages by 1 - m ** counter
        for i, kind in enumerate(self.kinds):
            if isinstance(kind, float) and kind < _NO_AVERAGE:
                values[i] = means[i] / (1 - kind)
                biased[i] = values[i] * (1 - kind ** self._counter())
        for i, kind in enumerate(self.kinds):
            if isinstance(kind, tuple):                     # factor = 1 / (1 - m ** (counter + 1)), see Haiku
                j, factor = kind
                values[i] = biased[i] = values[j]
                values[j] = biased[j] = values[j] * (1 - (1 - 1 / factor) / self.kinds[j])
        is_bool = lambda x: jnp.issubdtype(jnp.result_type(x), jnp.bool_)
        leaves = [self.others[i] if is_bool(x) else x for i, x in enumerate(self.leaves)]
        for chosen in (values, biased):
            if self._independent_of_counters(chosen, leaves, values):
                cast = [x.astype(jnp.result_type(self.leaves[i])) for i, x in zip(self.floats, chosen)]
                return self._whole(cast, leaves)
        raise ValueError("batch_statistics: the output of the model depends on the counters of its state in an unknown "
                         "way: expected averages that are divided by 1 - m ** counter, and equal counters")

    def _counters(self):
        """The integers of the state that an update changes."""
        return [i for i, x in self.others.items() if jnp.issubdtype(jnp.result_type(x), jnp.integer)
                and not np.array_equal(x, self.leaves[i])]

    def _counter(self):
        counts = {int(n) for i in self._counters() for n in np.ravel(self.leaves[i])}
        return counts.pop() if len(counts) == 1 else 0

    def _independent_of_counters(self, floats, leaves, averages):
        """Whether, without training, the outputs with these arrays equal those for `averages` after many updates."""
        counters = self._counters()
        if not counters:
            return True
        many = [jnp.full_like(x, jnp.iinfo(jnp.result_type(x)).max // 2) if i in counters else x
                for i, x in enumerate(leaves)]
        outputs = [self.f(self.params, *self.batch, state=self._whole(*each), train=False, **self.options)
                   for each in ((floats, leaves), (averages, many))]
        pairs = zip(*(jax.tree.leaves(each[0] if isinstance(each, tuple) else each) for each in outputs))
        return all(np.allclose(a, b, rtol=1e-3, atol=1e-4, equal_nan=True) for a, b in pairs)
