"""Jaxprs: what is in them, and how they are rewritten. Shared by all transforms and analyses.

- `Scope`, `scopes_in`, `scope_of_operation`: where an equation, or an operation of a compiled program, belongs.
- `traits`, `describe`, `product`, ...: what a primitive is, and typed access to the parameters of equations.
- `bodies`, `equations`, `scan`: the jaxprs inside equations.
- `rewrite`, `Interpreter`: evaluation under the control of a rule.
- `read`: a jaxpr as flat frames; `cost`, `touched`, `nbytes`: what an equation costs; `batch_axes`.
"""

from fnet.jaxpr import _mutable as mutable
from fnet.jaxpr._batch_axes import batch_axes, before
from fnet.jaxpr._calls import (
    CALLS,
    INLINED,
    bodies,
    call_name,
    donated,
    equations,
    has_shardings,
    opened,
    scan,
)
from fnet.jaxpr._costs import cost, nbytes, touched
from fnet.jaxpr._enter import inline
from fnet.jaxpr._equations import (
    BILINEAR,
    CONVOLUTION,
    DOT,
    explicit,
    new_dtype,
    permutation,
    pooling_window,
    product,
    random_bits,
    selects_largest,
)
from fnet.jaxpr._frames import Frame, Op, read
from fnet.jaxpr._primitives import POINTWISE, Description, Traits, describe, description, traits, unsupported
from fnet.jaxpr._replicated import may_differ
from fnet.jaxpr._rewrite import Evaluator, Interpreter, rewrite
from fnet.jaxpr._scopes import Scope, marks
from fnet.jaxpr._scopes import in_jaxpr as scopes_in
from fnet.jaxpr._scopes import of_operation as scope_of_operation
from fnet.jaxpr._static_leaves import boxed, is_array, results_boxed, statics, unboxed
from fnet.jaxpr._traced import Traced
from fnet.jaxpr._values import Value, bind, plain, restore
from fnet.jaxpr._wrapping import Compiled, wraps

__all__ = [
    "BILINEAR",
    "CALLS",
    "CONVOLUTION",
    "DOT",
    "INLINED",
    "POINTWISE",
    "Compiled",
    "Description",
    "Evaluator",
    "Frame",
    "Interpreter",
    "Op",
    "Scope",
    "Traced",
    "Traits",
    "Value",
    "batch_axes",
    "before",
    "bind",
    "bodies",
    "boxed",
    "call_name",
    "cost",
    "describe",
    "description",
    "donated",
    "equations",
    "explicit",
    "has_shardings",
    "inline",
    "is_array",
    "marks",
    "may_differ",
    "mutable",
    "nbytes",
    "new_dtype",
    "opened",
    "permutation",
    "plain",
    "pooling_window",
    "product",
    "random_bits",
    "read",
    "restore",
    "results_boxed",
    "rewrite",
    "scan",
    "scope_of_operation",
    "scopes_in",
    "selects_largest",
    "statics",
    "touched",
    "traits",
    "unboxed",
    "unsupported",
    "wraps",
]
