"""The models in Keras on JAX, with the jitted stateless step from Keras' guide to training loops.

With mixed precision, the global policy is `mixed_bfloat16`.
"""

from __future__ import annotations

import os

os.environ["KERAS_BACKEND"] = "jax"

import jax
import jax.numpy as jnp
import keras
from keras import layers, ops

from benchmarks.peers import _steps
from benchmarks.peers import _workloads as spec


def build(workload, weights, batches, *, train, mixed):
    return Run(workload, weights, batches, train=train, mixed=mixed)


class Run(_steps.Run):
    """Runs the steps of a Keras model, with the methods of `_steps.Run`."""

    def __init__(self, workload, weights, batches, *, train, mixed):
        keras.mixed_precision.set_global_policy("mixed_bfloat16" if mixed else "float32")
        self.batches = [(jnp.asarray(x), jnp.asarray(y)) for x, y in batches]
        x = batches[0][0]
        inputs = keras.Input(x.shape[1:], dtype=str(x.dtype))
        model = keras.Model(inputs, MODELS[type(workload)](workload, inputs))
        _fill(model, weights)
        self.train = train
        values = lambda variables: [jnp.array(variable.value) for variable in variables]
        self.state = values(model.trainable_variables), values(model.non_trainable_variables)
        if train:
            optimizer = keras.optimizers.AdamW(
                spec.LEARNING_RATE, weight_decay=spec.WEIGHT_DECAY, epsilon=1e-8
            )
            optimizer.build(model.trainable_variables)
            self.state = *self.state, values(optimizer.variables)
            self.f = jax.jit(_training(model, optimizer), donate_argnums=0)
        else:
            self.f = jax.jit(lambda state, x: model.stateless_call(*state, x, training=False)[0])


def _training(model, optimizer):
    cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def loss(params, stats, x, y):
        logits, stats = model.stateless_call(params, stats, x, training=True)
        return cross_entropy(y, ops.cast(logits, "float32")), stats

    def step(state, x, y):
        params, stats, opt_state = state
        (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(params, stats, x, y)
        params, opt_state = optimizer.stateless_apply(opt_state, grads, params)
        return (params, stats, opt_state), value

    return step


NAMES = {
    "gamma": "scale",
    "beta": "bias",
    "moving_mean": "mean",
    "moving_variance": "var",
    "embeddings": "embedding",
    "attention_output": "out",
}


def _fill(model, weights):
    """Copies the weights into the model by name. The weights of a layer block0__attn are at
    block0/attn, because names in Keras must not contain "/"."""
    left = dict(weights)
    for variable in model.variables:
        if "seed_generator" in variable.path:
            continue
        names = variable.path.replace("__", "/").replace("/lstm_cell", "").split("/")
        variable.assign(
            left.pop("/".join(NAMES.get(name, name) for name in names)).reshape(variable.shape)
        )
    if left:
        raise ValueError(f"weights that the model does not have: {sorted(left)}")


def _mlp(w, x):  # [batch, features]
    for i, width in enumerate(w.widths[1:]):
        x = layers.Dense(width, name=f"dense{i}")(ops.relu(x) if i else x)
    return x


def _cnn(w, x):  # [batch, height, width, channels]
    i = 0
    for stage in w.stages:
        for channels in stage:
            x = layers.Conv2D(channels, 3, padding="same", activation="relu", name=f"conv{i}")(x)
            i += 1
        x = layers.MaxPooling2D(2)(x)
    return layers.Dense(w.classes, name="head")(layers.GlobalAveragePooling2D()(x))


class Position(layers.Layer):
    """Adds a learned vector for each position."""

    def build(self, shape):
        self.embedding = self.add_weight(shape=shape[1:], name="embedding")

    def call(self, x):  # [batch, time, width]
        return x + self.embedding


def _block(name, x, heads, bias, causal):  # [batch, time, width]
    width = x.shape[-1]
    norm = lambda y, name: layers.LayerNormalization(epsilon=spec.EPSILON, center=bias, name=name)(
        y
    )
    y = norm(x, f"{name}__norm1")
    y = layers.MultiHeadAttention(heads, width // heads, use_bias=bias, name=f"{name}__attn")(
        y, y, use_causal_mask=causal
    )
    x = x + y
    y = layers.Dense(4 * width, use_bias=bias, name=f"{name}__up")(norm(x, f"{name}__norm2"))
    return x + layers.Dense(width, use_bias=bias, name=f"{name}__down")(
        ops.gelu(y, approximate=True)
    )


def _gpt(w, tokens):  # [batch, time]
    embed = layers.ReversibleEmbedding(w.vocab, w.width, name="token")
    x = Position(name="position")(embed(tokens))  # [batch, time, width]
    for i in range(w.depth):
        x = _block(f"block{i}", x, w.heads, w.bias, True)
    x = layers.LayerNormalization(epsilon=spec.EPSILON, center=w.bias, name="norm")(x)
    return embed(x, reverse=True)  # [batch, time, vocab]


def _vit(w, x):  # [batch, height, width, channels]
    x = layers.Conv2D(w.width, w.patch, w.patch, name="patch")(x)
    x = Position(name="position")(layers.Reshape((-1, w.width))(x))  # [batch, tokens, width]
    for i in range(w.depth):
        x = _block(f"block{i}", x, w.heads, True, False)
    x = layers.LayerNormalization(epsilon=spec.EPSILON, name="norm")(x)
    return layers.Dense(w.classes, name="head")(layers.GlobalAveragePooling1D()(x))


def _conv_norm(x, channels, window, stride, conv, norm):  # [batch, height, width, channels]
    if window // 2 and stride > 1:  # with a stride, "same" may pad only one side
        x = layers.ZeroPadding2D(window // 2)(x)
    padding = "same" if stride == 1 else "valid"
    x = layers.Conv2D(channels, window, stride, padding=padding, use_bias=False, name=conv)(x)
    return layers.BatchNormalization(momentum=0.9, epsilon=spec.EPSILON, name=norm)(x)


def _resnet(w, x):  # [batch, height, width, channels]
    x = ops.relu(_conv_norm(x, w.width, *((7, 2) if w.photos else (3, 1)), "stem", "stem_norm"))
    if w.photos:
        x = layers.MaxPooling2D(3, 2)(
            layers.ZeroPadding2D(1)(x)
        )  # after a ReLU, 0 is equivalent to -inf
    for i, (before, width, out, stride) in enumerate(w.blocks()):
        convs = (
            [(width, 1, 1), (width, 3, stride), (out, 1, 1)]
            if w.bottleneck
            else [(width, 3, stride), (out, 3, 1)]
        )
        y = x
        for j, sizes in enumerate(convs, 1):
            y = _conv_norm(y, *sizes, f"block{i}__conv{j}", f"block{i}__norm{j}")
            y = ops.relu(y) if j < len(convs) else y
        if before != out or stride != 1:
            x = _conv_norm(x, out, 1, stride, f"block{i}__shortcut", f"block{i}__shortcut_norm")
        x = ops.relu(x + y)
    return layers.Dense(w.classes, name="head")(layers.GlobalAveragePooling2D()(x))


def _lstm(w, tokens):  # [batch, time]
    x = layers.Embedding(w.vocab, w.width, name="token")(tokens)
    for i in range(w.depth):
        x = layers.LSTM(w.width, return_sequences=True, name=f"lstm{i}")(x)
    return layers.Dense(w.vocab, name="head")(x)  # [batch, time, vocab]


MODELS = {
    spec.MLP: _mlp,
    spec.CNN: _cnn,
    spec.GPT: _gpt,
    spec.ViT: _vit,
    spec.ResNet: _resnet,
    spec.LSTM: _lstm,
}
