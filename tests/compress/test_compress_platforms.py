"""Programs on implicit arrays: lowered for GPUs and TPUs and compiled for TPUs that are not
attached (make pods)."""

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import optax
import pytest

from fnet import compress, models, parallel
from fnet import layers as nn
from fnet import training as tr
from fnet import transforms as ft
from fnet.compress import _calibrate

X = jnp.ones((4, 32))
IMAGE = jnp.ones((2, 6, 6, 32))
PARAMS = {"w": jnp.ones((32, 32)), "kernel": jnp.ones((3, 3, 32, 8)), "table": jnp.ones((16, 32))}
FORMATS = {
    "int8": compress.Int8(),
    "dynamic": compress.Int8(activations="dynamic"),
    "int4": compress.Int4(16),
    "nf4": compress.NF4(16),
    "float8": compress.Float8(),
}
KINDS = {
    name: lambda p, format=format: compress.quantize(p, {".*": format})
    for name, format in FORMATS.items()
}
KINDS |= {
    "fake": lambda p: compress.fake_quantize(p, {".*": compress.Int4(16)}),
    "lora": lambda p: compress.lora(jax.random.key(0), p, {".*": 2}),
    "qlora": lambda p: compress.lora(jax.random.key(0), KINDS["int4"](p), {".*": 2}),
    "calibrated": lambda p: (
        compress.quantize(
            {"w": p["w"]},
            {"w": compress.Int8(activations="mse")},
            stats=compress.calibrate(lambda p, x: x @ p["w"], {"w": p["w"]}, [X]),
        )
        | {name: p[name] for name in ("kernel", "table")}
    ),
}


def program(params, x, image):
    axes = "NHWC", "HWIO", "NHWC"
    y = jax.lax.conv_general_dilated(
        image, params["kernel"], (1, 1), "SAME", dimension_numbers=axes
    )
    rows = params["table"][jnp.array([1, 3, 5, 7])]
    return jnp.tanh(x @ params["w"]) @ params["table"].T + rows.sum() + y.mean()


@pytest.mark.parametrize(
    "kind",
    [
        kind if kind in ("dynamic", "qlora") else pytest.param(kind, marks=pytest.mark.exhaustive)
        for kind in KINDS
    ],
)
def test_lowered_for_gpus_and_tpus(kind):
    """The outputs, and their derivatives with respect to x."""
    params = KINDS[kind](PARAMS)
    f = ft.use_implicit_arrays(program)
    both = lambda params, x, image: jax.value_and_grad(lambda x: f(params, x, image).sum())(x)
    for platform in ("cuda", "tpu"):
        assert jax.export.export(jax.jit(both), platforms=[platform])(
            params, X, IMAGE
        ).platforms == (platform,)


def test_calibration_is_lowered(monkeypatch):
    recorded, recorder = [], _calibrate._recorder

    def traced(evaluate, names):
        f = recorder(evaluate, names)
        return lambda *args: (recorded.append((f, jax.tree.map(jax.typeof, args))), f(*args))[1]

    monkeypatch.setattr(_calibrate, "_recorder", traced)
    compress.calibrate(program, PARAMS, [(X, IMAGE)])
    f, shapes = recorded[0]
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), shapes)
    for platform in ("cuda", "tpu"):
        assert jax.export.export(jax.jit(f), platforms=[platform])(*shapes).platforms == (platform,)


@pytest.mark.exhaustive
def test_losses_and_averages_are_lowered():
    tx = optax.chain(optax.sgd(0.1), tr.average_weights(start=2))
    model = models.GPT(32, 32, 1, 2, context=8)
    tokens = jnp.ones((2, 8), jnp.int32)
    params, _ = model.init(jax.random.key(0), tokens)

    def step(state, teacher):
        def loss(params):
            wanted, hidden = ft.capture(model, "norm")(teacher, tokens)
            logits, seen = ft.capture(model, "norm")(params, tokens)
            difference = compress.hidden_loss(seen, hidden, {"norm": "norm"})
            return compress.distillation_loss(logits, wanted).mean() + difference

        return state.apply(tx, jax.grad(loss)(state.params))

    whole = jax.jit(lambda params: jax.tree.leaves(step(tr.TrainState.create(params, tx), params)))
    for platform in ("cuda", "tpu"):
        exported = jax.export.export(whole, platforms=[platform])(params)
        assert exported.platforms == (platform,)


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu: make pods")
@pytest.mark.parametrize("base", ["int8", "dynamic", "int4", "nf4", "float8"])
def test_a_step_on_a_quantized_base_compiles_for_a_slice(base):
    """QLoRA on four chips of a TPU v5e, with the base and its scales split."""
    model, tx = models.Decoder(512, 256, 2, 4, 2, 512, context=64), optax.adamw(1e-3)

    def init(key):
        params = compress.quantize(model.init(key, model.example())[0], {"blocks": FORMATS[base]})
        trainable, frozen = nn.partition(compress.lora(key, params, {"blocks": 8}), ".*/[ab]")
        return tr.TrainState.create(trainable, tx, state=frozen)

    def step(state, tokens):
        f = ft.use_implicit_arrays(model.cross_entropy)
        loss = lambda t: f(nn.combine(t, state.state), tokens[:, :-1], tokens[:, 1:]).mean()
        value, grads = ft.autocast(jax.value_and_grad(loss), "bfloat16")(state.params)
        return state.apply(tx, grads), {"loss": value}

    batch = jax.ShapeDtypeStruct((8, 65), jnp.int32)
    plan = parallel.plan(step, init, batch, devices="v5e:2x2", strategy="fsdp")
    for each in plan.candidates:
        assert each.compiled.arguments == each.arguments and each.compiled.peak


def fake_step(model, example):
    """Quantization-aware training: (init, tx, loss of the trainable parameters)."""
    stats = compress.calibrate(model, model.init(jax.random.key(0), example)[0], [example])
    recipe = {"blocks/attention": compress.Int4(32), "blocks": compress.Int8(activations="mse")}
    init = lambda key: compress.fake_quantize(model.init(key, example)[0], recipe, stats=stats)
    return init, optax.sgd(0.1), ft.use_implicit_arrays(model.cross_entropy)


def prune_step(model, example):
    tx = optax.chain(optax.adamw(1e-3), compress.prune({"blocks": 0.5}, end=4, jointly=True))
    return lambda key: model.init(key, example)[0], tx, model.cross_entropy


def distil_step(model, example):
    student = dataclasses.replace(model, width=128, hidden=256)

    def loss(params, x, y):
        wanted, hidden = ft.capture(model, "norm")(params["teacher"], x)
        logits, seen = ft.capture(student, "norm")(params["student"], x)
        difference = compress.hidden_loss(
            seen, hidden, {"norm": "norm"}, {"norm": params["projection"]}
        )
        return compress.distillation_loss(logits, wanted, y) + difference

    def init(key):
        return {
            "student": student.init(key, example)[0],
            "teacher": model.init(key, example)[0],
            "projection": jax.random.normal(key, (128, 256)),
        }

    return init, optax.chain(optax.adamw(1e-3), tr.average_weights(start=2)), loss


def shrink_step(model, example):
    shrunk = compress.shrink(
        model, model.init(jax.random.key(0), example)[0], example, fraction=0.5
    )

    def loss(params, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(shrunk.f(params, x), y)

    return (
        lambda key: jax.tree.map(lambda x: jax.random.normal(key, x.shape), shrunk.params),
        optax.adamw(1e-3),
        loss,
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, id=kind.__name__)
        for kind in (fake_step, prune_step, distil_step, shrink_step)
    ],
)
def test_training_steps(kind):
    """Lowered for cuda and tpu, and with libtpu compiled for four chips of a TPU v5e."""
    model = models.Decoder(512, 256, 2, 4, 2, 512, context=64)
    initial, tx, losses = kind(model, jnp.ones((2, 64), jnp.int32))

    def step(state, tokens):
        loss = lambda params: losses(params, tokens[:, :-1], tokens[:, 1:]).mean()
        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply(tx, grads), {"loss": value}

    init = lambda key: tr.TrainState.create(initial(key), tx)
    batch = jax.ShapeDtypeStruct((8, 65), jnp.int32)
    leaves = lambda key, tokens: jax.tree.leaves(step(init(key), tokens))
    for platform in ("cuda", "tpu"):
        exported = jax.export.export(jax.jit(leaves), platforms=[platform])(
            jax.random.key(0), batch
        )
        assert exported.platforms == (platform,)
    if importlib.util.find_spec("libtpu") is None:
        return
    plan = parallel.plan(step, init, batch, devices="v5e:2x2", strategy="fsdp")
    for each in plan.candidates:
        assert each.compiled.peak
