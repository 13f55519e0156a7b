"""RoBERTa and XLM-R: BERT's encoder, with position indices that start at the index of the padding
token plus 1."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import ClassVar

import jax.numpy as jnp

from fnet import layers as nn
from fnet.models.language._bert import (
    ALIASES,
    COMMON,
    ENCODER,
    IRRELEVANT,
    Bert,
    architectures,
    heads_of,
)
from fnet.models.weights._config import Fields, Use, transformers
from fnet.models.weights._labels import labels
from fnet.models.weights._weight_names import Names
from fnet.models.weights._words import torch


def _context(value, config):
    padding = config.get("pad_token_id", 1)
    if not all(isinstance(each, int) and not isinstance(each, bool) for each in (value, padding)):
        raise ValueError("expected integers for max_position_embeddings and pad_token_id")
    return {"context": value - padding - 1}


def _config(prefix, words):
    kinds = architectures(prefix)
    return transformers(
        {
            **COMMON,
            "vocab_size": Use("vocab_size", words),
            "pad_token_id": Use("padding", 1),
            "max_position_embeddings": Fields(
                _context, 512, lambda model: model.context + model.padding + 1
            ),
            **labels(kinds),
        },
        architectures=kinds,
        irrelevant=IRRELEVANT,
    )


class Roberta(Bert):
    """RoBERTa and XLM-R: the encoder of `Bert`, trained without segments and with other tokenizers.

    The first token of a text has position `padding` + 1, so the table of position embeddings has
    additional rows at its start. Padding tokens are not counted: one within a text does not change
    the positions of later tokens.

    Args:
        vocab_size, width, depth, heads, hidden, context, segments, classes, pooler, dropout,
            epsilon, stacked: as in `Bert`.
        head: as in `Bert`, without "next_sentence" and "pretraining".
        padding: the index of the padding token in the vocabulary.

    Inputs, output: as in `Bert`.

    Source: Liu et al. (2019), RoBERTa: A Robustly Optimized BERT Pretraining Approach; Conneau et
    al. (2020), Unsupervised Cross-lingual Representation Learning at Scale.

    >>> model = models.Roberta.preset("roberta-base")
    >>> nn.count_parameters(model.spec(model.example()).params)
    124645632
    """

    PRESETS: ClassVar = {
        "roberta-base": dict(vocab_size=50265, width=768, depth=12, heads=12, hidden=3072),
        "roberta-large": dict(vocab_size=50265, width=1024, depth=24, heads=16, hidden=4096),
        "distilroberta-base": dict(vocab_size=50265, width=768, depth=6, heads=12, hidden=3072),
        "xlm-roberta-base": dict(vocab_size=250002, width=768, depth=12, heads=12, hidden=3072),
        "xlm-roberta-large": dict(vocab_size=250002, width=1024, depth=24, heads=16, hidden=4096),
    }
    NAMES: ClassVar = {
        "huggingface": Names(
            ENCODER,
            prefixes=("", "roberta."),
            config={"epsilon": 1e-5},
            metadata={"format": "pt"},
            aliases=ALIASES,
            heads=(
                torch.dense("dense", "classifier.dense"),
                torch.dense("out", "classifier.out_proj"),
                heads_of(
                    "lm_head.dense",
                    "lm_head.layer_norm",
                    "lm_head.decoder",
                    "lm_head.bias",
                    "classifier.dense",
                    "classifier.out_proj",
                ),
            ),
        ),
    }
    CONFIGS: ClassVar = {
        "roberta": _config("Roberta", 50265),
        "xlm-roberta": _config("XLMRoberta", 30522),
        "camembert": _config("Camembert", 30522),
    }
    HUB: ClassVar = {
        name: (f"FacebookAI/{name}",) for name in PRESETS if name != "distilroberta-base"
    } | {"distilroberta-base": ("distilbert/distilroberta-base",)}

    _: KW_ONLY
    segments: int = 1
    epsilon: float = 1e-5
    padding: int = 1

    def _check(self):
        super()._check()
        if self.head in ("next_sentence", "pretraining"):
            raise ValueError(
                f"Roberta: expected another head than {self.head!r}, which RoBERTa does not have"
            )

    def _logits(self, scope, x):
        if self.head != "sequence":
            return super()._logits(scope, x)
        drop = nn.Dropout(self.dropout)
        x = jnp.tanh(nn.Dense(self.width)(scope["dense"], drop(scope["dense_drop"], x[:, 0])))
        return nn.Dense(self.classes, axes=("in", "classes"))(
            scope["out"], drop(scope["head_drop"], x)
        )

    def _positions(self, tokens):
        valid = (tokens != self.padding).astype(jnp.int32)
        order = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        # Not jnp.cumsum, which jax.export cannot lower for an axis of symbolic length.
        count = jnp.where(order[None, :, None] >= order[None, None], valid[:, None], 0).sum(
            2, dtype=jnp.int32
        )
        return count * valid + jnp.int32(self.padding)  # [batch, time]

    def _rows(self):
        return self.context + self.padding + 1
