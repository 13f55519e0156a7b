"""Initial numbers out of shared bits are what the initializer itself makes, to the bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.nn import initializers as init

from fnet import layers as nn
from fnet.layers import _draws

KEY = jax.random.key(7)


def alone(made, key, shape, dtype):
    return jax.jit(made, static_argnums=(1, 2))(key, shape, dtype)


def twice(key, shape, dtype):
    """One key drawn from in two ways."""
    return jax.random.normal(key, shape, dtype) + jax.random.uniform(key, shape[-1:], dtype)[None]


def folded(key, shape, dtype):
    return jax.random.normal(jax.random.fold_in(key, 1), shape, dtype)


def raw(key, shape, dtype):
    return jnp.broadcast_to(jax.random.key_data(key)[:1].astype(dtype), shape)


def several(key, shape, dtype):
    return jax.vmap(lambda key: jax.random.normal(key, shape[1:], dtype))(
        jnp.broadcast_to(key, shape[:1])
    )


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(
    ("made", "shape", "shared"),
    [
        (init.he_normal(), (3, 3, 4, 8), True),
        (init.glorot_uniform(), (5, 7), True),
        (init.normal(0.02), (11,), True),
        (init.orthogonal(), (6, 4), True),
        (twice, (3, 5), True),
        (init.lecun_normal(), (70, 60), True),
        (init.zeros, (3,), False),
        (folded, (3, 5), False),
        (raw, (3, 5), False),
        (several, (3, 5), False),
    ],
    ids=[
        "conv",
        "dense",
        "one axis",
        "orthogonal",
        "twice",
        "larger",
        "zeros",
        "folded",
        "raw",
        "several",
    ],
)
def test_numbers_are_the_initializers_own(made, shape, shared, monkeypatch):
    drawn = []
    bits = _draws._bits
    monkeypatch.setattr(_draws, "_bits", lambda key, size: drawn.append(size) or bits(key, size))
    got = _draws.compiled(made, KEY, shape, jnp.dtype("float32"))
    assert bool(drawn) == shared
    np.testing.assert_array_equal(got, alone(made, KEY, shape, jnp.dtype("float32")))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("make_key", "partitionable"),
    [
        (functools.partial(jax.random.key, impl="rbg"), True),
        (jax.random.PRNGKey, True),
        (jax.random.key, False),
    ],
    ids=["rbg", "legacy", "not partitionable"],
)
def test_other_keys_draw_by_themselves(make_key, partitionable, monkeypatch):
    monkeypatch.setattr(_draws, "_bits", None)
    key, made, kind = make_key(3), init.normal(0.1), jnp.dtype("float32")
    with jax.threefry_partitionable(partitionable):
        got = _draws.compiled(made, key, (7,), kind)
        np.testing.assert_array_equal(got, alone(made, key, (7,), kind))


@pytest.mark.exhaustive
def test_in_a_stack_and_in_a_larger_program():
    model, x = nn.Stack(nn.Dense(6), 3), jax.ShapeDtypeStruct((1, 6), jnp.float32)
    made = model.init(KEY, x)
    jax.tree.map(np.testing.assert_array_equal, made, jax.jit(lambda key: model.init(key, x))(KEY))


def test_many_shapes_share_the_bits():
    """Why this is here: what is compiled for one more shape is short, and draws nothing."""
    numbers = _draws._numbers.lower(
        init.he_normal(), (3, 3, 8, 8), jnp.dtype("float32"), jnp.zeros(4096, jnp.uint32)
    )
    assert "threefry" not in numbers.as_text() and "shift_left" not in numbers.as_text()
    assert "shift_left" in _draws._bits.lower(KEY, 4096).as_text()
