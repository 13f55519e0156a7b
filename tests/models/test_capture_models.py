"""Captured values and cotangents of models: equal to what their layers return while the model runs
unrolled."""

import jax
import jax.numpy as jnp
import pytest
from checks import close, sampled
from zoo import FEW, build, inputs

from fnet import _jax
from fnet import transforms as ft
from fnet.layers import _compose, _core

pytestmark = pytest.mark.usefixtures("quickly")


def unrolled(layer, scope, x, *rest, **options):
    """`Stack.forward` without a scan."""
    f, params, _, _ = scope.pure(layer.block, x, *rest, copies=layer.depth, **options)
    for i in range(layer.depth):
        x, _ = f(*jax.tree.map(lambda leaf, i=i: leaf[i], (params,)), x, *rest, **options)
        x = recorded.record("/".join(scope._place.path) + "[:]", x)
    return x


class Recorder:
    """Records what every layer returns, {path: [outputs]}, and adds `offsets` of that structure to
    it."""

    def start(self, offsets=None):
        self.values, self.offsets, self.trace = {}, offsets, _jax.trace_state()

    def record(self, path, y):
        values = self.values.setdefault(path, [])
        if self.offsets is not None:
            y = jax.tree.map(
                lambda leaf, more: leaf + more if more is not None else leaf,
                y,
                self.offsets[path][len(values)],
            )
        values.append(y)
        return y

    def __call__(self, layer, function, where, inputs, options):
        entered = isinstance(where, _core.Scope) and where._place.path != where._place.run.here
        y = call(layer, function, where, inputs, options)
        return (
            self.record("/".join(where._place.path), y)
            if entered and _jax.trace_state() == self.trace
            else y
        )


call, recorded = _core._call, Recorder()


@pytest.fixture
def recorder(monkeypatch):
    monkeypatch.setattr(_core, "_call", recorded)
    monkeypatch.setattr(_compose.Stack, "forward", unrolled)
    return recorded


def of_sites(sites, values):
    """The recorded values by the names of the sites."""
    rest = {path: list(outputs) for path, outputs in values.items()}
    named = {}
    for site in sites:
        path = site.name.partition("#")[0]
        if path in values:  # not the named scopes inside layers
            named[site.name] = (
                jax.tree.map(lambda *leaves: jnp.stack(leaves), *rest.pop(path))
                if site.scans
                else rest[path].pop(0)
            )
    assert not any(rest.values()), "the model has sites that are not listed"
    return named


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", sampled(FEW, ["CNN", "Decoder"]))
def test_values_and_cotangents(name, request):
    f, params, _, shapes = build(name)
    x = inputs(name, shapes[0])

    def loss(params, *x):
        y = [
            leaf
            for leaf in jax.tree.leaves(f(params, *x))
            if jnp.issubdtype(leaf.dtype, jnp.floating)
        ]
        return sum(
            jnp.sum(leaf * jnp.cos(jnp.arange(leaf.size, dtype=leaf.dtype).reshape(leaf.shape)))
            for leaf in y
        )

    def captured(params, *x):
        both = ft.capture_cotangents(ft.capture(loss, ".*"), ".*", has_aux=True)
        (_, values), slopes = both(params, *x)
        return values, slopes

    sites = ft.sites(f)(params, *x)
    values, slopes = jax.jit(captured)(params, *x)
    recorder = request.getfixturevalue("recorder")

    def shifted(offsets):
        recorder.start(offsets)
        return loss(params, *x), dict(recorder.values)

    def start():
        recorder.start()
        f(params, *x)
        return dict(recorder.values)

    zeros = jax.tree.map(lambda t: jnp.zeros(t.shape, t.dtype), jax.eval_shape(start))
    want_slopes, want_values = jax.jit(jax.grad(shifted, has_aux=True))(zeros)
    want_values, want_slopes = of_sites(sites, want_values), of_sites(sites, want_slopes)
    assert len(want_values) > 2
    close({key: values[key] for key in want_values}, want_values)
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(want_slopes))
    assert largest > 0
    for key in want_slopes:
        for a, b in zip(*map(jax.tree.leaves, (slopes[key], want_slopes[key])), strict=True):
            assert a.shape == b.shape and jnp.abs(a - b).max() <= 1e-5 * largest, key
