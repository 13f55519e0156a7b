"""Weights in and out: every key accounted for, and every wrong file answered with a sentence."""

import dataclasses
import re
from dataclasses import KW_ONLY
from typing import ClassVar

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checks import same
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from fnet import layers as nn
from fnet import models
from fnet.models import pretrained
from fnet.models.pretrained import DENSE, DEPTHWISE, Names, Rule, Spare, Tied, keras, torch
from fnet.models.weights import _config, _tensors

QKV = ("query", "key", "value")


@nn.layer
def gate(scope, x):  # [batch, width, features]
    q, k, v = (nn.Dense(size, use_bias=False)(scope[name], x) for name, size in zip(QKV, (4, 4, 6)))
    return x + nn.Dense(4)(scope["out"], jnp.concatenate([q * jax.nn.sigmoid(k), v], -1))


class Small(models.Model):
    """Everything that rules can say: convolutions, a stack, fused projections, ties, prefixes, two
    frameworks."""

    PRESETS: ClassVar = {"small": {}, "small_deep": {"depth": 3}}
    HUB: ClassVar = {"small": ("someone/small", "torchvision:small")}
    NAMES: ClassVar = {
        "torch": Names(
            (
                torch.conv("stem/conv", "conv"),
                torch.batch_norm("stem/norm", "bn"),
                Rule("stem/depthwise/kernel", "dw.weight", pretrained.CONV),
                Rule(tuple(f"blocks/{name}/kernel" for name in QKV), "h.{i}.qkv.weight", DENSE),
                torch.dense("blocks/out", "h.{i}.proj"),
                torch.embed("embed", "wte"),
                Tied("head.weight", "embed/embedding"),
                Spare("h.{i}.mask", "blocks/out/kernel"),
                Spare("position_ids"),
            ),
            prefixes=("", "model."),
            config={"epsilon": 1e-5},
            metadata={"format": "pt"},
        ),
        "keras": Names(
            (
                keras.conv("stem/conv", "conv2d"),
                keras.batch_norm("stem/norm", "bn"),
                Rule("stem/depthwise/kernel", "dw/depthwise_kernel", DEPTHWISE),
                *(
                    keras.dense(f"blocks/{name}", f"block{{i+1}}{{i:letter}}/{name}")
                    for name in (*QKV, "out")
                ),
                keras.embed("embed", "embedding"),
            ),
            config={"epsilon": 1e-3},
        ),
    }

    _: KW_ONLY
    depth: int = 2
    epsilon: float = 1e-5

    def forward(self, scope, x):  # [batch, height, width, 3]
        stem = scope["stem"]
        x = nn.BatchNorm(epsilon=self.epsilon)(stem["norm"], nn.Conv(4, (3, 2))(stem["conv"], x))
        x = nn.DepthwiseConv((3, 1), use_bias=False)(stem["depthwise"], x).mean(1)
        return nn.Embed(7, 4).attend(
            scope["embed"], nn.Stack(gate(), self.depth)(scope["blocks"], x)
        )

    def example(self):
        return jax.ShapeDtypeStruct((1, 6, 6, 3), jnp.float32)


TORCH, KERAS = Small(), Small(epsilon=1e-3)


@pytest.fixture
def trees():
    numbers = np.random.default_rng(0)
    draw = lambda leaf: jnp.asarray(numbers.standard_normal(leaf.shape, np.float32))
    return tuple(jax.tree.map(draw, tree) for tree in TORCH.spec(TORCH.example()))


@pytest.fixture
def file(trees, tmp_path):
    return pretrained.save(TORCH, *trees, tmp_path / "model.safetensors")


def rewritten(file, change, metadata=None):
    arrays = load_file(file)
    change(arrays)
    save_file(arrays, file, metadata)


def refused(error, text, *args, **options):
    with pytest.raises(error, match=text) as caught:
        pretrained.load(*args, **options)
    assert "\n" not in str(caught.value)


@pytest.fixture
def small_is_published(monkeypatch, tmp_path):
    monkeypatch.setattr(models, "Small", Small, raising=False)
    monkeypatch.setattr(models, "__all__", [*models.__all__, "Small"])
    monkeypatch.setenv("FNET_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))


# What stands in a file.


def test_torch_names_and_layouts(trees, file):
    params, state = trees
    arrays = load_file(file)
    assert {key: array.shape for key, array in arrays.items()} == {
        "conv.weight": (4, 3, 3, 2),
        "conv.bias": (4,),
        "dw.weight": (4, 1, 3, 1),
        "bn.weight": (4,),
        "bn.bias": (4,),
        "bn.running_mean": (4,),
        "bn.running_var": (4,),
        "bn.num_batches_tracked": (),
        "wte.weight": (7, 4),
        **{
            f"h.{i}.{key}": shape
            for i in (0, 1)
            for key, shape in {
                "qkv.weight": (14, 4),
                "proj.weight": (4, 10),
                "proj.bias": (4,),
            }.items()
        },
    }
    blocks = params["blocks"]
    for i in (0, 1):
        fused = np.concatenate([blocks[name]["kernel"][i].T for name in QKV])
        np.testing.assert_array_equal(arrays[f"h.{i}.qkv.weight"], fused)
        np.testing.assert_array_equal(arrays[f"h.{i}.proj.weight"], blocks["out"]["kernel"][i].T)
    kernel = params["stem"]["conv"]["kernel"]  # [height, width, in, out]
    np.testing.assert_array_equal(arrays["conv.weight"], np.einsum("hwio->oihw", kernel))
    np.testing.assert_array_equal(arrays["bn.running_var"], state["stem"]["norm"]["var"])
    with safe_open(file, "np") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_keras_names_and_layouts(trees, tmp_path):
    params, _ = trees
    file = pretrained.save(KERAS, *trees, tmp_path)
    arrays = load_file(file)
    assert sorted(arrays) == sorted(
        [
            "conv2d/kernel",
            "conv2d/bias",
            "dw/depthwise_kernel",
            "bn/gamma",
            "bn/beta",
            "bn/moving_mean",
            "bn/moving_variance",
            "embedding/embeddings",
            *(
                f"{block}/{name}/kernel"
                for block in ("block1a", "block2b")
                for name in (*QKV, "out")
            ),
            "block1a/out/bias",
            "block2b/out/bias",
        ]
    )
    assert arrays["dw/depthwise_kernel"].shape == (3, 1, 4, 1)
    np.testing.assert_array_equal(arrays["conv2d/kernel"], params["stem"]["conv"]["kernel"])
    np.testing.assert_array_equal(
        arrays["block2b/value/kernel"], params["blocks"]["value"]["kernel"][1]
    )
    same(pretrained.load(KERAS, file), trees)


def test_what_is_loaded_is_what_was_saved(trees, file):
    params, state = pretrained.load(TORCH, file)
    same((params, state), trees)
    TORCH.check(params, TORCH.example(), state=state)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves((params, state)))
    same(pretrained.load(TORCH, file.parent), trees)
    same(pretrained.load(TORCH, str(file), names="torch"), trees)


def test_like_takes_over_what_a_model_has_no_place_for(trees, file, tmp_path):
    def change(arrays):
        arrays |= {
            "bn.num_batches_tracked": np.array(7),
            "h.0.mask": np.ones(2, bool),
            "h.1.mask": np.zeros(2, bool),
            "head.weight": arrays["wte.weight"],
            "position_ids": np.arange(3),
        }
        for key in list(arrays):
            if key not in ("head.weight", "position_ids"):
                arrays[f"model.{key}"] = arrays.pop(key)

    rewritten(file, change, {"format": "pt", "from": "somewhere"})
    params, state = pretrained.load(TORCH, file)
    same((params, state), trees)
    back = pretrained.save(TORCH, params, state, tmp_path / "back.safetensors", like=file)
    same(load_file(back), load_file(file))
    with safe_open(back, "np") as opened:
        assert opened.metadata() == {"format": "pt", "from": "somewhere"}


# Keys and shapes.


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda a: a.update({"conv.weihgt": a.pop("conv.weight")}),
            r"names of torch: 'conv.weight' is missing \(for 'stem/conv/kernel'; the file has "
            r"'conv.weihgt'\); "
            r"'conv.weihgt' \(4, 3, 3, 2\) is not expected \(did you mean 'conv.weight'\?\)$",
        ),
        (
            lambda a: a.pop("h.1.qkv.weight"),
            "'h.1.qkv.weight' is missing \\(for 'blocks/query/kernel' and 'blocks/key/kernel' and "
            "'blocks/value/kernel'\\)$",
        ),
        (
            lambda a: a.update(more=np.ones(3, np.float32)),
            r"match this Small .*: 'more' \(3,\) is not expected$",
        ),
        (
            lambda a: a.update({"h.2.proj.bias": np.ones(4, np.float32)}),
            r"'h.2.proj.bias' \(4,\) is not expected$",
        ),
        (
            lambda a: a.update({"h.0.proj.weight": np.ones((10, 4), np.float32)}),
            r"'h.0.proj.weight': expected shape \(4, 10\) for 'blocks/out/kernel', got \(10, 4\)$",
        ),
        (
            lambda a: a.update({"head.weight": a["wte.weight"] + 1}),
            "'head.weight' must equal 'embed/embedding', because the model ties the two "
            r"\('tie_word_embeddings' in config.json\)$",
        ),
        (
            lambda a: [a.pop(key) for key in list(a) if key not in ("conv.bias", "bn.bias")],
            r"is missing .*; and 4 more$",
        ),
        (
            lambda a: [a.pop(key) for key in list(a) if key != "conv.bias"],
            "contains no weights of a Small with the names of",
        ),
    ],
)
def test_a_key_that_does_not_fit(file, change, text):
    rewritten(file, change)
    refused(ValueError, text, TORCH, file)


def test_another_configuration(file, trees, tmp_path):
    refused(
        ValueError,
        r"with the names of torch need a Small with epsilon=1e-05, got epsilon=0.001; use "
        r"dataclasses.replace\(model, epsilon=1e-05\)",
        KERAS,
        file,
    )
    refused(ValueError, r"'h.2.qkv.weight' is missing", Small(depth=3), file)
    with pytest.raises(
        ValueError, match="select the names to write for this Small: names='torch' or 'keras'"
    ):
        pretrained.save(Small(epsilon=0.1), *trees, tmp_path / "x.safetensors")
    with pytest.raises(
        ValueError, match=r"the names of torch need a \*.safetensors file; got .*x.pt"
    ):
        pretrained.save(TORCH, *trees, tmp_path / "x.pt")
    assert (
        pretrained.save(TORCH, *trees, tmp_path / "new") == tmp_path / "new" / "model.safetensors"
    )
    with pytest.raises(
        ValueError, match=r"Small: arrays do not match the model: 'embed/embedding' .* is missing"
    ):
        pretrained.save(
            TORCH, {k: v for k, v in trees[0].items() if k != "embed"}, trees[1], tmp_path
        )


def test_another_model(file, tmp_path):
    refused(
        ValueError,
        r"contains no weights of a ResNet with the names of torchvision or keras: its keys are "
        r"'bn.num_batches_tracked', .*; expected 'conv1.weight', .* for torchvision",
        models.ResNet.preset("resnet18"),
        file,
    )
    refused(ValueError, "Small has no names 'flax'; it has torch, keras", TORCH, file, names="flax")
    refused(
        TypeError,
        r"expected a model with NAMES for its weights, e.g. models.ResNet; got Dense",
        nn.Dense(3),
        file,
    )
    refused(TypeError, "pretrained.load: pass the path of the weights for this Small", TORCH)


@dataclasses.dataclass
class _Rules:
    rules: tuple
    text: str


@pytest.mark.parametrize(
    "case",
    [
        _Rules(
            (torch.conv("conv", "c"),),
            "Ruled, names of mine: no rule matches 'norm/bias', 'norm/scale', 'norm/mean'",
        ),
        _Rules(
            (torch.conv("conv", "c"), torch.batch_norm("norm", "c")),
            "the rules use 'c.weight' for 'conv/kernel' and",
        ),
        _Rules(
            (Rule(("conv/kernel", "conv/gain"), "c"),),
            "rule for 'c' needs 'conv/gain' in addition to 'conv/kernel'",
        ),
    ],
    ids=lambda case: "",
)
def test_rules_that_do_not_cover_a_model(case, file):
    class Ruled(models.Model):
        NAMES: ClassVar = {"mine": Names(case.rules)}

        def forward(self, scope, x):
            return nn.BatchNorm()(scope["norm"], nn.Conv(2, 3)(scope["conv"], x))

        def example(self):
            return jax.ShapeDtypeStruct((1, 6, 6, 3), jnp.float32)

    refused(ValueError, re.escape(case.text), Ruled(), file)


# Dtypes.


@pytest.mark.exhaustive
def test_dtypes_are_the_files_unless_a_cast_is_asked_for(trees, file):
    def narrow(arrays):
        for key, array in arrays.items():
            if array.dtype == np.float32:
                arrays[key] = array.astype(ml_dtypes.bfloat16)

    rewritten(file, narrow)
    params, state = pretrained.load(TORCH, file)
    assert {leaf.dtype.name for leaf in jax.tree.leaves((params, state))} == {"bfloat16"}
    same(params, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), trees[0]))
    wide, _ = pretrained.load(TORCH, file, dtype=jnp.float32)
    same(wide, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), trees[0]))
    back = load_file(pretrained.save(TORCH, params, state, file))
    assert back["h.0.qkv.weight"].dtype == ml_dtypes.bfloat16


def test_dtypes_that_are_no_parameters(file):
    rewritten(file, lambda arrays: arrays.update({"h.1.proj.bias": np.ones(4, np.float16)}))
    refused(
        TypeError,
        "parts of 'blocks/out/bias' have different dtypes, float16, float32; pass dtype=",
        TORCH,
        file,
    )
    rewritten(
        file,
        lambda arrays: arrays.update({f"h.{i}.proj.bias": np.ones(4, np.int8) for i in (0, 1)}),
    )
    refused(
        TypeError,
        "'h.0.proj.bias' has dtype int8, but 'blocks/out/bias' needs a floating-point",
        TORCH,
        file,
    )
    rewritten(
        file,
        lambda arrays: arrays.update({f"h.{i}.proj.bias": np.ones(4, np.float64) for i in (0, 1)}),
    )
    refused(
        TypeError,
        "bias' has dtype float64, which JAX supports only with jax_enable_x64; pass dtype=",
        TORCH,
        file,
    )
    params, _ = pretrained.load(TORCH, file, dtype="float32")
    same(params["blocks"]["out"]["bias"], jnp.ones((2, 4)))
    for dtype in (jnp.int8, "bool", jnp.complex64):
        with pytest.raises(
            TypeError, match=r"expected a floating-point dtype such as jnp.bfloat16; got dtype="
        ):
            pretrained.load(TORCH, file, dtype=dtype)


def test_arrays_are_mapped_and_copied_once(file):
    tensors = _tensors.read(file)
    assert not any(
        array.flags.writeable or array.flags.owndata for array in tensors.arrays.values()
    )
    place = _tensors.aligned((3, 5), np.float32)
    place[:] = 1
    put = jax.device_put(place, jax.devices("cpu")[0])
    assert put.unsafe_buffer_pointer() == place.ctypes.data, (
        "JAX copies what it could take as it is"
    )


def test_a_file_and_its_config_json_are_read_once(
    small_is_published, trees, file, tmp_path, monkeypatch
):
    """By every way that leads to a model: a model, a preset, and a folder."""
    read = []
    for module, name in (_tensors, "_mapped"), (_config, "read"):
        original = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda path, of=original: read.append(path.name) or of(path)
        )
    pretrained.load(TORCH, file)
    pretrained.load("small", file)
    assert pretrained.names_of(TORCH, file) == "torch"
    assert read == [file.name] * 3
    model, rng = models.GPT(24, 16, 2, 4, context=16), np.random.default_rng(0)
    draw = lambda spec: rng.normal(size=spec.shape).astype(np.float32)
    params = jax.tree.map(draw, model.spec(model.example()).params)
    pretrained.save(model, params, {}, tmp_path / "gpt")
    read.clear()
    again, loaded, _ = pretrained.load(tmp_path / "gpt")
    assert again == model and sorted(read) == ["config.json", "model.safetensors"]
    same(loaded, params)


# Presets and caches.


def test_presets():
    assert Small.preset("small_deep", epsilon=1e-3) == Small(depth=3, epsilon=1e-3)
    with pytest.raises(ValueError, match=r"Small has no preset 'smal'; did you mean 'small'\?"):
        Small.preset("smal")
    with pytest.raises(ValueError, match="Small has no preset 'xyz'; it has small, small_deep"):
        Small.preset("xyz")
    with pytest.raises(NotImplementedError, match=r"Model has no example\(self\)"):
        models.Model().example()


def test_a_name_finds_a_cache_and_the_model_of_its_weights(small_is_published, trees, tmp_path):
    snapshot = tmp_path / "hub" / "models--someone--small" / "snapshots" / "abc"
    for folder in (snapshot.parents[1] / "refs", snapshot, tmp_path / "own" / "small"):
        folder.mkdir(parents=True)
    (snapshot.parents[1] / "refs" / "main").write_text("abc\n")
    pretrained.save(TORCH, *trees, snapshot)
    assert pretrained.find("small") == pretrained.find("someone/small") == snapshot
    assert pretrained.model("small") == TORCH
    model, *read = pretrained.load("small")
    assert model == TORCH
    same(tuple(read), trees)
    same(pretrained.load(TORCH, "someone/small"), trees)

    pretrained.save(KERAS, *trees, tmp_path / "own" / "small")  # fnet's own cache comes first
    assert pretrained.find("small") == tmp_path / "own" / "small"
    assert pretrained.model("small") == KERAS
    assert pretrained.names_of(KERAS, "small") == "keras"
    model, *read = pretrained.load("small")
    assert model == KERAS
    same(tuple(read), trees)
    assert pretrained.model("small", snapshot) == TORCH
    model, *read = pretrained.load("small", snapshot)
    assert model == TORCH
    same(tuple(read), trees)


def test_a_name_that_is_not_on_this_disk(small_is_published, tmp_path):
    refused(
        FileNotFoundError,
        r"the weights 'small' are not on this disk: no such path, nothing in .*own/small, no "
        r"someone/small in Hugging Face's cache, .*hub \(.*\): download it with 'hf download "
        r"someone/small', or "
        r"copy its files to .*own/small; or write its model.safetensors in Python \(import "
        r"torchvision, .*"
        r"get_model\('small', weights='IMAGENET1K_V1'\).*\) and put it into .*own/small$",
        "small",
    )
    refused(FileNotFoundError, "download it with 'hf download small_deep'", "small_deep")
    refused(
        FileNotFoundError,
        "download it with 'hf download some/repository'",
        TORCH,
        "some/repository",
    )
    refused(
        FileNotFoundError,
        "no/such/file.safetensors: no such file or folder",
        TORCH,
        "no/such/file.safetensors",
    )
    refused(ValueError, "no model has a preset 'smaal'; did you mean 'small'?", "smaal")
    refused(ValueError, "no model has a preset 'zzz'; there are .*resnet50", "zzz")
    with pytest.raises(ValueError, match=r"no model has a preset 'smaal'; did you mean 'small'?"):
        pretrained.model("smaal")


def test_hugging_faces_cache_stands_where_its_client_puts_it(monkeypatch):
    for name in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME", "FNET_CACHE"):
        monkeypatch.delenv(name, raising=False)
    assert str(pretrained._hub.hugging_face()).endswith("/.cache/huggingface/hub")
    assert str(pretrained._hub.cache()).endswith("/.cache/fnet")
    monkeypatch.setenv("HF_HOME", "/somewhere")
    assert str(pretrained._hub.hugging_face()) == "/somewhere/hub"
    monkeypatch.setenv("HF_HUB_CACHE", "/elsewhere")
    assert str(pretrained._hub.hugging_face()) == "/elsewhere"
