"""Every use of names that JAX does not document as public.

`_features` looks names up; a missing one disables one feature (`disabled` lists them). `compilation`, `kernels` and
`processes` are imported where they are used. Each name has a test in tests/test_jax_names.py that fails with a clear
message if JAX moves it. What equations hold in their parameters is read in `fnet.jaxpr`.
"""

import importlib

from jax.extend.core import Literal, Primitive

from fnet._jax._features import disabled
from fnet._jax._jaxprs import close, consts_as_inputs, hoisted, unplaced, widened
from fnet._jax._rules import CustomJvp, CustomVjp, custom_vmap_rule
from fnet._jax._tracing import (
    bind,
    bind_again,
    current_names,
    equation_context,
    kernels_in_exports,
    line,
    name_stack,
    names_context,
    origin,
    outermost,
    scope_entries,
    trace_state,
    varies_over,
    vary_alike,
    without_locations,
)

__all__ = ["CustomJvp", "CustomVjp", "Literal", "Primitive", "bind", "bind_again", "close", "consts_as_inputs",
           "current_names", "custom_vmap_rule", "disabled", "equation_context", "hoisted", "kernels_in_exports", "line",
           "name_stack", "names_context", "origin", "outermost", "prng_impl", "scope_entries", "trace_state",
           "unplaced", "varies_over", "vary_alike", "widened", "without_locations"]


def __getattr__(name):
    if name in ("compilation", "kernels", "processes"):
        return importlib.import_module(f"fnet._jax.{name}")
    raise AttributeError(f"module 'fnet._jax' has no attribute {name!r}")


def prng_impl(**options):
    """A kind of random keys for `jax.random.wrap_key_data(..., impl=...)`."""
    from jax.extend import random

    return random.define_prng_impl(**options)
