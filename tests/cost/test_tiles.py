"""Bytes of arrays in a TPU's memory, beside the argument sizes of compiled programs."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest

from fnet import hardware as hw
from fnet.cost._tiles import Stored, stored, stored_bytes

# Argument sizes of programs that libtpu 0.0.52 compiled: (dtype, shape) -> bytes on v5e, and on v3.
SIZES = {
    ("float32", (32, 33, 33)): (540672, 540672),
    ("float32", (33, 32, 3, 3)): (147456, 147456),
    ("float32", (1, 3, 33)): (1536, 2048),
    ("float32", (3, 3, 1, 32)): (4608, 6144),
    ("bfloat16", (1, 1000)): (4096, 8192),
    ("bfloat16", (9, 1, 33)): (4096, 4096),
    ("int8", (1, 1000)): (4096, 8192),
    ("int8", (33, 33, 1)): (5120, 5120),
    ("bool", (257, 1)): (1536, 3072),
    ("bool", (2, 500)): (2048, 4096),
    ("int32", (17, 4, 3)): (6144, 6144),
    ("uint32", (33, 33, 10, 16)): (2703360, 2703360),
    ("float32", ()): (512, 1024),
    ("float32", (0, 3)): (0, 0),
}
LIBTPU = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
)


@pytest.mark.parametrize(("dtype", "shape"), SIZES, ids=str)
def test_sizes_of_compiled_arguments(dtype, shape):
    array = jax.ShapeDtypeStruct(shape, dtype)
    assert [stored(array, hw.chips[chip]) for chip in ("TPU v5e", "TPU v3")] == [
        Stored(size, True) for size in SIZES[dtype, shape]
    ]
    assert stored(array, hw.chips["H100 SXM5 80GB"]).bytes == array.size * array.dtype.itemsize


def test_keys_are_integers():
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 5))
    assert stored(keys, hw.chips["TPU v5e"]) == Stored(
        stored_bytes((5, 2), 4, hw.chips["TPU v5e"]), True
    )


@pytest.mark.parametrize(
    ("dtype", "chip", "exact"),
    [
        ("int4", "TPU v5e", False),
        ("uint4", "H100 SXM5 80GB", False),
        ("complex64", "TPU v5e", False),
        ("complex64", "H100 SXM5 80GB", True),
        ("float8_e4m3fn", "TPU v5e", True),
    ],
)
def test_what_is_not_known_is_estimated(dtype, chip, exact):
    found = stored(jax.ShapeDtypeStruct((8, 128), dtype), hw.chips[chip])
    assert found.exact == exact and found.basis == ("exact" if exact else "estimated")
    assert (found + Stored(1, True)) == Stored(found.bytes + 1, exact)


@LIBTPU
@pytest.mark.parametrize("name", ["v5e:2x2", "v3:2x2"])
def test_a_compiled_program_has_these_sizes(name):
    from fnet.parallel._targets import target

    found = target(name)
    place = jax.sharding.SingleDeviceSharding(found.devices[0])
    arrays = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=place)
        for dtype in (jnp.float32, jnp.bfloat16, jnp.int8, jnp.bool_)
        for shape in [
            (1, 1),
            (3,),
            (1000, 1),
            (7, 7, 3, 64),
            (3, 3, 96, 1),
            (17, 40, 5),
            (2, 33, 1, 9),
        ]
    ]
    for array in arrays:
        program = jax.jit(lambda x: x, donate_argnums=0).trace(array).lower().compile()
        assert (
            program.memory_analysis().argument_size_in_bytes == stored(array, found.chip).bytes
        ), array
