"""A whole recurrent layer as one operation, whose derivatives keep what a kernel needs.

There are three primitives. `recurrence` computes a layer's outputs and its carry,
`recurrence_tangent` their tangents, and `recurrence_gradient`, the transpose of the second, the
cotangents of the layer's inputs and parameters. Each contains its program (`call_jaxpr`), a scan of
JAX's own operations, so every transform and analysis sees a call of that program, which it enters
as it enters `jax.jit`. A rule of `tune` recognizes the primitive by its name and its `Form`, and may
compute the same with a kernel: it needs to know no equation of the scan.

The gradient of the recurrent kernel is one product after the backward scan. JAX's derivative of the
forward scan would read and write the whole gradient in each iteration, and keep twice as many arrays.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad, batching, mlir

from fnet import _jax, jaxpr
from fnet._jax import Primitive
from fnet.layers._explicit import like, resharded
from fnet.layers._linear import affine, align, linear, wide

# The arrays of one time step, all [batch, features]. "projected" are the products of the inputs with
# the kernel, "recurrent" those of the hidden state with the recurrent kernel, one for each gate.


class Cell(NamedTuple):
    """The formula of a recurrent layer.

    Attributes:
        name: "lstm" or "gru".
        gates: the number of gates.
        states: the number of arrays in the carry, of which the first is the hidden state.
        step: `step(carry, projected, recurrent)` returns the new carry, and what `tangent` needs to
            know of the step beside the old carry, its `kept` arrays.
        sums: `sums(projected, recurrent)` returns sums whose tangents determine those of the step.
        tangent: `tangent(carry, kept, carry_tangents, sums_tangents)` returns the tangents of the
            new carry, and is linear in the last two.
    """

    name: str
    gates: int
    states: int
    step: Callable
    sums: Callable
    tangent: Callable


def _lstm(carry: tuple, projected: list, recurrent: list) -> tuple:
    _, cell = carry
    i, f, g, o = _added(projected, recurrent)
    i, f, g, o = jax.nn.sigmoid(i), jax.nn.sigmoid(f), jnp.tanh(g), jax.nn.sigmoid(o)
    cell = f * cell + i * g
    return (o * jnp.tanh(cell), cell), (i, f, g, o)


def _added(projected: list, recurrent: list) -> list:
    return [px + ph for px, ph in zip(projected, recurrent)]


def _lstm_tangent(carry: tuple, kept: tuple, carry_tangents: tuple, sums: list) -> tuple:
    (_, cell), (_, cell_tangent), (i, f, g, o) = carry, carry_tangents, kept
    of_i, of_f, of_g, of_o = sums
    squashed = jnp.tanh(f * cell + i * g)
    cell_tangent = (
        f * cell_tangent
        + cell * f * (1 - f) * of_f
        + g * i * (1 - i) * of_i
        + i * (1 - g * g) * of_g
    )
    hidden = squashed * o * (1 - o) * of_o + o * (1 - squashed * squashed) * cell_tangent
    return hidden, cell_tangent


def _gru(carry: tuple, projected: list, recurrent: list) -> tuple:
    (hidden,), (rx, zx, nx), (rh, zh, nh) = carry, projected, recurrent
    r, z = jax.nn.sigmoid(rx + rh), jax.nn.sigmoid(zx + zh)
    n = jnp.tanh(nx + r * nh)
    return ((1 - z) * n + z * hidden,), (r, z, n, nh)


def _gru_sums(projected: list, recurrent: list) -> list:
    (rx, zx, nx), (rh, zh, nh) = projected, recurrent
    return [rx + rh, zx + zh, nx, nh]


def _gru_tangent(carry: tuple, kept: tuple, carry_tangents: tuple, sums: list) -> tuple:
    (hidden,), (hidden_tangent,), (r, z, n, nh) = carry, carry_tangents, kept
    of_r, of_z, of_nx, of_nh = sums
    of_n = (1 - n * n) * (of_nx + nh * r * (1 - r) * of_r + r * of_nh)
    return ((1 - z) * of_n + (hidden - n) * z * (1 - z) * of_z + z * hidden_tangent,)


LSTM_CELL = Cell("lstm", 4, 2, _lstm, _added, _lstm_tangent)
GRU_CELL = Cell("gru", 3, 1, _gru, _gru_sums, _gru_tangent)


class Form(NamedTuple):
    """The options of a recurrence.

    Attributes:
        cell: the `Cell`.
        given: the names of its operands, in order: "x" [batch, time, features_in], "kernel",
            "recurrent_kernel", if given "bias" and "recurrent_bias", the arrays of the carry
            "state0" and so on, and if given "valid" and "begins" (booleans [time, batch, 1]).
        reverse: whether it begins at the last time step.
        unroll: the number of time steps in one iteration of the scan.
    """

    cell: Cell
    given: tuple[str, ...]
    reverse: bool
    unroll: int

    def named(self, operands: Sequence) -> dict[str, Any]:
        return dict(zip(self.given, operands))

    @property
    def states(self) -> tuple[str, ...]:
        return tuple(f"state{i}" for i in range(self.cell.states))


def recurrence(
    cell: Cell,
    arrays: dict,
    x: Any,
    carry: tuple,
    valid: Any,
    *,
    begins: Any = None,
    reverse: bool,
    unroll: int,
) -> tuple[Any, tuple]:
    """Returns the outputs [batch, time, features] and the last carry of a recurrent layer.

    Args:
        cell: the formula.
        arrays: the parameters: "kernel", "recurrent_kernel", and maybe "bias" and "recurrent_bias".
        x: [batch, time, features_in].
        carry: arrays [batch, features] of at least float32.
        valid: booleans [time, batch, 1], or None for all time steps.
        begins: booleans [time, batch, 1], True where the carry is set to 0 before the step, or
            None. With it, the layer is no primitive, but a scan that JAX differentiates.
        reverse, unroll: as in `Form`.
    """
    operands = {"x": x, **arrays}
    operands |= {f"state{i}": resharded(state, like(x, 0)) for i, state in enumerate(carry)}
    if valid is not None:
        operands["valid"] = valid
    if begins is not None:
        operands["begins"] = begins
    form = Form(cell, tuple(operands), reverse, unroll)
    # Inside shard_map, the carry must vary over the same mesh axes as the results of a step.
    arrays = _jax.vary_alike(*operands.values())
    if begins is not None:
        y, *after = _forward(*arrays, form=form, keeps=False)
    else:
        y, *after = _bind(recurrence_p, _forward, arrays, form=form, keeps=False)
    return y, tuple(after)


recurrence_p = Primitive("recurrence")
"""Operands: `form.given`. Results: the outputs, and the arrays of the last carry. With `keeps`, then
stacks over time of what the derivatives need: the carry before each step, and the kept arrays of
each step (see `Cell`), all [time, batch, features]."""

tangent_p = Primitive("recurrence_tangent")
"""Operands: those of `recurrence`, what it keeps, and the tangents of those operands for which
`moving` is True. Results: the tangents of the outputs and of the arrays of the last carry."""

gradient_p = Primitive("recurrence_gradient")
"""Operands: those of `recurrence`, what it keeps, and the cotangents of those of its results for
which `known` is True. Results: the cotangents of the operands for which `moving` is True."""


def _forward(*operands: Any, form: Form, keeps: bool) -> list:
    cell, given = form.cell, form.named(operands)
    x, valid = _time_first(given)
    carry = tuple(given[name] for name in form.states)
    projected = _projected(cell, given, x, given)

    def step(carry: tuple, inputs: tuple) -> tuple:
        projected, valid, begins = inputs
        if begins is not None:
            carry = _where(begins, tuple(map(jnp.zeros_like, carry)), carry)
        # The kernel is cast within the step, so that its gradient is summed over time in the
        # kernel's dtype.
        recurrent = _recurrent(cell, given, carry[0].astype(x.dtype), given["recurrent_kernel"])
        after, kept = cell.step(carry, [wide(gate) for gate in projected], recurrent)
        output = after[0].astype(x.dtype)
        if valid is not None:
            after = _where(valid, after, carry)
            output = jnp.where(valid, output, 0)
        return after, (output, *carry, *kept) if keeps else (output,)

    carry, (y, *kept) = _scan(form, step, carry, (projected, valid, given.get("begins")))
    return [y.swapaxes(0, 1), *carry, *kept]  # [batch, time, features]


def _tangent(*operands: Any, form: Form, moving: tuple[bool, ...]) -> list:
    cell, count = form.cell, len(form.given)
    given = form.named(operands[:count])
    kept, tangents = operands[count : len(operands) - sum(moving)], operands[-sum(moving) :]
    tangent = dict(zip(itertools.compress(form.given, moving), tangents))
    x, valid = _time_first(given)
    sums = _sums_tangents(cell, given, tangent, x, valid, kept[0])
    start = tuple(tangent[name] if name in tangent else _zeros(given[name]) for name in form.states)
    step = lambda carry, inputs: _tangent_step(cell, given, x.dtype, carry, *inputs)
    carry, y = _scan(form, step, start, (sums, kept, valid))
    return [y.swapaxes(0, 1), *carry]


def _tangent_step(
    cell: Cell, given: dict, dtype: Any, carry: tuple, sums: Any, kept: tuple, valid: Any
) -> tuple:
    """Returns the tangents of the new carry and of the output of one time step. `sums` may be None,
    which stands for zeros."""
    before, kept = kept[: cell.states], kept[cell.states :]
    hidden = linear(carry[0].astype(dtype), given["recurrent_kernel"])
    recurrent = _apart(cell, wide(hidden))
    moved = cell.sums([jnp.zeros_like(gate) for gate in recurrent], recurrent)
    after = cell.tangent(before, kept, carry, moved if sums is None else _added(sums, moved))
    output = after[0].astype(dtype)
    if valid is not None:
        after = _where(valid, after, carry)
        output = jnp.where(valid, output, 0)
    return after, output


def _sums_tangents(
    cell: Cell, given: dict, tangent: dict, x: Any, valid: Any, hidden: Any
) -> list | None:
    """Returns the tangents of `cell.sums` for all time steps, without the part that is due to the
    tangent of the hidden state, or None if they are 0."""
    terms = []
    none = [jnp.zeros((), hidden.dtype)] * cell.gates
    if "x" in tangent:
        moved = tangent["x"].swapaxes(0, 1)
        moved = moved if valid is None else jnp.where(valid, moved, 0)
        terms.append((_projected(cell, {"kernel": given["kernel"]}, moved, {}), none))
    if "kernel" in tangent:
        terms.append((_projected(cell, {"kernel": tangent["kernel"]}, x, {}), none))
    if "recurrent_kernel" in tangent:
        # In float32, because XLA:CPU sums up 16-bit products in 16 bits.
        moved = linear(wide(hidden.astype(x.dtype)), tangent["recurrent_kernel"])
        terms.append((none, _apart(cell, moved)))
    if "bias" in tangent:
        gates = [_over_time(bias, x, hidden) for bias in _apart(cell, tangent["bias"])]
        terms.append((gates, none))
    if "recurrent_bias" in tangent:
        moved = _over_time(tangent["recurrent_bias"], hidden, hidden)
        terms.append((none, [*none[:-1], moved]))
    each = [cell.sums([wide(gate) for gate in px], ph) for px, ph in terms]
    total = [functools.reduce(jnp.add, gates) for gates in zip(*each)]
    return [jnp.broadcast_to(gate, hidden.shape) for gate in total] or None


def _over_time(bias: Any, x: Any, hidden: Any) -> Any:
    """Returns a bias, rounded as where it is added, for all time steps."""
    return jnp.broadcast_to(align(bias, x), hidden.shape)


def _gradient(
    *operands: Any, form: Form, moving: tuple[bool, ...], known: tuple[bool, ...]
) -> list:
    cell, count = form.cell, len(form.given)
    first = len(operands) - sum(known)
    given, kept = form.named(operands[:count]), operands[count:first]
    cotangents = iter(operands[first:])
    of_y, *of_carry = (next(cotangents) if each else None for each in known)
    x, valid = _time_first(given)
    of_y = _zeros(kept[0], x.dtype) if of_y is None else of_y.swapaxes(0, 1)
    start = tuple(
        _zeros(given[name]) if of_state is None else of_state
        for name, of_state in zip(form.states, of_carry)
    )

    def step(of_after: tuple, inputs: tuple) -> tuple:
        of_output, kept, valid = inputs

        def tangents(carry: tuple, sums: list) -> tuple:
            return _tangent_step(cell, given, x.dtype, carry, sums, kept, valid)

        sums = [jax.typeof(each) for each in kept[cell.states :]]
        transposed = jax.linear_transpose(tangents, tuple(map(jax.typeof, of_after)), sums)
        return transposed((of_after, of_output))

    backward = form._replace(reverse=not form.reverse)
    of_carry, of_sums = _scan(backward, step, start, (of_y, kept, valid))
    cotangent = dict(zip(form.states, of_carry))
    names = [name for name in itertools.compress(form.given, moving) if name not in form.states]

    def sums(tangent: dict) -> list | None:
        return _sums_tangents(cell, given, tangent, x, valid, kept[0])

    if names:
        types = {name: jax.typeof(given[name]) for name in names}
        cotangent |= jax.linear_transpose(sums, types)(of_sums)[0]
    return [cotangent[name] for name in itertools.compress(form.given, moving)]


def _zeros(x: Any, dtype: Any = None) -> Any:
    return _jax.zeros(jax.typeof(x), dtype=dtype)


def _time_first(given: dict) -> tuple:
    """Returns the inputs [time, batch, features_in], 0 where they are padding, and `valid`."""
    x, valid = given["x"].swapaxes(0, 1), given.get("valid")
    if valid is not None:
        x = jnp.where(valid, x, 0)  # otherwise NaN in padding reaches the kernel's gradient
    return x, valid


def _apart(cell: Cell, x: Any) -> list:
    return jnp.split(x, cell.gates, axis=-1)


def _projected(cell: Cell, arrays: dict, x: Any, biases: dict) -> list:
    """Returns one array for each gate. If they were slices of one array, XLA:CPU would not
    vectorize the elementwise operations of a step."""
    each = [_apart(cell, arrays["kernel"])]
    if "bias" in biases:
        each.append(_apart(cell, biases["bias"]))
    return [(linear if len(gate) == 1 else affine)(x, *gate) for gate in zip(*each)]


def _recurrent(cell: Cell, given: dict, hidden: Any, kernel: Any) -> list:
    gates = _apart(cell, wide(linear(hidden, kernel)))
    if "recurrent_bias" in given:
        gates[-1] = gates[-1] + align(given["recurrent_bias"], gates[-1])
    return gates


def _where(valid: Any, new: tuple, old: tuple) -> tuple:
    return tuple(jnp.where(valid, a, b) for a, b in zip(new, old))


def _scan(form: Form, step: Callable, carry: tuple, inputs: tuple) -> tuple:
    return lax.scan(step, carry, inputs, reverse=form.reverse, unroll=form.unroll)


# The rules of the primitives.


def _bind(primitive: Any, f: Callable, operands: Any, **params: Any) -> list:
    operands = list(operands)
    program = _program(f, tuple(map(jax.typeof, operands)), tuple(params.items()))
    return primitive.bind(*operands, **params, call_jaxpr=program)


@functools.lru_cache(1024)
def _program(f: Callable, types: tuple, params: tuple) -> Any:
    return _jax.close(_jax.make_jaxpr(functools.partial(f, **dict(params)))(*types))


def _evaluated(*operands: Any, call_jaxpr: Any, **_: Any) -> list:
    return _jax.evaluate(call_jaxpr, [], list(operands))


def _batch(args: tuple, axes: tuple, *, call_jaxpr: Any, **_: Any) -> tuple:
    run = functools.partial(_evaluated, call_jaxpr=call_jaxpr)
    results = jax.vmap(run, in_axes=axes)(*args)
    return results, [0] * len(results)


def _derivative(primals: tuple, tangents: tuple, *, call_jaxpr: Any, **_: Any) -> tuple:
    """The JVP of a primitive whose program is differentiated as JAX does it."""
    moving = [i for i, x in enumerate(tangents) if not isinstance(x, ad.Zero)]

    def run(*moved: Any) -> list:
        args = list(primals)
        for i, x in zip(moving, moved):
            args[i] = x
        return _evaluated(*args, call_jaxpr=call_jaxpr)

    return jax.jvp(run, [primals[i] for i in moving], [tangents[i] for i in moving])


def _forward_jvp(primals: tuple, tangents: tuple, *, form: Form, keeps: bool, **params: Any) -> Any:
    if keeps:
        return _derivative(primals, tangents, **params)
    results = _bind(recurrence_p, _forward, primals, form=form, keeps=True)
    count = 1 + form.cell.states
    moving = tuple(not isinstance(x, ad.Zero) for x in tangents)
    moved = itertools.compress(tangents, moving)
    operands = (*primals, *results[count:], *moved)
    return results[:count], _bind(tangent_p, _tangent, operands, form=form, moving=moving)


def _tangent_transpose(
    cotangents: Any, *operands: Any, form: Form, moving: tuple[bool, ...], **_: Any
) -> list:
    known = tuple(not isinstance(x, ad.Zero) for x in cotangents)
    constants = operands[: len(operands) - sum(moving)]
    if not any(known):
        return [None] * len(operands)
    arrays = (*constants, *itertools.compress(cotangents, known))
    gradients = _bind(gradient_p, _gradient, arrays, form=form, moving=moving, known=known)
    return [*[None] * len(constants), *gradients]


def _define(primitive: Any, jvp: Callable) -> None:
    primitive.multiple_results = True
    run = jax.jit(
        lambda *args, params: primitive.bind(*args, **dict(params)), static_argnames="params"
    )
    primitive.def_impl(lambda *args, **params: run(*args, params=tuple(params.items())))
    primitive.def_abstract_eval(lambda *_, call_jaxpr, **__: list(call_jaxpr.out_avals))
    mlir.register_lowering(primitive, mlir.lower_fun(_evaluated, multiple_results=True))
    ad.primitive_jvps[primitive] = jvp
    batching.primitive_batchers[primitive] = _batch
    jaxpr.describe(primitive, jaxpr.Description(jaxpr.Traits("unknown")))


_define(recurrence_p, _forward_jvp)
_define(tangent_p, _derivative)
_define(gradient_p, _derivative)
ad.primitive_transposes[tangent_p] = _tangent_transpose
