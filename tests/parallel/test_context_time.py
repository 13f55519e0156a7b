"""Time is followed through a step."""

import jax
import jax.numpy as jnp
import pytest

from fnet import layers as nn
from fnet.axes import through
from fnet.parallel._context._time import Span, Times, time_axes

TIME = 32
# {name: (a function of x [2, time, 6], the axis of time in its result)}
FOLLOWED = {
    "shift": (lambda x: x[:, 1:], 1),
    "start of a text": (lambda x: x[:, :4], None),
    "every second": (lambda x: x[:, ::2], None),
    "padding": (lambda x: jnp.pad(x, ((0, 0), (0, 1), (0, 0))), 1),
    "class token": (lambda x: jnp.concatenate([x[:, :1], x], 1), 1),
    "transposed": (lambda x: x.swapaxes(0, 1), 0),
    "features split": (lambda x: x.reshape(2, TIME, 2, 3), 1),
    "rows and time joined": (lambda x: x.reshape(2 * TIME, 6), None),
    "windows": (lambda x: x.reshape(2, 4, 8, 6), 1),
    "products": (lambda x: jnp.tanh(x @ jnp.ones((6, 3))), 1),
    "sum over time": (lambda x: x.sum(1), None),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_which_axis_is_time(name):
    f, expected = FOLLOWED[name]
    x = jax.ShapeDtypeStruct((2, TIME, 6), jnp.float32)
    times = Times(4, [TIME])
    assert through(jax.make_jaxpr(f)(x).jaxpr, [1], 1, times.rule) == [expected]


def test_long_chunks_are_split_inside():
    x = jax.ShapeDtypeStruct((1, 1024, 6), jnp.float32)
    chunks = jax.make_jaxpr(lambda x: x.reshape(1, 2, 512, 6))(x).jaxpr
    assert through(chunks, [1], 1, Times(4, [1024]).rule) == [2]
    back = jax.make_jaxpr(lambda x: x.reshape(1, 1024, 6))(jnp.ones((1, 2, 512, 6))).jaxpr
    assert through(back, [2], 1, Times(4, [1024]).rule) == [1]


def found(step, batch):
    closed = jax.make_jaxpr(step)(jnp.ones(3), batch)
    return time_axes(closed, jnp.ones(3), batch, 4)


def test_only_leaves_that_become_queries_have_time():
    """The labels and a mask of [time, time] beside the texts have none."""

    def step(state, batch):
        x = batch["x"].reshape(2, TIME, 2, 3)
        y = nn.dot_product_attention(x, x, x, causal=True, segments=batch["segments"])
        return (y.sum() * state.sum() * batch["labels"].sum()).sum()

    batch = {
        "labels": jnp.ones((2, 5)),
        "segments": jnp.ones((2, TIME), int),
        "x": jnp.ones((2, TIME, 6)),
    }
    assert found(step, batch) == ([None, None, 1], [Span(TIME)])


def test_products_of_queries_and_keys_are_attention():
    def step(state, x):
        weights = jax.nn.softmax(jnp.einsum("btf,bsf->bts", x, x))
        return (weights @ x).sum() * state.sum()

    assert found(step, jnp.ones((2, TIME, 6))) == ([1], [Span(TIME, by_hand=True)])
    assert found(lambda state, x: (x @ jnp.ones((6, 6))).sum(), jnp.ones((2, TIME, 6))) == (
        [None],
        [],
    )
