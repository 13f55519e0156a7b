"""Reads and writes LoRA adapters (low-rank changes of kernels) in the file format of the library
PEFT."""

from __future__ import annotations

import collections
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from fnet._util._files import write_json
from fnet.compress import LowRank
from fnet.models._model import Model
from fnet.models.weights import _json, _key_map, _match, _tensors
from fnet.models.weights._weights import Weights

_HEAD = "lm_head"
_PREFIX, _WEIGHTS, _CONFIG = "base_model.model.", "adapter_model.safetensors", "adapter_config.json"
# Initializations after which the base weights are what they were. PiSSA, OLoRA, CorDA, LoftQ and
# LoRA-GA subtract the first factors from them, and an adapter that is saved without conversion is
# right for the changed weights only.
_INITIALIZATIONS = True, False, None, "gaussian", "orthogonal", "eva"
# Fields that change the computation, with the values for which the result is that of `LowRank`.
_PLAIN = {
    "peft_type": ("LORA",),
    "use_dora": (False, None),
    "bias": ("none",),
    "modules_to_save": (None, []),
    "lora_bias": (False, None),
    "alora_invocation_tokens": (None, []),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "layer_replication": (None, []),
    "use_qalora": (False, None),
    "init_lora_weights": _INITIALIZATIONS,
    "megatron_config": (None,),
    "velora_config": (None,),
    "monteclora_config": (None,),
    "use_bdlora": (None, False),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "ensure_weight_tying": (False, None),
}
# Fields that `load_adapter` uses.
_USED = (
    "r",
    "lora_alpha",
    "rank_pattern",
    "alpha_pattern",
    "use_rslora",
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
)
# Fields that do not change what a trained adapter computes: training, the options of
# initializations that are refused above, and the orientation of the base's kernels, which the model
# here knows.
_IRRELEVANT = (
    "task_type",
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "lora_dropout",
    "fan_in_fan_out",
    "megatron_core",
    "loftq_config",
    "eva_config",
    "corda_config",
    "lora_ga_config",
    "qalora_group_size",
    "runtime_config",
)


def load_adapter(
    model: Model, params: Mapping, path: str | os.PathLike, *, names: str = "huggingface"
) -> dict:
    """Reads a LoRA adapter that PEFT saved, and applies it to the parameters of its base model.

        params, _ = pretrained.load("smollm-135m")
        adapted = pretrained.load_adapter(model, params, "path/to/adapter")
        logits = ft.use_implicit_arrays(model)(adapted, tokens)        # or model(compress.merge(adapted), tokens)

    Args:
        model: the base model.
        params: the parameters of the base model. Kernels may be quantized.
        path: the folder with adapter_config.json and adapter_model.safetensors.
        names: the framework that defines the names of the modules in the adapter, a key of the
            model's `NAMES`, such as "torchvision" for a ResNet. Default: "huggingface".

    Returns:
        The parameters, in which the leaves that the adapter changes are `compress.LowRank`.

    Raises:
        FileNotFoundError: a file of the adapter is missing.
        ValueError: the adapter is for another model, or is not plain LoRA, such as DoRA or an
            initialization that changes the base weights (PiSSA). A field of adapter_config.json
            that is neither used nor known to have no effect on a trained adapter is an error that
            names it.

    >>> import tempfile
    >>> from fnet import compress
    >>> model = models.GPT(24, 16, 2, 4, context=16)
    >>> params, _ = model.init(jax.random.key(0), model.example())
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     adapted = compress.lora(jax.random.key(1), params, {".*value": 2})
    ...     folder = models.pretrained.save_adapter(model, adapted, folder)
    ...     adapted = models.pretrained.load_adapter(model, params, folder)
    """
    folder = Path(path).expanduser()
    config = _read_config(folder / _CONFIG)
    weights = Weights.open(folder / _WEIGHTS)
    given = {key.removeprefix(_PREFIX): array for key, array in weights.tensors.items()}
    changes, used = {}, set()
    for entry in _closest_entries(model, names, _modules(given)):
        bases = _bases(entry)
        pairs = [_pair(given, base) for base in bases]
        if not any(pairs):
            continue
        factors, scales = [], []
        for base, pair in zip(bases, pairs):
            if pair is None:  # this layer of a stack is not changed
                factors.append(None)
                scales.append(1.0)
                continue
            a, b = (np.asarray(given[key], np.float32) for key in pair)
            _check_module(folder / _CONFIG, config, base, len(a))
            factors.append((a, b))
            scales.append(_scale(config, base, a))
            used.update(pair)
        if _is_tied(model, entry):
            used.update(_tied_head(given, pairs[0]))
        changes |= _changes(model, entry, factors, scales, weights.path)
    if unknown := sorted(set(given) - used):
        raise ValueError(
            f"{weights.path}: no kernel of this {type(model).__name__} has the keys "
            f"{', '.join(map(repr, unknown[:3]))}" + (" ..." if len(unknown) > 3 else "")
        )
    return _replaced(params, {tuple(path.split("/")): change for path, change in changes.items()})


def _closest_entries(model, names, modules):
    """Returns the entries with the prefix for which the most modules of the adapter are known."""

    def known(entries):
        return sum(base in modules for entry in entries for base in _bases(entry))

    return max((_entries(model, prefix, names) for prefix in _prefixes(model, names)), key=known)


def _tied_head(given, table):
    """Returns the keys of the change of the head, if it is that of the table to which the head is
    tied: with the factors exchanged and transposed."""
    head = _pair(given, _HEAD)
    if head is None:
        return ()
    same = all(
        np.array_equal(given[mine], given[theirs].T) for mine, theirs in zip(head, reversed(table))
    )
    return head if same else ()


def save_adapter(
    model: Model,
    params: Mapping,
    path: str | os.PathLike,
    *,
    base: str | None = None,
    prefix: str | None = None,
    names: str = "huggingface",
) -> Path:
    """Writes the `compress.LowRank` leaves of a tree of parameters as a LoRA adapter for PEFT.

        pretrained.save_adapter(model, adapted, "adapter", base="HuggingFaceTB/SmolLM-135M")

    Args:
        model: the base model.
        params: the parameters of the base model, with `LowRank` leaves.
        path: the folder to write.
        base: the name of the base model on Hugging Face's hub, for adapter_config.json. Default:
            null is written.
        prefix: the prefix of the names of modules, which PEFT expects to be that of the
            transformers class to which the adapter is applied, such as "transformer." for
            GPT2LMHeadModel and "" for GPT2Model. Default: that of a class with a head, such as
            GPT2LMHeadModel.
        names: as for `load_adapter`.

    Returns:
        The folder.

    Raises:
        ValueError: the parameters have no `LowRank` leaf, PEFT cannot represent one of them (for
            example that of a depthwise convolution), or the model does not support this `prefix` or
            `names`.

    >>> import tempfile
    >>> from fnet import compress
    >>> model = models.GPT(24, 16, 2, 4, context=16)
    >>> params, _ = model.init(jax.random.key(0), model.example())
    >>> adapted = compress.lora(jax.random.key(1), params, {".*query": 4})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     folder = models.pretrained.save_adapter(model, adapted, folder)
    ...     adapted = models.pretrained.load_adapter(model, params, folder)
    >>> adapted["blocks"]["attention"]["query"]["kernel"].a.shape
    (2, 16, 4)
    """
    arrays, ranks, swapped, prefixes = {}, {}, True, _prefixes(model, names)
    if prefix is not None and prefix not in prefixes:
        raise ValueError(f"save_adapter: expected a prefix of {prefixes}; got {prefix!r}")
    for entry in _entries(model, prefixes[-1] if prefix is None else prefix, names):
        leaves = [_match.get(params, place) for place in entry.paths]
        if not any(isinstance(leaf, LowRank) for leaf in leaves):
            continue
        inputs = len(_kernel(entry))
        if not _is_supported(entry) or any(
            isinstance(leaf, LowRank) and leaf.inputs != inputs for leaf in leaves
        ):
            raise ValueError(
                f"save_adapter: PEFT has no form for the change of {_match.ours(entry)}"
            )
        swapped = swapped and (entry.rule.layout.name != "same" or _is_table(entry))
        for name, copy in zip(_bases(entry), np.ndindex(entry.copies)):
            a, b, scale = _joined(leaves, copy)  # [*window, in, rank], [rank, out]
            b = b[:, _rotary_order(model, entry, b.shape[1])]
            down, up = (
                ("lora_embedding_A", "lora_embedding_B")
                if _is_table(entry)
                else ("lora_A.weight", "lora_B.weight")
            )
            arrays[f"{_PREFIX}{name}.{down}"] = np.moveaxis(a, (-1, -2), (0, 1))
            arrays[f"{_PREFIX}{name}.{up}"] = b.T.reshape(*b.T.shape, *(1,) * (inputs - 1))
            ranks[name] = a.shape[-1], scale * a.shape[-1]
            if _is_tied(model, entry):  # PEFT changes the table and the head separately
                (
                    arrays[f"{_PREFIX}{_HEAD}.lora_A.weight"],
                    arrays[f"{_PREFIX}{_HEAD}.lora_B.weight"],
                ) = b, a
                ranks[_HEAD] = ranks[name]
    if not arrays:
        raise ValueError(
            "save_adapter: the parameters have no LowRank leaf; compress.lora creates them"
        )
    (rank, alpha), _ = collections.Counter(ranks.values()).most_common(1)[0]
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted(ranks),
        "bias": "none",
        "rank_pattern": {name: r for name, (r, _) in ranks.items() if r != rank},
        "alpha_pattern": {name: other for name, (_, other) in ranks.items() if other != alpha},
        "lora_dropout": 0.0,
        "fan_in_fan_out": not swapped,
        "inference_mode": True,
        "task_type": None,
        "base_model_name_or_path": base,
    }
    folder = Path(path).expanduser()
    _tensors.write(folder / _WEIGHTS, arrays, {"format": "pt"})
    write_json(folder / _CONFIG, config)
    return folder


def _read_config(file):
    if not file.is_file():
        raise FileNotFoundError(
            f"{file} does not exist; PEFT's save_pretrained writes it beside {_WEIGHTS}"
        )
    config = _json.read(file)
    if (
        type(config.get("r")) is not int
        or config["r"] < 1
        or type(config.get("lora_alpha")) not in (int, float)
    ):
        raise ValueError(f"{file}: expected the fields r and lora_alpha of a LoRA adapter")
    for field, value in config.items():
        if field in _PLAIN and not any(
            value is each or (type(value) is type(each) and value == each) for each in _PLAIN[field]
        ):
            why = (
                "; it changes the base weights, so convert the adapter to plain LoRA with PEFT: "
                "save_pretrained(..., path_initial_model_for_weight_conversion=...)"
                if field == "init_lora_weights"
                else ""
            )
            raise ValueError(
                f"{file}: {field}={value!r} is not supported; expected {_PLAIN[field][0]!r}{why}"
            )
        if field not in (*_PLAIN, *_USED, *_IRRELEVANT) and value not in (None, False):
            raise ValueError(
                f"{file}: the field {field}={_json.text_of(value)} is unknown, so it may change "
                "what the adapter computes; remove it if it does not"
            )
    for field, kinds in ("rank_pattern", (int,)), ("alpha_pattern", (int, float)):
        values = config.get(field) or {}
        if not isinstance(values, dict) or not all(
            type(value) in kinds for value in values.values()
        ):
            raise ValueError(
                f"{file}: expected {field} as an object of numbers, got {_json.text_of(values)}"
            )
    if not isinstance(config.get("use_rslora"), bool | None):
        raise ValueError(
            f"{file}: expected use_rslora=true or false, got {_json.text_of(config['use_rslora'])}"
        )
    return config


def _check_module(file, config, base, rank):
    """Checks that the configuration gives the module `base` an adapter of this rank, as PEFT would
    when it loads it."""
    if not _is_targeted(config, base):
        raise ValueError(
            f"{file}: the fields target_modules, exclude_modules, layers_to_transform and "
            f"layers_pattern do not select {base!r}, for which the adapter has weights; PEFT would "
            "ignore them"
        )
    wanted = _patterned(config, "rank_pattern", base, config["r"])
    if rank != wanted:
        raise ValueError(
            f"{file}: r and rank_pattern give {base!r} the rank {wanted}, but its weights have "
            f"rank {rank}"
        )


def _is_targeted(config, base) -> bool:
    def selects(modules):
        if isinstance(modules, str):
            return re.fullmatch(modules, base) is not None
        return any(base == each or base.endswith(f".{each}") for each in modules)

    targets, excluded = config.get("target_modules"), config.get("exclude_modules")
    if excluded and selects(excluded):
        return False
    if targets is None or targets == "all-linear":
        return True
    layers = config.get("layers_to_transform")
    if not selects(targets) or isinstance(targets, str) or layers in (None, []):
        return selects(targets)
    patterns = config.get("layers_pattern") or r"[^.]*"
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        start = r".*?\." if pattern == r"[^.]*" else r"(?:^|.*?\.)"
        if found := re.match(rf"{start}{pattern}\.(\d+)\.", base):
            return int(found[1]) in ([layers] if isinstance(layers, int) else layers)
    return False


def _patterned(config, field, base, default):
    """Returns the value of the first pattern in the field that matches the name of a module, or the
    default."""
    return next(
        (
            value
            for pattern, value in (config.get(field) or {}).items()
            if re.fullmatch(rf"(.*\.)?({pattern})", base)
        ),
        default,
    )


def _prefixes(model, names):
    return _match.rules_of(model, names).prefixes


def _entries(model, prefix, names):
    rules = _match.rules_of(model, names)
    kinds, leaves = _match.leaves_of(model)
    entries = _key_map.key_map(rules, prefix, leaves, _match.who(model, names)).reads
    return [entry for entry in entries if kinds[entry.paths[0]] == "params"]


def _bases(entry):
    """Returns the names of the modules that contain the arrays of `entry` in the original
    framework."""
    return [key.removesuffix(".weight") for key in entry.keys]


def _modules(given):
    return {re.sub(r"\.lora_(embedding_)?[AB](\.weight)?$", "", key) for key in given}


def _pair(given, base):
    """Returns the array names of a module's two low-rank factors, or None if the adapter does not
    change the module."""
    for a, b in ((".lora_A.weight", ".lora_B.weight"), (".lora_embedding_A", ".lora_embedding_B")):
        if base + a in given and base + b in given:
            return base + a, base + b
    return None


def _kernel(entry):
    """Returns the shape [*window, in] of a kernel, without the stacked axes and the axis of output
    features."""
    return entry.specs[0].shape[len(entry.copies) : -1]


def _is_supported(entry):
    """Whether the array is the kernel of a dense layer or of an ungrouped convolution, or an
    embedding table."""
    kernel, layout = _kernel(entry), entry.rule.layout.name
    return (len(kernel) == 1 and layout in ("dense", "same")) or (
        len(kernel) > 1 and layout == "conv" and kernel[-1] > 1
    )


def _is_tied(model, entry):
    """Whether the array of `entry` is the embedding table that is also used to compute the logits."""
    return entry.paths == ("embed/embedding",) and getattr(model, "tied", False)


def _is_table(entry):
    return entry.paths[0].endswith("/embedding")


def _rotary_order(model, entry, width):
    """Returns the order of the output features in the file of an adapter.

    In transformers, the rotary embedding rotates the pairs (i, i + head_dim / 2) of features. In
    fnet, the rotary embedding of a model with `interleaved=True` rotates pairs of neighboring
    features.
    """
    order = np.arange(width)
    if getattr(model, "interleaved", False) and re.fullmatch(
        r".*attention/(query|key)/kernel", entry.paths[0]
    ):
        head_dim = model.head_dim or model.width // model.heads
        order = order.reshape(-1, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)
    return order


def _scale(config, base, a):
    alpha = _patterned(config, "alpha_pattern", base, config["lora_alpha"])
    return alpha / (math.sqrt(len(a)) if config.get("use_rslora") else len(a))


def _changes(model, entry, arrays, scales, file):
    """Returns {path of a kernel: (a, b, scale, number of input axes)}, the low-rank change of each
    kernel.

    In a stack of blocks, the low-rank factors `a` and `b` of all blocks are stacked. The factors
    are zero for a block that the adapter does not change. If the ranks of the blocks differ, the
    low-rank factors of every block are padded with zeros to the largest rank.
    """
    if not _is_supported(entry):
        raise ValueError(
            f"{file}: changes of {_match.ours(entry)} are supported for dense layers, convolutions "
            "in one group and tables only"
        )
    rank = max(len(pair[0]) for pair in arrays if pair)
    scale = max(each for each, pair in zip(scales, arrays) if pair)
    widths, kernel = [spec.shape[-1] for spec in entry.specs], _kernel(entry)
    outputs, ones = sum(widths), (1,) * (len(kernel) - 1)
    a = np.zeros((*entry.copies, *kernel, rank), np.float32)
    b = np.zeros((*entry.copies, rank, outputs), np.float32)
    for copy, pair, own in zip(np.ndindex(entry.copies), arrays, scales):
        if pair:
            n = len(pair[0])
            if pair[0].shape != (n, kernel[-1], *kernel[:-1]) or pair[1].shape != (
                outputs,
                n,
                *ones,
            ):
                raise ValueError(
                    f"{file}: {_match.ours(entry)}: expected factors for a kernel "
                    f"{(*kernel, outputs)}, got {pair[0].shape} and {pair[1].shape}"
                )
            a[(*copy, ..., slice(n))] = np.moveaxis(pair[0], (0, 1), (-1, -2))
            b[(*copy, slice(n))] = pair[1].reshape(outputs, n).T * (own / scale)
    b = b[..., np.argsort(_rotary_order(model, entry, outputs))]
    parts = np.split(b, np.cumsum(widths)[:-1], -1)
    return {path: (a, part, scale, len(kernel)) for path, part in zip(entry.paths, parts)}


def _joined(leaves, copy):
    """Returns (a, b, scale), the two factors and the scale of the low-rank change of one module.

    The shape of the factor `a` is [*window, in, rank], and the shape of the factor `b` is [rank,
    out]. If one module contains several fnet kernels, such as query, key and value, the low-rank
    factors `a` are concatenated along the rank axis, and the factors `b` form a block-diagonal
    matrix.
    """
    scale = next(leaf.scale for leaf in leaves if isinstance(leaf, LowRank))
    widths = [leaf.shape[-1] for leaf in leaves]
    factors, rows = [], []
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, LowRank):
            factors.append(np.asarray(leaf.a[copy], np.float32))
            row = np.zeros((leaf.a.shape[-1], sum(widths)), np.float32)
            row[:, sum(widths[:i]) : sum(widths[: i + 1])] = np.asarray(leaf.b[copy]) * (
                leaf.scale / scale
            )
            rows.append(row)
    return np.concatenate(factors, -1), np.concatenate(rows), scale


def _replaced(tree, changes: Mapping[tuple, tuple]) -> Any:
    """Returns the tree in which the leaves at the paths in `changes` are `LowRank`."""
    if () in changes:
        a, b, scale, inputs = changes[()]
        return LowRank(tree, jnp.asarray(a), jnp.asarray(b), scale, inputs)
    if not changes:
        return tree
    return {
        name: _replaced(
            node, {path[1:]: change for path, change in changes.items() if path[0] == name}
        )
        for name, node in tree.items()
    }
