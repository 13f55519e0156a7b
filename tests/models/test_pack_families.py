"""`ft.pack` of a decoder that is written for one text per row equals its own `segments=`, in every
family."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checks import close, sampled
from test_packed_texts import FOLDERS, MODELS, loaded, rows

from fnet import introspect
from fnet import layers as nn
from fnet import transforms as ft

AXES = None, "n, t", "segments"


def next_token(model):
    """The loss for padded rows: the mean over all predicted tokens."""

    def loss(params, tokens, lengths):
        logits = model(params, tokens, lengths)[:, :-1]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        mask = jnp.arange(1, tokens.shape[1], dtype=jnp.int32)[None] < lengths[:, None]
        return jnp.where(mask, losses, 0).sum() / mask.sum().astype(losses.dtype)

    return loss


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", sampled({**MODELS, **FOLDERS}, ["GPT", "gemma2"]))
def test_a_packed_decoder_equals_its_own_segments(name):
    with jax.enable_x64(True):
        model, params = loaded(name)
        tokens, segments, *_ = rows(model)

        def by_hand(params):
            labels, weights = nn.next_tokens(tokens, segments)
            logits = model(params, tokens, segments=segments)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            weights = weights.astype(losses.dtype)
            return (losses * weights).sum() / weights.sum()

        step = ft.pack(jax.value_and_grad(next_token(model)), axes=AXES)
        loss, gradients = step(params, tokens, segments)
        want, want_gradients = jax.jit(jax.value_and_grad(by_hand))(params)
        close(loss, want, 1e-6)
        clear = lambda g: np.where(np.abs(g) < 1e-12, 0, g)  # rounding errors of 0
        close(jax.tree.map(clear, gradients), jax.tree.map(clear, want_gradients), 1e-6)


def test_no_text_of_a_packed_decoder_sees_another():
    """Proved for all tokens of texts with these numbers."""
    model = MODELS["GPT"]
    params, _ = model.init(jax.random.key(0), jnp.ones((1, 4), jnp.int32))
    tokens, segments, *_ = rows(model)

    def losses(tokens, lengths):
        logits = model(params, tokens, lengths)
        return jax.nn.logsumexp(logits, -1) - logits[..., 0]

    packed = ft.pack(losses, axes=AXES[1:])
    report = introspect.depends(packed, tokens, segments, axes={"b": 0, "t": 1})
    report.check(segments="lengths", assume="finite")
