"""capture, intervene and capture_cotangents of a function inside shard_map, against the function on
one device."""

import functools

import jax
import jax.numpy as jnp
import pytest
from checks import close
from jax import lax
from jax.sharding import PartitionSpec as P

from fnet import transforms as ft

W = jax.random.normal(jax.random.key(0), (4, 4))
X = jax.random.normal(jax.random.key(1), (2, 4))
ROWS = P("i")
pytestmark = pytest.mark.usefixtures("quickly")


def layers(x):
    return lax.scan(
        lambda h, _: (jnp.tanh(ft.tag(h @ W, "h")), None), ft.tag(x * 2, "x"), None, length=3
    )[0]


def mapped(f, *, out_specs=ROWS):
    """Returns f as a function of all rows. Each of two devices has one row."""
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("i",))
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=ROWS, out_specs=out_specs))


@pytest.mark.parametrize("site", ["x", "h[1]"])
def test_captured_values(site):
    found = lambda x: ft.capture(layers, site)(x)[1][site]
    close(mapped(found)(X), found(X))


@pytest.mark.parametrize(
    "change", [lambda x, index: 2 * x, lambda x, index: jnp.full(x.shape, 0.5)]
)
@pytest.mark.parametrize("site", ["x", "h", "h[1]"])
def test_replaced_values(site, change):
    replaced = ft.intervene(layers, {site: change})
    close(mapped(replaced)(X), replaced(X))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("site", "axis"), [("x", 0), ("h", 1), ("h[1]", 0)])
def test_cotangents_belong_to_one_device(site, axis):
    def cotangents(add, x):
        loss = lambda x: add(jnp.sin(layers(x)).sum())
        return ft.capture_cotangents(loss, site)(x)[1][site]

    add = functools.partial(lax.psum, axis_name="i")
    got = mapped(functools.partial(cotangents, add), out_specs=P(*[None] * axis, "i"))(X)
    close(got, cotangents(lambda y: y, X))
