"""Naming rules for several layers of a PyTorch file at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fnet.models.weights._weight_names import DENSE, SAME, Layout, Rule, Spare
from fnet.models.weights._words import torch


def torch_layers(
    ours: str,
    theirs: str,
    dense: Mapping[str, str],
    norms: Mapping[str, str],
    layout: Layout = DENSE,
) -> tuple:
    """Returns the naming rules for the layers of a block in a PyTorch file.

    Args:
        ours, theirs: the path of the block in fnet, and its prefix in the file.
        dense: {path of a Dense within the block: name in the file}.
        norms: {path of a LayerNorm or RMSNorm within the block: name in the file}.
        layout: the layout of the kernels.
    """
    return (
        *(
            torch.dense(f"{ours}/{mine}", f"{theirs}.{name}", layout)
            for mine, name in dense.items()
        ),
        *(torch.norm(f"{ours}/{mine}", f"{theirs}.{name}") for mine, name in norms.items()),
    )


def fused(
    ours: Sequence[str], theirs: str, kernel: Layout = DENSE, bias: Layout = SAME, join: str = "."
) -> tuple:
    """Returns naming rules for Dense layers, such as query, key and value, that are fused into one
    layer in PyTorch."""
    return (
        Rule(tuple(f"{each}/kernel" for each in ours), f"{theirs}{join}weight", kernel),
        Rule(tuple(f"{each}/bias" for each in ours), f"{theirs}{join}bias", bias),
    )


def qkv(ours: str) -> tuple[str, ...]:
    """Returns the paths of the query, key and value layers in the block with the path `ours`."""
    return tuple(f"{ours}/attention/{name}" for name in ("query", "key", "value"))


def spare(*layers: str) -> tuple:
    """Returns `Spare` rules for the weights and biases of PyTorch layers that the model does not
    need."""
    return tuple(Spare(f"{layer}.{leaf}") for layer in layers for leaf in ("weight", "bias"))
