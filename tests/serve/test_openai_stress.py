"""Thousands of requests to one process: right answers, invalid requests, clients that leave, SIGTERM."""

import concurrent.futures
import http.client
import json
import random
import signal
import time
from pathlib import Path

import pytest
from servers import Client, serving

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

from texts import write_folder

from fnet import models

REQUESTS, CLIENTS, PROMPTS = 10_000, 8, 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stress") / "tiny"
    folder.mkdir()
    return folder


def prompts():
    draw = random.Random(0)
    words = ["the", " weather", " in", " city", " hello", " there", "é", "🎉"]
    return ["".join(draw.choices(words, k=draw.randint(1, 30))) for _ in range(PROMPTS)]


def wanted(model, params, tokenizer, texts):
    """The greedy continuation of each text, alone."""
    found = []
    for text in texts:
        tokens = [tokenizer.encode(text).tolist()]
        out = models.generate(
            model, params, tokens, max_tokens=20, temperature=0, stop=tokenizer.stop
        )
        count = int(out.lengths[0])
        found.append((tokenizer.decode(out.tokens[0, :count].tolist()), count))
    return found


def invalid(draw):
    return draw.choice(
        [
            {"temperature": 9},
            {"model": "other"},
            {"max_tokens": 5000},
            {"prompt": []},
            {"more": 1},
            {"n": "2"},
        ]
    )


def ask(port, number, texts, want):
    """Sends a request of a kind that its number decides, and says what was wrong, or None."""
    draw = random.Random(number)
    index = draw.randrange(PROMPTS)
    body = {"model": "tiny", "prompt": texts[index], "max_tokens": 20, "temperature": 0}
    kind = draw.random()
    if kind < 0.05:
        status, answer = Client(port).json("/v1/completions", body | invalid(draw))
        return None if status in (400, 404) and "message" in answer["error"] else answer
    if kind < 0.1:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("POST", "/v1/completions", json.dumps(body | {"stream": True}))
        if draw.random() < 0.5:
            connection.getresponse().read(30)
        connection.close()
        return None
    streams = kind < 0.5
    status, _, content = Client(port)("/v1/completions", body | {"stream": streams})
    if status != 200:
        return status, content
    if streams:
        frames = content.decode().split("\n\n")
        if frames[-2:] != ["data: [DONE]", ""]:
            return content
        events = [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]
        text = "".join(event["choices"][0]["text"] for event in events)
    else:
        answer = json.loads(content)
        text = answer["choices"][0]["text"]
        if answer["usage"]["completion_tokens"] != want[index][1]:
            return answer
    return None if text == want[index][0] else (texts[index], text, want[index])


def resident(process):
    """The memory of a process in MB."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith("VmRSS")]
    return int(line.split()[1]) / 1024


@pytest.mark.exhaustive
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_thousands_of_requests_get_their_answers_in_flat_memory(folder):
    model, params = write_folder(folder)
    tokenizer = models.read_tokenizer(folder)
    texts = prompts()
    want = wanted(model, params, tokenizer, texts)
    with serving(folder, "--context", 256, "--warm", 256, "--timeout", 120) as (port, process):
        with concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool:
            memory = []
            for part in range(4):
                numbers = range(part * REQUESTS // 4, (part + 1) * REQUESTS // 4)
                wrong = list(pool.map(lambda i: ask(port, i, texts, want), numbers))
                assert not [each for each in wrong if each is not None][:3]
                memory.append(resident(process))
            assert memory[-1] <= 1.05 * memory[1], memory
            numbers = Client(port)("/metrics")[2].decode()
            assert 'fnet_engine_active{model="tiny"} 0' in numbers
            assert 'fnet_engine_waiting{model="tiny"} 0' in numbers
            assert 'fnet_engine_finished_total{model="tiny",reason="error"} 0' in numbers
            late = [pool.submit(ask, port, 3 * REQUESTS + i, texts, want) for i in range(CLIENTS)]
            time.sleep(0.02)
            process.send_signal(signal.SIGTERM)
            assert not [each for each in (future.result() for future in late) if each is not None]
        assert process.wait(60) == 0
