"""Chat templates against texts rendered by transformers (tests/reference/verify_chat.py), their
limits, and `chat`."""

import builtins
import datetime
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fnet import models

REFERENCE = pathlib.Path(__file__).parents[1] / "reference"
sys.path.insert(0, str(REFERENCE))
from chat_templates import CONVERSATIONS, DATE, TEMPLATES  # noqa: E402

TEXTS = json.loads((REFERENCE / "chat.json").read_text(encoding="utf-8"))
USER = [{"role": "user", "content": "Hello"}]
SIMPLE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def write(folder, template, **fields):
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, **fields}))
    (folder / "characters.json").write_text('"abc"')
    return folder


@pytest.mark.quick_cases(7)
@pytest.mark.parametrize("style", TEMPLATES)
def test_texts_equal_those_of_transformers(style, tmp_path):
    template, tokens = TEMPLATES[style]
    write(
        tmp_path, template, **{name: token and {"content": token} for name, token in tokens.items()}
    )
    read = models.ChatTemplate.read(tmp_path)
    assert set(TEXTS[style]) == set(CONVERSATIONS)
    for name, (messages, options) in CONVERSATIONS.items():
        want = TEXTS[style][name]
        if want is None:
            with pytest.raises(
                ValueError, match=r"tokenizer_config\.json, chat template|continue_final_message"
            ):
                read.render(messages, **DATE, **options)
        else:
            before = json.dumps(messages)
            assert read.render(messages, **DATE, **options) == want, name
            assert json.dumps(messages) == before


def test_templates_that_reject_messages_say_why():
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    with pytest.raises(
        ValueError,
        match=r"^ChatTemplate, chat template: rejects these messages: System role not supp",
    ):
        models.ChatTemplate(TEMPLATES["gemma"][0], **tokens).render(
            [{"role": "system", "content": "a"}, *USER]
        )
    with pytest.raises(
        ValueError, match=r"rejects these messages: Only user, .* are supported; got critic"
    ):
        models.ChatTemplate(TEMPLATES["mistral"][0], **tokens).render(
            [{"role": "critic", "content": "a"}]
        )


CONTINUED = [*USER, {"role": "assistant", "content": "It is "}]


@pytest.mark.parametrize(
    ("template", "options", "text"),
    [
        (SIMPLE, {}, "user: Hello\nassistant: It is "),
        (SIMPLE.replace("m.content", "m.content | trim"), {}, "user: Hello\nassistant: It is"),
        (SIMPLE + "{{ 'end' if not add_generation_prompt }}", {}, "user: Hello\nassistant: It is "),
        (SIMPLE, {"continue_final_message": False}, "user: Hello\nassistant: It is \n"),
    ],
)
def test_the_last_message_is_continued(template, options, text):
    assert (
        models.ChatTemplate(template).render(
            CONTINUED, **{"continue_final_message": True, **options}
        )
        == text
    )


@pytest.mark.parametrize(
    ("template", "options", "text"),
    [
        (SIMPLE, {"add_generation_prompt": True}, "pass one of them"),
        (
            SIMPLE,
            {"continue_final_message": "thinking"},
            "the last message has no 'thinking' to continue",
        ),
        (
            SIMPLE,
            {"continue_final_message": "role", "tools": 3},
            "expected tools as a list of dicts, got 3",
        ),
        (SIMPLE, {"documents": ["a"]}, r"expected documents as a list of dicts, got \['a'\]"),
        (
            "{% for m in messages %}{{ m.role }}{% endfor %}",
            {},
            "the template does not read 'content'",
        ),
        ("{{ messages[0].content }}", {}, "the last message is not in the text as it is"),
        (
            SIMPLE.replace("m.content", "m.content | upper"),
            {},
            "the last message is not in the text as it is",
        ),
    ],
)
def test_a_message_that_cannot_be_continued(template, options, text):
    with pytest.raises(ValueError, match=text):
        models.ChatTemplate(template).render(
            CONTINUED, **{"continue_final_message": True, **options}
        )


@pytest.mark.parametrize(
    "name",
    [
        "tokenize",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "padding",
        "truncation",
        "max_length",
        "tokenizer_kwargs",
        "chat_template",
    ],
)
def test_arguments_of_transformers_that_are_no_variables(name):
    with pytest.raises(
        TypeError, match=f"'{name}' is an argument of transformers' apply_chat_template"
    ):
        models.ChatTemplate(SIMPLE).render(USER, **{name: False})


def test_files_of_a_folder(tmp_path):
    several = [
        {"name": "default", "template": "D"},
        {"name": "tool_use", "template": "T {{ tools | length }}"},
        {"name": "rag", "template": "R"},
    ]
    read = models.ChatTemplate.read(write(tmp_path, several))
    assert [read.render(USER), read.render(USER, tools=[{}]), read.render(USER, name="rag")] == [
        "D",
        "T 1",
        "R",
    ]
    with pytest.raises(
        ValueError, match="no chat template 'x'; expected name='default' or 'tool_use' or 'rag'"
    ):
        read.render(USER, name="x")
    with pytest.raises(
        ValueError, match="there is no chat template 'default'; expected name='rag'"
    ):
        models.ChatTemplate({"rag": "R"}).render(USER)

    (tmp_path / "chat_template.jinja").write_text(
        "é{{ eos_token }}\n", encoding="utf-8"
    )  # has priority
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "short.jinja").write_text("S")
    write(tmp_path, several, eos_token="</s>")
    read = models.ChatTemplate.read(tmp_path)
    assert [read.render(USER), read.render(USER, tools=[{}])] == ["é</s>", "é</s>"]
    assert read.render(USER, name="short") == "S"
    (tmp_path / "tokenizer_config.json").unlink()
    words = models.read_tokenizer(tmp_path)
    assert words.chat_template.templates == {"default": "é{{ eos_token }}\n", "short": "S"}


def test_folders_without_a_template(tmp_path):
    (write(tmp_path, None) / "tokenizer_config.json").unlink()
    assert models.read_tokenizer(tmp_path).chat_template is None
    with pytest.raises(
        FileNotFoundError,
        match=r"no chat template found; expected chat_template\.jinja, or chat_temp",
    ):
        models.ChatTemplate.read(tmp_path)
    for wrong in 3, {"default": "a"}, [{"name": "a"}], ["a"]:
        with pytest.raises(
            ValueError, match=r"tokenizer_config\.json: expected .* as chat_template"
        ):
            models.ChatTemplate.read(write(tmp_path, wrong))


def test_a_special_token_that_the_class_of_the_tokenizer_defines(tmp_path):
    """LlamaTokenizer has a bos_token that is not in the file; an undefined one would be rendered as
    an empty text."""
    read = models.ChatTemplate.read(
        write(tmp_path, "{{ bos_token }}a", tokenizer_class="LlamaTokenizer")
    )
    with pytest.raises(
        ValueError, match=r"uses bos_token, which tokenizer_config\.json lacks; pass bos_token="
    ):
        read.render(USER)
    assert read.render(USER, bos_token="<s>") == "<s>a"
    for fields in (
        {"tokenizer_class": "PreTrainedTokenizerFast"},
        {"tokenizer_class": "A", "bos_token": None},
    ):
        assert (
            models.ChatTemplate.read(write(tmp_path, "{{ bos_token }}a", **fields)).render(USER)
            == "a"
        )


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        (
            "Hello",
            r'expected messages \[\{"role": "user", "content": "\.\.\."\}, \.\.\.\], at least one; got \'Hello\'',
        ),
        ([], "at least one; got "),
        ({"role": "user", "content": "a"}, "at least one; got "),
        (["Hello"], "message 0 is 'Hello'"),
        ([*USER, {"content": "a"}], "message 1 is {'content': 'a'}"),
        ([{"role": 3, "content": "a"}], "message 0 is "),
        ([{"role": "user"}], "message 0 is "),
        ([{"role": "user", "content": 3}], "expected a string as the content of message 0, got 3"),
        (
            [{"role": "user", "content": [np.zeros(2)]}],
            "expected JSON values in messages: Object of type ndarray",
        ),
    ],
)
def test_messages_of_another_form(messages, text):
    with pytest.raises(ValueError, match="chat: .*" + text):
        models.ChatTemplate(SIMPLE).render(messages)


@pytest.mark.quick_cases(13)
@pytest.mark.parametrize(
    ("template", "text"),
    [
        (
            "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% "
            "endfor %}",
            "more than 16",
        ),
        (
            "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% "
            "endfor %}",
            "more than 16,7",
        ),
        (
            "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set y %}{{ n.x }}{{ n.x }}{% "
            "endset %}{% set n.x = y %}{% endfor %}",
            "more than 16,7",
        ),
        (
            "{% set x = 'a' * 10 ** 6 %}{% for i in range(99) %}{{ x }}{% endfor %}",
            "more than 16,7",
        ),
        (
            "{% for i in range(9999) %}{% for i in range(9999) %}{% endfor %}{% endfor %}",
            "131,072 iterations",
        ),
        (
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ "
            "f(99) }}",
            "131,072 iter",
        ),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ 'a' * 10 ** 9 }}", "more than 16,7"),
        ("{{ (9 ** 999) ** 9 }}", "an integer of "),
        ("{{ '%999999999d' % 1 }}", "too wide a field"),
        ("{{ '{:>999999999}'.format(1) }}", "too wide a field"),
        ("{{ '%999999999d' | format(1) }}", "too wide a field"),
        ("{{ 'a'.center(10 ** 9) }}", "more than 16,7"),
        ("{{ 'a' | center(10 ** 9) }}", "more than 16,7"),
        ("{{ range(10 ** 6) }}", "Range too big"),
        ("{{ ('a' * 10 ** 6).replace('a', 'a' * 10 ** 6) }}", "more than 16,7"),
        ("{{ ('a' * 10 ** 6) | join('a' * 10 ** 6) }}", "more than 16,7"),
        ("a" * (1 << 21), "characters, more than 1,0"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ namespace.__init__.__globals__ }}", "SecurityError"),
        ("{{ namespace(__html__=1) }}", "SecurityError"),
        ("{{ raise_exception.__globals__['x'] }}", "SecurityError|Undefined"),
        ("{% include 'a' %}", "TypeError: no load"),
        ("{{ x", "line 1: TemplateSyntaxError"),
        ("\n{{ messages.x.y }}", "UndefinedError"),
    ],
)
def test_templates_that_are_wrong_or_do_not_end(template, text):
    with pytest.raises(ValueError, match=f"ChatTemplate, chat template.*({text})"):
        models.ChatTemplate(template).render(USER)


def test_the_environment_of_templates():
    render = lambda template, **variables: models.ChatTemplate(template).render(USER, **variables)
    assert render("{{ {'b': 'é<', 'a': 1} | tojson }}") == '{"b": "é<", "a": 1}'
    assert (
        render("{{ {'b': 1, 'a': 1} | tojson(indent=1, sort_keys=true) }}")
        == '{\n "a": 1,\n "b": 1\n}'
    )
    assert render("{{ dict(a=1) }}{{ dict.fromkeys('ab', 0) }}{{ namespace(self=3).self }}") == (
        "{'a': 1}{'a': 0, 'b': 0}3"
    )
    now = datetime.datetime.strptime(
        render("{{ strftime_now('%Y-%m-%d %H:%M:%S') }}"), "%Y-%m-%d %H:%M:%S"
    )
    assert abs(datetime.datetime.now() - now) < datetime.timedelta(minutes=1)
    assert (
        render(
            "{{ date }}{% generation %}{% set date = 1 %}{% endgeneration %}{{ date }}", date="a"
        )
        == "aa"
    )
    long = [{"role": "user", "content": "x" * 1000}] * 3000
    assert len(models.ChatTemplate(SIMPLE).render(long)) == 3000 * 1007


def test_jinja2_is_not_installed(monkeypatch):
    original = builtins.__import__

    def missing(name, *args, **kwargs):
        if name == "jinja2":
            raise ModuleNotFoundError(name=name)
        return original(name, *args, **kwargs)

    monkeypatch.delitem(sys.modules, "fnet.models.tokenizers._sandbox", raising=False)
    monkeypatch.delattr("fnet.models.tokenizers._sandbox", raising=False)
    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(
        ModuleNotFoundError,
        match=r"need the package jinja2, which is not installed: pip install 'jinja2>=3.1.6'$",
    ):
        models.ChatTemplate("a").render(USER)


@pytest.fixture(scope="module")
def decoder():
    words = models.CharTokenizer("abcdefghijklmnopqrstuvwxyz:! \n")
    model = models.GPT(words.vocab_size, width=8, depth=1, heads=1, context=64)
    spec = model.spec(jax.ShapeDtypeStruct((1, 3), jnp.int32)).params
    return model, jax.tree.map(lambda s: jax.random.normal(jax.random.key(1), s.shape), spec), words


TEMPLATE = models.ChatTemplate(
    SIMPLE + "{% if add_generation_prompt %}assistant:{{ more }}{% endif %}"
)
ASK = [{"role": "user", "content": "who wrote it"}]


@pytest.mark.exhaustive
def test_an_answer_continues_the_rendered_text(decoder):
    model, params, words = decoder
    options = dict(max_tokens=20, temperature=0.8, top_k=5)
    answer = list(
        models.chat(model, params, words, ASK, jax.random.key(0), template=TEMPLATE, **options)
    )
    want = "".join(
        models.stream_text(
            model, params, words, "user: who wrote it\nassistant:", jax.random.key(0), **options
        )
    )
    assert "".join(answer) == want and len(want) == 20 and len(answer) > 5
    other = models.chat(
        model,
        params,
        words,
        ASK,
        jax.random.key(0),
        template=TEMPLATE,
        variables={"more": " ja "},
        **options,
    )
    assert "".join(other) != want
    cut = models.chat(
        model, params, words, ASK, jax.random.key(0), template=TEMPLATE, stop=[want[7:9]], **options
    )
    assert "".join(cut) == want[: want.index(want[7:9])]


class Special:
    """Characters, and a tokenizer.json's token that is added to each text unless special_tokens is
    False."""

    def __init__(self, words, stop):
        self.words, self.stop, self.chat_template, self.seen = words, stop, TEMPLATE, []

    def encode(self, text, *, special_tokens=True):
        self.seen.append(special_tokens)
        return self.words.encode("a" * special_tokens + text)

    def decode(self, tokens):
        return self.words.decode(tokens)


def test_the_tokenizers_template_and_stop_tokens(decoder):
    model, params, words = decoder
    free = "".join(
        models.chat(model, params, words, ASK, template=TEMPLATE, max_tokens=20, temperature=0)
    )
    stop = words.encode(free)[5]
    tokenizer = Special(words, (int(stop),))
    answer = "".join(models.chat(model, params, tokenizer, ASK, max_tokens=20, temperature=0))
    assert answer == free[: free.index(words.decode([stop]))] and tokenizer.seen == [False]


def test_errors_of_chat(decoder):
    model, params, words = decoder
    ask = lambda messages=ASK, **options: list(
        models.chat(
            model, params, words, messages, **{"template": TEMPLATE, "max_tokens": 5, **options}
        )
    )
    with pytest.raises(
        ValueError, match=r"chat: the tokenizer has no chat template; read it with models\.read"
    ):
        ask(template=None)
    with pytest.raises(ValueError, match="chat: expected a sequence of strings as stop"):
        ask(stop="END", temperature=0)
    with pytest.raises(
        TypeError, match="chat: samples is an option of `stream`; chat generates one text"
    ):
        ask(samples=2, temperature=0)
    with pytest.raises(ValueError, match="exceed the model's context of 64"):
        ask([{"role": "user", "content": "a" * 50}], temperature=0)
    with pytest.raises(ValueError, match="sampling needs key"):
        ask()
    with pytest.raises(
        ValueError, match=r"ChatTemplate: expected a template or \{name: template\}, got 3"
    ):
        models.ChatTemplate(3)
