#!/bin/sh
# onnxruntime's ReduceSum adds integers as if in float64, so that sums do not wrap, and lose digits beyond 2^53. Its
# ReduceMean adds float32 numbers one after the other, so that the mean of a million equal numbers is 1 % off.
set -eu
python=${PYTHON:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/environment"
"$folder/environment/bin/python" -m pip install --quiet --disable-pip-version-check \
    "onnxruntime==1.32.0" "onnx==1.23.2" "numpy==2.4.6"
cd "$folder"
environment/bin/python - <<'PYTHON'
import sys

import numpy as np
import onnx
import onnxruntime
from onnx import helper
from onnx.reference import ReferenceEvaluator


def results(operator, x):
    """Reduces the first axis, in onnxruntime and in ONNX's reference implementation, which calls NumPy."""
    kind = lambda name, dtype, shape: helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(dtype), shape)
    graph = helper.make_graph(
        [helper.make_node(operator, ["x", "axes"], ["y"], keepdims=0)], "graph",
        [kind("x", x.dtype, x.shape)], [kind("y", x.dtype, x.shape[1:])], [helper.make_tensor("axes", 7, [1], [0])])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0], ReferenceEvaluator(model).run(None, {"x": x})[0]


print(f"Python {sys.version.split()[0]}, onnxruntime {onnxruntime.__version__}, onnx {onnx.__version__}")
print("sums of integers do not wrap, and lose digits; the mean of many numbers is 1 % off")
wrong = []
for name, operator, x in (
        ("the sum of the int32 2^30, 2^30, 2^30, 2^30", "ReduceSum", np.full(4, 2**30, np.int32)),
        ("the sum of the int64 2^53, 1, 2", "ReduceSum", np.array([2**53, 1, 2])),
        ("the mean of 2^20 rows with one number, 0.1", "ReduceMean", np.full((2**20, 1), 0.1, np.float32))):
    y, wanted = results(operator, x)
    wrong.append(abs(y.item() - wanted.item()) > 0.005 * abs(wanted.item()) if x.ndim > 1 else y != wanted)
    print(name)
    print("onnxruntime:", y)
    print("reference:  ", wanted)
print("as described" if all(wrong) else "CHANGED: no longer as described")
sys.exit(not all(wrong))
PYTHON
