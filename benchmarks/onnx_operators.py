"""Transformers in onnxruntime: with the operators of opset 20, with those that fnet selects by
default, and with all of opset 23, which has RMSNormalization and Attention.

    python -m benchmarks.onnx_operators
    python -m benchmarks.onnx_operators decoder --lengths=16,512

The weights are random. The forms alternate in one process, each with one thread. A time is the median
over the rounds of the CPU time of a call, so that other programs on the machine matter less.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

from benchmarks._harness import header
from fnet import export, models

WIDTH, DEPTH, HEADS, VOCABULARY, CONTEXT = 384, 6, 6, 1000, 1024
MODELS = {
    "gpt": models.GPT(VOCABULARY, WIDTH, DEPTH, HEADS, context=CONTEXT),
    "decoder": models.Decoder(VOCABULARY, WIDTH, DEPTH, HEADS, 2, 2 * WIDTH, context=CONTEXT),
    "bert": models.Bert(VOCABULARY, WIDTH, DEPTH, HEADS, 4 * WIDTH, context=CONTEXT),
    "bert with lengths": models.Bert(VOCABULARY, WIDTH, DEPTH, HEADS, 4 * WIDTH, context=CONTEXT),
    "vit": models.ViT(WIDTH, DEPTH, HEADS, classes=10, patch=16, size=224),
}
FORMS = {"opset 20": dict(opset=20), "default": {}, "opset 23": dict(opset=23)}


def program(name: str):
    model = MODELS[name]
    if name == "vit":
        params, _ = model.init(jax.random.key(0), np.zeros((1, 224, 224, 3), np.float32))
        return export.program(model, params, x=export.spec("b, 224, 224, 3"))
    params, _ = model.init(jax.random.key(0), np.zeros((1, 8), np.int32))
    x, lengths = export.spec("b, t", "int32", where=f"t <= {CONTEXT}"), export.spec("b", "int32")
    if "lengths" not in name:
        return export.program(model, params, x=x)
    f = lambda params, x, lengths: model(params, x, lengths)
    return export.program(f, params, x=x, lengths=lengths)


def given(name: str, batch: int, length: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    if name == "vit":
        return {"x": draw.normal(size=(batch, 224, 224, 3)).astype(np.float32)}
    inputs = {"x": draw.integers(0, VOCABULARY, (batch, length)).astype(np.int32)}
    if "lengths" in name:
        inputs["lengths"] = np.full(batch, max(1, 3 * length // 4), np.int32)
    return inputs


def sessions(made, folder: Path) -> dict:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    result = {}
    for form, arguments in FORMS.items():
        made.onnx(folder / "model.onnx", check=False, **arguments)
        result[form] = onnxruntime.InferenceSession(str(folder / "model.onnx"), options)
    return result


def main(arguments=None) -> None:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.onnx_operators", description=__doc__.split("\n\n")[0]
    )
    made.add_argument("models", nargs="*", default=list(MODELS), help=f"of {', '.join(MODELS)}")
    made.add_argument("--batches", default="1")
    made.add_argument("--lengths", default="16,128,512", help="tokens of a text")
    made.add_argument("--rounds", type=int, default=9)
    options = made.parse_args(arguments)
    command = " ".join(sys.argv[1:] if arguments is None else arguments)
    command = f"python -m benchmarks.onnx_operators {command}".strip()
    print(header(command, options.rounds, ("onnxruntime",)))
    columns = [
        "model",
        "batch",
        "tokens",
        *(f"{form} ms" for form in FORMS),
        "default / 20",
        "23 / 20",
    ]
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    for name in options.models:
        with tempfile.TemporaryDirectory() as folder:
            forms = sessions(program(name), Path(folder))
        lengths = [197] if name == "vit" else map(int, options.lengths.split(","))
        for length in lengths:
            for batch in map(int, options.batches.split(",")):
                inputs = given(name, batch, length)
                times: dict[str, list[float]] = {form: [] for form in forms}
                for turn in range(options.rounds + 1):  # the first round allocates
                    for form, session in forms.items():
                        began = time.process_time()
                        session.run(None, inputs)
                        times[form] += [time.process_time() - began] * bool(turn)
                milliseconds = [1e3 * statistics.median(each) for each in times.values()]
                ratios = [each / milliseconds[0] for each in milliseconds[1:]]
                cells = [name, batch, length, *(f"{each:.3g}" for each in milliseconds)]
                cells += [f"{ratio:.2f}" for ratio in ratios]
                print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    main()
