"""Measures what steps cost on a device: calls, kernels, turns of loops and small pieces of work."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fnet.hardware._latency import Latency
from fnet.hardware._tables import FrozenTable

_LEAST = 1e-10  # seconds of what is too short to be measured


def call_seconds(run: Callable[[], Any], seconds: float) -> float:
    """Returns the seconds of the fastest of many single calls, each of which is waited for. On a
    busy machine, a mean over several calls would include the time of other processes."""
    jax.block_until_ready(run())
    best, end = math.inf, time.perf_counter() + seconds
    while True:
        start = time.perf_counter()
        jax.block_until_ready(run())
        now = time.perf_counter()
        best = min(best, now - start)
        if now >= end:
            return best


class _Programs:
    """Times programs on a device. Most figures are slopes between a short and a long program."""

    def __init__(self, device: Any, seconds: float):
        self.device, self.seconds = device, seconds

    def timed(self, f: Callable, *args: Any) -> float:
        return self.fastest([(f, args)])[0]

    def fastest(self, programs: list[tuple[Callable, tuple]]) -> list[float]:
        """Times programs in turn, three times, since another process may slow some of them down."""
        calls = [
            functools.partial(jax.jit(f), *jax.device_put(args, self.device))
            for f, args in programs
        ]
        rounds = [[call_seconds(call, self.seconds / 12) for call in calls] for _ in range(3)]
        return [min(each) for each in zip(*rounds)]

    def slope(self, make: Callable[[int], Callable], few: int, many: int, *args: Any) -> float:
        """Seconds for each further piece of a program."""
        shorter, longer = self.fastest([(make(few), args), (make(many), args)])
        return max(_LEAST, (longer - shorter) / (many - few))


def measure_latency(device: Any, seconds: float) -> Latency:
    """Returns the `Latency` of a device without its links."""
    on = _Programs(device, seconds)
    figures = _calls(on) | _loops(on) | _work(on)
    how = f"measured with jax {jax.__version__} on {time.strftime('%Y-%m-%d')}"
    return Latency(**figures, sources=FrozenTable(dict.fromkeys(figures, how)))


def _calls(on: _Programs) -> dict[str, float]:
    small = jnp.ones(16)
    one = on.timed(lambda x: x + 1, small)
    argument = max(_LEAST, (on.timed(_sum, *[small] * 33) - on.timed(_sum, small)) / 32)
    result = on.slope(lambda n: lambda x: [x + i for i in range(n)], 1, 33, small)
    x, w = jnp.ones((4, 32)), jnp.ones((32, 64))
    start = max(0.0, on.timed(jnp.matmul, x, w) - one - argument)
    return dict(
        call=max(_LEAST, one - argument - result), argument=argument, result=result, start=start
    )


def _loops(on: _Programs) -> dict[str, float]:
    """An iteration takes `kernel` and its FLOPs at the rate `product`, a straight line through the
    times of two sizes."""
    turn = on.slope(_loop(lambda x: x * 0.99 + 0.1), 100, 1100, jnp.ones(16))
    rows, sides = 8, (32, 64)
    times = [
        on.slope(_loop(jnp.matmul), 100, 600, jnp.ones((rows, side)), jnp.eye(side))
        for side in sides
    ]
    flops = [2 * rows * side**2 for side in sides]
    per_flop = max(1e-15, (times[1] - times[0]) / (flops[1] - flops[0]))
    kernel = max(_LEAST, times[0] - turn - flops[0] * per_flop)
    stacked = on.slope(_stacked, 100, 600, jnp.ones(64))
    return dict(turn=turn, kernel=kernel, product=1 / per_flop, update=max(0.0, stacked - turn))


def _work(on: _Programs) -> dict[str, float]:
    few = jnp.ones(512)
    elementwise = on.slope(_chain(lambda x: x * 1.01 + 0.1), 2, 34, jnp.ones(4096)) / 2 / 4096
    transcendental = on.slope(_chain(jnp.tanh), 2, 18, few) / 512
    shorter, longer = (on.timed(lambda x: x + 1, jnp.ones(n)) for n in (2**13, 2**16))
    moved = max(_LEAST, longer - shorter) / (8 * (2**16 - 2**13))
    rows, columns = 32, 256
    numbers = jax.random.normal(jax.random.key(0), (rows, columns))
    sort = on.timed(jnp.sort, numbers) - on.timed(lambda x: x + 1, numbers)
    smaller, larger = (_convolution(on, *size) for size in ((8, 8), (16, 16)))
    per_flop = max(1e-15, (larger[0] - smaller[0]) / (larger[1] - smaller[1]))
    return dict(
        elementwise=1 / elementwise,
        transcendental=1 / transcendental,
        cached=1 / moved,
        compared=rows * columns * 8 / max(_LEAST, sort),
        convolved=1 / per_flop,
    )


def _convolution(on: _Programs, side: int, channels: int) -> tuple[float, int]:
    """Returns the seconds and the FLOPs of a small convolution."""
    images, window = jnp.ones((1, side, side, channels)), jnp.ones((3, 3, channels, channels))
    numbers = ("NHWC", "HWIO", "NHWC")
    convolve = lambda x, w: lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=numbers
    )
    return on.timed(convolve, images, window), 2 * side**2 * channels**2 * 9


def _sum(*arrays: Any) -> Any:
    return sum(arrays)


def _loop(f: Callable) -> Callable[[int], Callable]:
    return lambda n: lambda x, *rest: lax.fori_loop(0, n, lambda _, x: f(x, *rest), x)


def _stacked(n: int) -> Callable:
    return lambda x: lax.scan(lambda x, _: (x + 1, x), x, None, length=n)[1]


def _chain(f: Callable) -> Callable[[int], Callable]:
    def made(n: int) -> Callable:
        def run(x: Any) -> Any:
            for _ in range(n):
                x = f(x)
            return x

        return run

    return made
