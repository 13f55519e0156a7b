"""`shrink` on models of all kinds: equal to masked parameters in float64, other shapes, lowered for
other platforms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zoo
from checks import sampled
from jax import export

from fnet import compress

pytestmark = pytest.mark.usefixtures("quickly")
LESS = {  # parameters that remain at fraction 0.5; LayerNorm keeps the features of transformers
    "GPT": 0.57,
    "Bert": 0.63,
    "ModernBert": 0.56,
    "ViT": 0.64,
    "DINOv2": 0.69,
    "MLP": 0.53,
    "ConvNeXt": 0.83,
    "Crepe": 0.42,
}


def build(name):
    """(the model, parameters whose values all differ, two sets of inputs), in float64."""
    f, params, _, shapes = zoo.build(name)
    draw = np.random.default_rng(0)
    params = jax.tree.map(lambda x: jnp.asarray(draw.normal(size=x.shape, scale=0.5)), params)
    wide = lambda x: x.astype(float) if x.dtype == jnp.float32 else x
    return f, params, *([wide(x) for x in zoo.inputs(name, shape)] for shape in shapes)


def masked(params, small):
    """The parameters with zeros in place of the values that `small` lacks."""

    def mask(x, kept):
        found = np.isin(x, kept)
        assert found.sum() == np.size(kept)
        return jnp.where(found, x, 0)

    return jax.tree.map(mask, params, small)


@pytest.mark.parametrize(
    "name", sampled(zoo.DISTINCT, ["Decoder"])
)  # a scan, grouped heads, a residual stream
def test_a_shrunk_model_equals_the_masked_one(name):
    with jax.enable_x64(True):
        f, params, x, other = build(name)
        shrunk = compress.shrink(f, params, *x, fraction=0.5)
        zeros = masked(params, shrunk.params)
        want, got = jax.jit(f)(zeros, *other), jax.jit(shrunk.f)(shrunk.params, *other)
        for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * np.abs(a).max())
    before, after = shrunk.report.parameters
    assert after < LESS.get(name, 0.36) * before


@pytest.mark.parametrize("name", sampled(zoo.FEW, ["LSTMClassifier"]))
def test_a_shrunk_model_is_lowered_for_all_platforms_with_symbolic_sizes(name):
    f, params, shape, shapes = zoo.build(name)
    shrunk = compress.shrink(f, params, *zoo.inputs(name, shapes[0]), fraction=0.5)
    program = export.export(jax.jit(shrunk.f), platforms=("cpu", "cuda", "tpu"))(
        shrunk.params, *zoo.inputs(name, shape)
    )
    x = zoo.inputs(name, shapes[1])
    outputs = program.call(shrunk.params, *x), jax.jit(shrunk.f)(shrunk.params, *x)
    for a, b in zip(*map(jax.tree.leaves, outputs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["GPT", "Decoder", "MobileNetV2", "LSTMClassifier"])
def test_the_gradient_of_a_shrunk_model_is_lowered_for_cuda_and_tpu(name):
    f, params, _, shapes = zoo.build(name)
    shrunk = compress.shrink(f, params, *zoo.inputs(name, shapes[0]), fraction=0.5)
    step = jax.jit(jax.grad(lambda params, *x: jnp.square(shrunk.f(params, *x)).mean()))
    program = export.export(step, platforms=("cuda", "tpu"))(
        shrunk.params, *zoo.inputs(name, shapes[1])
    )
    assert program.platforms == ("cuda", "tpu")
