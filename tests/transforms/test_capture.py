"""sites, capture, intervene and capture_cotangents: values, structure, composition, cost and
errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import close, same
from jax import lax

from fnet import jaxpr
from fnet import layers as nn
from fnet import transforms as ft

pytestmark = pytest.mark.usefixtures("quickly")
X = jax.random.normal(jax.random.key(0), (2, 5, 8))
BLOCK = nn.Sequential(
    attend=nn.Residual(nn.LayerNorm(), attention=nn.Attention(2, causal=True)),
    mlp=nn.Residual(nn.LayerNorm(), nn.Dense(12), jnp.tanh, nn.Dense(8)),
)
MODEL = nn.Sequential(
    nn.Dense(8), drop=nn.Dropout(0.5), blocks=nn.Stack(nn.Remat(BLOCK), 3), head=nn.Dense(4)
)
PARAMS = MODEL.init(jax.random.key(1), X)[0]
ATTEND = "blocks/attend/attention"


def by_hand(params, x, change=lambda name, value, index: value):
    """MODEL unrolled, with `change` applied at some sites; (output, {name: value})."""
    seen = {}

    def site(name, value, index=()):
        value = change(name, value, index)
        seen.setdefault(name, []).append(value)
        return value

    x = site("0", nn.Dense(8)(params["0"], x))
    for i in range(3):
        block = jax.tree.map(lambda leaf, i=i: leaf[i], params["blocks"])
        x = site("blocks/attend", BLOCK.layers[0](block["attend"], x), (i,))
        x = site("blocks/mlp", BLOCK.layers[1](block["mlp"], x), (i,))
    y = site("head", nn.Dense(4)(params["head"], x))
    return y, {
        name: jnp.stack(values) if "/" in name else values[0] for name, values in seen.items()
    }


def loss(params, x):
    return jnp.sum(jnp.sin(MODEL(params, x)))


# What the sites are.


def test_sites_are_the_paths_of_layers():
    listed = ft.sites(MODEL)(PARAMS, jax.ShapeDtypeStruct(X.shape, X.dtype))
    assert listed.names == (
        "0",
        "drop",
        "blocks/attend/0",
        f"{ATTEND}/query",
        f"{ATTEND}/key",
        f"{ATTEND}/value",
        f"{ATTEND}/weights",
        f"{ATTEND}/out",
        ATTEND,
        "blocks/attend",
        "blocks/mlp/0",
        "blocks/mlp/1",
        "blocks/mlp/3",
        "blocks/mlp",
        "blocks[:]",
        "blocks",
        "head",
    )
    assert str(listed).splitlines()[6] == f"{ATTEND}/weights  float32[3, 2, 2, 5, 5]"
    assert {site.name: site.scans for site in listed}["blocks[:]"] == (3,)


def test_programs_have_no_tags_outside_of_an_inspection():
    """Also after the same jitted function has been inspected: tags are a part of the key of JAX's
    caches."""
    f = jax.jit(MODEL)
    inspected = jax.jit(ft.capture(f, "head"))
    assert "head" in inspected(PARAMS, X)[1]
    for g in (
        f,
        MODEL,
        jax.grad(loss),
        inspected,
        ft.intervene(f, {"head": lambda value, index: value}),
    ):
        assert not any(
            jaxpr.is_tag(eqn) for eqn in jaxpr.equations(jax.make_jaxpr(g)(PARAMS, X).jaxpr)
        )
    with jaxpr.tagging(True):
        assert any(jaxpr.is_tag(eqn) for eqn in jaxpr.equations(jax.make_jaxpr(f)(PARAMS, X).jaxpr))


# Values.


def test_values_equal_those_by_hand():
    y, seen = jax.jit(ft.capture(MODEL, r"0|blocks/(attend|mlp)|head"))(PARAMS, X)
    want, values = by_hand(PARAMS, X)
    close(y, want)
    assert seen.keys() == values.keys()
    close(seen, values)
    same(seen["head"], y)
    same(
        ft.capture(MODEL, "blocks[1]/mlp")(PARAMS, X)[1]["blocks[1]/mlp"],
        ft.capture(MODEL, "blocks/mlp")(PARAMS, X)[1]["blocks/mlp"][1],
    )
    close(ft.capture(MODEL, "blocks[-1]")(PARAMS, X)[1]["blocks[2]"], values["blocks/mlp"][2])


@nn.layer
def several(scope, x):
    """Returns its input, a tree with None, the same array twice, and calls a layer whose output
    nothing uses."""
    nn.Dense(3)(scope["unused"], x)
    y = nn.Dense(8)(scope["dense"], x)
    return {"x": x, "none": None, "twice": (y, y)}


@nn.layer
def with_several(scope, x):
    return several()(scope["several"], nn.Dropout(0.5)(scope["drop"], x))["twice"][1]


def test_values_are_exactly_what_layers_return():
    params, _ = with_several().init(jax.random.key(0), X)
    for f in (with_several(), jax.jit(with_several())):
        y, seen = ft.capture(f, ".*")(params, X)
        assert list(seen) == ["drop", "several/unused", "several/dense", "several"]
        same(seen["drop"], X)
        same(seen["several"], {"x": X, "none": None, "twice": (y, y)})
        same(seen["several/unused"], nn.Dense(3)(params["several"]["unused"], X))


def test_a_changed_tree():
    params, _ = with_several().init(jax.random.key(0), X)

    def change(value, index):
        assert index == ()
        return {**value, "twice": (value["twice"][0], 2 * value["x"])}

    same(ft.intervene(with_several(), {"several": change})(params, X), 2 * X)


def test_weights_of_attention():
    """They are those of the formula, in the fused form and with dropout, and replacing them
    replaces the output."""
    layer = nn.Attention(2, kv_heads=1, causal=True, window=3)
    named = nn.Sequential(attention=layer)
    params, _ = named.init(jax.random.key(0), X)
    _, seen = ft.capture(named, r"attention/(query|key|value|weights)")(params, X)
    q, k, v = (seen[f"attention/{name}"].reshape(2, 5, -1, 4) for name in ("query", "key", "value"))
    logits = np.einsum("bthd,bsd->bhts", q, k[:, :, 0]) / 2
    ahead = np.arange(5)[:, None] - np.arange(5)
    weights = np.exp(np.where((ahead >= 0) & (ahead < 3), logits, -np.inf))
    weights /= weights.sum(-1, keepdims=True)
    close(seen["attention/weights"], jnp.asarray(weights), 1e-6)

    def uniform(value, index):
        return jnp.full_like(value, 1 / 5)

    mean = jnp.broadcast_to(v.mean(1, keepdims=True), (2, 5, 2, 4)).reshape(2, 5, 8)
    want = nn.Dense(8)(params["attention"]["out"], mean)
    close(ft.intervene(named, {"attention/weights": uniform})(params, X), want)
    same(jax.jit(ft.capture(named, []))(params, X)[0], jax.jit(named)(params, X))
    dropping = nn.Sequential(
        attention=nn.Attention(2, kv_heads=1, causal=True, window=3, dropout=0.5)
    )
    _, seen = ft.capture(
        lambda p, x: dropping(p, x, key=jax.random.key(0), train=True), ".*/weights"
    )(params, X)
    close(seen["attention/weights"], jnp.asarray(weights), 1e-6)


# Scopes without tags.


def scoped(x):
    with jax.named_scope("a"):
        x = x + 1
        with jax.named_scope("b"):
            y = jnp.sin(x)
        z = y * x
    with jax.named_scope("a"):  # entered twice in a row
        w = z + y
    return w


def test_named_scopes():
    want = {
        "a/b": np.sin(X + 1),
        "a#0": (np.sin(X + 1), np.sin(X + 1) * (X + 1)),
        "a#1": np.sin(X + 1) * (X + 1) + np.sin(X + 1),
    }
    _, seen = ft.capture(scoped, "a.*")(X)
    assert list(seen) == ["a/b", "a#0", "a#1"]
    close(seen, want)
    assert list(ft.capture(scoped, "a")(X)[1]) == ["a#0", "a#1"]
    changed = ft.intervene(
        scoped,
        {
            "a#0": lambda value, index: (0 * value[0], value[1]),
            "a#1": lambda value, index: value + 3,
        },
    )(X)
    close(changed, np.sin(X + 1) * (X + 1) + 3)


def test_call_sites_that_share_a_jaxpr():
    @jax.jit
    def shared(x):
        with jax.named_scope("inner"):
            return ft.tag(jnp.sin(x), "tagged") * 2

    f = lambda x: shared(shared(x) + 1)
    names = ["inner/tagged#0", "inner#0", "inner/tagged#1", "inner#1"]
    assert list(ft.sites(f)(X).names) == names
    _, seen = ft.capture(f, "inner.*")(X)
    first = 2 * jnp.sin(X)
    close(seen, dict(zip(names, (jnp.sin(X), first, jnp.sin(first + 1), 2 * jnp.sin(first + 1)))))
    close(ft.intervene(f, {"inner/tagged#1": lambda value, index: 0 * value})(X), 0 * X)
    inlined = jax.jit(shared.__wrapped__, inline=True)
    assert ft.sites(lambda x: inlined(inlined(x) + 1))(X).names == tuple(names)


def nested(x):
    def outer(carry, row):
        def inner(carry, y):
            with jax.named_scope("cell"):
                carry = jnp.tanh(carry + y)
            return carry, 2 * carry

        with jax.named_scope("row"):
            return lax.scan(inner, carry, row, reverse=True)

    return lax.scan(outer, jnp.zeros(x.shape[2:]), x)


def test_nested_scans():
    (_, doubled), seen = ft.capture(nested, "row/cell")(X)
    close(seen["row/cell"], doubled / 2)
    assert seen["row/cell"].shape == X.shape
    # An index after "row" is that of the scan at "row"; the scan around everything has no name.
    one = ft.capture(nested, "row[1]/cell")(X)[1]
    assert list(one) == ["row[1]/cell"]
    same(one["row[1]/cell"], seen["row/cell"][:, 1])
    indices = []

    def change(value, index):
        indices.append(index)
        return jnp.where((index[0] == 1) & (index[1] == 4), 0.5, value)

    (_, changed) = ft.intervene(nested, {"row/cell": change})(X)
    assert len(indices[0]) == 2
    close(changed[1, 4], jnp.ones(8))
    close(changed[0], doubled[0])
    assert jnp.abs(changed[1, 3] - doubled[1, 3]).max() > 0.01


# Other transforms.


@pytest.mark.exhaustive
def test_vmap():
    """vmap(intervene) changes each example, intervene(vmap) the batch."""
    rows = jnp.stack([X, 2 * X, 3 * X])
    batched = jax.vmap(MODEL, (None, 0))
    sites = ["drop", "blocks/mlp"]
    inside = jax.vmap(ft.capture(MODEL, sites), (None, 0))(PARAMS, rows)[1]
    outside = ft.capture(batched, sites)(PARAMS, rows)[1]
    close(inside["drop"], outside["drop"])
    close(
        inside["blocks/mlp"], outside["blocks/mlp"].swapaxes(0, 1)
    )  # [batch, depth, ...] and [depth, batch, ...]
    centered = {"drop": lambda value, index: value - value.mean(0, keepdims=True)}
    each = jax.vmap(ft.intervene(MODEL, centered), (None, 0))(PARAMS, rows)
    whole = ft.intervene(batched, centered)(PARAMS, rows)
    close(each, jnp.stack([ft.intervene(MODEL, centered)(PARAMS, row) for row in rows]))
    hidden = rows @ PARAMS["0"]["kernel"]
    hidden = hidden - hidden.mean(0, keepdims=True)
    rest = nn.Sequential(*[jnp.copy], blocks=MODEL.layers[2], head=MODEL.layers[3])
    close(whole, jax.vmap(rest, (None, 0))(PARAMS, hidden))
    assert jnp.abs(whole - each).max() > 0.01
    # A leading axis although the batch is another axis while the program runs.
    aside = jax.vmap(lambda x: ft.tag(x * 2, "site").sum(), in_axes=1)
    assert ft.capture(aside, "site")(jnp.ones((3, 4)))[1]["site"].shape == (4, 3)


@pytest.mark.exhaustive
def test_gradients():
    """Values inside a gradient, gradients of values, and second derivatives."""
    names = ["blocks/mlp", "blocks/attend", "head"]
    _, values = by_hand(PARAMS, X)
    step = jax.value_and_grad(loss)
    got, seen = jax.jit(ft.capture(step, names))(PARAMS, X)
    near(got, jax.jit(step)(PARAMS, X), 1e-5)
    close(seen, {name: values[name] for name in names})
    square = lambda params, x: sum(
        jnp.sum(value**2) for value in ft.capture(MODEL, names)(params, x)[1].values()
    )
    reference = lambda params, x: sum(jnp.sum(by_hand(params, x)[1][name] ** 2) for name in names)
    near(jax.jit(jax.grad(square))(PARAMS, X), jax.jit(jax.grad(reference))(PARAMS, X), 1e-5)
    change = {"blocks/mlp": lambda value, index: value * (1 + index[0].astype(jnp.float32))}
    by_index = lambda name, value, index: (
        value * (1.0 + index[0]) if name == "blocks/mlp" else value
    )
    f = lambda x: jnp.sum(ft.intervene(MODEL, change)(PARAMS, x) ** 2)
    g = lambda x: jnp.sum(by_hand(PARAMS, x, by_index)[0] ** 2)
    close(jax.jit(jax.grad(f))(X), jax.jit(jax.grad(g))(X), 1e-4)


def test_second_derivatives():
    model = nn.Sequential(
        blocks=nn.Stack(nn.Sequential(dense=nn.Dense(8), tanh=nn.Sequential(jnp.tanh)), 2)
    )
    params, _ = model.init(jax.random.key(0), X)
    double = {"blocks/dense": lambda value, index: 2 * value}

    def f(x):
        y, seen = ft.capture(ft.intervene(model, double), "blocks[0]")(params, x)
        return jnp.sum(y**2) + jnp.sum(seen["blocks[0]"] ** 3)

    def g(x):
        kernel = params["blocks"]["dense"]["kernel"]
        first = jnp.tanh(2 * x @ kernel[0])
        return jnp.sum(jnp.tanh(2 * first @ kernel[1]) ** 2) + jnp.sum(first**3)

    close(jax.jit(ft.hvp(f))(X, X), jax.jit(ft.hvp(g))(X, X), 1e-4)


@pytest.mark.exhaustive
def test_cotangents():
    value, slopes = jax.jit(
        ft.capture_cotangents(loss, ["blocks/mlp", "blocks[1]/attend", "head"])
    )(PARAMS, X)
    zeros = {
        "blocks/mlp": jnp.zeros((3, *X.shape)),
        "blocks/attend": jnp.zeros((3, *X.shape)),
        "head": jnp.zeros((2, 5, 4)),
    }

    def shifted(zeros):
        add = lambda name, value, index: value + zeros[name][index] if name in zeros else value
        return jnp.sum(jnp.sin(by_hand(PARAMS, X, add)[0]))

    want = jax.jit(jax.grad(shifted))(zeros)
    close(value, loss(PARAMS, X))
    close(
        slopes,
        {
            "blocks/mlp": want["blocks/mlp"],
            "blocks[1]/attend": want["blocks/attend"][1],
            "head": want["head"],
        },
    )
    integers = lambda x: jnp.sum(ft.tag((x, jnp.argmax(x)), "pair")[0] ** 2)
    same(
        ft.capture_cotangents(integers, "pair")(jnp.arange(3.0))[1],
        {"pair": (2 * jnp.arange(3.0), None)},
    )


@pytest.mark.exhaustive
def test_one_layer_of_a_stack():
    only = {"blocks[1]/mlp": lambda value, index: 0 * value}
    by_index = lambda name, value, index: (
        0 * value if (name, index) == ("blocks/mlp", (1,)) else value
    )
    close(ft.intervene(MODEL, only)(PARAMS, X), by_hand(PARAMS, X, by_index)[0])
    # The function runs in that layer alone: what would be NaN elsewhere is not computed.
    log = {"blocks[1]/mlp": lambda value, index: value + jnp.log(index[0].astype(jnp.float32))}
    gradient = jax.grad(lambda x: jnp.sum(ft.intervene(MODEL, log)(PARAMS, x)))(X)
    close(gradient, jax.grad(lambda x: jnp.sum(MODEL(PARAMS, x)))(X))


@pytest.mark.exhaustive
def test_several_changes_of_a_site_are_made_in_order():
    changes = {"hea.": lambda value, index: value + 1, "head": lambda value, index: 2 * value}
    close(ft.intervene(MODEL, changes)(PARAMS, X), 2 * (MODEL(PARAMS, X) + 1))


def near(got, want, tolerance):
    """Relative to the largest number of the tree."""
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(want))
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        error = float(jnp.abs(a.astype(jnp.float32) - b).max())
        assert a.shape == b.shape and error <= tolerance * largest, (
            jax.tree_util.keystr(path),
            error,
        )


@pytest.mark.exhaustive
def test_state_and_keys_pass():
    model = nn.Sequential(nn.Dense(4), norm=nn.BatchNorm(), drop=nn.Dropout(0.5))
    params, state = model.init(jax.random.key(0), X)
    run = lambda f: f(params, X, state=state, key=jax.random.key(1), train=True)
    (y, new), seen = run(ft.capture(model, "norm|drop"))
    same((y, new), run(model))
    same(seen["drop"], y)
    assert 0.2 < float((seen["drop"] == 0).mean()) < 0.8 and not bool((seen["norm"] == 0).any())


# Cost.


def memory(f, *args):
    stats = jax.jit(f).lower(*args).compile().memory_analysis()
    return stats.temp_size_in_bytes + stats.output_size_in_bytes


@pytest.mark.exhaustive
def test_only_the_requested_values_are_kept():
    depth, width, x = 6, 64, jnp.ones((32, 64))
    block = nn.Sequential(
        a=nn.Dense(width),
        tanh=nn.Sequential(jnp.tanh),
        b=nn.Dense(width),
        sin=nn.Sequential(jnp.sin),
    )
    model = nn.Sequential(blocks=nn.Stack(block, depth))
    params, _ = model.init(jax.random.key(0), x)
    step = jax.value_and_grad(lambda params, x: jnp.sum(model(params, x) ** 2))
    array = x.nbytes
    for f in (model, step):
        plain = memory(f, params, x)
        assert memory(lambda *args, f=f: ft.capture(f, [])(*args)[0], params, x) == plain
        assert (
            memory(
                lambda *args, f=f: ft.intervene(
                    f, {"blocks/a": lambda v, i: v} if f is model else {}
                )(*args),
                params,
                x,
            )
            <= plain + array
        )
        one = memory(ft.capture(f, "blocks/a"), params, x) - plain
        assert 0 < one <= (depth + 2) * array, one / array
        # One layer of a stack: not those of the others.
        assert memory(ft.capture(f, "blocks[2]/a"), params, x) - plain <= 4 * array


def test_a_constant_removes_the_computation_before_it():
    model = nn.Sequential(*[nn.Dense(8)] * 5, last=nn.Dense(3))
    params, _ = model.init(jax.random.key(0), X)
    products = lambda f: jax.jit(f).lower(params, X).compile().as_text().count(" dot(")
    f = ft.intervene(model, {"3": lambda value, index: jnp.ones_like(value)})
    assert (products(model), products(f)) == (6, 2)


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_lowering(platform):
    def f(params, x):
        (value, _), slopes = ft.capture_cotangents(
            ft.capture(loss, ["blocks/mlp", ".*weights"]), "blocks/attend", has_aux=True
        )(params, x)
        return (
            value,
            slopes,
            ft.intervene(jax.vmap(MODEL, (None, 0)), {"head": lambda v, i: v})(params, x[None]),
        )

    text = jax.jit(f).trace(PARAMS, X).lower(lowering_platforms=(platform,)).as_text()
    assert "site" not in text


@pytest.mark.exhaustive
def test_symbolic_shapes():
    (b,) = jax.export.symbolic_shape("b")
    spec = jax.ShapeDtypeStruct((b, 5, 8), X.dtype)
    assert ft.sites(MODEL)(PARAMS, spec)[0].value.shape == (b, 5, 8)
    exported = jax.export.export(jax.jit(ft.capture(MODEL, "blocks/mlp")))(PARAMS, spec)
    close(exported.call(PARAMS, X), ft.capture(MODEL, "blocks/mlp")(PARAMS, X))
