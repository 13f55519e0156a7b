"""OpenAI's API: bytes, OpenAI's own client, fields, errors and the end of a connection, with an
engine whose texts are known."""

import contextlib
import http.client
import json
import time

import numpy as np
import pytest
from servers import Client

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

from texts import END, Script, running, write_folder

from fnet import models, serve

pytestmark = pytest.mark.usefixtures("quickly")
HELLO = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


class Served:
    """A server whose engine says what it is told."""

    def __init__(self, port, language):
        self.port, self.language, self.client = port, language, Client(port)
        self.tokenizer = language.tokenizer
        self.closing = contextlib.ExitStack()

    def close(self):
        self.closing.close()

    def say(self, *texts):
        self.language.engine = Script(self.tokenizer, *texts)
        return self.language.engine

    def chat(self, **fields):
        return self.client.json(
            "/v1/chat/completions", {"model": "tiny", "messages": HELLO, **fields}
        )

    def complete(self, **fields):
        return self.client.json("/v1/completions", {"model": "tiny", "prompt": "Hello", **fields})

    def events(self, path="/v1/chat/completions", **fields):
        """The events of a stream, whose bytes are checked."""
        asked = {"messages": HELLO} if "chat" in path else {"prompt": "Hello"}
        body = {"model": "tiny", "stream": True, **asked, **fields}
        status, headers, content = self.client(path, body)
        assert status == 200, content
        assert headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert content.endswith(b"}\n\ndata: [DONE]\n\n")
        frames = content.decode().removesuffix("\n\n").split("\n\n")
        assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames)
        return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-1]]

    def openai(self, api_key="none"):
        openai = pytest.importorskip("openai")
        url = f"http://127.0.0.1:{self.port}/v1"
        client = openai.OpenAI(base_url=url, api_key=api_key, max_retries=0)
        return self.closing.enter_context(client)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("openai") / "tiny"
    folder.mkdir()
    write_folder(folder)
    app = serve.application([str(folder)])
    with running(app) as port:
        language = app.state.server.repository.languages["tiny"]
        engine = language.engine
        with contextlib.closing(Served(port, language)) as served:
            yield served
        language.engine = engine


def test_a_whole_answer_has_the_fields_of_openai(served):
    served.say("Good day.")
    status, answer = served.chat()
    assert status == 200
    assert answer["object"] == "chat.completion" and answer["model"] == "tiny"
    assert answer["id"].startswith("chatcmpl-") and abs(answer["created"] - time.time()) < 60
    message = {"role": "assistant", "content": "Good day.", "refusal": None}
    assert answer["choices"] == [
        {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    ]
    tokens = len(served.tokenizer.encode("Good day."))
    prompt = len(served.tokenizer.encode("<|user|>Hello<|assistant|>"))
    assert answer["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": tokens,
        "total_tokens": prompt + tokens,
        "prompt_tokens_details": {"cached_tokens": 3},
    }


def test_the_bytes_of_a_stream(served):
    served.say("Good day.")
    events = served.events(stream_options={"include_usage": True})
    assert len({event["id"] for event in events}) == 1
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert all(event["usage"] is None for event in events[:-1])
    first, *deltas, last = (event["choices"][0] for event in events[:-1])
    assert first["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert "".join(choice["delta"]["content"] for choice in deltas) == "Good day."
    assert last["delta"] == {} and last["finish_reason"] == "stop"
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 9
    assert all("usage" not in event for event in served.events())


def test_the_bytes_of_a_stream_of_a_completion(served):
    served.say("Good day.", "Hi!")
    events = served.events("/v1/completions", prompt=["a", "b"], echo=True)
    assert {event["object"] for event in events} == {"text_completion"}
    texts = ["", ""]
    for event in events:
        [choice] = event["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == ["aGood day.", "bHi!"]
    ends = [e["choices"][0]["finish_reason"] for e in events if e["choices"][0]["finish_reason"]]
    assert ends == ["stop", "stop"]


def test_openais_client_reads_whole_answers_and_streams(served):
    served.say("Good day.")
    client = served.openai()
    answer = client.chat.completions.create(model="tiny", messages=HELLO, seed=3)
    assert answer.choices[0].message.content == "Good day."
    stream = client.chat.completions.create(
        model="tiny", messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    texts = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(texts) == "Good day."
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens == 9
    text = client.completions.create(model="tiny", prompt="Hello", logprobs=1).choices[0]
    assert text.text == "Good day." and "".join(text.logprobs.tokens) == "Good day."
    pieces = client.completions.create(model="tiny", prompt="Hello", stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == "Good day."
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "fnet"


def test_openais_client_sees_errors_as_its_own(served):
    openai = pytest.importorskip("openai")
    client = served.openai()
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-4o", messages=HELLO)
    assert caught.value.code == "model_not_found" and caught.value.param == "model"
    with pytest.raises(openai.BadRequestError, match="temperature: expected a number from 0 to 2"):
        client.chat.completions.create(model="tiny", messages=HELLO, temperature=3)
    served.say("Good day.").full = True
    with pytest.raises(openai.RateLimitError, match="3 requests wait; try again later"):
        client.chat.completions.create(model="tiny", messages=HELLO, stream=True)


def test_a_full_queue_is_429_with_retry_after(served):
    served.say("Good day.").full = True
    body = {"model": "tiny", "messages": HELLO}
    status, headers, content = served.client("/v1/chat/completions", body)
    assert status == 429 and headers["Retry-After"] == "1"
    assert json.loads(content)["error"]["type"] == "rate_limit_error"


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_end_the_text_wherever_tokens_divide_them(served, stream):
    engine = served.say("the weather STOPPED here", "no such word: STO", "häSTOP")
    fields = {"stop": ["STOP", "never"], "n": 3}
    if stream:
        texts, ends = [""] * 3, {}
        for event in served.events(**fields):
            [choice] = event["choices"]
            texts[choice["index"]] += choice["delta"].get("content", "")
            ends[choice["index"]] = choice["finish_reason"]
        assert set(ends.values()) == {"stop"}
    else:
        choices = served.chat(**fields)[1]["choices"]
        texts = [choice["message"]["content"] for choice in choices]
        assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert texts == ["the weather ", "no such word: STO", "hä"]
    assert engine.requests[0].cancelled.is_set() and engine.requests[2].cancelled.is_set()


def test_characters_of_several_tokens_arrive_whole(served):
    served.say("Grüße 🎉 日本")
    contents = [event["choices"][0]["delta"].get("content", "") for event in served.events()]
    assert "".join(contents) == "Grüße 🎉 日本" and "\ufffd" not in "".join(contents)
    assert len([each for each in contents if each]) < 15


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_have_the_bytes_of_the_text(served, stream):
    served.say("ü the end")
    fields = {"logprobs": True, "top_logprobs": 2, "stop": "end"}
    if stream:
        held = [event["choices"][0]["logprobs"] for event in served.events(**fields)]
        entries = [entry for each in held if each for entry in each["content"]]
    else:
        entries = served.chat(**fields)[1]["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == "ü the "
    first = entries[0]
    assert first["logprob"] == -0.5 and first["token"] == "\ufffd"
    assert first["top_logprobs"][0] == {key: first[key] for key in ("token", "logprob", "bytes")}
    special = {"token": END, "logprob": -9999.0, "bytes": list(END.encode())}
    assert first["top_logprobs"][1] == special


def test_log_probabilities_of_a_completion(served):
    served.say("a bü c")
    choice = served.complete(logprobs=1)[1]["choices"][0]["logprobs"]
    assert choice["text_offset"] == [0, 1, 2, 3, 3, 4, 5]
    assert choice["tokens"][:3] == ["a", " ", "b"]
    assert choice["token_logprobs"] == [-0.5] * 7
    assert choice["top_logprobs"][0] == {"a": -0.5}


def test_options_reach_the_engine(served):
    engine = served.say("Good day.")
    served.chat(
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.5,
        seed=11,
        n=2,
        max_completion_tokens=12,
        user="me",
    )
    first, second = (request.options for request in engine.requests)
    callback = first.pop("callback")
    assert callable(callback)
    assert first == {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "seed": 11,
        "max_tokens": 12,
        "log_probs": 0,
        "adapter": None,
    }
    assert second["seed"] not in (11, 12)
    served.chat(seed=11, n=2)
    assert engine.requests[3].options["seed"] == second["seed"]
    assert engine.requests[3].options["top_p"] is None
    prompt = len(served.tokenizer.encode("<|user|>Hello<|assistant|>"))
    assert engine.requests[3].options["max_tokens"] == 512 - prompt
    assert served.complete(prompt="x", max_tokens=5)[0] == 200
    assert engine.requests[4].options["max_tokens"] == 5
    assert served.complete(prompt="x")[0] == 200
    assert engine.requests[5].options["max_tokens"] == 16


def test_messages_reach_the_template_as_it_prints_them(served):
    engine = served.say("Good day.")
    call = {"id": "abc", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    status, answer = served.chat(
        messages=[
            {"role": "developer", "content": "Be kind."},
            {
                "role": "user",
                "content": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}],
            },
            {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
            {"role": "tool", "content": "4", "tool_call_id": "abc"},
        ],
        chat_template_kwargs={"style": "briefly"},
    )
    assert status == 200, answer
    assert served.tokenizer.decode(engine.requests[0].prompt) == (
        '<|system|>Be kind.AB<tool_call>{"a": 1}</tool_call><|tool|>4briefly'
    )


WRONG = [
    (
        {"temperature": "hot"},
        "temperature: expected a number from 0 to 2; got 'hot'",
        "temperature",
    ),
    ({"temprature": 1}, "unknown field 'temprature'; did you mean 'temperature'?", "temprature"),
    ({"n": 0}, "n: expected an integer from 1 to 128; got 0", "n"),
    ({"n": True}, "n: expected an integer from 1 to 128; got True", "n"),
    ({"stop": ""}, "stop: expected a string or at most 16 strings", "stop"),
    ({"stop": ["a"] * 17}, "stop: expected a string or at most 16 strings", "stop"),
    ({"max_tokens": 512}, "6 tokens and 512 to generate are more than this model's", "messages"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "contradict each other", "max_tokens"),
    ({"messages": []}, "messages: expected a list of at least one message", "messages"),
    ({"messages": None}, "the field messages is missing", "messages"),
    ({"messages": [{"role": "critic", "content": "No"}]}, "with a role among", "messages[0]"),
    ({"messages": [{"role": "user"}]}, "messages[0].content: expected text", "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "expected parts of the type 'text'",
        "messages[0].content",
    ),
    (
        {"messages": [{"role": "user", "content": "a", "mood": 1}]},
        "unknown field messages[0].'mood'",
        "messages[0].mood",
    ),
    ({"response_format": {"type": "xml"}}, "response_format: expected {", "response_format"),
    ({"logit_bias": {"5": 101}}, "logit_bias: expected a number from -100 to 100", "logit_bias"),
    ({"logit_bias": {"a": 1}}, 'expected tokens as names, such as {"50256"', "logit_bias"),
    ({"store": True}, "store: this server keeps nothing", "store"),
    ({"functions": []}, "functions have been replaced by tools", "functions"),
    ({"top_logprobs": 2}, "top_logprobs: expected logprobs as true, too", "top_logprobs"),
    ({"stream_options": {}}, "stream_options: expected stream as true, too", "stream_options"),
    ({"stream": True, "stream_options": {"x": 1}}, "unknown field stream_options.'x'", None),
    ({"chat_template_kwargs": {"mood": 1}}, "has no variable 'mood'", "chat_template_kwargs"),
    ({"reasoning_effort": "low"}, "no variable 'reasoning_effort'", "reasoning_effort"),
    ({"tools": [{"type": "search"}]}, "tools[0]: expected", "tools"),
    (
        {"tools": [TOOL], "tool_choice": "any"},
        "tool_choice: expected 'auto', 'none'",
        "tool_choice",
    ),
    ({"model": None}, "model: expected the id of a model", "model"),
]


@pytest.mark.parametrize("fields,message,param", WRONG, ids=[next(iter(w[0])) for w in WRONG])
def test_what_is_wrong_is_said_in_openais_form(served, fields, message, param):
    served.say("Good day.")
    status, answer = served.chat(**fields)
    error = answer["error"]
    assert status == 400 and message in error["message"], answer
    assert error["type"] == "invalid_request_error" and set(error) == {
        "message",
        "type",
        "param",
        "code",
    }
    assert param is None or error["param"] == param


@pytest.mark.parametrize(
    "fields,message",
    [
        ({"prompt": ""}, "none of them empty"),
        ({"prompt": [[]]}, "none of them empty"),
        ({"prompt": ["a"] * 129}, "at most 128"),
        ({"prompt": ["a"] * 100, "n": 2}, "are 200 texts, expected at most 128"),
        ({"prompt": {"a": 1}}, "expected a string, a list of tokens"),
        ({"best_of": 3}, "best_of: this server returns all texts"),
        ({"echo": True, "logprobs": 1}, "log-probabilities of a prompt are not computed"),
        ({"suffix": "end"}, "text before a suffix is not supported"),
        ({"prompt": "\ud800"}, "prompt: "),
    ],
)
def test_what_is_wrong_with_a_completion(served, fields, message):
    served.say("Good day.")
    status, answer = served.complete(**fields)
    assert status == 400 and message in answer["error"]["message"], answer


def test_paths_and_bodies_that_are_wrong_have_errors_in_openais_form(served):
    client = served.client
    for path, body, status in (
        ("/v1/chat", {}, 404),
        ("/v1/chat/completions", None, 405),
        ("/v1/chat/completions", "{", 400),
        ("/v1/chat/completions", "[]", 400),
        ("/v1/models/other", None, 404),
        ("/v1/embeddings", {"model": "tiny", "input": "a"}, 400),
    ):
        got, answer = client.json(path, body)
        assert got == status and answer["error"]["type"] == "invalid_request_error", answer
    assert (
        "generates texts"
        in client.json("/v1/embeddings", {"model": "tiny", "input": "a"})[1]["error"]["message"]
    )
    assert client.json("/v2/models/tiny") == (404, {"error": "there is no model 'tiny'"})


CALLS = 'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'


def test_calls_of_tools_are_read(served):
    engine = served.say(CALLS + "\n" + CALLS)
    fields = {"tools": [TOOL], "max_tokens": 200, "tool_choice": "auto"}
    choice = served.chat(**fields)[1]["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me see.Let me see."
    first, second = choice["message"]["tool_calls"]
    assert first["function"] == {"name": "weather", "arguments": '{"city": "Köln"}'}
    assert first["id"] != second["id"] and first["type"] == "function"
    assert "weather" in served.tokenizer.decode(engine.requests[0].prompt)
    single = served.chat(**fields, parallel_tool_calls=False)[1]["choices"][0]
    assert len(single["message"]["tool_calls"]) == 1 and single["finish_reason"] == "tool_calls"
    assert engine.requests[1].cancelled.is_set()


def test_calls_of_tools_are_streamed_to_openais_client(served):
    served.say(CALLS)
    client = served.openai()
    stream = client.chat.completions.create(
        model="tiny", messages=HELLO, tools=[TOOL], stream=True, max_tokens=100
    )
    content, calls, reason = "", [], None
    for chunk in stream:
        [choice] = chunk.choices
        content += choice.delta.content or ""
        calls += choice.delta.tool_calls or []
        reason = choice.finish_reason or reason
    assert content == "Let me see." and reason == "tool_calls"
    assert calls[0].index == 0 and calls[0].function.name == "weather"
    assert json.loads(calls[0].function.arguments) == {"city": "Köln"}
    answer = client.chat.completions.create(
        model="tiny", messages=HELLO, tools=[TOOL], max_tokens=100
    )
    message = answer.choices[0].message
    reply = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    again = client.chat.completions.create(
        model="tiny", messages=[*HELLO, message.model_dump(), reply], tools=[TOOL], max_tokens=9
    )
    assert again.choices[0].finish_reason == "length"


def test_without_tools_a_call_is_text(served):
    engine = served.say(CALLS)
    for fields in ({}, {"tools": [TOOL], "tool_choice": "none"}, {"tools": []}):
        choice = served.chat(max_tokens=100, **fields)[1]["choices"][0]
        assert choice["message"]["content"] == CALLS and "tool_calls" not in choice["message"]
    assert "weather" not in served.tokenizer.decode(engine.requests[1].prompt)


@contextlib.contextmanager
def template(served, source):
    held = served.tokenizer.chat_template
    served.tokenizer.chat_template = None if source is None else models.ChatTemplate(source)
    yield
    served.tokenizer.chat_template = held


@pytest.mark.parametrize(
    "source,message",
    [
        ("{{ messages[0].content }}", "this model's chat template has no tools"),
        ("{{ tools }} <tool_call><function=name> arguments", "are of no known form"),
        (None, "has no chat template"),
    ],
)
def test_models_that_cannot_call_tools_say_so(served, source, message):
    served.say("Good day.")
    with template(served, source):
        status, answer = served.chat(tools=[TOOL])
    assert status == 400 and message in answer["error"]["message"]


def test_a_template_that_rejects_messages_is_an_error_of_the_request(served):
    served.say("Good day.")
    with template(served, "{{ raise_exception('Roles must alternate') }}"):
        status, answer = served.chat()
    assert status == 400 and "Roles must alternate" in answer["error"]["message"]
    with template(served, "{{ messages.__class__ }}{{ messages[0].content.__init__.__globals__ }}"):
        status, answer = served.chat()
    assert status == 400 and answer["error"]["param"] == "messages"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_its_texts(served, stream):
    engine = served.say("Good day.", "Hello there")
    if not stream:
        engine.may_speak.clear()
    connection = http.client.HTTPConnection("127.0.0.1", served.port)
    body = {"model": "tiny", "messages": HELLO, "stream": stream, "n": 2}
    engine.said[1] = engine.said[1] * 5000
    connection.request("POST", "/v1/chat/completions", json.dumps(body))
    if stream:
        connection.getresponse().read(10)
    while len(engine.requests) < 2:
        time.sleep(0.01)
    connection.sock.close()
    connection.close()
    assert engine.requests[1].cancelled.wait(10)
    engine.may_speak.set()
    assert served.chat()[0] == 200


def test_an_engine_that_fails_is_an_error_before_and_in_a_stream(served):
    served.say("Good day.").fails_after = 0
    status, answer = served.chat()
    assert status == 500 and answer["error"]["type"] == "server_error"
    assert answer["error"]["message"] == "the computation failed: ValueError"
    body = {"model": "tiny", "messages": HELLO, "stream": True}
    assert served.client("/v1/chat/completions", body)[0] == 500
    served.say("Good day.").fails_after = 4
    status, _, content = served.client("/v1/chat/completions", body)
    *_, last, end = content.decode().split("\n\n")
    assert status == 200 and end == "" and json.loads(last.removeprefix("data: "))["error"]
    openai = pytest.importorskip("openai")
    with pytest.raises(openai.APIError, match="the computation failed"):
        list(served.openai().chat.completions.create(model="tiny", messages=HELLO, stream=True))


def test_a_token_is_the_api_key(tmp_path):
    openai = pytest.importorskip("openai")
    write_folder(tmp_path)
    app = serve.application([f"tiny={tmp_path}"], serve.Options(token="correct-horse"))
    language = app.state.server.repository.languages["tiny"]
    with running(app) as port, contextlib.closing(Served(port, language)) as served:
        with pytest.raises(openai.AuthenticationError, match="Bearer TOKEN"):
            served.openai().models.list()
        right = served.openai("correct-horse")
        assert [model.id for model in right.models.list()] == ["tiny"]
        answer = right.chat.completions.create(model="tiny", messages=HELLO, max_tokens=3)
        assert answer.usage.completion_tokens <= 3


def test_seeds_are_reproducible_numbers(served):
    engine = served.say("Good day.")
    for seed in (-5, 1 << 62, None):
        served.chat(seed=seed)
    seeds = [request.options["seed"] for request in engine.requests]
    assert all(0 <= seed < 1 << 63 for seed in seeds) and len(set(seeds)) == 3
    assert np.unique(seeds).size == 3
