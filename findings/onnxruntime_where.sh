#!/bin/sh
# onnxruntime's Where returns 0.0 where it selects -0.0 from its second operand. In the third operand, -0.0 remains, and
# an optimization of onnxruntime exchanges the two.
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

condition = np.array([True, True, False, False])
inputs = {"condition": condition, "zero": np.full(4, -0.0, np.float32), "one": np.ones(4, np.float32)}


def results(*nodes):
    """Returns the output of a graph, in onnxruntime and in ONNX's reference implementation."""
    kind = lambda name, x: helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
    graph = helper.make_graph(nodes, "graph", [kind(*item) for item in inputs.items()], [kind("y", inputs["one"])])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, inputs)[0], ReferenceEvaluator(model).run(None, inputs)[0]


print(f"Python {sys.version.split()[0]}, onnxruntime {onnxruntime.__version__}, onnx {onnx.__version__}")
print("-0.0 is selected from the second operand of Where, and is 0.0 in the result")
wrong = []
for name, nodes, exact in (
        ("Where(condition, -0.0, 1.0)", [helper.make_node("Where", ["condition", "zero", "one"], ["y"])], False),
        ("Where(condition, 1.0, -0.0)", [helper.make_node("Where", ["condition", "one", "zero"], ["y"])], True),
        ("Where(Not(condition), 1.0, -0.0)", [helper.make_node("Not", ["condition"], ["opposite"]),
                                              helper.make_node("Where", ["opposite", "one", "zero"], ["y"])], False)):
    y, wanted = results(*nodes)
    wrong.append(np.array_equal(y, wanted) and np.array_equal(np.signbit(y), np.signbit(wanted)) == exact)
    print(name)
    print("onnxruntime:   ", y)
    print("reference:     ", wanted)
print("as described" if all(wrong) else "CHANGED: no longer as described")
sys.exit(not all(wrong))
PYTHON
