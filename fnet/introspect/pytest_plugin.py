"""Proofs as tests, for any JAX project. In conftest.py:

    pytest_plugins = ["fnet.introspect.pytest_plugin"]

A test with one of the marks returns a function and its arguments instead of asserting anything:

    @pytest.mark.independent(in_axes=(None, 0), assume="finite")
    @pytest.mark.causal(in_axes=(None, 1), out_axes=1, assume="finite")
    def test_decoder():
        return model.apply, params, tokens

The marks take `in_axes` and `out_axes` as `jax.vmap` does, or one integer for all arguments that are
arrays and all results, or the name of a symbolic size. `assume` is that of `Dependence.check`. The
mark `segments("segment_ids", axes={"b": 0, "t": 1})` takes the name of an argument, and the axes as
`introspect.depends` does.
"""

from __future__ import annotations

from typing import Any

import pytest

from fnet.introspect._depends._report import depends

_MARKS = ("independent", "causal", "segments")


def pytest_configure(config: pytest.Config) -> None:
    for name in _MARKS:
        line = f"{name}(axis, in_axes=, out_axes=, assume=): proves what the returned program depends on"
        config.addinivalue_line("markers", line)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    marks = [mark for mark in pyfuncitem.iter_markers() if mark.name in _MARKS]
    if not marks:
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    returned = pyfuncitem.obj(**arguments)
    if not isinstance(returned, tuple) or not returned or not callable(returned[0]):
        raise TypeError(
            f"{pyfuncitem.name}: a test with the mark {marks[0].name!r} returns a function and its "
            f"arguments, such as `return model.apply, params, x`; it returned {type(returned).__name__}"
        )
    f, *args = returned
    for mark in marks:
        _check(mark, f, args)
    return True


def _check(mark: pytest.Mark, f: Any, args: list) -> None:
    options = dict(mark.kwargs)
    assume = options.pop("assume", None)
    axis = mark.args[0] if mark.args else 0
    axes: Any = options.pop("axes", None)
    if options and mark.name != "segments":
        axes = {axis: (options.pop("in_axes", axis), options.pop("out_axes", 0))}
    elif axes is None and isinstance(axis, int):
        axes = {axis: axis}
    if options:
        raise TypeError(f"pytest.mark.{mark.name}: unknown arguments {', '.join(options)}")
    depends(f, *args, axes=axes).check(**{mark.name: axis}, assume=assume)
