"""Reports why the step is compiled again: which arguments differ from those of the previous step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import keystr

_REPORTS = 8  # largest number of reports for one leaf


class Arguments:
    """Detects new shapes, dtypes and structures of an argument of the step, for which XLA compiles
    the step again.

    Args:
      name: the name of the argument, such as "batch". A message names a leaf by its path, which
        begins with `name`, as in "batch/x".
    """

    def __init__(self, name: str):
        self.name = name
        self.last: Any = None  # (structure, [(shape, dtype, weakly typed)])
        self._seen: set[Any] = set()
        self._reports: dict[str, int] = {}

    def changed(self, tree: Any) -> str | None:
        """Describes how a tree differs from the tree of the previous call. Returns None at the
        first call, or if the structure, shapes and dtypes of the tree have occurred before.

        If only shapes or dtypes of leaves have changed, and 8 changes of each changed leaf have
        already been reported, `changed` also returns None, to limit the number of messages.
        """
        leaves, structure = jax.tree.flatten(tree)
        kind = (
            structure,
            tuple(
                [
                    (x.shape, x.dtype, getattr(x, "weak_type", False))
                    if hasattr(x, "shape")
                    else ((), type(x), True)
                    for x in leaves
                ]
            ),
        )
        before, self.last = self.last, kind
        if kind in self._seen:
            return None
        self._seen.add(kind)
        return None if before is None else self._difference(before, kind, tree)

    def shapes(self) -> Any:
        """Returns the last tree that `changed` received, with a `jax.ShapeDtypeStruct` for each
        leaf."""
        structure, kinds = self.last
        leaf = lambda shape, dtype, _: jax.ShapeDtypeStruct(
            shape, dtype if hasattr(dtype, "name") else jnp.result_type(dtype)
        )
        return jax.tree.unflatten(structure, [leaf(*kind) for kind in kinds])

    def _difference(self, before, kind, tree) -> str | None:
        if before[0] != kind[0]:
            return f"{self.name}: its structure or a static value was {_short(before[0])}, is {_short(kind[0])}"
        paths = [
            keystr(path, simple=True, separator="/")
            for path, _ in jax.tree_util.tree_leaves_with_path(tree)
        ]
        words, told = [], False
        for path, old, new in zip(paths, before[1], kind[1]):
            if old == new:
                continue
            path = f"{self.name}/{path}" if path else self.name
            count = self._reports[path] = self._reports.get(path, 0) + 1
            told |= count <= _REPORTS
            more = f"; further shapes of {path} are not reported: pad it to a few fixed ones"
            words.append(
                f"{path} was {_described(*old)}, is "
                f"{_described(*new)}{more if count == _REPORTS else ''}"
            )
        return ", ".join(words) if told else None


class Recompilations:
    """Notices when the step is compiled again: its arguments have new shapes, dtypes or structures."""

    def __init__(self):
        self.batch = Arguments("batch")
        self.state = Arguments("state")

    def notice(self, at: int, state: Any, batch: Any, *, begins: bool) -> str | None:
        """Returns the reason why the step after step `at` is compiled again, or None.

        Args:
          begins: whether this is one of the first two steps of the process. Later states have the
            shapes of the first result.
        """
        changed = self.batch.changed(batch)
        if begins:
            changed = self.state.changed(state) or changed
        if not changed or jax.config.jax_disable_jit:
            return None
        return f"step {at + 1} is compiled again: {changed}"


def _described(shape, dtype, weak) -> str:
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", str(dtype))
    return f"{name}{list(shape)}{' (weakly typed)' if weak else ''}"


def _short(structure) -> str:
    text = str(structure).removeprefix("PyTreeDef(").removesuffix(")")
    return text if len(text) <= 120 else text[:117] + "..."
