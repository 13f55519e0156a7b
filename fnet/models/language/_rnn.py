"""Recurrent networks for text: an LSTM language model, and a classifier of texts of any length."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import ClassVar

import jax
import jax.numpy as jnp

from fnet import layers as nn
from fnet.models._model import LanguageModel, Model

zeros = jax.nn.initializers.zeros


class LSTMLanguageModel(LanguageModel):
    """A language model: a stack of LSTMs, with dropout between them but not between time steps.

    Args:
        vocab_size: number of tokens in the vocabulary.
        width: number of features of a token and of the output of each LSTM.
        depth: number of LSTMs.
        dropout: dropout rate before each LSTM and before the logits.
        tied: whether the logits are computed with the embedding table.

    Inputs:
        tokens: integers [batch, time].
        lengths: integers [batch], the number of valid tokens in each example. Later tokens are
            padding. Default: all tokens are valid.

    Output: logits [batch, time, vocab_size]. With a cache from `model.cache` as `state` (the carry
    of every LSTM), as `models.generate` passes it, the tokens continue the text in the cache, and
    the result is (logits, cache).

    Source: Zaremba, Sutskever and Vinyals (2014), Recurrent Neural Network Regularization; the
    presets are its three sizes for the Penn Treebank. `tied`: Press and Wolf (2017), Using the
    Output Embedding to Improve Language Models.

    >>> model = models.LSTMLanguageModel.preset("zaremba-small")
    >>> nn.count_parameters(model.spec(model.example()).params)
    4651600
    """

    PRESETS: ClassVar = {
        "zaremba-small": dict(vocab_size=10000, width=200),
        "zaremba-medium": dict(vocab_size=10000, width=650, dropout=0.5),
        "zaremba-large": dict(vocab_size=10000, width=1500, dropout=0.65),
    }

    PACKS: ClassVar = False

    vocab_size: int
    width: int
    depth: int = 2
    _: KW_ONLY
    dropout: float = 0.0
    tied: bool = False

    def _body(self, scope, tokens, lengths, segments):  # [batch, time]
        if segments is not None:
            raise ValueError(
                "LSTMLanguageModel: segments= is for decoders with attention; give each text a row "
                "of its own, with lengths="
            )
        embed, at = nn.Embed(self.vocab_size, self.width), scope["embed"]
        x = embed(at, tokens)  # [batch, time, width]
        for i in range(self.depth):
            lstm, place = nn.LSTM(self.width), scope[f"lstm{i}"]
            x = nn.Dropout(self.dropout)(scope[f"drop{i}"], x)
            names = f"hidden{i}", f"cell{i}"
            carry = tuple(
                scope.state(name, (x.shape[0], self.width), zeros, "cache") for name in names
            )
            x, after = lstm.scan(place, x, None if carry[0] is None else carry, lengths=lengths)
            if carry[0] is not None:
                for name, value in zip(names, after):
                    scope.update(name, value)
        x = nn.Dropout(self.dropout)(scope["drop"], x)
        if self.tied:
            return embed, at, x
        return nn.Dense(self.vocab_size), scope["head"], x

    def example(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, 35), jnp.int32)


class LSTMClassifier(Model):
    """A classifier of texts: bidirectional LSTMs, then the maximum of each feature over time.

    Args:
        classes: number of logits.
        vocab_size: number of tokens in the vocabulary.
        width: number of features of a token, and of the output of the LSTM of each direction.
        depth: number of bidirectional layers.
        dropout: dropout rate before each layer and before the logits.

    Inputs:
        tokens: integers [batch, time].
        lengths: integers [batch], at least 1, the number of valid tokens in each example. Padding
            does not affect the output. Default: all tokens are valid.

    Output: logits [batch, classes].

    Source: Schuster and Paliwal (1997), Bidirectional Recurrent Neural Networks. The maximum over
    time: Conneau et al. (2017), Supervised Learning of Universal Sentence Representations, section
    3.2.2.

    >>> model = models.LSTMClassifier(classes=2, vocab_size=100)
    >>> "logits", jax.eval_shape(model, model.spec(model.example()).params, model.example()).shape[-1]
    ('logits', 2)
    """

    classes: int
    vocab_size: int
    width: int = 128
    depth: int = 1
    _: KW_ONLY
    dropout: float = 0.0

    def forward(
        self, scope: nn.Scope, tokens: jax.Array, lengths: jax.Array | None = None
    ) -> jax.Array:
        x = nn.Embed(self.vocab_size, self.width)(scope["embed"], tokens)
        for i in range(self.depth):
            x = nn.Dropout(self.dropout)(scope[f"drop{i}"], x)
            x = nn.LSTM(self.width, bidirectional=True)(scope[f"lstm{i}"], x, lengths=lengths)
        if lengths is not None:  # [batch, time, 2 width]
            real = jnp.arange(x.shape[1], dtype=jnp.int32)[None] < jnp.asarray(lengths)[
                :, None
            ].astype(jnp.int32)
            x = jnp.where(real[..., None], x, -1)  # no LSTM output is smaller
        x = nn.Dropout(self.dropout)(scope["drop"], x.max(1))
        return nn.Dense(self.classes, axes=("in", "classes"))(scope["head"], x)

    def example(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, 35), jnp.int32)
