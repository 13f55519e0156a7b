#!/bin/sh
# LiteRT's exponential of NaN is 0, and its logarithm of NaN is 88.8. Its maximum is NaN only if the second operand is.
set -eu
python=${PYTHON:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/environment"
"$folder/environment/bin/python" -m pip install --quiet --disable-pip-version-check \
    "ai-edge-litert==2.3.0" "numpy==2.4.6"
cd "$folder"
environment/bin/python - <<'PYTHON'
import importlib.metadata
import sys

import numpy as np
from ai_edge_litert import interpreter
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.tools import flatbuffer_utils


def model(operator, operands, n):
    """Returns a model that applies one operator to arrays of n numbers."""
    code = schema.OperatorCodeT()
    code.builtinCode = getattr(schema.BuiltinOperator, operator)
    code.deprecatedBuiltinCode, code.version = code.builtinCode, 1
    node = schema.OperatorT()
    node.inputs, node.outputs = list(range(operands)), [operands]
    if operator == "MAXIMUM":
        node.builtinOptionsType = schema.BuiltinOptions.MaximumMinimumOptions
        node.builtinOptions = schema.MaximumMinimumOptionsT()
    graph = schema.SubGraphT()
    graph.inputs, graph.outputs, graph.operators, graph.tensors = node.inputs, node.outputs, [node], []
    for i in range(operands + 1):
        tensor = schema.TensorT()
        tensor.name, tensor.shape, tensor.type, tensor.buffer = f"x{i}", [n], schema.TensorType.FLOAT32, 0
        graph.tensors.append(tensor)
    whole = schema.ModelT()
    whole.version, whole.operatorCodes, whole.subgraphs, whole.buffers = 3, [code], [graph], [schema.BufferT()]
    return bytes(flatbuffer_utils.convert_object_to_bytearray(whole))


def result(operator, *arrays):
    runner = interpreter.Interpreter(model_content=model(operator, len(arrays), len(arrays[0])))
    runner.allocate_tensors()
    for i, x in enumerate(arrays):
        runner.set_tensor(i, np.array(x, np.float32))
    runner.invoke()
    return runner.get_tensor(len(arrays))


version = importlib.metadata.version("ai-edge-litert")
print(f"Python {sys.version.split()[0]}, ai-edge-litert {version}, numpy {np.__version__}")
print("NaN becomes a number, and a large exponential becomes infinite")
nan = float("nan")
wrong = []
for operator, f, arrays, described in (
        ("EXP", np.exp, ([nan, 1, 88.5],), [0, np.e, np.inf]),
        ("LOG", np.log, ([nan, 1, 2],), [88.78, 0, np.log(2)]),
        ("MAXIMUM", np.maximum, ([nan, 1], [1, nan]), [1, nan])):
    y = result(operator, *arrays)
    wrong.append(np.allclose(y, described, rtol=1e-3, equal_nan=True))
    print(f"{operator} of", *arrays)
    print("LiteRT:", y)
    print("NumPy: ", f(*np.array(arrays, np.float32)))
print("as described" if all(wrong) else "CHANGED: no longer as described")
sys.exit(not all(wrong))
PYTHON
