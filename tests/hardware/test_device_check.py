"""check_devices: a healthy machine passes, and each of the twenty operations is shown able to fail,
on the device that fails."""

import dataclasses
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fnet import hardware as hw
from fnet.hardware import _device_check, _operations
from fnet.hardware._operations import AXIS, OPERATIONS

pytestmark = pytest.mark.usefixtures("quickly")
NAMES = [(one.name, one.dtype) for one in OPERATIONS]
FAULTY = 3  # the device of the typical faults


def checked(operations, devices=None):
    """The check of other operations than the twenty."""
    found = _device_check._check(devices or jax.local_devices(), operations)
    return hw.DeviceCheck(tuple(found), "jax 1", 0.0)


def named(name, dtype=None):
    return next(one for one in OPERATIONS if one.name == name and dtype in (None, one.dtype))


@pytest.fixture(scope="module")
def healthy():
    return hw.check_devices()


def test_this_machine_is_right_on_each_of_its_devices(healthy):
    assert healthy.right and not healthy.wrong and not healthy.failed and healthy.report() == ""
    assert healthy.devices == [f"cpu:{i}" for i in range(8)]
    assert len(NAMES) == 20 and len(set(NAMES)) == 20
    for device in healthy.devices:
        results = [one for one in healthy.results if one.device == device]
        assert [(one.operation, one.dtype) for one in results] == NAMES
        assert {one.status for one in results} == {"right"}
        assert all(one.error <= one.bound for one in results)


def test_it_prints_as_a_table(healthy):
    lines = str(healthy).splitlines()
    assert lines[0].split() == ["operation", "dtype", "shape", "error", "bound", "result"]
    assert len(lines) == 22 and max(map(len, lines)) <= 100
    assert all(line.endswith("  right") for line in lines[1:21])
    assert lines[6].split() == "sum float32 [331, 307] 0 exact right".split()
    assert lines[21].startswith("20 operations on 8 x cpu in ")
    assert lines[21].endswith(f" s, with jax {jax.__version__}, jaxlib {jax.lib.__version__}")


# Faults slightly above the bound: each part of each operation, on a device of its own.


def outputs_of(operation, at, count):
    place = (at, count) if operation.placed else ()
    return operation.expect(*place, *_device_check._inputs(operation))


def moved(expected, factor, dtype):
    """(index, value): an element that is off by `factor` times its bound, or by the least that its
    dtype can be if it must be exact."""
    values = np.asarray(expected.values, np.float64)
    bound = np.broadcast_to(expected.bound, values.shape)
    finite = np.where(np.isfinite(values) & (values < 1e38), bound, -1)
    at = np.unravel_index(np.argmax(finite), values.shape)
    value = np.asarray(values[at] + factor * bound[at]).astype(dtype)
    if not bound[at] or factor > 1:
        if np.issubdtype(dtype, np.floating):
            value = np.nextafter(value, np.asarray(np.inf, dtype))
        else:
            value = value + np.ones((), dtype)
    return at, value


def perturbed(operation, factor):
    """The operation with a fault in its part number i on device i."""

    def put(outputs, put_one):
        for device, (part, output) in enumerate(list(outputs.items())):
            expected = outputs_of(operation, device, 8)[part]
            outputs[part] = put_one(output, device, expected)
        return outputs

    def traced(*inputs):
        def put_one(output, device, expected):
            at, value = moved(expected, factor, output.dtype)
            mask = np.zeros(output.shape, bool)
            mask[at] = True
            here = mask & (lax.axis_index(AXIS) == device)
            return jnp.where(here, value, output)

        return put(dict(operation.run(*inputs)), put_one)

    def eager(devices, *inputs):
        def put_one(output, device, expected):
            rows = _device_check._rows(output)
            rows = [np.array(rows[i]) for i in range(len(devices))]
            at, value = moved(expected, factor, rows[device].dtype)
            rows[device][at] = value
            return rows

        return put(dict(operation.run(devices, *inputs)), put_one)

    return operation._replace(run=eager if operation.by_itself else traced)


def test_slightly_more_than_its_bound_is_reported_for_each_part_on_its_device():
    check = checked([perturbed(one, 1.1) for one in OPERATIONS])
    for operation in OPERATIONS:
        parts = list(outputs_of(operation, 0, 8))
        results = [one for one in check.results if (one.operation, one.dtype) == operation[:2]]
        for i, result in enumerate(results):
            if i < len(parts):
                assert result.status == "wrong", (result, parts[i])
                assert (result.part, result.elements) == (parts[i], 1)
                assert result.error > result.bound
            else:
                assert result.status == "right", result


@pytest.mark.exhaustive
def test_slightly_less_than_its_bound_is_rounding():
    inexact = []
    for operation in OPERATIONS:
        if all(np.max(part.bound) for part in outputs_of(operation, 0, 8).values()):
            inexact.append(operation)
    assert len(inexact) == 8
    check = checked([perturbed(one, 0.9) for one in inexact])
    assert check.right
    assert {round(one.error / one.bound, 1) for one in check.results[:8]} >= {0.9}


# Faults as they occur, on one device.


def low(x, bits):
    return lax.reduce_precision(x, 8, bits)


def restarted(x):
    """A sum over tiles that forgets the carry."""
    return {"sums": jnp.concatenate((lax.cumsum(x[:, :512], 1), lax.cumsum(x[:, 512:], 1)), 1)}


def unstable(x):
    """A sort that reverses equal keys."""
    _, where = lax.sort((x[:, ::-1], lax.broadcasted_iota(jnp.int32, x.shape, 1)), num_keys=1)
    right = named("sort and top_k").run(x)
    return {**right, "indices of sort": x.shape[1] - 1 - where}


def lost_updates(x, rows, updates):
    """Of several updates of one row, only the last counts."""
    right = named("scatter-add").run(x, rows, updates)
    before = x[jnp.clip(rows, 0, len(x) - 1)]
    return {**right, "sums": x.at[rows].set(before + updates, mode="drop")}


def saturating(a, b):
    """A sum that stops at the ends instead of wrapping around."""
    results = named("arithmetic").run(a, b)["results"]
    ends = jnp.where(a > 0, np.int32(2**31 - 1), np.int32(-(2**31)))
    overflows = (a > 0) == (b > 0)
    wrapped = overflows & ((results[0] > 0) != (a > 0))
    return {"results": results.at[0].set(jnp.where(wrapped, ends, results[0]))}


def with_parts(name, dtype=None, **parts):
    """The right results, with parts computed by other functions."""

    def run(*inputs):
        right = dict(named(name, dtype).run(*inputs))
        return right | {part.replace("_", " "): f(*inputs) for part, f in parts.items()}

    return run


def stale(devices, x):
    """The scalar of the program before, as in jax-ml/jax#40633."""
    right = dict(named("one by one").run(devices, x))
    rows = _device_check._rows(right["ones(4) + 1"])
    ones = [rows[i] if i != FAULTY else np.full(4, 513, np.float32) for i in range(len(devices))]
    return {**right, "ones(4) + 1": ones}


def narrow(a, b):
    """A sum in the dtype of the operands. (XLA would leave out two casts.)"""
    product = named("matmul", str(a.dtype)).run(a, b)["product"]
    digits = jnp.finfo(a.dtype)
    return {"product": lax.reduce_precision(product, digits.nexp, digits.nmant)}


TYPICAL = {
    ("matmul", "float32"): (
        "product",  # TF32, although the highest precision is requested
        lambda a, b: named("matmul").run(low(a, 10), low(b, 10)),
    ),
    ("matmul", "bfloat16"): ("product", narrow),
    ("matmul", "float16"): ("product", narrow),
    ("matmul", "int8"): (
        "product",  # sums that saturate at 16 bits
        lambda a, b: {
            "product": jnp.clip(named("matmul", "int8").run(a, b)["product"], -(2**15), 2**15 - 1)
        },
    ),
    ("convolution", "float32"): (
        "gradient of the kernel",  # without the last image
        with_parts(
            "convolution",
            gradient_of_the_kernel=lambda x, w, g: named("convolution").run(
                x, w, g * np.array([1, 0], np.float32)[:, None, None, None]
            )["gradient of the kernel"],
        ),
    ),
    ("sum", "float32"): ("rows", with_parts("sum", rows=lambda x: x[:, :256].sum(1))),
    ("cumsum", "float32"): ("sums", restarted),
    ("sort and top_k", "float32"): ("indices of sort", unstable),
    ("gather", "float32"): (
        "rows",  # shifted
        with_parts("gather", rows=lambda x, rows, i: named("gather").run(x, rows + 1, i)["rows"]),
    ),
    ("scatter-add", "float32"): ("sums", lost_updates),
    ("transpose", "float32"): (
        "matrix",  # a tile in the wrong place
        with_parts("transpose", matrix=lambda x, m: m.T.at[:32, :32].set(m[:32, :32])),
    ),
    ("softmax", "float32"): (
        "softmax",  # overflows
        with_parts("softmax", softmax=lambda x: jnp.exp(x) / jnp.exp(x).sum(-1, keepdims=True)),
    ),
    ("exp, log, tanh, erf", "float32"): (
        "exp",
        with_parts("exp, log, tanh, erf", exp=lambda x, positive: jnp.exp(low(x, 16))),
    ),
    ("random bits", "uint32"): (
        "bits",  # one round less would change them as much
        with_parts(
            "random bits",
            bits=lambda key, counters: _operations._jax.threefry_2x32(key[::-1], counters),
        ),
    ),
    ("arithmetic", "int32"): ("results", saturating),
    ("scan and while", "int32"): (
        "while",  # an iteration less
        with_parts(
            "scan and while",
            **{"while": lambda steps, n: named("scan and while").run(steps, n)["while"] - 1},
        ),
    ),
    ("fft", "complex64"): ("imaginary", lambda re, im: conjugated(re, im)),
    ("cholesky", "float32"): (
        "factor",
        with_parts("cholesky", factor=lambda a, b: named("cholesky").run(low(a, 10), b)["factor"]),
    ),
    ("psum and ppermute", "float32"): (
        "psum",  # without the last device
        with_parts("psum and ppermute", psum=lambda x: lax.psum(x * mine(), AXIS) - 8 * x),
    ),
    ("one by one", "float32"): ("ones(4) + 1", stale),
}


def mine():
    return (lax.axis_index(AXIS) + 1).astype(jnp.float32)


def conjugated(re, im):
    right = named("fft").run(re, im)
    return {**right, "imaginary": -right["imaginary"]}


def broken(operation):
    """The operation, with the typical fault on one device."""
    run = TYPICAL[operation[:2]][1]
    if operation.by_itself:
        return operation._replace(run=run)

    def here(*inputs):
        wrong, right = run(*inputs), operation.run(*inputs)
        faulty = lax.axis_index(AXIS) == FAULTY
        return jax.tree.map(lambda x, y: jnp.where(faulty, x, y), dict(wrong), dict(right))

    return operation._replace(run=here)


def test_a_typical_fault_of_each_operation_is_reported_on_its_device_alone():
    assert list(TYPICAL) == NAMES
    with jax.numpy_dtype_promotion("standard"):
        check = checked([broken(one) for one in OPERATIONS])
    wrong = [(one.device, one.operation, one.dtype, one.part) for one in check.wrong]
    assert wrong == [(f"cpu:{FAULTY}", *name, part) for name, (part, _) in TYPICAL.items()]
    nan = next(one for one in check.wrong if one.operation == "softmax")
    assert np.isnan(
        nan.error
    ) and "'softmax' is wrong in 1 element; the worst is off by nan" in str(nan)
    lines = str(check).splitlines()
    assert all(line.endswith(f"  wrong on cpu:{FAULTY}") for line in lines[1:21])


@pytest.mark.parametrize("part", ["all", "rows"])
def test_one_nan_is_reported(part):
    def run(x):
        right = named("sum").run(x)
        return {**right, part: right[part].at[...].set(np.nan)}

    check = checked([named("sum")._replace(run=run)], jax.local_devices()[:1])
    (result,) = check.wrong
    assert np.isnan(result.error) and result.part == part


def test_a_wrong_shape_is_wrong():
    run = lambda x: {**named("sum").run(x), "rows": x.sum(0)}
    (result,) = checked([named("sum")._replace(run=run)], jax.local_devices()[:1]).wrong
    assert result.part == "rows" and result.elements == 331


def test_the_report_says_what_is_wrong_where_and_what_to_do():
    run = lambda x: {**named("cumsum").run(x), "sums": lax.cumsum(x, 1) + 2}
    check = checked([named("cumsum")._replace(run=run), named("sum")], jax.local_devices()[:2])
    assert check.report() == (
        "cpu:0 (cpu) computes 1 of 2 operations wrongly:\n"
        "  cumsum, float32 [35, 1009]: 'sums' is wrong in 35315 elements; the worst is off by 2, "
        "and must be exact\n"
        "cpu:1 (cpu) computes 1 of 2 operations wrongly:\n"
        "  cumsum, float32 [35, 1009]: 'sums' is wrong in 35315 elements; the worst is off by 2, "
        "and must be exact\n"
        "with jax 1. Install another version of the driver or of jax and jaxlib, and try again "
        "with `fnet devices --check`. To train in spite of it, pass fit(..., check_devices=False)."
    )


# Operations that do not run.


def refused(*inputs):
    raise NotImplementedError("MLIR translation rule for primitive 'fft' not found")


def test_what_a_platform_does_not_implement_is_not_wrong():
    wrong = named("cumsum")._replace(run=lambda x: {"sums": x})
    check = checked([named("fft")._replace(run=refused), wrong], jax.local_devices()[:2])
    fft = check.results[0]
    assert (fft.status, fft.operation) == ("not supported", "fft")
    assert fft.reason == "MLIR translation rule for primitive 'fft' not found"
    assert {one.operation for one in check.wrong} == {
        "cumsum"
    }  # the others are checked all the same
    assert "not supported" in str(check).splitlines()[1]
    assert checked([named("fft")._replace(run=refused)]).right


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("UNIMPLEMENTED: DNN library is not found", "not supported"),
        ("UNKNOWN: error: failed to legalize operation 'mhlo.fft'", "not supported"),
        ("INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS\nmore", "failed"),
        ("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes", "failed"),
    ],
)
def test_an_error_is_a_failure_unless_it_says_that_the_operation_is_missing(text, status):
    def run(*inputs):
        raise RuntimeError(text)

    for name in ("one by one", "fft"):  # when it runs, and when it is compiled
        check = checked([named(name)._replace(run=run)], jax.local_devices()[:1])
        (result,) = check.results
        assert (result.status, result.reason) == (status, text.partition("\n")[0])
        assert not check.wrong and check.right == (status == "not supported")


# Where it runs.


def test_devices_that_are_not_here():
    other = types.SimpleNamespace(process_index=1)
    for devices in ([], [*jax.local_devices(), other]):
        with pytest.raises(ValueError, match=r"expected devices of this process; got .*Pass "):
            hw.check_devices(devices)


def test_devices_of_different_kinds_run_in_programs_of_their_own(monkeypatch):
    seen = []
    monkeypatch.setattr(
        _device_check, "_check_alike", lambda devices, _: seen.append(devices) or []
    )
    a, b = (types.SimpleNamespace(platform="gpu", device_kind=kind) for kind in "AB")
    _device_check._check([a, b, a], OPERATIONS)
    assert seen == [[a, a], [b]]


@pytest.mark.quick_cases("disable_jit", "mesh")
@pytest.mark.parametrize(
    "context",
    [
        lambda: jax.disable_jit(),
        lambda: jax.debug_nans(True),
        lambda: jax.enable_x64(True),
        lambda: jax.default_matmul_precision("bfloat16"),
        lambda: jax.set_mesh(jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])),
        lambda: jax.transfer_guard("disallow"),
    ],
    ids=["disable_jit", "debug_nans", "x64", "precision", "mesh", "transfer_guard"],
)
def test_the_settings_of_the_caller_do_not_matter(monkeypatch, context):
    few = [named(name) for name in ("matmul", "softmax", "one by one")]
    monkeypatch.setattr(_device_check, "OPERATIONS", few)
    with context():
        assert hw.check_devices(jax.local_devices()[:2]).right


def test_threefry_is_that_of_its_paper():
    """The known answers of Random123, kat_vectors, for threefry2x32 with 20 rounds."""
    for counter, key, known in (
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 2, (0x1CB996FC, 0xBB002BE7)),
        ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
    ):
        found = _operations.threefry(np.array(key, np.uint32), np.array(counter, np.uint32))
        assert tuple(found) == known


# What is remembered.


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FNET_CACHE", str(tmp_path / "fnet"))
    monkeypatch.setattr(_device_check, "_known", set())
    return tmp_path / "fnet" / "devices.json"


def result(status, device="cpu:0"):
    one = hw.OperationCheck(device, "cpu", "sum", "float32", "[3]", status)
    return hw.DeviceCheck((one,), "jax 1", 0.0)


def test_right_devices_are_remembered_and_no_others(cache):
    devices = jax.local_devices()
    for status in ("wrong", "failed"):
        _device_check.remember(devices, result(status))
        assert not _device_check.remembered(devices) and not cache.exists()
    _device_check.remember(devices, result("right"))
    assert _device_check.remembered(devices)
    (key,) = json.loads(cache.read_text())
    assert key.startswith("8 x cpu ") and f", jaxlib {jax.lib.__version__}, XLA_FLAGS " in key
    _device_check._known.clear()  # a new process
    assert _device_check.remembered(devices)
    assert not _device_check.remembered(devices[:1])


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setattr(_device_check.jaxlib, "__version__", "9.9"),
        lambda patch: patch.setattr(_device_check.jax, "__version__", "9.9"),
        lambda patch: patch.setattr(_device_check, "driver", lambda platform: "610.43"),
        lambda patch: patch.setattr(_device_check, "_kind", lambda device: "Titan V"),
        lambda patch: patch.setattr(_device_check, "_VERSION", 99),
        lambda patch: patch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true"),
    ],
)
def test_another_driver_jaxlib_or_kind_is_checked_again(cache, monkeypatch, change):
    devices = jax.local_devices()
    _device_check.remember(devices, result("right"))
    with monkeypatch.context() as patch:
        change(patch)
        assert not _device_check.remembered(devices)
    assert _device_check.remembered(devices)


def test_a_cache_that_cannot_be_used_lasts_as_long_as_the_process(cache, monkeypatch):
    devices = jax.local_devices()
    cache.parent.parent.joinpath("file").write_text("")
    monkeypatch.setenv("FNET_CACHE", str(cache.parent.parent / "file"))
    _device_check.remember(devices, result("right"))
    assert _device_check.remembered(devices)
    _device_check._known.clear()
    assert not _device_check.remembered(devices)


def test_a_damaged_cache_is_none(cache):
    cache.parent.mkdir()
    for text in ("", "[", "[]", "3", "\x00"):
        cache.write_text(text)
        assert not _device_check.remembered(jax.local_devices())


def test_the_driver_of_a_gpu(tmp_path):
    assert _device_check.driver("cpu", tmp_path) is None
    assert _device_check.driver("gpu", tmp_path) is None
    amd = tmp_path / "sys/module/amdgpu/version"
    amd.parent.mkdir(parents=True)
    amd.write_text("6.10.5\n")
    assert _device_check.driver("gpu", tmp_path) == "6.10.5"
    nvidia = tmp_path / "proc/driver/nvidia/version"
    nvidia.parent.mkdir(parents=True)
    nvidia.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  610.43.02  Release Build\n"
        "GCC version:  gcc version 13.3.0 (Ubuntu)\n"
    )
    assert _device_check.driver("gpu", tmp_path) == "610.43.02"


def test_versions_name_the_driver(monkeypatch):
    monkeypatch.setattr(_device_check, "driver", lambda platform: "610.43.02")
    client = types.SimpleNamespace(platform_version="PJRT C API\ncuda 13030")
    gpu = types.SimpleNamespace(platform="gpu", client=client)
    assert _device_check._versions([gpu, gpu]) == (
        f"jax {jax.__version__}, jaxlib {jax.lib.__version__}, PJRT C API cuda 13030, driver "
        "610.43.02"
    )


def test_results_are_values(healthy):
    one = healthy.results[0]
    assert dataclasses.replace(one, status="wrong") != one == dataclasses.replace(one)
    assert str(one) == "matmul, float32 [131, 130] x [130, 67]: right"
