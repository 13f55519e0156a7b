"""Which library computes what, for tune on CPUs: compiler options, and when they pay.

XLA:CPU hands products and convolutions to YNNPACK, to Eigen or to oneDNN. oneDNN has convolutions of bfloat16 with
float32 sums that take a tenth of the time of all others where the processor multiplies bfloat16 (AMX); its products of
bfloat16 are slower than YNNPACK's, and so are its weight gradients of float32 convolutions than Eigen's. An option
holds for the whole program: what the program does most of decides.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Sequence

import jax.numpy as jnp

from fnet.hardware._cpu import read_cpu
from fnet.hardware._onednn import onednn
from fnet.jaxpr import CONVOLUTION, product

F32, BF16 = jnp.dtype("float32"), jnp.dtype("bfloat16")
YNNPACK = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT,LIBRARY_FUSION_TYPE_REDUCE"}
LARGE = 1 << 21    # multiplications of a convolution from which on a call of oneDNN is worth it


@functools.cache
def bfloat16_pays() -> bool:
    """Whether this processor multiplies bfloat16; others were not measured."""
    return not {"amx_bf16", "avx512_bf16"}.isdisjoint(read_cpu().flags)


def eigen_pays(equations: Sequence) -> bool:
    """Whether convolutions are most of the work, and none of them is grouped.

    Eigen takes 0.50 to 1.10 of YNNPACK's time for ungrouped convolutions, but up to 1.27 for depthwise ones, which take
    most of the time where there are any (`python -m benchmarks.convolutions`, benchmarks/RESULTS.md).
    """
    convolutions = [found for eqn in equations if (found := product(eqn)) is not None and found.op is CONVOLUTION]
    if any(found.groups != (1, 1) for found in convolutions):
        return False
    work = _work(equations)
    return work["convolution", F32] + work["convolution", BF16] > work["product", F32] + work["product", BF16]


def onednn_pays(equations: Sequence) -> bool:
    """Whether convolutions of bfloat16 are most of the work, and not small."""
    work, products = _work(equations), filter(None, map(product, equations))
    every, low = sum(each.op is CONVOLUTION for each in products), work["convolution", BF16]
    return 2 * low > sum(work.values()) and low >= LARGE * every and onednn()


def _work(equations) -> collections.Counter:
    """{("product" or "convolution", dtype): multiplications}, with the body of a loop counted once."""
    work = collections.Counter()
    for eqn in equations:
        if (found := product(eqn)) is not None:
            kind = "convolution" if found.op is CONVOLUTION else "product"
            work[kind, found.dtype] += eqn.outvars[0].aval.size * found.summed
    return work
