"""Text that is released while tokens arrive, calls of tools in it, and fields that are read."""

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fnet import models
from fnet.serve._openai import _fields, _tools
from fnet.serve._openai._errors import Wrong
from fnet.serve._openai._text import Text

sys.path.append(str(Path(__file__).parents[1] / "reference"))
from chat_templates import TEMPLATES

BYTES = models.ByteTokenizer()


def streamed(tokenizer, tokens, stop=(), prompt=()):
    """(the released text, its pieces, the Text)."""
    text, pieces = Text(tokenizer, prompt, stop), []
    for token in tokens:
        pieces.append(text.add(int(token)))
        if text.stopped:
            break
    pieces.append(text.end())
    return "".join(pieces), pieces, text


def cut(text, stop):
    """The text before the stop string that is completed first, by trying every end."""
    for end in range(len(text) + 1):
        found = [each for each in stop if text[:end].endswith(each)]
        if found:
            return text[: end - max(map(len, found))]
    return text


@settings(deadline=None, max_examples=200)
@given(
    st.text("aβ🎉b", max_size=12), st.lists(st.text("aβ🎉b", min_size=1, max_size=4), max_size=3)
)
def test_text_in_bytes_is_cut_before_its_first_stop_string(text, stop):
    released, _, _ = streamed(BYTES, BYTES.encode(text), stop, prompt=BYTES.encode("β"))
    assert released == cut(text, stop)


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=20))
def test_bytes_that_are_no_text_are_those_of_the_whole(data):
    """No byte is lost, whatever the model writes."""
    assert streamed(BYTES, data)[0] == data.decode(errors="replace")


def test_garbage_does_not_hold_text_back_for_ever():
    _, pieces, _ = streamed(BYTES, b"\xff" * 100)
    assert len(pieces[64]) == 65 and not any(pieces[:64])


def test_what_may_become_a_stop_string_is_held_back():
    _, pieces, text = streamed(BYTES, b"a ST ok", ["STOP"])
    assert pieces == ["a", " ", "", "", "ST ", "o", "k", ""]
    assert text.starts == [0, 1, 2, 3, 4, 5, 6]
    released, _, text = streamed(BYTES, "aé🎉".encode())
    assert text.starts == [0, 1, 1, 2, 2, 2, 2] and released == "aé🎉"


def test_a_space_before_a_word_stays_after_a_prompt():
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"▁to": 0, "▁be": 1}, unk_token="▁to"))
    words.decoder = tokenizers.decoders.Metaspace()
    assert words.decode([0]) == "to"
    assert streamed(words, [1, 0], prompt=[0])[0] == " be to"


def test_a_long_text_costs_the_same_for_each_token():
    """Decoding looks at a window, not at the whole text."""
    longest = 0

    class Counting:
        def decode(self, tokens):
            nonlocal longest
            longest = max(longest, len(tokens))
            return BYTES.decode(tokens)

    streamed(Counting(), BYTES.encode("ab🎉" * 100), prompt=BYTES.encode("x" * 100))
    assert longest <= 12


CALL = '{"name": "weather", "arguments": {"city": "Köln"}}'
READ = [_tools.Call("weather", '{"city": "Köln"}')]
OTHER = '{"name": "time", "parameters": {}}'


def read(form, text, size):
    """(content, calls) of a text that comes in pieces of a size."""
    reader, content, calls = form(), "", []
    parts = [reader.add(text[i : i + size]) for i in range(0, len(text), size)]
    for more, found in [*parts, reader.end()]:
        content, calls = content + more, calls + found
    return content, calls


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    "form,text,content,calls",
    [
        (_tools.Tagged, f"Wait.\n<tool_call>\n{CALL}\n</tool_call>", "Wait.", READ),
        (
            _tools.Tagged,
            f"<tool_call>{CALL}</tool_call>\n\n<tool_call>{CALL}</tool_call>",
            "",
            READ * 2,
        ),
        (_tools.Tagged, f"<tool_call>{CALL}</tool_call> Done.", "Done.", READ),
        (_tools.Tagged, "a <tool_call>{1}</tool_call> b", "a<tool_call>{1}</tool_call> b", []),
        (_tools.Tagged, f"a<tool_call>{CALL}", f"a<tool_call>{CALL}", []),
        (_tools.Tagged, "1 < 2 <tool", "1 < 2 <tool", []),
        (_tools.Tagged, " a  ", " a  ", []),
        (_tools.Tagged, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', None, []),
        (_tools.Whole, CALL, "", READ),
        (_tools.Whole, f"\n{CALL}; {OTHER}", "", [*READ, _tools.Call("time", "{}")]),
        (_tools.Whole, f"[TOOL_CALLS][{CALL}]", "", READ),
        (_tools.Whole, f"[{CALL}, {OTHER}]", "", [*READ, _tools.Call("time", "{}")]),
        (_tools.Whole, f"No: {CALL}", f"No: {CALL}", []),
        (_tools.Whole, '{"name": 3}', '{"name": 3}', []),
        (_tools.Whole, "{" * 5000, "{" * 5000, []),
        (_tools.Plain, CALL, CALL, []),
    ],
)
def test_calls_are_read_however_the_text_is_divided(form, text, content, calls, size):
    assert read(form, text, size) == (text if content is None else content, calls)


LLAMA = (
    "{% if tools %}Respond in the format "
    '{"name": function name, "parameters": dictionary of argument name and its value}.{% endif %}'
)


def test_the_form_of_calls_is_known_by_the_template():
    assert _tools.form(TEMPLATES["qwen-3"][0]).reader is _tools.Tagged
    assert _tools.form(LLAMA).reader is _tools.Whole
    assert _tools.form("{{ tools }}[TOOL_CALLS] arguments").reader is _tools.Whole
    for other in ("<tool_call> arguments <function=f>", "[TOOL_CALLS]f[ARGS]{}", "<tools>", ""):
        with pytest.raises(Wrong, match="of no known form, so they cannot be read; known are JSON"):
            _tools.form("{{ tools }}" + other)
    with pytest.raises(Wrong, match="has no tools"):
        _tools.form(TEMPLATES["chatml"][0])


def test_a_call_has_an_id_that_templates_of_mistral_accept():
    content = READ[0].content(1)
    assert content["index"] == 1 and len(content["id"]) == 9 and content["id"].isalnum()
    assert json.loads(content["function"]["arguments"]) == {"city": "Köln"}


@pytest.mark.parametrize(
    "value,error",
    [
        (True, "expected a number"),
        (float("nan"), "expected a number"),
        (float("inf"), "expected a number"),
        ("1", "expected a number"),
        ([1], "expected a number"),
    ],
)
def test_numbers_are_numbers(value, error):
    with pytest.raises(ValueError, match=error):
        _fields.number(0, 2)(value)
    assert _fields.number(0, 2)(1) == 1.0


@pytest.mark.parametrize(
    "value,texts",
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ([1, True], None),
        ([[1], "a"], [[1], "a"]),
        ([[-1]], None),
        ([[1 << 31]], None),
        ([], None),
        (None, None),
        (["a", ["b"]], None),
    ],
)
def test_prompts_have_four_forms(value, texts):
    if texts is not None:
        assert _fields.token_lists(value, 4) == texts
        return
    with pytest.raises(ValueError, match="expected a string, a list of tokens, or at most 4"):
        _fields.token_lists(value, 4)


def test_every_field_of_openais_client_is_used_irrelevant_or_refused():
    """A field that a later client adds fails here, and is then an error with a name."""
    pytest.importorskip("openai")
    from openai.types import completion_create_params, embedding_create_params
    from openai.types.chat import completion_create_params as chat_create_params

    for table, theirs in (
        (_fields.CHAT, chat_create_params.CompletionCreateParamsBase),
        (_fields.COMPLETIONS, completion_create_params.CompletionCreateParamsBase),
        (_fields.EMBEDDINGS, embedding_create_params.EmbeddingCreateParams),
    ):
        lacking = set(theirs.__annotations__) - set(table.fields) - table.irrelevant
        assert not lacking, lacking
