"""Describes the leaves of a tree in a checkpoint, and compares their dtypes and shapes with the
expected ones."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

_NUMBERS = (bool, int, float, complex)
_NAMES = (
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
)
_ODD = [
    kind
    for kind in vars(ml_dtypes).values()
    if isinstance(kind, type) and issubclass(kind, np.generic)
]
DTYPES = {name: np.dtype(name) for name in _NAMES} | {
    np.dtype(kind).name: np.dtype(kind) for kind in _ODD
}
_KEYS = ("threefry2x32", "rbg", "unsafe_rbg")


def paths(tree: Any) -> dict[str, Any]:
    """Returns a dict of the leaves of a tree by path, such as "params/conv1/kernel".

    Raises:
      ValueError: two leaves have the same path.
    """
    found: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if name in found:
            raise ValueError(
                f"two leaves of this tree have the path '{name}': rename one, so that no name "
                f"holds a '/'"
            )
        found[name] = leaf
    return found


def is_key(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


def entry(path: str, leaf: Any) -> dict[str, Any]:
    """Returns the entry of a leaf in a checkpoint's manifest, without the location of the leaf's
    bytes.

    Raises:
      TypeError: the leaf is not an array, a number or a PRNG key.
    """
    if type(leaf) in _NUMBERS:
        return {"python": type(leaf).__name__}
    if is_key(leaf):
        data = jax.eval_shape(jax.random.key_data, leaf)
        return {"dtype": data.dtype.name, "shape": list(data.shape), "key": _implementation(leaf)}
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct | np.ndarray | np.generic):
        if leaf.dtype.name in DTYPES:
            weak = {"weak": True} if getattr(leaf, "weak_type", False) else {}
            return {"dtype": leaf.dtype.name, "shape": list(leaf.shape)} | weak
        kind = f"an array of {leaf.dtype}"
    else:
        kind = f"a {type(leaf).__name__}"
    raise TypeError(
        f"'{path}' is {kind}: a checkpoint holds arrays of numbers, Python numbers and PRNG keys"
    )


def _implementation(leaf):
    if isinstance(leaf, jax.Array):
        return str(jax.random.key_impl(leaf))
    return next(
        (name for name in _KEYS if jax.random.key(0, impl=name).dtype == leaf.dtype),
        str(leaf.dtype),
    )


def describe(leaf: Mapping[str, Any]) -> str:
    if "python" in leaf:
        return f"a Python {leaf['python']}"
    key = f" (PRNG key, {leaf['key']})" if "key" in leaf else ""
    return f"{leaf['dtype']}{list(leaf['shape'])}{key}"


def mismatches(
    saved: Mapping[str, Any], wanted: Mapping[str, Any], *, cast: bool = False
) -> list[str]:
    """Compares the leaves of a checkpoint with the leaves of a target tree. Returns a line of text
    for each leaf that is missing in the checkpoint or in the target, or that differs in shape or
    dtype. If `cast` is True, the dtype may differ."""
    lines = []
    for path in sorted(saved.keys() | wanted.keys()):
        if path not in saved:
            lines.append(
                f"'{path}': not in the checkpoint, the target has {describe(wanted[path])}"
            )
        elif path not in wanted:
            lines.append(f"'{path}': {describe(saved[path])} in the checkpoint, not in the target")
        elif describe(saved[path]) != describe(wanted[path]):
            old, new = saved[path], wanted[path]
            numbers = "dtype" in old and "dtype" in new and "key" not in old and "key" not in new
            if not (cast and numbers and old["shape"] == new["shape"]):
                lines.append(
                    f"'{path}': {describe(old)} in the checkpoint, the target has {describe(new)}"
                )
    return lines


def number(kind: str, raw: bytes) -> bool | int | float | complex:
    """Converts the bytes of a Python number, as returned by `number_bytes`, to the number."""
    if kind == "int":
        return int.from_bytes(raw, "little", signed=True)
    return np.frombuffer(raw, kind)[0].item()


def number_bytes(value: Any) -> np.ndarray:
    if type(value) is int:
        raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        return np.frombuffer(raw, np.uint8)
    return np.asarray(value).reshape(1).view(np.uint8)


def plain(array: np.ndarray, saved: Mapping[str, Any]) -> Any:
    """Converts a saved leaf to a Python number, a PRNG key or a JAX array, if no target tree is
    given. Saved arrays whose dtype JAX would change, such as float64, remain NumPy arrays."""
    if "python" in saved:
        return number(saved["python"], array.tobytes())
    if "key" in saved:
        return jax.random.wrap_key_data(jnp.asarray(array), impl=saved["key"])
    return (
        jnp.asarray(array) if jax.dtypes.canonicalize_dtype(array.dtype) == array.dtype else array
    )


def like(leaf: Any, array: np.ndarray, saved: Mapping[str, Any]) -> Any:
    """Converts a saved array to an array with the type, the dtype and the sharding of `leaf`, a
    target leaf."""
    if "key" not in saved and array.dtype != leaf.dtype:
        array = array.astype(leaf.dtype)
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return array if isinstance(leaf, np.ndarray) else array[()]
    # An uncommitted array must stay uncommitted, because it may be combined with sharded data.
    bound = isinstance(leaf, jax.ShapeDtypeStruct) or leaf.committed
    sharding = leaf.sharding if bound else None
    if "key" in saved:
        wrap = functools.partial(jax.random.wrap_key_data, impl=saved["key"])
        if sharding is not None and not sharding.is_fully_addressable:
            return jax.jit(wrap, out_shardings=sharding)(array)
        return jax.device_put(wrap(array), sharding)
    if sharding is not None and not sharding.is_fully_addressable:
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
    placed = jax.device_put(array, sharding)
    if saved.get("weak"):  # weakly typed: only with the same type are the results identical
        yielding = jnp.broadcast_to(
            jnp.asarray({"b": False, "i": 0, "c": 0j}.get(array.dtype.kind, 0.0)), array.shape
        )
        placed = yielding.at[...].set(placed) if yielding.dtype == array.dtype else placed
    return placed
