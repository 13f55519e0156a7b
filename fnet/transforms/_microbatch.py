"""Gradient accumulation: a function of a large batch, computed slice by slice."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fnet import _jax
from fnet.jaxpr import wraps


def microbatch(f: Callable, n: int, *, argnums: int | tuple[int, ...] | None = None,
               weight: Callable | None = None) -> Callable:
    """Evaluates `f` on n slices of the batch, one after another in a scan, and averages the results.

        microbatch(f, n)(params, batch) = sum_i w_i f(params, batch_i) / sum_i w_i

    w_i is the weight of slice i. Only the intermediate values of one slice are in memory at a time. With equal weights
    (the default), the result equals f(params, batch) if f computes a mean over the rows of the batch, or the gradient
    of such a mean. The function f must not use statistics across rows, as batch normalization does. If f is a weighted
    mean, pass a function `weight` that returns the sum of the weights in a slice.

        step = ft.microbatch(ft.value_and_grad(loss), 8)
        step = ft.microbatch(ft.value_and_grad(loss), 8, weight=lambda params, batch: batch["weight"].sum())

    Weights may be negative and may depend on the parameters. A slice whose weight is exactly 0 has no effect on the
    results or on their derivatives of any order. If f or a derivative of f is NaN or infinite on a slice with weight 0,
    this value is ignored. If the positive and negative weights in a slice add up to 0, the slice has no effect, because
    the weighted mean of its rows does not exist. If the weights of all slices add up to 0, floating-point results are
    NaN or infinite.

    Slice i contains rows i, i + n, i + 2n, ..., so that no row is moved to another device if the batch is sharded. If a
    batched argument is a scalar `jax.random.key`, the index of the slice is folded into the key, so that slices have
    different random numbers. Scalars that are not keys, and leaves that are not arrays, are passed to every slice
    unchanged. With n = 1, f is called once with unchanged arguments, and its outputs are converted to arrays.

    Args:
        f: a function of parameters and batched arguments. Floating-point outputs are averaged: they are summed in at
            least float32 and returned in their own dtype. Integer outputs, such as counts, are summed over the slices.
        n: the number of slices, a divisor of the number of rows.
        argnums: the positions of the arguments that are batched along the first axis of their leaves. Default None:
            all arguments except the first.
        weight: a function with the arguments of f, which receives one slice in place of the batch and returns a real
            scalar, the weight of the slice. If `weight` is None, every weight is 1. Default None.

    Returns:
        A function with f's signature and output structure.

    Raises:
        TypeError: a batched argument is a `jax.Ref`, or `weight` is not a function.
        ValueError: the batched arguments contain no arrays or have different numbers of rows, n does not divide the
            number of rows, or an output is neither floating point nor integer. A ValueError is also raised if the
            function `weight` does not return a real scalar, or has side effects.

    >>> f = lambda w, x: jnp.mean(w * x)
    >>> float(ft.microbatch(f, 2)(2.0, jnp.arange(4.0)))
    3.0
    """
    if not isinstance(n, (int, np.integer)) or isinstance(n, bool) or n < 1:
        raise ValueError(f"microbatch: the number of slices must be a positive integer; got {n!r}")
    if weight is not None and not callable(weight):
        raise TypeError("microbatch: weight= must be a function of f's arguments that returns the weight of a slice; "
                        f"got {weight!r}")
    n = int(n)

    @wraps(f, "microbatch")
    def sliced(*args, **options):
        where = batched("microbatch", args, argnums)
        rows = batch_rows("microbatch", args, where)
        if rows % n:
            raise ValueError(f"microbatch: a batch of {rows} rows cannot be divided into {n} equal slices; use "
                             f"{max(d for d in range(1, n + 1) if rows % d == 0)}")
        if n == 1:
            return jax.tree.map(_strong, f(*args, **options))
        stacked, rebuild = _slices(args, where, n)
        first = jax.tree.map(lambda a: a[0], stacked)
        run, shapes, _, inputs = _traced(lambda i, stacked: _arrays(f(*rebuild(i, stacked), **options)), first)
        axes = frozenset()
        if weight is not None:
            weigh, of_weight, effects, more = _traced(
                lambda i, stacked: _scalar(weight(*rebuild(i, stacked), **options)), first)
            axes = _jax.varies_over(of_weight)
            if missing := set().union(*(axes - _jax.varies_over(x) for x in jax.tree.leaves((inputs, more)))):
                raise ValueError(f"microbatch: inside shard_map the weights vary over the mesh axes {sorted(missing)} "
                                 "and some arguments do not. Use shard_map(..., check_vma=False), or cast these "
                                 f"arguments first: jax.lax.pcast(x, {tuple(sorted(missing))}, to='varying')")
            if effects:
                raise ValueError("microbatch: weight= must not have side effects, since it is evaluated twice for each "
                                 f"slice; got {', '.join(sorted({type(e).__name__ for e in effects}))}. Move callbacks "
                                 "and uses of a jax.Ref into the function itself")

        def body(total, slice_):
            if weight is None:
                return jax.tree.map(lambda t, y: t + _widened(y), total, run(*slice_)), None
            live = weigh(*slice_, lax.stop_gradient) != 0
            gate = functools.partial(_gate, live)
            y, share = run(*slice_, gate), jnp.where(live, weigh(*slice_, gate), 0)
            return (jax.tree.map(lambda t, y: t + _weighted(y, share, live), total[0], y), total[1] + share), None

        start = jax.tree.map(lambda s: _jax.zeros(s.shape, _wide(s), _jax.varies_over(s) | axes), shapes)
        if weight is not None:
            start = start, _jax.zeros((), of_weight.dtype, axes)
        total, _ = lax.scan(body, start, (jnp.arange(n, dtype=jnp.int32), stacked))
        total, share = (total, jnp.float32(n)) if weight is None else total
        return jax.tree.map(lambda y, s: _mean(y, share, s.dtype), total, shapes)

    return sliced


def _arrays(result):
    """Checks that the results of f are arrays, so that their mean can be computed. Returns the results."""
    for path, leaf in jax.tree.leaves_with_path(result):
        try:
            jax.typeof(leaf)
        except TypeError:
            raise TypeError(f"microbatch: the function must return arrays, whose mean is computed; result"
                            f"{jax.tree_util.keystr(path)} is a {type(leaf).__name__}. Return only arrays") from None
    return result


def _traced(f, first):
    """Traces `f(i, slice)` once.

    Returns:
        (run, shapes, effects, values). `run(i, slice, gate)` evaluates `f(i, slice)`, but first replaces each
        floating-point array x in `slice` and in the closure of f by `gate(x)`. `shapes` are the shapes of f's outputs.
        `effects` are the side effects of f. `values` is a list of the floating-point arrays in `slice` and in the
        closure of f.
    """
    traced, closed = jax.closure_convert(f, jnp.int32(0), first)
    program, shapes = jax.make_jaxpr(traced, return_shape=True)(jnp.int32(0), first, *closed)

    def run(i, slice_, gate=lambda x: x):
        slice_, inner = jax.tree.map(lambda x: gate(x) if _differentiable(x) else x, (slice_, closed))
        # A constant output may be a typed scalar instead of an array.
        return jax.tree.map(lambda y, s: y if isinstance(y, jax.Array) else jnp.asarray(y, s.dtype),
                            traced(i, slice_, *inner), shapes)

    return run, shapes, program.effects, [x for x in jax.tree.leaves((first, closed)) if _differentiable(x)]


def _differentiable(x) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.inexact)    # a traced jax.Ref is no Array


def _gate(live, x):
    """Returns x. If `live` is False, the derivative of the result is 0. `microbatch` applies `_gate` to the inputs of
    f. It would not be sufficient to set the cotangents of f's outputs to 0: a division by 0 inside f, for example,
    would turn the cotangent 0 into NaN."""
    return jnp.where(live, x, lax.stop_gradient(x))


def _scalar(share):
    """Returns a slice's weight as an array with a dtype of at least float32. Raises an error if the weight is not a
    real scalar."""
    share = jnp.asarray(share)
    if share.shape or jnp.issubdtype(share.dtype, jnp.complexfloating) or not (
            share.dtype == jnp.bool_ or jnp.issubdtype(share.dtype, jnp.number)):
        raise ValueError("microbatch: weight= must return a real scalar, the weight of a slice; got "
                         f"{share.dtype}{list(share.shape)}")
    return share.astype(_wide(share) if jnp.issubdtype(share.dtype, jnp.inexact) else jnp.float32)


def batched(who: str, args, argnums) -> tuple[int, ...]:
    """Returns the positions of the batched arguments as nonnegative integers."""
    if argnums is None:
        return tuple(range(1, len(args)))
    where = (argnums,) if np.ndim(argnums) == 0 else tuple(argnums)
    for i in where:
        if not isinstance(i, (int, np.integer)) or isinstance(i, bool):
            raise TypeError(f"{who}: argnums must be an integer or a tuple of integers; got {argnums!r}")
        if not -len(args) <= i < len(args):
            raise ValueError(f"{who}: argnums names argument {i}; the function was called with {len(args)}")
    return tuple(i % len(args) for i in where)


def batch_rows(who: str, args, where) -> int:
    """Returns the length of the first axis, which must be the same for all leaves of the batched arguments."""
    rows = {}
    for i in where:
        for path, leaf in jax.tree.leaves_with_path(args[i]):
            if isinstance(leaf, jax.Ref):
                raise TypeError(f"{who}: argument {i}{jax.tree_util.keystr(path)} is a jax.Ref, which has no slices; "
                                "expected arrays. Pass ref[...], or exclude this argument from argnums=")
            if np.ndim(leaf):
                rows.setdefault(jnp.shape(leaf)[0], f"argument {i}{jax.tree_util.keystr(path)} {jnp.shape(leaf)}")
    if len(rows) != 1:
        what = "; ".join(rows.values()) if rows else "no arrays"
        raise ValueError(f"{who}: the batched arguments must be arrays with the same number of rows (argnums= says "
                         f"which arguments are batched); got {what}")
    return next(iter(rows))


def _slices(args, where, n):
    """Returns the batched arrays, split into n slices, as arrays [n, rows / n, ...]. Also returns a function that
    replaces the whole batch in the arguments by one of the slices."""
    arrays, rebuild = batch_leaves(args, where)

    def split(a):
        return jnp.swapaxes(jnp.reshape(a, (a.shape[0] // n, n, *a.shape[1:])), 0, 1)    # [n, rows / n, ...]

    return [split(jnp.asarray(a)) for a in arrays], rebuild


def batch_leaves(args, where):
    """Returns the batched arrays, and a function `rebuild` that replaces the batched arrays in the arguments.

    The batched arrays are the non-scalar leaves of the batched arguments. `rebuild(i, arrays)` returns all arguments of
    the call with `arrays` in place of the batched arrays, and with the integer i folded into the scalar random keys.
    """
    leaves, structure = jax.tree.flatten([args[i] for i in where])

    def rebuild(i, arrays):
        rest, new = iter(arrays), list(args)
        filled = [next(rest) if np.ndim(a) else _fold_key(a, i) for a in leaves]
        for at, value in zip(where, jax.tree.unflatten(structure, filled)):
            new[at] = value
        return new

    return [a for a in leaves if np.ndim(a)], rebuild


def _fold_key(scalar, i):
    """Folds the integer i into a random key. Scalars that are not keys, and leaves that are not arrays, are returned
    unchanged."""
    key = isinstance(scalar, jax.Array) and jnp.issubdtype(scalar.dtype, jax.dtypes.prng_key)
    return jax.random.fold_in(scalar, i) if key else scalar


def _wide(y):
    """Returns the dtype in which `microbatch` accumulates an output of f over the slices."""
    if jnp.issubdtype(y.dtype, jnp.inexact):
        return jnp.float32 if jnp.finfo(y.dtype).bits < 32 else y.dtype
    if jnp.issubdtype(y.dtype, jnp.integer):
        return y.dtype
    raise ValueError(f"microbatch: expected outputs with floating-point dtype (averaged over slices) or integer dtype "
                     f"(summed); got {y.dtype}{list(y.shape)}")


def _strong(y):
    """Returns an output of f as an array without weak type. Raises an error if `microbatch` can neither average nor sum
    outputs of this dtype."""
    y = jnp.asarray(y, jnp.result_type(y))
    _wide(y)
    return y


def _widened(y):
    return y.astype(_wide(y))


def _weighted(y, share, live):
    y = _widened(y)
    weighted = y * share.astype(y.dtype) if jnp.issubdtype(y.dtype, jnp.inexact) else y
    return jnp.where(live, weighted, jnp.zeros_like(y))


def _mean(y, share, dtype):
    if not jnp.issubdtype(y.dtype, jnp.inexact):
        return y
    return (y / share.astype(y.dtype)).astype(dtype)
