"""Whether the server combines, splits and pads rows: only if it has shown that they are
independent."""

import json
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import close

from fnet import export, models, serve
from fnet import layers as nn
from fnet.serve import _model, _proof
from fnet.serve._batching import Alone, Batcher
from fnet.serve._model import Model

pytest.importorskip("starlette")
pytestmark = pytest.mark.usefixtures("quickly")


TWO = np.float32(2)


def model_of(
    tmp_path, f, specs, *, params=TWO, pad=None, max_batch=4, tests=None, warm=True, assume=False
):
    path = tmp_path / "model.fnet"
    program = export.program(
        f, params, **{name: export.spec(*spec) for name, spec in specs.items()}
    )
    program.save(path, **({"tests": {"predict": tests}} if tests else {}))
    model = Model("model", "1", export.load(path), "predict", max_batch, pad or {}, assume)
    if warm:
        model.warm()
    return model


X = {"x": ("b, 3",)}
DEPENDENT = {  # name: (function, specs, the reason)
    "softmax": (lambda p, x: jax.nn.softmax(p * x, axis=0), X, "breaks it is reduce_max,"),
    "center": (lambda p, x: x - x.mean(0, keepdims=True), X, "breaks it is reduce_sum,"),
    "running sum": (lambda p, x: x.cumsum(0), X, "breaks it is cumsum,"),
    "batch norm": (
        lambda p, x: p * (x - x.mean(0, keepdims=True)) / jnp.sqrt(x.var(0, keepdims=True) + 1e-5),
        X,
        "breaks it is reduce_sum,",
    ),
    "sort": (lambda p, x: jnp.sort(p * x, axis=0), X, "breaks it is sort,"),
    "rank": (lambda p, x: jnp.argsort(x, axis=0), X, "breaks it is sort,"),
    "best of the batch": (
        lambda p, x: x * (jnp.arange(x.shape[0]) == x[:, 0].argmax())[:, None].astype(x.dtype),
        X,
        "breaks it is argmax,",
    ),
    "reversed": (lambda p, x: x[::-1] * p, X, "breaks it is rev,"),
    "rolled": (lambda p, x: jnp.roll(x, 1, axis=0) * p, X, "breaks it is concatenate,"),
    "the first row": (lambda p, x: x - p * x[:1], X, "breaks it is sub,"),
    "the first row is changed": (lambda p, x: x.at[0].set(0), X, "depends on the other rows"),
    "a late row is changed": (lambda p, x: x.at[3].set(0), X, "depends on the other rows"),
    "a row that only a larger request has": (
        lambda p, x: x.at[6].set(0),
        X,
        "depends on the other rows",
    ),
    "position": (
        lambda p, x: x + jnp.arange(x.shape[0], dtype=jnp.float32)[:, None],
        X,
        "depends on the other rows",
    ),
    "size": (lambda p, x: x / x.shape[0], X, "depends on the other rows"),
    "a mean above a limit": (
        lambda p, x: jnp.where(x.mean() > 1e5, 0, p * x),
        X,
        "breaks it is reduce_sum,",
    ),
    "a mean below a limit": (
        lambda p, x: jnp.where(x.mean() < -50, 0, p * x),
        X,
        "breaks it is reduce_sum,",
    ),
    "any NaN": (
        lambda p, x: jnp.where(jnp.isnan(x).any(), 0, p * x),
        X,
        "breaks it is reduce_or,",
    ),
    "a tiny share": (
        lambda p, x: p * x + 1e-6 * jnp.clip(x, -1, 1).sum(0, keepdims=True),
        X,
        "breaks it is reduce_sum,",
    ),
    "equal rows": (
        lambda p, x: p * x * (1 + (x[:, None] == x[None]).all(2).sum(1)[:, None].astype(x.dtype)),
        X,
        "breaks it is eq,",
    ),
    "integers": (
        lambda p, x: x - x.max(0, keepdims=True),
        {"x": ("b, 3", "int32")},
        "breaks it is reduce_max,",
    ),
    "most frequent": (
        lambda p, x: x == jnp.argmax(jnp.bincount(x, length=4)),
        {"x": ("b", "int32")},
        "breaks it is scatter-add,",
    ),
    "lengths of others": (
        lambda p, x, n: jnp.where(jnp.arange(x.shape[1])[None] < n.max(), x, 0),
        {"x": ("b, t",), "n": ("b", "int32")},
        "breaks it is reduce_max,",
    ),
    "drawn by position": (
        lambda p, x: x * jax.random.bernoulli(jax.random.key(0), 0.5, x.shape).astype(x.dtype),
        X,
        "has no stable form",
    ),
    "one of two outputs": (
        lambda p, x: {"good": p * x, "bad": x - x.mean(0, keepdims=True)},
        X,
        "breaks it is reduce_sum,",
    ),
    "a loop": (
        lambda p, x: jax.lax.while_loop(lambda x: (x > 1).any(), lambda x: x / 2, x),
        X,
        "breaks it is while,",
    ),
    "always zero": (
        lambda p, x: 0 * jnp.nan_to_num(jnp.clip(x, -1, 1)),
        X,
        "shows nothing about other rows",
    ),
    "always NaN": (lambda p, x: x * jnp.nan, X, "have no finite element"),
    "a scalar": (lambda p, x: x.mean(), X, "not one size variable"),
    "no rows in one output": (lambda p, x: (x, x.mean(0)), X, "not one size variable"),
    "pairs": (lambda p, x: x @ x.T, X, "not one size variable"),
    "a fixed batch": (lambda p, x: x * p, {"x": ("2, 3",)}, "not one size variable"),
}


@pytest.mark.quick_cases("size", "integers", "a scalar", "pairs")
@pytest.mark.parametrize("name", DEPENDENT)
def test_dependent_rows_are_computed_alone(name, tmp_path):
    f, specs, reason = DEPENDENT[name]
    model = model_of(tmp_path, f, specs)
    assert not model.batched and model.max_batch == 1 and reason in model.not_batched
    draw = np.random.default_rng(1)
    for rows in (2,) if name == "a fixed batch" else (1, 3, 9):
        inputs = [
            draw.integers(
                0, 3, (rows, *[2] * spec[0].count("t"), *[3] * spec[0].count("3"))
            ).astype(spec[1] if len(spec) > 1 else np.float32)
            for spec in specs.values()
        ]
        got, want = model.compute(model.bound(inputs)), jax.tree.leaves(model.bundle(*inputs))
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, 1e-6)


TOKENS = nn.Sequential(nn.Embed(7, 8), nn.LayerNorm(), nn.Dense(3))
INDEPENDENT = {
    "rows": (lambda p, x: jnp.tanh(p * x) @ jnp.ones((3, 2)), X),
    "softmax of a row": (lambda p, x: jax.nn.softmax(p * x), X),
    "a class": (lambda p, x: {"label": jnp.argmax(x, 1), "p": jax.nn.softmax(x)}, X),
    "the last element": (
        lambda p, x, n: x[jnp.arange(x.shape[0]), n - 1] * p,
        {"x": ("b, t",), "n": ("b", "int32")},
    ),
    "a masked sum": (
        lambda p, x, n: p * jnp.where(jnp.arange(x.shape[1])[None] < n[:, None], x, 0).sum(1),
        {"x": ("b, t",), "n": ("b", "int32")},
    ),
    "half precision": (
        lambda p, x: x @ jnp.ones((3, 2), jnp.bfloat16),
        {"x": ("b, 3", "bfloat16")},
    ),
    "bytes": (lambda p, x: x.astype(jnp.float32) / 255, {"x": ("b, 3", "uint8")}),
    "booleans": (lambda p, x: jnp.where(x, p, 0), {"x": ("b, 3", "bool")}),
    "minus infinity": (lambda p, x: jnp.where(x > 0, p * x, -jnp.inf), X),
}


@pytest.mark.quick_cases("a masked sum", "bytes")
@pytest.mark.parametrize("name", INDEPENDENT)
def test_independent_rows_are_batched(name, tmp_path):
    model = model_of(tmp_path, *INDEPENDENT[name])
    assert model.batched and model.not_batched is None and model.max_batch == 4


def test_what_is_not_proved_is_batched_only_by_an_explicit_assumption(tmp_path):
    sure = lambda p, x: jnp.where(x.sum() < jnp.inf, p * x, p * x)
    assert "breaks it is reduce_sum," in model_of(tmp_path, sure, X).not_batched
    softmax, specs, _ = DEPENDENT["softmax"]
    assumed = model_of(tmp_path, softmax, specs, assume=True)  # the test of rows remains
    assert not assumed.batched and "depends on the other rows" in assumed.not_batched
    loop = lambda p, x: jax.lax.fori_loop(0, x.shape[0], lambda i, y: y * p, x)
    assert not model_of(tmp_path, loop, X, assume=True).batched


def batcher_of(model, causes, **options):
    """A batcher of the requests of a model, which appends the causes for which some are computed
    alone."""
    options = {"max_batch": model.max_batch, "max_delay": 0.2, "max_queue": 99, **options}
    return Batcher(model.compute, model.run, apart=causes.append, **options)


def test_sizes_without_a_proof_are_computed_alone(tmp_path, monkeypatch):
    """The proof is made again for each size that is compiled."""
    model = model_of(tmp_path, lambda p, x: p * x, {"x": ("b, t",)})
    assert model.batched
    proved = _proof.Proofs.rows

    def rows(self):
        if self._sizes["t"] == 5:
            raise Alone("rows", "t is 5")
        return proved(self)

    monkeypatch.setattr(_proof.Proofs, "rows", rows)
    causes = []
    batcher = batcher_of(model, causes)
    requests = [np.full((1, t), i, np.float32) for i, t in enumerate((3, 3, 5, 5, 3))]
    answers = [batcher.submit([x]) for x in requests]
    for x, answer in zip(requests, answers):
        np.testing.assert_array_equal(answer.result()[0], 2 * x)
    batcher.close()
    assert model.batched and batcher.max_batch == 4 and causes == ["rows", "rows"]


def hidden(p, x):
    """What an expert would add, multiplied by a mask that hides all of it."""
    return p * x + jnp.zeros((), x.dtype) * x.sum(0, keepdims=True)


def layers(p, x):
    return jax.lax.scan(lambda x, w: (hidden(p, x) * w, None), x, jnp.array([0.5, 2, 1]))[0]


CONDITIONAL = {"hidden": hidden, "in a loop over layers": layers}


@pytest.mark.quick_cases("in a loop over layers")
@pytest.mark.parametrize("name", CONDITIONAL)
def test_requests_are_batched_as_long_as_the_conditions_of_the_proof_hold(name, tmp_path, caplog):
    f = CONDITIONAL[name]
    model = model_of(tmp_path, f, X)
    line = "model: requests are computed together if operand 1 of mul is finite; others one by one"
    assert model.batched and line in caplog.text
    causes, sizes = [], []
    batcher = batcher_of(model, causes, observe=lambda rows, seconds: sizes.append(rows))
    draw = np.random.default_rng(0)
    finite = [draw.normal(size=(1, 3)).astype(np.float32) for _ in range(4)]
    answers = [batcher.submit([x]) for x in finite]
    for x, answer in zip(finite, answers):
        np.testing.assert_allclose(answer.result()[0], f(TWO, jnp.asarray(x)), 1e-6)
    assert causes == [] and sizes == [4]
    finite[2] = np.full((1, 3), np.nan, np.float32)
    answers = [batcher.submit([x]) for x in finite]
    for x, answer in zip(finite, answers):
        np.testing.assert_allclose(answer.result()[0], f(TWO, jnp.asarray(x)), 1e-6)
    batcher.close()
    assert causes == ["condition"] * 2 and sizes == [4, 2, 1, 1]  # one neighbor is alone, too
    two = np.stack([finite[0][0], finite[2][0]])
    with pytest.raises(Alone):  # one request of two rows, too, which is then not filled or split
        model.compute([two])


def test_the_conditions_are_checked_for_the_batch_as_it_is_computed(tmp_path):
    """Each row is finite, and so is their sum without the copies that fill the batch."""
    model = model_of(tmp_path, hidden, X)
    large = [np.full((1, 3), 1.1e38, np.float32) for _ in range(3)]
    (alone,) = model.compute([large[0]])
    assert np.isfinite(alone).all()
    assert np.isfinite(model.run([np.concatenate(large)])[0]).all()
    with pytest.raises(Alone):
        model.compute([np.concatenate(large)])
    causes = []
    batcher = batcher_of(model, causes, max_batch=3)
    for answer in [batcher.submit([x]) for x in large]:
        np.testing.assert_array_equal(answer.result()[0], alone)
    batcher.close()
    assert causes == ["condition"]  # a batch of the other two fulfills it


@pytest.mark.exhaustive
def test_a_layer_is_batched(tmp_path):
    params, _ = TOKENS.init(jax.random.key(0), jnp.zeros((1, 3), jnp.int32))
    model = model_of(tmp_path, TOKENS, {"x": ("b, t", "int32")}, params=params)
    assert model.batched


PADDED = {  # name: (function, specs, sizes, the reason or None)
    "mean": (
        lambda p, x: x.mean(1),
        {"x": ("b, t, 3",)},
        {"t": (4, 8)},
        "depends on the padding of t",
    ),
    "another free size": (
        lambda p, x: x.mean(1),
        {"x": ("b, t, c",)},
        {"t": (4, 8)},
        "depends on the padding of t",
    ),
    "the size of the test is padded": (
        lambda p, x: x.mean(1),
        {"x": ("b, t, 3",)},
        {"t": (2, 4, 8)},
        "depends on the padding of t",
    ),
    "maximum": (
        lambda p, x: x.max(1),
        {"x": ("b, t, 3",)},
        {"t": (8,)},
        "depends on the padding of t",
    ),
    "maximum of positive numbers": (
        lambda p, x: jnp.abs(x).max(1),
        {"x": ("b, t, 3",)},
        {"t": (8,)},
        "depends on the values in the padding of t",
    ),
    "the last": (
        lambda p, x: x[:, -1] * p,
        {"x": ("b, t",)},
        {"t": (4,)},
        "depends on the padding of t",
    ),
    "reversed": (
        lambda p, x: x[:, ::-1] * p,
        {"x": ("b, t",)},
        {"t": (4,)},
        "depends on the padding of t",
    ),
    "softmax": (
        lambda p, x: jax.nn.softmax(x),
        {"x": ("b, t",)},
        {"t": (4,)},
        "depends on the padding of t",
    ),
    "one of two": (
        lambda p, x, y: x.cumsum(1) + y.mean(1, keepdims=True),
        {"x": ("b, t",), "y": ("b, s",)},
        {"t": (4, 8), "s": (4,)},
        "depends on the padding of s",
    ),
    "tokens": (
        lambda p, x: jnp.eye(9)[x].mean(1),
        {"x": ("b, t", "int32")},
        {"t": (4,)},
        "depends on the padding of t",
    ),
    "flags": (
        lambda p, x: jnp.where(x, p, 0).mean(1),
        {"x": ("b, t", "bool")},
        {"t": (4,)},
        "depends on the padding of t",
    ),
    "no information": (
        lambda p, x: 0 * x,
        {"x": ("b, t",)},
        {"t": (4,)},
        "shows nothing about the padding of t",
    ),
    "causal": (lambda p, x: x.cumsum(1) * p, {"x": ("b, t",)}, {"t": (4, 8)}, None),
    "lengths": (
        lambda p, x, n: p * jnp.where(jnp.arange(x.shape[1])[None] < n[:, None], x, 0).sum(1),
        {"x": ("b, t",), "n": ("b", "int32")},
        {"t": (4, 8)},
        None,
    ),
    "a mask": (
        lambda p, x, mask: (x * mask).sum(1) * p,
        {"x": ("b, t",), "mask": ("b, t",)},
        {"t": (4,)},
        None,
    ),
    "two sizes": (
        lambda p, x: jnp.cumsum(x.cumsum(1), 2) * p,
        {"x": ("b, h, w",)},
        {"h": (4,), "w": (4, 6)},
        None,
    ),
    "nothing between": (lambda p, x: x.mean(1), {"x": ("b, t",)}, {"t": (1, 2, 3)}, None),
}


@pytest.mark.quick_cases("maximum", "maximum of positive numbers", "reversed")
@pytest.mark.parametrize("name", PADDED)
def test_padding_is_tested(name, tmp_path):
    f, specs, pad, reason = PADDED[name]
    model = model_of(tmp_path, f, specs, pad=pad, max_batch=1, warm=False)
    if reason is not None:
        with pytest.raises(
            ValueError, match=f"serve: model: .*{reason}.*serve the model without --pad"
        ):
            model.warm()
        return
    model.warm()
    inputs = model.drawn({**dict.fromkeys(model.variables, 3), "b": 2}, 1.0, 5)
    if name == "a mask":
        inputs[1] = np.float32(inputs[1] > 0)
    close(model.compute(model.bound(inputs)), jax.tree.leaves(model.bundle(*inputs)), 1e-6)


def attend(p, x, lengths):
    """Attention with a mask of numbers, and the mean of what it returns."""
    inside = jnp.arange(x.shape[1])[None] < lengths[:, None]
    scores = jnp.einsum("btd,bsd->bts", x, x) + jnp.where(inside, jnp.float32(0), -1e9)[:, None]
    y = jax.nn.softmax(scores) @ (p * x)
    return jnp.where(inside[..., None], y, 0).sum(1) / lengths[:, None].astype(x.dtype)


ATTEND = {"x": ("b, t, 3",), "lengths": ("b", "int32")}


def test_padding_rests_on_a_proof(tmp_path, caplog):
    model = model_of(tmp_path, attend, ATTEND, pad={"t": (4, 8)})
    assert model.batched and model._masks == {"t": [1]} and "computed together if" in caplog.text
    draw = np.random.default_rng(0)
    for t in (1, 3, 4, 6, 7, 8):
        inputs = [
            draw.normal(size=(3, t, 3)).astype(np.float32),
            np.array([t, 1, (t + 1) // 2], np.int32),
        ]
        close(model.compute(inputs), jax.tree.leaves(model.bundle(*inputs)), 1e-5)
    for inputs, cause in (
        ([np.full((2, 3, 3), 2e4, np.float32), np.array([3, 1], np.int32)], "condition"),
        ([np.ones((2, 3, 3), np.float32), np.array([3, 4], np.int32)], "padding"),
    ):  # scores that are larger than the mask, and a length that would show the padding
        with pytest.raises(Alone) as caught:
            model.compute(inputs)
        assert caught.value.cause == cause


def test_lengths_that_are_not_proved_are_not_padded(tmp_path):
    """The test of padding does not try six positions, for which this program forgets its mask."""

    def f(p, x, n):
        kept = jnp.where(jnp.arange(x.shape[1])[None] < n[:, None], x, 0).sum(1)
        return p * jnp.where(n == 6, x.sum(1), kept)

    model = model_of(tmp_path, f, {"x": ("b, t",), "n": ("b", "int32")}, pad={"t": (16,)})
    causes = []
    batcher = batcher_of(model, causes)
    for t in (5, 6, 7):
        inputs = [np.arange(t, dtype=np.float32)[None], np.array([t], np.int32)]
        (got,) = batcher.submit(inputs).result()
        np.testing.assert_allclose(got, [t * (t - 1)], 1e-6)
        assert causes == (["padding"] if t > 5 else [])
    batcher.close()
    with pytest.raises(Alone, match="with output position 0 and input position 15"):
        model.compute([np.ones((2, 7), np.float32), np.array([5, 6], np.int32)])


def test_padding_without_a_proof_is_announced(tmp_path, caplog):
    """A sum that forgets the mask where it is too small to be seen in the test."""
    f = lambda p, x, mask: p * jnp.where(mask > 0, x, 0).sum(1) + jnp.float32(1e-30) * x.sum(1)
    specs = {"x": ("b, t",), "mask": ("b, t", "int32")}
    model = model_of(tmp_path, f, specs, pad={"t": (4,)})
    assert "requests that need padding of t are computed one by one and unpadded" in caplog.text
    with pytest.raises(Alone, match="the padding of t is not proved to reach no output"):
        model.compute([np.ones((1, 3), np.float32), np.ones((1, 3), np.int32)])
    (got,) = model.compute([np.ones((1, 4), np.float32), np.ones((1, 4), np.int32)])
    np.testing.assert_array_equal(got, [8])


def test_a_model_keeps_the_latest_programs(tmp_path, monkeypatch):
    monkeypatch.setattr(_model, "_PROGRAMS", 2)
    model = model_of(tmp_path, lambda p, x: p * x, {"x": ("b, t",)}, warm=False)
    for t in (3, 4, 5, 5):
        model.run([np.ones((1, t), np.float32)])
    assert [shapes[0][1] for shapes in model._programs] == [4, 5]


def test_the_stored_test_is_used(tmp_path):
    """A program whose padding matters only beyond what is drawn."""
    f = lambda p, x: jnp.where(x > 1e8, x.mean(1, keepdims=True), x)
    model_of(tmp_path, f, {"x": ("b, t",)}, pad={"t": (4,)}, max_batch=1)
    tests = {"x": np.full((1, 3), 1e9, np.float32)}
    with pytest.raises(ValueError, match="depends on the padding of t"):
        model_of(tmp_path, f, {"x": ("b, t",)}, pad={"t": (4,)}, max_batch=1, tests=tests)


def test_sizes_that_depend_on_a_padded_size(tmp_path):
    with pytest.raises(ValueError, match="inputs or outputs have sizes computed from 't'"):
        model_of(tmp_path, lambda p, x: jnp.repeat(x, 2, 1), {"x": ("b, t",)}, pad={"t": (4,)})
    f = lambda p, x, y: x * y[:, : x.shape[1]]
    with pytest.raises(ValueError, match="inputs or outputs have sizes computed from 't'"):
        model_of(tmp_path, f, {"x": ("b, t",), "y": ("b, 2*t",)}, pad={"t": (4,)})


def test_several_clients(tmp_path):
    """Each client gets its own answer, from a model that is batched, from one that is not, and from
    one that is if no request of the batch has NaN."""
    testclient = pytest.importorskip("starlette.testclient")
    functions = {
        "center": lambda p, x: x - x.mean(0, keepdims=True),
        "tanh": lambda p, x: jnp.tanh(x * p),
        "hidden": hidden,
    }
    for name, f in functions.items():
        export.program(f, jnp.float32(2), x=export.spec("b, 3")).save(tmp_path / f"{name}.fnet")
    app = serve.application(
        [str(tmp_path / f"{name}.fnet") for name in functions],
        serve.Options(max_delay=0.05, max_batch=8),
    )
    answers = {}
    with testclient.TestClient(app, base_url="http://127.0.0.1") as client:
        while client.get("/v2/health/ready").status_code != 200:
            time.sleep(0.02)

        def ask(i, name):
            x = np.random.default_rng(i).normal(size=(1 + i % 3, 3)).astype(np.float32)
            x = x if i % 2 else x * np.nan
            body = {
                "inputs": [
                    {
                        "name": "x",
                        "shape": list(x.shape),
                        "datatype": "FP32",
                        "parameters": {"binary_data_size": x.nbytes},
                    }
                ]
            }
            head = json.dumps(body).encode()
            got = client.post(
                f"/v2/models/{name}/infer",
                content=head + x.tobytes(),
                headers={"Inference-Header-Content-Length": str(len(head))},
            ).json()["outputs"][0]
            answers[i, name] = x, np.array(got["data"], np.float32).reshape(got["shape"])

        threads = [
            threading.Thread(target=ask, args=(i, name)) for i in range(8) for name in functions
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        metadata = {
            name: client.get(f"/v2/models/{name}").json()["parameters"] for name in functions
        }
        metrics = client.get("/metrics").text
    assert len(answers) == 24
    for (_, name), (x, got) in answers.items():
        np.testing.assert_allclose(got, functions[name](jnp.float32(2), x), 1e-5, 1e-6)
    assert metadata["tanh"]["batched"] and "not_batched" not in metadata["tanh"]
    assert (
        not metadata["center"]["batched"]
        and "the first operation that breaks it is reduce_sum" in metadata["center"]["not_batched"]
    )
    assert metadata["hidden"]["batched"]
    assert metadata["hidden"]["batched_if"] == "operand 1 of mul is finite"
    assert 'fnet_unbatched_requests_total{cause="rows",model="center"} 8' in metrics
    assert 'fnet_unbatched_requests_total{cause="condition",model="hidden"}' in metrics
    assert 'model="tanh"' not in "".join(x for x in metrics.splitlines() if "unbatched" in x)


def test_a_model_that_cannot_be_served_says_why(tmp_path):
    testclient = pytest.importorskip("starlette.testclient")
    export.program(lambda p, x: x.mean(1), {}, x=export.spec("b, t")).save(tmp_path / "mean.fnet")
    app = serve.application(
        [str(tmp_path / "mean.fnet")], serve.Options(pad={"t": (4,)}, max_batch=1)
    )
    with testclient.TestClient(app, base_url="http://127.0.0.1") as client:
        while app.state.server.repository.error is None:
            time.sleep(0.02)
        response = client.post("/v2/models/mean/infer", json={})
        (row,) = client.post("/v2/repository/index").json()
    assert response.status_code == 503 and "depends on the padding of t" in response.json()["error"]
    assert row["state"] == "UNAVAILABLE" and "depends on the padding of t" in row["reason"]


@pytest.mark.exhaustive
def test_padding_of_tokens(tmp_path):
    """The test's tokens differ, and some of them are in the vocabulary, so it shows something."""
    gpt = models.GPT(11, 8, 2, 2, context=64)
    params, _ = gpt.init(jax.random.key(0), jnp.zeros((1, 64), jnp.int32))
    spec = export.spec("b, t", "int32", where="t <= 64")
    export.program(gpt, params, tokens=spec).save(tmp_path / "text.fnet")
    model = Model(
        "text", "1", export.load(tmp_path / "text.fnet"), "predict", 4, {"t": (8, 16)}, False
    )
    model.warm()
    assert model.batched
    tokens = np.arange(10, dtype=np.int32).reshape(2, 5)
    (y,) = model.compute(model.bound([tokens]))
    np.testing.assert_allclose(y, gpt(params, tokens), atol=1e-5)
