"""Loads a bundle and runs its programs. Bundles contain this file as load.py, which needs JAX and NumPy alone.

    python digits.fnet                      # describes the bundle and checks its programs

    import sys
    sys.path.insert(0, "digits.fnet")       # Python imports from zip archives
    import load

    model = load.load("digits.fnet")
    logits = model(x)
"""

import functools
import re
import sys

import numpy as np

if __package__:
    from fnet.export import _interpret as interpret
    from fnet.export import _reader as reader
    from fnet.export._sizes import size
else:
    import interpret
    import reader
    from sizes import size

BundleError = reader.BundleError
CALL = r'custom_call @"?([\w$.]+)'
_KEYS = {"key<fry>": "threefry2x32", "key<rbg>": "rbg", "key<urbg>": "unsafe_rbg"}


def load(path, *, verify=True, check=False, kernels=False):
    """Loads a bundle.

    Args:
        path: the file.
        verify: whether to compare the digest of the whole file, which reads all of it once. Without, only the digests
            of the small files in it are compared.
        check: whether to run all programs on the inputs that the bundle contains: `Bundle.check`.
        kernels: whether to use the program with kernels for this platform, if the bundle contains one.

    Returns:
        A `Bundle`.

    Raises:
        BundleError: the file is damaged, is not a bundle, or does not pass the check.
        OSError: the file cannot be read.
    """
    bundle = Bundle(reader.Archive(path, verify), kernels)
    if check:
        bundle.check()
    return bundle


class Bundle:
    """A model that was loaded from a file: its programs (entry points), weights and descriptions.

        model = export.load("digits.fnet")
        logits = model(x)                                 # the entry point "predict"
        vectors = model.call("embed", x)
        f = model.function("predict")                     # f(weights, x), for jax.jit, jax.grad, other weights

    Attributes:
        manifest: the description of the bundle, from JSON.
        weights: {name: array}, views of the memory-mapped file.
        entries: the names of the entry points.
        labels: the names of the classes, or None.
        read_until: the ISO date until which JAX guarantees to read the programs.
    """

    def __init__(self, archive, kernels=False):
        self._archive, self._kernels = archive, kernels
        self.path, self.manifest = archive.path, archive.manifest
        self.weights = archive.tensors(reader.WEIGHTS)
        self.entries = tuple(self.manifest["entries"])
        self.labels = self.manifest.get("labels")
        self.read_until = self.manifest["read_until"]
        self._programs = {}

    def __call__(self, *inputs, **named):
        """Runs the entry point "predict", or the only one."""
        return self.call("predict" if "predict" in self.entries else self.entries[0], *inputs, **named)

    def call(self, entry, *inputs, **named):
        """Runs an entry point with the bundle's weights.

        Returns:
            The output: arrays in dicts, lists and tuples.

        Raises:
            BundleError: the inputs do not match the signature; the message names the input and the violated constraint.
        """
        return self.function(entry)(self.arrays, *inputs, **named)

    def run(self, *inputs, **named):
        """Runs "preprocess", "predict" and "postprocess", as far as the bundle contains them. Each receives the output
        of the one before; a dict is passed as named inputs."""
        for entry in ("preprocess", "predict", "postprocess"):
            if entry in self.entries:
                output = self.call(entry, *inputs, **named)
                inputs, named = ((), output) if isinstance(output, dict) else ((output,), {})
        return output

    def function(self, entry):
        """The function f(weights, *inputs) of an entry point. It can be compiled, and differentiated if the bundle was
        saved with `differentiable=True`. Weights are {name: array}, or nested dicts with the same paths."""
        description, program = self._entry(entry), self._program(entry)

        def f(weights, *inputs, **named):
            flat, _ = bound(self.path, entry, description, inputs, named)
            return _unflatten(description["output"], iter(program(_chosen(description, weights, self.arrays), flat)))

        f.__name__ = entry
        return f

    def interpret(self, entry, *inputs, weights=None, **named):
        """Runs an entry point with NumPy, from its stable form. It needs no version of JAX, and is slow."""
        description = self._entry(entry)
        flat, sizes = bound(self.path, entry, description, inputs, named)
        chosen = _chosen(description, self.weights if weights is None else weights, self.weights)
        program = self.stable(entry)
        constants = [self.weights[name] for name in description["constants"]]
        inputs = [chosen[name] for name in description["weights"]] + flat
        return _unflatten(description["output"], iter(interpret.run(program, constants, inputs, sizes)))

    def stable(self, entry):
        """The stable form of an entry point, from JSON.

        Raises:
            BundleError: it has none; the message states the reason.
        """
        reason = self._entry(entry).get("not_stable")
        if reason:
            raise BundleError(f"{self.path}: {entry!r} has no stable form: {reason}")
        return self._archive.json(f"programs/{entry}.json")

    def files(self, folder):
        """{name: bytes} of the files in a folder of the bundle, such as "tokenizer"."""
        return {name.removeprefix(f"{folder}/"): self._archive.read(name)
                for name in self._archive.names(f"{folder}/")}

    def signature(self, entry):
        """The inputs and output of an entry point as text: "predict(x: float32[b, 8, 8, 1]) -> float32[b, 10]"."""
        description = self._entry(entry)
        inputs = ", ".join(f"{name}: {_text(tree)}" for name, tree in description["inputs"])
        where = f" where {', '.join(description['constraints'])}" if description["constraints"] else ""
        return f"{entry}({inputs}) -> {_text(description['output'])}{where}"

    def check(self):
        """Runs all programs on the inputs in the bundle, with JAX and with NumPy, and compares the outputs.

        Returns:
            One line for each entry point.

        Raises:
            BundleError: an output differs from the one in the bundle by more than 1e-5 of its largest element (with
                16-bit numbers, 2e-2).
        """
        lines = []
        for entry, (inputs, wanted) in self.tests().items():
            if not wanted:
                lines.append(f"{entry}: not checked, because the bundle contains no input for it")
                continue
            description = self._entry(entry)
            output = self.call(entry, **_named(description, inputs))
            found = f"{entry}: JAX {_compared(self.path, entry, 'JAX', description, output, wanted)}"
            if not description.get("not_stable"):
                found += f", NumPy {self.checked_by_numpy(entry, inputs, wanted)}"
            lines.append(found)
        return lines

    def checked_by_numpy(self, entry, inputs, wanted):
        """The part of `check` that needs no JAX, for one entry point."""
        description = self._entry(entry)
        output = self.interpret(entry, **_named(description, inputs))
        return _compared(self.path, entry, "NumPy", description, output, wanted)

    def tests(self):
        """{entry point: (leaves of the inputs, leaves of the outputs)} of the check; empty lists if there are none."""
        tests = self._archive.tensors(reader.TESTS)
        read = lambda kind: [tests[f"{kind}/{i}"] for i in range(sum(name.startswith(f"{kind}/") for name in tests))]
        return {entry: (read(f"{entry}/inputs"), read(f"{entry}/outputs")) for entry in self.entries}

    @functools.cached_property
    def arrays(self):
        """The weights as JAX arrays, copied to the default device on first use."""
        import jax

        return {name: jax.device_put(array) for name, array in self.weights.items()}

    def _entry(self, entry):
        if entry not in self.entries:
            raise BundleError(f"{self.path} has no entry point {entry!r}; it has {', '.join(self.entries)}")
        return self.manifest["entries"][entry]

    def _program(self, entry):
        """The function of (weights, inputs) that JAX runs."""
        if entry not in self._programs:
            import jax

            exported = self._deserialized(entry)
            self._programs[entry] = jax.jit(exported.call)
        return self._programs[entry]

    def _deserialized(self, entry):
        from jax import export

        name = f"programs/{entry}.portable.jax"
        if self._kernels:
            name = next((kernels for platform in _platforms() if (kernels := f"programs/{entry}.{platform}.jax")
                         in self.manifest["files"]), name)
        data = self._archive.read(name)
        try:
            exported = export.deserialize(bytearray(data))
        except Exception as error:    # flatbuffers and MLIR raise errors of many types for data that they cannot read
            raise BundleError(
                f"{self.path}: this version of JAX cannot read {name} ({' '.join(str(error).split())[:300]}). JAX "
                f"guarantees to read it until {self.read_until}. Bundle.interpret runs the program with NumPy, and "
                "fnet bundle renew FILE writes a new one") from error
        allowed = set(self._entry(entry)["custom_calls"].get(name.split(".")[-2], ()))
        calls = set(re.findall(CALL, exported.mlir_module())) - {"shape_assertion"}
        if not calls <= allowed:
            raise BundleError(f"{self.path}: {name} calls {', '.join(sorted(calls - allowed))}, which "
                              f"{reader.MANIFEST} does not state")
        return exported


def _platforms():
    import jax

    platform = jax.default_backend()
    return ("cuda", "rocm") if platform == "gpu" else (platform,)


def bound(path, entry, description, inputs, named):
    """(the input arrays in order, {size variable: value}) of a call.

    Raises:
        BundleError: the inputs do not match the signature.
    """
    names = [name for name, _ in description["inputs"]]
    expected = f"{path}: {entry}({', '.join(names)})"
    values = dict(zip(names, inputs))
    unknown = sorted(set(named) - set(names)) or sorted(set(named) & set(values))
    if len(inputs) > len(names) or unknown:
        what = f"the unexpected or repeated input {unknown[0]!r}" if unknown else f"{len(inputs)} inputs"
        raise BundleError(f"{expected} got {what}")
    values |= named
    missing = [name for name in names if name not in values]
    if missing:
        raise BundleError(f"{expected} lacks the input {missing[0]!r}")
    flat, leaves = [], []
    for name, tree in description["inputs"]:
        _flatten(expected, name, tree, values[name], flat, leaves)
    return flat, _sizes(expected, description["constraints"], leaves)


def _sizes(expected, constraints, leaves):
    """The values of the size variables."""
    sizes, origin = {}, {}
    for name, leaf, shape in leaves:
        if len(shape) != len(leaf["shape"]):
            raise BundleError(f"{expected}: the input {name!r} has shape {shape}, expected {_text(leaf)}")
        for axis, (n, wanted) in enumerate(zip(shape, leaf["shape"])):
            if isinstance(wanted, str) and wanted.isidentifier() and wanted not in sizes:
                sizes[wanted], origin[wanted] = n, f"axis {axis} of the input {name!r}"
                if n < 1:
                    raise BundleError(f"{expected}: {origin[wanted]} has size {n}; {wanted} must be at least 1")
    for name, leaf, shape in leaves:
        for axis, (n, wanted) in enumerate(zip(shape, leaf["shape"])):
            try:
                value = size(wanted, sizes)
            except KeyError:      # a variable that occurs in expressions alone; JAX solves for it
                continue
            if n != value:
                why = (f"{wanted} = {value}" + (f", as in {origin[wanted]}" if wanted in origin else "")
                       if isinstance(wanted, str) else f"{value}")
                raise BundleError(f"{expected}: the input {name!r} has shape {shape}, expected {_text(leaf)}: axis "
                                  f"{axis} has size {n}, expected {why}")
    for constraint in constraints:
        if not satisfied(constraint, sizes):
            variables = [name for name in sizes if re.search(rf"\b{name}\b", constraint)]
            what = ", ".join(f"{name} = {sizes[name]} ({origin[name]})" for name in variables)
            raise BundleError(f"{expected}: {what} violates the constraint {constraint}")
    return sizes


def satisfied(constraint, sizes):
    """Whether sizes satisfy a constraint such as "t <= 64"; True if it contains unknown variables."""
    left, relation, right = re.split("(<=|>=|==)", constraint, maxsplit=1)
    try:
        x, y = (size(part.strip(), sizes) for part in (left, right))
    except KeyError:
        return True
    return {"<=": x <= y, ">=": x >= y, "==": x == y}[relation]


def _flatten(expected, name, tree, value, flat, leaves):
    if tree is None:
        return
    if "dtype" in tree and "shape" in tree:
        x = value if hasattr(value, "shape") and hasattr(value, "dtype") else np.asarray(value)
        dtype = tree["dtype"]
        if str(x.dtype) != dtype and dtype in _KEYS and x.dtype == np.uint32:
            import jax

            x = jax.random.wrap_key_data(x, impl=_KEYS[dtype])
        if str(x.dtype) != dtype:
            if dtype in _KEYS or not np.can_cast(x.dtype, np.dtype(dtype), "same_kind") or x.dtype.kind in "?b":
                raise BundleError(f"{expected}: the input {name!r} has dtype {x.dtype}, expected {dtype}")
            x = x.astype(dtype)
        flat.append(x)
        leaves.append((name, tree, tuple(x.shape)))
        return
    (kind, children), = tree.items()
    items = list(children.items()) if kind == "dict" else list(enumerate(children))
    held = value.keys() if kind == "dict" and hasattr(value, "keys") else range(len(value))
    if {key for key, _ in items} != set(held):
        raise BundleError(f"{expected}: the input {name!r} has the parts {sorted(map(str, held))}, expected "
                          f"{sorted(str(key) for key, _ in items)}")
    for key, child in items:
        _flatten(expected, f"{name}/{key}", child, value[key], flat, leaves)


def _unflatten(tree, leaves):
    if tree is None:
        return None
    if "dtype" in tree and "shape" in tree:
        return next(leaves)
    (kind, children), = tree.items()
    if kind == "dict":
        return {key: _unflatten(child, leaves) for key, child in children.items()}
    parts = [_unflatten(child, leaves) for child in children]
    return tuple(parts) if kind == "tuple" else parts


def _named(description, inputs):
    """{name: input} of the leaves of all inputs."""
    leaves = iter(inputs)
    return {name: _unflatten(tree, leaves) for name, tree in description["inputs"]}


def _chosen(description, weights, held):
    """The weights of an entry point. Arrays that its function closed over are always those of the bundle."""
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
        raise BundleError(f"the weights lack {missing[0]!r} ({len(missing)} of {len(description['weights'])} are "
                          "missing)")
    return {name: flat[name] for name in description["weights"]}


def _text(tree):
    if tree is None:
        return "None"
    if "dtype" in tree and "shape" in tree:
        return f"{tree['dtype']}[{', '.join(map(str, tree['shape']))}]"
    (kind, children), = tree.items()
    if kind == "dict":
        return "{" + ", ".join(f"{key}: {_text(child)}" for key, child in children.items()) + "}"
    return ("[{}]" if kind == "list" else "({})").format(", ".join(map(_text, children)))


def _compared(path, entry, name, description, output, wanted):
    leaves, worst, tolerance = [], 0.0, description["tolerance"]
    _flatten(str(path), entry, description["output"], output, leaves, [])
    for i, (got, want) in enumerate(zip(leaves, wanted)):
        if str(getattr(got, "dtype", "")) in _KEYS:
            import jax

            got = jax.random.key_data(got)
        got, want = (np.asarray(x).astype(np.float64) for x in (got, want))
        largest = np.abs(want[np.isfinite(want)]).max(initial=0.0)
        same = np.array_equal(got, want, equal_nan=True)
        apart = 0.0 if same else float(np.abs(got - want).max(initial=0.0)) / max(largest, 1e-30)
        if not apart <= tolerance:
            raise BundleError(f"{path}: output {i} of {entry!r}, computed with {name}, differs from the bundle's by "
                              f"{apart:.1e} of its largest element, more than {tolerance:.0e}")
        worst = max(worst, apart)
    return f"{worst:.1e}" if worst else "equal"


def main(arguments=None):
    """Describes a bundle and checks its programs: `python digits.fnet`."""
    path = (sys.argv[1:] if arguments is None else arguments) or [sys.argv[0]]
    bundle = load(path[0])
    for entry in bundle.entries:
        print(bundle.signature(entry))
    versions = ", ".join(f"{name} {version}" for name, version in bundle.manifest["versions"].items())
    print(f"written {bundle.manifest['created']} by {versions}; JAX reads it until {bundle.read_until} at least")
    for line in bundle.check():
        print(line)
