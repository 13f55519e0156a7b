"""A program as plain data: lists, numbers and strings that mean the same in every later version of
JAX.

This module represents a JAX program as plain data, called the stable form of the program, with only
the operations that the documentation of `fnet.export` lists. In this stable form of a program, the
names and options of the operations are defined by fnet, not by JAX. If JAX renames a primitive or a
parameter, only `fnet/export/_stable.py` must change, and existing programs remain valid.
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
    """Raised for an operation that fnet cannot represent as plain data that is independent of the
    version of JAX.

    Attributes:
        primitive: the name of JAX's primitive.
        path: the path of the named scopes around the operation.
    """

    def __init__(self, primitive: str, path: str, why: str = ""):
        self.primitive, self.path = primitive, path
        super().__init__(
            f"the operation {primitive!r} at {path or 'the top level'!r} has no form that is "
            f"independent of JAX{f' ({why})' if why else ''}; write this part of the model with "
            "other operations"
        )


def stable(closed: Any) -> tuple[dict, list[np.ndarray]]:
    """Returns (the program as JSON data, its array constants) for a closed jaxpr.

    The program is a dict with the keys "values", "constants", "inputs", "equations" and "outputs".
    The list "values" contains the type [dtype, shape] of each value of the program. Equations refer
    to a value by its index in the list "values". Sizes of axes are integers or expressions of size
    variables (symbolic sizes). A literal is [dtype, number]. An equation is [operation, inputs,
    outputs, options, path of named scopes]. The body of a loop or branch is a dict with the keys
    "inputs", "equations" and "outputs", and may read the constants of the program.

    Raises:
        Unsupported: the program contains an operation that cannot be written in the stable form,
            which is independent of JAX.
    """
    closed = flatten(closed)
    writer = _Writer()
    constants = [writer.constant(v, x) for v, x in zip(closed.jaxpr.constvars, closed.consts)]
    body = writer.body(closed.jaxpr, TOP)
    return {"values": writer.values, "constants": constants + writer.more, **body}, writer.arrays


def size(value: Any) -> int | str:
    """Converts the size of an axis to JSON data: an integer, or a string for a symbolic size."""
    return int(value) if isinstance(value, (int, np.integer)) else str(value)


class _Equation:
    """An equation of a jaxpr, which records the parameters that were read."""

    def __init__(self, eqn):
        self.primitive, self.invars, self.outvars = eqn.primitive, eqn.invars, eqn.outvars
        self._params, self.read = eqn.params, set()

    @property
    def params(self):
        return self

    def __getitem__(self, name):
        self.read.add(name)
        return self._params[name]

    def __contains__(self, name):
        return name in self._params

    def get(self, name, default=None):
        return self[name] if name in self else default

    def unread(self) -> list[str]:
        return sorted(set(self._params) - self.read)


def _check_all_read(eqn, at) -> None:
    """Raises `Unsupported` if an equation has a parameter that the stable form does not hold,
    unless `_IRRELEVANT` states why results do not depend on it. A later version of JAX may add such
    a parameter."""
    unknown = [name for name in eqn.unread() if name not in _IRRELEVANT]
    if unknown:
        raise Unsupported(
            eqn.primitive.name,
            at.path,
            f"its parameter {unknown[0]!r} is unknown to this version of fnet",
        )


class _Writer:
    def __init__(self):
        self.values: list = []
        self.arrays: list[np.ndarray] = []
        self.more: list[int] = []  # constants of bodies
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
            if any(
                jax.dtypes.issubdtype(v.aval.dtype, jax.dtypes.extended)
                for v in (*eqn.invars, *eqn.outvars)
            ):
                raise Unsupported(eqn.primitive.name, at.path, "random keys")
            name, options = _OPTIONS[eqn.primitive.name]
            equation = _Equation(eqn)
            inputs = [self.atom(a) for a in eqn.invars]
            filled = options(self, equation, at) if options else {}
            _check_all_read(equation, at)
            equations.append(
                [
                    filled.pop("operation", name or eqn.primitive.name),
                    inputs,
                    [self.value(v) for v in eqn.outvars],
                    filled,
                    at.path,
                ]
            )
        return {
            "inputs": [self.value(v) for v in jaxpr.invars],
            "equations": equations,
            "outputs": [self.atom(a) for a in jaxpr.outvars],
        }

    def closed(self, closed, at) -> dict:
        """Returns the body of a loop or branch. The constants of the body become constants of the
        whole program."""
        closed = _jax.close(closed)
        self.more += [self.constant(v, x) for v, x in zip(closed.jaxpr.constvars, closed.consts)]
        return self.body(closed.jaxpr, at)


def _number(x) -> int | float | bool | str:
    """Returns a number as JSON. Infinity and NaN become strings in the data, because JSON cannot
    represent them."""
    number = np.asarray(x).item()
    if isinstance(number, complex):
        raise Unsupported("complex", "", "complex numbers")
    return str(number) if isinstance(number, float) and not math.isfinite(number) else number


def _scan(self, eqn, at):
    parts = scan(eqn)
    return {
        "body": self.closed(parts.closed, at),
        "consts": parts.consts,
        "carry": parts.carry,
        "length": size(parts.length),
        "reverse": bool(parts.options.get("reverse")),
    }


def _while(self, eqn, at):
    params = eqn.params
    return {
        "test": self.closed(params["cond_jaxpr"], at),
        "test_consts": params["cond_nconsts"],
        "body": self.closed(params["body_jaxpr"], at),
        "body_consts": params["body_nconsts"],
    }


def _gather(self, eqn, at):
    params, numbers = eqn.params, eqn.params["dimension_numbers"]
    mode = _mode(eqn, at)
    fill = params["fill_value"]
    return {
        "offset": _ints(numbers.offset_dims),
        "collapsed": _ints(numbers.collapsed_slice_dims),
        "indexed": _ints(numbers.start_index_map),
        "batch": _ints(numbers.operand_batching_dims),
        "index_batch": _ints(numbers.start_indices_batching_dims),
        "sizes": list(map(size, params["slice_sizes"])),
        "fill": _filling(eqn, fill) if mode == lax.GatherScatterMode.FILL_OR_DROP else None,
        **_promises(eqn),
    }


def _mode(eqn, at):
    mode = lax.GatherScatterMode.from_any(eqn.params["mode"])
    if mode == lax.GatherScatterMode.ONE_HOT:
        raise Unsupported(eqn.primitive.name, at.path, "its mode is 'one_hot'")
    return mode


def _promises(eqn) -> dict:
    """Returns what the user promised about the indices of a gather or scatter, such as {"unique":
    true}."""
    names = {"sorted": "indices_are_sorted", "unique": "unique_indices"}
    return {name: True for name, source in names.items() if eqn.params[source]}


def _filling(eqn, fill):
    """Returns the value that a gather returns for indices that are out of bounds. Without a
    `fill_value`, `jax.lax.gather` returns NaN, the smallest signed integer, the largest unsigned
    integer, or True for an index that is out of bounds, depending on the dtype."""
    dtype = eqn.outvars[0].aval.dtype
    if fill is not None:
        return _number(fill)
    if jnp.issubdtype(dtype, jnp.inexact):
        return "nan"
    if jnp.issubdtype(dtype, jnp.bool_):
        return True
    return int(
        jnp.iinfo(dtype).min if jnp.issubdtype(dtype, jnp.signedinteger) else jnp.iinfo(dtype).max
    )


def _scatter(kind):
    def options(self, eqn, at):
        params, numbers = eqn.params, eqn.params["dimension_numbers"]
        return {
            "kind": kind,
            "window": _ints(numbers.update_window_dims),
            "inserted": _ints(numbers.inserted_window_dims),
            "indexed": _ints(numbers.scatter_dims_to_operand_dims),
            "batch": _ints(numbers.operand_batching_dims),
            "index_batch": _ints(numbers.scatter_indices_batching_dims),
            "clip": _mode(eqn, at) == lax.GatherScatterMode.CLIP,
            **_promises(eqn),
            **(_applied(self, eqn, at) if kind == "replace" else _reduced(params)),
        }

    return options


def _reduced(params) -> dict:
    params["update_jaxpr"], params["update_consts"]  # the primitive's name says what they compute
    return {}


def _applied(self, eqn, at) -> dict:
    """Returns the function of a scatter that applies a function to the elements, such as
    `x.at[i].apply(jnp.exp)`. JAX has no primitive of its own for it."""
    jaxpr, consts = eqn.params["update_jaxpr"], eqn.params["update_consts"]
    if jaxpr is None:
        return {}
    closed = flatten(_jax.ClosedJaxpr(jaxpr, consts))
    _, update = closed.jaxpr.invars
    if closed.jaxpr.outvars == [update]:
        return {}
    if any(v is update for eqn in closed.jaxpr.eqns for v in eqn.invars):
        raise Unsupported(eqn.primitive.name, at.path, "its function depends on the updates")
    return {"operation": "scatter_apply", "kind": "apply", "body": self.closed(closed, at)}


def _convolution(self, eqn, at):
    params, numbers = eqn.params, eqn.params["dimension_numbers"]
    return {
        "strides": _ints(params["window_strides"]),
        "padding": _pairs(params["padding"]),
        "input_dilation": _ints(params["lhs_dilation"]),
        "dilation": _ints(params["rhs_dilation"]),
        "input": _ints(numbers.lhs_spec),
        "kernel": _ints(numbers.rhs_spec),
        "output": _ints(numbers.out_spec),
        "groups": params["feature_group_count"],
        "batch_groups": params["batch_group_count"],
        **_precision(eqn),
    }


def _window(self, eqn, at):
    params, rank = eqn.params, len(eqn.params["window_dimensions"])
    return {
        "window": _ints(params["window_dimensions"]),
        "strides": _ints(params["window_strides"]),
        "padding": _pairs(params["padding"]),
        "input_dilation": _ints(params.get("base_dilation") or (1,) * rank),
        "dilation": _ints(params.get("window_dilation") or (1,) * rank),
    }


def _select_window(self, eqn, at):
    select = eqn.params["select_prim"]
    if select not in (lax.ge_p, lax.le_p):
        raise Unsupported(eqn.primitive.name, at.path, f"it selects by {select}")
    return {**_window(self, eqn, at), "largest": select is lax.ge_p}


def _dot(self, eqn, at):
    contract, batch = eqn.params["dimension_numbers"]
    return {
        "contract": [_ints(axes) for axes in contract],
        "batch": [_ints(axes) for axes in batch],
        **_precision(eqn),
    }


def _precision(eqn) -> dict:
    """Returns the precision of a product: the names of two `lax.Precision`, or of a
    `lax.DotAlgorithmPreset`. It is left out where the user did not state it."""
    precision = eqn.params["precision"]
    if precision is None:
        return {}
    if isinstance(precision, tuple):
        return {"precision": [each.name.lower() for each in precision]}
    if isinstance(precision, lax.DotAlgorithmPreset):
        return {"precision": precision.name.lower()}
    raise Unsupported(eqn.primitive.name, "", f"its precision is {precision}")


def _accuracy(self, eqn, at):
    """Returns the accuracy of a function such as exp: the name of a `lax.AccuracyMode`, or the
    numbers of a `lax.Tolerance`."""
    accuracy = eqn.params.get("accuracy")
    if accuracy is None:
        return {}
    if isinstance(accuracy, lax.AccuracyMode):
        return {"accuracy": accuracy.name.lower()}
    return {"accuracy": [accuracy.atol, accuracy.rtol, accuracy.ulps]}


def _largest(self, eqn, at):
    stable = eqn.params.get("is_stable", True)
    return {**_of(k="k", axis="axis")(self, eqn, at), **({} if stable else {"stable": False})}


def _round(self, eqn, at):
    return {"even": eqn.params["rounding_method"] == lax.RoundingMethod.TO_NEAREST_EVEN}


def _ints(values) -> list[int]:
    """Converts integers, which may be NumPy integers, to Python's type."""
    return [int(value) for value in values]


def _pairs(padding) -> list:
    return [[size(low), size(high)] for low, high in padding]


def _of(**names):
    """Returns a function that reads the options of an operation, such as strides, from the
    parameters of a jaxpr equation. For example, `_of(step="strides")` returns a function that reads
    the option `step` from the parameter `strides`."""

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


# Parameters on which the results do not depend, or which only repeat the type of an output.
_IRRELEVANT: dict[str, str] = {
    **dict.fromkeys(
        ("dtype", "new_dtype", "preferred_element_type", "index_dtype", "shape", "new_sizes"),
        "the type of an output, which the stable form states",
    ),
    **dict.fromkeys(("sharding", "out_sharding"), "the devices of an output"),
    "weak_type": "all types in the stable form are explicit",
    "dimensions": "flatten has replaced it by a transpose",
    "out_dtype": "flatten has replaced it by casts of the operands",
    "is_stable": "readers of the stable form always sort stably",
    **dict.fromkeys(
        ("linear", "unroll", "_split_transpose"), "how a loop is differentiated or compiled"
    ),
    "ft_out": "the outputs of a loop, which the stable form counts",
    "branches_platforms": "the index of the branch is an operand",
}
_FUNCTIONS = """exp exp2 expm1 log log1p tanh logistic sin cos tan asin acos atan sinh cosh asinh acosh atanh sqrt rsqrt
cbrt erf erfc erf_inv lgamma digamma""".split()  # with an accuracy, or without, depending on the version of JAX
_SAME_NAME = """
neg sign floor ceil is_finite abs not add sub mul div rem max min pow atan2 and or xor eq ne lt le gt ge nextafter
shift_left shift_right_logical shift_right_arithmetic clamp population_count real imag
""".split()
_AXES = (
    "reduce_sum",
    "reduce_prod",
    "reduce_max",
    "reduce_min",
    "reduce_and",
    "reduce_or",
    "reduce_xor",
)
# The name of the operation (None: that of the primitive), and the function that reads its options.
_OPTIONS: dict[str, tuple] = {
    **{name: (None, None) for name in _SAME_NAME},
    **{name: (None, _accuracy) for name in _FUNCTIONS},
    **{name: (None, _of(axes="axes")) for name in _AXES},
    **{name: (None, _of(axes="axes")) for name in ("argmax", "argmin")},
    **{
        name: (None, _of(axis="axis", reverse="reverse"))
        for name in ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
    },
    "lt_to": ("total_lt", None),
    "le_to": ("total_le", None),
    "select_n": ("select", None),
    "integer_pow": ("power", _of(exponent="y")),
    "round": ("round", _round),
    "convert_element_type": ("convert", None),
    "reduce_precision": (None, _of(exponent="exponent_bits", mantissa="mantissa_bits")),
    "broadcast_in_dim": ("broadcast", _broadcast),
    "reshape": (None, _shape),
    "iota": (None, _iota),
    "transpose": (None, _of(axes="permutation")),
    "rev": ("reverse", _of(axes="dimensions")),
    "concatenate": (None, _of(axis="dimension")),
    "pad": (None, _of(padding="padding_config")),
    "slice": (None, _of(start="start_indices", stop="limit_indices", step="strides")),
    "dynamic_slice": (None, _of(sizes="slice_sizes")),
    "dynamic_update_slice": (None, None),
    "gather": (None, _gather),
    "scatter": (None, _scatter("replace")),
    "scatter-add": ("scatter", _scatter("add")),
    "scatter-mul": ("scatter", _scatter("mul")),
    "scatter-min": ("scatter", _scatter("min")),
    "scatter-max": ("scatter", _scatter("max")),
    "sort": (None, _of(axis="dimension", keys="num_keys")),
    "top_k": (None, _largest),
    "dot_general": ("dot", _dot),
    "conv_general_dilated": ("convolution", _convolution),
    "reduce_window_max": ("window_max", _window),
    "reduce_window_min": ("window_min", _window),
    "reduce_window_sum": ("window_sum", _window),
    "select_and_scatter_add": ("window_select_add", _select_window),
    "dim_as_value": ("size", _of(value="dim")),
    "scan": (None, _scan),
    "while": (None, _while),
    "cond": (None, _cond),
}
