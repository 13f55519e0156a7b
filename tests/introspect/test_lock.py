"""The file of a lock: what it contains, that it is read as it was written, and what is refused; and
what newer versions of JAX have changed in steps that jax 0.10.2 locked."""

import gzip
import itertools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from locked_steps import STEPS, lock

from fnet import introspect, parallel
from fnet import layers as nn
from fnet.introspect._lock._common import common

pytestmark = pytest.mark.usefixtures("quickly")
X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
Y = X[::-1] * 2 + 1
LOCKS = Path(__file__).parent / "locks"


def locked(f, *args, **options):
    return introspect.lock(f, *(args or (X, Y)), **options)


def changes(f, g):
    return introspect.diff(locked(f), locked(g))


# The derivatives of tanh (before 0.11: 1 - t and a sum) and of the maximum of two numbers.
RULES = re.compile("tanh|`eq |select_n .* 0.0 1.0|gt .* 0.0")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", STEPS)
def test_other_versions_of_jax_change_only_derivatives(name, tmp_path):
    old = tmp_path / f"{name}.lock"
    old.write_bytes(gzip.decompress((LOCKS / f"{name}.lock.gz").read_bytes()))
    new = lock(name)
    found = introspect.diff(old, new)
    if jax.__version_info__ < (0, 11) or name in ("lstm", "resnet50"):
        assert found.same, str(found)
    for change in found.changes:
        expected = change.follows or change.kind == "cost"
        assert expected or RULES.search(str(change)), str(change)
        assert change.kind != "value"
    made = introspect.read_lock(old).made
    assert made.startswith("jax 0.10.2") and (
        f"made with {made}, and with {new.made}" in found.notes
    ) == (made != new.made)


def test_a_file_is_small_text_that_is_read_as_it_was_written(tmp_path):
    model = nn.Sequential(hidden=nn.Dense(3), norm=nn.LayerNorm())
    params, _ = model.init(jax.random.key(0), X)
    f = lambda params, x: model(params, x)
    first = introspect.lock(f, params, X)
    first.save(tmp_path / "model.lock")
    text = (tmp_path / "model.lock").read_text()
    assert text == first.text == introspect.lock(f, params, X).text
    assert "layer hidden matmul=192 other=24\n1 dot_general $x $params/hidden/kernel " in text
    assert re.search(r"^\d+ add %\d+ 1e-05 : f32\[8,1\]$", text, re.MULTILINE)
    again = introspect.read_lock(tmp_path / "model.lock")
    assert again.text == text and not introspect.diff(tmp_path / "model.lock", again)


@pytest.mark.parametrize(
    "edit, message",
    [
        (lambda text: text.replace("mul", "add"), "damaged, or was edited by hand"),
        (lambda text: text[:-40], "damaged, or was edited"),
        (
            lambda text: text.replace("lock 1\n", "lock 7\n"),
            "has version 7 of the format, and this",
        ),
        (lambda text: "{}", "no lock file: its first line must begin with 'fnet lock'"),
        (lambda text: "", "no lock file"),
    ],
)
def test_what_is_no_lock_file_is_refused(tmp_path, edit, message):
    path = tmp_path / "step.lock"
    path.write_text(edit(locked(lambda x, y: x * y).text))
    with pytest.raises(ValueError, match=message):
        introspect.read_lock(path)


def test_bytes_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "step.lock").write_bytes(b"\x80\x04\x95")
    with pytest.raises(ValueError, match="not text in UTF-8"):
        introspect.read_lock(tmp_path / "step.lock")
    with pytest.raises(OSError):
        introspect.read_lock(tmp_path / "other.lock")


def test_every_single_changed_byte_is_noticed(tmp_path):
    text = locked(lambda x, y: jnp.sin(x) * y).text.encode()
    for i in range(0, len(text), 3):
        path = tmp_path / "step.lock"
        path.write_bytes(text[:i] + bytes([text[i] ^ 1]) + text[i + 1 :])
        with pytest.raises(ValueError):
            introspect.read_lock(path)


def scan(body, **options):
    return lambda x, y: lax.scan(body, (x[0], y[0]), x, **options)


def repeat(test, start=0):
    body = lambda c: (c[0] + 1, c[1] * 2)
    return lambda x, y: lax.while_loop(test, body, (start, x))


def placed(*axes):
    mesh = jax.make_mesh((8,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    return lambda x, y: lax.with_sharding_constraint(x * 2, NamedSharding(mesh, P(*axes)))


def reduced(axis):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    specs = dict(in_specs=P("a", "b"), out_specs=P())
    both = lambda x: lax.psum(lax.psum(x[:1, :1], axis) * 2, "ab".replace(axis, ""))
    return lambda x, y: jax.shard_map(both, mesh=mesh, **specs)(x)


DIFFERENT = {
    "operands": (lambda x, y: x - y, lambda x, y: y - x),
    "results": (lambda x, y: (x, y), lambda x, y: (y, x)),
    "fewer results": (lambda x, y: (x, y), lambda x, y: x),
    "test of a loop": (repeat(lambda c: c[0] < 5), repeat(lambda c: c[0] < 6)),
    "start of a loop": (repeat(lambda c: c[0] < 5), repeat(lambda c: c[0] < 5, start=1)),
    "carries": (
        scan(lambda c, r: ((c[0] + r, c[1] * 2), c[0])),
        scan(lambda c, r: ((c[1] * 2, c[0] + r), c[0])),
    ),
    "one carry": (
        scan(lambda c, r: ((c[0], c[1] + c[0]), r)),
        scan(lambda c, r: ((c[1], c[1] + c[0]), r)),
    ),
    "direction": (
        scan(lambda c, r: ((c[0] + r, c[1]), r * 2)),
        scan(lambda c, r: ((c[0] + r, c[1]), r * 2), reverse=True),
    ),
    "branches": (
        lambda x, y: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x),
        lambda x, y: lax.cond(x[0, 0] > 0, jnp.cos, jnp.sin, x),
    ),
    "lookup": (
        lambda x, y: x.at[jnp.arange(3)].get(mode="clip"),
        lambda x, y: x.at[jnp.arange(3)].get(mode="fill"),
    ),
    "integers": (lambda x, y: x[np.array([0, 1])], lambda x, y: x[np.array([0, 2])]),
    "values": (
        lambda x, y: x * np.array([1, 2, 3, 4], "f")[None],
        lambda x, y: x * np.array([1, 2, 3, 5], "f")[None],
    ),
    "seed": (
        lambda x, y: jax.random.normal(jax.random.key(0), (3,)),
        lambda x, y: jax.random.normal(jax.random.key(1), (3,)),
    ),
    "order of axes": (
        lambda x, y: x.reshape(2, 4, 4).transpose(0, 2, 1),
        lambda x, y: x.reshape(2, 4, 4).transpose(1, 0, 2),
    ),
    "in a loop": (
        lambda x, y: lax.fori_loop(0, 5, lambda i, c: c + jnp.sin(y), x),
        lambda x, y: (lambda s: lax.fori_loop(0, 5, lambda i, c: c + s, x))(jnp.sin(y)),
    ),
    "placement": (placed("a"), placed()),
    "axis of a mesh": (reduced("a"), reduced("b")),
    "callback": (
        lambda x, y: jax.pure_callback(lambda v: np.asarray(v) * 2, x, x),
        lambda x, y: jax.pure_callback(lambda v: np.asarray(v) * 3, x, x),
    ),
    "printed": (
        lambda x, y: (jax.debug.print("{}", x), x)[1],
        lambda x, y: (jax.debug.print("{}", y), x)[1],
    ),
    "last digits": (lambda x, y: x + 1e-5, lambda x, y: x + 1.0001e-5),
    "sign of zero": (lambda x, y: x * 0.0, lambda x, y: x * -0.0),
}


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("name", DIFFERENT)
def test_small_differences_are_noticed(name):
    found = changes(*DIFFERENT[name])
    assert found and found.first is not None


def test_a_lock_of_odd_names_is_read_as_it_was_written(tmp_path):
    def f(tree):
        with jax.named_scope("a b/{c}~%$=;"):
            return {"": jnp.sin(tree["x % y"]) + tree["x$%~{};= y"], "none": None, "text": "x"}

    path = tmp_path / "odd.lock"
    first = introspect.lock(f, {"x % y": X, "x$%~{};= y": Y})
    first.save(path)
    assert introspect.read_lock(path).text == first.text


def test_values_are_compared_as_exactly_as_rounding_allows():
    noisy = lambda x, y: (x - x.mean(0, keepdims=True)).sum() * 1e6  # rounding alone
    assert changes(noisy, lambda x, y: (x - x.mean(0, keepdims=True)).sum() * 1e6).same
    base = locked(lambda x, y: x * 2)
    assert introspect.diff(base, locked(lambda x, y: x * 2, X * np.float32(1 + 1e-6), Y)).same
    moved = introspect.diff(base, locked(lambda x, y: x * 2, X * np.float32(1.01), Y))
    assert moved.first.kind == "value" and "x mean" in str(moved.first)
    assert [change.follows for change in moved.changes] == [False, True]


def test_a_step_with_side_effects_does_not_run():
    printed = []

    def f(x):
        jax.debug.callback(printed.append, x.sum())
        return x * 2

    lock = introspect.lock(f, X)
    jax.effects_barrier()
    assert not printed and lock.notes == ("no values, because the step has side effects",)


def test_inputs_are_drawn_and_odd_ones_allowed():
    key = jax.ShapeDtypeStruct((), jax.random.key(0).dtype)
    index = jax.ShapeDtypeStruct((3,), jnp.int32)
    f = lambda table, i, key, n, mode: (table[i] * n, jax.random.normal(key, (2,)), mode)
    lock = introspect.lock(f, jax.ShapeDtypeStruct((5, 2), jnp.float32), index, key, 3, "text")
    assert "input key key<fry>[]\n" in lock.text and "~" in lock.text
    assert introspect.lock(lambda x: x @ x.T, jnp.zeros((0, 4))).text.count("~") == 0


def test_symbolic_sizes_are_refused():
    (size,) = export.symbolic_shape("b")
    x = jax.ShapeDtypeStruct((size, 4), jnp.float32)
    with pytest.raises(ValueError, match=r"\[0\]\['x'\] has the shape \(b, 4\); expected numbers"):
        introspect.lock(lambda inputs: inputs["x"] * 2, {"x": x})


def test_the_plan_of_a_step_is_recorded():
    step = lambda state, batch: (
        {"w": state["w"] - 0.1 * jnp.outer(batch.mean(0), batch.mean(0))},
        {"mean": batch.mean()},
    )
    init = lambda key: {"w": jax.random.normal(key, (512, 512))}
    batch = jax.ShapeDtypeStruct((64, 512), jnp.float32)
    locks = [
        introspect.lock(
            step,
            jax.eval_shape(init, jax.random.key(0)),
            batch,
            plan=parallel.plan(
                step, init, batch, devices="v5e:2x2", strategy=strategy, compile=False
            ),
            values=False,
        )
        for strategy in ("data", "fsdp")
    ]
    found = introspect.diff(*locks)
    assert {change.kind for change in found.changes} == {"cost", "plan"}
    assert "4 x TPU v5e, data, mesh data=4, now 4 x TPU v5e, fsdp" in str(found)
    assert locks[0].sent > 0 and introspect.diff(locks[0], locks[0]).same


def test_longest_common_subsequences():
    rng = np.random.default_rng(0)
    for _ in range(200):
        a, b = (rng.integers(0, 4, rng.integers(0, 12)).tolist() for _ in range(2))
        pairs = common(a, b)
        assert all(a[i] == b[j] for i, j in pairs)
        assert pairs == sorted(pairs) and len(set(pairs)) == len(pairs)
        assert all(p[0] < q[0] and p[1] < q[1] for p, q in itertools.pairwise(pairs))
        assert len(pairs) == _length(a, b)


def _length(a, b):
    best = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            best[i + 1][j + 1] = best[i][j] + 1 if x == y else max(best[i][j + 1], best[i + 1][j])
    return best[-1][-1]
