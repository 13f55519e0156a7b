"""Reads requests and writes responses of the Open Inference Protocol, version 2 (REST), with
tensors as JSON or as bytes.

The Open Inference Protocol is defined in https://github.com/kserve/open-inference-protocol.
Triton's extension "binary_tensor_data" defines how requests and responses contain tensors as bytes,
and its extension "classification" how an output becomes the names of its largest elements. A field
or parameter that the server does not know is an error, because a client that sends it expects an
effect.
"""

from __future__ import annotations

import json
import math

import numpy as np

from fnet.serve._model import Model

EXTENSIONS = ("binary_tensor_data", "classification", "generate")
LENGTH = "inference-header-content-length"
_CODES = {
    "bool": "BOOL",
    "uint8": "UINT8",
    "uint16": "UINT16",
    "uint32": "UINT32",
    "uint64": "UINT64",
    "int8": "INT8",
    "int16": "INT16",
    "int32": "INT32",
    "int64": "INT64",
    "float16": "FP16",
    "float32": "FP32",
    "float64": "FP64",
    "bfloat16": "BF16",
}
# Kind of a dtype -> kinds of JSON data.
_KINDS = {"b": "b", "u": "ui", "i": "ui", "f": "uif", "V": "uif"}


# The last is sent by KServe's client.
_FIELDS = ("id", "parameters", "inputs", "outputs", "model_name")
_SUPPORTED = {
    "request": ("binary_data_output",),
    "input": ("binary_data_size",),
    "output": ("binary_data", "classification"),
}


class Invalid(ValueError):
    """Raised for a request that is not valid. The error message is sent to the client."""


def servable(model: Model) -> bool:
    """Whether the Open Inference Protocol supports the dtypes of all inputs and outputs of a model."""
    return all(leaf["dtype"] in _CODES for _, leaf in [*model.inputs, *model.outputs])


def metadata(model: Model, versions: list[str]) -> dict:
    """Returns the description of a model. Sizes that may differ between requests are -1."""
    sizes = lambda leaf: [n if isinstance(n, int) else -1 for n in leaf["shape"]]
    tensors = lambda found: [
        {"name": name, "datatype": _CODES[leaf["dtype"]], "shape": sizes(leaf)}
        for name, leaf in found
    ]
    bundle = model.bundle
    parameters = {
        "signature": bundle.signature(model.entry),
        "created": bundle.manifest["created"],
        "batched": model.batched,
    }
    if model.not_batched:
        parameters["not_batched"] = model.not_batched
    if model.conditions:
        parameters["batched_if"] = model.conditions
    if bundle.labels:
        parameters["labels"] = bundle.labels
    return {
        "name": model.name,
        "versions": versions,
        "platform": "fnet",
        "inputs": tensors(model.inputs),
        "outputs": tensors(model.outputs),
        "parameters": parameters,
    }


def read_json(data: bytes) -> dict:
    """Reads a JSON object.

    Raises:
        Invalid: the data are not a JSON object.
    """
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Invalid(f"the body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise Invalid(f"expected a JSON object, got {type(body).__name__}")
    return body


def read(model: Model, body: bytes, length: str | None) -> tuple[dict, list[np.ndarray]]:
    """Reads a request. Returns (the JSON object of the request, the inputs in the order of the
    model's inputs).

    Args:
        length: the header Inference-Header-Content-Length, the number of bytes of JSON before the
            bytes of the tensors. The header is None if the whole body is JSON.

    Raises:
        Invalid: the request is not valid for the model.
    """
    if length is not None and not (
        length.isdigit() and len(length) < 16 and int(length) <= len(body)
    ):
        raise Invalid(
            f"Inference-Header-Content-Length is {length[:40]!r}, expected at most the {len(body)} "
            "bytes of the body"
        )
    end = len(body) if length is None else int(length)
    request, rest = read_json(body[:end]), memoryview(body)[end:]
    if unknown := sorted(set(request) - set(_FIELDS)):
        raise Invalid(f"unknown field {unknown[0][:80]!r}; expected {', '.join(_FIELDS)}")
    if request.get("model_name", model.name) != model.name:
        raise Invalid(
            f'"model_name" is {str(request["model_name"])[:80]!r}, and the path names {model.name!r}'
        )
    _parameters("request", request)
    tensors = request.get("inputs")
    if not isinstance(tensors, list) or not all(isinstance(x, dict) for x in tensors):
        raise Invalid('expected "inputs", a list of {name, shape, datatype, data}')
    held = {}
    for tensor in tensors:
        name = tensor.get("name")
        leaf = next((leaf for known, leaf in model.inputs if known == name), None)
        if leaf is None or name in held:
            raise Invalid(
                f"{'unknown' if leaf is None else 'repeated'} input {str(name)[:80]!r}; expected "
                f"{', '.join(name for name, _ in model.inputs)}"
            )
        held[name], rest = _tensor(name, tensor, leaf["dtype"], rest)
    missing = [name for name, _ in model.inputs if name not in held]
    if missing or len(rest):
        raise Invalid(
            f"the input {missing[0]!r} is missing"
            if missing
            else f"{len(rest)} bytes follow the tensors"
        )
    return request, [held[name] for name, _ in model.inputs]


def _parameters(what, held) -> dict:
    """Returns the parameters of a request, an input or a requested output.

    Raises:
        Invalid: the server does not support one of them. Those of Triton's extensions that are
            zero, false or empty, which is how clients state that they do not use an extension, are
            allowed.
    """
    parameters = held.get("parameters")
    if parameters is None:
        return {}
    if not isinstance(parameters, dict):
        raise Invalid(f"expected the parameters of the {what} as a JSON object")
    for name, value in parameters.items():
        if name not in _SUPPORTED[what] and value not in (None, 0, False, ""):
            raise Invalid(
                f"the parameter {name[:80]!r} of the {what} is not supported; expected "
                f"{' or '.join(_SUPPORTED[what])}"
            )
    for name in ("binary_data_output", "binary_data"):
        if not isinstance(parameters.get(name, False), bool):
            raise Invalid(f"{name} must be true or false")
    return parameters


def _tensor(name, tensor, dtype, rest):
    """Reads one input. Returns (array, the bytes of the body that follow the array)."""
    shape, code = tensor.get("shape"), tensor.get("datatype")
    if code != _CODES[dtype]:
        raise Invalid(
            f"the input {name!r} has datatype {str(code)[:20]!r}, expected {_CODES[dtype]!r}"
        )
    if (
        not isinstance(shape, list)
        or len(shape) > 32
        or not all(type(n) is int and 0 <= n < 1 << 40 for n in shape)
    ):
        raise Invalid(f"the shape of the input {name!r} must be a list of sizes")
    count, size = math.prod(shape), _parameters("input", tensor).get("binary_data_size")
    if size is not None:
        if "data" in tensor:
            raise Invalid(f"the input {name!r} has data and binary_data_size; expected one of them")
        wanted = count * np.dtype(dtype).itemsize
        if type(size) is not int or size != wanted or size > len(rest):
            raise Invalid(
                f"the input {name!r} of shape {shape} needs {wanted} bytes; binary_data_size is "
                f"{str(size)[:20]} and {len(rest)} bytes are left in the body"
            )
        return np.frombuffer(rest[:size], np.dtype(dtype)).reshape(shape), rest[size:]
    try:
        array = np.asarray(tensor.get("data"))
    except (ValueError, OverflowError, RecursionError):
        raise Invalid(
            f"the data of the input {name!r} must be a list of numbers, or equally nested lists"
        ) from None
    if array.size != count or (array.size and array.dtype.kind not in _KINDS[np.dtype(dtype).kind]):
        raise Invalid(
            f"the data of the input {name!r} must have {count} numbers of datatype {code}, got "
            f"{array.size} of the type {array.dtype.name}"
        )
    if np.dtype(dtype).kind in "ui" and array.size:
        limits = np.iinfo(dtype)
        if int(array.min()) < limits.min or int(array.max()) > limits.max:
            raise Invalid(
                f"the data of the input {name!r} must be from {limits.min} to {limits.max}"
            )
    with np.errstate(
        over="ignore"
    ):  # a number above the range of a float is infinite, as in the binary form
        return array.astype(dtype).reshape(shape), rest


def write(model: Model, request: dict, outputs: list[np.ndarray]) -> tuple[bytes, int | None]:
    """Returns (the body of the response, the number of bytes of JSON at its start). The number of
    bytes is None if the whole body is JSON.

    Raises:
        Invalid: the request asks for outputs that do not exist.
    """
    wanted, tensors, parts = _wanted(model, request), [], []
    for (name, leaf), array in zip(model.outputs, outputs):
        if name not in wanted:
            continue
        binary, count = wanted[name]
        tensor = {"name": name, "shape": list(array.shape), "datatype": _CODES[leaf["dtype"]]}
        if count:
            classes = _classes(model, array, count)
            tensor |= {"shape": list(classes.shape), "datatype": "BYTES"}
        if binary:
            parts.append(_texts(classes) if count else np.ascontiguousarray(array).tobytes())
            tensor["parameters"] = {"binary_data_size": len(parts[-1])}
        else:
            tensor["data"] = classes.ravel().tolist() if count else _numbers(array)
        tensors.append(tensor)
    response = {"model_name": model.name, "model_version": model.version, "outputs": tensors}
    if isinstance(request.get("id"), str):
        response["id"] = request["id"][:256]
    head = json.dumps(response, separators=(",", ":"), allow_nan=False).encode()
    return b"".join([head, *parts]), len(head) if parts else None


def check_outputs(model: Model, request: dict) -> None:
    """Raises Invalid if the request asks for outputs that do not exist, or for classes of an output
    without numbers."""
    _wanted(model, request)


def _wanted(model, request) -> dict[str, tuple[bool, int]]:
    """Returns {name of a requested output: (whether it is requested as bytes, the number of
    requested classes or 0)}"""
    everything = bool(_parameters("request", request).get("binary_data_output"))
    asked = request.get("outputs")
    if not asked:
        return {name: (everything, 0) for name, _ in model.outputs}
    if not isinstance(asked, list) or not all(isinstance(x, dict) for x in asked):
        raise Invalid('expected "outputs", a list of {name}')
    known, wanted = dict(model.outputs), {}
    for output in asked:
        name = output.get("name")
        if not isinstance(name, str) or name not in known or name in wanted:
            what = "repeated" if isinstance(name, str) and name in wanted else "unknown"
            raise Invalid(f"{what} output {str(name)[:80]!r}; expected {', '.join(known)}")
        parameters = _parameters("output", output)
        count = parameters.get("classification", 0)
        if type(count) is not int or count < 0:
            raise Invalid(
                f"classification is {str(count)[:20]}, expected the number of classes, an integer"
            )
        if count and known[name]["dtype"] == "bool":
            raise Invalid(f"classification: the output {name!r} has no numbers, but booleans")
        wanted[name] = bool(parameters.get("binary_data", everything)), count
    return wanted


def _classes(model, array, count) -> np.ndarray:
    """Returns the `count` largest elements of each row as strings "value:index" or
    "value:index:label", in Triton's format: [rows, count], or [count] if the first axis of the
    model is not a batch. NaN is less than all numbers."""
    rows = array.reshape(len(array), -1) if model.rows_name else array.reshape(1, -1)
    exact = rows.dtype.kind in "ui"
    numbers = (
        rows
        if exact
        else np.where(np.isnan(rows.astype(np.float64)), -np.inf, rows.astype(np.float64))
    )
    # A stable sort in descending order: of equal elements, the first one is first.
    order = (
        rows.shape[1] - 1 - np.argsort(numbers[:, ::-1], axis=1, kind="stable")[:, ::-1][:, :count]
    )
    labels = model.bundle.labels or ()

    def text(row, i):
        value = str(row[i]) if exact else f"{float(row[i]):f}"
        return f"{value}:{i}:{labels[i]}" if i < len(labels) else f"{value}:{i}"

    found = np.array([[text(row, i) for i in indices] for row, indices in zip(rows, order)], object)
    return found.reshape(order.shape) if model.rows_name else found.reshape(-1)


def _texts(strings) -> bytes:
    """Returns strings as bytes, each after its length in 4 bytes."""
    encoded = [text.encode() for text in strings.ravel()]
    return b"".join(len(text).to_bytes(4, "little") + text for text in encoded)


def _numbers(array):
    """Returns the elements of an array as a flat list. NaN and infinite elements become None,
    because JSON cannot represent them."""
    if array.dtype.kind in "fV":
        numbers = array.astype(np.float64).ravel()
        finite = np.isfinite(numbers)
        if not finite.all():
            return [x if ok else None for x, ok in zip(numbers.tolist(), finite)]
        return numbers.tolist()
    return array.ravel().tolist()
