"""Computes how much of a chip's tiles a matrix product fills, and how many bytes padded arrays
occupy in memory."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fnet.cost._count import Matmul
from fnet.hardware._chip import Chip

RULES = {
    "tpu": "a TPU's matrix unit pads k and n to its side (128; 256 from v6e on) and m to 8 rows of 32 bits, 16 of "
    "bf16 (Cloud TPU performance guide)",
    "NVIDIA": "cuBLAS divides the result into tiles at least 64 wide, and k into pieces of 16 bytes (NVIDIA, Matrix "
    "Multiplication Background User's Guide); cuBLAS selects the size of the tile, so this is an "
    "estimate",
    "AMD": "a matrix core multiplies tiles of 32 x 32 (AMD lab notes, matrix cores); an estimate",
    "cpu": "vector registers hold 16 to 64 bytes of the columns of the result; an estimate",
}


class Waste(NamedTuple):
    """A matrix product whose sizes do not fill the chip's tiles.

    Attributes:
        scope: the scope path.
        op: "dot" or "conv".
        shape: its sizes (batch, m, n, k).
        padded: the sizes with which the chip computes, padding included.
        dtype: the dtype of the operands.
        fill: its FLOPs without padding divided by those with padding, between 0 and 1.
        wasted: the FLOPs that all its runs spend on padding.
        times: how often it runs.

    >>> count = cost.count(jnp.matmul, jnp.ones((512, 130)), jnp.ones((130, 512)))
    >>> [round(waste.fill, 2) for waste in cost.tile_waste(count.matmuls, hw.chips["TPU v5e"])]
    [0.51]
    """

    scope: str
    op: str
    shape: tuple[int, int, int, int]
    padded: tuple[int, int, int, int]
    dtype: str
    fill: float
    wasted: float
    times: int

    def __str__(self) -> str:
        sizes = ", ".join(
            f"{name} {a} of {b}"
            for name, a, b in zip(("m", "n", "k"), self.shape[1:], self.padded[1:])
            if a != b
        )
        return f"{self.scope or '(no scope)'}: {self.op} {self.dtype} fills {self.fill:.0%} of its tiles ({sizes})"


def padded_shape(
    shape: tuple[int, int, int, int], dtype: str, chip: Chip
) -> tuple[int, int, int, int]:
    """Rounds the sizes (batch, m, n, k) of a matrix product up to multiples of the chip's tile
    sizes. On a TPU, the operands are swapped if this needs less padding."""
    b, m, n, k = shape
    size = max(1, jnp.dtype(dtype).itemsize)
    if chip.kind == "tpu":
        side, rows = chip.units.get("mxu_dim", 128), 8 * max(1, 4 // size)
        options = [
            (b, _up(m, rows), _up(n, side), _up(k, side)),
            (b, _up(m, side), _up(n, rows), _up(k, side)),
        ]
        return min(options, key=math.prod)
    if chip.kind == "gpu" and chip.vendor in ("NVIDIA", "AMD"):
        side = 64 if chip.vendor == "NVIDIA" else 32
        return b, _up(m, side), _up(n, side), _up(k, max(1, 16 // size))
    if chip.kind == "cpu":
        return b, m, _up(n, max(1, _vector_bytes(chip) // size)), k
    return shape


def tile_size(chip: Chip, dtype: Any) -> int:
    """Returns the number of columns of the tiles (blocks) in which a chip computes the result of a
    matrix product.

    If the tiles of the chip are unknown, `tile_size` returns 1, so that every number of columns is
    a multiple of the tile size.

    Args:
        chip: the `Chip` that computes the matrix product.
        dtype: the dtype of the operands. The tile size depends on it on CPUs only, where a tile is
            as wide as a vector register.

    >>> from fnet import hardware as hw
    >>> cost.tile_size(hw.chips["TPU v5e"], "bfloat16")
    128
    >>> cpu = hw.Chip("a CPU", "cpu", architecture="AVX-512")
    >>> cost.tile_size(cpu, "bfloat16"), cost.tile_size(cpu, "float32")
    (32, 16)
    """
    if chip.kind == "tpu":
        return chip.units.get("mxu_dim", 128)
    return padded_shape((1, 1, 1, 1), str(jnp.dtype(dtype)), chip)[2]


def rule(chip: Chip) -> str:
    """Returns a text with the tile sizes that `padded_shape` uses and their source, or "" if they
    are unknown."""
    return RULES.get(chip.kind) or RULES.get(chip.vendor, "")


def tile_waste(matmuls: Iterable[Matmul], chip: Chip, *, below: float = 0.9) -> tuple[Waste, ...]:
    """Finds the matrix products that waste a part of their tiles, the worst first.

    A chip computes a matrix product in tiles (blocks) of a fixed size, and pads the operands to
    whole tiles.

    Args:
        matmuls: the matrix products, `Count.matmuls`.
        chip: the `Chip` that computes them.
        below: list those of whose computed FLOPs less than this fraction is useful, that is, not
            spent on padding. Default 0.9.

    Returns:
        A `Waste` for each of them, in descending order of wasted FLOPs.

    >>> count = cost.count(lambda x: x @ x, jax.ShapeDtypeStruct((100, 100), "float32"))
    >>> len(cost.tile_waste(count.matmuls, hw.chips["TPU v5e"]))
    1
    """
    found: dict[tuple, Waste] = {}
    for matmul in matmuls:
        padded = padded_shape(matmul.shape, matmul.dtype, chip)
        useful = math.prod(matmul.shape)
        if not useful or (fill := useful / math.prod(padded)) >= min(below, 1):
            continue
        key = (matmul.scope, matmul.op, matmul.shape, matmul.dtype)
        wasted, times = matmul.flops * (1 / fill - 1), matmul.times
        if key in found:
            wasted, times = wasted + found[key].wasted, times + found[key].times
        found[key] = Waste(
            matmul.scope, matmul.op, matmul.shape, padded, matmul.dtype, fill, wasted, times
        )
    return tuple(sorted(found.values(), key=lambda waste: -waste.wasted))


def _up(size: int, tile: int) -> int:
    return -(-size // tile) * tile


def _vector_bytes(chip: Chip) -> int:
    isa = f"{chip.architecture} {chip.units.get('isa', '')}"
    return 64 if "512" in isa or "amx" in isa else 32 if "avx" in isa else 16


class Stored(NamedTuple):
    """The number of bytes that arrays occupy in a chip's memory. `exact` is False if the number is
    an estimate."""

    bytes: int
    exact: bool

    @property
    def basis(self) -> str:
        return "exact" if self.exact else "estimated"

    def __add__(self, other: Stored) -> Stored:  # type: ignore[override]
        return Stored(self.bytes + other.bytes, self.exact and other.exact)


def stored(array: Any, chip: Chip) -> Stored:
    """Returns the number of bytes that an array occupies in a chip's memory. `array` is an array or
    a `jax.ShapeDtypeStruct`.

    Arrays of random keys are stored as integers. For dtypes smaller than one byte, such as int4,
    the result is only an estimate: it counts one byte for each element, but some chips pack several
    elements into one byte. TPUs do not support dtypes of 8 bytes natively, so the result for such
    dtypes is an estimate on a TPU.
    """
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.eval_shape(jax.random.key_data, array)
    itemsize = array.dtype.itemsize
    whole = not re.fullmatch(r"u?int[24]|float[46]_\w+", array.dtype.name)
    return Stored(
        stored_bytes(array.shape, itemsize, chip), whole and (chip.kind != "tpu" or itemsize <= 4)
    )


def stored_bytes(shape: tuple[int, ...], itemsize: int, chip: Chip) -> int:
    """Returns the number of bytes that an array with elements of `itemsize` bytes occupies in a
    chip's memory.

    A TPU stores two axes of an array in tiles of 128 columns and up to 8 rows. The tiled axes are
    the two axes that need the least padding. The number of rows of a tile is a power of two, and
    each column of a tile occupies at least 4 bytes (8 bytes on TPU v2 and v3). Vectors have tiles
    of 128 to 1,024 elements. A TPU rounds the number of bytes of an array up to a multiple of 512
    (1,024 on TPU v2 and v3). Other chips do not pad.

    Source: argument sizes of programs compiled by libtpu 0.0.52 (tests/cost/test_tiles.py).
    """
    if chip.kind != "tpu":
        return math.prod(shape) * itemsize
    unit, column = (1024, 8) if chip.name in ("TPU v2", "TPU v3") else (512, 4)
    power = lambda n: 1 << max(0, n - 1).bit_length()
    if len(shape) < 2:
        n = shape[0] if shape else 1
        return _up(_up(n, min(1024, max(128, power(n)))) * itemsize, unit)
    total, group = math.prod(shape), max(1, column // itemsize)
    if not total:
        return 0
    padded = min(
        total // (rows * columns) * _up(rows, min(8, max(group, power(rows)))) * _up(columns, 128)
        for rows, columns in itertools.permutations(shape, 2)
    )
    return _up(padded * itemsize, unit)
