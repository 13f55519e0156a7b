"""Counts the FLOPs and bytes of each named scope in the jaxpr of a JAX function."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fnet import jaxpr
from fnet._util._text_table import aligned
from fnet._util._units import si
from fnet.cost._fusion import fused_traffic, kernels, multiplies, updates
from fnet.hardware._chip import FrozenTable
from fnet.jaxpr import Frame, Op, Traced, cost, nbytes, read, touched, trips


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
        kernels: an estimate of the number of kernels that run one after another.
        light: those of the `kernels` that a CPU runs as part of a loop, because the loop has no
            matrix products.
        turns: the number of iterations of all loops.
        updates: how often they write a part of an array, such as the outputs of a scan.
        compared: those of `elementwise` that are comparisons of a sort.

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
    kernels: int = 0
    light: int = 0
    turns: int = 0
    updates: int = 0
    compared: int = 0

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
        results: the number of output arrays.
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
    results: int = 0

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
    once, unless it counts up or down to a constant; of a cond only the branch with the most FLOPs
    counts, and an operation of unknown cost counts as zero. Operations whose result is not used
    count, although a compiler removes them.

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
        count_frame(read(closed.jaxpr)),
        argument_bytes=arguments,
        output_bytes=outputs,
        results=len(closed.out_avals),
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
    def __init__(self, frame: Frame, times: int, *, looped: bool = False, light: bool = False):
        # Whether this is the body of a loop, and of one without products.
        self.looped, self.light = looped, light
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
        for op in kernels(frame):
            light = times if self.light else 0
            written = times * updates(op) if self.looped else 0
            self.scopes[op.scope] += Cost(kernels=times, light=light, updates=written)

    def bodies(self, op: Op, times: int) -> None:
        name, where = jaxpr.title(op.eqn), _where(op.scope)
        if op.bodies[0][0].kind == "branch":
            self.branches(op, times)
            return
        known = trips(op.eqn) if name == "while" else None
        if name == "while" and known is None:
            self.notes.append(
                f"while loop{where}: its number of iterations is unknown, one is counted"
            )
        before = self.looped, self.light
        for sub, frame in op.bodies:
            if sub.kind == "other":
                self.notes.append(f"{name}{where}: unknown operation, its body is counted once")
            turns = times * ((sub.times or 1) if known is None else known)
            if sub.kind in ("scan", "while_body"):
                self.scopes[op.scope] += Cost(turns=turns, updates=turns * updates(op))
            if sub.kind in ("scan", "while_body", "while_cond"):
                self.looped = True
                self.light = not any(multiplies(each) for _, each in op.bodies)
            self.frame(frame, turns)
            self.looped, self.light = before

    def branches(self, op: Op, times: int) -> None:
        branches = [
            _Tally(frame, times, looped=self.looped, light=self.light) for _, frame in op.bodies
        ]
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
            compared = flops if jaxpr.traits(eqn.primitive.name).kind == "sort" else 0
            self.scopes[op.scope] += Cost(**{each.kind: flops}, bytes=moved, compared=compared)

    def stand_in(self, op: Op, plain: Any, times: int) -> None:
        """Adds the FLOPs and bytes of `times` runs of a composite operation to the costs of the
        scopes. A composite operation, such as attention, represents several ordinary operations,
        whose FLOPs are counted. The bytes are those of the operands and results of the composite
        operation, without intermediate values."""
        inner = _Tally(read(plain, op.at), times)
        for scope, each in inner.scopes.items():
            inner.scopes[scope] = dataclasses.replace(
                each, bytes=0, fused_bytes=0, kernels=0, light=0
            )
        self.merge(inner)
        reads, writes = touched(op.eqn)
        self.scopes[op.scope] += Cost(bytes=(sum(reads) + sum(writes)) * times)

    def merge(self, other: _Tally) -> None:
        for scope, each in other.scopes.items():
            self.scopes[scope] += each
        self.matmuls += other.matmuls
        self.notes += other.notes


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
