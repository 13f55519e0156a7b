"""use_implicit_arrays: runs a function with quantized, low-rank or masked parameters."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable

import jax
from jax.tree_util import keystr

from fnet._util._text_table import aligned
from fnet.jaxpr import Traced, array_leaves, is_implicit, mutable, pack, wraps
from fnet.transforms._implicit_rules import ImplicitInterpreter, Use


def use_implicit_arrays(f: Callable) -> Callable:
    """Makes f accept parameters that are implicit arrays, such as quantized or low-rank ones.

        params = compress.quantize(params, {".*": compress.Int8()})
        logits = ft.use_implicit_arrays(model)(params, x)
        print(ft.explain(ft.use_implicit_arrays(model), params, x))

    An implicit array is computed from several arrays, its components, such as 8-bit codes and
    scales. f is traced with plain arrays and knows nothing of them; matrix products, convolutions
    and lookups (indexing) then read the components directly. On the way there, an implicit array
    may be transposed, reshaped or cast, and passed through jit, scans, remat, branches and loops.
    Any other operation gets it as a plain array: it is materialized. `ft.explain` lists all
    operations that read an implicit array, and how.

    Args:
        f: any function: a model of any library, a loss, a gradient.

    Returns:
        A function with the arguments of f, any leaf of which may be an implicit array. It can be
        compiled, batched, and differentiated with respect to the floating-point leaves of implicit
        arrays, which `nn.partition` separates from the others. An implicit array that f returns
        unchanged comes back as it is. Without implicit arrays, f is called unchanged.

    >>> import jax.numpy as jnp
    >>> from fnet import compress
    >>> params = {"kernel": jnp.array([[1.0, 2.0], [3.0, 4.0]])}
    >>> quantized = compress.quantize(params, {"kernel": compress.Int8()})
    >>> use_implicit_arrays(lambda params, x: x @ params["kernel"])(quantized, jnp.ones((1, 2))).round(1).tolist()
    [[4.0, 6.0]]
    """

    @wraps(f, "use_implicit_arrays")
    def evaluated(*args, **kwargs):
        return _evaluate(ImplicitInterpreter(), f, args, kwargs)

    evaluated.implicit = f
    return evaluated


def _evaluate(interpreter, f, args, kwargs):
    packed, form = pack((args, kwargs))
    paths, structure = jax.tree_util.tree_flatten_with_path(packed, is_leaf=is_implicit)
    implicit, leaves = {}, []  # by the identity of their placeholders
    for path, leaf in paths:
        if is_implicit(leaf):
            placeholder = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
            implicit[id(placeholder)] = (
                placeholder,
                leaf,
                keystr(path[2:], simple=True, separator="/") or "argument",
            )
            leaf = placeholder
        leaves.append(leaf)
    if not implicit:
        return f(*args, **kwargs)
    _, _, modules = mutable.extract((args, kwargs))
    given = jax.tree.unflatten(structure, leaves)
    args, kwargs = given if form is None else form.unpack(given)
    traced = Traced(f, args, kwargs)
    found = [implicit.get(id(array), (None, array, "")) for array in traced.arrays]
    outputs = interpreter(
        traced.closed, [array for _, array, _ in found], [name for *_, name in found]
    )
    return traced.result(outputs, modules)


@dataclasses.dataclass(frozen=True)
class Uses:
    """The uses of implicit arrays in a function, as `ft.explain` reports them. `str()` returns a
    table.

    Attributes:
        uses: for each equation, one `Use` for each implicit array that it reads.
    """

    uses: tuple[Use, ...]

    @property
    def materialized(self) -> tuple[Use, ...]:
        return tuple(use for use in self.uses if use.materialized)

    def __str__(self):
        if not self.uses:
            return "no implicit array is used"
        counts = collections.Counter(self.uses)
        table = [("array", "scope", "use")] + [
            (
                use.leaf,
                use.scope or "(no scope)",
                f"{count} {use.primitive or 'result'}: "
                + (f"materialized: {use.materialized}" if use.materialized else "in its own form"),
            )
            for use, count in counts.items()
        ]
        title = f"{len(self.uses)} uses of implicit arrays, {len(self.materialized)} materialized"
        return "\n".join([title, "", *aligned(table, left=range(3))])


def uses(f: Callable, args: tuple, kwargs: dict) -> Uses:
    """Returns the operations in `f(*args, **kwargs)` that read implicit arrays, by tracing f."""
    interpreter = ImplicitInterpreter()
    packed, form = pack((args, kwargs))
    arrays, rebuild = array_leaves(packed)

    def run(arrays):
        given = rebuild(arrays)
        args, kwargs = given if form is None else form.unpack(given)
        _evaluate(interpreter, f, args, kwargs)

    jax.eval_shape(run, arrays)
    return Uses(tuple(interpreter.uses.values()))
