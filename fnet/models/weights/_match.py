"""A model and the frameworks of its `NAMES`: its arrays, the rules of a framework, and the fields that
the weights of a framework require."""

from __future__ import annotations

import jax

from fnet.models.weights._weight_names import Names


def known_names(model):
    known = getattr(model, "NAMES", None)
    if not known:
        what = (
            type(model).__name__ if not isinstance(model, type) else f"the class {model.__name__}"
        )
        hint = "Pass the rules in names=; pretrained.names(module, model, x) proposes them"
        if what == "NnxLayer":
            hint = "nn.nnx_variables(module) reads the arrays, nn.update_nnx writes them back"
        raise TypeError(
            f"pretrained: expected a model with NAMES for its weights, e.g. models.ResNet; got "
            f"{what}. {hint}"
        )
    return known


def rules_of(model, name):
    """Returns the rules of a framework for a model; `name` is a key of its `NAMES`, or a `Names`."""
    if isinstance(name, Names):
        return name.of(model)
    known = known_names(model)
    if name not in known:
        raise ValueError(f"{type(model).__name__} has no names {name!r}; it has {', '.join(known)}")
    return known[name].of(model)


def who(model, name):
    return f"{type(model).__name__}, names of {label(name)}"


def label(name):
    return "the rules in names=" if isinstance(name, Names) else name


def leaves_of(model, name=None):
    """Returns ({path: "params" or "state"}, {path: spec}) of all arrays of a model."""
    spec = model.spec(*inputs_of(model, name))
    kinds, leaves = {}, {}
    for kind, tree in zip(("params", "state"), spec):
        for path, leaf in jax.tree.leaves_with_path(tree):
            place = jax.tree_util.keystr(path, simple=True, separator="/")
            kinds[place], leaves[place] = kind, leaf
    return kinds, leaves


def inputs_of(model, name=None):
    """Returns a tuple of inputs for `model.spec` and `model.check`."""
    if not isinstance(name, Names):
        known_names(model)
    elif name.inputs:
        return name.inputs
    if not hasattr(model, "example"):
        raise TypeError(
            f"pretrained: a {type(model).__name__} has no example() of its inputs; pass them in "
            "names=Names(rules, inputs=(x,))"
        )
    example = model.example()
    return example if isinstance(example, tuple) else (example,)


def get(tree, place):
    """Returns the leaf of a tree at a path such as "head/kernel"."""
    for part in place.split("/"):
        tree = tree[part]
    return tree


def differs(model, rules):
    """Returns {field: required value} for model fields whose values differ from those that the
    weights require."""
    return {field: value for field, value in rules.config.items() if getattr(model, field) != value}


def names_to_write(model):
    known = known_names(model)
    if len(known) == 1:
        return next(iter(known))
    fitting = [
        name for name in known if not known[name].only_named and not differs(model, known[name])
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
        for config in getattr(model, "CONFIGS", {}).values()
        if name in config.names
        for field in config.compared()
    }


def check_config(model, name, path, compared=()):
    """Checks that the model's fields have the values that weights of the framework `name` require.

    Fields in `compared` are not checked, because they were already compared with config.json.
    """
    wanted = {
        field: value
        for field, value in differs(model, rules_of(model, name)).items()
        if field not in compared
    }
    if wanted:
        want = ", ".join(f"{field}={value!r}" for field, value in wanted.items())
        have = ", ".join(f"{field}={getattr(model, field)!r}" for field in wanted)
        raise ValueError(
            f"{path}: weights with the names of {label(name)} need a {type(model).__name__} with "
            f"{want}, got {have}; use dataclasses.replace(model, {want}), or pretrained.model(name "
            "of the preset, path)"
        )


def ours(entry):
    return " and ".join(map(repr, entry.paths))
