"""LoRA: identity at first, gradients of the merged form inside scans and remat, and less memory
than it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fnet import compress, models
from fnet import layers as nn
from fnet import transforms as ft

MODEL = models.Decoder(32, 64, 3, 4, 2, 96, context=8)  # a scan over three blocks
TOKENS = jax.random.randint(jax.random.key(0), (2, 8), 0, 32)
RULES = {"blocks": 4, "head": 2}


def adapted(base=None, fill=True, model=MODEL):
    params = model.init(jax.random.key(1), TOKENS)[0]
    params = params if base is None else compress.quantize(params, {"blocks": base})
    params = compress.lora(jax.random.key(2), params, RULES)
    is_change = lambda x: isinstance(x, compress.LowRank)
    draw = lambda w: dataclasses.replace(w, b=0.1 * jax.random.normal(jax.random.key(3), w.b.shape))
    return jax.tree.map(
        lambda w: draw(w) if fill and is_change(w) else w, params, is_leaf=is_change
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("base", [None, compress.Int8()])
def test_no_change_at_first(base):
    params = adapted(base, fill=False)
    without = jax.tree.map(
        lambda w: w.base if isinstance(w, compress.LowRank) else w,
        params,
        is_leaf=lambda x: isinstance(x, compress.LowRank),
    )
    f = jax.jit(ft.use_implicit_arrays(MODEL))
    np.testing.assert_array_equal(f(params, TOKENS), f(without, TOKENS))


def losses(trainable, frozen, model=MODEL, remat=False):
    """(loss on implicit arrays, loss on merged ones)"""

    def loss(params, tokens):
        return jnp.square(model(params, tokens)).mean()

    loss = jax.checkpoint(loss) if remat else loss
    return (
        lambda t: ft.use_implicit_arrays(loss)(nn.combine(t, frozen), TOKENS),
        lambda t: loss(compress.materialize(nn.combine(t, frozen)), TOKENS),
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("remat", [True, False])
def test_gradients_in_a_scan_and_remat(remat):
    """In float64, to 1e-6 of the largest value of each leaf."""
    with jax.enable_x64(True):
        params = jax.tree.map(lambda x: x.astype(jnp.float64), adapted())
        trainable, frozen = nn.partition(params, ".*/[ab]")
        implicit, merged = losses(trainable, frozen, remat=remat)
        got, want = (jax.jit(jax.grad(loss))(trainable) for loss in (implicit, merged))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert jnp.abs(a - b).max() <= 1e-6 * jnp.abs(b).max()


@pytest.mark.exhaustive
def test_less_memory_than_merged():
    """The merged form holds kernels and their gradients; LoRA holds products of width 4."""
    model = dataclasses.replace(MODEL, width=256, hidden=512)
    shapes = jax.eval_shape(lambda: adapted(model=model))
    trainable, frozen = nn.partition(shapes, ".*/[ab]")

    def temporary(number):
        run = lambda trainable, frozen: jax.grad(losses(trainable, frozen, model)[number])(
            trainable
        )
        return jax.jit(run).lower(trainable, frozen).compile().memory_analysis().temp_size_in_bytes

    assert temporary(0) < 0.5 * temporary(1)
