"""Spaces, halving, population-based training, constraints and Bayesian optimization."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fnet import federated, search
from fnet import training as tr
from fnet.search import _identity


def quadratic(method="vmap"):
    """Members that minimize (w - 3)^2 with momentum; the state of the optimizer matters."""
    tx = lambda hyper: optax.sgd(hyper["rate"], momentum=0.9)
    init = lambda key, hyper: tr.TrainState.create({"w": jax.random.normal(key, (2,))}, tx(hyper))

    def step(state, batch, hyper):
        value, grads = jax.value_and_grad(lambda p: ((p["w"] - 3 - batch) ** 2).sum())(state.params)
        return state.apply(tx(hyper), grads), {"loss": value}

    return search.population(init, step, method=method)


def score(state):
    return -((state.members.params["w"] - 3) ** 2).sum(1)


def noise(i):
    return jnp.asarray(np.random.default_rng(i).normal(0, 0.1), jnp.float32)


def equal(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("dimensions", [1, 2, 7, 21])
def test_sobol_equals_scipy(dimensions):
    qmc = pytest.importorskip("scipy.stats").qmc
    want = qmc.Sobol(dimensions, scramble=False, bits=30).random(256)
    np.testing.assert_array_equal(search.sobol(256, dimensions), want)
    np.testing.assert_array_equal(search.sobol(100, dimensions, start=56), want[56:156])


def test_shifted_sobol_points_are_spread_evenly():
    points = search.sobol(64, 3, seed=1)
    assert all(sorted(np.floor(64 * points[:, i])) == list(range(64)) for i in range(3))
    assert not np.array_equal(points, search.sobol(64, 3, seed=2))


def test_spaces(tmp_path):
    space = search.Space(
        rate=search.LogUniform(1e-4, 1),
        depth=search.Integer(1, 4),
        decay=search.Uniform(0, 0.1),
        name=search.Choice(("adam", "sgd", None)),
    )
    points = space.random(500, seed=0)
    assert points[:3] == space.random(3, seed=0) and points != space.random(500, seed=1)
    assert np.mean([p["rate"] < 1e-2 for p in points]) == pytest.approx(0.5, abs=0.07)
    assert {p["depth"] for p in points} == {1, 2, 3, 4} and {p["name"] for p in points} == {
        "adam",
        "sgd",
        None,
    }
    (tmp_path / "space.json").write_text(json.dumps(space.json()))
    assert search.Space.read(tmp_path / "space.json") == space
    numbers = search.Space(rate=space["rate"], depth=space["depth"])
    arrays = numbers.arrays(points[:8])
    assert arrays["rate"].dtype == np.float32 and arrays["depth"].dtype == np.int32
    with pytest.raises(TypeError, match="'name' is not a number"):
        space.arrays(points)


@pytest.mark.parametrize(
    "content, error",
    [
        ({}, "expected an object"),
        ([1], "expected an object"),
        ({"a": 3}, "'a' is 3; expected one of uniform"),
        ({"a": {"normal": [0, 1]}}, "expected one of uniform"),
        ({"a": {"uniform": [1, 0]}}, r"'a' needs \[low, high\]"),
        ({"a": {"log_uniform": [0, 1]}}, "needs low > 0"),
        ({"a": {"integer": [0.5, 1]}}, "needs integers"),
        ({"a": {"choice": []}}, "needs a list of values"),
        ({"a": {"uniform": [0, True]}}, r"'a' needs \[low, high\]"),
    ],
)
def test_wrong_spaces(content, error, tmp_path):
    (tmp_path / "space.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=error):
        search.Space.read(tmp_path / "space.json")


def test_sobol_errors():
    with pytest.raises(ValueError, match=r"sobol\(dimensions=22\): expected 1 to 21"):
        search.sobol(4, 22)


@pytest.mark.exhaustive
def test_a_copy_carries_parameters_optimizer_and_hyperparameters():
    init_n, step_n = quadratic()
    state = init_n(jax.random.key(0), {"rate": jnp.linspace(0.01, 0.1, 10), "seed": jnp.arange(10)})
    for i in range(3):
        state, _ = step_n(state, noise(i))
    space = search.Space(rate=search.LogUniform(0.001, 0.11))
    scores = jnp.arange(10.0).at[9].set(jnp.nan)  # members 0 and 9 are the worst, 7 and 8 the best
    new = search.evolve(state, scores, space, jax.random.key(1))
    parents = [int(i) for i in new.hyper["seed"][np.array([0, 9])]]
    assert set(parents) <= {7, 8} and new.hyper["seed"][1:9].tolist() == list(range(1, 9))
    equal(search.take(new, [0, 9]).members, search.take(state, parents).members)
    equal(search.take(new, range(1, 9)), search.take(state, range(1, 9)))
    for child, parent in zip((0, 9), parents):
        ratio = float(new.hyper["rate"][child] / state.hyper["rate"][parent])
        assert 0.001 <= new.hyper["rate"][child] <= 0.11 and ratio != 1


@pytest.mark.exhaustive
def test_perturbation_and_resampling():
    init_n, _ = quadratic()
    state = init_n(jax.random.key(0), {"rate": jnp.full(200, 0.1)})
    space = search.Space(rate=search.LogUniform(0.001, 1.0))
    scores = jnp.arange(200.0)
    moved = search.evolve(
        state, scores, space, jax.random.key(0), fraction=0.5, resample=0.0
    ).hyper["rate"][:100]
    assert (
        sorted(set(np.round(moved.tolist(), 4))) == [0.08, 0.12] and 20 < (moved > 0.1).sum() < 80
    )
    anew = search.evolve(state, scores, space, jax.random.key(0), fraction=0.5, resample=1.0).hyper[
        "rate"
    ][:100]
    assert 30 < (anew < 10**-1.5).sum() < 70 and len(set(anew.tolist())) == 100


@pytest.mark.exhaustive
@pytest.mark.parametrize("steps", [3, 4, 6])
@pytest.mark.parametrize("method", ["vmap", "loop"])
def test_pbt_resumes_bit_by_bit(method, steps, tmp_path):
    """Interrupted in the middle of a generation, at its end, and in the next one; a generation has
    4 steps."""
    space = search.Space(rate=search.LogUniform(0.001, 0.1))

    def train(folder, steps):
        init_n, step_n = quadratic(method)
        step = search.pbt(step_n, score, space, interval=4)
        state = init_n(jax.random.key(0), {"rate": jnp.linspace(0.001, 0.1, 6)})
        return tr.fit(
            step, state, noise, steps=steps, workdir=tmp_path / folder, config={}, tensorboard=False
        )

    whole = train("whole", 10)
    train("parts", steps)
    equal(train("parts", 10), whole)
    init_n, step_n = quadratic(method)
    assert not np.array_equal(whole.hyper["rate"], jnp.linspace(0.001, 0.1, 6))
    step, state = (
        search.pbt(step_n, score, space, interval=4),
        init_n(jax.random.key(0), {"rate": jnp.linspace(0.001, 0.1, 6)}),
    )
    for i in range(10):
        state, _ = step(state, noise(i))
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(whole)):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_halving_keeps_the_best_and_counts_steps(tmp_path):
    init_n, step_n = quadratic()
    hyper = {"rate": jnp.logspace(-5, -1.5, 9)}
    found = search.halving(
        init_n,
        step_n,
        hyper,
        noise,
        score,
        steps=18,
        first=2,
        key=jax.random.key(0),
        workdir=tmp_path,
        tensorboard=False,
    )
    assert [rung[:2] for rung in found.rungs] == [(9, 2), (3, 6), (1, 18)]
    assert found.member_steps == 9 * 2 + 3 * 4 + 1 * 12
    want = init_n(jax.random.key(0), hyper)
    for i in range(18):
        want, _ = step_n(want, noise(i))
    np.testing.assert_allclose(
        search.member(found.state, 0).params["w"],
        search.member(want, int(found.indices[0])).params["w"],
        rtol=1e-5,
    )
    assert "members  steps" in str(found)
    again = search.halving(
        init_n,
        step_n,
        hyper,
        noise,
        score,
        steps=18,
        first=2,
        key=jax.random.key(0),
        workdir=tmp_path,
        tensorboard=False,
    )  # reads the checkpoints of the rungs
    assert (
        again.indices.tolist() == found.indices.tolist()
        and len(tr.read_metrics(tmp_path / "rung2")) == 1
    )
    equal(again.state, found.state)


@pytest.mark.exhaustive
def test_hyperband_has_brackets():
    init_n, step_n = quadratic()
    found = search.hyperband(
        init_n, step_n, search.Space(rate=search.LogUniform(1e-5, 0.03)), noise, score, steps=9
    )
    assert [bracket.rungs[0][:2] for bracket in found] == [(9, 1), (5, 3), (3, 9)]
    assert all(len(bracket.scores) >= 1 and bracket.rungs[-1][1] == 9 for bracket in found)


def test_constraints_on_separate_programs():
    space = search.Space(width=search.Integer(8, 512), depth=search.Integer(1, 3))

    def program(point):
        def f(x):
            for _ in range(point["depth"]):
                x = x @ jnp.ones((point["width"], point["width"]))
            return x

        return f, (jax.ShapeDtypeStruct((4, point["width"]), jnp.float32),)

    points = space.sobol(8, seed=0)
    limit = 2 * 4 * 256**2
    found = search.feasible(points, program, flops=limit)
    want = [p for p in points if 8 * p["width"] ** 2 * p["depth"] <= limit]
    assert [point for point, _ in found] == want and 0 < len(want) < 8
    assert all(
        spent.basis == "measured" and spent.seconds > 0 and spent.bytes > 0 for _, spent in found
    )
    assert search.feasible(points, program, seconds=1e-12) == []
    assert len(search.feasible(points, program, seconds=1.0, chip="T4")) == 8
    with pytest.raises(ValueError, match="at least one of flops="):
        search.feasible(points, program)


def test_bayesian_optimization_by_optuna():
    pytest.importorskip("optuna")
    space = search.Space(
        x=search.Uniform(-10, 10), kind=search.Choice(("a", "b")), n=search.Integer(1, 3)
    )
    goal = lambda p: -((p["x"] - 2) ** 2) - 5 * (p["kind"] == "a")

    def run(seed):
        bayesian, seen = search.Bayesian(space, seed=seed), []
        for _ in range(10):
            points = bayesian.ask(4)
            seen += points
            bayesian.tell(points, [goal(p) for p in points])
        return seen, bayesian.best

    seen, (point, value) = run(0)
    assert value == max(map(goal, seen)) and value > -1 and point["kind"] == "b"
    assert run(0)[0] == seen
    other = search.Bayesian(space)
    other.tell(
        seen, [*map(goal, seen[:-1]), float("nan")]
    )  # of an earlier run; the last one failed
    assert other.best[1] == max(map(goal, seen[:-1]))


# What Optuna 4.9 proposes with its own defaults, in rounds 0, 3 and 7 of four points.
PROPOSED = {
    0: [
        (-8.473834212520856, 0.13172711156111802, "b", 6),
        (0.7699174082086735, 0.010103732850016273, "b", 3),
        (3.5845999224188105, 0.16404241128227343, "a", 2),
        (8.191870554392274, 0.000713742264336183, "b", 1),
    ],
    3: [
        (0.09986928830356989, 0.0001496256902781703, "b", 5),
        (0.21326431517064282, 0.8408941748084171, "b", 5),
        (-0.7946918444033767, 0.8194656181172176, "b", 5),
        (-0.03843790155633764, 0.926779758271255, "b", 5),
    ],
    7: [
        (2.148584762928465, 0.312048761065919, "a", 1),
        (1.8102580645343331, 0.07057981829897246, "a", 1),
        (-2.662779024702196, 0.28012800933207116, "a", 1),
        (9.234332743379412, 0.08364568502837666, "a", 1),
    ],
}


def test_a_seed_of_bayesian_optimization_means_the_same_with_each_optuna():
    pytest.importorskip("optuna", "4.9")
    space = search.Space(
        x=search.Uniform(-10, 10),
        rate=search.LogUniform(1e-4, 1),
        kind=search.Choice(("a", "b")),
        n=search.Integer(1, 6),
    )

    def goal(p):
        closeness = (p["x"] - 2) ** 2 + (np.log10(p["rate"]) + 2) ** 2
        return -closeness - 5 * (p["kind"] == "a") - p["n"]

    bayesian = search.Bayesian(space, seed=7)
    for i in range(8):
        points = bayesian.ask(4)
        if i in PROPOSED:
            for point, expected in zip(points, PROPOSED[i], strict=True):
                numbers = [point["x"], point["rate"], point["n"]]
                np.testing.assert_allclose(numbers, [*expected[:2], expected[3]], 1e-9)
                assert point["kind"] == expected[2]
        scores = [goal(point) for point in points]
        if i == 2:
            scores[3] = float("nan")  # a failure
        bayesian.tell(points, scores)
    assert bayesian.best[1] == pytest.approx(-1.274296100581715, rel=1e-9)


def test_errors():
    init_n, step_n = quadratic()
    state = init_n(jax.random.key(0), {"rate": jnp.ones(4)})
    with pytest.raises(
        ValueError,
        match="'width' is not a numeric hyperparameter of the population, which has rate",
    ):
        search.evolve(
            state, jnp.ones(4), search.Space(width=search.Uniform(0, 1)), jax.random.key(0)
        )
    with pytest.raises(ValueError, match="at least 2 members"):
        search.evolve(state, jnp.ones(4), search.Space(), jax.random.key(0), fraction=0.7)
    with pytest.raises(ValueError, match=r"pbt\(interval=0\)"):
        search.pbt(step_n, score, search.Space(), interval=0)
    with pytest.raises(ValueError, match="1 <= first <= steps"):
        search.halving(
            init_n,
            step_n,
            {"rate": jnp.ones(4)},
            noise,
            score,
            steps=2,
            first=3,
            key=jax.random.key(0),
        )


# What a folder is for.


def halved(workdir, **changes):
    """A search, of which each argument can be another one."""
    options = {
        "rates": np.logspace(-5, -1.5, 9, dtype=np.float32),
        "steps": 9,
        "first": 1,
        "eta": 3,
        "seed": 0,
        "score": score,
        "noise": noise,
        "aim": 3.0,
        "begin": 0.0,
    } | changes
    tx = lambda hyper: optax.sgd(hyper["rate"])
    init = lambda key, hyper: tr.TrainState.create(
        {"w": jax.random.normal(key, (2,)) + options["begin"]}, tx(hyper)
    )

    def step(state, batch, hyper):
        value, grads = jax.value_and_grad(lambda p: ((p["w"] - options["aim"] - batch) ** 2).sum())(
            state.params
        )
        return state.apply(tx(hyper), grads), {"loss": value}

    init_n, step_n = search.population(init, step, method="vmap")
    return search.halving(
        init_n,
        step_n,
        {"rate": options["rates"]},
        options["noise"],
        options["score"],
        steps=options["steps"],
        first=options["first"],
        eta=options["eta"],
        key=jax.random.key(options["seed"]),
        workdir=workdir,
        tensorboard=False,
    )


OTHERS = {
    "hyperparameters": {"rates": np.logspace(-5, -1.5, 9, dtype=np.float32)[::-1].copy()},
    "one value": {
        "rates": np.r_[np.logspace(-5, -1.5, 9, dtype=np.float32)[:8], 0.5].astype(np.float32)
    },
    "dtype": {"rates": np.arange(1, 10, dtype=np.int32)},
    "steps": {"steps": 12},
    "first": {"first": 2},
    "eta": {"eta": 2},
    "seed": {"seed": 1},
    "init": {"begin": 1.0},
    "step": {"aim": 2.0},
    "score": {"score": lambda state: -score(state)},
    "score on the host": {"score": lambda state: -np.asarray(score(state))},
    "data": {"noise": lambda i: noise(i + 1)},
}


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("halving")
    return workdir, halved(workdir)


def test_halving_continues_its_own_search(searched):
    again = halved(searched[0])
    np.testing.assert_array_equal(again.indices, searched[1].indices)
    equal(again.state, searched[1].state)


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("change", OTHERS)
def test_halving_does_not_answer_for_another_search(searched, change):
    with pytest.raises(
        tr.ConfigError, match=r"holds (another search|a run with another configuration)"
    ):
        halved(searched[0], **OTHERS[change])


def test_a_search_of_unknown_origin_is_not_continued(tmp_path):
    (tmp_path / "rung0").mkdir()
    (tmp_path / "rung0" / "config.json").write_text("{}")
    with pytest.raises(tr.ConfigError, match=r"holds a search without search\.json, so what"):
        halved(tmp_path)


@pytest.mark.exhaustive
def test_hyperband_does_not_answer_for_another_search(tmp_path):
    init_n, step_n = quadratic()
    run = lambda high, seed: search.hyperband(
        init_n,
        step_n,
        search.Space(rate=search.Uniform(0, high)),
        noise,
        score,
        steps=3,
        seed=seed,
        workdir=tmp_path,
        tensorboard=False,
    )
    first = run(0.1, 0)
    assert [each.indices.tolist() for each in run(0.1, 0)] == [
        each.indices.tolist() for each in first
    ]
    for high, seed in ((0.2, 0), (0.1, 1)):
        with pytest.raises(tr.ConfigError, match="holds another search"):
            run(high, seed)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("change", ["rate", "seed", "evolution", "space", "score", "step"])
def test_a_population_is_not_resumed_with_other_arguments(tmp_path, change):
    def train(rates=(0.01, 0.02, 0.03), seed=0, evolution=0, high=0.1, sign=1, slow=1.0):
        init_n, inner = search.population(
            lambda key, h: {"w": jax.random.normal(key, ())},
            lambda s, b, h: ({"w": s["w"] - slow * h["rate"]}, {}),
            method="vmap",
        )
        step = search.pbt(
            inner,
            lambda state: sign * state.members["w"],
            search.Space(rate=search.Uniform(0.01, high)),
            interval=2,
            seed=evolution,
        )
        state = init_n(jax.random.key(seed), {"rate": jnp.asarray(rates)})
        return tr.fit(
            step,
            state,
            lambda i: np.zeros(1),
            steps=3,
            workdir=tmp_path,
            config={},
            tensorboard=False,
        )

    first = train()
    equal(train(), first)
    other = {
        "rate": {"rates": (0.01, 0.02, 0.04)},
        "seed": {"seed": 1},
        "evolution": {"evolution": 1},
        "space": {"high": 0.2},
        "score": {"sign": -1},
        "step": {"slow": 0.5},
    }[change]
    with pytest.raises(tr.ConfigError, match=r"the population's .* was .*, is "):
        train(**other)


# One generation.


def members(n, **hyper):
    init_n, _ = search.population(
        lambda key, h: {"id": h["id"]}, lambda s, b, h: (s, {}), method="vmap"
    )
    return init_n(jax.random.key(0), {"id": jnp.arange(n), **hyper})


@pytest.mark.quick_cases("kind1-float32", "kind2-int32")
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (search.Integer(1, 3), "int32"),
        (search.Integer(-2, 0), "float32"),
        (search.Uniform(0.5, 3.5), "int32"),
    ],
)
def test_integers_are_drawn_uniformly(kind, dtype):
    state = members(4000, k=jnp.zeros(4000, dtype))
    drawn = np.asarray(
        search.evolve(
            state,
            -jnp.arange(4000.0),
            search.Space(k=kind),
            jax.random.key(0),
            fraction=0.5,
            resample=1.0,
        ).hyper["k"]
    )[2000:]
    values, counts = np.unique(drawn, return_counts=True)
    assert (
        len(values) == 3
        and kind.low <= values[0]
        and values[-1] <= kind.high
        and drawn.dtype == dtype
    )
    assert abs(counts / 2000 - 1 / 3).max() < 0.04


@pytest.mark.quick_cases("none-7")
@pytest.mark.parametrize("n", range(2, 10))
@pytest.mark.parametrize("sound", ["all", "some", "none"])
def test_replaced_members_are_no_parents_and_no_diverged_member_is_copied(n, sound):
    rng, space = np.random.default_rng(n), search.Space(rate=search.Uniform(0, 1))
    for fraction in (0.01, 0.2, 0.5):
        diverged = {
            "all": np.zeros(n, bool),
            "some": rng.random(n) < 0.6,
            "none": np.ones(n, bool),
        }[sound]
        state = members(n, rate=jnp.full(n, 0.5)).replace(diverged=jnp.asarray(diverged))
        scores = rng.permutation(n).astype(np.float32)
        new = search.evolve(state, scores, space, jax.random.key(n), fraction=fraction)
        ids, count = np.asarray(new.members["id"]), min(max(1, round(fraction * n)), n // 2)
        order = np.argsort(-np.where(diverged, -np.inf, scores), kind="stable")
        replaced, parents = order[n - count :], ids[order[n - count :]]
        np.testing.assert_array_equal(np.delete(ids, replaced), np.delete(np.arange(n), replaced))
        assert set(parents.tolist()) <= set(order[:count].tolist())
        assert diverged.all() or not diverged[parents].any()


def test_the_values_of_a_choice_keep_their_types():
    choice = search.Choice((1, True, 1.0))
    assert [choice.where(value) for value in (1, True, 1.0)] == pytest.approx([1 / 6, 3 / 6, 5 / 6])


def test_programs_are_told_apart_by_their_constants():
    """Those of jitted functions are not in the text of the jaxpr; what JAX cannot trace is compared
    by its bytecode."""

    def made(constant, host=False):
        inner = jax.jit(lambda x: (x * constant).sum())
        return (
            (lambda x: float(inner(x)))
            if host
            else (lambda x: jax.lax.cond(x[0] > 0, inner, lambda x: x[0], x))
        )

    x = jnp.ones(3)
    for host in (False, True):
        one, same, other = (
            _identity.program(made(np.full(3, value, np.float32), host), x) for value in (1, 1, 2)
        )
        assert one == same
        assert one != other
    sums = lambda x: np.asarray(x).sum(), lambda x: np.asarray(x).sum() + 1
    assert _identity.program(sums[0], x) != _identity.program(sums[1], x)
    assert (
        len({_identity.digest(value) for value in (1, True, 1.0, np.float32(1), -0.0, 0.0, [1])})
        == 7
    )


@pytest.mark.quick_cases("complex64")
@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float8_e4m3fn", "int8", "uint32", "bool", "complex64"]
)
def test_every_element_is_in_the_digest(dtype):
    """Wherever it is; two populations may differ in their last member alone."""
    values = np.random.default_rng(0).integers(0, 2, (3, 1000))
    found = {
        _identity.digest(jnp.asarray(values, dtype)),
        _identity.digest(jnp.asarray(values.T, dtype)),
        _identity.digest(jnp.asarray(values[::-1], dtype)),
    }
    for i, j in ((0, 0), (1, 24), (2, 999)):
        other = values.copy()
        other[i, j] = 1 - other[i, j]
        found.add(_identity.digest(jnp.asarray(other, dtype)))
    assert len(found) == 6
    assert _identity.digest(jnp.asarray(values, dtype)) in found
    spread = jax.device_put(
        jnp.asarray(values.T, dtype), jax.NamedSharding(jax.make_mesh((8,), ("a",)), jax.P("a"))
    )
    assert _identity.digest(spread) in found


def test_a_search_over_other_initial_values_is_another_search(tmp_path):
    """Those of the last member differ, after more than a thousand equal numbers."""

    def run(value):
        init_n, step_n = search.population(
            lambda key, h: {"w": jnp.zeros(2000).at[-1].set(h["start"])},
            lambda s, b, h: (s, {}),
            method="vmap",
        )
        start = {"start": jnp.zeros(3).at[2].set(value)}
        state = init_n(jax.random.key(0), start).replace(hyper={"start": jnp.zeros(3)})
        return _identity.of_population(step_n.plain, state, np.zeros(1))

    assert run(1.0) == run(1.0) != run(2.0)


def test_federated_data_that_differ_in_the_last_client():
    parts = [np.zeros((400, 100), np.float32) for _ in range(3)]
    other = [*parts[:2], parts[2] + np.float32(1)]
    made = [federated.clients([{"x": x} for x in each]).data for each in (parts, other)]
    assert _identity.digest(made[0]) != _identity.digest(made[1])
