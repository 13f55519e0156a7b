"""Writes programs as ONNX models, and compares the outputs of onnxruntime with those of the
program."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fnet._util import _missing
from fnet.export import _examples, _stable
from fnet.export._choices import choices
from fnet.export._tree import described_leaves, size_variables
from fnet.export.onnx import _elementwise, _fused, _products, _reductions
from fnet.export.onnx._graph import Graph, evaluated
from fnet.export.standalone import _outputs, _rounding, _signature, _sizes

OLDEST, USUAL, FUSED = 18, 20, 23  # opsets
LARGE = (
    1_900_000_000  # bytes above which the weights are in a separate file; protobuf's limit is 2 GB
)
_DIRECT = {
    **_elementwise.OPERATIONS,
    **_reductions.OPERATIONS,
    **_products.OPERATIONS,
    **_fused.OPERATIONS,
}


class Unsupported(NotImplementedError):
    """Raised for an operation that the ONNX exporter does not support. The error message states the
    operation and its path."""


def save(
    program: Any,
    path: str | os.PathLike,
    *,
    entry: str = "predict",
    opset: int | None = None,
    fused: bool = True,
    external: bool | None = None,
    check: bool = True,
) -> None:
    """Writes an entry point (a function of the program) as an ONNX model. `Program.onnx` documents
    the arguments."""
    try:
        import onnx
    except ImportError as error:
        raise ImportError(
            _missing.message("ONNX needs", "onnx", "onnxruntime", error=error)
        ) from None
    newest = onnx.defs.onnx_opset_version()
    if opset is not None and not OLDEST <= opset <= newest:
        raise ValueError(f"Program.onnx: opset={opset}: expected {OLDEST} to {newest}")
    if entry not in program.entries:
        raise ValueError(
            f"Program.onnx: there is no entry point {entry!r}; there are "
            f"{', '.join(program.entries)}"
        )
    traced = program.entries[entry]
    stable, constants = _stable.stable(traced.closed)
    if not fused:
        opset = USUAL if opset is None else opset
    elif opset is None:
        stable = _fused.fused(stable, FUSED, traced.constraints, unequal=False)
        opset = max(USUAL, _fused.needs(stable))
    else:
        stable = _fused.fused(stable, opset, traced.constraints)
    model = _Model(onnx, stable, opset)
    names = [*(f"constant/{i}" for i in range(len(constants))), *traced.weights]
    arrays = [*constants, *(np.asarray(program.weights[name]) for name in traced.weights)]
    inputs, outputs = described_leaves(traced.inputs), described_leaves([("output", traced.output)])
    proto = model.convert(names, arrays, inputs, outputs, entry)

    path = Path(path)
    total = sum(array.nbytes for array in arrays)
    external = total > LARGE if external is None else external
    options = dict(save_as_external_data=True, location=f"{path.name}.data") if external else {}
    if external:
        path.with_name(f"{path.name}.data").unlink(missing_ok=True)  # onnx appends to an old file
    onnx.save_model(proto, path, **options)
    onnx.checker.check_model(str(path))
    if check:
        compare(program, path, entry)


def compare(
    program: Any, path: str | os.PathLike, entry: str = "predict", inputs: list | None = None
) -> float:
    """Compares the outputs of onnxruntime with those of the program: for the given leaves of
    inputs, or in several rounds for drawn ones (see `_examples`).

    If only inputs with NaN or Inf give other outputs, the function warns. NaN often stands for a
    fault elsewhere, and not every operator of onnxruntime propagates it.

    Returns:
        The largest relative difference of an element; what rounding may change counts as part of
        the element.

    Raises:
        ValueError: the difference is larger than 1e-5 (float16: 2e-3, float64: 1e-10).
    """
    check = _Check(program, path, entry)
    if inputs is not None:
        return check.differ(inputs, "your inputs")
    described, constraints = program.entries[entry].inputs, program.entries[entry].constraints
    sizes = choices(size_variables(described), constraints)
    if not sizes:
        warnings.warn(
            f"{path}: not compared with the program, because no small sizes were found that "
            f"satisfy {', '.join(constraints)}",
            stacklevel=3,
        )
        return 0.0
    worst = max(check.drawn(*each) for each in _examples.rounds(described, sizes))
    if not check.ranges.loops:
        try:
            check.drawn(sizes[0], "special", 0)
        except _outputs.Different as error:
            warnings.warn(f"{error}. With finite inputs, the outputs agree", stacklevel=3)
    return worst


class _Check:
    """Runs a model in onnxruntime, and compares its outputs with those of the program.

    Attributes:
        ranges: how the program uses its inputs.
    """

    def __init__(self, program, path, entry):
        try:
            import onnxruntime
        except ImportError as error:
            raise ImportError(
                _missing.message(
                    "the check of an ONNX model needs",
                    "onnxruntime",
                    error=error,
                    note=", or write the model with check=False",
                )
            ) from None
        self.program, self.path, self.entry, self.traced = (
            program,
            path,
            entry,
            program.entries[entry],
        )
        self.stable, self.constants = _stable.stable(self.traced.closed)
        self.ranges = _examples.Ranges(self.stable)
        self.tolerance = _outputs.tolerance(dtype for dtype, _ in self.stable["values"])
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        try:
            self.session = onnxruntime.InferenceSession(
                str(path), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # onnxruntime raises errors of several types
            raise Unsupported(
                f"ONNX: onnxruntime cannot load {path}: {_last_words(error)}"
            ) from error

    def drawn(self, sizes: Mapping[str, int], kind: str, seed: int) -> float:
        """Compares the outputs for drawn inputs."""
        return self.differ(
            _examples.drawn(self.traced.inputs, sizes, self.ranges, kind, seed), f"{kind} inputs"
        )

    def differ(self, inputs: list, kind: str) -> float:
        names = [name for name, _ in described_leaves([("output", self.traced.output)])]
        return _outputs.compare(
            f"{self.path}: in onnxruntime with {kind}",
            names,
            self._results(inputs),
            self.program.call(self.entry, *inputs),
            self.tolerance,
            [lambda: self._perturbed(inputs), lambda: self._spread(inputs)],
        )

    def _results(self, inputs):
        known = {value.name for value in self.session.get_inputs()}
        feed = {
            name: np.asarray(x)
            for (name, _), x in zip(described_leaves(self.traced.inputs), inputs)
            if name in known
        }
        try:
            return self.session.run(None, feed)
        except Exception as error:  # onnxruntime raises errors of several types
            node = re.search(r"Name:'([^']*)'", str(error))
            raise Unsupported(
                f"ONNX: onnxruntime cannot run {self.path}{f' at {node[1]!r}' if node else ''}: "
                f"{_last_words(error)}"
            ) from error

    def _perturbed(self, inputs):
        run = lambda weights, inputs: self.program.call(self.entry, *inputs, weights=weights)
        return _rounding.perturbed(
            run, {name: self.program.weights[name] for name in self.traced.weights}, inputs
        )

    def _spread(self, inputs):
        description = {"inputs": self.traced.inputs, "constraints": self.traced.constraints}
        _, sizes = _signature.bound(
            self.path, self.entry, description, (), _signature.named(description, inputs)
        )
        weights = [self.program.weights[name] for name in self.traced.weights]
        return _rounding.spread(self.stable, self.constants, [*weights, *inputs], sizes)


def _last_words(error) -> str:
    return " ".join(str(error).split())[-300:]


class _Model:
    """The ONNX model that is being written.

    Attributes:
        weights: the arrays that can become initializers of the ONNX model, {name: array}. The
            arrays are the weights and constants of the program, and reshaped or transposed copies
            of weights.
        path: the path of the operation that is being converted. The names of the operation's ONNX
            nodes begin with this path.
    """

    def __init__(self, onnx, stable, opset):
        self.onnx, self.helper, self.stable, self.opset = onnx, onnx.helper, stable, opset
        self.weights: dict[str, np.ndarray] = {}
        self.dtypes: dict[str, np.dtype] = {}  # of the values whose dtype is known
        self.positive: set[str] = set()  # the values of which no element is -0.0
        self.inverse: set[str] = set()  # the values that stand for their reciprocals
        self.path, self._used, self._constants = "", set(), {}
        self._layouts: dict[tuple, str] = {}
        self._sources: dict[
            str, tuple
        ] = {}  # a weight in another layout -> (the weight, the node for it)

    def unique(self, name: str) -> str:
        base, number = name, 1
        while name in self._used:
            number += 1
            name = f"{base}_{number}"
        self._used.add(name)
        return name

    def kind(self, dtype) -> int:
        if np.dtype(dtype).name == "bfloat16":
            raise Unsupported(
                f"ONNX: {self.path or 'the program'!r} computes in bfloat16, which onnxruntime "
                "does not support on CPUs; export the float32 model"
            )
        if np.dtype(dtype).kind == "c":
            raise Unsupported(
                f"ONNX: {self.path or 'the program'!r} computes with complex numbers, which "
                "onnxruntime does not support; compute with their real and imaginary parts"
            )
        return self.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))

    def dtype_of(self, kind: int) -> np.dtype:
        return np.dtype(self.helper.tensor_dtype_to_np_dtype(kind))

    def weight(self, array: np.ndarray, name: str) -> str:
        self.weights.setdefault(name, array)
        self.dtypes[name] = array.dtype
        self._used.add(name)
        return name

    def derived(
        self, source: str, array: np.ndarray, kind: str, *inputs: str, **attributes: Any
    ) -> str:
        """Adds a reshaped or transposed copy of a weight to the weights, and returns its name.
        `source` is the name of the original weight, and `array` is the reshaped or transposed copy.

        `kind`, `inputs` and `attributes` define the ONNX node that reshapes or transposes the
        original weight. The ONNX model contains the reshaping or transposing node only if it also
        contains the original weight.
        """
        key = source, kind, array.shape, str(attributes)
        if key not in self._layouts:
            name = self.unique(f"{source}:{kind.lower()}")
            self.weights[name] = array
            self.dtypes[name] = array.dtype
            self._layouts[key] = name
            node = self.helper.make_node(kind, [source, *inputs], [name], name=name, **attributes)
            self._sources[name] = source, node
        return self._layouts[key]

    def _computed(self, used: set[str]) -> list:
        """Returns nodes that reshape or transpose weights, so that each weight is stored only once.
        `used` are the names of the values that the model uses.

        If a weight is used in only one layout (for example, only transposed), the weight is stored
        in this layout, and no ONNX node reshapes or transposes it. If a weight is used in several
        layouts, the original weight is stored, and nodes compute the reshaped or transposed
        weights.
        """
        nodes, roots = [], {}
        for name in used & self._sources.keys():
            root = name
            while root in self._sources:
                root = self._sources[root][0]
            roots.setdefault(root, []).append(name)
        for root, names in roots.items():
            if root not in used and len(names) == 1:
                continue
            for name in sorted(names):
                chain = []
                while name in self._sources and name in self.weights:
                    chain.append(self._sources[name][1])
                    del self.weights[name]
                    name = self._sources[name][0]
                nodes += chain[::-1]
        return nodes

    def constant(self, array: np.ndarray) -> str:
        key = str(array.dtype), array.shape, array.tobytes()
        if key not in self._constants:
            self.kind(array.dtype)
            self._constants[key] = self.unique("constant")
            self.weights[self._constants[key]] = array
            self.dtypes[self._constants[key]] = array.dtype
        return self._constants[key]

    def value_info(self, name, dtype, shape=None):
        sizes = (
            None
            if shape is None
            else [n if isinstance(n, int) else re.sub(r"\s", "", n) for n in shape]
        )
        return self.helper.make_tensor_value_info(name, self.kind(dtype), sizes)

    def type_of(self, i):
        dtype, shape = self.stable["values"][i]
        return np.dtype(dtype), shape

    def _solve(self, graph, n):
        """Computes the variable of a size such as 4*h + 2 if h is the size of no axis."""
        if len(names := _sizes.variables(n)) != 1 or names[0] in graph.kept:
            return
        zero, one, two = (_sizes.size(n, {names[0]: value}) for value in (0, 1, 2))
        if two - one == one - zero != 0:
            rest = graph.op("Sub", graph.kept[n], graph.integers(zero)) if zero else graph.kept[n]
            graph.kept[names[0]] = graph.op("Div", rest, graph.integers(one - zero))

    def convert(self, names, arrays, inputs, outputs, entry):
        stable, graph = self.stable, _Graph(self)
        values = stable["constants"] + stable["inputs"]
        for i, name, array in zip(values, names, arrays):
            graph.names[i] = self.weight(array, name)
        for i, (name, leaf) in zip(values[len(names) :], inputs):
            graph.names[i] = self.unique(name)
            self.dtypes[graph.names[i]] = np.dtype(leaf["dtype"])
            for axis, n in enumerate(leaf["shape"]):
                if isinstance(n, str) and n not in graph.kept:
                    self.path = "sizes"
                    graph.kept[n] = graph.op("Shape", name, start=axis, end=axis + 1)
        for n in [n for _, leaf in inputs for n in leaf["shape"] if not isinstance(n, int)]:
            self._solve(graph, n)
        results = graph.body(graph, stable, None)
        self.path = ""
        wanted = [self.unique(name) for name, _ in outputs]
        for name, result in zip(wanted, results):
            graph.nodes.append(self.helper.make_node("Identity", [result], [name], name=name))
        used = {name for node in _all_nodes(graph.nodes) for name in node.input}
        graph.nodes[:0] = self._computed(used)
        used |= {name for node in graph.nodes for name in node.input}
        tensors = [
            self.onnx.numpy_helper.from_array(
                np.ascontiguousarray(array).reshape(array.shape), name
            )
            for name, array in self.weights.items()
            if name in used
        ]
        proto = self.helper.make_graph(
            graph.nodes,
            entry,
            [self.value_info(name, leaf["dtype"], leaf["shape"]) for name, leaf in inputs],
            [
                self.value_info(name, leaf["dtype"], leaf["shape"])
                for name, (_, leaf) in zip(wanted, outputs)
            ],
            tensors,
        )
        imports = [self.helper.make_opsetid("", self.opset)]
        return self.helper.make_model(
            proto,
            opset_imports=imports,
            producer_name="fnet",
            ir_version=self.helper.find_min_ir_version_for(imports),
        )


def _all_nodes(nodes):
    for node in nodes:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _all_nodes(attribute.g.node)


class _Graph(Graph):
    inputs: tuple = ()
    outputs: tuple = ()

    def inner(self) -> _Graph:
        return _Graph(self.model, self)

    def proto(self, name: str):
        value = self.model.helper.make_empty_tensor_value_info
        ins = [
            self.model.value_info(name, dtype, [] if shape == [] else None)
            if name.startswith(("iteration", "cond"))
            else self.model.value_info(name, dtype, shape)
            for name, (dtype, shape) in self.inputs
        ]
        return self.model.helper.make_graph(
            self.nodes, self.model.unique(name), ins, [value(y) for y in self.outputs]
        )

    def body(self, graph, body, inputs) -> list[str]:
        """Converts the equations of a program, loop or branch to nodes of `graph`, and returns the
        names of the outputs."""
        if inputs is not None:
            # A body may be converted twice, as the test of a while loop. Its values then get new
            # names in this graph.
            graph.names.update(zip(body["inputs"], inputs))
            self.model.dtypes.update(
                (name, self.model.type_of(i)[0]) for i, name in zip(body["inputs"], inputs)
            )
        for i, (operation, ins, outs, options, path) in enumerate(body["equations"]):
            self.model.path = path
            equation = Equation(
                graph, operation, ins, outs, options, body["equations"][i + 1 :], body["outputs"]
            )
            try:
                results = equation.convert()
            except (NotImplementedError, KeyError) as error:
                if isinstance(error, Unsupported):
                    raise
                why = "" if isinstance(error, KeyError) else f" ({error})"
                raise Unsupported(
                    f"ONNX: the operation {operation!r} at {path or 'the top level'!r} is not "
                    f"supported{why}; write this part of the model with other operations"
                ) from error
            for i, name in zip(outs, results or ()):
                graph.names[i] = name
                self.model.dtypes[name] = self.model.type_of(i)[0]
                graph.loose.pop(i, None)
        return [self._value(graph, a) for a in body["outputs"]]

    def _value(self, graph, a):
        return Equation(graph, "", [a], [], {}).x(0)


class Equation:
    """Converts one operation from the JSON description of a program (the stable form) to ONNX
    nodes.

    Attributes:
        g: the graph to which the nodes are added.
        options: the options of the operation, a dict.
        in_types, out_types: the types of the inputs and of the outputs, [(dtype, shape)].
        dtype, shape: the dtype and shape of the first output.
        equations, body_outputs: the equations that follow in the same body, and the outputs of the
            body.
    """

    def __init__(self, graph, operation, ins, outs, options, equations=(), body_outputs=()):
        self.equations, self.body_outputs = equations, body_outputs
        self.g, self.model, self.operation, self.ins, self.outs = (
            graph,
            graph.model,
            operation,
            ins,
            outs,
        )
        self.options = options
        self.in_types = [
            (np.dtype(a[0]), []) if isinstance(a, list) else self.model.type_of(a) for a in ins
        ]
        self.out_types = [self.model.type_of(i) for i in outs]
        self.dtype, self.shape = self.out_types[0] if outs else (None, None)

    def convert(self) -> list[str] | None:
        if self.operation not in _elementwise.ELEMENTWISE:
            return _DIRECT[self.operation](self)
        function = _elementwise.ELEMENTWISE[self.operation]
        parts = [self.loose(i) for i in range(len(self.ins))]
        full = any(
            narrow == shape
            for (_, narrow), (_, shape) in zip(parts, self.in_types)
            if shape == self.shape
        )
        name = function(self, *(name for name, _ in parts))
        if full or not self.shape:
            return [name]
        narrow = [
            max(
                (p[axis - len(self.shape)] for _, p in parts if len(p) >= len(self.shape) - axis),
                key=lambda n: n != 1,
                default=1,
            )
            for axis in range(len(self.shape))
        ]
        if narrow == self.shape:
            return [name]
        self.loosely(0, name, narrow)
        return None

    def x(self, i: int) -> str:
        """Returns the name of the i-th input."""
        a = self.ins[i]
        if isinstance(a, list):
            number = float(a[1]) if isinstance(a[1], str) else a[1]
            return self.g.constant(number, np.dtype(a[0]))
        graph = self.g
        while graph is not None:
            if a in graph.names:
                return graph.names[a]
            if a in graph.loose:
                name, _ = graph.loose[a]
                self.g.names[a] = self.g.expand(name, self.in_types[i][1])
                return self.g.names[a]
            graph = graph.parent
        raise KeyError(a)

    def loose(self, i: int) -> tuple[str, list]:
        """Returns (name, shape) of the value from which the i-th input was broadcast. If the input
        is not the result of a broadcast, returns the name and shape of the input itself."""
        a, graph = self.ins[i], self.g
        while graph is not None and not isinstance(a, list) and a not in graph.names:
            if a in graph.loose:
                return graph.loose[a]
            graph = graph.parent
        return self.x(i), self.in_types[i][1]

    def loosely(self, i: int, name: str, narrow: list) -> None:
        """Defines the i-th output as the broadcast of an ONNX value to the shape of the output. The
        arguments `name` and `narrow` are the name and the shape of the ONNX value before the
        broadcast. The operation that broadcasts the value is added only where it is necessary."""
        self.g.names.pop(self.outs[i], None)
        self.g.loose[self.outs[i]] = name, narrow

    def number(self, x: Any) -> str:
        """Returns the name of an ONNX constant, which contains the number x in the dtype of the
        first output."""
        return self.g.constant(float(x) if isinstance(x, str) else x, self.dtype)

    def branch(self, test: str, yes: Callable, no: Callable) -> list[str]:
        """Adds an If. `yes` and `no` are functions that add the nodes of the branches, and return
        their results."""
        outer, branches = self.g, []
        for function in (yes, no):
            self.g = outer.inner()
            self.g.outputs = [self.g.op("Identity", y) for y in function()]
            branches.append(self.g)
        self.g = outer
        dtypes = [self.model.dtypes.get(y) for y in branches[0].outputs]
        results = outer.op(
            "If",
            test,
            outputs=len(dtypes),
            then_branch=branches[0].proto("then"),
            else_branch=branches[1].proto("else"),
        )
        results = [results] if len(dtypes) == 1 else results
        self.model.dtypes.update(
            (y, dtype) for y, dtype in zip(results, dtypes) if dtype is not None
        )
        return results

    def body(self, graph, body, inputs) -> list[str]:
        path = self.model.path
        results = self.g.body(graph, body, inputs)
        self.model.path = path
        return results


__all__ = ["Equation", "Unsupported", "compare", "evaluated", "save"]
