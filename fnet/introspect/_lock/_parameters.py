"""The parameters of an equation as text that is the same in all versions of JAX."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from fnet import _jax

# What the types of the results state, or how a loop is differentiated or compiled.
_LEFT_OUT = frozenset(
    """dtype new_dtype preferred_element_type index_dtype out_dtype element_type shape new_sizes
    weak_type linear unroll _split_transpose debug_info result_shape_dtypes sharding out_sharding
    is_stable vma in_tree out_tree np_printoptions logging_record""".split()
)
# Left out if they are 1 for all axes.
_STEPS = frozenset(
    "strides window_strides lhs_dilation rhs_dilation base_dilation window_dilation".split()
)
# Only these are about the devices of an array.
_PLACED = frozenset(("sharding_constraint", "reshard", "mesh_cast", "device_put"))
_KNOWN_FUNCTION = re.compile(r"scatter[-_](add|sub|mul|min|max)|reduce_window_\w+|cum\w+")
_ADDRESS = re.compile(r"0x[0-9a-f]+")


def text(primitive: str, digest: Callable[[Any], str], /, **params: Any) -> str:
    """Returns the parameters of an equation, such as "axes=[1] k=2".

    Parameters that are None, False or empty are left out, so that one that a later version of JAX
    adds changes nothing as long as it is not used.

    Args:
        primitive: the name of the primitive.
        digest: a function that returns a text for a jaxpr.
        params: the parameters.
    """
    write = _Writer(digest)
    left_out = _LEFT_OUT - {"sharding"} if primitive in _PLACED else _LEFT_OUT
    if _KNOWN_FUNCTION.fullmatch(primitive):
        left_out |= {"update_jaxpr", "update_consts"}
    words = []
    for name, value in sorted(params.items()):
        usual = name in left_out or (name in _STEPS and value and all(n == 1 for n in value))
        written = "" if usual else write(value)
        if written:
            words.append(f"{name}={written}")
    return " ".join(words)


class _Writer:
    """Writes a value without spaces, or "" if it is None, False or empty."""

    def __init__(self, digest: Callable[[Any], str]):
        self.digest = digest

    def __call__(self, value: Any) -> str:
        if value is None or value is False:
            return ""
        if isinstance(value, enum.Enum):
            return value.name.lower()
        if isinstance(value, (bool, int, float, complex, np.generic)):
            return str(value).replace(" ", "").lower()
        if isinstance(value, str):
            return _word(value)
        if hasattr(getattr(value, "jaxpr", value), "eqns"):
            return f"program:{self.digest(value)}"
        if isinstance(value, np.dtype) or (isinstance(value, type) and hasattr(value, "dtype")):
            return np.dtype(value).name
        if isinstance(value, np.ndarray | jax.Array):
            return f"array:{hashlib.sha256(np.asarray(value).tobytes()).hexdigest()[:12]}"
        return self.container(value)

    def container(self, value: Any) -> str:
        if isinstance(value, jax.sharding.NamedSharding):
            return self(value.spec)
        if isinstance(value, jax.sharding.PartitionSpec):
            return f"P{self(list(value)) or '[]'}"
        if isinstance(value, jax.sharding.Mesh | jax.sharding.AbstractMesh):
            return self(dict(value.shape))
        if hasattr(value, "key_shape"):  # of random keys
            return _word(str(value))
        if hasattr(value, "_asdict"):
            return self(value._asdict())
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self({f.name: getattr(value, f.name) for f in dataclasses.fields(value)})
        if isinstance(value, Mapping):
            words = [(str(name), self(each)) for name, each in value.items()]
            words = [f"{_word(name)}:{each}" for name, each in words if each]
            return f"{{{','.join(words)}}}" if words else ""
        if isinstance(value, (tuple, list)):
            if not any(each is not None for each in value):
                return ""
            return f"[{','.join(self(each) or '-' for each in value)}]"
        if isinstance(value, (set, frozenset)):
            return f"{{{','.join(sorted(self(each) or '-' for each in value))}}}" if value else ""
        return self.other(value)

    def other(self, value: Any) -> str:
        if isinstance(value, _jax.Primitive):
            return value.name
        if callable(value) and not isinstance(value, type):
            return "function"  # whose name may change
        shown = str(value)
        if _ADDRESS.search(shown) or len(shown) > 80:
            return type(value).__name__
        return _word(shown)


def _word(shown: str) -> str:
    return re.sub(r"[\s=%$~{};]+", "_", shown)
