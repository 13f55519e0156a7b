"""Programs on implicit arrays: lowered for GPUs and TPUs and compiled for TPUs that are not attached (make pods)."""

import importlib.util

import jax
import jax.numpy as jnp
import optax
import pytest

from fnet import compress, models, parallel
from fnet import layers as nn
from fnet import training as tr
from fnet import transforms as ft

X = jnp.ones((4, 32))
IMAGE = jnp.ones((2, 6, 6, 32))
PARAMS = {"w": jnp.ones((32, 32)), "kernel": jnp.ones((3, 3, 32, 8)), "table": jnp.ones((16, 32))}
FORMATS = {"int8": compress.Int8(), "dynamic": compress.Int8(activations="dynamic"), "int4": compress.Int4(16),
           "nf4": compress.NF4(16), "float8": compress.Float8()}
KINDS = {name: lambda p, format=format: compress.quantize(p, {".*": format}) for name, format in FORMATS.items()}
KINDS |= {"fake": lambda p: compress.fake_quantize(p, {".*": compress.Int4(16)}),
          "qlora": lambda p: compress.lora(jax.random.key(0), KINDS["int4"](p), {".*": 2}),
          "calibrated": lambda p: compress.quantize(
              {"w": p["w"]}, {"w": compress.Int8(activations="mse")},
              stats=compress.calibrate(lambda p, x: x @ p["w"], {"w": p["w"]}, [X])) | {
                  name: p[name] for name in ("kernel", "table")}}


def program(params, x, image):
    axes = "NHWC", "HWIO", "NHWC"
    y = jax.lax.conv_general_dilated(image, params["kernel"], (1, 1), "SAME", dimension_numbers=axes)
    rows = params["table"][jnp.array([1, 3, 5, 7])]
    return jnp.tanh(x @ params["w"]) @ params["table"].T + rows.sum() + y.mean()


@pytest.mark.parametrize("kind", [kind if kind in ("dynamic", "qlora") else pytest.param(
    kind, marks=pytest.mark.exhaustive) for kind in KINDS])
def test_lowered_for_gpus_and_tpus(kind):
    """The outputs, and their derivatives with respect to x."""
    params = KINDS[kind](PARAMS)
    f = ft.use_implicit_arrays(program)
    both = lambda params, x, image: jax.value_and_grad(lambda x: f(params, x, image).sum())(x)
    for platform in ("cuda", "tpu"):
        assert jax.export.export(jax.jit(both), platforms=[platform])(params, X, IMAGE).platforms == (platform,)


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
