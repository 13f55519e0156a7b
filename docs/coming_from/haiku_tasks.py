"""Twenty tasks in Haiku."""

import pickle

import haiku as hk
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

x, y = np.ones((32, 8), np.float32), np.arange(32) % 3
images = np.ones((4, 28, 28, 1), np.float32)


# %% Define a model
class MLP(hk.Module):
    def __init__(self, hidden, classes=3):
        super().__init__()
        self.hidden, self.classes = hidden, classes

    def __call__(self, x):
        x = jax.nn.relu(hk.Linear(self.hidden, name="fc")(x))
        return hk.Linear(self.classes, name="head")(x)


model = hk.without_apply_rng(hk.transform(lambda x: MLP(16)(x)))

# %% Create the parameters
params = model.init(jax.random.key(0), x)
kernel = params["mlp/fc"]["w"]  # [8, 16]

# %% Apply the model
logits = model.apply(params, x)

# %% Count the parameters
count = hk.data_structures.tree_size(params)

# %% Choose initializers
dense = hk.transform(
    lambda x: hk.Linear(
        16, w_init=hk.initializers.VarianceScaling(2.0), b_init=hk.initializers.Constant(0.1)
    )(x)
)

# %% Write a network as a sequence
cnn = hk.without_apply_rng(
    hk.transform(
        lambda x: hk.Sequential(
            [
                hk.Conv2D(16, 3),
                jax.nn.relu,
                hk.MaxPool(2, 2, "VALID", channel_axis=-1),
                hk.Flatten(),
                hk.Linear(10),
            ]
        )(x)
    )
)
cnn_params = cnn.init(jax.random.key(0), images)
cnn_logits = cnn.apply(cnn_params, images)


# %% Use dropout
def dropped(x, train=False):
    x = hk.Linear(16)(x)
    return hk.dropout(hk.next_rng_key(), 0.5, x) if train else x


dropout = hk.transform(dropped)
dropout_params = dropout.init(jax.random.key(0), x)
noisy = dropout.apply(dropout_params, jax.random.key(1), x, train=True)
exact = dropout.apply(dropout_params, None, x)

# %% Use batch normalization
normed = hk.without_apply_rng(
    hk.transform_with_state(lambda x, train: hk.BatchNorm(True, True, 0.9)(hk.Linear(16)(x), train))
)
normed_params, stats = normed.init(jax.random.key(0), x, True)
out, stats = normed.apply(normed_params, stats, x, True)
out, _ = normed.apply(normed_params, stats, x, False)


# %% Write a layer with a parameter
class Scale(hk.Module):
    def __call__(self, x):
        scale = hk.get_parameter("scale", (x.shape[-1],), init=jnp.ones)
        return x * scale


# %% Share weights
def autoencoder(x, width):
    dense = hk.Linear(width, name="shared")
    return dense(dense(x))  # one module, called twice


# %% Repeat a block
def block(x):
    return x + jax.nn.relu(hk.Linear(8)(hk.LayerNorm(-1, True, True)(x)))


deep = hk.without_apply_rng(hk.transform(lambda x: hk.layer_stack(12)(block)(x)))
deep_params = deep.init(jax.random.key(0), x)


# %% Compute a loss and its gradient
def loss(params, x, y):
    logits = model.apply(params, x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


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
# Haiku itself contains no training loop.
for epoch in range(2):
    for rows in np.random.default_rng(epoch).permutation(32).reshape(4, 8):
        params, opt_state, value = step(params, opt_state, x[rows], y[rows])

# %% Freeze a part of the model
trainable, frozen = hk.data_structures.partition(
    lambda module, name, value: "head" in module, params
)
grads = jax.grad(lambda trainable: loss(hk.data_structures.merge(trainable, frozen), x, y))(
    trainable
)

# %% Train in mixed precision
policy = jmp.get_policy("params=float32,compute=bfloat16,output=float32")
hk.mixed_precision.set_policy(MLP, policy)  # for one class of modules
logits = model.apply(params, x)
hk.mixed_precision.clear_policy(MLP)

# %% Save and load
# Haiku has no file format. A pickle file from an untrusted source can run any code.
with open("params.pickle", "wb") as file:
    pickle.dump(jax.device_get(params), file)

# %% Read an activation
values = {}


def keep(call, args, kwargs, context):
    values[context.module.module_name] = result = call(*args, **kwargs)
    return result


with hk.intercept_methods(keep):
    logits = model.apply(params, x)
hidden = values["mlp/fc"]

# %% Train on all devices
mesh = Mesh(np.array(jax.devices()), ("data",))
params, opt_state = jax.device_put((params, opt_state), NamedSharding(mesh, P()))
batch = jax.device_put((x, y), NamedSharding(mesh, P("data")))
params, opt_state, value = step(params, opt_state, *batch)
