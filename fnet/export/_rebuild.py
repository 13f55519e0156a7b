"""Creates JAX programs from the stable form (JSON data), to renew bundles (files) that JAX no longer reads.

The stable form is a description of a program as JSON data, which does not depend on JAX's version.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax

from fnet.export import _loaded, _reader, _signature, _sizes, _write
from fnet.export._program import Entry, Program


def renew(path: str | os.PathLike, output: str | os.PathLike | None = None) -> None:
    """Replaces the programs of a bundle by programs that are written with the installed version of JAX.

    The new programs are created from the stable form (JSON data) of the old programs. The stable form describes a
    program independently of JAX's version. The outputs of the new programs are compared with the outputs in the old
    bundle. The new bundle has the same weights, labels and tokenizer as the old bundle. The new bundle contains no
    programs with handwritten kernels, because the JSON description of a program contains no kernels.

    Args:
        path: the path of the bundle.
        output: the path of the new bundle. Default None: the old bundle is replaced.

    Raises:
        BundleError: the file is damaged, or one of the programs in the bundle has no description as JSON data. A
            BundleError is also raised if the outputs of a new program differ from the outputs that are stored in the
            old bundle.

    >>> import tempfile
    >>> model = nn.Dense(3)
    >>> params, state = model.init(jax.random.key(0), jnp.ones((1, 4)))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     export.program(model, params, state, x=export.spec("b, 4")).save(f"{folder}/dense.fnet")
    ...     export.renew(f"{folder}/dense.fnet", f"{folder}/new.fnet")
    ...     export.load(f"{folder}/new.fnet")(np.ones((2, 4), np.float32)).shape
    (2, 3)
    """
    bundle = _loaded.load(path)
    manifest = bundle.manifest
    entries = {name: _entry(bundle, name) for name in bundle.entries}
    program = Program(entries, bundle.weights, ({}, None))
    saved = bundle.tests()
    tests: dict[str, Any] = {}
    for name, (inputs, wanted) in saved.items():
        if wanted:
            description = manifest["entries"][name]
            tests[name] = _signature.named(description, inputs)
            flat, _ = _signature.bound(path, name, description, (), tests[name])
            tree = _signature.unflatten(description["output"], iter(program.call(name, *flat)))
            _loaded._compared(path, name, "the renewed program", description, tree, wanted)
    provenance = {**manifest["provenance"], "renewed": {"on": datetime.date.today().isoformat(),
                                                        "from": manifest["versions"], "written": manifest["created"]}}
    tokenizer = {f"tokenizer/{name}": data for name, data in bundle.files("tokenizer").items()}
    _write.save(program, output or path, labels=bundle.labels, tests=tests, about=provenance,
                differentiable=manifest["differentiable"], files=tokenizer)


def _entry(bundle, name) -> Entry:
    description, stable = bundle.manifest["entries"][name], bundle.stable(name)
    names = [*description["constants"], *description["weights"]]
    scope = export.SymbolicScope(tuple(description["constraints"]))
    shape = lambda sizes: tuple(n if isinstance(n, int) else export.symbolic_shape(n, scope=scope)[0] for n in sizes)
    values = [(dtype, shape(sizes)) for dtype, sizes in stable["values"]]
    type_of = lambda i: jax.ShapeDtypeStruct(values[i][1], jnp.dtype(values[i][0]))
    types = [type_of(i) for i in stable["inputs"][len(description["weights"]):]]

    def run(*arrays):
        known = dict(zip(stable["constants"], arrays))
        return Run(values, known, shape).body(stable, arrays[len(stable["constants"]):])

    closed = jax.make_jaxpr(run)(*(type_of(i) for i in (*stable["constants"], *stable["inputs"])))
    return Entry(closed, names, description["inputs"], description["output"], description["constraints"], types)


def function(bundle: _loaded.Bundle, name: str, sizes: Mapping[str, int]) -> Callable:
    """Creates a function f(weights, inputs) -> outputs from the stable form (JSON data) of an entry point, for the
    given values of the size variables.

    Unlike a program that JAX has serialized, the created function can be optimized by `ft.tune`.

    Raises:
        BundleError: the bundle contains no JSON data that describe the program of the entry point.
    """
    description, stable = bundle.manifest["entries"][name], bundle.stable(name)

    def run(weights, inputs):
        constants, given = ([weights[name] for name in description[kind]] for kind in ("constants", "weights"))
        return sized(stable, constants, sizes).body(stable, [*given, *inputs])

    return run


def sized(stable: Mapping[str, Any], constants: Sequence[Any], sizes: Mapping[str, int],
          operations: Mapping[str, Callable] | None = None) -> Run:
    """Returns a `Run` that evaluates a program in stable form (JSON data) with given values of its symbolic sizes."""
    shape = lambda shape: tuple(_sizes.size(n, sizes) for n in shape)
    values = [(dtype, shape(axes)) for dtype, axes in stable["values"]]
    return Run(values, dict(zip(stable["constants"], constants)), shape, operations)


class Run:
    """Evaluates a program in stable form (JSON data) with JAX.

    Attributes:
        values: the type of each value, a list of (dtype, shape).
        known: the constants, {index of the value: array}.
        shape: a function that converts a shape from the JSON data, such as ["b", 3], to the shape of an array.
        operations: the functions that compute the operations, {name of the operation: function}.
    """

    def __init__(self, values, known, shape, operations=None):
        self.values, self.known, self.shape = values, known, shape
        self.operations = OPERATIONS if operations is None else operations

    def body(self, body, inputs) -> list:
        values = {**self.known, **dict(zip(body["inputs"], inputs))}
        get = lambda a: jnp.asarray(float(a[1]) if isinstance(a[1], str) else a[1], a[0]) if isinstance(
            a, list) else values[a]
        for operation, ins, outs, options, path in body["equations"]:
            if operation not in self.operations:
                raise _reader.BundleError(f"unknown operation {operation!r} at {path!r}; install a newer fnet")
            types = [self.values[i] for i in outs]
            with jax.named_scope(path):
                results = self.operations[operation](self, options, types, *map(get, ins))
                results = results if isinstance(results, (list, tuple)) else [results]
                values.update(zip(outs, (y.astype(dtype) for y, (dtype, _) in zip(results, types))))
        return [get(a) for a in body["outputs"]]


def _each(function: Callable) -> Callable:
    return lambda run, options, types, *arrays: function(*arrays)


def _pairs(run, padding):
    return [tuple(run.shape(pair)) for pair in padding]


def _convolution(run, options, types, x, kernel):
    numbers = lax.ConvDimensionNumbers(*(tuple(options[name]) for name in ("input", "kernel", "output")))
    return lax.conv_general_dilated(
        x, kernel, options["strides"], _pairs(run, options["padding"]), options["input_dilation"], options["dilation"],
        numbers, options["groups"], options["batch_groups"], preferred_element_type=jnp.dtype(types[0][0]))


def _window(function: Callable, start: Callable) -> Callable:
    def reduce(run, options, types, x):
        return lax.reduce_window(x, start(x.dtype), function, tuple(options["window"]), tuple(options["strides"]),
                                 _pairs(run, options["padding"]), tuple(options["input_dilation"]),
                                 tuple(options["dilation"]))
    return reduce


def _lowest(dtype):
    return np.asarray(-np.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min, dtype)


def _highest(dtype):
    return np.asarray(np.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).max, dtype)


def _window_select_add(run, options, types, source, x):
    """Computes the gradient of a max or min pooling by differentiating the pooling with `jax.vjp`. JAX's operation for
    the gradient of a pooling is not public."""
    kind = (lax.max, _lowest) if options["largest"] else (lax.min, _highest)
    pooled = lambda x: _window(*kind)(run, options, types, x)
    return jax.vjp(pooled, x)[1](source)[0]


def _gather(run, options, types, x, indices):
    numbers = lax.GatherDimensionNumbers(
        tuple(options["offset"]), tuple(options["collapsed"]), tuple(options["indexed"]),
        tuple(options["batch"]), tuple(options["index_batch"]))
    fill = options["fill"]
    mode = "clip" if fill is None else "fill"
    fill = float(fill) if isinstance(fill, str) else fill
    return lax.gather(x, indices, numbers, run.shape(options["sizes"]), mode=mode, fill_value=fill)


def _scatter(run, options, types, x, indices, updates):
    numbers = lax.ScatterDimensionNumbers(
        tuple(options["window"]), tuple(options["inserted"]), tuple(options["indexed"]),
        tuple(options["batch"]), tuple(options["index_batch"]))
    function = {"replace": lax.scatter, "add": lax.scatter_add, "mul": lax.scatter_mul, "min": lax.scatter_min,
                "max": lax.scatter_max}[options["kind"]]
    return function(x, indices, updates, numbers, mode="clip" if options["clip"] else "drop")


def _scan(run, options, types, *arrays):
    a, b = options["consts"], options["consts"] + options["carry"]

    def step(carry, slices):
        results = run.body(options["body"], [*arrays[:a], *carry, *slices])
        return results[:b - a], results[b - a:]

    length = {} if arrays[b:] else {"length": run.shape([options["length"]])[0]}
    carry, stacked = lax.scan(step, list(arrays[a:b]), list(arrays[b:]), reverse=options["reverse"], **length)
    return [*carry, *stacked]


def _while(run, options, types, *arrays):
    a, b = options["test_consts"], options["test_consts"] + options["body_consts"]
    return lax.while_loop(lambda carry: run.body(options["test"], [*arrays[:a], *carry])[0],
                          lambda carry: run.body(options["body"], [*arrays[a:b], *carry]), list(arrays[b:]))


def _cond(run, options, types, index, *arrays):
    branches = [lambda *arrays, body=body: run.body(body, arrays) for body in options["branches"]]
    return lax.switch(index.astype(jnp.int32), branches, *arrays)


def _slice(run, options, types, x):
    return lax.slice(x, run.shape(options["start"]), run.shape(options["stop"]), options["step"])


def _reduce(function: Callable) -> Callable:
    return lambda run, options, types, x: function(x, tuple(options["axes"]))


def _cumulative(function: Callable) -> Callable:
    return lambda run, options, types, x: function(x, options["axis"], options["reverse"])


def _position(function: Callable) -> Callable:
    return lambda run, options, types, x: function(x, options["axes"][0], jnp.dtype(types[0][0]))


_SAME = """neg sign floor ceil is_finite abs exp exp2 expm1 log log1p tanh logistic sin cos tan asin acos atan sinh cosh
asinh acosh atanh sqrt rsqrt cbrt erf erfc erf_inv lgamma add sub mul div rem max min pow atan2 eq ne lt le gt ge
nextafter shift_left shift_right_logical shift_right_arithmetic clamp population_count real imag""".split()
OPERATIONS: dict[str, Callable] = {
    **{name: _each(getattr(lax, name)) for name in _SAME},
    **{name: _each(getattr(lax, f"bitwise_{name}")) for name in ("not", "and", "or", "xor")},
    **{name: _reduce(getattr(lax, name)) for name in (
        "reduce_sum", "reduce_prod", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_xor")},
    **{name: _cumulative(getattr(lax, name)) for name in ("cumsum", "cumprod", "cummax", "cummin")},
    **{name: _position(getattr(lax, name)) for name in ("argmax", "argmin")},
    "select": _each(lax.select_n),
    "power": lambda run, options, types, x: lax.integer_pow(x, options["exponent"]),
    "round": lambda run, options, types, x: lax.round(
        x, lax.RoundingMethod.TO_NEAREST_EVEN if options["even"] else lax.RoundingMethod.AWAY_FROM_ZERO),
    "convert": lambda run, options, types, x: x.astype(types[0][0]),
    "reduce_precision": lambda run, options, types, x: lax.reduce_precision(x, options["exponent"],
                                                                            options["mantissa"]),
    "broadcast": lambda run, options, types, x: lax.broadcast_in_dim(x, types[0][1], options["axes"]),
    "reshape": lambda run, options, types, x: lax.reshape(x, types[0][1]),
    "iota": lambda run, options, types: lax.broadcasted_iota(jnp.dtype(types[0][0]), types[0][1], options["axis"]),
    "transpose": lambda run, options, types, x: lax.transpose(x, options["axes"]),
    "reverse": lambda run, options, types, x: lax.rev(x, options["axes"]),
    "concatenate": lambda run, options, types, *arrays: lax.concatenate(arrays, options["axis"]),
    "pad": lambda run, options, types, x, value: lax.pad(x, value, _pairs(run, options["padding"])),
    "slice": _slice,
    "dynamic_slice": lambda run, options, types, x, *starts: lax.dynamic_slice(x, starts, types[0][1]),
    "dynamic_update_slice": lambda run, options, types, x, update, *starts: lax.dynamic_update_slice(x, update, starts),
    "gather": _gather, "scatter": _scatter,
    "sort": lambda run, options, types, *arrays: lax.sort(arrays, options["axis"], num_keys=options["keys"]),
    "top_k": lambda run, options, types, x: lax.top_k(x, options["k"], axis=options["axis"]),
    "dot": lambda run, options, types, x, y: lax.dot_general(x, y, (options["contract"], options["batch"]),
                                                             preferred_element_type=jnp.dtype(types[0][0])),
    "convolution": _convolution,
    "window_max": _window(lax.max, _lowest), "window_min": _window(lax.min, _highest),
    "window_sum": _window(lax.add, lambda dtype: np.zeros((), dtype)), "window_select_add": _window_select_add,
    "size": lambda run, options, types: jnp.asarray(run.shape([options["value"]])[0], types[0][0]),
    "scan": _scan, "while": _while, "cond": _cond,
}
