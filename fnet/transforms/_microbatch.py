"""Gradient accumulation: a function of a large batch, computed slice by slice."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from fnet.transforms._wrapping import wraps


def microbatch(f: Callable, n: int, *, argnums: int | tuple[int, ...] | None = None,
               weight: Callable | None = None) -> Callable:
    """`f` over n slices of the batch, one after the other in a scan, averaged: memory for one slice at a time.

        microbatch(f, n)(params, batch) = sum_i w_i f(params, batch_i) / sum_i w_i

    With equal weights this is the full batch's value for every mean over rows, gradients included, that has no
    statistics across rows (batch normalisation has). For a loss that is a weighted mean, `weight` gives each slice's
    sum of weights, so that numerators and weights are summed apart; a slice of weight 0 counts nothing, whatever `f`
    makes of it.

        step = ft.microbatch(ft.value_and_grad(loss), 8)
        step = ft.microbatch(ft.value_and_grad(loss), 8, weight=lambda params, batch: batch["weight"].sum())

    Slice i holds rows i, i + n, i + 2n, ...: on a batch sharded over devices, each slice is sharded alike and no row
    moves. A scalar `jax.random.key` among the batched arguments is folded with the slice's number, so that the slices
    draw differently.

    Args:
        f: a function of parameters and batched arguments; floating-point outputs are averaged (accumulated in
            float32 at least, returned in their own dtype), integer outputs, such as counts, are summed.
        n: the number of slices; it must divide the batch.
        argnums: which positional arguments are batched along their leaves' first axis; None: all but the first.
        weight: a function of f's arguments, one slice of the batch in place of the batch: the slice's weight.

    Returns:
        A function with f's signature and output structure.

    Raises:
        ValueError: where the batch has no rows in common, n does not divide it, or an output is neither float nor
            integer.
    """
    if not isinstance(n, int) or n < 1:
        raise ValueError(f"microbatch needs a positive number of slices; got {n!r}")

    @wraps(f)
    def sliced(*args, **options):
        where = batched("microbatch", args, argnums)
        rows = batch_rows("microbatch", args, where)
        if rows % n:
            raise ValueError(f"microbatch: {n} slices do not divide a batch of {rows} rows; nearest that do: "
                             f"{max(d for d in range(1, n + 1) if rows % d == 0)}")
        if n == 1:
            return f(*args, **options)
        stacked, rebuild = _slices(args, where, n)

        @functools.partial(jax.jit, inline=True)    # traced once, for its shapes and for the scan
        def run(i, stacked):
            args = rebuild(i, stacked)
            share = jnp.float32(1) if weight is None else jnp.asarray(weight(*args, **options), jnp.float32)
            return f(*args, **options), share

        def body(total, slice_):
            y, share = run(*slice_)
            return (jax.tree.map(lambda t, y: t + _weighted(y, share), total[0], y), total[1] + share), None

        shapes, _ = jax.eval_shape(run, jnp.int32(0), jax.tree.map(lambda a: a[0], stacked))
        start = jax.tree.map(lambda s: jnp.zeros(s.shape, _wide(s)), shapes), jnp.float32(0)
        (total, share), _ = lax.scan(body, start, (jnp.arange(n, dtype=jnp.int32), stacked))
        return jax.tree.map(lambda y, s: _mean(y, share, s.dtype), total, shapes)

    return sliced


def batched(who: str, args, argnums) -> tuple[int, ...]:
    """The positions of the batched arguments, counted from the first."""
    if argnums is None:
        return tuple(range(1, len(args)))
    where = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    for i in where:
        if not -len(args) <= i < len(args):
            raise ValueError(f"{who}: argnums names argument {i}; the function was called with {len(args)}")
    return tuple(i % len(args) for i in where)


def batch_rows(who: str, args, where) -> int:
    """The first axis that all leaves of the batched arguments share."""
    rows = {}
    for i in where:
        for path, leaf in jax.tree.leaves_with_path(args[i]):
            if jnp.ndim(leaf):
                rows.setdefault(jnp.shape(leaf)[0], f"argument {i}{jax.tree_util.keystr(path)} {jnp.shape(leaf)}")
    if len(rows) != 1:
        what = "; ".join(rows.values()) if rows else "no arrays"
        raise ValueError(f"{who}: the batched arguments must be arrays with the same number of rows (argnums= says "
                         f"which arguments are batched); got {what}")
    return next(iter(rows))


def _slices(args, where, n):
    """The batched leaves as [n, rows / n, ...], and a function that puts slice i of them back among the arguments."""
    leaves, structure = jax.tree.flatten([args[i] for i in where])

    def split(a):
        return jnp.swapaxes(jnp.reshape(a, (a.shape[0] // n, n, *a.shape[1:])), 0, 1)    # [n, rows / n, ...]

    stacked = [split(jnp.asarray(a)) for a in leaves if jnp.ndim(a)]

    def rebuild(i, stacked):
        rest = iter(stacked)
        filled = [next(rest) if jnp.ndim(a) else fold_key(a, i) for a in leaves]
        return replaced(args, where, jax.tree.unflatten(structure, filled))

    return stacked, rebuild


def replaced(args, where, values) -> list:
    """The arguments with `values` at the positions `where`."""
    args = list(args)
    for i, value in zip(where, values):
        args[i] = value
    return args


def fold_key(scalar, i):
    """A random key folded with the number i; any other scalar as it is."""
    key = jax.dtypes.issubdtype(jnp.result_type(scalar), jax.dtypes.prng_key)
    return jax.random.fold_in(scalar, i) if key else scalar


def _wide(y):
    """The dtype in which an output is summed."""
    if jnp.issubdtype(y.dtype, jnp.inexact):
        return jnp.float32 if jnp.finfo(y.dtype).bits < 32 else y.dtype
    if jnp.issubdtype(y.dtype, jnp.integer):
        return y.dtype
    raise ValueError(f"microbatch: an output is {y.dtype}{list(y.shape)}; floating-point outputs are averaged and "
                     "integers summed, anything else has no meaning over slices")


def _weighted(y, share):
    y = jnp.asarray(y).astype(_wide(jnp.asarray(y)))
    if not jnp.issubdtype(y.dtype, jnp.inexact):
        return y
    return jnp.where(share > 0, y * share.astype(y.dtype), jnp.zeros_like(y))


def _mean(y, share, dtype):
    if not jnp.issubdtype(y.dtype, jnp.inexact):
        return y
    return (y / share.astype(y.dtype)).astype(dtype)
