"""Naming rules that fit a layer of another kind by the coincidence of a shape are refused."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from fnet import layers as nn
from fnet import models
from fnet.models import pretrained
from fnet.models.pretrained import CONV, DENSE, Layout, Names, Rule, Spare, keras, torch

IMAGE, TEXT = (1, 4, 4, 4), (1, 5, 4)


class One(models.Model):
    """A model of one layer, "x"."""

    layer: Any
    shape: tuple = IMAGE
    NAMES: ClassVar = {}

    def forward(self, scope, x):
        return self.layer(scope["x"], x)

    def example(self):
        return jax.ShapeDtypeStruct(self.shape, jnp.float32)


class Up(nn.ConvTranspose):
    pass


class Own(nn.Layer):
    """A layer of the user, with the names of a Conv."""

    def forward(self, scope, x):
        return x @ scope.param("kernel", (4, 4), jax.nn.initializers.ones)


def loaded(tmp_path, model, rules, arrays):
    kind = type(
        "Named", (type(model),), {"NAMES": {"file": Names(rules, metadata={"format": "pt"})}}
    )
    save_file(arrays, tmp_path / "x.safetensors", metadata={"format": "pt"})
    return pretrained.load(kind(model.layer, model.shape), tmp_path / "x.safetensors")


def array(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


SQUARE = {"x.weight": array(4, 4, 4, 4), "x.bias": array(4)}
FLAT = {"x.weight": array(4, 4), "x.bias": array(4)}
VECTORS = {f"x.{name}": array(4) for name in ("weight", "bias", "running_mean", "running_var")}
WRONG = {  # name: (model, rules, arrays, error)
    "conv, ConvTranspose": (
        One(nn.ConvTranspose(4, 4)),
        torch.conv("x", "x"),
        SQUARE,
        "reads 'x/kernel', an array of a ConvTranspose, but it is right for Conv or DepthwiseConv",
    ),
    "conv, a subclass": (
        One(Up(4, 4)),
        torch.conv("x", "x"),
        SQUARE,
        "an array of a Up, but it is right for Conv",
    ),
    "keras.conv, ConvTranspose": (
        One(nn.ConvTranspose(4, 4)),
        keras.conv("x", "x"),
        {"x/kernel": array(4, 4, 4, 4), "x/bias": array(4)},
        "right for Conv only",
    ),
    "CONV, ConvTranspose": (
        One(nn.ConvTranspose(4, 4)),
        (Rule("x/kernel", "x.weight", CONV), Rule("x/bias", "x.bias")),
        SQUARE,
        "with the layout of a convolution",
    ),
    "dense, Conv": (One(nn.Conv(4, 4)), torch.dense("x", "x"), SQUARE, "right for Dense only"),
    "conv, Dense": (
        One(nn.Dense(4), TEXT),
        torch.conv("x", "x"),
        FLAT,
        "right for Conv or DepthwiseConv only",
    ),
    "keras.conv, DepthwiseConv": (
        One(nn.DepthwiseConv(3)),
        keras.conv("x", "x"),
        {"x/kernel": array(3, 3, 1, 4), "x/bias": array(4)},
        "right for Conv only",
    ),
    "dense, LSTM": (
        One(nn.LSTM(4), TEXT),
        (torch.dense("x", "x"), Rule("x/recurrent_kernel", "x.r", DENSE)),
        {"x.weight": array(16, 4), "x.r": array(16, 4), "x.bias": array(16)},
        "an array of a LSTM",
    ),
    "norm, BatchNorm": (
        One(nn.BatchNorm()),
        (torch.norm("x", "x"), Rule("x/mean", "x.running_mean"), Rule("x/var", "x.running_var")),
        VECTORS,
        "right for LayerNorm or RMSNorm",
    ),
    "batch_norm, LayerNorm": (
        One(nn.LayerNorm(), TEXT),
        torch.batch_norm("x", "x"),
        VECTORS,
        "right for BatchNorm",
    ),
    "swapped statistics": (
        One(nn.BatchNorm()),
        (
            Rule("x/scale", "x.weight"),
            Rule("x/bias", "x.bias"),
            Rule("x/mean", "x.running_var"),
            Rule("x/var", "x.running_mean"),
        ),
        VECTORS,
        "the name in the file is that of another array",
    ),
    "swapped scale and bias": (
        One(nn.LayerNorm(), TEXT),
        (Rule("x/scale", "x.bias"), Rule("x/bias", "x.weight")),
        VECTORS,
        "the name in the file is that of another array",
    ),
    "one of two biases": (
        One(nn.LSTM(4), TEXT),
        (
            Rule("x/kernel", "x.weight_ih", DENSE),
            Rule("x/recurrent_kernel", "x.weight_hh", DENSE),
            Rule("x/bias", "x.bias_ih"),
            Spare("x.bias_hh"),
        ),
        {
            "x.weight_ih": array(16, 4),
            "x.weight_hh": array(16, 4),
            "x.bias_ih": array(16),
            "x.bias_hh": array(16),
        },
        "is the sum of PyTorch's bias_ih and bias_hh",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_rule_for_another_layer(name, tmp_path):
    model, rules, arrays, error = WRONG[name]
    with pytest.raises(ValueError, match=error):
        loaded(tmp_path, model, (rules,), arrays)


def test_a_stack_and_a_rule_for_another_layer(tmp_path):
    block = nn.Sequential(nn.ConvTranspose(4, 4, padding="SAME"))
    with pytest.raises(ValueError, match="an array of a ConvTranspose"):
        loaded(
            tmp_path,
            One(nn.Stack(block, 2)),
            (torch.conv("x/0", "x.{i}"),),
            {f"x.{i}.{name}": value for i in range(2) for name, value in SQUARE.items()},
        )


def test_layouts_of_ones_own(tmp_path):
    """A layout for a transposed convolution, and a layer that fnet does not know."""
    layout = Layout(
        "transposed",
        lambda x: np.moveaxis(x, (0, 1), (-2, -1)),
        lambda x: np.moveaxis(x, (-2, -1), (0, 1)),
    )
    rules = Rule("x/kernel", "x.weight", layout), Rule("x/bias", "x.bias")
    params, _ = loaded(tmp_path, One(nn.ConvTranspose(4, 4)), rules, SQUARE)
    np.testing.assert_array_equal(
        params["x"]["kernel"], np.transpose(SQUARE["x.weight"], (2, 3, 0, 1))
    )
    params, _ = loaded(
        tmp_path, One(Own(), TEXT), torch.dense("x", "x"), {"x.weight": FLAT["x.weight"]}
    )
    np.testing.assert_array_equal(params["x"]["kernel"], FLAT["x.weight"].T)


def test_rules_for_the_right_layers(tmp_path):
    for layer, rules, arrays, shape in [
        (nn.Conv(4, 4), torch.conv("x", "x"), SQUARE, IMAGE),
        (nn.Dense(4), torch.dense("x", "x"), FLAT, TEXT),
        (
            nn.DepthwiseConv(3),
            torch.conv("x", "x"),
            {"x.weight": array(4, 1, 3, 3), "x.bias": array(4)},
            IMAGE,
        ),
        (nn.GroupNorm(2), torch.norm("x", "x"), {"x.weight": array(4), "x.bias": array(4)}, IMAGE),
        (nn.BatchNorm(), torch.batch_norm("x", "x"), VECTORS, IMAGE),
    ]:
        loaded(tmp_path, One(layer, shape), rules, arrays)
