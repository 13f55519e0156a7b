"""BERT, a text encoder, with heads for several tasks, and sentence embeddings."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import KW_ONLY
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import export

from fnet import layers as nn
from fnet.layers._sizes import at_most
from fnet.models._blocks import Blocks
from fnet.models._model import Model
from fnet.models.weights._config import Fields, Must, Use, transformers
from fnet.models.weights._labels import labels
from fnet.models.weights._torch_layers import spare, torch_layers
from fnet.models.weights._weight_names import Names, Rule, Spare, Tied
from fnet.models.weights._words import torch

HEADS = "masked_lm", "sequence", "tokens", "questions", "next_sentence", "pretraining"


class Encoded(NamedTuple):
    """The output of an encoder: the features of each token and of each example.

    Attributes:
        hidden: [batch, time, width], the features of each token.
        pooled: [batch, width], the features of each example, which `Bert` computes from the first
            token with its pooler. None if the model has no such features.

    `Encoded` is registered with `jax.export` as "fnet.models.Encoded", so an exported program that
    returns one can be deserialized only after `import fnet.models`. To do without fnet, export a
    function that returns a dict, such as `lambda params, tokens: model(params, tokens)._asdict()`.

    >>> model = models.Bert(vocab_size=8, depth=1, heads=2, width=4, hidden=8, context=8)
    >>> params, _ = model.init(jax.random.key(0), jnp.zeros((1, 3), jnp.int32))
    >>> encoded = model(params, jnp.zeros((2, 3), jnp.int32))
    >>> encoded.hidden.shape, encoded.pooled.shape
    ((2, 3, 4), (2, 4))
    """

    hidden: jax.Array
    pooled: jax.Array | None


export.register_namedtuple_serialization(Encoded, serialized_name="fnet.models.Encoded")


def gelu(x):
    return jax.nn.gelu(x, approximate=False)


@nn.layer
def bert_block(scope, x, lengths=None, *, heads, hidden, dropout, epsilon):  # [batch, time, width]
    norm, drop = nn.LayerNorm(epsilon=epsilon), nn.Dropout(dropout)
    y = nn.Attention(heads, dropout=dropout)(scope["attention"], x, lengths=lengths)
    x = norm(scope["norm1"], x + drop(scope["drop1"], y))
    y = gelu(nn.Dense(hidden, axes=("embed", "mlp"))(scope["fc"], x))  # [batch, time, hidden]
    y = nn.Dense(x.shape[-1], axes=("mlp", "embed"))(scope["proj"], y)
    return norm(scope["norm2"], x + drop(scope["drop2"], y))


def _rules(ours, theirs="encoder.layer.{i}"):
    return torch_layers(
        ours,
        theirs,
        {
            "attention/query": "attention.self.query",
            "attention/key": "attention.self.key",
            "attention/value": "attention.self.value",
            "attention/out": "attention.output.dense",
            "fc": "intermediate.dense",
            "proj": "output.dense",
        },
        {"norm1": "attention.output.LayerNorm", "norm2": "output.LayerNorm"},
    )


ENCODER = (
    torch.embed("embed/words", "embeddings.word_embeddings"),
    torch.embed("embed/positions", "embeddings.position_embeddings"),
    torch.embed("embed/segments", "embeddings.token_type_embeddings"),
    torch.norm("embed/norm", "embeddings.LayerNorm"),
    torch.dense("pooler", "pooler.dense"),
    _rules("blocks"),
    _rules("blocks/{i}"),
    Spare("embeddings.position_ids"),
    spare("pooler.dense"),
)
ALIASES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


def heads_of(dense: str, norm: str, logits: str, bias: str, *others: str) -> tuple:
    """Returns the rules that map the keys of Hugging Face's files to the parameters of the heads.

    Args:
        dense, norm, logits, bias: the keys of the layers of the masked LM head in a file.
        others: the keys of further layers that the model does not need, but that a file may
            contain.
    """
    words = (
        torch.dense("masked_lm/dense", dense),
        torch.norm("masked_lm/norm", norm),
        Rule("masked_lm/bias", bias),
        Tied(f"{logits}.weight", "embed/words/embedding"),
        Tied(f"{logits}.bias", "masked_lm/bias"),
    )
    return (
        words,
        torch.dense("head", "classifier"),
        torch.dense("questions", "qa_outputs"),
        Spare(bias),
        spare(dense, norm, logits, "classifier", "qa_outputs", *others),
    )


def architectures(prefix: str, without: str = "Model") -> dict:
    """Returns {name of a class of the library transformers: {field of the model: value}}.

    The class that config.json states determines the fields of the model. In the returned dict,
    `...` is a placeholder for a value that another field of config.json determines.
    """
    return {
        f"{prefix}{without}": dict(head=None),
        f"{prefix}ForMaskedLM": dict(head="masked_lm"),
        f"{prefix}ForSequenceClassification": dict(head="sequence", classes=...),
        f"{prefix}ForTokenClassification": dict(head="tokens", classes=...),
        f"{prefix}ForQuestionAnswering": dict(head="questions"),
    }


def tied(value, config):
    """Checks the field `tie_word_embeddings` of config.json: it must be True for models with a
    masked LM head, and has no effect on others."""
    names, heads = config.get("architectures"), ("ForMaskedLM", "ForPreTraining")
    if (
        value is not True
        and isinstance(names, list)
        and any(str(name).endswith(heads) for name in names)
    ):
        raise ValueError("expected True for a masked LM")
    if not isinstance(value, bool):
        raise ValueError("expected True or False")
    return {}


COMMON = {
    "hidden_size": Use("width", 768),
    "num_hidden_layers": Use("depth", 12),
    "num_attention_heads": Use("heads", 12),
    "intermediate_size": Use("hidden", 3072),
    "type_vocab_size": Use("segments", 2),
    "layer_norm_eps": Use("epsilon", 1e-12),
    "hidden_act": Must(("gelu", "gelu_python")),
    "position_embedding_type": Must(("absolute",)),
    "tie_word_embeddings": Fields(tied, write=lambda model: True),
}
IRRELEVANT = "hidden_dropout_prob attention_probs_dropout_prob classifier_dropout output_past"
BERT = {
    **architectures("Bert"),
    "BertForPreTraining": dict(head="pretraining"),
    "BertForNextSentencePrediction": dict(head="next_sentence"),
}


class Bert(Model):
    """A text encoder: BERT and models distilled from it, such as MiniLM.

        tokenizer = models.WordPiece.read("vocab.txt")
        tokens, lengths = models.padded([tokenizer.encode("A cat."), tokenizer.encode("Dogs and cats.")])
        vectors = models.sentence_embedding(model(params, tokens, lengths).hidden, lengths)       # [batch, width]

    The blocks start from the sum of the embeddings of tokens, positions and segments. Each has
    bidirectional attention and an MLP with GELU, each followed by a residual connection and a
    LayerNorm. The pooler applies a dense layer and tanh to the features of the first token.

    Args:
        vocab_size: number of tokens in the vocabulary.
        width: number of features of a token.
        depth: number of blocks.
        heads: number of attention heads, which must divide the width.
        hidden: number of features between the two dense layers of a block's MLP.
        context: maximum length of a text in tokens.
        segments: number of segments.
        head: the layers after the encoder, one of those under Output. Default: None, no such
            layers.
        classes: number of logits of the heads "sequence" and "tokens".
        pooler: whether a model without a head has a pooler.
        dropout: dropout rate of the embeddings, the attention weights, the residual branches and
            the input of the head.
        epsilon: epsilon of the norms.
        stacked: whether the parameters of all blocks are stacked and a scan applies the blocks
            (`nn.Stack`). See also `models.unstack`.

    Inputs:
        tokens: integers [batch, time].
        lengths: integers [batch], the number of valid tokens in each example. Later tokens are
            padding. Default: all tokens are valid.
        segment: the index of the segment of each token, integers [batch, time], less than
            `segments`. Default: 0 for all tokens.

    Output: without a head, an `Encoded`. With one, its logits:

        "masked_lm"          # [batch, time, vocab_size], for each token, computed with the embedding table
        "sequence"           # [batch, classes], for the text, from the output of the pooler
        "tokens"             # [batch, time, classes], for each token
        "questions"          # [batch, time, 2]: an answer starts at this token, an answer ends at it
        "next_sentence"      # [batch, 2]: the second segment continues the first, or it is a random text
        "pretraining"        # a pair, those of "masked_lm" and those of "next_sentence"

    Source: Devlin et al. (2019), BERT: Pre-training of Deep Bidirectional Transformers; Wang et al.
    (2020), MiniLM: Deep Self-Attention Distillation.

    >>> model = models.Bert.preset("minilm-l6")
    >>> nn.count_parameters(model.spec(model.example()).params)
    22713216
    """

    PRESETS: ClassVar = {
        "bert-base-uncased": dict(vocab_size=30522, width=768, depth=12, heads=12, hidden=3072),
        "bert-large-uncased": dict(vocab_size=30522, width=1024, depth=24, heads=16, hidden=4096),
        "bert-base-cased": dict(vocab_size=28996, width=768, depth=12, heads=12, hidden=3072),
        "minilm-l6": dict(vocab_size=30522, width=384, depth=6, heads=12, hidden=1536),
        "minilm-l12": dict(vocab_size=30522, width=384, depth=12, heads=12, hidden=1536),
    }
    NAMES: ClassVar = {
        "huggingface": Names(
            ENCODER,
            prefixes=("", "bert."),
            config={"epsilon": 1e-12},
            metadata={"format": "pt"},
            aliases=ALIASES,
            heads=(
                torch.dense("next_sentence", "cls.seq_relationship"),
                heads_of(
                    "cls.predictions.transform.dense",
                    "cls.predictions.transform.LayerNorm",
                    "cls.predictions.decoder",
                    "cls.predictions.bias",
                    "cls.seq_relationship",
                ),
            ),
        ),
    }
    CONFIGS: ClassVar = {
        "bert": transformers(
            {
                "vocab_size": Use("vocab_size", 30522),
                "max_position_embeddings": Use("context", 512),
                **COMMON,
                **labels(BERT),
            },
            architectures=BERT,
            other_heads=("masked_lm", "next_sentence", "pretraining"),
            irrelevant=(
                f"{IRRELEVANT} directionality pooler_fc_size pooler_num_attention_heads "
                "pooler_num_fc_layers pooler_size_per_head pooler_type"
            ),
        ),
    }
    HUB: ClassVar = {
        "bert-base-uncased": ("google-bert/bert-base-uncased",),
        "bert-large-uncased": ("google-bert/bert-large-uncased",),
        "bert-base-cased": ("google-bert/bert-base-cased",),
        "minilm-l6": ("sentence-transformers/all-MiniLM-L6-v2",),
        "minilm-l12": ("sentence-transformers/all-MiniLM-L12-v2",),
    }

    vocab_size: int
    width: int
    depth: int
    heads: int
    hidden: int
    _: KW_ONLY
    context: int = 512
    segments: int = 2
    head: str | None = None
    classes: int | None = None
    pooler: bool = True
    dropout: float = 0.0
    epsilon: float = 1e-12
    stacked: bool = True

    def forward(
        self,
        scope: nn.Scope,
        tokens: jax.Array,
        lengths: jax.Array | None = None,
        segment: jax.Array | None = None,
    ) -> Encoded | jax.Array | tuple[jax.Array, jax.Array]:
        self._check()
        tokens, embed = jnp.asarray(tokens), scope["embed"]
        table, words = nn.Embed(self.vocab_size, self.width), embed["words"]
        x = table(words, tokens) + self._places(embed, tokens, segment)  # [batch, time, width]
        x = nn.LayerNorm(epsilon=self.epsilon)(embed["norm"], x)
        x = nn.Dropout(self.dropout)(scope["drop"], x)
        block = bert_block(
            heads=self.heads, hidden=self.hidden, dropout=self.dropout, epsilon=self.epsilon
        )
        x = Blocks(block, self.depth, self.stacked)(scope["blocks"], x, lengths=lengths)
        if self.head is None:
            return Encoded(x, self._pooled(scope, x) if self.pooler else None)
        if self.head in ("masked_lm", "pretraining"):
            logits = self._words(scope["masked_lm"], x, table, words)
            return logits if self.head == "masked_lm" else (logits, self._logits(scope, x))
        return self._logits(scope, x)

    def _words(self, scope, x, table, words):
        """Returns the logits of the masked LM, computed with the embedding table."""
        x = gelu(nn.Dense(self.width)(scope["dense"], x))
        x = nn.LayerNorm(epsilon=self.epsilon)(scope["norm"], x)
        x = table.attend(words, x)  # [batch, time, vocab_size]
        bias = scope.param(
            "bias", (self.vocab_size,), jax.nn.initializers.zeros, ("vocab",), roles=("out",)
        )
        return x + bias.astype(x.dtype)[None, None]

    def _logits(self, scope, x):
        """Returns the logits of a head other than the masked language model."""
        if self.head in ("sequence", "next_sentence", "pretraining"):
            x = self._pooled(scope, x)
        x = nn.Dropout(self.dropout)(scope["head_drop"], x)
        names = {"sequence": "head", "tokens": "head", "pretraining": "next_sentence"}
        return nn.Dense(self.classes or 2, axes=("in", "classes"))(
            scope[names.get(self.head, self.head)], x
        )

    def _check(self):
        if self.depth < 1:
            raise ValueError(f"{type(self).__name__}: depth must be at least 1; got {self.depth}")
        if self.head is not None and self.head not in HEADS:
            raise ValueError(
                f"{type(self).__name__}: head must be None or one of {', '.join(HEADS)}; "
                f"got {self.head!r}"
            )
        if (self.head in ("sequence", "tokens")) != (self.classes is not None):
            raise ValueError(
                f"{type(self).__name__}: the heads 'sequence' and 'tokens' need classes, and no "
                f"other head has them; got head={self.head!r} with classes={self.classes}"
            )

    def _pooled(self, scope, x):
        return jnp.tanh(nn.Dense(self.width)(scope["pooler"], x[:, 0]))

    def _places(self, scope, tokens, segment):
        """Returns the sum of the embeddings of segments and positions."""
        who = type(self).__name__
        if tokens.ndim != 2 or not at_most(who, tokens.shape[1], self.context):
            raise ValueError(
                f"{who}: expected tokens [batch, time] with time <= context={self.context}; got "
                f"shape {tokens.shape}"
            )
        if segment is not None and (jnp.shape(segment) != tokens.shape or not self.segments):
            raise ValueError(
                f"{who}: segment must have the shape of tokens, {tokens.shape}; got "
                f"{jnp.shape(segment)}"
                if self.segments
                else f"{who}: expected no segment, because this model has none"
            )
        order = self._positions(tokens)
        y = nn.Embed(self._rows(), self.width)(scope["positions"], order)
        if self.segments:
            segment = jnp.zeros((1, tokens.shape[1]), jnp.int32) if segment is None else segment
            y = nn.Embed(self.segments, self.width)(scope["segments"], segment) + y
        return y

    def _positions(self, tokens):
        return jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]  # [1, time]

    def _rows(self):
        return self.context

    def of_keys(self, keys: Collection[str]) -> Bert:
        held = any(key.endswith("pooler.dense.weight") for key in keys)
        return dataclasses.replace(self, pooler=held) if self.head is None else self

    def example(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, self.context), jnp.int32)


def sentence_embedding(hidden: jax.Array, lengths: jax.Array) -> jax.Array:
    """Averages the features of each text's valid tokens, and scales the average to length 1.

    The dot product of two such embeddings is their cosine similarity.

    Args:
        hidden: the features of the tokens, [batch, time, width].
        lengths: the number of valid tokens in each example, integers [batch], at least 1.

    Returns:
        The embeddings, an array [batch, width] in float32 or float64.

    Raises:
        ValueError: the shapes of `hidden` and `lengths` do not match.

    Source: Reimers and Gurevych (2019), Sentence-BERT, section 3.

    >>> from fnet import models
    >>> hidden = jnp.array([[[3.0, 0.0], [3.0, 8.0], [9.0, 9.0]]])
    >>> models.sentence_embedding(hidden, jnp.array([2]))
    Array([[0.6, 0.8]], dtype=float32)
    """
    hidden, lengths = jnp.asarray(hidden), jnp.asarray(lengths)
    if hidden.ndim != 3 or lengths.shape != hidden.shape[:1]:
        raise ValueError(
            "sentence_embedding: expected hidden [batch, time, width] and lengths [batch]; got "
            f"{hidden.shape} and {lengths.shape}"
        )
    hidden = hidden.astype(jnp.float32) if jnp.finfo(hidden.dtype).bits < 32 else hidden
    # [batch, time]
    real = jnp.arange(hidden.shape[1], dtype=jnp.int32)[None] < lengths[:, None].astype(jnp.int32)
    mean = jnp.where(real[..., None], hidden, 0).sum(1) / lengths[:, None].astype(hidden.dtype)
    return mean / jnp.maximum(jnp.linalg.norm(mean, axis=-1, keepdims=True), 1e-12)
