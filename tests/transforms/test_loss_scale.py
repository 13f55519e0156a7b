"""Loss scaling: every transition of the state against numbers written out by hand, and what it is
for."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fnet import hardware as hw
from fnet import transforms as ft

INF = float("inf")
PARAMS = {"w": jnp.array([1.0, 2.0])}


def gradient(*numbers, dtype=jnp.float32):
    return {"w": jnp.array(numbers, dtype)}


def scalars(state):
    return float(state.scale), int(state.good_steps), int(state.skipped)


def test_the_first_state():
    state = ft.loss_scale(optax.sgd(1.0)).init(PARAMS)
    assert scalars(state) == (32768.0, 0, 0)
    assert [leaf.dtype for leaf in state[:3]] == [jnp.float32, jnp.int32, jnp.int32]
    assert not any(leaf.weak_type or leaf.shape for leaf in state[:3])
    assert ft.loss_scale(optax.sgd(1.0), hw.policy("Tesla T4")).init(PARAMS).scale == 32768.0
    assert (
        ft.loss_scale(optax.sgd(1.0), hw.policy("Tesla T4"), initial=8.0).init(PARAMS).scale == 8.0
    )


def test_without_a_scale_in_the_policy_the_optimizer_is_the_very_same():
    inner = optax.sgd(1.0)
    for chip in ("TPU v4", "NVIDIA A100-SXM4-80GB", "cpu", "float32", "bfloat16"):
        assert ft.loss_scale(inner, hw.policy(chip)) is inner
    assert ft.loss_scale(inner, hw.policy("float16")) is not inner


@pytest.mark.parametrize("steps", [1999, 2000, 2001, 4000])
def test_it_grows_after_exactly_2000_good_steps(steps):
    tx = ft.loss_scale(optax.sgd(1.0))

    def step(state, _):
        return tx.update(gradient(1.0, 1.0), state, PARAMS)[1], None

    state = jax.jit(lambda state: jax.lax.scan(step, state, length=steps)[0])(tx.init(PARAMS))
    assert (
        scalars(state)
        == {
            1999: (32768.0, 1999, 0),
            2000: (65536.0, 0, 0),
            2001: (65536.0, 1, 0),
            4000: (131072.0, 0, 0),
        }[steps]
    )


@pytest.mark.exhaustive
def test_every_transition_by_hand():
    tx = ft.loss_scale(optax.sgd(1.0), initial=8.0, interval=2, minimum=4.0, maximum=16.0)
    state = tx.init(PARAMS)
    # (gradient of the scaled loss, the update, scale, good steps, skipped afterwards); the update
    # is -gradient / scale
    for given, update, scale, good, skipped in [
        (8.0, -1.0, 8.0, 1, 0),
        (8.0, -1.0, 16.0, 0, 0),  # grows; the update is by 8, the scale that was used
        (8.0, -0.5, 16.0, 1, 0),
        (16.0, -1.0, 16.0, 0, 0),  # would grow to 32: clamped, and counts anew
        (16.0, -1.0, 16.0, 1, 0),
        (INF, 0.0, 8.0, 0, 1),  # a bad step after a good one: the count begins anew
        (8.0, -1.0, 8.0, 1, 1),
        (-INF, 0.0, 4.0, 0, 2),
        (np.nan, 0.0, 4.0, 0, 3),  # would fall to 2: clamped
        (4.0, -1.0, 4.0, 1, 3),
        (4.0, -1.0, 8.0, 0, 3),
    ]:
        updates, state = tx.update(gradient(given, 0.0), state, PARAMS)
        assert updates["w"].tolist() == [update, 0.0] and scalars(state) == (scale, good, skipped)


@pytest.mark.exhaustive
def test_another_growth_and_backoff():
    tx = ft.loss_scale(optax.sgd(1.0), initial=100.0, growth=3.0, backoff=0.25, interval=1)
    state = tx.update(gradient(1.0, 1.0), tx.init(PARAMS), PARAMS)[1]
    assert scalars(state) == (300.0, 0, 0)
    assert scalars(tx.update(gradient(INF, 1.0), state, PARAMS)[1]) == (75.0, 0, 1)


def test_a_skipped_step_leaves_the_inner_state_bit_for_bit_and_the_parameters():
    inner = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.trace(0.9),
        optax.add_decayed_weights(0.1),
        optax.scale_by_schedule(lambda count: 0.5 + count.astype(jnp.float32)),
    )
    tx = ft.loss_scale(inner)
    _, state = tx.update(gradient(1e4, 3e4), tx.init(PARAMS), PARAMS)
    updates, after = tx.update(gradient(1.0, INF), state, PARAMS)
    assert updates["w"].tolist() == [0.0, 0.0]  # no decay of weights either
    assert jax.tree.structure(after) == jax.tree.structure(state)
    for old, new in zip(jax.tree.leaves(state.inner), jax.tree.leaves(after.inner)):
        assert np.asarray(old).tobytes() == np.asarray(new).tobytes() and old.dtype == new.dtype
    assert any(np.asarray(leaf).any() for leaf in jax.tree.leaves(state.inner))
    assert scalars(after) == (16384.0, 0, 1)


def test_a_random_key_in_the_inner_state():
    noisy = optax.GradientTransformation(
        lambda params: jax.random.key(0), lambda g, key, params=None: (g, jax.random.split(key)[0])
    )
    tx = ft.loss_scale(noisy)
    first = tx.init(PARAMS)
    skipped = tx.update(gradient(INF, 0.0), first, PARAMS)[1]
    moved = tx.update(gradient(1.0, 0.0), first, PARAMS)[1]
    assert jnp.array_equal(jax.random.key_data(skipped.inner), jax.random.key_data(first.inner))
    assert not jnp.array_equal(jax.random.key_data(moved.inner), jax.random.key_data(first.inner))


@pytest.mark.exhaustive
def test_the_state_is_a_carry():
    with jax.numpy_dtype_promotion("standard"):  # optax.adam asks for it
        tx = ft.loss_scale(optax.adam(1e-2), interval=3)

        def loss(params, x):
            return ((params["w"] * x) ** 2).sum()

        def step(carry, x):
            params, state = carry
            value, grads = ft.scaled_value_and_grad(loss)(state, params, x)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), (value, state.scale)

        xs = jnp.array([[1.0, 1.0], [1.0, INF], [1.0, 2.0], [1.0, 1.0], [1.0, 1.0]])
        carry = PARAMS, tx.init(PARAMS)
        (params, state), (values, scales) = jax.jit(functools.partial(jax.lax.scan, step))(
            carry, xs
        )
        assert scales.tolist() == [32768.0, 16384.0, 16384.0, 16384.0, 32768.0] and scalars(
            state
        ) == (32768.0, 0, 1)
        types = lambda tree: [
            (leaf.shape, leaf.dtype, leaf.weak_type) for leaf in jax.tree.leaves(tree)
        ]
        assert jax.tree.structure((params, state)) == jax.tree.structure(carry)
        assert types((params, state)) == types(carry)
        eager = carry
        for x in xs:
            eager, _ = step(eager, x)
        assert jnp.allclose(eager[0]["w"], params["w"], rtol=1e-6) and scalars(eager[1]) == scalars(
            state
        )
        assert int(state.inner[0].count) == 4  # adam counts the steps that were made
        assert jnp.isinf(values[1]) and jnp.isfinite(values[jnp.array([0, 2, 3, 4])]).all()


def test_a_round_trip_through_jit_and_flattening_keeps_every_field():
    state = ft.LossScaleState(jnp.float32(0.25), jnp.int32(7), jnp.int32(3), (jnp.ones(2),))
    for again in (
        jax.jit(lambda s: s)(state),
        jax.tree.unflatten(*reversed(jax.tree.flatten(state))),
    ):
        assert isinstance(again, ft.LossScaleState) and scalars(again) == (0.25, 7, 3)
    tx = ft.loss_scale(optax.sgd(1.0), minimum=0.25, initial=0.5)
    state = jax.jit(tx.update)(gradient(INF, 1.0), tx.init(PARAMS), PARAMS)[1]
    assert scalars(jax.jit(tx.update)(gradient(INF, 1.0), state, PARAMS)[1]) == (
        0.25,
        0,
        2,
    )  # bounds hold under jit


def half_loss(w, x):
    """x w^2 in float16: the gradient 2 x w is float16 too."""
    return (x * w.astype(jnp.float16) ** 2).sum()


@pytest.mark.exhaustive
def test_overflow_falls_until_the_gradient_fits():
    # The gradient is 2 * 8 * 1 = 16; times the scale it passes float16's 65504 above a scale of
    # 4094.
    tx, w, x = ft.loss_scale(optax.sgd(1.0)), jnp.ones(1), jnp.full(1, 8.0, jnp.float16)
    state, scales = tx.init(w), []
    for _ in range(6):
        value, grads = ft.scaled_value_and_grad(half_loss)(state, w, x)
        updates, state = tx.update(grads, state, w)
        scales.append(float(state.scale))
        assert float(value) == 8.0 and value.dtype == jnp.float32  # the loss itself never overflows
    assert scales == [16384.0, 8192.0, 4096.0, 2048.0, 2048.0, 2048.0] and scalars(state) == (
        2048.0,
        2,
        4,
    )
    assert updates.tolist() == [-16.0]


def test_underflow_is_lifted():
    # 2^-20 * 2^-10 = 2^-30 is nothing in float16, whose least number is 2^-24; 2^15 lifts it to
    # 2^-15.
    def loss(w, x):
        return ((x * w.astype(jnp.float16)) * jnp.float16(2.0**-20)).astype(jnp.float32).sum()

    w, x = jnp.ones(1), jnp.full(1, 2.0**-10, jnp.float16)
    assert jax.grad(loss)(w, x).tolist() == [0.0]
    tx = ft.loss_scale(optax.sgd(1.0))
    _, grads = ft.scaled_value_and_grad(loss)(tx.init(w), w, x)
    assert grads.tolist() == [2.0**-15]
    assert tx.update(grads, tx.init(w), w)[0].tolist() == [-(2.0**-30)]


def test_clipping_inside_sees_true_gradients():
    tx = ft.loss_scale(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)))
    state = tx.init(PARAMS)
    small, _ = tx.update(gradient(0.3 * 32768, 0.4 * 32768), state, PARAMS)  # norm 0.5: as it is
    large, _ = tx.update(gradient(3.0 * 32768, 4.0 * 32768), state, PARAMS)  # norm 5: to 1
    assert jnp.allclose(small["w"], jnp.array([-0.3, -0.4]), rtol=1e-6)
    assert jnp.allclose(large["w"], jnp.array([-0.6, -0.8]), rtol=1e-6)


@pytest.mark.parametrize(
    "nest",
    [
        lambda tx: optax.chain(tx, optax.scale(2.0)),
        lambda tx: optax.chain(optax.identity(), optax.chain(tx), optax.scale(2.0)),
        lambda tx: optax.multi_transform({"all": optax.chain(tx, optax.scale(2.0))}, {"w": "all"}),
        lambda tx: optax.masked(optax.chain(tx, optax.scale(2.0)), {"w": True}),
    ],
    ids=["chain", "chains", "multi_transform", "masked"],
)
def test_it_is_found_wherever_it_is(nest):
    tx = nest(ft.loss_scale(optax.sgd(1.0), initial=4.0))
    state = tx.init(PARAMS)
    assert scalars(ft.loss_scale_state(state)) == (4.0, 0, 0)
    value, grads = ft.scaled_value_and_grad(lambda params: (params["w"] ** 2).sum())(state, PARAMS)
    assert float(value) == 5.0 and grads["w"].tolist() == [8.0, 16.0]
    updates, state = tx.update(grads, state, PARAMS)
    assert updates["w"].tolist() == [-4.0, -8.0]
    _, state = tx.update(gradient(INF, 1.0), state, PARAMS)
    assert scalars(ft.loss_scale_state(state)) == (2.0, 0, 1)


@pytest.mark.exhaustive
def test_accumulated_gradients_are_unscaled_once():
    tx = optax.MultiSteps(ft.loss_scale(optax.sgd(1.0), initial=4.0), 2)
    state = tx.init(PARAMS)
    for _ in range(2):
        with jax.numpy_dtype_promotion("standard"):  # MultiSteps asks for it
            updates, state = tx.update(gradient(4.0, 8.0), state, PARAMS)
    assert updates["w"].tolist() == [-1.0, -2.0] and scalars(ft.loss_scale_state(state)) == (
        4.0,
        1,
        0,
    )


def test_where_there_is_none():
    state = optax.sgd(1.0, momentum=0.9).init(PARAMS)
    assert ft.loss_scale_state(state) is None
    value, grads = ft.scaled_value_and_grad(lambda p: (p["w"] ** 2).sum())(state, PARAMS)
    assert float(value) == 5.0 and grads["w"].tolist() == [2.0, 4.0]
    value, aux = ft.scaled_value_and_grad(lambda p: ((p["w"] ** 2).sum(), "aux"), has_aux=True)(
        state, PARAMS
    )[0]
    assert float(value) == 5.0 and aux == "aux"


def test_aux_and_argnums():
    state = ft.loss_scale(optax.sgd(1.0), initial=4.0).init(PARAMS)

    def loss(a, b, *, c):
        return a * b * c, {"a": a, "count": jnp.int32(3)}

    a, b = jnp.float32(2.0), jnp.float32(5.0)
    (value, aux), grads = ft.scaled_value_and_grad(loss, (0, 1), has_aux=True)(state, a, b, c=3.0)
    assert float(value) == 30.0 and float(aux["a"]) == 2.0 and aux["count"].dtype == jnp.int32
    assert [float(g) for g in grads] == [60.0, 24.0]  # 4 * (b c, a c)
    assert float(ft.scaled_value_and_grad(loss, 1, has_aux=True)(state, a, b, c=3.0)[1]) == 24.0
    grads = ft.scaled_value_and_grad(lambda *args: loss(*args, c=3.0)[0], (1,))(state, a, b)[1]
    assert isinstance(grads, tuple) and [float(g) for g in grads] == [24.0]


def test_it_carries_the_name_but_not_the_signature_of_the_loss():
    def my_loss(params, x):
        """Mine."""
        return (params["w"] * x).sum()

    scaled = ft.scaled_value_and_grad(my_loss)
    assert scaled.__name__ == "my_loss" and scaled.__doc__ == "Mine."
    assert next(iter(inspect.signature(scaled).parameters)) == "opt_state"
    assert (
        ft.scaled_value_and_grad(functools.partial(my_loss, x=2.0))(
            optax.sgd(1.0).init(PARAMS), PARAMS
        )[0]
        == 6.0
    )


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_parameters_of_any_type_keep_it(dtype):
    params = {"w": jnp.array([1.0, 2.0], dtype)}
    tx = ft.loss_scale(optax.sgd(0.5, momentum=0.9), initial=64.0)
    state = tx.init(params)
    value, grads = ft.scaled_value_and_grad(lambda p: (p["w"] ** 2).sum())(state, params)
    assert value.dtype == jnp.float32 and float(value) == 5.0
    assert grads["w"].dtype == dtype and grads["w"].tolist() == [128.0, 256.0]
    updates, after = tx.update(grads, state, params)
    assert updates["w"].dtype == dtype and updates["w"].tolist() == [-1.0, -2.0]
    assert [leaf.dtype for leaf in jax.tree.leaves(after)] == [
        leaf.dtype for leaf in jax.tree.leaves(state)
    ]


@pytest.mark.exhaustive
def test_float64_loses_nothing():
    with jax.enable_x64(True):
        w = jnp.array([1 / 3, 0.1], jnp.float64)
        tx = ft.loss_scale(optax.sgd(1.0))
        value, grads = ft.scaled_value_and_grad(lambda w: (w**2).sum())(tx.init(w), w)
        updates, _ = tx.update(grads, tx.init(w), w)
        assert value == (w**2).sum() and value.dtype == updates.dtype == jnp.float64
        assert updates.tolist() == (-2 * w).tolist()


def test_an_empty_tree():
    tx = ft.loss_scale(optax.sgd(1.0))
    updates, state = tx.update({"a": None}, tx.init({"a": None}), {"a": None})
    assert updates == {"a": None} and scalars(state) == (32768.0, 1, 0)


def test_extra_arguments_reach_the_optimizer_inside():
    inner = optax.GradientTransformationExtraArgs(
        lambda params: (),
        lambda g, s, params=None, *, factor: (jax.tree.map(lambda x: x * factor, g), s),
    )
    tx = ft.loss_scale(inner, initial=2.0)
    assert tx.update(gradient(2.0, 4.0), tx.init(PARAMS), PARAMS, factor=3.0)[0]["w"].tolist() == [
        3.0,
        6.0,
    ]
    plain = ft.loss_scale(optax.sgd(1.0), initial=2.0)
    assert plain.update(gradient(2.0, 4.0), plain.init(PARAMS), PARAMS, factor=3.0)[0][
        "w"
    ].tolist() == [-1.0, -2.0]


def learn(policy, tx):
    """A small regression whose loss is of the order 1e-7, in float16: the error before and after,
    relative."""
    key = jax.random.key(0)
    x = jax.random.normal(key, (32, 8))
    y = x @ jnp.linspace(-1.0, 1.0, 8)[:, None]
    params = {"a": jax.random.normal(key, (8, 16)) / 3, "b": jax.random.normal(key, (16, 1)) / 4}

    def error(params):
        return ((jnp.tanh(x @ params["a"]) @ params["b"] - y) ** 2).mean()

    gradient = ft.autocast(ft.scaled_value_and_grad(lambda params: 1e-7 * error(params)), policy)

    def step(carry, _):
        params, state = carry
        value, grads = gradient(state, params)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), value

    (after, state), values = jax.jit(lambda c: jax.lax.scan(step, c, length=200))(
        (params, tx.init(params))
    )
    return float(error(after) / error(params)), values, state


@pytest.mark.exhaustive
def test_a_loss_of_1e_7_learns_in_float16_only_with_the_scaler():
    sgd = optax.sgd(0.05 / 1e-7)
    full = learn("float32", sgd)[0]
    without = learn("float16", sgd)[0]
    scaled, values, state = learn("float16", ft.loss_scale(sgd, hw.policy("float16")))
    assert full < 0.1 and without > 0.5 and scaled < 1.1 * full
    assert values.dtype == jnp.float32 and 0 < float(values[0]) < 1e-6
    assert int(ft.loss_scale_state(state).skipped) == 0


SGD = optax.sgd(1.0)
TWO = "expected one loss scale in the optimizer state; got 2. Wrap the complete optimizer in loss_scale once"


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: ft.loss_scale(1e-3),
            TypeError,
            "loss_scale: expected an Optax transformation, such as optax.adamw(1e-3); got 0.001",
        ),
        (
            lambda: ft.loss_scale(SGD, "float16"),
            TypeError,
            "loss_scale: expected a hardware.Policy or None; got 'float16'. hardware.policy(chip) "
            "returns a Policy",
        ),
        *[
            (
                lambda options=options: ft.loss_scale(SGD, **options),
                ValueError,
                "loss_scale needs 0 < minimum <= initial <= maximum < 2^128, growth >= 1, 0 < "
                "backoff < 1 and an integer interval >= 1; got "
                f"minimum={options.get('minimum', 2.0**-14)}, "
                f"initial={options.get('initial', 2.0**15)}, "
                f"maximum={options.get('maximum', 2.0**24)}, growth={options.get('growth', 2.0)}, "
                f"backoff={options.get('backoff', 0.5)}, interval={options.get('interval', 2000)}",
            )
            for options in (
                {"initial": 0.0},
                {"initial": float("nan")},
                {"initial": 2.0**25},
                {"minimum": 2.0**16},
                {"maximum": INF},
                {"growth": 0.5},
                {"backoff": 1.0},
                {"backoff": 0.0},
                {"interval": 0},
                {"interval": 2.5},
            )
        ],
        (
            lambda: ft.loss_scale_state(
                optax.chain(ft.loss_scale(SGD), ft.loss_scale(SGD)).init(PARAMS)
            ),
            ValueError,
            TWO,
        ),
        (
            lambda: ft.loss_scale_state(ft.loss_scale(ft.loss_scale(SGD)).init(PARAMS)),
            ValueError,
            TWO,
        ),
        (
            lambda: ft.scaled_value_and_grad(lambda p: p["w"].sum())(
                optax.multi_transform(
                    {"a": ft.loss_scale(SGD), "b": ft.loss_scale(SGD)}, {"w": "a", "v": "b"}
                ).init(PARAMS | {"v": jnp.ones(2)}),
                PARAMS,
            ),
            ValueError,
            TWO,
        ),
        (
            lambda: ft.scaled_value_and_grad(lambda p: p["w"])(
                ft.loss_scale(SGD).init(PARAMS), PARAMS
            ),
            TypeError,
            "scaled_value_and_grad: the loss must be a floating-point scalar; got float32[2]",
        ),
        (
            lambda: ft.scaled_value_and_grad(lambda p: jnp.int32(3))(
                ft.loss_scale(SGD).init(PARAMS), PARAMS
            ),
            TypeError,
            "scaled_value_and_grad: the loss must be a floating-point scalar; got int32[]",
        ),
        (
            lambda: ft.scaled_value_and_grad(lambda p: (p["w"].sum(), 1))(
                ft.loss_scale(SGD).init(PARAMS), PARAMS
            ),
            TypeError,
            "scaled_value_and_grad: the loss must be a floating-point scalar; got a tuple",
        ),
        (
            lambda: ft.scaled_value_and_grad(lambda p: p["w"].sum(), has_aux=True)(
                ft.loss_scale(SGD).init(PARAMS), PARAMS
            ),
            TypeError,
            "scaled_value_and_grad: with has_aux=True the loss must return a pair (scalar, aux)",
        ),
    ],
)
def test_errors(call, error, text):
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == text
