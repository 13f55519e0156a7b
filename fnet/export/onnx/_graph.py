"""Builds an ONNX graph: adds nodes to the graph, including nodes that compute symbolic sizes and
shapes."""

from __future__ import annotations

import ast
from typing import Any

import numpy as np

from fnet.export.onnx import _kernels
from fnet.export.standalone import _sizes

INT64 = np.dtype(np.int64)
_POSITIVE = {"Exp", "Abs", "Sigmoid", "Softmax"}  # operators that never return -0.0
_KEEPING = {"Reshape", "Transpose", "Expand", "Unsqueeze", "Squeeze", "Slice", "Identity"}


class Graph:
    """The graph of a model, or of the body of a loop or branch.

    The body of a loop or branch can also use the values of the enclosing graphs.

    Attributes:
        nodes: the nodes in order.
        names: the names of the values in the graph, {index of the value in the program's stable
            form (JSON data): name}.
        loose: the broadcasts whose nodes are added to the graph only where an operator needs them.
            `loose` is a dict {index of the broadcast's result: (name, shape)}, in which name and
            shape are those of the array before the broadcast. The sizes in a shape are integers or
            expressions.
    """

    def __init__(self, model: Any, parent: Graph | None = None):
        self.model, self.parent = model, parent
        self.nodes: list = []
        self.names: dict[int, str] = {}
        self.loose: dict[str, str] = {}  # a broadcast value -> the value before the broadcast
        self.kept: dict[Any, str] = {}  # a size or shape -> the node that computes it

    def look(self, table: str, key: Any) -> Any:
        """Returns the value of a key in a dict of this graph, or else in the dict of the nearest
        enclosing graph that has the key. Returns None if no graph has the key. `table` is the name
        of the dict to search, for example "kept" for the attribute `Graph.kept`."""
        graph: Graph | None = self
        while graph is not None:
            if key in (entries := getattr(graph, table)):
                return entries[key]
            graph = graph.parent
        return None

    def op(self, kind: str, *inputs: str, outputs: int = 1, **attributes: Any) -> Any:
        """Adds a node, and returns the name of its output, or the names of its outputs if there are
        several.

        The operands are converted to a wider dtype and the result is converted back where
        onnxruntime has no kernel for their dtype.

        Raises:
            NotImplementedError: onnxruntime has no kernel for a dtype that contains the operands'
                numbers.
        """
        known = self.model.dtypes
        dtypes = [known.get(x) for x in inputs]
        compute = _kernels.compute_dtype(kind, dtypes)
        if compute is not None:
            places = _kernels.operands(kind, len(inputs))
            inputs = tuple(
                self.cast(x, compute) if i in places else x for i, x in enumerate(inputs)
            )
        name = self.model.unique(f"{self.model.path}/{kind}" if self.model.path else kind)
        names = [name if outputs == 1 else f"{name}.{i}" for i in range(outputs)]
        self.nodes.append(
            self.model.helper.make_node(kind, list(inputs), names, name=name, **attributes)
        )
        to = self.model.dtype_of(attributes["to"]) if kind == "Cast" else None
        result = _kernels.result_dtype(kind, [known.get(x) for x in inputs], to)
        if result is not None:
            known[names[0]] = result
        if kind == "TopK":
            known[names[1]] = INT64
        if (
            kind in _POSITIVE
            or (kind == "Add" and any(map(self.never_negative_zero, inputs)))
            or (kind in _KEEPING and self.never_negative_zero(inputs[0]))
            or (kind == "Where" and all(map(self.never_negative_zero, inputs[1:])))
            or (kind == "Mul" and inputs[0] == inputs[1])
        ):
            self.model.positive.add(names[0])
        if compute is not None and _kernels.keeps_dtype(kind):
            names[0] = self.cast(names[0], _kernels.typed(kind, dtypes))
        return names[0] if outputs == 1 else names

    def constant(self, array: Any, dtype: Any = None) -> str:
        return self.model.constant(np.asarray(array, dtype))

    def integers(self, *numbers: int) -> str:
        """Returns the name of a constant vector of integers, such as axes."""
        return self.constant(list(numbers), INT64)

    def opposite(self, x: str) -> str:
        """Returns `not x`. onnxruntime replaces Where(Not(x), a, b) by Where(x, b, a), which
        matters because its Where returns 0.0 for a -0.0 in the second operand, but not in the
        third."""
        return self.op("Equal", x, self.constant(False, bool))

    def never_negative_zero(self, x: str) -> bool:
        """Whether it is known that no element of x is -0.0."""
        known = self.known(x)
        return x in self.model.positive or (
            known is not None
            and (known.dtype.kind != "f" or not ((known == 0) & np.signbit(known)).any())
        )

    def without_negative_zeros(self, x: str) -> str:
        """Replaces -0.0 by 0.0, which XLA's sums begin with, so that they are never -0.0."""
        zero = self.constant(0, self.model.dtypes[x])
        return self.op("Where", self.op("Equal", x, zero), zero, x)

    # Sizes.

    def size(self, n: int | str) -> str:
        """Returns the name of an integer vector whose only element is the size n."""
        if isinstance(n, int):
            return self.integers(n)
        name = self.look("kept", n)
        if name is None:
            name = self.kept[n] = self._computed(ast.parse(n.replace("^", "**"), mode="eval").body)
        return name

    def _computed(self, node) -> str:
        if isinstance(node, ast.Constant):
            return self.integers(node.value)
        if isinstance(node, ast.Name):
            name = self.look("kept", node.id)
            if name is None:
                raise NotImplementedError(
                    f"the size variable {node.id!r} is not the size of any axis of an input"
                )
            return name
        if isinstance(node, ast.UnaryOp):
            return self.op("Neg", self._computed(node.operand))
        if isinstance(node, ast.BinOp):
            kinds = {ast.Add: "Add", ast.Sub: "Sub", ast.Mult: "Mul", ast.Pow: "Pow"}
            left, right = self._computed(node.left), self._computed(node.right)
            if type(node.op) in kinds:
                return self.op(kinds[type(node.op)], left, right)
            return (
                self._divided(left, right)
                if isinstance(node.op, ast.FloorDiv)
                else self._remainder(left, right)
            )
        function, parts = node.func.id, [self._computed(part) for part in node.args]
        if function in ("max", "min"):
            return self.op(function.capitalize(), *parts)
        return self._divided(*parts) if function == "floordiv" else self._remainder(*parts)

    def _remainder(self, x, y) -> str:
        return self.op("Mod", x, self._divisor(y))

    def _divided(self, x, y) -> str:
        """Divides integers and rounds down. (ONNX's operator Div rounds towards zero.)"""
        return self.op("Div", self.op("Sub", x, self._remainder(x, y)), self._divisor(y))

    def _divisor(self, y) -> str:
        """The size of an empty batch is 0, by which onnxruntime does not divide, not even for an
        empty result."""
        return y if y in self.model.weights else self.op("Max", y, self.integers(1))

    def shape(self, shape: list) -> str:
        """Returns the name of an integer vector that contains the sizes in `shape`."""
        if all(isinstance(n, int) for n in shape):
            return self.integers(*shape)
        key = tuple(shape)
        name = self.look("kept", key)
        if name is None:
            name = self.kept[key] = (
                self.op("Concat", *map(self.size, shape), axis=0)
                if len(shape) > 1
                else self.size(shape[0])
            )
        return name

    # Common operations.

    def reshape(self, x: str, old: list, new: list) -> str:
        """Reshapes x from the shape `old` to the shape `new`, and returns the name of the result."""
        if old == new:
            return x
        array = self.model.weights.get(x)
        if array is not None and all(isinstance(n, int) for n in new):
            return self.model.derived(x, array.reshape(new), "Reshape", self.integers(*new))
        symbolic = [i for i, n in enumerate(new) if not isinstance(n, int)]
        same = [i for i in symbolic if i < len(old) and old[i] == new[i]]  # 0 keeps the size
        target = [0 if i in same else n for i, n in enumerate(new)]
        rest = [i for i in symbolic if i not in same]
        # -1 cannot be computed beside a size that is kept and may be 0, as that of an empty batch.
        if len(rest) <= (0 if same else 1) and 0 not in old:
            for i in rest:
                target[i] = -1
            return self.op("Reshape", x, self.integers(*target))
        return self.op("Reshape", x, self.shape(new), allowzero=1)

    def transpose(self, x: str, order: list[int]) -> str:
        if order == list(range(len(order))):
            return x
        array = self.model.weights.get(x)
        if array is not None:
            return self.model.derived(x, array.transpose(order), "Transpose", perm=order)
        return self.op("Transpose", x, perm=order)

    def cast(self, x: str, dtype: Any) -> str:
        """Converts x as ONNX does: integers wrap, and numbers beyond the range of an integer dtype
        are undefined."""
        return self.op("Cast", x, to=self.model.kind(dtype))

    def known(self, x: str) -> np.ndarray | None:
        """Returns the value of a small constant, or None."""
        array = self.model.weights.get(x)
        return array if array is not None and array.size <= 4096 else None

    def expand(self, x: str, shape: list) -> str:
        return self.op("Expand", x, self.shape(shape))

    def unsqueeze(self, x: str, *axes: int) -> str:
        return self.op("Unsqueeze", x, self.integers(*axes))

    def slice(self, x: str, start: int | str, stop: int | str, axis: int, step: int = 1) -> str:
        """Computes x[start:stop:step] along one axis, and returns the name of the result."""
        return self.op(
            "Slice", x, self.size(start), self.size(stop), self.integers(axis), self.integers(step)
        )

    def dilate(self, x: str, shape: list, axis: int, step: int, zero: str) -> tuple[str, list]:
        """Inserts step - 1 elements `zero` between the elements of an axis of x. Returns (the name
        of the result, its shape)."""
        if step == 1:
            return x, shape
        n = shape[axis]
        wide = [*shape[: axis + 1], 1, *shape[axis + 1 :]]
        pads = [0] * (2 * len(wide))
        pads[len(wide) + axis + 1] = step - 1
        y = self.op("Pad", self.reshape(x, shape, wide), self.integers(*pads), zero)
        wide[axis + 1] = step
        full = [*shape[:axis], scaled(n, step), *shape[axis + 1 :]]
        y = self.op("Reshape", y, self.shape(full))
        shape = [*shape[:axis], added(scaled(n, step), 1 - step), *shape[axis + 1 :]]
        return self.slice(y, 0, -(step - 1), axis), shape

    def pad(self, x: str, shape: list, padding: list, value: str) -> tuple[str, list]:
        """Pads each axis of x by [low, high, interior] elements. Returns (the name of the result,
        its shape)."""
        for axis, (_, _, interior) in enumerate(padding):
            x, shape = self.dilate(x, shape, axis, interior + 1, value)
        lows, highs = [low for low, _, _ in padding], [high for _, high, _ in padding]
        if all(n == 0 for n in (*lows, *highs)):
            return x, shape
        shape = [added(added(n, low), high) for n, low, high in zip(shape, lows, highs)]
        return self.op("Pad", x, self.shape([*lows, *highs]), value), shape


def scaled(n: int | str, factor: int) -> int | str:
    return n * factor if isinstance(n, int) else f"({n})*{factor}"


def added(n: int | str, m: int | str) -> int | str:
    if isinstance(n, int) and isinstance(m, int):
        return n + m
    return n if m == 0 else m if n == 0 else f"({n}) + ({m})"


def product(sizes: list) -> int | str:
    """The product of sizes, as an integer or an expression."""
    numbers = [n for n in sizes if isinstance(n, int)]
    words = [f"({n})" for n in sizes if not isinstance(n, int)]
    number = int(np.prod(numbers, dtype=np.int64))
    return number if not words else "*".join([*([str(number)] if number != 1 else []), *words])


def same(n: int | str, m: int | str) -> bool:
    """Whether two sizes are the same number or the same expression."""
    return n == m or (not isinstance(n, int) and str(n).replace(" ", "") == str(m).replace(" ", ""))


def evaluated(shape: list, sizes: dict) -> tuple[int, ...]:
    return tuple(_sizes.size(n, sizes) for n in shape)
