"""Fused operators of ONNX replace equal operations of any library, and nothing else."""

import collections
import itertools
import math

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import close
from flax import linen
from test_bundles import specs_of
from test_renew import normal
from zoo import DISTINCT, build, inputs

from fnet import export
from fnet import layers as nn

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.usefixtures("quickly")
from fnet.export.onnx import _onnx  # noqa: E402

FUSED = "LayerNormalization", "RMSNormalization", "Gelu", "Attention"
ATTENTIONS = dict.fromkeys(
    (
        "GPT",
        "Decoder",
        "Bert",
        "Roberta",
        "DistilBert",
        "ViT",
        "DeiT",
        "DINOv2",
        "CLIPText",
        "CLIPVision",
    ),
    1,
) | {"ModernBert": 3}  # the first block, and two in the bodies of loops
WITHOUT_MASK = "ViT", "DeiT", "DINOv2", "CLIPVision"
X, TIMES, HEADS = normal(4, 8), normal(2, 5, 8), normal(2, 6, 4, 8)


def operators(graph):
    for node in graph.node:
        yield node.op_type
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from operators(attribute.g)


def found(path):
    kinds = collections.Counter(operators(onnx.load(path).graph))
    return {kind: kinds[kind] for kind in FUSED if kinds[kind]}


def random(params):
    """Parameters whose scales and biases are not 1 and 0."""
    leaves, tree = jax.tree.flatten(params)
    return jax.tree.unflatten(
        tree,
        [
            np.random.default_rng(i).normal(size=x.shape).astype(np.float32)
            for i, x in enumerate(leaves)
        ],
    )


def flax(module, x=X):
    return module.apply, random(module.init(jax.random.key(0), x))


def haiku(module):
    f = hk.without_apply_rng(hk.transform(lambda x: module()(x)))
    return f.apply, random(f.init(jax.random.key(0), X))


def equinox(module):
    params, static = eqx.partition(module, eqx.is_array)
    return lambda params, x: jax.vmap(eqx.combine(params, static))(x), random(params)


def own(layer, x=X):
    params, _ = layer.init(jax.random.key(0), x)
    return layer, random(params)


NORM, RMS, GELU, ATTENTION = ({kind: 1} for kind in FUSED)
CASES = {
    "fnet LayerNorm": (lambda: own(nn.LayerNorm()), X, NORM),
    "fnet RMSNorm": (lambda: own(nn.RMSNorm()), X, RMS),
    "flax LayerNorm": (lambda: flax(linen.LayerNorm()), X, NORM),
    "flax LayerNorm without scale": (lambda: flax(linen.LayerNorm(use_scale=False)), X, NORM),
    "flax RMSNorm": (lambda: flax(linen.RMSNorm()), X, RMS),
    "equinox LayerNorm": (lambda: equinox(eqx.nn.LayerNorm(8)), X, NORM),
    "haiku LayerNorm": (lambda: haiku(lambda: hk.LayerNorm(-1, True, True)), X, NORM),
    "haiku RMSNorm": (lambda: haiku(lambda: hk.RMSNorm(-1)), X, RMS),
    "gelu by erf": (
        lambda: (lambda params, x: x * (1 + jax.lax.erf(x * jnp.float32(0.5**0.5))) / 2, {}),
        X,
        GELU,
    ),
    "jax attention": (
        lambda: (lambda params, x: jax.nn.dot_product_attention(x, x + 1, 2 * x), {}),
        HEADS,
        ATTENTION,
    ),
    "jax causal attention": (
        lambda: (
            lambda params, x: jax.nn.dot_product_attention(x, x + 1, 2 * x, is_causal=True),
            {},
        ),
        HEADS,
        ATTENTION,
    ),
    "flax attention": (
        lambda: flax(linen.MultiHeadDotProductAttention(2), TIMES),
        TIMES,
        ATTENTION,
    ),
    # These are almost those operations.
    "a norm over another axis": (
        lambda: (lambda params, x: jax.nn.standardize(x, axis=0), {}),
        X,
        {},
    ),
    "a norm by the unbiased variance": (
        lambda: (
            lambda params, x: (
                (x - x.mean(-1, keepdims=True))
                * jax.lax.rsqrt(x.var(-1, keepdims=True, ddof=1) + 1e-5)
            ),
            {},
        ),
        X,
        {},
    ),
    "another constant than of gelu": (
        lambda: (lambda params, x: x * 0.5 * (1 + jnp.tanh(0.8 * (x + 0.045 * x**3))), {}),
        X,
        {},
    ),
    "attention with a limit of the logits": (
        lambda: (
            lambda params, x: jnp.einsum(
                "bhts,bshd->bthd", jax.nn.softmax(jnp.tanh(jnp.einsum("bthd,bshd->bhts", x, x))), x
            ),
            {},
        ),
        HEADS,
        {},
    ),
}


def softmax(x, mask, hidden):
    scores = jnp.where(mask, jnp.einsum("bthd,bshd->bhts", x, x), hidden)
    weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
    return jnp.where(mask, weights, 0.0)


def product(weights, x):
    return jnp.einsum("bhts,bshd->bthd", weights, x)


def attention(finish=lambda w: w / w.sum(-1, keepdims=True), hidden=-3e38, scale=1.0):
    return lambda params, x, mask: product(finish(softmax(x * jnp.float32(scale), mask, hidden)), x)


ALMOST = {
    # Masks with one visible key hide the difference; so do those with several.
    "no normalization": attention(lambda w: w),
    "normalized over the queries": attention(
        lambda w: w / jnp.maximum(w.sum(-2, keepdims=True), 1e-30)
    ),
    "the mean without visible keys": lambda params, x, mask: jax.nn.dot_product_attention(
        x, x, x, mask=mask
    ),
    "scores below -1e4 are visible": attention(
        lambda w: w / jnp.maximum(w.sum(-1, keepdims=True), 1e-30), -1e4
    ),
    "0 in place of NaN": attention(lambda w: jnp.nan_to_num(w / w.sum(-1, keepdims=True))),
    "a bound on the sum": attention(lambda w: w / jnp.maximum(w.sum(-1, keepdims=True), 1.5)),
}


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("name", ALMOST)
def test_almost_attention(name, tmp_path):
    f, x = ALMOST[name], np.asarray(HEADS)
    mask = np.random.default_rng(0).random((2, 1, 6, 6)) < 0.4
    mask[0, 0, :2] = False
    program = export.program(
        f, {}, x=export.spec("b, t, 4, 8"), mask=export.spec("b, 1, t, t", "bool")
    )
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        program.onnx(tmp_path / "f.onnx", opset=23, check=False)
        assert found(tmp_path / "f.onnx") == {}
        (y,) = onnxruntime.InferenceSession(str(tmp_path / "f.onnx")).run(
            None, {"x": x, "mask": mask}
        )
        np.testing.assert_allclose(y, f({}, x, mask), 1e-5, 1e-6)


def almost(f, x=X):
    return lambda: (lambda params, x: f(x), {}), x, {}


CASES |= {
    "a norm without scale and bias": (
        lambda: (lambda params, x: jax.nn.standardize(2 * x), {}),
        X,
        NORM,
    ),
    "a bounded norm": almost(
        lambda x: (
            jnp.where(jnp.abs(x) < 1e3, 1.0, 2.0)
            * x
            * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
        )
    ),
    "a norm of the absolute values": almost(
        lambda x: jnp.abs(x) * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
    ),
    "a gelu of finite values": almost(
        lambda x: (
            jnp.where(jnp.isfinite(x), x, 0.0) * 0.5 * jax.lax.erfc(-x * jnp.float32(0.5**0.5))
        )
    ),
    "nearly the constant of gelu": almost(
        lambda x: x * 0.5 * (1 + jnp.tanh(0.79787 * (x + 0.044715 * x**3)))
    ),
    "attention with a negative scale": almost(
        lambda x: jnp.einsum(
            "bhts,bshd->bthd", jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", x, x) * -0.25), x
        ),
        HEADS,
    ),
}


def variants(params, q, k, v, lengths, mask):
    """Attentions in which a query may see many keys, few or none."""
    attend = nn.dot_product_attention
    few = [x[:, :, :2] for x in (k, v)]
    return [
        attend(q, k, v, lengths=lengths),
        attend(q, k, v, mask=mask[:, None, None, :]),
        attend(q, k, v, mask=mask[:, None, :]),
        attend(q, *few, lengths=lengths),
        attend(q, k, v, causal=True),
        attend(q, k, v, lengths=lengths, window=2),
        attend(q, k, v, mask=mask[:, None, :, None], causal=True),
        attend(q, k, v, lengths=lengths, softcap=2.0),
    ]


@pytest.mark.quick_cases("True-23", "True-28", "False-23")
@pytest.mark.parametrize("opset", (20, 22, 23, onnx.defs.onnx_opset_version()))
@pytest.mark.parametrize("fused", (True, False))
def test_attention_with_masks(opset, fused, tmp_path):
    draw = np.random.default_rng(1)
    q, k, v = (draw.normal(size=(4, 6, 4, 8)).astype(np.float32) for _ in range(3))
    inputs = q, k, v, np.array([6, 0, 1, 4], np.int32), draw.random((4, 6)) < 0.5
    program = export.program(
        variants,
        {},
        **{name: export.spec("b, t, 4, 8") for name in "qkv"},
        lengths=export.spec("b", "int32"),
        mask=export.spec("b, t", "bool"),
    )
    program.onnx(tmp_path / "f.onnx", opset=opset, fused=fused, check=False)
    count = found(tmp_path / "f.onnx").get("Attention", 0)
    assert count == (7 if fused and opset >= 23 else 0)  # all but the one with a soft cap
    session = onnxruntime.InferenceSession(str(tmp_path / "f.onnx"))
    results = session.run(None, dict(zip(("q", "k", "v", "lengths", "mask"), inputs)))
    for y, wanted in zip(results, variants({}, *inputs), strict=True):
        np.testing.assert_allclose(y, wanted, 1e-5, 1e-6)


# In onnxruntime, NaN or Inf in a key that the mask hides reaches all queries of the Attention
# operator.
@pytest.mark.filterwarnings("ignore:.*With finite inputs, the outputs agree")
@pytest.mark.quick_cases(
    "a norm over another axis",
    "another constant than of gelu",
    "a bounded norm",
    "a norm of the absolute values",
    "nearly the constant of gelu",
)
@pytest.mark.parametrize("name", CASES)
def test_layers(name, tmp_path):
    make, x, wanted = CASES[name]
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        f, params = make()
        program = export.program(f, params, x=export.spec(", ".join(["b", *map(str, x.shape[1:])])))
        program.onnx(tmp_path / "f.onnx", opset=23)
        assert found(tmp_path / "f.onnx") == wanted
        (y,) = onnxruntime.InferenceSession(str(tmp_path / "f.onnx")).run(
            None, {"x": np.asarray(x)}
        )
        close(y, np.asarray(f(params, x)), 1e-5)


def test_queries_without_keys(tmp_path):
    """A mask that depends on inputs may hide all keys; the attention of fnet is then 0."""
    attention = nn.Attention(2, window=2, causal=True)
    x, lengths = normal(2, 6, 8), np.array([6, 1], np.int32)
    params, _ = attention.init(jax.random.key(0), x)
    program = export.program(
        attention, params, x=export.spec("b, t, 8"), lengths=export.spec("b", "int32")
    )
    program.onnx(tmp_path / "f.onnx", opset=23)
    assert found(tmp_path / "f.onnx") == ATTENTION
    assert _onnx.compare(program, tmp_path / "f.onnx", inputs=[x, lengths]) <= 1e-5


def test_the_option_and_the_opset(tmp_path):
    f, params, _, _ = build("GPT")
    program, counts = export.program(f, params, **specs_of("GPT")), []
    for options, wanted in (
        ({"fused": False, "opset": 23}, {}),
        ({"opset": 18}, {"LayerNormalization": 3}),
        ({"opset": 20}, {"LayerNormalization": 3}),
        ({"opset": 23}, {"LayerNormalization": 3, "Attention": 1}),
    ):
        program.onnx(tmp_path / "f.onnx", check=False, **options)
        assert found(tmp_path / "f.onnx") == wanted
        counts.append(len(list(operators(onnx.load(tmp_path / "f.onnx").graph))))
    assert counts[-1] < 0.7 * counts[0]  # docs/export.md states the nodes of a loop
    names = [node.name for node in onnx.load(tmp_path / "f.onnx").graph.node]
    assert "norm/LayerNormalization" in names


@pytest.mark.parametrize(
    "name, wanted, opset",
    [
        ("GPT", {"LayerNormalization": 3}, 20),
        ("Decoder", {"RMSNormalization": 3}, 23),
        ("ViT", {"LayerNormalization": 3, "Attention": 1}, 23),
    ],
)
def test_the_default_opset(name, wanted, opset, tmp_path):
    """Opset 23 only where it gains something, and no attention with a mask, here a causal one."""
    f, params, _, _ = build(name)
    program = export.program(f, params, **specs_of(name))
    program.onnx(tmp_path / "f.onnx", check=False)
    model = onnx.load(tmp_path / "f.onnx")
    assert found(tmp_path / "f.onnx") == wanted and model.opset_import[0].version == opset
    program.onnx(tmp_path / "f.onnx", fused=False, check=False)
    model = onnx.load(tmp_path / "f.onnx")
    assert found(tmp_path / "f.onnx") == {} and model.opset_import[0].version == 20


def test_by_default_nan_and_inf_go_where_they_go_in_jax(tmp_path):
    """Into a query, a key or a value, which a mask hides or not. With the operator of onnxruntime, a
    hidden key would reach all queries."""
    attend = nn.dot_product_attention
    program = export.program(
        lambda params, q, k, v, mask: (attend(q, k, v), attend(q, k, v, mask=mask)),
        {},
        **{name: export.spec("b, t, 4, 8") for name in "qkv"},
        mask=export.spec("b, 1, t, t", "bool"),
    )
    program.onnx(tmp_path / "f.onnx")
    assert found(tmp_path / "f.onnx") == ATTENTION  # the one without a mask
    session = onnxruntime.InferenceSession(str(tmp_path / "f.onnx"))
    draw = np.random.default_rng(1)
    finite = {name: draw.normal(size=(2, 6, 4, 8)).astype(np.float32) for name in "qkv"}
    mask = np.ones((2, 1, 6, 6), bool)
    mask[..., 3] = False
    for name, value in itertools.product("qkv", (np.nan, np.inf, -np.inf)):
        changed = finite[name].copy()
        changed[0, 3, 1, 2] = value
        inputs = {**finite, name: changed, "mask": mask}
        results = session.run(None, inputs)
        for y, wanted in zip(results, program.call("predict", *inputs.values()), strict=True):
            np.testing.assert_allclose(y, wanted, 1e-5, 1e-6)


def test_the_tails_of_gelus(tmp_path):
    """An exact GELU has no cancellation below 0, and 1 + tanh is exactly 0 far out."""
    x = np.concatenate(
        [
            -np.logspace(-9, 1.1, 300),
            [-4.96, -5.0, -5.144, -12.9, -50, -1e30, 3, 50, 1e30, -0.0, 0.0],
            [np.inf, -np.inf, np.nan],
        ]
    ).astype(np.float32)
    exact = np.array([value / 2 * math.erfc(-value / 2**0.5) for value in x.tolist()])
    program = export.program(
        lambda params, x: (jax.nn.gelu(x, approximate=False), 1 + jnp.tanh(x)),
        {},
        x=export.spec("n"),
    )
    for fused in (True, False):
        program.onnx(tmp_path / "f.onnx", fused=fused, check=False)
        y, sums = onnxruntime.InferenceSession(str(tmp_path / "f.onnx")).run(None, {"x": x})
        np.testing.assert_allclose(y, exact, 1e-5, 1e-37)
        np.testing.assert_array_equal(np.signbit(y[:-2]), np.signbit(exact[:-2]))
        np.testing.assert_allclose(sums, 1 + np.tanh(x.astype(np.float64)), 1e-5, 3e-7)
        assert (sums[x < -8] == 0).all() and (sums[x > 8] == 2).all()
    kinds = collections.Counter(operators(onnx.load(tmp_path / "f.onnx").graph))
    assert kinds["Where"] == kinds["Gelu"] == 0  # Where takes as long as 30 additions


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", DISTINCT)
def test_models(name, tmp_path):
    """Models at two sizes, with the operators of opset 23, without, and with those of the default."""
    f, params, _, shapes = build(name)
    program = export.program(f, params, **specs_of(name))
    for options in ({}, {"opset": 23}, {"opset": 23, "fused": False}):
        program.onnx(tmp_path / "f.onnx", check=False, **options)
        for shape in shapes:
            assert (
                _onnx.compare(program, tmp_path / "f.onnx", inputs=list(inputs(name, shape)))
                <= 1e-5
            )
        attentions = found(tmp_path / "f.onnx").get("Attention", 0)
        if "fused" in options:
            assert found(tmp_path / "f.onnx") == {}
        elif options:
            assert attentions == ATTENTIONS.get(name, 0)
        else:
            assert attentions == (1 if name in WITHOUT_MASK else 0)
