"""Traces the differentiation and batching rules of custom_jvp, custom_vjp and custom_vmap equations
to jaxprs."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Literal
from jax.interpreters import ad

from fnet._jax._hijax import classically, make_jaxpr, without_hi_primitives
from fnet._jax._jaxprs import ClosedJaxpr, close


class CustomJvp:
    """The differentiation rule of a custom_jvp equation."""

    def __init__(self, params: dict):
        self._fun, self.consts = params["jvp_jaxpr_fun"], params["num_consts"]
        self.symbolic_zeros = params["symbolic_zeros"]

    def jaxpr(self, zeros: list[bool]) -> tuple[Any, list[bool]]:
        """Returns the jaxpr of the differentiation rule, and for each output whether its tangent is
        zero. The inputs of the jaxpr are the primals and the nonzero tangents. The outputs of the
        jaxpr are the primal outputs and their nonzero tangents.

        Args:
            zeros: for each input, whether its tangent is zero. The first inputs are the closed-over
                constants, whose tangents are zero.
        """
        inputs = zeros[self.consts :]
        jaxpr, consts, zeros_out = classically(lambda: self._fun.call_wrapped(*inputs))
        return without_hi_primitives(ClosedJaxpr(jaxpr, consts)), list(zeros_out)


class Forward(NamedTuple):
    """The forward function of a custom_vjp equation.

    Attributes:
        closed: the closed jaxpr, which maps the inputs to the residuals and the outputs.
        residuals: the number of residuals that the jaxpr returns.
        forwarded: a tuple that states where each residual of the backward function comes from. The
            integer i means that the residual is equal to input i of the custom_vjp equation. The
            entry None means that the residual is an output of the jaxpr `closed`.
    """

    closed: Any
    residuals: int
    forwarded: tuple


class CustomVjp:
    """The forward and backward functions of a custom_vjp equation."""

    def __init__(self, params: dict):
        self._params, self.consts = params, params["num_consts"]
        self.symbolic_zeros = params["symbolic_zeros"]
        self._types = [v.aval for v in close(params["call_jaxpr"]).jaxpr.invars]
        self._forward: dict[tuple, Forward] = {}

    def forward(self, perturbed: tuple[bool, ...]) -> Forward:
        """Returns the forward function. The tuple `perturbed` contains one boolean for each input,
        including constants. The boolean of an input is True if the input is differentiated."""
        perturbed = tuple(perturbed[self.consts :])
        if perturbed not in self._forward:
            thunk = self._params["fwd_jaxpr_thunk"]
            jaxpr, consts = classically(lambda: thunk.call_wrapped(*perturbed))
            closed = without_hi_primitives(ClosedJaxpr(jaxpr, consts))
            _, tree, forwarded = self._params["out_trees"]()
            count = tree.num_leaves - sum(i is not None for i in forwarded)
            self._forward[perturbed] = Forward(closed, count, tuple(forwarded))
        return self._forward[perturbed]

    def backward(self, forward: Forward, zeros: list[bool]) -> tuple[Any, list[bool]]:
        """Returns the jaxpr of the backward function, and a list of booleans, one for each input of
        the equation.

        The boolean of an input is True if the jaxpr returns a cotangent for this input of the
        equation. The jaxpr maps the inputs and residuals of the equation, and the cotangents of its
        outputs, to the cotangents of its inputs.

        The jaxpr is traced for the types that the inputs have in the custom_vjp equation, because
        the user's backward function expects these types. If the user's forward function returns a
        Python number as a residual, the user's backward function gets a Python number.

        Args:
            forward: the forward function.
            zeros: for each output, whether its cotangent is a symbolic zero. The floating-point
                cotangents that are not symbolic zeros are inputs of the jaxpr.
        """
        outvars = forward.closed.jaxpr.outvars
        saved, outputs = outvars[: forward.residuals], outvars[forward.residuals :]
        live: list[bool] = []

        def run(inputs: Any, residuals: Any, cotangents: Any) -> list:
            rest = iter([v.val if isinstance(v, Literal) else x for v, x in zip(saved, residuals)])
            full = [next(rest) if i is None else inputs[i] for i in forward.forwarded]
            gradients = self._params["bwd"].call_wrapped(
                *full, *_cotangents(outputs, zeros, cotangents)
            )
            if (
                isinstance(gradients, tuple)
                and len(gradients) == 2
                and isinstance(gradients[0], (list, tuple))
            ):
                gradients = gradients[0]  # jax >= 0.12 returns (gradients, log)
            live[:] = [not isinstance(g, (ad.Zero, SymbolicZero)) for g in gradients]
            return [g for g, nonzero in zip(gradients, live) if nonzero]

        closed = make_jaxpr(run)(
            self._types,
            [_aval(v) for v in saved],
            [v.aval for v, zero in zip(outputs, zeros) if not zero and _inexact(v)],
        )
        return closed, [False] * self.consts + live


def custom_vmap_rule(params: dict, size: int, batched: list, types: list) -> tuple[Any, list[bool]]:
    """Traces the batching rule of a custom_vmap equation for inputs of the given types. Returns the
    jaxpr of the batching rule, and for each output whether it is batched."""
    flags: list[bool] = []
    tree = params["in_tree"]

    def rule(*arrays: Any) -> Any:
        outputs, which = params["rule"](
            size, list(jax.tree.unflatten(tree, batched)), *jax.tree.unflatten(tree, arrays)
        )
        flags[:] = jax.tree.leaves(which)
        return jax.tree.leaves(outputs)

    return make_jaxpr(rule)(*types), flags


def _aval(atom: Any) -> Any:
    return jax.typeof(jnp.asarray(atom.val)) if isinstance(atom, Literal) else atom.aval


def _inexact(v: Any) -> bool:
    return jnp.issubdtype(v.aval.dtype, jnp.inexact)


def _cotangents(outputs: Any, zeros: Any, nonzero: Any) -> list:
    """Returns the cotangents of all outputs, in order. Where `zeros` is True, the cotangent is a
    symbolic zero. The list `nonzero` contains the cotangents of the floating-point outputs for
    which `zeros` is False. The cotangent of an integer output is a symbolic zero or an array with
    the dtype float0 (JAX's tangent dtype for integers)."""
    rest = iter(nonzero)
    return [
        SymbolicZero(v.aval.to_tangent_aval())
        if zero
        else next(rest)
        if _inexact(v)
        else np.zeros(v.aval.shape, jax.dtypes.float0)
        for v, zero in zip(outputs, zeros)
    ]
