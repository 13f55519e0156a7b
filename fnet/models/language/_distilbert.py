"""DistilBERT: a BERT of half the depth, without segments and pooler."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import ClassVar

import jax

from fnet import layers as nn
from fnet.models.language._bert import ALIASES, Bert, architectures, heads_of, tied
from fnet.models.weights._config import Fields, Must, Use, transformers
from fnet.models.weights._labels import labels
from fnet.models.weights._torch_layers import torch_layers
from fnet.models.weights._weight_names import Names
from fnet.models.weights._words import torch

_KINDS = architectures("DistilBert")


def _rules(ours, theirs="transformer.layer.{i}"):
    return torch_layers(
        ours,
        theirs,
        {
            "attention/query": "attention.q_lin",
            "attention/key": "attention.k_lin",
            "attention/value": "attention.v_lin",
            "attention/out": "attention.out_lin",
            "fc": "ffn.lin1",
            "proj": "ffn.lin2",
        },
        {"norm1": "sa_layer_norm", "norm2": "output_layer_norm"},
    )


class DistilBert(Bert):
    """A text encoder distilled from BERT: `Bert` with half as many blocks, no segments and no
    pooler.

    Args:
        vocab_size, width, depth, heads, hidden, context, classes, dropout, epsilon, stacked: as in
            `Bert`.
        head: as in `Bert`, without "next_sentence" and "pretraining". "sequence" has an additional
            dense layer with ReLU.

    Inputs: as in `Bert`, but without `segment`. Output: as in `Bert`.

    Source: Sanh et al. (2019), DistilBERT, a distilled version of BERT: smaller, faster, cheaper
    and lighter.

    >>> model = models.DistilBert.preset("distilbert-base-uncased")
    >>> nn.count_parameters(model.spec(model.example()).params)
    66362880
    """

    PRESETS: ClassVar = {
        "distilbert-base-uncased": dict(
            vocab_size=30522, width=768, depth=6, heads=12, hidden=3072
        ),
        "distilbert-base-cased": dict(vocab_size=28996, width=768, depth=6, heads=12, hidden=3072),
    }
    NAMES: ClassVar = {
        "huggingface": Names(
            (
                torch.embed("embed/words", "embeddings.word_embeddings"),
                torch.embed("embed/positions", "embeddings.position_embeddings"),
                torch.norm("embed/norm", "embeddings.LayerNorm"),
                _rules("blocks"),
                _rules("blocks/{i}"),
            ),
            prefixes=("", "distilbert."),
            metadata={"format": "pt"},
            aliases=ALIASES,
            heads=(
                torch.dense("dense", "pre_classifier"),
                heads_of(
                    "vocab_transform",
                    "vocab_layer_norm",
                    "vocab_projector",
                    "vocab_projector.bias",
                    "pre_classifier",
                ),
            ),
        ),
    }
    CONFIGS: ClassVar = {
        "distilbert": transformers(
            {
                "vocab_size": Use("vocab_size", 30522),
                "dim": Use("width", 768),
                "n_layers": Use("depth", 6),
                "n_heads": Use("heads", 12),
                "hidden_dim": Use("hidden", 3072),
                "activation": Must(("gelu",)),
                "max_position_embeddings": Use("context", 512),
                "hidden_size": Use("width"),
                "num_hidden_layers": Use("depth"),
                "num_attention_heads": Use("heads"),
                "tie_word_embeddings": Fields(tied, write=lambda model: True),
                **labels(_KINDS),
            },
            architectures=_KINDS,
            irrelevant="dropout attention_dropout qa_dropout seq_classif_dropout tie_weights_ "
            "sinusoidal_pos_embds output_past",
        ),
    }
    HUB: ClassVar = {name: (f"distilbert/{name}",) for name in PRESETS}

    _: KW_ONLY
    segments: int = 0
    pooler: bool = False

    def _check(self):
        super()._check()
        if self.head in ("next_sentence", "pretraining") or self.segments or self.pooler:
            raise ValueError(
                "DistilBert: expected a head without a pooler, segments=0 and pooler=False; got "
                f"head={self.head!r}, segments={self.segments}, pooler={self.pooler}"
            )

    def _logits(self, scope, x):
        if self.head != "sequence":
            return super()._logits(scope, x)
        x = jax.nn.relu(nn.Dense(self.width)(scope["dense"], x[:, 0]))
        x = nn.Dropout(self.dropout)(scope["head_drop"], x)
        return nn.Dense(self.classes, axes=("in", "classes"))(scope["head"], x)
