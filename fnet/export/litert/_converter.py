"""Converts StableHLO to a LiteRT model with the package litert-converter, which has no public API,
and tries the model.

`_litert` runs this file as a program of its own, so it imports nothing of fnet. Its input is a line
of JSON, with a tuple (name, bytes of the StableHLO, names of inputs, names of outputs) for each
signature, and then their StableHLO. Its output is the model or, if it exits with `REFUSED`, the
reason why the program cannot be converted.
"""

from __future__ import annotations

import json
import os
import re
import sys

REFUSED = 3
_PASSES = (
    "builtin.module(vhlo-legalize-stablehlo,reconcile-unrealized-casts,"
    "func.func(stablehlo-legalize-composite-to-call),inline,strip-debuginfo)"
)
_CONSTANT = "stablehlo.constant"


def convert(signatures: list[tuple[str, bytes, list[str], list[str]]]) -> bytes:
    """Returns the LiteRT model of the signatures.

    Raises:
        NotImplementedError: the converter does not support an operation.
    """
    from litert_converter.mlir import ir, passmanager
    from litert_converter.mlir._mlir_libs import converter_api_ext as api

    context = ir.Context()
    api.prepare_mlir_context(context)
    with context, ir.Location.unknown():
        modules, module = [], None
        try:
            for name, program, inputs, outputs in signatures:
                module = ir.Module.parse(program)
                passmanager.PassManager.parse(_PASSES).run(module.operation)
                api.set_signature(
                    module.operation, signature_name=name, input_names=inputs, output_names=outputs
                )
                modules.append(module)
            module = api.merge_modules(modules)
            config = api.ConvertToTFLConfig()
            config.canonicalizing_inf_as_min_max_float = False
            api.run_convert_to_tfl_passes(module, passmanager.PassManager(), config)
            return api.export_flatbuffer_to_bytes(getattr(module, "operation", module))
        except Exception as error:  # the converter raises errors of several types
            remaining = sorted(
                set(re.findall(r"\b(?:stablehlo|chlo)\.\w+", str(module))) - {_CONSTANT}
            )
            which = f"the operations {', '.join(remaining)} are" if remaining else "an operation is"
            raise NotImplementedError(
                f"{which} not supported by litert-converter, so this program cannot be "
                f"converted: {str(error).strip().rstrip(':') or type(error).__name__}"
            ) from None


def try_out(model: bytes) -> None:
    """Runs each signature with zeros. The interpreter loads some models whose operators it cannot
    run.

    Raises:
        NotImplementedError: the interpreter cannot run the model.
    """
    import numpy as np
    from ai_edge_litert.interpreter import Interpreter

    try:
        interpreter = Interpreter(model_content=model, num_threads=1)
        for name in interpreter.get_signature_list():
            runner = interpreter.get_signature_runner(name)
            runner(
                **{
                    key: np.zeros(each["shape"], each["dtype"])
                    for key, each in runner.get_input_details().items()
                }
            )
    except (RuntimeError, ValueError) as error:
        raise NotImplementedError(
            f"the interpreter cannot run this model: {str(error).splitlines()[0]}"
        ) from None


def main() -> None:
    output = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    # What the converter prints is not part of the model.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    header = json.loads(sys.stdin.buffer.readline())
    signatures = [
        (name, sys.stdin.buffer.read(size), inputs, outputs)
        for name, size, inputs, outputs in header
    ]
    try:
        result, status = convert(signatures), 0
        try_out(result)
    except NotImplementedError as error:
        result, status = str(error).encode(), REFUSED
    with output:
        output.write(result)
    sys.exit(status)


if __name__ == "__main__":
    main()
