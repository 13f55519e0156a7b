"""The price of `ft.invariant`, and what it gives: the same bits for batches of 1, 3, 8 and 32 rows, and
on 1, 2, 4 and 8 devices.

    python -m benchmarks.invariant
    python -m benchmarks.invariant mlp --rounds=3

The models have random weights: a perceptron, a GPT, a CNN with BatchNorm in linen, MiniLM with a smaller
vocabulary, and a flax.nnx module with BatchNorm, dropout and Adam. "rows" says for how many batch sizes the
results of a forward pass are those in the batch of 32, "devices" for how many numbers of devices those of a
training step are those on one device, and "weights" for how many numbers of rows a step equals the step on
32 rows of which the others have weight 0; in brackets, the same without the transform. The price is the
median time with the transform, divided by that without it, on one device.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks._harness import header
from fnet import models
from fnet import transforms as ft

SIZES, DEVICES, ROWS = (1, 3, 8, 32), (1, 2, 4, 8), 32


class Case(NamedTuple):
    """A model: `forward(params, x)`, `step(params, *batch)`, whose last argument is the weights of
    the rows if `weighted`, and its arguments."""

    forward: Callable
    step: Callable
    params: Any
    batch: tuple
    weighted: bool


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def tokens(count: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, count, shape).astype(np.int32)


def descent(loss: Callable) -> Callable:
    def step(params: Any, *batch: Any) -> tuple:
        value, gradient = ft.value_and_grad(loss)(params, *batch)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, gradient), value

    return step


def weighted(losses: Callable) -> Callable:
    """A step on the weighted mean of the losses of the rows."""

    def loss(params: Any, *batch: Any) -> Any:
        *rest, weight = batch
        return (losses(params, *rest) * weight).sum() / weight.sum()

    return descent(loss)


cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def mlp() -> Case:
    params = {"w": draw(784, 300) / 28, "b": np.zeros(300, np.float32), "v": draw(300, 10) / 17}
    forward = lambda p, x: jnp.tanh(x @ p["w"] + p["b"]) @ p["v"]
    step = weighted(lambda p, x, y: cross_entropy(forward(p, x), y))
    return Case(forward, step, params, (draw(ROWS, 784), tokens(10, ROWS), np.ones(ROWS)), True)


def gpt() -> Case:
    model = models.GPT(512, 128, 4, 4, context=128)
    text = tokens(512, ROWS, 128)
    params, _ = model.init(jax.random.key(0), text)
    losses = lambda p, x: cross_entropy(model(p, x[:, :-1]), x[:, 1:]).mean(1)
    return Case(model, weighted(losses), params, (text, np.ones(ROWS)), True)


class ConvNet(linen.Module):
    @linen.compact
    def __call__(self, x, train=True):  # [batch, height, width, channels]
        for channels in (32, 64):
            x = linen.Conv(channels, (3, 3))(x)
            x = linen.relu(linen.BatchNorm(use_running_average=not train)(x))
            x = linen.max_pool(x, (2, 2), (2, 2))
        return linen.Dense(10)(x.mean((1, 2)))


def cnn() -> Case:
    net, x = ConvNet(), draw(ROWS, 32, 32, 3)

    def step(variables: dict, x: Any, y: Any) -> tuple:
        def loss(params: Any) -> tuple:
            given = {**variables, "params": params}
            logits, state = net.apply(given, x, mutable=["batch_stats"])
            return cross_entropy(logits, y).mean(), state

        (value, state), gradient = ft.value_and_grad(loss, has_aux=True)(variables["params"])
        new = jax.tree.map(lambda p, g: p - 0.01 * g, variables["params"], gradient)
        return {"params": new, **state}, value

    forward = lambda variables, x: net.apply(variables, x, train=False)
    return Case(forward, step, net.init(jax.random.key(0), x), (x, tokens(10, ROWS)), False)


def minilm() -> Case:
    model = models.Bert(2000, width=384, depth=6, heads=12, hidden=1536)
    text, lengths = tokens(2000, ROWS, 32), 4 + tokens(29, ROWS)
    params, _ = model.init(jax.random.key(0), text)

    def vectors(params: Any, given: tuple) -> Any:
        return models.sentence_embedding(model(params, *given).hidden, given[1])

    step = weighted(lambda params, given: (vectors(params, given) ** 3).sum(-1))
    return Case(vectors, step, params, ((text, lengths), np.ones(ROWS)), True)


class Module(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(3, 32, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.drop = nnx.Dropout(0.3, rngs=rngs)
        self.out = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, x):
        return self.out(self.drop(jax.nn.gelu(self.norm(self.conv(x)))).mean((1, 2)))


def module() -> Case:
    """The step takes the state of the module and of its optimizer."""
    model = Module(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    graph, state = nnx.split((model, optimizer))

    def step(state: Any, x: Any, y: Any) -> tuple:
        model, optimizer = nnx.merge(graph, state)
        loss = lambda model: cross_entropy(model(x), y).mean()
        value, gradient = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradient)
        return nnx.state((model, optimizer)), value

    def forward(state: Any, x: Any) -> Any:
        model, _ = nnx.merge(graph, state)
        model.eval()
        return model(x)

    return Case(forward, step, state, (draw(ROWS, 32, 32, 3), tokens(10, ROWS)), False)


CASES = {"mlp": mlp, "gpt": gpt, "cnn": cnn, "minilm": minilm, "nnx": module}


def head(tree: Any, n: int) -> Any:
    return jax.tree.map(lambda x: x[:n], tree)


def bits(tree: Any) -> list[bytes]:
    keys = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    raw = lambda x: np.asarray(jax.random.key_data(x) if keys(x) else x)
    return [raw(x).tobytes() for x in jax.tree.leaves(tree)]


def over_sizes(forward: Callable, case: Case) -> int:
    x = case.batch[0]
    whole = forward(case.params, x)
    return sum(bits(forward(case.params, head(x, n))) == bits(head(whole, n)) for n in SIZES)


def over_weights(step: Callable, case: Case) -> int:
    *rest, weight = case.batch
    zeroed = lambda n: np.where(np.arange(ROWS) < n, weight, 0)
    few = lambda n: step(case.params, *head((*rest, weight), n))
    return sum(bits(few(n)) == bits(step(case.params, *rest, zeroed(n))) for n in SIZES)


def over_devices(step: Callable[[Mesh], Callable], case: Case) -> int:
    results = []
    for count in DEVICES:
        mesh = Mesh(np.array(jax.devices()[:count]), ("data",))
        batch = jax.device_put(case.batch, NamedSharding(mesh, P("data")))
        params = jax.device_put(case.params, NamedSharding(mesh, P()))
        results.append(bits(step(mesh)(params, *batch)))
    return sum(result == results[0] for result in results)


def price(with_it: Callable, without: Callable, args: tuple, rounds: int) -> float:
    times: dict[Callable, list[float]] = {with_it: [], without: []}
    for f in (*times, *list(times) * rounds):
        began = time.perf_counter()
        jax.block_until_ready(f(*args))
        times[f].append(time.perf_counter() - began)
    first, second = (statistics.median(found[1:]) for found in times.values())
    return first / second


def row(name: str, rounds: int) -> str:
    case = CASES[name]()
    where = tuple(range(1, 1 + len(case.batch)))
    forward, step = jax.jit(case.forward), jax.jit(case.step)
    same = ft.invariant(case.forward)
    stepped = ft.invariant(case.step, argnums=where)
    sharded = lambda mesh: ft.invariant(case.step, argnums=where, mesh=mesh)
    cells = [name, f"{over_sizes(same, case)} ({over_sizes(forward, case)})"]
    cells.append(f"{over_devices(sharded, case)} ({over_devices(lambda _: step, case)})")
    both = (over_weights(f, case) for f in (stepped, step))
    cells.append("{} ({})".format(*both) if case.weighted else "–")
    cells.append(f"{price(same, forward, (case.params, case.batch[0]), rounds):.2f}")
    cells.append(f"{price(stepped, step, (case.params, *case.batch), rounds):.2f}")
    return "| " + " | ".join(cells) + " |"


def main(arguments: list[str]) -> None:
    made = argparse.ArgumentParser(prog="python -m benchmarks.invariant")
    made.add_argument("models", nargs="*", metavar="model", help=", ".join(CASES))
    made.add_argument("--rounds", type=int, default=7)
    options = made.parse_args(arguments)
    if unknown := set(options.models) - set(CASES):
        made.error(f"expected models among {', '.join(CASES)}; got {', '.join(sorted(unknown))}")
    jax.config.update("jax_num_cpu_devices", max(DEVICES))
    command = " ".join(["python -m benchmarks.invariant", *arguments])
    print(header(command, options.rounds, allocator="default"))
    print("| model | rows, of 4 | devices, of 4 | weights, of 4 | price, forward | price, step |")
    print("|---" * 6 + "|")
    for name in options.models or CASES:
        print(row(name, options.rounds), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
