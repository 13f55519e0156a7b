"""Compares the expected time of twelve small programs with the measured one on this CPU.

    python -m benchmarks.latency [--rounds=5]

Each round measures the CPU (`hardware.measure`) and times each program. The fastest call of all
rounds is compared with the median of the expected times (`cost.roofline(...).expected`). The exit
code is 1 if one of them differs by more than a factor of 1.5.
"""

import math
import statistics
import sys

import jax
import jax.numpy as jnp
import optax
from absl import app, flags
from jax import lax

from fnet import cost
from fnet import hardware as hw
from fnet import layers as nn
from fnet.hardware._measure_latency import call_seconds

FACTOR = 1.5
ROUNDS = flags.DEFINE_integer("rounds", 5, "how often everything is measured", lower_bound=1)
SECONDS = flags.DEFINE_float("seconds", 0.3, "time of each measurement")


def lstm():
    layer, x = nn.LSTM(64), _normal(1, 512, 64)
    params, _ = layer.init(jax.random.key(0), x)
    return lambda params, x: layer(params, x), (params, x)


def scan_of_products():
    def run(w, x):
        return lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=256)[0]

    return run, (_normal(32, 32), jnp.ones((8, 32)))


def elementwise_chain():
    def run(x):
        for _ in range(64):
            x = jnp.tanh(x * 1.01 + 0.1)
        return x

    return run, (jnp.ones(256),)


def cumsum_loop():
    def turn(i, carry):
        total, sums = carry
        return total + sums[i], sums.at[i].set(total + sums[i])

    run = lambda x: lax.fori_loop(0, x.shape[0], turn, (jnp.zeros(x.shape[1:]), x))[1]
    return run, (jnp.ones((512, 64)),)


def small_products():
    def run(ws, x):
        for w in ws:
            x = x @ w
        return x

    return run, ([_normal(64, 64) for _ in range(32)], jnp.ones((16, 64)))


def convolution():
    numbers = ("NHWC", "HWIO", "NHWC")
    run = lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)
    return run, (jnp.ones((1, 16, 16, 8)), jnp.ones((3, 3, 8, 8)))


def sort():
    return jnp.sort, (_normal(64, 256),)


def embedding():
    return lambda table, tokens: table[tokens], (_normal(1000, 64), jnp.arange(256))


def while_loop():
    """Newton's method for square roots."""

    def run(x):
        turn = lambda carry: (carry[0] + 1, 0.5 * (carry[1] + x / carry[1]))
        return lax.while_loop(lambda carry: carry[0] < 300, turn, (0, x))[1]

    return run, (jnp.arange(1.0, 65.0),)


def mlp_gradient():
    model = nn.Sequential(nn.Dense(64), jax.nn.relu, nn.Dense(64), jax.nn.relu, nn.Dense(10))
    x = jnp.ones((4, 32))
    params, _ = model.init(jax.random.key(0), x)
    return jax.grad(lambda params, x: jnp.square(model(params, x)).mean()), (params, x)


def attention():
    run = lambda q: nn.dot_product_attention(q, q, q, causal=True)
    return run, (_normal(1, 32, 2, 16),)


def adam_step():
    tx = optax.adam(1e-3)
    params = {f"kernel{i}": jnp.ones((64, 64)) for i in range(8)}
    params |= {f"bias{i}": jnp.ones(64) for i in range(8)}

    def run(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return run, (params, tx.init(params), params)


def _normal(*shape):
    return jax.random.normal(jax.random.key(0), shape) / math.sqrt(shape[0])


PROGRAMS = (
    lstm,
    scan_of_products,
    elementwise_chain,
    cumsum_loop,
    small_products,
    convolution,
    sort,
    embedding,
    while_loop,
    mlp_gradient,
    attention,
    adam_step,
)


def compared(rounds, seconds):
    """Returns {name: (expected seconds, measured seconds, what limits the program)}."""
    made = {make.__name__: make() for make in PROGRAMS}
    expected, measured, bounds = {}, {}, {}
    for _ in range(rounds):
        chip = hw.measure(dtypes=("float32",), seconds=seconds)
        for name, (run, args) in made.items():
            report = cost.roofline(run, *args, chip=chip, measure=False)
            compiled = jax.jit(run)
            expected.setdefault(name, []).append(report.expected)
            took = call_seconds(lambda compiled=compiled, args=args: compiled(*args), seconds)
            measured[name] = min(measured.get(name, math.inf), took)
            bounds[name] = report.total.bound
    return {
        name: (statistics.median(expected[name]), measured[name], bounds[name]) for name in made
    }


def main(argv):
    del argv
    found = compared(ROUNDS.value, SECONDS.value)
    print("| program | expected us | measured us | expected over measured | bound |")
    print("|---|---|---|---|---|")
    outside = []
    for name, (expected, measured, bound) in found.items():
        ratio = expected / measured
        print(f"| {name} | {expected * 1e6:.1f} | {measured * 1e6:.1f} | {ratio:.2f} | {bound} |")
        if not 1 / FACTOR <= ratio <= FACTOR:
            outside.append(name)
    within = len(found) - len(outside)
    print(f"\n{within} of {len(found)} within a factor of {FACTOR}", *outside)
    sys.exit(bool(outside))


if __name__ == "__main__":
    app.run(main)
