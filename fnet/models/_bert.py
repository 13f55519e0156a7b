"""BERT, an encoder of text, and sentence embeddings computed with it."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import export

from fnet import layers as nn
from fnet.layers._sizes import at_most
from fnet.models._blocks import Blocks
from fnet.models._model import Model
from fnet.models.weights._config import Must, Use, transformers
from fnet.models.weights._weight_names import Names, Spare, torch


class Encoded(NamedTuple):
    """The output of `Bert`, registered with `jax.export` as "fnet.models.Encoded".

    An exported program that returns it can be deserialized only after `import fnet.models`. To read the program
    without fnet, export a function that returns a dict: `lambda params, tokens: model(params, tokens)._asdict()`.

    Attributes:
        hidden: [batch, time, width], the features of each token.
        pooled: [batch, width], the features of the first token after the pooler.

    >>> model = models.Bert(vocab_size=8, depth=1, heads=2, width=4, hidden=8, context=8)
    >>> params, _ = model.init(jax.random.key(0), jnp.zeros((1, 3), jnp.int32))
    >>> encoded = model(params, jnp.zeros((2, 3), jnp.int32))
    >>> encoded.hidden.shape, encoded.pooled.shape
    ((2, 3, 4), (2, 4))
    """

    hidden: jax.Array
    pooled: jax.Array


export.register_namedtuple_serialization(Encoded, serialized_name="fnet.models.Encoded")


@nn.layer
def bert_block(scope, x, lengths=None, *, heads, hidden, dropout, epsilon):      # [batch, time, width]
    norm, drop = nn.LayerNorm(epsilon=epsilon), nn.Dropout(dropout)
    y = nn.Attention(heads, dropout=dropout)(scope["attention"], x, lengths=lengths)
    x = norm(scope["norm1"], x + drop(scope["drop1"], y))
    y = nn.Dense(hidden, axes=("embed", "mlp"))(scope["fc"], x)                                  # [batch, time, hidden]
    y = jax.nn.gelu(y, approximate=False)
    y = nn.Dense(x.shape[-1], axes=("mlp", "embed"))(scope["proj"], y)
    return norm(scope["norm2"], x + drop(scope["drop2"], y))


def _rules(ours, theirs):
    dense = {"attention/query": "attention.self.query", "attention/key": "attention.self.key",
             "attention/value": "attention.self.value", "attention/out": "attention.output.dense",
             "fc": "intermediate.dense", "proj": "output.dense"}
    norms = {"norm1": "attention.output.LayerNorm", "norm2": "output.LayerNorm"}
    return (*(torch.dense(f"{ours}/{mine}", f"{theirs}.{name}") for mine, name in dense.items()),
            *(torch.norm(f"{ours}/{mine}", f"{theirs}.{name}") for mine, name in norms.items()))


class Bert(Model):
    """An encoder of text: BERT and models distilled from it, such as MiniLM.

    Embeddings of tokens, positions and segments are added. Blocks of bidirectional attention and an MLP with GELU
    follow, each with a residual connection and a LayerNorm after it. The pooler is a dense layer with tanh on the first
    token.

    Args:
        vocab_size: number of tokens.
        width: features of a token.
        depth: number of blocks.
        heads: attention heads; they must divide the width.
        hidden: features within the MLP.
        context: maximum length of a text in tokens.
        segments: number of segments.
        dropout: dropout rate of embeddings, attention weights and residual branches.
        epsilon: epsilon of the norms.
        stacked: whether the blocks are one `nn.Stack`; see `models.unstack`.

    Inputs:
        tokens: integers [batch, time].
        lengths: integers [batch], the number of valid tokens in each example; the rest is padding. Default: all.
        segment: integers [batch, time], less than `segments`. Default: 0.

    Output: `Encoded`.

        words = models.WordPiece.read("vocab.txt")
        tokens, lengths = models.padded([words.encode("A cat."), words.encode("Dogs and cats.")])
        vectors = models.sentence_embedding(model(params, tokens, lengths).hidden, lengths)       # [batch, width]

    Source: Devlin et al. (2019), BERT: Pre-training of Deep Bidirectional Transformers; Wang et al. (2020), MiniLM:
    Deep Self-Attention Distillation.

    >>> model = models.Bert.preset("minilm-l6")
    >>> nn.count_parameters(model.spec(model.example()).params)
    22713216
    """

    PRESETS: ClassVar = {
        "bert-base-uncased": dict(vocab_size=30522, width=768, depth=12, heads=12, hidden=3072),
        "bert-large-uncased": dict(vocab_size=30522, width=1024, depth=24, heads=16, hidden=4096),
        "minilm-l6": dict(vocab_size=30522, width=384, depth=6, heads=12, hidden=1536),
        "minilm-l12": dict(vocab_size=30522, width=384, depth=12, heads=12, hidden=1536),
    }
    NAMES: ClassVar = {
        "huggingface": Names((
            torch.embed("embed/words", "embeddings.word_embeddings"),
            torch.embed("embed/positions", "embeddings.position_embeddings"),
            torch.embed("embed/segments", "embeddings.token_type_embeddings"),
            torch.norm("embed/norm", "embeddings.LayerNorm"), torch.dense("pooler", "pooler.dense"),
            _rules("blocks", "encoder.layer.{i}"), _rules("blocks/{i}", "encoder.layer.{i}"),
            Spare("embeddings.position_ids"),
        ), prefixes=("", "bert."), config={"epsilon": 1e-12}, metadata={"format": "pt"}),
    }
    CONFIGS: ClassVar = {
        "bert": transformers({
            "vocab_size": Use("vocab_size", 30522), "hidden_size": Use("width", 768),
            "num_hidden_layers": Use("depth", 12), "num_attention_heads": Use("heads", 12),
            "intermediate_size": Use("hidden", 3072), "max_position_embeddings": Use("context", 512),
            "type_vocab_size": Use("segments", 2), "layer_norm_eps": Use("epsilon", 1e-12),
            "hidden_act": Must(("gelu", "gelu_python")), "position_embedding_type": Must(("absolute",)),
        }, architectures=("BertModel", "BertForPreTraining", "BertForMaskedLM", "BertForNextSentencePrediction",
                          "BertForSequenceClassification", "BertForMultipleChoice", "BertForTokenClassification",
                          "BertForQuestionAnswering"),
            irrelevant="hidden_dropout_prob attention_probs_dropout_prob classifier_dropout tie_word_embeddings "
                       "directionality pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers "
                       "pooler_size_per_head pooler_type"),
    }
    HUB: ClassVar = {
        "bert-base-uncased": ("google-bert/bert-base-uncased",),
        "bert-large-uncased": ("google-bert/bert-large-uncased",),
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
    dropout: float = 0.0
    epsilon: float = 1e-12
    stacked: bool = True

    def forward(self, scope: nn.Scope, tokens: jax.Array, lengths: jax.Array | None = None,
                segment: jax.Array | None = None) -> jax.Array:
        x = self._embedded(scope["embed"], jnp.asarray(tokens), segment)         # [batch, time, width]
        x = nn.Dropout(self.dropout)(scope["drop"], x)
        block = bert_block(heads=self.heads, hidden=self.hidden, dropout=self.dropout, epsilon=self.epsilon)
        x = Blocks(block, self.depth, self.stacked)(scope["blocks"], x, lengths=lengths)
        return Encoded(x, jnp.tanh(nn.Dense(self.width)(scope["pooler"], x[:, 0])))

    def _embedded(self, scope, tokens, segment):
        if tokens.ndim != 2 or not at_most("Bert", tokens.shape[1], self.context):
            raise ValueError(f"Bert: expected tokens [batch, time] with time <= context={self.context}; got shape "
                             f"{tokens.shape}")
        if segment is not None and jnp.shape(segment) != tokens.shape:
            raise ValueError(f"Bert: segment must have the shape of tokens, {tokens.shape}; got {jnp.shape(segment)}")
        order = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]               # [1, time]
        segment = jnp.zeros_like(order) if segment is None else segment
        x = nn.Embed(self.vocab_size, self.width)(scope["words"], tokens)
        x = x + nn.Embed(self.segments, self.width)(scope["segments"], segment)
        x = x + nn.Embed(self.context, self.width)(scope["positions"], order)
        return nn.LayerNorm(epsilon=self.epsilon)(scope["norm"], x)

    def example(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, self.context), jnp.int32)


def sentence_embedding(hidden: jax.Array, lengths: jax.Array) -> jax.Array:
    """Averages the valid tokens of each example and normalizes to length 1, so a dot product is the cosine.

    Args:
        hidden: [batch, time, width].
        lengths: integers [batch], at least 1.

    Returns:
        [batch, width], in float32 or float64.

    Raises:
        ValueError: the shapes do not match.

    Source: Reimers and Gurevych (2019), Sentence-BERT, section 3.

    >>> from fnet import models
    >>> hidden = jnp.array([[[3.0, 0.0], [3.0, 8.0], [9.0, 9.0]]])
    >>> models.sentence_embedding(hidden, jnp.array([2]))
    Array([[0.6, 0.8]], dtype=float32)
    """
    hidden, lengths = jnp.asarray(hidden), jnp.asarray(lengths)
    if hidden.ndim != 3 or lengths.shape != hidden.shape[:1]:
        raise ValueError("sentence_embedding: expected hidden [batch, time, width] and lengths [batch]; got "
                         f"{hidden.shape} and {lengths.shape}")
    hidden = hidden.astype(jnp.float32) if jnp.finfo(hidden.dtype).bits < 32 else hidden
    real = jnp.arange(hidden.shape[1], dtype=jnp.int32)[None] < lengths[:, None].astype(jnp.int32)    # [batch, time]
    mean = jnp.where(real[..., None], hidden, 0).sum(1) / lengths[:, None].astype(hidden.dtype)
    return mean / jnp.maximum(jnp.linalg.norm(mean, axis=-1, keepdims=True), 1e-12)
