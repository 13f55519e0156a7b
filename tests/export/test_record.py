"""`fnet export RUN`: the trained model of a run's folder, without the code of the user."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checks import close

from fnet import cli, export, models
from fnet import layers as nn
from fnet import training as tr

pytestmark = pytest.mark.usefixtures("quickly")
MODEL = models.CNN(10, (4, 6), (1, 1))
IMAGES = np.random.default_rng(0).integers(0, 256, (3, 8, 8, 1)).astype(np.uint8)
STANDARD = {"mean": np.float32([0.5]), "std": np.float32([0.25])}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of two steps."""
    folder, tx = tmp_path_factory.mktemp("run"), optax.sgd(0.1)
    params, state = MODEL.init(jax.random.key(0), jnp.zeros((1, 8, 8, 1)))

    def step(state, batch):
        def loss(params):
            y, new = MODEL(params, batch["x"], state=state.state, train=True)
            return jnp.square(y).mean(), new

        (value, new), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
        return state.apply(tx, grads, state=new), {"loss": value}

    export.record(
        folder, MODEL, labels=range(10), standardize=STANDARD, x=export.spec("b, 8, 8, 1")
    )
    tr.fit(
        step,
        tr.TrainState.create(params, tx, state=state),
        lambda i: {"x": np.ones((2, 8, 8, 1), np.float32)},
        steps=2,
        workdir=folder,
        tensorboard=False,
    )
    return folder


def test_a_run_is_exported(run, capsys):
    assert cli.main(["export", str(run), "--to=bundle"]) == 0
    assert capsys.readouterr().out.startswith(f"{run / 'model.fnet'}: step 2, ")
    bundle, snapshot = export.load(run / "model.fnet", check=True), tr.load(run)
    x = (IMAGES.astype(np.float32) / 255 - 0.5) / np.float32(0.25)
    want, _ = MODEL(snapshot.averaged, x, state=snapshot.state)
    close(bundle(x), want, 1e-6)
    close(bundle.run(IMAGES), want, 1e-5)
    assert bundle.labels == list("0123456789") and bundle.manifest["provenance"]["step"] == 2


def test_a_run_as_onnx(run, tmp_path):
    pytest.importorskip("onnxruntime")
    assert cli.main(["export", str(run), "--to=bundle,onnx", f"--output={tmp_path}"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.fnet", "model.onnx"]


@pytest.mark.filterwarnings("ignore:Program.litert")  # of max and of sums
def test_a_run_for_litert(run, tmp_path, capsys):
    assert cli.main(["export", str(run), "--to=litert", f"--output={tmp_path}", "--sizes=2"]) == 2
    assert "--sizes=2: expected names and sizes, such as b=1,t=64" in capsys.readouterr().err
    interpreter = pytest.importorskip("ai_edge_litert.interpreter")
    sizes = ["--sizes=b=1", "--sizes=b=3"]
    assert (
        cli.main(["export", str(run), "--to=bundle,onnx,litert", f"--output={tmp_path}", *sizes])
        == 0
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "model.fnet",
        "model.onnx",
        "model.tflite",
    ]
    x = np.random.default_rng(0).normal(size=(3, 8, 8, 1)).astype(np.float32)
    runner = interpreter.Interpreter(str(tmp_path / "model.tflite")).get_signature_runner(
        "predict_b3"
    )
    snapshot = tr.load(run)
    close(runner(x=x)["output"], MODEL(snapshot.averaged, x, state=snapshot.state)[0], 1e-5)


def test_a_language_model_has_the_entries_with_which_a_server_generates(tmp_path):
    model, tx = models.GPT(11, 8, 1, 2, context=8, stacked=False), optax.sgd(0.1)
    params, _ = model.init(jax.random.key(0), model.example())
    step = lambda state, batch: (
        state.apply(tx, jax.tree.map(jnp.zeros_like, state.params)),
        {"loss": jnp.zeros(())},
    )
    export.record(tmp_path, model, tokens=export.spec("b, t", "int32", where="t <= 8"))
    (tmp_path / "characters.json").write_text(json.dumps("abcdefghijk"))
    tr.fit(
        step,
        tr.TrainState.create(params, tx),
        lambda i: {"x": np.zeros(1)},
        steps=1,
        workdir=tmp_path,
        tensorboard=False,
    )
    assert cli.main(["export", str(tmp_path)]) == 0
    bundle = export.load(tmp_path / "model.fnet", check=True)
    assert bundle.entries == (
        "predict",
        "prefill",
        "decode",
        "extend",
    ) and "characters.json" in bundle.files("tokenizer")
    tokens = np.array([[1, 2, 3, 4]], np.int32)
    first = bundle.call(
        "prefill", tokens[:, :3], model.cache(jax.ShapeDtypeStruct((1, 8), jnp.int32))
    )
    last = bundle.call("decode", tokens[:, 3:], first["cache"])
    close(last["logits"], model(params, tokens)[:, -1], 1e-5)


@pytest.mark.parametrize(
    "model",
    [
        MODEL,
        models.GPT(11, 8, 2, 2, context=8),
        models.MLP((6, 3)),
        models.Decoder(11, 8, 2, 4, 2, 12),
        models.LSTMLanguageModel(11, 8),
        models.Bert(11, 8, 2, 2, 16),
        models.ViT(8, 2, 2, patch=4, size=8),
    ],
    ids=lambda model: type(model).__name__,
)
def test_a_model_is_read_as_it_was_recorded(model, tmp_path):
    export.record(tmp_path, model, x=export.spec("b, t", "int32", where="t <= 8"))
    found = export.read_record(tmp_path)
    assert found.model == model and found.inputs == {
        "x": export.spec("b, t", "int32", where="t <= 8")
    }


def test_a_class_is_read_under_its_earlier_name(tmp_path):
    model = models.Decoder(11, 8, 2, 4, 2, 12)
    export.record(tmp_path, model, x=export.spec("b, t", "int32"))
    path = tmp_path / "model.json"
    path.write_text(path.read_text().replace('"Decoder"', '"Llama"'))
    assert export.read_record(tmp_path).model == model


def test_errors(run, tmp_path, capsys):
    assert cli.main(["export", str(run), "--to=pickle"]) == 2
    assert "'pickle' is not a format; expected bundle, onnx, litert, web" in capsys.readouterr().err
    assert cli.main(["export", str(tmp_path)]) == 2
    assert (
        "model.json: no such file; a run whose program calls export.record"
        in capsys.readouterr().err
    )
    with pytest.raises(
        TypeError, match=r"Dense is not a model of fnet.models; export it in your own code"
    ):
        export.record(tmp_path, nn.Dense(3), x=export.spec("b, 3"))
    for data in (
        "{",
        "[]",
        "{}",
        '{"model": "os.system"}',
        '{"model": "pretrained"}',
        '{"model": "MLP", "fields": {"depth": 3}, "inputs": {}, "labels": null, "standardize": null}',
    ):
        (tmp_path / "model.json").write_text(data)
        with pytest.raises(ValueError, match=r"model.json does not describe a model"):
            export.read_record(tmp_path)
    export.record(tmp_path, MODEL, x=export.spec("b, 8, 8, 1"))
    assert json.loads((tmp_path / "model.json").read_text())["model"] == "CNN"
