"""Embed: a table of vectors, one for each token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY

import jax.numpy as jnp
from jax.nn import initializers

from fnet.layers._core import Layer, method
from fnet.layers._cross_entropy import linear_cross_entropy
from fnet.layers._linear import floating, linear
from fnet.layers._scope import Scope


class Embed(Layer):
    """A table look-up: `y = embedding[tokens]`.

    Parameters: embedding [vocab_size, features], drawn with standard deviation 0.02 (Radford et al., 2018), which
    also suits tied logits.

    Args:
        vocab_size: the number of tokens.
        features: the length of each vector.

    Input: integers [...], each in 0 .. vocab_size - 1; a token outside gives NaN. Output [..., features], in the
    table's dtype.

    `attend` gives logits over the vocabulary with the same table:

        embed, at = nn.Embed(50257, 768), scope["embed"]
        x = embed(at, tokens)                  # [batch, time, features]
        logits = embed.attend(at, x)           # [batch, time, vocab_size]

    and `cross_entropy` the losses of those logits without ever holding them all.
    """

    vocab_size: int
    features: int
    _: KW_ONLY
    embedding_init: Callable = initializers.normal(0.02)

    def forward(self, scope: Scope, tokens):
        tokens = jnp.asarray(tokens)
        if not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise TypeError(f"Embed at {scope} takes integer tokens; got {tokens.dtype}{list(tokens.shape)}")
        table = jnp.asarray(self._table(scope))    # params may be NumPy's
        return table.at[tokens].get(mode="fill", wrap_negative_indices=False)

    @method
    def attend(self, scope: Scope, x):
        """Tied logits `x @ embedding.T`: [..., features] to [..., vocab_size], in x's dtype (Press and Wolf, 2017)."""
        x = floating(x, scope, "Embed.attend")
        if x.shape[-1] != self.features:
            raise ValueError(f"Embed.attend at {scope} needs [..., {self.features}]; got shape {x.shape}")
        return linear(x, self._table(scope).T)

    @method
    def cross_entropy(self, scope: Scope, x, labels):
        """Losses [...] in nats of the tied logits of x [..., time, features]: see `nn.linear_cross_entropy`."""
        return linear_cross_entropy(floating(x, scope, "Embed.cross_entropy"), self._table(scope).T, labels)

    def _table(self, scope):
        return scope.param("embedding", (self.vocab_size, self.features), self.embedding_init, ("vocab", "embed"))
