"""capture and intervene beside every other transform."""

import re

import jax
import jax.numpy as jnp
import pytest
from checks import sampled

from fnet import layers as nn
from fnet import transforms as ft

pytestmark = pytest.mark.usefixtures("quickly")
X = jax.random.normal(jax.random.key(0), (2, 5, 8))
SMALL = nn.Sequential(
    nn.Dense(6),
    drop=nn.Dropout(0.5),
    blocks=nn.Stack(nn.Remat(nn.Sequential(a=nn.Dense(6), b=nn.Sequential(jnp.tanh))), 2),
    head=nn.Dense(4),
)
SMALL_PARAMS = SMALL.init(jax.random.key(1), X)[0]
TRANSFORMS = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "rewrite": lambda f: ft.rewrite(f, lambda *_: NotImplemented),
    "autocast": lambda f: ft.autocast(f, "bfloat16"),
    "autocast32": lambda f: ft.autocast(f, "bfloat16", rules={".*": "float32"}),
    "tune": lambda f: ft.tune(f, "cpu"),
    "rematerialize": ft.rematerialize,
    "microbatch": lambda f: ft.microbatch(f, 2),
    "capture": lambda f: lambda *args: ft.capture(f, ".*")(*args)[0],
    "intervene": lambda f: ft.intervene(f, {"head": lambda value, index: value}),
}


def mean(params, x):
    return jnp.sum(jnp.sin(SMALL(params, x))) / len(x)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:tune. the compiler options")
@pytest.mark.parametrize(
    "name", sampled(TRANSFORMS, ["autocast", "tune", "rematerialize", "microbatch"])
)
def test_pairs(name):
    """capture and intervene inside and outside of every transform of a loss, and of its gradient."""
    transform, sites, bound = (
        TRANSFORMS[name],
        ["blocks/a", "head"],
        0.05 if name == "autocast" else 1e-5,
    )
    seen = ft.capture(SMALL, sites)(SMALL_PARAMS, X)[1]
    if name == "microbatch":  # slices are iterations of a scan
        seen = {key: jnp.stack(jnp.split(value, 2, -3)) for key, value in seen.items()}
    step = jax.value_and_grad(mean)
    double = {"head": lambda value, index: 2 * value}
    doubled = lambda params, x: jnp.sum(jnp.sin(2 * SMALL(params, x))) / len(x)

    def every(params, x):
        """{what is computed: its value}"""
        results = {
            "capture outside": ft.capture(transform(mean), sites)(params, x),
            "intervene inside": transform(ft.intervene(mean, double))(params, x),
            "intervene outside": ft.intervene(transform(mean), double)(params, x),
        }
        if name != "microbatch":
            results["capture inside"] = transform(ft.capture(mean, sites))(params, x)
        if name not in ("checkpoint", "intervene"):  # which take functions before differentiation
            results["capture outside of the gradient"] = ft.capture(transform(step), sites)(
                params, x
            )
        return results

    for what, result in jax.jit(every)(SMALL_PARAMS, X).items():
        if "intervene" in what:
            near(result, jax.jit(transform(doubled))(SMALL_PARAMS, X), 1e-5)
        else:
            near(result[1], seen, bound)
            near(
                result[0],
                jax.jit(transform(step if "gradient" in what else mean))(SMALL_PARAMS, X),
                1e-5,
            )


def near(got, want, tolerance):
    """Relative to the largest number of the tree."""
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(want))
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        error = float(jnp.abs(a.astype(jnp.float32) - b).max())
        assert a.shape == b.shape and error <= tolerance * largest, (
            jax.tree_util.keystr(path),
            error,
        )


@pytest.mark.quick_cases(2)
@pytest.mark.filterwarnings("ignore:tune. the compiler options")
@pytest.mark.parametrize(
    "name", sampled(TRANSFORMS, ["autocast", "tune", "rematerialize", "microbatch"])
)
def test_tags_change_no_transform(name):
    """Traced with tags, which are removed afterwards, every transform makes the program that it
    makes without."""

    def lowered(f, *args):
        return jax.jit(lambda *args: f(*args)).trace(*args).lower().as_text()

    f = TRANSFORMS[name]
    functions = [f(mean), f(jax.vmap(mean, (None, 0)))]
    functions += [] if name == "intervene" else [f(jax.value_and_grad(mean)), jax.grad(f(mean))]
    for g, args in zip(
        functions, [(SMALL_PARAMS, X), (SMALL_PARAMS, X[None]), *[(SMALL_PARAMS, X)] * 2]
    ):
        if name == "microbatch" and g is functions[1]:
            continue
        got, want = (
            lowered(lambda *args, g=g: ft.capture(g, [])(*args)[0], *args),
            lowered(g, *args),
        )
        if name == "microbatch":  # a scan that is bound again has its constants in another order
            got, want = (sorted(re.findall(r"stablehlo\.\w+", text)) for text in (got, want))
        assert got == want
