"""Derivatives that JAX has no name for: Hessian-vector products and per-example values of a batched function."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fnet.jaxpr import wraps
from fnet.transforms._microbatch import batch_rows, batched, fold_key, replaced


def hvp(f: Callable) -> Callable:
    """Hessian-vector products of a scalar function with respect to its first argument.

        hvp(f)(x, v, *rest) = d/dt grad(f)(x + t v, *rest) at t = 0

    Costs about two gradients and never forms the Hessian (Pearlmutter, 1994, Fast Exact Multiplication by the
    Hessian): forward over reverse.

    Args:
        f: `f(x, *rest, **options) -> scalar`, x any tree of floating-point arrays.

    Returns:
        A function of (x, v, *rest), v of x's structure, shapes and dtypes, that returns such a tree.

    >>> hvp(lambda x: (x ** 3).sum())(jnp.array([1., 2.]), jnp.array([1., 1.])).tolist()
    [6.0, 12.0]
    """

    @wraps(f, signature=False)    # which has another argument, v
    def product(x, v, *rest, **options):
        given, needed = _avals(v), _avals(x)
        if given != needed:
            raise ValueError(f"hvp: the vector must have the structure, shapes and dtypes of the first argument "
                             f"{needed}; got {given}")
        return jax.jvp(lambda x: jax.grad(f)(x, *rest, **options), (x,), (v,))[1]

    return product


def per_example(f: Callable, *, argnums: int | tuple[int, ...] | None = None) -> Callable:
    """`f` at each example by itself: `per_example(grad(loss))(params, batch)` has one gradient for each row.

    Row i of the result is `f` of the i-th row of every batched argument, given as a batch of one, so that a loss
    written for batches is taken as it is. A scalar `jax.random.key` among them is folded with the row's number, so that
    the rows draw differently; any other scalar goes to every row.

    Args:
        f: a function of parameters and batched arguments.
        argnums: which positional arguments are batched along their leaves' first axis; None: all but the first.

    Returns:
        A function like `f` whose every output has a leading axis of the batch's length.

    Raises:
        ValueError: where batched leaves differ in their first axis.
    """

    @wraps(f)
    def each(*args, **options):
        where = batched("per_example", args, argnums)
        rows = batch_rows("per_example", args, where)
        leaves, structure = jax.tree.flatten([args[i] for i in where])
        rows_of = [a for a in leaves if jnp.ndim(a)]

        def one(i, row):
            rest = iter(row)
            filled = [jnp.expand_dims(next(rest), 0) if jnp.ndim(a) else fold_key(a, i) for a in leaves]
            return f(*replaced(args, where, jax.tree.unflatten(structure, filled)), **options)

        return jax.vmap(one)(jnp.arange(rows, dtype=jnp.int32), rows_of)

    return each


def _avals(tree):
    return jax.tree.map(lambda a: f"{jnp.result_type(a)}{list(jnp.shape(a))}", tree)
