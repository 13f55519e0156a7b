"""How much of a chip's tiles a matrix product fills."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import jax.numpy as jnp

from fnet.hardware._chip import Chip
from fnet.hardware._count import Matmul

RULES = {
    "tpu": "a TPU's matrix unit pads k and n to its side (128; 256 from v6e on) and m to 8 rows of 32 bits, 16 of "
           "bf16 (Cloud TPU performance guide)",
    "NVIDIA": "cuBLAS cuts the result into tiles, 64 wide at the least, and k into pieces of 16 bytes (NVIDIA, Matrix "
              "Multiplication Background User's Guide); which tile it takes is its own choice: estimated",
    "AMD": "a matrix core multiplies tiles of 32 x 32 (AMD lab notes, matrix cores); estimated",
    "cpu": "the columns of the result run through vector registers of 16 to 64 bytes; estimated",
}


class Waste(NamedTuple):
    """A product whose sizes do not fill the tiles.

    `padded` are the sizes (batch, m, n, k) that the chip computes, `fill` the useful part of them, `wasted` the FLOPs
    of padding over all its runs.
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
        sizes = ", ".join(f"{name} {a} of {b}" for name, a, b in zip(("m", "n", "k"), self.shape[1:], self.padded[1:])
                          if a != b)
        return f"{self.scope or '(no scope)'}: {self.op} {self.dtype} fills {self.fill:.0%} of its tiles ({sizes})"


def padded_shape(shape: tuple[int, int, int, int], dtype: str, chip: Chip) -> tuple[int, int, int, int]:
    """The sizes (batch, m, n, k) rounded up to the chip's tiles, the operands swapped where that pads less."""
    b, m, n, k = shape
    size = max(1, jnp.dtype(dtype).itemsize)
    if chip.kind == "tpu":
        side, rows = chip.units.get("mxu_dim", 128), 8 * max(1, 4 // size)
        options = [(b, _up(m, rows), _up(n, side), _up(k, side)), (b, _up(m, side), _up(n, rows), _up(k, side))]
        return min(options, key=math.prod)
    if chip.kind == "gpu" and chip.vendor == "NVIDIA":
        return b, _up(m, 64), _up(n, 64), _up(k, max(1, 16 // size))
    if chip.kind == "gpu" and chip.vendor == "AMD":
        return b, _up(m, 32), _up(n, 32), _up(k, max(1, 16 // size))
    if chip.kind == "cpu":
        return b, m, _up(n, max(1, _vector_bytes(chip) // size)), k
    return shape


def rule(chip: Chip) -> str:
    """The rule by which `padded_shape` rounds up, and its source; "" where none is known."""
    return RULES.get(chip.kind) or RULES.get(chip.vendor, "")


def tile_waste(matmuls: Iterable[Matmul], chip: Chip, *, below: float = 0.9) -> tuple[Waste, ...]:
    """The products that fill less than `below` of their tiles, the most wasted FLOPs first."""
    found: dict[tuple, Waste] = {}
    for matmul in matmuls:
        padded = padded_shape(matmul.shape, matmul.dtype, chip)
        useful = math.prod(matmul.shape)
        if not useful or math.prod(padded) == useful:
            continue
        fill = useful / math.prod(padded)
        if fill >= below:
            continue
        key = (matmul.scope, matmul.op, matmul.shape, matmul.dtype)
        wasted, times = matmul.flops * (1 / fill - 1), matmul.times
        if key in found:
            wasted, times = wasted + found[key].wasted, times + found[key].times
        found[key] = Waste(matmul.scope, matmul.op, matmul.shape, padded, matmul.dtype, fill, wasted, times)
    return tuple(sorted(found.values(), key=lambda waste: -waste.wasted))


def _up(size: int, tile: int) -> int:
    return -(-size // tile) * tile


def _vector_bytes(chip: Chip) -> int:
    isa = f"{chip.architecture} {chip.units.get('isa', '')}"
    return 64 if "512" in isa or "amx" in isa else 32 if "avx" in isa else 16


def stored_bytes(shape: tuple[int, ...], itemsize: int, chip: Chip) -> int:
    """Bytes of an array in a chip's memory. A TPU lays the last two axes, in the order that takes less, out in tiles of
    8 x 128 numbers, or as few rows as there are, and vectors in tiles of 128 to 1,024; an array takes a multiple of 512
    bytes, of 1,024 on v2 and v3. Elsewhere nothing is added.

    Source: the layouts and argument sizes of programs compiled for TPUs by libtpu 0.0.52, which these are, but for
    some arrays of 16 bits with an axis of 1 among the last two.
    """
    if chip.kind != "tpu":
        return math.prod(shape) * itemsize
    begin = 1024 if chip.name in ("TPU v2", "TPU v3") else 512
    power = lambda n: 1 << max(0, n - 1).bit_length()
    whole = lambda n, tile: -(-n // tile) * tile
    if len(shape) < 2:
        n = shape[0] if shape else 1
        return whole(whole(n, min(1024, max(128, power(n)))) * itemsize, begin)
    *outer, rows, columns = shape
    area = lambda rows, columns: whole(rows, min(8, power(rows))) * whole(columns, 128)
    return whole(math.prod(outer) * min(area(rows, columns), area(columns, rows)) * itemsize, begin)
