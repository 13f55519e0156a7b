"""Records what a search was begun with, so that its folder never answers for another search."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import types
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fnet import _jax, jaxpr
from fnet.training import ConfigError
from fnet.training.checkpoints._leaves import is_key
from fnet.training.checkpoints._storage import location, write_whole

RECORD = "search.json"


def digest(tree: Any) -> str:
    """Returns a digest of the paths, dtypes, shapes and values of the leaves of a tree. Equal
    numbers of different types, such as 1, 1.0 and True, have different digests."""
    seal = hashlib.blake2b(digest_size=8)
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        kind = ""
        if is_key(leaf):
            kind, leaf = str(leaf.dtype), jax.random.key_data(leaf)
        array = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
        seal.update(f"{jax.tree_util.keystr(path)} {kind} {array.dtype} {array.shape}".encode())
        array = np.asarray(_sums(array) if isinstance(array, jax.Array) else array)
        seal.update(
            repr(array.tolist()).encode()
            if array.dtype.hasobject
            else np.ascontiguousarray(array).tobytes()
        )
    return seal.hexdigest()


@jax.jit
def _sums(x: jax.Array) -> jax.Array:
    """Returns two 32-bit sums of the mixed bits of all elements and their positions. Integers, so
    they do not depend on the order of the sum."""
    x = x.ravel()
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag])
    if not jnp.issubdtype(x.dtype, jnp.bool_) and jnp.issubdtype(x.dtype, jnp.inexact):
        x = lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    words = (
        [x.astype(jnp.uint32), (x >> 32).astype(jnp.uint32)]
        if x.dtype.itemsize == 8
        else [x.astype(jnp.uint32)]
    )
    position = lax.iota(jnp.uint32, x.size).reshape(x.shape)
    sums = []
    for seed in (0x9E3779B9, 0x85EBCA6B):
        total = position * jnp.uint32(seed) + jnp.uint32(seed)
        for word in words:
            total = _mixed(total ^ word)
        sums.append(total.sum(dtype=jnp.uint32))
    return jnp.stack(sums)


def _mixed(x):
    """The last steps of MurmurHash3, so that a change of any bit changes half of the others."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def program(function: Callable, *arguments: Any) -> str:
    """Returns a digest of what a function computes: of its jaxpr, or if JAX cannot trace it, of its
    bytecode. Both depend on the version of JAX or Python."""
    try:
        closed = _jax.make_jaxpr(function)(*arguments)
    except Exception:  # it reads concrete values, or is not a JAX function at all
        return hashlib.blake2b(_code(function, set()).encode(), digest_size=8).hexdigest()
    text = re.sub(r"0x[0-9a-f]+", "", str(closed.jaxpr))
    return hashlib.blake2b((text + digest(_constants(closed))).encode(), digest_size=8).hexdigest()


def _constants(closed: Any) -> list[Any]:
    """Returns the constant arrays of a jaxpr, whose text does not show their values."""
    inside = [body for equation in closed.jaxpr.eqns for body in jaxpr.bodies(equation)]
    return [*closed.consts, *(constant for body in inside for constant in _constants(body))]


def _code(value: Any, seen: set[int]) -> str:
    """Returns a text that identifies a function by its bytecode, its constants and the values that
    it closes over."""
    if id(value) in seen:
        return "..."
    if isinstance(value, functools.partial):
        return " ".join(_code(each, seen) for each in (value.func, value.args, value.keywords))
    if isinstance(value, types.CodeType):
        return f"{value.co_code.hex()} {value.co_names} {[_code(each, seen) for each in value.co_consts]}"
    if isinstance(value, types.FunctionType):
        seen = {*seen, id(value)}
        cells = []
        for cell in value.__closure__ or ():
            with contextlib.suppress(ValueError):  # an empty cell
                cells.append(cell.cell_contents)
        return " ".join(
            _code(each, seen)
            for each in (value.__code__, value.__defaults__, value.__kwdefaults__, cells)
        )
    if hasattr(value, "__wrapped__"):  # the result of jax.jit
        return _code(value.__wrapped__, seen)
    if isinstance(value, dict):
        return str({name: _code(each, seen) for name, each in value.items()})
    if isinstance(value, tuple | list):
        return str([_code(each, seen) for each in value])
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        return digest(value)
    return re.sub(r"0x[0-9a-f]+", "", f"{type(value).__qualname__} {value!r}")


def same_search(workdir: str | os.PathLike, made: Mapping[str, Any], below: str) -> None:
    """Writes what a search is made with to `workdir/search.json`, or compares it with that of the
    search in `workdir`.

    Args:
      made: a dict of JSON types.
      below: the name of a folder that an earlier search has written.

    Raises:
      ConfigError: `workdir` contains a search that was made with something else, or does not say
          what it was made with.
    """
    folder = location(workdir)
    path = folder / RECORD
    advice = "use the old values, or another workdir"
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        changed = [
            f"{name} was {before[name]!r}, is {made[name]!r}"
            for name in made
            if name in before and json.dumps(before[name]) != json.dumps(made[name])
        ]
        if changed:
            raise ConfigError(f"{workdir} holds another search ({'; '.join(changed)}): {advice}")
    elif (folder / below / "config.json").exists():
        raise ConfigError(
            f"{workdir} holds a search without {RECORD}, so what it was made with is unknown: use "
            "another workdir"
        )
    elif jax.process_index() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, f"{json.dumps(dict(made), indent=2)}\n".encode())


def of_population(step: Callable, state: Any, batch: Any) -> dict[str, Any]:
    """Identifies a population that begins: its hyperparameters, its initial values and its step.

    The initial values depend on the version of JAX and on the platform, and the step depends on the
    version. Their names say so, and only values of the same name are compared.
    """
    made = {f"step (jax {jax.__version__})": program(step, state, batch)}
    if int(state.step) == 0:
        where = f"jax {jax.__version__}, {jax.default_backend()}"
        made |= {
            "hyperparameters": digest(state.hyper),
            f"initial values ({where})": digest(state.members),
        }
    return made
