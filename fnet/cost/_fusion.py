"""Which operations a compiler fuses into one kernel, and which values it writes to memory."""

from __future__ import annotations

from collections.abc import Iterator

from fnet.jaxpr import Frame, Op, scan, touched, traits


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


def kernels(frame: Frame) -> Iterator[Op]:
    """Yields the operation that ends each kernel of a jaxpr, without its bodies. Kernels run one
    after another on a device. Counters and other scalars belong to their loops, or to the kernels
    that read them."""
    kept = Kept(frame)
    for op in kept.real:
        if op.bodies:
            continue
        written = [out for out in op.outs if kept(out) and kept.used(out)]
        scalar = all(not getattr(v.aval, "shape", ()) for v in op.eqn.outvars)
        if written and (heavy(op) or not scalar):
            yield op


def multiplies(frame: Frame) -> bool:
    """Whether a jaxpr, or a body in it, has operations that a CPU runs in a library or in several
    threads: products, sorts and linear algebra."""
    kinds = ("product", "sort", "linear_algebra")
    return any(
        traits(op.eqn.primitive.name).kind in kinds
        or any(multiplies(inner) for _, inner in op.bodies)
        for op in frame.ops
    )


def updates(op: Op) -> int:
    """The number of arrays of which an operation in a loop, or an iteration of a scan, writes a
    part."""
    name = op.eqn.primitive.name
    if name == "scan":
        return len(op.eqn.outvars) - scan(op.eqn).carry
    return int(name == "dynamic_update_slice" or name.startswith("scatter"))
