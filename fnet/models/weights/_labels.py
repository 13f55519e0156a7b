"""Reads and writes the number of labels of a classifier in transformers' config.json."""

from __future__ import annotations

from collections.abc import Mapping

from fnet.models.weights._config import SKIP, Fields


def labels(heads: Mapping[str, Mapping], default: str | None = None) -> dict[str, Fields]:
    """Returns {field: Fields} for the fields of transformers' config.json that set the number of
    classes: `id2label`, `num_labels` and `_num_labels`.

    Args:
        heads: {architecture, as in the field `architectures`: {field of the model: value}}. `...`
            as the value of `classes` means a classifier whose number of classes config.json states.
            Without a classifier, these fields of config.json are ignored.
        default: the architecture of a config.json that states none.
    """

    def read(value, config):
        names = config.get("architectures") or [default]
        names = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
        if not any(heads.get(name, {}).get("classes", None) is ... for name in names):
            return {}
        count, labels = config.get("num_labels", config.get("_num_labels")), config.get("id2label")
        if not (labels is None or isinstance(labels, dict)) or isinstance(
            count, bool | float | str | list | dict
        ):
            raise ValueError("expected an object of labels in id2label, and a number in num_labels")
        if labels is not None and count is not None and len(labels) != count:
            raise ValueError(
                f"expected as many labels in id2label as num_labels; got {len(labels)} and {count}"
            )
        return {"classes": (2 if count is None else count) if labels is None else len(labels)}

    def write(model):
        count = model.classes
        return SKIP if count is None else {str(i): f"LABEL_{i}" for i in range(count)}

    return {
        "id2label": Fields(read, None, write, True),
        "num_labels": Fields(read, partial=True),
        "_num_labels": Fields(read, partial=True),
    }
