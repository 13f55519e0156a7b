"""autocast: every function of the table, every primitive, constants, carries, scopes, the author's own casts."""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import same
from jax import lax
from precision_cases import CASES, normal

from fnet import layers as nn
from fnet import transforms as ft
from fnet._jax import sub_jaxprs
from fnet.hardware import Policy

F32, BF16, F16 = (np.dtype(name) for name in ("float32", "bfloat16", "float16"))
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}    # code that runs once
UNSAFE = {"exp", "exp2", "log", "log1p", "reduce_sum", "rsqrt", "pow", "cumsum"}


def once(f, *args):
    return jax.block_until_ready(jax.jit(f).lower(*args).compile(compiler_options=QUICK)(*args))


def equations(f, *args):
    """All equations of f's jaxpr, at every depth."""
    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            yield eqn
            for sub in sub_jaxprs(eqn):
                yield from walk(sub.jaxpr)

    return list(walk(jax.make_jaxpr(f)(*args).jaxpr))


def products(f, *args):
    """How often each (compute, out) occurs among lowered products; "plain" for the others."""
    count = collections.Counter()
    for eqn in equations(f, *args):
        if eqn.primitive.name == "lowered":
            count[eqn.params["compute"].name, eqn.params["out"].name] += 1
        elif eqn.primitive.name in ("dot_general", "conv_general_dilated"):
            count["plain"] += 1
    return count


def worst(got, want):
    """The largest |a - b| / |b| of a leaf; below a hundredth of the whole tree's norm, |b| is that hundredth: gradients
    that vanish but for rounding, like that of a key's bias under softmax, have no relative error."""
    got, want = ([np.asarray(x, np.float64) for x in jax.tree.leaves(tree)] for tree in (got, want))
    floor = 1e-2 * np.sqrt(sum((b ** 2).sum() for b in want))
    return max(np.linalg.norm(a - b) / max(np.linalg.norm(b), floor) for a, b in zip(got, want))


def variants(f, case, cast):
    """name -> function(params, *inputs): the function, its gradients inside and outside, jitted, batched, twice."""
    def twice(f):
        def product(params, *inputs):
            grad = lambda p: jax.grad(f)(p, *inputs)
            if case.forward:
                return jax.jvp(grad, (params,), (params,))[1]
            dots = lambda p: sum(jnp.vdot(a, b) for a, b in zip(jax.tree.leaves(grad(p)), jax.tree.leaves(params)))
            return jax.grad(dots)(params)    # custom_vjp has no forward mode
        return product

    grad = jax.grad(f)
    made = {
        "f": (cast(f), f),
        "grad(ac f)": (jax.grad(cast(f)), grad),
        "ac(grad f)": (cast(grad), grad),
        "jit(grad(ac f))": (jax.jit(jax.grad(cast(f))), grad),
        "ac(jit(grad f))": (cast(jax.jit(grad)), grad),
        "hvp": (twice(cast(f)), twice(f)),
    }
    if case.batched:
        axes = lambda *args: (0, *(None,) * (len(args) - 1))
        batch = lambda f: lambda p, *xs: jax.vmap(f, axes(p, *xs))(jax.tree.map(lambda a: jnp.stack([a, a]), p), *xs)
        made["vmap(grad(ac f))"] = batch(jax.grad(cast(f))), batch(grad)
        made["ac(vmap(grad f))"] = cast(batch(grad)), batch(grad)
    return made


@pytest.mark.parametrize("name", CASES)
def test_table(name):
    case = CASES[name]
    f, params, inputs = case.make()
    plain = {label: pair[1] for label, pair in variants(f, case, lambda f: f).items()}
    exact = once(lambda *args: [plain[k](*args) for k in ("f", "grad(ac f)", "hvp")], params, *inputs)
    for dtype, bound in ((BF16, case.bfloat16), (F16, case.float16)):
        made = variants(f, case, functools.partial(ft.autocast, policy=dtype.name))
        cast = {label: pair[0] for label, pair in made.items()}
        traced = {label: equations(g, params, *inputs) for label, g in cast.items()}
        for label, eqns in traced.items():
            low = [e.primitive.name for e in eqns if e.primitive.name in UNSAFE and any(
                getattr(v.aval, "dtype", None) == dtype for v in e.invars)]
            assert not low, (label, low)
        # Compiled whole, the first of these are the same programs as their jitted twins.
        run = {label: g for label, g in cast.items() if label not in ("grad(ac f)", "ac(grad f)")}
        got = once(lambda *args, run=run: {label: g(*args) for label, g in run.items()}, params, *inputs)
        for label, result in got.items():
            want = exact[0] if label == "f" else exact[2] if label == "hvp" else exact[1]
            if "vmap" in label:
                result = jax.tree.map(lambda a: a[1], result)
            assert jax.tree.map(lambda a: (a.shape, a.dtype), result) == jax.tree.map(
                lambda a: (a.shape, a.dtype), want), label
            # Second derivatives go through the products of the first once more.
            error = worst(result, want)
            assert error <= bound * (3 if label == "hvp" else 1), (label, dtype.name, f"{error:.1e}")


def test_the_table_is_lowered():
    """What the bounds of the table can't see: that there is something to bound."""
    for name in ("mlp", "conv and BatchNorm", "Stack with Remat", "shard_map", "custom_vjp"):
        f, params, inputs = CASES[name].make()
        for g in (jax.grad(ft.autocast(f, "bfloat16")), ft.autocast(jax.grad(f), "bfloat16")):
            count = products(g, params, *inputs)
            assert count["plain"] == 0 and sum(count.values()) >= 2, (name, count)


@pytest.mark.parametrize("form", ["grad(ac f)", "ac(grad f)"])
def test_weight_gradients_are_summed_and_kept_in_float32(form):
    f, params, inputs = CASES["mlp"].make()
    g = jax.grad(ft.autocast(f, "bfloat16")) if form == "grad(ac f)" else ft.autocast(jax.grad(f), "bfloat16")
    text = jax.jit(g).lower(params, *inputs).as_text()
    dots = re.findall(r"dot_general.*: \((.*)\) -> (.*)", text)
    assert len(dots) == 8    # three forward, three for weights, two for activations
    for operands, result in dots:
        assert operands.count("bf16") == 2 and result.strip().endswith("xf32>"), (operands, result)


# Primitives.

X, Y = normal(1, 4, 8), normal(2, 8, 4)
IMAGE, WINDOW = normal(3, 2, 6, 6, 3), normal(4, 3, 3, 3, 5)
convolve = functools.partial(lax.conv_general_dilated, window_strides=(1, 1), padding="SAME",
                             dimension_numbers=("NHWC", "HWIO", "NHWC"))

FOLLOW = {
    "reshape": lambda x: x.reshape(2, 8), "transpose": lambda x: x.T,
    "broadcast_in_dim": lambda x: jnp.broadcast_to(x[:, None], (4, 3, 4)),
    "slice": lambda x: x[1:3], "concatenate": lambda x: jnp.concatenate([x, x]), "rev": lambda x: x[::-1],
    "gather": lambda x: x[jnp.array([2, 0])], "select_n": lambda x: jnp.where(x > 0, x, -x),
    "pad": lambda x: lax.pad(x, x.dtype.type(0), [(1, 1, 0)] * 2),
    "add": lambda x: x + x, "sub": lambda x: x - 2 * x, "mul": lambda x: x * x,
    "div": lambda x: x / 3, "neg": lambda x: -x, "abs": abs, "sign": jnp.sign, "max": lambda x: jnp.maximum(x, 0.5),
    "min": lambda x: jnp.minimum(x, 0.5), "clamp": lambda x: lax.clamp(x.dtype.type(-0.5), x, x.dtype.type(0.5)),
    "tanh": jnp.tanh,
    "logistic": jax.nn.sigmoid, "erf": jax.scipy.special.erf, "reduce_max": lambda x: x.max(0),
    "reduce_min": lambda x: x.min(0), "floor": jnp.floor, "sort": lambda x: jnp.sort(x, 0),
}
FLOAT32 = {
    "exp": jnp.exp, "exp2": jnp.exp2, "expm1": jnp.expm1, "log": lambda x: jnp.log(x * x + 1), "log1p": lambda x:
    jnp.log1p(x * x), "pow": lambda x: (x * x + 1) ** jnp.float32(1.5), "sqrt": lambda x: jnp.sqrt(x * x + 1),
    "rsqrt": lambda x: lax.rsqrt(x * x + 1), "sin": jnp.sin, "cos": jnp.cos, "reduce_sum": lambda x: x.sum(0),
    "reduce_prod": lambda x: x.prod(0), "cumsum": lambda x: jnp.cumsum(x, 0), "cumprod": lambda x: jnp.cumprod(x, 0),
    "erf_inv": lambda x: lax.erf_inv(x / 10), "lgamma": lax.lgamma,
}


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("name", FOLLOW)
def test_follows_what_it_is_given(name, dtype):
    """Between two products, each of these runs in the low dtype, as by hand."""
    def f(x, y):
        return FOLLOW[name](x @ y).reshape(-1, 2) @ jnp.ones((2, 3), x.dtype)

    def by_hand(x, y):
        h = lax.dot(x.astype(dtype), y.astype(dtype), preferred_element_type=F32).astype(dtype)
        h = FOLLOW[name](h).reshape(-1, 2)
        return lax.dot(h, jnp.ones((2, 3), dtype), preferred_element_type=F32)

    cast = ft.autocast(f, dtype.name)
    seen = {e.primitive.name: e.outvars[0].aval.dtype for e in reversed(equations(cast, X, Y)) if e.outvars}
    assert seen[name] == dtype
    assert worst(cast(X, Y), by_hand(X, Y)) < 1e-6


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("name", FLOAT32)
def test_runs_in_float32(name, dtype):
    cast = ft.autocast(lambda x, y: FLOAT32[name](x @ y), dtype.name)
    at = [e for e in equations(cast, X, Y) if e.primitive.name == name]
    assert at and all(v.aval.dtype == F32 for e in at for v in (*e.invars, *e.outvars))
    product = lax.dot(X.astype(dtype), Y.astype(dtype), preferred_element_type=F32)
    assert worst(cast(X, Y), FLOAT32[name](product)) < 1e-6


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_products_are_the_casts_by_hand(dtype):
    same(ft.autocast(jnp.matmul, dtype.name)(X, Y),
         lax.dot(X.astype(dtype), Y.astype(dtype), preferred_element_type=F32))
    same(ft.autocast(lambda x, y: convolve(x, y), dtype.name)(IMAGE, WINDOW),
         jax.jit(lambda x, y: convolve(x.astype(dtype), y.astype(dtype)).astype(F32))(IMAGE, WINDOW))


@pytest.mark.parametrize(("name", "low"), [("square", True), ("integer_pow", True)])
def test_powers_stay_float32_in_float16_alone(name, low):
    power = jnp.square if name == "square" else lambda x: x ** 3
    f = lambda x, y: power(x @ y) @ jnp.ones((4, 2))
    for dtype in (BF16, F16):
        out = [e.outvars[0].aval.dtype for e in equations(ft.autocast(f, dtype.name), X, Y) if e.primitive.name == name]
        assert out == [BF16 if dtype == BF16 else F32]


# Constants.

@pytest.mark.parametrize(("dtype", "fill"), [("float16", -1e9), ("bfloat16", float(jnp.finfo(F32).min))])
def test_masks_stay_finite(dtype, fill):
    def f(x, y, mask):
        return jax.nn.softmax(jnp.where(mask, x @ y, fill) * 1.0)

    mask = jnp.arange(4)[None] <= jnp.arange(4)[:, None]
    got = ft.autocast(f, dtype)(X, Y, mask)
    assert np.isfinite(got).all() and (np.asarray(got)[~np.asarray(mask)] == 0).all()
    assert worst(got, f(X, Y, mask)) < 2e-2


def test_a_literal_follows_through_jit():
    """jnp.where hands its fill to a jitted function; it does not make the product float32."""
    f = lambda x, y: jnp.where(x @ y > 0, x @ y, 0.5) @ jnp.ones((4, 2))
    seen = [e.outvars[0].aval.dtype for e in equations(ft.autocast(f, "bfloat16"), X, Y)
            if e.primitive.name == "select_n"]
    assert seen == [BF16]


# Control flow.

def test_carries_and_branches_keep_their_dtypes():
    w = normal(5, 8, 8, scale=0.3)

    def f(x, w):
        x = lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h @ w), x)
        x, ys = lax.scan(lambda h, _: (jnp.tanh(h @ w), h @ w), x, length=2)
        x = lax.cond(x.sum() > 0, lambda h: h @ w, lambda h: h + 1, x)
        return lax.while_loop(lambda h: jnp.abs(h @ w).max() > 1, lambda h: (h @ w) / 2, x), ys

    cast = ft.autocast(f, "bfloat16")
    got, want = once(cast, X, w), once(f, X, w)
    assert jax.tree.map(lambda a: a.dtype, got) == jax.tree.map(lambda a: a.dtype, want)
    assert worst(got, want) < 2e-2
    assert products(cast, X, w)["plain"] == 0
    for eqn in equations(cast, X, w):
        if eqn.primitive.name in ("while", "cond"):
            assert all(v.aval.dtype != BF16 for v in eqn.outvars)


def test_gradients_of_float32_uses_are_added_up_in_float32():
    """Rounded one by one and then added up in 16 bits, as BatchNorm's would be, they no longer cancel."""
    def f(w, x):
        h = x @ w
        return jnp.tanh((h - h.mean(0, keepdims=True)) @ Y.T).sum()

    eqns = equations(jax.grad(ft.autocast(f, "bfloat16")), Y, X)
    assert {e.outvars[0].aval.dtype for e in eqns if e.primitive.name == "add_any"} == {F32}
    widened = [e for e in eqns if e.primitive.name == "convert_element_type" and e.outvars[0].aval.dtype == F32]
    assert len(widened) == 1


# What the author says.

def test_the_authors_casts_and_precision_win():
    cast = ft.autocast(lambda x, y: (x.astype(F16) @ y.astype(F16)).astype(F32) + x @ x.T, "bfloat16")
    dots = [e.invars[0].aval.dtype for e in equations(cast, X, Y) if e.primitive.name == "dot_general"]
    assert dots == [F16] and products(cast, X, Y)["bfloat16", "float32"] == 1
    high = ft.autocast(lambda x, y: jnp.matmul(x, y, precision="highest"), "bfloat16")
    same(high(X, Y), jnp.matmul(X, Y, precision="highest"))


def test_full_precision():
    f = lambda x, y: ft.full_precision(jnp.matmul)(x @ y, x)
    for g in (ft.autocast(f, "bfloat16"), ft.autocast(jax.jit(f), "bfloat16")):
        assert products(g, X, Y) == {("bfloat16", "float32"): 1, "plain": 1}
    grad = jax.grad(lambda x, y: f(x, y).sum())
    assert products(ft.autocast(grad, "bfloat16"), X, Y)["plain"] == 3    # the products of its backward pass too


MODEL = nn.Sequential(body=nn.Sequential(nn.Dense(8), jnp.tanh, nn.Dense(8)), head=nn.Dense(2))


def _loss(params, x):
    return jnp.square(MODEL(params, x)).mean()


def test_rules_by_scope_forward_and_backward():
    params, _ = MODEL.init(jax.random.key(0), X)
    count = lambda rules, policy="bfloat16": products(ft.autocast(jax.grad(_loss), policy, rules=rules), params, X)
    assert count(None)["plain"] == 0
    assert count({"head": "float32"})["plain"] == 3                  # forward, weights, activations
    assert count({"body": "float32"})["plain"] == 5                  # a prefix; its input needs no gradient
    assert count({"body/0": "bfloat16", "body": "float32"})["plain"] == 3    # the first that matches
    assert count({".*": "float32"})["plain"] == 8
    mixed = count({"head": "float16"})
    assert mixed["float16", "float32"] + mixed["float16", "float16"] == 3
    low = count({"head": "bfloat16"}, "float32")
    assert low["plain"] == 5 and sum(low.values()) == 8
    inside = jax.grad(ft.autocast(_loss, "bfloat16", rules={"head": "float32"}))
    assert products(inside, params, X)["plain"] == 3
    policy = Policy(compute="bfloat16", rules=(("head", "float32"),))
    assert products(ft.autocast(_loss, policy), params, X)["plain"] == 1
    assert products(ft.autocast(_loss, policy, rules={"head": "bfloat16"}), params, X)["plain"] == 0


def test_a_rule_that_matches_nothing_names_what_is_near():
    params, _ = MODEL.init(jax.random.key(0), X)
    message = "autocast: the rule 'haed' matches no scope; nearest: 'head'"
    with pytest.raises(ValueError, match=re.escape(message)):
        ft.autocast(_loss, "bfloat16", rules={"haed": "float32"})(params, X)
    with pytest.raises(ValueError, match="the function has no named scopes"):
        ft.autocast(jnp.matmul, "bfloat16", rules={"head": "float32"})(X, Y)


def test_bad_input_in_one_sentence():
    with pytest.raises(ValueError, match="'bfloat17' is neither 'auto', nor 'float32', 'bfloat16', 'float16', nor a"):
        ft.autocast(jnp.matmul, "bfloat17")
    with pytest.raises(TypeError, match=r"a policy is a hardware\.Policy or a string; got a int"):
        ft.autocast(jnp.matmul, 16)
    with pytest.raises(ValueError, match="the rule 'head' gives 'int8'; a dtype is one of float32, bfloat16, float16"):
        ft.autocast(jnp.matmul, "bfloat16", rules={"head": "int8"})
    with pytest.raises(TypeError, match=re.escape("autocast lowers what is float32, and the function has none; its "
                                                  "inputs are int32[3]")):
        ft.autocast(lambda x: x + 1, "bfloat16")(jnp.arange(3))


# Identities.

def test_float32_is_the_function_itself_and_nesting_changes_nothing():
    f, params, inputs = CASES["mlp"].make()
    assert str(jax.make_jaxpr(ft.autocast(f, "float32"))(params, *inputs)) == str(jax.make_jaxpr(f)(params, *inputs))
    one = ft.autocast(f, "bfloat16")
    two = ft.autocast(one, "bfloat16")
    assert products(two, params, *inputs) == products(one, params, *inputs)
    same(two(params, *inputs), one(params, *inputs))


def test_auto_asks_the_chip():
    assert ft.autocast(jnp.matmul).autocast[1].compute in (F32, BF16)
    assert ft.autocast(jnp.matmul, "NVIDIA H100 80GB HBM3").autocast[1].compute == BF16
    assert ft.autocast(jnp.matmul, "Tesla V100-SXM2-16GB").autocast[1].compute == F16


def test_other_dtypes_are_left_alone():
    def f(x, y, n, flag, key, z):
        draw = jax.random.normal(key, (4,))
        return x @ y, n @ n.T, flag & True, draw, z * z

    key = jax.random.key(3)
    args = (X, Y, jnp.arange(6).reshape(2, 3), jnp.array([True, False]), key, jnp.ones(3, jnp.complex64))
    got, want = ft.autocast(f, "bfloat16")(*args), f(*args)
    same(got[1:], want[1:])
    with jax.enable_x64(True):
        x = jnp.ones((3, 3), jnp.float64) / 3
        low = ft.autocast(lambda x, y: (x @ x, y @ y), "bfloat16")(x, x.astype(F32))
        same(low[0], x @ x)
        assert low[0].dtype == np.float64 and low[1].dtype == F32


# Other transforms.

def test_remat_policies_see_products():
    w = [normal(i, 32, 32, scale=0.2) for i in range(2)]
    block = lambda w, x: jnp.sin(jnp.sin(x @ w[0]) @ w[1]).sum()

    def saved(policy):
        grad = jax.grad(ft.autocast(jax.checkpoint(block, policy=policy), "bfloat16"))
        return sum(products(grad, w, normal(9, 8, 32)).values())

    every, none = jax.checkpoint_policies.everything_saveable, jax.checkpoint_policies.nothing_saveable
    assert saved(none) > saved(every)
    assert saved(jax.checkpoint_policies.dots_saveable) == saved(every)
    assert saved(jax.checkpoint_policies.dots_with_no_batch_dims_saveable) == saved(every)


def test_pmap():
    w, x = normal(1, 8, 4), normal(2, 8, 3, 8)
    f = lambda w, x: lax.pmean(jnp.tanh(x @ w).sum(), "i")
    run = lambda f: jax.pmap(f, axis_name="i", in_axes=(None, 0))(w, x)
    assert worst(run(jax.grad(ft.autocast(f, "bfloat16"))), run(jax.grad(f))) < 2e-2
