"""Initializes parameters with random values, without a long compilation for each new shape of a
parameter.

Most of the compile time of `he_normal(key, (3, 3, 64, 64))` is spent on the random bits. In JAX's
threefry, a random bit depends on the key and on the index of the bit, not on the number of bits.
Therefore, the first n elements of a longer array of random integers equal an array of n random
integers from the same key. fnet compiles one program for each of a few array lengths (`_SIZES`),
and an initializer uses the first elements of such an array. Only the conversion of the random bits
to values is compiled separately for each shape. The values are bit-identical to the result of
`jax.jit(init)(key, shape, dtype)`, where `init` is the initializer.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax

from fnet import _jax, jaxpr

# Numbers of 32-bit words for which programs exist.
_SIZES = tuple(1 << power for power in (12, 16, 18, 20, 22))


def compiled(init: Callable, key: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """Computes `jax.jit(init)(key, shape, dtype)`. The key must not be traced, except by vmap."""
    typed = jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key)
    shared = (
        typed
        and jax.random.key_impl(key) == "threefry2x32"
        and jax.config.jax_threefry_partitionable
    )
    size = _size(init, shape, dtype, jax.config.jax_enable_x64) if shared else None
    if size is None:
        return jax.jit(init, static_argnums=(1, 2))(key, shape, dtype)
    return _numbers(init, shape, dtype, _bits(key, size))


@functools.lru_cache(1024)
def _size(init: Callable, shape: tuple[int, ...], dtype: Any, x64: bool) -> int | None:
    """Returns the number of random 32-bit integers to generate for the initializer `init`. The
    result is the smallest sufficient number in `_SIZES`.

    The function returns None if the initializer does not use its random key, or if it draws more
    random integers than the largest number in `_SIZES`. The function also returns None if the
    initializer uses the key for anything other than drawing 32-bit integers, for example for
    `jax.random.split`.
    """
    uses = list(
        _uses(_jax.make_jaxpr(init, static_argnums=(1, 2))(jax.random.key(0), shape, dtype))
    )
    if not uses or any(
        eqn.primitive.name != "random_bits"
        or jaxpr.random_bits(eqn)[0] != 32
        or eqn.invars[0].aval.shape
        for eqn in uses
    ):
        return None
    most = max(jaxpr.random_bits(eqn)[1] for eqn in uses)
    return next((size for size in _SIZES if most <= size), None)


def _uses(program: Any) -> Iterator:
    """Yields every operation that takes a key, at any depth of the program."""
    for eqn in jaxpr.equations(program):
        if not jaxpr.bodies(eqn) and any(
            jax.dtypes.issubdtype(v.aval.dtype, jax.dtypes.prng_key) for v in eqn.invars
        ):
            yield eqn


@functools.partial(jax.jit, static_argnums=1)
def _bits(key: Any, size: int) -> Any:
    return jax.random.bits(key, (size,), "uint32")


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _numbers(init: Callable, shape: tuple[int, ...], dtype: Any, bits: Any) -> Any:
    return init(jax.random.wrap_key_data(bits, impl=_drawn(len(bits))), shape, dtype)


@functools.cache
def _drawn(size: int) -> Any:
    """Returns a PRNG implementation that reads random bits from the key instead of generating them.
    A key is an array of `size` random 32-bit integers. `jax.random.bits(key, shape)` returns the
    first integers of this array."""

    def draw(bits: Any, width: Any, shape: tuple[int, ...]) -> jax.Array:
        return bits[: math.prod(shape)].reshape(shape)

    def never(*_: Any) -> Any:
        raise AssertionError("`_size` should have excluded this initializer")

    return _jax.prng_impl(
        key_shape=(size,),
        seed=never,
        split=never,
        random_bits=draw,
        fold_in=never,
        name=f"fnet_drawn_{size}",
        tag="drawn",
    )
