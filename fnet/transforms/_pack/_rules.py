"""What each primitive does to packed values: elementwise operations, shapes and reductions.

A rule gets the packed inputs of an equation and returns its packed outputs. Whatever reads more
than one position keeps to those of one text.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fnet import jaxpr
from fnet.jaxpr import POINTWISE
from fnet.transforms._bucket import _sizes
from fnet.transforms._bucket._padded import NoRule
from fnet.transforms._bucket._rules import _groups as pairs_of_groups
from fnet.transforms._pack._moves import (
    resolved,
)
from fnet.transforms._pack._values import (
    ROW,
    TEXT,
    Packed,
    Time,
    along,
    arranged,
    groups_of,
    lead_of,
    merged,
    per_place,
    separated,
    size_of,
    spread,
    whole,
)

RULES: dict[str, Callable] = {}
"""{primitive: rule(call) -> outputs}"""


class Call:
    """An equation with packed inputs.

    Attributes:
        eqn: the equation, with open sizes.
        values: its packed inputs.
        rows: the `Rows` of the call.
        evaluate: evaluates a closed jaxpr on packed values: evaluate(closed, values, rows).
    """

    def __init__(self, eqn: Any, values: list, rows: Any, note: Callable, evaluate: Callable):
        self.eqn, self.values, self.rows = eqn, values, rows
        self._note, self.evaluate = note, evaluate

    @functools.cached_property
    def options(self) -> Any:
        return jaxpr.options(self.eqn)

    def shape(self, i: int) -> tuple:
        return tuple(self.eqn.invars[i].aval.shape)

    def result(self, i: int = 0) -> tuple:
        return tuple(self.eqn.outvars[i].aval.shape)

    def note(self, text: str) -> None:
        self._note(self.eqn, text)

    def bind(self, arrays: Sequence, **changes: Any) -> list:
        """Evaluates the primitive on arrays, with some parameters changed."""
        return [value.x for value in jaxpr.bind(self.eqn, list(arrays), **changes)]

    def batched(self, values: Sequence[Packed], groups: Sequence, **changes: Any) -> list[Packed]:
        """Evaluates the primitive on each text or row of the values as on any other axis. `groups`
        are those of the outputs."""
        leads = {value.lead for value in values if value.lead is not None}
        if len(leads) > 1:
            raise NoRule("it combines tokens with texts")
        lead = leads.pop() if leads else None
        if lead and any({ROW, TEXT} & set(v.roles[v.lead is not None :]) for v in values):
            raise NoRule("its operands belong to different texts")
        arrays = [merged(value) for value in values]
        run = lambda *arrays: self.bind(arrays, **changes)
        if lead:
            run = jax.vmap(run, [None if v.lead is None else 0 for v in values])
        pending = any(value.pending for value in values)
        found = [separated(y, each, lead, self.rows) for y, each in zip(run(*arrays), groups)]
        return [dataclasses.replace(value, pending=pending) for value in found]

    def settled(self) -> list[Packed]:
        """The inputs, without sums over texts that are still to be taken."""
        return [resolved(value, self.rows) for value in self.values]


def rule(*names: str) -> Callable:
    def register(f: Callable) -> Callable:
        RULES.update(dict.fromkeys(names, f))
        return f

    return register


_LINEAR = ("neg", "convert_element_type", "copy", "real", "imag", "reduce_precision")


@rule(*POINTWISE, "threefry2x32", "random_fold_in", "random_clone", "erf_inv", "random_seed")
def _pointwise(call: Call) -> list:
    values, pending = _pendings(call)
    values = [_stretched(v, call.shape(i), call) for i, v in enumerate(values)]
    full = [v for v in values if v.groups and v.seed is None]
    if not full:
        return _of_seeds(call, values, pending)
    target = _widest(full)
    values = [_as(v, target, call.rows) for v in values]
    if {v.lead for v in values} != {target.lead}:  # a number for each text meets a fixed array
        target = next(v for v in values if v.lead is not None)
        values = [_as(v, target, call.rows) for v in values]
    found = [target.like(y, pending=pending) for y in call.bind([v.x for v in values])]
    if call.eqn.primitive.name == "convert_element_type" and values[0] is call.values[0]:
        found = [dataclasses.replace(found[0], lengths=call.values[0].lengths)]
    return found


def _stretched(value: Packed, shape: tuple, call: Call) -> Packed:
    """Returns an operand whose axes of size 1 are as long as those of the result."""
    result = call.result()
    if not shape or list(map(str, shape)) == list(map(str, result)):
        return value
    fresh = list(groups_of(result, call.rows))
    if value.seed is not None and not value.pending:
        return spread(value.seed, fresh, lead_of(fresh), call.rows)
    kept = {i: i for i, size in enumerate(shape) if str(size) == str(result[i])}
    return _broadcasted(value, kept, tuple(range(len(shape))), fresh, call.rows)


def _pendings(call: Call) -> tuple[list, bool]:
    """Returns the inputs, and whether the result is a sum over texts that is still to be taken:
    linear operations commute with it."""
    name, values = call.eqn.primitive.name, call.values
    count = sum(value.pending for value in values)
    if not count:
        return values, False
    zero = [v.seed is not None and _is_zero(v.seed) for v in values]
    linear = name in _LINEAR or (name == "mul" and count == 1)
    linear |= name == "div" and count == 1 and values[0].pending
    linear |= name in ("add", "add_any", "sub") and count == 2
    if name == "select_n":
        linear |= not values[0].pending and all(
            v.pending or empty for v, empty in zip(values[1:], zero[1:])
        )
    return (values, True) if linear else (call.settled(), False)


def _is_zero(seed: Packed) -> bool:
    try:
        return not bool(seed.x.any())
    except jax.errors.ConcretizationTypeError:
        return False


def _of_seeds(call: Call, values: list, pending: bool) -> list:
    """An elementwise operation on numbers."""
    numbers = [v.seed or v for v in values]
    lead = next((v.lead for v in numbers if v.lead is not None), None)
    if lead == TEXT:
        arrays = [v.x if v.lead else jnp.broadcast_to(v.x, (call.rows.texts,)) for v in numbers]
    else:
        arrays = [v.x for v in numbers]
    outputs = [Packed(y, (), lead, pending) for y in call.bind(arrays)]
    shaped = next((v for v in values if v.groups), None)
    if shaped is None:
        return outputs
    return [spread(y, shaped.groups, shaped.lead, call.rows) for y in outputs]


def _widest(values: list) -> Packed:
    def width(v: Packed) -> tuple:
        return v.tokens, v.lead is not None, len(v.roles)

    return max(values, key=width)


def _as(value: Packed, target: Packed, rows: Any) -> Packed:
    """Returns a value with the axes of another one of the same shape."""
    if value.seed is not None and (value.groups != target.groups or value.lead != target.lead):
        value = value.seed
    if not value.groups and (target.groups or value.lead != target.lead):
        return spread(value, target.groups, target.lead, rows)
    if value.groups == target.groups and value.lead == target.lead:
        return value
    if value.groups == target.groups and value.lead is None:
        size = size_of(target.lead, rows)
        return dataclasses.replace(
            value, x=jnp.broadcast_to(value.x, (size, *value.x.shape)), lead=target.lead
        )
    if value.groups == target.groups and target.lead is None:
        return value
    raise NoRule("its operands belong to different texts, or have merged axes in another order")


@rule("random_wrap", "random_unwrap", "bitcast_convert_type")
def _trailing(call: Call) -> list:
    (value,) = call.settled()
    groups = value.groups[: len(call.result())]
    more = call.result()[len(groups) :]
    return call.batched([value], [(*groups, *((int(n),) for n in more))])


@rule("dim_as_value")
def _dimension(call: Call) -> list:
    dtype, size, rows = call.eqn.outvars[0].aval.dtype, call.options.dim, call.rows
    if rows.letter in _sizes.letters(str(size)):
        return [whole(jnp.asarray(rows.total(size), dtype))]
    value = jnp.broadcast_to(jnp.asarray(rows.value(size), dtype), (rows.texts,))
    return [Packed(value, (), TEXT)]


@rule("broadcast_in_dim")
def _broadcast(call: Call) -> list:
    value, rows, shape = call.values[0], call.rows, call.result()
    dims = tuple(call.options.broadcast_dimensions)
    fresh = list(groups_of(shape, rows))
    if not value.roles or (value.seed is not None and not value.pending):
        seed = value.seed or value
        return [spread(seed, fresh, lead_of(fresh), rows)]
    kept = {out: i for i, out in enumerate(dims) if str(call.shape(0)[i]) == str(shape[out])}
    return [_broadcasted(value, kept, dims, fresh, rows)]


def _broadcasted(value: Packed, kept: dict, dims: tuple, fresh: list, rows: Any) -> Packed:
    """Returns a value with new axes. `kept` is {axis of the result: axis of the value}."""
    new_times = [r for out, g in enumerate(fresh) if out not in kept for r in g
                 if isinstance(r, Time)]  # fmt: skip
    # Labels of the axes of the array: (axis of the value, number), or "lead".
    labels: list[Any] = ["lead"] if value.lead is not None else []
    for i, group in enumerate(value.groups):
        labels += [(i, j) for j in range(len(group))]
    x, roles = value.x, list(value.roles)
    gone = [k for i, out in enumerate(dims) if out not in kept for k in value.axes_of(i)]
    x = jnp.squeeze(x, gone)
    labels = [each for k, each in enumerate(labels) if k not in gone]
    roles = [each for k, each in enumerate(roles) if k not in gone]
    time_label = None
    if TEXT in roles and ROW not in roles and new_times:
        at = roles.index(TEXT)
        whole_ = Packed(x, tuple((r,) for r in roles))
        x = per_place(whole_, new_times[0], rows).x
        time_label = "time"
        roles[at : at + 1] = [ROW, new_times[0]]
        labels[at : at + 1] = [labels[at], time_label]
    role_of = dict(zip(labels, roles))
    free_lead = value.lead is not None
    groups: list[tuple] = []
    want: list[Any] = []
    sizes: list[int] = []
    row_taken = ROW in roles
    for out, group in enumerate(fresh):
        each: list[Any] = []
        for j, role in enumerate(value.groups[kept[out]] if out in kept else group):
            label: Any = ("new", out, j)
            if out in kept:
                label = (kept[out], j)
                role = role_of[label]
            elif role in (ROW, TEXT) and free_lead:
                label, free_lead = "lead", False
                role = role_of["lead"]
            elif role == ROW and row_taken:
                role = TEXT
            elif isinstance(role, Time) and time_label is not None:
                label, time_label = time_label, None
            row_taken |= role == ROW
            each.append(role)
            want.append(label)
            sizes.append(size_of(role, rows))
        groups.append(tuple(each))
    lead = None
    if free_lead:
        lead = role_of["lead"]
        want.insert(0, "lead")
        sizes.insert(0, size_of(lead, rows))
    elif lead_of(groups) == ROW:
        lead = ROW
        want.insert(0, "rows")
        sizes.insert(0, size_of(ROW, rows))
    if value.pending and lead is None:
        raise NoRule("a sum over the texts becomes one value for each text again")
    y = arranged(x, labels, want, sizes)
    return Packed(y, tuple(groups), lead, value.pending)


@rule("iota")
def _iota(call: Call) -> list:
    rows, shape, dtype = call.rows, call.result(), call.eqn.outvars[0].aval.dtype
    groups = groups_of(shape, rows)
    lead = lead_of(groups)
    roles = Packed(None, groups, lead).roles
    at = Packed(None, groups, lead).axes_of(call.options.dimension)
    if len(at) != 1:
        raise NoRule("it numbers all tokens of the batch")
    role, padded = roles[at[0]], tuple(size_of(each, rows) for each in roles)
    if isinstance(role, Time):
        call.note(f"positions count from the beginning of each text, along {role.size}")
        place = along(rows.layout(role.size).position, [roles.index(ROW), at[0]], len(roles))
        x = jnp.broadcast_to(place, padded).astype(dtype)
    elif role == TEXT:
        x = jnp.broadcast_to(along(rows.numbers, at, len(roles)), padded).astype(dtype)
    elif role == ROW:
        time = next(i for i, r in enumerate(roles) if isinstance(r, Time))
        text = rows.layout(roles[time].size).text
        x = jnp.broadcast_to(along(text, [at[0], time], len(roles)), padded).astype(dtype)
    else:
        x = lax.broadcasted_iota(dtype, padded, at[0])
    return [Packed(x, groups, lead)]


@rule("transpose")
def _transpose(call: Call) -> list:
    value, order = call.values[0], call.options.permutation
    groups = tuple(value.groups[i] for i in order)
    axes = [0] * (value.lead is not None) + [k for i in order for k in value.axes_of(i)]
    return [dataclasses.replace(value, x=lax.transpose(value.x, axes), groups=groups)]


@rule("reshape")
def _reshape(call: Call) -> list:
    value, rows = call.values[0], call.rows
    if call.options.dimensions is not None:
        raise NoRule("it permutes axes")
    before, after = call.shape(0), call.result()
    if value.seed is not None and not value.pending:
        fresh = groups_of(after, rows)
        return [spread(value.seed, fresh, lead_of(fresh), rows)]
    groups: list[tuple] = []
    sizes = list(value.x.shape[: value.lead is not None])
    i = 0
    for old, new in pairs_of_groups(before, after):
        roles = [r for group in value.groups[i : i + len(old)] for r in group]
        i += len(old)
        for each in _regrouped(roles, new, rows):
            groups.append(each)
            sizes += [size_of(role, rows) for role in each]
    return [dataclasses.replace(value, x=value.x.reshape(sizes), groups=tuple(groups))]


def _regrouped(roles: list, new: list, rows: Any) -> list[tuple]:
    """Distributes the axes of an array over the axes of a value of other sizes."""
    roles = [r for r in roles if r != 1]
    found = []
    for size in new:
        group: list[Any] = []
        need = _sample(size, rows)
        while need != 1:
            role = roles.pop(0) if roles else 0
            many = _sample(role, rows)
            if isinstance(role, int) and role and many % need == 0 and many != need:
                roles.insert(0, many // need)  # the major part belongs here
                role = many = need
            if not many or need % many:
                raise NoRule(f"{size} cannot be cut from the axes of its operand")
            need //= many
            if isinstance(role, int) and group and isinstance(group[-1], int):
                role *= group.pop()
            group.append(role)
        found.append(tuple(group) or (1,))
    if roles:
        raise NoRule("its sizes do not match")
    return found


def _sample(role: Any, rows: Any) -> int:
    """Returns the size of an axis for some large primes as sizes of the letters."""
    at = {rows.letter: 1_000_003, rows.time: 10_007}
    if role in (ROW, TEXT):
        return at[rows.letter]
    return int(_sizes.value(str(role.size if isinstance(role, Time) else role), at))


def _kind(role: Any) -> Any:
    return role if isinstance(role, Time) else TEXT


@rule("random_bits")
def _random_bits(call: Call) -> list:
    (key,), rows, shape = call.values, call.rows, tuple(call.options.shape)
    if not key.is_global:
        raise NoRule("its key differs from text to text")
    lead_shape = call.result()[: len(call.result()) - len(shape)]
    groups = groups_of(shape, rows)
    lead = lead_of(groups)
    roles = Packed(None, groups, lead).roles
    call.note("numbers are drawn for the packed rows")
    (bits,) = call.bind([key.x], shape=tuple(size_of(role, rows) for role in roles))
    if lead_shape and lead:
        raise NoRule("several keys draw numbers for positions")
    return [Packed(bits, (*((int(n),) for n in lead_shape), *groups), lead)]


_MATRICES = {"tridiagonal_solve": 1, "lu_pivots_to_permutation": 1}


@rule("cholesky", "eigh", "eig", "svd", "qr", "geqrf", "householder_product", "lu", "fft",
      "triangular_solve", "tridiagonal_solve", "lu_pivots_to_permutation")  # fmt: skip
def _matrices(call: Call) -> list:
    """Only axes before those of the matrices are packed."""
    name, values = call.eqn.primitive.name, call.settled()
    own = len(call.options.fft_lengths) if name == "fft" else _MATRICES.get(name, 2)
    ndim = len(call.shape(0))
    batch = values[0].groups[: ndim - own]
    shapes = [call.shape(i) for i in range(len(values))]
    shapes += [call.result(i) for i in range(len(call.eqn.outvars))]
    if any(_sizes.is_open(n) for shape in shapes for n in shape[len(batch) :]):
        raise NoRule("it is computed over a whole axis of texts or positions")
    if any(value.groups[: len(batch)] != batch for value in values):
        raise NoRule("its operands belong to different texts")
    groups = [
        (*batch, *((int(n),) for n in call.result(i)[len(batch) :]))
        for i in range(len(call.eqn.outvars))
    ]
    return call.batched(values, groups)
