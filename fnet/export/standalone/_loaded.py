"""Loads a bundle (the file of an exported model) and runs its programs. Every bundle of an exported
model contains a copy of this module as load.py. The module needs only JAX and NumPy.

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
    from fnet.export.standalone import _interpret as interpret
    from fnet.export.standalone import _outputs as outputs
    from fnet.export.standalone import _reader as reader
    from fnet.export.standalone import _rounding as rounding
    from fnet.export.standalone import _signature as signature
else:
    import interpret
    import outputs
    import reader
    import rounding
    import signature

BundleError = reader.BundleError
CALL = r'custom_call @"?([\w$.]+)'


def load(path, *, verify=True, check=False, kernels=False):
    """Loads a bundle, the file that `Program.save` writes. No Python code in the file is executed.

        digits = export.load("digits.fnet", check=True)
        logits = digits(x)

    Args:
        path: the file.
        verify: whether to read the whole file once and compare it with the SHA-256 at its end.
            Default True. If False, only the small files inside are compared with theirs in
            manifest.json.
        check: whether to run the tests in the bundle, as `Bundle.check` does. Default False.
        kernels: whether to use a program with handwritten attention kernels, if the bundle has one
            for JAX's default platform. Default False.

    Returns:
        A `Bundle`.

    Raises:
        BundleError: the file is damaged, is not a bundle, or does not pass the check.
        OSError: the file cannot be read.

    >>> import tempfile
    >>> model = nn.Dense(3)
    >>> params, state = model.init(jax.random.key(0), jnp.ones((1, 4)))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     export.program(model, params, state, x=export.spec("b, 4")).save(f"{folder}/dense.fnet")
    ...     export.load(f"{folder}/dense.fnet", check=True)(np.ones((2, 4), np.float32)).shape
    (2, 3)
    """
    bundle = Bundle(reader.Archive(path, verify), kernels)
    if check:
        bundle.check()
    return bundle


class Bundle:
    """A model that was loaded from a bundle: its entry points, weights and description.

        model = export.load("digits.fnet")
        logits = model(x)                                 # the entry point "predict"
        vectors = model.call("embed", x)
        f = model.function("predict")                     # f(weights, x): other weights, jax.jit, jax.grad

    Attributes:
        manifest: the description of the bundle, the content of manifest.json.
        weights: the weights, {name: array}, views of the memory-mapped file.
        entries: the names of the entry points, a tuple.
        labels: the names of the classes, or None.
        read_until: the date until which JAX guarantees to read the programs, such as "2027-05-20".

    >>> import tempfile
    >>> model = nn.Dense(3)
    >>> params, state = model.init(jax.random.key(0), jnp.ones((1, 4)))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     export.program(model, params, state, x=export.spec("b, 4")).save(f"{folder}/dense.fnet")
    ...     bundle = export.load(f"{folder}/dense.fnet")
    ...     bundle.entries, bundle(np.ones((5, 4), np.float32)).shape
    (('predict',), (5, 3))
    """

    def __init__(self, archive, kernels=False):
        self._archive, self._kernels = archive, kernels
        self.path, self.manifest = archive.path, archive.manifest
        self.weights = archive.tensors(reader.WEIGHTS)
        self.entries = tuple(self.manifest["entries"])
        self.labels = self.manifest.get("labels")
        self.read_until = self.manifest["read_until"]
        self._programs, self._exported = {}, {}

    def __call__(self, *inputs, **named):
        """Runs the entry point "predict", or the first one if the bundle has no "predict"."""
        return self.call(
            "predict" if "predict" in self.entries else self.entries[0], *inputs, **named
        )

    def call(self, entry, *inputs, **named):
        """Runs an entry point, one of the functions of the bundle, with the bundle's weights.

            logits = bundle.call("predict", x)                 # the same as bundle(x)
            vectors = bundle.call("embed", x)                  # another entry point
            vectors = bundle.call("embed", x=x)                # with the name of the input

        Args:
            entry: the name of the entry point, one of `entries`.
            inputs, named: the inputs, in the order of the signature or by name. The text
                `signature(entry)` has their names, dtypes and shapes.

        Returns:
            The output, a tree of arrays.

        Raises:
            BundleError: the bundle has no such entry point, the inputs do not match its signature
                (structure, dtypes and shapes), or an input has a value that the dtype in the
                signature cannot hold. The message names the input and states the violated
                constraint. Also if the program has dtypes of 64 bits and jax_enable_x64 is not set,
                or if a later version of JAX wrote the bundle and the installed one cannot read it.
        """
        return self.function(entry)(self.arrays, *inputs, **named)

    def run(self, *inputs, **named):
        """Runs "preprocess", "predict" and "postprocess" one after another, those that the bundle
        has.

        Each one's output is the input of the next; the items of a dict become its named inputs.
        """
        for entry in ("preprocess", "predict", "postprocess"):
            if entry in self.entries:
                output = self.call(entry, *inputs, **named)
                inputs, named = ((), output) if isinstance(output, dict) else ((output,), {})
        return output

    def function(self, entry):
        """Returns an entry point as a function f(weights, *inputs), for `jax.jit` or other weights.

        `weights` is a dict {name: array}, or a nested dict whose paths are these names. If the
        bundle was saved with `differentiable=True`, `jax.grad` takes the function as well.
        """
        description, program = self._entry(entry), self._program(entry)

        def f(weights, *inputs, **named):
            self._check_wide(entry)
            flat, _ = signature.bound(self.path, entry, description, inputs, named)
            leaves = self._run(
                entry, program, signature.chosen(description, weights, self.arrays), flat
            )
            return signature.unflatten(description["output"], iter(leaves))

        f.__name__ = entry
        return f

    def interpret(self, entry, *inputs, weights=None, **named):
        """Runs an entry point with NumPy, without JAX: slow, but independent. It evaluates the
        stable form of the program."""
        description = self._entry(entry)
        flat, sizes = signature.bound(self.path, entry, description, inputs, named)
        chosen = signature.chosen(
            description, self.weights if weights is None else weights, self.weights
        )
        program = self.stable(entry)
        constants = [self.weights[name] for name in description["constants"]]
        inputs = [chosen[name] for name in description["weights"]] + flat
        return signature.unflatten(
            description["output"], iter(interpret.run(program, constants, inputs, sizes))
        )

    def stable(self, entry):
        """Returns the stable form of an entry point, a description as JSON that does not depend on
        JAX's version.

        Raises:
            BundleError: it has none; the message states the reason.
        """
        reason = self._entry(entry).get("not_stable")
        if reason:
            raise BundleError(f"{self.path}: {entry!r} has no stable form: {reason}")
        return self._archive.json(f"programs/{entry}.json")

    def files(self, folder):
        """Returns the files in a folder of the bundle, such as "tokenizer", as {name: bytes}."""
        return {
            name.removeprefix(f"{folder}/"): self._archive.read(name)
            for name in self._archive.names(f"{folder}/")
        }

    def signature(self, entry):
        """Returns the signature of an entry point as text.

        For example "predict(x: float32[b, 8, 8, 1]) -> float32[b, 10]".
        """
        description = self._entry(entry)
        parts = (description[key] for key in ("inputs", "output", "constraints"))
        return signature.of_entry(entry, *parts)

    def __repr__(self):
        return f"<Bundle {'; '.join(map(self.signature, self.entries))}>"

    def check(self):
        """Runs all programs on the test inputs in the bundle, with JAX and with NumPy, and compares
        both with the stored outputs.

        Returns:
            A line of text for each entry point.

        Raises:
            BundleError: an element differs from the stored one by more than 1e-5 of its value (2e-3
                if the program computes in float16, 2e-2 in bfloat16, 1e-10 if all is float64) and
                more than rounding explains, which NumPy measures if it has to.
        """
        lines = []
        for entry in self.entries:
            if not self.cases(entry):
                lines.append(f"{entry}: not checked, because the bundle contains no input for it")
                continue
            runs = {"JAX": self.call}
            if not self._entry(entry).get("not_stable"):
                runs["NumPy"] = self.interpret
            lines.append(f"{entry}: {self._checked(entry, runs)}")
        return lines

    def checked_by_numpy(self, entry):
        """Checks one entry point with NumPy alone, which is possible without JAX."""
        return self._checked(entry, {"NumPy": self.interpret})

    def _checked(self, entry, runs):
        worst, description = dict.fromkeys(runs, 0.0), self._entry(entry)
        for inputs, wanted in self.cases(entry):
            spreads = self.spreads(entry, inputs, with_jax="JAX" in runs)
            for name, run in runs.items():
                output = run(entry, **signature.named(description, inputs))
                worst[name] = max(
                    worst[name],
                    self.compare(entry, f"computed with {name}", output, wanted, spreads),
                )
        return ", ".join(
            f"{name} {error:.1e}" if error else f"{name} equal" for name, error in worst.items()
        )

    def compare(self, entry, how, output, wanted, spreads):
        """Compares an output with that of a test in `cases`. Returns the largest relative
        difference of an element.

        Raises:
            BundleError: an element differs by more than the tolerance of the bundle and more than
                rounding explains.
        """
        description, leaves = self._entry(entry), []
        signature.flatten(str(self.path), entry, description["output"], output, leaves, [])
        try:
            return outputs.compare(
                f"{self.path}: {entry!r} {how}",
                map(str, range(len(leaves))),
                map(_data, leaves),
                wanted,
                description["tolerance"],
                spreads,
            )
        except outputs.Different as error:
            raise BundleError(str(error)) from None

    def spreads(self, entry, inputs, *, with_jax):
        """Returns functions that measure, for each output of a test in `cases`, by how much
        rounding may change each element: with JAX, if `with_jax`, and with NumPy, if there is a
        stable form."""
        description = self._entry(entry)
        flat, sizes = signature.bound(
            self.path, entry, description, (), signature.named(description, inputs)
        )

        @functools.cache
        def perturbed():
            program, weights = (
                self._program(entry),
                {name: self.weights[name] for name in description["weights"]},
            )
            return rounding.perturbed(
                lambda weights, inputs: map(_data, program(weights, inputs)), weights, flat
            )

        @functools.cache
        def spread():
            constants = [self.weights[name] for name in description["constants"]]
            weights = [self.weights[name] for name in description["weights"]]
            return rounding.spread(self.stable(entry), constants, [*weights, *flat], sizes)

        return [perturbed] * with_jax + [spread] * (not description.get("not_stable"))

    def tests(self):
        """Returns the first test of each entry point, {name: (leaves of the inputs, leaves of the
        outputs)}; both lists are empty if it has none."""
        return {
            entry: self.cases(entry)[0] if self.cases(entry) else ([], []) for entry in self.entries
        }

    def cases(self, entry):
        """Returns the tests of an entry point, a list of (leaves of the inputs, leaves of the
        outputs)."""
        stored, found = self._archive.tensors(reader.TESTS), []
        while f"{(name := reader.test_name(entry, len(found)))}/outputs/0" in stored:
            found.append(
                tuple(
                    [
                        stored[f"{name}/{kind}/{i}"]
                        for i in range(sum(key.startswith(f"{name}/{kind}/") for key in stored))
                    ]
                    for kind in ("inputs", "outputs")
                )
            )
        return found

    @functools.cached_property
    def arrays(self):
        """The weights, {name: JAX array}, copied to the default device on first use."""
        import jax

        return {name: jax.device_put(array) for name, array in self.weights.items()}

    def _entry(self, entry):
        if entry not in self.entries:
            raise BundleError(
                f"{self.path} has no entry point {entry!r}; it has {', '.join(self.entries)}"
            )
        return self.manifest["entries"][entry]

    def _program(self, entry):
        """Returns the program of a function of the bundle as a jitted function of (weights,
        inputs)."""
        if entry not in self._programs:
            import jax

            exported = self._deserialized(entry)
            self._check_wide(entry)
            self._programs[entry] = jax.jit(exported.call)
        return self._programs[entry]

    def _run(self, entry, program, weights, flat):
        try:
            return program(weights, flat)
        except BundleError:
            raise
        except (
            Exception
        ) as error:  # JAX may find only while it compiles that it does not know an operation
            if self._newer():
                raise self._unreadable(f"the program {entry!r}", error) from error
            raise

    def wide(self, entry):
        """Returns the dtypes of 64 bits in the inputs, weights and outputs of an entry point. JAX
        has them only with jax_enable_x64."""
        exported = self._deserialized(entry)
        return sorted(
            {str(x.dtype) for x in (*exported.in_avals, *exported.out_avals)} & set(signature.WIDE)
        )

    def _check_wide(self, entry):
        import jax

        if not jax.config.jax_enable_x64 and (wide := self.wide(entry)):
            raise BundleError(
                f"{self.path}: {entry!r} has the dtype {wide[0]}, which JAX narrows without "
                "jax_enable_x64. Call jax.config.update('jax_enable_x64', True) first. "
                "Bundle.interpret runs the program with NumPy, which does not need it"
            )

    def _newer(self):
        """Whether the bundle was written by a later version of JAX than the installed one."""
        import jax

        numbers = lambda version: [int(n) for n in re.findall(r"\d+", version)[:3]]
        return numbers(self.manifest["versions"]["jax"]) > numbers(jax.__version__)

    def _unreadable(self, what, error):
        import jax

        written, why = self.manifest["versions"]["jax"], " ".join(str(error).split())[:300]
        return BundleError(
            f"{self.path} was written by JAX {written}, and the installed JAX {jax.__version__} "
            f"cannot read {what} ({why}). JAX guarantees that it and later versions read it until "
            f"{self.read_until}. fnet bundle renew {self.path} writes it for the installed "
            "version, and Bundle.interpret runs it with NumPy"
        )

    def _deserialized(self, entry):
        from jax import export

        name = f"programs/{entry}.portable.jax"
        if self._kernels:
            name = next(
                (
                    kernels
                    for platform in _platforms()
                    if (kernels := f"programs/{entry}.{platform}.jax") in self.manifest["files"]
                ),
                name,
            )
        if name in self._exported:
            return self._exported[name]
        data = self._archive.read(name)
        try:
            exported = export.deserialize(bytearray(data))
            text = exported.mlir_module()
        except Exception as error:  # flatbuffers and MLIR raise errors of many types for data that they cannot read
            raise self._unreadable(name, error) from error
        allowed = set(self._entry(entry)["custom_calls"].get(name.split(".")[-2], ()))
        calls = set(re.findall(CALL, text)) - {"shape_assertion"}
        if not calls <= allowed:
            raise BundleError(
                f"{self.path}: {name} calls {', '.join(sorted(calls - allowed))}, which "
                f"{reader.MANIFEST} does not state"
            )
        self._exported[name] = exported
        return exported


def _platforms():
    import jax

    platform = jax.default_backend()
    return ("cuda", "rocm") if platform == "gpu" else (platform,)


def _data(x):
    """The array of a leaf, also of a random key."""
    if str(getattr(x, "dtype", "")) in signature.KEYS:
        import jax

        x = jax.random.key_data(x)
    return np.asarray(x)


def main(arguments=None):
    """The command `python digits.fnet` describes the bundle digits.fnet and checks its programs."""
    path = (sys.argv[1:] if arguments is None else arguments) or [sys.argv[0]]
    bundle = load(path[0])
    for entry in bundle.entries:
        print(bundle.signature(entry))
    versions = ", ".join(
        f"{name} {version}" for name, version in bundle.manifest["versions"].items()
    )
    print(
        f"written {bundle.manifest['created']} by {versions}; JAX reads it until "
        f"{bundle.read_until} at least"
    )
    for line in bundle.check():
        print(line)
