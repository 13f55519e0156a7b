"""Structured output over HTTP: OpenAI's client, calls of tools that are forced, refusals, and other
requests meanwhile."""

import contextlib
import json
import re
import threading

import pytest
from servers import Client

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")
pytest.importorskip("llguidance")

from texts import running, write_folder

from fnet import models, serve
from fnet.serve._openai import _structured, _tools
from fnet.serve._openai._errors import Wrong
from fnet.serve._structured import _grammar, _vocabulary

pytestmark = pytest.mark.usefixtures("quickly")
HELLO = [{"role": "user", "content": "Hello"}]
POINT = {
    "type": "object",
    "properties": {
        "x": {"type": "integer", "minimum": 0, "maximum": 99},
        "ok": {"type": "boolean"},
    },
    "required": ["x", "ok"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "p", "schema": POINT, "strict": True}}


def tool(name, strict=True, **parameters):
    function = {"name": name, "strict": strict, "parameters": {**POINT, **parameters}}
    return {"type": "function", "function": function}


def small(name):
    """A tool whose description is short, as the context is."""
    function = {"name": name, "strict": True, "parameters": {"const": {"is": name}}}
    return {"type": "function", "function": function}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A model that was never trained."""
    folder = tmp_path_factory.mktemp("structured") / "tiny"
    folder.mkdir()
    write_folder(folder)
    app = serve.application([str(folder)])
    with running(app) as port:
        yield port, app.state.server.repository.languages["tiny"]


@pytest.fixture
def ask(server):
    def ask(path="/v1/chat/completions", **fields):
        asked = {"messages": HELLO} if "chat" in path else {"prompt": "Hello"}
        return Client(server[0]).json(path, {"model": "tiny", **asked, **fields})

    return ask


@pytest.fixture
def client(server):
    openai = pytest.importorskip("openai")
    url = f"http://127.0.0.1:{server[0]}/v1"
    with contextlib.closing(openai.OpenAI(base_url=url, api_key="none", max_retries=0)) as client:
        yield client


def is_point(text):
    point = json.loads(text)
    return list(point) == ["x", "ok"] and 0 <= point["x"] < 100 and type(point["ok"]) is bool


def test_openais_client_gets_what_the_schema_says(client):
    chat = client.chat.completions
    for seed in range(4):
        answer = chat.create(model="tiny", messages=HELLO, response_format=FORMAT, seed=seed)
        [choice] = answer.choices
        assert choice.finish_reason == "stop" and is_point(choice.message.content)
    stream = chat.create(model="tiny", messages=HELLO, response_format=FORMAT, stream=True, n=2)
    texts, ends = ["", ""], set()
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ends.add(choice.finish_reason)
    assert all(map(is_point, texts)) and ends == {None, "stop"}


def test_openais_client_reads_a_class_of_pydantic(client):
    pydantic = pytest.importorskip("pydantic")

    class Point(pydantic.BaseModel):
        x: int = pydantic.Field(ge=0, le=99)
        corner: tuple[bool, bool] | None

    answer = client.chat.completions.parse(model="tiny", messages=HELLO, response_format=Point)
    assert isinstance(answer.choices[0].message.parsed, Point)


def test_a_text_that_is_cut_off_has_the_reason_length(ask):
    status, answer = ask(response_format=FORMAT, max_tokens=3)
    assert status == 200 and answer["choices"][0]["finish_reason"] == "length"


def test_any_object_or_any_text(ask):
    status, answer = ask(response_format={"type": "json_object"}, max_tokens=200)
    [choice] = answer["choices"]
    assert status == 200 and choice["message"]["content"].startswith("{")
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(choice["message"]["content"]), dict)
    assert ask(response_format={"type": "text"}, max_tokens=2)[0] == 200


@pytest.mark.parametrize(
    "outputs,matches",
    [
        ({"choice": ["yes", "no"]}, lambda text: text in ("yes", "no")),
        ({"regex": r"\d{3}-é?"}, lambda text: re.fullmatch(r"\d{3}-é?", text)),
        ({"json": POINT}, is_point),
        ({"json": json.dumps(POINT)}, is_point),
        ({"grammar": 'start: "a" start "b" | "c"'}, lambda text: re.fullmatch("a*cb*", text)),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_structured_outputs_as_in_vllm(ask, path, outputs, matches):
    status, answer = ask(path, structured_outputs=outputs, max_tokens=200)
    assert status == 200, answer
    [choice] = answer["choices"]
    text = choice["message"]["content"] if "chat" in path else choice["text"]
    assert choice["finish_reason"] == "stop" and matches(text)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "b"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_can_be_forced(client, choice, stream):
    tools = [small("a"), small("b")]
    fields = {"model": "tiny", "messages": HELLO, "tools": tools, "tool_choice": choice}
    for seed in range(3):
        answer = client.chat.completions.create(
            **fields, seed=seed, parallel_tool_calls=False, stream=stream
        )
        if stream:
            deltas = [chunk.choices[0] for chunk in answer if chunk.choices]
            calls = [call for each in deltas for call in each.delta.tool_calls or ()]
            content, finish = (
                "".join(d.delta.content or "" for d in deltas),
                deltas[-1].finish_reason,
            )
        else:
            [got] = answer.choices
            calls, content, finish = got.message.tool_calls, got.message.content, got.finish_reason
        assert not content and finish == "tool_calls" and len(calls) == 1
        function = calls[0].function
        assert function.name in ("b", "a" if choice == "required" else "b")
        assert json.loads(function.arguments) == {"is": function.name}


WRONG = [
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"a": 1}}}},
        "response_format.json_schema.schema: #/a: the keyword 'a' is not supported",
        "response_format.json_schema.schema",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        "the field response_format.json_schema.name is missing",
        "response_format.json_schema.name",
    ),
    ({"response_format": {"type": "json_schema"}}, "response_format: expected {", "response_format"),
    (
        {"response_format": FORMAT, "structured_outputs": {"regex": "a"}},
        "structured_outputs: expected no response_format, too",
        "structured_outputs",
    ),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "expected one of json, json_object, regex", None),
    ({"structured_outputs": {"xml": "a"}}, "expected one of json, json_object, regex", None),
    ({"structured_outputs": {"regex": "(?=a)"}}, "lookahead is not supported", None),
    ({"structured_outputs": {"choice": "yes"}}, "expected a list of texts", None),
    ({"tools": [tool("a", properties={"x": {"not": {}}})]}, "tools: #/properties/x/not", "tools"),
    (
        {"tools": [tool("a")], "tool_choice": {"type": "function", "function": {"name": "b"}}},
        '{"type": "function", "function": {"name": one of a}}',
        "tool_choice",
    ),
    ({"tool_choice": "required"}, "tool_choice: expected tools, too", "tool_choice"),
    ({"logit_bias": {"280": 1}}, "a token of logit_bias must be an integer from 0 to 279", None),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {
            "type": "integer", "multipleOf": 10_000_019}}}},
        "response_format: it takes more than 2 seconds to compile",
        "response_format",
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    "fields,message,param", WRONG, ids=[message[:40] for _, message, _ in WRONG]
)
def test_what_is_wrong_is_said_in_openais_form(ask, fields, message, param):
    status, answer = ask(**fields)
    assert status == 400, answer
    assert message in answer["error"]["message"]
    assert param is None or answer["error"]["param"] == param


def test_biases_reach_the_engine(ask, server):
    token = int(server[1].tokenizer.encode("z")[0])
    status, answer = ask(logit_bias={str(token): 100}, max_tokens=4, temperature=0)
    assert status == 200 and answer["choices"][0]["message"]["content"] == "zzzz"


def test_others_are_answered_while_a_hostile_schema_is_tried(ask):
    schema = {"type": "integer", "multipleOf": 10_000_079}
    hostile = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    done, statuses = threading.Event(), []

    def attack():
        statuses.append(ask(response_format=hostile)[0])
        done.set()

    thread = threading.Thread(target=attack)
    thread.start()
    answered = 0
    while not done.is_set():
        assert ask(max_tokens=4)[0] == 200
        answered += not done.is_set()
    thread.join()
    assert statuses == [400] and answered >= 2


def test_too_many_that_wait_are_refused(ask, monkeypatch):
    from fnet.serve._openai import _routes

    monkeypatch.setattr(_routes, "_MOST_WAITING", 0)
    assert ask(response_format=FORMAT)[0] == 429
    assert ask(max_tokens=1)[0] == 200


def test_a_text_that_cannot_go_on_is_an_error_of_the_request(ask, monkeypatch):
    from fnet.serve._structured import _walk

    monkeypatch.setattr(_walk, "SLOWEST", -1)
    status, answer = ask(response_format=FORMAT)
    assert status == 400
    assert answer["error"]["message"].startswith("the text cannot go on: the next tokens took more")


BYTES = models.ByteTokenizer()
HERMES = _tools.form("tools <tool_call> arguments")
LLAMA = _tools.form("tools dictionary of argument name and its value")
MISTRAL = _tools.form("tools [TOOL_CALLS]")


def accepts(grammar, text):
    """Whether a text follows a grammar to an end."""
    walk, tokens = grammar.walk(257, [256]), BYTES.encode(text).tolist()
    for index, token in enumerate(tokens):
        row = walk.allowed(tokens[:index])
        if row is None or not row[token]:
            return False
    row = walk.allowed(tokens)
    return row is None or bool(row[256])


def of_chat(form, *tools, choice="auto", parallel=True, **fields):
    found = {"response_format": None, "structured_outputs": None, **fields}
    found["parallel_tool_calls"] = parallel
    return _structured.of_chat(BYTES, found, _tools.chosen(list(tools), choice), form)


ARGUMENTS = '{"x": 3, "ok": true}'
HERMES_CALL = f'<tool_call>\n{{"name": "a", "arguments": {ARGUMENTS}}}\n</tool_call>'
LLAMA_CALL = f'{{"name": "a", "parameters": {ARGUMENTS}}}'
MISTRAL_CALL = f'[TOOL_CALLS][{{"name": "a", "arguments": {ARGUMENTS}}}]'
CALLS = [
    (HERMES, HERMES_CALL, f"{HERMES_CALL}\n{HERMES_CALL}"),
    (LLAMA, LLAMA_CALL, f"{LLAMA_CALL}; {LLAMA_CALL}"),
    (MISTRAL, MISTRAL_CALL, f"{MISTRAL_CALL[:-1]}, {MISTRAL_CALL[13:]}"),
]


@pytest.mark.parametrize("form,call,two", CALLS, ids=["hermes", "llama", "mistral"])
def test_calls_have_the_form_of_the_template(form, call, two):
    wrong, other = call.replace("3", "300"), call.replace('"a"', '"c"')
    reader = form.reader()
    assert (reader.add(two)[1] + reader.end()[1])[1].name == "a"
    free = of_chat(form, tool("a"), tool("b"))  # strict, and no call is needed
    assert all(accepts(free, text) for text in ("", "Hello!\n<b>", call, two))
    assert not accepts(free, wrong) and not accepts(free, other)
    forced = of_chat(form, tool("a"), tool("b"), choice="required")
    assert accepts(forced, call) and accepts(forced, two)
    assert not any(accepts(forced, text) for text in ("", "Hello", wrong, other))
    one = of_chat(form, tool("a"), choice="required", parallel=False)
    assert accepts(one, call) and not accepts(one, two)
    named = {"type": "function", "function": {"name": "b"}}
    second = of_chat(form, tool("a"), tool("b"), choice=named)
    assert not accepts(second, call) and accepts(second, call.replace('"a"', '"b"'))
    loose = of_chat(form, tool("a", strict=False), choice="required")
    assert accepts(loose, wrong) and not accepts(loose, "Hello")
    assert of_chat(form, tool("a", strict=False)) is None
    both = of_chat(form, tool("a", strict=False), response_format=FORMAT)
    assert accepts(both, ARGUMENTS) and accepts(both, wrong) and not accepts(both, "Hello")


def test_text_before_a_call_is_free():
    free = of_chat(HERMES, tool("a"))
    assert accepts(free, f"I look it up. <tool> {HERMES_CALL}")
    assert not accepts(free, "I look it up. <tool_call>nothing</tool_call>")


def test_the_special_token_of_a_form_comes_first(monkeypatch):
    known = _vocabulary.vocabulary(BYTES)
    rules = _structured._calls(
        MISTRAL, _tools.chosen([tool("a")], "required"), True, "", {"[TOOL_CALLS]": 7}
    )
    row = _grammar.compiled(rules, known).allowed([])
    assert row.nonzero()[0].tolist() == [7]


def test_grammars_and_tools_do_not_go_together():
    with pytest.raises(Wrong, match="a grammar and tools do not go together"):
        of_chat(HERMES, tool("a"), structured_outputs={"grammar": 'start: "a"'})


def test_a_missing_library_is_a_refusal(ask, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(Wrong, match="pip install llguidance"):
        _structured.of_completion(models.ByteTokenizer(), {"structured_outputs": {"choice": ["a"]}})
