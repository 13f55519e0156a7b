"""Changes of low rank for finetune.py, on parameters that may be quantized (LoRA, QLoRA)."""

import dataclasses
import math
import re

import jax
from jax.tree_util import keystr, tree_flatten_with_path

from fnet import compress
from fnet import layers as nn

FORMATS = {"none": None, "int8": compress.Int8(), "int4": compress.Int4(), "nf4": compress.NF4()}


def adapted(key, params, rank, base):
    """(trainable, frozen): the factors of LoRA, and the parameters that they change.

    Args:
      key: for the factors.
      params: the published parameters.
      rank: of the change of each kernel but the first, the last and depthwise ones, and of the table of tokens.
      base: the format of these kernels, one of FORMATS. The table keeps its dtype.
    """
    kernels = inner_kernels(params)
    if FORMATS[base] is not None:
        params = compress.quantize(params, {re.escape(path): fitting(FORMATS[base], n) for path, n in kernels.items()})
    tables = ["embed/embedding"] if "embedding" in params.get("embed", {}) else []
    return nn.partition(compress.lora(key, params, {re.escape(path): rank for path in (*kernels, *tables)}), ".*/[ab]")


def inner_kernels(params):
    """{path: inputs} of the kernels that are changed. Those of pixels and depthwise convolutions have 3 or 1 inputs."""
    paths = ((keystr(path, simple=True, separator="/"), leaf) for path, leaf in tree_flatten_with_path(params)[0])
    return {path: leaf.shape[-2] for path, leaf in paths
            if path.endswith("/kernel") and not path.startswith("head/") and leaf.shape[-2] % 2 == 0}


def fitting(format, inputs):
    """The format with groups that divide the inputs."""
    return dataclasses.replace(format, group=format.group and math.gcd(format.group, inputs))


def count(tree):
    return sum(leaf.size for leaf in jax.tree.leaves(tree))
