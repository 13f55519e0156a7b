"""Traces with symbolic sizes: the comparisons that JAX answers without knowing, and convolutions
with symbolic paddings."""

from __future__ import annotations

import contextlib
import numbers
import operator
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import jax
from jax import export

from fnet._jax._features import private

_FEATURE = "ft.bucket"
_DimExpr = private("jax._src.export.shape_poly._DimExpr", _FEATURE)
_convolution = private("jax._src.lax.convolution", _FEATURE)
_patched = threading.RLock()  # attributes of JAX are replaced: by one thread at a time
_COMPARES = "__eq__", "__ne__"
_JAX = os.path.dirname(jax.__file__)
_FNET = os.path.dirname(os.path.dirname(__file__))
_MACHINERY = tuple(
    os.path.join(*parts, "")
    for parts in ((_JAX,), (os.path.dirname(_JAX), "opt_einsum"), (_FNET, "_jax"), (_FNET, "jaxpr"))
)
# Functions such as jnp.array_equal compare sizes as a user does.
_LIBRARIES = tuple(
    os.path.join(_JAX, "_src", name, "") for name in ("numpy", "scipy", "nn", "image", "ops")
)


@contextlib.contextmanager
def symbolic_trace(*, broadcasts: bool = True) -> Iterator[list]:
    """Collects the sizes for which JAX assumes in this context that they are not 0: it answers `t ==
    64` with False, and the list then contains `t - 64`; for `if t - 64:`, too. JAX decides all other
    comparisons, or raises an error.

    Comparisons with numbers other than 1 in JAX's core do not count, since its operations mean the
    same for all sizes: they decide how a result is computed, but not what it is. Without
    `broadcasts`, that holds for 1 as well, with which JAX compares the sizes of arrays that may be
    broadcast.

    Inside, convolutions accept symbolic paddings, as those have that JAX creates for derivatives.
    """
    if not _DimExpr or not _convolution:
        _DimExpr()  # raises an error that names what is missing
    found: dict[tuple[int, int], Any] = {}
    sizes: list = []
    here, busy = threading.get_ident(), False

    def counts(other: Any) -> bool:
        if other == 1 and not broadcasts:
            return _by_user(())
        return other in (0, 1) or _by_user()

    def note(size: Any, other: Any) -> None:
        nonlocal busy
        if busy or threading.get_ident() != here:
            return
        busy = True  # what follows compares sizes, too
        try:
            key = hash(size), hash(other)
            if key not in found and _comparable(size, other) and counts(other):
                difference = size - (other if isinstance(other, type(size)) else int(float(other)))
                if export.is_symbolic_dim(difference):
                    found[key] = difference
        finally:
            busy = False

    def equal(self: Any, other: Any) -> Any:
        answer = original(self, other)
        if answer is False:
            note(self, other)
        return answer

    def true(self: Any) -> bool:
        note(self, 0)
        return True

    with _patched:
        original = _DimExpr.__eq__
        _DimExpr.__eq__, _DimExpr.__bool__ = equal, true
        _convolution.operator = _Operator()
        try:
            yield sizes
        finally:
            _DimExpr.__eq__ = original
            del _DimExpr.__bool__
            _convolution.operator = operator
            sizes += found.values()


def _comparable(size: Any, other: Any) -> bool:
    if isinstance(other, type(size)):
        return size.scope is other.scope
    return isinstance(other, numbers.Real) and float(other).is_integer()


def _by_user(libraries: tuple[str, ...] = _LIBRARIES) -> bool:
    """Whether the comparison is made outside of JAX's core, or in one of its libraries."""
    frame: Any = sys._getframe(4)
    while frame is not None and frame.f_code.co_name in _COMPARES:
        frame = frame.f_back
    if frame is None:
        return False
    file = frame.f_code.co_filename
    return file.startswith(libraries) or not file.startswith(_MACHINERY)


class _Operator:
    """The module `operator`, with an `index` that leaves symbolic sizes alone."""

    def __getattr__(self, name: str) -> Any:
        return getattr(operator, name)

    @staticmethod
    def index(x: Any) -> Any:
        return x if export.is_symbolic_dim(x) else operator.index(x)
