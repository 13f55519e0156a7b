"""Which library computes what, for tune on CPUs: compiler options, and when they pay.

XLA:CPU hands products and convolutions to YNNPACK, to Eigen or to oneDNN. oneDNN has convolutions of bfloat16 with
float32 sums that take a tenth of the time of all others where the processor multiplies bfloat16 (AMX); its products of
bfloat16 are slower than YNNPACK's, and so are its weight gradients of float32 convolutions than Eigen's. An option
holds for the whole program: what the program does most of decides.
"""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax

from fnet.hardware._cpu import read_cpu
from fnet.hardware._onednn import onednn
from fnet.transforms._lowered import lowered_p

F32, BF16 = jnp.dtype("float32"), jnp.dtype("bfloat16")
YNNPACK = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT,LIBRARY_FUSION_TYPE_REDUCE"}
LARGE = 1 << 21    # multiplications of a convolution from which on a call of oneDNN is worth it


def operation(eqn) -> tuple:
    """(the primitive, its parameters, the dtype that its operands are rounded to), of a product that autocast has
    lowered too."""
    if eqn.primitive is lowered_p:
        return eqn.params["op"], eqn.params["params"](None), eqn.params["compute"]
    return eqn.primitive, eqn.params, getattr(eqn.invars[0].aval, "dtype", None) if eqn.invars else None


@functools.cache
def bfloat16_pays() -> bool:
    """Whether this processor multiplies bfloat16; others were not measured."""
    return not {"amx_bf16", "avx512_bf16"}.isdisjoint(read_cpu().flags)


def eigen_pays(equations: Sequence) -> bool:
    """Whether convolutions are most of the work: YNNPACK takes twice the time of Eigen for them."""
    work = _work(equations)
    return work["convolution", F32] + work["convolution", BF16] > work["product", F32] + work["product", BF16]


def onednn_pays(equations: Sequence) -> bool:
    """Whether convolutions of bfloat16 are most of the work, and not small."""
    work, every = _work(equations), sum(operation(eqn)[0] is lax.conv_general_dilated_p for eqn in equations)
    low = work["convolution", BF16]
    return 2 * low > sum(work.values()) and low >= LARGE * every and onednn()


def _work(equations) -> collections.Counter:
    """{("product" or "convolution", dtype): multiplications}, with the body of a loop counted once."""
    work = collections.Counter()
    for eqn in equations:
        op, params, dtype = operation(eqn)
        if op is lax.dot_general_p:
            x = eqn.invars[0].aval.shape
            summed = math.prod(x[i] for i in params["dimension_numbers"][0][0])
            work["product", dtype] += eqn.outvars[0].aval.size * summed
        elif op is lax.conv_general_dilated_p:
            kernel, axis = eqn.invars[1].aval, params["dimension_numbers"].rhs_spec[0]
            work["convolution", dtype] += eqn.outvars[0].aval.size * kernel.size // max(1, kernel.shape[axis])
    return work
