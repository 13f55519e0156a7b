"""Compares `introspect.profile` with an ablation: the time of a CNN's training step without each of
its layers.

    python -m benchmarks.profiles [--rounds=15] [--batch=32]

In the ablation, a layer is replaced by the mean over the channels, broadcast to the layer's output
channels and scaled by a parameter. Because of this parameter, the next layer still computes the
gradient of its input. Times are processor times, because other programs on the machine affect them
less. The process uses one core, so that processor time is elapsed time. The programs alternate, and
the minimum time of each program counts. Two layers have the same rank if their times differ by less
than the tolerance.
"""

import itertools
import os
import time

if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # before JAX counts the cores

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags

from benchmarks._harness import header
from fnet import introspect
from fnet import layers as nn
from fnet.models._cnn import conv_norm_relu

ROUNDS = flags.DEFINE_integer("rounds", 15, "calls of each program")
BATCH = flags.DEFINE_integer("batch", 32, "images of 28 x 28 pixels in a step")
TOLERANCE = 0.15  # noise of the ablation, relative to the larger time
CHANNELS = {
    "stage0/block0": 16,
    "stage0/block1": 16,
    "stage1/block0": 32,
    "stage1/block1": 64,
    "stage2/block0": 64,
    "stage2/block1": 128,
}


class Cheap(nn.Layer):
    channels: int

    def forward(self, scope, x):
        scale = scope.param("scale", (), jax.nn.initializers.ones)
        return jnp.broadcast_to(scale * x.mean(-1, keepdims=True), (*x.shape[:-1], self.channels))


def network(without=None):
    """Returns the CNN, which has stages of two blocks. The block named `without` is replaced."""
    layers = {}
    for name, channels in CHANNELS.items():
        if name in ("stage1/block0", "stage2/block0"):
            layers[f"pool{name[5]}"] = nn.MaxPool(2)
        block = conv_norm_relu(channels=channels, kernel_size=3, stride=1)
        layers[name.replace("/", "_")] = Cheap(channels) if name == without else block
    return nn.Sequential(**layers, pool=nn.GlobalAvgPool(), head=nn.Dense(10))


def step_of(model, x, labels):
    """Returns a jitted training step and its arguments."""
    params, state = model.init(jax.random.key(0), x)

    def step(params, state, x, labels):
        def loss(params):
            logits, new = model(params, x, state=state, train=True)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), new

        (value, new), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), new, value

    return jax.jit(step), (params, state, x, labels)


def seconds(run, args):
    start = time.process_time()
    jax.block_until_ready(run(*args))
    return time.process_time() - start


def main(_):
    random = np.random.default_rng(0)
    x = jnp.asarray(random.normal(size=(BATCH.value, 28, 28, 1)), jnp.float32)
    labels = jnp.asarray(random.integers(0, 10, BATCH.value))
    programs = {name: step_of(network(name), x, labels) for name in (None, *CHANNELS)}
    for run, args in programs.values():
        seconds(run, args)  # the first call compiles
    best = dict.fromkeys(programs, float("inf"))
    for _ in range(ROUNDS.value):
        for name, (run, args) in programs.items():
            best[name] = min(best[name], seconds(run, args))
    report = introspect.profile(*programs[None][:1], *programs[None][1], repeats=ROUNDS.value)
    saved = {name: best[None] - best[name] for name in CHANNELS}
    measured = {name: report[name.replace("/", "_")].total for name in CHANNELS}
    print(
        header(
            f"python -m benchmarks.profiles --rounds={ROUNDS.value} --batch={BATCH.value}",
            ROUNDS.value,
        )
    )
    print("| layer | profile ms | ablation ms |\n|---|---|---|")
    for name in sorted(CHANNELS, key=measured.__getitem__, reverse=True):
        print(f"| {name} | {1e3 * measured[name]:.2f} | {1e3 * saved[name]:.2f} |")
    apart = [
        (a, b)
        for a, b in itertools.combinations(CHANNELS, 2)
        if abs(saved[a] - saved[b]) > TOLERANCE * max(saved[a], saved[b])
    ]
    agree = sum((saved[a] > saved[b]) == (measured[a] > measured[b]) for a, b in apart)
    print(
        f"\n{agree} of {len(apart)} pairs of layers whose ablations differ by more than "
        f"{TOLERANCE:.0%} have one order; the operations take {report.coverage:.1%} of the step of "
        f"{1e3 * report.step_seconds:.2f} ms; {report.spanning:.1%} of that in fusions of several "
        "paths"
    )


if __name__ == "__main__":
    app.run(main)
