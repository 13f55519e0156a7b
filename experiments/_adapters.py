"""Low-rank adapters for finetune.py (LoRA), optionally on quantized parameters (QLoRA)."""

import dataclasses
import math
import re

import jax
from jax.tree_util import keystr, tree_flatten_with_path

from fnet import compress
from fnet import layers as nn

FORMATS = {"none": None, "int8": compress.Int8(), "int4": compress.Int4(), "nf4": compress.NF4()}


def adapted(key, params, rank, base):
    """Returns (trainable, frozen): the low-rank factors of LoRA, and the parameters to which their
    products are added.

    Args:
      key: a PRNG key for the initial factors.
      params: the pretrained parameters.
      rank: the rank of the factors. Each kernel, except the first, the last and depthwise kernels,
        gets factors. The token embedding also gets factors.
      base: the format in which the kernels that get factors are stored, one of FORMATS. The token
        embedding keeps its dtype.
    """
    kernels = inner_kernels(params)
    if FORMATS[base] is not None:
        params = compress.quantize(
            params, {re.escape(path): fitting(FORMATS[base], n) for path, n in kernels.items()}
        )
    tables = ["embed/embedding"] if "embedding" in params.get("embed", {}) else []
    return nn.partition(
        compress.lora(key, params, {re.escape(path): rank for path in (*kernels, *tables)}),
        ".*/[ab]",
    )


def inner_kernels(params):
    """Returns {path: number of inputs} of the kernels that get factors. Kernels with an odd number
    of inputs get no factors: the first kernel of a model for color images has 3 inputs, and kernels
    of depthwise convolutions have 1."""
    paths = (
        (keystr(path, simple=True, separator="/"), leaf)
        for path, leaf in tree_flatten_with_path(params)[0]
    )
    return {
        path: leaf.shape[-2]
        for path, leaf in paths
        if path.endswith("/kernel") and not path.startswith("head/") and leaf.shape[-2] % 2 == 0
    }


def fitting(format, inputs):
    """Returns the format with a group size that divides the number of inputs."""
    return dataclasses.replace(format, group=format.group and math.gcd(format.group, inputs))


def count(tree):
    return sum(leaf.size for leaf in jax.tree.leaves(tree))
