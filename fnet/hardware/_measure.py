"""Measures a chip's peaks with a matrix product for each dtype, and its memory bandwidth with a
copy."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fnet.hardware._chip import Chip, FrozenTable, dtype_name
from fnet.hardware._detect import detect
from fnet.hardware._measure_latency import measure_latency

_LINKS = ("hop", "network", "collective")  # which one device cannot measure


def measure(
    device: Any = None,
    *,
    dtypes: Sequence[Any] = ("float32", "bfloat16", "float16"),
    size: int | None = None,
    copy_bytes: int | None = None,
    seconds: float = 0.3,
) -> Chip:
    """Measures how fast a device multiplies matrices and copies memory.

        chip = hw.measure()
        cost.mfu(count.model_flops, seconds, chip, count.dtype)     # of what XLA reaches here

    These are the rates of XLA's code on this machine at this time, not the limits of the chip. An
    MFU computed with them compares a step with a plain matrix product.

    For each dtype, products of two matrices [size, size], 2 size^3 FLOPs each, are timed in several
    batches, and the fastest batch counts. The bandwidth is that of an array times a constant, which
    reads and writes each element once. The latencies are slopes between short and long programs of
    tiny operations. All this takes about `seconds` for each dtype and for the bandwidth, three times
    `seconds` for the latencies, and the compilations.

    Args:
        device: a `jax.Device`. Default None: the first local device.
        dtypes: the dtypes to measure. One that the device cannot multiply is left out, and listed
            in the notes of the result. Default float32, bfloat16 and float16.
        size: the number of rows and columns. Default None: 1024 on a CPU, 8192 elsewhere.
        copy_bytes: the bytes of the array for the bandwidth. Default None: 256 MiB on a CPU, 1 GiB
            elsewhere.
        seconds: the time of each measurement in seconds. Default 0.3.

    Returns:
        The `Chip` of `detect` with `known=True`, the `peaks` and the `bandwidth` of the whole chip,
        and the `latency` of the device, marked as "measured" in `Chip.bases`. Dtypes that were not
        measured have no peak.

    >>> chip = measure(dtypes=("float32",), size=64, copy_bytes=2**16, seconds=0.01)
    >>> chip.basis("bandwidth"), chip.peak("float32").flops > 0
    ('measured', True)
    """
    device = device or jax.local_devices()[0]
    cpu = device.platform == "cpu"
    size = size or (1024 if cpu else 8192)
    copy_bytes = copy_bytes or (2**28 if cpu else 2**30)
    chip = detect(device)
    # Emulated CPU devices share one pool of threads, so that each of them can use the whole chip.
    share = 1 if cpu else chip.jax_devices_per_chip
    peaks, failed = {}, []
    for dtype in dtypes:
        try:
            rate = _matmul(device, jnp.dtype(dtype), size, seconds)
        except Exception as error:  # backends raise different exceptions
            failed.append(f"{jnp.dtype(dtype)} ({str(error).splitlines()[0][:80]})")
            continue
        name = dtype_name(dtype)
        if chip.kind == "tpu" and name == "fp32":
            continue  # float32 runs in bfloat16 passes, so `Chip.peak` computes its rate
        peaks["tf32" if name == "fp32" and "tf32" in chip.peaks else name] = rate * share
    bandwidth = _copy(device, copy_bytes, seconds) * share
    steps = measure_latency(device, seconds)
    links = chip.latency and {name: getattr(chip.latency, name) for name in _LINKS}
    sources = {**(chip.latency.sources if chip.latency else {}), **steps.sources}
    steps = dataclasses.replace(steps, **links or {}, sources=FrozenTable(sources))
    note = (
        f"Measured with jax {jax.__version__} on {time.strftime('%Y-%m-%d')}: matmuls of side "
        f"{size}, a copy of {copy_bytes / 2**20:.4g} MiB, the best of several."
    )
    if failed:
        note += f" Not measured: {'; '.join(failed)}."
    bases = {name: "measured" for name in (*peaks, "bandwidth", "latency")}
    return dataclasses.replace(
        chip,
        known=True,
        peaks=FrozenTable(peaks),
        bandwidth=bandwidth,
        latency=steps,
        notes=note,
        bases=FrozenTable({**chip.bases, **bases}),
        sources=(note,),
        quoted=(),
        explained=FrozenTable(),
    )


def _matmul(device: Any, dtype: Any, size: int, seconds: float) -> float:
    """Returns the FLOP/s of the product of two square matrices."""
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
    """Returns the bytes/s that are read and written when an array is multiplied by a constant. The
    array is donated, so that the result is stored in the memory of the array."""
    scale = jax.jit(lambda x: x * 1.0001, donate_argnums=0)
    held = [jax.device_put(jnp.ones(nbytes // 4, jnp.float32), device)]

    def run() -> Any:
        held[0] = scale(held[0])
        return held[0]

    return 2 * (nbytes // 4 * 4) / _best(run, seconds)


def _best(run: Callable[[], Any], seconds: float) -> float:
    """Returns the seconds per call in the fastest of several batches of calls. All batches together
    take about `seconds`."""
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
