"""Decoders of texts that are packed into rows: each text has the logits, the loss and the gradients
that it has alone, in every family."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import close, sampled

from fnet import introspect, models
from fnet import layers as nn
from fnet.models import pretrained

FOLDERS = {
    path.name: path
    for path in sorted((pathlib.Path(__file__).parents[1] / "reference/families").iterdir())
}
SIZES = dict(vocab_size=31, width=16, depth=2, heads=2, context=32)
SMALL = dict(SIZES, kv_heads=1, hidden=24)
MODELS = {
    "GPT": models.GPT(**SIZES),
    "GPT, unstacked": models.GPT(**SIZES, stacked=False, tied=False),
    "GPT, scores by depth": models.GPT(**SIZES, scale_by_depth=True),
    "Llama 3": models.Decoder(**SMALL, rope_scaling=models.Llama3Scaling(8.0, 1.0, 4.0, 8)),
    "Yarn": models.Decoder(**SMALL, rope_scaling=models.YarnScaling(4.0, original_context=8)),
    "dynamic": models.Decoder(**SMALL, rope_scaling=models.DynamicScaling(2.0, 4)),
    "long": models.Decoder(
        **SMALL, rope_scaling=models.LongScaling((1.0,) * 4, (1.0, 2.0, 3.0, 4.0), 4)
    ),
    "experts": models.Decoder(**SMALL, experts=3, window=(3, None)),
}
LENGTHS = (5, 12, 1, 3), (9, 12)
TIME, LONGEST = 24, 12


def loaded(name):
    """(model, parameters in float64) with tokens that it knows."""
    if name in FOLDERS:
        model, params, _ = pretrained.load(FOLDERS[name], dtype=jnp.float32)
    else:
        model = MODELS[name]
        params, _ = model.init(jax.random.key(0), jnp.ones((1, 4), jnp.int32))
    return model, jax.tree.map(lambda p: p.astype(jnp.float64), params)


def rows(model):
    """Packed tokens and segments, and the same texts one in each row, with lengths."""
    draw = np.random.default_rng(0)
    texts = [[draw.integers(0, model.vocab_size, n, np.int32) for n in row] for row in LENGTHS]
    tokens, segments = np.zeros((2, 2, TIME), np.int32)
    for i, row in enumerate(texts):
        at = 0
        for number, text in enumerate(row, 1):
            tokens[i, at : at + len(text)] = text
            segments[i, at : at + len(text)] = number
            at += len(text)
    flat = [text for row in texts for text in row]
    apart = np.stack([np.pad(text, (0, LONGEST - len(text))) for text in flat])
    return tokens, segments, apart, np.array([len(text) for text in flat], np.int32)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", sampled({**MODELS, **FOLDERS}, ["GPT", "long", "gemma2"]))
def test_every_text_is_as_if_alone(name):
    with jax.enable_x64(True):
        model, params = loaded(name)
        tokens, segments, apart, lengths = rows(model)
        valid = np.arange(LONGEST)[None] < lengths[:, None]
        one_each = valid.astype(np.int32)

        def loss_of(params, tokens, numbers, **options):
            labels, weights = nn.next_tokens(tokens, numbers)
            each = model.cross_entropy(params, tokens, labels, **options)
            return (each * weights).sum() / weights.sum()

        both = lambda *rest, **options: jax.jit(
            jax.value_and_grad(lambda params: loss_of(params, *rest, **options))
        )
        together = both(tokens, segments, segments=segments)
        separate = both(apart, one_each, lengths=lengths)
        (loss, gradients), (want, want_gradients) = together(params), separate(params)
        close(loss, want, 1e-6)
        clear = lambda g: np.where(np.abs(g) < 1e-12, 0, g)  # rounding errors of 0
        close(jax.tree.map(clear, gradients), jax.tree.map(clear, want_gradients), 1e-6)
        logits = jax.jit(model)(params, tokens, segments=segments)
        close(logits[segments != 0], jax.jit(model)(params, apart, lengths)[valid], 1e-6)


@pytest.mark.parametrize("name", sampled({**MODELS, **FOLDERS}, ["GPT", "qwen2"]))
def test_no_text_sees_another(name):
    """Proved for all tokens of texts with these numbers."""
    if name in FOLDERS:
        model, params, _ = pretrained.load(FOLDERS[name], dtype=jnp.float32)
    else:
        model = MODELS[name]
        params, _ = model.init(jax.random.key(0), jnp.ones((1, 4), jnp.int32))
    tokens, segments, *_ = rows(model)

    def losses(tokens, segments):
        labels, weights = nn.next_tokens(tokens, segments)
        return model.cross_entropy(params, tokens, labels, segments=segments) * weights

    report = introspect.depends(losses, tokens, segments, axes={"b": 0, "t": 1})
    if getattr(model, "experts", None):
        # The order in which experts get their tokens depends on all tokens. No analysis shows that
        # nothing else does, so this is tested.
        assert report.verdict("segments", "segments").status == "tested"
    else:
        report.check(segments="segments", assume="finite")


def test_a_cache_and_other_models_are_refused():
    model, lstm = MODELS["GPT"], models.LSTMLanguageModel(31, 8)
    tokens = jnp.ones((2, 6), jnp.int32)
    cache = model.cache(jax.ShapeDtypeStruct((2, 16), jnp.int32))
    params, _ = model.init(jax.random.key(0), tokens)
    with pytest.raises(ValueError, match="segments= cannot be combined with a cache"):
        model(params, tokens, segments=tokens, state=cache)
    params, _ = lstm.init(jax.random.key(0), tokens)
    with pytest.raises(ValueError, match="segments= is for decoders with attention"):
        lstm(params, tokens, segments=tokens)
