"""Transforms of functions whose arguments lie on a mesh with explicit axes: the values of one
device, and the types, with their shardings, of plain JAX on the mesh."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from explicit_programs import PROGRAMS, mesh, normal
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fnet import introspect
from fnet import transforms as ft

pytestmark = pytest.mark.usefixtures("quickly")
TRANSFORMS = {
    "rewrite": lambda f: ft.rewrite(f, lambda *_: NotImplemented),
    "autocast": lambda f: ft.autocast(f, "bfloat16"),
    "tune": lambda f: ft.tune(f, "cpu"),
    "tune for a TPU": lambda f: ft.tune(f, "TPU v5e"),
    "tune for a GPU": lambda f: ft.tune(f, "A100 SXM4 80GB"),
    "rematerialize": ft.rematerialize,
    "use_implicit_arrays": ft.use_implicit_arrays,
}
TOLERANCE = {"half": 0.02}  # bfloat16


def types(tree):
    return jax.tree.map(lambda x: (str(jax.typeof(x)), jax.typeof(x).sharding), tree)


def close(got, want, tolerance=1e-4):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        x, y = (np.asarray(a, np.float64) for a in (x, y))
        np.testing.assert_allclose(x, y, atol=tolerance * (1 + np.abs(y).max()), rtol=0)


@functools.cache
def expected(name):
    """(arguments, the values of one device, the types of plain JAX)."""
    program, places = PROGRAMS[name], mesh(4, 2)
    with jax.set_mesh(mesh(1, 1)):
        values = jax.tree.map(np.asarray, jax.jit(program.f)(*program.args(mesh(1, 1))))
    with jax.set_mesh(places):
        args = program.args(places)
        return args, values, types(jax.jit(program.f)(*args))


@pytest.mark.quick_cases("mlp-tune", "unreduced_sum-tune", "scan-autocast", "embedding-rewrite")
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_values_of_one_device_and_the_types_of_jax(name, transform):
    args, values, kinds = expected(name)
    with jax.set_mesh(mesh(4, 2)):
        got = jax.jit(TRANSFORMS[transform](PROGRAMS[name].f))(*args)
        assert types(got) == kinds
        close(got, values, TOLERANCE.get(name, 0.2 if transform == "autocast" else 1e-4))


def placed(x, *spec):
    return jax.device_put(x, NamedSharding(mesh(4, 2), P(*spec)))


def ambiguous(x, w):
    return jnp.tanh(x.T @ w)


@pytest.mark.parametrize("transform", ["rewrite", "autocast", "tune", "rematerialize"])
def test_an_ambiguous_product_raises_the_error_of_jax(transform):
    x, w = placed(normal(8, 6), "data"), placed(normal(8, 4), "data")
    with jax.set_mesh(mesh(4, 2)):
        with pytest.raises(Exception) as plain:
            jax.jit(ambiguous)(x, w)
        with pytest.raises(type(plain.value), match=re.escape(str(plain.value))):
            TRANSFORMS[transform](ambiguous)(x, w)


# microbatch


def loss(params, x):
    hidden = jnp.tanh(x @ params["w"])
    y = jnp.einsum("bi,io->bo", hidden, params["v"], out_sharding=P("data", None))
    return jnp.mean(jnp.square(y - x))


def arguments():
    params = {"w": placed(normal(6, 4), None, "model"), "v": placed(normal(4, 6), "model")}
    return params, placed(normal(16, 6), "data")


@pytest.mark.parametrize("weight", [None, lambda params, x: x.shape[0] + 0 * x.sum()])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_microbatch(n, weight):
    with jax.set_mesh(mesh(4, 2)):
        args = arguments()
        want = jax.jit(jax.value_and_grad(loss))(*args)
        got = jax.jit(ft.microbatch(jax.value_and_grad(loss), n, weight=weight))(*args)
    assert types(got) == types(want)
    close(got, want, 1e-5)


def test_microbatch_of_rows_that_cannot_be_split_like_the_batch():
    message = (
        "microbatch: the type float32[16@data,6] splits the rows of the batch over 4 devices, and "
        "a slice of 2 rows cannot be split so; use n=4, or replicate the batch"
    )
    with jax.set_mesh(mesh(4, 2)), pytest.raises(ValueError, match=re.escape(message)):
        ft.microbatch(jax.value_and_grad(loss), 8)(*arguments())


def test_state_that_microbatch_carries_gets_the_sharding_of_its_new_value():
    def counted(w, x, state):
        rows = jax.sharding.reshard(state["rows"] + x.sum(0), P("model"))
        return jnp.mean(x @ w), {"rows": rows, "n": state["n"] + 1}

    with jax.set_mesh(mesh(4, 2)):
        x = placed(normal(16, 6), "data")
        args = placed(normal(6, 4)), x, {"rows": placed(np.zeros(6, np.float32)), "n": 0}
        _, state = ft.microbatch(counted, 2, argnums=1, carry=2)(*args)
    assert jax.typeof(state["rows"]).sharding.spec == P("model")
    assert int(state["n"]) == 2
    np.testing.assert_allclose(state["rows"], np.asarray(x).sum(0), atol=1e-5)


# Named values


def tagged(x, stack):
    def block(x, w):
        return ft.tag(jax.sharding.reshard(jnp.tanh(x @ w), P("data", None)), "h"), None

    return jnp.sin(lax.scan(block, x, stack)[0])


def scanned():
    return placed(normal(8, 6), "data"), placed(normal(3, 6, 6), None, None, "model")


@pytest.mark.parametrize("pattern", ["h", "h[1]"])
def test_capture(pattern):
    with jax.set_mesh(mesh(4, 2)):
        args = scanned()
        want = jax.jit(tagged)(*args)
        got, seen = jax.jit(ft.capture(tagged, pattern))(*args)
        value, moved = ft.capture_cotangents(lambda *args: tagged(*args).sum(), pattern)(*args)
    assert types(got) == types(want)
    close((got, value), (want, want.sum()))
    axes = ("data", None) if pattern == "h[1]" else (None, "data", None)
    for found in (seen, moved):
        assert jax.typeof(found[pattern]).sharding.spec == P(*axes)


@pytest.mark.parametrize("pattern", ["h", "h[1]"])
def test_intervene_with_a_value_of_another_sharding(pattern):
    change = {pattern: lambda value, *_: jnp.full(value.shape, 0.5, value.dtype)}
    with jax.set_mesh(mesh(4, 2)):
        args = scanned()
        got = jax.jit(ft.intervene(tagged, change))(*args)
        assert types(got) == types(jax.jit(tagged)(*args))
    unplaced = jax.tree.map(np.asarray, args)
    reference = np.full((8, 6), 0.5, np.float32)
    if pattern == "h[1]":
        reference = np.tanh(reference @ unplaced[1][2])
    close(got, np.sin(reference))


# Other functions


def test_per_example_and_hvp():
    params, x = arguments()
    simple = lambda w, x: jnp.square(jnp.tanh(x @ w)).sum()
    with jax.set_mesh(mesh(4, 2)):
        rows = jax.jit(ft.per_example(jax.grad(simple)))(params["w"], x)
        product = jax.jit(ft.hvp(simple))(params["w"], params["w"], x)
    assert jax.typeof(rows).sharding.spec == P("data", None, "model")
    assert jax.typeof(product) == jax.typeof(params["w"])
    unplaced = np.asarray(params["w"]), np.asarray(x)
    close(rows, jax.vmap(jax.grad(simple), (None, 0))(unplaced[0], unplaced[1][:, None]))
    close(product, jax.jvp(jax.grad(simple), unplaced, (unplaced[0], 0 * unplaced[1]))[1])


def test_fold_and_loss_scale():
    w, x = placed(normal(6, 4), None, "model"), placed(normal(16, 6), "data")
    f = lambda w, x: jnp.tanh(x @ (2 * w))
    with jax.set_mesh(mesh(4, 2)):
        assert types(ft.fold(f, w)(x)) == types(f(w, x))
        scale = ft.loss_scale(optax.sgd(0.1)).init(w)
        value, gradient = ft.scaled_value_and_grad(lambda w: f(w, x).sum())(scale, w)
        want = jax.value_and_grad(lambda w: f(w, x).sum())(w)
    assert types((value, gradient)) == types(want)
    close((value, gradient / ft.loss_scale_state(scale).scale), want)


def test_statistics():
    with jax.set_mesh(mesh(4, 2)):
        args = scanned()
        measured = introspect.statistics(lambda stack, x: tagged(x, stack).sum(), *args[::-1])
    hidden = np.asarray(args[0])
    for site, w in zip(measured.sites, np.asarray(args[1]), strict=True):
        hidden = np.tanh(hidden @ w)
        np.testing.assert_allclose((site.mean, site.std), (hidden.mean(), hidden.std()), rtol=1e-3)
