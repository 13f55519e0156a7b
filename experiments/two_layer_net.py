"""One two-layer network, written in three versions: by hand, with `grad`, and with layers and
Optax.

    python experiments/two_layer_net.py

The network classifies scans of handwritten digits:

    hidden = sigmoid(x @ w1 + b1)       x [batch, 64],   w1 [64, width],   b1 [width]
    logits = hidden @ w2 + b2                            w2 [width, 10],   b2 [10]
    loss   = mean over the batch of  -log softmax(logits)[label]

All three versions start from the same weights and use the same batches. After every step, the
script compares the versions. It stops if a loss differs by more than 1e-5, or a parameter array by
a relative error of more than 1e-5.
"""

import sys

import _common as common
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags

from fnet import layers as nn
from fnet import transforms as ft
from fnet.training import datasets

TOLERANCE = 1e-5  # of every loss: |a - b|, of every parameter array: max |a - b| / max |b|


# 1. By hand: the forward pass line by line, then its derivatives line by line from the end.


def step_by_hand(params, x, labels, rate):
    """Performs one step of gradient descent. Returns (loss, new params)."""
    w1, b1 = params["hidden"]["kernel"], params["hidden"]["bias"]
    w2, b2 = params["head"]["kernel"], params["head"]["bias"]

    hidden = 1 / (1 + jnp.exp(-(x @ w1 + b1[None])))  # [batch, width]
    logits = hidden @ w2 + b2[None]  # [batch, 10]
    logits -= logits.max(axis=1, keepdims=True)  # exp cannot overflow, loss is the same
    log_probs = logits - jnp.log(jnp.exp(logits).sum(axis=1, keepdims=True))
    rows = jnp.arange(len(x))
    loss = -log_probs[rows, labels].mean()

    # d loss / d logits = (softmax(logits) - one_hot(label)) / batch
    d_logits = jnp.exp(log_probs).at[rows, labels].add(-1) / len(x)  # [batch, 10]
    d_w2, d_b2 = hidden.T @ d_logits, d_logits.sum(axis=0)
    d_hidden = d_logits @ w2.T  # [batch, width]
    d_z = d_hidden * hidden * (1 - hidden)  # sigmoid' = sigmoid (1 - sigmoid)
    d_w1, d_b1 = x.T @ d_z, d_z.sum(axis=0)

    return loss, {
        "hidden": {"kernel": w1 - rate * d_w1, "bias": b1 - rate * d_b1},
        "head": {"kernel": w2 - rate * d_w2, "bias": b2 - rate * d_b2},
    }


# 2. With grad: the loss alone, and a sigmoid that brings its own derivative.


@ft.custom_vjp
def sigmoid(x):
    """Computes 1 / (1 + exp(-x)), with full relative precision of the value and the derivative for
    every x.

    Both formulas use e = exp(-|x|), which cannot overflow:

        sigmoid(x)  = 1 / (1 + e)  for x >= 0,  e / (1 + e)  for x < 0
        sigmoid'(x) = e / (1 + e)²

    The usual formula for the derivative is sigmoid(x) * (1 - sigmoid(x)). In float32, the result of
    this formula is zero for x >= 17, because sigmoid(x) rounds to one.
    """
    e = jnp.exp(-jnp.abs(x))
    return jnp.where(x >= 0, 1, e) / (1 + e)


def sigmoid_forward(x):
    return sigmoid(x), x


def sigmoid_backward(x, cotangent):
    e = jnp.exp(-jnp.abs(x))
    return (cotangent * e / (1 + e) ** 2,)


sigmoid.defvjp(sigmoid_forward, sigmoid_backward)


def loss_fn(params, x, labels):
    w1, b1 = params["hidden"]["kernel"], params["hidden"]["bias"]
    w2, b2 = params["head"]["kernel"], params["head"]["bias"]
    logits = sigmoid(x @ w1 + b1[None]) @ w2 + b2[None]  # [batch, 10]
    log_probs = jax.nn.log_softmax(logits)
    return -log_probs[jnp.arange(len(x)), labels].mean()


def step_with_grad(params, x, labels, rate):
    """Performs one step of gradient descent. Returns (loss, new params)."""
    loss, grads = ft.value_and_grad(loss_fn)(params, x, labels)
    return loss, jax.tree.map(lambda p, g: p - rate * g, params, grads)


# 3. With layers and Optax: a model, a loss, an optimiser, each from its shelf.


def two_layer_net(width):
    return nn.Sequential(hidden=nn.Dense(width), sigmoid=jax.nn.sigmoid, head=nn.Dense(10))


def step_with_layers(model, optimizer, params, opt_state, x, labels):
    """Performs one step of any Optax optimizer. Returns (loss, new params, new optimizer state)."""

    def loss_fn(params):
        logits = model(params, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, grads = ft.value_and_grad(loss_fn)(params)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return loss, optax.apply_updates(params, updates), opt_state


# All three, side by side.


@ft.jit
def difference(a, b):
    """The largest relative difference between two trees: max over arrays of max|a-b| / max|b|."""
    relative = lambda a, b: jnp.abs(a - b).max() / jnp.maximum(jnp.abs(b).max(), 1e-30)
    return jnp.stack(jax.tree.leaves(jax.tree.map(relative, a, b))).max()


def train(data, *, steps, batch_size, width, rate, seed, print_every):
    """Trains all three versions and returns {version: params}. Exits with an error if the versions
    differ."""
    images, labels = flat(data.train_images), data.train_labels
    model, optimizer = two_layer_net(width), optax.sgd(rate)
    params, _ = model.init(jax.random.key(seed), images[:1])

    by_hand = with_grad = with_layers = params
    opt_state = optimizer.init(params)
    hand_step, grad_step = ft.jit(step_by_hand), ft.jit(step_with_grad)
    layers_step = ft.jit(step_with_layers, static_argnums=(0, 1))

    print("  step      by hand    with grad  with layers   largest difference")
    rng, worst = np.random.default_rng(seed), 0.0
    for step in range(1, steps + 1):
        rows = rng.choice(len(images), batch_size, replace=False)
        x, y = images[rows], labels[rows]
        loss_a, by_hand = hand_step(by_hand, x, y, rate)
        loss_b, with_grad = grad_step(with_grad, x, y, rate)
        loss_c, with_layers, opt_state = layers_step(model, optimizer, with_layers, opt_state, x, y)
        apart = [float(difference(params, with_layers)) for params in (by_hand, with_grad)]
        apart += [abs(float(loss - loss_c)) for loss in (loss_a, loss_b)]
        apart = np.max(apart)  # NumPy's max: Python's may lose a NaN
        if not apart <= TOLERANCE:  # NaN is no agreement
            sys.exit(f"step {step}: the three differ by {apart:.1e}, more than {TOLERANCE:.0e}")
        worst = max(worst, apart)
        if step == 1 or step % print_every == 0 or step == steps:
            print(f"{step:6d} {loss_a:12.7f} {loss_b:12.7f} {loss_c:12.7f}   {apart:.1e}")
    print(f"all three agreed at each of {steps} steps; the largest difference was {worst:.1e}\n")
    return {"by hand": by_hand, "with grad": with_grad, "with layers": with_layers}


def flat(images):
    """Converts uint8 [n, height, width, channels] to float32 [n, pixels] from 0 to 1."""
    return images.reshape(len(images), -1).astype(np.float32) / 255


def accuracy(params, data):
    logits = two_layer_net(len(params["hidden"]["bias"]))(params, flat(data.test_images))
    return np.mean(np.argmax(logits, axis=1) == data.test_labels)


def show_sigmoids():
    """Prints the derivatives of three functions at points from -1000 to 1000: the plain formula of
    the sigmoid, `jax.nn.sigmoid`, and the function `sigmoid` of this file. Also prints the exact
    derivative of the sigmoid."""
    plain = lambda x: 1 / (1 + jnp.exp(-x))
    print("derivative of the sigmoid in float32")
    print("     x        plain   jax.nn.sigmoid   custom_vjp        exact")
    for x in (-1000.0, -85.0, -20.0, 0.0, 20.0, 85.0, 1000.0):
        slopes = [float(ft.grad(f)(x)) for f in (plain, jax.nn.sigmoid, sigmoid)]
        e = np.exp(-abs(x))  # in float64
        print("{:6.0f} {:12.4g} {:16.4g} {:12.4g} {:12.4g}".format(x, *slopes, e / (1 + e) ** 2))


def define_flags():
    flags.DEFINE_integer(
        "steps", 1000, "number of training steps", lower_bound=1, upper_bound=10**9
    )
    flags.DEFINE_integer(
        "batch_size", 128, "number of images in a batch", lower_bound=1, upper_bound=1437
    )
    flags.DEFINE_integer(
        "width", 64, "number of units in the hidden layer", lower_bound=1, upper_bound=65536
    )
    flags.DEFINE_float("rate", 1.0, "learning rate", lower_bound=0.0, upper_bound=1000.0)
    flags.DEFINE_integer(
        "seed",
        0,
        "random seed of the weights and the batches",
        lower_bound=0,
        upper_bound=2**32 - 1,
    )
    flags.DEFINE_integer(
        "print_every", 100, "number of steps between two lines of output", lower_bound=1
    )


def configured(argv):
    """Raises ConfigError if there is a positional argument."""
    common.no_arguments(argv, "--seed=1")


def main(argv):
    configured(argv)
    names = ("steps", "batch_size", "width", "rate", "seed", "print_every")
    data = datasets.load("digits")
    trained = train(data, **{name: flags.FLAGS[name].value for name in names})
    show_sigmoids()
    print()
    for version, params in trained.items():
        print(f"test accuracy {accuracy(params, data):.4f}  {version}")


if __name__ == "__main__":
    define_flags()
    common.run(main)
