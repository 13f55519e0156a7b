"""Recurrent layers and their gradients as a primitive with kernels in C++.

The layers of `fnet.layers` are primitives that contain their program (see
`fnet.layers._recurrence`). `recurrence` binds another one, with the same operands, results and
program. Where a kernel may run, it is lowered to the large products of the layer, which XLA
computes, and one call of the kernel for the loop over time. Anywhere else it is its program.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fnet import _jax
from fnet.native._library import library
from fnet.native._primitive import define

F32 = jnp.dtype("float32")
FORWARD, GRADIENT = "recurrence", "recurrence_gradient"


def supported(eqn: Any) -> bool:
    """Whether there is a kernel for an equation of a recurrent layer."""
    if eqn.primitive.name not in (FORWARD, GRADIENT):
        return False
    given = recurrence_form(eqn).named([v.aval for v in eqn.invars])
    dtypes = {name: kind.dtype for name, kind in given.items()}
    narrow = dtypes["x"], dtypes["kernel"], dtypes["recurrent_kernel"]
    return all(dtype in (F32, jnp.bfloat16) for dtype in narrow) and dtypes["state0"] == F32


def recurrence_form(eqn: Any) -> Any:
    """Returns the form of an equation of a recurrent layer, which names its operands."""
    return _form(**eqn.params)


def _form(*, form: Any, **_: Any) -> Any:
    return form


def recurrence(eqn: Any, arrays: list) -> list:
    """Computes the results of an equation of a recurrent layer, for which there must be a kernel."""
    return recurrence_p.bind(*arrays, **eqn.params, of=eqn.primitive.name)


def _portable(*arrays: Any, call_jaxpr: Any, **_: Any) -> list:
    return _jax.evaluate(call_jaxpr, [], list(arrays))


def _forward(*operands: Any, form: Any, keeps: bool, **_: Any) -> list:
    given = form.named(operands)
    x, valid = _time_first(given)
    time, batch, _ = x.shape
    units, columns = given["recurrent_kernel"].shape
    projected = _rows(x) @ _rounded(given["kernel"], x)
    stacked = jax.ShapeDtypeStruct((time, batch, units), F32)
    carry = [given[name] for name in form.states]
    y, *rest = jax.ffi.ffi_call(
        library().target(f"fnet_{form.cell.name}"),
        [
            jax.ShapeDtypeStruct((time, batch, units), x.dtype),
            *map(jax.typeof, carry),
            *[stacked] * ((form.cell.states + 4) * keeps),
        ],
    )(
        projected.reshape(time, batch, columns),
        _rounded(given["recurrent_kernel"], x),
        _rounded(given["bias"], x) if "bias" in given else _none(),
        _wide(given["recurrent_bias"]) if "recurrent_bias" in given else _none(),
        _none(bool) if valid is None else valid[..., 0],
        *carry,
        reverse=form.reverse,
        rounded=x.dtype != F32,
    )
    return [y.swapaxes(0, 1), *rest]


def _gradient(*operands: Any, form: Any, moving: tuple, known: tuple, **_: Any) -> list:
    first = len(operands) - sum(known)
    given, kept = form.named(operands[: len(form.given)]), operands[len(form.given) : first]
    cotangents = iter(operands[first:])
    of_y, *of_after = (next(cotangents) if each else _none() for each in known)
    x, valid = _time_first(given)
    time, batch, _ = x.shape
    units, columns = given["recurrent_kernel"].shape
    apart = form.cell.name == "gru"  # then the recurrent products have cotangents of their own
    moves = {name for name, each in zip(form.given, moving) if each}
    rows = jax.ShapeDtypeStruct((time, batch, columns), F32)
    biases = [("bias", columns), ("recurrent_bias", units)][: 1 + apart]
    of_projected, *rest = jax.ffi.ffi_call(
        library().target(f"fnet_{form.cell.name}_gradient"),
        [
            *[rows] * (1 + apart),
            *(jax.typeof(given[name]) for name in form.states),
            *(jax.ShapeDtypeStruct((size * (name in moves),), F32) for name, size in biases),
        ],
    )(
        of_y.swapaxes(0, 1) if of_y.ndim == 3 else of_y,
        _rounded(given["recurrent_kernel"], x),
        _none(bool) if valid is None else valid[..., 0],
        *kept,
        *of_after,
        reverse=form.reverse,
    )
    of_recurrent = rest.pop(0) if apart else of_projected
    names = (*form.states, *(name for name, _ in biases))
    cotangent = {name: y for name, y in zip(names, rest) if name in moves}
    if "x" in moves:
        of_x = _rows(of_projected) @ _rounded(given["kernel"], x).T
        of_x = of_x.reshape(x.shape)
        of_x = of_x if valid is None else jnp.where(valid, of_x, 0)
        cotangent["x"] = of_x.swapaxes(0, 1)
    if "kernel" in moves:
        cotangent["kernel"] = _summed(x, of_projected)
    if "recurrent_kernel" in moves:
        hidden = kept[0] if x.dtype == F32 else kept[0].astype(x.dtype)
        cotangent["recurrent_kernel"] = _summed(hidden, of_recurrent)
    wanted = [name for name in form.given if name in moves]
    return [cotangent[name].astype(given[name].dtype) for name in wanted]


def _time_first(given: dict) -> tuple:
    x, valid = given["x"].swapaxes(0, 1), given.get("valid")
    return (x if valid is None else jnp.where(valid, x, 0)), valid


def _rows(x: Any) -> Any:
    """An array [time, batch, features] as a matrix of float32."""
    return _wide(x).reshape(x.shape[0] * x.shape[1], x.shape[2])


def _wide(x: Any) -> Any:
    return x.astype(F32)


def _rounded(x: Any, like: Any) -> Any:
    """Returns x in float32, rounded to the dtype of `like`."""
    return _wide(x.astype(like.dtype))


def _none(dtype: Any = F32) -> Any:
    """An operand that stands for one that is not given."""
    return jnp.zeros((0,), dtype)


def _summed(x: Any, y: Any) -> Any:
    """Returns the sum of x^T y over time and batch. XLA:CPU is faster with the smaller one first."""
    x, y = _rows(x), _rows(y)
    swapped = x.shape[1] > y.shape[1]
    first, second = (y, x) if swapped else (x, y)
    z = lax.dot_general(first, second, (((0,), (0,)), ((), ())))
    return lax.optimization_barrier(z).T if swapped else z


_KERNELS: dict[str, Callable[..., list]] = {FORWARD: _forward, GRADIENT: _gradient}


def _by_kernel(_: list, *operands: Any, of: str, **params: Any) -> list:
    return _KERNELS[of](*operands, **params)


recurrence_p = define("native_recurrence", _portable, _by_kernel)
