"""What `introspect.diff` says of planted changes and of refactorings, for a training step of a small
transformer."""

import functools
import re

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fnet import introspect


@pytest.fixture(autouse=True)
def _usual_promotion():
    """Programs as users write them; Optax's Adam needs it too."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


WIDTH, HEADS, TIME, WORDS = 8, 2, 5, 11
TOKENS = np.random.default_rng(0).integers(0, WORDS, (3, TIME + 1)).astype(np.int32)


def init():
    rng = np.random.default_rng(1)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape) / 3, jnp.float32)
    block = lambda: {
        "norm": {"scale": draw(WIDTH) + 1, "bias": draw(WIDTH)},
        "attention": {name: draw(WIDTH, WIDTH) for name in ("q", "k", "v", "out")},
        "mlp": {"up": draw(WIDTH, 4 * WIDTH), "down": draw(4 * WIDTH, WIDTH)},
    }
    return {"embed": draw(WORDS, WIDTH), "blocks": [block(), block()], "head": draw(WIDTH, WORDS)}


OPTIONS = {
    "epsilon": 1e-5,
    "dtype": jnp.float32,
    "mask": True,
    "mask_value": -1e9,
    "scale": 1 / 2,
    "activation": jax.nn.gelu,
    "remat": False,
    "policy": None,
    "tx": optax.adam(1e-2),
    "clip": None,
    "residual": True,
    "mean": True,
    "smoothing": 0.0,
    "stop": False,
    "stable": True,
    "rsqrt": True,
    "half": False,
    "order": "qkv",
    "tied": False,
    "precision": None,
    "twice": False,
    "noise": 0.0,
    "axis": -1,
    "weights": None,
    "attend": lambda f: f,
}


def norm(p, x, o):
    with jax.named_scope("norm"):
        x = x - x.mean(-1, keepdims=True)
        variance = jnp.square(x).mean(o["axis"], keepdims=True) + o["epsilon"]
        y = x * jax.lax.rsqrt(variance) if o["rsqrt"] else x / jnp.sqrt(variance)
        scale, bias = (p[name].astype(x.dtype)[None, None] for name in ("scale", "bias"))
        return y * scale + bias


def attention(p, x, o):
    with jax.named_scope("attention"):
        split = lambda y: y.reshape(*y.shape[:2], HEADS, -1)
        parts = {}
        for name in o["order"]:
            parts[name] = split(jnp.dot(x, p[name].astype(x.dtype), precision=o["precision"]))
        scores = jnp.einsum("bihd,bjhd->bhij", parts["q"], parts["k"]) * o["scale"]
        if o["mask"]:
            causal = jnp.tril(jnp.ones((TIME, TIME), bool))[None, None]
            scores = jnp.where(causal, scores, jnp.asarray(o["mask_value"], scores.dtype))
        if o["half"]:
            scores = scores.astype(jnp.float16).astype(jnp.float32)
        weights = jax.nn.softmax(scores) if o["stable"] else _plain_softmax(scores)
        mixed = jnp.einsum("bhij,bjhd->bihd", weights, parts["v"])
        return mixed.reshape(x.shape) @ p["out"].astype(x.dtype)


def _plain_softmax(x):
    e = jnp.exp(x)
    return e / e.sum(-1, keepdims=True)


def mlp(p, x, o):
    with jax.named_scope("mlp"):
        hidden = o["activation"](x @ p["up"].astype(x.dtype))
        if o["twice"]:
            hidden = o["activation"](hidden)
        return hidden @ p["down"].astype(x.dtype)


def block(p, x, o):
    attend = o["attend"](lambda p, x: attention(p, x, o))
    y = attend(p["attention"], norm(p["norm"], x, o))
    x = x + y if o["residual"] else y
    return x + mlp(p["mlp"], x, o)


def model(params, tokens, o):
    with jax.named_scope("embed"):
        x = params["embed"][tokens].astype(o["dtype"])
        if o["noise"]:
            x = x + o["noise"] * jax.random.normal(jax.random.key(0), x.shape)
    for i, p in enumerate(params["blocks"]):
        with jax.named_scope(f"blocks[{i}]"):
            apply = lambda p, x: block(p, x, o)
            x = jax.checkpoint(apply, policy=o["policy"])(p, x) if o["remat"] and i else apply(p, x)
    with jax.named_scope("head"):
        head = params["embed"].T if o["tied"] else params["head"]
        return (x @ head.astype(x.dtype)).astype(jnp.float32)


def make(**changed):
    """Returns a training step and its arguments."""
    o = OPTIONS | changed
    tx = o["tx"]

    def loss(params, batch):
        logits = model(params, batch[:, :-1], o)
        with jax.named_scope("loss"):
            labels = jax.nn.one_hot(batch[:, 1:], WORDS)
            labels = labels * (1 - o["smoothing"]) + o["smoothing"] / WORDS
            losses = optax.softmax_cross_entropy(logits, labels)
            if o["weights"] is not None:
                losses = losses * o["weights"]
            return losses.mean() if o["mean"] else losses.sum()

    def step(state, batch):
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        with jax.named_scope("optimizer"):
            if o["clip"]:
                grads = jax.tree.map(lambda g: jnp.clip(g, -o["clip"], o["clip"]), grads)
            updates, opt = tx.update(grads, state["opt"], state["params"])
            params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt}, {"loss": value}

    params = init()
    return step, ({"params": params, "opt": tx.init(params)}, jnp.asarray(TOKENS))


def fused(rate):
    """SGD on one vector of all parameters."""

    def update(grads, state, params):
        flat, unflatten = jax.flatten_util.ravel_pytree(grads)
        return unflatten(-rate * flat), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


SGD = optax.sgd(0.1)
TABLE = np.linspace(1, 2, 3 * TIME, dtype=np.float32).reshape(3, TIME)
OTHER = TABLE + np.float32(0.01) * (TABLE == 2)
PLANTED = {  # the options before and after, the layer, and what is said of it
    "epsilon": ({}, dict(epsilon=1e-6), "blocks[0]/norm", "add .* 1e-05 .* is now `add .* 1e-06"),
    "dtype": ({}, dict(dtype=jnp.bfloat16), "embed", "added `convert .* : bf16"),
    "mask": ({}, dict(mask=False), "blocks[0]/attention", "removed `select_n .* -1e.09"),
    "mask value": (
        {},
        dict(mask_value=-1e4),
        "blocks[0]/attention",
        "select_n .* -1e.09 .* is now `select_n .* -10000.0",
    ),
    "fused optimizer": (dict(tx=SGD), dict(tx=fused(0.1)), "optimizer", "added `reshape"),
    "recomputation": ({}, dict(remat=True), "blocks[1]/norm", r"\(recomputed\): added"),
    "learning rate": (
        {},
        dict(tx=optax.adam(1e-3)),
        "optimizer",
        "mul -0.01 .* is now `mul -0.001",
    ),
    "decay of a moment": (
        {},
        dict(tx=optax.adam(1e-2, b2=0.99)),
        "optimizer",
        "mul 0.001 .* is now `mul 0.01",
    ),
    "weight decay": ({}, dict(tx=optax.adamw(1e-2)), "optimizer", "added `mul .*1e-04|mul 0.0001"),
    "epsilon of Adam": (
        {},
        dict(tx=optax.adam(1e-2, eps=1e-7)),
        "optimizer",
        "add .* 1e-08 .* is now `add .* 1e-07",
    ),
    "clipping": ({}, dict(clip=1.0), "optimizer", "added `max -1.0"),
    "residual": (
        {},
        dict(residual=False),
        "blocks[0]/mlp",
        r"dot_general add of blocks\[0\] .* is now `dot_general dot_general of blocks\[0\]/attention",
    ),
    "sum of losses": ({}, dict(mean=False), "loss", "removed `div .* 15.0"),
    "smoothed labels": ({}, dict(smoothing=0.1), "loss", "mul .* 1.0 .* is now `mul .* 0.9"),
    "unstable softmax": ({}, dict(stable=False), "blocks[0]/attention", "removed `reduce_max"),
    "square root": ({}, dict(rsqrt=False), "blocks[0]/norm", "rsqrt .* is now `sqrt"),
    "scores in float16": (
        {},
        dict(half=True),
        "blocks[0]/attention",
        "added `convert .* : f16",
    ),
    "tied head": (
        {},
        dict(tied=True),
        "head",
        "dot_general of head .* is now `transpose state/params/embed",
    ),
    "precision": (
        {},
        dict(precision="highest"),
        "blocks[0]/attention",
        r"dot_general .* is now `dot_general .* precision=\[highest,highest\]",
    ),
    "second activation": ({}, dict(twice=True), "blocks[0]/mlp", "added `"),
    "noise": ({}, dict(noise=0.1), "embed", "added `add"),
    "axis": (
        {},
        dict(axis=1),
        "blocks[0]/norm",
        r"reduce_sum .* axes=\[2\] .* is now `reduce_sum .* axes=\[1\]",
    ),
    "exact gelu": (
        {},
        dict(activation=lambda x: jax.nn.gelu(x, approximate=False)),
        "blocks[0]/mlp",
        "integer_pow|added `neg",
    ),
    "scale": ({}, dict(scale=0.25), "blocks[0]/attention", "mul .* 0.5 .* is now `mul .* 0.25"),
}


@functools.cache
def plain():
    return introspect.lock(*_call(*make()), values=False)


def _call(step, args):
    return (step, *args)


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_change_is_named(name):
    before, after, layer, words = PLANTED[name]
    old = introspect.lock(*_call(*make(**before)), values=False) if before else plain()
    changes = introspect.diff(old, introspect.lock(*_call(*make(**after)), values=False))
    assert changes and not changes.same
    assert changes.first.layer == layer and not changes.first.follows
    assert re.search(words, str(changes.first)), str(changes.first)
    assert f"first change: {changes.first}" in str(changes)


@pytest.mark.exhaustive
def test_a_changed_constant_and_an_input_are_named_by_their_values():
    old, new = (introspect.lock(*_call(*make(weights=each))) for each in (TABLE, OTHER))
    first = introspect.diff(old, new).first
    assert first.kind == "value" and first.was.startswith("constant mean 1.5")
    step, (state, batch) = make()
    state["params"]["head"] = state["params"]["head"].at[0, 0].add(1.0)
    changes = introspect.diff(introspect.lock(*_call(*make())), introspect.lock(step, state, batch))
    assert changes.first.was.startswith("state/params/head mean")
    assert {change.kind for change in changes.changes} == {"value"}


def renamed(rename, **changed):
    """The step with other names of parameters, which also changes the order of its arguments."""
    step, (state, batch) = make(**changed)
    back = {new: old for old, new in rename.items()}

    def names(tree, table):
        if isinstance(tree, dict):
            return {table.get(name, name): names(each, table) for name, each in tree.items()}
        if type(tree) in (list, tuple):
            return type(tree)(names(each, table) for each in tree)
        if hasattr(tree, "_fields"):
            return type(tree)(*(names(each, table) for each in tree))
        return tree

    def other(everything, rows):
        new, metrics = step(names(everything, back), rows)
        return names(new, rename), metrics

    return other, (names(state, rename), batch)


def flat_step():
    """The same with the state as two arguments, and results in another structure."""
    step, (state, batch) = make()

    def other(optimizer, batch, weights):
        new, metrics = step({"params": weights, "opt": optimizer}, batch)
        return metrics["loss"], new["opt"], new["params"]

    return other, (state["opt"], batch, state["params"])


def attention_jitted():
    step, args = make(attend=jax.jit)
    return jax.jit(step, donate_argnums=0), args


def unused_and_twice():
    step, (state, batch) = make()

    def other(state, batch):
        unused = jnp.sin(state["params"]["head"]) @ jnp.ones((WORDS, 3))
        del unused
        step(state, batch)
        return step(state, batch)

    return other, (state, batch)


def double(x: jax.Array) -> jax.Array:
    """A helper with annotations."""
    return x * 2


FORMS = {  # functions of x [3, 4] that compute the same
    "helper": (lambda x: x * 2, double),
    "swapped operands": (lambda x: 2 * x + jnp.sin(x), lambda x: jnp.sin(x) + x * 2),
    "square": (lambda x: x**2, lambda x: x * x),
    "new axes": (
        lambda x: x[:, None, :] + jnp.ones((3, 2, 4)),
        lambda x: jnp.broadcast_to(jnp.expand_dims(x, 1), (3, 2, 4)) + np.ones((3, 2, 4), "f"),
    ),
    "reshapes": (lambda x: x.reshape(12), lambda x: x.reshape(2, 6).reshape(12, 1)[:, 0]),
    "transposes": (lambda x: x.T, lambda x: jnp.moveaxis(x[None], 1, 2)[0]),
    "casts to the same dtype": (jnp.sin, lambda x: jnp.sin(x.astype(jnp.float32))),
    "a scalar from NumPy": (lambda x: x * 0.5, lambda x: x * np.float32(0.5)),
    "a loop of a scan": (
        lambda x: jax.lax.scan(lambda c, r: (c + r, c * r), x[0], x),
        lambda x: jax.lax.scan(jax.jit(lambda carry, row: (row + carry, row * carry)), x[0], x),
    ),
    "names in the carry of a loop": (
        lambda x: jax.lax.fori_loop(
            0, 3, lambda i, c: {"a": c["b"], "b": c["a"] * 2}, {"a": x, "b": x + 1}
        ),
        lambda x: jax.lax.fori_loop(
            0, 3, lambda i, c: {"z": c["y"], "y": c["z"] * 2}, {"z": x, "y": x + 1}
        ),
    ),
    "named scopes": (lambda x: jnp.sin(x) + 1, jax.named_scope("sines")(lambda x: jnp.sin(x) + 1)),
}
REFACTORED = {
    "order of statements": lambda: make(order="vkq"),
    "names of parameters": lambda: renamed({"q": "query", "k": "a_key", "mlp": "ffn", "norm": "a"}),
    "structure of arguments": flat_step,
    "jitted parts": attention_jitted,
    "unused and repeated work": unused_and_twice,
}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", REFACTORED)
def test_a_refactored_step_has_not_changed(name):
    changes = introspect.diff(plain(), introspect.lock(*_call(*REFACTORED[name]()), values=False))
    assert not changes, str(changes)


@pytest.mark.parametrize("name", FORMS)
def test_another_way_of_writing_the_same_has_not_changed(name):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 4)), jnp.float32)
    old, new = (introspect.lock(f, x) for f in FORMS[name])
    changes = introspect.diff(old, new)
    assert not changes, str(changes)


def test_renamed_parameters_are_a_note():
    renaming = REFACTORED["names of parameters"]()
    changes = introspect.diff(plain(), introspect.lock(*_call(*renaming), values=False))
    assert {"renamed: mlp -> ffn", "renamed: k -> a_key"} < set(changes.notes)
    assert str(changes).startswith("nothing changed")


# Fresh names, in another order.
SHUFFLED = dict(q="z", k="y", v="x", out="w", mlp="a", norm="zz", params="weights", opt="b")


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ["epsilon", "mask", "dtype", "recomputation", "residual"])
def test_a_planted_change_is_named_among_renamed_parameters(name):
    _, after, layer, words = PLANTED[name]
    changes = introspect.diff(
        plain(), introspect.lock(*_call(*renamed(SHUFFLED, **after)), values=False)
    )
    assert changes.first.layer == layer
    assert re.search(words.partition(" .* is now")[0], str(changes.first)), str(changes.first)
