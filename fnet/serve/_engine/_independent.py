"""The proof that the rows of a decode step are independent: whatever is in one row, be it another
text, an empty row or NaN, no bit of the next token of another row changes."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from fnet import introspect
from fnet.serve._engine import _programs
from fnet.serve._engine._cache import Layout, empty


def why_not(model: Any, params: Any, layout: Layout) -> str | None:
    """Returns why the rows of a decode step are not proved to be independent, or None if they are.

    It depends on the program alone, so the answer is kept for parameters of these shapes.
    """
    leaves, structure = jax.tree.flatten(params)
    return _why_not(model, structure, tuple((x.shape, x.dtype) for x in leaves), layout)


@functools.lru_cache(256)
def _why_not(model: Any, structure: Any, types: tuple, layout: Layout) -> str | None:
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in types]
    params = jax.tree.unflatten(structure, shapes)
    row = jax.ShapeDtypeStruct((3,), jnp.int32)
    cache = jax.eval_shape(lambda params: empty(params, model=model, rows=3, length=2), params)
    axes = jax.tree.unflatten(jax.tree.structure(cache), [leaf.rows for leaf in layout.leaves])
    step = functools.partial(_programs.next_logits, model)
    report = introspect.depends(
        step, params, row, row, cache, axes={"rows": ((None, 0, 0, axes), (0, axes))}
    )
    verdict = report.verdict("independent", "rows", trials=False)
    return None if verdict.status == "proved" else " ".join(str(verdict).split())
