"""Plans on meshes with explicit axes, the default of `jax.make_mesh`: the numbers of one device, and
arrays whose types state the plan's shardings."""

import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from plan_cases import CASES_ON_EXPLICIT_MESHES, N

from fnet import parallel
from fnet import transforms as ft

pytestmark = pytest.mark.usefixtures("quickly")
MESH = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
TWIN = Mesh(MESH.devices, MESH.axis_names, axis_types=(AxisType.Auto,) * 2)
TX = optax.sgd(0.1, momentum=0.9)
X = np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32)


def init(key, *, w=None, v=None):
    first, second = jax.random.split(key)
    params = {
        "w": jax.random.normal(first, (64, 128), out_sharding=w),
        "v": 0.1 * jax.random.normal(second, (128, 64), out_sharding=v),
    }
    return {"params": params, "opt": TX.init(params)}


def step_of(loss):
    def step(state, batch, *, microbatches=1):
        run = ft.microbatch(jax.value_and_grad(loss), microbatches)
        value, grads = run(state["params"], batch)
        updates, opt = TX.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt}, {"loss": value}

    return step


def product(params, x, place=None):
    return jnp.einsum("bi,io->bo", jnp.tanh(x @ params["w"]), params["v"], out_sharding=place)


# The same model, written for one device, and with its own shardings.
step = step_of(lambda params, x: jnp.mean(jnp.square(product(params, x) - x)))
typed_init = functools.partial(init, w=P(None, "model"), v=P("model", None))
typed_step = step_of(
    lambda params, x: jnp.mean(jnp.square(product(params, x, P("data", None)) - x))
)


@functools.cache
def on_one_device():
    state = jax.jit(init)(jax.random.key(0))
    for _ in range(2):
        state, metrics = jax.jit(step)(state, X)
    return jax.tree.map(np.asarray, (state, metrics))


def close(got, want, tolerance=1e-4):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance)


def trained(plan, step, key=0):
    """Two steps: with a batch that was never placed, and with one on the mesh."""
    state, run = plan.init(jax.random.key(key)), plan.jit(step)
    for batch in (X, jax.device_put(X, plan.batch)):
        before = state
        state, metrics = run(state, batch)
        assert all(x.is_deleted() for x in jax.tree.leaves(before) if x.ndim)
    return state, metrics


def check_types(state, plan):
    for x, place in zip(jax.tree.leaves(state), jax.tree.leaves(plan.state), strict=True):
        assert x.sharding.mesh == plan.mesh
        assert x.sharding.is_equivalent_to(place, x.ndim)
        parts = (*place.spec, *[None] * (x.ndim - len(place.spec)))
        assert tuple(jax.typeof(x).sharding.spec) == parts


@pytest.mark.quick_cases("fsdp+pins-None")
@pytest.mark.parametrize("context", [None, "set_mesh", "set_mesh of automatic axes"])
@pytest.mark.parametrize(
    "strategy", ["auto", "data", "zero1", "fsdp+pins", "data+microbatches=2", "fsdp+pins+remat"]
)
def test_a_step_for_one_device(strategy, context):
    meshes = {None: None, "set_mesh": MESH, "set_mesh of automatic axes": TWIN}
    place = meshes[context]
    with contextlib.nullcontext() if place is None else jax.set_mesh(place):
        plan = parallel.plan(step, init, X, mesh=MESH, strategy=strategy)
        state, metrics = trained(plan, step)
        check_types(state, plan)
    assert plan.mesh is MESH and (strategy == "auto" or plan.strategy == strategy)
    close((state, metrics), on_one_device())
    twin = parallel.plan(step, init, X, mesh=TWIN, strategy=strategy)
    assert plan.strategy == twin.strategy
    assert [each.persistent for each in plan.candidates] == [
        each.persistent for each in twin.candidates
    ]


@pytest.mark.quick_cases("explicit+microbatches=2-None")
@pytest.mark.parametrize("context", [None, "set_mesh"])
@pytest.mark.parametrize(
    "strategy", ["auto", "explicit", "explicit+remat", "explicit+microbatches=2"]
)
def test_a_step_with_its_own_shardings(strategy, context):
    with jax.set_mesh(MESH) if context else contextlib.nullcontext():
        plan = parallel.plan(typed_step, typed_init, X, mesh=MESH, strategy=strategy)
        state, metrics = trained(plan, typed_step)
    assert plan.options.state == "explicit" and "types on the explicit mesh" in str(plan)
    check_types(state, plan)
    close((state, metrics), on_one_device())
    assert (
        plan.state["params"]["w"].spec == plan.state["opt"][0].trace["w"].spec == P(None, "model")
    )
    with jax.set_mesh(MESH):  # plain JAX
        plain = jax.jit(typed_init)(jax.random.key(0))
        for _ in range(2):
            plain, _ = jax.jit(typed_step)(plain, jax.device_put(X, plan.batch))
    assert jax.tree.map(jax.typeof, state) == jax.tree.map(jax.typeof, plain)


@pytest.mark.exhaustive
def test_a_step_that_states_shardings_although_init_does_not():
    plan = parallel.plan(typed_step, init, X, mesh=MESH)
    assert plan.strategy == "explicit"
    close(trained(plan, typed_step), on_one_device())


def test_a_new_state_of_another_type_gets_the_sharding_of_the_plan():
    def whole(state, batch):
        new, metrics = typed_step(state, batch)
        return jax.tree.map(lambda x: jax.sharding.reshard(x, P()), new), metrics

    plan = parallel.plan(whole, typed_init, X, mesh=MESH)
    state, metrics = trained(plan, whole)
    check_types(state, plan)
    close((state, metrics), on_one_device())


@pytest.mark.parametrize("kinds", [(AxisType.Explicit, AxisType.Auto), (AxisType.Auto,) * 2])
def test_axes_of_other_types(kinds):
    mesh = jax.make_mesh((2, 4), ("model", "data"), axis_types=kinds)
    plan = parallel.plan(step, init, X, mesh=mesh, strategy="fsdp+pins", compile=False)
    assert plan.mesh is mesh
    close(trained(plan, step), on_one_device())


def test_an_abstract_mesh_states_axes_and_their_types():
    kinds = (AxisType.Explicit,) * 2
    mesh = AbstractMesh((2, 4), ("model", "data"), axis_types=kinds)
    plan = parallel.plan(step, init, X, mesh=mesh, strategy="zero1", compile=False)
    assert plan.mesh.axis_names == ("model", "data") and plan.mesh.axis_types == kinds
    close(trained(plan, step), on_one_device())
    here = parallel.plan(typed_step, typed_init, X, mesh=mesh, compile=False, devices="dgx-1")
    assert isinstance(here.mesh, AbstractMesh) and here.mesh.axis_types == kinds
    assert here.strategy == "explicit" and here.state["params"]["v"].spec == P("model", None)


def test_a_plan_of_automatic_axes_inside_of_an_explicit_mesh():
    with jax.set_mesh(MESH):
        plan = parallel.plan(step, init, X, mesh={"data": -1, "model": 2}, strategy="fsdp+pins")
        got = trained(plan, step)
    assert plan.mesh.axis_types == (AxisType.Auto,) * 2
    close(got, on_one_device())


def test_arrays_on_the_same_devices_with_automatic_axes():
    plan = parallel.plan(step, init, X, mesh=MESH, strategy="zero1", compile=False)
    twin = parallel.plan(step, init, X, mesh=TWIN, strategy="zero1", compile=False)
    state, batch = twin.init(jax.random.key(0)), jax.device_put(X, twin.batch)
    run = plan.jit(step)
    state, _ = run(state, batch)
    got = run(state, batch)
    check_types(got[0], plan)
    close(got, on_one_device())


def test_rules_of_a_step_for_one_device():
    rules = {"w": (None, "model"), "v": ("model",)}
    plan = parallel.plan(step, init, X, mesh=MESH, rules=rules, compile=False)
    assert plan.state["params"]["v"].spec[0] == "model"
    close(trained(plan, step), on_one_device())


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES_ON_EXPLICIT_MESHES)
def test_models(name):
    step, init, batch = CASES_ON_EXPLICIT_MESHES[name]()
    mesh = jax.make_mesh((N,), ("data",), axis_types=(AxisType.Explicit,))
    plan = parallel.plan(step, init, batch, mesh=mesh, strategy="fsdp+pins", compile=False)
    got, _ = plan.jit(step)(plan.init(jax.random.key(0)), batch)
    want, _ = jax.jit(step)(jax.jit(init)(jax.random.key(0)), batch)
    check_types(got, plan)
    close(got, want, 1e-4)


# What XLA divides wrongly


def images(*axes):
    """A step in plain JAX, whose convolution and pooling overlap at the borders of devices."""

    def loss(params, x):
        x = jax.sharding.reshard(x, P(*axes))
        y = lax.conv_general_dilated(
            x, params["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        y = lax.reduce_window(y, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 1, 1, 1), "SAME")
        return jnp.sum(jnp.sin(y))

    def step(state, x):
        value, grads = jax.value_and_grad(loss)(state["params"], x)
        return {"params": jax.tree.map(lambda p, g: p - 0.01 * g, state["params"], grads)}, value

    return step


def image_init(key):
    return {"params": {"kernel": jax.random.normal(key, (3, 3, 4, 4))}}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("axes", [("data", "model"), ("model", "data"), (None, "data", "model")])
def test_images_that_types_split(axes):
    x = np.random.default_rng(0).normal(size=(8, 8, 8, 4)).astype(np.float32)
    step, key = images(*axes), jax.random.key(0)
    plan = parallel.plan(step, image_init, x, mesh=MESH)
    got = plan.jit(step)(plan.init(key), x)
    one = jax.make_mesh(
        (1, 1), MESH.axis_names, axis_types=MESH.axis_types, devices=jax.devices()[:1]
    )
    with jax.set_mesh(one):
        put = lambda tree: jax.device_put(tree, NamedSharding(one, P()))
        want = jax.jit(step)(put(image_init(key)), put(x))
    close(got, want, 1e-2)
    assert any("overlapping_max_pool" in row.name for each in plan.avoided for row in each.rows)
    assert "not left to XLA" in str(plan)


# Errors


def ambiguous(state, x):
    return {"w": state["w"] - x.T @ x}, jnp.float32(0)


def replicated(key):
    return {"w": jnp.zeros((64, 64))}


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: parallel.plan(step, init, X, mesh=MESH, devices="v5e:2x4"),
            ValueError,
            "plan: mesh= already states the devices; leave out devices=, or pass the mesh as a "
            "dict {axis: length} or as a jax.sharding.AbstractMesh; got a mesh with the axes "
            "data=4 (Explicit), model=2 (Explicit) and devices='v5e:2x4'",
        ),
        (
            lambda: parallel.plan(step, init, X, mesh=jax.make_mesh((8,), ("x",))),
            ValueError,
            "plan: the batch is split over the mesh axis 'data'; name an axis of the mesh so, as "
            "in jax.make_mesh((8,), ('data',)); got a mesh with the axes x=8",
        ),
        (
            lambda: parallel.plan(step, init, X, mesh=AbstractMesh((4,), ("data",))),
            ValueError,
            "plan: mesh {'data': 4} needs 4 devices; 'local' has 8",
        ),
        (
            lambda: parallel.plan(step, init, X, mesh=8),
            TypeError,
            "plan: mesh must be a dict {axis: length}, such as {'data': -1}, or a mesh of JAX, "
            "such as jax.make_mesh((8,), ('data',)); got 8",
        ),
        (
            lambda: parallel.plan(step, init, X, strategy="explicit"),
            ValueError,
            "plan: strategy 'explicit' is for a mesh with explicit axes; pass one, such as "
            "mesh=jax.make_mesh((8,), ('data',), axis_types=(jax.sharding.AxisType.Explicit,))",
        ),
        (
            lambda: parallel.plan(typed_step, typed_init, X, mesh=MESH, strategy="fsdp"),
            ValueError,
            "plan: strategy 'fsdp' is for a step written for one device; this step states its own "
            "shardings, because the types of the state that init returns state shardings. Use "
            "strategy='explicit' or 'auto'",
        ),
        (
            lambda: parallel.plan(typed_step, init, X, mesh=MESH, rules={"w": ("model",)}),
            ValueError,
            "plan: rules= are for a step written for one device; this step states its own "
            "shardings, because it cannot be traced for one device",
        ),
        (
            lambda: parallel.plan(ambiguous, replicated, X, mesh=MESH, strategy="explicit"),
            Exception,
            "Contracting dimensions are sharded and it is ambiguous how the output should be "
            "sharded. Please specify the output sharding via the `out_sharding` parameter",
        ),
        (
            lambda: parallel.plan(lambda state, x: state, init, X, mesh=MESH),
            ValueError,
            "plan: expected a step that returns (state, metrics); this one returns dict",
        ),
        (
            lambda: parallel.plan(step, init, X, mesh=MESH, strategy="fsdp", compile=False).jit(
                step
            )(jax.device_put(init(jax.random.key(0)), NamedSharding(MESH, P())), X),
            ValueError,
            "plan.jit: state['opt'][0].trace['v'] does not have the plan's sharding, but "
            "NamedSharding",
        ),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call()
