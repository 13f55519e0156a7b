"""`fnet serve` in a process of its own: answers, clients, invalid requests, limits, the end."""

import asyncio
import concurrent.futures
import json
import random
import re
import signal
import socket
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from servers import Client, request, serving

from fnet import export, models
from fnet.serve._options import Options

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytestmark = pytest.mark.usefixtures("quickly")
GPT = models.GPT(11, 8, 1, 2, context=16, stacked=False)
LIMIT = 1_000_000  # bytes of a request


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Two versions of a classifier, and a language model."""
    folder = tmp_path_factory.mktemp("served")
    classify = lambda kernel, x: jnp.tanh(x.reshape(x.shape[0], 64) @ kernel)
    for seed, name in enumerate(["old", "digits"]):
        kernel = jax.random.normal(jax.random.key(seed), (64, 10)) / 8
        program = export.program(classify, kernel, x=export.spec("b, 8, 8, 1"))
        if name == "digits":
            program = program.entry(
                "preprocess",
                lambda params, image: image.astype(jnp.float32) / 255,
                image=export.spec("b, 8, 8, 1", "uint8"),
            )
        program.save(folder / f"{name}.fnet", labels=range(10))
    params, _ = GPT.init(jax.random.key(0), GPT.example())
    (folder / "characters.json").write_text(json.dumps("abcdefghijk"))
    program = export.program(GPT, params, tokens=export.spec("b, t", "int32", where="t <= 16"))
    export.generation(program, GPT, context=16).save(
        folder / "gpt.fnet", tokenizer=folder / "characters.json"
    )
    return folder


@pytest.fixture(scope="module")
def port(files):
    """The port of the process that the tests of this file share."""
    with serving(
        f"digits:1={files / 'old.fnet'}",
        files / "digits.fnet",
        files / "gpt.fnet",
        "--max-batch",
        4,
        "--max-body",
        LIMIT / 1e6,
    ) as (port, _):
        yield port


@pytest.fixture
def client(port):
    return Client(port)


@pytest.fixture(scope="module")
def digits(files):
    return export.load(files / "digits.fnet")


def images(rows, seed=0):
    return np.random.default_rng(seed).normal(size=(rows, 8, 8, 1)).astype(np.float32)


def equal(got, want):
    assert not isinstance(got, str), got
    assert np.abs(got[0] - np.asarray(want)).max() <= 1e-5 * np.abs(want).max()


def test_metadata(client):
    assert client.json("/v2/health/live") == (200, {"live": True})
    assert client.json("/v2/health/ready") == (200, {"ready": True})
    assert client.json("/v2")[1]["extensions"] == [
        "binary_tensor_data",
        "classification",
        "generate",
    ]
    status, data = client.json("/v2/models/digits")
    assert (
        status == 200
        and data["versions"] == ["1", "2"]
        and data["parameters"]["labels"] == list("0123456789")
    )
    assert data["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 8, 8, 1]}]
    assert data["outputs"] == [{"name": "output", "datatype": "FP32", "shape": [-1, 10]}]
    names = {
        (row["name"], row["version"], row["kind"])
        for row in client.json("/v2/repository/index", {})[1]
    }
    assert names == {
        ("digits", "1", "infer"),
        ("digits", "2", "infer"),
        ("digits.preprocess", "2", "infer"),
        ("gpt", "1", "infer"),
        ("gpt", "1", "generate"),
    }
    for path, status, error in (
        ("/v2/models/cat", 404, "there is no model 'cat'"),
        ("/v3", 404, "Not Found"),
        ("/v2/models/digits/versions/9", 404, "there is no model 'digits' of version 9"),
        ("/v2/models/digits/infer", 405, "Method Not Allowed"),
    ):
        assert client.json(path) == (status, {"error": error})


@pytest.mark.exhaustive
def test_answers(client, files, digits):
    """Also of more rows than a batch has, of an older version and of another entry point."""
    for rows in (1, 3, 21):
        equal(client.infer("digits", x=images(rows)), digits(images(rows)))
    equal(
        client.infer("digits/versions/1", x=images(2)), export.load(files / "old.fnet")(images(2))
    )
    image = np.arange(64, dtype=np.uint8).reshape(1, 8, 8, 1)
    equal(client.infer("digits.preprocess", image=image), image / 255)
    tokens = np.array([[1, 2, 3], [4, 5, 6]], np.int32)
    equal(client.infer("gpt", tokens=tokens), export.load(files / "gpt.fnet")(tokens))


def test_tritonclient(port, digits):
    triton = pytest.importorskip("tritonclient.http")
    client, x = triton.InferenceServerClient(f"127.0.0.1:{port}"), images(3)
    assert (
        client.is_server_live()
        and client.is_server_ready()
        and client.is_model_ready("digits", "1")
    )
    assert client.get_server_metadata()["name"] == "fnet"
    assert client.get_model_metadata("digits")["inputs"][0]["shape"] == [-1, 8, 8, 1]
    for binary in (True, False):
        tensor = triton.InferInput("x", x.shape, "FP32")
        tensor.set_data_from_numpy(x, binary_data=binary)
        for outputs in ([triton.InferRequestedOutput("output", binary_data=binary)], None):
            result = client.infer("digits", [tensor], outputs=outputs, request_id="7")
            assert result.get_response()["id"] == "7"
            equal([result.as_numpy("output")], digits(x))
    with pytest.raises(triton.InferenceServerException, match="expected 'FP32'"):
        client.infer(
            "digits",
            [triton.InferInput("x", x.shape, "INT32").set_data_from_numpy(x.astype(np.int32))],
        )
    want = np.asarray(digits(x))
    for binary in (True, False):
        tensor = triton.InferInput("x", x.shape, "FP32").set_data_from_numpy(x)
        result = client.infer(
            "digits",
            [tensor],
            outputs=[triton.InferRequestedOutput("output", binary_data=binary, class_count=2)],
        )
        texts = result.as_numpy("output")
        assert texts.shape == (3, 2)
        for row, numbers in zip(texts.tolist(), want):
            parts = [
                (text.decode() if isinstance(text, bytes) else text).split(":") for text in row
            ]
            order = np.argsort(-numbers)[:2]
            assert [(int(index), label) for _, index, label in parts] == [
                (i, str(i)) for i in order
            ]
            np.testing.assert_allclose(
                [float(value) for value, *_ in parts], numbers[order], atol=1e-5
            )
    client.close()


@pytest.mark.exhaustive
def test_kserve(port, digits):
    """In an environment of its own: make verify-export."""
    kserve = pytest.importorskip("kserve")
    address, x = f"http://127.0.0.1:{port}", images(3)

    async def run():
        client = kserve.InferenceRESTClient(kserve.RESTConfig(protocol="v2"))
        assert await client.is_server_live(address) and await client.is_server_ready(address)
        assert await client.is_model_ready(address, "digits")
        for binary in (True, False):
            tensor = kserve.InferInput("x", list(x.shape), "FP32")
            tensor.set_data_from_numpy(x, binary_data=binary)
            request = kserve.InferRequest("digits", [tensor], request_id="7")
            response = await client.infer(address, request, model_name="digits")
            assert (response.id, response.model_name) == ("7", "digits")
            equal([response.outputs[0].as_numpy()], digits(x))
        tensor = kserve.InferInput("x", [1, 8, 9, 1], "FP32")
        tensor.set_data_from_numpy(np.zeros((1, 8, 9, 1), np.float32), binary_data=False)
        with pytest.raises(Exception, match=r"axis 2 has size 9, expected 8.*400 Bad Request"):
            await client.infer(
                address, kserve.InferRequest("digits", [tensor]), model_name="digits"
            )
        await client.close()

    asyncio.run(run())


def test_requests_are_computed_together(port, digits):
    before = rows_and_batches(port)

    def one(seed):
        client = Client(port)
        return [
            (client.infer("digits", x=images(1 + seed % 3, seed)), images(1 + seed % 3, seed))
            for _ in range(6)
        ]

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        for answers in pool.map(one, range(16)):
            for got, x in answers:
                equal(got, digits(x))
    rows, batches = np.subtract(rows_and_batches(port), before)
    assert rows == 6 * sum(1 + seed % 3 for seed in range(16)) and batches < 96


def rows_and_batches(port):
    text = Client(port)("/metrics")[2].decode()
    find = lambda kind: re.search(
        rf'fnet_batch_rows_{kind}{{model="digits",version="2"}} (\d+)', text
    )
    return [int(find(kind)[1]) if find(kind) else 0 for kind in ("sum", "count")]


def test_metrics(client):
    client.infer("digits", x=images(1))
    status, headers, content = client("/metrics")
    assert status == 200 and headers["Content-Type"].startswith("text/plain; version=0.0.4")
    for line in content.decode().splitlines():
        assert re.fullmatch(
            r"# (HELP|TYPE) \w+ .+|\w+(\{(\w+=\"[^\"]*\",?)+\})? [\d.e+-]+", line
        ), line
    assert (
        b'fnet_requests_total{code="200",model="digits",path="/v2/models/{model}/infer"}' in content
    )


VALID = request(x=images(1))
INVALID = {
    "no JSON": (b"{", "the body is not valid JSON"),
    "nested JSON": (b"[" * 100_000, "the body is not valid JSON"),
    "a list": (b"[1]", "expected a JSON object, got list"),
    "no inputs": ({}, 'expected "inputs", a list'),
    "another input": (
        {"inputs": [{**VALID["inputs"][0], "name": "y"}]},
        "unknown input 'y'; expected x",
    ),
    "twice": ({"inputs": VALID["inputs"] * 2}, "repeated input 'x'"),
    "a missing input": ({"inputs": []}, "the input 'x' is missing"),
    "another dtype": (
        {"inputs": [{**VALID["inputs"][0], "datatype": "FP64"}]},
        "has datatype 'FP64', expected 'FP32'",
    ),
    "text": (
        {"inputs": [{**VALID["inputs"][0], "data": ["a"] * 64}]},
        "must have 64 numbers of datatype FP32",
    ),
    "too few": (
        {"inputs": [{**VALID["inputs"][0], "data": [1.0]}]},
        "must have 64 numbers of datatype FP32, got 1",
    ),
    "ragged": (
        {"inputs": [{**VALID["inputs"][0], "data": [[1], [1, 2]]}]},
        "must be a list of numbers",
    ),
    "a negative size": (
        {"inputs": [{**VALID["inputs"][0], "shape": [-1, 8, 8, 1]}]},
        "must be a list of sizes",
    ),
    "a huge size": (
        {"inputs": [{**VALID["inputs"][0], "shape": [1 << 39, 8, 8, 1]}]},
        "must have 35184372088832 ",
    ),
    "another shape": (
        request(x=np.zeros((1, 8, 9, 1), np.float32)),
        "axis 2 has size 9, expected 8",
    ),
    "another rank": (
        request(x=np.zeros((64,), np.float32)),
        "has shape (64,), expected float32[b, 8, 8, 1]",
    ),
    "no rows": (request(x=np.zeros((0, 8, 8, 1), np.float32)), "b must be at least 1"),
    "another output": (
        {**VALID, "outputs": [{"name": "y"}]},
        "unknown output 'y'; expected output",
    ),
    "an unknown field": (
        {**VALID, "output": []},
        "unknown field 'output'; expected id, parameters, inputs, outputs",
    ),
    "a priority": (
        {**VALID, "parameters": {"priority": 3}},
        "'priority' of the request is not supported",
    ),
    "a priority that is True": (
        {**VALID, "parameters": {"priority": True}},
        "'priority' of the request is not sup",
    ),
    "a sequence": (
        {**VALID, "parameters": {"sequence_id": 3, "sequence_end": True}},
        "'sequence_id' of the request",
    ),
    "shared memory": (
        {**VALID, "outputs": [{"name": "output", "parameters": {"shared_memory_region": "a"}}]},
        "'shared_memory_region' of the output is not supported",
    ),
    "an unknown parameter of an input": (
        {"inputs": [{**VALID["inputs"][0], "parameters": {"content_type": "np"}}]},
        "'content_type' of the input",
    ),
    "parameters that are no object": (
        {**VALID, "parameters": [1]},
        "expected the parameters of the request as a JSON",
    ),
    "binary_data": (
        {**VALID, "parameters": {"binary_data_output": "no"}},
        "binary_data_output must be true or false",
    ),
    "an output twice": ({**VALID, "outputs": [{"name": "output"}] * 2}, "repeated output 'output'"),
    "an output without a name": ({**VALID, "outputs": [{"name": ["a"]}]}, "unknown output"),
    "negative classes": (
        {**VALID, "outputs": [{"name": "output", "parameters": {"classification": -1}}]},
        "classification is -1, expected the number of classes",
    ),
    "classes": (
        {**VALID, "outputs": [{"name": "output", "parameters": {"classification": True}}]},
        "classification is True, expected the number of classes",
    ),
    "few bytes": (
        {
            "inputs": [
                {
                    "name": "x",
                    "shape": [1, 8, 8, 1],
                    "datatype": "FP32",
                    "parameters": {"binary_data_size": 256},
                }
            ]
        },
        "needs 256 bytes; binary_data_size is 256",
    ),
}


@pytest.mark.parametrize("name", INVALID)
def test_invalid_requests(name, client):
    body, error = INVALID[name]
    status, response = client.json("/v2/models/digits/infer", body)
    assert status == 400 and error in response["error"], response


def damaged(draw):
    """A request with a random change, as bytes."""
    data = bytearray(json.dumps(request(x=images(draw.randint(1, 2)))).encode())
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(data))
        new = draw.choices(b'0123456789{}[]",:-eE.nulltrue\xff', k=draw.randint(0, 2))
        data[at : at + draw.choice([0, 1, 1, 5, 300])] = bytes(new)
    return bytes(data)


def fuzz(port, digits, count, clients):
    """Valid requests get right answers among damaged ones; returns how many were answered."""

    def one(seed):
        draw, client, done = random.Random(seed), Client(port), 0
        for i in range(count // clients):
            if draw.random() < 0.5:
                x = images(draw.randint(1, 4), seed * 100_000 + i)
                equal(client.infer("digits", x=x), digits(x))
            else:
                body = damaged(draw)
                length = {"Inference-Header-Content-Length": str(draw.randint(0, 2 * len(body)))}
                headers = length if draw.random() < 0.3 else {}
                status, response = client.json("/v2/models/digits/infer", body, **headers)
                assert status in (200, 400) and (status == 200) == ("outputs" in response), response
            done += 1
        return done

    with concurrent.futures.ThreadPoolExecutor(clients) as pool:
        return sum(pool.map(one, range(clients)))


def test_random_requests(port, digits):
    assert fuzz(port, digits, 160, 4) == 160
    assert Client(port).json("/v2/health/ready")[0] == 200


@pytest.mark.exhaustive
def test_ten_thousand_requests(port, digits):
    assert fuzz(port, digits, 10_000, 16) == 10_000
    assert Client(port).json("/v2/health/ready")[0] == 200


def test_limits_of_the_body(port):
    path = "/v2/models/digits/infer"
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n"
    chunk = f"{LIMIT + 1:x}\r\n" + "x" * (LIMIT + 1)
    for rest in (
        f"Content-Length: {LIMIT + 1}\r\n\r\n",
        f"Transfer-Encoding: chunked\r\n\r\n{chunk}",
    ):
        with socket.create_connection(("127.0.0.1", port), 60) as connection:
            connection.sendall((head + rest).encode())
            answer = connection.recv(1000)
            assert answer.startswith(b"HTTP/1.1 413") and b"connection: close" in answer.lower()
    assert Client(port)(path, b"", Content_Encoding="gzip")[0] == 415
    assert Client(port)("/v2", Host="example.org")[0] == 400  # a name that resolves to this address


@pytest.mark.exhaustive
def test_text(client):
    """The streamed tokens are those of the model without a cache."""
    params, _ = GPT.init(jax.random.key(0), GPT.example())
    tokens, model = np.array([[1, 2, 3, 4, 5] + [0] * 11], np.int32), jax.jit(GPT)
    for i in range(5, 11):
        tokens[0, i] = model(params, tokens)[0, i - 1].argmax()
    want = tokens[0, 5:11].tolist()
    body = {"text_input": "bcdef", "max_tokens": 6, "temperature": 0}
    status, headers, content = client("/v2/models/gpt/generate_stream", body)
    assert status == 200 and headers["Content-Type"].startswith("text/event-stream")
    *tokens, last = [
        json.loads(event.removeprefix("data: ")) for event in content.decode().strip().split("\n\n")
    ]
    assert [event["token"] for event in tokens] == want and last["finished"]
    text = "".join("abcdefghijk"[i] for i in want)
    assert client.json("/v2/models/gpt/generate", {**body, "seed": 1})[1] == {
        "model_name": "gpt",
        "model_version": "1",
        "tokens": want,
        "text_output": text,
    }
    sampled = [
        client.json(
            "/v2/models/gpt/generate", {"tokens": [3], "seed": seed, "top_k": 3, "max_tokens": 5}
        )[1]
        for seed in (0, 0, 1, 2, 3)
    ]
    assert sampled[0] == sampled[1] and any(x != sampled[0] for x in sampled)


def test_texts_that_have_ended_make_room(client):
    for _ in range(Options().max_streams + 1):
        assert client.json("/v2/models/gpt/generate", {"tokens": [3], "max_tokens": 1})[0] == 200


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "body, error",
    [
        ({"text_input": "xyz"}, "the text contains 'x', which is not in the model's vocabulary"),
        ({"text_input": ""}, "expected text_input, or tokens: a list of at least one integer"),
        ({"tokens": [1, 99]}, "the token 99 is not in the vocabulary of 11"),
        ({"tokens": [1], "max_tokens": 0}, "max_tokens is 0, expected a number from 1 to 4096"),
        (
            {"tokens": [1] * 10, "max_tokens": 8},
            "the prompt and max_tokens have 18 tokens, expected at most 17",
        ),
        (
            {"tokens": [1], "temperature": "hot"},
            "temperature is hot, expected a number from 0 to 100",
        ),
        ({"tokens": [1], "temprature": 1}, "unknown field 'temprature'"),
        (
            {"tokens": [1], "stream": False},
            "stream is False, but the path is that of generate_stream, which streams",
        ),
        ({"tokens": [1], "id": 3}, "id must be a string"),
        ({"tokens": [1], "top_k": -1}, "top_k is -1, expected a number from 0 to"),
        (
            {"tokens": [1], "temperature": float("nan")},
            "temperature is nan, expected a number from 0 to 100",
        ),
    ],
)
def test_invalid_texts(client, body, error):
    status, response = client.json("/v2/models/gpt/generate_stream", {"max_tokens": 4, **body})
    assert status == 400 and error in response["error"]
    assert client.json("/v2/models/digits/generate", body)[0] == 404


@pytest.mark.exhaustive
def test_slow_clients_and_the_token(files):
    """Connections whose head or body does not arrive are closed; others are served meanwhile."""
    with serving(files / "digits.fnet", FNET_SERVE_TOKEN="a-long-secret") as (port, _):
        assert (
            Client(port)("/v2")[0]
            == Client(port, Authorization="Bearer a-long-secret-")("/v2")[0]
            == 401
        )
        assert Client(port)("/v2/health/live")[0] == Client(port)("/")[0] == 200
        client = Client(port, Authorization="Bearer a-long-secret")
        slow = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
        for i, connection in enumerate(slow):
            head = (
                b"POST /v2/models/digits/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: "
                b"100\r\n"
                b"Authorization: Bearer a-long-secret\r\n"
            )
            connection.sendall(head[:20] if i % 2 else head + b"\r\n{")
        assert not isinstance(client.infer("digits", x=images(1)), str)
        for i, connection in enumerate(slow):  # 10 seconds
            connection.settimeout(30)
            answer = connection.recv(1000)
            connection.close()
            assert answer == b"" if i % 2 else b"408" in answer
        assert not isinstance(Client(port, **client.headers).infer("digits", x=images(1)), str)


@pytest.mark.exhaustive
def test_sigterm_under_load(files, digits):
    """Every request on an open connection is answered, and the process ends with 0."""
    counts, errors, ended = [], [], threading.Event()

    def load(seed):
        client, x, count = Client(port), images(2, seed), 0
        want = digits(x)
        try:
            while True:
                status, headers, content = client("/v2/models/digits/infer", request(x=x))
                assert status == 200, content
                equal([np.array(json.loads(content)["outputs"][0]["data"]).reshape(2, 10)], want)
                count += 1
                if headers["Connection"] == "close":
                    counts.append(count)
                    return
                assert not ended.is_set()
        except Exception as error:
            errors.append(error)

    with serving(files / "digits.fnet") as (port, process):
        threads = [threading.Thread(target=load, args=(seed,)) for seed in range(16)]
        for thread in threads:
            thread.start()
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join()
        assert process.wait(60) == 0
        ended.set()
    assert not errors, errors
    assert len(counts) == 16 and min(counts) >= 1
    with pytest.raises(ConnectionRefusedError):
        Client(port)("/v2")
