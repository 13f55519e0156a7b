"""Twenty tasks in Keras 3, with the JAX backend."""

import jax
import keras
import numpy as np
from keras import layers

x, y = np.ones((32, 8), np.float32), np.arange(32) % 3
images = np.ones((4, 28, 28, 1), np.float32)


# %% Define a model
class MLP(keras.Model):
    def __init__(self, hidden, classes=3):
        super().__init__()
        self.fc = layers.Dense(hidden, activation="relu")
        self.head = layers.Dense(classes)

    def call(self, x):
        return self.head(self.fc(x))


model = MLP(16)

# %% Create the parameters
keras.utils.set_random_seed(0)
logits = model(x)  # the first call creates the parameters
kernel = model.fc.kernel  # [8, 16]

# %% Apply the model
logits = model(x)

# %% Count the parameters
count = model.count_params()

# %% Choose initializers
dense = layers.Dense(
    16, kernel_initializer="he_normal", bias_initializer=keras.initializers.Constant(0.1)
)

# %% Write a network as a sequence
cnn = keras.Sequential(
    [
        layers.Conv2D(16, 3, padding="same", activation="relu"),
        layers.MaxPooling2D(2),
        layers.Flatten(),
        layers.Dense(10),
    ]
)
cnn_logits = cnn(images)  # channels last

# %% Use dropout
dropout = keras.Sequential([layers.Dense(16), layers.Dropout(0.5)])
noisy = dropout(x, training=True)
exact = dropout(x)

# %% Use batch normalization
normed = keras.Sequential([layers.Dense(16), layers.BatchNormalization()])
out = normed(x, training=True)  # updates the statistics in place
out = normed(x)


# %% Write a layer with a parameter
class Scale(layers.Layer):
    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x):
        return x * self.scale


# %% Share weights
shared = layers.Dense(8)
inputs = keras.Input((8,))
autoencoder = keras.Model(inputs, shared(shared(inputs)))

# %% Repeat a block
outputs = inputs = keras.Input((8,))
for _ in range(12):
    outputs = outputs + layers.Dense(8, activation="relu")(layers.LayerNormalization()(outputs))
deep = keras.Model(inputs, outputs)

# %% Compute a loss and its gradient
# With the JAX backend, `stateless_call` is a pure function.
cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def loss(trainable, frozen, x, y):
    logits, _ = model.stateless_call(trainable, frozen, x)
    return cross_entropy(y, logits)


trainable = [v.value for v in model.trainable_variables]
frozen = [v.value for v in model.non_trainable_variables]
value, grads = jax.value_and_grad(loss)(trainable, frozen, x, y)

# %% Write a training step
optimizer = keras.optimizers.AdamW(1e-3)
optimizer.build(model.trainable_variables)
opt_state = [v.value for v in optimizer.variables]


@jax.jit
def step(trainable, opt_state, x, y):
    value, grads = jax.value_and_grad(loss)(trainable, frozen, x, y)
    trainable, opt_state = optimizer.stateless_apply(opt_state, grads, trainable)
    return trainable, opt_state, value


trainable, opt_state, value = step(trainable, opt_state, x, y)

# %% Use a schedule and clip gradients
schedule = keras.optimizers.schedules.CosineDecay(0.0, 90, warmup_target=1e-2, warmup_steps=10)
optimizer = keras.optimizers.AdamW(schedule, global_clipnorm=1.0)

# %% Train with a ready-made loop
model.compile(optimizer, cross_entropy, metrics=["accuracy"])
history = model.fit(x, y, batch_size=8, epochs=2, verbose=0)

# %% Freeze a part of the model
model.fc.trainable = False
model.compile(optimizer, cross_entropy)  # compile again, so that it takes effect

# %% Train in mixed precision
keras.config.set_dtype_policy("mixed_bfloat16")  # set it before you create the model
mixed = MLP(16)
keras.config.set_dtype_policy("float32")

# %% Save and load
model.save_weights("model.weights.h5")
model.load_weights("model.weights.h5")

# %% Read an activation
hidden = model.fc(x)  # or, for a functional model: keras.Model(inputs, layer.output)

# %% Train on all devices
keras.distribution.set_distribution(keras.distribution.DataParallel())
model = MLP(16)
model.compile("adamw", cross_entropy)
model.fit(x, y, batch_size=16, verbose=0)
