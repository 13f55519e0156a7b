"""Prints the table of sizes in docs/export.md: bytes of the programs of every model, without the
weights.

Run it with:

    PYTHONPATH=tests python tests/export/sizes.py
"""

import pathlib
import tempfile

import jax
from zoo import MODELS, build, inputs

from fnet import export

jax.config.update("jax_disable_most_optimizations", True)
print(
    "| model | sizes | portable | stable form | stable form, compressed | ONNX, without weights |\n"
    "| --- | --- | --- | --- | --- | --- |"
)
with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder)
    for name, (_, (shape, where), _) in MODELS.items():
        f, params, symbolic, _ = build(name)
        types = inputs(name, symbolic)
        program = export.program(
            f,
            params,
            **{
                f"x{i}": export.spec(
                    ", ".join(map(str, x.shape)), x.dtype, where=where if i == 0 else ()
                )
                for i, x in enumerate(types)
            },
        )
        program.save(
            path / "f",
            tests={"predict": {f"x{i}": x for i, x in enumerate(inputs(name, build(name)[3][0]))}},
        )
        bundle = export.load(path / "f")
        files = bundle.manifest["files"]
        packed = bundle._archive._entries["programs/predict.json"][0].compress_size
        program.onnx(path / "f.onnx", external=True, check=False)
        kilobytes = [
            files["programs/predict.portable.jax"]["bytes"],
            files["programs/predict.json"]["bytes"],
            packed,
            (path / "f.onnx").stat().st_size,
        ]
        print(
            f"| {name} | {shape} | {' | '.join(f'{size / 1000:.0f} kB' for size in kilobytes)} |",
            flush=True,
        )
