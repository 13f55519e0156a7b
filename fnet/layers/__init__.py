"""Layers, the parts of models.

A layer is an immutable object without arrays. Its parameters are a plain nested dict, which you
pass to each call:

    model = nn.Sequential(nn.Conv(32, 3), jax.nn.relu, nn.MaxPool(2), nn.Flatten(), nn.Dense(10))
    params, state = model.init(jax.random.key(0), x)
    logits = model(params, x)

Activation functions come from `jax.nn`: `sigmoid`, `leaky_relu`, `tanh`, `relu`, `elu`, `gelu`,
`silu`, ... Losses come from Optax, such as `optax.squared_error`,
`optax.sigmoid_binary_cross_entropy`, `optax.softmax_cross_entropy_with_integer_labels` and
`optax.hinge_loss`. For the cross-entropy over a large vocabulary, use
`linear_cross_entropy`."""

from typing import Any

from fnet.layers import _hints
from fnet.layers._attend import dot_product_attention
from fnet.layers._attention import Attention, Rotary
from fnet.layers._compose import Parallel, Remat, Residual, Sequential, Stack
from fnet.layers._conv import Conv, ConvTranspose, DepthwiseConv
from fnet.layers._core import Layer, layer, method
from fnet.layers._cross_entropy import linear_cross_entropy
from fnet.layers._dropout import Dropout
from fnet.layers._embed import Embed
from fnet.layers._experts import MixtureOfExperts, load_balancing_loss, router_z_loss
from fnet.layers._interop import (
    from_linen,
    from_nnx,
    linen_variables,
    nnx_variables,
    to_linen,
    to_nnx,
    update_nnx,
)
from fnet.layers._linear import Dense, Maxout
from fnet.layers._norm import BatchNorm, GroupNorm, LayerNorm, RMSNorm
from fnet.layers._partition import combine, partition
from fnet.layers._pool import AvgPool, Flatten, GlobalAvgPool, MaxPool
from fnet.layers._recurrent import GRU, LSTM, RNN
from fnet.layers._scope import Scope
from fnet.layers._segments import next_tokens, segment_positions
from fnet.layers._spec import ParamSpec, Spec, count_parameters

__all__ = [
    "GRU",
    "LSTM",
    "RNN",
    "Attention",
    "AvgPool",
    "BatchNorm",
    "Conv",
    "ConvTranspose",
    "Dense",
    "DepthwiseConv",
    "Dropout",
    "Embed",
    "Flatten",
    "GlobalAvgPool",
    "GroupNorm",
    "Layer",
    "LayerNorm",
    "MaxPool",
    "Maxout",
    "MixtureOfExperts",
    "Parallel",
    "ParamSpec",
    "RMSNorm",
    "Remat",
    "Residual",
    "Rotary",
    "Scope",
    "Sequential",
    "Spec",
    "Stack",
    "combine",
    "count_parameters",
    "dot_product_attention",
    "from_linen",
    "from_nnx",
    "layer",
    "linear_cross_entropy",
    "linen_variables",
    "load_balancing_loss",
    "method",
    "next_tokens",
    "nnx_variables",
    "partition",
    "router_z_loss",
    "segment_positions",
    "to_linen",
    "to_nnx",
    "update_nnx",
]


def __getattr__(name: str) -> Any:
    raise _hints.missing_name(name, __all__)
