"""Matches a file of weights with a model: detects the framework of the names, and compares all keys
and shapes."""

from __future__ import annotations

import jax
import numpy as np

from fnet._util._nearest import nearest
from fnet.models.weights import _key_map
from fnet.models.weights._weight_names import Tied

LISTED = 8  # number of problems that an error lists; the others are only counted


def _known(model):
    known = getattr(model, "NAMES", None)
    if not known:
        what = (
            type(model).__name__ if not isinstance(model, type) else f"the class {model.__name__}"
        )
        raise TypeError(
            f"pretrained: expected a model with NAMES for its weights, e.g. models.ResNet; got "
            f"{what}"
        )
    return known


def renamed(model, tensors):
    """Replaces the array names of older files (`Names.aliases`) by the current names, and returns
    the tensors."""
    aliases = {old: new for names in _known(model).values() for old, new in names.aliases.items()}
    if not aliases:
        return tensors

    def now(key):
        old = next((old for old in aliases if key.endswith(old)), None)
        new = key if old is None else key.removesuffix(old) + aliases[old]
        return key if new in tensors.arrays else new

    return tensors._replace(arrays={now(key): array for key, array in tensors.arrays.items()})


def rules_of(model, name):
    known = _known(model)
    if name not in known:
        raise ValueError(f"{type(model).__name__} has no names {name!r}; it has {', '.join(known)}")
    return known[name].of(model)


def who(model, name):
    return f"{type(model).__name__}, names of {name}"


def leaves_of(model):
    """Returns ({path: "params" or "state"}, {path: spec}) of all arrays of a model."""
    _known(model)
    spec = model.spec(*inputs_of(model))
    kinds, leaves = {}, {}
    for kind, tree in zip(("params", "state"), spec):
        for path, leaf in jax.tree.leaves_with_path(tree):
            place = jax.tree_util.keystr(path, simple=True, separator="/")
            kinds[place], leaves[place] = kind, leaf
    return kinds, leaves


def inputs_of(model):
    """Returns a tuple of inputs for `model.spec` and `model.check`."""
    example = model.example()
    return example if isinstance(example, tuple) else (example,)


def get(tree, place):
    """Returns the leaf of a tree at a path such as "head/kernel"."""
    for part in place.split("/"):
        tree = tree[part]
    return tree


def detect_names(model, leaves, tensors, name):
    """Returns the framework whose naming rules match the most array names in the file, and its key
    map."""
    best, unfit = None, None
    for each in _known(model) if name is None else (name,):
        rules = rules_of(model, each)
        for prefix in rules.prefixes:
            try:
                key_map = _key_map.key_map(rules, prefix, leaves, who(model, each))
            except ValueError as error:  # this configuration has no rules for these names
                unfit = unfit or error
                continue
            hits = sum(key in tensors.arrays for key in key_map.keys())
            score = hits, not _differs(model, rules)
            if best is None or score > best[0]:
                best = score, each, key_map
    if best is None:
        raise unfit
    (hits, _), detected, key_map = best
    if 10 * hits < len(key_map.keys()):
        wanted, held = (
            ", ".join(map(repr, list(keys)[:3])) for keys in (key_map.keys(), tensors.arrays)
        )
        raise ValueError(
            f"{tensors.path} contains no weights of a {type(model).__name__} with the names of "
            f"{' or '.join(_known(model)) if name is None else name}: its keys are {held}, ...; "
            f"expected {wanted}, ... for {detected}"
        )
    return detected, key_map


def _differs(model, rules):
    """Returns {field: required value} for model fields whose values differ from those that the
    weights require."""
    return {field: value for field, value in rules.config.items() if getattr(model, field) != value}


def names_to_write(model):
    known = _known(model)
    if len(known) == 1:
        return next(iter(known))
    fitting = [
        name for name in known if not known[name].only_named and not _differs(model, known[name])
    ]
    if len(fitting) != 1:
        raise ValueError(
            f"pretrained.save: select the names to write for this {type(model).__name__}: names="
            f"{' or '.join(map(repr, fitting or known))}"
        )
    return fitting[0]


def described(model, name):
    """Returns the names of the model's fields that config.json can state for weights of the
    framework `name`."""
    return {
        field
        for config in model.CONFIGS.values()
        if name in config.names
        for field in config.compared()
    }


def check_config(model, name, path, compared=()):
    """Checks that the model's fields have the values that weights of the framework `name` require.

    Fields in `compared` are not checked, because they were already compared with config.json.
    """
    wanted = {
        field: value
        for field, value in _differs(model, rules_of(model, name)).items()
        if field not in compared
    }
    if wanted:
        want = ", ".join(f"{field}={value!r}" for field, value in wanted.items())
        have = ", ".join(f"{field}={getattr(model, field)!r}" for field in wanted)
        raise ValueError(
            f"{path}: weights with the names of {name} need a {type(model).__name__} with {want}, "
            f"got "
            f"{have}; use dataclasses.replace(model, {want}), or pretrained.model(name of the "
            f"preset, "
            "path)"
        )


def check_keys(model, name, key_map, tensors):
    """Compares the array names and shapes of a file with the key map, which contains the expected
    keys and shapes."""
    held, wanted, spare = (
        tensors.arrays,
        key_map.keys(),
        {key: entry for entry in key_map.beside for key in entry.keys},
    )
    extra = [key for key in held if key not in wanted and key not in spare]
    missing = [key for key in wanted if key not in held]

    def lacking(key):
        return f"{key!r} is missing (for {ours(wanted[key])}{_near(key, extra, '; the file has {!r}')})"

    def unexpected(key):
        return f"{key!r} {held[key].shape} is not expected{_near(key, missing, ' (did you mean {!r}?)')}"

    def misshapen(key):
        return f"{key!r}: expected shape {wanted[key].shape()} for {ours(wanted[key])}, got {held[key].shape}"

    def untied(key):
        return (
            f"{key!r} must equal {ours(spare[key])}, because the model ties the two "
            f"('tie_word_embeddings' in "
            "config.json)"
        )

    wrong = [(lacking, key) for key in missing] + [(unexpected, key) for key in extra]
    wrong += [
        (misshapen, key)
        for key, entry in wanted.items()
        if key in held and held[key].shape != entry.shape()
    ]
    wrong += [
        (untied, key)
        for key, entry in spare.items()
        if isinstance(entry.rule, Tied) and key in held and not _tied(key, entry, wanted, tensors)
    ]
    if wrong:
        listed = "; ".join(say(key) for say, key in wrong[:LISTED])
        rest = f"; and {len(wrong) - LISTED} more" if len(wrong) > LISTED else ""
        raise ValueError(
            f"{tensors.path} does not match this {type(model).__name__} with the names of {name}: "
            f"{listed}{rest}"
        )


def _tied(key, entry, wanted, tensors):
    first = next(each for each in wanted.values() if each.paths == entry.paths)
    if any(each not in tensors.arrays for each in first.keys):
        return True  # already listed as missing
    array = tensors.arrays[key]
    return array.shape == entry.shape() and np.array_equal(
        entry.rule.layout.ours(array), first.rule.layout.ours(tensors.arrays[first.keys[0]])
    )


def ours(entry):
    return " and ".join(map(repr, entry.paths))


def _near(key, keys, text):
    near = nearest(key, keys, similar=0.7)
    return text.format(near[0]) if near else ""
