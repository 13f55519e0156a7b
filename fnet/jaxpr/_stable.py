"""A program as plain data: lists, numbers and strings that mean the same in every later version of JAX.

This module represents a JAX program as plain data, called the stable form of the program, with only the operations that
the documentation of `fnet.export` lists. In this stable form of a program, the names and options of the operations are
defined by fnet, not by JAX. If JAX renames a primitive or a parameter, only `fnet/jaxpr/_stable.py` must change, and
existing programs remain valid.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fnet import _jax
from fnet.jaxpr import _scopes
from fnet.jaxpr._calls import scan
from fnet.jaxpr._flatten import flatten
from fnet.jaxpr._scopes import TOP


class Unsupported(NotImplementedError):
    """Raised for an operation that fnet cannot represent as plain data that is independent of the version of JAX.

    Attributes:
        primitive: the name of JAX's primitive.
        path: the path of the named scopes around the operation.
    """

    def __init__(self, primitive: str, path: str, why: str = ""):
        self.primitive, self.path = primitive, path
        super().__init__(f"the operation {primitive!r} at {path or 'the top level'!r} has no form that is independent "
                         f"of JAX{f' ({why})' if why else ''}; write this part of the model with other operations")


def stable(closed: Any) -> tuple[dict, list[np.ndarray]]:
    """Returns (the program as JSON data, its array constants) for a closed jaxpr.

    The program is a dict with the keys "values", "constants", "inputs", "equations" and "outputs". The list "values"
    contains the type [dtype, shape] of each value of the program. Equations refer to a value by its index in the list
    "values". Sizes of axes are integers or expressions of size variables (symbolic sizes). A literal is [dtype,
    number]. An equation is [operation, inputs, outputs, options, path of named scopes]. The body of a loop or branch is
    a dict with the keys "inputs", "equations" and "outputs", and may read the constants of the program.

    Raises:
        Unsupported: the program contains an operation that cannot be written in the stable form, which is independent
            of JAX.
    """
    closed = flatten(closed)
    writer = _Writer()
    constants = [writer.constant(v, x) for v, x in zip(closed.jaxpr.constvars, closed.consts)]
    body = writer.body(closed.jaxpr, TOP)
    return {"values": writer.values, "constants": constants + writer.more, **body}, writer.arrays


def size(value: Any) -> int | str:
    """Converts the size of an axis to JSON data: an integer, or a string for a symbolic size."""
    return int(value) if isinstance(value, (int, np.integer)) else str(value)


class _Writer:
    def __init__(self):
        self.values: list = []
        self.arrays: list[np.ndarray] = []
        self.more: list[int] = []      # constants of bodies
        self.ids: dict = {}

    def value(self, v) -> int:
        if v not in self.ids:
            self.ids[v] = len(self.values)
            self.values.append([str(v.aval.dtype), list(map(size, v.aval.shape))])
        return self.ids[v]

    def constant(self, v, x) -> int:
        if jax.dtypes.issubdtype(v.aval.dtype, jax.dtypes.extended):
            raise Unsupported("random_wrap", "", "a random key is a constant")
        self.arrays.append(np.asarray(x))
        return self.value(v)

    def atom(self, a) -> int | list:
        if not isinstance(a, _jax.Literal):
            return self.value(a)
        return [str(a.aval.dtype), _number(a.val)]

    def body(self, jaxpr, outer) -> dict:
        scope_of = _scopes.in_jaxpr(jaxpr, outer)
        equations = []
        for eqn in jaxpr.eqns:
            at = scope_of(eqn)
            if eqn.primitive.name not in _OPTIONS:
                raise Unsupported(eqn.primitive.name, at.path)
            if any(jax.dtypes.issubdtype(v.aval.dtype, jax.dtypes.extended) for v in (*eqn.invars, *eqn.outvars)):
                raise Unsupported(eqn.primitive.name, at.path, "random keys")
            name, options = _OPTIONS[eqn.primitive.name]
            inputs = [self.atom(a) for a in eqn.invars]
            filled = options(self, eqn, at) if callable(options) else {}
            equations.append([name or eqn.primitive.name, inputs, [self.value(v) for v in eqn.outvars], filled,
                              at.path])
        return {"inputs": [self.value(v) for v in jaxpr.invars], "equations": equations,
                "outputs": [self.atom(a) for a in jaxpr.outvars]}

    def closed(self, closed, at) -> dict:
        """Returns the body of a loop or branch. The constants of the body become constants of the whole program."""
        closed = _jax.close(closed)
        self.more += [self.constant(v, x) for v, x in zip(closed.jaxpr.constvars, closed.consts)]
        return self.body(closed.jaxpr, at)


def _number(x) -> int | float | bool | str:
    """Returns a number as JSON. Infinity and NaN become strings in the data, because JSON cannot represent them."""
    number = np.asarray(x).item()
    if isinstance(number, complex):
        raise Unsupported("complex", "", "complex numbers")
    return str(number) if isinstance(number, float) and not math.isfinite(number) else number


def _scan(self, eqn, at):
    parts = scan(eqn)
    return {"body": self.closed(parts.closed, at), "consts": parts.consts, "carry": parts.carry,
            "length": size(parts.length), "reverse": bool(parts.options.get("reverse"))}


def _while(self, eqn, at):
    params = eqn.params
    return {"test": self.closed(params["cond_jaxpr"], at), "test_consts": params["cond_nconsts"],
            "body": self.closed(params["body_jaxpr"], at), "body_consts": params["body_nconsts"]}


def _gather(self, eqn, at):
    params, numbers = eqn.params, eqn.params["dimension_numbers"]
    mode = lax.GatherScatterMode.from_any(params["mode"])
    fill = params["fill_value"]
    return {"offset": _ints(numbers.offset_dims), "collapsed": _ints(numbers.collapsed_slice_dims),
            "indexed": _ints(numbers.start_index_map), "batch": _ints(numbers.operand_batching_dims),
            "index_batch": _ints(numbers.start_indices_batching_dims), "sizes": list(map(size, params["slice_sizes"])),
            "fill": _filling(eqn, fill) if mode == lax.GatherScatterMode.FILL_OR_DROP else None}


def _filling(eqn, fill):
    """Returns the value that a gather returns for indices that are out of bounds. Without a `fill_value`,
    `jax.lax.gather` returns NaN, the smallest signed integer, the largest unsigned integer, or True for an index that
    is out of bounds, depending on the dtype."""
    dtype = eqn.outvars[0].aval.dtype
    if fill is not None:
        return _number(fill)
    if jnp.issubdtype(dtype, jnp.inexact):
        return "nan"
    if jnp.issubdtype(dtype, jnp.bool_):
        return True
    return int(jnp.iinfo(dtype).min if jnp.issubdtype(dtype, jnp.signedinteger) else jnp.iinfo(dtype).max)


def _scatter(kind):
    def options(self, eqn, at):
        params, numbers = eqn.params, eqn.params["dimension_numbers"]
        return {"kind": kind, "window": _ints(numbers.update_window_dims),
                "inserted": _ints(numbers.inserted_window_dims), "indexed": _ints(numbers.scatter_dims_to_operand_dims),
                "batch": _ints(numbers.operand_batching_dims),
                "index_batch": _ints(numbers.scatter_indices_batching_dims),
                "clip": lax.GatherScatterMode.from_any(params["mode"]) == lax.GatherScatterMode.CLIP}
    return options


def _convolution(self, eqn, at):
    params, numbers = eqn.params, eqn.params["dimension_numbers"]
    return {"strides": _ints(params["window_strides"]), "padding": _pairs(params["padding"]),
            "input_dilation": _ints(params["lhs_dilation"]), "dilation": _ints(params["rhs_dilation"]),
            "input": _ints(numbers.lhs_spec), "kernel": _ints(numbers.rhs_spec), "output": _ints(numbers.out_spec),
            "groups": params["feature_group_count"], "batch_groups": params["batch_group_count"]}


def _window(self, eqn, at):
    params, rank = eqn.params, len(eqn.params["window_dimensions"])
    return {"window": _ints(params["window_dimensions"]), "strides": _ints(params["window_strides"]),
            "padding": _pairs(params["padding"]), "input_dilation": _ints(params.get("base_dilation") or (1,) * rank),
            "dilation": _ints(params.get("window_dilation") or (1,) * rank)}


def _select_window(self, eqn, at):
    return {**_window(self, eqn, at), "largest": eqn.params["select_prim"] is lax.ge_p}


def _dot(self, eqn, at):
    contract, batch = eqn.params["dimension_numbers"]
    return {"contract": [_ints(axes) for axes in contract], "batch": [_ints(axes) for axes in batch]}


def _round(self, eqn, at):
    return {"even": eqn.params["rounding_method"] == lax.RoundingMethod.TO_NEAREST_EVEN}


def _ints(values) -> list[int]:
    """Converts integers, which may be NumPy integers, to Python's type."""
    return [int(value) for value in values]


def _pairs(padding) -> list:
    return [[size(low), size(high)] for low, high in padding]


def _of(**names):
    """Returns a function that reads the options of an operation, such as strides, from the parameters of a jaxpr
    equation. For example, `_of(step="strides")` returns a function that reads the option `step` from the parameter
    `strides`."""
    def options(self, eqn, at):
        return {name: _plain(eqn.params[source]) for name, source in names.items()}
    return options


def _plain(value):
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return size(value)


def _cond(self, eqn, at):
    return {"branches": [self.closed(branch, at) for branch in eqn.params["branches"]]}


def _shape(self, eqn, at):
    return {"shape": list(map(size, eqn.outvars[0].aval.shape))}


def _broadcast(self, eqn, at):
    return {**_shape(self, eqn, at), "axes": _ints(eqn.params["broadcast_dimensions"])}


def _iota(self, eqn, at):
    return {**_shape(self, eqn, at), "axis": eqn.params["dimension"]}


_SAME_NAME = """
neg sign floor ceil is_finite abs not exp exp2 expm1 log log1p tanh logistic sin cos tan asin acos atan sinh cosh asinh
acosh atanh sqrt rsqrt cbrt erf erfc erf_inv lgamma add sub mul div rem max min pow atan2 and or xor eq ne lt le gt ge
nextafter shift_left shift_right_logical shift_right_arithmetic clamp population_count real imag
""".split()
_AXES = ("reduce_sum", "reduce_prod", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_xor")
_OPTIONS: dict[str, tuple] = {
    **{name: (None, None) for name in _SAME_NAME},
    **{name: (None, _of(axes="axes")) for name in _AXES},
    **{name: (None, _of(axes="axes")) for name in ("argmax", "argmin")},
    **{name: (None, _of(axis="axis", reverse="reverse")) for name in ("cumsum", "cumprod", "cummax", "cummin")},
    "select_n": ("select", None), "integer_pow": ("power", _of(exponent="y")), "round": ("round", _round),
    "convert_element_type": ("convert", None), "reduce_precision": (None, _of(exponent="exponent_bits",
                                                                            mantissa="mantissa_bits")),
    "broadcast_in_dim": ("broadcast", _broadcast), "reshape": (None, _shape), "iota": (None, _iota),
    "transpose": (None, _of(axes="permutation")), "rev": ("reverse", _of(axes="dimensions")),
    "concatenate": (None, _of(axis="dimension")), "pad": (None, _of(padding="padding_config")),
    "slice": (None, _of(start="start_indices", stop="limit_indices", step="strides")),
    "dynamic_slice": (None, _of(sizes="slice_sizes")), "dynamic_update_slice": (None, None),
    "gather": (None, _gather), "scatter": (None, _scatter("replace")), "scatter-add": ("scatter", _scatter("add")),
    "scatter-mul": ("scatter", _scatter("mul")), "scatter-min": ("scatter", _scatter("min")),
    "scatter-max": ("scatter", _scatter("max")), "scatter_add": ("scatter", _scatter("add")),
    "sort": (None, _of(axis="dimension", keys="num_keys")), "top_k": (None, _of(k="k", axis="axis")),
    "dot_general": ("dot", _dot), "conv_general_dilated": ("convolution", _convolution),
    "reduce_window_max": ("window_max", _window), "reduce_window_min": ("window_min", _window),
    "reduce_window_sum": ("window_sum", _window), "select_and_scatter_add": ("window_select_add", _select_window),
    "dim_as_value": ("size", _of(value="dim")), "scan": (None, _scan), "while": (None, _while), "cond": (None, _cond),
}
