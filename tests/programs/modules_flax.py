"""Flax modules: nnx, which mutates in place, and linen."""

import functools

import jax
import jax.numpy as jnp
import optax
from flax import linen, nnx

from .program import Made, Topic, integers, key, normal

topic = Topic("flax", promotion="standard")
x, y = normal(8, 4), normal(8, 3)
_adam = optax.adam(
    1e-2
)  # one object, because it is a static attribute of an optimizer, by which JAX compares calls


class Network(nnx.Module):
    def __init__(self, norm=False, rate=0.0):
        rngs = nnx.Rngs(0)
        self.fc, self.head = nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs) if norm else None
        self.drop = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x):
        h = nnx.relu(self.fc(x))
        return self.head(self.drop(h if self.norm is None else self.norm(h)))


def _loss(model, x, y):
    return jnp.mean((model(x) - y) ** 2)


def _step(model, optimizer, x, y):
    loss, grads = nnx.value_and_grad(_loss)(model, x, y)
    optimizer.update(model, grads)
    return loss


def _with_optimizer(**options):
    def make():
        model = Network(**options)
        return {"model": model, "optimizer": nnx.Optimizer(model, _adam, wrt=nnx.Param)}

    return Made(make)


@topic(Made(lambda: nnx.split(Network())), x, y, batched=(1, 2))
def nnx_split_and_merge(parts, x, y):
    return _loss(nnx.merge(*parts), x, y)


@topic(Made(Network), x, y, wrt=(), batched=(1, 2))
def nnx_module_as_argument(model, x, y):
    return _loss(model, x, y)


@topic(Made(functools.partial(Network, norm=True)), x, y, wrt=())
def nnx_batch_norm_in_place(model, x, y):
    return _loss(model, x, y)


@topic(Made(functools.partial(Network, norm=True)), x, y, wrt=(), inner=True)
def nnx_grad_of_transformed_loss(transform, model, x, y):
    return nnx.value_and_grad(transform(_loss))(model, x, y)


@topic(Made(Network), normal(2, 8, 4), normal(2, 8, 3), wrt=(), inner=True, core=True)
def nnx_module_read_by_transformed_loss_in_scan(transform, model, xs, ys):
    loss = transform(_loss)
    return jax.lax.scan(
        lambda total, batch: (total + loss(model, *batch), None), jnp.float32(0), (xs, ys)
    )[0]


@topic(Made(functools.partial(Network, rate=0.5)), x, y, wrt=())
def nnx_dropout_advances_its_stream(model, x, y):
    return _loss(model, x, y), _loss(model, x, y)


@topic(_with_optimizer(), x, y, wrt=())
def nnx_step_in_place(state, x, y):
    return _step(state["model"], state["optimizer"], x, y)


@topic(
    _with_optimizer(norm=True),
    x,
    y,
    wrt=(),
    inner=True,
    core=True,
    excluded={
        ("autocast", "*"): "the first steps of adaptive optimizers divide gradients by themselves"
    },
)
def nnx_jit_of_transformed_step(transform, state, x, y):
    step = nnx.jit(transform(_step))
    return step(state["model"], state["optimizer"], x, y), step(
        state["model"], state["optimizer"], x, y
    )


_NOT_JAX_JIT = "expected a plain function or the result of jax.jit"


@topic(
    _with_optimizer(),
    x,
    y,
    wrt=(),
    inner=True,
    refused={("tune", "value"): _NOT_JAX_JIT, ("tune", "again"): _NOT_JAX_JIT},
)
def transformed_nnx_jit(transform, state, x, y):
    return transform(nnx.jit(_step))(state["model"], state["optimizer"], x, y)


@topic(Made(lambda: nnx.split(Network(), nnx.Param, ...)), x, y, wrt=())
def nnx_functional_step(parts, x, y):
    graph, params, rest = parts
    return jax.value_and_grad(lambda params: _loss(nnx.merge(graph, params, rest), x, y))(params)


@topic(Made(Network), x, wrt=())
def nnx_vmap_scan_and_remat(model, x):
    h = nnx.vmap(lambda m, x: m(x), in_axes=(None, 0))(model, x)
    return h + nnx.remat(lambda m, x: m(x))(model, x)


@topic(
    Made(lambda: nnx.MultiHeadAttention(2, 4, decode=False, rngs=nnx.Rngs(0))),
    normal(1, 5, 4),
    wrt=(),
)
def nnx_attention(model, x):
    return model(x, mask=nnx.make_causal_mask(jnp.ones((1, 5))))


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x, train=False):
        x = linen.Dropout(0.5, deterministic=not train)(linen.LayerNorm()(linen.Dense(8)(x)))
        return linen.Dense(3)(linen.BatchNorm(use_running_average=not train)(x))


@topic(
    Made(lambda: Linen().init(jax.random.key(0), jnp.ones((8, 4)))), x, y, batched=(1, 2), core=True
)
def linen_loss(variables, x, y):
    return jnp.mean((Linen().apply(variables, x) - y) ** 2)


@topic(Made(lambda: Linen().init(jax.random.key(0), jnp.ones((8, 4)))), key(), x)
def linen_in_training(variables, k, x):
    return Linen().apply(variables, x, train=True, mutable=["batch_stats"], rngs={"dropout": k})


class LinenScan(linen.Module):
    @linen.compact
    def __call__(self, x):
        block = linen.remat(linen.Dense)
        layers = linen.scan(
            lambda block, h, _: (jnp.tanh(block(h)), None),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=3,
        )
        return layers(block(4), x, None)[0]


@topic(Made(lambda: LinenScan().init(jax.random.key(0), jnp.ones((8, 4)))), x)
def linen_scan_of_remat(variables, x):
    return LinenScan().apply(variables, x)


@topic(key(), x, wrt=())
def linen_init(k, x):
    return LinenScan().init(k, x)


@topic(
    Made(lambda: linen.RNN(linen.LSTMCell(3)).init(jax.random.key(0), jnp.ones((2, 5, 4)))),
    normal(2, 5, 4),
    integers(2, high=5),
)
def linen_lstm_with_lengths(variables, x, lengths):
    return linen.RNN(linen.LSTMCell(3)).apply(variables, x, seq_lengths=lengths)


class Recurrent(nnx.Module):
    """Draws and counts in place; its layers share a variable."""

    def __init__(self):
        self.rngs = nnx.Rngs(params=0, noise=1)
        self.fc = nnx.Linear(4, 4, rngs=self.rngs)
        self.layers = nnx.List([self.fc, nnx.Linear(4, 4, rngs=self.rngs)])
        self.layers[1].bias = self.fc.bias
        self.count = nnx.BatchStat(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x)) + 0.1 * jax.random.normal(self.rngs.noise(), x.shape)
        self.count[...] += 1
        return x


@topic(Made(Recurrent), x, wrt=())
def nnx_rngs_counts_and_shared_variables(model, x):
    return model(model(x)), model.count[...]


@topic(
    Made(Recurrent),
    x,
    wrt=(),
    inner=True,
    excluded={("autocast", "*"): "rounding the arguments gives the layers separate biases"},
)
def nnx_rngs_in_transformed_loss(transform, model, x):
    loss = transform(lambda model, x: jnp.mean(model(x) ** 2))
    first = nnx.value_and_grad(loss)(model, x)
    return first, nnx.jit(loss)(model, x)


@topic(Made(Recurrent), x, wrt=())
def nnx_fori_loop_and_cond(model, x):
    x = nnx.fori_loop(0, 2, lambda i, c: (c[0], c[0](c[1])), (model, x))[1]
    return nnx.cond(x.sum() > 0, lambda m, x: m(x), lambda m, x: m(2 * x), model, x)


@topic(Made(lambda: nnx.Rngs(dropout=1)), x, wrt=())
def nnx_rngs_as_argument(rngs, x):
    drop = nnx.Dropout(0.5)
    return drop(x, rngs=rngs), rngs.dropout(), drop(x, rngs=rngs)


class _Block(nnx.Module):
    def __init__(self, rngs):
        self.fc = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(0.3, rngs=rngs)
        self.calls = nnx.BatchStat(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls[...] += 1
        return self.drop(jnp.tanh(self.norm(self.fc(x))))


def _stacked():
    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def create(rngs):
        return _Block(rngs)

    return create(nnx.Rngs(0, dropout=1))


@topic(Made(_stacked), normal(8, 4), wrt=())
def nnx_scan_over_stacked_modules(model, x):
    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def forward(block, x):
        return block(x)

    def loss(model, x):
        return jnp.mean(forward(model, x) ** 2)

    return nnx.value_and_grad(loss)(model, x), model.calls[...], model.norm.mean[...]


@topic(
    Made(_stacked), normal(3, 8, 4), wrt=(), inner=True, tolerance=1e-4
)  # a bias before BatchNorm: rounding alone
def nnx_vmap_of_transformed_step(transform, model, xs):
    step = transform(lambda block, x: nnx.grad(lambda b: jnp.mean(b(x) ** 2))(block))
    grads = nnx.vmap(step, in_axes=(0, 0))(model, xs)
    return grads, model.calls[...], model.norm.mean[...]


class _Sowing(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.base, self.lora = nnx.Linear(4, 3, rngs=rngs), nnx.LoRA(4, 2, 3, rngs=rngs)
        self.rnn = nnx.RNN(nnx.LSTMCell(3, 3, rngs=rngs))

    def __call__(self, x):
        h = self.base(x) + self.lora(x)
        self.sow(nnx.Intermediate, "h", h)
        return self.rnn(h[None])[0]


def _sowing():
    model = _Sowing()
    return {"model": model, "optimizer": nnx.Optimizer(model, _adam, wrt=nnx.LoRAParam)}


@topic(Made(_sowing), normal(8, 4), wrt=())
def nnx_lora_with_sown_values_and_optimizer(state, x):
    model, optimizer = state["model"], state["optimizer"]
    loss, grads = nnx.value_and_grad(
        lambda m: jnp.mean(m(x) ** 2), argnums=nnx.DiffState(0, nnx.LoRAParam)
    )(model)
    optimizer.update(model, grads)
    return loss, nnx.pop(model, nnx.Intermediate), optimizer.step[...]
