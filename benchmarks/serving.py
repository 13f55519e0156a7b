"""Requests per second and latencies under load: `fnet serve`, FastAPI with onnxruntime, and direct
calls.

    python -m benchmarks.serving                      # MiniLM embeddings and ResNet-50, 1, 8 and 64 clients
    python -m benchmarks.serving --seconds=5 minilm

Each client sends one row, waits for the response, and sends the next row. A server and its clients
are processes on the same cores. The servers are measured one after the other. The weights are
random, which does not change the time. The FastAPI server receives and returns raw bytes, runs
onnxruntime in FastAPI's threads, and does not batch. "direct" calls the exported bundle in threads
of one process. Every response of a server is compared with the result of the bundle. This benchmark
needs `pip install -e '.[bench,serve,onnx]'`.
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import _harness
from fnet import export, models

CLIENTS, TIME = (1, 8, 64), 32
CODES = {"float32": "FP32", "int32": "INT32"}


def minilm():
    """MiniLM with mean pooling, for sentences of 32 tokens: the exported program, the name of the
    input, and input rows."""
    model = models.Bert(**models.Bert.PRESETS["minilm-l6"])
    tokens = jnp.zeros((1, TIME), jnp.int32)
    params, _ = model.init(jax.random.key(0), tokens)
    embed = lambda params, tokens: model(params, tokens).hidden.mean(1)
    rows = np.random.default_rng(0).integers(0, model.vocab_size, (16, 1, TIME)).astype(np.int32)
    program = export.program(embed, params, tokens=export.spec(f"b, {TIME}", "int32"))
    return program, "tokens", rows


def resnet50():
    model = models.ResNet(**models.ResNet.PRESETS["resnet50"])
    rows = np.random.default_rng(0).normal(size=(8, 1, 224, 224, 3)).astype(np.float32)
    params, state = model.init(jax.random.key(0), rows[0])
    return export.program(model, params, state, x=export.spec("b, 224, 224, 3")), "x", rows


MODELS = {"minilm": minilm, "resnet50": resnet50}


def write(program, path, name, row):
    program.save(path.with_suffix(".fnet"), tests={"predict": {name: row}})
    program.onnx(path.with_suffix(".onnx"), check=False)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--seconds", type=float, default=20, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--max-batch", type=int, default=16)
    parser.add_argument("--fastapi", nargs=2, metavar=("ONNX", "PORT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.fastapi:
        return fastapi_server(*args.fastapi)
    command = f"python -m benchmarks.serving --seconds={args.seconds:g} {' '.join(args.models)}"
    print(_harness.header(command, args.rounds, ("onnxruntime", "fastapi", "uvicorn")))
    print("| model | peer | clients | requests/s | p50 ms | p99 ms |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for model in args.models:
            path = Path(folder) / model
            program, name, rows = MODELS[model]()
            write(program, path, name, rows[0])
            bundle = export.load(path.with_suffix(".fnet"))
            want = [np.asarray(bundle(row)) for row in rows]
            peers = {
                "fnet serve": fnet_serve(path, args.max_batch, name, rows),
                "FastAPI + onnxruntime": fastapi(path, rows),
                "direct": contextlib.nullcontext((None, None)),
            }
            for peer, running in peers.items():
                with running as (port, requests):
                    for clients in CLIENTS:
                        figures = []
                        for _ in range(args.rounds):
                            if port is None:
                                times, wall = direct(bundle, rows, clients, args.seconds)
                            else:
                                times, wall = asyncio.run(
                                    load(port, requests, want, clients, args.seconds)
                                )
                            figures.append(
                                (
                                    len(times) / wall,
                                    *(1e3 * np.percentile(times, q) for q in (50, 99)),
                                )
                            )
                        cells = [f"{statistics.median(column):.3g}" for column in zip(*figures)]
                        print(f"| {model} | {peer} | {clients} | {' | '.join(cells)} |", flush=True)


@contextlib.contextmanager
def process(command, ready, **environment):
    """Starts a server, and yields its port."""
    started = subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
    )
    try:
        line = next(line for line in started.stdout if ready in line)
        threading.Thread(target=started.stdout.read, daemon=True).start()
        yield int(line.rsplit(":", 1)[1])
    finally:
        started.terminate()
        started.wait()


@contextlib.contextmanager
def fnet_serve(path, max_batch, name, rows):
    file = path.with_suffix(".fnet")
    options = ["--port=0", f"--max-batch={max_batch}", "--timeout=300"]
    with process(["-m", "fnet.cli", "serve", str(file), *options], "serving on") as port:
        yield port, [infer(path.name, {name: row}) for row in rows]


def infer(model, inputs):
    """The bytes of a request for a model of `fnet serve`."""
    tensors = [
        {
            "name": name,
            "shape": list(x.shape),
            "datatype": CODES[str(x.dtype)],
            "parameters": {"binary_data_size": x.nbytes},
        }
        for name, x in inputs.items()
    ]
    head = json.dumps({"inputs": tensors, "parameters": {"binary_data_output": True}}).encode()
    return http(
        f"/v2/models/{model}/infer",
        head + b"".join(x.tobytes() for x in inputs.values()),
        f"Inference-Header-Content-Length: {len(head)}\r\n",
    )


@contextlib.contextmanager
def fastapi(path, rows):
    with process(
        ["-m", "benchmarks.serving", "--fastapi", str(path.with_suffix(".onnx")), "0"], "fastapi on"
    ) as port:
        yield port, [http("/predict", row.tobytes()) for row in rows]


def fastapi_server(file, port):
    """Runs the FastAPI server, which serves a session of onnxruntime at one path."""
    import fastapi
    import onnxruntime
    import uvicorn

    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    (value,) = session.get_inputs()
    dtype, shape = (
        {"tensor(float)": np.float32, "tensor(int32)": np.int32}[value.type],
        [-1, *value.shape[1:]],
    )
    app = fastapi.FastAPI()

    @app.post("/predict")
    async def predict(request: fastapi.Request):
        x = np.frombuffer(await request.body(), dtype).reshape(shape)
        (y,) = await fastapi.concurrency.run_in_threadpool(session.run, None, {value.name: x})
        return fastapi.Response(y.tobytes(), media_type="application/octet-stream")

    class Server(uvicorn.Server):
        async def startup(self, sockets=None):
            await super().startup(sockets)
            print(f"fastapi on :{self.servers[0].sockets[0].getsockname()[1]}", flush=True)

    Server(uvicorn.Config(app, port=int(port), log_level="error", http="h11")).run()


def http(path, body, more=""):
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n{more}\r\n".encode()
        + body
    )


async def load(port, requests, want, clients, seconds):
    """Sends requests from several clients. Returns the seconds of each request, and the seconds of
    the complete measurement."""
    times, failures = [], []

    async def client(i):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
        while time.perf_counter() < end:
            i = (i + 1) % len(requests)
            start = time.perf_counter()
            writer.write(requests[i])
            await writer.drain()
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            body = await reader.readexactly(
                int(head.split("\r\ncontent-length: ")[1].split("\r\n")[0])
            )
            times.append(time.perf_counter() - start)
            if not head.startswith("http/1.1 200"):
                failures.append(head)
                break
            answer = np.frombuffer(body[len(body) - want[i].nbytes :], want[i].dtype).reshape(
                want[i].shape
            )
            if np.abs(answer - want[i]).max() > 1e-4 * np.abs(want[i]).max():
                failures.append(i)
        writer.close()

    end = time.perf_counter() + 1  # the first second warms up the server
    await asyncio.gather(*map(client, range(clients)))
    times.clear()
    start = time.perf_counter()
    end = start + seconds
    await asyncio.gather(*map(client, range(clients)))
    assert not failures, failures[:3]
    return times, time.perf_counter() - start


def direct(bundle, rows, clients, seconds):
    """Does the same as `load` without a server: threads of this process call the bundle."""
    times, start = [], time.perf_counter()

    def client(i):
        while time.perf_counter() < start + seconds:
            i = (i + 1) % len(rows)
            before = time.perf_counter()
            np.asarray(bundle(rows[i]))
            times.append(time.perf_counter() - before)

    threads = [threading.Thread(target=client, args=(i,)) for i in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return times, time.perf_counter() - start


if __name__ == "__main__":
    main()
