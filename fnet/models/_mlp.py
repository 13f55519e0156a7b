"""MLP: dense layers with ReLU between them."""

from __future__ import annotations

import jax

from fnet import layers as nn


class MLP(nn.Layer):
    """A multi-layer perceptron: dense layers, with ReLU and dropout after each but the last.

        model = MLP((128, 10))
        params, state = model.init(jax.random.key(0), jax.ShapeDtypeStruct((1, 28, 28, 1), "float32"))

    All axes of the input except the first are flattened to one.

    Args:
        widths: number of output features of each layer; the last is that of the MLP.
        dropout: dropout rate after each hidden layer.

    Input: [batch, ...]. Output: [batch, widths[-1]].

    >>> model = models.MLP((64, 10))
    >>> nn.count_parameters(model.spec(jnp.ones((1, 784))).params)
    50890
    """

    widths: tuple[int, ...]
    dropout: float = 0.0

    def forward(self, scope: nn.Scope, x: jax.Array) -> jax.Array:
        x = nn.Flatten()(scope["flatten"], x)  # [batch, features]
        for i, width in enumerate(self.widths[:-1]):
            x = jax.nn.relu(nn.Dense(width)(scope[f"fc{i}"], x))
            x = nn.Dropout(self.dropout)(scope[f"drop{i}"], x)
        return nn.Dense(self.widths[-1])(scope["head"], x)
