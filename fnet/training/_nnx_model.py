"""A flax.nnx module as `train` calls a model: as a function of its parameters and its other arrays."""

from __future__ import annotations

import sys
from typing import Any

import jax

from fnet.jaxpr import mutable, pack
from fnet.layers._spec import leaves, put


def is_nnx(model: Any) -> bool:
    return isinstance(model, mutable.kinds())


class NnxModel:
    """The module of the user. Its parameters are its `nnx.Param`s, its state all other variables,
    random streams included.

    Args:
      module: the module, with whose arrays the training begins.
    """

    def __init__(self, module: Any):
        nnx = sys.modules["flax.nnx"]
        self._module = module
        self._arrays, self._form = pack(module)
        parameters = nnx.to_flat_state(nnx.state(module, nnx.Param))
        self._parameters = {tuple(map(str, path)) for path, _ in parameters}

    def init(self, key: Any, x: Any) -> tuple[dict, dict]:
        """Returns the parameters and the state of the module, which is initialized already."""
        return self._split(self._arrays)

    def check(self, params: Any, x: Any, *, state: Any) -> None:
        """Does nothing: the arrays are the module's own."""

    def __call__(
        self, params: Any, x: Any, *, state: Any, key: Any = None, train: bool = False
    ) -> tuple[Any, Any]:
        module = self._form.unpack(_merged(params, state))
        if train:
            module.train()
        else:
            module.eval()
        y = module(x)
        new, after = self._split(pack(module)[0])
        if any(a is not b for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(params))):
            raise TypeError(
                f"train: {type(self._module).__name__} changes an nnx.Param in its call, and the "
                "optimizer changes the parameters: keep the value in another nnx.Variable"
            )
        return y, after

    def update(self, params: Any, state: Any) -> None:
        """Writes the arrays into the user's module."""
        self._form.update(self._module, _merged(params, state))

    def _split(self, arrays: Any) -> tuple[dict, dict]:
        params: dict = {}
        state: dict = {}
        for name, leaf in leaves(arrays):
            put(params if name in self._parameters else state, name, leaf)
        return params, state


def _merged(params: Any, state: Any) -> dict:
    arrays: dict = {}
    for name, leaf in (*leaves(params), *leaves(state)):
        put(arrays, name, leaf)
    return arrays
