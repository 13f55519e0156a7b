"""One prepared and compiled case for each layer of the table."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layer_cases import CASES, inputs

KEY = jax.random.key(7)
every = pytest.mark.parametrize("name", CASES)
COMPOSED = (
    "MLP",
    "Parallel",
    "Residual",
    "Sequential",
    "Tied",
    "residual_block",
)  # of layers named above
ALONE = [name for name in CASES if name not in COMPOSED]
KINDS = [name for name in ALONE if name == type(CASES[name].layer).__name__]  # one of each kind
FEW = [
    "Attention",
    "BatchNorm",
    "Conv",
    "Dense",
    "Dropout",
    "LSTM",
]  # of the classes of computation


@functools.cache
def prepared(name):
    """(case, params, state, inputs), with a state that is not the initial one and biases that are
    not zero."""
    case = CASES[name]
    x = inputs(case)
    params, state = case.layer.init(jax.random.key(0), *x, **case.options)
    draw = np.random.default_rng(1)
    params, state = jax.tree.map(
        lambda a: a + jnp.asarray(draw.uniform(0.1, 0.5, a.shape), a.dtype), (params, state)
    )
    return case, params, state, x


def call(case, *, train):
    """(params, state, *inputs) -> (y, state), as a function that transforms take."""

    def f(params, state, *x):
        return case.layer(params, *x, state=state, key=KEY, train=train, **case.options)

    return f


@functools.cache
def compiled(name, train):
    case, params, state, x = prepared(name)
    return jax.jit(call(case, train=train))(params, state, *x)
