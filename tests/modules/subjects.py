"""Modules of flax.nnx and Equinox, and training steps of them, as their own documentation writes
them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

FEATURES, ROWS = 6, 8
TX = optax.adam(1e-2)
SUBJECTS: dict[str, Subject] = {}


@dataclasses.dataclass(frozen=True)
class Subject:
    """What is transformed.

    Attributes:
        name: its name, which begins with "nnx module", "nnx step", "eqx model" or "eqx step".
        make: `make(key)` returns the arguments before the batch.
        f: `f(*arguments, batch)`, which returns outputs, or for a step what it returns by itself.
        carries: how many results are the next arguments.
    """

    name: str
    make: Callable
    f: Callable
    carries: int = 0

    @property
    def kind(self) -> str:
        return " ".join(self.name.split()[:2])

    @property
    def steps(self) -> bool:
        return self.kind.endswith("step")

    def after(self, arguments: tuple, result: Any) -> tuple:
        return result[: self.carries] if self.carries else arguments

    def outputs(self, result: Any) -> Any:
        return result[self.carries] if self.carries else result


def batch(i: int) -> np.ndarray:
    return np.random.default_rng(i).normal(size=(ROWS, FEATURES)).astype(np.float32)


def _add(name: str, make: Callable, f: Callable, carries: int = 0) -> None:
    SUBJECTS[name] = Subject(name, make, f, carries)


# flax.nnx


class Norm(nnx.Module):
    def __init__(self, rngs):
        # Without a bias, whose gradient is zero up to rounding, which Adam divides by itself.
        self.fc = nnx.Linear(FEATURES, 8, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(0.25, rngs=rngs)
        self.head = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(self.drop(nnx.relu(self.norm(self.fc(x)))))


class Recurrent(nnx.Module):
    def __init__(self, rngs):
        self.rnn = nnx.RNN(nnx.LSTMCell(FEATURES // 2, 4, rngs=rngs))
        self.head = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):  # two times
        return self.head(self.rnn(x.reshape(x.shape[0], 2, -1))[:, -1])


class Shared(nnx.Module):
    """A submodule with two names, and a parameter of one layer that another one shares."""

    def __init__(self, rngs):
        self.fc = nnx.Linear(FEATURES, FEATURES, rngs=rngs)
        self.again = self.fc
        self.tied = nnx.Linear(FEATURES, FEATURES, rngs=rngs)
        self.tied.kernel = self.fc.kernel

    def __call__(self, x):
        return self.tied(nnx.relu(self.again(self.fc(x))))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(FEATURES, rngs=rngs)
        self.fc = nnx.Linear(FEATURES, FEATURES, rngs=rngs)
        self.drop = nnx.Dropout(0.25, rngs=rngs)

    def __call__(self, x):
        return x + self.drop(nnx.relu(self.fc(self.norm(x))))


class Stacked(nnx.Module):
    def __init__(self, rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap
        def blocks(rngs):
            return Block(rngs)

        self.blocks = blocks(rngs)

    def __call__(self, x):
        @nnx.scan
        def deep(x, block):
            return block(x), None

        return deep(jnp.asarray(x), self.blocks)[0]


class Streams(nnx.Module):
    """Streams of random numbers that were forked, and several names in one `nnx.Rngs`."""

    def __init__(self, rngs):
        self.fc = nnx.Linear(FEATURES, 3, rngs=rngs)
        self.noise = rngs.noise.fork()
        self.rngs = rngs.fork()

    def __call__(self, x):
        noise = jax.random.normal(self.noise(), x.shape)
        mask = jax.random.bernoulli(self.rngs.mask(), 0.8, x.shape)
        return self.fc(jnp.where(mask, x + 0.1 * noise, 0.0))


class Seen(nnx.Variable):
    """A kind of variable that Flax does not know."""


class Custom(nnx.Module):
    def __init__(self, rngs):
        self.fc = nnx.Linear(FEATURES, 3, rngs=rngs)
        self.seen = Seen(jnp.zeros((), jnp.int32))
        self.largest = nnx.Dict(inputs=Seen(jnp.zeros(FEATURES)))

    def __call__(self, x):
        self.seen[...] += x.shape[0]
        self.largest["inputs"][...] = jnp.maximum(self.largest["inputs"][...], x.max(0))
        return self.fc(x / (1.0 + self.largest["inputs"][...][None]))


class Counting(nnx.Module):
    """A counter that is a Python number, not an array."""

    def __init__(self, rngs):
        self.fc = nnx.Linear(FEATURES, 3, rngs=rngs)
        self.calls = 0

    def __call__(self, x):
        self.calls += 1
        return self.fc(x)


NNX = {
    "norm": Norm,
    "rnn": Recurrent,
    "shared": Shared,
    "stacked": Stacked,
    "streams": Streams,
    "custom": Custom,
    "counting": Counting,
}


def _rngs(key):
    return nnx.Rngs(key, noise=jax.random.fold_in(key, 1), mask=2)


def _nnx_step(model, optimizer, batch):
    def loss(model):
        return jnp.square(model(batch) - 1.0).mean()

    value, grads = nnx.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    return {"loss": value}


def _measured_step(model, optimizer, metrics, batch):
    """As in Flax's tutorial: returns nothing, and updates metrics in place."""

    def loss(model):
        return jnp.square(model(batch) - 1.0).mean()

    value, grads = nnx.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    metrics.update(loss=value, mean=batch)


def _metrics():
    return nnx.MultiMetric(loss=nnx.metrics.Average("loss"), mean=nnx.metrics.Average("mean"))


def _functional_step(model, optimizer, batch):
    """Returns the modules as well."""
    metrics = _nnx_step(model, optimizer, batch)
    return model, optimizer, metrics


def _with_optimizer(cls):
    def make(key):
        model = cls(_rngs(key))
        return model, nnx.Optimizer(model, TX, wrt=nnx.Param)

    return make


for _name, _cls in NNX.items():
    _add(f"nnx module {_name}", lambda key, cls=_cls: (cls(_rngs(key)),), lambda model, x: model(x))
    _add(f"nnx step {_name}", _with_optimizer(_cls), _nnx_step)
_add(
    "nnx step metrics",
    lambda key: (*_with_optimizer(Norm)(key), _metrics()),
    _measured_step,
)
_add("nnx step returning", _with_optimizer(Norm), _functional_step, 2)
_add("nnx step jitted", _with_optimizer(Norm), nnx.jit(_nnx_step))


# Equinox


class Dense(eqx.Module):
    """Arrays, functions and options, Python numbers among them."""

    mlp: eqx.nn.MLP
    drop: eqx.nn.Dropout
    scale: float
    layers: int = eqx.field(static=True)

    def __init__(self, key):
        self.mlp = eqx.nn.MLP(FEATURES, 3, 8, 2, key=key)
        self.drop = eqx.nn.Dropout(0.25)
        self.scale = 0.5
        self.layers = 2

    def __call__(self, x, key=None):
        y = self.mlp(x)
        if self.scale > 0:  # an option, on which Python branches
            y = y * self.scale
        return self.drop(y, key=key, inference=key is None)


class Normed(eqx.Module):
    """Batch statistics and a counter, in an `eqx.nn.State`."""

    fc: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    calls: eqx.nn.StateIndex
    activation: Callable

    def __init__(self, key):
        self.fc = eqx.nn.Linear(FEATURES, 3, use_bias=False, key=key)
        self.norm = eqx.nn.BatchNorm(3, axis_name="batch", mode="ema")
        self.calls = eqx.nn.StateIndex(jnp.zeros((), jnp.int32))
        self.activation = jax.nn.relu

    def __call__(self, x, state):
        y, state = self.norm(self.fc(x), state)
        return self.activation(y), state.set(self.calls, state.get(self.calls) + 1)


class Tied(eqx.Module):
    """A layer with two names: `eqx.nn.Shared`."""

    shared: eqx.nn.Shared

    def __init__(self, key):
        first = eqx.nn.Linear(FEATURES, FEATURES, key=key)
        second = eqx.nn.Linear(FEATURES, FEATURES, key=jax.random.fold_in(key, 1))
        self.shared = eqx.nn.Shared(
            (first, second, jax.nn.relu), lambda m: m[1].weight, lambda m: m[0].weight
        )

    def __call__(self, x):
        first, second, activation = self.shared()
        return second(activation(first(x)))


class Deep(eqx.Module):
    """Layers that `eqx.filter_vmap` stacked, and a scan over them."""

    blocks: eqx.nn.MLP

    def __init__(self, key):
        def block(key):
            return eqx.nn.MLP(FEATURES, FEATURES, 8, 1, key=key)

        self.blocks = eqx.filter_vmap(block)(jax.random.split(key, 3))

    def __call__(self, x):
        arrays, static = eqx.partition(self.blocks, eqx.is_array)

        def turn(x, block):
            return x + eqx.combine(block, static)(x), None

        return jax.lax.scan(turn, x, arrays)[0]


def _batched(model, x):
    return jax.vmap(model)(x)


def _batched_with_keys(model, key, x):
    return jax.vmap(model)(x, jax.random.split(key, len(x)))


def _batched_with_state(model, state, x):
    run = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    return run(x, state)


def _updated(tx, model, grads, opt_state):
    updates, opt_state = tx.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
    return eqx.apply_updates(model, updates), opt_state


def _opt_state(model):
    return TX.init(eqx.filter(model, eqx.is_inexact_array))


def _eqx_step(model, opt_state, batch):
    def loss(model):
        return jnp.square(_batched(model, batch) - 1.0).mean()

    value, grads = eqx.filter_value_and_grad(loss)(model)
    return *_updated(TX, model, grads, opt_state), value


def _dropout_step(model, opt_state, key, batch):
    key, now = jax.random.split(key)

    def loss(model):
        return jnp.square(_batched_with_keys(model, now, batch) - 1.0).mean()

    value, grads = eqx.filter_value_and_grad(loss)(model)
    return *_updated(TX, model, grads, opt_state), key, value


def _stateful_step(model, state, opt_state, batch):
    def loss(model, state):
        y, state = _batched_with_state(model, state, batch)
        return jnp.square(y - 1.0).mean(), state

    (value, state), grads = eqx.filter_value_and_grad(loss, has_aux=True)(model, state)
    model, opt_state = _updated(TX, model, grads, opt_state)
    return model, state, opt_state, value


def _frozen_step(trainable, frozen, opt_state, batch):
    def loss(trainable):
        return jnp.square(_batched(eqx.combine(trainable, frozen), batch) - 1.0).mean()

    value, grads = eqx.filter_value_and_grad(loss)(trainable)
    return (
        *_updated(TX, trainable, grads, opt_state)[:1],
        frozen,
        *(_updated(TX, trainable, grads, opt_state)[1:]),
        value,
    )


def _frozen(key):
    model = eqx.nn.inference_mode(Dense(key))
    where = jax.tree.map(lambda _: False, model)
    where = eqx.tree_at(lambda m: m.mlp.layers[-1].weight, where, True)
    return eqx.partition(model, where)


def _stateful(key):
    return eqx.nn.make_with_state(Normed)(key)


EQX = {"dense": Dense, "tied": Tied, "deep": Deep}
for _name, _cls in EQX.items():
    _add(f"eqx model {_name}", lambda key, cls=_cls: (cls(key),), _batched)
    _add(
        f"eqx step {_name}",
        lambda key, cls=_cls: (lambda model: (model, _opt_state(model)))(cls(key)),
        _eqx_step,
        2,
    )
_add("eqx model dropout", lambda key: (Dense(key), jax.random.key(5)), _batched_with_keys)
_add("eqx model state", lambda key: _stateful(key), _batched_with_state)
_add("eqx model frozen", _frozen, lambda *parts: _batched(eqx.combine(*parts[:2]), parts[2]))
_add(
    "eqx step dropout",
    lambda key: (lambda model: (model, _opt_state(model), jax.random.key(5)))(Dense(key)),
    _dropout_step,
    3,
)
_add(
    "eqx step state",
    lambda key: (lambda model, state: (model, state, _opt_state(model)))(*_stateful(key)),
    _stateful_step,
    3,
)
_add(
    "eqx step frozen",
    lambda key: (lambda parts: (*parts, _opt_state(parts[0])))(_frozen(key)),
    _frozen_step,
    3,
)
_add(
    "eqx step jitted",
    lambda key: (lambda model: (model, _opt_state(model)))(Dense(key)),
    eqx.filter_jit(_eqx_step),
    2,
)


def arrays(tree: Any) -> dict[str, np.ndarray]:
    """The arrays of a tree with modules, by their paths, and the options of flax.nnx modules."""
    is_module = lambda x: isinstance(x, (nnx.Pytree, nnx.Variable))
    found = {}
    for path, x in jax.tree.leaves_with_path(tree, is_leaf=is_module):
        name = jax.tree_util.keystr(path)
        if not is_module(x):
            if hasattr(x, "dtype"):
                found[name] = _array(x)
            continue
        if isinstance(x, nnx.Variable):
            found[name] = _array(x.get_value())
            continue
        for inside, leaf in jax.tree.leaves_with_path(nnx.state(x)):
            found[name + jax.tree_util.keystr(inside)] = _array(leaf)
        for inside, node in nnx.iter_graph(x):
            if isinstance(node, Counting):
                found[f"{name}{inside} calls"] = np.int32(node.calls)
    return found


def _array(x):
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x)
