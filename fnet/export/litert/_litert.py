"""Writes programs as LiteRT models, and compares the outputs of LiteRT's interpreter with those of
the program.

The package litert-converter converts StableHLO to LiteRT (see `_converter`). It does not
support loops, and supports symbolic sizes in only some operations. Therefore a program is converted
with fixed sizes and with unrolled scans. The conversion starts from a JSON description of the
program (see `export._stable`). For each choice of sizes, the LiteRT model contains one signature,
that is, a function that can be called.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import json
import math
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from fnet._util import _missing
from fnet._util._files import write
from fnet.export import _evaluate, _examples, _stable
from fnet.export._tree import described_leaves, size_variables
from fnet.export.litert import _converter, _indices, _values
from fnet.export.litert._values import Unsupported
from fnet.export.standalone import _outputs, _rounding, _signature

TOLERANCE = {"float32": 1e-5, "float16": 1e-2, "int8": 0.25}  # of the largest element
_LARGE = 2_000_000_000  # bytes of a file above which its flatbuffer does not contain the weights
_SMALLEST = 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64, 96, 128, 224, 256


# With float16, weights are converted to float32 when they are used. With int8, weights have one
# scale for each output channel, and the other operands of products are rounded to int8 at run time,
# with a scale for the range of each batch.
_RECIPES: dict[str, dict] = {
    "float16": {
        "algorithm_key": "float_casting",
        "op_config": {
            "weight_tensor_config": {
                "num_bits": 16,
                "dtype": "FLOAT",
                "symmetric": True,
                "granularity": "TENSORWISE",
            },
            "compute_precision": "FLOAT",
            "explicit_dequantize": True,
            "skip_checks": False,
            "min_weight_elements": 0,
        },
    },
    "int8": {
        "algorithm_key": "min_max_uniform_quantize",
        "op_config": {
            "weight_tensor_config": {
                "num_bits": 8,
                "dtype": "INT",
                "symmetric": True,
                "granularity": "CHANNELWISE",
            },
            "compute_precision": "INTEGER",
            "explicit_dequantize": False,
            "skip_checks": False,
            "min_weight_elements": 0,
        },
    },
}


def save(
    program: Any,
    path: str | os.PathLike,
    *,
    entry: str = "predict",
    sizes: Mapping[str, int] | Iterable[Mapping[str, int]] | None = None,
    dtype: str = "float32",
    check: bool = True,
) -> None:
    """Writes an entry point (a function of the program) as a LiteRT model. `Program.litert`
    documents the arguments."""
    if dtype not in TOLERANCE:
        raise ValueError(f"Program.litert: dtype={dtype!r}: expected {', '.join(TOLERANCE)}")
    if entry not in program.entries:
        raise ValueError(
            f"Program.litert: there is no entry point {entry!r}; there are "
            f"{', '.join(program.entries)}"
        )
    signatures = _signatures(program.entries[entry], entry, sizes)
    _interpreter()
    traced = program.entries[entry]
    stable, constants = _stable.stable(traced.closed)
    _check_dtypes(stable)
    weights = [np.asarray(program.weights[name]) for name in traced.weights]
    try:
        outputs = [("output", traced.output)]
        data = _converted(
            [
                (
                    name,
                    _lowered(stable, constants, weights, chosen),
                    _names(traced.inputs),
                    _names(outputs),
                )
                for name, chosen in signatures.items()
            ]
        )
    except Unsupported as error:
        raise _named(stable, next(iter(signatures.values())), error) from None
    _warn(stable)
    if dtype != "float32":
        data = _quantized(data, dtype)
    path = Path(path)
    write(path, data)
    if check:
        for name, chosen in signatures.items():
            compare(program, path, entry, chosen, signature=name, tolerance=TOLERANCE[dtype])


def _names(tree) -> list[str]:
    return [name for name, _ in described_leaves(tree)]


def _check_dtypes(stable) -> None:
    """Raises `Unsupported` for the dtypes for which LiteRT lacks most operators."""
    for operation, operands, results, _, path in _equations(stable):
        for a in (*operands, *results):
            dtype = a[0] if isinstance(a, list) else stable["values"][a][0]
            if dtype in ("bfloat16", "float16", "float64"):
                raise Unsupported(
                    f"LiteRT: the operation {operation!r} at {path or 'the top level'!r} computes "
                    f"in {dtype}, which LiteRT does not support; export the float32 model"
                )


def _equations(body) -> Iterable[list]:
    for equation in body["equations"]:
        options = equation[3]
        inner = [options[name] for name in ("body", "test") if name in options] + options.get(
            "branches", []
        )
        for each in inner:
            yield from _equations(each)
        yield equation


def _named(stable, sizes, error) -> Unsupported:
    """Names the operation that cannot be converted or run, which the error of the converter often
    does not. Converts each kind of operation alone."""
    tried = set()
    for equation in _equations(stable):
        operation, operands, results, options, path = equation
        types = [
            tuple(map(str, a if isinstance(a, list) else stable["values"][a])) for a in operands
        ]
        if str((operation, types, options)) in tried:
            continue
        tried.add(str((operation, types, options)))
        inputs = list(dict.fromkeys(a for a in operands if not isinstance(a, list)))
        alone = {
            "values": stable["values"],
            "constants": [],
            "inputs": inputs,
            "equations": [equation],
            "outputs": results,
        }
        try:
            _converted(
                [
                    (
                        "f",
                        _lowered(alone, [], [], sizes),
                        [f"x{i}" for i in range(len(inputs))],
                        [f"y{i}" for i in range(len(results))],
                    )
                ]
            )
        except Unsupported as why:
            return Unsupported(
                f"LiteRT: the operation {operation!r} at {path or 'the top level'!r} is not "
                f"supported: {str(why).removeprefix('LiteRT: ')}"
            )
        except Exception:  # a loop that reads constants of the program
            continue
    return error


def _warn(stable) -> None:
    """Warns of the operations that compute other values in LiteRT for special numbers."""
    where = _differing(stable)
    if where:
        parts = [
            f"{operation} at "
            f"{paths[0]!r}{f' and {len(paths) - 1} more' if len(paths) > 1 else ''}: "
            f"{_values.DIFFERS[operation]}"
            for operation, paths in where.items()
        ]
        warnings.warn(
            "Program.litert: the operators of LiteRT compute other values for special numbers. "
            + "; ".join(parts),
            stacklevel=4,
        )


def _differing(stable) -> dict[str, list[str]]:
    """Returns the paths of the operations that compute other values in LiteRT for special numbers."""
    where: dict[str, list[str]] = {}
    for operation, operands, results, _, path in _equations(stable):
        types = [
            a[0] if isinstance(a, list) else stable["values"][a][0] for a in (*operands, *results)
        ]
        if operation in _values.DIFFERS and "float32" in types:
            where.setdefault(operation, []).append(path or "the top level")
        if any(
            isinstance(a, list) and a[1] == 0 and math.copysign(1, a[1].real) < 0 for a in operands
        ):
            where.setdefault("-0.0", []).append(path or "the top level")
    return where


def compare(
    program: Any,
    path: str | os.PathLike,
    entry: str = "predict",
    sizes: Mapping[str, int] | None = None,
    *,
    signature: str = "predict",
    inputs: list | None = None,
    tolerance: float = TOLERANCE["float32"],
) -> float:
    """Runs a signature (function) of a LiteRT model in LiteRT, and compares its outputs with those
    of the program: for the given leaves of inputs, or in several rounds for drawn ones (see
    `_examples`).

    With the default tolerance, each element is compared. A larger tolerance, for rounded weights,
    is relative to the largest element of the output, and only usual inputs are drawn.

    Returns:
        The largest relative difference.

    Raises:
        ValueError: the difference is larger than the tolerance.
    """
    traced = program.entries[entry]
    stable, constants = _stable.stable(traced.closed)
    ranges, rounded = _examples.Ranges(stable), tolerance > TOLERANCE["float32"]
    weights = {name: program.weights[name] for name in traced.weights}
    names = [name for name, _ in described_leaves([("output", traced.output)])]

    def differ(inputs, kind):
        results = _run(path, signature, traced, inputs)
        description = {"inputs": traced.inputs, "constraints": traced.constraints}
        _, chosen = _signature.bound(
            path, entry, description, (), _signature.named(description, inputs)
        )
        run = lambda weights, inputs: program.call(entry, *inputs, weights=weights)
        spreads = [
            lambda: _rounding.perturbed(run, weights, inputs),
            lambda: _rounding.spread(
                stable, constants, [*map(weights.get, traced.weights), *inputs], chosen
            ),
        ]
        return _outputs.compare(
            f"{path}: in LiteRT with {kind} inputs",
            names,
            [results[name] for name in names],
            program.call(entry, *inputs),
            tolerance,
            () if rounded else spreads,
            largest=rounded,
        )

    if inputs is not None:
        return differ(inputs, "your")
    worst = differ(_examples.drawn(traced.inputs, sizes, ranges, "usual"), "usual")
    if rounded:
        return worst
    try:
        return max(
            worst, differ(_examples.drawn(traced.inputs, sizes, ranges, "extreme"), "extreme")
        )
    except _outputs.Different as error:
        if not _differing(stable):
            raise
        warnings.warn(
            f"Program.litert: {error}. With usual inputs, the outputs agree", stacklevel=3
        )
        return worst


def _run(path, signature, traced, inputs) -> dict[str, np.ndarray]:
    try:
        runner = _interpreter()(str(path), num_threads=1).get_signature_runner(signature)
        known = runner.get_input_details()
        return runner(
            **{
                name: np.asarray(x)
                for (name, _), x in zip(described_leaves(traced.inputs), inputs)
                if name in known
            }
        )
    except (RuntimeError, ValueError) as error:
        raise Unsupported(
            f"LiteRT: the interpreter cannot run this model: {str(error).splitlines()[0]}"
        ) from None


def _interpreter() -> Any:
    """Imports the packages of LiteRT, and returns the class of its interpreter."""
    try:
        import litert_quantizer  # noqa: F401
        from ai_edge_litert.interpreter import Interpreter
        from litert_converter import mlir  # noqa: F401
    except ImportError as error:
        version = ".".join(map(str, sys.version_info[:2]))
        raise ImportError(
            _missing.message(
                "LiteRT needs",
                "litert-converter==0.5.0",
                "ai-edge-litert==2.3.*",
                "litert-quantizer==0.11.*",
                error=error,
                note=". They exist for some versions of Python and systems alone; this is Python "
                f"{version} on {sys.platform}",
            )
        ) from None
    return Interpreter


def _signatures(traced, entry, sizes) -> dict[str, dict[str, int]]:
    """Returns {name of a function of the LiteRT model: {name of a symbolic size: value}}. If a
    program is exported for only one choice of its symbolic sizes, the signature in the LiteRT file
    has the name of the exported function (entry point)."""
    variables = size_variables(traced.inputs)
    if sizes is None:
        choices = [default_sizes(traced)]
    else:
        choices = [dict(sizes)] if isinstance(sizes, Mapping) else [dict(each) for each in sizes]
    if not choices:
        raise ValueError("Program.litert: sizes=[]: expected at least one choice of sizes")
    for i, chosen in enumerate(choices):
        if chosen in choices[:i]:
            raise ValueError(f"Program.litert: sizes has {chosen} twice")
        if set(chosen) != set(variables) or any(
            not isinstance(n, int) or n < 1 for n in chosen.values()
        ):
            raise ValueError(
                f"Program.litert: sizes={chosen}: expected a number of at least 1 for "
                f"{' and '.join(variables) or 'no variable'}"
            )
        for constraint in traced.constraints:
            if not _signature.satisfied(constraint, chosen):
                raise ValueError(
                    f"Program.litert: sizes={chosen} violates the constraint {constraint}"
                )
    if len(choices) == 1:
        return {entry: choices[0]}
    return {
        "_".join([entry, *(f"{name}{n}" for name, n in chosen.items())]): chosen
        for chosen in choices
    }


def default_sizes(traced: Any) -> dict[str, int]:
    """Returns {size variable: default value}. `save` uses the default values if its argument
    `sizes` is None. The default value of a size variable is its upper bound, such as 64 for t <=
    64. For a size variable without an upper bound, the default value is the smallest number in
    `_SMALLEST` that satisfies the constraints of the program."""
    names = size_variables(traced.inputs)
    bounds = {
        name: int(n)
        for constraint in traced.constraints
        for name, n in re.findall(r"^(\w+) <= (\d+)$", constraint.strip())
    }
    candidates = [(bounds[name],) if name in bounds else _SMALLEST for name in names]
    for values in itertools.islice(itertools.product(*candidates), 100_000):
        chosen = dict(zip(names, values))
        if all(_signature.satisfied(constraint, chosen) for constraint in traced.constraints):
            return chosen
    raise ValueError(
        f"Program.litert: expected the sizes of {' and '.join(names)}, such as sizes="
        f"{dict.fromkeys(names, 32)}"
    )


def _lowered(stable, constants, weights, sizes) -> bytes:
    """Returns the program for the sizes `sizes` as portable StableHLO. The weights are constants of
    the program."""
    run = _evaluate.sized(stable, constants, sizes, {**_evaluate.OPERATIONS, **_OPERATIONS})
    types = [
        jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
        for dtype, shape in (run.values[i] for i in stable["inputs"][len(weights) :])
    ]
    f = jax.jit(lambda *inputs: run.body(stable, [*weights, *inputs]), keep_unused=True)
    with jax.numpy_rank_promotion("allow"):
        return bytes(export.export(f, platforms=["cpu"])(*types).mlir_module_serialized)


def _unrolled(run, options, types, *arrays):
    """Evaluates a scan without a loop. Slices of weights are computed during tracing, so they
    become constants of the program."""
    start, end = options["consts"], options["consts"] + options["carry"]
    (length,) = run.shape([options["length"]])
    carry, stacked = list(arrays[start:end]), []
    for i in reversed(range(length)) if options["reverse"] else range(length):
        results = run.body(
            options["body"], [*arrays[:start], *carry, *(x[i] for x in arrays[end:])]
        )
        carry = results[: end - start]
        stacked.append(results[end - start :])
    if options["reverse"]:
        stacked.reverse()
    joined = [
        jnp.stack([parts[k] for parts in stacked]) if stacked else jnp.zeros(shape, dtype)
        for k, (dtype, shape) in enumerate(types[len(carry) :])
    ]
    return [*carry, *joined]


def _convolution(run, options, types, x, kernel):
    """Evaluates a convolution. litert-converter ignores the padding of a convolution with input
    dilation, such as a transposed convolution. Input dilation is therefore replaced by a separate
    operation, which inserts zeros between the elements of the input."""
    padding = [(0, 0, 0)] * x.ndim
    for axis, dilation in zip(options["input"][2:], options["input_dilation"]):
        padding[axis] = (0, 0, dilation - 1)
    x = jax.lax.pad(x, np.zeros((), x.dtype), padding) if max(options["input_dilation"]) > 1 else x
    plain = {**options, "input_dilation": [1] * len(options["input_dilation"])}
    return _evaluate.OPERATIONS["convolution"](run, plain, types, x, kernel)


_OPERATIONS = {
    **_values.OPERATIONS,
    **_indices.OPERATIONS,
    "scan": _unrolled,
    "convolution": _convolution,
}


def _converted(signatures) -> bytes:
    """Converts signatures (functions) to one LiteRT model, and returns its bytes. Each signature is
    a tuple (name, program as StableHLO, names of inputs, names of outputs).

    Converts and tries the model in another process, because for some programs that they do not
    support, the converter and the interpreter end their process."""
    header = [
        (name, len(program), inputs, outputs) for name, program, inputs, outputs in signatures
    ]
    data = b"\n".join(
        [json.dumps(header).encode(), b"".join(program for _, program, _, _ in signatures)]
    )
    done = subprocess.run(
        [sys.executable, "-P", _converter.__file__], input=data, capture_output=True
    )
    if done.returncode == 0:
        return done.stdout
    if done.returncode == _converter.REFUSED:
        why = done.stdout.decode()
    else:
        why = f"the process that converts and tries the model ended with status {done.returncode}"
    raise Unsupported(f"LiteRT: {why}")


def _quantized(data: bytes, dtype: str) -> bytes:
    """Converts the weights of a float32 model to float16 or int8, and returns the new model."""
    from litert_quantizer import quantizer

    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):  # hides progress
        quantized = quantizer.Quantizer(bytearray(data))
        quantized.load_quantization_recipe([{"regex": ".*", "operation": "*", **_RECIPES[dtype]}])
        return _shared(bytes(quantized.quantize().quantized_model))


def _shared(data: bytes) -> bytes:
    """Removes copies of equal weights from a model. The quantizer writes a copy of the weights for
    each signature (function)."""
    from ai_edge_litert.tools import flatbuffer_utils

    if len(data) > _LARGE:
        return data
    model = flatbuffer_utils.read_model_from_bytearray(data)
    first: dict[bytes, int] = {}
    for graph in model.subgraphs:
        for tensor in graph.tensors:
            content = model.buffers[tensor.buffer].data
            if content is not None and len(content):
                tensor.buffer = first.setdefault(hashlib.sha256(content).digest(), tensor.buffer)
    kept = {*first.values(), *(entry.buffer for entry in model.metadata or ())}
    for i, buffer in enumerate(model.buffers):
        if i not in kept:
            buffer.data = None
    return bytes(flatbuffer_utils.convert_object_to_bytearray(model))
