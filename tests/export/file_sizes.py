"""Prints the table of file sizes in docs/export.md: models of usual sizes with random weights, as
every kind of file.

Run it with:

    PYTHONPATH=tests .venv-export/bin/python tests/export/file_sizes.py      # all files are run and compared
"""

import pathlib
import tempfile

import jax

from fnet import export, models

IMAGE, TEXT = "b, h, w, 3", "b, t"
MODELS = {  # model, type of its input, and the sizes of the LiteRT model
    "CNN of `make demo`": (models.CNN(10, (16, 32), 2), export.spec("b, 8, 8, 1"), {"b": 1}),
    "MobileNetV2": (
        models.MobileNetV2(),
        export.spec(IMAGE, where=("h >= 32", "w >= 32")),
        {"b": 1, "h": 224, "w": 224},
    ),
    "ResNet-50": (
        models.ResNet(**models.ResNet.PRESETS["resnet50"]),
        export.spec(IMAGE, where=("h >= 32", "w >= 32")),
        {"b": 1, "h": 224, "w": 224},
    ),
    "ViT-Ti/16": (
        models.ViT(**models.ViT.PRESETS["vit_ti_16"]),
        export.spec("b, 224, 224, 3"),
        {"b": 1},
    ),
    "BERT (MiniLM-L6)": (
        models.Bert(**models.Bert.PRESETS["minilm-l6"]),
        export.spec(TEXT, "int32", where="t <= 512"),
        {"b": 1, "t": 64},
    ),
    "GPT, 6 blocks of width 384": (
        models.GPT(256, 384, 6, 6, context=256),
        export.spec(TEXT, "int32", where="t <= 256"),
        {"b": 1, "t": 64},
    ),
    "Llama (stories15M)": (
        models.Decoder(**models.Decoder.PRESETS["stories15m"]),
        export.spec(TEXT, "int32", where="t <= 256"),
        {"b": 1, "t": 64},
    ),
    "LSTM of width 512": (
        models.LSTMLanguageModel(256, 512),
        export.spec(TEXT, "int32"),
        {"b": 1, "t": 16},
    ),
}


def megabytes(path):
    return f"{path.stat().st_size / 1e6:.2f}"


print(
    "| model | weights | bundle | ONNX | LiteRT | LiteRT, float16 | LiteRT, int8 |\n"
    "| --- | --- | --- | --- | --- | --- | --- |"
)
with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / "file"
    for name, (model, x, sizes) in MODELS.items():
        example = jax.ShapeDtypeStruct(
            [sizes.get(n.strip()) or int(n) for n in x.shape.split(",")], x.dtype
        )
        params, state = model.init(jax.random.key(0), example)
        program = export.program(model, params, state or None, x=x)
        total = sum(array.nbytes for array in program.weights.values())
        row = [f"{total / 1e6:.2f}"]
        program.save(path)
        row.append(megabytes(path))
        program.onnx(path)
        row.append(megabytes(path))
        for dtype in ("float32", "float16", "int8"):
            try:
                program.litert(path, sizes=sizes, dtype=dtype)
                row.append(megabytes(path))
            except (NotImplementedError, ValueError) as error:
                row.append(str(error).split(": ", 1)[-1].strip())
        print(f"| {name} | {' | '.join(row)} |", flush=True)
