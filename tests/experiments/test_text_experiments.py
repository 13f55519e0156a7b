"""Language models as a user trains them, lets them write, and compares sentences, in sizes that
suit a test."""

import dataclasses
import json
import os
import pathlib
import re
import shutil
import struct
import subprocess
import sys
import warnings

import absl.flags
import jax
import numpy as np
import pytest
from checks import same
from torture import flags as torture

from fnet import compress, models
from fnet import training as tr
from fnet.models import pretrained

pytest.importorskip("matplotlib")

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "experiments"))
import embed  # noqa: E402
import generate  # noqa: E402
import language_model as experiment  # noqa: E402
import llama2c  # noqa: E402

HELD = json.loads((ROOT / "tests" / "reference" / "tokenizers.json").read_text(encoding="utf-8"))
LLAMA = dict(
    vocab_size=259 + len(HELD["llama_bpe"]["pieces"]),
    width=16,
    depth=1,
    heads=2,
    kv_heads=2,
    hidden=24,
    context=40,
    interleaved=True,
    tied=True,
)
BERT = dict(
    vocab_size=len(HELD["wordpiece"]["vocabulary"]),
    width=16,
    depth=1,
    heads=2,
    hidden=24,
    context=32,
)
SMALL = [
    "--steps=12",
    "--width=16",
    "--depth=1",
    "--heads=2",
    "--context=24",
    "--batch_size=4",
    "--precision=float32",
]

# The experiment itself, in a world where MiniLM is smaller.
TINY = """
import runpy, sys
from fnet import models
models.Bert.PRESETS["minilm-l6"] = {preset!r}
sys.argv = sys.argv[1:]
sys.path.insert(0, {folder!r})
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def start(script, *flags):
    drop = ("JAX_NUMPY_DTYPE_PROMOTION", "JAX_NUMPY_RANK_PROMOTION")
    environment = {k: v for k, v in os.environ.items() if k not in drop}
    environment["XLA_FLAGS"] = os.environ["FNET_TEST_XLA_FLAGS"]
    folder = str(ROOT / "experiments")
    return subprocess.Popen(
        [
            sys.executable,
            "-c",
            TINY.format(folder=folder, preset=BERT),
            f"{folder}/{script}",
            *map(str, flags),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=ROOT,
    )


def finished(process, code=0):
    out, err = process.communicate(timeout=240)
    assert process.returncode == code, out + err
    return out if code == 0 else err


def filled(model):
    rng = np.random.default_rng(0)
    draw = lambda leaf: (rng.uniform(-2, 2, leaf.shape) / np.sqrt(leaf.shape[-1])).astype(
        np.float32
    )
    return jax.tree.map(draw, model.spec(model.example()).params)


@pytest.fixture(scope="module")
def stories(tmp_path_factory):
    """model.bin and tokenizer.bin of a small Decoder."""
    folder = tmp_path_factory.mktemp("stories")
    model = models.Decoder(**LLAMA)
    llama2c.save(model, filled(model), folder)
    pieces = [
        "<unk>",
        "\n<s>\n",
        "\n</s>\n",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *HELD["llama_bpe"]["pieces"],
    ]
    scores = [0.0] * 259 + HELD["llama_bpe"]["scores"]
    raw = struct.pack("<i", max(len(piece.encode()) for piece in pieces))
    for piece, score in zip(pieces, scores):
        raw += struct.pack("<fi", score, len(piece.encode())) + piece.encode()
    (folder / "tokenizer.bin").write_bytes(raw)
    return folder


@pytest.fixture(scope="module")
def minilm(tmp_path_factory):
    """model.safetensors and vocab.txt of a small BERT."""
    folder, model = tmp_path_factory.mktemp("minilm"), models.Bert(**BERT)
    pretrained.save(model, filled(model), {}, folder)
    (folder / "vocab.txt").write_text(
        "\n".join(HELD["wordpiece"]["vocabulary"]) + "\n", encoding="utf-8"
    )
    return folder


@pytest.mark.exhaustive
def test_trained_and_asked_to_go_on(tmp_path):
    """The weights it leaves are GPT-2's, by name."""
    out = finished(start("language_model.py", *SMALL, f"--workdir={tmp_path}"))
    assert "88,477 tokens to train on, 9,816 to validate on, 69 different" in out
    assert "gpt: 4,800 parameters, 12 steps of 4 x 24 tokens" in out
    loss = re.fullmatch(r"validation loss (\d\.\d{4})", out.splitlines()[-1])[1]
    rows = tr.read_metrics(tmp_path)
    assert rows[-1]["validation/loss"] == pytest.approx(float(loss), abs=1e-4)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    sample = (tmp_path / "sample.txt").read_text(encoding="utf-8")
    texts = sample.removesuffix("\n").split("\n\n----\n")  # 500 characters in all
    assert len(texts) == 21 and max(map(len, texts)) <= 24 and sample in out

    config = tr.load_config(experiment.Config, tmp_path / "config.json")
    words = models.read_tokenizer(tmp_path)
    params, _ = pretrained.load(experiment.make_model(config, words.vocab_size), tmp_path)
    logits = experiment.make_model(config, words.vocab_size)(params, words.encode("MIRANDA.")[None])
    assert logits.shape == (1, 8, 69)

    asked = finished(
        start("generate.py", f"--weights={tmp_path}", "--max_tokens=9", "MIRANDA.", "A")
    )
    assert f"{tmp_path}: GPT, 4,800 parameters, float32" in asked
    assert "\nMIRANDA." in asked and re.search(
        r"\n18 tokens in \d+\.\d\d s, \d+ tokens/s \(compiling inc", asked
    )


@pytest.mark.exhaustive
def test_a_published_model_is_adapted_to_a_text(stories, tmp_path):
    """QLoRA as a user runs it. generate.py reads the merged weights; the adapter is in PEFT's
    format."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "one.txt").write_text("the old man and the sea was the old man. " * 30)
    snapshot = (
        tmp_path / "models--org--stories" / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
    )
    shutil.copytree(stories, snapshot)
    flags = [
        "--model=stories15m",
        f"--weights={snapshot}",
        "--dataset=text",
        f"--data_dir={tmp_path}/text",
        "--lora=2",
        "--base=int4",
        "--steps=6",
        "--context=16",
        "--batch_size=4",
        "--precision=float32",
        f"--workdir={tmp_path}/run",
    ]
    out = finished(start("finetune.py", *flags))
    assert re.search(
        r"stories15m, llama2c names: [\d,]+ parameters, ([\d,]+) trained \(\d+\.\d\d %\)", out
    )[1] == (f"{496 + 2 * (LLAMA['vocab_size'] + 16):,}")
    assert re.fullmatch(r"validation loss \d\.\d{4}", out.splitlines()[-1])
    assert (
        tr.Checkpoints(tmp_path / "run" / "checkpoints").notes()["weights_revision"]
        == snapshot.name
    )
    assert (tmp_path / "run" / "curves.png").read_bytes().startswith(b"\x89PNG")
    model = models.Decoder(**LLAMA)
    _, published = llama2c.load(stories / "model.bin")
    _, merged = llama2c.load(tmp_path / "run" / "merged" / "model.bin")
    base = compress.quantize(
        published, {"blocks/down": compress.Int4(8), "blocks": compress.Int4(16)}
    )
    adapted = compress.materialize(
        pretrained.load_adapter(model, base, tmp_path / "run" / "adapter")
    )
    for a, b in zip(jax.tree.leaves(adapted), jax.tree.leaves(merged)):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    asked = finished(
        start("generate.py", f"--weights={tmp_path}/run/merged", "--max_tokens=5", "the old")
    )
    assert "5 tokens in" in asked
    again = finished(start("finetune.py", *flags))
    assert "resumed at step 6" in again and again.splitlines()[-1] == out.splitlines()[-1]


@pytest.mark.exhaustive
def test_nanogpts_token_files(tmp_path):
    rng = np.random.default_rng(0)
    for name in ("train", "val"):
        rng.integers(0, 300, 4000).astype("<u2").tofile(tmp_path / f"{name}.bin")
    out = finished(
        start(
            "language_model.py",
            *SMALL,
            "--model=llama",
            "--tokens=bin",
            "--vocab_size=300",
            "--ema=0.9",
            f"--data_dir={tmp_path}",
            f"--workdir={tmp_path}/run",
            "--early_stop=3",
        )
    )
    assert (
        "4,000 tokens to train on, 3,984 to validate on, 300 different" in out and "llama: " in out
    )
    sample = np.array(
        [text.split() for text in (tmp_path / "run" / "sample.txt").read_text().split("----")], int
    )
    assert sample.shape == (21, 24) and 0 <= sample.min() and sample.max() < 300
    assert (tmp_path / "run" / "model.safetensors").exists()


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the experiment in this process: run(*flags) -> its exit code; what it says is with
    capsys."""
    common = sys.modules["_common"]

    def run(*flags):
        with torture.experiment("language_model") as (module, _):
            for name in absl.flags.FLAGS:
                absl.flags.FLAGS[name].unparse()
            with pytest.raises(SystemExit) as end:
                argv = common.parse_flags(
                    [
                        "language_model.py",
                        *SMALL,
                        "--steps=2",
                        f"--workdir={tmp_path / 'run'}",
                        *map(str, flags),
                    ]
                )
                common._said(module.main, argv)
                sys.exit(0)
        return end.value.code

    monkeypatch.setattr(sys, "stdout", sys.stdout)
    return run


@pytest.mark.exhaustive
def test_weights_come_first_and_a_text_needs_no_newline(
    tmp_path, run, monkeypatch, capsys, quickly
):
    """Whatever fails after training, the weights and their vocabulary are there; and then it is the
    other way round."""
    (tmp_path / "input.txt").write_text("abcdefgh" * 60)
    with monkeypatch.context() as patch:
        patch.setattr(
            "fnet.training.record._plots.curves",
            lambda *_, **__: warnings.warn("a glyph is missing", stacklevel=1),
        )
        assert run(f"--data_dir={tmp_path}") == 1
    assert "error: a glyph is missing" in capsys.readouterr().err
    words = models.read_tokenizer(tmp_path / "run")
    assert words.characters == "abcdefgh"
    config = tr.load_config(experiment.Config, tmp_path / "run" / "config.json")
    pretrained.load(experiment.make_model(config, 8), tmp_path / "run")

    assert run(f"--data_dir={tmp_path}") == 0  # the sample begins with a character of the text
    assert set((tmp_path / "run" / "sample.txt").read_text()) <= set("abcdefgh\n-")

    weights = (tmp_path / "run" / "model.safetensors").read_bytes()
    (tmp_path / "input.txt").write_text("stuvwxyz" * 60)  # as many characters, but others
    for flags in (), ("--tokens=byte",):
        assert run(f"--data_dir={tmp_path}", *flags) == 2
    assert (
        "holds a run on a text with other characters (characters.json): use that text"
        in capsys.readouterr().err
    )
    assert models.read_tokenizer(tmp_path / "run").characters == "abcdefgh"
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == weights
    (tmp_path / "input.txt").write_bytes(b"\xff\xfe")
    assert (
        run(f"--data_dir={tmp_path}", "--restart") == 2
    )  # nothing is removed for a run that cannot begin
    assert f"{tmp_path / 'input.txt'} is not a text in UTF-8" in capsys.readouterr().err
    assert (tmp_path / "run" / "checkpoints" / "2").is_dir()


def test_token_files_are_held_to_the_vocabulary_before_training(tmp_path, run, capsys):
    for name, largest in ("train", 299), ("val", 300):
        np.full(400, largest, "<u2").tofile(tmp_path / f"{name}.bin")
    assert run("--tokens=bin", "--vocab_size=300", f"--data_dir={tmp_path}") == 2
    assert (
        "the validation text holds the token 300, outside a vocabulary of 300: set --vocab_size"
        in (capsys.readouterr().err)
    )
    assert not (tmp_path / "run").exists()
    assert run("--width=65536", "--depth=256") == 2
    assert re.search(
        r"needs at least [\d,]+ GiB .*make --batch_size, --context, --width or --depth smaller",
        capsys.readouterr().err,
    )


def small(**changes):
    return experiment.Config(**{**experiment.PRESETS["small"], **changes})


def test_what_is_read(tmp_path):
    (tmp_path / "b.txt").write_text("zz")
    (tmp_path / "a.txt").write_text("xyxyxyxyxy" * 3)
    train, test, words = experiment.read(small(data_dir=str(tmp_path)))
    assert words.decode([*train, *test]) == "xyxyxyxyxy" * 3 + "\nzz" and len(test) == 4
    (tmp_path / "input.txt").write_text("é" * 20)
    train, test, words = experiment.read(small(data_dir=str(tmp_path), tokens="byte"))
    assert len(train) == 36 and len(test) == 4 and isinstance(words, models.ByteTokenizer)
    assert train.dtype == np.uint8


def test_the_sizes_that_are_named():
    """10m and 124m say what they are; every model has about as many."""
    count = lambda model: sum(
        np.prod(leaf.shape)
        for leaf in jax.tree.leaves(model.spec(jax.ShapeDtypeStruct((1, 8), np.int32)).params)
    )
    make = lambda preset, model, vocab: experiment.make_model(
        experiment.Config(preset=preset, model=model, **experiment.PRESETS[preset]), vocab
    )
    assert 10.5e6 < count(make("10m", "gpt", 65)) < 11e6
    assert 10e6 < count(make("10m", "llama", 65)) < 11e6
    assert count(make("124m", "gpt", 50257)) == 124_439_808
    assert isinstance(make("small", "lstm", 65), models.LSTMLanguageModel)


@pytest.mark.exhaustive
def test_prompts_in_text_out(stories):
    flags = [f"--weights={stories}", "--max_tokens=12"]  # model.bin says what it is
    out = finished(start("generate.py", *flags, "--temperature=0", "our revels", "now"))
    model, words = models.Decoder(**LLAMA), models.read_tokenizer(stories)
    _, params = llama2c.load(stories)
    prompts = [words.encode("our revels"), words.encode("now")]
    tokens, lengths = models.padded(prompts)
    want = models.generate(
        model, params, tokens, max_tokens=12, temperature=0, lengths=lengths, stop=(1, 2)
    )
    for prompt, row, length in zip(prompts, want.tokens, want.lengths):
        assert f"\n{words.decode([*prompt, *np.asarray(row[:length])])}\n" in out.replace(
            "\r", "\n"
        )
    assert "Decoder, " in out and f"\n{int(want.lengths.sum())} tokens in " in out


@pytest.mark.exhaustive
def test_sentences_compared(minilm, tmp_path):
    (tmp_path / "lines.txt").write_text(
        "our revels now are ended\n\nthese our actors\nour revels now are ended\n"
    )
    pairs = start("embed.py", f"--weights={minilm}", "our revels", "these actors", "our revels")
    found = start(
        "embed.py",
        f"--weights={minilm}",
        f"--file={tmp_path}/lines.txt",
        "--top=1",
        "--batch_size=1",
        "our revels now are ended",
    )
    rows = re.findall(r"^ +\d  ([-\d. ]+)  (.*)$", finished(pairs), re.M)
    nearness = np.array([row.split() for row, _ in rows], float)
    assert [text for _, text in rows] == ["our revels", "these actors", "our revels"]
    np.testing.assert_allclose(np.diag(nearness), 1, atol=1e-3)
    assert nearness[0, 2] == 1 and nearness[0, 1] < 1
    assert finished(found).splitlines() == [
        "our revels now are ended",
        "  1.000  our revels now are ended",
    ]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (dict(model="rnn"), "--model=rnn: use gpt, llama, lstm"),
        (dict(tokens="word"), "--tokens=word: use char, byte, bin"),
        (dict(precision="int8"), "--precision=int8: use auto, float32"),
        (dict(steps=0), r"--steps=0: expected a number in \[1, 2147483647\]"),
        (dict(heads=3), "--heads=3: expected a divisor of --width=128"),
        (
            dict(vocab_size=5),
            "--vocab_size is for --tokens=bin; the vocabulary size of char tokens is fixed",
        ),
        (dict(optimizer="adm"), "--optimizer=adm: use sgd"),
    ],
)
def test_wrong_configurations(changes, text):
    with pytest.raises(ValueError, match=text):
        experiment.checked(small(**changes))


def test_token_files_have_gpt2s_vocabulary_unless_told():
    assert experiment.checked(small(tokens="bin")).vocab_size == 50304


@pytest.mark.parametrize(
    ("script", "changes", "text"),
    [
        (generate, dict(model="llama"), "--model=llama: use stories260k, stories15m"),
        (generate, dict(precision="int8"), "--precision=int8: use float32, bfloat16, float16"),
        (generate, dict(beams=2, samples=2), "--beams and --samples: use one of them"),
        (
            generate,
            dict(chat=True, beams=2),
            "--chat generates one answer: leave out --beams, --samples and --log_probs",
        ),
        (generate, dict(system="a"), "--system is for --chat"),
        (generate, dict(temperature=-1.0), r"--temperature=-1.0: expected a number in \[0, 1000\]"),
        (embed, dict(model="bert"), "--model=bert: use minilm-l6, minilm-l12"),
        (embed, dict(max_length=1), r"--max_length=1: expected a number in \[2, 512\]"),
        (embed, dict(top=0), r"--top=0: expected a number in \[1, 1000000\]"),
    ],
)
def test_wrong_options(script, changes, text):
    with pytest.raises(tr.ConfigError, match=text):
        script.checked(dataclasses.replace(script.Config(), **changes))


@pytest.mark.exhaustive
def test_errors_are_one_line_and_exit_2(tmp_path, stories, minilm):
    (tmp_path / "mixed").mkdir()
    (tmp_path / "mixed" / "model.bin").write_bytes((stories / "model.bin").read_bytes())
    (tmp_path / "mixed" / "vocab.txt").write_bytes((minilm / "vocab.txt").read_bytes())
    (tmp_path / "empty").mkdir()
    tiny, train = ("generate.py",), ("language_model.py", f"--workdir={tmp_path}/run")
    cases = {
        (*train, "--preset=11m"): "--preset=11m: use small, 10m, 124m",
        (*train, "--tokens=bin"): "name the folder of train.bin and val.bin with --data_dir",
        (*train, f"--data_dir={tmp_path}/empty"): "has no text: put input.txt or other",
        (
            *tiny,
            f"--weights={stories}",
            "revels " * 60,
        ): "the longest prompt has .* tokens; the model sees 40",
        (*train, "gpt"): "gpt: flags begin with --",
        (
            *tiny,
            f"--weights={tmp_path}/mixed",
        ): r"the tokenizer has \d+ tokens, the model \d+: use a tokenizer "
        "and a model of one vocabulary",
        (*tiny, f"--weights={tmp_path}/no"): "no: no such file",
        ("embed.py",): "no sentence given: python experiments/embed.py",
    }
    items = list(cases.items())
    for some in (items[:4], items[4:]):  # four at a time
        started = [(start(*flags), text) for flags, text in some]
        for process, text in started:
            err = finished(process, 2)
            assert err.startswith("error: ") and err.count("\n") == 1, err
            assert re.search(text, err), err


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with config.json, a vocabulary of characters, and a chat template."""
    folder = tmp_path_factory.mktemp("chat")
    model = models.Decoder(7, 16, 2, 4, 2, 24, context=64, head_dim=8, tied=True)
    pretrained.save(model, filled(model), {}, folder, names="huggingface")
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role[0] | replace('s', 'f') | replace('u', 'e') }}:{{ "
        "m.content }}{% endfor %}"
    )
    (folder / "characters.json").write_text('":abcdef"')
    return folder


@pytest.mark.exhaustive
def test_a_conversation(folder):
    flags = [f"--weights={folder}", "--chat", "--temperature=0", "--max_tokens=6"]
    model, params, _ = pretrained.load(folder)
    words, messages, answers = (
        models.read_tokenizer(folder),
        [{"role": "system", "content": "ff"}],
        [],
    )
    for line in "ab", "cd":
        messages.append({"role": "user", "content": line})
        answers.append(
            "".join(models.chat(model, params, words, messages, max_tokens=6, temperature=0))
        )
        messages.append({"role": "assistant", "content": answers[-1]})
    given, piped = (
        start("generate.py", *flags, "--system=ff", "ab", "cd"),
        subprocess.run(
            [sys.executable, "experiments/generate.py", *flags, "--system=ff"],
            input="ab\n\ncd\n",
            capture_output=True,
            text=True,
            cwd=ROOT,
            timeout=240,
            env={k: v for k, v in os.environ.items() if not k.startswith("JAX_NUMPY")},
        ),
    )
    assert finished(given).splitlines()[1:] == ["", "> ab", answers[0], "", "> cd", answers[1]]
    assert piped.stdout.splitlines()[1:] == answers and piped.returncode == 0, piped.stderr


@pytest.mark.exhaustive
def test_beams_samples_and_stop_strings(folder):
    beams = start(
        "generate.py",
        f"--weights={folder}",
        "--beams=3",
        "--length_penalty=0.5",
        "--max_tokens=5",
        "--log_probs",
        "ab",
        "cde",
    )
    several = start(
        "generate.py",
        f"--weights={folder}",
        "--samples=2",
        "--max_tokens=9",
        "--presence_penalty=0.5",
        "--frequency_penalty=0.1",
        "--min_p=0.01",
        "--stop=a|dd",
        "ab",
    )
    (model, params, _), words = pretrained.load(folder), models.read_tokenizer(folder)
    tokens, lengths = models.padded([words.encode("ab"), words.encode("cde")])
    best = models.beam_search(
        model, params, tokens, beams=3, max_tokens=5, length_penalty=0.5, lengths=lengths
    )
    texts = [line for line in finished(beams).splitlines()[1:] if line][:4]
    assert texts[::2] == [
        "ab" + words.decode(best.tokens[0, 0]),
        "cde" + words.decode(best.tokens[1, 0]),
    ]
    assert [float(text[7:-1]) for text in texts[1::2]] == pytest.approx(
        best.scores[:, 0].tolist(), abs=2e-4
    )
    out = models.generate(
        model,
        params,
        tokens[:1, :2],
        jax.random.key(0),
        max_tokens=9,
        samples=2,
        temperature=0.8,
        top_p=0.95,
        min_p=0.01,
        presence_penalty=0.5,
        frequency_penalty=0.1,
    )
    want = ["ab" + re.split("a|dd", words.decode(row))[0] for row in out.tokens]
    assert [line for line in finished(several).splitlines()[1:] if line][:2] == want


def test_both_forms_of_the_weights_are_one(stories):
    """What generate.py does on a CPU: blocks one by one."""
    model, params = llama2c.load(stories)
    assert model == models.Decoder(**LLAMA)
    apart, taken = models.unstack(model, params)
    assert not apart.stacked and set(taken["blocks"]) == {"0"}
    same(jax.tree.map(lambda leaf: leaf[None], taken["blocks"]["0"]), params["blocks"])


@pytest.mark.exhaustive
def test_a_folder_with_config_json_is_fine_tuned(tmp_path):
    model = models.Decoder(6, 16, 2, 4, 2, 24, context=32, head_dim=8, tied=True)
    pretrained.save(model, filled(model), {}, tmp_path / "weights", names="huggingface")
    (tmp_path / "weights" / "characters.json").write_text('"abcdef"')
    (tmp_path / "one.txt").write_text("abc def ".replace(" ", "") * 200)
    flags = ("--dataset=text", f"--data_dir={tmp_path}", "--steps=40", "--learning_rate=0.01")
    run = finished(
        start("finetune.py", f"--weights={tmp_path}/weights", *flags, f"--workdir={tmp_path}/run")
    )
    assert re.search(r"Decoder, huggingface names: [\d,]+ parameters, [\d,]+ trained \(100", run)
    assert float(run.splitlines()[-1].removeprefix("validation loss ")) < 1.0
    out = finished(
        start(
            "generate.py",
            f"--weights={tmp_path}/run/merged",
            "--temperature=0",
            "--max_tokens=6",
            "ab",
        )
    )
    assert "abcdefab" in out


@pytest.mark.exhaustive
def test_a_folder_with_config_json_continues_a_text(tmp_path):
    model = models.Decoder(6, 16, 2, 4, 2, 24, context=32, head_dim=8, tied=True)
    pretrained.save(model, filled(model), {}, tmp_path, names="huggingface")
    (tmp_path / "characters.json").write_text('"abcdef"')
    out = finished(
        start("generate.py", f"--weights={tmp_path}", "--temperature=0", "--max_tokens=6", "ab")
    )
    assert "Decoder, " in out.splitlines()[0] and out.splitlines()[2].startswith("ab")
    (tmp_path / "characters.json").write_text('"abcdefghijk"')
    error = finished(start("generate.py", f"--weights={tmp_path}", "ab"), code=2)
    assert (
        "the tokenizer has 11 tokens, the model 6: use a tokenizer and a model of one vocabulary"
        in error
    )
