"""Bundles of language models: the entry points, and the tokenizer that travels with them."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fnet import export, models
from fnet._util._tokenizer_files import is_file_of_a_tokenizer

MODELS = {
    "learned positions": models.GPT(9, 8, 1, 2, context=16),
    "recurrent": models.LSTMLanguageModel(9, 8),
    "window": models.Decoder(
        vocab_size=9, width=8, depth=2, heads=2, kv_heads=1, hidden=8, window=4, context=16
    ),
}


@pytest.mark.quick_cases("learned positions")
@pytest.mark.parametrize("name", MODELS)
def test_extend_reads_texts_of_different_lengths_into_a_cache_of_any_size(name):
    model = MODELS[name]
    params, _ = model.init(jax.random.key(3), jnp.zeros((1, 3), jnp.int32))
    program = export.program(model, params, tokens=export.spec("b, t", "int32", where="t <= 16"))
    program = export.generation(program, model, context=16)
    assert list(program.entries) == ["predict", "prefill", "decode", "extend"]
    texts = [[1, 2, 3, 4], [5, 6]]
    for size in (5, 16):
        cache = model.cache(jax.ShapeDtypeStruct((2, size), jnp.int32))
        tokens, lengths = models.padded(texts)
        structure = jax.tree.structure({"cache": cache, "logits": 0})
        leaves = program.call("extend", tokens, lengths, cache)
        cache = jax.tree.unflatten(structure, leaves)["cache"]
        one = np.array([[7], [8]], np.int32)
        after = program.call("extend", one, np.array([1, 1], np.int32), cache)
        logits = jax.tree.unflatten(structure, after)["logits"]
        for row, text in enumerate([[*texts[0], 7], [*texts[1], 8]]):
            want = model(params, jnp.array([text]))[0, -1]
            assert np.abs(logits[row] - want).max() <= 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of weights, of which only some files are those of a tokenizer."""
    folder = tmp_path_factory.mktemp("weights")
    (folder / "characters.json").write_text(json.dumps("abc"))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    for name in ("config.json", "model.safetensors", "pytorch_model.bin", "README.md"):
        (folder / name).write_text("{}")
    return folder


def saved(path, program, **options):
    program.save(path, **options)
    return export.load(path).files("tokenizer")


def test_the_files_of_a_tokenizer_travel_in_a_bundle(folder, tmp_path):
    program = export.program(lambda params, x: 2 * x, {}, x=export.spec("b"))
    want = {
        name: (folder / name).read_bytes()
        for name in (
            "additional_chat_templates/tool_use.jinja",
            "characters.json",
            "chat_template.jinja",
        )
    }
    path = tmp_path / "x.fnet"
    assert saved(path, program, tokenizer=folder) == want
    assert saved(path, program, tokenizer=models.read_tokenizer(folder)) == want
    file = models.read_tokenizer(folder / "characters.json")
    assert saved(path, program, tokenizer=file) == {"characters.json": b'"abc"'}
    made = models.CharTokenizer("ba")
    assert saved(path, program, tokenizer=made) == {"characters.json": b'"ab"'}
    export.renew(path)
    assert export.load(path).files("tokenizer") == {"characters.json": b'"ab"'}
    model = MODELS["learned positions"]
    params, _ = model.init(jax.random.key(0), model.example())
    program = export.program(model, params, tokens=export.spec("b, t", "int32", where="t <= 16"))
    program = export.generation(program, model, context=16, tokenizer=folder)
    assert program.entry("twice", lambda params, x: x, x=export.spec("b")).tokenizer == folder


def test_what_is_no_tokenizer_is_refused(tmp_path):
    program = export.program(lambda params, x: 2 * x, {}, x=export.spec("b"))
    for tokenizer, message in (
        (tmp_path, "has no file of a tokenizer; expected generation_config.json"),
        (models.ByteTokenizer(), "this ByteTokenizer was made from no file; save it in a folder"),
        (3, r"an object that models\.read_tokenizer returned; got a int"),
        (b"{}", "this bytes was made from no file"),
    ):
        with pytest.raises(ValueError, match=message):
            program.save(tmp_path / "x.fnet", tokenizer=tokenizer)


def test_files_that_leave_the_folder_are_none_of_a_tokenizer():
    assert is_file_of_a_tokenizer("additional_chat_templates/tool_use.jinja")
    for name in ("../tokenizer.json", "additional_chat_templates/../../x.jinja", "evil.py"):
        assert not is_file_of_a_tokenizer(name)
