"""A primitive for bilinear operations in low precision. Derivatives of any order are also computed
in low precision.

If JAX's dot_general has bfloat16 operands and a float32 result, its backward pass is not computed
in bfloat16, because the float32 cotangent of the result is an operand of each matrix product in the
backward pass. If dot_general has a bfloat16 result, weight gradients are rounded to bfloat16. The
primitive `lowered` casts its operands itself, so the operands and the result may have any
floating-point dtype. `lowered` multiplies in the low-precision dtype and accumulates in float32.
The gradient of each operand has the dtype of the operand, so that the gradient of a float32 weight
is summed in float32.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType, get_abstract_mesh

from fnet import _jax, jaxpr
from fnet._jax import Primitive
from fnet.jaxpr import BILINEAR, explicit

lowered_p = Primitive("lowered")


def lowered(op, x, y, params: dict, *, compute, out, stored=None) -> jax.Array:
    """Computes `op(x, y)` with operands cast to the dtype `compute`, float32 accumulation, and a
    result of dtype `out`.

    Args:
        op: a bilinear primitive that has the parameter `preferred_element_type`, such as
            dot_general.
        x, y: floating-point arrays.
        params: the primitive's parameters.
        compute, out: the dtype of the operands, and the dtype of the result.
        stored: the dtype to which GPUs and TPUs round the result to save memory. Default: `out`.
    """
    if jet := sys.modules.get("jax.experimental.jet"):
        jet.jet_rules.setdefault(
            lowered_p, functools.partial(jet.jet_rules[lax.dot_general_p].func, lowered_p)
        )
    return lowered_p.bind(
        x,
        y,
        op=op,
        params=_Params(params),
        compute=jnp.dtype(compute),
        out=jnp.dtype(out),
        stored=jnp.dtype(out if stored is None else stored),
    )


class _Params:
    """The parameters of a primitive, in hashable form."""

    def __init__(self, params):
        self.items = tuple(sorted(params.items(), key=lambda item: item[0]))
        try:
            self._hash = hash(self.items)
        except TypeError:  # some values are lists or contain dicts
            self._hash = hash(str(self.items))

    def __hash__(self):
        return self._hash

    def __eq__(self, other):
        return isinstance(other, _Params) and self.items == other.items

    def __repr__(self):
        return f"{{{', '.join(f'{name}={value}' for name, value in self.items)}}}"

    def __call__(self, dtype=None) -> dict:
        return {**dict(self.items), "preferred_element_type": dtype}


@dataclasses.dataclass(frozen=True)
class Saveable:
    """Wraps a policy of `jax.checkpoint`. If the primitive of an equation was replaced by the
    primitive `lowered`, the policy is called with the original primitive, such as dot_general."""

    policy: Callable

    def __call__(self, primitive, *types, **params):
        if primitive is lowered_p:
            primitive, params = params["op"], params["params"](jnp.dtype(jnp.float32))
        return self.policy(primitive, *types, **params)


def _compute(x, y, *, op, params, compute, out, sums=jnp.float32):
    x, y = (a if a.dtype == compute else lax.convert_element_type(a, compute) for a in (x, y))
    z = op.bind(x, y, **params(jnp.dtype(sums)))
    return z if z.dtype == out else lax.convert_element_type(z, out)


@functools.partial(jax.jit, static_argnames=("op", "params", "compute", "out", "stored"))
def _eager(x, y, **params):
    return lowered_p.bind(x, y, **params)


@lowered_p.def_impl
def _impl(x, y, **params):
    with jax.disable_jit(False):  # there is no implementation outside of jit
        return _eager(x, y, **params)


@lowered_p.def_effectful_abstract_eval
def _abstract(x, y, *, op, params, compute, out, stored):
    # The primitive's own rule determines shapes, shardings and varying mesh axes.
    z, effects = op.abstract_eval(
        x.update(dtype=compute, weak_type=False),
        y.update(dtype=compute, weak_type=False),
        **params(jnp.dtype(jnp.float32)),
    )
    return z.update(dtype=out, weak_type=False), effects


def _on_accelerators(x, y, *, compute, out, stored, **rest):
    # Matrix units compute sums in float32 for every result dtype. A 16-bit result halves the number
    # of bytes written.
    return _compute(
        x,
        y,
        compute=compute,
        out=out,
        sums=stored if stored.itemsize == compute.itemsize else jnp.float32,
        **rest,
    )


def _on_cuda(x, y, *, op, compute, out, stored, **rest):
    # cuDNN has no convolution of 16-bit operands with a float32 result: XLA would widen the
    # operands. Its sums are in float32, and a weight gradient is rounded to 16 bits.
    if op is not lax.dot_general_p:
        return _compute(x, y, op=op, compute=compute, out=out, sums=compute, **rest)
    return _on_accelerators(x, y, op=op, compute=compute, out=out, stored=stored, **rest)


def _on_cpu(x, y, *, op, params, compute, out, stored):
    # XLA:CPU's low-precision convolutions have low-precision sums.
    if op is not lax.dot_general_p:
        return _compute(x, y, op=op, params=params, compute=compute, out=out, sums=compute)
    if compute != jnp.bfloat16:
        return _compute(x, y, op=op, params=params, compute=compute, out=out)
    if explicit(jax.typeof(x)) or explicit(jax.typeof(y)):  # a reshape would lose the shardings
        x, y = (lax.convert_element_type(a.astype(compute), jnp.float32) for a in (x, y))
        return op.bind(x, y, **params(jnp.dtype(jnp.float32))).astype(out)
    return as_matrices(x, y, params()["dimension_numbers"], out)


def as_matrices(x, y, dimension_numbers, out) -> jax.Array:
    """Computes a dot_general in bfloat16 with float32 accumulation, in a form that is fast on
    XLA:CPU.

    The operands are cast to bfloat16, and the result has the dtype `out`. XLA:CPU computes a matrix
    product fast if the operands have the shapes [batch, m, k] and [batch, k, n], or [batch, m, k]
    and [batch, n, k]. Optimization barriers prevent XLA from merging a transpose into the matrix
    product, because the merged operation would fail at run time ("DotThunk: BF16 x BF16 = F32").
    """
    contract, batch = dimension_numbers
    free = [
        [i for i in range(a.ndim) if i not in (*c, *b)] for a, c, b in zip((x, y), contract, batch)
    ]
    # One operand of a weight gradient is transposed: the narrower one, preferably the one that the
    # layer has read (JAX's second), because XLA (jaxlib 0.10) computes everything that produces a
    # cotangent within its transpose.
    swapped = (
        all(f == [len(c)] and not b for f, c, b in zip(free, contract, batch))
        and x.shape[-1] >= y.shape[-1]
    )
    if swapped:
        (x, y), contract, free = (y, x), contract[::-1], free[::-1]
    shape = [x.shape[i] for i in (*batch[0], *free[0])] + [y.shape[i] for i in free[1]]
    last = not free[1] or not contract[1] or contract[1][-1] > free[1][-1]
    x = _matrices(x, (batch[0], free[0], contract[0]))
    y = _matrices(y, (batch[1], free[1], contract[1]) if last else (batch[1], contract[1], free[1]))
    z = lax.dot_general(
        x, y, (((2,), (2 if last else 1,)), ((0,), (0,))), preferred_element_type=jnp.float32
    )
    z = lax.optimization_barrier(z).reshape(shape)
    z = z.T if swapped else z
    return z if z.dtype == out else lax.convert_element_type(z, out)


def _matrices(x, axes):
    """Casts x to bfloat16 and reshapes it to three axes. `axes` is three groups of axes of x, and
    each group becomes one axis. An optimization barrier makes XLA cast x only once, even if several
    matrix products use x."""
    order, shape = (
        [i for group in axes for i in group],
        [math.prod(x.shape[i] for i in group) for group in axes],
    )
    x = lax.optimization_barrier(lax.convert_element_type(x, jnp.bfloat16))
    if order == list(range(x.ndim)):
        return x.reshape(shape)
    return lax.optimization_barrier(x.transpose(order).reshape(shape))


mlir.register_lowering(lowered_p, mlir.lower_fun(_on_accelerators, multiple_results=False))
mlir.register_lowering(lowered_p, mlir.lower_fun(_on_cpu, multiple_results=False), platform="cpu")
mlir.register_lowering(lowered_p, mlir.lower_fun(_on_cuda, multiple_results=False), platform="cuda")


def _evaluated(closed, x, y, compute, dtype, stored=None):
    """Evaluates a jaxpr that has two inputs and one bilinear operation, which is computed in low
    precision."""

    def rule(eqn, arrays):
        if eqn.primitive.name not in BILINEAR:
            return NotImplemented
        return [
            lowered(eqn.primitive, *arrays, eqn.params, compute=compute, out=dtype, stored=stored)
        ]

    return jaxpr.Evaluator(rule)(closed, x, y)[0]


# Transposes and batched forms of a product are products with other parameters and moved axes. They
# are derived from JAX's rules for float32, once for each kind of product. `mesh` is the mesh of the
# trace, which JAX stores in a jaxpr.


@functools.lru_cache(4096)
def _transposed(side, op, params, like, mesh):
    """Returns the jaxpr that computes the cotangent of one operand of the bilinear primitive `op`.
    `side` is the index (0 or 1) of the operand whose cotangent is computed. The jaxpr has two
    inputs: the cotangent of the result of `op`, and the other operand of `op`."""
    product = functools.partial(op.bind, **params(jnp.dtype(jnp.float32)))

    def transposed(g, other):
        linear = (lambda x: product(x, other)) if side == 0 else (lambda y: product(other, y))
        return jax.linear_transpose(linear, like[side])(g)[0]

    return _jax.make_jaxpr(transposed)(jax.eval_shape(product, *like), like[1 - side])


@functools.lru_cache(4096)
def _batched(op, params, like, axes, mesh):
    product = functools.partial(op.bind, **params(jnp.dtype(jnp.float32)))
    return _jax.make_jaxpr(jax.vmap(product, in_axes=axes))(*like)


def _like(*avals):
    """Returns a float32 `jax.ShapeDtypeStruct` for each abstract value, with the same shape. On a
    mesh with explicit axes, the `jax.ShapeDtypeStruct` of a sharded or replicated array also has
    the sharding of the array, because the gradient of the array must have the same sharding."""
    return tuple(
        jax.ShapeDtypeStruct(
            aval.shape, jnp.float32, sharding=aval.sharding if _on_explicit_mesh(aval) else None
        )
        for aval in avals
    )


def _on_explicit_mesh(aval) -> bool:
    return AxisType.Explicit in aval.sharding.mesh.axis_types


def _transpose_left(g, x, y, *, op, params, compute, out, stored):
    closed = _transposed(0, op, params, _like(x.aval, jax.typeof(y)), get_abstract_mesh())
    # The cast precedes the reversal of the other operand, by which compilers recognize the gradient
    # of a convolution.
    return _evaluated(closed, g, lax.convert_element_type(y, compute), compute, x.aval.dtype)


def _transpose_right(g, x, y, *, op, params, compute, out, stored):
    closed = _transposed(1, op, params, _like(jax.typeof(x), y.aval), get_abstract_mesh())
    return _evaluated(closed, g, x, compute, y.aval.dtype)


def _batch(args, axes, *, op, params, compute, out, stored):
    closed = _batched(op, params, _like(*map(jax.typeof, args)), tuple(axes), get_abstract_mesh())
    return _evaluated(closed, *args, compute, out, stored), 0


ad.defbilinear(lowered_p, _transpose_left, _transpose_right)
batching.primitive_batchers[lowered_p] = _batch
jaxpr.describe(
    lowered_p,
    jaxpr.Description(
        jaxpr.Traits("product", memory="heavy"),
        stands_for=lambda params: (params["op"], params["params"](), params["compute"]),
    ),
)
