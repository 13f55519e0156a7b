"""Evaluation of a program whose inputs may be implicit arrays, such as quantized arrays (see
`ImplicitArray`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fnet import _jax
from fnet.jaxpr._calls import INLINED, bodies, donated, has_shardings, scan
from fnet.jaxpr._enter import inline
from fnet.jaxpr._implicit import Convolution, ImplicitArray, View, plain_dot
from fnet.jaxpr._records import options
from fnet.jaxpr._rewrite import Interpreter
from fnet.jaxpr._values import Value, bind, plain


@dataclasses.dataclass(frozen=True)
class Use:
    """A use of an implicit array by one equation.

    Attributes:
        leaf: the path of the array among the arguments.
        scope: the named scope of the equation.
        primitive: the primitive of the equation.
        materialized: the reason why the array was materialized (computed as a plain array) for the
            equation; "" if the equation used the array without materializing it.
    """

    leaf: str
    scope: str
    primitive: str
    materialized: str = ""


class ImplicitInterpreter(Interpreter):
    """Evaluates programs whose arguments may be implicit arrays, such as quantized ones.

    The `View` of an implicit array is what the program has cast, transposed or reshaped. Its
    `Value` has the path of the array in the arguments as its note.
    """

    def __init__(self):
        super().__init__()
        self.uses: dict[tuple, Use] = {}

    def __call__(self, closed: Any, arguments: list, names: list[str]) -> list:
        """Returns the outputs of a program: plain arrays, and the implicit arrays that it returns
        unchanged."""
        values = [
            Value(View.of(x), name) if isinstance(x, ImplicitArray) else Value(x)
            for x, name in zip(arguments, names)
        ]
        outputs = self.evaluate(closed.jaxpr, closed.consts, values)
        return [self._returned(y) for y in outputs]

    def equation(self, eqn, at, inputs, plan):
        if not any(_is_view(value) for value in inputs):
            return plain(eqn, inputs)
        name = eqn.primitive.name
        rule = _RULES.get(name)
        outputs = NotImplemented if rule is None else rule(self, eqn, at, inputs)
        if outputs is NotImplemented:
            reason = _REASONS.get(name, "no form for this operation")
            return plain(eqn, [self.materialized(eqn, at, value, reason) for value in inputs])
        return outputs

    def used(self, eqn, at, value, reason="") -> None:
        self.uses[id(eqn), value.note] = Use(value.note, at.path, eqn.primitive.name, reason)

    def materialized(self, eqn, at, value, reason) -> Value:
        if not _is_view(value):
            return value
        self.used(eqn, at, value, reason)
        return Value(value.x.materialize())

    def _returned(self, value):
        view = value.x
        if not _is_view(value):
            return view
        if view.whole and view.dtype == view.base.dtype:
            return view.base
        self.uses["returned", value.note] = Use(
            value.note, "", "", "the function returns it in another layout"
        )
        return view.materialize()

    def call(self, closed, at, values) -> tuple[Callable, list]:
        """Returns (f, leaves), where `leaves` is the list of the plain arrays in `values`.
        `f(*leaves)` evaluates the jaxpr `closed` on `values`, and returns a list of plain
        arrays."""
        leaves, structure = jax.tree.flatten([value.x for value in values])

        def flat(*leaves):
            inputs = [
                Value(x, value.note)
                for x, value in zip(jax.tree.unflatten(structure, leaves), values)
            ]
            outputs = self.evaluate(closed.jaxpr, closed.consts, inputs, at)
            return [y.x.materialize() if _is_view(y) else y.x for y in outputs]

        return flat, leaves


def _is_view(value) -> bool:
    return isinstance(value.x, View)


# Changes of layout and dtype.


def _cast(self, eqn, at, inputs):
    """Casts an implicit array to the dtype in which a product computes.

    A second cast, as in `w.astype(bfloat16).astype(float32)`, and casts to 8 bits are for rounding
    the values, so the array is materialized for them.
    """
    view, dtype = inputs[0].x, options(eqn).new_dtype
    if not jnp.issubdtype(dtype, jnp.floating):
        return NotImplemented
    rounds = jnp.finfo(dtype).bits < 16 or view.dtype not in (view.base.dtype, dtype)
    if rounds and not view.base.only_observes:
        return NotImplemented
    return [Value(view.astype(dtype), inputs[0].note)]


def _transpose(self, eqn, at, inputs):
    return [Value(inputs[0].x.transpose(options(eqn).permutation), inputs[0].note)]


def _reshape(self, eqn, at, inputs):
    view, shape = inputs[0].x, eqn.outvars[0].aval.shape
    lead = len(shape) - view.ndim + 1
    if (
        lead > 1 and view.ndim > 1 and shape[lead:] == view.shape[1:]
    ):  # axis 0 is split: a stack of stacks
        part = view.part(lambda a: a.reshape(*shape[:lead], *a.shape[1:]))
        if part is not None:
            return [Value(part, inputs[0].note)]
    view = view.reshape(shape)
    return NotImplemented if view is None else [Value(view, inputs[0].note)]


def _broadcast(self, eqn, at, inputs):
    """Evaluates a broadcast of an implicit array if it adds only axes of length 1."""
    view, shape = inputs[0].x, eqn.outvars[0].aval.shape
    if int(np.prod(shape)) != int(np.prod(view.shape)):
        return NotImplemented
    return [Value(view.reshape(shape), inputs[0].note)]


def _identity(self, eqn, at, inputs):
    return [Value(inputs[0].x, inputs[0].note)]


def _of_each_leaf(self, eqn, at, inputs):
    """Applies an operation that does not change values, such as `pvary`, to each leaf of an
    implicit array (for example to the codes and the scales of a quantized array)."""
    view = inputs[0].x
    base = jax.tree.map(lambda a: bind(eqn, [a])[0].x, view.base)
    return [Value(dataclasses.replace(view, base=base), inputs[0].note)]


def _slice(self, eqn, at, inputs):
    view = inputs[0].x
    start, limit, strides = options(eqn)
    if strides is not None or any(start[1:]) or tuple(limit[1:]) != view.shape[1:]:
        return NotImplemented
    part = view.part(lambda a: a[start[0] : limit[0]])
    return NotImplemented if part is None else [Value(part, inputs[0].note)]


def _dynamic_slice(self, eqn, at, inputs):
    view, first = inputs[0].x, inputs[1].x
    size, *sizes = options(eqn).slice_sizes
    if tuple(sizes) != view.shape[1:]:
        return NotImplemented

    def sliced(a):
        # Not by lax.dynamic_slice: it adds the length to negative starts, which the program has
        # already done. The other axes are whole, so JAX clamps any start to 0.
        return bind(eqn, [a, *[first] * a.ndim], slice_sizes=(size, *a.shape[1:]))[0].x

    part = view.part(sliced)
    return NotImplemented if part is None else [Value(part, inputs[0].note)]


# Operations that compute with a view.


def _dot_general(self, eqn, at, inputs):
    if all(map(_is_view, inputs)):
        return NotImplemented
    side = 0 if _is_view(inputs[0]) else 1
    view, x = inputs[side].x, inputs[1 - side].x
    (contracted, batch), precision, preferred = options(eqn)
    mine, other = contracted[side], contracted[1 - side]
    mine_batch, other_batch = batch[side], batch[1 - side]
    count = len(mine_batch)
    lead = view.transpose((*mine_batch, *(i for i in range(view.ndim) if i not in mine_batch)))
    moved = [i for i in range(view.ndim) if i not in mine_batch]
    axes = tuple(count + moved.index(i) for i in mine)
    free = [i for i in range(x.ndim) if i not in other and i not in other_batch]
    operand = x.transpose((*other_batch, *free, *other))
    y = lead.dot(operand, axes, count, plain_dot(precision, preferred))
    if y is NotImplemented:
        return y
    if (
        side == 0
    ):  # [*batch, *free of x, *free of the view] -> [*batch, *free of the view, *free of x]
        split = count + len(free)
        y = y.transpose((*range(count), *range(split, y.ndim), *range(count, split)))
    self.used(eqn, at, inputs[side])
    return [Value(y.astype(eqn.outvars[0].aval.dtype))]


def _convolution(self, eqn, at, inputs):
    x, kernel = inputs
    if _is_view(x) or not kernel.x.whole:
        return NotImplemented
    numbers, groups, batch_groups, *_ = options(eqn)
    if batch_groups != 1:
        return NotImplemented
    convolution = Convolution(
        lambda x, kernel: bind(eqn, [x, kernel])[0].x,
        numbers.lhs_spec[0],
        numbers.rhs_spec[0],
        numbers.out_spec[1],
        groups,
    )
    y = kernel.x.base.convolve(x.x, convolution)
    if y is NotImplemented:
        return y
    self.used(eqn, at, kernel)
    return [Value(y.astype(eqn.outvars[0].aval.dtype))]


def _gather(self, eqn, at, inputs):
    table, indices = inputs
    view = table.x
    numbers, sizes, fill, _ = options(eqn)
    if (
        _is_view(indices)
        or not _is_view(table)
        or not view.whole
        or numbers.collapsed_slice_dims != (0,)
        or numbers.start_index_map != (0,)
        or numbers.operand_batching_dims
        or tuple(sizes) != (1, *view.shape[1:])
        or not (fill is None or np.isnan(fill))
    ):
        return NotImplemented

    def take(a):
        exact = jnp.issubdtype(a.dtype, jnp.inexact)
        changes = {} if exact else {"mode": lax.GatherScatterMode.CLIP, "fill_value": None}
        return bind(eqn, [a, indices.x], slice_sizes=(1, *a.shape[1:]), **changes)[0].x

    y = view.base.lookup(take)
    if y is NotImplemented:
        return y
    self.used(eqn, at, table)
    return [Value(y.astype(eqn.outvars[0].aval.dtype))]


# Equations with bodies.


def _call(self, eqn, at, inputs):
    if has_shardings(eqn) or any(donated(eqn)):
        return NotImplemented
    return inline(self, eqn, at, inputs, (None,) * len(eqn.outvars))


def _inline(self, eqn, at, inputs):
    return inline(self, eqn, at, inputs, (None,) * len(eqn.outvars))


def _remat(self, eqn, at, inputs):
    flat, leaves = self.call(bodies(eqn)[0].closed, at, inputs)
    closed = _jax.make_jaxpr(flat)(*map(jax.typeof, leaves))
    return bind(eqn, [*closed.consts, *leaves], jaxpr=_jax.consts_as_inputs(closed))


def _scan(self, eqn, at, inputs):
    """Evaluates a scan. If possible, a scan over an implicit array, such as a quantized array,
    slices the leaves of the array instead of materializing the array (computing it as a plain
    array)."""
    parts = scan(eqn)
    consts, carry, slices = parts.split(inputs)
    carry = [self.materialized(eqn, at, value, "it is the carry of a scan") for value in carry]
    slices = [
        value
        if not _is_view(value) or value.x.part(lambda a: a) is not None
        else self.materialized(eqn, at, value, "a leaf lacks the axis of the scan")
        for value in slices
    ]
    sliced, structure = jax.tree.flatten(
        [value.x.base if _is_view(value) else value.x for value in slices]
    )

    def step(carried, leaves):
        values = [
            Value(View.of(x, value.x.dtype), value.note) if _is_view(value) else Value(x)
            for x, value in zip(jax.tree.unflatten(structure, leaves), slices)
        ]
        flat, leaves = self.call(parts.closed, at, [*consts, *map(Value, carried), *values])
        outputs = flat(*leaves)
        return outputs[: parts.carry], outputs[parts.carry :]

    carried, stacked = lax.scan(step, [value.x for value in carry], sliced, **parts.options)
    return [*map(Value, carried), *map(Value, stacked)]


def _while(self, eqn, at, inputs):
    """Evaluates a while loop.

    Constants of the body of a while loop may be implicit arrays, such as quantized arrays. All
    other inputs of the loop are materialized (computed as plain arrays).
    """
    tests, steps, body_jaxpr = options(eqn)
    reason = "it is the carry or in the condition of a while loop"
    test = [self.materialized(eqn, at, value, reason) for value in inputs[:tests]]
    init = [self.materialized(eqn, at, value, reason) for value in inputs[tests + steps :]]
    flat, leaves = self.call(body_jaxpr, at, [*inputs[tests : tests + steps], *init])
    body = _jax.make_jaxpr(flat)(*map(jax.typeof, leaves))
    constants = [*body.consts, *leaves[: len(leaves) - len(init)]]
    return bind(
        eqn,
        [*(value.x for value in test), *constants, *(value.x for value in init)],
        body_nconsts=len(constants),
        body_jaxpr=_jax.close(_jax.consts_as_inputs(body)),
    )


def _cond(self, eqn, at, inputs):
    index, *rest = inputs
    calls = [self.call(branch.closed, at, rest) for branch in bodies(eqn)]
    leaves = calls[0][1]
    return [Value(y) for y in lax.switch(index.x, [flat for flat, _ in calls], *leaves)]


_REASONS = {
    "shard_map": "shard_map takes plain arrays",
    "jit": "a jit with shardings or donation takes plain arrays",
    **dict.fromkeys(
        ("custom_jvp_call", "custom_vjp_call"), "a custom derivative takes plain arrays"
    ),
    "dot_general": "no form for a product over these axes",
    "conv_general_dilated": "no form for this convolution",
    "gather": "no form for this lookup",
    "convert_element_type": "the cast rounds the values",
    "reshape": "the reshape mixes its axes",
}
_RULES = {
    "convert_element_type": _cast,
    "transpose": _transpose,
    "reshape": _reshape,
    "squeeze": _reshape,
    "expand_dims": _reshape,
    "broadcast_in_dim": _broadcast,
    "copy": _identity,
    "copy_p": _identity,
    "name": _identity,
    **dict.fromkeys(("pvary", "pcast", "stop_gradient"), _of_each_leaf),
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "dot_general": _dot_general,
    "conv_general_dilated": _convolution,
    "gather": _gather,
    "jit": _call,
    "pjit": _call,
    **dict.fromkeys(INLINED - {"jit", "pjit"}, _inline),
    **dict.fromkeys(("remat2", "checkpoint"), _remat),
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}
