"""Layers on all shardings of their input and kernel, compared with one device.

    python -m tests.parallel.sharding_product --draw 200        # of the complete product of each layer, 200 drawn cases
    python -m tests.parallel.sharding_product --layer grouped --mesh 2x2 --situation "in_shardings"

A case assigns each mesh axis to an axis of the input and to an axis of the kernel, or to none; two
mesh axes on one array axis occur in both orders. The shardings of the bias and the cotangent are
drawn. A case is equal if the output and the gradients of the input, the kernel and the bias are
those of one device, element by element; refused if there is an error; and wrong otherwise. On an
explicit mesh, JAX refuses shardings of which it cannot infer the sharding of the result. The
column "gathered" is the largest number of bytes that a case gathers on each device because the
layer avoids a wrong result. The exit code is 1 if a case is wrong in a situation in which layers
promise to be right (`PROMISED`). In the others, XLA may also abort the process.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import itertools
import math
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

if (
    __name__ == "__main__"
):  # before JAX starts: eight devices, a fast compiler, and no warnings of the partitioner
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
    import tests.conftest  # noqa: F401

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fnet import layers as nn
from fnet import parallel
from fnet.jaxpr import typed

LAYERS = {  # layer, shape of the input
    "1d": (nn.Conv(8, 4), (8, 16, 8)),
    "2d": (nn.Conv(8, 3), (8, 8, 8, 8)),
    "even window": (nn.Conv(8, 4), (8, 8, 8, 8)),
    "strided": (nn.Conv(8, 2, 2, padding="VALID"), (8, 8, 8, 8)),
    "strided, overlapping": (nn.Conv(8, 4, 2), (8, 8, 8, 8)),
    "dilated": (nn.Conv(8, 3, dilation=2), (8, 8, 8, 8)),
    "causal": (nn.Conv(8, 4, padding="CAUSAL"), (8, 16, 8)),
    "pointwise": (nn.Conv(8, 1), (8, 8, 8, 8)),
    "grouped 1d": (nn.Conv(8, 4, groups=2), (8, 16, 8)),
    "grouped": (nn.Conv(8, 2, groups=4), (8, 8, 8, 8)),
    "few rows": (nn.Conv(8, 3, groups=2), (4, 8, 8, 8)),
    "depthwise": (nn.DepthwiseConv(4, 2), (8, 8, 8, 8)),
    "depthwise 1d": (nn.DepthwiseConv(4), (8, 16, 8)),
    "transposed": (nn.ConvTranspose(8, 4, 2), (8, 4, 4, 8)),
    "transposed 1d": (nn.ConvTranspose(8, 4, 2), (8, 8, 8)),
    "transposed, grouped 1d": (nn.ConvTranspose(8, 3, 2, groups=4), (8, 8, 8)),
    "max": (nn.MaxPool(2), (8, 8, 8, 8)),
    "max 1d": (nn.MaxPool(2), (8, 16, 8)),
    "overlapping max": (nn.MaxPool(3, 1, padding="SAME"), (8, 8, 8, 8)),
    "overlapping max, strided": (nn.MaxPool(3, 2, padding=1), (8, 8, 8, 8)),
    "overlapping max 1d": (nn.MaxPool(3, 1, padding="SAME"), (8, 16, 8)),
    "average": (nn.AvgPool(2), (8, 8, 8, 8)),
    "average 1d": (nn.AvgPool(2), (8, 16, 8)),
    "overlapping average": (nn.AvgPool(3, 2, padding="SAME"), (8, 8, 8, 8)),
    "global average": (nn.GlobalAvgPool(), (8, 8, 8, 8)),
}
MESHES = {"2x2": (2, 2), "2x4": (2, 4)}
STACKED = 2  # the length of the axis that vmap maps
SITUATIONS = {  # which of params and input `vmap` maps
    "placed": (None, None),
    "set_mesh": (None, None),
    "with mesh": (None, None),
    "in_shardings": (None, None),
    "vmap of inputs": (None, 0),
    "vmap of kernels": (0, None),
    "vmap of both": (0, 0),
    "explicit mesh": (None, None),
}
PROMISED = tuple(name for name in SITUATIONS if name != "in_shardings")


class Prepared(NamedTuple):
    """A layer's program.

    Attributes:
        run: computes the output and the gradients of params and input.
        args: params, input and cotangent, arrays of integers, so that sums are exact.
        want: the results of one device.
    """

    run: Callable
    args: tuple
    want: Any


def mesh(*sizes: int, kind: AxisType = AxisType.Auto) -> Mesh:
    devices = np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes)
    return Mesh(devices, ("a", "b")[: len(sizes)], axis_types=(kind,) * len(sizes))


def mesh_for(situation: str, *sizes: int) -> Mesh:
    explicit = situation == "explicit mesh"
    return mesh(*sizes, kind=AxisType.Explicit if explicit else AxisType.Auto)


def shardings(shape: tuple[int, ...], mesh: Mesh) -> list[NamedSharding]:
    """All shardings that divide an array: each axis of the mesh splits one axis of the array, or
    none."""
    found = []
    for places in itertools.product((None, *range(len(shape))), repeat=len(mesh.shape)):
        split = [
            tuple(name for name, place in zip(mesh.shape, places) if place == i)
            for i in range(len(shape))
        ]
        parts = [math.prod(mesh.shape[name] for name in names) for names in split]
        if any(size % part for size, part in zip(shape, parts)):
            continue
        found.append(NamedSharding(mesh, P(*(names or None for names in split))))
        if any(len(names) > 1 for names in split):
            found.append(NamedSharding(mesh, P(*(names[::-1] or None for names in split))))
    return found


@functools.cache
def prepared(name: str, mapped: tuple[int | None, int | None] = (None, None)) -> Prepared:
    layer, shape = LAYERS[name]
    draw = lambda shape: np.random.default_rng(len(shape)).integers(-3, 4, shape).astype(np.float32)
    params = jax.eval_shape(layer.init, jax.random.key(0), jax.ShapeDtypeStruct(shape, np.float32))[
        0
    ]
    stacked = lambda shape, axis: shape if axis is None else (STACKED, *shape)
    params = jax.tree.map(lambda leaf: draw(stacked(leaf.shape, mapped[0])), params)
    x = (
        np.random.default_rng(0)
        .permutation(math.prod(stacked(shape, mapped[1])))
        .astype(np.float32)
    )
    x = x.reshape(stacked(shape, mapped[1]))
    x = x if isinstance(layer, nn.MaxPool) else x % 7 - 3
    f = layer if mapped == (None, None) else jax.vmap(layer, mapped)
    cotangent = 36 * draw(jax.eval_shape(f, params, x).shape)  # 36: means are exact, too

    def run(params, x, cotangent):
        y, transpose = jax.vjp(f, params, x)
        if (place := typed(jax.typeof(y))) is not None:
            cotangent = jax.sharding.reshard(cotangent, place)
        return y, transpose(cotangent)

    args = params, x, cotangent
    return Prepared(run, args, jax.tree.map(np.asarray, jax.jit(run)(*args)))


def product(name: str, situation: str, mesh: Mesh) -> list[tuple]:
    """All cases of a layer: (kernel's sharding, input's sharding), without the kernel's if there
    are no params."""
    params, x, _ = prepared(name, SITUATIONS[situation]).args
    kernels = shardings(params["kernel"].shape, mesh) if params else [None]
    return list(itertools.product(kernels, shardings(x.shape, mesh)))


def placed(name: str, situation: str, mesh: Mesh, case: tuple, draw: random.Random) -> tuple:
    """The shardings of a case, of params, input and cotangent."""
    params, _, cotangent = prepared(name, SITUATIONS[situation]).args
    some = lambda leaf: draw.choice(shardings(leaf.shape, mesh))
    if situation == "explicit mesh":  # where JAX adds no arrays that are split differently
        some = lambda leaf: NamedSharding(mesh, P())
    places = {key: case[0] if key == "kernel" else some(leaf) for key, leaf in params.items()}
    return places, case[1], some(cotangent)


class Outcome(NamedTuple):
    """What became of a case.

    Attributes:
        result: "equal", "refused" or "wrong".
        why: the error, or the results that are wrong.
        gathered: the bytes that each device has gathered for the layer's own constraints, in all
            arrays together.
    """

    result: str
    why: str = ""
    gathered: int = 0


def outcome(name: str, situation: str, mesh: Mesh, places: tuple) -> Outcome:
    """Computes one case."""
    each = prepared(name, SITUATIONS[situation])
    try:
        got, gathered = _computed(each, situation, mesh, places)
    except Exception as error:
        return Outcome("refused", f"{type(error).__name__}: {error}")
    names = [
        jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(each.want)
    ]
    pairs = zip(names, jax.tree.leaves(got), jax.tree.leaves(each.want))
    wrong = [name for name, a, b in pairs if not np.allclose(a, b, rtol=1e-5, atol=0)]
    return Outcome("wrong", ", ".join(wrong), gathered) if wrong else Outcome("equal", "", gathered)


def _computed(each, situation, mesh, places):
    """Returns (the results, the gathered bytes)."""
    contexts = {
        "set_mesh": jax.set_mesh,
        "with mesh": lambda mesh: mesh,
        "explicit mesh": jax.set_mesh,
    }
    # On an explicit mesh, jax 0.12 names the gather of an argument after the argument.
    named = "" if situation == "explicit mesh" else "avoid_"
    args, options = each.args, {"in_shardings": places}
    if situation not in ("set_mesh", "with mesh", "in_shardings"):
        args, options = jax.tree.map(jax.device_put, args, places), {}
    with contexts.get(situation, contextlib.nullcontext)(mesh):
        program = jax.jit(each.run, **options).lower(*args).compile()
        got = jax.tree.map(np.asarray, program(*args))
    return got, sum(
        transfer.bytes
        for transfer in parallel.ledger(program).transfers
        if transfer.collective == "all-gather" and named in transfer.scope
    )


def drawn(name: str, situation: str, mesh: Mesh, count: int | None) -> Iterator[tuple]:
    """Shardings of `count` drawn cases, or of all."""
    draw = random.Random(f"{name} {situation} {mesh.shape}")
    cases = product(name, situation, mesh)
    for case in cases if count is None or count >= len(cases) else draw.sample(cases, count):
        yield placed(name, situation, mesh, case, draw)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--draw", type=int, metavar="N", help="draw N cases of each product; default: all"
    )
    parser.add_argument("--layer", action="append", choices=LAYERS, help="default: all")
    parser.add_argument("--mesh", action="append", choices=MESHES, help="default: all")
    parser.add_argument("--situation", action="append", choices=SITUATIONS, help="default: placed")
    parser.add_argument(
        "--show",
        type=int,
        default=1,
        metavar="N",
        help="show N cases that are not equal; default 1",
    )
    options = parser.parse_args()
    print(f"jax {jax.__version__}")
    print(
        f"{'situation':16} {'layer':26} {'mesh':5} {'of':>6} {'equal':>6} {'refused':>8} "
        f"{'wrong':>6} {'gathered':>9} {'s':>5}"
    )
    broken = False
    for situation in options.situation or ["placed"]:
        for name, size in itertools.product(options.layer or LAYERS, options.mesh or MESHES):
            if SITUATIONS[situation][0] == 0 and not prepared(name).args[0]:
                continue  # no kernel to map
            started, counts, most, shown = time.monotonic(), collections.Counter(), 0, []
            each = mesh_for(situation, *MESHES[size])
            for places in drawn(name, situation, each, options.draw):
                found = outcome(name, situation, each, places)
                counts[found.result] += 1
                most = max(most, found.gathered)
                if found.result != "equal" and len(shown) < options.show:
                    specs = jax.tree.map(lambda place: place.spec, places)
                    shown.append(f"    {found.result}: {specs}: {found.why[:300]}")
            print(
                f"{situation:16} {name:26} {size:5} {len(product(name, situation, each)):6} "
                f"{counts['equal']:6} {counts['refused']:8} {counts['wrong']:6} {most:9,} "
                f"{time.monotonic() - started:5.0f}",
                flush=True,
            )
            print(*shown, sep="\n", end="\n" * bool(shown), flush=True)
            broken = broken or (bool(counts["wrong"]) and situation in PROMISED)
            jax.clear_caches()
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
