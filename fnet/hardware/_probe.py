"""Measures whether matrix products and convolutions are faster in bfloat16 than in float32 on this
CPU.

The result of the measurement depends on the installed XLA. On a CPU, bfloat16 is faster than
float32 only if XLA uses the CPU's bfloat16 instructions. If XLA converts the operands to float32
and the results back, bfloat16 is slower.
"""

from __future__ import annotations

import concurrent.futures
import datetime
import functools
import hashlib
import math
import os
import pathlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax import lax

from fnet._jax import trace_state
from fnet._util._cache import cache_folder, read_json, write_json
from fnet._util._timing import timings
from fnet.hardware._cpu import read_cpu
from fnet.hardware._onednn import ONEDNN, onednn

DOT_AT_MOST, CONV_AT_MOST = 0.8, 0.9  # bfloat16 is selected up to this fraction of float32's time
_VERSION = 2  # version of the measurement; a cached result of another version is not used
_SIDE = 768
_IMAGES, _KERNEL = (16, 16, 16, 64), (3, 3, 64, 64)


class Probe(NamedTuple):
    """The result of a measurement: the time with bfloat16 divided by the time with float32.

    Attributes:
        dot, conv: the time with bfloat16 divided by the time with float32, `dot` for a matrix
            product and `conv` for a convolution. A ratio is infinite if XLA cannot compile the
            operation for bfloat16.
        clock: how the time was measured. "wall" means wall-clock time. "processor" means processor
            time: the time that the cores spent on this process. If the machine is busy, the
            processor time is measured.
        jaxlib: the jaxlib version of the measurement.
        date: the date of the measurement, such as "2026-11-21".
    """

    dot: float
    conv: float
    clock: str
    jaxlib: str
    date: str


def verdict(probe: Probe, mode: str) -> tuple[str, str, str]:
    """Returns (dtype of matrix products, dtype of convolutions, reason). Each dtype is bfloat16 if
    bfloat16 is fast enough, otherwise float32."""
    dot = "bfloat16" if probe.dot <= DOT_AT_MOST else "float32"
    conv = dot if probe.conv <= CONV_AT_MOST else "float32"
    passes = "forward and backward" if mode == "train" else "forward"
    times = "processor time (the machine was busy)" if probe.clock == "processor" else "time"
    return (
        dot,
        conv,
        (
            f"bfloat16 took {probe.dot:.2f} of float32's {times} for a matrix product and "
            f"{probe.conv:.2f} for a convolution, {passes}, in the probe of {probe.date} with "
            f"jaxlib {probe.jaxlib}; it is selected up to {DOT_AT_MOST:g}, and for convolutions up "
            f"to {CONV_AT_MOST:g}"
        ),
    )


def unfit() -> str | None:
    """Returns the reason why bfloat16 and float32 cannot be timed now, or None if they can."""
    if jax.default_backend() != "cpu":
        return f"not measured, because JAX's default backend is {jax.default_backend()}"
    if jax.process_count() > 1:
        return "not measured, because all processes must select the same dtypes"
    return None


def probe(mode: str) -> Probe | None:
    """Returns how long matrix products and convolutions take in bfloat16 on this CPU, relative to
    float32.

    The argument `mode` is "train" or "inference". If no measurement is cached for this CPU and
    mode, `probe` makes a measurement, which takes about a second. Measurements are cached in the
    file probe.json of `cache_folder()`. If the file probe.json cannot be written, measurements are
    cached only in this process. Returns None if no measurement is cached and JAX is tracing a
    function.
    """
    cpu = read_cpu()
    flags = hashlib.sha256(repr((cpu.flags, os.environ.get("XLA_FLAGS", ""))).encode()).hexdigest()[
        :12
    ]
    key = f"{cpu.model}, {cpu.cores} cores, flags {flags}, jaxlib {jaxlib.__version__}, probe {_VERSION}, {mode}"
    kept = _read(_path()).get(key)
    if kept is not None:
        return kept
    return None if _tracing() else _once(mode, key, _path())


@functools.cache
def _once(mode: str, key: str, path: pathlib.Path) -> Probe:
    busy = _busy()
    dot, conv = _ratios(mode, time.process_time if busy else time.perf_counter)
    made = Probe(
        dot,
        conv,
        "processor" if busy else "wall",
        jaxlib.__version__,
        datetime.date.today().isoformat(),
    )
    _write(path, key, made)
    return made


def _busy() -> bool:
    """Whether other processes are computing on this machine, so that wall time would include their
    work."""
    try:
        return os.getloadavg()[0] > 0.5 * (os.cpu_count() or 1)
    except (AttributeError, OSError):  # Windows has no load average
        return False


def _tracing() -> bool:
    with concurrent.futures.ThreadPoolExecutor(
        1
    ) as fresh:  # JAX traces no function in a new thread
        return fresh.submit(trace_state).result() != trace_state()


# The measured operations are those of autocast on a CPU. Activations and cotangents are already in
# bfloat16. Weights and their gradients are in float32.


def _dot(x: Any, w: Any, g: Any, *, train: bool) -> Any:
    low = w.astype(x.dtype)
    product = functools.partial(lax.dot_general, preferred_element_type=jnp.float32)
    y = product(x, low, (((1,), (0,)), ((), ()))).astype(x.dtype)
    if not train:
        return y
    dx = product(g, low, (((1,), (1,)), ((), ()))).astype(x.dtype)
    dw = product(x, g, (((0,), (0,)), ((), ())))
    return y, dx, dw


def _conv(x: Any, w: Any, g: Any, *, train: bool) -> Any:
    def forward(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(
            x,
            w.astype(x.dtype),
            (1, 1),
            "SAME",
            preferred_element_type=x.dtype,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )

    if not train:
        return forward(x, w)
    y, backward = jax.vjp(forward, x, w)
    return y, backward(g)


def _ratios(mode: str, clock: Callable[[], float]) -> tuple[float, float]:
    calls: dict[tuple[str, str], Callable[[], Any]] = {}
    for name, operation, shape, weights in (
        ("dot", _dot, (_SIDE, _SIDE), (_SIDE, _SIDE)),
        ("conv", _conv, _IMAGES, _KERNEL),
    ):
        run = functools.partial(operation, train=mode == "train")
        numbers = np.random.default_rng(0).standard_normal
        x, w = numbers(shape, np.float32), jnp.asarray(numbers(weights, np.float32))
        for dtype in ("float32", "bfloat16"):
            args = (jnp.asarray(x, dtype), w, jnp.asarray(x, dtype))
            try:
                # `tune` also selects oneDNN for steps that consist mostly of bfloat16 convolutions.
                options = ONEDNN if (name, dtype) == ("conv", "bfloat16") and onednn() else None
                compiled = jax.jit(run).lower(*args).compile(options)
                jax.block_until_ready(compiled(*args))
            except Exception:  # XLA raises various exceptions for a dtype without code on this CPU
                if dtype == "float32":
                    raise
                continue
            calls[name, dtype] = functools.partial(compiled, *args)
    return ratios(timings(calls, clock))


def ratios(times: Mapping[tuple[str, str], Sequence[float]]) -> tuple[float, float]:
    """Returns the ratios (dot, conv) of the time with bfloat16 to the time with float32. Each ratio
    is the median over the rounds of the measurement, rounded to two decimals. A ratio is infinite
    if no time with bfloat16 was measured."""

    def ratio(name: str) -> float:
        rounds = zip(times[name, "float32"], times.get((name, "bfloat16"), ()))
        each = [low / full for full, low in rounds if full > 0]
        return round(statistics.median(each), 2) if each else math.inf

    return ratio("dot"), ratio("conv")


# The cache of measurements.


def _path() -> pathlib.Path:
    return cache_folder() / "probe.json"


def _read(path: pathlib.Path) -> dict[str, Probe]:
    """Returns the valid measurements in probe.json. A measurement that was made while the machine
    was busy is used only on the day on which it was made."""
    kept = {}
    for key, entry in read_json(path).items():
        try:
            probe = Probe(**entry)
        except TypeError:
            continue
        if _sound(probe) and _current(probe):
            kept[key] = probe
    return kept


def _sound(probe: Probe) -> bool:
    numbers, texts = probe[:2], probe[2:]
    if not all(isinstance(ratio, float) and ratio >= 0 for ratio in numbers):
        return False
    return all(isinstance(text, str) for text in texts)


def _current(probe: Probe) -> bool:
    today = datetime.date.today().isoformat()
    return probe.clock == "wall" or (probe.clock == "processor" and probe.date == today)


def _write(path: pathlib.Path, key: str, made: Probe) -> None:
    """Adds a measurement to the cache file probe.json."""
    write_json(path, {name: one._asdict() for name, one in (_read(path) | {key: made}).items()})
