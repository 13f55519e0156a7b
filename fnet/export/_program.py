"""A program: the functions of a model, traced for symbolic sizes, and their weights."""

from __future__ import annotations

import hashlib
import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fnet import _jax, jaxpr
from fnet import layers as nn
from fnet.export import _spec
from fnet.export._entry import Entry
from fnet.export._tree import described, described_leaves, named_leaves
from fnet.export.standalone._signature import WIDE, converted, of_entry


class Program:
    """The functions of a model, traced with size variables, and the weights that they share.

    `export.program` makes a `Program` with one function, the entry point "predict", and its method
    `entry` adds others. The methods `save`, `onnx` and `litert` write it to a file. A size variable
    may then be any size from 1 that meets the constraints of its `export.spec`; only `litert` fixes
    all sizes.

    Attributes:
        entries: the entry points, {name: `Entry`}.
        weights: the weights, {name: array}. Names begin with params/ or state/, or with constants/
            for arrays that a function closes over.
        tokenizer: the tokenizer that `save` copies into the bundle, from `export.generation`, or
            None.

    >>> model = nn.Dense(3)
    >>> params, state = model.init(jax.random.key(0), jnp.ones((1, 4)))
    >>> program = export.program(model, params, state, x=export.spec("b, 4"))
    >>> sorted(program.weights), list(program.entries)
    (['params/bias', 'params/kernel'], ['predict'])
    """

    def __init__(
        self,
        entries: dict[str, Entry],
        weights: dict[str, Any],
        trees: tuple,
        tokenizer: Any = None,
    ):
        self.entries, self.weights, self._trees = entries, weights, trees
        self.tokenizer = tokenizer

    def entry(self, name: str, f: Callable, **specs: Any) -> Program:
        """Returns the program with one more entry point, a function of the same parameters and
        state.

            text = text.entry("decode", decode, token=export.spec("b, 1", "int32"), cache=cache)

        Two names have a meaning: `Bundle.run` calls "preprocess" before "predict", and
        "postprocess" after it.

        Args:
            name: its name, a Python identifier such as "embed", "decode" or "train_step".
            f: the function, as for `export.program`.
            specs: the types of its inputs, as for `export.program`.

        Raises:
            ValueError: the program has this name already, or it is not an identifier.
        """
        if not name.isidentifier() or name in self.entries:
            what = "exists already" if name in self.entries else "must be a Python identifier"
            raise ValueError(f"export: the entry point {name!r} {what}")
        f, trees, random = _plain(f, *self._trees)
        entry, constants = _traced(f, *trees, random, specs)
        entries, weights = {**self.entries, name: entry}, {**self.weights, **constants}
        return Program(entries, weights, self._trees, self.tokenizer)

    def __repr__(self) -> str:
        texts = (
            of_entry(name, each.inputs, each.output, each.constraints)
            for name, each in self.entries.items()
        )
        return f"<Program {'; '.join(texts)}>"

    def call(self, name: str, *inputs: Any, weights: Mapping[str, Any] | None = None) -> list:
        """Runs an entry point in this process and returns the leaves of its output. `weights`
        replaces those of the program."""
        entry = self.entries[name]
        weights = self.weights if weights is None else weights
        return entry.compiled(
            {name: weights[name] for name in entry.weights}, jax.tree.leaves(inputs)
        )

    def save(
        self,
        path: str | os.PathLike,
        *,
        labels: Iterable[Any] | None = None,
        tokenizer: Any = None,
        tests: Mapping[str, Mapping[str, Any]] | None = None,
        differentiable: bool = False,
        kernels: Sequence[str] = (),
        about: Mapping[str, Any] | None = None,
    ) -> None:
        """Writes a bundle, one file that holds the programs and the weights and is loaded with only
        JAX and NumPy.

            program.save("digits.fnet", labels=range(10))

        Args:
            path: the file to write. An existing file is replaced atomically.
            labels: the names of the classes. Default None: no labels.
            tokenizer: a tokenizer to copy into the bundle, with its chat template: its folder (of
                which only the files of a tokenizer are taken), its file, a list of its files, or
                what `models.read_tokenizer` returned, as its files are now. Default None: that of
                `export.generation`, or none.
            tests: the inputs for `load(check=True)`, {entry point: {input: array}}. By default they
                are drawn for two choices of the size variables: integers from the range in which
                the program uses them (lengths, indices) and beyond it, floating-point numbers
                around 1, near 0 and far out.
            differentiable: whether to include the gradients of the programs. Default False.
            kernels: the platforms ("cuda", "tpu") for which to add a program with handwritten
                attention kernels. Default: none.
            about: JSON data about the model, such as the data set and the accuracy, for the
                provenance in manifest.json. Default None.

        Raises:
            ValueError: an argument is not valid, or a weight has a dtype that safetensors files
                cannot hold.
        """
        from fnet.export import _write

        _write.save(
            self,
            path,
            labels=labels,
            tokenizer=tokenizer,
            tests=tests,
            differentiable=differentiable,
            kernels=kernels,
            about=about,
        )

    def onnx(
        self,
        path: str | os.PathLike,
        *,
        entry: str = "predict",
        opset: int | None = None,
        fused: bool = True,
        external: bool | None = None,
        check: bool = True,
    ) -> None:
        """Writes an entry point as an ONNX model, and compares its outputs in onnxruntime with the
        program's.

            program.onnx("digits.onnx")                        # needs the packages onnx and onnxruntime

        Size variables (see `export.spec`) remain symbolic, scans become Loops, and nodes are named
        after their scopes. The section "ONNX" of `docs/export.md` says which operators the file
        contains and where onnxruntime differs from JAX.

        Args:
            path: the file to write.
            entry: the entry point. Default "predict".
            opset: the version of ONNX's operators, at least 18. Default None: 23 if the program has
                RMS normalizations or attentions without a mask, which then become single operators,
                otherwise 20. Runtimes that do not know opset 23, such as onnxruntime before 1.23,
                need `opset=20`.
            fused: whether to replace groups of operations by an operator that computes the same:
                LayerNormalization, Gelu (of a program with erf, from opset 20 on), and
                RMSNormalization and Attention (from opset 23 on). An attention with a mask is
                replaced only with an explicit `opset`, because NaN or Inf in a hidden key then
                reaches every query. An exact GELU with erfc becomes fewer operators. Default True.
            external: whether the weights go to a separate file, path + ".data". Default None: only
                if they exceed 1.9 GB.
            check: whether to run the file in onnxruntime and compare, with drawn inputs as for
                `save`. Default True.

        Raises:
            NotImplementedError: an operation is not supported; the message states it and its path.
            ValueError: an element in onnxruntime differs from the program's by more than 1e-5 of
                its value (float16: 2e-3, float64: 1e-10) and more than rounding explains, or an
                argument is not valid.

        Warns:
            UserWarning: the outputs differ, but only for inputs with NaN or Inf. Or nothing could
                be compared, because no small sizes satisfy the constraints.
        """
        from fnet.export.onnx import _onnx

        _onnx.save(
            self, path, entry=entry, opset=opset, fused=fused, external=external, check=check
        )

    def litert(
        self,
        path: str | os.PathLike,
        *,
        entry: str = "predict",
        sizes: Mapping[str, int] | Iterable[Mapping[str, int]] | None = None,
        dtype: str = "float32",
        check: bool = True,
    ) -> None:
        """Writes an entry point as a LiteRT (TensorFlow Lite) model, and compares its outputs in
        LiteRT with the program's.

            program.litert("gpt.tflite", sizes=[{"b": 1, "t": 16}, {"b": 1, "t": 64}])

        All sizes of the file are fixed, and scans are unrolled. It needs the packages
        litert-converter, ai-edge-litert and litert-quantizer, but not TensorFlow, and is
        experimental, because litert-converter has no public API. Some of LiteRT's operators are
        wrong for special numbers, such as exp(NaN) = 0; a warning names those that the program
        contains, with their paths.

        Args:
            path: the file to write.
            entry: the entry point. Default "predict".
            sizes: the value of each size variable, such as {"b": 1, "t": 64}, or a list of such
                dicts. A single dict gives one function (a signature), named after the entry point;
                several give a signature each, such as predict_b1_t64, with the same weights.
                Default None: each size is its upper bound, such as 64 for t <= 64, or, if it has
                none, the smallest valid value.
            dtype: the dtype of the weights: "float32" (the default), "float16" or "int8". With
                "int8", matrix products and convolutions run in int8 (dynamic quantization).
            check: whether to run the file in LiteRT and compare, with drawn inputs as for `save`.
                Default True.

        Raises:
            NotImplementedError: the converter or the interpreter does not support an operation or a
                dtype; the message names the operation and its path.
            ValueError: an element in LiteRT differs from the program's by more than 1e-5 of its
                value and more than rounding explains (float16 and int8: by more than 1e-2 or 0.25
                of the largest element of the output), or an argument is not valid.
        """
        from fnet.export.litert import _litert

        _litert.save(self, path, entry=entry, sizes=sizes, dtype=dtype, check=check)


_IN_F: Any = object()  # the parameters are in the model


def program(f: Callable, params: Any = _IN_F, state: Any = None, /, **specs: Any) -> Program:
    """Traces a function and returns it with its parameters as a `Program`, to save and run
    elsewhere.

        program = export.program(model, params, state, x=export.spec("b, 8, 8, 1", "float32"))
        program.save("digits.fnet")
        program.onnx("digits.onnx")

    A module of flax.nnx or Equinox holds its parameters itself. It must be in inference mode:

        model.eval()                                                       # flax.nnx
        program = export.program(model, x=export.spec("b, 8, 8, 1"))
        program = export.program(eqx.nn.inference_mode(model), x=export.spec("8, 8, 1"))

    The function is traced once, as the entry point "predict"; `Program.entry` adds others.

    Args:
        f: a model, or any JAX function f(params, *inputs), for example of Flax, Equinox or Haiku.
        params: the parameters, a tree of arrays, or a module, such as `model` in
            `export.program(lambda model, x: jax.vmap(model)(x), model, x=...)`. Quantized
            parameters and other implicit arrays are exported as what they store, such as codes and
            scales. Default: those in the module f, or in the module of which f is a method.
        state: the state, a tree of arrays, by position or as `state=`. If it is not None (the
            default), f is called with `state=state` and returns (output, new state), of which the
            output is exported. A function that does not accept `state` is called without it.
        specs: the type of each input, `name=export.spec(...)`; for a tree of arrays, a tree of
            them. Inputs are passed by name if f has parameters of these names, otherwise by
            position in this order.

    Returns:
        A `Program`.

    Raises:
        TypeError: `specs` is empty or contains something else than input types, f cannot be
            called with the inputs, or there are no `params` and f is not a module.
        ValueError: two weights have the same name, or a module is in training mode: it changes its
            variables, its outputs are random, or a part of it has `inference=False`. Without
            jax_enable_x64 also: an input has a dtype of 64 bits, or a weight has a value that its
            dtype of 32 bits cannot hold.

    >>> f = lambda params, x: x @ params["kernel"]
    >>> export.program(f, {"kernel": jnp.ones((3, 2))}, x=export.spec("b, 3")).entries["predict"].output
    {'dtype': 'float32', 'shape': ['b', 2]}
    """
    if params is _IN_F:
        f, params = _opened(f)
    if state is None and _has_numbers(specs.get("state")):
        state = specs.pop("state")  # as the other functions of fnet take it
    f, trees, random = _plain(f, params, state)
    weights = {
        name: _held(name, x)
        for root, tree in zip(("params", "state"), trees)
        for name, x in named_leaves(root, tree)
        if jaxpr.is_array(x) and name not in random
    }
    entry, constants = _traced(f, *trees, random, specs)
    return Program({"predict": entry}, {**weights, **constants}, (params, state))


def _has_numbers(tree: Any) -> bool:
    """Whether a tree has arrays, and not only types of arrays."""
    return any(isinstance(x, jax.Array | np.ndarray) for x in jax.tree.leaves(tree))


def _opened(f: Any) -> tuple[Callable, Any]:
    """Returns a module as a function of itself, or a method of a module as a function of it."""
    module = getattr(f, "__self__", f)
    if not jaxpr.holds_arrays(module):
        raise TypeError(
            "export.program: expected the parameters after the function, export.program(f, params, "
            f"x=...), because a {type(f).__name__} does not hold them as a module of flax.nnx or "
            "Equinox does"
        )
    for path, node in jaxpr.nodes(module):
        if getattr(node, "inference", None) is False:
            raise ValueError(
                f"export.program: {path or 'the model'}, a {type(node).__name__}, is in training "
                "mode; pass eqx.nn.inference_mode(model). To export a training mode, pass a "
                "function and the model: export.program(f, model, x=...)"
            )
    return getattr(f, "__func__", type(f).__call__), module


def _plain(f: Callable, params: Any, state: Any) -> tuple[Callable, tuple, set[str]]:
    """Returns f as a function without flax.nnx modules, the trees (params, state) without them, and
    the names of those arrays in them that belong to random streams."""
    arrays, form = jaxpr.pack((params, state))
    if form is None or form.graph is None:
        return f, (params, state), set()
    roots = {"0": "params", "1": "state"}
    random = {path.replace(path[0], roots[path[0]], 1) for path in form.random}

    @jaxpr.wraps(f)
    def plain(params: Any, *inputs: Any, state: Any = arrays[1], **named: Any) -> Any:
        trees = params, state
        modules, held = form.unpack(trees)
        if held is not None:
            named["state"] = held
        with jaxpr.mutable.explained():
            y = f(modules, *inputs, **named)
        if lost := form.lost((modules, held), trees):
            names = ", ".join(path.partition("/")[2] for path in lost[:3])
            raise ValueError(
                f"export.program: the function changes {names}{', ...' * (len(lost) > 3)} of the "
                "module, and the change would be lost. Call model.eval() before, for inference "
                "mode. To export the outputs alone: graph, state = nnx.split(model), and "
                "export.program(lambda state, x: nnx.merge(graph, state)(x), state, x=...)"
            )
        return y

    return plain, arrays, random


def _traced(f, params, state, random, specs):
    """Traces f. Returns the `Entry` (traced function) of f, and the arrays that f closes over,
    {name: array}. `random` are the names of arrays that f may read only for results that it does
    not return."""
    if not specs:
        raise TypeError(
            "export.program: expected the type of each input by name, x=export.spec('b, 28, 28, 1')"
        )
    inputs, constraints = _spec.resolve(specs)
    by_name, takes_state = _called(f, tuple(specs))
    named = [
        pair
        for root, tree in (("params", params), ("state", state))
        for pair in named_leaves(root, tree)
    ]
    names = [name for name, x in named if jaxpr.is_array(x)]
    if len(set(names)) < len(names):
        raise ValueError(
            f"export.program: two weights have the name "
            f"{next(n for n in names if names.count(n) > 1)!r}"
        )
    leaves, structure = jax.tree.flatten((params, state))
    held = [x for x in leaves if jaxpr.is_array(x)]
    types, tree = jax.tree.flatten([inputs[name] for name in specs])
    _check_wide([(name, described(inputs[name])) for name in specs])
    output = []

    def run(*arrays):
        rest = iter(arrays[: len(held)])
        params, state = jax.tree.unflatten(
            structure, [next(rest) if jaxpr.is_array(x) else x for x in leaves]
        )
        given = jax.tree.unflatten(tree, arrays[len(held) :])
        positional, named = ((), dict(zip(specs, given))) if by_name else (given, {})
        if state is not None and takes_state:
            y, _ = f(params, *positional, **named, state=state)
        else:
            y = f(params, *positional, **named)
        y = jax.tree.map(lambda x: x if jaxpr.is_array(x) else jnp.asarray(x), y)
        output[:] = [described(y)]
        return jax.tree.leaves(y)

    weight_types = [jax.ShapeDtypeStruct(x.shape, _traced_dtype(x)) for x in held]
    try:
        closed = jaxpr.inlined(_jax.make_jaxpr(run)(*weight_types, *types))
    except Exception as error:
        if "floordiv" in str(error) or "Inconclusive" in type(error).__name__:
            error.add_note(
                "export.program traces f for sizes of any value. If f needs sizes that divide "
                "evenly, write the factor into the shape: export.spec('b, 4*h, 4*w, 3'). If they "
                "must not be small, say so: export.spec('b, h', where='h >= 2')."
            )
        raise
    constants = [_constant(x) for x in closed.consts]
    opened = _jax.consts_as_inputs(closed)
    weights = [*(name for name, _ in constants), *names]
    if random:
        opened, weights = _without_random(opened, weights, random)
    closed = _jax.close(opened)
    described_inputs = [(name, described(inputs[name])) for name in specs]
    return Entry(closed, weights, described_inputs, output[0], list(constraints), types), dict(
        constants
    )


def _without_random(opened, weights, random):
    """Returns an open jaxpr that does not read the random streams of modules, and the names of its
    weights."""
    kept = [name not in random for name in weights]
    inputs = len(opened.invars) - len(weights)
    opened, left = _jax.without_unused(opened, [*kept, *[True] * inputs])
    drawn = [name for name, keeps, reads in zip(weights, kept, left) if reads and not keeps]
    if drawn:
        raise ValueError(
            f"export.program: the output is random, it is computed from {', '.join(drawn)}. Call "
            "model.eval() before, for inference mode, or export a function that calls "
            "nnx.reseed(model, default=key) first, with key=export.spec('', 'key<fry>')"
        )
    return opened, [name for name, keeps in zip(weights, kept) if keeps]


def _check_wide(inputs):
    """Raises a ValueError if JAX would trace an input of 64 bits as one of 32 bits."""
    for name, leaf in described_leaves(inputs):
        if leaf["dtype"] in WIDE and not jax.config.jax_enable_x64:
            raise ValueError(
                f"export.program: the input {name!r} has dtype {leaf['dtype']}, which JAX narrows "
                f"to {jax.dtypes.canonicalize_dtype(leaf['dtype'])} without jax_enable_x64. Call "
                "jax.config.update('jax_enable_x64', True) before the program is made, or export "
                "the narrow dtype"
            )


def _held(name, x):
    """Returns a weight in the dtype in which JAX traces it. Without jax_enable_x64, JAX computes
    with a NumPy array of float64 in float32, and the bundle contains what it computes with."""
    if str(x.dtype) not in WIDE or jax.config.jax_enable_x64:
        return x
    return converted(
        f"export.program: the weight {name!r}", np.asarray(x), np.dtype(_traced_dtype(x))
    )


def _traced_dtype(x):
    return jax.dtypes.canonicalize_dtype(x.dtype) if str(x.dtype) in WIDE else x.dtype


def _constant(x):
    """Returns (name, array) of an array that a function closes over. The name is a digest of the
    array, so equal arrays are saved once."""
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
        raise TypeError(
            "export.program: the function closes over a random key; pass the key as an input, "
            "key=jax.random.key(0)"
        )
    x = np.asarray(x)
    return (
        f"constants/{hashlib.sha256(x.tobytes() + str((x.dtype, x.shape)).encode()).hexdigest()[:16]}",
        x,
    )


def _called(f, names) -> tuple[bool, bool]:
    """Returns two bools (by_name, takes_state). `by_name` is True if the name of each input is also
    the name of a parameter of f, other than the first parameter. `takes_state` is True if f accepts
    the keyword argument `state`."""
    forward = isinstance(f, nn.Layer)
    try:
        parameters = list(inspect.signature(type(f).forward if forward else f).parameters.values())
    except (TypeError, ValueError):
        return False, True
    known = {
        p.name
        for p in parameters[2 if forward else 1 :]
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }
    takes_state = forward or "state" in known or any(p.kind is p.VAR_KEYWORD for p in parameters)
    missing = [name for name in names if name not in known]
    if not missing or len(missing) == len(names):
        return not missing, takes_state
    raise TypeError(
        f"export.program: the function has no parameter {missing[0]!r}; name all inputs as its "
        f"parameters ({', '.join(sorted(known - {'state'}))}) or none"
    )
