"""Haiku models."""

import jax
import jax.numpy as jnp

from .program import Made, Package, Topic, key, normal

hk = Package("haiku")
topic = Topic("haiku", needs="haiku", promotion="standard")
x, y = normal(8, 4), normal(8, 2)


def _mlp(x):
    return hk.Linear(2)(jnp.tanh(hk.Linear(8)(x)))


def _params(f, *args, state=False):
    return Made(
        lambda: (hk.transform_with_state if state else hk.transform)(f).init(
            jax.random.PRNGKey(0), *args
        )
    )


@topic(_params(_mlp, x), x, y, batched=(1, 2))
def mlp_loss(params, x, y):
    return jnp.mean((hk.without_apply_rng(hk.transform(_mlp)).apply(params, x) - y) ** 2)


@topic(key(), x, wrt=())
def init(k, x):
    return hk.transform(_mlp).init(k, x)


@topic(_params(_mlp, x), x, inner=True)
def transformed_function_inside(transform, params, x):
    return hk.transform(lambda x: transform(jnp.tanh)(_mlp(x))).apply(params, None, x)


@topic(_params(_mlp, x), key(), x)
def dropout(params, k, x):
    drop = lambda x: hk.dropout(hk.next_rng_key(), 0.5, x)
    return hk.transform(lambda x: drop(_mlp(x)) + drop(x[:, :2])).apply(params, k, x)


def _batch_norm(x):
    return hk.BatchNorm(True, True, 0.9)(hk.Linear(3)(x), is_training=True)


@topic(_params(_batch_norm, x, state=True), x, wrt=(), core=True)
def batch_norm(params_and_state, x):
    return hk.transform_with_state(_batch_norm).apply(*params_and_state, None, x)


def _lstm(x):
    core = hk.LSTM(3)
    return hk.dynamic_unroll(core, x, core.initial_state(x.shape[1]))[0]


@topic(_params(_lstm, normal(5, 2, 4)), normal(5, 2, 4))
def lstm(params, x):
    return hk.transform(_lstm).apply(params, None, x)


def _remat(x):
    cell = hk.Linear(4, name="cell")  # not in the loop, which JAX may trace more than once
    return hk.remat(hk.Linear(4))(hk.scan(lambda c, x: (c + cell(x), c), x[0], x)[1])


@topic(_params(_remat, x), x)
def remat_and_scan(params, x):
    return hk.transform(_remat).apply(params, None, x)


def _conv(x):
    return hk.LayerNorm(-1, True, True)(hk.MaxPool(2, 2, "SAME")(hk.Conv2D(3, 3)(x)))


@topic(_params(_conv, normal(1, 4, 4, 2)), normal(1, 4, 4, 2))
def conv_pool_and_layer_norm(params, x):
    return hk.transform(_conv).apply(params, None, x)


def _attention(x):
    return hk.MultiHeadAttention(2, 4, w_init=hk.initializers.VarianceScaling(1.0))(x, x, x)


@topic(_params(_attention, normal(5, 8)), normal(5, 8))
def attention(params, x):
    return hk.transform(_attention).apply(params, None, x)


def _counting(x):
    calls = hk.get_state("calls", (), jnp.int32, init=jnp.zeros)
    hk.set_state("calls", calls + 1)
    mean = hk.ExponentialMovingAverage(0.9)(jnp.mean(x))
    h = hk.cond(calls > 0, lambda x: x * 2, lambda x: x, x) - mean
    y = hk.fori_loop(0, 2, lambda i, y: y * 0.5, hk.Linear(2)(h))
    return y * jax.random.normal(hk.next_rng_key(), y.shape)


@topic(_params(_counting, x, state=True), key(), x, wrt=())
def state_loops_and_keys(params_and_state, k, x):
    f = hk.transform_with_state(_counting)
    y, state = f.apply(*params_and_state, k, x)
    return y, f.apply(params_and_state[0], state, jax.random.fold_in(k, 1), x)


def _stacked_and_recurrent(x):
    h = hk.experimental.layer_stack(3)(lambda h: jnp.tanh(hk.Linear(4)(h)))(x)
    h = hk.BatchApply(hk.Linear(4), 2)(jnp.stack([h, h]))
    core = hk.DeepRNN([hk.LSTM(3), hk.GRU(2)])
    return hk.dynamic_unroll(core, h, core.initial_state(8))


@topic(_params(_stacked_and_recurrent, normal(8, 4)), normal(8, 4), wrt=(0, 1), low=0.1)
def layer_stack_and_deep_lstm(params, x):
    return hk.transform(_stacked_and_recurrent).apply(params, None, x)


def _with_custom_getter(x):
    def getter(next_getter, value, context):
        return value.astype(jnp.bfloat16) if context.name == "w" else value

    with hk.custom_getter(getter):
        h = hk.Linear(4)(x.astype(jnp.bfloat16))
    h = hk.switch(jnp.int32(2), [lambda h: h, lambda h: -h], h)
    return hk.vmap(hk.Linear(2), split_rng=False)(h.astype(jnp.float32))


@topic(_params(_with_custom_getter, normal(8, 4)), normal(8, 4), wrt=(0, 1))
def custom_getter_switch_and_vmap(params, x):
    return hk.transform(_with_custom_getter).apply(params, None, x)
