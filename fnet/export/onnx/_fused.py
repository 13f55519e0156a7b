"""Finds normalizations, GELUs and attentions in a program, and replaces them by operators of ONNX.

The search for a normalization starts at rsqrt, the search for a GELU at erf or erfc, and the search
for an attention at exp. A candidate for the replacement by an ONNX operator is a group of equations
that contains the operation at which the search starts. NumPy evaluates the candidate and the
definition of the operator in float64 on the same inputs, and the group is replaced only if every
element agrees. Because numbers are compared, not equations, different implementations of a
normalization are found.

A comparison shows only what its inputs can show. Masks with a single visible key once made an
attention without its normalization look equal to one with it. So each candidate is tried at several
sizes, with values near 0 and far out, NaN and Inf, and masks that show many keys, few, one or none.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from fnet.export._choices import choices
from fnet.export.onnx import _functions
from fnet.export.standalone import _interpret, _sizes

_SINCE = {  # opsets
    "layer_norm": 18,
    "erfc_gelu": 18,
    "gelu": 20,
    "rms_norm": 23,
    "attention": 23,
    "masked_attention": 23,
}
# In onnxruntime, NaN or Inf in a key that a mask hides reaches all queries.
_UNEQUAL = {"masked_attention"}
_REACH, _LIMIT = 12, 120  # the maximum number of equations up to an input, and in a candidate
_CLIMB = {"mul", "div", "add", "sub", "broadcast", "reshape", "transpose", "convert", "select"}
_VALUES = 1 << 24  # elements of the largest value that is evaluated


def fused(
    stable: dict, opset: int, constraints: Iterable[str] = (), *, unequal: bool = True
) -> dict:
    """Replaces groups of operations by equivalent ONNX operators, one for each group, and returns
    the new program.

    Args:
        stable: the program as JSON data, see `export._stable`.
        opset: only operators that exist in this version of ONNX's operators are used.
        constraints: those on the symbolic sizes of the program.
        unequal: whether to use also the operators that onnxruntime computes differently if an input
            contains NaN or Inf.
    """
    kinds = {kind for kind, since in _SINCE.items() if opset >= since}
    kinds -= set() if unequal else _UNEQUAL
    names = sorted(
        {name for _, shape in stable["values"] for n in shape for name in _sizes.variables(n)}
    )
    return _fused(
        stable, stable["values"], kinds, choices(names, constraints) or [dict.fromkeys(names, 2)]
    )


def needs(stable: dict) -> int:
    """Returns the oldest opset that has all operators which `fused` put into a program."""
    newest = 0
    for operation, _, _, options, _ in stable["equations"]:
        bodies = [each for option in options.values() for each in _listed(option)]
        inner = [needs(each) for each in bodies if isinstance(each, dict) and "equations" in each]
        newest = max([newest, _SINCE.get(operation, 0), *inner])
    return newest


def _listed(option):
    return option if isinstance(option, list) else [option]


def _fused(body, values, kinds, sizes):
    equations = [
        [operation, ins, outs, _options(options, values, kinds, sizes), path]
        for operation, ins, outs, options, path in body["equations"]
    ]
    for i, equation in enumerate(equations):
        found = equation[0] in _PATTERNS and _PATTERNS[equation[0]](
            _Candidate(equations, values, i, sizes), kinds
        )
        if found:
            place, equations[place] = found
    return {**body, "equations": _needed(equations, body["outputs"])}


def _options(options, values, kinds, sizes):
    inner = lambda x: (
        _fused(x, values, kinds, sizes) if isinstance(x, dict) and "equations" in x else x
    )
    return {
        key: [inner(x) for x in option] if isinstance(option, list) else inner(option)
        for key, option in options.items()
    }


def _needed(equations, outputs):
    """Returns the equations whose outputs are used."""
    used, kept = {a for a in outputs if isinstance(a, int)}, []
    for equation in reversed(equations):
        if used & set(equation[2]):
            used |= {a for a in equation[1] if isinstance(a, int)}
            kept.append(equation)
    return kept[::-1]


class _Candidate:
    """A group of equations that contains the equation with index `start` and may be replaced by an
    ONNX operator.

    Attributes:
        choices: the values of the symbolic sizes with which the candidate is compared, a list of
            dicts.
        sizes: the values with which its shapes are computed now, one of `choices`.
    """

    def __init__(self, equations, values, start, choices):
        self.equations, self.values, self.start = equations, values, start
        self.made = {v: i for i, equation in enumerate(equations) for v in equation[2]}
        self.choices, self.sizes = choices, choices[0]

    def proven(
        self, equal: Callable[[_Candidate, int, np.random.Generator], bool], rounds: int
    ) -> bool:
        """Whether `equal(candidate, round, draw)` holds in all rounds, at all sizes."""
        for i, sizes in itertools.product(range(rounds), self.choices):
            trial = copy.copy(self)
            trial.sizes = sizes
            if not equal(trial, i, np.random.default_rng(i)):
                return False
        return True

    def shape(self, value) -> tuple[int, ...]:
        return tuple(_sizes.size(n, self.sizes) for n in self.values[value][1])

    def inputs(self, equation) -> list[int]:
        return [a for a in equation[1] if isinstance(a, int)]

    def before(self, value, cuts=(), reach=_REACH) -> list[int]:
        """Returns the values from which a value is computed, the nearest first. The function
        follows at most `reach` equations backwards, and stops at the values in `cuts`."""
        found, front = [], [value]
        for _ in range(reach):
            step = [
                a
                for v in front
                if v in self.made and v not in cuts
                for a in self.inputs(self.equations[self.made[v]])
            ]
            front = [a for a in dict.fromkeys(step) if a not in found]
            found += front
        return found

    def after(self, value) -> Iterator[int]:
        """Yields the value, then the result of the operation that uses it, then the result of the
        operation that uses this result, and so on. The method follows only elementwise operations
        and changes of layout (such as reshapes), and stops at a value that several equations
        use."""
        yield value
        for _ in range(_REACH):
            users = [equation for equation in self.equations if value in equation[1]]
            if len(users) != 1 or users[0][0] not in _CLIMB:
                return
            (value,) = users[0][2]
            yield value

    def region(self, root, cuts) -> tuple[list, list[int]]:
        """Returns two lists: the equations that compute `root` from the values in `cuts`, and the
        inputs and constants of the program that these equations also need."""
        wanted, places, free = [root], set(), []
        while wanted:
            value = wanted.pop()
            if value in cuts:
                continue
            if value not in self.made:
                free.append(value)
            elif self.made[value] not in places:
                places.add(self.made[value])
                wanted += self.inputs(self.equations[self.made[value]])
                if len(places) > _LIMIT:
                    raise _Unsuitable
        return [self.equations[i] for i in sorted(places)], list(dict.fromkeys(free))

    def evaluate(self, root, given: dict[int, np.ndarray]) -> np.ndarray:
        """Computes `root` from the values in `given`, in float64."""
        equations, free = self.region(root, given)
        sizes = [int(np.prod(self.shape(v))) for equation in equations for v in equation[2]]
        if free or max(sizes, default=0) > _VALUES:
            raise _Unsuitable
        wide = lambda a: ["float64", a[1]] if isinstance(a, list) and a[0] == "float32" else a
        program = {
            "values": [wide(value) for value in self.values],
            "constants": [],
            "inputs": list(given),
            "equations": [[e[0], list(map(wide, e[1])), *e[2:]] for e in equations],
            "outputs": [root],
        }
        arrays = [x.astype(np.float64) if x.dtype == np.float32 else x for x in given.values()]
        return _interpret.run(program, [], arrays, self.sizes)[0]

    def replaced(self, root, operation, inputs, options):
        place = self.made[root]
        return place, [operation, inputs, [root], options, self.equations[place][4]]


class _Unsuitable(Exception):
    """Raised if a group of equations cannot be compared with an ONNX operator, for example if the
    group is too
    large."""


def _attempt(function):
    def attempted(*args):
        try:
            return function(*args)
        except (
            _Unsuitable,
            KeyError,
            IndexError,
            ValueError,
            TypeError,
            NotImplementedError,
            ZeroDivisionError,
        ):
            return None  # the interpreter cannot evaluate the candidate for these sizes

    return attempted


def _equal(x, y, scale=1.0) -> bool:
    """Whether two arrays agree in every element. Programs contain float32 constants, so float64
    results agree to 1e-6; `scale` is the magnitude of the terms that may cancel."""
    return x.shape == y.shape and np.allclose(x, y, rtol=1e-6, atol=1e-9 * scale, equal_nan=True)


def _floating(candidate, value) -> bool:
    return candidate.values[value][0] == "float32"


@_attempt
def _norm(c, kinds):
    """Finds a normalization over the last axis. The search starts at the rsqrt operation of the
    normalization."""
    (variance,), (start,) = c.equations[c.start][1:3]
    sums = c.equations[c.made[variance]]
    epsilon = next(float(a[1]) for a in sums[1] if isinstance(a, list))
    if sums[0] != "add" or not epsilon > 0:
        return None
    reduced = [
        v for v in c.before(start) if v in c.made and c.equations[c.made[v]][0] == "reduce_sum"
    ]
    near = dict.fromkeys(a for v in reduced for a in c.before(v, reach=3))
    rank = len(c.values[c.inputs(c.equations[c.made[reduced[0]]])[0]][1])
    sources = [
        v
        for v in near
        if len(c.values[v][1]) == rank
        and isinstance(c.values[v][1][-1], int)
        and _floating(c, v)
        and c.shape(v)[-1] > 1
    ]
    for x in reversed(sources):
        found = _normalized(c, x, start, epsilon, kinds)
        if found:
            return found
    return None


@_attempt
def _normalized(c, x, start, epsilon, kinds):
    shape, found = c.shape(x), None
    n = shape[-1]
    for root in c.after(start):
        if c.shape(root) != shape:
            continue
        _, vectors = c.region(root, {x})
        if len(vectors) > 2 or any(
            c.shape(v)[-1:] != (n,) or np.prod(c.shape(v)) != n or not _floating(c, v)
            for v in vectors
        ):
            return found
        # Of scale and bias.
        pairs = dict.fromkeys(itertools.permutations([*vectors, None, None], 2))
        for kind, names in itertools.product(sorted(kinds & _FORMS.keys()), pairs):
            if any(v not in names for v in vectors) or (
                kind == "rms_norm" and names[1] is not None
            ):
                continue

            def equal(c, i, draw, root=root, vectors=vectors, kind=kind, names=names):
                array = _rows(draw, c.shape(x), epsilon, i)
                arrays = {
                    v: draw.normal(size=c.shape(v)) * 10.0 ** draw.integers(-2, 3) for v in vectors
                }
                scale, bias = (
                    1.0 if v is None and j == 0 else 0.0 if v is None else arrays[v].reshape(n)
                    for j, v in enumerate(names)
                )
                with np.errstate(all="ignore"):
                    wanted = _FORMS[kind](array, epsilon) * scale + bias
                return _equal(
                    c.evaluate(root, {x: array, **arrays}), wanted, np.abs(bias).max(initial=0) + 1
                )

            if c.proven(equal, len(_ROWS)):
                used = {
                    name: None if v is None else 1 + vectors.index(v)
                    for name, v in zip(("scale", "bias"), names)
                }
                found = c.replaced(
                    root, kind, [x, *vectors], {"epsilon": epsilon, "size": n, **used}
                )
    return found


def _layer_norm(x, epsilon):
    centered = x - x.mean(-1, keepdims=True)
    return centered / np.sqrt((centered**2).mean(-1, keepdims=True) + epsilon)


def _rms_norm(x, epsilon):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon)


_FORMS = {"layer_norm": _layer_norm, "rms_norm": _rms_norm}
_ROWS = {  # (mean, standard deviation) of the rows of a normalization
    "epsilon matters": lambda epsilon: (epsilon**0.5, epsilon**0.5),
    "usual": lambda epsilon: (0.5, 1),
    "far out": lambda epsilon: (3e3, 1e3),
    "near 0": lambda epsilon: (0, 1e-9),
    "constant": lambda epsilon: (2, 0),
    "special": lambda epsilon: (0, 1),
}


def _rows(draw, shape, epsilon, i):
    """Returns rows for a normalization. Each round i has rows of another kind."""
    kind = list(_ROWS)[i]
    mean, deviation = _ROWS[kind](epsilon)
    x = (mean + deviation * draw.normal(size=shape)).astype(np.float32).astype(np.float64)
    if kind == "special":
        flat = x.reshape(-1, shape[-1])
        for row, value in zip(flat[::2], itertools.cycle((np.nan, np.inf, 0.0, -np.inf))):
            row[0] = value
    return x


@_attempt
def _gelu(c, kinds):
    """Finds an exact GELU, x times the cumulative normal distribution of x. onnxruntime's Gelu
    computes 1 + erf, as a program with erf does. Below x = -5.5, this has no correct digit. A
    program with erfc has all, so erfc remains. A GELU with tanh is not replaced: onnxruntime's Gelu
    does not round 1 + tanh like XLA, but its Tanh does."""
    kind, (start,) = (
        {"erf": "gelu", "erfc": "erfc_gelu"}[c.equations[c.start][0]],
        c.equations[c.start][2],
    )
    if kind not in kinds or not _floating(c, start):
        return None
    shape = c.shape(start)
    for source in reversed([v for v in c.before(start, reach=6) if c.shape(v) == shape]):
        for root in list(c.after(start))[:0:-1]:
            if c.shape(root) != shape or c.region(root, {source})[1]:
                continue

            def equal(c, i, draw, root=root, source=source):
                x = draw.uniform(-8, 8, c.shape(source)) * (1e-4, 1, 1e3)[i]
                flat = x.reshape(-1)
                special = (np.nan, 0.0, np.inf, -np.inf)[: flat.size // 2]
                flat[: len(special)] = special
                with np.errstate(all="ignore"):
                    wanted = _exact_gelu(x)
                return _equal(c.evaluate(root, {source: x}), wanted, 1e-4)

            if c.proven(equal, 3):
                return c.replaced(root, kind, [source], {})
    return None


def _exact_gelu(x):
    return x / 2 * _interpret.OPERATIONS["erfc"](None, {}, None, -x / np.sqrt(2))[0]


@_attempt
def _attention(c, kinds):
    """Finds the equations that compute an attention. The search starts at the exp operation of the
    attention's softmax."""
    (start,) = c.equations[c.start][2]
    if "attention" not in kinds or not _floating(c, start) or len(c.shape(start)) < 4:
        return None
    if np.prod(c.shape(start)[:-4]) != 1:
        return None
    made = lambda v: c.equations[c.made[v]] if v in c.made else [None, [], [], {}, ""]
    scores = next(v for v in c.before(start, reach=8) if made(v)[0] == "dot")
    after = next(
        e
        for e in c.equations[c.start :]
        if e[0] == "dot" and any(start in (a, *c.before(a, reach=6)) for a in c.inputs(e))
    )
    side = next(i for i, a in enumerate(after[1]) if start not in (a, *c.before(a, reach=6)))
    v = after[1][side], _order(c, after, side, contracted_last=False)
    sides = [
        (a, _order(c, made(scores), i, contracted_last=True)) for i, a in enumerate(made(scores)[1])
    ]
    cuts = {v[0], *(a for a, _ in sides)}
    masks = list(
        dict.fromkeys(
            _narrow(c, made(u)[1][0])
            for u in [
                *c.before(start, {scores}, reach=6),
                after[2][0],
                *c.before(after[2][0], {start, *cuts}),
            ]
            if made(u)[0] == "select"
        )
    )
    masks = [
        m for m in masks if m not in cuts and len(c.shape(m)) == 4 and c.values[m][0] == "bool"
    ]
    if len(masks) > 1 or (masks and "masked_attention" not in kinds):
        return None
    for root in itertools.islice(c.after(after[2][0]), 4):
        if not _divided(c, root, start, cuts):
            continue  # the sum over the keys follows later, as in fnet's own attention
        for (q, k), scale in itertools.product((sides, sides[::-1]), _scales(c, root, cuts)):
            for order in ((0, 1, 2, 3), (0, 2, 1, 3), (0, 1, 3, 2)):

                def equal(c, i, draw, root=root, q=q, k=k, scale=scale, order=order):
                    return _attends(c, i, draw, root, start, cuts, masks, (q, k, v), scale, order)

                if c.proven(equal, len(_ROUNDS)):
                    return c.replaced(
                        root,
                        "attention",
                        [q[0], k[0], v[0], *masks],
                        {
                            "orders": [q[1], k[1], v[1]],
                            "scale": scale,
                            "output": list(order),
                            "scores": c.values[start][1][-4:],
                        },
                    )
    return None


def _divided(c, root, start, cuts) -> bool:
    """Whether `root` is computed from a sum of the exponentials `start`, the denominator of a
    softmax."""
    equations, _ = c.region(root, cuts)
    return any(
        e[0] == "reduce_sum" and start in (e[1][0], *c.before(e[1][0], {start}, reach=3))
        for e in equations
    )


def _attends(c, i, draw, root, start, cuts, masks, operands, scale, order) -> bool:
    """Whether the equations that compute `root` are an attention, for the inputs of round i."""
    heads, (times, keys) = c.shape(start)[-4:-2], c.shape(start)[-2:]
    given = _drawn(c, i, draw, root, cuts, masks, operands[0], c.values[start][1][-2:])
    arrays = [given[name].transpose(axes) for name, axes in operands]
    q, k, v = (a.reshape(heads[0], -1, n, a.shape[-1]) for a, n in zip(arrays, (times, keys, keys)))
    if (
        q.shape[1] != heads[1]
        or k.shape[1] != v.shape[1]
        or heads[1] % k.shape[1]
        or q.shape[-1] != k.shape[-1]
    ):
        return False
    result = c.evaluate(root, given)
    mask = given.get(masks[0]) if masks else None
    if masks and mask is None:
        mask = c.evaluate(masks[0], given)
    moved = _attended(q, k, v, mask, scale).transpose(order)
    return moved.size == result.size and _equal(result, moved.reshape(result.shape))


def _order(c, dot, side, contracted_last):
    """Returns the axes of an operand of a matrix product: [batch, free, contracted] if
    `contracted_last` is true, otherwise [batch, contracted, free]. The free axes are the axes that
    are neither batch axes nor contracted."""
    value, contract, batch = dot[1][side], dot[3]["contract"][side], dot[3]["batch"][side]
    free = [i for i in range(len(c.shape(value))) if i not in (*contract, *batch)]
    return [*batch, *free, *contract] if contracted_last else [*batch, *contract, *free]


def _narrow(c, value):
    """Follows broadcasts backwards from `value`, and returns the array before these broadcasts. The
    function stops at a broadcast whose input has fewer than four axes. If `value` is not computed
    by a broadcast of an array with at least four axes, `value` itself is returned."""
    while (
        value in c.made
        and c.equations[c.made[value]][0] == "broadcast"
        and isinstance(c.equations[c.made[value]][1][0], int)
        and len(c.shape(c.equations[c.made[value]][1][0])) >= 4
    ):
        value = c.equations[c.made[value]][1][0]
    return value


# Magnitude of the queries, share of visible keys.
_ROUNDS = ((1, 0.5), (0.01, 0.9), (8, 0.2), (1e5, 0.6), (1, 1))


def _drawn(c, i, draw, root, cuts, masks, query, lengths):
    """Returns the inputs of an attention in round i: queries, keys, values, and a mask.

    If the mask depends on inputs or constants of the program, it is random, and some queries see no
    key. If only sizes determine it, as in a causal attention, the program computes it. If it
    depends on two sizes, other sizes than those of this comparison may hide all keys, so it is
    random, too.
    """
    sized = lengths[0] == lengths[1] or all(isinstance(n, int) for n in lengths)
    given = {name: draw.normal(size=c.shape(name)) for name in sorted(cuts)}
    magnitude, share = _ROUNDS[i]
    given[query[0]] *= magnitude
    if masks and (c.region(root, given)[1] or not sized):
        mask = draw.random(c.shape(masks[0])) < share
        rows = mask.reshape(-1, mask.shape[-1])
        if i % 2 == 0:
            rows[0] = False
        given[masks[0]] = mask
    elif i == len(_ROUNDS) - 1:
        given[query[0]].reshape(-1)[0] = np.nan  # as in a text whose embedding is broken
    return given


def _scales(c, root, cuts):
    """Yields the positive constants of the equations, and their reciprocals. onnxruntime accepts no
    other scales."""
    equations, _ = c.region(root, cuts)
    numbers = [
        float(a[1])
        for e in equations
        if e[0] in ("mul", "div")
        for a in e[1]
        if isinstance(a, list) and a[0] == "float32"
    ]
    return [1.0, *(number for n in dict.fromkeys(numbers) if 0 < n < 1e6 for number in (n, 1 / n))]


def _attended(q, k, v, mask, scale):
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(a, group, 1) for a in (k, v))
    scores = (q @ k.swapaxes(-1, -2)) * scale
    mask = np.broadcast_to(True if mask is None else mask, scores.shape)
    scores = np.where(mask, scores, -np.inf)
    # Without a visible key, all weights are 0.
    peak = np.maximum(scores.max(-1, keepdims=True), -1e300)
    weights = np.exp(scores - peak)
    # Then the output is 0, too.
    return weights / np.maximum(weights.sum(-1, keepdims=True), 1e-300) @ v


_PATTERNS = {"rsqrt": _norm, "erf": _gelu, "erfc": _gelu, "exp": _attention}


def _norm_node(kind):
    def convert(e):
        n, options = e.options["size"], e.options
        flat = lambda i: e.g.reshape(e.x(i), e.in_types[i][1], [n])
        scale = flat(options["scale"]) if options["scale"] else e.g.constant(np.ones(n, np.float32))
        bias = [flat(options["bias"])] if options["bias"] else []
        return [e.g.op(kind, e.x(0), scale, *bias, axis=-1, epsilon=options["epsilon"])]

    return convert


def _attention_node(e):
    batch, heads, times, keys = e.options["scores"]
    inputs = []
    for i, (order, n) in enumerate(zip(e.options["orders"], (times, keys, keys))):
        shape = [e.in_types[i][1][axis] for axis in order]
        features = shape[-1]
        count = heads if i == 0 else shape[1]
        inputs.append(e.g.reshape(e.g.transpose(e.x(i), order), shape, [batch, count, n, features]))
    if len(e.ins) > 3:
        first = e.in_types[3][1][:2]
        inputs.append(e.g.expand(e.x(3), [*first, times, keys]))
    y = e.g.op("Attention", *inputs, scale=e.options["scale"])
    order = e.options["output"]
    features = e.in_types[2][1][e.options["orders"][2][-1]]
    shape = [[batch, heads, times, features][axis] for axis in order]
    return [e.g.reshape(e.g.transpose(y, order), shape, e.shape)]


OPERATIONS = {
    "layer_norm": _norm_node("LayerNormalization"),
    "rms_norm": _norm_node("RMSNormalization"),
    "gelu": lambda e: [e.g.op("Gelu", e.x(0))],
    "erfc_gelu": lambda e: [_functions.gelu(e, e.x(0))],
    "attention": _attention_node,
}
