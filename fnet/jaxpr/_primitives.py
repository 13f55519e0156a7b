"""What each primitive is: one table for all transforms and analyses, and descriptions of fnet's own primitives."""

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
    """What a primitive is.

    Attributes:
        kind: "product" (bilinear: dot_general, convolutions), "elementwise", "transcendental", "reduction", "scatter",
            "window", "sort", "linear_algebra", "cast", "alias" (its output is its input, seen otherwise), "layout"
            (values unchanged, elsewhere in the array), "gather", "collective", "random", "effect", or "unknown".
        precision: what a lower precision does to it: "exact" (values pass through unchanged), "arithmetic" (as good as
            its inputs), "power" (as "arithmetic", but overflows float16 early), or "" (needs float32).
        memory: "free" (compilers fold it into a neighbour), "fused" (with its elementwise neighbours), or "heavy" (its
            inputs and outputs are written to memory).
    """

    kind: str
    precision: str = ""
    memory: str = "fused"


UNKNOWN = Traits("unknown")
# kind, precision, memory: names. Names that differ between JAX versions are written a|b; "?": not in every version.
_TABLE = """
product         -          heavy: dot_general conv_general_dilated ragged_dot_general
elementwise     arithmetic fused: add sub mul div neg abs sign max min clamp add_any floor ceil round eq ne
                                  lt le gt ge is_finite
elementwise     -          fused: rem nextafter real imag complex conj reduce_precision and or xor not
                                  population_count clz shift_left shift_right_logical shift_right_arithmetic eq_to le_to
                                  lt_to
elementwise     power      fused: square integer_pow one_minus_square?
elementwise     exact      fused: select_n
transcendental  arithmetic fused: tanh logistic erf
transcendental  -          fused: exp exp2 expm1 log log1p sin cos tan asin acos atan atan2 sinh cosh asinh acosh atanh
                                  pow sqrt rsqrt cbrt erfc erf_inv lgamma digamma polygamma igamma igammac igamma_grad_a
                                  zeta regularized_incomplete_beta bessel_i0e bessel_i1e
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
effect          -          fused: debug_callback debug_print get swap addupdate
"""


def _read(table: str) -> tuple[dict[str, Traits], list[tuple[str, ...]]]:
    traits, required, current = {}, [], UNKNOWN
    for row in table.strip().splitlines():
        head, colon, rest = row.partition(":")
        if colon:
            kind, precision, memory = head.split()
            current = Traits(kind, precision.strip("-"), memory)
        for names in (rest if colon else row).split():
            optional = names.endswith("?")
            names = tuple(names.rstrip("?").split("|"))
            traits.update(dict.fromkeys(names, current))
            if not optional:
                required.append(names)
    return traits, required


_TRAITS, _REQUIRED = _read(_TABLE)
POINTWISE = frozenset(name for name, each in _TRAITS.items() if each.kind in ("elementwise", "transcendental", "cast")
                      ) | {"copy", "stop_gradient"}
"""Primitives whose output elements depend on the input elements at the same position alone."""


def traits(name: str) -> Traits:
    """What the primitive called `name` is; `UNKNOWN` for one that fnet does not know."""
    return _TRAITS.get(name, UNKNOWN)


@functools.cache
def unsupported() -> tuple[str, ...]:
    """What this version of JAX lacks that fnet relies on, one line each; empty for the versions it is tested with.

    A primitive that JAX has renamed is treated as unknown: transforms do not change it, and counts name it.
    """

    for platform in ("cuda", "tpu"):
        _jax.kernels.unavailable(platform)    # lists it among the features that are disabled
    known = {value.name for name, module in list(sys.modules.items()) if name.split(".")[0] == "jax"
             for value in list(vars(module).values()) if isinstance(value, _jax.Primitive)}
    lines = tuple(f"the rules for '{names[0]}' are disabled: JAX {jax.__version__} has no primitive of that name"
                  for names in (*_REQUIRED, *CONTROL_NAMES) if known.isdisjoint(names))
    return (*_jax.disabled(), *lines)


# Descriptions of fnet's own primitives.

class Inside(NamedTuple):
    """A value inside a primitive: `compute(eqn, arrays)`, and `replace(eqn, arrays, value)`, the outputs for another
    value."""

    compute: Callable
    replace: Callable


@dataclasses.dataclass(frozen=True)
class Description:
    """What fnet knows of one of its own primitives.

    Attributes:
        traits: kind, precision and memory behavior.
        lower: `lower(params, compute, out)`: the parameters that change for operands rounded to `compute` and results
            in `out`; None if the program's author has chosen the precision.
        explain: `explain(*avals, **params)`: a description of the form that it takes on this machine.
        plain: `plain(eqn)`: an open jaxpr of ordinary operations with the same value.
        refusal: `refusal(platform, eqn)`: why there is no kernel for it on "cuda" or "tpu"; None if there is one.
        stands_for: `stands_for(params)`: (the bilinear primitive that it computes, its parameters, the dtype that its
            operands are rounded to).
        batch_first: the first axis of all operands and results is the batch.
        inside: {name: `Inside`}: values that it computes on the way, as sites for `transforms.capture`.
        axes: `axes(eqn)`: ({name: size} of the factors of axes, the names of those whose size may change, the axes of
            each operand, those of each result). A name is one letter; "b gr" is an axis b and an axis of g times r.
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
    """Registers the description of a primitive, which makes every transform and analysis know it."""
    _DESCRIPTIONS[primitive] = description
    _TRAITS[primitive.name] = description.traits


def description(primitive: Any) -> Description:
    """The description of a primitive; an empty one for JAX's."""
    return _DESCRIPTIONS.get(primitive, _NONE)
