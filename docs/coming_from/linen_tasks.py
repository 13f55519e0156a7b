"""Twenty tasks in Flax linen."""

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

x, y = np.ones((32, 8), np.float32), np.arange(32) % 3
images = np.ones((4, 28, 28, 1), np.float32)


# %% Define a model
class MLP(nn.Module):
    hidden: int
    classes: int = 3
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(self.hidden, self.dtype, name="fc")(x))
        return nn.Dense(self.classes, self.dtype, name="head")(x)


model = MLP(16)

# %% Create the parameters
variables = model.init(jax.random.key(0), x)
kernel = variables["params"]["fc"]["kernel"]  # [8, 16]

# %% Apply the model
logits = model.apply(variables, x)

# %% Count the parameters
count = sum(leaf.size for leaf in jax.tree.leaves(variables["params"]))

# %% Choose initializers
dense = nn.Dense(
    16, kernel_init=nn.initializers.he_normal(), bias_init=nn.initializers.constant(0.1)
)

# %% Write a network as a sequence
cnn = nn.Sequential(
    [
        nn.Conv(16, (3, 3)),
        nn.relu,
        lambda x: nn.max_pool(x, (2, 2), (2, 2)),
        lambda x: x.reshape(len(x), -1),
        nn.Dense(10),
    ]
)
cnn_variables = cnn.init(jax.random.key(0), images)
cnn_logits = cnn.apply(cnn_variables, images)


# %% Use dropout
class Dropped(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        return nn.Dropout(0.5, deterministic=not train)(nn.Dense(16)(x))


dropped = Dropped().init(jax.random.key(0), x)
noisy = Dropped().apply(dropped, x, train=True, rngs={"dropout": jax.random.key(1)})
exact = Dropped().apply(dropped, x)


# %% Use batch normalization
class Normed(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        return nn.BatchNorm(use_running_average=not train)(nn.Dense(16)(x))


normed = Normed().init(jax.random.key(0), x)
out, changes = Normed().apply(normed, x, train=True, mutable=["batch_stats"])
out = Normed().apply({**normed, **changes}, x)


# %% Write a layer with a parameter
class Scale(nn.Module):
    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        return x * scale


# %% Share weights
class Autoencoder(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x):
        dense = nn.Dense(self.width, name="shared")
        return dense(dense(x))  # one module, called twice


# %% Repeat a block
class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.relu(nn.Dense(8)(nn.LayerNorm()(x))), None


deep = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=12)()
deep_variables = deep.init(jax.random.key(0), x, None)


# %% Compute a loss and its gradient
def loss(params, x, y):
    logits = model.apply({"params": params}, x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


params = variables["params"]
value, grads = jax.value_and_grad(loss)(params, x, y)

# %% Write a training step
tx = optax.adamw(1e-3)
opt_state = tx.init(params)


@jax.jit
def step(params, opt_state, x, y):
    value, grads = jax.value_and_grad(loss)(params, x, y)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, value


params, opt_state, value = step(params, opt_state, x, y)

# %% Use a schedule and clip gradients
schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 10, 100)
scheduled = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))

# %% Train with a ready-made loop
# Flax itself contains no training loop.
for epoch in range(2):
    for rows in np.random.default_rng(epoch).permutation(32).reshape(4, 8):
        params, opt_state, value = step(params, opt_state, x[rows], y[rows])

# %% Freeze a part of the model
labels = flax.traverse_util.path_aware_map(
    lambda path, _: "train" if path[0] == "head" else "freeze", params
)
partial = optax.multi_transform({"train": optax.adamw(1e-3), "freeze": optax.set_to_zero()}, labels)

# %% Train in mixed precision
mixed = MLP(16, dtype=jnp.bfloat16)  # MLP passes dtype to its layers
logits = mixed.apply({"params": params}, x)

# %% Save and load
data = flax.serialization.to_bytes({"params": params, "opt_state": opt_state})
restored = flax.serialization.from_bytes({"params": params, "opt_state": opt_state}, data)

# %% Read an activation
logits, captured = model.apply({"params": params}, x, capture_intermediates=True)
hidden = captured["intermediates"]["fc"]["__call__"][0]

# %% Train on all devices
mesh = Mesh(np.array(jax.devices()), ("data",))
params, opt_state = jax.device_put((params, opt_state), NamedSharding(mesh, P()))
batch = jax.device_put((x, y), NamedSharding(mesh, P("data")))
params, opt_state, value = step(params, opt_state, *batch)
