"""Properties of primitives: a table that all transforms and analyses read, and descriptions of
fnet's own
primitives."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from fnet import _jax
from fnet.jaxpr._calls import CONTROL_NAMES


class Traits(NamedTuple):
    """The properties of a primitive.

    Attributes:
        kind: "product" (bilinear: dot_general, convolutions), "elementwise", "transcendental",
            "reduction", "scatter", "window", "sort", "linear_algebra", "cast", "alias" (the output
            is the input in another form, as for a reshape), "layout" (the values are unchanged, but
            at other positions in the array), "gather", "collective", "random", "effect", or
            "unknown".
        precision: the effect of a lower precision, such as bfloat16, on the primitive. If
            `precision` is "exact", the primitive does not change the values. If `precision` is
            "arithmetic", the result is as accurate as the inputs. The value "power" means the same
            as "arithmetic", except that float16 overflows early, as in x ** 2. If `precision` is
            "", the primitive needs float32.
        memory: "free" (compilers merge the operation into a neighbor), "fused" (compilers fuse the
            operation with elementwise neighbors), or "heavy" (the inputs and outputs are written to
            memory).
    """

    kind: str
    precision: str = ""
    memory: str = "fused"


UNKNOWN = Traits("unknown")
# kind, precision, memory: names. Names that differ between JAX versions are written a|b; "?": not
# in every version.
_TABLE = """
product         -          heavy: dot_general conv_general_dilated ragged_dot_general
elementwise     arithmetic fused: add sub mul div neg abs sign max min clamp add_any floor ceil round eq ne
                                  lt le gt ge is_finite
elementwise     -          fused: rem nextafter real imag complex conj reduce_precision and or xor not
                                  population_count clz shift_left shift_right_logical shift_right_arithmetic eq_to le_to
                                  lt_to polynomial?
elementwise     power      fused: square integer_pow one_minus_square?
elementwise     exact      fused: select_n
transcendental  arithmetic fused: tanh logistic erf
transcendental  -          fused: exp exp2 expm1 log log1p sin cos tan asin acos atan atan2 sinh cosh asinh acosh atanh
                                  pow sqrt rsqrt cbrt erfc erf_inv lgamma digamma polygamma igamma igammac igamma_grad_a
                                  zeta regularized_incomplete_beta bessel_i0e bessel_i1e log2?
reduction       arithmetic heavy: reduce_max reduce_min argmax argmin cummax cummin
reduction       -          heavy: reduce_sum reduce_prod reduce_and reduce_or reduce_xor reduce cumsum cumprod
                                  cumlogsumexp
scatter         -          heavy: scatter scatter-add scatter-mul scatter-min scatter-max scatter-sub
window          arithmetic heavy: reduce_window_max
window          -          heavy: reduce_window reduce_window_sum reduce_window_min select_and_scatter_add
                                  select_and_scatter
window          -          fused: select_and_gather_add
sort            arithmetic heavy: sort top_k
linear_algebra  -          heavy: fft cholesky triangular_solve lu
cast            -          fused: convert_element_type
alias           exact      free:  reshape squeeze stop_gradient name optimization_barrier
                                  sharding_constraint reshard pvary pbroadcast broadcast_in_dim device_put copy
alias           -          free:  layout_constraint
layout          exact      free:  transpose
layout          exact      fused: slice pad rev split unstack stack tile
layout          exact      heavy: concatenate dynamic_slice dynamic_update_slice
layout          -          fused: iota bitcast_convert_type empty empty2 create_token after_all to_edtype
                                  from_edtype
gather          exact      heavy: gather
collective      exact      fused: all_gather all_to_all ppermute
collective      arithmetic fused: psum psum_invariant pmax pmin reduce_scatter
collective      -          fused: axis_index all_gather_invariant
random          -          fused: random_bits random_wrap random_unwrap random_seed random_split random_fold_in
                                  random_clone threefry2x32
effect          -          fused: debug_callback debug_print get swap addupdate new_ref empty_ref freeze free_ref
"""


def _read(table: str) -> tuple[dict[str, Traits], list[tuple[str, ...]]]:
    traits: dict[str, Traits] = {}
    required: list[tuple[str, ...]] = []
    current = UNKNOWN
    for row in table.strip().splitlines():
        head, colon, rest = row.partition(":")
        if colon:
            kind, precision, memory = head.split()
            current = Traits(kind, precision.strip("-"), memory)
        for word in (rest if colon else row).split():
            names = tuple(word.rstrip("?").split("|"))
            traits.update(dict.fromkeys(names, current))
            if not word.endswith("?"):
                required.append(names)
    return traits, required


_TRAITS, _REQUIRED = _read(_TABLE)
POINTWISE = frozenset(
    name for name, each in _TRAITS.items() if each.kind in ("elementwise", "transcendental", "cast")
) | {"copy", "stop_gradient"}
"""Primitives whose output elements depend only on the input elements at the same position."""


def traits(name: str) -> Traits:
    """Returns the properties of the primitive called `name`, or `UNKNOWN` for a primitive that fnet
    does not know."""
    return _TRAITS.get(name, UNKNOWN)


def builtin(primitive: Any) -> bool:
    """Whether a primitive is JAX's or fnet's own, and not another one of the same name."""
    return primitive in _DESCRIPTIONS or id(primitive) in _of_jax()


@functools.cache
def _of_jax() -> frozenset[int]:
    modules = [module for name, module in list(sys.modules.items()) if name.split(".")[0] == "jax"]
    values = (value for module in modules for value in list(vars(module).values()))
    return frozenset(id(value) for value in values if isinstance(value, _jax.Primitive))


@functools.cache
def unsupported() -> tuple[str, ...]:
    """Returns one line for each feature that fnet uses and that this version of JAX lacks.

    For the versions of JAX with which fnet is tested, no feature is missing, so the returned tuple
    is empty. If a version of JAX has renamed a primitive, fnet does not know the new name:
    transforms leave the primitive unchanged, and `cost.count` reports it as unknown.
    """

    for platform in ("cuda", "tpu"):
        _jax.kernels.unavailable(platform)  # adds the missing kernels to _jax.disabled()
    known = {
        value.name
        for name, module in list(sys.modules.items())
        if name.split(".")[0] == "jax"
        for value in list(vars(module).values())
        if isinstance(value, _jax.Primitive)
    }
    lines = tuple(
        f"the rules for '{names[0]}' are disabled: JAX {jax.__version__} has no primitive of that "
        f"name"
        for names in (*_REQUIRED, *CONTROL_NAMES)
        if known.isdisjoint(names)
    )
    return (*_jax.disabled(), *lines)


# Descriptions of fnet's own primitives.


class Inside(NamedTuple):
    """An intermediate value of an equation of one of fnet's own primitives, such as the attention
    weights.

    `compute(eqn, arrays)` returns the intermediate value, such as attention weights, of an equation
    with the inputs `arrays`. `replace(eqn, arrays, value)` returns the outputs of the equation
    after its intermediate value, such as the attention weights, was replaced by `value`.
    """

    compute: Callable
    replace: Callable


@dataclasses.dataclass(frozen=True)
class Description:
    """The properties of one of fnet's own primitives.

    Attributes:
        traits: the `Traits` of the primitive.
        lower: a function for autocast. `lower(params, compute, out)` returns a dict with new values
            for some parameters of an equation. With the new parameters, the results of the equation
            have the dtype `out`. If the primitive has a parameter for the dtype to which its
            operands are rounded, this dtype is set to `compute`. `lower` returns None if autocast
            must not change the equation, for example because the user has set its precision.
        explain: `explain(*avals, **params)` returns a description of the primitive's implementation
            on this machine.
        plain: `plain(eqn)` returns an open jaxpr that computes the outputs of the equation with
            JAX's primitives.
        refusal: `refusal(platform, eqn)` returns the reason why "cuda" or "tpu" has no kernel for
            the equation, or None if the platform has one.
        stands_for: `stands_for(params)` returns (the equivalent bilinear primitive of JAX, such as
            dot_general, the parameters of the equivalent primitive, the dtype to which the operands
            are rounded). `stands_for` is None if the primitive is not equivalent to a bilinear
            primitive of JAX.
        batch_first: whether the first axis of all operands and results is the batch axis.
        inside: {name: `Inside`} for the intermediate values, such as attention weights, that
            `transforms.capture` can return.
        axes: a function that describes the axes of the operands and results of an equation by
            letters, as in einops. `axes(eqn)` returns a tuple (sizes, free, operands, results).
            `sizes` is {letter: size}, and `free` contains the letters whose sizes may change. The
            lists `operands` and `results` contain one string for each operand and each result of
            the equation, such as "b gr" for an array of shape [b, g * r].
    """

    traits: Traits
    lower: Callable | None = None
    explain: Callable | None = None
    plain: Callable | None = None
    refusal: Callable | None = None
    stands_for: Callable | None = None
    batch_first: bool = False
    inside: Mapping[str, Inside] = dataclasses.field(default_factory=dict)
    axes: Callable | None = None


_DESCRIPTIONS: dict[Any, Description] = {}
_NONE = Description(UNKNOWN)


def describe(primitive: Any, description: Description) -> None:
    """Registers the description of a primitive, for use by all transforms and analyses."""
    _DESCRIPTIONS[primitive] = description
    _TRAITS[primitive.name] = description.traits


def description(primitive: Any) -> Description:
    """Returns the description of one of fnet's own primitives, or an empty `Description` for any
    other primitive."""
    return _DESCRIPTIONS.get(primitive, _NONE)
