"""fnet's own layers, and training steps with Optax."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fnet import layers as nn
from fnet import transforms as ft

from .program import Made, Topic, integers, key, normal

topic = Topic("steps")
x, y = normal(8, 4), normal(8, 3)


def _params(model, x):
    return Made(lambda: model.init(jax.random.key(0), jnp.asarray(x))[0])


_mlp = nn.Sequential(fc=nn.Dense(8), act=jnp.tanh, head=nn.Dense(3))
_rematted = nn.Sequential(
    a=nn.Sequential(fc=nn.Dense(8)),
    b=nn.Remat(nn.Sequential(fc=nn.Dense(8), act=jnp.tanh, out=nn.Dense(3))),
)


def _loss(model):
    return lambda params, x, y: jnp.mean((model(params, x) - y) ** 2)


@topic(_params(_mlp, x), x, y, batched=(1, 2))
def fnet_mlp(params, x, y):
    return _loss(_mlp)(params, x, y)


@topic(
    _params(_rematted, x),
    x,
    y,
    rules={"a/fc": "float32", "b/fc": "float32", "b/out": "float32"},
    core=True,
)
def fnet_remat_with_rules_for_its_scopes(params, x, y):
    return _loss(_rematted)(params, x, y)


@nn.layer
def _block(scope, x):
    return x + nn.Dense(4)(scope["proj"], jnp.tanh(nn.Dense(8)(scope["fc"], x)))


_stack = nn.Sequential(blocks=nn.Stack(nn.Remat(_block()), 2), head=nn.Dense(3))


@topic(_params(_stack, x), x, y, batched=(1, 2))
def fnet_stack_of_remat(params, x, y):
    return _loss(_stack)(params, x, y)


_attention = nn.Attention(2, causal=True)


@topic(_params(_attention, normal(2, 6, 8)), normal(2, 6, 8))
def fnet_attention(params, x):
    return _attention(params, x)


_conv = nn.Sequential(nn.Conv(4, 3), jax.nn.relu, nn.MaxPool(2), nn.Flatten(), nn.Dense(3))


@topic(_params(_conv, normal(2, 4, 4, 2)), normal(2, 4, 4, 2), batched=(1,))
def fnet_convolutional_network(params, x):
    return jnp.mean(_conv(params, x) ** 2)


_norm = nn.Sequential(nn.Dense(8), nn.BatchNorm(), nn.Dropout(0.5), nn.Dense(3))


@topic(Made(lambda: _norm.init(jax.random.key(0), jnp.ones((8, 4)))), x, key())
def fnet_batch_norm_and_dropout(variables, x, k):
    params, state = variables
    return _norm(params, x, state=state, key=k, train=True)


_lstm = nn.LSTM(3)


@topic(_params(_lstm, normal(2, 5, 4)), normal(2, 5, 4), integers(2, high=5))
def fnet_lstm_with_lengths(params, x, lengths):
    return _lstm(params, x, lengths=lengths + 1)


_depthwise = nn.Sequential(
    nn.Conv(6, 1, use_bias=False),
    nn.DepthwiseConv(3, use_bias=False),
    jax.nn.relu6,
    nn.Conv(3, 1, use_bias=False),
)


# The derivative of relu6 jumps at 0 and 6. For this seed, all its arguments are at least 0.045 away
# from them, which is three times the error of bfloat16; one argument on the other side of 0 changes
# the gradient of the kernels by 0.2.
@topic(_params(_depthwise, normal(2, 3, 3, 4)), normal(2, 3, 3, 4, seed=156))
def fnet_depthwise(params, x):
    return _depthwise(params, x)


def _optimizer_step(tx, params, x, y):
    state = tx.init(params)
    for _ in range(2):
        grads = jax.grad(_loss(_mlp))(params, x, y)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


_OPTIMIZERS = {
    "sgd_with_momentum": lambda: optax.sgd(0.1, 0.9, nesterov=True),
    "adam": lambda: optax.adam(1e-2),
    "adamw_clipped_with_schedule": lambda: optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10)),
    ),
    "adafactor": lambda: optax.adafactor(1e-2),
    "multi_steps": lambda: optax.MultiSteps(optax.adam(1e-2), 2),
    "lion": lambda: optax.lion(1e-2),
    "injected_schedule": lambda: optax.inject_hyperparams(optax.sgd)(
        optax.linear_schedule(0.1, 0.01, 3)
    ),
    "piecewise_schedule": lambda: optax.sgd(
        optax.join_schedules(
            [optax.constant_schedule(0.1), optax.exponential_decay(0.1, 2, 0.5)], [1]
        )
    ),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.sgd(0.1), 2),
    "masked_decay_and_average": lambda: optax.chain(
        optax.masked(
            optax.add_decayed_weights(0.1), lambda p: jax.tree.map(lambda x: x.ndim > 1, p)
        ),
        optax.ema(0.9),
        optax.scale(-0.1),
    ),
    "muon": lambda: optax.contrib.muon(1e-2),
}
_PROPORTIONAL = (
    "sgd_with_momentum",
    "injected_schedule",
    "piecewise_schedule",
    "apply_if_finite",
    "masked_decay_and_average",
)
for _name, _make in _OPTIMIZERS.items():
    topic.add(
        f"optax_{_name}",
        lambda params, x, y, make=_make: _optimizer_step(make(), params, x, y),
        _params(_mlp, x),
        x,
        y,
        wrt=(),
        tolerance=1e-3,
        promotion="standard",
        excluded={}
        if _name in _PROPORTIONAL
        else {
            (
                "autocast",
                "*",
            ): "the first steps of adaptive optimizers divide gradients by themselves"
        },
    )


@topic(_params(_mlp, x), x, y, wrt=(), core=True)
def jitted_step_that_donates(params, x, y):
    @jax.jit
    def step(params, x, y):
        loss, grads = jax.value_and_grad(_loss(_mlp))(params, x, y)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), {
            "loss": loss,
            "norm": optax.tree.norm(grads),
        }

    return step(params, x, y)


topic.add(
    "donated_arguments",
    jax.jit(lambda params, x: (jax.tree.map(lambda p: p * 2, params), x.sum()), donate_argnums=0),
    _params(_mlp, x),
    x,
    wrt=(),
)


@topic(_params(_mlp, x), normal(3, 8, 4), normal(3, 8, 3), wrt=())
def scan_over_steps(params, xs, ys):
    def step(params, batch):
        loss, grads = jax.value_and_grad(_loss(_mlp))(params, *batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return jax.lax.scan(step, params, (xs, ys))


@topic(_params(_mlp, x), x, y, wrt=())
def per_example_gradients(params, x, y):
    return jax.vmap(jax.grad(_loss(_mlp)), (None, 0, 0))(params, x[:, None], y[:, None])


@topic(_params(_mlp, x), x, y, wrt=())
def hessian_vector_product(params, x, y):
    return jax.jvp(jax.grad(lambda p: _loss(_mlp)(p, x, y)), (params,), (params,))


@topic(_params(_mlp, x), x, y, wrt=())
def model_agnostic_meta_learning(params, x, y):
    loss = _loss(_mlp)
    inner = lambda p: jax.tree.map(lambda p, g: p - 0.1 * g, p, jax.grad(loss)(p, x, y))
    return jax.value_and_grad(lambda p: loss(inner(p), x, y))(params)


@topic(_params(_mlp, x), x, y, wrt=(), batched=(1, 2))
def mean_gradients(params, x, y):
    return jax.value_and_grad(_loss(_mlp))(params, x, y)


@topic(_params(_mlp, x), x, y, wrt=(), excluded={("autocast", "*"): "nested mixed precision"})
def transforms_inside(params, x, y):
    return ft.microbatch(jax.value_and_grad(_loss(_mlp)), 2, argnums=(1, 2))(params, x, y)


@topic(_params(_mlp, x), x, y, wrt=(), tolerance=1e-3)
def full_precision_part(params, x, y):
    return ft.full_precision(_loss(_mlp))(params, x, y)


@topic(
    normal(4),
    wrt=(),
    promotion="standard",
    tolerance=1e-3,
    excluded={("autocast", "*"): "rounding decides how far the line search goes"},
)
def optax_lbfgs_with_line_search_in_scan(x):
    f = lambda x: jnp.sum((x - 1.0) ** 2 * jnp.arange(1.0, 5.0))
    tx = optax.lbfgs(memory_size=2)

    def step(c, _):
        x, state = c
        value, grad = optax.value_and_grad_from_state(f)(x, state=state)
        updates, state = tx.update(grad, state, x, value=value, grad=grad, value_fn=f)
        return (optax.apply_updates(x, updates), state), value

    (x, _), values = jax.lax.scan(step, (x, tx.init(x)), None, length=2)
    return x, values


@topic(
    {
        "a": {"w": normal(4, 8), "b": np.zeros(8, "float32")},
        "b": {"w": normal(8, 3)},
        "none": None,
        "empty": {},
    },
    normal(3, 8, 4),
    normal(3, 8, 3),
    wrt=(),
    promotion="standard",
    tolerance=1e-3,
)
def optax_masks_partitions_and_multi_steps_in_scan(params, xs, ys):
    f = lambda p, x: jnp.tanh(x @ p["a"]["w"] + p["a"]["b"]) @ p["b"]["w"]
    mask = lambda tree: jax.tree.map(lambda p: jnp.ndim(p) > 1, tree)
    labels = lambda tree: jax.tree.map(lambda p: "decay" if jnp.ndim(p) > 1 else "rest", tree)
    parts = {"decay": optax.sgd(0.1, momentum=0.9, nesterov=True), "rest": optax.set_to_zero()}
    tx = optax.MultiSteps(
        optax.chain(
            optax.masked(optax.add_decayed_weights(0.1), mask),
            optax.clip_by_global_norm(1.0),
            optax.partition(parts, labels),
        ),
        2,
    )

    def step(carry, batch):
        params, state = carry
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((f(p, batch[0]) - batch[1]) ** 2))(
            params
        )
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), loss

    (params, state), losses = jax.lax.scan(step, (params, tx.init(params)), (xs, ys))
    return params, losses, state.mini_step, tx.has_updated(state)
