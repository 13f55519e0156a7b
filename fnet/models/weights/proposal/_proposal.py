"""`pretrained.names`: which layer of a PyTorch module is which of a model, and the rules for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fnet.layers._spec import leaves as spec_leaves
from fnet.models.weights import _key_map, _match
from fnet.models.weights._weight_names import Names, Rule, Spare, Tied, flat
from fnet.models.weights._weights import Weights
from fnet.models.weights.proposal import _align, _fold, _proof, _record, _run
from fnet.models.weights.proposal._distinct import distinct
from fnet.models.weights.proposal._layers import Unit, units
from fnet.models.weights.proposal._settle import Settled, settle
from fnet.models.weights.proposal._source import Group, Source

_FUSED = ("qkv", "in_proj", "c_attn", "query_key_value", "kv_proj")


@dataclasses.dataclass(frozen=True, eq=False)
class Proposal:
    """The rules that `pretrained.names` proposes. Printed, they are the lines for `NAMES`.

        params, state = pretrained.load(model, module, names=proposal)
        pretrained.save(model, params, state, "back.safetensors", names=proposal)

    >>> import numpy as np
    >>> arrays = {"fc.weight": np.ones((3, 8), "f"), "fc.bias": np.ones(3, "f")}
    >>> proposal = models.pretrained.names(arrays, nn.Sequential(head=nn.Dense(3)), jnp.ones((1, 8)))
    >>> proposal.lines
    ('pretrained.torch.dense("head", "fc")',)

    Attributes:
        names: the `Names` with all rules, yours included.
        lines: the proposed rules as text, one line for each.
        unmatched: the arrays of the model for which nothing fits: {path: shape}.
        unread: the arrays of the source that nothing reads: {key: shape}.
        unclear: pairs of layers of equal shape that only their order tells apart. Empty after a
            proof.
        proof: what `prove` returned, or None if there was no module or no input. A proof that
            failed has a `problem`.
        inputs: the inputs of the model that belong to the x of the module.
    """

    names: Names
    lines: tuple[str, ...]
    unmatched: Mapping[str, tuple]
    unread: Mapping[str, tuple]
    unclear: tuple[tuple[str, str], ...]
    proof: _proof.Proof | None
    inputs: tuple
    _model: Any
    _texts: Mapping[str, str]
    _yours: int = 0
    _spares: tuple[str, ...] = ()

    def __str__(self) -> str:
        yours = [f"*rules,  # yours, {self._yours}"] if self._yours else []
        lines = [*yours, *(f"{line}," for line in self.lines)]
        text = "\n".join(f"    {line}" for line in lines)
        end = '), metadata={"format": "pt"})}'
        notes = [
            *(f"no layer of the source fits {path!r} {s}" for path, s in self.unmatched.items()),
            *(f"nothing reads {key!r} {shape}" for key, shape in self.unread.items()),
        ]
        if self.unclear:
            pairs = ", ".join(f"{one!r} and {two!r}" for one, two in self.unclear[:6])
            more = f" and {len(self.unclear) - 6} more" if len(self.unclear) > 6 else ""
            notes.append(f"told apart by their order alone: {pairs}{more}. Prove it, or compare")
        if self._spares:
            keys = ", ".join(self._spares[:4]) + ", ..." * (len(self._spares) > 4)
            notes.append(f"written back as they are: {keys}")
        if self.proof is not None:
            notes.append(str(self.proof))
        comments = "".join(f"\n# {note}" for note in notes)
        return f'NAMES = {{"torch": pretrained.Names((\n{text}\n{end}{comments}'

    __repr__ = __str__

    def check(self) -> None:
        """Raises a `ValueError` if an array has no rule, or if the proof failed."""
        lost = [f"no layer of the source fits {path!r} {s}" for path, s in self.unmatched.items()]
        lost += [f"nothing reads {key!r} {shape}" for key, shape in self.unread.items()]
        if lost:
            rest = f"; and {len(lost) - 8} more" if len(lost) > 8 else ""
            raise ValueError(
                f"pretrained.names: the proposal is incomplete: {'; '.join(lost[:8])}{rest}. Pass "
                "lines for them: names(..., rules=(torch.dense(path, name),)), or "
                "Spare(key) for an array that the model does not need"
            )
        if self.proof is not None and not self.proof.equal:
            raise ValueError(
                f"pretrained.names: the proof failed. {self.proof}. To load it all the same, pass "
                "names=proposal.names"
            )

    def prove(
        self, module: Any, x: Any, *, x_fnet: Any = None, tolerance: float = 1e-5
    ) -> _proof.Proof:
        """Runs the module and the model with the module's arrays, and compares all their layers.

        Each layer is compared in the whole run, and alone on the input that PyTorch's layer got.
        Both programs run in eval mode. Wrong rules that fit in shape show here: transposed square
        kernels, gates in another order, exchanged norms or layers of equal shape. Arrays that could
        hide them, such as the equal norms of a new module, have other values meanwhile.

        Args:
            module: the torch.nn.Module.
            x: an input of the module, or a tuple of inputs: tensors or arrays, in its layout.
            x_fnet: the same in the layout of the model. Default: the channels of images move to the
                end if the first layer that reads them is a convolution, a norm of channels or a
                pooling; the batch comes before the time if a recurrent layer or an attention
                without batch_first is the first; other inputs are the same.
            tolerance: the largest difference that counts as equal, relative to the largest value
                of an output. Default 1e-5.

        Returns:
            The proof, whose text says how near the outputs are.

        Raises:
            ValueError: a layer or the output differs. The message names the first layer that does,
                its rule, both shapes and the difference.
        """
        kept = [rule.theirs for rule in self.names.flat() if isinstance(rule, Spare)]
        with distinct(module, kept):
            source = Source.of(module, copied=True)
            record = _record.record(module, x)
        inputs = _inputs(record, x, x_fnet)
        made = _proved(self._model, self.names, source, record, inputs, self._texts, tolerance)
        if not made.equal:
            raise ValueError(f"pretrained.names: {made}")
        return made


def names(
    source: Any,
    model: Any,
    x: Any = None,
    *,
    x_fnet: Any = None,
    rules: Sequence | Names = (),
    tolerance: float = 1e-5,
) -> Proposal:
    """Proposes the naming rules that bring the arrays of a PyTorch module into a model of fnet.

        proposal = pretrained.names(module, model, x)     # print it: the lines for NAMES, and the proof
        params, state = pretrained.load(model, module, names=proposal)
        pretrained.save(model, params, state, "back.safetensors", names=proposal)
        module.load_state_dict(safetensors.torch.load_file("back.safetensors"))

    For each layer of the model, `names` looks for the layers of the source whose arrays fit in
    shape, and aligns the two lists by their names and their order. With a module and an input, it
    records what each layer of PyTorch computes, exchanges layers until the model computes the same,
    and proves it (see `Proposal.prove`). Without, layers of equal shape are told apart by names and
    order alone, and those that could be exchanged are listed.

    Args:
        source: a torch.nn.Module, its state_dict, a dict of NumPy arrays, or a safetensors file.
        model: a layer of fnet, with the same layers. It needs no NAMES.
        x: an input of the module, or a tuple of inputs, in PyTorch's layout. Without a module, an
            input of the model. Default: `model.example()`, and no proof.
        x_fnet: the input of the model. Default: made from x, see `Proposal.prove`.
        rules: your own rules, such as `(torch.conv("stem", "conv1"),)`, which are not changed; the
            rest is proposed. With a complete set of rules, `names` only proves it.
        tolerance: the largest relative difference that counts as equal. Default 1e-5, for a module
            in float32; call `module.float()` first if it is not.

    Returns:
        The proposal. It does not raise if layers are left over or the proof fails; `load` does.

    Raises:
        TypeError: the source has no arrays, or the model has no `example` and there is no x.

    >>> import numpy as np
    >>> arrays = {"layers.0.weight": np.ones((16, 8), "f"), "layers.0.bias": np.ones(16, "f"),
    ...           "layers.2.weight": np.ones((3, 16), "f"), "layers.2.bias": np.ones(3, "f")}
    >>> model = nn.Sequential(fc=nn.Dense(16), act=jax.nn.relu, head=nn.Dense(3))
    >>> proposal = models.pretrained.names(arrays, model, jnp.ones((1, 8)))
    >>> print(proposal)
    NAMES = {"torch": pretrained.Names((
        pretrained.torch.dense("fc", "layers.0"),
        pretrained.torch.dense("head", "layers.2"),
    ), metadata={"format": "pt"})}
    >>> params, state = models.pretrained.load(model, arrays, names=proposal)
    >>> params["fc"]["kernel"].shape
    (8, 16)
    """
    given, record = Source.of(source), None
    yours = tuple(flat(rules.of(model).rules if isinstance(rules, Names) else tuple(rules)))
    _check_options(given.module)
    proved = given
    if given.module is not None and x is not None:
        with distinct(given.module, [r.theirs for r in yours if isinstance(r, Spare)]):
            proved = Source.of(given.module, copied=True)
            record = _record.record(given.module, x)
    inputs = _model_inputs(model, record, x, x_fnet)
    search = _Search(model, inputs, given, proved, record, yours)
    return search.proposal(tolerance)


def _check_options(module: Any) -> None:
    """Refuses layers of PyTorch that compute something for which fnet has no layer."""
    for name, layer in [] if module is None else module.named_modules():
        attention = "MultiheadAttention" in type(layer).__name__
        options = {
            "add_zero_attn=True": attention and getattr(layer, "add_zero_attn", False),
            "add_bias_kv=True": attention and getattr(layer, "bias_k", None) is not None,
            f"proj_size={getattr(layer, 'proj_size', 0)}": getattr(layer, "proj_size", 0),
        }
        for option, there in options.items():
            if there:
                raise ValueError(
                    f"pretrained.names: {name!r} is a {type(layer).__name__} with {option}, which "
                    "no layer of fnet has"
                )


class _Search:
    """What `names` knows: the model, the source, the arrays of the recorded run, which may be
    others, and the rules of the user."""

    def __init__(self, model, inputs, source, proved, record, yours):
        self.model, self.inputs, self.source, self.record = model, inputs, source, record
        self.proved = proved
        self.shapes = {key: array.shape for key, array in source.arrays.items()}
        spec = model.spec(*inputs)
        self.leaves = {"/".join(path): leaf for tree in spec for path, leaf in spec_leaves(tree)}
        self.yours = tuple(_with_arrays(rule, source) for rule in yours)
        entries = _key_map.key_map(
            Names(self.yours), "", self.leaves, "pretrained.names, rules=", whole=False
        )
        self.taken = {path for entry in entries.reads for path in entry.paths}
        self.read = {key for entry in (*entries.reads, *entries.beside) for key in entry.keys}
        self.groups = source.groups(self.read)

    def proposal(self, tolerance: float) -> Proposal:
        aligned = self._aligned()
        if self.record is not None:
            settled = settle(_Trial(self), aligned, tolerance, self.record.images())
        else:
            settled = Settled(aligned.pairs, dict(aligned.lines))
        placed = [(aligned.units[u], settled.lines[u, g]) for u, g in sorted(settled.pairs.items())]
        lines, lost = _fold.folded(placed, self.leaves)
        ties, spares = self._rest(lines)
        held = self._names(lines, ties, spares)
        gone = {unit.paths for unit in lost}
        matched = {path for unit, _ in placed if unit.paths not in gone for path in unit.leaves}
        unmatched = {
            path: spec.shape
            for path, spec in self.leaves.items()
            if path not in matched and path not in self.taken
        }
        read = _read(held, self.leaves)
        unread = {key: self.shapes[key] for key in self.source.unread(read)}
        texts = {path: str(line) for unit, line in placed for path in unit.paths}
        proof = None
        if self.record is not None and not unmatched:
            proof = _proved(
                self.model, held, self.proved, self.record, self.inputs, texts, tolerance
            )
        unclear = aligned.unclear() if proof is None or not proof.equal else []
        return Proposal(
            held,
            (*map(str, lines), *(text for text, _ in (*ties, *spares))),
            unmatched,
            unread,
            tuple((aligned.units[one].site, aligned.units[two].site) for one, two in unclear),
            proof,
            self.inputs,
            self.model,
            texts,
            len(self.yours),
            tuple(rule.theirs for _, rule in spares),
        )

    def _aligned(self) -> _align.Alignment:
        """Aligns the layers, with each attention in the form that fits the most arrays."""
        called = {} if self.record is None else self.record.order()
        best, before = None, None
        for form in ("whole", "fused", "separate"):
            found = units(self.model, self.inputs, form, self.taken)
            if found == before:
                continue
            before = found
            aligned = _align.align(found, self.groups, self.shapes, called)
            filled = sum(len(found[u].leaves) for u in aligned.pairs)
            names = " ".join(self.groups[g].name for g in aligned.pairs.values())
            rank = filled, form == "fused" and any(word in names for word in _FUSED)
            if best is None or rank > best[0]:
                best = rank, aligned
        return best[1]

    def _names(self, lines, ties, spares) -> Names:
        rules = (*self.yours, *(line.rules() for line in lines))
        rules += tuple(rule for _, rule in (*ties, *spares))
        return Names(rules, metadata={"format": "pt"}, inputs=_specs(self.inputs))

    def _rest(self, lines) -> tuple[list, list]:
        """(text, rule) of the second names of arrays, and of arrays that are no weights: integers,
        and buffers such as masks."""
        names = self._names(lines, (), ())
        entries = _key_map.key_map(names, "", self.leaves, "pretrained.names", whole=False)
        of_key = {key: entry for entry in entries.reads for key in entry.keys}
        read = {*of_key, *(key for entry in entries.beside for key in entry.keys)}
        ties, spares, buffers = [], [], self.source.buffers()
        for key in self.source.unread(read):
            first = self.source.tied.get(key)
            others = [
                other
                for other in (first, *(k for k, f in self.source.tied.items() if f == first))
                if other in of_key
            ]
            entry = of_key[others[0]] if others else None
            if entry is not None and len(entry.paths) == 1 and not entry.copies:
                rule = Tied(key, entry.paths[0], entry.rule.layout, write=True)
                if not entry.is_joined() and entry.rule.layout.name in ("same", "dense"):
                    layout = "" if entry.rule.layout.name == "same" else ", pretrained.DENSE"
                    text = f'pretrained.Tied("{key}", "{entry.paths[0]}"{layout}, write=True)'
                    ties.append((text, rule))
                    continue
            array = self.source.arrays[key]
            if key in buffers or not jax.dtypes.issubdtype(array.dtype, np.floating):
                spares.append((f'pretrained.Spare("{key}")', Spare(key, write=np.array(array))))
        return ties, spares


class _Trial:
    """A run of the model with the arrays that an alignment gives it."""

    def __init__(self, search: _Search):
        self._search = search
        yours = Names(search.yours)
        self._fixed = _pairs(search.model, yours, search.source, search.inputs)
        self._program: Any = None
        self._last: Any = None

    def __call__(
        self, aligned: _align.Alignment, pairs: Mapping, lines: Mapping
    ) -> list[_run.Compared] | None:
        """What is compared of each layer, in the order of the calls, and at the end the output; None
        if arrays are missing."""
        search = self._search
        placed = [(aligned.units[u], lines[u, g]) for u, g in sorted(pairs.items())]
        folded, lost = _fold.folded(placed, search.leaves)
        if lost:
            return None
        try:
            trees = _trees(search.model, search._names(folded, (), ()), search.proved)
        except ValueError:
            return None
        found = [(aligned.units[u], aligned.groups[g]) for u, g in pairs.items()]
        found = sorted([*found, *self._fixed], key=lambda pair: pair[0].order)
        if self._program is None:
            self._program = _run.Program(search.model, search.inputs, [u for u, _ in found])
        assert search.record is not None
        self._last = found, trees
        compared, output = _proof.compare(self._program, found, trees, search.record, own=False)
        fixed = {(unit.paths, unit.index) for unit, _ in self._fixed}
        return [
            *(
                dataclasses.replace(each, fixed=(each.unit.paths, each.unit.index) in fixed)
                for each in compared
            ),
            _run.Compared(*_OUTPUT, output),
        ]

    def own(self, each: _run.Compared) -> float | None:
        """How far a layer of the last run is from PyTorch's on the input that the latter got."""
        found, trees = self._last
        layers = _proof.recurrent_layers(found).get(each.group.name, 0)
        record = self._search.record
        return _run.own_difference(each.unit, each.group, *trees, record, layers)


_OUTPUT = Unit(("the output",), "output", {}, order=(10**9,)), Group("", "output", (), 0)


def _proved(model, names, source, record, inputs, texts, tolerance) -> _proof.Proof:
    pairs = _pairs(model, names, source, inputs)
    program = _run.Program(model, inputs, [unit for unit, _ in pairs])
    trees = _trees(model, names, source)
    found, output = _proof.compare(program, pairs, trees, record)
    return _proof.proof(found, output, record, texts, tolerance)


def _trees(model, names, source):
    """(parameters, state) of the model with the arrays of the source, in float32."""
    weights = Weights.of_arrays(source.arrays).of(model, names).matched(names)
    return weights.trees(jnp.float32)


def _pairs(model, names, source, inputs) -> list[tuple[Unit, Group]]:
    """The layers of the model and those of the source that `names` gives them."""
    spec = model.spec(*inputs)
    leaves = {"/".join(path): leaf for tree in spec for path, leaf in spec_leaves(tree)}
    entries = _key_map.key_map(names, "", leaves, "pretrained.names", whole=False).reads
    groups = {key: group for group in source.groups() for key in group.keys}
    of_path = {path: entry for entry in entries for path in entry.paths}

    def group(unit):
        for path in unit.leaves:
            if (entry := of_path.get(path)) is None:
                continue
            width = len(entry.keys) // int(np.prod(entry.copies, dtype=int))
            number = int(np.ravel_multi_index(unit.index, entry.copies)) if unit.index else 0
            if (found := groups.get(entry.keys[number * width])) is not None:
                return found
        return None

    pairs: dict[tuple, tuple[Unit, Group]] = {}
    covered: set = set()
    for form in ("whole", "fused", "separate"):
        for unit in units(model, inputs, form):
            found = group(unit)
            if found is None or any((path, unit.index) in covered for path in unit.leaves):
                continue
            if unit.kind == "attention" and found.kind != "attention":
                continue
            if len(unit.paths) > 1 and not _is_one(unit, of_path):
                continue
            if unit.kind == "dense" and len(unit.paths) == 1 and found.kind != "affine":
                continue  # a part of an attention that PyTorch does not show
            covered |= {(path, unit.index) for path in unit.leaves}
            pairs[unit.paths, unit.index] = unit, found
    return sorted(pairs.values(), key=lambda pair: pair[0].order)


def _is_one(unit, of_path):
    """Whether layers of the model are one in the file."""
    kernels = [of_path.get(f"{path}/kernel") for path in unit.paths]
    return all(each is not None and each is kernels[0] for each in kernels)


def _read(names, leaves):
    entries = _key_map.key_map(names, "", leaves, "pretrained.names", whole=False)
    return {key for entry in (*entries.reads, *entries.beside) for key in entry.keys}


def _with_arrays(rule, source):
    """A Spare of the user writes back what the source has."""
    if isinstance(rule, Spare) and rule.write is None and rule.theirs in source.arrays:
        return dataclasses.replace(rule, write=np.array(source.arrays[rule.theirs]))
    if not isinstance(rule, Rule | Spare | Tied):
        raise TypeError(
            f"pretrained.names: expected rules such as torch.conv('stem', 'conv1'); got {rule!r}"
        )
    return rule


def _specs(inputs):
    return tuple(jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x)) for x in inputs)


def _model_inputs(model, record, x, x_fnet) -> tuple:
    if record is not None:
        return _inputs(record, x, x_fnet)
    given = x if x_fnet is None else x_fnet
    if given is None:
        if not hasattr(model, "example"):
            raise TypeError(
                f"pretrained.names: a {type(model).__name__} has no example() of its inputs; pass an "
                "input of it as x"
            )
        return _match.inputs_of(model, Names(()))
    given = given if isinstance(given, tuple) else (given,)
    return tuple(_spec_of(each) for each in given)


def _spec_of(x):
    if isinstance(x, jax.ShapeDtypeStruct):
        return x
    return jnp.asarray(_record.to_numpy(x))


_CHANNELS_FIRST = (
    "Conv",
    "BatchNorm",
    "GroupNorm",
    "InstanceNorm",
    "MaxPool",
    "AvgPool",
    "Adaptive",
)
_TIME_FIRST = ("RNN", "LSTM", "GRU", "MultiheadAttention")


def _inputs(record, x, x_fnet) -> tuple:
    """The inputs of the model for those of the module."""
    if x_fnet is not None:
        given = x_fnet if isinstance(x_fnet, tuple) else (x_fnet,)
        return tuple(jnp.asarray(_record.to_numpy(each)) for each in given)
    given = x if isinstance(x, tuple) else (x,)
    return tuple(
        jnp.asarray(_as_in_fnet(_record.to_numpy(each), record))
        for each in given
        if each is not None
    )


def _as_in_fnet(x, record):
    if x.ndim < 3 or not np.issubdtype(x.dtype, np.floating):
        return x
    first = record.first_reader(x)
    if first is None:
        return x
    if any(word in first.module for word in _CHANNELS_FIRST):
        return np.moveaxis(x, 1, -1)
    if first.module in _TIME_FIRST and not first.batch_first:
        return x.swapaxes(0, 1)
    return x
