"""The shardings of a training state: the axis along which each leaf is split, or the reason why it
is not split."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec as P

from fnet import _jax
from fnet.jaxpr import bodies, is_implicit, scan, split_over
from fnet.parallel._sharding_rules import path_of

# Arrays with fewer elements are not split: transfers would take more time than is saved.
SMALL = 1 << 12
_KEEPS = frozenset(
    ("convert_element_type", "copy", "optimization_barrier", "sharding_constraint", "name")
)


class Layout(NamedTuple):
    """`specs` is the tree of the partition specs of a state. `whole` is a list with a tuple (path,
    shape, reason) for each leaf that is replicated because it cannot be split."""

    specs: Any
    whole: list


def stated(state) -> Layout:
    """Returns the partition specs that the types of a state on an explicit mesh state."""
    return Layout(jax.tree.map(lambda leaf: P(*split_over(leaf)), state), [])


def layout(
    state,
    kind: str,
    mesh: Mapping[str, int],
    scanned: frozenset[str],
    ruled: dict[str, tuple] | None = None,
    shared: tuple[str, ...] = (),
) -> Layout:
    """Returns the partition specs of a state. If `kind` is "data", no leaf is split. If `kind` is
    "zero1", all leaves except parameters are split. If `kind` is "fsdp", all leaves are split. If
    `kind` is "pipeline", leaves over whose first axis a scan runs are split along this axis over
    "stage", and all others over "data" and "stage". What is split over "data" is also split over
    "context", if the mesh has this axis. Small leaves and leaves without a suitable axis are
    replicated. The mesh axes `shared` hold other rows of the batch, too, so what is split over
    "data" is also split over those of them that no rule uses for it.

    An array is split along the largest axis whose size is a multiple of the devices. If several axes
    have the largest size, the array is split along the last of these axes. An array is never split
    along an axis that a sharding rule already splits. An array is also never split along an axis
    over which a scan runs, because each iteration of the scan would need a transfer. Leaves of the
    optimizer's state that belong to a parameter, such as its moments, are split like this
    parameter. An implicit array, such as a quantized array, consists of an array of values and an
    array of scales. The scales of an implicit array are split along the same axis as its values if
    the number of scales along this axis is a multiple of `chips`.

    Args:
        state: a tree of shapes.
        kind: "data", "zero1", "fsdp", "context", "expert" or "pipeline".
        mesh: the mesh axes, {name: length}.
        scanned: paths of the leaves that a scan slices along their first axis.
        ruled: a dict {path of a parameter: its partition spec}, derived from the user's sharding
            rules. Default None.
        shared: names of mesh axes. Default: none.
    """
    leaves, structure = jax.tree.flatten_with_path(state)
    model = {path: leaf.shape for path, leaf in leaves if is_parameter(path, state)}
    named = {(path[1:], shape): path for path, shape in model.items() if path[1:]}
    beside, by_path = _beside(state, ()), {}
    stages = mesh["stage"] if kind == "pipeline" else 1
    more = ("stage",) * (kind == "pipeline") + ("context",) * (mesh.get("context", 1) > 1)
    specs, whole = [], []
    for path, leaf in leaves:
        source = next(
            (
                named[path[i:], leaf.shape]
                for i in range(len(path))
                if (path[i:], leaf.shape) in named
            ),
            path,
        )
        mine = (ruled or {}).get(path_of(source[1:]), ()) if source in model else ()
        if kind == "data" or (kind == "zero1" and path in model):
            specs.append(P(*mine))
            continue
        names = ("data", *more, *(name for name in shared if name not in mine))
        over = names if len(names) > 1 else "data"
        chips = math.prod(mesh[name] for name in names)
        layers = jax.tree_util.keystr(source) in scanned
        if kind == "pipeline" and layers and leaf.shape[0] % stages == 0:
            by_path[path] = P("stage")
            specs.append(P("stage"))
            continue
        spec, reason = _spec(leaf.shape, chips, mine, over, first=layers)
        if source in beside:
            values = by_path.get(beside[source], P())
            kept = [name if n % chips == 0 else None for name, n in zip(values, leaf.shape)]
            spec, reason = (P(*kept), None) if any(kept) else (P(), reason)
        by_path[path] = spec
        specs.append(spec)
        if reason and not mine:
            whole.append((jax.tree_util.keystr(path), leaf.shape, reason))
    return Layout(jax.tree.unflatten(structure, specs), whole)


def _spec(shape, chips, mine, over, *, first):
    if math.prod(shape) < SMALL:
        return P(*mine), "small"
    taken = {i for i, name in enumerate(mine) if name is not None}
    axes = [
        i
        for i in range(1 if first else 0, len(shape))
        if shape[i] % chips == 0 and shape[i] and i not in taken
    ]
    if not axes:
        return P(*mine), f"no axis of {list(shape)} is a multiple of {chips}"
    axis = max(axes, key=lambda i: (shape[i], i))
    spec = [*mine, *[None] * (len(shape) - len(mine))]
    spec[axis] = over
    while spec[-1] is None:
        spec.pop()
    return P(*spec), None


def _beside(tree, path) -> dict:
    """Returns a dict {path of an array of scales: path of the array of values}. The dict contains
    these paths for
    each implicit array of the tree that has scales, such as a quantized array."""
    found = {}
    for inner, leaf in jax.tree.leaves_with_path(
        tree, is_leaf=lambda x: is_implicit(x) and x is not tree
    ):
        if is_implicit(leaf):
            key = lambda name, at=(*path, *inner): (*at, jax.tree_util.GetAttrKey(name))
            found |= {key(name): key(values) for name, values in leaf.beside.items()}
            found |= _beside(leaf, (*path, *inner))
    return found


def is_parameter(path, state) -> bool:
    """Whether a leaf is a parameter. Parameters are in `state.params`, in `state["params"]`, or in
    the first item of a tuple."""
    if not path:
        return False
    return path_of(path[:1]) == (
        "params" if hasattr(state, "params") or isinstance(state, dict) else "0"
    )


def scanned_leaves(jaxpr, paths: list) -> frozenset[str]:
    """Returns the paths of those inputs of a jaxpr that a scan slices along their first axis."""
    marks = _scanned(jaxpr, [{i} for i in range(len(jaxpr.invars))])
    return frozenset(jax.tree_util.keystr(paths[i]) for i in marks if i < len(paths))


def _scanned(jaxpr, origins: list) -> set:
    came = dict(zip(jaxpr.invars, origins))
    read = lambda v: set() if isinstance(v, _jax.Literal) else came.get(v, set())
    found = set()
    for eqn in jaxpr.eqns:
        inputs = list(map(read, eqn.invars))
        if eqn.primitive.name == "scan":
            parts = scan(eqn)
            consts, carry, slices = parts.split(inputs)
            found.update(*slices)
            found |= _scanned(parts.jaxpr, [*consts, *(set() for _ in (*carry, *slices))])
            continue
        for body in bodies(eqn):
            if body.kind == "call":
                found |= _scanned(body.jaxpr, inputs)
        if eqn.primitive.name in _KEEPS and inputs:
            came[eqn.outvars[0]] = inputs[0]
    return found
