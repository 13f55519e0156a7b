"""Compares timm's config.json with a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fnet.models.weights._config import Config, Fields, Must, Use, same
from fnet.models.weights._json import text_of


def name_of(model, table: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the name in `table`, {name: {field: value}}, whose fields equal those of the model,
    or "other"."""
    return next(
        (
            name
            for name, fields in table.items()
            if all(getattr(model, field) == value for field, value in fields.items())
        ),
        "other",
    )


def timm(
    architecture: Callable[[str], Mapping[str, Any] | None],
    write: Callable,
    pool: str,
    expected: str,
) -> Config:
    """Returns a `Config` for timm's config.json.

    Args:
        architecture: a function that maps the name of a timm architecture to the fields of the
            model. The function returns None if it does not support the name.
        write: the inverse of `architecture`. `write` may return a name that fnet does not know; for
            this name, `architecture` returns None.
        pool: the only supported value of `global_pool` in config.json, such as "avg".
        expected: a description of the supported architectures, for error messages.
    """

    def fields(value, config):
        found = architecture(value) if isinstance(value, str) else None
        if found is None:
            raise ValueError(f"expected {expected}")
        return found

    def arguments(value, config):
        supported = {"num_classes": config.get("num_classes"), "in_chans": 3, "global_pool": pool}
        size = fields(config.get("architecture"), config).get("size")
        if size is not None:
            supported["img_size"] = [size, size]
        if value is not None and not (
            isinstance(value, dict)
            and all(
                name in supported and same(each, supported[name]) for name, each in value.items()
            )
        ):
            raise ValueError(f"expected {{}}, or the arguments {text_of(supported)}")
        return {}

    return Config(
        {
            "architecture": Fields(fields, write=write),
            "num_classes": Use("classes"),
            "global_pool": Fields(Must((pool,)).wanted, write=lambda model: pool),
            "model_args": Fields(arguments),
        },
        frozenset(("num_features", "pretrained_cfg", "label_names", "label_descriptions")),
        ("timm", "torchvision"),
    )
