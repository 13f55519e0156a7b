"""Rewrite rules of tune for GPUs and TPUs, which reduce memory traffic. The results stay equal up
to rounding.

The rewrite rules were evaluated with roofline estimates of compiled programs (`python -m
benchmarks.accelerators`). If a rule has a function `apply`, this function returns the outputs of an
equation. If a rule has a function `prepare`, this function returns a new equation and its inputs.
The new equation is evaluated instead of the original equation. If a rule also has a function
`finish`, this function receives the outputs of the new equation and returns the final outputs.
"""

from __future__ import annotations

import functools
import math
import operator

import jax.numpy as jnp
from jax import lax

from fnet import _jax, jaxpr
from fnet.jaxpr import Value, converted
from fnet.transforms._tune._cpu import Rule

UNROLLED = 1 << 13  # maximum equations of an unrolled loop: 48 layers of a transformer
LARGE = 1 << 16  # minimum elements of an array that is cast or copied before a loop
UPDATES = 16  # maximum number of slices that are overwritten by selection
CONSTANT = "constant"  # the origin of an operand that is the same in each iteration of a loop
_LOW = (jnp.dtype("bfloat16"), jnp.dtype("float16"))
# Kinds of primitives whose output has the values of their first input.
_ALIKE = ("alias", "layout", "cast")


def unrolled_layers(eqn, inputs):
    """Unrolls a scan over layers: each iteration uses one slice of the scanned weights in its
    matrix products.

    A scan is not unrolled if a matrix product or convolution in its body has an operand that is the
    same in each iteration, such as the weights of a recurrent network.

    If the backward loop reads the result of an elementwise operation, the forward loop stores this
    result. In code without loops, XLA recomputes the results of elementwise operations from the
    results of matrix products. A loop that recomputes activations (`jax.checkpoint`,
    `rematerialize`) is not unrolled, because XLA would then store the activations.
    """
    parts = jaxpr.scan(eqn)
    every = list(jaxpr.equations(parts.jaxpr))
    if (
        parts.options.get("unroll", 1) != 1
        or not 1 < parts.length
        or len(every) * parts.length > UNROLLED
    ):
        return None
    if any(
        each.primitive.name in ("remat2", "checkpoint")
        or "rematted_computation" in _jax.name_stack(each)
        for each in every
    ):
        return None
    return (jaxpr.unrolled(eqn), inputs) if _weights(parts) else None


def separate_layers(eqn, inputs):
    """Copies the weights of each layer out of the stacked arrays before an unrolled loop over
    layers.

    The compiler of a TPU prefetches whole arrays into on-chip memory, but not slices of larger
    arrays.
    """
    parts = jaxpr.scan(eqn)
    if parts.options.get("unroll") != parts.length:
        return None
    weights = [i for i in _weights(parts) if inputs[i].note is True and _separable(inputs[i].x)]
    changed = {i: Value(_separated(inputs[i].x)) for i in weights}
    return (eqn, [changed.get(i, value) for i, value in enumerate(inputs)]) if changed else None


def separate_gradients(eqn, outputs):
    """Computes the gradient of each layer's weights in an array of its own before the gradients are
    stacked. A stacked output of the scan is treated as a weight gradient if it has the shape of a
    stack of weights."""
    parts = jaxpr.scan(eqn)
    shapes = {eqn.invars[i].aval.shape for i in _weights(parts)}
    return [
        Value(_separated(y.x), y.note)
        if i >= parts.carry and y.x.shape in shapes and _separable(y.x)
        else y
        for i, y in enumerate(outputs)
    ]


def _separable(x) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating) and x.size >= LARGE * x.shape[0]


def _separated(x):
    """Returns an array equal to x. Optimization barriers make XLA compute x[0], x[1], ... as
    separate arrays."""
    return jnp.stack([lax.optimization_barrier(x[i]) for i in range(x.shape[0])])


def _weights(parts) -> list[int]:
    """Returns the indices of the scanned inputs that matrix products or convolutions use, such as
    the stacked weights of layers. Returns an empty list if a matrix product or convolution in the
    body of the scan uses the same array in each iteration, such as the weights of a recurrent
    network. A scan over layers uses different weights in each iteration."""
    consts, _, slices = parts.split(parts.jaxpr.invars)
    first = parts.consts + parts.carry
    origins = {**dict.fromkeys(consts, CONSTANT), **{v: i for i, v in enumerate(slices, first)}}
    read = {origin for operands in _operands(parts.jaxpr, origins) for origin in operands}
    return [] if CONSTANT in read else sorted(read - {None})


def _operands(program, origins):
    """Yields a list of the operands' origins for each matrix product or convolution in the body of
    a scan.

    The origin of an operand is the index of a scanned input, `CONSTANT` for an array that is the
    same in each iteration, or None for any other value. If a scanned input is cast, transposed or
    reshaped before a matrix product, the origin of the operand is still the index of the scanned
    input. The argument `origins` maps each input variable of the jaxpr to its origin (an index,
    `CONSTANT` or None).
    """
    origins = dict(origins)
    for eqn in program.eqns:
        known = [None if isinstance(v, _jax.Literal) else origins.get(v) for v in eqn.invars]
        if jaxpr.product(eqn) is not None:
            yield known
        elif jaxpr.traits(eqn.primitive.name).kind in _ALIKE:
            origins.update(dict.fromkeys(eqn.outvars, known[0] if known else None))
        for body in jaxpr.bodies(eqn):
            if body.inputs is not None:
                yield from _operands(
                    body.jaxpr, dict(zip(body.jaxpr.invars, (known[i] for i in body.inputs)))
                )


def hoisted_casts(eqn, inputs):
    """Moves casts out of a loop. If a loop uses a large float32 constant only in one 16-bit dtype,
    the constant is cast once, before the loop."""
    parts, changed = jaxpr.scan(eqn), {}
    for i, v in enumerate(parts.jaxpr.invars[: parts.consts]):
        x = inputs[i].x
        if getattr(x, "dtype", None) == jnp.float32 and x.size >= LARGE:
            read = _read_as(parts.jaxpr, v)
            if len(read) == 1 and read <= set(_LOW):
                changed[i] = Value(converted(x, read.pop()))
    return (eqn, [changed.get(i, value) for i, value in enumerate(inputs)]) if changed else None


def _read_as(program, v) -> set:
    """Returns the dtypes to which the equations of a jaxpr cast a float32 variable. The returned
    set also contains float32 if an equation reads the variable without a cast."""
    found = {jnp.dtype("float32")} if any(each is v for each in program.outvars) else set()
    for eqn in program.eqns:
        places = [i for i, each in enumerate(eqn.invars) if each is v]
        if not places:
            continue
        name, product = eqn.primitive.name, jaxpr.product(eqn)
        if name == "convert_element_type":
            found.add(jaxpr.new_dtype(eqn))
        elif product is not None and name not in jaxpr.BILINEAR:
            found.add(product.dtype)
        elif (
            jaxpr.traits(name).kind in ("alias", "layout")
            and places == [0]
            and len(eqn.outvars) == 1
        ):
            found |= _read_as(program, eqn.outvars[0])
        elif name in jaxpr.CALLS or name == "shard_map":
            body = jaxpr.bodies(eqn)[0]
            for i, inner in zip(body.inputs, body.jaxpr.invars):
                found |= _read_as(body.jaxpr, inner) if i in places else set()
        elif name == "scan" and max(places) < jaxpr.scan(eqn).consts:
            for i in places:
                found |= _read_as(jaxpr.scan(eqn).jaxpr, jaxpr.scan(eqn).jaxpr.invars[i])
        else:
            found.add(jnp.dtype("float32"))
    return found


def _hits(x, indices):
    """Returns the one-hot encoding of `indices` along the last axis of x, a bool array with the
    shape of x. If x has the shape [..., n], `indices` has the shape [..., 1, 1], with one index for
    each row of x."""
    return lax.broadcasted_iota(indices.dtype, x.shape, x.ndim - 1) == indices[..., 0]


def _holds(indices, count) -> bool:
    return jnp.issubdtype(indices.dtype, jnp.integer) and jnp.iinfo(indices.dtype).max >= count


def comparison(eqn, inputs):
    """Selects one element of each row, such as a label's logit, by a comparison instead of a
    lookup.

    XLA fuses a comparison with other operations that read the same row of the array, for example
    with the sum in a softmax. The gradient of a lookup is 0 except at the selected element of each
    row. The rule `comparison` also computes this gradient by a comparison. Without the rule, this
    gradient is computed by a scatter-add into an additional array of zeros.
    """
    mode = jaxpr.lookup_mode(eqn)
    x, indices = inputs[0].x, inputs[1].x
    if mode is None or not _holds(indices, x.shape[-1]):
        return None
    if mode == "clip":
        indices = jnp.clip(indices, 0, x.shape[-1] - 1)
    hits = _hits(x, indices)
    zero = jnp.zeros((), x.dtype)
    if eqn.primitive.name == "scatter-add":
        return [x + jnp.where(hits, inputs[2].x, zero)]
    y = jnp.where(hits, x, zero).sum(-1, keepdims=True, dtype=x.dtype)
    if mode == "fill":
        inside = (indices[..., 0] >= 0) & (indices[..., 0] < x.shape[-1])
        y = jnp.where(inside, y, jnp.full((), jnp.nan, x.dtype))
    return [y]


def two_rows(eqn, inputs):
    """Replaces the one-row operand of a 16-bit matrix product by two copies of the row.

    For the product of a one-row operand and a matrix, XLA multiplies the elements, rounds the
    results to 16 bits, writes them to memory, and reads them again to sum them. For the product of
    a two-row operand and a matrix, XLA reads the matrix once and accumulates in float32. Because
    the operand has two equal rows, the result also has two equal rows, and `two_rows` returns only
    the first row of the result.
    """
    product = jaxpr.product(eqn)
    contract, batch = product.dimensions
    x, y = (value.x for value in inputs)
    rows = [
        math.prod(a.shape[i] for i in range(a.ndim) if i not in axes)
        for a, axes in zip((x, y), contract)
    ]
    if (
        any(batch)
        or {x.dtype, y.dtype} - set(_LOW)
        or max(x.size, y.size) < LARGE
        or min(rows) != 1
        or max(rows) == 1
    ):
        return None
    if rows[1] == 1:
        x, y, contract = y, x, contract[::-1]
    # Without it, XLA removes the second row.
    x = lax.optimization_barrier(jnp.broadcast_to(x, (2, *x.shape)))
    dimensions = ([i + 1 for i in contract[0]], contract[1]), ((), ())
    both = lax.dot_general(x, y, dimensions, **product.without("dimension_numbers"))
    return [both[0].reshape(eqn.outvars[0].aval.shape)]


def unshifted(eqn, inputs):
    """Disables the subtraction of constants from a bfloat16 array in `nn.BatchNorm`.

    Without the rule `unshifted`, `nn.BatchNorm` subtracts the first value of each channel from the
    channel, and then sums the array. `unshifted` replaces the subtracted values by 0. If BatchNorm
    subtracts constants from the result of a convolution, XLA cannot compute the sums in the same
    compiled kernel as the convolution. If BatchNorm sums the array in float32 without subtracting
    constants, the relative error of the variance is about 2^-24 (mean / standard deviation)^2.
    Rounding the array to bfloat16 already causes a relative error of about 2^-20 (mean / standard
    deviation)^2 in the variance.
    """
    x = inputs[0].x
    return (
        [jnp.zeros_like(x)]
        if jaxpr.value_name(eqn) == jaxpr.SHIFT and x.dtype == jnp.bfloat16
        else None
    )


def few_updates(eqn, inputs):
    """Overwrites a few slices of a large array by elementwise selection, as when the keys and
    values of one token are appended to the cache of each text.

    The compiler of a TPU stores the operand of a scatter in a layout of its own, and copies the
    whole array into this layout and back. An elementwise operation reads and writes the array once,
    in any layout.
    """
    (x, indices, updates), axes_of = (value.x for value in inputs), jaxpr.overwritten(eqn)
    count = math.prod(indices.shape[:-1])
    if (
        axes_of is None
        or not 1 < count <= UPDATES
        or x.size < LARGE
        or not _holds(indices, max(x.shape))
    ):
        return None
    axes, window = axes_of
    updates = jnp.moveaxis(updates, window, range(-len(window), 0))
    updates = updates.reshape(count, *updates.shape[updates.ndim - len(window) :])
    places = [lax.broadcasted_iota(indices.dtype, x.shape, axis) for axis in axes]
    for index, update in zip(indices.reshape(count, len(axes)), updates):
        hits = functools.reduce(operator.and_, [place == at for place, at in zip(places, index)])
        x = jnp.where(hits, jnp.broadcast_to(lax.expand_dims(update, sorted(axes)), x.shape), x)
    return [x]


RULES = (
    Rule(
        "unrolled_layers",
        ("scan",),
        None,
        "XLA recomputes elementwise operations within one program, but not across "
        "the border of a loop",
        prepare=unrolled_layers,
    ),
    Rule(
        "hoisted_casts",
        ("scan",),
        None,
        "constants are cast once, before the loop",
        prepare=hoisted_casts,
    ),
    Rule(
        "comparison", ("gather", "scatter-add"), comparison, "one element of each row by comparison"
    ),
)
GPU_RULES = (
    *RULES,
    Rule(
        "two_rows",
        ("dot_general",),
        two_rows,
        "XLA writes the products of one row and a matrix to memory before it sums them",
    ),
)
TPU_RULES = (
    *RULES,
    Rule(
        "separate_layers",
        ("scan",),
        None,
        "the compiler prefetches whole arrays, but not slices, into on-chip memory",
        prepare=separate_layers,
        finish=separate_gradients,
    ),
    Rule(
        "few_updates",
        ("scatter",),
        few_updates,
        "the compiler copies the whole operand of a scatter into another layout",
    ),
    Rule(
        "unshifted",
        ("name",),
        unshifted,
        "the kernel of a convolution then sums its result for BatchNorm",
    ),
)
