#!/bin/sh
# litert-converter writes a constant array of -0.0 as 0.0, so that 1 / x is inf instead of -inf. It also writes a sum
# over windows of uint32, and the interpreter accepts the file; only running it raises an error.
set -eu
python=${PYTHON:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
jax=$("$python" -c 'import sys; print("0.10.2" if sys.version_info < (3, 12) else "0.12.0")')
"$python" -m venv "$folder/environment"
"$folder/environment/bin/python" -m pip install --quiet --disable-pip-version-check \
    "jax==$jax" "jaxlib==$jax" "flatbuffers==25.12.19" "ai-edge-litert==2.3.0" "litert-converter==0.5.0"
cd "$folder"
JAX_PLATFORMS=cpu environment/bin/python - <<'PYTHON'
import importlib.metadata
import sys

import jax
import jax.numpy as jnp
import numpy as np
from ai_edge_litert import interpreter
from jax import export
from litert_converter.mlir import ir, passmanager
from litert_converter.mlir._mlir_libs import converter_api_ext as api

PASSES = "builtin.module(vhlo-legalize-stablehlo,reconcile-unrealized-casts,inline)"


def runner(f, x):
    """Returns f as a function that runs in LiteRT."""
    program = export.export(jax.jit(f), platforms=["cpu"])(jax.ShapeDtypeStruct(x.shape, x.dtype))
    context = ir.Context()
    api.prepare_mlir_context(context)
    with context, ir.Location.unknown():
        module = ir.Module.parse(program.mlir_module_serialized)
        passmanager.PassManager.parse(PASSES).run(module.operation)
        api.set_signature(module.operation, signature_name="f", input_names=["x"], output_names=["y"])
        module = api.merge_modules([module])
        api.run_convert_to_tfl_passes(module, passmanager.PassManager(), api.ConvertToTFLConfig())
        model = api.export_flatbuffer_to_bytes(getattr(module, "operation", module))
    loaded = interpreter.Interpreter(model_content=model)
    loaded.allocate_tensors()
    return loaded.get_signature_runner("f")


versions = {name: importlib.metadata.version(name) for name in ("jax", "ai-edge-litert", "litert-converter")}
print(f"Python {sys.version.split()[0]}", *(f"{name} {version}" for name, version in versions.items()))
as_described = []
x = np.array([1.0, 2.0, -3.0], np.float32)
for described, constant in ([0.0, 0.0, 0.0], np.full(3, -0.0, np.float32)), ([-0.0, 5.0, 5.0], np.float32([-0.0, 5, 5])):
    f = lambda x: jnp.where(x > 100, x, constant)
    y = runner(f, x)(x=x)["y"]
    print("the constant", constant, "in LiteRT:", y, "in JAX:", f(jnp.asarray(x)))
    as_described.append(bool(np.all(np.signbit(y) == np.signbit(np.float32(described)))))

x = np.array([1, 2, 3, 4], np.uint32)
run = runner(lambda x: jax.lax.reduce_window(x, np.uint32(0), jax.lax.add, (2,), (1,), "VALID"), x)
print("sums over windows of uint32: written, and accepted by the interpreter")
try:
    print("LiteRT:", run(x=x)["y"])
    as_described.append(False)
except RuntimeError as error:
    print("running it:", str(error).splitlines()[0])
    as_described.append(True)
print("as described" if all(as_described) else "CHANGED: no longer as described")
sys.exit(not all(as_described))
PYTHON
