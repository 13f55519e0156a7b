"""The model of a training run, recorded in its folder, so that `fnet export RUN` needs no code of
the user."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fnet._util._files import write_json
from fnet.export._spec import Spec, spec

RECORD = "model.json"
_PACKAGE = (
    "fnet.models"  # the only package of models in records, so that reading imports no other code
)
_RENAMED = {"Llama": "Decoder"}  # classes in records of earlier versions


class Record(NamedTuple):
    """What `record` wrote to the folder of a training run.

    Attributes:
        model: the model.
        inputs: the types of its inputs, {name: `Spec`}.
        labels: the names of the classes, or None.
        standardize: None, or the mean and standard deviation of each channel, {"mean": [...],
            "std": [...]}, of images with values in [0, 1], if the model expects standardized
            images.
    """

    model: Any
    inputs: dict[str, Spec]
    labels: list[str] | None
    standardize: Mapping[str, list[float]] | None


def record(
    workdir: str | os.PathLike,
    model: Any,
    *,
    labels: Iterable[Any] | None = None,
    standardize: Mapping[str, Iterable[float]] | None = None,
    **specs: Spec,
) -> None:
    """Writes the model of a training run to model.json in its folder, so that `fnet export` needs
    no code of yours.

        export.record(workdir, model, x=export.spec("b, 28, 28, 1"), labels=range(10))

    Args:
        workdir: the folder of the run, a local path. It is created if necessary.
        model: a model of `fnet.models` whose fields are numbers, strings, or tuples of them. Its
            class and fields are recorded.
        labels: the names of the classes. Default None: no labels.
        standardize: for a model that expects standardized images, {"mean": [...], "std": [...]}
            with one number for each channel, of images with values in [0, 1]. Default None.
        specs: the types of the inputs, `name=export.spec(...)`.

    Raises:
        TypeError: the model is not one of `fnet.models`, or a field cannot be written as JSON.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     export.record(folder, models.MLP((8, 3)), x=export.spec("b, 4"), labels=["a", "b", "c"])
    ...     export.read_record(folder).labels
    ['a', 'b', 'c']
    """
    kind, folder = type(model), Path(workdir)
    if getattr(importlib.import_module(_PACKAGE), kind.__name__, None) is not kind:
        raise TypeError(
            f"export.record: {kind.__module__}.{kind.__name__} is not a model of fnet.models; "
            "export it in your own code with export.program"
        )
    fields = {}
    for field in dataclasses.fields(model):
        value = getattr(model, field.name)
        if not _plain(value):
            raise TypeError(
                f"export.record: {kind.__name__}.{field.name} is a {type(value).__name__}, which "
                "cannot be recorded; export the model in your own code with export.program"
            )
        fields[field.name] = value
    data = {
        "model": kind.__name__,
        "fields": fields,
        "inputs": {name: dataclasses.asdict(x) for name, x in specs.items()},
        "labels": None if labels is None else [str(label) for label in labels],
        "standardize": standardize
        and {name: [float(x) for x in values] for name, values in standardize.items()},
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / RECORD, data)


def read_record(workdir: str | os.PathLike) -> Record:
    """Reads the model that `record` wrote to the folder of a training run.

    Returns:
        A named tuple (model, inputs, labels, standardize), with the values that were passed to
            `record`.

    Raises:
        FileNotFoundError: the folder has no model.json.
        ValueError: model.json is not valid.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     export.record(folder, models.MLP((8, 3)), x=export.spec("b, 4"))
    ...     export.read_record(folder).model
    MLP(widths=(8, 3)...)
    """
    path = Path(workdir) / RECORD
    if not path.exists():
        raise FileNotFoundError(
            f"{path}: no such file; a run whose program calls export.record(workdir, model, ...) "
            "has one, and other models are exported with export.program"
        )
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        models = importlib.import_module(_PACKAGE)
        name = _RENAMED.get(data["model"], data["model"])
        kind = getattr(models, name) if name in models.__all__ else None
        if kind is None or not dataclasses.is_dataclass(kind):
            raise ValueError(f"{data['model']!r} is not a model of {_PACKAGE}")
        inputs = {
            name: spec(x["shape"], x["dtype"], where=x["where"])
            for name, x in data["inputs"].items()
        }
        return Record(kind(**data["fields"]), inputs, data["labels"], data["standardize"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path} does not describe a model: {error or type(error).__name__}"
        ) from None


def _plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))
