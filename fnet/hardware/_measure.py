"""A row for a chip by measuring it: a matrix product per type and a copy."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fnet.hardware._chip import Chip, FrozenTable, dtype_name
from fnet.hardware._detect import detect


def measure(device: Any = None, *, dtypes: Sequence[Any] = ("float32", "bfloat16", "float16"), size: int | None = None,
            copy_bytes: int | None = None, seconds: float = 0.3) -> Chip:
    """Measures what a device does, and fills in its row.

    A product of two square matrices gives the rate per type (2 size^3 FLOPs each, the best of several batches), a
    scaled copy the bandwidth (one read, one write). These are the rates of XLA's code on this machine as it is now, not
    what the chip could do: an MFU against them says how a step compares with a plain matmul.

    Args:
      device: a `jax.Device`; by default the first local one.
      dtypes: types to try. One that the device cannot multiply is left out and named in the notes.
      size: side of the matrices; by default 1024 on a CPU, 8192 elsewhere.
      copy_bytes: size of the copied array; by default 256 MiB on a CPU, 1 GiB elsewhere.
      seconds: time to spend on each measurement.

    Returns:
      The chip that `detect` finds, known, with measured `peaks` and `bandwidth` (basis "measured") of the whole chip. A
      type that was not measured keeps no figure.

    Takes about `seconds` times (number of types + 1), plus compilation.
    """
    device = device or jax.local_devices()[0]
    cpu = device.platform == "cpu"
    size = size or (1024 if cpu else 8192)
    copy_bytes = copy_bytes or (2**28 if cpu else 2**30)
    chip = detect(device)
    # Eight emulated CPU devices share one pool of threads: one of them already has the whole chip.
    share = 1 if cpu else chip.jax_devices_per_chip
    peaks, failed = {}, []
    for dtype in dtypes:
        try:
            rate = _matmul(device, jnp.dtype(dtype), size, seconds)
        except Exception as error:      # whatever the backend raises for a type it does not know
            failed.append(f"{jnp.dtype(dtype)} ({str(error).splitlines()[0][:80]})")
            continue
        name = dtype_name(dtype)
        if chip.kind == "tpu" and name == "fp32":
            continue      # bfloat16 passes: `Chip.peak` derives it
        peaks["tf32" if name == "fp32" and "tf32" in chip.peaks else name] = rate * share
    bandwidth = _copy(device, copy_bytes, seconds) * share
    note = (f"Measured with jax {jax.__version__} on {time.strftime('%Y-%m-%d')}: matmuls of side {size}, a copy of "
            f"{copy_bytes / 2**20:.4g} MiB, the best of several.")
    if failed:
        note += f" Not measured: {'; '.join(failed)}."
    bases = {name: "measured" for name in (*peaks, "bandwidth")}
    return dataclasses.replace(
        chip, known=True, peaks=FrozenTable(peaks), bandwidth=bandwidth, notes=note,
        bases=FrozenTable({**chip.bases, **bases}), sources=(note,), quoted=(), explained=FrozenTable())


def _matmul(device: Any, dtype: Any, size: int, seconds: float) -> float:
    """FLOP/s of a square matmul."""
    key = jax.random.key(0)
    if jnp.issubdtype(dtype, jnp.integer):
        a = jax.random.randint(key, (size, size), -8, 8, dtype)
    else:
        a = (jax.random.normal(key, (size, size)) / size**0.5).astype(dtype)
    a = jax.device_put(a, device)
    wide = jnp.int32 if jnp.issubdtype(dtype, jnp.integer) else None
    product = jax.jit(lambda x, y: jax.lax.dot(x, y, preferred_element_type=wide))
    return 2 * size**3 / _best(lambda: product(a, a), seconds)


def _copy(device: Any, nbytes: int, seconds: float) -> float:
    """Bytes/s read and written by a scaled copy, into a donated buffer so that no new pages are asked for."""
    scale = jax.jit(lambda x: x * 1.0001, donate_argnums=0)
    held = [jax.device_put(jnp.ones(nbytes // 4, jnp.float32), device)]

    def run():
        held[0] = scale(held[0])
        return held[0]

    return 2 * (nbytes // 4 * 4) / _best(run, seconds)


def _best(run: Callable[[], Any], seconds: float) -> float:
    """Seconds per call: calls in batches long enough to time, the best batch within about `seconds`."""
    jax.block_until_ready(run())
    start = time.perf_counter()
    jax.block_until_ready(run())
    once = max(time.perf_counter() - start, 1e-7)
    batch = max(1, int(seconds / 8 / once))
    best, end = once, time.perf_counter() + seconds
    while True:
        start = time.perf_counter()
        for _ in range(batch):
            out = run()
        jax.block_until_ready(out)
        best = min(best, (time.perf_counter() - start) / batch)
        if time.perf_counter() >= end:
            return best
