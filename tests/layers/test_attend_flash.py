"""The kernels of attention: which are chosen, that they are called as JAX calls them, and what is
done around them.

No GPU or TPU runs here. cuDNN's kernels are lowered for, and held to what jax.nn lowers to; splash
attention is run in Pallas' interpreter, and compiled for a TPU where libtpu is installed.
"""

import functools
import importlib.util
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import close
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fnet import _jax
from fnet.layers import _attend_flash as flash
from fnet.layers import _attend_xla as xla
from fnet.layers import dot_product_attention
from fnet.layers._attend import attention_p, backward_p

MASK = np.tri(128, dtype=bool) & (np.random.default_rng(0).random((2, 1, 128, 128)) < 0.7)
LENGTHS = np.array([5, 128], np.int32)
SEGMENTS = np.repeat([[1, 2, 3, 0], [0, 4, 2, 6]], [50, 1, 70, 7], axis=1).astype(np.int32)
HIDING = ("mask", "lengths", "segments")


def arrays(dtype=jnp.bfloat16, b=2, t=128, h=4, g=2, d=16, seed=0):
    draw = np.random.default_rng(seed)
    return [jnp.asarray(draw.normal(size=(b, t, n, d)), dtype) for n in (h, g, g)]


def lowered(f, *args, platform="cuda"):
    return jax.jit(f).trace(*args).lower(lowering_platforms=(platform,)).as_text()


def calls(text):
    """(target, operand and result types, configuration) of the custom calls."""
    found = re.findall(r"custom_call @([\w$]+)\(.*?backend_config = (\"[^\"]*\").*? : (\(.*)", text)
    return [(target, types, config) for target, config, types in found]


def gradient(attention):
    return lambda q, k, v: jax.vjp(attention, q, k, v)[1](q)


@pytest.mark.quick_cases(9)
@pytest.mark.parametrize(
    ("options", "theirs"),
    [
        ({}, {}),
        ({"causal": True}, {"is_causal": True}),
        ({"scale": 0.3}, {"scale": 0.3}),
        ({"causal": True, "window": 9}, {"is_causal": True, "local_window_size": (8, 0)}),
        ({"lengths": LENGTHS}, {"key_value_seq_lengths": LENGTHS}),
        (
            {"causal": True, "lengths": LENGTHS},
            {"is_causal": True, "key_value_seq_lengths": LENGTHS},
        ),
        ({"mask": MASK}, {"mask": MASK}),
        ({"causal": True, "mask": MASK}, {"is_causal": True, "mask": MASK}),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_cudnn_is_called_as_jax_nn_calls_it(options, theirs, dtype, monkeypatch):
    monkeypatch.setattr(
        "jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91000
    )
    ours = functools.partial(dot_product_attention, **options)
    theirs = functools.partial(jax.nn.dot_product_attention, implementation="cudnn", **theirs)
    of_bias = lambda found: [
        (
            *call[:1],
            *(
                re.sub(r", tensor<\d+x1x128x128x\w+>(?=, tensor<0xui8>\))", "", part)
                for part in call[1:]
            ),
        )
        for call in found
    ]  # jax < 0.12 wants its gradient
    for f in (lambda f: f, gradient):
        mine, his = (of_bias(calls(lowered(f(g), *arrays(dtype)))) for g in (ours, theirs))
        assert mine == his
        assert len(mine) == (1 if f is not gradient else 2)


def test_float32_and_strange_sizes_are_plain():
    for dtype, options, size in [
        (jnp.float32, {}, {}),
        (jnp.bfloat16, {}, {"d": 12}),
        (jnp.float16, {}, {"d": 136}),
        (jnp.bfloat16, {"window": 9}, {}),
        (jnp.bfloat16, {"mask": np.ones((127, 127), bool)}, {"t": 127}),
    ]:
        text = lowered(
            gradient(functools.partial(dot_product_attention, **options)), *arrays(dtype, **size)
        )
        assert "cudnn" not in text and "dot_general" in text
    assert "cudnn" not in lowered(dot_product_attention, *arrays(), platform="rocm")


def test_autocast_has_cudnn_take_float32():
    from fnet import transforms as ft

    f = lambda *x: jnp.square(dot_product_attention(*x, causal=True)).sum()
    for g in (
        ft.autocast(jax.grad(f, (0, 1, 2)), "bfloat16"),
        jax.grad(ft.autocast(f, "bfloat16"), (0, 1, 2)),
    ):
        found = calls(lowered(g, *arrays(jnp.float32)))
        assert [target for target, *_ in found] == [
            "__cudnn$fmhaSoftmax",
            "__cudnn$fmhaSoftmaxBackward",
        ]
        assert all("xbf16>" in types for _, types, _ in found)
        assert all(x.dtype == jnp.float32 for x in jax.eval_shape(g, *arrays(jnp.float32)))


def refused(platform, compute=jnp.bfloat16, t=512, s=512, d=64, **form):
    form = xla.Form(**{"causal": True, "window": None, "scale": 1.0, **form})
    like = [jax.ShapeDtypeStruct((2, n, 4, d), compute) for n in (t, s)]
    return flash.refusal(platform, form, jnp.dtype(compute), *like)


@pytest.mark.parametrize(
    ("platform", "options", "words"),
    [
        ("rocm", {}, "there is no kernel for rocm"),
        ("cuda", {"precision": "highest"}, "a kernel has no precision 'highest'"),
        (
            "cuda",
            {"given": ("starts",)},
            "a kernel does not support a different first query in each example",
        ),
        ("tpu", {"s": 0}, "an axis has length 0"),
        (
            "cuda",
            {"compute": jnp.float32},
            "cuDNN's flash kernels need a 16-bit dtype, not float32",
        ),
        (
            "cuda",
            {"d": 65},
            "cuDNN's flash kernels need a head_dim that is a multiple of 8 up to 128, not 65",
        ),
        (
            "cuda",
            {"d": 256},
            "cuDNN's flash kernels need a head_dim that is a multiple of 8 up to 128, not 256",
        ),
        (
            "cuda",
            {"s": 511},
            "cuDNN's causal mask needs equal numbers of queries and keys, not 512 and 511",
        ),
        (
            "cuda",
            {"window": 3, "causal": False},
            "cuDNN's sliding window needs cuDNN 9.2 and causal=True, without lengths, segments or mask",
        ),
        (
            "cuda",
            {"given": ("mask",), "t": 511, "s": 511},
            "cuDNN's masks need even times, not 511 and 511",
        ),
        (
            "tpu",
            {"compute": jnp.float16},
            "the TPU's kernel needs bfloat16 or float32, not float16",
        ),
        (
            "tpu",
            {"given": ("mask",)},
            "the TPU's kernel supports causal=, window=, lengths= and segments=, but no other mask",
        ),
        (
            "tpu",
            {"t": 640, "s": 600},
            "the TPU's kernel needs times >= 512 that are multiples of 128, not 640 and 600",
        ),
        ("tpu", {"d": 320}, "the TPU's kernel needs head_dim <= 256, not 320"),
        (
            "tpu",
            {"t": 1024, "window": 8},
            "the TPU's kernel does not support a window with more queries than keys",
        ),
    ],
)
def test_refusals_say_why(platform, options, words):
    assert refused(platform) is None or platform == "rocm"
    assert refused(platform, **options) == words


@pytest.mark.parametrize(
    ("gpu", "d", "words"),
    [
        ((7.5, 90500), 64, "cuDNN's flash kernels need compute capability 8.0, not 7.5"),
        ((8.0, 0), 64, "cuDNN 8.9.4 or later is not installed"),
        ((9.0, 90500), 256, None),
        ((9.0, 90500), 128, None),
    ],
)
def test_what_the_gpu_is_counts(gpu, d, words, monkeypatch):
    monkeypatch.setattr(flash, "_nvidia", lambda: gpu)
    assert refused("cuda", d=d) == words


# Masks and lengths around the kernels


def problem(options, dtype):
    q, k, v = arrays(dtype)
    where = {name: jnp.asarray(options[name]) for name in HIDING if name in options}
    form = xla.Form(options.get("causal", False), options.get("window"), 0.3, tuple(where))
    return form, (q, k, v), tuple(where.values()), arrays(dtype, seed=1)[0]


def truth(form, operands, where, y):
    t, s = operands[0].shape[1], operands[1].shape[1]
    how = (
        form,
        xla.Products(jnp.dtype("float32"), jnp.dtype("float32"), None),
        [xla.Span(0, t, 0, s)],
    )
    operands = [x.astype(jnp.float32) for x in operands]
    results = xla.forward(*how, *operands, *where)
    return [results[0], *xla.backward(*how, *operands, *where, *results, y.astype(jnp.float32))]


def both(platform, form, operands, where, y, partitioning="whole"):
    compute = operands[0].dtype
    results = flash.forward(platform, form, compute, True, partitioning, *operands, *where)
    assert [x.dtype for x in results[1:]] == [jnp.float32] * 2
    return [
        results[0],
        *flash.backward(platform, form, compute, partitioning, *operands, *where, *results, y),
    ]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"causal": True, "window": 40},
        {"lengths": [0, 100]},
        {"causal": True, "lengths": [1, 128]},
        {"segments": SEGMENTS},
        {"causal": True, "window": 40, "segments": SEGMENTS},
    ],
    ids=str,
)
def test_splash_attention_in_pallas_interpreter(options, monkeypatch):
    interpreted = functools.partial(_jax.kernels.splash_attention, interpret=True)
    monkeypatch.setattr(_jax.kernels, "splash_attention", interpreted)
    form, *rest = problem(options, jnp.float32)
    close(
        jax.jit(functools.partial(both, "tpu", form))(*rest),
        jax.jit(functools.partial(truth, form))(*rest),
    )


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_splash_attention_keeps_rows_apart(value, monkeypatch):
    """What one row of a batch holds changes no bit of another."""
    interpreted = functools.partial(_jax.kernels.splash_attention, interpret=True)
    monkeypatch.setattr(_jax.kernels, "splash_attention", interpreted)
    form, operands, where, y = problem({"causal": True, "lengths": [40, 128]}, jnp.float32)
    run = jax.jit(functools.partial(both, "tpu", form))
    hostile = tuple(x.at[1].set(value) for x in operands)
    for got, want in zip(run(hostile, where, y), run(operands, where, y)):
        assert np.asarray(got[0]).tobytes() == np.asarray(want[0]).tobytes()
        assert not np.isfinite(got[1]).all()


def stand_in(q, k, v, bias, lengths, *rest, scale, causal, window, residuals=True):
    """What cuDNN documents that it computes; where a row has no keys, something that is not a
    number."""

    def forward(q, k, v):
        h, t, s = q.shape[2], q.shape[1], k.shape[1]
        k, v = (jnp.repeat(x, h // x.shape[2], 2) for x in (k, v))
        logits = jnp.einsum("bthd,bshd->bhts", q, k) * scale
        if bias is not None:
            logits = logits + jnp.broadcast_to(bias.astype(jnp.float32), logits.shape)
        ahead = (jnp.arange(t)[:, None] - jnp.arange(s)[None])[None, None]
        if causal:
            logits = jnp.where(ahead >= 0, logits, -jnp.inf)
        if window is not None:
            logits = jnp.where(ahead < window, logits, -jnp.inf)
        if lengths is not None:
            logits = jnp.where(
                (jnp.arange(s)[None] < lengths[:, None])[:, None, None], logits, -jnp.inf
            )
        logsumexp = jax.nn.logsumexp(logits, axis=-1)
        return jnp.einsum("bhts,bshd->bthd", jnp.exp(logits - logsumexp[..., None]), v), logsumexp

    wide = [x.astype(jnp.float32) for x in (q, k, v)]
    if not rest:
        out, logsumexp = forward(*wide)
        return [out.astype(q.dtype), logsumexp][: 2 if residuals else 1]
    assert [x.shape for x in rest] == [(len(q), q.shape[2], q.shape[1]), q.shape, q.shape]
    pulled = jax.vjp(lambda *x: forward(*x)[0], *wide)[1](rest[2].astype(jnp.float32))
    return [x.astype(q.dtype) for x in pulled]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"causal": True, "window": 40},
        {"lengths": [0, 100]},
        {"mask": MASK},
        {"mask": MASK[:1]},
        {"causal": True, "mask": MASK},
        {"causal": True, "mask": MASK, "lengths": [3, 128]},
        {"mask": np.eye(128, k=3, dtype=bool)[None, None]},
        {"causal": True, "segments": SEGMENTS},
        {"segments": SEGMENTS, "mask": MASK},
    ],
    ids=lambda options: str(list(options)),
)
def test_what_is_around_cudnn(options, monkeypatch):
    monkeypatch.setattr(_jax.kernels, "cudnn_attention", stand_in)
    form, *rest = problem(options, jnp.bfloat16)
    got, want = (
        jax.jit(functools.partial(both, "cuda", form))(*rest),
        jax.jit(functools.partial(truth, form))(*rest),
    )
    close([x.astype(jnp.float32) for x in got], want, 2e-2)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("spec", "g", "options"),
    [
        (P("data"), 2, {"causal": True}),
        (P("data", None, "model"), 2, {"causal": True, "lengths": [3, 9, 0, 16] * 2}),
        (P("data", None, "model"), 2, {"mask": MASK[:1, :, :16, :16]}),
        (P("data", None, "model"), 2, {"segments": SEGMENTS[[0, 1] * 4, 42:58]}),
        (P("data", None, "model"), 1, {}),
        (P("data", "model"), 2, {"causal": True}),
        (P(None, None, None, "model"), 2, {"mask": MASK[[0, 1] * 4, :, :16, :16]}),
    ],
    ids=str,
)
def test_devices_share_batch_and_heads(spec, g, options, monkeypatch):
    monkeypatch.setattr(_jax.kernels, "cudnn_attention", stand_in)
    mesh = Mesh(
        np.array(jax.devices()).reshape(4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2
    )
    operands = arrays(jnp.float32, b=8, t=16, g=g, d=4)
    where = [jnp.asarray(options[name]) for name in HIDING if name in options]
    form = xla.Form(
        options.get("causal", False),
        None,
        0.3,
        tuple(n for n in HIDING if n in options),
    )
    y = arrays(jnp.float32, b=8, t=16, g=g, d=4, seed=1)[0]
    run = lambda operands, where, y: both("cuda", form, operands, where, y, "split")
    # Keys of one head cannot be split among heads.
    places = [NamedSharding(mesh, P(*spec[:2]) if g == 1 and i else spec) for i in range(3)]
    placed = [jax.device_put(x, s) for x, s in zip(operands, places)]
    compiled = jax.jit(run).lower(placed, where, jax.device_put(y, places[0])).compile()
    got = compiled(placed, where, jax.device_put(y, places[0]))
    close(jax.tree.map(np.asarray, got), jax.tree.map(np.asarray, truth(form, operands, where, y)))
    if spec[1:2] != ("model",) and spec[:1] != (None,) and g == 2:
        assert not re.search("all-gather|all-to-all|collective-permute", compiled.as_text())


def test_lowers_for_several_gpus(monkeypatch):
    told = set(_jax.kernels._dispatch.prim_requires_devices_during_lowering) - {
        attention_p,
        backward_p,
    }
    monkeypatch.setattr(_jax.kernels._dispatch, "prim_requires_devices_during_lowering", told)
    mesh = Mesh(np.array(jax.devices()), ("data",), axis_types=(AxisType.Auto,))
    place = NamedSharding(mesh, P("data"))
    like = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place) for x in arrays(b=8)]
    found = {}
    for plugin in (None, object()):
        monkeypatch.setattr(_jax.kernels, "_cuda_versions", lambda: plugin)  # noqa: B023
        f = gradient(lambda *x: dot_product_attention(*x, causal=True))
        found[plugin is not None] = lowered(f, *like)
    assert "dot_general" in found[False] and not calls(found[False])  # the devices are not known
    assert [target for target, *_ in calls(found[True])] == ["CustomSPMDPartitioning"] * 2
    split = jax.shard_map(f, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    assert [target for target, *_ in calls(lowered(split, *like))] == [
        "__cudnn$fmhaSoftmax",
        "__cudnn$fmhaSoftmaxBackward",
    ]


@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None,
    reason="jax-cuda13-plugin and jax-cuda13-pjrt are not installed",
)
def test_compiles_for_an_h100():
    from benchmarks.deviceless import h100

    place = NamedSharding(Mesh(np.array([h100()]), ("data",)), P())
    like = [
        jax.ShapeDtypeStruct(x.shape, jnp.bfloat16, sharding=place)
        for x in arrays(b=2, t=256, d=64)
    ]
    step = jax.jit(gradient(functools.partial(dot_product_attention, causal=True)))
    text = step.trace(*like).lower(lowering_platforms=("cuda",)).compile().as_text()
    assert set(re.findall(r'custom_call_target="__cudnn\$(\w+)"', text)) == {
        "fmhaSoftmax",
        "fmhaSoftmaxBackward",
    }


# TPU


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_compiles_for_a_tpu(monkeypatch):
    for name, value in [("TPU_SKIP_MDS_QUERY", "1"), ("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")]:
        monkeypatch.setitem(os.environ, name, value)
    from jax.experimental import topologies

    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
    mesh = Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,))
    attend = gradient(functools.partial(dot_product_attention, causal=True))
    split = jax.shard_map(attend, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    for f, spec, of, kernels in [
        (attend, P(), mesh.devices[:1], 3),
        (split, P("data"), mesh.devices, 3),
        (attend, P("data"), mesh.devices, 0),
    ]:
        place = NamedSharding(Mesh(of, ("data",), axis_types=(AxisType.Auto,)), spec)
        for dtype in (jnp.bfloat16, jnp.float32):
            like = [
                jax.ShapeDtypeStruct(x.shape, dtype, sharding=place)
                for x in arrays(b=4, t=1024, d=64)
            ]
            text = jax.jit(f).lower(*like).compile().as_text()
            assert text.count('custom_call_target="tpu_custom_call"') == kernels
