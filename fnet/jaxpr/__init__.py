"""Analysis and rewriting of jaxprs. All transforms and analyses of fnet use the package
`fnet.jaxpr`.

- `Scope`, `scopes_in`, `scope_of_operation`: the scope of an equation, or of an operation of a
  compiled program.
- `traits`, `describe`: properties of primitives.
- `options`, `product`, ...: the parameters of an equation, as a typed record.
- `bodies`, `equations`, `scan`: `bodies` returns the jaxprs inside an equation, `equations` yields
  the equations of a jaxpr at any depth, and `scan` returns the body and the options of a scan
  equation.
- `rewrite`, `Interpreter`: evaluation of a jaxpr in which a rule can replace equations.
- `ImplicitArray`, `Convolution`: a parameter that is computed from several arrays, such as a
  quantized one.
- `tag`: names a value of a program.
- `flatten`, `stable`: `flatten` rewrites a program so that it contains only a few primitives, and
  `stable` represents the rewritten program as plain data.
- `rolled`: repeated equations of a program, such as the blocks of a model, as scans.
- `read`: a jaxpr as a flat list of operations, in which calls are inlined.
- `mutable`, `pack`: flax.nnx modules among the arguments of a function, and trees with modules as
  trees of arrays.
- `cost`, `touched`, `nbytes`: `cost` returns the FLOPs of an equation, `touched` returns the bytes
  that an equation reads and writes, and `nbytes` returns the bytes of an array.
- `misdivided`: the operations that XLA divides wrongly over several devices, and what avoids each
  of them.
"""

from fnet.jaxpr import _misdivided as misdivided
from fnet.jaxpr import _mutable as mutable
from fnet.jaxpr._calls import (
    CALLS,
    INLINED,
    Scan,
    bodies,
    call_name,
    donated,
    equations,
    has_shardings,
    mapped_whole,
    opened,
    scan,
    solve_inputs,
    title,
    unrolled,
)
from fnet.jaxpr._costs import cost, nbytes, touched
from fnet.jaxpr._enter import ENTERED, inline, opaque, opaque_operations
from fnet.jaxpr._equations import (
    BILINEAR,
    CONVOLUTION,
    DOT,
    SHIFT,
    kept_bits,
    lookup_mode,
    new_dtype,
    operation,
    overwritten,
    pooling_window,
    product,
    random_bits,
    selects_largest,
    sorted_axis,
    value_name,
)
from fnet.jaxpr._explicit import automatic, explicit, split_over, typed, without_shardings
from fnet.jaxpr._flatten import flatten, inlined, opened_calls
from fnet.jaxpr._frames import Frame, Op, read
from fnet.jaxpr._implicit import (
    Convolution,
    ImplicitArray,
    implicit_dot,
    is_implicit,
    materialize,
    plain_dot,
)
from fnet.jaxpr._packed import Form, has_modules, holds_arrays, map_arrays, nodes, pack
from fnet.jaxpr._pieces import Piece, cut_out
from fnet.jaxpr._primitives import (
    POINTWISE,
    Description,
    Inside,
    Traits,
    builtin,
    describe,
    description,
    traits,
    unsupported,
)
from fnet.jaxpr._records import options, reduced_axes
from fnet.jaxpr._rewrite import Evaluator, Interpreter, rewrite
from fnet.jaxpr._rolled import rolled
from fnet.jaxpr._rows import ends_by_rows, while_of_rows
from fnet.jaxpr._scopes import Scope, marks
from fnet.jaxpr._scopes import in_jaxpr as scopes_in
from fnet.jaxpr._scopes import of_operation as scope_of_operation
from fnet.jaxpr._static_leaves import (
    Structure,
    alike_fields,
    array_leaves,
    boxed,
    is_array,
    results_boxed,
    static,
    statics,
    unboxed,
)
from fnet.jaxpr._tags import BLOCK, is_tag, tag, tagging
from fnet.jaxpr._traced import Traced
from fnet.jaxpr._trips import trips
from fnet.jaxpr._values import Value, bind, converted, plain, restore
from fnet.jaxpr._wrapping import Compiled, check_function, wraps

__all__ = [
    "BILINEAR",
    "BLOCK",
    "CALLS",
    "CONVOLUTION",
    "DOT",
    "ENTERED",
    "INLINED",
    "POINTWISE",
    "SHIFT",
    "Compiled",
    "Convolution",
    "Description",
    "Evaluator",
    "Form",
    "Frame",
    "ImplicitArray",
    "Inside",
    "Interpreter",
    "Op",
    "Piece",
    "Scan",
    "Scope",
    "Structure",
    "Traced",
    "Traits",
    "Value",
    "alike_fields",
    "array_leaves",
    "automatic",
    "bind",
    "bodies",
    "boxed",
    "builtin",
    "call_name",
    "check_function",
    "converted",
    "cost",
    "cut_out",
    "describe",
    "description",
    "donated",
    "ends_by_rows",
    "equations",
    "explicit",
    "flatten",
    "has_modules",
    "has_shardings",
    "holds_arrays",
    "implicit_dot",
    "inline",
    "inlined",
    "is_array",
    "is_implicit",
    "is_tag",
    "kept_bits",
    "lookup_mode",
    "map_arrays",
    "mapped_whole",
    "marks",
    "materialize",
    "misdivided",
    "mutable",
    "nbytes",
    "new_dtype",
    "nodes",
    "opaque",
    "opaque_operations",
    "opened",
    "opened_calls",
    "operation",
    "options",
    "overwritten",
    "pack",
    "plain",
    "plain_dot",
    "pooling_window",
    "product",
    "random_bits",
    "read",
    "reduced_axes",
    "restore",
    "results_boxed",
    "rewrite",
    "rolled",
    "scan",
    "scope_of_operation",
    "scopes_in",
    "selects_largest",
    "solve_inputs",
    "sorted_axis",
    "split_over",
    "static",
    "statics",
    "tag",
    "tagging",
    "title",
    "touched",
    "traits",
    "trips",
    "typed",
    "unboxed",
    "unrolled",
    "unsupported",
    "value_name",
    "while_of_rows",
    "without_shardings",
    "wraps",
]
