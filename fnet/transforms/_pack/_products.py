"""Products of packed values, and attention."""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fnet import _jax, jaxpr
from fnet.transforms._bucket._padded import NoRule
from fnet.transforms._pack._moves import resolved
from fnet.transforms._pack._rules import Call, rule
from fnet.transforms._pack._values import ROW, TEXT, Packed, Time, masked, per_place


@dataclasses.dataclass
class _Operand:
    """An operand of a product, with a label for each axis of its array."""

    x: Any
    roles: list
    labels: list

    def masked(self, gone: set, rows: Any) -> Any:
        """The array, with zeros for what does not exist along the axes that are summed."""
        over = [k for k, label in enumerate(self.labels) if label in gone]
        over = [k for k in over if self.roles[k] == TEXT or isinstance(self.roles[k], Time)]
        flat = Packed(self.x, tuple((role,) for role in self.roles))
        return masked(flat, over, 0, rows) if over else self.x


@rule("dot_general")
def _dot(call: Call) -> list:
    (contracted, batch), rows = call.options.dimension_numbers, call.rows
    values = call.values if sum(v.pending for v in call.values) < 2 else call.settled()
    left, right = values
    pairs = [(i, j) for i, j in (*zip(*contracted), *zip(*batch))]
    a, b = _labelled(left, right, pairs)
    gone = {a.labels[k] for i in contracted[0] for k in left.axes_of(i)}
    mine = [i for i in range(len(left.groups)) if i not in (*contracted[0], *batch[0])]
    its = [j for j in range(len(right.groups)) if j not in (*contracted[1], *batch[1])]
    out = [[a.labels[k] for k in left.axes_of(i)] for i in (*batch[0], *mine)]
    out += [[b.labels[k] for k in right.axes_of(j)] for j in its]
    lead = [x.labels[0] for x, value in ((a, left), (b, right)) if value.lead is not None]
    lead = [label for label in lead if label not in gone and all(label not in g for g in out)]
    _share_places(a, b, rows)
    return [_product(call, a, b, gone, out, lead[:1], left.pending or right.pending)]


def _labelled(left: Packed, right: Packed, pairs: Sequence) -> tuple[_Operand, _Operand]:
    """Labels the axes of both arrays; paired axes have the same label, and axes of the texts to
    which both values belong."""
    a = _Operand(left.x, list(left.roles), [("left", k) for k in range(len(left.roles))])
    b = _Operand(right.x, list(right.roles), [("right", k) for k in range(len(right.roles))])
    of_text = {TEXT: "n", ROW: "n"}
    for i, j in pairs:
        ours, theirs = left.axes_of(i), right.axes_of(j)
        if len(ours) != len(theirs) or any(
            of_text.get(a.roles[k], a.roles[k]) != of_text.get(b.roles[m], b.roles[m])
            for k, m in zip(ours, theirs)
        ):
            raise NoRule("its axes are merged in different ways")
        for k, m in zip(ours, theirs):
            b.labels[m] = a.labels[k]
    if left.lead is not None or right.lead is not None:
        first = [next((k for k, r in enumerate(o.roles) if r in of_text), None) for o in (a, b)]
        if None not in first and b.labels[first[1]] not in a.labels:
            if a.labels[first[0]] in b.labels:
                raise NoRule("its operands belong to different texts")
            b.labels[first[1]] = a.labels[first[0]]
    return a, b


def _share_places(a: _Operand, b: _Operand, rows: Any) -> None:
    """Gives a value of the texts the places of the other operand's tokens."""
    for text, token in ((a, b), (b, a)):
        if ROW in text.roles or ROW not in token.roles:
            continue
        row = token.labels[token.roles.index(ROW)]
        if row not in text.labels:
            continue  # it belongs to other texts, or to none
        at = text.labels.index(row)
        time = next(k for k, role in enumerate(token.roles) if isinstance(role, Time))
        groups = [(role,) for role in text.roles]
        groups[at] = ("this",)
        flat = Packed(jnp.moveaxis(text.x, at, 0), (), TEXT)
        y = per_place(_first_text(flat, text.roles, at), token.roles[time], rows).x
        text.x = jnp.moveaxis(y, (0, 1), (at, at + 1))
        text.roles[at : at + 1] = [ROW, token.roles[time]]
        text.labels[at : at + 1] = [row, token.labels[time]]
    both = a.roles.count(ROW) and b.roles.count(ROW)
    if both and a.labels[a.roles.index(ROW)] != b.labels[b.roles.index(ROW)]:
        raise NoRule("it combines the tokens of all pairs of texts")


def _first_text(flat: Packed, roles: list, at: int) -> Packed:
    rest = [role for k, role in enumerate(roles) if k != at]
    return Packed(flat.x, tuple((role,) for role in rest), TEXT)


def _product(
    call: Call, a: _Operand, b: _Operand, gone: set, out: list, lead: list, pending: bool
) -> Packed:
    rows = call.rows
    role = dict(zip(a.labels, a.roles)) | dict(zip(b.labels, b.roles))
    times = [label for label, each in role.items() if isinstance(each, Time)]
    kept = [label for label in times if label not in gone]
    row = next((label for label, each in role.items() if each == ROW), None)
    gone = set(gone)
    if row is not None and not kept and pending:
        gone.add(row)
        lead, pending = [], False
    elif row is not None and row in gone and kept:
        gone.discard(row)
        lead, pending = [row], True
    by_text = row is not None and not kept and row not in gone
    _say(call, role, gone, by_text)
    x, y = a.masked(gone, rows), b.masked(gone, rows)
    flat = [label for group in out for label in group]
    if not by_text:
        z = _einsum(call, (x, a.labels), (y, b.labels), [*lead, *flat])
        groups = tuple(tuple(role[label] for label in group) for group in out)
        return Packed(z, groups, role[lead[0]] if lead else None, pending)
    time = next(label for label in times if label in gone)
    rest = [label for label in (*lead, *flat) if label != row]
    z = _einsum(call, (x, a.labels), (y, b.labels), [row, time, *rest])
    layout = rows.layout(role[time].size)
    z = z.reshape(-1, *z.shape[2:])
    z = jax.ops.segment_sum(z, layout.text.reshape(-1), rows.texts, mode="drop")
    where = [*lead, *flat].index(row)
    role[row] = TEXT
    groups = tuple(tuple(role[label] for label in group) for group in out)
    return Packed(jnp.moveaxis(z, 0, where), groups, TEXT if lead else None)


def _say(call: Call, role: dict, gone: set, by_text: bool) -> None:
    summed = {TEXT if role[g] in (ROW, TEXT) else Time for g in gone
              if not isinstance(role[g], int)}  # fmt: skip
    if by_text:
        call.note("summed within each text")
    elif summed == {Time}:
        call.note("other texts are masked before the product")
    elif summed:
        call.note("what does not exist is masked before the product")


def _einsum(call: Call, left: tuple, right: tuple, out: list) -> Any:
    (x, mine), (y, its) = left, right
    letters = dict(zip(dict.fromkeys((*mine, *its)), string.ascii_letters))
    spelled = ["".join(letters[label] for label in labels) for labels in (mine, its, out)]
    options = call.options
    return jnp.einsum(
        f"{spelled[0]},{spelled[1]}->{spelled[2]}",
        x,
        y,
        precision=options.precision,
        preferred_element_type=options.preferred_element_type,
    ).astype(call.eqn.outvars[0].aval.dtype)


@rule("attention", "attention_backward")
def _attention(call: Call) -> list:
    """fnet's own attention skips what belongs to other texts."""
    own = jaxpr.description(call.eqn.primitive)
    form = call.options.form
    found = _with_segments(call, form)
    if found is None:
        closed = jaxpr.flatten(_jax.close(own.plain(call.eqn)))
        return call.evaluate(closed, call.values, call.rows)
    arrays, form, groups = found
    call.note("given the segments, so that no query attends to another text")
    outputs = call.bind(arrays, form=form)
    return [Packed(y, each) for y, each in zip(outputs, groups)]


def _with_segments(call: Call, form: Any) -> tuple | None:
    """Returns the operands with the segments, the form that says so, and the axes of the results;
    None if the attention is not that of a text to itself."""
    values = [resolved(value, call.rows) for value in call.values]
    query, key, value, *rest = values
    groups = query.groups
    if len(groups) != 4 or groups[0] != (ROW,) or not isinstance(groups[1][0], Time):
        return None
    if any(v.groups[:2] != groups[:2] for v in (key, value)) or "segments" in form.given:
        return None
    where = dict(zip(form.given, rest))
    after = rest[len(where) :]
    if "starts" in where or ("lengths" in where and not where["lengths"].lengths):
        return None
    where.pop("lengths", None)
    given = {}
    if "mask" in where:
        mask = _mask_of(where["mask"], groups)
        if mask is None:
            return None
        given["mask"] = mask
    layout = call.rows.layout(groups[1][0].size)
    names = layout.segments if layout.plain else layout.text + 1
    given["segments"] = jnp.where(layout.valid, names, 0).astype(jnp.int32)
    statistics = (groups[0], groups[2], groups[1])
    expected = [groups, statistics, statistics, groups]
    if any(v.groups != each or v.lead for v, each in zip(after, expected)):
        return None
    results = [groups, statistics, statistics]
    if after:
        results = [groups, key.groups, value.groups]
    arrays = [query.x, key.x, value.x, *given.values(), *(v.x for v in after)]
    return arrays, dataclasses.replace(form, given=tuple(given)), results


def _mask_of(mask: Packed, groups: tuple) -> Any:
    """Returns a mask [rows or 1, heads or 1, length or 1, length or 1], or None."""
    roles = tuple(group[0] for group in mask.groups)
    if any(len(group) != 1 for group in mask.groups) or TEXT in mask.roles:
        return None
    time = groups[1][0]
    if any(isinstance(r, Time) and r != time for r in roles):
        return None
    if mask.lead is None:
        return mask.x
    return jnp.squeeze(mask.x, 1) if roles[0] == 1 else None
