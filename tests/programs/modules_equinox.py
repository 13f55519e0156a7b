"""Equinox models, losses and transforms."""

import jax
import jax.numpy as jnp

from .program import Made, Package, Topic, integers, key, normal

eqx, internal, optax = Package("equinox"), Package("equinox.internal"), Package("optax")
topic = Topic("equinox", needs="equinox")
mlp = Made(lambda: eqx.nn.MLP(4, 2, 8, 2, key=jax.random.key(0)))
x, y = normal(8, 4), normal(8, 2)
_ERROR = "error_if is for the default backend"


def _loss(model, x, y):
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


@topic(mlp, x, y, batched=(1, 2))
def mlp_loss(model, x, y):
    return _loss(model, x, y)


@topic(mlp, x, y, wrt=())
def filter_value_and_grad(model, x, y):
    return eqx.filter_value_and_grad(_loss)(model, x, y)


@topic(mlp, x, y, wrt=(), inner=True, core=True)
def filter_grad_of_transformed_loss(transform, model, x, y):
    return eqx.filter_grad(transform(_loss))(model, x, y)


@topic(mlp, x, y, wrt=(), inner=True)
def filter_jit_of_transformed_step(transform, model, x, y):
    @eqx.filter_jit
    @transform
    def step(model, x, y):
        grads = eqx.filter_grad(_loss)(model, x, y)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads))

    return step(model, x, y)


@topic(mlp, x, y, wrt=())
def filter_jit_inside(model, x, y):
    return eqx.filter_jit(_loss)(model, x, y)


@topic(Made(lambda: eqx.nn.MultiheadAttention(2, 4, key=jax.random.key(0))), normal(5, 4))
def attention(model, x):
    return model(x, x, x, mask=jnp.tril(jnp.ones((5, 5), bool)))


@topic(Made(lambda: eqx.nn.GRUCell(4, 3, key=jax.random.key(0))), normal(6, 4))
def gru(cell, xs):
    return jax.lax.scan(lambda h, x: (cell(x, h), None), jnp.zeros(3), xs)[0]


@topic(
    Made(lambda: eqx.nn.make_with_state(eqx.nn.BatchNorm)(4, axis_name="batch", mode="batch")),
    x,
    wrt=(),
)
def batch_norm_with_state(model_and_state, x):
    model, state = model_and_state
    return jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)


@topic(
    Made(
        lambda: eqx.nn.Sequential(
            [
                eqx.nn.Conv2d(2, 3, 3, key=jax.random.key(0)),
                eqx.nn.Lambda(jax.nn.relu),
                eqx.nn.MaxPool2d(2, 2),
                eqx.nn.Lambda(jnp.ravel),
                eqx.nn.Linear(12, 2, key=jax.random.key(1)),
            ]
        )
    ),
    normal(3, 2, 6, 6),
)
def convolutional_network(model, x):
    return jax.vmap(model)(x).sum(0)


@topic(mlp, key(), x)
def dropout_with_vmapped_keys(model, k, x):
    drop = eqx.nn.Dropout(0.5)
    return jax.vmap(lambda x, k: drop(model(x), key=k))(x, jax.random.split(k, 8)).mean()


@topic(Made(lambda: eqx.nn.Embedding(7, 4, key=jax.random.key(0))), integers(5, high=7))
def embedding(model, i):
    return jax.vmap(model)(i)


@topic(normal(3), core=True)
def checkpointed_while_loop(x):
    return internal.while_loop(
        lambda c: c[0] < 5,
        lambda c: (c[0] + 1, jnp.sin(c[1]) * 1.1),
        (0, x),
        max_steps=8,
        kind="checkpointed",
    )[1].sum()


@topic(normal(3))
def bounded_while_loop(x):
    return internal.while_loop(
        lambda c: c[0] < 5,
        lambda c: (c[0] + 1, jnp.sin(c[1]) * 1.1),
        (0, x),
        max_steps=8,
        kind="bounded",
    )[1].sum()


@topic(normal(3), excluded={("*", "cuda"): _ERROR, ("*", "tpu"): _ERROR})
def error_if_and_filter_custom_vjp(x):
    @eqx.filter_custom_vjp
    def f(x, scale):
        return jnp.sin(x) * scale

    f.def_fwd(lambda perturbed, x, scale: (f(x, scale), (x, scale)))
    f.def_bwd(lambda saved, g, perturbed, x, scale: 2 * g * jnp.cos(saved[0]) * saved[1])
    return f(eqx.error_if(x, x.sum() > 1e6, "too large"), 3.0)


@topic(normal(3), wrt=())
def filter_pure_callback_and_closures(x):
    f = eqx.filter_closure_convert(lambda y: y * x, x)
    return f(x), eqx.filter_eval_shape(f, x).shape


@topic(mlp, x, y, wrt=(), promotion="standard")
def adam_step(model, x, y):
    tx = optax.adam(1e-2)
    params, static = eqx.partition(model, eqx.is_array)
    state = tx.init(params)
    grads = jax.grad(lambda p: _loss(eqx.combine(p, static), x, y))(params)
    updates, state = tx.update(grads, state, params)
    return eqx.combine(optax.apply_updates(params, updates), static), state


@topic(mlp, x, y, wrt=(), inner=True)
def ensemble_by_filter_vmap_in_filter_jit(transform, model, x, y):
    @eqx.filter_jit
    def losses(keys):
        models = eqx.filter_vmap(lambda k: eqx.nn.MLP(4, 2, 8, 2, key=k))(keys)
        return eqx.filter_vmap(transform(_loss), in_axes=(eqx.if_array(0), None, None))(
            models, x, y
        )

    return losses(jax.random.split(jax.random.key(1), 3)), eqx.filter_jit(transform(_loss))(
        model, x, y
    )


@topic(mlp, x, y)
def filter_checkpoint_and_scan_over_stacked_layers(model, x, y):
    h = eqx.filter_checkpoint(lambda m, x: jax.vmap(m)(x))(model, x)
    layers = eqx.filter_vmap(lambda k: eqx.nn.Linear(2, 2, key=k))(
        jax.random.split(jax.random.key(1), 3)
    )
    arrays, static = eqx.partition(layers, eqx.is_array)
    step = lambda h, layer: (jnp.tanh(jax.vmap(eqx.combine(layer, static))(h)), None)
    return jnp.mean((jax.lax.scan(step, h, arrays)[0] - y) ** 2)


@topic(mlp, "relu", others=[(mlp, "tanh"), (mlp, "relu")], wrt=(), static=(1,))
def tree_at_with_a_string_argument(model, activation):
    model = eqx.tree_at(lambda m: m.activation, model, getattr(jax.nn, activation))
    return eqx.tree_at(lambda m: m.layers[0].bias, model, None), jax.vmap(model)(jnp.ones((2, 4)))


@topic(Made(lambda: eqx.nn.MLP(4, 3, 8, 1, key=jax.random.key(0))), normal(8, 4), wrt=())
def custom_rules_hessian_and_shared(model, x):
    @eqx.filter_custom_vjp
    def f(inputs, scale):
        model, x = inputs
        return jnp.sum(jax.vmap(model)(x) ** 2) * scale

    f.def_fwd(lambda perturbed, inputs, scale: (f(inputs, scale), None))

    def bwd(saved, g, perturbed, inputs, scale):
        grads = eqx.filter_grad(lambda inputs: jnp.sum(jax.vmap(inputs[0])(inputs[1])))(inputs)
        return jax.tree.map(lambda a: a * g * scale, grads)

    f.def_bwd(bwd)

    @eqx.filter_custom_jvp
    def h(x):
        return jnp.sin(x)

    @h.def_jvp
    def _(primals, tangents):
        return h(*primals), 3.0 * tangents[0]

    return (
        eqx.filter_grad(f)((model, x), 2.0),
        jax.grad(lambda x: h(x).sum())(x),
        eqx.filter_hessian(lambda b: model(b).sum())(x[0]),
    )


@topic(Made(lambda: eqx.nn.LSTMCell(4, 3, key=jax.random.key(0))), normal(5, 4), wrt=(0, 1))
def lstm_scan_checkpointed(cell, xs):
    def f(carry, x):
        carry = cell(x, carry)
        return carry, carry[0]

    return internal.scan(f, (jnp.zeros(3), jnp.zeros(3)), xs, kind="checkpointed", checkpoints=2)


def _tied():
    embed = eqx.nn.Embedding(7, 4, key=jax.random.key(0))
    linear = eqx.nn.Linear(4, 7, use_bias=False, key=jax.random.key(1))
    return eqx.nn.Shared(
        (embed, linear), where=lambda pair: pair[1].weight, get=lambda pair: pair[0].weight
    )


@topic(Made(_tied), integers(5, high=7))
def shared_weights(shared, i):
    embed, linear = shared()
    return jax.vmap(linear)(jnp.tanh(jax.vmap(embed)(i)))
