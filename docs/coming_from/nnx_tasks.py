"""Twenty tasks in Flax nnx."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

x, y = np.ones((32, 8), np.float32), np.arange(32) % 3
images = np.ones((4, 28, 28, 1), np.float32)


# %% Define a model
class MLP(nnx.Module):
    def __init__(self, inputs, hidden, classes=3, *, dtype=None, rngs):
        self.fc = nnx.Linear(inputs, hidden, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(hidden, classes, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.fc(x)))


model = MLP(8, 16, rngs=nnx.Rngs(0))

# %% Create the parameters
model = MLP(8, 16, rngs=nnx.Rngs(0))  # the constructor creates the parameters
kernel = model.fc.kernel  # [8, 16]

# %% Apply the model
logits = model(x)

# %% Count the parameters
count = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))

# %% Choose initializers
dense = nnx.Linear(
    8,
    16,
    kernel_init=nnx.initializers.he_normal(),
    bias_init=nnx.initializers.constant(0.1),
    rngs=nnx.Rngs(0),
)

# %% Write a network as a sequence
rngs = nnx.Rngs(0)
cnn = nnx.Sequential(
    nnx.Conv(1, 16, (3, 3), rngs=rngs),
    nnx.relu,
    lambda x: nnx.max_pool(x, (2, 2), (2, 2)),
    lambda x: x.reshape(len(x), -1),
    nnx.Linear(16 * 14 * 14, 10, rngs=rngs),
)
cnn_logits = cnn(images)

# %% Use dropout
dropout = nnx.Sequential(nnx.Linear(8, 16, rngs=rngs), nnx.Dropout(0.5, rngs=rngs))
dropout.train()
noisy = dropout(x)  # uses the module's own random stream
dropout.eval()
exact = dropout(x)

# %% Use batch normalization
normed = nnx.Sequential(nnx.Linear(8, 16, rngs=rngs), nnx.BatchNorm(16, rngs=rngs))
normed.train()
out = normed(x)  # updates the statistics in place
normed.eval()
out = normed(x)


# %% Write a layer with a parameter
class Scale(nnx.Module):
    def __init__(self, features):
        self.scale = nnx.Param(jnp.ones(features))

    def __call__(self, x):
        return x * self.scale[...]


# %% Share weights
class Autoencoder(nnx.Module):
    def __init__(self, width, *, rngs):
        self.shared = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, x):
        return self.shared(self.shared(x))


# %% Repeat a block
class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm, self.fc = nnx.LayerNorm(8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return x + nnx.relu(self.fc(self.norm(x)))


@nnx.split_rngs(splits=12)
@nnx.vmap
def blocks(rngs):
    return Block(rngs)


@nnx.scan
def deep(x, block):
    return block(x), None


out, _ = deep(jnp.asarray(x), blocks(nnx.Rngs(0)))


# %% Compute a loss and its gradient
def loss(model, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()


value, grads = nnx.value_and_grad(loss)(model, x, y)

# %% Write a training step
optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)


@nnx.jit
def step(model, optimizer, x, y):
    value, grads = nnx.value_and_grad(loss)(model, x, y)
    optimizer.update(model, grads)  # updates the model in place
    return value


value = step(model, optimizer, x, y)

# %% Use a schedule and clip gradients
schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 10, 100)
scheduled = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))

# %% Train with a ready-made loop
# Flax itself contains no training loop.
for epoch in range(2):
    for rows in np.random.default_rng(epoch).permutation(32).reshape(4, 8):
        value = step(model, optimizer, x[rows], y[rows])

# %% Freeze a part of the model
in_head = nnx.All(nnx.Param, nnx.PathContains("head"))
partial = nnx.Optimizer(model, optax.adamw(1e-3), wrt=in_head)
value, grads = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, in_head))(model, x, y)

# %% Train in mixed precision
mixed = MLP(8, 16, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))  # MLP passes dtype to its layers
logits = mixed(x)

# %% Save and load
# To write the state to files, use Orbax.
graph, state = nnx.split(model)
restored = nnx.merge(graph, state)

# %% Read an activation
# Call the submodule directly, or store the activation with `self.sow`.
hidden = model.fc(x)

# %% Train on all devices
mesh = Mesh(np.array(jax.devices()), ("data",))
nnx.update(model, jax.device_put(nnx.state(model), NamedSharding(mesh, P())))
nnx.update(optimizer, jax.device_put(nnx.state(optimizer), NamedSharding(mesh, P())))
batch = jax.device_put((x, y), NamedSharding(mesh, P("data")))
value = step(model, optimizer, *batch)
