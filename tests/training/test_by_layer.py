"""Optimizers that treat each layer by itself, on stacked layers, against Optax on one array for
each layer."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from fnet import layers as nn
from fnet import training as tr

# Depth, heads, experts and features are all 2: no size tells them apart.
TEXT = nn.Stack(
    nn.Remat(
        nn.Sequential(
            attention=nn.Attention(2),
            mixture=nn.MixtureOfExperts(2, 2),
            rnn=nn.GRU(2),
            inner=nn.Stack(nn.Dense(2), 2),
            norm=nn.RMSNorm(),
        )
    ),
    2,
)
IMAGE = nn.Stack(
    nn.Sequential(
        conv=nn.Conv(4, 3), grouped=nn.Conv(4, 3, groups=2), depthwise=nn.DepthwiseConv(3)
    ),
    2,
)
AXES = {
    "text": TEXT.spec(jnp.ones((2, 2, 2))),
    "image": IMAGE.spec(jnp.ones((2, 4, 4, 4))),
    "embed": nn.Embed(8, 4).spec(jnp.zeros((1, 2), int)),
    "head": nn.Dense(4, axes=("embed", "vocab")).spec(jnp.ones((1, 4))),
}
GROUPS = {"conv": 1, "grouped": 2, "depthwise": 4}


def numbers(seed, tree, *lead):
    """A tree of random numbers with the shapes of `tree`, and layers of different norms."""
    rng, leaves = np.random.default_rng(seed), jax.tree.leaves(tree)
    scale = lambda x: np.exp(rng.normal(size=x.shape[:1] + (1,) * (len(x.shape) - 1)))
    return jax.tree.unflatten(
        jax.tree.structure(tree),
        [jnp.asarray(rng.normal(size=(*lead, *x.shape)) * scale(x)) for x in leaves],
    )


def example(steps=10):
    tree = jax.tree.map(
        lambda each: jax.ShapeDtypeStruct(each.shape, float),
        {name: spec.params for name, spec in AXES.items()},
    )
    return numbers(0, tree), numbers(1, tree, steps)


def trained(tx, params, grads):
    """The parameters after one update for each gradient."""

    def step(carry, grad):
        params, state = carry
        updates, state = tx.update(grad, state, params)
        return (optax.apply_updates(params, updates), state), None

    with jax.numpy_dtype_promotion("standard"):
        return jax.jit(
            lambda params, grads: jax.lax.scan(step, (params, tx.init(params)), grads)[0][0]
        )(params, grads)


def unstacked(tree, *, lead=0, matrices=True):
    """{name: array}, with an array for each layer, expert and, if `matrices`, group of a
    convolution."""
    found = {}
    for path, x in jax.tree.leaves_with_path(tree):
        names, layers = [key.key for key in path], ()
        if names[0] in ("text", "image"):
            layers = (2, 2) if "inner" in names or names[-1] in ("gate", "up", "down") else (2,)
        for index in np.ndindex(*layers):
            name, one = "/".join((*names, *map(str, index))), x[(slice(None),) * lead + index]
            if names[0] != "image" or names[-1] != "kernel" or not matrices:
                found[name] = one
                continue
            flat = one.reshape(*one.shape[:lead], -1, 4)
            for i, part in enumerate(jnp.split(flat, GROUPS[names[1]], axis=-1)):
                found[f"{name}/{i}"] = part
    return found


def row(tree, i):
    return jax.tree.map(lambda x: x[i], tree)


def assert_close(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), a, b)


def differs(a, b):
    return max(float(jnp.abs(a[name] - b[name]).max()) for name in a)


def _adam(path, _):
    return (
        None
        if path[0].key.split("/")[0] in ("embed", "head")
        else optax.contrib.MuonDimensionNumbers()
    )


def muon_of_matrices(params):
    hidden = lambda path, x: _adam(path, x) if x.ndim == 2 else None
    return jax.tree_util.tree_map_with_path(hidden, params)


OPTAX = {
    "muon": (
        tr.optimizer("muon", 0.02, weight_decay=0.1, axes=AXES),
        optax.contrib.muon(0.02, weight_decay=0.1, muon_weight_dimension_numbers=muon_of_matrices),
        True,
    ),
    "muon, adaptive": (
        tr.optimizer("muon", 0.02, adaptive=True, axes=AXES),
        optax.contrib.muon(0.02, adaptive=True, muon_weight_dimension_numbers=muon_of_matrices),
        True,
    ),
    "lamb": (tr.optimizer("lamb", 0.01, axes=AXES), optax.lamb(0.01), False),
    "lars": (tr.optimizer("lars", 0.1, axes=AXES), optax.lars(0.1), False),
    "adafactor": (
        tr.optimizer("adafactor", 0.01, min_dim_size_to_factor=2, axes=AXES),
        optax.adafactor(0.01, min_dim_size_to_factor=2),
        True,
    ),
    "adaptive_clip": (
        tr.optimizer("momentum", 0.01, adaptive_clip=0.1, axes=AXES),
        optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(0.01, momentum=0.9)),
        True,
    ),
    "by_layer": (
        tr.by_layer(optax.chain(optax.clip_by_block_rms(0.5), optax.sgd(0.1)), AXES),
        optax.chain(optax.clip_by_block_rms(0.5), optax.sgd(0.1)),
        True,
    ),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", OPTAX)
def test_ten_steps_equal_those_of_one_array_for_each_layer(name):
    ours, theirs, matrices = OPTAX[name]
    with jax.enable_x64(True):
        params, grads = example()
        got = unstacked(trained(ours, params, grads), matrices=matrices)
        flat = unstacked(params, matrices=matrices)
        want = trained(theirs, flat, unstacked(grads, lead=1, matrices=matrices))
        assert differs(got, want) < 1e-6
        assert differs(want, flat) > 1e-3  # both moved


PLAIN = {"kernel": jnp.eye(2, dtype=float)}
WORDS = {"blocks/.*/kernel": "layers in out", "blocks/.*/bias": "layers out", "embed": "vocab out"}


def small():
    tree = {
        "blocks": {"fc": {"kernel": jnp.ones((2, 2, 2)), "bias": jnp.ones((2, 2))}},
        "embed": jnp.ones((2, 2)),
    }
    return numbers(0, tree), numbers(1, tree, 10)


@pytest.mark.quick_cases("adafactor-options2", "sgd-options3")
@pytest.mark.parametrize(
    "name, options",
    [
        ("muon", {"weight_decay": 0.1}),
        ("lamb", {}),
        ("adafactor", {"min_dim_size_to_factor": 2}),
        ("sgd", {"adaptive_clip": 0.1}),
    ],
)
def test_a_stack_of_two_dense_layers(name, options):
    """Equals Optax on two kernels; Muon leaves the embedding to Adam."""
    params, grads = small()

    def apart(tree, lead=0):
        layers = {str(i): row(tree["blocks"]["fc"], (*[slice(None)] * lead, i)) for i in range(2)}
        return layers | {"embed": tree["embed"]}

    got = apart(trained(tr.optimizer(name, 0.02, axes=WORDS, **options), params, grads))
    numbers = {
        "embed": None,
        **{i: {"kernel": optax.contrib.MuonDimensionNumbers(), "bias": None} for i in "01"},
    }
    reference = {
        "muon": lambda: optax.contrib.muon(
            0.02, weight_decay=0.1, muon_weight_dimension_numbers=numbers
        ),
        "lamb": lambda: optax.lamb(0.02),
        "sgd": lambda: optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(0.02)),
        "adafactor": lambda: optax.adafactor(0.02, min_dim_size_to_factor=2),
    }[name]()
    want = trained(reference, apart(params), apart(grads, 1))
    assert_close(got, want)


@pytest.mark.exhaustive
def test_attention_kernels_with_three_axes():
    """Heads are outputs of a query and inputs of the last layer, also if a stack and all sizes are
    equal."""
    params = {
        "query": jnp.ones((2, 2, 2, 2)),
        "out": jnp.ones((2, 2, 2, 2)),
        "torch": jnp.ones((2, 2, 2)),
    }
    params, grads = numbers(0, params), numbers(1, params, 10)
    words = {"query": "layers in out out", "out": "layers in in out", "torch": "layers out in"}
    got = trained(tr.optimizer("muon", 0.1, axes=words), params, grads)
    each = optax.contrib.MuonDimensionNumbers
    tx = optax.contrib.muon(
        0.1,
        muon_weight_dimension_numbers={
            "query": each(1, (2, 3)),
            "out": each((1, 2), 3),
            "torch": each(2, 1),
        },
    )
    want = trained(tx, params, grads)
    assert_close(got, want)


@pytest.mark.quick_cases("nnx")
@pytest.mark.parametrize("library", ["nnx", "equinox"])
def test_stacked_modules_of_other_libraries(library):
    """Layers that a vmap has stacked equal separate layers; LAMB."""
    keys = jax.random.split(jax.random.key(0), 3)
    if library == "nnx":
        make = lambda key: nnx.state(nnx.Linear(3, 3, rngs=nnx.Rngs(key)), nnx.Param)
        stack, words = jax.vmap(make)(keys), {"kernel": "layers in out", "bias": "layers out"}
    else:
        make = lambda key: eqx.filter(eqx.nn.Linear(3, 3, key=key), eqx.is_array)
        stack, words = (
            eqx.filter_vmap(make)(keys),
            {"weight": "layers out in", "bias": "layers out"},
        )
    tx, grads = tr.optimizer("lamb", 0.1, axes=words), jax.tree.map(lambda x: 0.1 + x * x, stack)
    got = trained(tx, stack, jax.tree.map(lambda x: x[None], grads))
    for i in range(3):
        grad = row(jax.tree.map(lambda x: x[None], grads), (slice(None), i))
        assert_close(row(got, i), trained(optax.lamb(0.1), row(stack, i), grad))


@pytest.mark.exhaustive
def test_each_member_of_a_population_has_its_own_norm():
    """The axis of members belongs to a vmap around the optimizer, so `axes` does not count it."""
    params, grads = small()
    many = jax.tree.map(lambda x: jnp.stack([x, 5 * x]), params)
    tx = tr.optimizer("lars", 0.1, axes=WORDS)
    update = jax.jit(lambda p, g: optax.apply_updates(p, tx.update(g, tx.init(p), p)[0]))
    grads = jax.tree.map(lambda x: x[0], grads)
    got = jax.vmap(update, (0, None))(many, grads)
    for i in range(2):
        assert_close(row(got, i), update(row(many, i), grads))


def test_the_state_of_unstacked_parameters_is_that_of_optax():
    """So that earlier runs resume: no axes of layers, no change."""
    axes = {"kernel": "in out"}
    paths = lambda tree: [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(tree)]
    for ours, theirs in (
        (tr.optimizer("lamb", 0.1, axes=axes), optax.lamb(0.1)),
        (tr.optimizer("lars", 0.1, axes=axes), optax.lars(0.1)),
        (tr.optimizer("muon", 0.1, axes=axes), optax.contrib.muon(0.1)),
    ):
        assert paths(ours.init(PLAIN)) == ["[0]" + path for path in paths(theirs.init(PLAIN))]


@jax.numpy_dtype_promotion("standard")  # as in TrainState.apply
def test_parts_of_a_tree():
    """A mask, frozen parameters, no parameters at all, and a stack of no layers."""
    params, grads = small()
    mask = {"blocks": {"fc": {"kernel": True, "bias": False}}, "embed": False}
    tx = tr.optimizer("lars", 1.0, trust_ratio_mask=mask, axes=WORDS)
    first = jax.tree.map(lambda x: x[0], grads)
    updates, _ = tx.update(first, tx.init(params), params)
    np.testing.assert_allclose(updates["embed"], -first["embed"], rtol=1e-6)
    norms = [np.linalg.norm(params["blocks"]["fc"]["kernel"][i]) for i in range(2)]
    np.testing.assert_allclose(
        [np.linalg.norm(updates["blocks"]["fc"]["kernel"][i]) for i in range(2)],
        0.001 * np.array(norms),
        rtol=1e-5,
    )
    frozen = {
        "blocks": {"fc": {"kernel": params["blocks"]["fc"]["kernel"], "bias": None}},
        "embed": None,
    }
    tx = tr.optimizer("lamb", 1.0, axes={".*/kernel": "layers in out"})
    assert tx.update(frozen, tx.init(frozen), frozen)[0]["embed"] is None
    none = {"kernel": jnp.ones((0, 2, 2))}
    tx = tr.optimizer("muon", 1.0, axes={"kernel": "layers in out"})
    assert tx.update(none, tx.init(none), none)[0]["kernel"].shape == (0, 2, 2)


@pytest.mark.exhaustive
def test_train_knows_the_axes_of_its_model():
    model = nn.Sequential(nn.Stack(nn.Dense(3), 2), head=nn.Dense(1))
    data = lambda i: (jnp.ones((4, 3)), jnp.ones((4, 1)))
    marked = tr.train(
        model, data, optax.squared_error, tr.optimizer("lars", 0.1), steps=1
    ).opt_state
    assert int(marked[-1].layers_apart) == 1
    with pytest.raises(ValueError, match=r"axes=model.spec\(x\)"):
        tr.train(model, data, optax.squared_error, optax.chain(tr.optimizer("lars", 0.1)), steps=1)


@pytest.mark.parametrize(
    "tx, params, text",
    [
        (
            tr.optimizer("muon", 0.1),
            PLAIN,
            r"muon: which axes of 'kernel' float32\[2, 2\] are layers",
        ),
        (
            tr.optimizer("lamb", 0.1, axes={"kernel": "in"}),
            PLAIN,
            r"lamb: axes= names 1 axes of 'kernel' .* \(in\)",
        ),
        (
            tr.optimizer("lamb", 0.1, axes={"kernel": "in out", "bias": "out"}),
            PLAIN,
            "the pattern 'bias' of axes= matches no parameter; nearest: 'kernel'",
        ),
        (
            tr.optimizer("lamb", 0.1, axes={"kernel": "in 3*out"}),
            PLAIN,
            r"says '3\*out' of an axis with 2 elements",
        ),
        (
            tr.optimizer("lamb", 0.1, axes={"(": "in out"}),
            PLAIN,
            "the pattern '\\(' is not a regular expression",
        ),
        (tr.optimizer("sgd", 0.1, adaptive_clip=0.1), PLAIN, "adaptive_clip: which axes"),
        (tr.by_layer(optax.sgd(0.1), None), PLAIN, "by_layer: which axes"),
    ],
)
def test_errors(tx, params, text):
    params = jax.tree.map(jnp.float32, params)
    with pytest.raises(ValueError, match=text):
        tx.init(params)


def test_undeclared_parameters_of_a_layer():
    """LAMB needs no inputs and outputs; Muon does, unless there is one axis only."""

    @nn.layer
    def custom(scope, x, *, roles=None):
        gain = scope.param("gain", (3,), jax.nn.initializers.ones)
        return (x * gain[None]) @ scope.param("mix", (3, 3), jax.nn.initializers.ones, roles=roles)

    make = lambda **options: nn.Stack(custom(**options), 2)
    params = make().init(jax.random.key(0), jnp.ones((1, 3)))[0]
    spec = make().spec(jnp.ones((1, 3)))
    tr.optimizer("lamb", 0.1, axes=spec).init(params)
    with pytest.raises(ValueError, match=r"(?s)which axes of 'mix'.*roles=\(\"in\", \"out\"\)"):
        tr.optimizer("muon", 0.1, axes=spec).init(params)
    tr.optimizer("muon", 0.1, axes=make(roles=("in", "out")).spec(jnp.ones((1, 3)))).init(params)
    tr.optimizer("muon", 0.1, axes=[spec, {"mix": "layers in out"}]).init(params)
    foreign = nn.Stack(nn.from_nnx(nnx.Linear, 3, 3), 2)
    params = foreign.init(jax.random.key(0), jnp.ones((1, 3)))[0]
    with pytest.raises(ValueError, match="lamb: which axes of 'bias'"):
        tr.optimizer("lamb", 0.1, axes=foreign.spec(jnp.ones((1, 3)))).init(params)


def test_options():
    with pytest.raises(ValueError, match="muon: expected no weight_decay_mask"):
        tr.optimizer("muon", 0.1, weight_decay_mask=True)
    with pytest.raises(ValueError, match="muon: adaptive=True needs axes="):
        tr.optimizer(
            "muon",
            0.1,
            adaptive=True,
            muon_weight_dimension_numbers=optax.contrib.MuonDimensionNumbers(),
        )
    with pytest.raises(
        ValueError, match=r"'kernel': expected one name for each axis of shape \(3, 3\), got roles="
    ):
        nn.layer(lambda scope, x: scope.param("kernel", (3, 3), jnp.ones, roles=("in",)))().spec(
            jnp.ones(3)
        )
