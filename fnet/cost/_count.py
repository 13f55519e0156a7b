"""Counts the FLOPs and bytes of each named scope in the jaxpr of a JAX function."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fnet import jaxpr
from fnet._util._text_table import aligned
from fnet._util._units import si
from fnet.hardware._chip import FrozenTable
from fnet.jaxpr import Frame, Op, Traced, cost, nbytes, read, touched, traits


@dataclasses.dataclass(frozen=True)
class Cost:
    """The FLOPs and bytes of a named scope, or of several together.

    Two properties add up the FLOPs, and which to use depends on the question:

    - `flops` is `matmul + elementwise + reduction`: what the function computes, recomputation
      included.
    - `model_flops` is `matmul - recomputed`: what MFU counts, and what you compare models by.

    For memory traffic, use `fused_bytes`, as `roofline` does; `bytes` is only an upper bound of it.

    Attributes:
        matmul: the FLOPs of matrix products and convolutions, 2 for each multiply-add. Exact,
            except that convolutions include multiplications with the zeros of the padding.
        elementwise: the FLOPs of elementwise operations, 1 for each element of the result.
        reduction: the FLOPs of reductions, 1 for each element of the operand.
        transcendental: the number of evaluations of exp, tanh, rsqrt and similar functions, which
            are in neither `flops` nor `model_flops`.
        recomputed: the FLOPs in `matmul` that the backward pass spends on recomputation
            (rematerialization).
        bytes: the bytes of the inputs and outputs of every operation, as if nothing were fused.
        fused_bytes: an estimate of the bytes of memory traffic, with elementwise operations fused
            with their neighbors.

    >>> total = cost.count(jnp.matmul, jnp.ones((8, 16)), jnp.ones((16, 4))).total
    >>> total.matmul, total.flops, total.bytes                  # 2 * 8 * 16 * 4 FLOPs; float32 operands and result
    (1024, 1024, 896)
    """

    matmul: int = 0
    elementwise: int = 0
    reduction: int = 0
    transcendental: int = 0
    recomputed: int = 0
    bytes: int = 0
    fused_bytes: int = 0

    @property
    def flops(self) -> int:
        """All floating-point operations except transcendental functions."""
        return self.matmul + self.elementwise + self.reduction

    @property
    def model_flops(self) -> int:
        """The FLOPs of matrix products and convolutions without rematerialization, as MFU counts
        them.
        """
        return self.matmul - self.recomputed

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(a + b for a, b in zip(vars(self).values(), vars(other).values())))

    def times(self, n: int) -> Cost:
        return Cost(*(n * a for a in vars(self).values()))


class Matmul(NamedTuple):
    """A matrix product [batch, m, k] x [batch, k, n], or a convolution expressed as one.

    Attributes:
        scope: the path of the scope, such as "block/attention".
        op: "dot" or "conv".
        shape: the sizes (batch, m, n, k).
        dtype: the dtype of the operands.
        precision: the `precision` argument of the matrix product.
        flops: the FLOPs of all its runs together.
        times: how often it runs, for example in the iterations of a scan.

    >>> cost.count(jnp.matmul, jnp.ones((8, 16)), jnp.ones((16, 4))).matmuls[0].shape    # batch, m, n, k
    (1, 8, 4, 16)
    """

    scope: str
    op: str
    shape: tuple[int, int, int, int]
    dtype: str
    precision: Any
    flops: int
    times: int


@dataclasses.dataclass(frozen=True)
class Count:
    """The FLOPs and bytes of a function, the result of `count`. It prints as a table of scopes.

    Attributes:
        total: the sum over all scopes, a `Cost`.
        scopes: {scope path: `Cost`} in the order of the program. The path "" has the operations
            outside any scope.
        matmuls: all matrix products and convolutions, `Matmul` objects.
        argument_bytes: the size of the arguments in bytes.
        output_bytes: the size of the outputs in bytes.
        notes: why the count is not exact; empty if it is.

    >>> x = jax.ShapeDtypeStruct((4, 4), "float32")
    >>> cost.count(lambda x: x @ x, x).flops
    128
    """

    total: Cost
    scopes: Mapping[str, Cost]
    matmuls: tuple[Matmul, ...]
    argument_bytes: int
    output_bytes: int
    notes: tuple[str, ...]

    @property
    def flops(self) -> int:
        return self.total.flops

    @property
    def model_flops(self) -> int:
        return self.total.model_flops

    @property
    def io_bytes(self) -> int:
        """The bytes of the arguments and outputs, a lower bound of the memory traffic."""
        return self.argument_bytes + self.output_bytes

    @property
    def dtype(self) -> str | None:
        """The operand dtype with the most FLOPs in matrix products, or None if there are none."""
        by_type: dict[str, int] = {}
        for matmul in self.matmuls:
            by_type[matmul.dtype] = by_type.get(matmul.dtype, 0) + matmul.flops
        return max(by_type, key=by_type.__getitem__, default=None)

    def under(self, prefix: str) -> Cost:
        """Returns the total cost of a scope and all scopes below it."""
        inside = (
            cost
            for path, cost in self.scopes.items()
            if path == prefix or path.startswith(prefix + "/")
        )
        return sum(inside, Cost())

    def by_depth(self, depth: int | None) -> dict[str, Cost]:
        """Returns {path: `Cost`}, where scopes with the same first `depth` segments are summed.
        With None, every scope has its own entry.
        """
        rows: dict[str, Cost] = {}
        for path, each in self.scopes.items():
            key = shortened(path, depth)
            rows[key] = rows.get(key, Cost()) + each
        return rows

    def __str__(self) -> str:
        return table(self)


def count(f: Callable[..., Any], *args: Any, **kwargs: Any) -> Count:
    """Counts the FLOPs and bytes of a function from its jaxpr, without running or compiling it.

        print(cost.count(step, state, batch))       # a table of named scopes

    The body of a scan counts once for each iteration, and the shards of a shard_map are summed.
    What cannot be known is listed in the `notes` of the result: the body of a while loop counts
    once, of a cond only the branch with the most FLOPs, and an operation of unknown cost counts as
    zero. Operations whose result is not used count, although a compiler removes them.

    The FLOPs of `layers.dot_product_attention` follow from the formula of attention and include
    masked pairs of positions, as is the convention for MFU. What its backward pass recomputes is in
    `Cost.recomputed`, and its bytes are those of its operands and results.

    Args:
        f: any JAX function, also a jitted, differentiated or sharded one.
        *args, **kwargs: its arguments, trees of arrays or `jax.ShapeDtypeStruct`s. Leaves that are
            not arrays (flags, strings, functions, Python numbers) are passed unchanged.

    Returns:
        A `Count`.

    >>> import jax
    >>> from fnet import hardware as hw
    >>> x = jax.ShapeDtypeStruct((8, 32), "float32")
    >>> w = jax.ShapeDtypeStruct((32, 64), "float32")
    >>> cost.count(lambda x, w: x @ w, x, w).flops
    32768
    """
    return count_jaxpr(Traced(f, args, kwargs).closed)


def shortened(path: str, depth: int | None) -> str:
    """Returns the first `depth` segments of a scope path, or the whole path for None."""
    return path if depth is None else "/".join(path.split("/")[:depth])


def count_jaxpr(closed: Any) -> Count:
    """Counts the FLOPs and bytes of a closed jaxpr, as `count` does for a function."""
    arguments = sum(nbytes(v.aval) for v in (*closed.jaxpr.invars, *closed.jaxpr.constvars))
    outputs = sum(nbytes(aval) for aval in closed.out_avals)
    return dataclasses.replace(
        count_frame(read(closed.jaxpr)), argument_bytes=arguments, output_bytes=outputs
    )


def count_frame(frame: Frame) -> Count:
    """Counts the FLOPs and bytes of the operations of one jaxpr, but not the bytes of its arguments
    and outputs."""
    tally = _Tally(frame, 1)
    return Count(
        tally.total,
        FrozenTable(tally.scopes),
        tuple(tally.matmuls),
        0,
        0,
        tuple(dict.fromkeys(tally.notes)),
    )


class _Tally:
    def __init__(self, frame: Frame, times: int):
        self.scopes: dict[str, Cost] = collections.defaultdict(Cost)
        self.matmuls: list[Matmul] = []
        self.notes: list[str] = []
        self.frame(frame, times)

    @property
    def total(self) -> Cost:
        return sum(self.scopes.values(), Cost())

    def frame(self, frame: Frame, times: int) -> None:
        for op in frame.ops:
            if op.bodies:
                self.bodies(op, times)
            else:
                self.operation(op, times)
        for op, n in fused_traffic(frame):
            self.scopes[op.scope] += Cost(fused_bytes=n * times)

    def bodies(self, op: Op, times: int) -> None:
        name, where = jaxpr.title(op.eqn), _where(op.scope)
        if op.bodies[0][0].kind == "branch":
            self.branches(op, times)
            return
        if name == "while":
            self.notes.append(
                f"while loop{where}: its number of iterations is unknown, one is counted"
            )
        for sub, frame in op.bodies:
            if sub.kind == "other":
                self.notes.append(f"{name}{where}: unknown operation, its body is counted once")
            self.frame(frame, times * (1 if sub.times is None else sub.times))

    def branches(self, op: Op, times: int) -> None:
        branches = [_Tally(frame, times) for _, frame in op.bodies]
        if len({tally.total.flops for tally in branches}) > 1:
            self.notes.append(
                f"cond{_where(op.scope)}: only the most expensive of {len(branches)} branches is "
                f"counted"
            )
        self.merge(max(branches, key=lambda tally: (tally.total.flops, tally.total.bytes)))

    def operation(self, op: Op, times: int) -> None:
        eqn = op.eqn
        plain = jaxpr.description(eqn.primitive).plain
        if plain is not None:
            self.stand_in(op, plain(eqn), times)
            return
        each = cost(eqn)
        reads, writes = touched(eqn)
        moved = (sum(reads) + sum(writes)) * times
        flops = each.flops * times
        label = f"{jaxpr.title(eqn)}{_where(op.scope)}"

        if each.kind == "unknown":
            self.notes.append(f"{label}: its FLOPs are unknown, counted as 0")
            self.scopes[op.scope] += Cost(bytes=moved)
        elif each.kind == "free":
            self.scopes[op.scope] += Cost(bytes=moved)
        elif each.kind == "matmul":
            if each.shape is None:
                self.notes.append(f"{label}: the FLOPs are the operation's own estimate")
            else:
                self.matmuls.append(_matmul(op, each.shape, flops, times))
            recomputed = flops if op.recomputed else 0
            self.scopes[op.scope] += Cost(matmul=flops, recomputed=recomputed, bytes=moved)
        else:  # the other kinds are names of fields of Cost
            self.scopes[op.scope] += Cost(**{each.kind: flops}, bytes=moved)

    def stand_in(self, op: Op, plain: Any, times: int) -> None:
        """Adds the FLOPs and bytes of `times` runs of a composite operation to the costs of the
        scopes. A composite operation, such as attention, represents several ordinary operations,
        whose FLOPs are counted. The bytes are those of the operands and results of the composite
        operation, without intermediate values."""
        inner = _Tally(read(plain, op.at), times)
        for scope, each in inner.scopes.items():
            inner.scopes[scope] = dataclasses.replace(each, bytes=0, fused_bytes=0)
        self.merge(inner)
        reads, writes = touched(op.eqn)
        self.scopes[op.scope] += Cost(bytes=(sum(reads) + sum(writes)) * times)

    def merge(self, other: _Tally) -> None:
        for scope, each in other.scopes.items():
            self.scopes[scope] += each
        self.matmuls += other.matmuls
        self.notes += other.notes


def fused_traffic(frame: Frame) -> list[tuple[Op, int]]:
    """Returns the memory traffic of the operations of one jaxpr, as a list of pairs (operation,
    bytes). Elementwise operations are assumed to be fused with neighbors of the same scope.

    A value is stored in memory if it is an input or output of the jaxpr, or if an operation in
    another named scope reads the value. If several operations in one named scope read the same
    stored value, only one read is counted.
    """
    kept = Kept(frame, by_scope=True)
    moved: dict[tuple[str, int, str], tuple[Op, int]] = {}

    def move(op: Op, value: int, size: int, way: str) -> None:
        key = op.scope, kept.name(value), way
        if key not in moved or size > moved[key][1]:
            moved[key] = op, size

    for op in kept.real:
        if op.bodies:
            continue  # the bytes are counted in the frame of its body
        reads, writes = touched(op.eqn)
        for value, size in zip(op.ins, reads):
            if value is not None and kept(value):
                move(op, value, size, "read")
        for value, size in zip(op.outs, writes):
            if value is not None and kept(value) and kept.used(value):
                move(op, value, size, "write")
    return list(moved.values())


class Kept:
    """Determines which values of a frame (the operations of one jaxpr) are written to memory after
    fusion of elementwise operations.

    A value is written to memory if an operation that is not elementwise, such as a matrix product,
    produces or reads the value. However, if the only reader of the result of a matrix product is an
    elementwise operation (an epilogue), the two operations are fused, and the result is not written
    to memory. Reshapes, broadcasts and transposes need no memory traffic.

    Args:
        frame: the operations of one jaxpr, in order.
        by_scope: whether operations are fused only with operations of the same scope. Default
            False.
        epilogues: whether a matrix product is fused with an elementwise operation that is the only
            reader of its result. Default True.

    Attributes:
        real: all operations except those that need no memory traffic, such as reshapes.
        users: the operations that read each value.
        outputs: the output values of the jaxpr.
    """

    def __init__(self, frame: Frame, *, by_scope: bool = False, epilogues: bool = True):
        self.by_scope, self.epilogues = by_scope, epilogues
        self._same: dict[int, int] = {}  # maps the result of a reshape or broadcast to its input
        for op in frame.ops:
            if _free(op) and op.ins and op.ins[0] is not None:
                self._same[op.outs[0]] = self.name(op.ins[0])
        self.real = [op for op in frame.ops if not _free(op) and op.eqn.primitive.name != "iota"]
        self.maker = {out: op for op in self.real for out in op.outs}
        self.users: dict[int, list[Op]] = {}
        for op in self.real:
            for i in op.ins:
                if i is not None:
                    self.users.setdefault(self.name(i), []).append(op)
        self.outputs = {self.name(i) for i in frame.outputs if i is not None}

    def name(self, value: int) -> int:
        """Returns the value of which `value` is a reshaped, broadcast or transposed form."""
        return self._same.get(value, value)

    def used(self, value: int) -> bool:
        return bool(self.users.get(value)) or value in self.outputs

    def __call__(self, value: int) -> bool:
        value = self.name(value)
        op = self.maker.get(value)
        users = self.users.get(value, [])
        if op is None or value in self.outputs:
            return True
        if any(heavy(user) for user in users):
            return True
        if self.by_scope and any(user.scope != op.scope for user in users):
            return True
        is_epilogue = self.epilogues and len(users) == 1
        return heavy(op) and not is_epilogue


def heavy(op: Op) -> bool:
    """Whether an operation reads its inputs from memory, and is not fused with the operations that
    compute them. For example, matrix products and loops read their inputs from memory."""
    return bool(op.bodies) or traits(op.eqn.primitive.name).memory == "heavy"


def _free(op: Op) -> bool:
    return traits(op.eqn.primitive.name).memory == "free"


def table(counted: Count, depth: int | None = None) -> str:
    """Formats a count as a table with a line for each scope."""
    rows = [("scope", "matmul", "other FLOPs", "transcend.", "bytes fused", "unfused")]
    for path, each in (*counted.by_depth(depth).items(), ("total", counted.total)):
        rows.append(
            (
                path or "(no scope)",
                f"{si(each.matmul)}F",
                f"{si(each.elementwise + each.reduction)}F",
                si(each.transcendental),
                f"{si(each.fused_bytes)}B",
                f"{si(each.bytes)}B",
            )
        )
    lines = [
        *aligned(rows),
        "FLOPs are exact (convolutions: padding included); the bytes moved are between",
        f"{si(counted.io_bytes)}B (arguments and outputs, exact) and {si(counted.total.bytes)}B "
        f"(unfused, upper bound); 'fused' is an estimate.",
        *(f"note: {note}" for note in counted.notes),
    ]
    return "\n".join(lines)


def _matmul(op: Op, shape: tuple[int, int, int, int], flops: int, times: int) -> Matmul:
    product = jaxpr.product(op.eqn)
    if product is None:  # a ragged dot, of which `cost` knows the sizes
        name, dtype, precision = "dot", op.eqn.invars[0].aval.dtype, None
    else:
        name = "conv" if product.op is jaxpr.CONVOLUTION else "dot"
        dtype, precision = product.dtype, product.precision
    return Matmul(op.scope, name, shape, str(dtype), precision, flops, times)


def _where(scope: str) -> str:
    return f" in '{scope}'" if scope else ""
