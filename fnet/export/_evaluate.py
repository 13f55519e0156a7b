"""Evaluates the stable form of a program (JSON data, which does not depend on JAX's version) with
JAX."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fnet import _jax
from fnet.export.standalone import _loaded, _reader, _signature, _sizes


def function(bundle: _loaded.Bundle, name: str, sizes: Mapping[str, int]) -> Callable:
    """Creates a function f(weights, inputs) -> outputs from the stable form (JSON data) of an entry
    point, for the given values of the size variables.

    Unlike a program that JAX has serialized, the created function can be optimized by `ft.tune`.

    Raises:
        BundleError: the bundle contains no JSON data that describe the program of the entry point,
            or its signature has dtypes of 64 bits and jax_enable_x64 is not set.
    """
    description, stable = bundle.manifest["entries"][name], bundle.stable(name)
    if _signature.is_wide(stable) and not jax.config.jax_enable_x64:
        # Contains its dtypes, which JAX would narrow if it traced them.
        program = bundle._program(name)
        return lambda weights, inputs: program(
            {name: weights[name] for name in description["weights"]}, inputs
        )

    def run(weights, inputs):
        constants, given = (
            [weights[name] for name in description[kind]] for kind in ("constants", "weights")
        )
        return sized(stable, constants, sizes).body(stable, [*given, *inputs])

    return run


def sized(
    stable: Mapping[str, Any],
    constants: Sequence[Any],
    sizes: Mapping[str, int],
    operations: Mapping[str, Callable] | None = None,
) -> Run:
    """Returns a `Run` that evaluates a program in stable form (JSON data) with given values of its
    symbolic sizes."""
    shape = lambda shape: tuple(_sizes.size(n, sizes) for n in shape)
    values = [(dtype, shape(axes)) for dtype, axes in stable["values"]]
    return Run(values, dict(zip(stable["constants"], constants)), shape, operations)


class Run:
    """Evaluates a program in stable form (JSON data) with JAX.

    Attributes:
        values: the type of each value, a list of (dtype, shape).
        known: the constants, {index of the value: array}.
        shape: a function that converts a shape from the JSON data, such as ["b", 3], to the shape
            of an array.
        operations: the functions that compute the operations, {name of the operation: function}.
    """

    def __init__(self, values, known, shape, operations=None):
        self.values, self.known, self.shape = values, known, shape
        self.operations = OPERATIONS if operations is None else operations

    def body(self, body, inputs) -> list:
        values = {**self.known, **dict(zip(body["inputs"], inputs))}
        get = lambda a: (
            np.asarray(_number(a[1]), jnp.dtype(a[0])) if isinstance(a, list) else values[a]
        )
        for operation, ins, outs, options, path in body["equations"]:
            if operation not in self.operations:
                raise _reader.BundleError(
                    f"unknown operation {operation!r} at {path!r}; install a newer fnet"
                )
            types = [self.values[i] for i in outs]
            with jax.named_scope(path):
                results = self.operations[operation](self, options, types, *map(get, ins))
                values.update(
                    zip(outs, results if isinstance(results, (list, tuple)) else [results])
                )
        return [get(a) for a in body["outputs"]]


def _number(x):
    return float(x) if isinstance(x, str) else x


# Operations bind JAX's primitives with the recorded parameters. The public functions of jax.lax
# would interpret their arguments once more: jax.lax.dynamic_slice counts a negative start from the
# end, but the recorded program has already done so, and a start that is still negative is out of
# bounds.


def _bind(name: str, *arrays: Any, **params: Any) -> Any:
    """Evaluates the primitive `name` of jax.lax."""
    return getattr(lax, f"{name}_p").bind(*arrays, **{**_others(name), **params})


@functools.cache
def _others(name: str) -> Mapping[str, Any]:
    """Returns the parameters of a primitive in a call without options. The stable form holds no
    shardings, and versions of JAX differ in which primitives have them."""
    if name not in _CALLS:
        return {}
    x = np.ones((1, 2, 2), np.float32)
    equations = _jax.make_jaxpr(_CALLS[name])(x).jaxpr.eqns
    return next(eqn.params for eqn in equations if eqn.primitive is getattr(lax, f"{name}_p"))


_FUNCTIONS = """exp exp2 expm1 log log1p tanh logistic sin cos tan asin acos atan sinh cosh asinh acosh atanh sqrt rsqrt
cbrt erf erfc erf_inv lgamma digamma""".split()
_CALLS: dict[str, Callable] = {
    **{name: getattr(lax, name) for name in _FUNCTIONS},
    "mul": lambda x: lax.mul(x, x),
    **{
        name: functools.partial(getattr(lax, name), axes=(0,))
        for name in ("reduce_sum", "reduce_prod", "reduce_max", "reduce_min")
    },
    **{
        name: lambda x, name=name: getattr(lax, name)(x > 0, (0,))
        for name in ("reduce_and", "reduce_or", "reduce_xor")
    },
    "convert_element_type": lambda x: lax.convert_element_type(x, np.int32),
    "broadcast_in_dim": lambda x: lax.broadcast_in_dim(x, (3, 1, 2, 2), (1, 2, 3)),
    "reshape": lambda x: lax.reshape(x, (4,)),
    "iota": lambda x: lax.iota(np.int32, 2),
    "sort": lax.sort,
    "top_k": lambda x: lax.top_k(x, 1),
    "dot_general": lambda x: lax.dot_general(x, x, (((2,), (2,)), ((), ()))),
    "conv_general_dilated": lambda x: lax.conv_general_dilated(x, x, (1,), "VALID"),
}


def _each(name: str) -> Callable:
    return lambda run, options, types, *arrays: _bind(name, *arrays)


def _function(name: str) -> Callable:
    """Evaluates a function such as exp, with the recorded accuracy."""

    def function(run, options, types, x):
        accuracy = options.get("accuracy")
        if isinstance(accuracy, str):
            accuracy = lax.AccuracyMode[accuracy.upper()]
        elif accuracy is not None:
            accuracy = lax.Tolerance(*accuracy)
        known = {"accuracy": accuracy} if "accuracy" in _others(name) else {}
        return _bind(name, x, **known)

    return function


def _pairs(run, padding):
    return tuple(run.shape(pair) for pair in padding)


def _precision(options):
    precision = options.get("precision")
    if isinstance(precision, str):
        return lax.DotAlgorithmPreset[precision.upper()]
    return precision and tuple(lax.Precision[name.upper()] for name in precision)


def _dot(run, options, types, x, y):
    numbers = tuple(tuple(map(tuple, options[name])) for name in ("contract", "batch"))
    return _bind(
        "dot_general",
        x,
        y,
        dimension_numbers=numbers,
        precision=_precision(options),
        preferred_element_type=jnp.dtype(types[0][0]),
    )


def _convolution(run, options, types, x, kernel):
    numbers = lax.ConvDimensionNumbers(
        *(tuple(options[name]) for name in ("input", "kernel", "output"))
    )
    return _bind(
        "conv_general_dilated",
        x,
        kernel,
        window_strides=tuple(options["strides"]),
        padding=_pairs(run, options["padding"]),
        lhs_dilation=tuple(options["input_dilation"]),
        rhs_dilation=tuple(options["dilation"]),
        dimension_numbers=numbers,
        feature_group_count=options["groups"],
        batch_group_count=options["batch_groups"],
        precision=_precision(options),
        preferred_element_type=jnp.dtype(types[0][0]),
    )


def _placed(run, options):
    return {
        "window_dimensions": tuple(options["window"]),
        "window_strides": tuple(options["strides"]),
        "padding": _pairs(run, options["padding"]),
    }


def _window(name: str) -> Callable:
    return lambda run, options, types, x: _bind(
        name,
        x,
        **_placed(run, options),
        base_dilation=tuple(options["input_dilation"]),
        window_dilation=tuple(options["dilation"]),
    )


def _window_select_add(run, options, types, source, x):
    if {*options["input_dilation"], *options["dilation"]} != {1}:
        raise NotImplementedError("the gradient of a dilated pooling")
    return _bind(
        "select_and_scatter_add",
        source,
        x,
        **_placed(run, options),
        select_prim=lax.ge_p if options["largest"] else lax.le_p,
    )


def _promises(options):
    return {
        "indices_are_sorted": options.get("sorted", False),
        "unique_indices": options.get("unique", False),
    }


def _gather(run, options, types, x, indices):
    numbers = lax.GatherDimensionNumbers(
        tuple(options["offset"]),
        tuple(options["collapsed"]),
        tuple(options["indexed"]),
        tuple(options["batch"]),
        tuple(options["index_batch"]),
    )
    modes = lax.GatherScatterMode
    fill = options["fill"]
    return _bind(
        "gather",
        x,
        indices,
        dimension_numbers=numbers,
        slice_sizes=run.shape(options["sizes"]),
        mode=modes.CLIP if fill is None else modes.FILL_OR_DROP,
        fill_value=_number(fill),
        **_promises(options),
    )


def _scatter(run, options, types, x, indices, updates):
    numbers = lax.ScatterDimensionNumbers(
        tuple(options["window"]),
        tuple(options["inserted"]),
        tuple(options["indexed"]),
        tuple(options["batch"]),
        tuple(options["index_batch"]),
    )
    mode = lax.GatherScatterMode.CLIP if options["clip"] else lax.GatherScatterMode.FILL_OR_DROP
    if options["kind"] == "apply":
        # The primitive's parameter is a jaxpr of this function, which jax.lax.scatter_apply traces.
        return lax.scatter_apply(
            x,
            indices,
            lambda element: run.body(options["body"], [element, element])[0],
            numbers,
            update_shape=updates.shape,
            mode=mode,
            **_promises(options),
        )
    combine = {"replace": None, "add": lax.add, "mul": lax.mul, "min": lax.min, "max": lax.max}[
        options["kind"]
    ]
    scalar = jax.ShapeDtypeStruct((), x.dtype)
    return _bind(
        "scatter" if combine is None else f"scatter_{options['kind']}",
        x,
        indices,
        updates,
        dimension_numbers=numbers,
        update_jaxpr=combine and _jax.make_jaxpr(combine)(scalar, scalar).jaxpr,
        update_consts=(),
        mode=mode,
        **_promises(options),
    )


def _scan(run, options, types, *arrays):
    a, b = options["consts"], options["consts"] + options["carry"]

    def step(carry, slices):
        results = run.body(options["body"], [*arrays[:a], *carry, *slices])
        return results[: b - a], results[b - a :]

    length = {} if arrays[b:] else {"length": run.shape([options["length"]])[0]}
    carry, stacked = lax.scan(
        step, list(arrays[a:b]), list(arrays[b:]), reverse=options["reverse"], **length
    )
    return [*carry, *stacked]


def _while(run, options, types, *arrays):
    a, b = options["test_consts"], options["test_consts"] + options["body_consts"]
    return lax.while_loop(
        lambda carry: run.body(options["test"], [*arrays[:a], *carry])[0],
        lambda carry: run.body(options["body"], [*arrays[a:b], *carry]),
        list(arrays[b:]),
    )


def _cond(run, options, types, index, *arrays):
    branches = [lambda *arrays, body=body: run.body(body, arrays) for body in options["branches"]]
    return lax.switch(
        _bind("convert_element_type", index, new_dtype=jnp.dtype("int32"), weak_type=False),
        branches,
        *arrays,
    )


def _slice(run, options, types, x):
    step = options["step"]
    return _bind(
        "slice",
        x,
        start_indices=run.shape(options["start"]),
        limit_indices=run.shape(options["stop"]),
        strides=step and tuple(step),
    )


def _reduce(name: str) -> Callable:
    return lambda run, options, types, x: _bind(name, x, axes=tuple(options["axes"]))


def _cumulative(name: str) -> Callable:
    return lambda run, options, types, x: _bind(
        name, x, axis=options["axis"], reverse=options["reverse"]
    )


def _position(name: str) -> Callable:
    return lambda run, options, types, x: _bind(
        name, x, axes=tuple(options["axes"]), index_dtype=jnp.dtype(types[0][0])
    )


def _sort(run, options, types, *arrays):
    return _bind(
        "sort", *arrays, dimension=options["axis"], num_keys=options["keys"], is_stable=True
    )


def _top_k(run, options, types, x):
    axis = options["axis"]
    known = {"is_stable": options.get("stable", True)} if "is_stable" in _others("top_k") else {}
    return _bind("top_k", x, k=options["k"], axis=x.ndim - 1 if axis is None else axis, **known)


def _size(run, options, types):
    return jnp.asarray(run.shape([options["value"]])[0], types[0][0])


_SAME = """neg sign floor ceil is_finite abs not add sub div rem max min pow atan2 and or xor eq ne lt le gt ge
nextafter shift_left shift_right_logical shift_right_arithmetic clamp population_count real imag""".split()
OPERATIONS: dict[str, Callable] = {
    **{name: _each(name) for name in _SAME},
    **{name: _function(name) for name in _FUNCTIONS},
    **{
        name: _reduce(name)
        for name in (
            "reduce_sum",
            "reduce_prod",
            "reduce_max",
            "reduce_min",
            "reduce_and",
            "reduce_or",
            "reduce_xor",
        )
    },
    **{
        name: _cumulative(name)
        for name in ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
    },
    "total_lt": _each("lt_to"),
    "total_le": _each("le_to"),
    **{name: _position(name) for name in ("argmax", "argmin")},
    "mul": lambda run, options, types, x, y: _bind("mul", x, y),
    "select": _each("select_n"),
    "power": lambda run, options, types, x: _bind("integer_pow", x, y=options["exponent"]),
    "round": lambda run, options, types, x: _bind(
        "round",
        x,
        rounding_method=lax.RoundingMethod.TO_NEAREST_EVEN
        if options["even"]
        else lax.RoundingMethod.AWAY_FROM_ZERO,
    ),
    "convert": lambda run, options, types, x: _bind(
        "convert_element_type", x, new_dtype=jnp.dtype(types[0][0]), weak_type=False
    ),
    "reduce_precision": lambda run, options, types, x: _bind(
        "reduce_precision", x, exponent_bits=options["exponent"], mantissa_bits=options["mantissa"]
    ),
    "broadcast": lambda run, options, types, x: _bind(
        "broadcast_in_dim", x, shape=types[0][1], broadcast_dimensions=tuple(options["axes"])
    ),
    "reshape": lambda run, options, types, x: _bind(
        "reshape", x, new_sizes=types[0][1], dimensions=None
    ),
    "iota": lambda run, options, types: _bind(
        "iota", dtype=jnp.dtype(types[0][0]), shape=types[0][1], dimension=options["axis"]
    ),
    "transpose": lambda run, options, types, x: _bind(
        "transpose", x, permutation=tuple(options["axes"])
    ),
    "reverse": lambda run, options, types, x: _bind("rev", x, dimensions=tuple(options["axes"])),
    "concatenate": lambda run, options, types, *arrays: _bind(
        "concatenate", *arrays, dimension=options["axis"]
    ),
    "pad": lambda run, options, types, x, value: _bind(
        "pad", x, value, padding_config=_pairs(run, options["padding"])
    ),
    "slice": _slice,
    "dynamic_slice": lambda run, options, types, x, *starts: _bind(
        "dynamic_slice", x, *starts, slice_sizes=types[0][1]
    ),
    "dynamic_update_slice": _each("dynamic_update_slice"),
    "gather": _gather,
    "scatter": _scatter,
    "scatter_apply": _scatter,
    "sort": _sort,
    "top_k": _top_k,
    "dot": _dot,
    "convolution": _convolution,
    "window_max": _window("reduce_window_max"),
    "window_min": _window("reduce_window_min"),
    "window_sum": _window("reduce_window_sum"),
    "window_select_add": _window_select_add,
    "size": _size,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}
