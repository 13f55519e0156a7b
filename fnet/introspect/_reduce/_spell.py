"""The calls of `jax.numpy` and `jax.lax` that trace to one equation of a primitive.

A speller gets the names of the operands and the parameters of the equation, and returns expressions,
the most readable first. `_write` takes the first one that traces to the same equation, so a speller
may guess.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from fnet import _jax

_OPERATORS = {
    "add": "+",
    "add_any": "+",
    "sub": "-",
    "mul": "*",
    "div": "/",
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "and": "&",
    "or": "|",
    "xor": "^",
}
_REDUCTIONS = ("sum", "max", "min", "prod")


def spelled(eqn: Any, operands: Sequence[str]) -> list[str]:
    """Returns expressions for an equation; the last one binds its primitive."""
    name = eqn.primitive.name
    aval = eqn.outvars[0].aval if eqn.outvars else None
    found: list[str] = []
    if name in _OPERATORS and len(operands) == 2:
        found.append(f" {_OPERATORS[name]} ".join(operands))
    if name in _SPELLERS:
        found += _SPELLERS[name](aval, *operands, **eqn.params)
    if name.startswith("reduce_") and name[7:] in _REDUCTIONS:
        found += _reduction(name[7:], aval, *operands, **eqn.params)
    public = name.replace("-", "_")
    if hasattr(jax.numpy, public):
        found.append(f"jnp.{public}({', '.join(operands)})")
    if hasattr(lax, public):
        found += _called(f"lax.{public}", operands, eqn.params)
    try:
        found.append(_bound(eqn.primitive, operands, eqn.params))
    except Unwritable:
        pass
    return found


class Unwritable(ValueError):
    """A parameter of an equation is no plain value, such as a function."""


def _called(function: str, operands: Sequence[str], params: dict) -> list[str]:
    """A call with the parameters as keyword arguments, and one without those that say nothing."""
    try:
        some = {k: v for k, v in params.items() if v is not None and v is not False}
        calls = [", ".join(operands)]
        for chosen in (some, params):
            calls.append(", ".join([*operands, *(f"{k}={text(v)}" for k, v in chosen.items())]))
        return [f"{function}({call})" for call in dict.fromkeys(calls)]
    except Unwritable:
        return []


def _bound(primitive: Any, operands: Sequence[str], params: dict) -> str:
    arguments = ", ".join([*operands, *(f"{k}={text(v)}" for k, v in params.items())])
    known = primitive.name.replace("-", "_") + "_p"
    if hasattr(lax, known):
        return f"lax.{known}.bind({arguments})"
    public = _jax.public_name(primitive)
    if public is None:
        raise Unwritable(f"{primitive.name} is not public")
    return f"primitives.{public}.bind({arguments})"


def text(value: Any) -> str:
    """Returns a parameter of an equation as Python code.

    Raises:
        Unwritable: there is no such code.
    """
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, enum.Enum) and hasattr(lax, type(value).__name__):
        return f"lax.{type(value).__name__}.{value.name}"
    if value is None or isinstance(value, (bool, int)):
        return repr(value)
    if isinstance(value, float):
        return repr(value) if np.isfinite(value) else f'float("{value}")'
    if isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic)):
        return dtype(value)
    if isinstance(value, np.integer):
        return repr(int(value))
    if isinstance(value, (np.generic, np.ndarray)) and np.ndim(value) == 0:
        return f"{dtype(value.dtype)}({text(value.item())})"
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return _record(value)
    if type(value).__name__ in ("GatherDimensionNumbers", "ScatterDimensionNumbers"):
        return _record(value)
    if isinstance(value, (tuple, list)):
        items = ", ".join(map(text, value))
        return f"({items},)" if len(value) == 1 else f"({items})"
    if type(value).__name__ == "Primitive" and hasattr(lax, f"{value.name}_p"):
        return f"lax.{value.name}_p"
    raise Unwritable(f"{value!r} cannot be written as code")


def _record(value: Any) -> str:
    """A named tuple of jax.lax, such as a ConvDimensionNumbers, without its empty fields."""
    kind = type(value).__name__
    if not hasattr(lax, kind):
        raise Unwritable(f"{value!r} cannot be written as code")
    names = getattr(value, "_fields", None) or vars(value)
    fields = {name: getattr(value, name) for name in names}
    needed = {"offset_dims", "collapsed_slice_dims", "start_index_map", "update_window_dims"}
    needed |= {"inserted_window_dims", "scatter_dims_to_operand_dims"}
    shown = {k: v for k, v in fields.items() if v != () or k in needed}
    return f"lax.{kind}({', '.join(f'{k}={text(v)}' for k, v in shown.items())})"


def dtype(value: Any) -> str:
    """Returns a dtype as code, such as np.float32 or jnp.bfloat16."""
    value = np.dtype(value)
    name = {"bool": "bool_"}.get(value.name, value.name)
    return f"{'np' if hasattr(np, name) else 'jnp'}.{name}"


def _reduction(kind: str, aval: Any, x: str, *, axes: tuple, **_: Any) -> list[str]:
    axis = text(tuple(axes) if len(axes) > 1 else axes[0]) if axes else "()"
    return [f"{x}.{kind}()", f"{x}.{kind}({axis})", f"lax.reduce_{kind}({x}, {text(tuple(axes))})"]


def _convert(aval: Any, x: str, **_: Any) -> list[str]:
    return [
        f"{x}.astype({dtype(aval.dtype)})",
        f"lax.convert_element_type({x}, {dtype(aval.dtype)})",
    ]


def _broadcast(aval: Any, x: str, *, shape: tuple, broadcast_dimensions: tuple, **_: Any) -> list:
    found = [
        f"jnp.full({text(tuple(shape))}, {x}, {dtype(aval.dtype)})",
        f"lax.broadcast_in_dim({x}, {text(tuple(shape))}, {text(tuple(broadcast_dimensions))})",
    ]
    return found if not broadcast_dimensions else found[1:]


def _select(aval: Any, which: str, *cases: str, **_: Any) -> list[str]:
    found = [f"lax.select_n({', '.join((which, *cases))})"]
    if len(cases) == 2:
        found.insert(0, f"jnp.where({which}, {cases[1]}, {cases[0]})")
    return found


def _dot(aval: Any, x: str, y: str, *, dimension_numbers: Any, precision: Any, **rest: Any) -> list:
    numbers = text(tuple(tuple(map(tuple, pair)) for pair in dimension_numbers))
    accurate = "" if precision is None else f", precision={text(precision)}"
    wide = f", preferred_element_type={dtype(aval.dtype)}"
    calls = [f"lax.dot_general({x}, {y}, {numbers}{accurate}{more})" for more in ("", wide)]
    if not accurate:
        calls = [f"{x} @ {y}", f"{x} @ {y}.T", f"{x}.T @ {y}", *calls]
    return calls


def _convolution(aval: Any, x: str, kernel: str, *, dimension_numbers: Any, **options: Any) -> list:
    numbers = dimension_numbers
    rank = len(numbers.lhs_spec)
    space = "WHD"[: rank - 2][::-1] if rank <= 4 else "DHW"

    def letters(spec: tuple, first: str) -> str:
        named = dict(zip(spec, first + space))
        return "".join(named[i] for i in range(rank))

    specs = (
        letters(numbers.lhs_spec, "NC"),
        letters(numbers.rhs_spec, "OI"),
        letters(numbers.out_spec, "NC"),
    )
    defaults = {
        "lhs_dilation": (1,) * (rank - 2),
        "rhs_dilation": (1,) * (rank - 2),
        "feature_group_count": 1,
        "batch_group_count": 1,
        "precision": None,
    }
    shown = []
    for name, default in defaults.items():
        value = options[name]
        value = tuple(value) if isinstance(value, list) else value
        if value != default:
            shown.append(f"{name}={text(value)}")
    strides, explicit = text(tuple(options["window_strides"])), text(tuple(options["padding"]))
    where = f'dimension_numbers=("{specs[0]}", "{specs[1]}", "{specs[2]}")'
    wide = f"preferred_element_type={dtype(aval.dtype)}"
    default = specs == ("NC" + space, "OI" + space, "NC" + space)
    shown += [] if default else [where]
    calls = []
    for padding in ('"SAME"', '"VALID"', explicit):
        head = f"lax.conv_general_dilated({x}, {kernel}, {strides}, {padding}"
        calls += [f"{', '.join([head, *more])})" for more in (shown, [*shown, wide])]
    return calls


def _iota(aval: Any, *, shape: tuple, dimension: int, **_: Any) -> list[str]:
    kind = dtype(aval.dtype)
    found = [f"lax.broadcasted_iota({kind}, {text(tuple(shape))}, {dimension})"]
    return [f"jnp.arange({shape[0]}, dtype={kind})", *found] if len(shape) == 1 else found


def _power(aval: Any, x: str, *, y: int, **_: Any) -> list[str]:
    return [f"{x} ** {y}" if y >= 0 else f"{x} ** ({y})", f"lax.integer_pow({x}, {y})"]


def _gather(
    aval: Any, x: str, i: str, *, dimension_numbers: Any, slice_sizes: Any, **o: Any
) -> list:
    options = "".join(
        f", {name}={text(o[name])}"
        for name in ("mode", "fill_value", "indices_are_sorted", "unique_indices")
        if o.get(name) not in (None, False)
    )
    numbers = text(dimension_numbers)
    return [f"lax.gather({x}, {i}, {numbers}, {text(tuple(slice_sizes))}{options})"]


def _scatter(function: str) -> Callable:
    def speller(aval: Any, x: str, i: str, u: str, *, dimension_numbers: Any, **o: Any) -> list:
        options = "".join(
            f", {name}={text(o[name])}"
            for name in ("mode", "indices_are_sorted", "unique_indices")
            if o.get(name) not in (None, False)
        )
        return [f"lax.{function}({x}, {i}, {u}, {text(dimension_numbers)}{options})"]

    return speller


def _window(combine: str, start: str) -> Callable:
    def speller(aval: Any, x: str, **o: Any) -> list[str]:
        sizes, strides, padding = (
            text(tuple(o[name])) for name in ("window_dimensions", "window_strides", "padding")
        )
        begin = f"{dtype(aval.dtype)}({start})"
        head = f"lax.reduce_window({x}, {begin}, lax.{combine}, {sizes}, {strides}, {padding}"
        more = f", {text(tuple(o['base_dilation']))}, {text(tuple(o['window_dilation']))}"
        return [f"{head})", f"{head}{more})"]

    return speller


def _unwrap(aval: Any, key: str, **_: Any) -> list[str]:
    return [f"jax.random.key_data({key})"]


def _wrap(aval: Any, data: str, *, impl: Any, **_: Any) -> list[str]:
    return [f"jax.random.wrap_key_data({data}, impl={impl.name!r})"]


def _bits(aval: Any, key: str, *, bit_width: int, shape: tuple, **_: Any) -> list[str]:
    return [f"jax.random.bits({key}, {text(tuple(shape))}, np.uint{bit_width})"]


def _fold(aval: Any, key: str, data: str, **_: Any) -> list[str]:
    return [f"jax.random.fold_in({key}, {data})"]


def _split_key(aval: Any, key: str, *, shape: tuple, **_: Any) -> list[str]:
    return [f"jax.random.split({key}, {text(tuple(shape))})"]


def _split(aval: Any, x: str, *, sizes: tuple, axis: int, **_: Any) -> list[str]:
    return [f"lax.split({x}, {text(tuple(sizes))}, axis={axis})"]


def _constrained(aval: Any, x: str, *, sharding: Any, **_: Any) -> list[str]:
    return [f"lax.with_sharding_constraint({x}, {placed(sharding)})"]


def placed(sharding: Any) -> str:
    """A NamedSharding on the mesh `mesh` of the script."""
    axes = ", ".join(text(axis) for axis in sharding.spec)
    return f"jax.NamedSharding(mesh, jax.P({axes}))"


def _along(function: str, *names: str) -> Callable:
    """A function of the operand and of some parameters by position."""

    def speller(aval: Any, *operands: str, **o: Any) -> list[str]:
        values = [o[name] for name in names]
        values = [tuple(v) if isinstance(v, (list, tuple)) else v for v in values]
        return [f"{function}({', '.join([*operands, *map(text, values)])})"]

    return speller


def _cumulative(name: str) -> Callable:
    def speller(aval: Any, x: str, *, axis: int, reverse: bool, **_: Any) -> list[str]:
        return [f"lax.{name}({x}, {axis}{', reverse=True' if reverse else ''})"]

    return speller


def _sort(aval: Any, *operands: str, dimension: int, num_keys: int, is_stable: bool, **_: Any):
    given = operands[0] if len(operands) == 1 else f"({', '.join(operands)})"
    stable = "" if is_stable else ", is_stable=False"
    keys = f", num_keys={num_keys}" if num_keys > 1 else ""
    return [f"lax.sort({given}, dimension={dimension}{keys}{stable})"]


def _position(name: str) -> Callable:
    def speller(aval: Any, x: str, *, axes: tuple, **_: Any) -> list[str]:
        return [f"lax.{name}({x}, {axes[0]}, {dtype(aval.dtype)})"]

    return speller


_SPELLERS: dict[str, Callable[..., list[str]]] = {
    "neg": lambda aval, x, **_: [f"-{x}"],
    "max": lambda aval, x, y, **_: [f"jnp.maximum({x}, {y})"],
    "min": lambda aval, x, y, **_: [f"jnp.minimum({x}, {y})"],
    "fft": lambda aval, x, *, fft_type, fft_lengths: [
        f"lax.fft({x}, {text(fft_type)}, {text(tuple(fft_lengths))})"
    ],
    "stack": lambda aval, *xs, axis: [f"jnp.stack([{', '.join(xs)}], {axis})"],
    "unstack": lambda aval, x, *, axis: [f"jnp.unstack({x}, axis={axis})"],
    "polynomial": lambda aval, x, *coefficients, **options: _called(
        "lax.polynomial", [x, f"[{', '.join(coefficients)}]"], options
    ),
    "not": lambda aval, x, **_: [f"~{x}", f"lax.bitwise_not({x})"],
    "square": lambda aval, x, **_: [f"jnp.square({x})", f"lax.square({x})"],
    "integer_pow": _power,
    "convert_element_type": _convert,
    "broadcast_in_dim": _broadcast,
    "select_n": _select,
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
    "iota": _iota,
    "reshape": lambda aval, x, **_: [f"{x}.reshape({text(tuple(aval.shape))})"],
    "transpose": lambda aval, x, *, permutation: [
        f"{x}.T",
        f"{x}.transpose({text(tuple(permutation))})",
    ],
    "squeeze": lambda aval, x, *, dimensions: [f"{x}.squeeze({text(tuple(dimensions))})"],
    "expand_dims": _along("lax.expand_dims", "dimensions"),
    "concatenate": lambda aval, *xs, dimension: [
        f"lax.concatenate([{', '.join(xs)}], {dimension})"
    ],
    "pad": lambda aval, x, value, *, padding_config: [
        f"lax.pad({x}, {value}, {text(tuple(padding_config))})"
    ],
    "slice": lambda aval, x, *, start_indices, limit_indices, strides: [
        f"lax.slice({x}, {text(tuple(start_indices))}, {text(tuple(limit_indices))}"
        + (f", {text(tuple(strides))})" if strides is not None else ")")
    ],
    "rev": _along("lax.rev", "dimensions"),
    "gather": _gather,
    "scatter": _scatter("scatter"),
    **{
        f"scatter-{name}": _scatter(f"scatter_{name}")
        for name in ("add", "sub", "mul", "min", "max")
    },
    "reduce_window_sum": _window("add", "0"),
    "reduce_window_max": _window("max", "-np.inf"),
    "reduce_window_min": _window("min", "np.inf"),
    "split": _split,
    "sort": _sort,
    "argmax": _position("argmax"),
    "argmin": _position("argmin"),
    "clamp": _along("lax.clamp"),
    "random_unwrap": _unwrap,
    "random_wrap": _wrap,
    "random_bits": _bits,
    "random_fold_in": _fold,
    "random_split": _split_key,
    "sharding_constraint": _constrained,
    **{
        name: _cumulative(name)
        for name in ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
    },
}
