"""Twenty tasks in Equinox."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

x, y = np.ones((32, 8), np.float32), np.arange(32) % 3
images = np.ones((4, 1, 28, 28), np.float32)


# %% Define a model
class MLP(eqx.Module):
    fc: eqx.nn.Linear
    head: eqx.nn.Linear

    def __init__(self, inputs, hidden, classes=3, *, key):
        first, second = jax.random.split(key)
        self.fc = eqx.nn.Linear(inputs, hidden, key=first)
        self.head = eqx.nn.Linear(hidden, classes, key=second)

    def __call__(self, x):  # [features]: one example
        return self.head(jax.nn.relu(self.fc(x)))


model = MLP(8, 16, key=jax.random.key(0))

# %% Create the parameters
model = MLP(8, 16, key=jax.random.key(0))  # the constructor creates the parameters
kernel = model.fc.weight  # [16, 8], transposed

# %% Apply the model
logits = jax.vmap(model)(x)

# %% Count the parameters
count = sum(leaf.size for leaf in jax.tree.leaves(eqx.filter(model, eqx.is_array)))

# %% Choose initializers
dense = eqx.nn.Linear(8, 16, key=jax.random.key(0))
weight = jax.nn.initializers.he_normal(in_axis=1, out_axis=0)(jax.random.key(0), (16, 8))
dense = eqx.tree_at(lambda d: (d.weight, d.bias), dense, (weight, jnp.full(16, 0.1)))

# %% Write a network as a sequence
first, second = jax.random.split(jax.random.key(0))
cnn = eqx.nn.Sequential(
    [
        eqx.nn.Conv2d(1, 16, 3, padding=1, key=first),
        eqx.nn.Lambda(jax.nn.relu),
        eqx.nn.MaxPool2d(2, 2),
        eqx.nn.Lambda(jnp.ravel),
        eqx.nn.Linear(16 * 14 * 14, 10, key=second),
    ]
)
cnn_logits = jax.vmap(cnn)(images)  # channels first

# %% Use dropout
dropout = eqx.nn.Sequential([eqx.nn.Linear(8, 16, key=first), eqx.nn.Dropout(0.5)])
keys = jax.random.split(jax.random.key(1), len(x))
noisy = jax.vmap(lambda row, key: dropout(row, key=key))(x, keys)
exact = jax.vmap(eqx.nn.inference_mode(dropout))(x)

# %% Use batch normalization
linear, norm = (
    eqx.nn.Linear(8, 16, key=first),
    eqx.nn.BatchNorm(16, axis_name="batch", mode="batch"),
)
stats = eqx.nn.State(norm)
batched = jax.vmap(
    lambda row, stats: norm(linear(row), stats),
    axis_name="batch",
    in_axes=(0, None),
    out_axes=(0, None),
)
out, stats = batched(jnp.asarray(x), stats)


# %% Write a layer with a parameter
class Scale(eqx.Module):
    scale: jax.Array

    def __init__(self, features):
        self.scale = jnp.ones(features)

    def __call__(self, x):
        return x * self.scale


# %% Share weights
class Autoencoder(eqx.Module):
    shared: eqx.nn.Linear

    def __call__(self, x):
        return self.shared(self.shared(x))


# %% Repeat a block
class Block(eqx.Module):
    norm: eqx.nn.LayerNorm
    fc: eqx.nn.Linear

    def __init__(self, key):
        self.norm, self.fc = eqx.nn.LayerNorm(8), eqx.nn.Linear(8, 8, key=key)

    def __call__(self, x):
        return x + jax.nn.relu(self.fc(self.norm(x)))


blocks = eqx.filter_vmap(Block)(jax.random.split(jax.random.key(0), 12))
arrays, static = eqx.partition(blocks, eqx.is_array)


def deep(x):
    return jax.lax.scan(lambda x, block: (eqx.combine(block, static)(x), None), x, arrays)[0]


# %% Compute a loss and its gradient
def loss(model, x, y):
    logits = jax.vmap(model)(x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


value, grads = eqx.filter_value_and_grad(loss)(model, x, y)

# %% Write a training step
tx = optax.adamw(1e-3)
opt_state = tx.init(eqx.filter(model, eqx.is_array))


@eqx.filter_jit
def step(model, opt_state, x, y):
    value, grads = eqx.filter_value_and_grad(loss)(model, x, y)
    updates, opt_state = tx.update(grads, opt_state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), opt_state, value


model, opt_state, value = step(model, opt_state, x, y)

# %% Use a schedule and clip gradients
schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 10, 100)
scheduled = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))

# %% Train with a ready-made loop
# Equinox itself contains no training loop.
for epoch in range(2):
    for rows in np.random.default_rng(epoch).permutation(32).reshape(4, 8):
        model, opt_state, value = step(model, opt_state, x[rows], y[rows])

# %% Freeze a part of the model
where = jax.tree.map(lambda _: False, model)
where = eqx.tree_at(lambda m: (m.head.weight, m.head.bias), where, (True, True))
trainable, frozen = eqx.partition(model, where)
grads = eqx.filter_grad(lambda trainable: loss(eqx.combine(trainable, frozen), x, y))(trainable)

# %% Train in mixed precision
cast = lambda leaf: leaf.astype(jnp.bfloat16) if eqx.is_inexact_array(leaf) else leaf
low = jax.tree.map(cast, model)  # inside the loss
logits = jax.vmap(low)(x.astype(jnp.bfloat16))

# %% Save and load
eqx.tree_serialise_leaves("model.eqx", model)
restored = eqx.tree_deserialise_leaves("model.eqx", like=model)

# %% Read an activation
hidden = jax.vmap(model.fc)(x)

# %% Train on all devices
mesh = Mesh(np.array(jax.devices()), ("data",))
model, opt_state = eqx.filter_shard((model, opt_state), NamedSharding(mesh, P()))
batch = eqx.filter_shard((jnp.asarray(x), jnp.asarray(y)), NamedSharding(mesh, P("data")))
model, opt_state, value = step(model, opt_state, *batch)
