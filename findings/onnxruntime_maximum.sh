#!/bin/sh
# onnxruntime's ReduceMax and ReduceMin return NaN if it is the first element, and overlook it elsewhere.
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
    """Reduces the rows of x, in onnxruntime and in ONNX's reference implementation."""
    graph = helper.make_graph(
        [helper.make_node(operator, ["x", "axes"], ["y"], keepdims=0)], "graph",
        [helper.make_tensor_value_info("x", 1, x.shape)], [helper.make_tensor_value_info("y", 1, x.shape[:1])],
        [helper.make_tensor("axes", 7, [1], [1])])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0], ReferenceEvaluator(model).run(None, {"x": x})[0]


x = np.array([[np.nan, 1, 2], [1, np.nan, 2], [1, 2, np.nan]], np.float32)

print(f"Python {sys.version.split()[0]}, onnxruntime {onnxruntime.__version__}, onnx {onnx.__version__}")
print("whether the maximum of a row is NaN depends on the place of the NaN in the row")
print("rows:       ", x.tolist())
wrong = []
for operator in "ReduceMax", "ReduceMin":
    y, wanted = results(operator, x)
    wrong.append(np.isnan(wanted).all() and np.isnan(y).tolist() == [True, False, False])
    print(operator)
    print("onnxruntime:", y)
    print("reference:  ", wanted)
print("as described" if all(wrong) else "CHANGED: no longer as described")
sys.exit(not all(wrong))
PYTHON
