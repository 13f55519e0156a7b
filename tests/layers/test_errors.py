"""Wrong inputs of new users: each raises a one-line error that states what was given and expected,
and what to do."""

import re

import jax.numpy as jnp
import pytest
from layer_errors import LAYER_ERRORS
from model_errors import KEY, MODEL_ERRORS, ROWS

from fnet import layers as nn

ERRORS = MODEL_ERRORS | LAYER_ERRORS


@pytest.mark.parametrize("name", ERRORS)
def test_error(name):
    attempt, kind, text = ERRORS[name]
    with pytest.raises(kind) as caught:
        attempt()
    assert type(caught.value) is kind
    assert str(caught.value) == text


def test_an_error_is_one_sentence():
    for name, (_, _, text) in ERRORS.items():
        assert not re.search(r"\n|\.\s+[A-Z]|\.$", text), name


def test_errors_carry_the_whole_path():
    model = nn.Sequential(
        encoder=nn.Residual(nn.Dense(4), inner=nn.Stack(nn.Sequential(nn.Dense(4), nn.Dense(4)), 2))
    )
    params, _ = model.init(KEY, ROWS)
    params["encoder"]["inner"]["1"]["bias"] = jnp.ones((2, 5))
    message = "'encoder/inner/1/bias': expected shape (4,) for this input, got (5,) in params"
    with pytest.raises(ValueError, match=re.escape(message)):
        model(params, ROWS)
