"""The steps that `benchmarks.accelerators` compiles: training of GPT-2 and ResNet, and decoding of
a Llama, with fnet, flax.linen, flax.nnx and plain JAX.

Each function returns (step, indices of the donated arguments, shapes of the arguments).
`benchmarks.accelerators` may apply `ft.tune` to the step.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from benchmarks import _handwritten
from benchmarks.peers import _linen, _nnx
from benchmarks.peers import _workloads as spec
from fnet import hardware, models
from fnet import transforms as ft
from fnet.models.generation import _generate


@dataclasses.dataclass(frozen=True)
class Size:
    """The sizes of the three models."""

    gpt: spec.GPT
    resnet: spec.ResNet
    llama: models.Decoder
    capacity: int

    @property
    def parameters(self) -> int:
        """The number of the GPT's parameters that are operands of matrix products."""
        return 12 * self.gpt.depth * self.gpt.width**2 + self.gpt.vocab * self.gpt.width


LARGE = Size(
    spec.GPT(8, 1024, 768, 12, 12, 50257, True),
    spec.ResNet(128, 224, (3, 4, 6, 3), 64, True, True, 1000),
    models.Decoder.preset("smollm-135m"),
    2048,
)
SMALL = Size(
    spec.GPT(2, 512, 128, 4, 2, 1003, True),
    spec.ResNet(8, 64, (1, 1, 1, 1), 64, True, True, 100),
    models.Decoder(1024, 128, 4, 4, 2, 256, context=256, tied=True),
    256,
)


def _policy(form):
    return hardware.Policy(
        compute="bfloat16", residual="bfloat16" if "residual" in form else "float32"
    )


def gpt(form, size, platform):
    w = size.gpt
    if form == "hand":
        return _handwritten.gpt(platform, w.vocab, w.width, w.depth, w.heads, w.time, w.batch)
    tokens = jax.ShapeDtypeStruct((w.batch, w.time + 1), jnp.int32)
    if form.startswith(("linen", "nnx")):
        params, apply = _flax(form, w, jax.ShapeDtypeStruct((w.batch, w.time), jnp.int32))

        def loss(params, tokens):
            logits = apply(params, tokens[:, :-1])[0].astype(jnp.float32)
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        gradient = jax.value_and_grad(loss)
    else:
        stacked, whole = "unstacked" not in form, "whole" in form
        model = models.GPT(w.vocab, w.width, w.depth, w.heads, context=w.time, stacked=stacked)
        params, _ = jax.eval_shape(model.init, jax.random.key(0), model.example())

        def loss(params, tokens):
            x, y = tokens[:, :-1], tokens[:, 1:]
            if whole:
                return optax.softmax_cross_entropy_with_integer_labels(model(params, x), y).mean()
            return model.cross_entropy(params, x, y).mean()

        gradient = ft.autocast(jax.value_and_grad(loss), _policy(form))
    tx = optax.adamw(6e-4)
    return (
        _handwritten.train_step(gradient, tx),
        (0, 1),
        (params, jax.eval_shape(tx.init, params), tokens),
    )


def resnet(form, size, platform):
    w, tx = size.resnet, optax.sgd(0.1, momentum=0.9, nesterov=True)
    images = jax.ShapeDtypeStruct((w.batch, w.size, w.size, 3), jnp.float32)
    labels = jax.ShapeDtypeStruct((w.batch,), jnp.int32)
    if form in ("linen", "nnx"):
        (params, state), apply = _flax(form, w, images)

        def loss(params, state, x, y):
            logits, state = apply((params, state), x)
            return optax.softmax_cross_entropy_with_integer_labels(
                logits.astype(jnp.float32), y
            ).mean(), state
    else:
        model = models.ResNet(w.depths, bottleneck=w.bottleneck, classes=w.classes, width=w.width)
        params, state = jax.eval_shape(model.init, jax.random.key(0), images)
        loss = functools.partial(_handwritten.resnet_loss, depths=w.depths)
        if form.startswith("fnet"):

            def loss(params, state, x, y):
                logits, state = model(params, x, state=state, train=True)
                return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), state

    gradient = jax.value_and_grad(loss, has_aux=True)
    if form.startswith("fnet"):
        gradient = ft.autocast(gradient, _policy(form))

    def step(params, state, opt_state, x, y):
        (value, state), grads = gradient(params, state, x, y)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), state, opt_state, value

    return step, (0, 1, 2), (params, state, jax.eval_shape(tx.init, params), images, labels)


def _flax(form, workload, x):
    """Returns the shapes of the variables, and a function `apply(variables, x) -> (logits, state)`.
    The variables are the parameters, or (parameters, state of BatchNorm). In forms with "scan", the
    blocks are a scan."""
    library, *scanned = form.split("-")
    options = {"scanned": True} if scanned else {}
    if library == "linen":
        model = _linen.MODELS[type(workload)](workload, jnp.bfloat16, **options)
        found = jax.eval_shape(functools.partial(model.init, train=False), jax.random.key(0), x)
        if "batch_stats" not in found:
            return found["params"], lambda params, x: (
                model.apply({"params": params}, x, True),
                None,
            )

        def apply(variables, x):
            logits, new = model.apply(
                {"params": variables[0], "batch_stats": variables[1]},
                x,
                True,
                mutable=["batch_stats"],
            )
            return logits, new["batch_stats"]

        return (found["params"], found["batch_stats"]), apply
    module = nnx.eval_shape(
        lambda: _nnx.MODELS[type(workload)](
            workload, dtype=jnp.bfloat16, rngs=nnx.Rngs(0), **options
        )
    )
    graph, params, stats, rest = nnx.split(module, nnx.Param, nnx.BatchStat, ...)
    if not jax.tree.leaves(stats):
        return params, lambda params, x: (nnx.merge(graph, params, stats, rest)(x), None)

    def apply(variables, x):
        module = nnx.merge(graph, *variables, rest, copy=True)  # updated in this trace
        return module(x), nnx.state(module, nnx.BatchStat)

    return (params, stats), apply


def decode(form, size, platform, *, batch=1):
    """Greedy decoding of one token, as in `models.generate`, with bfloat16 parameters."""
    model = size.llama
    if form == "hand":
        return _handwritten.decode(
            model.vocab_size,
            model.width,
            model.depth,
            model.heads,
            model.kv_heads,
            model.hidden,
            batch,
            size.capacity,
        )
    tokens = jax.ShapeDtypeStruct((batch, size.capacity), jnp.int32)
    params, _ = jax.eval_shape(
        model.init, jax.random.key(0), jax.ShapeDtypeStruct((1, 8), jnp.int32)
    )
    # `generate` converts model and parameters once, before its loop.
    model, params = (
        dataclasses.replace(model, stacked=False),
        jax.eval_shape(lambda params: _generate.prepared(model, params, jnp.bfloat16)[1], params),
    )
    cache = jax.eval_shape(lambda params: _generate.empty_cache(model, params, tokens), params)

    def step(params, token, cache):
        logits, cache = model(params, token[:, None], state=cache)
        return logits[:, 0].astype(jnp.float32).argmax(-1).astype(jnp.int32), cache

    return step, (2,), (params, jax.ShapeDtypeStruct((batch,), jnp.int32), cache)


def decode8(form, size, platform):
    return decode(form, size, platform, batch=8)


PROGRAMS = {"gpt": gpt, "resnet": resnet, "decode": decode, "decode8": decode8}
