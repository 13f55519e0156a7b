"""Conditions by which tune selects the CPU library for matrix products and convolutions (YNNPACK,
Eigen or oneDNN).

Compiler options of XLA:CPU select the library that computes matrix products and convolutions. For
bfloat16 convolutions with float32 sums, oneDNN needs a tenth of the time of YNNPACK and Eigen on
CPUs with AMX. On CPUs with the AVX-512 instructions for bfloat16, oneDNN usually needs at most half
of the time of YNNPACK and Eigen
(`python -m benchmarks.convolutions bfloat16`). For bfloat16 matrix products, oneDNN is slower than
YNNPACK. For weight gradients of float32 convolutions, oneDNN is slower than Eigen. A compiler
option applies to the whole program, so the library is selected for the operations (matrix products
or convolutions) that do most of the program's multiplications.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Sequence

import jax.numpy as jnp

from fnet.hardware._cpu import BFLOAT16, read_cpu
from fnet.hardware._onednn import onednn
from fnet.jaxpr import CONVOLUTION, product

F32, BF16 = jnp.dtype("float32"), jnp.dtype("bfloat16")
YNNPACK = {
    "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT,LIBRARY_FUSION_TYPE_REDUCE"
}
# Maximum multiplications of a program's convolutions for which YNNPACK is as fast as Eigen.
SMALL = 1 << 26
LARGE = 1 << 21  # minimum multiplications of a convolution for a call of oneDNN


@functools.cache
def bfloat16_pays() -> bool:
    """Whether this CPU has instructions that multiply bfloat16 numbers (AMX or AVX-512). The rule
    `bfloat16_products` is used only on CPUs with bfloat16 instructions, because its effect on other
    CPUs was not measured."""
    return not BFLOAT16.isdisjoint(read_cpu().flags)


def eigen_pays(equations: Sequence) -> bool:
    """Whether a program's convolutions are large, are not grouped, and do most of the program's
    multiplications.

    `python -m benchmarks.convolutions` measures both libraries (benchmarks/RESULTS.md). For
    ungrouped float32 convolutions that are not transposed, Eigen takes 0.24 to 0.88 times as long
    as YNNPACK. For depthwise convolutions, Eigen takes up to 1.51 times as long. Therefore, the
    result is False for a program with grouped convolutions.
    """
    found = filter(None, map(product, equations))
    if any(each.op is CONVOLUTION and each.groups != (1, 1) for each in found):
        return False
    work = _work(equations)
    convolutions, products = (
        work[kind, F32] + work[kind, BF16] for kind in ("convolution", "product")
    )
    return convolutions > max(products, SMALL)


def pools_apart(equations: Sequence) -> bool:
    """Whether XLA computes poolings separately from convolutions, so that the rewrite rule for
    poolings is useful.

    YNNPACK computes a convolution and the pooling of its result together, unless the program also
    computes the gradient of the pooling.
    """
    names = {eqn.primitive.name for eqn in equations}
    return (
        "conv_general_dilated" not in names
        or "select_and_scatter_add" in names
        or eigen_pays(equations)
        or onednn_pays(equations)
    )


def onednn_pays(equations: Sequence) -> bool:
    """Returns whether a program should use oneDNN's convolutions. The result is True if XLA can run
    bfloat16 convolutions with oneDNN, this CPU has bfloat16 instructions, and large bfloat16
    convolutions do most of the program's multiplications."""
    work, products = _work(equations), filter(None, map(product, equations))
    every, low = sum(each.op is CONVOLUTION for each in products), work["convolution", BF16]
    return 2 * low > sum(work.values()) and low >= LARGE * every and onednn()


def _work(equations) -> collections.Counter:
    """Returns the number of multiplications in matrix products and in convolutions, by dtype. The
    keys of the returned dict are ("product" or "convolution", dtype). The body of a loop is counted
    once."""
    work = collections.Counter()
    for eqn in equations:
        if (found := product(eqn)) is not None:
            kind = "convolution" if found.op is CONVOLUTION else "product"
            work[kind, found.dtype] += eqn.outvars[0].aval.size * found.summed
    return work
