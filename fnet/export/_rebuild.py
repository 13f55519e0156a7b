"""New JAX programs from the stable form of old ones, for bundles that JAX no longer reads.

The stable form is a description of a program as JSON, which does not depend on JAX's version.
"""

from __future__ import annotations

import datetime
import os
from typing import Any

import jax
import jax.numpy as jnp
from jax import export

from fnet import _jax
from fnet.export import _evaluate, _write
from fnet.export._entry import Entry
from fnet.export._program import Program
from fnet.export.standalone import _loaded, _signature


def renew(path: str | os.PathLike, output: str | os.PathLike | None = None) -> None:
    """Replaces the programs of a bundle by ones for the installed JAX, which it reads for another
    six months.

    The new programs come from the stable form of the old ones, a description as JSON that does not
    depend on JAX's version, and must reproduce the outputs that are stored in the bundle. Weights,
    labels, tokenizer and dtypes stay, those of 64 bits with or without jax_enable_x64. Programs
    with handwritten kernels are lost, because the stable form has none.

    Args:
        path: the bundle.
        output: where to write the new one. Default None: the old one is replaced.

    Raises:
        BundleError: the file is damaged, a program has no stable form, or the outputs of a new
            program differ from the stored ones.

    >>> import tempfile
    >>> model = nn.Dense(3)
    >>> params, state = model.init(jax.random.key(0), jnp.ones((1, 4)))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     export.program(model, params, state, x=export.spec("b, 4")).save(f"{folder}/dense.fnet")
    ...     export.renew(f"{folder}/dense.fnet", f"{folder}/new.fnet")
    ...     export.load(f"{folder}/new.fnet")(np.ones((2, 4), np.float32)).shape
    (2, 3)
    """
    bundle = _loaded.load(path)
    wide = any(_signature.is_wide(bundle.stable(name)) for name in bundle.entries)
    with jax.enable_x64(
        wide or jax.config.jax_enable_x64
    ):  # otherwise, JAX would trace them as types of 32 bits
        _renewed(bundle, path, output)


def _renewed(bundle, path, output):
    manifest = bundle.manifest
    entries = {name: _entry(bundle, name) for name in bundle.entries}
    program = Program(entries, bundle.weights, ({}, None))
    tests: dict[str, Any] = {}
    for name in bundle.entries:
        description = manifest["entries"][name]
        for inputs, wanted in bundle.cases(name):
            flat, _ = _signature.bound(
                path, name, description, (), _signature.named(description, inputs)
            )
            tree = _signature.unflatten(description["output"], iter(program.call(name, *flat)))
            bundle.compare(
                name, "renewed", tree, wanted, bundle.spreads(name, inputs, with_jax=False)
            )
            tests.setdefault(name, []).append(flat)
    provenance = {
        **manifest["provenance"],
        "renewed": {
            "on": datetime.date.today().isoformat(),
            "from": manifest["versions"],
            "written": manifest["created"],
        },
    }
    tokenizer = {f"tokenizer/{name}": data for name, data in bundle.files("tokenizer").items()}
    _write.save(
        program,
        output or path,
        labels=bundle.labels,
        tests=tests,
        about=provenance,
        differentiable=manifest["differentiable"],
        files=tokenizer,
    )


def _entry(bundle, name) -> Entry:
    description, stable = bundle.manifest["entries"][name], bundle.stable(name)
    names = [*description["constants"], *description["weights"]]
    scope = export.SymbolicScope(tuple(description["constraints"]))
    shape = lambda sizes: tuple(
        n if isinstance(n, int) else export.symbolic_shape(n, scope=scope)[0] for n in sizes
    )
    values = [(dtype, shape(sizes)) for dtype, sizes in stable["values"]]
    type_of = lambda i: jax.ShapeDtypeStruct(values[i][1], jnp.dtype(values[i][0]))
    types = [type_of(i) for i in stable["inputs"][len(description["weights"]) :]]

    def run(*arrays):
        known = dict(zip(stable["constants"], arrays))
        return _evaluate.Run(values, known, shape).body(stable, arrays[len(stable["constants"]) :])

    closed = _jax.make_jaxpr(run)(*(type_of(i) for i in (*stable["constants"], *stable["inputs"])))
    return Entry(
        closed,
        names,
        description["inputs"],
        description["output"],
        description["constraints"],
        types,
    )
