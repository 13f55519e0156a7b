"""Programs over a mesh of eight devices."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from fnet import transforms as ft

from .program import Made, Topic, normal

topic = Topic("sharded")
x83, w34 = normal(8, 3), normal(3, 4)


@functools.cache
def mesh(explicit=False):
    kind = AxisType.Explicit if explicit else AxisType.Auto
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)


def sharded(x, *spec, explicit=False):
    return Made(lambda: jax.device_put(x, NamedSharding(mesh(explicit), P(*spec))))


def shard_map(**specs):
    """A decorator; the mesh is made at the first call."""
    return lambda f: functools.wraps(f)(lambda *args: jax.shard_map(f, mesh=mesh(), **specs)(*args))


@topic(x83)
@shard_map(in_specs=P("data"), out_specs=P())
def shard_map_psum(x):
    return lax.psum(jnp.sin(x).sum(), "data")


@topic(x83, w34, wrt=(0, 1))
@shard_map(in_specs=(P("data"), P(None, "model")), out_specs=P("data", "model"))
def shard_map_product(x, w):
    return jnp.tanh(x @ w)


@topic(x83)
@shard_map(in_specs=P("data"), out_specs=P("data"))
def shard_map_collectives(x):
    n = lax.axis_index("data").astype(jnp.float32)
    y = lax.ppermute(x, "data", [(i, (i + 1) % 4) for i in range(4)])
    g = lax.all_gather(x, "data", tiled=True)
    return y + lax.pmean(x, "data") + lax.psum_scatter(g, "data", tiled=True) * n


@topic(normal(4, 4))
@shard_map(in_specs=P("data"), out_specs=P(None, "data"))
def shard_map_all_to_all(x):
    return lax.all_to_all(x, "data", 1, 0, tiled=True)


@topic(x83, w34, wrt=(1,), core=True)
def shard_map_gradient_inside(x, w):
    @functools.partial(jax.shard_map, mesh=mesh(), in_specs=(P("data"), P()), out_specs=P())
    def step(x, w):
        return jax.grad(lambda w: lax.pmean(jnp.mean((x @ w) ** 2), "data"))(w)

    return step(x, w)


@topic(normal(16, 16), normal(16, 16), wrt=(), tolerance=1e-4, core=True)
def shard_map_gradient_of_shared_weights(x, w):
    """Inside, the rows vary over the mesh and the weights do not."""

    def step(x, w):
        return jax.value_and_grad(
            lambda w: lax.pmean(jnp.sum(jnp.sin(jnp.tanh(jnp.tanh(x @ w) @ w) @ w)), "data")
        )(w)

    return jax.shard_map(step, mesh=mesh(), in_specs=(P("data"), P()), out_specs=P())(x, w)


@topic(x83, w34, wrt=(0, 1), inner=True)
def transformed_function_in_shard_maps_of_two_meshes(transform, x, w):
    f = transform(lambda x, w: jnp.tanh(x @ w))
    places = mesh(), jax.make_mesh((8,), ("rows",), axis_types=(AxisType.Auto,))
    return [
        jax.shard_map(
            f, mesh=place, in_specs=(P(place.axis_names[0]), P()), out_specs=P(place.axis_names[0])
        )(x, w)
        for place in places
    ]


@topic(x83)
def shard_map_over_one_axis_in_scan(x):
    f = jax.shard_map(
        lambda c: jnp.tanh(c + lax.pmean(c, "data")),
        mesh=mesh(),
        in_specs=P("data"),
        out_specs=P("data"),
        axis_names={"data"},
    )
    return jax.jit(lambda x: lax.scan(lambda c, _: (f(c), None), x, None, length=3)[0])(x)


@topic(x83)
def shard_map_without_checks(x):
    return jax.shard_map(
        lambda x: lax.all_gather(x, "data", tiled=True).sum(0),
        mesh=mesh(),
        in_specs=P("data"),
        out_specs=P(),
        check_vma=False,
    )(x)


@topic(x83, w34, wrt=(0, 1), core=True)
def constraints(x, w):
    h = lax.with_sharding_constraint(jnp.tanh(x @ w), NamedSharding(mesh(), P("data", "model")))
    return lax.with_sharding_constraint(h * 2, NamedSharding(mesh(), P())), h


@topic(sharded(x83, "data"), sharded(w34, None, "model"), wrt=(1,), batched=(0,))
def sharded_arguments(x, w):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


@topic(sharded(x83, "data"), sharded(w34, None, "model"))
def sharded_results(x, w):
    return x @ w, x * 2, w.sum(0)


@topic(x83)
def jit_with_shardings(x):
    s = NamedSharding(mesh(), P("data"))
    return jax.jit(
        lambda x: (jnp.sin(x), x.sum()),
        in_shardings=s,
        out_shardings=(s, NamedSharding(mesh(), P())),
    )(x)


@topic(
    sharded(x83, "data", explicit=True),
    sharded(w34, None, "model", explicit=True),
    excluded={("*", "vmap"): "jnp.stack of explicitly sharded arguments"},
)
def explicit_sharding(x, w):
    with (
        jax.set_mesh(mesh(True))
        if not isinstance(x, jax.core.Tracer)
        else jax.named_scope("traced")
    ):
        return jnp.tanh(x @ w)


@topic(
    x83,
    excluded={
        ("tune", "again"): "as under jax.jit, the compiler chooses the sharding of the result"
    },
)
def device_put(x):
    return jax.device_put(x, NamedSharding(mesh(), P("data"))) * 2


@topic(x83)
def jax_pmap(x):
    return jax.pmap(lambda x: x / lax.psum(x, "i"), axis_name="i")(x)


topic.add("fnet_pmap", ft.pmap(lambda x: x @ x.T * 1.001), normal(8, 4, 4))
