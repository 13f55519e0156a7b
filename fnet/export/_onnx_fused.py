"""Finds normalizations, GELUs and attentions in a program, and replaces them by operators of ONNX.

The search for a normalization starts at rsqrt, the search for a GELU at erf or tanh, and the search for an attention at
exp. A candidate for the replacement by an ONNX operator is a group of equations that contains the operation at which
the search starts. To test whether a candidate can be replaced by an ONNX operator, NumPy evaluates the equations of the
candidate and the definition of the operator on the same random inputs. A group of equations is replaced only if its
results equal those of the ONNX operator. Because numerical results are compared, not the equations themselves,
different implementations of a normalization are found.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

import numpy as np

from fnet.export import _interpret, _sizes

_SINCE = {"layer_norm": 18, "gelu": 20, "rms_norm": 23, "attention": 23}      # opsets
_PRIMES = 2, 3, 5, 7, 11, 13
_REACH, _LIMIT = 12, 120      # the maximum number of equations up to an input, and in a candidate
_CLIMB = {"mul", "div", "add", "sub", "broadcast", "reshape", "transpose", "convert", "select"}
_VALUES = 1 << 24             # elements of the largest value that is evaluated


def fused(stable: dict, opset: int) -> dict:
    """Replaces groups of operations by equivalent ONNX operators, one for each group, and returns the new program. Only
    operators that exist in version `opset` of ONNX's operators are used. The argument `stable` is the program as JSON
    data, see `jaxpr.stable`."""
    kinds = {kind for kind, since in _SINCE.items() if opset >= since}
    return _fused(stable, stable["values"], kinds)


def _fused(body, values, kinds):
    equations = [[operation, ins, outs, _options(options, values, kinds), path]
                 for operation, ins, outs, options, path in body["equations"]]
    for i, equation in enumerate(equations):
        found = equation[0] in _PATTERNS and _PATTERNS[equation[0]](_Candidate(equations, values, i), kinds)
        if found:
            place, equations[place] = found
    return {**body, "equations": _needed(equations, body["outputs"])}


def _options(options, values, kinds):
    inner = lambda x: _fused(x, values, kinds) if isinstance(x, dict) and "equations" in x else x
    return {key: [inner(x) for x in option] if isinstance(option, list) else inner(option)
            for key, option in options.items()}


def _needed(equations, outputs):
    """Returns the equations whose outputs are used."""
    used, kept = {a for a in outputs if isinstance(a, int)}, []
    for equation in reversed(equations):
        if used & set(equation[2]):
            used |= {a for a in equation[1] if isinstance(a, int)}
            kept.append(equation)
    return kept[::-1]


class _Candidate:
    """A group of equations that contains the equation with index `start` and may be replaced by an ONNX operator."""

    def __init__(self, equations, values, start):
        self.equations, self.values, self.start = equations, values, start
        self.made = {v: i for i, equation in enumerate(equations) for v in equation[2]}
        words = " ".join(str(n) for equation in equations for v in equation[2] for n in values[v][1])
        names = sorted(set(re.findall(r"[A-Za-z_]\w*", words)) - {"floordiv", "mod", "max", "min"})
        self.sizes = dict(zip(names, itertools.cycle(_PRIMES)))

    def shape(self, value) -> tuple[int, ...]:
        return tuple(_sizes.size(n, self.sizes) for n in self.values[value][1])

    def inputs(self, equation) -> list[int]:
        return [a for a in equation[1] if isinstance(a, int)]

    def before(self, value, cuts=(), reach=_REACH) -> list[int]:
        """Returns the values from which a value is computed, the nearest first. The function follows at most `reach`
        equations backwards, and stops at the values in `cuts`."""
        found, front = [], [value]
        for _ in range(reach):
            step = [a for v in front if v in self.made and v not in cuts
                    for a in self.inputs(self.equations[self.made[v]])]
            front = [a for a in dict.fromkeys(step) if a not in found]
            found += front
        return found

    def after(self, value) -> Iterator[int]:
        """Yields the value, then the result of the operation that uses it, then the result of the operation that uses
        this result, and so on. The method follows only elementwise operations and changes of layout (such as reshapes),
        and stops at a value that several equations use."""
        yield value
        for _ in range(_REACH):
            users = [equation for equation in self.equations if value in equation[1]]
            if len(users) != 1 or users[0][0] not in _CLIMB:
                return
            value, = users[0][2]
            yield value

    def region(self, root, cuts) -> tuple[list, list[int]]:
        """Returns two lists: the equations that compute `root` from the values in `cuts`, and the inputs and constants
        of the program that these equations also need."""
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
        equations, free = self.region(root, given)
        sizes = [int(np.prod(self.shape(v))) for equation in equations for v in equation[2]]
        if free or max(sizes, default=0) > _VALUES:
            raise _Unsuitable
        program = {"values": self.values, "constants": [], "inputs": list(given), "equations": equations,
                   "outputs": [root]}
        return _interpret.run(program, [], list(given.values()), self.sizes)[0]

    def replaced(self, root, operation, inputs, options):
        place = self.made[root]
        return place, [operation, inputs, [root], options, self.equations[place][4]]


class _Unsuitable(Exception):
    """Raised if a group of equations cannot be compared with an ONNX operator, for example if the group is too
    large."""


def _attempt(function):
    def attempted(*args):
        try:
            return function(*args)
        except (_Unsuitable, KeyError, IndexError, ValueError, TypeError, NotImplementedError, ZeroDivisionError):
            return None      # the interpreter cannot evaluate the candidate for these sizes
    return attempted


def _equal(x, y, tolerance=1e-5) -> bool:
    return x.shape == y.shape and float(np.abs(x - y).max(initial=0)) <= tolerance * np.abs(y).max(initial=1e-30)


def _floating(candidate, value) -> bool:
    return candidate.values[value][0] == "float32"


@_attempt
def _norm(c, kinds):
    """Finds a normalization over the last axis. The search starts at the rsqrt operation of the normalization."""
    (variance,), (start,) = c.equations[c.start][1:3]
    sums = c.equations[c.made[variance]]
    epsilon = next(float(a[1]) for a in sums[1] if isinstance(a, list))
    if sums[0] != "add" or not epsilon > 0:
        return None
    reduced = [v for v in c.before(start) if v in c.made and c.equations[c.made[v]][0] == "reduce_sum"]
    near = dict.fromkeys(a for v in reduced for a in c.before(v, reach=3))
    rank = len(c.values[c.inputs(c.equations[c.made[reduced[0]]])[0]][1])
    sources = [v for v in near if len(c.values[v][1]) == rank and isinstance(c.values[v][1][-1], int)
               and _floating(c, v) and c.shape(v)[-1] > 1]
    for x in reversed(sources):
        found = _normalized(c, x, start, epsilon, kinds)
        if found:
            return found
    return None


@_attempt
def _normalized(c, x, start, epsilon, kinds):
    draw, shape, found = np.random.default_rng(0), c.shape(x), None
    n = shape[-1]
    array = (draw.normal(size=shape) * epsilon ** 0.5 + epsilon ** 0.5).astype(np.float32)     # epsilon has an effect
    centered = array - array.mean(-1, keepdims=True)
    forms = {"layer_norm": centered / np.sqrt(centered.var(-1, keepdims=True) + epsilon),
             "rms_norm": array / np.sqrt((array ** 2).mean(-1, keepdims=True) + epsilon)}
    for root in c.after(start):
        if c.shape(root) != shape:
            continue
        _, vectors = c.region(root, {x})
        if len(vectors) > 2 or any(c.shape(v)[-1:] != (n,) or np.prod(c.shape(v)) != n or not _floating(c, v)
                                   for v in vectors):
            return found
        arrays = {v: draw.normal(size=c.shape(v)).astype(np.float32) for v in vectors}
        result = c.evaluate(root, {x: array, **arrays})
        for kind, names in itertools.product(sorted(kinds & forms.keys()), itertools.permutations([*vectors, None], 2)):
            if any(v not in names for v in vectors):
                continue
            scale, bias = (1.0 if v is None and i == 0 else 0.0 if v is None else arrays[v].reshape(n)
                           for i, v in enumerate(names))
            if (kind == "layer_norm" or names[1] is None) and _equal(result, forms[kind] * scale + bias):
                used = {name: None if v is None else 1 + vectors.index(v) for name, v in zip(("scale", "bias"), names)}
                found = c.replaced(root, kind, [x, *vectors], {"epsilon": epsilon, "size": n, **used})
    return found


@_attempt
def _gelu(c, kinds):
    """Finds a GELU: x times the cumulative normal distribution of x, or its approximation by tanh."""
    start, = c.equations[c.start][2]
    if "gelu" not in kinds or not _floating(c, start):
        return None
    shape = c.shape(start)
    x = np.random.default_rng(0).uniform(-4, 4, shape).astype(np.float32)
    erf = np.asarray(_interpret.OPERATIONS["erf"](None, {}, None, x / np.sqrt(2))[0])
    forms = {"none": x / 2 * (1 + erf), "tanh": x / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x ** 3)))}
    for source in reversed([v for v in c.before(start, reach=6) if c.shape(v) == shape]):
        for root in list(c.after(start))[:0:-1]:
            if c.shape(root) != shape or c.region(root, {source})[1]:
                continue
            result = c.evaluate(root, {source: x})
            for form, wanted in forms.items():
                if _equal(result, wanted.astype(np.float32)):
                    return c.replaced(root, "gelu", [source], {"form": form})
    return None


@_attempt
def _attention(c, kinds):
    """Finds the equations that compute an attention. The search starts at the exp operation of the attention's
    softmax."""
    start, = c.equations[c.start][2]
    if "attention" not in kinds or not _floating(c, start) or len(c.shape(start)) < 4:
        return None
    heads, (times, keys) = c.shape(start)[-4:-2], c.shape(start)[-2:]
    if np.prod(c.shape(start)[:-4]) != 1:
        return None
    made = lambda v: c.equations[c.made[v]] if v in c.made else [None, [], [], {}, ""]
    scores = next(v for v in c.before(start, reach=8) if made(v)[0] == "dot")
    after = next(e for e in c.equations[c.start:] if e[0] == "dot" and any(
        start in (a, *c.before(a, reach=6)) for a in c.inputs(e)))
    side = next(i for i, a in enumerate(after[1]) if start not in (a, *c.before(a, reach=6)))
    v = after[1][side], _order(c, after, side, contracted_last=False)
    sides = [(a, _order(c, made(scores), i, contracted_last=True)) for i, a in enumerate(made(scores)[1])]
    cuts = {v[0], *(a for a, _ in sides)}
    masks = list(dict.fromkeys(_narrow(c, made(u)[1][0]) for u in [*c.before(start, {scores}, reach=6), after[2][0],
                               *c.before(after[2][0], {start, *cuts})] if made(u)[0] == "select"))
    masks = [m for m in masks if m not in cuts and len(c.shape(m)) == 4 and c.values[m][0] == "bool"]
    if len(masks) > 1:
        return None
    for root in itertools.islice(c.after(after[2][0]), 4):
        given = _drawn(c, root, cuts, masks)
        result = c.evaluate(root, given)
        mask = given.get(masks[0], None) if masks else None
        if masks and mask is None:
            mask = c.evaluate(masks[0], given)
        for (q, k), scale in itertools.product((sides, sides[::-1]), _scales(c, root, cuts)):
            arrays = [given[name].transpose(order) for name, order in (q, k, v)]
            q4, k4, v4 = (a.reshape(heads[0], -1, n, a.shape[-1]) for a, n in zip(arrays, (times, keys, keys)))
            if q4.shape[1] != heads[1] or k4.shape[1] != v4.shape[1] or heads[1] % k4.shape[1]:
                continue
            output = _attended(q4, k4, v4, mask, scale)
            for order in ((0, 1, 2, 3), (0, 2, 1, 3), (0, 1, 3, 2)):
                moved = output.transpose(order)
                if moved.size == result.size and _equal(result, moved.reshape(result.shape)):
                    return c.replaced(root, "attention", [q[0], k[0], v[0], *masks], {
                        "orders": [q[1], k[1], v[1]], "scale": scale, "output": list(order),
                        "scores": c.values[start][1][-4:]})
    return None


def _order(c, dot, side, contracted_last):
    """Returns the axes of an operand of a matrix product: [batch, free, contracted] if `contracted_last` is true,
    otherwise [batch, contracted, free]. The free axes are the axes that are neither batch axes nor contracted."""
    value, contract, batch = dot[1][side], dot[3]["contract"][side], dot[3]["batch"][side]
    free = [i for i in range(len(c.shape(value))) if i not in (*contract, *batch)]
    return [*batch, *free, *contract] if contracted_last else [*batch, *contract, *free]


def _narrow(c, value):
    """Follows broadcasts backwards from `value`, and returns the array before these broadcasts. The function stops at a
    broadcast whose input has fewer than four axes. If `value` is not computed by a broadcast of an array with at least
    four axes, `value` itself is returned."""
    while value in c.made and c.equations[c.made[value]][0] == "broadcast" and isinstance(
            c.equations[c.made[value]][1][0], int) and len(c.shape(c.equations[c.made[value]][1][0])) >= 4:
        value = c.equations[c.made[value]][1][0]
    return value


def _drawn(c, root, cuts, masks):
    """Returns random test data for an attention: queries, keys and values. If the mask of the attention depends on
    inputs or constants of the program, the test data also contain a random mask. In the first row of the random mask,
    all keys are masked."""
    draw = np.random.default_rng(0)
    given = {name: draw.normal(size=c.shape(name)).astype(np.float32) for name in sorted(cuts)}
    if c.region(root, given)[1] and masks:
        mask = draw.random(c.shape(masks[0])) < 0.5
        mask.reshape(-1, mask.shape[-1])[0] = False
        given[masks[0]] = mask
    return given


def _scales(c, root, cuts):
    equations, _ = c.region(root, cuts)
    numbers = [float(a[1]) for e in equations if e[0] in ("mul", "div") for a in e[1] if isinstance(a, list)
               and a[0] == "float32"]
    return [1.0, *(number for n in dict.fromkeys(numbers) if 0 < abs(n) < 1e6 for number in (n, 1 / n))]


def _attended(q, k, v, mask, scale):
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(a, group, 1) for a in (k, v))
    scores = (q @ k.swapaxes(-1, -2)) * np.float32(scale)
    mask = np.broadcast_to(True if mask is None else mask, scores.shape)
    weights = np.where(mask, np.exp(scores - scores.max(-1, keepdims=True)), 0)
    return weights / np.maximum(weights.sum(-1, keepdims=True), 1e-30) @ v      # 0 without keys, as in onnxruntime


_PATTERNS = {"rsqrt": _norm, "erf": _gelu, "erfc": _gelu, "tanh": _gelu, "exp": _attention}


def _norm_node(kind):
    def convert(e):
        n, options = e.options["size"], e.options
        flat = lambda i: e.g.reshape(e.x(i), e.in_types[i][1], [n])
        scale = flat(options["scale"]) if options["scale"] else e.g.constant(np.ones(n, np.float32))
        bias = [flat(options["bias"])] if options["bias"] else []
        return [e.g.op(kind, e.x(0), scale, *bias, axis=-1, epsilon=options["epsilon"])]
    return convert


def _gelu_node(e):
    return [e.g.op("Gelu", e.x(0), approximate=e.options["form"])]


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


OPERATIONS = {"layer_norm": _norm_node("LayerNormalization"), "rms_norm": _norm_node("RMSNormalization"),
              "gelu": _gelu_node, "attention": _attention_node}
