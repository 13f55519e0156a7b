"""Reads JSON files of configurations, in which duplicate fields, NaN and infinity are errors."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from fnet.models.weights._files import MOST, SMALL, contents


def read(path: Path, most: int = SMALL) -> dict[str, Any]:
    """Reads a JSON object from a file. Duplicate fields, NaN and infinity are errors.

    Raises:
        ValueError: the file does not contain a valid JSON object, or has more than `most` bytes.
    """

    def unique(pairs):
        held = {}
        for name, value in pairs:
            if name in held:
                raise ValueError(f"the field {text_of(name)} appears more than once")
            held[name] = value
        return held

    try:
        text = contents(path, most=most)
        if text.count("[") + text.count("{") > MOST:
            raise ValueError(f"it contains more than {MOST:,} lists and objects")
        config = json.loads(text, object_pairs_hook=unique)
        if not isinstance(config, dict):
            raise ValueError(f"expected a JSON object, got {text_of(config)}")
        for name, value in config.items():
            _finite(name, value)
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply to be a configuration") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    except ValueError as error:
        raise ValueError(str(error) if str(path) in str(error) else f"{path}: {error}") from None
    return config


def _finite(name, value):
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name!r} is {value}, expected a finite number")
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            _finite(name, each)


def text_of(value) -> str:
    """Formats a value for an error message, with at most 200 characters."""
    text = "null" if value is None else repr(value)
    return text if len(text) <= 200 else f"{text[:197]}..."
