"""Training steps whose locks tests/introspect/locks holds, as jax 0.10.2 made them:

python tests/introspect/locked_steps.py tests/introspect/locks
"""

import gzip
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx

from fnet import introspect, models
from fnet import layers as nn
from fnet import training as tr

KEY = jax.random.key(0)


def _array(*shape):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


def gpt():
    model = models.GPT(vocab_size=64, width=32, depth=3, heads=4, context=16)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, 17)), jnp.int32)
    params, _ = model.init(KEY, tokens[:, :-1])
    tx = optax.adamw(3e-4)

    def step(state, batch):
        def loss(params):
            return model.cross_entropy(params, batch[:, :-1], batch[:, 1:]).mean()

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply(tx, grads), {"loss": value}

    return step, tr.TrainState.create(params, tx), tokens


def resnet50():
    model = models.ResNet.preset("resnet50")
    images, labels = _array(2, 64, 64, 3), jnp.zeros(2, jnp.int32)
    params, state = model.init(KEY, images)
    tx = optax.sgd(0.1, momentum=0.9)

    def step(state, images, labels):
        def loss(params):
            logits, new = model(params, images, state=state.state, key=KEY, train=True)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return losses.mean(), new

        (value, new), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
        return state.apply(tx, grads, state=new), {"loss": value}

    return step, tr.TrainState.create(params, tx, state=state), images, labels


def lstm():
    model = nn.Sequential(rnn=nn.LSTM(8), head=nn.Dense(3))
    x = _array(2, 5, 4)

    def step(params, x):
        value, grads = jax.value_and_grad(lambda p: jnp.square(model(p, x)).mean())(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step, model.init(KEY, x)[0], x


class Classifier(nnx.Module):
    def __init__(self, rngs):
        self.fc = nnx.Linear(4, 8, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(0.2, rngs=rngs)
        self.head = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(self.drop(nnx.relu(self.norm(self.fc(x)))))


def nnx_step():
    model = Classifier(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    def step(model, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda model: jnp.square(model(x)).mean())(model)
        optimizer.update(model, grads)
        return loss

    return step, model, optimizer, _array(5, 4)


class Encoder(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.gelu(linen.LayerNorm()(linen.Dense(8)(x)))
        x = linen.MultiHeadDotProductAttention(num_heads=2)(x)
        return linen.softmax(linen.Dense(3)(x))


def linen_step():
    model, x = Encoder(), _array(2, 5, 4)

    def step(variables, x):
        return jax.value_and_grad(lambda v: jnp.log(model.apply(v, x)).mean())(variables)

    return step, model.init(KEY, x), x


STEPS = {
    "gpt": gpt,
    "resnet50": resnet50,
    "lstm": lstm,
    "nnx": nnx_step,
    "linen": linen_step,
}


def lock(name):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return introspect.lock(*STEPS[name]())


if __name__ == "__main__":
    for name in STEPS:
        text = lock(name).text.encode()
        Path(sys.argv[1], f"{name}.lock.gz").write_bytes(gzip.compress(text, mtime=0))
