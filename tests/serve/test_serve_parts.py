"""The parts of the server in this process: batches, queues, time limits, padding, options."""

import asyncio
import json
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import close

from fnet import export, serve
from fnet import layers as nn
from fnet.serve import _page, _protocol
from fnet.serve._batching import Batcher, Full
from fnet.serve._generate import Request, _pick
from fnet.serve._model import Model

pytest.importorskip("starlette")
pytestmark = pytest.mark.usefixtures("quickly")


class Slow:
    """A computation that waits until it is released, and records the rows of its batches."""

    def __init__(self):
        self.rows, self.started, self.release = [], threading.Event(), threading.Event()

    def __call__(self, arrays):
        self.started.set()
        assert self.release.wait(30)
        self.rows.append(len(arrays[0]))
        return [2 * x for x in arrays]


def test_batches():
    slow = Slow()
    batcher = Batcher(slow, max_batch=8, max_delay=0, max_queue=5)
    first = batcher.submit([np.zeros((1, 2))])
    assert slow.started.wait(30)
    shapes = (3, 2), (4, 2), (2, 3)
    waiting = [batcher.submit([np.full(shape, i)]) for i, shape in enumerate(shapes)]
    waiting[1].cancel()
    for _ in range(2):
        waiting.append(batcher.submit([np.full((4, 2), 5.0)]))
    with pytest.raises(Full, match="5 requests wait; try again later"):
        batcher.submit([np.zeros((1, 2))])
    slow.release.set()
    batcher.close()
    assert slow.rows == [
        1,
        3,
        2,
        8,
    ]  # a batch has at most 8 rows; the canceled request is not computed
    assert first.result()[0].shape == (1, 2)
    for i, shape in (0, (3, 2)), (2, (2, 3)):
        np.testing.assert_array_equal(waiting[i].result()[0], np.full(shape, 2 * i))
    with pytest.raises(Full):
        batcher.submit([np.zeros((1, 2))])


def test_an_error_reaches_all_requests_of_a_batch():
    def fail(arrays):
        raise MemoryError("no memory")

    batcher = Batcher(fail, max_batch=8, max_delay=0.05, max_queue=9)
    for future in [batcher.submit([np.zeros((1, 2))]) for _ in range(2)]:
        with pytest.raises(MemoryError):
            future.result(30)
    batcher.close()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A sum over a ragged axis of which only the first `lengths` elements count, and the running
    sum."""

    def f(params, x, lengths):
        inside = jnp.arange(x.shape[1])[None] < lengths[:, None]
        x = jnp.where(inside, x, 0) * params
        return {"sum": x.sum(1), "running": jnp.cumsum(x, 1)}

    file = tmp_path_factory.mktemp("served") / "sums.fnet"
    export.program(
        f, jnp.float32(3), x=export.spec("b, t"), lengths=export.spec("b", "int32")
    ).save(file)
    export.program(lambda params, x: x.mean(1), jnp.float32(3), x=export.spec("b, t")).save(
        file.with_name("means.fnet")
    )
    return file


def asked(app, path, body=b"", method="POST", headers=()):
    """(status, headers, content) of one request."""
    sent = []

    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"host", b"localhost"), *headers],
        "http_version": "1.1",
        "scheme": "http",
        "root_path": "",
    }
    asyncio.run(app(scope, receive, send))
    return (
        sent[0]["status"],
        dict(sent[0]["headers"]),
        b"".join(message.get("body", b"") for message in sent[1:]),
    )


def tensors(x, lengths):
    return json.dumps(
        {
            "inputs": [
                {
                    "name": "x",
                    "shape": list(x.shape),
                    "datatype": "FP32",
                    "data": x.ravel().tolist(),
                },
                {"name": "lengths", "shape": [len(x)], "datatype": "INT32", "data": lengths},
            ]
        }
    ).encode()


def test_padding(path):
    """Inputs are padded to few sizes, for which programs are compiled at the start."""
    app = serve.application([str(path)], serve.Options(max_batch=2, pad={"t": (4, 8)}))
    repository = app.state.server.repository
    repository.warm()
    model, _ = repository.find("sums", None)
    assert repository.ready and repository.error is None and model.programs == 4
    x = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
    status, _, content = asked(app, "/v2/models/sums/infer", tensors(x, [5, 2, 1]))
    outputs = {
        y["name"]: np.array(y["data"], np.float32).reshape(y["shape"])
        for y in json.loads(content)["outputs"]
    }
    want = 3 * np.where(np.arange(5) < np.array([[5], [2], [1]]), x, 0).astype(np.float32)
    close(outputs, {"output/sum": want.sum(1), "output/running": np.cumsum(want, 1)})
    assert model.programs == 4
    status, _, content = asked(
        app, "/v2/models/sums/infer", tensors(np.zeros((1, 9), np.float32), [1])
    )
    assert status == 400 and b"t = 9, expected at most 8" in content
    repository.close()


def test_padding_that_has_an_effect(path):
    app = serve.application(
        [str(path.with_name("means.fnet"))], serve.Options(max_batch=2, pad={"t": (8,)})
    )
    repository = app.state.server.repository
    repository.warm()
    assert "the output 'output' depends on the padding of t; serve the model without --pad" in str(
        repository.error
    )
    repository.close()


def test_overload_and_time_limits(path):
    app = serve.application([str(path)], serve.Options(max_queue=1, timeout=0.1))
    repository = app.state.server.repository
    body = tensors(np.zeros((1, 3), np.float32), [1])
    status, headers, content = asked(app, "/v2/models/sums/infer", body)
    assert status == 503 and headers[b"retry-after"] == b"1" and b"being compiled" in content
    assert asked(app, "/v2/health/ready", method="GET")[0] == 503
    repository.ready = True
    _, batcher = repository.find("sums", None)
    batcher._compute = slow = Slow()
    assert asked(app, "/v2/models/sums/infer", body)[0] == 504  # is computed
    future = batcher.submit([np.zeros((1, 3), np.float32), np.zeros(1, np.int32)])  # waits
    status, headers, content = asked(app, "/v2/models/sums/infer", body)
    assert status == 503 and headers[b"retry-after"] == b"1" and b"1 requests wait" in content
    slow.release.set()
    repository.close()
    assert future.done()
    app.state.server.draining = True
    assert asked(app, "/v2/health/live", method="GET")[1][b"connection"] == b"close"


def test_numbers_without_json(path):
    """NaN and infinities are null in JSON."""
    app = serve.application([str(path)], serve.Options())
    app.state.server.repository.ready = True
    body = tensors(np.array([[1.0, np.inf]], np.float32), [2])
    outputs = json.loads(asked(app, "/v2/models/sums/infer", body)[2])["outputs"]
    assert {y["name"]: y["data"] for y in outputs} == {
        "output/sum": [None],
        "output/running": [3.0, None],
    }
    app.state.server.repository.close()


@pytest.mark.parametrize(
    "dtype, rows, want",
    [
        (
            "float32",
            [[1, 5, 10, 4], [0.5, -1, np.nan, 0.5]],
            [["10.000000:2:c", "5.000000:1:b"], ["0.500000:0:a", "0.500000:3"]],
        ),
        ("int32", [[7, -7, 7, 2**31 - 1]], [["2147483647:3", "7:0:a"]]),
        ("bfloat16", [[1, 2, 3, 4]], [["4.000000:3", "3.000000:2:c"]]),
        ("uint8", [[0, 0, 0, 0]], [["0:0:a", "0:1:b"]]),
    ],
)
def test_classes(dtype, rows, want, tmp_path):
    """As Triton's extension describes them; of equal elements the first, and NaN last."""
    file = tmp_path / "same.fnet"
    program = export.program(lambda params, x: x, {}, x=export.spec("b, 4", dtype))
    program.entry("one", lambda params, x: x, x=export.spec("4", dtype)).save(
        file, labels=["a", "b", "c"]
    )
    outputs = [np.array(rows).astype(jnp.dtype(dtype))]
    asked = lambda count: {"outputs": [{"name": "output", "parameters": {"classification": count}}]}
    for entry, given, expected in ("predict", outputs, want), ("one", [outputs[0][0]], want[0]):
        model = Model("same", "1", export.load(file), entry, 4, {})
        (output,) = json.loads(_protocol.write(model, asked(2), given)[0])["outputs"]
        assert output["datatype"] == "BYTES" and output["shape"] == list(np.shape(expected))
        assert output["data"] == np.ravel(expected).tolist()
        (output,) = json.loads(_protocol.write(model, asked(9), given)[0])["outputs"]
        assert output["shape"][-1] == 4
    with pytest.raises(_protocol.Invalid, match="has no numbers, but booleans"):
        model.outputs = [("output", {"dtype": "bool", "shape": [4]})]
        _protocol.check_outputs(model, asked(1))


@pytest.mark.parametrize(
    "logits, temperature, top_k, allowed",
    [
        ([1, 3, 2], 1e-300, 0, {1}),
        ([1, 3, 3], 1e-30, 0, {1, 2}),
        ([1, 3, 2], 0.0, 0, {1}),
        ([1, 3, 2], 100.0, 1, {1}),
        ([1, 1, 1], 1.0, 1, {0, 1, 2}),
        ([1, 3, 2], 100.0, 3, {0, 1, 2}),
        ([1, 3, 2], 100.0, 99, {0, 1, 2}),
        ([-np.inf, 3, -np.inf], 100.0, 3, {1}),
        ([-np.inf, 3e38, -3e38], 1e-3, 0, {1}),
        ([np.inf, 3, 2], 1.0, 0, {0}),
    ],
)
def test_bounds_of_sampling(logits, temperature, top_k, allowed):
    request = Request([0], 1, temperature, top_k, 0)
    drawn = {
        _pick(np.array(logits, np.float32), request, np.random.default_rng(seed))
        for seed in range(60)
    }
    assert drawn == allowed


def test_the_page_loads_nothing():
    assert "src=" not in _page.HTML and "innerHTML" not in _page.HTML
    assert re.findall('href="[^"]*"', _page.HTML) == ['href="data:,"']
    assert (
        "default-src 'none'; script-src 'sha256-" in _page.POLICY and "unsafe" not in _page.POLICY
    )


@pytest.mark.parametrize(
    "options, error",
    [
        ({"max_batch": 0}, "serve: max_batch=0: expected at least 1"),
        ({"timeout": 0}, "timeout=0: expected more than 0"),
        ({"token": "short"}, "expected a token of at least 8 ASCII characters"),
        ({"port": 70000}, "a port from 0 to 65535"),
        ({"pad": {"t": ()}}, r"pad t=\(\): expected sizes of at least 1"),
    ],
)
def test_options(options, error):
    with pytest.raises(ValueError, match=error):
        serve.Options(**options)


def test_files(path, tmp_path):
    with pytest.raises(ValueError, match=r"'a/b=.*expected FILE, NAME=FILE or NAME:VERSION=FILE"):
        serve.application([f"a/b={path}"])
    with pytest.raises(ValueError, match="a number that is not used twice"):
        serve.application([f"a:1={path}", f"a:1={path}"])
    with pytest.raises(ValueError, match="no model has the size variable 'w'"):
        serve.application([str(path)], serve.Options(pad={"w": (1,)}))
    with pytest.raises(ValueError, match="expected at least one bundle"):
        serve.application([])
    with pytest.raises(FileNotFoundError):
        serve.application([str(tmp_path / "missing.fnet")])


def test_generation_needs_a_cache():
    program = export.program(lambda params, x: x, {}, x=export.spec("b"))
    with pytest.raises(AttributeError, match="cache"):
        export.generation(program, lambda params, tokens: tokens, context=4)


def served(tmp_path, f, params, x, spec):
    """(the outputs of a served model, those of its bundle, the text of the compiled program)."""
    path = tmp_path / "model.fnet"
    export.program(f, params, x=export.spec(spec)).save(path)
    bundle = export.load(path)
    model = Model("model", "1", bundle, "predict", 8, {})
    (found,) = model.compute(model.bound([x]))
    (compiled,) = model._programs.values()
    return found, bundle(x), getattr(compiled, "as_text", str)()


def test_programs_are_tuned_on_a_cpu(tmp_path):
    layer, x = (
        nn.DepthwiseConv(3, padding=1),
        np.random.default_rng(0).normal(size=(3, 6, 6, 4)).astype(np.float32),
    )
    params, _ = layer.init(jax.random.key(0), x)
    table = np.arange(4, dtype=np.float32)[None, None, None]  # a constant of the program
    found, expected, text = served(
        tmp_path, lambda params, x: layer(params, x) * table, params, x, "b, 6, 6, 4"
    )
    close(found, expected, 1e-6)
    assert "convolution(" not in text


def test_a_program_without_a_stable_form_is_served(tmp_path):
    f = lambda params, x: x * params + jax.random.normal(jax.random.key(0), (4,))[None]
    x = np.ones((2, 4), np.float32)
    found, expected, _ = served(tmp_path, f, jnp.ones(()), x, "b, 4")
    close(found, expected, 1e-6)
