"""64 clients at once, over HTTP, of programs whose rows see each other, or would if a mask let NaN
through: every answer is that of a direct call."""

import concurrent.futures
import json
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from servers import Client, serving

from fnet import export

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytestmark = [pytest.mark.exhaustive, pytest.mark.usefixtures("quickly")]

CLIENTS, TURNS = 64, 6
TWO = np.float32(2)


def statistics(p, x):
    return p * (x - x.mean(0, keepdims=True)) / jnp.sqrt(x.var(0, keepdims=True) + 1e-5)


def experts(p, x):
    """Each expert takes two rows of a batch, and leaves out the others."""
    chosen = jax.nn.one_hot(x.argmax(1), 3)
    kept = jnp.where(chosen.cumsum(0) <= 2, chosen, 0)
    return x * p * kept.sum(1, keepdims=True)


def masked(p, x):
    """The mean of the batch, multiplied by a mask that hides it in every layer."""

    def layer(x, w):
        mean = x.mean(0, keepdims=True)
        return jnp.tanh(w * x) + jnp.zeros((), x.dtype) * mean, None

    return jax.lax.scan(layer, p * x, jnp.array([0.5, 2.0, 1.0]))[0]


PROGRAMS = {  # name: (function, why some requests are computed alone)
    "softmax": (lambda p, x: jax.nn.softmax(p * x, 0), "rows"),
    "statistics": (statistics, "rows"),
    "experts": (experts, "rows"),
    "contrast": (lambda p, x: jax.nn.log_softmax(p * x @ x.T), "rows"),
    "masked": (masked, "condition"),
}


@pytest.fixture(scope="module")
def port(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clients")
    files = []
    for name, (f, _) in PROGRAMS.items():
        files.append(folder / f"{name}.fnet")
        export.program(f, TWO, x=export.spec("b, 3")).save(files[-1])
    with serving(*files, "--max-batch", 16, "--max-delay", 20) as (port, _):
        yield port


def asked(client, name, x):
    """The output for an input, both as bytes, because JSON has no NaN."""
    tensor = {"name": "x", "shape": list(x.shape), "datatype": "FP32"}
    tensor["parameters"] = {"binary_data_size": x.nbytes}
    body = {"inputs": [tensor], "parameters": {"binary_data_output": True}}
    head = json.dumps(body).encode()
    length = {"Inference_Header_Content_Length": str(len(head))}
    status, headers, content = client(
        f"/v2/models/{name}/infer", head + x.tobytes(), method="POST", **length
    )
    assert status == 200, content
    end = int(headers["Inference-Header-Content-Length"])
    (output,) = json.loads(content[:end])["outputs"]
    return np.frombuffer(content[end:], np.float32).reshape(output["shape"])


def inputs_of(i, turn):
    """One to three rows; every fifth client sends NaN or infinities in one of them."""
    draw = np.random.default_rng([i, turn])
    x = draw.normal(size=(1 + (i + turn) % 3, 3)).astype(np.float32)
    if i % 5 == 0:
        x[draw.integers(len(x)), draw.integers(3)] = (np.nan, np.inf, -np.inf)[turn % 3]
    return x


@pytest.mark.parametrize("name", PROGRAMS)
def test_64_clients_get_the_answers_of_direct_calls(name, port):
    f, cause = PROGRAMS[name]
    together = threading.Barrier(CLIENTS)

    def talk(i):
        client = Client(port)
        answers = []
        for turn in range(TURNS):
            together.wait(60)  # all requests of a turn arrive at about the same time
            answers.append(asked(client, name, inputs_of(i, turn)))
        return answers

    with concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool:
        answers = list(pool.map(talk, range(CLIENTS)))
    for i, turns in enumerate(answers):
        for turn, got in enumerate(turns):
            want = np.asarray(f(TWO, jnp.asarray(inputs_of(i, turn))))
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    text = Client(port)("/metrics")[2].decode()
    figure = lambda pattern: float(re.search(pattern + r" (\S+)", text)[1])
    alone = figure(rf'fnet_unbatched_requests_total{{cause="{cause}",model="{name}"}}')
    batches = figure(rf'fnet_batch_rows_count{{model="{name}",version="1"}}')
    if cause == "rows":
        assert alone == batches == CLIENTS * TURNS
    else:  # the others, but few, are computed with neighbors
        assert len(range(0, CLIENTS, 5)) * TURNS // 2 <= alone and batches < 0.8 * CLIENTS * TURNS
