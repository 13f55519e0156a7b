"""Twenty tasks in fnet. The pages in this folder show the same tasks in other libraries beside this
code."""

import jax
import numpy as np
import optax

from fnet import layers as nn
from fnet import parallel
from fnet import training as tr
from fnet import transforms as ft

x, y = np.ones((32, 8), np.float32), np.arange(32) % 3
images = np.ones((4, 28, 28, 1), np.float32)


# %% Define a model
class MLP(nn.Layer):
    hidden: int
    classes: int = 3

    def forward(self, scope, x):  # [batch, features]
        x = jax.nn.relu(nn.Dense(self.hidden)(scope["fc"], x))
        return nn.Dense(self.classes)(scope["head"], x)


model = MLP(16)

# %% Create the parameters
params, state = model.init(jax.random.key(0), x)
kernel = params["fc"]["kernel"]  # [8, 16]

# %% Apply the model
logits = model(params, x)  # [32, 3]

# %% Count the parameters
count = nn.count_parameters(params)

# %% Choose initializers
dense = nn.Dense(
    16, kernel_init=jax.nn.initializers.he_normal(), bias_init=jax.nn.initializers.constant(0.1)
)

# %% Write a network as a sequence
cnn = nn.Sequential(nn.Conv(16, 3), jax.nn.relu, nn.MaxPool(2), nn.Flatten(), head=nn.Dense(10))
cnn_params, _ = cnn.init(jax.random.key(0), images)
cnn_logits = cnn(cnn_params, images)  # channels last

# %% Use dropout
dropout = nn.Sequential(nn.Dense(16), nn.Dropout(0.5))
dropout_params, _ = dropout.init(jax.random.key(0), x)
noisy, _ = dropout(dropout_params, x, state={}, key=jax.random.key(1), train=True)
exact = dropout(dropout_params, x)

# %% Use batch normalization
normed = nn.Sequential(nn.Dense(16), nn.BatchNorm())
normed_params, stats = normed.init(jax.random.key(0), x)
out, stats = normed(normed_params, x, state=stats, train=True)
out, _ = normed(normed_params, x, state=stats)


# %% Write a layer with a parameter
class Scale(nn.Layer):
    def forward(self, scope, x):
        scale = scope.param("scale", (x.shape[-1],), jax.nn.initializers.ones)
        return x * scale


# %% Share weights
@nn.layer
def autoencoder(scope, x, *, width):
    dense, shared = nn.Dense(width), scope["shared"]
    return dense(shared, dense(shared, x))  # both calls use the same scope


# %% Repeat a block
block = nn.Residual(nn.LayerNorm(), nn.Dense(8), jax.nn.relu)
deep = nn.Stack(block, 12)  # a scan, so the block is compiled once
deep_params, _ = deep.init(jax.random.key(0), x)
assert nn.count_parameters(deep_params) == 12 * (8 * 8 + 3 * 8)


# %% Compute a loss and its gradient
def loss(params, x, y):
    logits = model(params, x)
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
trained = tr.train(
    model,
    tr.Batches((x, y), batch_size=8),
    optax.softmax_cross_entropy_with_integer_labels,
    scheduled,
    epochs=2,
    metrics={"accuracy": lambda logits, y: logits.argmax(-1) == y},
)

# %% Freeze a part of the model
trainable, frozen = nn.partition(params, ["head"])
grads = jax.grad(lambda trainable: loss(nn.combine(trainable, frozen), x, y))(trainable)

# %% Train in mixed precision
gradient = ft.autocast(jax.value_and_grad(loss), "bfloat16")
value, grads = gradient(params, x, y)  # gradients stay float32

# %% Save and load
checkpoints = tr.Checkpoints("checkpoints")
checkpoints.save(1, {"params": params, "opt_state": opt_state})
checkpoints.wait()
restored = checkpoints.restore({"params": params, "opt_state": opt_state})

# %% Read an activation
logits, values = ft.capture(model, "fc")(params, x)
hidden = values["fc"]  # [32, 16]


# %% Train on all devices
def init(key):
    params, _ = model.init(key, x)
    return {"params": params, "opt_state": tx.init(params)}


def update(state, batch):
    value, grads = jax.value_and_grad(loss)(state["params"], batch["x"], batch["y"])
    updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, value


plan = parallel.plan(update, init, {"x": x, "y": y})
state = plan.init(jax.random.key(0))
state, value = plan.jit(update)(state, {"x": x, "y": y})
