"""Reads and writes the checkpoints of Orbax, which most training loops in Flax save.

Orbax writes. TensorStore reads, the library in which Orbax stores its arrays, and this module reads
the JSON files beside them. Orbax's own `restore` was tried first. It returns lost chunks of old
files as zeros and keys as integers if a file is lost, does not say which leaf is damaged, and leaves
behind reads in a closed event loop, which print their tracebacks later. Both libraries are imported
on first use: Orbax takes as long to import as JAX.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from fnet.training.checkpoints import _leaves, _shards
from fnet.training.checkpoints._load import Snapshot
from fnet.training.checkpoints._orbax_files import AGAIN, TREE, Files, Name, checksum, here, reason
from fnet.training.checkpoints._reading import CheckpointError, CheckpointWarning

_CHECKPOINT = "_CHECKPOINT_METADATA"  # in the folder of a checkpoint, which contains trees
_UNFINISHED = ".orbax-checkpoint-tmp"  # older versions append a number
_STEP = re.compile(r"(?:.*[_-])?(\d+)")  # 100, step_100, checkpoint-000100


def from_orbax(
    path: str | os.PathLike,
    *,
    step: int | None = None,
    item: str | None = None,
    part: str = "",
    like: Any = None,
    cast: bool = False,
) -> Any:
    """Reads a checkpoint that Orbax has written, in Flax's training loops or elsewhere.

    All forms are read that Orbax 0.12 writes: of its APIs v0 and v1, with and without OCDBT, zarr
    2 and 3, written by one process or by several. The files contain only JSON and arrays, and
    nothing in them is executed.

    Args:
      path: the folder of a `CheckpointManager` with one folder for each step, the folder of one
        step or checkpoint, or the folder of a tree. URLs such as gs:// are opened by etils and
        TensorStore, if these can, and are not tested.
      step: the step to read. Default None: the last one. Folders may be called 100, step_100 or
        similar. Unfinished saves do not count.
      item: the name of the tree in a checkpoint that contains several, such as "state". Default
        None: the only tree. MaxText's is called "items", `CheckpointManager`'s "default".
      part: the path of a subtree, such as "params" of a linen `TrainState`, or "params/params" of a
        checkpoint of MaxText. Nothing else is read. Default "": the complete tree.
      like: a tree with the structure of the saved one, or of `part`, such as
        `nnx.state(model)` or a `TrainState`. Its leaves may be `jax.ShapeDtypeStruct`s. Leaves are
        compared by their paths, and returned in the containers, with the types and the shardings of
        `like`. With several processes, each reads only its own shards of arrays whose sharding
        `like` states. Default None: the tree as Orbax has saved it.
      cast: whether to convert saved numbers to the dtypes of `like`. Default False: a different
        dtype raises an error. Python numbers and arrays without axes stand for each other
        if no digit is lost, because a jitted step makes an array of `TrainState.step`.

    Returns:
      With `like`, its structure. Without, dicts and lists. Orbax saves tuples as lists, and named
      tuples and dataclasses as dicts of their fields; `optax.EmptyState` becomes None. Arrays that
      were saved from JAX are JAX arrays on the default device, except for dtypes that JAX would
      change, such as float64. Those that were saved from NumPy are NumPy arrays. Numbers, strings,
      typed PRNG keys, None and empty containers are as they were saved. Keys of dicts are strings.

    Raises:
      FileNotFoundError: there is no such folder or step.
      CheckpointError: the folder has no tree of Orbax, or several; the tree differs from `like` (the
        message lists every leaf that is missing, unexpected, or of another shape or dtype); or a
        file is damaged. The bytes of arrays are verified only in checkpoints that `to_orbax` has
        written. In all others, a missing or shortened file raises an error, but a changed bit of an
        array does not, because Orbax stores no checksums.
      ValueError: `step` or `item` is passed for a folder that has only one.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     tr.to_orbax({"params": {"kernel": jnp.arange(3)}, "step": 7}, folder + "/7")
    ...     tree = tr.from_orbax(folder)
    >>> tree["params"]["kernel"].tolist(), tree["step"]
    ([0, 1, 2], 7)
    """
    folder = _tree_folder(path, step, item)
    files = Files(folder)
    begin = tuple(part.split("/")) if part else ()
    _subtree(folder, files.tree, begin)
    names = [name for name in files.names() if name[: len(begin)] == begin]
    entries = files.open(names)
    targets = {} if like is None else {begin + name: leaf for name, leaf in _named(like).items()}
    if like is not None:
        _compare(folder, entries, targets, cast, len(begin))
    leaves = {}
    with _together(folder, targets.values()):
        for name, value in files.read(
            {name: _sharding(targets.get(name), entries[name]) for name in names}
        ):
            if like is None:
                leaves[name] = _plain(value, entries[name])
            else:
                leaves[name] = _like(folder, name, targets[name], value, entries[name])
    if files.filled:
        warnings.warn(
            f"{folder}: an old Orbax wrote this, which left out chunks of zeros, so a lost chunk "
            f"cannot be told from zeros; chunks are missing of {', '.join(files.filled)}",
            CheckpointWarning,
            stacklevel=2,
        )
    if like is not None:
        return jax.tree.unflatten(jax.tree.structure(like), [leaves[name] for name in targets])
    return _subtree(folder, jax.tree.map(lambda leaf: leaves.get(leaf.name), files.tree), begin)


def to_orbax(snapshot: Snapshot | Any, path: str | os.PathLike) -> None:
    """Writes a checkpoint that Orbax reads: `StandardCheckpointer().restore(path)` and v1's `load`.

    The folder appears under its name when it is complete. Besides the arrays it contains a
    SHA-256 of each leaf, which `from_orbax` verifies and Orbax ignores. With several processes,
    every process calls `to_orbax`, with the same path on a shared file system, and writes its own
    shards; leaves that are divided over processes have no SHA-256.

    Args:
      snapshot: a `Snapshot` from `tr.load`, which becomes a dict with its "step", "params" and
        "state", and "ema" if there is one; or any pytree of arrays, numbers, strings and PRNG keys,
        such as a `TrainState` or `nnx.state(model)`, which is written as it is.
      path: the folder to create. It must not exist yet. To begin a folder of steps, use a path such
        as "runs/flax/100".

    Raises:
      FileExistsError: `path` exists.
      TypeError: leaves that Orbax cannot save. The message lists them.
      CheckpointError: the files could not be written.

    >>> import tempfile, orbax.checkpoint as ocp
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     tr.to_orbax({"kernel": jnp.ones(3)}, folder + "/flax")
    ...     tree = ocp.StandardCheckpointer().restore(folder + "/flax")
    >>> tree["kernel"].tolist()
    [1.0, 1.0, 1.0]
    """
    import orbax.checkpoint as ocp

    tree = _fields(snapshot) if isinstance(snapshot, Snapshot) else snapshot
    tree = jax.tree.map(lambda x: np.asarray(x) if isinstance(x, np.generic) else x, tree)
    leaves = _named(tree)
    if lines := _unsaveable(tree, leaves):
        raise TypeError("Orbax cannot save this tree:\n  " + "\n  ".join(lines))
    folder = _folder(path)
    if folder.exists():
        raise FileExistsError(f"{folder} exists: to_orbax replaces nothing; choose another path")
    unfinished = folder.parent / (folder.name + _UNFINISHED)
    mine = not unfinished.exists()
    sums = {".".join(name): checksum(leaf) for name, leaf in leaves.items() if here(leaf)}
    args = ocp.args.PyTreeSave(tree, custom_metadata={"fnet": {"sha256": sums}})
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            checkpointer.save(folder, args=args)
    except Exception as error:
        if mine and jax.process_index() == 0:
            unfinished.rmtree(missing_ok=True)
        raise CheckpointError(f"{folder}: Orbax could not write this ({reason(error)})") from error


def _fields(snapshot):
    fields = {"step": snapshot.step, "params": snapshot.params, "state": snapshot.state}
    return fields if snapshot.ema is None else fields | {"ema": snapshot.ema}


def _unsaveable(tree, leaves) -> list[str]:
    """Returns a line of text for each leaf that Orbax would refuse or mix up. Orbax itself raises
    in a thread, at the first such leaf, and leaves an unfinished folder."""
    import tensorstore

    if jax.tree_util.all_leaves([tree]):
        return ["one leaf without a container: pass a dict, such as {'params': params}"]
    lines, places = [], {}
    for name, leaf in leaves.items():
        shown = "/".join(name)
        other = places.setdefault(".".join(name), shown)  # Orbax's name of the leaf's files
        if other != shown:
            lines.append(f"'{shown}' and '{other}' would have the same files: rename one")
        if isinstance(leaf, str):
            if "~" in shown:
                lines.append(f"'{shown}' is a string, in whose name Orbax allows no '~': rename it")
            continue
        try:
            entry = _leaves.entry(shown, leaf)
        except TypeError as error:
            lines.append(str(error))
            continue
        if "python" in entry:
            if isinstance(leaf, complex):
                lines.append(f"'{shown}' is a Python complex: make it a NumPy array")
            elif isinstance(leaf, int) and not -(2**63) <= leaf < 2**63:
                lines.append(f"'{shown}' is {leaf}, which has more than 64 bits")
            continue
        if not isinstance(leaf, jax.Array | np.ndarray):
            lines.append(f"'{shown}' is a {type(leaf).__name__} without values")
            continue
        if math.prod(entry["shape"]) == 0:
            lines.append(f"'{shown}' has no elements: {_leaves.describe(entry)}; leave it out")
        try:
            tensorstore.dtype(_leaves.DTYPES[entry["dtype"]])
        except ValueError:
            lines.append(f"'{shown}' is {_leaves.describe(entry)}: convert it to another dtype")
    return lines


def _name(path) -> Name:
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def _named(tree) -> dict[Name, Any]:
    return {_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def _folder(path):
    from etils import epath

    text = os.fspath(path)
    return epath.Path(text if "://" in text else os.path.abspath(text))


def _tree_folder(path, step, item):
    """Returns the folder of the tree that `path`, `step` and `item` select."""
    folder = _folder(path)
    if not folder.exists():
        raise FileNotFoundError(f"{folder}: there is no such folder")
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is a file; Orbax saves folders. A file of flax.training.checkpoints is read "
            "by flax.serialization.msgpack_restore"
        )
    if _UNFINISHED in folder.name:
        raise CheckpointError(f"{folder}: Orbax has not finished this save")
    if (folder / TREE).exists():
        if step is not None or item is not None:
            raise ValueError(
                f"{folder} is one tree, without steps and items: leave out step= and item="
            )
        return folder
    inside = {
        child.name: child
        for child in sorted(folder.iterdir())
        if child.is_dir() and _UNFINISHED not in child.name
    }
    steps = {} if (folder / _CHECKPOINT).exists() else _steps(folder, inside)
    if not steps:
        if step is not None:
            raise ValueError(f"{folder} is one checkpoint, without steps: leave out step={step}")
        return _item(folder, inside, item, "")
    if step is not None and step not in steps:
        raise FileNotFoundError(f"{folder}: no step {step} here, there are steps {sorted(steps)}")
    chosen = steps[max(steps) if step is None else step]
    if (chosen / TREE).exists():
        if item is not None:
            raise ValueError(f"{chosen} is one tree, without items: leave out item={item!r}")
        return chosen
    inside = {child.name: child for child in sorted(chosen.iterdir()) if child.is_dir()}
    return _item(chosen, inside, item, f"; there are steps {sorted(steps)}")


def _steps(folder, inside) -> dict[int, Any]:
    steps: dict[int, Any] = {}
    for name, child in inside.items():
        if match := _STEP.fullmatch(name):
            other = steps.setdefault(int(match[1]), child)
            if other is not child:
                raise CheckpointError(
                    f"{folder}: both '{other.name}' and '{name}' are step {int(match[1])}: pass "
                    "the path of one"
                )
    return steps


def _item(folder, inside, item, also):
    trees = [name for name, child in inside.items() if (child / TREE).exists()]
    if item is not None and item in trees:
        return inside[item]
    there = ", ".join(f"'{name}'" for name in trees) or "none"
    if item is not None:
        raise CheckpointError(f"{folder}: there is no tree '{item}' here; the trees are: {there}")
    if len(trees) == 1:
        return inside[trees[0]]
    if trees:
        raise CheckpointError(f"{folder}: choose a tree with item=: {there}")
    raise CheckpointError(
        f"{folder}: no tree of Orbax here (a folder with {TREE}){also}." + _other_format(folder)
    )


def _other_format(folder) -> str:
    if (folder / "checkpoint").exists() or any(folder.glob("*/checkpoint")):
        return f" The file 'checkpoint' is of an Orbax before 0.4.3: {AGAIN}"
    if (folder / "checkpoints").exists() or (folder / "manifest.json").exists():
        return " This seems to be a run of fnet: use tr.load or tr.restore"
    return ""


def _subtree(folder, tree, name: Name):
    for depth, key in enumerate(name):
        children = {}
        if isinstance(tree, Mapping):
            children = {str(child): value for child, value in tree.items()}
        elif isinstance(tree, list | tuple):
            children = {str(index): value for index, value in enumerate(tree)}
        if key not in children:
            there = ", ".join(f"'{child}'" for child in children) or "nothing"
            raise CheckpointError(
                f"{folder}: no part '{'/'.join(name[: depth + 1])}' in this tree; at this place "
                f"there is {there}"
            )
        tree = children[key]
    return tree


def _compare(folder, entries, targets, cast, depth) -> None:
    lines = []
    wanted = {name: _wanted(name, leaf) for name, leaf in targets.items()}
    for name in sorted(entries.keys() | wanted.keys()):
        shown = "/".join(name[depth:])
        saved, target = entries.get(name), wanted.get(name)
        if saved is None:
            lines.append(
                f"'{shown}': not in the checkpoint, the target has {_leaves.describe(target)}"
            )
        elif target is None:
            lines.append(
                f"'{shown}': {_leaves.describe(saved)} in the checkpoint, not in the target"
            )
        elif not _fits(saved, target, cast):
            lines.append(
                f"'{shown}': {_leaves.describe(saved)} in the checkpoint, the target has "
                f"{_leaves.describe(target)}"
            )
    if lines:
        raise CheckpointError(
            f"{folder}: this checkpoint is of something else:\n  "
            + "\n  ".join(lines)
            + _boxed(entries, wanted)
        )
    for name, leaf in targets.items():
        if (sharding := getattr(leaf, "sharding", None)) is not None:
            try:
                sharding.shard_shape(tuple(leaf.shape))
            except ValueError as error:
                raise ValueError(f"'{'/'.join(name[depth:])}': {error}") from None


def _boxed(entries, wanted) -> str:
    """A note if the trees differ only in the last part of each path, "value"."""
    unboxed = lambda names: {name[:-1] if name[-1:] == ("value",) else name for name in names}
    if entries.keys() == wanted.keys() or unboxed(entries) != unboxed(wanted):
        return ""
    return (
        "\nOnly one of the two has the boxes of Flax (nnx.state, nn.Partitioned), whose arrays are "
        "called 'value': nnx.to_pure_dict(state) and nn.unbox(tree) take them off"
    )


def _wanted(name, leaf) -> dict[str, Any]:
    return {"python": "str"} if isinstance(leaf, str) else _leaves.entry("/".join(name), leaf)


def _fits(saved, target, cast) -> bool:
    if _leaves.describe(saved) == _leaves.describe(target):
        return True
    either = (saved, target)
    if any("key" in leaf or leaf.get("python") == "str" for leaf in either):
        return False
    shapes = [leaf.get("shape", []) for leaf in either]
    if shapes[0] != shapes[1]:
        return False
    kinds = [_kind(leaf) for leaf in either]
    if cast:
        return kinds[1] == "c" or kinds[0] != "c"  # not without the imaginary part
    if sum("python" in leaf for leaf in either) != 1:
        return False
    # From a Python float, which has 64 bits, to an array, digits would be lost.
    return kinds[0] == kinds[1] and not (kinds[0] in "fc" and "python" in saved)


def _kind(leaf) -> str:
    if "python" in leaf:
        return {"bool": "b", "int": "i", "float": "f", "complex": "c"}[leaf["python"]]
    dtype = _leaves.DTYPES.get(leaf["dtype"])
    if dtype is None:
        return "?"
    for kind, of in (("f", "floating"), ("i", "integer"), ("c", "complexfloating")):
        if jax.numpy.issubdtype(dtype, getattr(jax.numpy, of)):
            return kind
    return dtype.kind


def _sharding(leaf, entry):
    """Returns the sharding of a target leaf if the array can be read in its shards. All others are
    read whole, as NumPy arrays: keys, arrays on one device, and dtypes that JAX would change, such
    as float64, which would be rounded twice on its way to float16."""
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) or _leaves.is_key(leaf):
        return None
    dtype = _leaves.DTYPES.get(entry.get("dtype"))
    if dtype is None or jax.dtypes.canonicalize_dtype(dtype) != dtype:
        return None
    sharding = leaf.sharding
    return None if sharding is None or len(sharding.device_set) == 1 else sharding


@contextlib.contextmanager
def _together(folder, targets) -> Iterator[None]:
    """Raises an error in every process if one process cannot read its shards. Otherwise the others
    would wait for it in their next step."""
    shardings = (getattr(leaf, "sharding", None) for leaf in targets)
    if all(sharding is None or sharding.is_fully_addressable for sharding in shardings):
        yield
        return
    problem = None
    try:
        yield
    except Exception as error:
        problem = error
    came = _shards.together(problem)
    if problem is not None:
        raise problem
    if came.any():
        raise CheckpointError(
            f"{folder}: process {int(came.argmax())} could not read this checkpoint; its own error "
            "states the reason"
        )


def _plain(value, entry) -> Any:
    if "python" in entry:
        return value if isinstance(value, str) else value.item()
    return value if entry["host"] else _leaves.plain(value, entry)


def _like(folder, name, leaf, value, entry) -> Any:
    if isinstance(leaf, str):
        return value
    if type(leaf) in (bool, int, float, complex):
        return type(leaf)(value.item())
    if isinstance(value, jax.Array):
        if value.dtype == leaf.dtype:
            return value
        return jax.jit(lambda x: x.astype(leaf.dtype), out_shardings=value.sharding)(value)
    if entry.get("python") == "int" and jax.numpy.issubdtype(leaf.dtype, jax.numpy.integer):
        limits = jax.numpy.iinfo(leaf.dtype)
        if not limits.min <= value.item() <= limits.max:
            raise CheckpointError(
                f"{folder}: '{'/'.join(name)}' is {value.item()}, which {leaf.dtype} cannot hold"
            )
    weak = {"weak": True} if getattr(leaf, "weak_type", False) else {}
    return _leaves.like(leaf, value, entry | weak)
