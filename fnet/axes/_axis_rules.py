"""Rules that state for each primitive which axes of its inputs and outputs must have equal sizes.

The rule of a primitive is a function `rule(frame, eqn, ins, atoms)` that returns the axes of the
outputs of the equation `eqn`. The list `ins` contains the axes of the equation's inputs. The
argument `frame` is a `Frame`, which maps each variable of the jaxpr to its axes, and `atoms` is an
`Atoms` object. Each axis of an array is represented as a tuple of integer ids, for example the ids
of the smaller axes that a reshape merged into the axis (see `Atoms`). If two axes must have equal
sizes, the rule of the primitive calls `Atoms.tie`. If the size of an axis cannot change, the rule
calls `Atoms.freeze`.
"""

from __future__ import annotations

import math

from fnet.jaxpr._equations import BILINEAR, product
from fnet.jaxpr._records import options


def _shape(v):
    return tuple(v.aval.shape)


def _same(frame, eqn, ins, atoms):
    return list(ins)


def _new(frame, eqn, ins, atoms):
    return [atoms.axes(_shape(v)) for v in eqn.outvars]


def _fixed(why):
    def rule(frame, eqn, ins, atoms):
        outs = _new(frame, eqn, ins, atoms)
        for axes in (*ins, *outs):
            atoms.freeze(why, *axes)
        return outs

    return rule


def _random_bits(frame, eqn, ins, atoms):
    outs = _new(frame, eqn, ins, atoms)
    atoms.freeze("an axis of random keys", *outs[0][: len(_shape(eqn.invars[0]))])
    return outs


def _bitcast(frame, eqn, ins, atoms):
    if _shape(eqn.outvars[0]) == _shape(eqn.invars[0]):
        return list(ins)
    return _fixed("converted to another number of values")(frame, eqn, ins, atoms)


def _broadcast(frame, eqn, ins, atoms):
    out = list(atoms.axes(_shape(eqn.outvars[0])))
    for i, axis in enumerate(options(eqn).broadcast_dimensions):
        if _shape(eqn.invars[0])[i] == _shape(eqn.outvars[0])[axis]:
            out[axis] = ins[0][i]
    return [tuple(out)]


def _transpose(frame, eqn, ins, atoms):
    return [tuple(ins[0][i] for i in options(eqn).permutation)]


def _squeeze(frame, eqn, ins, atoms):
    return [tuple(axis for i, axis in enumerate(ins[0]) if i not in options(eqn).dimensions)]


def _expand(frame, eqn, ins, atoms):
    out = list(ins[0])
    for i in sorted(options(eqn).dimensions):
        out.insert(i, ())
    return [tuple(out)]


def _divides(m, n) -> bool:
    return m != 0 and n % m == 0


def _reshape(frame, eqn, ins, atoms):
    """Splits and joins axes. In a reshape, a group of adjacent input axes corresponds to a group of
    adjacent output axes if the products of their sizes are equal."""
    before, after, axes = list(_shape(eqn.invars[0])), list(_shape(eqn.outvars[0])), ins[0]
    if order := options(eqn).dimensions:
        before, axes = [before[i] for i in order], [axes[i] for i in order]
    if 0 in before:
        return _fixed("reshaped without values")(frame, eqn, ins, atoms)
    out, i, j = [], 0, 0
    while i < len(before) or j < len(after):
        i0, j0 = i, j
        i, j = min(i + 1, len(before)), min(j + 1, len(after))
        while (m := math.prod(before[i0:i])) != (n := math.prod(after[j0:j])):
            if _divides(m, n) or (
                isinstance(m, int) and isinstance(n, int) and m < n
            ):  # other sizes are symbolic
                i += 1
            else:
                j += 1
        joined = tuple(atom for axis in axes[i0:i] for atom in axis)
        if j - j0 == 1:
            out.append(joined)
        else:
            out += (split := atoms.axes(after[j0:j]))
            atoms.tie(joined, tuple(atom for axis in split for atom in axis))
    return [tuple(out)]


def _reduced(over):
    """Returns the rule of a reduction: a function that determines the axes of the outputs.

    Args:
        over: the reason why the size of a reduced axis cannot change, such as "the maximum over it
            is taken", where "it" means the axis. For a sum, `over` is None: the size of a summed
            axis can change if all removed elements are zeros. The function `freeze_nonzero_sums`
            determines whether they are zeros.
    """

    def rule(frame, eqn, ins, atoms):
        reduced = options(eqn).axes
        for axes in ins[: len(eqn.outvars)] if over else ():
            atoms.freeze(over, *(axes[i] for i in reduced))
        out = tuple(axis for i, axis in enumerate(ins[0]) if i not in reduced)
        return [out] * len(eqn.outvars)

    return rule


def _along(parameter, why):
    """Returns the rule (a function that determines the output axes) of a shape-preserving operation
    along one or several axes, such as a cumulative sum. `parameter` is the name of the equation
    parameter that contains the axes of the operation, such as "axis". The text `why` states why the
    sizes of the operation's axes cannot change, for example "accumulated" for a cumulative sum."""

    def rule(frame, eqn, ins, atoms):
        where = getattr(options(eqn), parameter)
        for i in where if isinstance(where, (tuple, list)) else (where,):
            atoms.freeze(why, *(axes[i] for axes in ins))
        for other in ins[1:]:
            atoms.tie_all(ins[0], other)
        return [ins[0]] * len(eqn.outvars)

    return rule


def _multiply(frame, eqn, ins, atoms):
    found, (lhs, rhs) = product(eqn), ins[:2]
    if found.op.name != "dot_general":
        return _convolve(frame, eqn, lhs, rhs, found, atoms)
    contract, batch = found.dimensions
    for a, b in (*zip(*contract), *zip(*batch)):
        atoms.tie(lhs[a], rhs[b])
    own = [
        [axis for i, axis in enumerate(axes) if i not in (*contract[side], *batch[side])]
        for side, axes in enumerate((lhs, rhs))
    ]
    return [(*(lhs[i] for i in batch[0]), *own[0], *own[1])]


def _convolve(frame, eqn, lhs, rhs, found, atoms):
    spec, (groups, batch_groups) = found.dimensions, found.groups
    out = list(atoms.axes(_shape(eqn.outvars[0])))
    for axes, order, why in (
        (lhs, spec.lhs_spec, "space"),
        (rhs, spec.rhs_spec, "the window of a convolution"),
        (out, spec.out_spec, "space"),
    ):
        atoms.freeze(why, *(axes[i] for i in order[2:]))
    if batch_groups > 1:
        atoms.freeze("a convolution with groups of examples", *lhs, *rhs, *out)
        return [tuple(out)]
    features = _shape(eqn.outvars[0])[spec.out_spec[1]]
    group, within = atoms.axes((groups, features // groups))
    frame.groups[id(eqn)] = group
    atoms.tie(lhs[spec.lhs_spec[0]], out[spec.out_spec[0]])
    atoms.tie(lhs[spec.lhs_spec[1]], (*group, *rhs[spec.rhs_spec[1]]))
    atoms.tie(rhs[spec.rhs_spec[0]], (*group, *within))
    out[spec.out_spec[1]] = (*group, *within)
    return [tuple(out)]


def _window(frame, eqn, ins, atoms):
    window, outs = options(eqn), []
    for v, axes in zip(eqn.outvars, ins):
        out = atoms.axes(_shape(v))
        for i, (a, b) in enumerate(zip(axes, out)):
            if (
                window.window_dimensions[i],
                window.window_strides[i],
                *window.padding[i],
            ) == (1, 1, 0, 0):
                atoms.tie(a, b)
            else:
                atoms.freeze("space", a, b)
        outs.append(out)
    return outs


def _blocks(atoms, axis, block, size, why):
    """Splits an axis into axes of sizes `size // block` and `block`, as a reshape does, and returns
    the second axis.

    The function also records that the size of the first axis (the number of blocks) cannot change,
    for the reason `why`.
    """
    parts = atoms.axes((size // block, block))
    atoms.tie(axis, (*parts[0], *parts[1]))
    atoms.freeze(why, parts[0])
    return parts[1]


def _slice(frame, eqn, ins, atoms):
    piece, out = options(eqn), []
    strides = piece.strides or (1,) * len(ins[0])
    for i, axis in enumerate(ins[0]):
        n, m, start = (
            _shape(eqn.invars[0])[i],
            _shape(eqn.outvars[0])[i],
            piece.start_indices[i],
        )
        if m == n:
            out.append(axis)
        elif m and strides[i] == 1 and n % m == 0 and start % m == 0:
            out.append(_blocks(atoms, axis, m, n, "sliced into parts"))
        else:
            out.append(atoms.axes((m,))[0])
            atoms.freeze("sliced", axis, out[-1])
    return [tuple(out)]


def _split(frame, eqn, ins, atoms):
    at, sizes = options(eqn)
    n = _shape(eqn.invars[0])[at]
    if len(set(sizes)) == 1 and sizes[0]:
        block = _blocks(atoms, ins[0][at], sizes[0], n, "split into parts")
        return [(*ins[0][:at], block, *ins[0][at + 1 :])] * len(sizes)
    pieces = atoms.axes(sizes)
    atoms.freeze("split into unequal parts", ins[0][at], *pieces)
    return [(*ins[0][:at], piece, *ins[0][at + 1 :]) for piece in pieces]


def _concatenate(frame, eqn, ins, atoms):
    at = options(eqn).dimension
    sizes = [_shape(v)[at] for v in eqn.invars]
    for other in ins[1:]:
        atoms.tie_all((*ins[0][:at], *ins[0][at + 1 :]), (*other[:at], *other[at + 1 :]))
    count = atoms.axes((len(ins),))[0]
    atoms.freeze("concatenated", count)
    if len(set(sizes)) == 1:
        for other in ins[1:]:
            atoms.tie(ins[0][at], other[at])
        axis = (*count, *ins[0][at])
    else:
        axis = atoms.axes((sum(sizes),))[0]
        atoms.freeze("concatenated with an axis of another size", axis, *(axes[at] for axes in ins))
    return [(*ins[0][:at], axis, *ins[0][at + 1 :])]


def _stack(frame, eqn, ins, atoms):
    for other in ins[1:]:
        atoms.tie_all(ins[0], other)
    at, count = options(eqn).axis, atoms.axes((len(ins),))[0]
    atoms.freeze("stacked", count)
    return [(*ins[0][:at], count, *ins[0][at:])]


def _unstack(frame, eqn, ins, atoms):
    at = options(eqn).axis
    atoms.freeze("unstacked", ins[0][at])
    return [(*ins[0][:at], *ins[0][at + 1 :])] * len(eqn.outvars)


def _tile(frame, eqn, ins, atoms):
    return [tuple((*count, *axis) for count, axis in zip(atoms.axes(options(eqn).reps), ins[0]))]


def _resized(eqn, axes, atoms, changed, why):
    """Returns the tuple of atoms (see `Atoms`) for each output axis of a pad or dynamic_slice.

    `changed(i)` states whether the operation pads or slices axis i. If the operation pads or slices
    an axis, the function calls `Atoms.freeze` to record that the traced size of this axis is fixed,
    and why.
    """
    out = list(atoms.axes(_shape(eqn.outvars[0])))
    for i, axis in enumerate(axes):
        if changed(i):
            atoms.freeze(why, axis, out[i])
        else:
            out[i] = axis
    return [tuple(out)]


def _pad(frame, eqn, ins, atoms):
    return _resized(
        eqn, ins[0], atoms, lambda i: options(eqn).padding_config[i] != (0, 0, 0), "padded"
    )


def _gather(frame, eqn, ins, atoms):
    numbers, sizes = options(eqn).dimension_numbers, options(eqn).slice_sizes
    out, rank = list(atoms.axes(_shape(eqn.outvars[0]))), len(_shape(eqn.outvars[0]))
    rows = [i for i in range(rank) if i not in numbers.offset_dims]
    atoms.tie_all([out[i] for i in rows], ins[1][:-1])
    atoms.freeze("indices", ins[1][-1])
    kept = [
        i
        for i in range(len(ins[0]))
        if i not in (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    ]
    for i, axis in enumerate(ins[0]):
        whole = (
            i in kept and sizes[i] == _shape(eqn.invars[0])[i] and i not in numbers.start_index_map
        )
        if whole:
            out[numbers.offset_dims[kept.index(i)]] = axis
        else:
            found = [out[numbers.offset_dims[kept.index(i)]]] if i in kept else []
            atoms.freeze("looked up by index", axis, *found)
    return [tuple(out)]


def _scatter(frame, eqn, ins, atoms):
    numbers, (operand, indices, updates) = options(eqn).dimension_numbers, ins
    window = [
        i
        for i in range(len(operand))
        if i not in (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    ]
    for i, axis in enumerate(operand):
        at = numbers.update_window_dims[window.index(i)] if i in window else None
        if (
            at is not None
            and i not in numbers.scatter_dims_to_operand_dims
            and _shape(eqn.invars[2])[at] == _shape(eqn.invars[0])[i]
        ):
            atoms.tie(axis, updates[at])
        else:
            changed = [axis] if at is None else [axis, updates[at]]
            atoms.freeze("updated by index", *changed)
    rows = [axis for i, axis in enumerate(updates) if i not in numbers.update_window_dims]
    atoms.tie_all(rows, indices[:-1])
    atoms.freeze("indices", indices[-1])
    return [operand]


def _dynamic_slice(frame, eqn, ins, atoms):
    before, after = _shape(eqn.invars[0]), _shape(eqn.outvars[0])
    return _resized(
        eqn, ins[0], atoms, lambda i: before[i] != after[i], "sliced at a computed position"
    )


def _dynamic_update_slice(frame, eqn, ins, atoms):
    for i, (a, b) in enumerate(zip(ins[0], ins[1])):
        if _shape(eqn.invars[0])[i] == _shape(eqn.invars[1])[i]:
            atoms.tie(a, b)
        else:
            atoms.freeze("updated at a computed position", a, b)
    return [ins[0]]


RULES = {
    **dict.fromkeys(
        ("name", "optimization_barrier", "pvary", "pbroadcast", "device_put", "copy_p", "site"),
        _same,
    ),
    **dict.fromkeys(("iota", "empty"), _new),
    "random_bits": _random_bits,
    **{
        f"random_{name}": _fixed("an axis of random keys")
        for name in ("seed", "wrap", "unwrap", "fold_in")
    },
    **dict.fromkeys(BILINEAR, _multiply),
    **dict.fromkeys(("reduce_sum",), _reduced(None)),
    **{
        f"reduce_{name}": _reduced(f"the {what} over it is taken")
        for name, what in (
            ("max", "maximum"),
            ("min", "minimum"),
            ("prod", "product"),
            ("and", "conjunction"),
            ("or", "disjunction"),
        )
    },
    **{
        f"arg{name}": _reduced(f"the position of the {name}imum is taken")
        for name in ("max", "min")
    },
    **{
        f"cum{name}": _along("axis", "accumulated")
        for name in ("sum", "prod", "max", "min", "logsumexp")
    },
    **{f"reduce_window{name}": _window for name in ("_sum", "_max", "_min")},
    "bitcast_convert_type": _bitcast,
    "sort": _along("dimension", "sorted"),
    "rev": _along("dimensions", "reversed"),
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "expand_dims": _expand,
    "reshape": _reshape,
    "slice": _slice,
    "split": _split,
    "concatenate": _concatenate,
    "stack": _stack,
    "unstack": _unstack,
    "tile": _tile,
    "pad": _pad,
    "gather": _gather,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    **{f"scatter{name}": _scatter for name in ("", "-add", "-mul", "-min", "-max")},
}
