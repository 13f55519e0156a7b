"""`fnet export RUN --to=bundle,onnx,litert`: writes the trained model of a run as files."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

_FORMATS = {"bundle": "model.fnet", "onnx": "model.onnx", "litert": "model.tflite", "web": "web"}
_CONTEXT = 4096  # tokens of a generated text, at most


def define(commands: Any) -> None:
    """Adds the command `export` to the parser of `fnet`."""
    export = commands.add_parser(
        "export",
        help="export the trained model of a run",
        description="Exports the model of a run's folder, which contains model.json "
        "(export.record). onnx needs the packages onnx and onnxruntime, litert those of LiteRT, and "
        "web those of onnx and the npm package onnxruntime-web.",
    )
    export.add_argument("run", help="folder of the run, such as runs/digits")
    export.add_argument(
        "--to",
        default="bundle",
        help=f"formats to write, separated by commas: {', '.join(_FORMATS)} (default: %(default)s)",
    )
    export.add_argument(
        "--which",
        default="last",
        help="checkpoint to export: last (default), best, or the number of a step",
    )
    export.add_argument(
        "--output", help="folder to which the files are written (default: the folder of the run)"
    )
    export.add_argument(
        "--runtime",
        metavar="FOLDER",
        help="folder of the npm package onnxruntime-web, for --to=web "
        "(default: node_modules/onnxruntime-web)",
    )
    export.add_argument(
        "--sizes",
        action="append",
        metavar="NAME=SIZE,...",
        help="values of the size variables of a LiteRT model, such as b=1,t=64; repeat the option for "
        "several signatures",
    )


def run(args: argparse.Namespace) -> int:
    """Runs the command `fnet export` and returns its exit code.

    Raises:
        ValueError: a format is unknown, or the folder does not contain a run.
    """
    from fnet import export, models
    from fnet import training as tr

    formats = [name.strip() for name in args.to.split(",")]
    unknown = [name for name in formats if name not in _FORMATS]
    if unknown:
        raise ValueError(
            f"--to={args.to}: {unknown[0]!r} is not a format; expected {', '.join(_FORMATS)}"
        )
    sizes = [_sizes(text) for text in args.sizes] if args.sizes else None
    which = int(args.which) if args.which.isdigit() else args.which
    found = export.read_record(args.run)
    snapshot = tr.load(args.run, which=which)
    program = export.program(found.model, snapshot.averaged, snapshot.state or None, **found.inputs)
    if found.standardize:
        (image,) = found.inputs.values()
        program = program.entry(
            "preprocess",
            _standard(**found.standardize),
            image=export.spec(image.shape, "uint8", where=image.where),
        )
    if isinstance(found.model, (models.GPT, models.Decoder, models.LSTMLanguageModel)):
        context = getattr(found.model, "context", None) or _CONTEXT
        program = export.generation(program, found.model, context=min(context, _CONTEXT))
    folder, characters = Path(args.output or args.run), Path(args.run) / "characters.json"
    about = {"run": Path(args.run).name, "step": snapshot.step, "metrics": snapshot.metrics}
    for name in formats:
        path = folder / _FORMATS[name]
        if name == "bundle":
            program.save(
                path,
                labels=found.labels,
                about=about,
                tokenizer=characters if characters.exists() else None,
            )
        elif name == "onnx":
            program.onnx(path)
        elif name == "litert":
            program.litert(path, sizes=sizes)
        else:
            export.web(
                program,
                path,
                labels=found.labels,
                title=Path(args.run).resolve().name,
                runtime=args.runtime,
            )
        files = path.iterdir() if path.is_dir() else [path]
        print(f"{path}: step {snapshot.step}, {sum(file.stat().st_size for file in files):,} bytes")
    return 0


def _sizes(text: str) -> dict[str, int]:
    """Converts the value of --sizes, such as "b=1,t=64", to a dict, such as {"b": 1, "t": 64}."""
    try:
        return {
            name.strip(): int(size) for name, size in (pair.split("=") for pair in text.split(","))
        }
    except ValueError:
        raise ValueError(f"--sizes={text}: expected names and sizes, such as b=1,t=64") from None


def _standard(mean: list[float], std: list[float]) -> Any:
    """Returns a function that scales images with values from 0 to 255 and standardizes their
    channels."""

    def preprocess(params, image):
        import jax.numpy as jnp

        x = image.astype(jnp.float32) / 255
        shape = (1,) * (x.ndim - 1) + (-1,)
        return (x - jnp.asarray(mean, x.dtype).reshape(shape)) / jnp.asarray(std, x.dtype).reshape(
            shape
        )

    return preprocess
