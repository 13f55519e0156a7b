"""Compares the arguments of a call with the signature of an exported program.

A signature describes the inputs and the output as trees of dtypes and shapes. Every bundle (file of
an exported model) contains a copy of this module as signature.py.
"""

import re

import numpy as np

if __package__:
    from fnet.export.standalone._reader import BundleError
    from fnet.export.standalone._sizes import size, solved
else:
    from reader import BundleError
    from sizes import size, solved

# Dtypes that JAX narrows without jax_enable_x64.
WIDE = ("float64", "int64", "uint64", "complex128")
# Floating-point numbers of n bytes hold all integers up to.
_CONSECUTIVE = {1: 8, 2: 1 << 8, 4: 1 << 24, 8: 1 << 53}
KEYS = {"key<fry>": "threefry2x32", "key<rbg>": "rbg", "key<urbg>": "unsafe_rbg"}


def is_wide(stable):
    """Whether a program computes in dtypes of 64 bits, which JAX traces as dtypes of 32 bits
    without jax_enable_x64."""
    return any(dtype in WIDE for dtype, _ in stable["values"])


def bound(path, entry, description, inputs, named):
    """Checks the inputs of a call. Returns two values: the list of the input arrays, in the order
    of the program's inputs, and the values of the symbolic sizes, {name: value}.

    Raises:
        BundleError: the inputs do not match the signature (structure, dtypes and shapes of the
            inputs).
    """
    names = [name for name, _ in description["inputs"]]
    expected = f"{path}: {entry}({', '.join(names)})"
    values = dict(zip(names, inputs))
    unknown = sorted(set(named) - set(names)) or sorted(set(named) & set(values))
    if len(inputs) > len(names) or unknown:
        what = (
            f"the unexpected or repeated input {unknown[0]!r}"
            if unknown
            else f"{len(inputs)} inputs"
        )
        raise BundleError(f"{expected} got {what}")
    values |= named
    missing = [name for name in names if name not in values]
    if missing:
        raise BundleError(f"{expected} lacks the input {missing[0]!r}")
    flat, leaves = [], []
    for name, tree in description["inputs"]:
        flatten(expected, name, tree, values[name], flat, leaves)
    return flat, _sizes(expected, description["constraints"], leaves)


def _sizes(expected, constraints, leaves):
    """Returns the values of the symbolic sizes, {name: value}, after checking shapes and
    constraints."""
    sizes, origin = {}, {}
    for name, leaf, shape in leaves:
        if len(shape) != len(leaf["shape"]):
            raise BundleError(
                f"{expected}: the input {name!r} has shape {shape}, expected {text(leaf)}"
            )
        for axis, (n, wanted) in enumerate(zip(shape, leaf["shape"])):
            if isinstance(wanted, str) and wanted.isidentifier() and wanted not in sizes:
                sizes[wanted], origin[wanted] = n, f"axis {axis} of the input {name!r}"
                if n < 1:
                    raise BundleError(
                        f"{expected}: {origin[wanted]} has size {n}; {wanted} must be at least 1"
                    )
    _solve(expected, leaves, sizes, origin)
    for name, leaf, shape in leaves:
        for axis, (n, wanted) in enumerate(zip(shape, leaf["shape"])):
            try:
                value = size(wanted, sizes)
            except KeyError:  # a variable that no axis determines alone
                continue
            if n != value:
                why = (
                    f"{wanted} = {value}"
                    + (f", as in {origin[wanted]}" if wanted in origin else "")
                    if isinstance(wanted, str)
                    else f"{value}"
                )
                raise BundleError(
                    f"{expected}: the input {name!r} has shape {shape}, expected {text(leaf)}: "
                    f"axis {axis} has size {n}, expected {why}"
                )
    for constraint in constraints:
        if not satisfied(constraint, sizes):
            variables = [name for name in sizes if re.search(rf"\b{name}\b", constraint)]
            what = ", ".join(f"{name} = {sizes[name]} ({origin[name]})" for name in variables)
            raise BundleError(f"{expected}: {what} violates the constraint {constraint}")
    return sizes


def _solve(expected, leaves, sizes, origin):
    """Adds the variables that occur only in expressions, such as h in an image with 4*h rows."""
    expressions = [
        (name, leaf, axis, n, wanted)
        for name, leaf, shape in leaves
        for axis, (n, wanted) in enumerate(zip(shape, leaf["shape"]))
        if isinstance(wanted, str)
    ]
    for name, leaf, axis, n, wanted in [
        *expressions,
        *expressions,
    ]:  # one may need the variable of a later one
        unknown = solved(wanted, n, sizes)
        if unknown is None:
            continue
        variable, value = unknown
        if value is None or value < 1:
            raise BundleError(
                f"{expected}: axis {axis} of the input {name!r} has size {n}, expected {wanted} "
                f"for an integer {variable} of at least 1, as in {text(leaf)}"
            )
        sizes[variable], origin[variable] = (
            value,
            f"axis {axis} of the input {name!r}: {wanted} = {n}",
        )


def satisfied(constraint, sizes):
    """Whether sizes satisfy a constraint such as "t <= 64". If `sizes` has no value for a variable
    in the constraint, the result is True."""
    left, relation, right = re.split("(<=|>=|==)", constraint, maxsplit=1)
    try:
        x, y = (size(part.strip(), sizes) for part in (left, right))
    except KeyError:
        return True
    return {"<=": x <= y, ">=": x >= y, "==": x == y}[relation]


def flatten(expected, name, tree, value, flat, leaves):
    if tree is None:
        return
    if "dtype" in tree and "shape" in tree:
        x = value if hasattr(value, "shape") and hasattr(value, "dtype") else np.asarray(value)
        dtype = tree["dtype"]
        if str(x.dtype) != dtype and dtype in KEYS and x.dtype == np.uint32:
            import jax

            x = jax.random.wrap_key_data(x, impl=KEYS[dtype])
        if str(x.dtype) != dtype:
            if (
                dtype in KEYS
                or not np.can_cast(x.dtype, np.dtype(dtype), "same_kind")
                or x.dtype.kind in "?b"
            ):
                raise BundleError(
                    f"{expected}: the input {name!r} has dtype {x.dtype}, expected {dtype}"
                )
            x = converted(f"{expected}: the input {name!r}", x, np.dtype(dtype))
        flat.append(x)
        leaves.append((name, tree, tuple(x.shape)))
        return
    ((kind, children),) = tree.items()
    items = list(children.items()) if kind == "dict" else list(enumerate(children))
    held = value.keys() if kind == "dict" and hasattr(value, "keys") else range(len(value))
    if {key for key, _ in items} != set(held):
        raise BundleError(
            f"{expected}: the input {name!r} has the parts {sorted(map(str, held))}, expected "
            f"{sorted(str(key) for key, _ in items)}"
        )
    for key, child in items:
        flatten(expected, f"{name}/{key}", child, value[key], flat, leaves)


def converted(what, x, dtype):
    """Converts an array to a dtype that holds all of its values. Only floating-point numbers may be
    rounded.

    Raises:
        BundleError: a value is outside of the range of the dtype, or an integer has no equal in it.
            The error is also raised if the values of an integer array are not known yet, because
            JAX is tracing the call.
    """
    integers = x.dtype.kind in "iu"
    if np.can_cast(x.dtype, dtype, "safe") and not (
        integers and x.dtype.itemsize == 8 and dtype.kind in "fc"
    ):
        return x.astype(dtype)
    try:
        values = np.asarray(x)
    except TypeError:  # JAX is tracing
        if integers:
            raise BundleError(
                f"{what} has dtype {x.dtype}, expected {dtype}; inside of a transformation of JAX, "
                f"convert it first: x.astype({str(dtype)!r})"
            ) from None
        return x.astype(dtype)
    with np.errstate(all="ignore"):
        narrow = values.astype(dtype)
    if not integers:
        lost = np.isfinite(values) & ~np.isfinite(narrow)
    elif dtype.kind in "iu":
        lost = (
            (narrow < 0) != (values < 0) if dtype.itemsize == values.itemsize else narrow != values
        )
    else:
        lost = ~np.isfinite(narrow)
        reals = narrow.real.astype(np.float64)
        large = ~lost & (np.abs(reals) >= _CONSECUTIVE[narrow.real.dtype.itemsize])
        lost[large] = [int(a) != int(b) for a, b in zip(values[large], reals[large])]
    if lost.any():
        raise BundleError(
            f"{what} has dtype {x.dtype} and the value {values[lost].ravel()[0]}, which {dtype} "
            f"cannot hold; expected {dtype}"
        )
    return narrow


def unflatten(tree, leaves):
    if tree is None:
        return None
    if "dtype" in tree and "shape" in tree:
        return next(leaves)
    ((kind, children),) = tree.items()
    if kind == "dict":
        return {key: unflatten(child, leaves) for key, child in children.items()}
    parts = [unflatten(child, leaves) for child in children]
    return tuple(parts) if kind == "tuple" else parts


def named(description, inputs):
    """Returns the inputs of a program as trees, {name of the input: tree}. The argument `inputs`
    contains the leaves of all trees, in the order of the program's inputs."""
    leaves = iter(inputs)
    return {name: unflatten(tree, leaves) for name, tree in description["inputs"]}


def chosen(description, weights, held):
    """Selects the weights of an entry point (a function) from a tree of weights, and returns them
    as {name: array}.

    An entry point may also need arrays that the exported function closed over. If the tree
    `weights` does not contain such an array, the array is taken from `held`, a dict of the arrays
    that are stored in the bundle.
    """
    flat = {name: held[name] for name in description["weights"] if name.startswith("constants/")}

    def collect(tree, path):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for key, value in items:
            if isinstance(value, (dict, list, tuple)):
                collect(value, f"{path}{key}/")
            else:
                flat[f"{path}{key}"] = value

    collect(weights, "")
    missing = [name for name in description["weights"] if name not in flat]
    if missing:
        raise BundleError(
            f"the weights lack {missing[0]!r} ({len(missing)} of {len(description['weights'])} are "
            "missing)"
        )
    return {name: flat[name] for name in description["weights"]}


def of_entry(name, inputs, output, constraints):
    """Returns the signature of an entry point as text."""
    arguments = ", ".join(f"{argument}: {text(tree)}" for argument, tree in inputs)
    where = f" where {', '.join(constraints)}" if constraints else ""
    return f"{name}({arguments}) -> {text(output)}{where}"


def text(tree):
    if tree is None:
        return "None"
    if "dtype" in tree and "shape" in tree:
        return f"{tree['dtype']}[{', '.join(map(str, tree['shape']))}]"
    ((kind, children),) = tree.items()
    if kind == "dict":
        return "{" + ", ".join(f"{key}: {text(child)}" for key, child in children.items()) + "}"
    return ("[{}]" if kind == "list" else "({})").format(", ".join(map(text, children)))


def shape(leaf, sizes):
    """Returns the shape of an array for the given values of the symbolic sizes."""
    return tuple(size(n, sizes) for n in leaf["shape"])
