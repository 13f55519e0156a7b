"""Embed: a table with one vector for each token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY

import jax
import jax.numpy as jnp
from jax import lax
from jax.nn import initializers

from fnet.jaxpr import automatic
from fnet.layers._core import Layer, method
from fnet.layers._cross_entropy import linear_cross_entropy
from fnet.layers._explicit import like
from fnet.layers._linear import floating, linear
from fnet.layers._scope import Scope


class Embed(Layer):
    """Looks up a vector for each token: `y = embedding[tokens]`.

        embed, table = nn.Embed(50257, 768), scope["embed"]
        x = embed(table, tokens)               # [batch, time, features]
        logits = embed.attend(table, x)        # [batch, time, vocab_size]

    With the same table, `attend` computes logits over the vocabulary, `cross_entropy` their loss
    without storing all of them, and `first(scope, count)` returns the first `count` vectors, for
    example for learned positions.

    >>> from fnet import layers as nn
    >>> embed = nn.Embed(10, 4)
    >>> params, _ = embed.init(jax.random.key(0), jnp.zeros((2, 3), int))
    >>> embed.attend(params, embed(params, jnp.zeros((2, 3), int))).shape
    (2, 3, 10)

    Args:
        vocab_size: number of tokens.
        features: length of each vector.
        embedding_init: initializer of the table. Default: normal with standard deviation 0.02
            (Radford et al., 2018), which also suits the logits of `attend`.

    Input: integers [...] in 0 .. vocab_size - 1; the vector of any other token is NaN.
    Output: [..., features], in the dtype of the table.

    Parameters: embedding [vocab_size, features].
    """

    vocab_size: int
    features: int
    _: KW_ONLY
    embedding_init: Callable = initializers.normal(0.02)

    def forward(self, scope: Scope, tokens: jax.Array) -> jax.Array:
        tokens = jnp.asarray(tokens)
        if not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise TypeError(
                f"Embed at {scope}: expected integer tokens; got {tokens.dtype}{list(tokens.shape)}"
            )
        table = jnp.asarray(self._table(scope))  # params may contain NumPy arrays
        lookup = lambda table, tokens: table.at[tokens].get(
            mode="fill", wrap_negative_indices=False
        )
        return automatic(lookup, like(tokens, *range(tokens.ndim)))(table, tokens)

    @method
    def first(self, scope: Scope, count: int) -> jax.Array:
        """Returns the first `count` vectors, [count, features], for example the learned embeddings
        of `count` positions."""
        return lax.slice_in_dim(jnp.asarray(self._table(scope)), 0, count, axis=0)

    @method
    def attend(self, scope: Scope, x: jax.Array) -> jax.Array:
        """Computes logits `x @ embedding.T` with the table of this layer (tied embeddings; Press
        and Wolf, 2017).

        x is [..., features]; the logits are [..., vocab_size].
        """
        x = floating(x, scope, "Embed.attend")
        if x.shape[-1] != self.features:
            raise ValueError(
                f"Embed.attend at {scope}: expected [..., {self.features}]; got shape {x.shape}"
            )
        return linear(x, self._table(scope).T)

    @method
    def cross_entropy(
        self, scope: Scope, x: jax.Array, labels: jax.Array, softcap: float | None = None
    ) -> jax.Array:
        """Computes the cross-entropy loss of the logits of `attend`, by `nn.linear_cross_entropy`.

        x is [..., time, features]; labels and losses are [..., time]. The losses are in nats.
        """
        x = floating(x, scope, "Embed.cross_entropy")
        return linear_cross_entropy(x, self._table(scope).T, labels, softcap=softcap)

    def _table(self, scope: Scope) -> jax.Array:
        return scope.param(
            "embedding",
            (self.vocab_size, self.features),
            self.embedding_init,
            ("vocab", "embed"),
            roles=("vocab", "out"),
        )
