"""Derivatives that JAX lacks: Hessian-vector products, and per-example values (such as gradients)
of a batched function."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fnet import jaxpr
from fnet.jaxpr import wraps
from fnet.transforms._microbatch import batch_leaves, batch_rows, batched


def hvp(f: Callable) -> Callable:
    """Returns a function that computes Hessian-vector products of `f` with respect to its first
    argument.

        hvp(f)(x, v, *rest) = d/dt grad(f)(x + t v, *rest) at t = 0

    The Hessian itself is never computed. The product is a JVP (forward mode) of the gradient
    (reverse mode), so it takes about as long as two gradients (Pearlmutter, 1994, Fast Exact
    Multiplication by the Hessian).

    Args:
        f: `f(x, *rest, **options) -> scalar`, where x is any tree of floating-point arrays.

    Returns:
        A function of (x, v, *rest). v and the result have the structure, shapes and dtypes of x.

    Raises:
        ValueError: v does not have the structure, shapes and dtypes of x.

    >>> hvp(lambda x: (x ** 3).sum())(jnp.array([1., 2.]), jnp.array([1., 1.])).tolist()
    [6.0, 12.0]
    """

    @wraps(f, "hvp", signature=False)  # the result has the additional argument v
    def product(x, v, *rest, **options):
        given, needed = _avals(v), _avals(x)
        if given != needed:
            raise ValueError(
                f"hvp: the vector must have the structure, shapes and dtypes of the first argument "
                f"{needed}; got {given}"
            )
        return jax.jvp(lambda x: jax.grad(f)(x, *rest, **options), (x,), (v,))[1]

    return product


def per_example(f: Callable, *, argnums: int | tuple[int, ...] | None = None) -> Callable:
    """Applies `f` to each example: `per_example(grad(loss))(params, batch)` returns one gradient
    for each row.

    `f` receives each row as a batch of length 1, so a loss written for batches works unchanged.
    Random numbers differ between rows: the index of the row is folded into a batched argument that
    is a scalar `jax.random.key`. Other scalars, and leaves that are not arrays, are passed on as
    they are.

    Args:
        f: a function of parameters and batched arguments.
        argnums: the arguments that are batched along the first axis of their leaves, an int or a
            tuple of positions. Default None: all arguments except the first.

    Returns:
        A function with f's arguments. Its outputs have a leading axis of the batch's length; row i
        is the output of `f` for row i of every batched argument.

    Raises:
        ValueError: batched leaves have different numbers of rows.

    >>> per_example(jax.grad(lambda w, x: (w * x).sum()))(jnp.float32(2), jnp.array([1.0, 5.0])).tolist()
    [1.0, 5.0]
    """

    @wraps(f, "per_example")
    def each(*args, **options):
        where = batched("per_example", args, argnums)
        rows = batch_rows("per_example", args, where)
        arrays, rebuild = batch_leaves(args, where)
        one = lambda i, row: f(*rebuild(i, [jnp.expand_dims(a, 0) for a in row]), **options)
        index = jnp.arange(rows, dtype=jnp.int32)
        place = jaxpr.typed(jax.typeof(arrays[0]))
        if place is not None:  # vmap needs equal shardings of the axis that it maps
            index = jax.sharding.reshard(
                index, NamedSharding(place.mesh, P(place.spec.partitions[0]))
            )
        return jax.vmap(one)(index, arrays)

    return each


def _avals(tree):
    return jax.tree.map(lambda a: f"{jnp.result_type(a)}{list(jnp.shape(a))}", tree)
