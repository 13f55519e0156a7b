"""Checks whether the devices of this process compute what NumPy computes."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import datetime
import hashlib
import os
import re
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jaxlib
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fnet._util._cache import cache_folder, read_json, write_json
from fnet._util._text_table import aligned
from fnet.hardware._cpu import read_cpu
from fnet.hardware._operations import AXIS, OPERATIONS, Expected, Operation

_VERSION = 1  # of the operations; a device that passed another version is checked again
# How XLA, MLIR and plugins of other vendors say that they do not implement an operation. Any other
# error may be one of the moment, such as a lack of memory.
_NOT_IMPLEMENTED = re.compile(
    "UNIMPLEMENTED|not implemented|not supported|unsupported|failed to legalize", re.IGNORECASE
)
_RIGHT, _WRONG, _UNSUPPORTED, _FAILED = "right", "wrong", "not supported", "failed"


class FaultyDevice(RuntimeError):
    """Raised by `training.fit` if a device computes wrong values, before anything is compiled for
    the run or changed in its folder.

    >>> from fnet import hardware as hw
    >>> step = lambda state, batch: (state.apply(optax.sgd(0.1), {"w": batch}), {})
    >>> state = tr.TrainState.create({"w": jnp.ones(3)}, optax.sgd(0.1))
    >>> try:
    ...     state = tr.fit(step, state, lambda i: jnp.ones(3), steps=2)
    ... except hw.FaultyDevice as error:
    ...     raise SystemExit(f"use another machine: {error}")
    >>> int(state.step)
    2
    """


@dataclasses.dataclass(frozen=True)
class OperationCheck:
    """How one device computed one operation.

    Attributes:
        device: the platform and the index of the JAX device, such as "gpu:0".
        kind: its `device_kind`.
        operation, dtype, shape: what was computed.
        status: "right", "wrong", "not supported" (this platform does not implement the operation),
            or "failed" (it raised an error when it was compiled or ran).
        part: the output with the largest error relative to its bound.
        error: the largest error of this output, where its bound is exceeded most. NaN if the device
            computed NaN.
        bound: the largest error that rounding explains at the same index. 0 if the result must be
            exact.
        elements: the number of elements whose error exceeds the bound.
        reason: why the operation is not supported, or why it failed.

    >>> from fnet import hardware as hw
    >>> print(hw.OperationCheck("cpu:0", "cpu", "matmul", "float32", "[8, 8]", "right"))
    matmul, float32 [8, 8]: right
    """

    device: str
    kind: str
    operation: str
    dtype: str
    shape: str
    status: str
    part: str = ""
    error: float = 0.0
    bound: float = 0.0
    elements: int = 0
    reason: str = ""

    @property
    def what(self) -> tuple[str, str, str]:
        """The operation, the dtype and the shape."""
        return self.operation, self.dtype, self.shape

    def __str__(self) -> str:
        what = f"{self.operation}, {self.dtype} {self.shape}"
        if self.status == _WRONG:
            allowed = f"where rounding explains {self.bound:.2g}"
            if not self.bound:
                allowed = "and must be exact"
            return (
                f"{what}: '{self.part}' is wrong in {self.elements} element"
                f"{'s' if self.elements > 1 else ''}; the worst is off by {self.error:.4g}, "
                f"{allowed}"
            )
        return f"{what}: {self.status}" + (f" ({self.reason})" if self.reason else "")


@dataclasses.dataclass(frozen=True)
class DeviceCheck:
    """The result of `check_devices`, which prints as a table.

    Attributes:
        results: an `OperationCheck` for each device and operation.
        versions: the versions of jax, jaxlib and the driver.
        seconds: the time that the check took.

    >>> from fnet import hardware as hw
    >>> one = hw.OperationCheck("cpu:0", "cpu", "matmul", "float32", "[8, 8]", "right")
    >>> hw.DeviceCheck((one,), "jax 0.12.0", seconds=0.1).right
    True
    """

    results: tuple[OperationCheck, ...]
    versions: str
    seconds: float

    @property
    def wrong(self) -> tuple[OperationCheck, ...]:
        """The operations whose results are wrong."""
        return self._with(_WRONG)

    @property
    def failed(self) -> tuple[OperationCheck, ...]:
        """The operations that raised an error when they were compiled or ran."""
        return self._with(_FAILED)

    @property
    def right(self) -> bool:
        """Whether no operation is wrong, and none that the platform supports has failed."""
        return not self.wrong and not self.failed

    @property
    def devices(self) -> list[str]:
        return list(dict.fromkeys(result.device for result in self.results))

    def _with(self, status: str) -> tuple[OperationCheck, ...]:
        return tuple(result for result in self.results if result.status == status)

    def report(self) -> str:
        """Returns what is wrong on which device, and what to do about it. "" if nothing is
        wrong."""
        if not self.wrong:
            return ""
        lines = []
        for device in dict.fromkeys(result.device for result in self.wrong):
            faults = [result for result in self.wrong if result.device == device]
            total = sum(result.device == device for result in self.results)
            lines.append(
                f"{device} ({faults[0].kind}) computes {len(faults)} of {total} operations wrongly:"
            )
            lines += [f"  {fault}" for fault in faults]
        lines.append(
            f"with {self.versions}. Install another version of the driver or of jax and jaxlib, "
            "and try again with `fnet devices --check`. To train in spite of it, pass "
            "fit(..., check_devices=False)."
        )
        return "\n".join(lines)

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("operation", "dtype", "shape", "error", "bound", "result")]
        for what in dict.fromkeys(result.what for result in self.results):
            rows.append(_row([result for result in self.results if result.what == what]))
        kinds: dict[str, list[str]] = {}
        for device in self.devices:
            kind = next(result.kind for result in self.results if result.device == device)
            kinds.setdefault(kind, []).append(device)
        where = ", ".join(f"{len(devices)} x {kind}" for kind, devices in kinds.items())
        return "\n".join(
            (
                *aligned(rows, left=(0, 1, 2, 5)),
                f"{len(rows) - 1} operations on {where} in {self.seconds:.1f} s, with "
                f"{self.versions}",
            )
        )


def _row(results: Sequence[OperationCheck]) -> tuple[str, ...]:
    """Returns the row of one operation: the worst of all devices, and what is not right where."""
    ran = [result for result in results if result.status in (_RIGHT, _WRONG)]
    error, bound = "", ""
    if ran:
        worst = max(ran, key=lambda result: (result.status == _WRONG, _excess(result)))
        error = f"{worst.error:.2g}"
        bound = f"{worst.bound:.2g}" if worst.bound else "exact"
    said = []
    for status in (_WRONG, _FAILED, _UNSUPPORTED, _RIGHT):
        devices = [result.device for result in results if result.status == status]
        if len(devices) == len(results):
            said.append(status)
        elif devices and status != _RIGHT:
            said.append(f"{status} on {', '.join(devices)}")
    return (*results[0].what, error, bound, "; ".join(said))


def _excess(result: OperationCheck) -> float:
    if np.isnan(result.error):
        return np.inf
    return result.error / result.bound if result.bound else result.error


def check_devices(devices: Sequence[Any] | None = None) -> DeviceCheck:
    """Computes twenty operations on each device, and compares the results with NumPy's.

    A driver, a compiler or a chip may compute wrong values without an error, and training then
    goes on with them. The operations are those of which training consists: matrix products in four
    dtypes, a convolution with its gradients, sums, sorting, indexing, random bits, loops, FFT,
    Cholesky, sums over devices. They run in one compiled program and, for a few of them, one by
    one, as without `jax.jit`. The reference is NumPy in float64, and an error may be as large as
    the rounding errors of the operation explain: 0 for data movement and integers. The check takes
    a few seconds, most of them for compilation, and finds systematic faults; it is no stress test
    of the hardware. `training.fit` checks devices before it uses them for the first time.

    Args:
        devices: JAX devices of this process. Default None: `jax.local_devices()`.

    Returns:
        A `DeviceCheck`, with one result for each device and operation.

    Raises:
        ValueError: there are no devices, or one of them belongs to another process.

    >>> from fnet import hardware as hw
    >>> check = hw.check_devices(jax.local_devices()[:1])
    >>> check.right, len(check.results)
    (True, 20)
    """
    devices = list(jax.local_devices() if devices is None else devices)
    others = [device for device in devices if device.process_index != jax.process_index()]
    if not devices or others:
        raise ValueError(
            f"check_devices: expected devices of this process; got {others or 'none'}. Pass "
            "jax.local_devices(), or nothing to check them all."
        )
    began = time.perf_counter()
    # A new thread has none of the contexts of the caller, such as a mesh, a transform or
    # jax.disable_jit.
    with concurrent.futures.ThreadPoolExecutor(1) as fresh:
        results = fresh.submit(_check, devices, OPERATIONS).result()
    return DeviceCheck(tuple(results), _versions(devices), time.perf_counter() - began)


# Running the operations.


@contextlib.contextmanager
def _plain_settings() -> Iterator[None]:
    """The settings for which the operations are written, whatever the process has configured."""
    with (
        jax.disable_jit(False),
        jax.debug_nans(False),
        jax.debug_infs(False),
        jax.enable_x64(False),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        jax.transfer_guard("allow"),
    ):
        yield


def _check(devices: Sequence[Any], operations: Sequence[Operation]) -> list[OperationCheck]:
    """Checks the devices of each kind together, because a program is compiled for one kind."""
    kinds: dict[tuple[str, str], list[Any]] = {}
    for device in devices:
        kinds.setdefault((device.platform, device.device_kind), []).append(device)
    results = []
    with _plain_settings():
        for alike in kinds.values():
            results += _check_alike(alike, operations)
    return results


def _check_alike(devices: Sequence[Any], operations: Sequence[Operation]) -> list[OperationCheck]:
    inputs = [_inputs(operation) for operation in operations]
    traced = [i for i, one in enumerate(operations) if not one.by_itself]
    outputs: dict[int, Any] = {}
    try:
        together = _run([operations[i] for i in traced], [inputs[i] for i in traced], devices)
        outputs = dict(zip(traced, together))
    except Exception:  # one of them is not supported: each one is compiled on its own
        pass
    results = []
    for i, operation in enumerate(operations):
        status, reason = _RIGHT, ""
        if i not in outputs:
            outputs[i], status, reason = _try(operation, inputs[i], devices)
        expected = None
        for at, device in enumerate(devices):
            result = OperationCheck(
                f"{device.platform}:{device.id}", device.device_kind, *operation[:3], status
            )
            if status == _RIGHT:
                if operation.placed:
                    expected = operation.expect(at, len(devices), *inputs[i])
                elif expected is None:
                    expected = operation.expect(*inputs[i])
                results.append(_judged(result, outputs[i][at], expected))
            else:
                results.append(dataclasses.replace(result, reason=reason))
    return results


def _inputs(operation: Operation) -> tuple[np.ndarray, ...]:
    """Returns the inputs of an operation, which are always the same."""
    seed = zlib.crc32(f"{operation.name} {operation.dtype}".encode())
    return operation.draw(np.random.default_rng(seed))


def _try(
    operation: Operation, inputs: Sequence[np.ndarray], devices: Sequence[Any]
) -> tuple[Any, str, str]:
    """Returns (outputs, status, reason)."""
    try:
        return _run([operation], [inputs], devices)[0], _RIGHT, ""
    except Exception as error:  # platforms raise different exceptions
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        unsupported = isinstance(error, NotImplementedError) or _NOT_IMPLEMENTED.search(str(error))
        return None, _UNSUPPORTED if unsupported else _FAILED, reason


def _run(
    operations: Sequence[Operation], inputs: Sequence[Sequence[np.ndarray]], devices: Sequence[Any]
) -> list[list[dict[str, np.ndarray]]]:
    """Returns the outputs of each operation on each device, read from this device."""
    if operations[0].by_itself:
        outputs = [one.run(devices, *arrays) for one, arrays in zip(operations, inputs)]
    else:
        outputs = _run_program(operations, inputs, devices)
    return [
        [{part: rows[at] for part, rows in parts.items()} for at in range(len(devices))]
        for parts in ({part: _rows(array) for part, array in one.items()} for one in outputs)
    ]


def _run_program(
    operations: Sequence[Operation], inputs: Sequence[Sequence[np.ndarray]], devices: Sequence[Any]
) -> list[Mapping[str, Any]]:
    """Runs the operations in one program, which is compiled once for all devices. Its inputs are
    arguments, because XLA would compute with constants on the host."""

    def program(inputs: Any) -> Any:
        outputs = [dict(one.run(*arrays)) for one, arrays in zip(operations, inputs)]
        return jax.tree.map(lambda output: output[None], outputs)

    mesh = Mesh(np.array(devices), AXIS)
    each = jax.shard_map(program, mesh=mesh, in_specs=P(), out_specs=P(AXIS), check_vma=False)
    placed = jax.device_put(list(inputs), NamedSharding(mesh, P()))
    return jax.jit(each)(placed)


def _rows(array: jax.Array | list[jax.Array]) -> dict[int, np.ndarray]:
    """Returns the row of each device."""
    if isinstance(array, list):
        return dict(enumerate(map(np.asarray, array)))
    return {
        (shard.index[0].start or 0) + i: row
        for shard in array.addressable_shards
        for i, row in enumerate(np.asarray(shard.data))
    }


def _judged(
    result: OperationCheck, outputs: Mapping[str, np.ndarray], expected: Mapping[str, Expected]
) -> OperationCheck:
    """Adds the largest error to a result."""
    worst, largest = result, -1.0
    for part, (values, bound) in expected.items():
        if outputs[part].shape != values.shape:
            return dataclasses.replace(
                result, status=_WRONG, part=part, error=np.nan, elements=values.size
            )
        excess, error, allowed, count = _difference(outputs[part], values, bound)
        if excess > largest:
            status = _WRONG if count else _RIGHT
            worst = dataclasses.replace(
                result, status=status, part=part, error=error, bound=allowed, elements=count
            )
            largest = excess
    return worst


def _difference(
    computed: np.ndarray, values: np.ndarray, bound: np.ndarray | float
) -> tuple[float, float, float, int]:
    """Returns the largest error relative to its bound, this error, its bound, and the number of
    elements whose error exceeds the bound."""
    computed, values = computed.astype(np.float64), values.astype(np.float64)
    allowed = np.broadcast_to(bound, values.shape)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        error = np.where(computed == values, 0.0, abs(computed - values))
        wrong = ~(error <= allowed)  # also if it is NaN
        relative = np.where(error == 0, 0.0, error / allowed)
    error_or_inf = np.where(np.isnan(error), np.inf, error)
    relative = np.where(np.isnan(relative), np.inf, relative)
    worst = np.argmax(np.where(relative == relative.max(), error_or_inf, -1.0))
    at = np.unravel_index(worst, error.shape)
    return float(relative[at]), float(error[at]), float(allowed[at]), int(wrong.sum())


# Versions, and what is remembered.


def _versions(devices: Sequence[Any]) -> str:
    said = [f"jax {jax.__version__}", f"jaxlib {jaxlib.__version__}"]
    for platform, client in {device.platform: device.client for device in devices}.items():
        version = " ".join(client.platform_version.split())
        if version != platform:  # that of a CPU is "cpu"
            said.append(version)
        if found := driver(platform):
            said.append(f"driver {found}")
    return ", ".join(said)


def driver(platform: str, root: str | os.PathLike = "/") -> str | None:
    """Returns the version of the kernel's driver for GPUs, or None if there is none or it is not
    known."""
    if platform not in ("gpu", "cuda", "rocm"):
        return None
    with contextlib.suppress(OSError):
        text = (Path(root) / "proc/driver/nvidia/version").read_text()
        if found := re.search(r"\s(\d+\.\d+(?:\.\d+)*)\s", text):
            return found[1]
    with contextlib.suppress(OSError):
        return (Path(root) / "sys/module/amdgpu/version").read_text().strip() or None
    return None


_known: set[str] = set()  # where the cache cannot be written


def _path() -> Path:
    return cache_folder() / "devices.json"


def _keys(devices: Sequence[Any]) -> set[str]:
    """What identifies the devices: their kind and number, and the versions of jax, jaxlib and the
    driver."""
    kinds: dict[str, list[Any]] = {}
    for device in devices:
        kinds.setdefault(f"{device.platform} {_kind(device)}", []).append(device)
    flags = hashlib.sha256(os.environ.get("XLA_FLAGS", "").encode()).hexdigest()[:12]
    return {
        f"{len(alike)} x {kind}, {_versions(alike)}, XLA_FLAGS {flags}, check {_VERSION}"
        for kind, alike in kinds.items()
    }


def _kind(device: Any) -> str:
    if device.platform != "cpu":
        return device.device_kind
    cpu = read_cpu()
    return f"{cpu.model} with {' '.join(cpu.flags)}"


def remembered(devices: Sequence[Any]) -> bool:
    """Whether devices of the same kinds were found right before, with the same versions of
    jax, jaxlib and the driver."""
    keys = _keys(devices)
    return keys <= _known or keys <= read_json(_path()).keys()


def remember(devices: Sequence[Any], check: DeviceCheck) -> None:
    """Stores in the cache folder that these devices are right, if they are."""
    if not check.right:
        return
    keys = _keys(devices)
    _known.update(keys)
    today = datetime.date.today().isoformat()
    write_json(_path(), read_json(_path()) | dict.fromkeys(keys, today))
