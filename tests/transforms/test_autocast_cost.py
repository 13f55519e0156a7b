"""What autocast adds to a step: nothing, beside the same casts written by hand.

Programs are compared as they are handed to a TPU's or a GPU's compiler; a CPU gets products in
forms of its own.
"""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from precision_cases import normal
from precision_checks import BF16, F32

from fnet import hardware as hw
from fnet import models
from fnet import transforms as ft


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def by_hand(spec, x, y, out):
    """An einsum of bfloat16 operands with sums in float32, whose backward pass has both, too."""
    return jnp.einsum(spec, x.astype(BF16), y.astype(BF16), preferred_element_type=out)


def _forward(spec, x, y, out):
    low = x.astype(BF16), y.astype(BF16)
    return jnp.einsum(spec, *low, preferred_element_type=out), (
        *low,
        jnp.zeros((), x.dtype),
        jnp.zeros((), y.dtype),
    )


def _backward(spec, out, saved, g):
    x, y, like_x, like_y = saved
    a, b, c = re.split(",|->", spec)
    g = g.astype(BF16)
    return (
        jnp.einsum(f"{c},{b}->{a}", g, y, preferred_element_type=like_x.dtype),
        jnp.einsum(f"{c},{a}->{b}", g, x, preferred_element_type=like_y.dtype),
    )


by_hand.defvjp(_forward, _backward)


def plain(spec, x, y, out):
    return jnp.einsum(spec, x, y)


def mlp(params, x, product):
    for w in params[:-1]:
        x = jnp.tanh(product("bi,ij->bj", x, w, BF16))
    return jnp.square(jnp.tanh(product("bi,ij->bj", x, params[-1], F32))).mean()


def transformer_block(params, x, product):
    def norm(x, scale):
        return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * scale

    h = norm(x, params["scale1"])
    q, k, v = (product("btd,dhk->bthk", h, params[name], BF16) for name in "qkv")
    weights = jax.nn.softmax(product("bqhk,bshk->bhqs", q, k, F32) * k.shape[-1] ** -0.5)
    x = x + product(
        "bthk,hkd->btd", product("bhqs,bshk->bqhk", weights, v, BF16), params["o"], BF16
    ).astype(F32)
    h = jax.nn.gelu(product("btd,df->btf", norm(x, params["scale2"]), params["up"], BF16))
    return jnp.square(x + product("btf,fd->btd", h, params["down"], F32)).mean()


STEPS = {
    "mlp": (mlp, [normal(i, 64, 64, scale=0.1) for i in range(4)], normal(9, 16, 64)),
    "transformer block": (
        transformer_block,
        {
            **{name: normal(i, 32, 4, 8, scale=0.2) for i, name in enumerate("qkv")},
            "o": normal(3, 4, 8, 32, scale=0.2),
            "up": normal(4, 32, 64, scale=0.2),
            "down": normal(5, 64, 32, scale=0.1),
            "scale1": normal(6, 1, 1, 32) + 1,
            "scale2": normal(7, 1, 1, 32) + 1,
        },
        normal(9, 2, 16, 32),
    ),
}


def step(gradient):
    return lambda params, x: jax.tree.map(lambda w, g: w - 0.1 * g, params, gradient(params, x))


def operations(f, platform, *args):
    """({types of a product: how many}, {types of a cast: how many}) of a lowered program; casts of
    one value count once, as the compilers see to."""
    text = jax.jit(f).trace(*args).lower(lowering_platforms=(platform,)).as_text()
    types = lambda text: re.sub(r"tensor<(?:\d+x)*(\w+)>", r"\1", text)
    products, casts, function = collections.Counter(), set(), None
    for line in text.splitlines():
        if found := re.search(r"func\.func .*@(\w+)", line):
            function = found[1]
        if found := re.search(r"stablehlo\.dot_general.* : (\(.*\) -> \S+)", line):
            products[types(found[1])] += 1
        if found := re.search(r"stablehlo\.convert (\S+) : \((\S+)\) -> (\S+)", line):
            casts.add((function, found[1], types(f"{found[2]} -> {found[3]}")))
    return dict(products), dict(collections.Counter(cast for *_, cast in casts))


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("platform", ["tpu", "cuda"])
@pytest.mark.parametrize("name", STEPS)
def test_inside_grad_products_and_casts_are_those_by_hand(name, platform):
    f, params, x = STEPS[name]
    cast = jax.grad(ft.autocast(functools.partial(f, product=plain), "bfloat16"))
    want = operations(step(jax.grad(functools.partial(f, product=by_hand))), platform, params, x)
    assert operations(step(cast), platform, params, x) == want
    assert set(want[0]) == {"(bf16, bf16) -> bf16", "(bf16, bf16) -> f32"}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("platform", ["tpu", "cuda"])
@pytest.mark.parametrize("name", STEPS)
def test_around_grad_there_are_as_many(name, platform):
    """As many products, and as many casts down. A product whose result the forward pass wants in
    float32 alone may write bfloat16 where the backward pass reads the result, too, and widens it
    where it reads it: three casts up."""
    f, params, x = STEPS[name]
    cast = ft.autocast(jax.grad(functools.partial(f, product=plain)), "bfloat16")
    products, casts = operations(step(cast), platform, params, x)
    want, want_casts = operations(
        step(jax.grad(functools.partial(f, product=by_hand))), platform, params, x
    )
    assert sum(products.values()) == sum(want.values()) and products.keys() == want.keys()
    assert casts["f32 -> bf16"] == want_casts["f32 -> bf16"]
    assert casts["bf16 -> f32"] <= want_casts.get("bf16 -> f32", 0) + 3


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", STEPS)
def test_a_cpu_computes_as_many_products_all_with_float32_sums(name):
    f, params, x = STEPS[name]
    hand, around, inside = (
        jax.jit(step(g)).lower(params, x)
        for g in (
            jax.grad(functools.partial(f, product=by_hand)),
            ft.autocast(jax.grad(functools.partial(f, product=plain)), "bfloat16"),
            jax.grad(ft.autocast(functools.partial(f, product=plain), "bfloat16")),
        )
    )
    dots = lambda lowered: len(re.findall(r" = \S+ dot\(", lowered.compile().as_text()))
    want = dots(hand)
    for lowered in (around, inside):
        types = re.findall(
            r"stablehlo\.dot_general.*x(\w+)>, .*x(\w+)>\) -> .*x(\w+)>", lowered.as_text()
        )
        assert set(types) == {("bf16", "bf16", "f32")} and len(types) == want == dots(lowered)


def biased(w, b, x):
    return jnp.square(jax.nn.gelu(jnp.einsum("bi,ij->bj", x, w) + b[None])).mean()


@pytest.mark.exhaustive
def test_a_bias_is_added_in_the_dtype_of_the_product():
    w, b, x = normal(0, 8, 8), normal(1, 8), normal(2, 4, 8)
    rows = ft.explain(ft.autocast(jax.value_and_grad(biased, (0, 1)), "bfloat16"), w, b, x).rows
    assert ("add", "bfloat16", "adds a bias to a product") in {
        (row.primitive, row.dtype, row.reason) for row in rows
    }
    got = jax.jit(ft.autocast(jax.value_and_grad(biased, (0, 1)), "bfloat16"))(w, b, x)
    want = jax.value_and_grad(biased, (0, 1))(w, b, x)
    assert [leaf.dtype for leaf in jax.tree.leaves(got)] == [F32] * 3
    for a, c in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        assert jnp.abs(a - c).max() <= 2e-2 * jnp.abs(c).max()


@pytest.mark.parametrize("inside", [True, False])
def test_the_gradient_of_a_bias_is_summed_in_float32(inside):
    args = normal(0, 8, 8), normal(1, 8), normal(2, 4, 8)
    f = lambda w, b, x: jnp.einsum(
        "bi,ij->bj", jax.nn.relu(jnp.einsum("bi,ij->bj", x, w) + b[None]), w
    ).sum()
    low = (
        jax.grad(ft.autocast(f, "bfloat16"), 1)
        if inside
        else ft.autocast(jax.grad(f, 1), "bfloat16")
    )
    sums = [
        eqn for eqn in jax.make_jaxpr(low)(*args).jaxpr.eqns if eqn.primitive.name == "reduce_sum"
    ]
    assert sums and all(eqn.invars[0].aval.dtype == F32 for eqn in sums)


def test_a_rule_keeps_bias_and_product_in_float32():
    f = jax.named_call(biased, name="head")
    rows = ft.explain(
        ft.autocast(f, "bfloat16", rules={"head": "float32"}),
        normal(0, 8, 8),
        normal(1, 8),
        normal(2, 4, 8),
    ).rows
    assert {row.dtype for row in rows} == {"float32"}


def test_what_is_no_bias_of_a_product_is_added_in_float32():
    full = lambda w, b, x: (
        jax.nn.relu(jnp.einsum("bi,ij->bj", x, w) + b).sum() * 0
        + jnp.einsum("bi,ij->bj", jnp.einsum("bi,ij->bj", x, w) + b, w).sum()
    )
    rows = ft.explain(
        ft.autocast(full, "bfloat16"), normal(0, 8, 8), normal(1, 4, 8), normal(2, 4, 8)
    ).rows
    assert not any("bias" in row.reason for row in rows)


def loss_of_logits(w, x):
    logits = jnp.einsum("bti,ij->btj", x, w)
    return (jax.nn.logsumexp(logits, -1) - logits[..., 0]).mean()


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize(
    ("policy", "want"),
    [("bfloat16", "bf16"), (hw.Policy(compute="bfloat16", activations="float32"), "f32")],
)
def test_large_activations_are_stored_in_16_bits_but_no_weight_gradients(policy, want, inside):
    shapes = lambda width, size: (
        jax.ShapeDtypeStruct((width, size), F32),
        jax.ShapeDtypeStruct((2, 1 << 10, width), F32),
    )
    grad = lambda f, policy: (
        jax.grad(ft.autocast(f, policy), (0, 1))
        if inside
        else ft.autocast(jax.grad(f, (0, 1)), policy)
    )

    def results(platform, *shapes):
        lowered = (
            jax.jit(grad(loss_of_logits, policy))
            .trace(*shapes)
            .lower(lowering_platforms=(platform,))
        )
        return sorted(re.findall(r"dot_general.* -> tensor<(\S*)x(\w+)>", lowered.as_text()))

    for platform in ("cuda", "tpu"):
        large = dict(results(platform, *shapes(8, 1 << 11)))  # 2^22 logits
        assert large["2x1024x2048"] == want and large["2048x8"] == "f32"
        large = dict(results(platform, *shapes(1 << 11, 8)))  # 2^22 elements of the gradient of x
        assert large["2x1024x2048"] == ("f32" if inside else want) and large["8x2048"] == "f32"
        assert {dtype for _, dtype in results(platform, *shapes(8, 1 << 10))} == {"f32"}
    assert {dtype for _, dtype in results("cpu", *shapes(8, 1 << 11))} == {"f32"}


def test_weight_gradients_of_kernels_with_three_axes_are_not_rounded():
    """The gradient of y = einsum("ni,ihd->nhd", x, w) sums over the first axis of an array with
    three axes."""
    f = lambda w, x: jnp.square(jnp.tanh(jnp.einsum("ni,ihd->nhd", x, w))).sum()
    shapes = (
        jax.ShapeDtypeStruct((1 << 9, 1 << 7, 1 << 6), F32),
        jax.ShapeDtypeStruct((16, 1 << 9), F32),
    )
    lowered = (
        jax.jit(ft.autocast(jax.grad(f), "bfloat16"))
        .trace(*shapes)
        .lower(lowering_platforms=("cuda",))
    )
    (dtype,) = {
        dtype
        for shape, dtype in re.findall(r"dot_general.* -> tensor<(\S*)x(\w+)>", lowered.as_text())
        if sorted(shape.split("x")) == ["128", "512", "64"]
    }
    assert dtype == "f32"


RESIDUAL = hw.Policy(compute="bfloat16", residual="bfloat16")


def layers(params, x):
    for w, v, b in params:
        x = x + 0.5 * (jax.nn.gelu(x @ w) @ v + b)
    return x


def residual_case():
    params = [
        (0.1 * normal(i, 16, 32), 0.1 * normal(i + 3, 32, 16), 0.1 * normal(i + 6, 1, 1, 16))
        for i in range(3)
    ]
    return params, normal(9, 2, 4, 16)


@pytest.mark.quick_cases("jit-True")
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint, jax.jit])
def test_a_residual_stream_in_16_bits(wrap, inside):
    params, x = residual_case()
    loss = wrap(lambda params, x: jnp.square(layers(params, x)).mean())
    f = lambda policy: jax.jit(
        jax.value_and_grad(ft.autocast(loss, policy))
        if inside
        else ft.autocast(jax.value_and_grad(loss), policy)
    )
    added = lambda policy: [
        row.dtype
        for row in ft.explain(ft.autocast(loss, policy), params, x).rows
        if row.reason == "adds to the residual stream"
    ]
    assert added(RESIDUAL).count("bfloat16") >= 3 and not added("bfloat16")
    (value, grads), (want, exact) = (
        f(RESIDUAL)(params, x),
        jax.jit(jax.value_and_grad(loss))(params, x),
    )
    assert value.dtype == F32 and {leaf.dtype for leaf in jax.tree.leaves(grads)} == {
        jnp.dtype(F32)
    }
    # bfloat16 rounds by up to 2^-9 = 2e-3. Measured: 1.4e-4 for the mean and 7.4e-3 for gradients
    # (6.5e-3 without a residual stream in bfloat16).
    np.testing.assert_allclose(value, want, rtol=5e-4)
    for got, leaf in zip(jax.tree.leaves(grads), jax.tree.leaves(exact)):
        np.testing.assert_allclose(got, leaf, rtol=0, atol=1.5e-2 * np.abs(leaf).max())


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("stacked", [True, False])
def test_the_gradient_of_a_residual_stream_has_16_bits(stacked):
    """Applied to the gradient function, autocast rounds where JAX's gradient of a stream in
    bfloat16 also rounds."""
    model = models.GPT(64, 16, 3, 2, context=8, stacked=stacked)
    params, _ = model.init(jax.random.key(0), model.example())
    tokens = jax.random.randint(jax.random.key(1), (4, 9), 0, 64)
    loss = lambda params: model.cross_entropy(params, tokens[:, :-1], tokens[:, 1:]).mean()
    around, inside = ft.autocast(jax.grad(loss), RESIDUAL), jax.grad(ft.autocast(loss, RESIDUAL))
    rows = ft.explain(around, params).rows
    sums = [row for row in rows if row.reason == "adds to the gradient of the residual stream"]
    assert len(sums) >= (2 if stacked else 6) and {row.dtype for row in sums} == {"bfloat16"}
    exact = jax.jit(jax.grad(loss))(params)
    error = jax.jit(
        lambda grads: (
            optax.tree.norm(jax.tree.map(jnp.subtract, grads, exact)) / optax.tree.norm(exact)
        )
    )
    grads = [jax.jit(f)(params) for f in (around, inside, ft.autocast(jax.grad(loss), "bfloat16"))]
    errors = [error(each) for each in grads]
    assert {leaf.dtype for leaf in jax.tree.leaves(grads[0])} == {jnp.dtype(F32)}
    # Measured: 4.3e-3, 4.4e-3 and 2.2e-3 (stacked), 5.3e-3, 5.5e-3 and 2.8e-3.
    assert errors[0] <= 1.5 * errors[1] and errors[0] <= 3 * errors[2], errors


@pytest.mark.exhaustive
def test_a_resnet_rounds_sums_with_shortcuts_but_no_statistics():
    """BatchNorm adds a shift, which is a part of the result of a convolution, to the mean of the
    differences."""
    model = models.ResNet((1, 1), bottleneck=True, classes=4, width=8)
    x = normal(0, 4, 16, 16, 3)
    params, state = model.init(jax.random.key(0), x)
    loss = lambda params: optax.softmax_cross_entropy_with_integer_labels(
        model(params, x, state=state, train=True)[0], jnp.arange(4)
    ).mean()
    rows = ft.explain(ft.autocast(loss, RESIDUAL), params).rows
    scopes = [row.scope for row in rows if row.reason == "adds to the residual stream"]
    assert len(scopes) == 2 and not any("norm" in scope for scope in scopes)
    exact = jax.jit(jax.grad(loss))(params)
    difference = jax.jit(lambda grads: optax.tree.norm(jax.tree.map(jnp.subtract, grads, exact)))
    error = lambda policy: (
        difference(jax.jit(ft.autocast(jax.grad(loss), policy))(params)) / optax.tree.norm(exact)
    )
    assert error(RESIDUAL) <= 1.5 * error("bfloat16")  # measured: 0.198 and 0.197


def test_an_earlier_program_does_not_affect_the_rounding():
    """The second program has no residual stream, but sums gradients with the shape of the stream of
    the first one."""

    def loss(w, x, residual):
        h = jnp.tanh(x @ w)
        h = h + h @ w.T @ w if residual else jnp.sin(h) * jnp.cos(h) * jnp.exp(h)
        return jnp.square(h).mean()

    w, x = 0.1 * normal(0, 16, 12), normal(1, 2, 4, 16)
    step = lambda residual: (
        lambda cast: str(jax.make_jaxpr(lambda w, x: cast(w, x, residual))(w, x))
    )
    used, fresh = (ft.autocast(jax.grad(loss), RESIDUAL) for _ in range(2))
    step(True)(used)
    assert step(False)(used) == step(False)(fresh) != step(True)(fresh)


def test_sums_of_parameter_gradients_stay_in_float32():
    """A matrix that is used in three layers, whose gradient has the shape of the residual stream,
    [16, 16]."""

    def loss(w, x):
        for _ in range(3):
            x = x + jnp.tanh(x @ w) @ w
        return jnp.square(x).mean()

    w, x = 0.1 * normal(0, 16, 16), normal(1, 16, 16)
    rows = ft.explain(ft.autocast(jax.grad(loss), RESIDUAL), w, x).rows
    reasons = [row.reason for row in rows]
    assert (
        "adds to the residual stream" in reasons
        and "adds to the gradient of the residual stream" not in reasons
    )


@pytest.mark.parametrize("tokens", [16, 24])
def test_the_gradient_of_a_weight_is_not_that_of_a_stream_with_its_shape(tokens):
    """A matrix that each layer of a scan uses twice, and as many tokens as features."""

    def loss(params, tokens):
        block = lambda h, w: (h + jnp.tanh(h @ w) @ w, None)
        return jnp.square(jax.lax.scan(block, params["embed"][tokens], params["w"])[0]).mean()

    params = {"w": jnp.ones((2, 16, 16)), "embed": jnp.ones((50, 16))}
    rows = ft.explain(ft.autocast(jax.grad(loss), RESIDUAL), params, jnp.arange(tokens)).rows
    added = [(row.dtype, row.reason.split(" ")[0]) for row in rows if row.primitive == "add_any"]
    assert added.count(("float32", "is")) == 1 and set(added) == {
        ("bfloat16", "adds"),
        ("float32", "is"),
    }


@pytest.mark.exhaustive
def test_parameters_and_sums_that_are_no_branches_stay_in_float32():
    """A step that updates parameters by a sum, a sum of inputs, and a function with a rule."""
    params, x = residual_case()

    def step(params, x):
        grads = jax.grad(lambda params: jnp.square(layers(params, x)).mean())(params)
        return jax.tree.map(lambda p, g: p + -1e-4 * g, params, grads)

    new, plain = ft.autocast(step, RESIDUAL)(params, x), ft.autocast(step, "bfloat16")(params, x)
    for p, got, want in zip(*map(jax.tree.leaves, (params, new, plain))):
        assert got.dtype == F32 and (got != got.astype(jnp.bfloat16).astype(F32)).any()
        # Measured: 8.1e-3, because gradients differ by the rounding of activations. Rounded
        # parameters would differ by more than the whole update.
        np.testing.assert_allclose(got - p, want - p, rtol=0, atol=0.02 * np.abs(want - p).max())
    f = lambda x, w: (x + jnp.sin(x)) @ w
    rows = ft.explain(ft.autocast(f, RESIDUAL), x, params[0][0]).rows
    assert [row.dtype for row in rows if row.primitive == "add"] == ["float32"]
    exact = ft.autocast(layers, RESIDUAL, rules={".*": "float32"})
    np.testing.assert_array_equal(exact(params, x), layers(params, x))


def convolution(w, x):
    return jax.lax.conv_general_dilated(
        x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


@pytest.mark.parametrize("inside", [True, False])
def test_kernels_are_cast_before_they_are_reversed_and_convolutions_write_16_bits_on_cuda(inside):
    loss = lambda w, x: jnp.square(jnp.tanh(convolution(w, x))).sum()
    w, x = normal(0, 3, 3, 4, 4), normal(1, 2, 8, 8, 4)
    f = (
        jax.grad(ft.autocast(loss, "bfloat16"), (0, 1))
        if inside
        else ft.autocast(jax.grad(loss, (0, 1)), "bfloat16")
    )
    lowered = {
        platform: jax.jit(f).trace(w, x).lower(lowering_platforms=(platform,)).as_text()
        for platform in ("cuda", "tpu")
    }
    reversals = re.findall(r"stablehlo\.reverse .* : tensor<\S*x(\w+)>", lowered["cuda"])
    assert reversals and set(reversals) == {"bf16"}
    results = {
        platform: re.findall(r"stablehlo\.convolution.* -> tensor<\S*x(\w+)>", text)
        for platform, text in lowered.items()
    }
    assert set(results["cuda"]) == {"bf16"} and "f32" in results["tpu"]
