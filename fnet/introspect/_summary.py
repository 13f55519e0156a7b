"""Summarizes a function by named scope: shapes, parameters, FLOPs, activations for the backward
pass, roofline time."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp

from fnet import cost
from fnet import hardware as hw
from fnet import transforms as ft
from fnet.cost import Cost
from fnet.introspect import _render
from fnet.introspect._graph._kept import Kept, kept_activations
from fnet.jaxpr import holds_arrays, pack
from fnet.layers import Layer


@dataclasses.dataclass(frozen=True)
class Row:
    """The outputs, parameters, cost and activations of a named scope, including all scopes inside
    it.

    Attributes:
        path: the path of the scope; "" for the whole function.
        output: the shapes and dtypes of its results, a tuple with one tree for each call. In a
            scan, they have a leading axis for the iterations.
        parameters, parameter_bytes: the number of its parameters, and their bytes.
        forward, backward: the cost of the forward pass, and what the derivative with respect to the
            parameters adds.
        kept: the activations that it stores for the backward pass, without arguments of the
            function.
        share: its fraction of the roofline time (see `cost.roofline`) of a forward and backward
            pass, or None if the chip's peaks are unknown.

    >>> summary = introspect.summary(nn.Sequential(head=nn.Dense(3)), jnp.ones((1, 4)))
    >>> summary["head"].parameters
    15
    """

    path: str
    output: tuple
    parameters: int
    parameter_bytes: int
    forward: Cost
    backward: Cost
    kept: tuple[Kept, ...]
    share: float | None

    @property
    def kept_bytes(self) -> int:
        return sum(each.nbytes for each in self.kept)

    @property
    def depth(self) -> int:
        return self.path.count("/") + 1 if self.path else 0


@dataclasses.dataclass(frozen=True)
class Summary:
    """The result of `summary`; `str()` returns it as text, and Jupyter shows `html()`.

    Attributes:
        rows: a `Row` for each path, outer paths first.
        total: the `Row` of the whole function.
        chip: the chip of the roofline time.
        notes: the reasons why some figures are not exact.
        temporary_bytes: the memory that the compiled forward and backward pass needs beside its
            arguments and results; None without `compile=True`.

    >>> summary = introspect.summary(nn.Sequential(head=nn.Dense(3)), jnp.ones((1, 4)))
    >>> summary["head"].parameters
    15
    """

    rows: tuple[Row, ...]
    total: Row
    chip: hw.Chip
    notes: tuple[str, ...] = ()
    temporary_bytes: int | None = None

    def __str__(self) -> str:
        return _render.text(self)

    def __getitem__(self, path: str) -> Row:
        """Returns the row of a path."""
        return next(
            (row for row in (self.total, *self.rows) if row.path == path), None
        ) or self._missing(path)

    def _missing(self, path):
        raise KeyError(
            f"the summary has no path {path!r}; it has "
            f"{', '.join(repr(row.path) for row in self.rows)}"
        )

    def markdown(self) -> str:
        """Returns the table in Markdown."""
        return _render.markdown(self)

    def html(self) -> str:
        """Returns the table in HTML."""
        return _render.html(self)

    _repr_html_ = html

    def data(self) -> list[dict]:
        """Returns the rows as dictionaries of numbers and strings, the totals last."""
        return _render.data(self)


def summary(
    f: Callable,
    *args: Any,
    depth: int | None = None,
    chip: Any = None,
    train: bool = False,
    compile: bool = False,
    **options: Any,
) -> Summary:
    """Returns a table of what each layer, or other named scope, costs. The function is not run.

        print(introspect.summary(model, x))                    # a layer, or a flax.nnx module, and its inputs
        print(introspect.summary(loss, params, batch))         # a function, whose first argument are its parameters

    FLOPs are exact (see `cost.count`), and the kept activations are those that
    `jax.ad_checkpoint.print_saved_residuals` lists for the derivative with respect to the
    parameters. Without such a derivative, for example because of a while loop, the table describes
    the forward pass, and `notes` says why.

    Args:
        f: a layer, a `flax.nnx.Module`, or a function.
        args: the inputs of a layer or module, or the arguments of a function, the tree of its
            parameters first. Arrays or `jax.ShapeDtypeStruct`s.
        depth: the maximum number of segments of a path. With `depth=1`, "block" includes
            "block/dense", which has no row of its own. Default None: all paths.
        chip: the chip of the roofline time, as in `cost.roofline`. Default: this machine's chip.
        train: whether a layer is called with train=True. Default False.
        compile: whether to compile the forward and backward pass for this machine, and report XLA's
            temporary memory beside the kept activations. It is larger if the program has other
            temporary values, and smaller if XLA recomputes activations or reuses their memory.
            Default False.
        options: keyword arguments of f.

    Returns:
        A `Summary`.

    >>> print(summary(nn.Sequential(hidden=nn.Dense(4), head=nn.Dense(2)), jnp.ones((3, 5))).total.parameters)
    34
    """
    run, params, inputs = as_function(f, args, train, options)
    forward = cost.count(run, params, *inputs)
    missing: tuple[str, ...] = ()
    try:
        passes = _training(run)
        both, on, seconds = _cost(passes, params, inputs, chip)
        kept = kept_activations(run, params, *inputs)
    except (TypeError, ValueError, NotImplementedError) as error:  # of the derivative
        passes = run
        both, on, seconds = _cost(run, params, inputs, chip)
        kept, missing = [], (f"no backward pass: {str(error).partition('. ')[0]}",)

    outputs: dict[str, list] = {}
    for site in ft.sites(run)(params, *inputs):
        outputs.setdefault(site.name.partition("#")[0], []).append(site.value)
    paths = _tree([*forward.scopes, *outputs, *both.scopes])
    owners: dict[str, list] = {}  # {path: the parameters of this scope, not of those below it}
    for key_path, leaf in jax.tree.leaves_with_path(params):
        owners.setdefault(_owner(key_path, paths), []).append(leaf)
    paths = _tree([*paths, *owners])

    def row(path: str, values: Iterable) -> Row:
        def inside(other: str) -> bool:
            return not path or other == path or other.startswith(path + "/")

        leaves = [leaf for owner, group in owners.items() if inside(owner) for leaf in group]
        before = _sum(each for other, each in forward.scopes.items() if inside(other))
        after = _sum(each for other, each in both.scopes.items() if inside(other))
        time = sum(each for other, each in seconds.items() if inside(other))
        return Row(
            path,
            tuple(values),
            sum(map(_size, leaves)),
            sum(map(_bytes, leaves)),
            before,
            _less(after, before),
            tuple(each for each in kept if inside(each.path)),
            time / sum(seconds.values()) if seconds else None,
        )

    rows = []
    for path in paths:
        part = path in outputs and (path.endswith("[:]") or path.endswith("/weights"))
        shown = depth is None or path.count("/") < depth
        if path and shown and not part:
            rows.append(row(path, outputs.get(path, ())))
    result = jax.eval_shape(lambda params, inputs: _arrays(run(params, *inputs)), params, inputs)
    notes = tuple(dict.fromkeys((*missing, *forward.notes, *both.notes)))
    temporary = None
    if compile:
        memory = jax.jit(passes).lower(params, *inputs).compile().memory_analysis()
        temporary = memory and memory.temp_size_in_bytes
    return Summary(tuple(rows), row("", [result]), on, notes, temporary)


def as_function(f, args, train, options, caller="summary") -> tuple[Callable, Any, tuple]:
    """Returns (a function of parameters and inputs, the parameters, the inputs)."""
    nnx = sys.modules.get("flax.nnx")
    if isinstance(f, Layer):
        spec = f.spec(*args, train=train, **options)
        params, state = (
            jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), tree)
            for tree in (spec.params, spec.state)
        )
        key = jax.eval_shape(lambda: jax.random.key(0))

        def run(params, state, key, *inputs):
            more = {"key": key, "train": True} if train else {}
            return f(params, *inputs, state=state or None, **more, **options)

        return run, params, (state, key, *args)
    if nnx is not None and isinstance(f, nnx.Module):
        graph, params, rest = nnx.split(ft.name_scopes(f), nnx.Param, ...)
        # Variables that belong to the current trace.
        fresh = lambda: jax.tree.map(lambda x: x, rest)
        return (
            (lambda params, *inputs: nnx.merge(graph, params, fresh())(*inputs, **options)),
            params,
            args,
        )
    if not callable(f) or not args:
        raise TypeError(
            f"{caller}: expected a layer, a flax.nnx module, or a function and its parameters; got "
            f"{'no arguments' if callable(f) else f'a {type(f).__name__}'}"
        )
    if train:
        raise TypeError(f"{caller}: train=True is for layers; a function takes its own arguments")
    if holds_arrays(f):  # an Equinox model
        f, args = type(f).__call__, (f, *args)
    arrays, form = pack(args)
    if form is None:
        return (lambda params, *inputs: f(params, *inputs, **options)), args[0], args[1:]
    return (lambda *arrays: f(*form.unpack(arrays), **options)), arrays[0], arrays[1:]


def _training(run):
    """Returns a function that computes the forward pass and the derivative with respect to the
    first argument."""

    def training(params, *inputs):
        y, pull = jax.vjp(lambda params: _inexact(run(params, *inputs)), params)
        if not y:
            raise TypeError("the function returns nothing floating-point")
        return pull(jax.tree.map(jnp.ones_like, y))

    return training


def _cost(f, params, inputs, chip) -> tuple[cost.Count, hw.Chip, dict[str, float]]:
    """Returns a tuple: the `Count` (FLOPs and bytes of the function), the chip, and {scope:
    estimated seconds at the roofline}. The dictionary {scope: seconds} is empty if the times are
    unknown."""
    leaves = jax.tree.leaves((params, inputs))
    if any(
        jax.export.is_symbolic_dim(size) for leaf in leaves for size in getattr(leaf, "shape", ())
    ):
        return cost.count(f, params, *inputs), hw.detect(chip), {}
    bounds = cost.roofline(f, params, *inputs, chip=chip, measure=False, depth=None)
    seconds = {row.scope: row.seconds for row in bounds.scopes}
    return bounds.count, bounds.chip, {} if None in seconds.values() else seconds


def _arrays(result):
    return [x for x in jax.tree.leaves(result) if isinstance(x, jax.Array)]


def _inexact(result):
    return [x for x in _arrays(result) if jnp.issubdtype(x.dtype, jnp.inexact)]


def _tree(paths: Iterable[str]) -> list[str]:
    """Returns a list of the given paths and their prefixes, in which a prefix "a" precedes longer
    paths like "a/b"."""
    children: dict[str, dict] = {}
    for path in paths:
        node = children
        for part in path.split("/") if path else ():
            node = node.setdefault(part, {})
    found: list[str] = []

    def walk(node, above):
        for part, below in node.items():
            found.append(f"{above}/{part}" if above else part)
            walk(below, found[-1])

    walk(children, "")
    return found


def _owner(path, known) -> str:
    """Returns the scope that a parameter belongs to, from the path of the parameter in the tree."""
    if path and path[-1] == jax.tree_util.GetAttrKey("value"):  # of an nnx variable
        path = path[:-1]
    parts = [
        str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path
    ]
    parts = [part for text in parts for part in text.split("/")]
    parts = parts[1:] if parts[:1] == ["params"] else parts  # of Flax Linen
    owner = "/".join(part for part in parts[:-1] if part != "~")  # of Haiku
    if owner in known:
        return owner
    return next((other for other in known if owner and other.endswith("/" + owner)), owner)


def _size(leaf) -> int:
    size = 1
    for n in getattr(leaf, "shape", ()):
        size = size * n
    return size


def _bytes(leaf) -> int:
    return _size(leaf) * jnp.result_type(leaf).itemsize


def _sum(costs) -> Cost:
    return sum(costs, Cost())


def _less(a, b) -> Cost:
    return a + b.times(-1)
