"""tune: every rule against the plain step, NaN and ties where they were, inside every body, beside
every transform."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tune_cases import EVERY, NAMES, STEPS, cnn, fired, mlp, near, normal, only

from fnet import hardware as hw
from fnet import layers as nn
from fnet import native
from fnet import transforms as ft
from fnet.transforms._tune import _accumulated, _cpu, _library, _tune

pytestmark = [
    pytest.mark.usefixtures("every_size"),
    pytest.mark.filterwarnings("ignore:tune. the compiler options"),
]  # tested in test_tune_calls


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", STEPS)
def test_numbers_stay(name):
    step, args = STEPS[name]()
    want = jax.jit(step)(*args)
    near(ft.tune(step, "cpu")(*args), want)
    used = fired(step, *args, rules=EVERY)
    assert "products" in used
    assert ("max_pool_gradient" in used) == ("cnn" in name)
    for rule in used:
        assert fired(step, *args, rules=only(rule)) == {rule}
        near(jax.jit(ft.tune(step, "cpu", rules=only(rule)))(*args), want)


def test_every_rule_fires_somewhere(monkeypatch):
    monkeypatch.setattr(_library, "onednn", lambda: True)
    monkeypatch.setattr(_library, "LARGE", 0)
    monkeypatch.setattr(_library, "bfloat16_pays", lambda: True)
    monkeypatch.setattr(_cpu, "LARGE_LOW", 0)
    monkeypatch.setattr(_accumulated, "LARGE", 0)
    made = [make() for make in (cnn, mlp)]
    made += [(ft.autocast(step, "bfloat16"), args) for step, args in made]
    made += [(lambda x: x @ x, (jnp.ones((4, 4), jnp.bfloat16),))]
    made += [
        (
            lambda x, w, groups=groups: lax.conv_general_dilated(
                x, w, (1,), "SAME", feature_group_count=groups
            ),
            (jnp.ones((2, 4, 8)), jnp.ones((4, 4 // groups, 3))),
        )
        for groups in (2, 4)
    ]
    made += [
        (lambda x, w: lax.conv(x, w, (1,), "SAME"), (jnp.ones((2, 4, 2)), jnp.ones((3, 4, 3))))
    ]
    made += [
        (
            lambda x, w: lax.conv_transpose(x, w, (2, 2, 2), "SAME"),
            (jnp.ones((2, 3, 3, 3, 2)), jnp.ones((2, 2, 2, 2, 3))),
        )
    ]
    outer = lambda total, row: (total + row.T @ row, None)
    made += [(lambda x: lax.scan(outer, jnp.zeros((16, 16)), x), (jnp.ones((3, 1, 16)),))]
    layer, x = nn.LSTM(4), jnp.ones((8, 16, 3))
    made += [(lambda p, x: layer(p, x), (layer.init(jax.random.key(0), x)[0], x))]
    made += [
        (lambda x, w: lax.conv(x, w, (1,), "SAME"), (jnp.ones((8, 64, 64)), jnp.ones((64, 64, 3))))
    ]
    made += [(lambda x, w: x @ w, (jnp.ones((4, 256)), jnp.ones((256, 256))))]
    expected = {name for name in NAMES if native.library() or not name.startswith("native")}
    assert set().union(*(fired(step, *args, rules=EVERY) for step, args in made)) == expected


# Inside bodies, beside other transforms.


@pytest.mark.exhaustive
def test_bodies_are_entered():
    w = normal(1, 8, 8, scale=0.2)
    grad = jax.grad(lambda w, x: jnp.tanh(x @ w).sum())
    scan = lambda w, x: lax.scan(lambda w, x: (w - grad(w, x), None), w, x)[0]
    loop = lambda w, x: lax.fori_loop(0, 3, lambda i, w: w - grad(w, x[0]), w)
    test = lambda w, x: lax.while_loop(
        lambda w: jnp.abs(w).max() > 0.1, lambda w: 0.5 * (w - 0 * grad(w, x[0])), w
    )
    cond = lambda w, x: lax.cond(x.sum() > 0, grad, lambda w, x: w, w, x[0])
    remat = lambda w, x: jax.grad(lambda w: jax.checkpoint(lambda w: jnp.sin(x[0] @ w))(w).sum())(w)
    custom = jax.custom_jvp(lambda w, x: x[0] @ w)
    custom.defjvp(lambda p, t: (custom(*p), custom(t[0], p[1])))
    inner = lambda w, x: jax.jit(grad)(w, x[0])
    x = normal(2, 3, 4, 8)
    every = (scan, loop, test, cond, remat, custom, inner)
    for f in every:
        assert "products" in fired(f, w, x)
    near(
        jax.jit(lambda *args: [ft.tune(f, "cpu")(*args) for f in every])(w, x),
        jax.jit(lambda *args: [f(*args) for f in every])(w, x),
    )
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    mapped = jax.shard_map(
        lambda w, x: lax.psum(grad(w, x[0]), "data"),
        mesh=mesh,
        in_specs=(P(), P("data")),
        out_specs=P(),
    )
    x = normal(2, 4, 4, 8)
    assert "products" in fired(mapped, w, x)
    near(ft.tune(mapped, "cpu")(w, x), jax.jit(mapped)(w, x))


def test_beside_other_transforms():
    step, (params, x) = mlp()
    tuned, stacked = ft.tune(step, "cpu"), jnp.stack([x, 2 * x])

    def variants(step, tune):
        batched = lambda step: lambda params, x: jax.vmap(step, (None, 0))(params, x)
        slices = ft.microbatch(lambda params, x: step(params, x), 2)
        return {
            "microbatch": tune(slices)(params, x),
            "microbatch inside": ft.microbatch(lambda params, x: tune(step)(params, x), 2)(
                params, x
            ),
            "vmap": batched(tune(step))(params, stacked),
            "vmap inside": tune(batched(step))(params, stacked),
            "grad": jax.grad(lambda params: tune(step)(params, x)[0])(params),
            "jvp": jax.jvp(lambda params: tune(step)(params, x), (params,), (params,)),
            "twice": tune(tune(step))(params, x),
        }

    got = jax.jit(lambda: variants(step, functools.partial(ft.tune, chip="cpu")))()
    near(got, jax.jit(lambda: variants(step, lambda f: f))())
    low = ft.tune(ft.autocast(step, "bfloat16"), "cpu")
    near(low(params, x), jax.jit(ft.autocast(step, "bfloat16"))(params, x), 1e-3)
    kept = ft.tune(ft.autocast(step, "bfloat16", rules={"0": "float32"}), "cpu")
    assert {(row.scope, row.rule) for row in ft.explain(kept, params, x).rows} == {
        ("0", "products")
    }
    with jax.disable_jit():
        near(tuned(params, x), step(params, x))


@pytest.mark.exhaustive
def test_shardings_stay():
    step, (params, x) = mlp()
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put(x, NamedSharding(mesh, P("data")))
    params = jax.device_put(params, NamedSharding(mesh, P()))
    f = lambda params, x: (step(params, x), x * 2)
    got, want = ft.tune(f, "cpu")(params, x), jax.jit(f)(params, x)
    near(got, want)
    assert got[1].sharding.is_equivalent_to(want[1].sharding, 2)
    pinned = jax.jit(lambda x: x.T @ x, out_shardings=NamedSharding(mesh, P("data")))
    x = jax.device_put(normal(1, 16, 8), NamedSharding(mesh, P("data")))
    assert ft.tune(pinned, "cpu")(x).sharding.is_equivalent_to(pinned(x).sharding, 2)


def test_donation_names_and_results_of_a_jitted_step():
    def train(state, batch, *, rate):
        return {"w": state["w"] - rate * (batch.T @ batch)}, batch.sum()

    step = ft.tune(jax.jit(train, donate_argnums=0), "cpu")
    assert step.__name__ == "train"
    state, batch = {"w": jnp.ones((4, 4))}, normal(1, 8, 4)
    new, total = step(state, batch, rate=0.1)
    near((new, total), jax.jit(train)({"w": jnp.ones((4, 4))}, batch, rate=0.1))
    assert state["w"].is_deleted() and not batch.is_deleted()
    new, _ = step(new, batch, rate=0.2)
    near(
        new,
        jax.jit(train)(
            jax.jit(train)({"w": jnp.ones((4, 4))}, batch, rate=0.1)[0], batch, rate=0.2
        )[0],
    )


def test_a_step_is_traced_once():
    traces = []

    def f(x):
        traces.append(1)
        return x.T @ x

    step = ft.tune(f, "cpu")
    for _ in range(3):
        step(normal(1, 8, 4))
    assert len(traces) == 1
    step(normal(1, 6, 4))
    assert len(traces) == 2


def test_scopes_stay():
    step, args = mlp()
    tuned = jax.jit(jax.named_scope("outer")(ft.tune(step, "cpu")))
    text = tuned.lower(*args).as_text(debug_info=True)
    dots = re.findall(r'loc\("([^"]*dot_general[^"]*)"', text)
    for scope in (
        "outer/jvp(0)/",
        "outer/transpose(jvp(0))/",
        "outer/jvp(2)/",
        "outer/transpose(jvp(2))/",
    ):
        assert any(scope in name for name in dots), (scope, dots)


def test_other_dtypes_are_left_alone():
    half, whole = normal(1, 8, 4).astype(jnp.bfloat16), jnp.arange(32).reshape(8, 4)
    f = lambda a, b: (a.T @ a, b.T @ b)
    assert fired(f, half, whole) == set()
    with jax.enable_x64(True):
        assert fired(lambda a: a.T @ a, jnp.ones((8, 4), jnp.float64)) == set()


def test_small_arrays_are_left_alone(monkeypatch):
    monkeypatch.setattr(_cpu, "LARGE", 1 << 19)
    step, args = mlp()
    assert fired(step, *args) == set()


def test_convolutions_choose_the_compilers_kernels():
    step, args = cnn()
    tuning = ft.explain(ft.tune(step, "cpu"), *args)
    assert "ynn" in str(tuning.options) and str(tuning.options) in str(tuning)
    assert "convolution_kernels" not in str(tuning)  # among those that did not fire
    assert (
        ft.explain(ft.tune(step, "cpu", rules={"convolution_kernels": False}), *args).options == {}
    )
    step, args = mlp()
    assert ft.explain(ft.tune(step, "cpu"), *args).options == {}


# Which rules.


def test_rules_are_switched_off_by_name_and_by_version(monkeypatch):
    step, args = cnn()
    assert "max_pool" not in fired(step, *args, rules={"max_pool": False})
    old = tuple(
        rule._replace(below="0.1") if rule.name == "max_pool" else rule for rule in _cpu.RULES
    )
    monkeypatch.setitem(_tune.RULES, "cpu", old)
    assert "max_pool" not in fired(step, *args)
    assert "max_pool" in fired(step, *args, rules={"max_pool": True})
    new = tuple(rule._replace(below="99.0") for rule in _cpu.RULES)
    monkeypatch.setitem(_tune.RULES, "cpu", new)
    assert "max_pool" in fired(step, *args)


def test_chips():
    step, args = mlp()
    for chip in ("NVIDIA H100 80GB HBM3", hw.chips["TPU v5e"]):
        plain = ft.tune(step, chip)
        near(plain(*args), jax.jit(step)(*args), 1e-6)  # the comparison may be rounded elsewhere
        assert {row.rule for row in ft.explain(plain, *args).rows} == {"comparison"}
        off = {rule.name: False for rule in (*_tune.RULES["gpu"], *_tune.RULES["tpu"])}
        assert str(ft.explain(ft.tune(step, chip, rules=off), *args)).endswith(
            "no rules are on; the step is compiled as it is"
        )
    assert ft.explain(ft.tune(step), *args).rows


def test_explain_is_a_table():
    step, args = mlp()
    text = str(ft.explain(jax.jit(ft.tune(step, rules=EVERY)), *args))
    assert re.search(
        r"equations rewritten; not fired: summed_products, native_product, bfloat16_products, max_pool, "
        "max_pool_gradient, native_convolution, native_recurrence, depthwise_convolution, grouped_convolution, "
        "small_input, dilated_input, "
        "convolution_gradient, kernel_layout, convolution_kernels, convolution_library",
        text,
    )
    assert re.search(
        r"^0 +products +2 dot_general: its operands are computed before it reads them$", text, re.M
    )
    cast = ft.autocast(ft.tune(step), "bfloat16")
    assert (
        "scope" in str(ft.explain(cast, *args))
        and ft.explain(cast, *args).policy.compute == jnp.bfloat16
    )


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ft.tune(3), TypeError, "tune: expected a function, got a int"),
        (
            lambda: ft.tune(jnp.sin, "TPU v99"),
            ValueError,
            "tune: chip 'TPU v99' is not in hardware.chips; nearest: ",
        ),
        (
            lambda: ft.tune(jnp.sin, 5),
            TypeError,
            "tune: expected a chip that is 'auto', a name or a hardware.Chip; got a int",
        ),
        (
            lambda: ft.tune(jnp.sin, rules=["products"]),
            TypeError,
            "tune: expected a dict {name of a rule: False} as rules; got ['products']",
        ),
        (
            lambda: ft.tune(jnp.sin, rules={"pool": False}),
            ValueError,
            f"tune: unknown rule 'pool'; the rules are {', '.join(NAMES)}",
        ),
        (
            lambda: ft.tune(jnp.sin, rules={"products": "no"}),
            ValueError,
            "tune: the value of rule 'products' must be True (on) or False (off); got 'no'",
        ),
        (
            lambda: ft.tune(lambda x: float(x) + 1)(jnp.ones(())),
            TypeError,
            "tune: '<lambda>' cannot be traced with abstract arrays: ",
        ),
        (
            lambda: ft.tune(jax.jit(lambda x, n: x * n, static_argnums=1))(jnp.ones(()), 3),
            TypeError,
            "tune: a jitted step with static arguments is not supported; bind them with "
            "functools.partial",
        ),
    ],
)
def test_bad_input(make, error, message):
    with pytest.raises(error, match=re.escape(message)):
        make()


def test_partial_binds_static_arguments():
    f = jax.jit(lambda n, x: x**n, static_argnums=0)
    np.testing.assert_array_equal(
        ft.tune(functools.partial(f, 3), "cpu")(jnp.full(2, 2.0)), [8.0, 8.0]
    )


@pytest.mark.parametrize("features", [(512, 64), (64, 512)])
def test_a_weight_gradient_keeps_its_narrow_side_in_front(features):
    """As compiled: XLA turns a product round whose result is transposed."""
    w, x = jnp.ones(features), jnp.ones((8, 2048, features[0]))
    tuned = ft.tune(lambda w, x: jax.grad(lambda w: jnp.sin(x @ w).sum())(w), "cpu")
    products = re.findall(
        r"f32\[([\d,]+)\]\S* dot\(", jax.jit(tuned).lower(w, x).compile().as_text()
    )
    assert len(products) == 2 and "64,512" in products
