"""Typical uses of fnet, for mypy (`make lint`): what a user's editor knows about the public names.
It is not run."""

from typing import assert_type

import jax
import optax

import fnet
from fnet import hardware as hw
from fnet import introspect, models, parallel
from fnet import layers as nn
from fnet import training as tr
from fnet import transforms as ft


class MLP(nn.Layer):
    widths: tuple[int, ...]
    dropout: float = 0.0

    def forward(self, scope: nn.Scope, x: jax.Array) -> jax.Array:
        for i, width in enumerate(self.widths[:-1]):
            x = jax.nn.relu(nn.Dense(width, use_bias=False)(scope[f"fc{i}"], x))
            x = nn.Dropout(self.dropout)(scope[f"drop{i}"], x)
        return nn.Dense(self.widths[-1])(scope["head"], x)


@nn.layer
def scaled(scope: nn.Scope, x: jax.Array, *, features: int) -> jax.Array:
    scale = scope.param("scale", (features,), jax.nn.initializers.ones, axes=("embed",))
    return x * scale


def layers(key: jax.Array, x: jax.Array) -> None:
    assert_type(scaled(features=3), nn.Layer)
    model = nn.Sequential(
        nn.Conv(32, 3, strides=2), jax.nn.relu, nn.Flatten(), head=MLP((64, 10), dropout=0.1)
    )
    assert_type(model, nn.Sequential)
    params, state = model.init(key, x)
    assert_type(params, dict)
    spec = model.spec(x)
    assert_type(spec, nn.Spec)
    assert_type(nn.count_parameters(spec.params), int)
    trainable, frozen = nn.partition(params, "head/.*")
    print(model(nn.combine(trainable, frozen), x, state=state, key=key, train=True))
    nn.Attention(8, causal=True, rotary=nn.Rotary(), window=None)
    nn.Dense("10")  # type: ignore[arg-type]
    nn.Dense(10, bias=False)  # type: ignore[call-arg]


def transforms(params: dict, x: jax.Array) -> None:
    model = MLP((4, 2))
    step = ft.tune(
        ft.autocast(ft.value_and_grad(model), "bfloat16", rules={"head": "float32"}), "cpu"
    )
    print(ft.explain(step, params, x))
    print(ft.capture(model, "head")(params, x))
    ft.intervene(model, {"head": lambda value, index: 0 * value})(params, x)
    ft.microbatch(step, 8)(params, x)
    print(ft.loss_scale(optax.adamw(1e-3), hw.policy(hw.detect(), "train")))
    introspect.summary(model, x, chip="TPU v5e")
    ft.microbatch(step)  # type: ignore[call-arg]


def training(params: dict, batches: tr.Batches, workdir: str) -> None:
    tx = optax.adam(1e-3)

    def step(state: tr.TrainState, batch: dict) -> tuple[tr.TrainState, dict]:
        value, grads = ft.value_and_grad(MLP((4, 2)))(state.params, batch["x"])
        return state.apply(tx, grads), {"loss": value}

    state = tr.TrainState.create(params, tx)
    plan = parallel.plan(step, lambda key: state, {"x": jax.numpy.ones((8, 3))}, strategy="fsdp")
    assert_type(plan.explain(), str)
    tr.fit(plan.jit(step), plan.place(state), batches, steps=100, workdir=workdir, every=10)
    print(
        tr.load(workdir, which="best").params,
        fnet.__version__,
        models.GPT(256, 64, 2, 2, context=32),
    )
