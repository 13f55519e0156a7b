"""Initial numbers, without a long compilation for every shape.

Most of what XLA compiles for `he_normal(key, (3, 3, 64, 64))` is the random bits, and in JAX's threefry a bit depends
on its key and place alone, not on how many are drawn. So the bits come from a program that many shapes share, and only
what makes numbers of them is compiled for each. The numbers are the same, bit for bit.
"""

from __future__ import annotations

import functools
import math

import jax

from fnet import _jax, jaxpr

_SIZES = tuple(1 << power for power in (12, 16, 18, 20, 22))    # how many bits programs are compiled for


def compiled(init, key, shape, dtype):
    """`jax.jit(init)(key, shape, dtype)`, for a key that is not being traced (but by vmap)."""
    typed = jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key)
    shared = typed and jax.random.key_impl(key) == "threefry2x32" and jax.config.jax_threefry_partitionable
    size = _size(init, shape, dtype, jax.config.jax_enable_x64) if shared else None
    if size is None:
        return jax.jit(init, static_argnums=(1, 2))(key, shape, dtype)
    return _numbers(init, shape, dtype, _bits(key, size))


@functools.lru_cache(1024)
def _size(init, shape, dtype, x64):
    """How many bits to draw for this initializer; None: it does more with its key than to draw some, or needs none."""
    uses = list(_uses(jax.make_jaxpr(init, static_argnums=(1, 2))(jax.random.key(0), shape, dtype)))
    if not uses or any(eqn.primitive.name != "random_bits" or jaxpr.random_bits(eqn)[0] != 32
                       or eqn.invars[0].aval.shape for eqn in uses):
        return None
    most = max(jaxpr.random_bits(eqn)[1] for eqn in uses)
    return next((size for size in _SIZES if most <= size), None)


def _uses(program):
    """Every ordinary operation that takes a key, at any depth."""
    for eqn in jaxpr.equations(program):
        if not jaxpr.bodies(eqn) and any(jax.dtypes.issubdtype(v.aval.dtype, jax.dtypes.prng_key) for v in eqn.invars):
            yield eqn


@functools.partial(jax.jit, static_argnums=1)
def _bits(key, size):
    return jax.random.bits(key, (size,), "uint32")


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _numbers(init, shape, dtype, bits):
    return init(jax.random.wrap_key_data(bits, impl=_drawn(len(bits))), shape, dtype)


@functools.cache
def _drawn(size):
    """Keys that hold the bits that are drawn from them."""
    def draw(bits, width, shape):
        return bits[:math.prod(shape)].reshape(shape)

    def never(*_):
        raise AssertionError("an initializer that does this was to draw by itself")

    return _jax.prng_impl(key_shape=(size,), seed=never, split=never, random_bits=draw, fold_in=never,
                          name=f"fnet_drawn_{size}", tag="drawn")
