"""The fields of config.json that describe rotary positions and windows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from fnet.models.language.decoder import _rope
from fnet.models.weights._config import SKIP, Fields

FULL, SLIDING = "full_attention", "sliding_attention"
COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}


def number(value, what="a number above 0"):
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ValueError(f"expected {what}")
    return value


def whole(value, least=1):
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"expected a whole number of at least {least}")
    return value


def collapsed(values):
    """Converts a list of values, one per layer, to its shortest repeating pattern, or to one value
    if all are equal."""
    values = tuple(values)
    period = next(
        n
        for n in range(1, len(values) + 1)
        if all(value == values[i % n] for i, value in enumerate(values))
    )
    return values[0] if period == 1 else values[:period]


def scaling(value, config, context, long=()):
    """Returns the scaling that the field `rope_scaling` or `rope_parameters` of config.json
    describes.

    Args:
        value: the value of the field `rope_scaling` or `rope_parameters`.
        config: the content of config.json.
        context: the value of `max_position_embeddings` that is used if config.json lacks this
            field.
        long: other names that the family uses for the rope_type longrope.

    Raises:
        ValueError: fnet does not support the type of the rotary scaling.
    """
    kind, other = (value.get(name) for name in ("rope_type", "type"))
    kind = kind if kind is not None else "default" if other is None else other
    if other not in (None, kind) or not isinstance(kind, str) or kind not in {*_KINDS, *long}:
        raise ValueError(f"expected the rope_type {' or '.join(map(repr, _KINDS))}")
    make, required, optional = _KINDS["longrope" if kind in long else kind]
    names = set(value) - COMMON
    if not set(required) <= names <= {*required, *optional}:
        raise ValueError(
            f"expected the fields {', '.join(required) or 'rope_theta and rope_type'} for the "
            f"rope_type {kind!r}" + (f", and possibly {', '.join(optional)}" if optional else "")
        )
    longest = whole(config.get("max_position_embeddings", context))
    given = {
        name: each
        for name, each in value.items()
        if name in {*required, *optional} and each is not None
    }
    for name, each in given.items():
        if name not in ("short_factor", "long_factor", "truncate"):
            number(each, f"numbers above 0, such as {name}")
    if missing := set(required) - set(given):
        raise ValueError(f"expected numbers, such as {min(missing)}")
    return make({"original_max_position_embeddings": longest, **given}, longest)


def _yarn(given, longest):
    amplitude = given.get("attention_factor")
    if amplitude is None and "mscale" in given and "mscale_all_dim" in given:
        amplitude = _rope.growth(given["factor"], given["mscale"]) / _rope.growth(
            given["factor"], given["mscale_all_dim"]
        )
    if not isinstance(given.get("truncate", True), bool):
        raise ValueError("expected true or false as truncate")
    return _rope.YarnScaling(
        given["factor"],
        given["original_max_position_embeddings"],
        given.get("beta_fast", 32.0),
        given.get("beta_slow", 1.0),
        amplitude,
        given.get("truncate", True),
    )


def _long(given, longest):
    original = given["original_max_position_embeddings"]
    factor, amplitude = given.get("factor", longest / original), given.get("attention_factor")
    if original < 2:
        raise ValueError("expected original_max_position_embeddings above 1")
    if amplitude is None:
        amplitude = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    for name in "short_factor", "long_factor":
        if not isinstance(given[name], list):
            raise ValueError(f"expected a list of numbers as {name}")
        for each in given[name]:
            number(each, f"numbers above 0 in {name}")
    return _rope.LongScaling(
        tuple(given["short_factor"]), tuple(given["long_factor"]), original, amplitude
    )


_ORIGINAL = ("original_max_position_embeddings",)
_KINDS = {
    "default": (lambda given, longest: None, (), ()),
    "linear": (lambda given, longest: _rope.LinearScaling(given["factor"]), ("factor",), ()),
    "dynamic": (
        lambda given, longest: _rope.DynamicScaling(given["factor"], longest),
        ("factor",),
        (),
    ),
    "llama3": (
        lambda given, longest: _rope.Llama3Scaling(
            given["factor"],
            given["low_freq_factor"],
            given["high_freq_factor"],
            given["original_max_position_embeddings"],
        ),
        ("factor", "low_freq_factor", "high_freq_factor"),
        _ORIGINAL,
    ),
    "yarn": (
        _yarn,
        ("factor",),
        (
            *_ORIGINAL,
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        ),
    ),
    "longrope": (
        _long,
        ("short_factor", "long_factor"),
        (*_ORIGINAL, "factor", "attention_factor"),
    ),
}


def written(model, base, scale, partial=None) -> dict[str, Any]:
    """Returns transformers' `rope_parameters` for a base and a scaling. `partial` is the fraction
    of each head's features that is rotated."""
    fields: dict[str, Any] = {
        "rope_theta": base,
        **({} if partial is None else {"partial_rotary_factor": partial}),
    }
    match scale:
        case None:
            return {"rope_type": "default", **fields}
        case _rope.LinearScaling():
            return {"rope_type": "linear", "factor": scale.factor, **fields}
        case _rope.DynamicScaling() if scale.original_context == model.context:
            return {"rope_type": "dynamic", "factor": scale.factor, **fields}
        case _rope.Llama3Scaling():
            return {
                "rope_type": "llama3",
                "factor": scale.factor,
                "low_freq_factor": scale.low_freq_factor,
                "high_freq_factor": scale.high_freq_factor,
                "original_max_position_embeddings": scale.original_context,
                **fields,
            }
        case _rope.YarnScaling():
            return {
                "rope_type": "yarn",
                "factor": scale.factor,
                "beta_fast": scale.beta_fast,
                "beta_slow": scale.beta_slow,
                "attention_factor": scale.amplitude,
                "truncate": scale.truncate,
                "original_max_position_embeddings": scale.original_context,
                **fields,
            }
        case _rope.LongScaling():
            return {
                "rope_type": "longrope",
                "short_factor": list(scale.short),
                "long_factor": list(scale.long),
                "attention_factor": scale.amplitude,
                "original_max_position_embeddings": scale.original_context,
                **fields,
            }
    raise ValueError(f"config.json has no form for rope_scaling={scale!r}")


def rope(
    theta=10000.0,
    partial=1.0,
    *,
    context,
    names=("rope_theta", "partial_rotary_factor"),
    turns=False,
    long=(),
    spread: Callable = lambda config, base: base,
    original: int | None = None,
) -> dict[str, Fields]:
    """Returns `Fields` for the fields of config.json that describe rotary positions: their base,
    their scaling, and the fraction of each head's features that is rotated.

    transformers before 5 writes `rope_theta` and `rope_scaling`, later versions write both in
    `rope_parameters`. Where a config.json has `rope_scaling` and `rope_parameters`, the former
    counts, as in transformers.

    Args:
        theta, partial, context: the base, the rotated fraction and `max_position_embeddings` of a
            config.json that lacks them.
        names: the fields at the top level of config.json for the base and for the rotated fraction.
        turns: whether models of the family can rotate only some of each head's features.
        long: other names of the family for the rope_type longrope.
        spread: function (config, base) that returns the model's `rotary_base`, for example a tuple
            with None for layers without position embedding. Default: `base`.
        original: for longrope, the `original_max_position_embeddings` of a config.json whose top
            level lacks it. None: it is read only from `rope_scaling` or `rope_parameters`.
    """

    def inner(config) -> Mapping[str, Any]:
        value = config.get("rope_scaling") or config.get("rope_parameters")
        return value if isinstance(value, dict) else {}

    def outside(name, value, config):
        """Whether to use the value of a field at the top level of config.json, such as
        `rope_theta`. If `rope_parameters` or `rope_scaling` contains the same field as the top
        level, the two values must be equal, and the value at the top level is not used."""
        held = inner(config).get(name, value)
        if held != value:
            raise ValueError(f"expected {held!r}, the {name} in rope_parameters or rope_scaling")
        return name not in inner(config)

    def base(value, config):
        used = outside("rope_theta", number(value), config)
        return {"rotary_base": spread(config, value)} if used else {}

    def part(value, config):
        if not outside("partial_rotary_factor", value, config):
            return {}
        return {"rotary_dim": _rotated(1.0 if value is None else value, config, turns)}

    def both(value, config):
        if not isinstance(value, dict):
            raise ValueError("expected an object or null")
        if original is not None and value.get("rope_type", value.get("type")) in (
            "longrope",
            *long,
        ):
            value = {
                **value,
                "original_max_position_embeddings": config.get(
                    "original_max_position_embeddings", original
                ),
            }
        fields = {"rope_scaling": scaling(value, config, context, long)}
        if "rope_theta" in value:
            fields["rotary_base"] = spread(
                config, number(value["rope_theta"], "a rope_theta above 0")
            )
        if "partial_rotary_factor" in value:
            fields["rotary_dim"] = _rotated(value["partial_rotary_factor"], config, turns)
        return fields

    def older(value, config):
        return (
            both(value, config)
            if value
            else {}
            if config.get("rope_parameters")
            else {"rope_scaling": None}
        )

    def newer(value, config):
        return both(value, config) if value and not config.get("rope_scaling") else {}

    def write(model):
        bases = model.rotary_base if isinstance(model.rotary_base, tuple) else (model.rotary_base,)
        head_dim = model.head_dim or model.width // model.heads
        ratio = (
            None if not turns else 1.0 if model.rotary_dim is None else model.rotary_dim / head_dim
        )
        return written(
            model, next(each for each in bases if each is not None), model.rope_scaling, ratio
        )

    return {
        names[0]: Fields(base, lambda config: SKIP if "rope_theta" in inner(config) else theta),
        names[1]: Fields(
            part, lambda config: SKIP if "partial_rotary_factor" in inner(config) else partial
        ),
        "rope_scaling": Fields(
            older, lambda config: SKIP if config.get("rope_parameters") else None
        ),
        "rope_parameters": Fields(newer, write=write),
    }


def rope_by_type(merged: Callable, types: Callable, context: int) -> dict[str, Fields]:
    """Returns a dict of `Fields` objects for the fields of config.json that describe rotary
    positions.

    The model has layers with and without sliding windows. In layers with sliding windows, the
    rotary embedding has another base and another scaling than in layers without windows.

    Args:
        merged: function that takes the content of config.json, and returns {type of layers:
            `rope_parameters`}. Like transformers, `merged` also reads the fields of older versions
            of config.json.
        types: function that takes the content of config.json, and returns the `layer_types` to use
            if config.json lacks the field `layer_types`.
        context: the value of `max_position_embeddings` that is used if config.json lacks this
            field.
    """

    def bases(value, config):
        held = config.get("rope_parameters")
        if not isinstance(value, dict) or (held and set(held) - {FULL, SLIDING}):
            raise ValueError(f"expected an object with {FULL!r} and {SLIDING!r}")
        for each in (*(held or {}).values(), config.get("rope_scaling")):
            if each is not None and not isinstance(each, dict):
                raise ValueError("expected objects")
        found = merged(config)
        for each in found.values():
            if each.get("partial_rotary_factor", 1) != 1:
                raise ValueError("expected a partial_rotary_factor of 1")
        kinds = config.get("layer_types") or types(config)
        if not isinstance(kinds, list) or not set(map(str, kinds)) <= {FULL, SLIDING}:
            return {}  # the check of layer_types raises the error
        scalings = {
            name: scaling(each, config, context) for name, each in found.items() if name in kinds
        }
        return {
            "rotary_base": collapsed(
                number(found[kind]["rope_theta"], "a rope_theta above 0") for kind in kinds
            ),
            "rope_scaling": collapsed(scalings[kind] for kind in kinds),
        }

    def older(value, config):
        if value is not None and not isinstance(value, dict):
            raise ValueError("expected an object or null")
        scaling(merged(config)[FULL], config, context)
        return {}

    def write(model):
        values = zip(
            *(layers(model, each) for each in (model.window, model.rotary_base, model.rope_scaling))
        )
        kinds = {SLIDING if window else FULL: (base, scale) for window, base, scale in values}
        return {kind: written(model, *pair) for kind, pair in kinds.items()}

    return {"rope_scaling": Fields(older), "rope_parameters": Fields(bases, merged, write)}


def _rotated(part, config, turns):
    """Returns the number of rotated features of a head, or None if all features are rotated."""
    part = number(1.0 if part is None else part, "a partial_rotary_factor from 0 to 1")
    if part > 1 or (part != 1 and not turns):
        raise ValueError("expected a partial_rotary_factor " + ("from 0 to 1" if turns else "of 1"))
    if part == 1:
        return None
    head_dim = config.get("head_dim") or whole(config.get("hidden_size")) // whole(
        config.get("num_attention_heads")
    )
    rotated = int(head_dim * part)
    if rotated < 2 or rotated % 2:
        raise ValueError(
            f"expected a partial_rotary_factor that rotates an even number of the {head_dim} "
            f"features"
        )
    return None if rotated == head_dim else rotated


def layer_types(value, config, depth):
    """Returns `layer_types`, after checking that it has one of the two supported types for each
    layer."""
    depth = config.get("num_hidden_layers", depth)
    if (
        not isinstance(value, list)
        or len(value) != depth
        or not all(each in (FULL, SLIDING) for each in value)
    ):
        raise ValueError(f"expected {depth} times {FULL!r} or {SLIDING!r}")
    return value


def windows(
    depth, size, derived: Callable, used: Callable = lambda config: True
) -> dict[str, Fields]:
    """Returns a dict of `Fields` objects for the fields of config.json that describe sliding-window
    attention.

    The fields for sliding-window attention are `layer_types` and `sliding_window`.

    Args:
        depth, size: the values of `num_hidden_layers` and `sliding_window` that are used if
            config.json lacks them.
        derived: function (config, window, depth) that returns the `layer_types` that are used if
            config.json lacks this field.
        used: function that takes the content of config.json, and returns whether attention windows
            are used.
    """

    def window(config):
        return config.get("sliding_window", size) if used(config) else None

    def types(value, config):
        held, value = (
            window(config),
            layer_types(absent(config) if value is None else value, config, depth),
        )
        if held is None and SLIDING in value:
            raise ValueError(
                "expected no sliding_attention without sliding_window (and use_sliding_window)"
            )
        return {"window": collapsed(held if each == SLIDING else None for each in value)}

    def absent(config):
        return derived(config, window(config), config.get("num_hidden_layers", depth))

    def write(model):
        return [SLIDING if each else FULL for each in layers(model, model.window)]

    return {
        "layer_types": Fields(types, absent, write=write),
        "sliding_window": Fields(
            lambda value, config: {} if value is None else (whole(value), {})[1],
            write=lambda model: next(filter(None, layers(model, model.window)), SKIP),
        ),
    }


def layers(model, value):
    """Returns a list with one value for each layer. `value` is a single value for all layers, or a
    tuple that is repeated."""
    return [
        value[i % len(value)] if isinstance(value, tuple) else value for i in range(model.depth)
    ]
