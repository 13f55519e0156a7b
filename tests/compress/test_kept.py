"""Implicit arrays in checkpoints, plans, files of weights and exported programs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from fnet import compress, export, models, parallel
from fnet import layers as nn
from fnet import training as tr
from fnet import transforms as ft
from fnet.models import pretrained

MODEL = models.Decoder(32, 16, 2, 4, 2, 24, context=8)
TOKENS = jax.random.randint(jax.random.key(0), (2, 8), 0, 32)
TX = optax.adamw(1e-2)
FORMATS = {"blocks/down": compress.Int4(8), "blocks": compress.Int4(16), "head": compress.Int8()}


def quantized():
    return compress.quantize(MODEL.init(jax.random.key(1), TOKENS)[0], FORMATS)


def qlora():
    adapted = compress.lora(jax.random.key(2), quantized(), {"blocks/attention": 2})
    return nn.partition(adapted, ".*/[ab]")


def step(state, batch):
    def loss(trainable):
        losses = ft.use_implicit_arrays(MODEL.cross_entropy)
        return losses(nn.combine(trainable, state.state), batch[:, :-1], batch[:, 1:]).mean()

    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply(TX, grads), {"loss": value}


def init(key=None):
    trainable, frozen = qlora()
    return tr.TrainState.create(trainable, TX, state=frozen)


def batches(i):
    return jax.random.randint(jax.random.key(i), (8, 8), 0, 32)


def equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.exhaustive
def test_a_run_with_a_quantized_base_is_resumed_exactly(tmp_path):
    options = dict(config={}, tensorboard=False)
    whole = tr.fit(step, init(), batches, steps=3, workdir=tmp_path / "whole", **options)
    tr.fit(step, init(), batches, steps=2, workdir=tmp_path / "parts", **options)
    resumed = tr.fit(step, init(), batches, steps=3, workdir=tmp_path / "parts", **options)
    equal(resumed, whole)
    equal(tr.restore(tmp_path / "parts", like=init()), whole)
    kernel = tr.load(tmp_path / "parts").state["blocks"]["attention"]["query"][
        "kernel"
    ]  # without model code
    want = whole.state["blocks"]["attention"]["query"]["kernel"]
    np.testing.assert_array_equal(kernel["base"]["codes"], want.base.codes)


@pytest.mark.parametrize(
    "format", [compress.Int8(), pytest.param(compress.Int4(128), marks=pytest.mark.exhaustive)]
)
def test_scales_are_split_with_their_values(format):
    """codes [512, 256] are split along the longest axis; scales [1, 256] or [4, 256] only where
    they can be."""

    @jax.jit
    def train(state, batch):
        f = ft.use_implicit_arrays(lambda params, x: jnp.tanh(x @ params["in"]) @ params["out"])
        loss = lambda bias: jnp.square(f(state["frozen"], batch) + bias[None]).mean()
        value, grads = jax.value_and_grad(loss)(state["params"])
        return {**state, "params": state["params"] - 0.1 * grads}, {"loss": value}

    def start(key):
        one, two = jax.random.split(key)
        kernels = {
            "in": jax.random.normal(one, (512, 256)),
            "out": jax.random.normal(two, (256, 512)),
        }
        return {"params": jnp.zeros(512), "frozen": compress.quantize(kernels, {".*": format})}

    batch = jax.random.normal(jax.random.key(3), (16, 512))
    plan = parallel.plan(train, start, batch, devices="local", strategy="fsdp")
    state = plan.init(jax.random.key(0))
    specs = {
        name: (array.codes.sharding.spec, array.scale.sharding.spec)
        for name, array in state["frozen"].items()
    }
    columns = P(None, "data"), P(None, "data")
    assert specs == {
        "in": (P("data"), P()) if format == compress.Int8() else columns,
        "out": columns,
    }
    want, metrics = train(start(jax.random.key(0)), batch)
    got, planned = plan.jit(train)(state, batch)
    np.testing.assert_allclose(planned["loss"], metrics["loss"], rtol=1e-5)
    np.testing.assert_allclose(got["params"], want["params"], rtol=1e-4, atol=1e-5)


@pytest.mark.exhaustive
def test_weights_are_saved_as_the_arrays_that_they_represent(tmp_path):
    small = quantized()
    file = pretrained.save(MODEL, small, {}, tmp_path, names="huggingface")
    read, _ = pretrained.load(MODEL, file)
    equal(jax.tree.map(np.asarray, read), jax.tree.map(np.asarray, compress.materialize(small)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["quantized", pytest.param("qlora", marks=pytest.mark.exhaustive)])
def test_a_program_keeps_their_form(name, tmp_path):
    params = quantized() if name == "quantized" else nn.combine(*qlora())
    f = ft.use_implicit_arrays(MODEL)
    program = export.program(f, params, tokens=export.spec("b, 8", "int32"))
    program.save(tmp_path / "small.fnet")
    want = f(params, TOKENS)
    np.testing.assert_allclose(
        export.load(tmp_path / "small.fnet")(TOKENS), want, rtol=1e-4, atol=1e-5
    )
    plain = export.program(MODEL, compress.materialize(params), tokens=export.spec("b, 8", "int32"))
    plain.save(tmp_path / "plain.fnet")
    stored = [sum(array.nbytes for array in each.weights.values()) for each in (program, plain)]
    assert stored[0] < 0.7 * stored[1]
    with pytest.raises(
        TypeError, match=r"a Quantized array; call ft\.use_implicit_arrays\(model\)"
    ):
        export.program(MODEL, quantized(), tokens=export.spec("b, 8", "int32"))


@pytest.mark.exhaustive
def test_onnx_keeps_their_form(tmp_path):
    pytest.importorskip("onnx")
    onnxruntime = pytest.importorskip("onnxruntime")
    params = nn.combine(*qlora())
    f = ft.use_implicit_arrays(MODEL)
    export.program(f, params, tokens=export.spec("b, 8", "int32")).onnx(tmp_path / "small.onnx")
    session = onnxruntime.InferenceSession(
        tmp_path / "small.onnx", providers=["CPUExecutionProvider"]
    )
    (got,) = session.run(None, {session.get_inputs()[0].name: np.asarray(TOKENS, np.int32)})
    np.testing.assert_allclose(got, f(params, TOKENS), rtol=1e-4, atol=1e-4)
