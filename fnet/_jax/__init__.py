"""The only package of fnet that uses undocumented names of JAX.

`_features` imports these names. If the installed version of JAX lacks a name, the feature of fnet
that needs the name is disabled. `disabled` lists such features. The modules `compilation`,
`kernels` and `processes` of this package are imported on first use. For each name,
tests/test_jax_names.py contains a test that fails if a version of JAX no longer has the name.
"""

import importlib
from typing import Any

from jax.extend.core import ClosedJaxpr, Literal, Primitive

from fnet._jax._features import disabled
from fnet._jax._hijax import (
    classic_tracing,
    classically,
    expanded,
    hi_primitive,
    make_jaxpr,
    without_hi_primitives,
    zero_tangent,
)
from fnet._jax._jaxprs import (
    PUBLIC_PRIMITIVES,
    close,
    consts_as_inputs,
    evaluate,
    hoisted,
    is_dropped,
    jaxpr_of,
    public_name,
    unplaced,
    used_inputs,
    without_unused,
)
from fnet._jax._rules import CustomJvp, CustomVjp, custom_vmap_rule
from fnet._jax._symbolic import symbolic_trace
from fnet._jax._tracing import (
    bind,
    bind_again,
    context_mesh,
    current_names,
    equation_context,
    kernels_in_exports,
    line,
    mesh_of_type,
    name_stack,
    names_context,
    origin,
    outermost,
    scope_entries,
    trace_state,
    varies_over,
    vary_alike,
    without_locations,
    zeros,
)

__all__ = [
    "PUBLIC_PRIMITIVES",
    "ClosedJaxpr",
    "CustomJvp",
    "CustomVjp",
    "Literal",
    "Primitive",
    "bind",
    "bind_again",
    "classic_tracing",
    "classically",
    "close",
    "consts_as_inputs",
    "context_mesh",
    "current_names",
    "custom_vmap_rule",
    "disabled",
    "equation_context",
    "evaluate",
    "expanded",
    "hi_primitive",
    "hoisted",
    "is_dropped",
    "jaxpr_of",
    "kernels_in_exports",
    "line",
    "make_jaxpr",
    "mesh_of_type",
    "name_stack",
    "names_context",
    "origin",
    "outermost",
    "prng_impl",
    "public_name",
    "scope_entries",
    "symbolic_trace",
    "threefry_2x32",
    "trace_state",
    "unplaced",
    "used_inputs",
    "varies_over",
    "vary_alike",
    "without_hi_primitives",
    "without_locations",
    "without_unused",
    "zero_tangent",
    "zeros",
]


def __getattr__(name: str) -> Any:
    if name in ("compilation", "kernels", "processes"):
        return importlib.import_module(f"fnet._jax.{name}")
    raise AttributeError(f"module 'fnet._jax' has no attribute {name!r}")


def prng_impl(**options: Any) -> Any:
    """Defines a random number generator with `jax.extend.random.define_prng_impl`, and returns it.
    The result can be passed to `jax.random.wrap_key_data` as `impl`."""
    from jax.extend import random

    return random.define_prng_impl(**options)


def threefry_2x32(key: Any, counters: Any) -> Any:
    """Returns the bits that Threefry-2x32 computes from a key of two words and an array of
    counters."""
    from jax.extend import random

    return random.threefry_2x32(key, counters)
