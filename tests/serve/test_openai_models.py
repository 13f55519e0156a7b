"""OpenAI's API over models: folders of Hugging Face, adapters, bundles and encoders."""

import contextlib
import http.client
import json
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from servers import Client, serving

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

from texts import running, write_folder, write_tokenizer

from fnet import compress, export, models, serve
from fnet.export.standalone._reader import BundleError
from fnet.models import pretrained
from fnet.serve._openai import _bundle, _pooling
from fnet.serve._openai._errors import Wrong
from fnet.serve._openai._language import Language

pytestmark = pytest.mark.usefixtures("quickly")
HELLO = [{"role": "user", "content": "Hello"}]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "cat", "dog", "and", "##s"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    write_folder(folder)
    return folder


@pytest.fixture(scope="module")
def french(folder):
    """An adapter that changes the text."""
    model, params, _ = pretrained.load(folder)
    adapted = compress.lora(jax.random.key(1), params, {".*attention/(query|value)": 2})
    key = jax.random.key(2)

    def drawn(leaf):
        if not isinstance(leaf, compress.LowRank):
            return leaf
        return compress.LowRank(
            leaf.base, leaf.a, jax.random.normal(key, leaf.b.shape), leaf.scale, leaf.inputs
        )

    adapted = jax.tree.map(drawn, adapted, is_leaf=lambda x: isinstance(x, compress.LowRank))
    return pretrained.save_adapter(model, adapted, folder.parent / "french")


@pytest.fixture(scope="module")
def bundle(folder):
    model, params, _ = pretrained.load(folder)
    program = export.program(model, params, tokens=export.spec("b, t", "int32", where="t <= 64"))
    tokenizer = models.read_tokenizer(folder)
    path = folder.parent / "packed.fnet"
    export.generation(program, model, context=64, tokenizer=tokenizer).save(path)
    return path


@contextlib.contextmanager
def clients(files, **options):
    """(a client, the repository) of a server. Without batches of the Open Inference Protocol, nothing
    has to be proved for them."""
    app = serve.application(list(map(str, files)), serve.Options(**{"max_batch": 1, **options}))
    with running(app) as port:
        yield Client(port), app.state.server.repository


def said(client, model="tiny", **fields):
    fields = {"temperature": 0, "max_tokens": 12, **fields}
    status, answer = client.json(
        "/v1/chat/completions", {"model": model, "messages": HELLO, **fields}
    )
    assert status == 200, answer
    return answer["choices"][0]["message"]["content"]


def expected(folder, params=None):
    """The greedy answer to HELLO, without a server."""
    model, loaded, _ = pretrained.load(folder)
    if params is not None:
        loaded = compress.materialize(params)
    tokenizer = models.read_tokenizer(folder)
    return "".join(models.chat(model, loaded, tokenizer, HELLO, max_tokens=12, temperature=0))


def test_a_folder_its_adapters_and_a_bundle_answer_like_their_models(folder, french, bundle):
    model, params, _ = pretrained.load(folder)
    adapted = pretrained.load_adapter(model, params, french)
    plain, other = expected(folder), expected(folder, adapted)
    assert plain != other
    with clients([folder, bundle], dtype="float32", adapters={"french": french}, slots=2) as (
        client,
        _,
    ):
        listed = client.json("/v1/models")[1]["data"]
        assert [(each["id"], each.get("parent")) for each in listed] == [
            ("tiny", None),
            ("french", "tiny"),
            ("packed", None),
        ]
        assert client.json("/v1/models/french")[1]["owned_by"] == "fnet"
        assert said(client) == said(client, "packed") == plain
        assert said(client, "french") == other
        drawn = [said(client, temperature=1, seed=seed, max_tokens=20) for seed in (1, 1, 2)]
        assert drawn[0] == drawn[1] != drawn[2]
        body = {"model": "packed", "prompt": [300], "max_tokens": 2}
        status, answer = client.json("/v1/completions", body)
        assert status == 400 and "tokens must be from 0 to 279" in answer["error"]["message"]
        body = {"text_input": "a", "tokens": None, "max_tokens": 1}
        assert client.json("/v2/models/packed/generate", body)[0] == 400  # no characters.json
        body = {"tokens": [1, 2], "max_tokens": 3, "temperature": 0}
        assert len(client.json("/v2/models/packed/generate", body)[1]["tokens"]) == 3
        numbers = metrics(client)
    assert numbers['fnet_engine_slots{model="tiny"}'] == 2
    assert numbers['fnet_engine_generated_tokens_total{model="tiny"}'] >= 24
    assert numbers['fnet_engine_first_token_seconds_count{model="tiny"}'] >= 5
    assert numbers['fnet_engine_between_tokens_seconds_bucket{model="packed",le="+Inf"}'] >= 11
    assert numbers['fnet_engine_waiting{model="packed"}'] == 0
    assert 0 <= numbers['fnet_engine_cache_used_ratio{model="packed"}'] <= 1
    path = "/v1/chat/completions"
    assert numbers[f'fnet_requests_total{{code="200",path="{path}"}}'] == 6


def metrics(client):
    _, headers, content = client("/metrics")
    assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
    lines = [line for line in content.decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "model",
    [
        models.GPT(9, 8, 1, 2, context=16),
        models.LSTMLanguageModel(9, 8),
        models.Decoder(
            vocab_size=9, width=8, depth=2, heads=2, kv_heads=1, hidden=8, window=4, context=16
        ),
    ],
    ids=["learned positions", "recurrent", "window"],
)
def test_bundles_of_other_models_complete_texts_in_characters(model, tmp_path):
    params, _ = model.init(jax.random.key(3), jnp.zeros((1, 3), jnp.int32))
    program = export.program(model, params, tokens=export.spec("b, t", "int32", where="t <= 16"))
    tokenizer = models.CharTokenizer("abcdefghi")
    export.generation(program, model, context=16, tokenizer=tokenizer).save(tmp_path / "m.fnet")
    want = models.generate(
        model, params, [tokenizer.encode("abc").tolist()], max_tokens=6, temperature=0
    )
    body = {"model": "m", "prompt": "abc", "max_tokens": 6, "temperature": 0}
    with clients([tmp_path / "m.fnet"]) as (client, _):
        [choice] = client.json("/v1/completions", body)[1]["choices"]
        assert choice["text"] == tokenizer.decode(want.tokens[0])
        status, answer = client.json("/v1/completions", body | {"prompt": "xyz"})
        assert status == 400 and "'x' at 0 is not one of the 9" in answer["error"]["message"]
        status, answer = client.json("/v1/completions", body | {"max_tokens": 14})
        assert status == 400 and answer["error"]["code"] == "context_length_exceeded"
        status, answer = client.json("/v1/chat/completions", {"model": "m", "messages": HELLO})
        assert status == 400 and "has no chat template" in answer["error"]["message"]


class Held:
    """What of a bundle is read for its tokenizer."""

    path = "bad.fnet"

    def __init__(self, folder, **files):
        write_tokenizer(folder)
        held = {path.name: path.read_bytes() for path in folder.iterdir()}
        self._files = held | {name: content.encode() for name, content in files.items()}

    def files(self, folder):
        return self._files


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% for i in range(10**9) %}{% for j in range(10**9) %}{% endfor %}{% endfor %}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_hostile_template_in_a_bundle_is_an_error_of_the_request(tmp_path, source):
    tokenizer = _bundle._tokenizer(Held(tmp_path, **{"chat_template.jinja": source}))
    language = Language("bad", None, tokenizer, 64)
    with pytest.raises(Wrong, match="chat template") as caught:
        language.rendered(language.template(False)[0], HELLO)
    assert caught.value.status == 400


def test_damaged_and_foreign_files_of_a_tokenizer_in_a_bundle(tmp_path):
    with pytest.raises(ValueError, match=r"^serve: bad.fnet: tokenizer/tokenizer.json"):
        _bundle._tokenizer(Held(tmp_path, **{"tokenizer.json": "{"}))
    names = "../evil.json", "additional_chat_templates/../../x.jinja", "evil.py"
    before = sorted(tmp_path.parent.rglob("*"))
    assert _bundle._tokenizer(Held(tmp_path, **dict.fromkeys(names, "{}"))).vocab_size > 256
    assert sorted(tmp_path.parent.rglob("*")) == before


@pytest.mark.exhaustive
def test_a_bundle_without_the_entry_point_extend_keeps_its_old_paths(bundle, tmp_path):
    assert export.load(bundle).entries == ("predict", "prefill", "decode", "extend")
    model, params, _ = pretrained.load(bundle.parent / "tiny")
    program = export.program(model, params, tokens=export.spec("b, t", "int32", where="t <= 16"))
    both = export.generation(program, model, context=16)
    del both.entries["extend"]
    both.save(tmp_path / "old.fnet", tokenizer=bundle.parent / "tiny")
    with clients([tmp_path / "old.fnet"]) as (client, repository):
        assert not repository.languages
        body = {"tokens": [1, 2], "max_tokens": 3}
        assert client.json("/v2/models/old/generate", body)[0] == 200


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """A MiniLM-like folder: (folder, model, params)."""
    folder = tmp_path_factory.mktemp("encoders") / "mini"
    model = models.Bert(len(WORDS), 16, 2, 2, 24, context=24, pooler=False)
    params, state = model.init(jax.random.key(0), model.example())
    pretrained.save(model, params, state, folder, names="huggingface")
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    return folder, model, params


TEXTS = ["a cat", "dogs and cats and a dog", "cat"]


def vectors(model, params, tokenizer, texts=TEXTS):
    tokens, lengths = models.padded([tokenizer.encode(text) for text in texts])
    return models.sentence_embedding(model(params, tokens, lengths).hidden, lengths)


def test_a_folder_of_an_encoder_makes_embeddings(encoder):
    folder, model, params = encoder
    want = np.asarray(vectors(model, params, models.read_tokenizer(folder)))
    with clients([folder], max_batch=2) as (client, _):
        ask = lambda **fields: client.json(
            "/v1/embeddings", {"model": "mini", "input": TEXTS, **fields}
        )
        status, answer = ask()
        assert status == 200 and answer["object"] == "list" and answer["model"] == "mini"
        assert [row["index"] for row in answer["data"]] == [0, 1, 2]
        got = np.array([row["embedding"] for row in answer["data"]])
        assert np.abs(got - want).max() <= 1e-6
        count = sum(len(models.read_tokenizer(folder).encode(text)) for text in TEXTS)
        assert answer["usage"] == {"prompt_tokens": count, "total_tokens": count}
        tokens = models.read_tokenizer(folder).encode("cat").tolist()
        [row] = ask(input=tokens)[1]["data"]
        assert np.abs(np.array(row["embedding"]) - want[2]).max() <= 1e-6
        for fields, message in (
            ({"dimensions": 8}, "the vectors of this model have 16"),
            ({"encoding_format": "hex"}, "expected 'float' or 'base64'"),
            (
                {"input": "a cat " * 20},
                "text 0 has 42 tokens, more than this model's context of 24",
            ),
            ({"input": [99]}, "expected tokens below 9, got 99"),
            ({"input": []}, "none of them empty"),
            ({"messages": []}, "unknown field 'messages'"),
        ):
            status, answer = ask(**fields)
            assert status == 400 and message in answer["error"]["message"], answer
        status, answer = client.json("/v1/completions", {"model": "mini", "prompt": "a"})
        assert status == 400 and "embeds texts" in answer["error"]["message"]


def test_openais_client_reads_embeddings(encoder):
    openai = pytest.importorskip("openai")
    folder, model, params = encoder
    want = np.asarray(vectors(model, params, models.read_tokenizer(folder)))
    with clients([folder]) as (client, _):
        url = f"http://127.0.0.1:{client.connection.port}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as theirs:
            found = theirs.embeddings.create(model="mini", input=TEXTS)  # as base64
            assert np.abs(np.array([row.embedding for row in found.data]) - want).max() <= 1e-6
            plain = theirs.embeddings.create(model="mini", input="cat", encoding_format="float")
            assert np.abs(np.array(plain.data[0].embedding) - want[2]).max() <= 1e-6


def test_a_bundle_of_an_encoder_makes_embeddings(encoder, tmp_path):
    folder, model, params = encoder
    want = np.asarray(vectors(model, params, models.read_tokenizer(folder)))

    def embed(params, tokens, lengths):
        return models.sentence_embedding(model(params, tokens, lengths).hidden, lengths)

    program = export.program(
        embed,
        params,
        tokens=export.spec("b, t", "int32", where="t <= 24"),
        lengths=export.spec("b", "int32"),
    )
    program.save(tmp_path / "mini.fnet", tokenizer=folder)
    with clients([tmp_path / "mini.fnet"]) as (client, _):
        status, answer = client.json("/v1/embeddings", {"model": "mini", "input": TEXTS})
        assert status == 200, answer
        got = np.array([row["embedding"] for row in answer["data"]])
        assert np.abs(got - want).max() <= 1e-5
        assert client.json("/v2/models/mini")[0] == 200
        body = {"model": "mini", "input": "a cat " * 20}
        status, answer = client.json("/v1/embeddings", body)
        assert (
            status == 400 and "more than this model's context of 24" in answer["error"]["message"]
        )


def described(folder, mode="cls", normalize=True, **files):
    """The files of sentence-transformers."""
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {
            "idx": 1,
            "name": "1",
            "path": "1_Pooling",
            "type": "sentence_transformers.models.Pooling",
        },
        {"idx": 2, "name": "2", "path": "2", "type": "sentence_transformers.models.Normalize"},
    ]
    modes = {"cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens"}
    pooling = {f"pooling_mode_{name}": key == mode for key, name in modes.items()}
    (folder / "1_Pooling").mkdir(parents=True, exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": 16, **pooling})
    )
    (folder / "modules.json").write_text(json.dumps(modules if normalize else modules[:2]))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("mode", ["cls", "mean"])
@pytest.mark.parametrize("normalize", [False, True])
def test_pooling_is_that_of_sentence_transformers(tmp_path, mode, normalize):
    pooling = _pooling.pooling(described(tmp_path, mode, normalize))
    hidden = np.random.default_rng(0).normal(size=(2, 5, 16)).astype(np.float32)
    lengths = np.array([5, 2], np.int32)
    want = np.stack([row[: 1 if mode == "cls" else n].mean(0) for row, n in zip(hidden, lengths)])
    if normalize:
        want /= np.linalg.norm(want, axis=-1, keepdims=True)
    hidden[1, 2:] = np.nan  # padding
    got = pooling(jnp.asarray(hidden), jnp.asarray(lengths))
    assert np.abs(got - want).max() <= 1e-6


def test_pooling_that_is_not_known_is_refused(tmp_path):
    assert _pooling.pooling(tmp_path) == _pooling.Pooling("mean", True, None)
    with pytest.raises(ValueError, match="pooling_mode_mean_tokens alone, got pooling_mode_max"):
        _pooling.pooling(described(tmp_path, "max"))
    longest = {"max_seq_length": 12, "do_lower_case": False}
    described(tmp_path, "mean", sentence_bert_config=longest)
    assert _pooling.pooling(tmp_path).longest == 12
    for content, message in (
        ({"max_seq_length": "12"}, "expected max_seq_length as a number of tokens, got '12'"),
        ({"do_lower_case": True}, "do_lower_case belongs to the tokenizer"),
        ({"more": 1}, "the field 'more' is not known"),
    ):
        with pytest.raises(ValueError, match=message):
            _pooling.pooling(described(tmp_path, sentence_bert_config=content))
    for module, message in (
        ({"path": "2_Dense", "type": "sentence_transformers.models.Dense"}, "Dense' is not supp"),
        ({"path": "../..", "type": "x.Pooling"}, "leaves the folder"),
        ({"path": 1, "type": "x"}, "expected a list of"),
    ):
        (tmp_path / "modules.json").write_text(json.dumps([module]))
        with pytest.raises(ValueError, match=message):
            _pooling.pooling(tmp_path)
    (tmp_path / "modules.json").write_text("[]")
    with pytest.raises(ValueError, match="has no pooling"):
        _pooling.pooling(tmp_path)


def test_folders_and_options_that_are_wrong(folder, french, encoder, tmp_path):
    for files, options, message in (
        ([tmp_path], {}, "has no config.json; expected a bundle, or a folder of weights"),
        ([folder, folder], {}, "the name 'tiny' of a model or an adapter is used twice"),
        ([f"a b={folder}"], {}, "expected FOLDER or NAME=FOLDER with a name of letters"),
        ([folder], {"adapters": {"tiny": french}}, "the name 'tiny' of a model or an adapter"),
        ([folder], {"adapters": {"x": tmp_path}}, "adapter_config.json"),
        ([encoder[0]], {"adapters": {"x": french}}, "is an encoder of texts, which takes no adapt"),
        ([folder], {"context": 1 << 20}, "context=1048576 exceeds that of the model, 512"),
        ([folder], {"context": 1}, "context=1: expected at least 2"),
        ([folder], {"dtype": "float33"}, "dtype='float33': expected a dtype such as 'float32'"),
        ([folder], {"dtype": "int8"}, "expected a floating-point dtype"),
        ([folder], {"slots": 0}, "slots=0: expected at least 1"),
    ):
        with pytest.raises((ValueError, TypeError, OSError, BundleError), match=message):
            serve.application(list(map(str, files)), serve.Options(**options))


def test_adapters_need_a_language_model(bundle):
    with pytest.raises(ValueError, match="adapters: expected a folder with a language model"):
        serve.application([str(bundle)], serve.Options(adapters={"x": "y"}))


def test_sigterm_finishes_the_texts_that_run(folder):
    with serving(folder, "--slots", 2, "--context", 400) as (port, process):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        body = {"model": "tiny", "messages": HELLO, "stream": True, "max_tokens": 390}
        connection.request("POST", "/v1/chat/completions", json.dumps(body))
        response = connection.getresponse()
        assert response.status == 200
        first = response.read(20)
        process.send_signal(signal.SIGTERM)
        content = first + response.read()
        connection.close()
        assert process.wait(30) == 0
    assert content.endswith(b"data: [DONE]\n\n")
    last = json.loads(content.split(b"\n\n")[-3].removeprefix(b"data: "))
    assert last["choices"][0]["finish_reason"] in ("length", "stop")
