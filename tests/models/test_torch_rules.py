"""Rules for the layers that PyTorch keeps in its own way, against its formulas in NumPy."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fnet import layers as nn
from fnet import models
from fnet.models import pretrained
from fnet.models.pretrained import Names, torch


class One(models.Model):
    """A model of one layer, "x"."""

    layer: Any
    shape: tuple
    NAMES: ClassVar = {}

    def forward(self, scope, x, *others):
        return self.layer(scope["x"], x, *others)

    def example(self):
        shapes = self.shape if isinstance(self.shape[0], tuple) else (self.shape,)
        return tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)


def array(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def named(layer, shape, *rules):
    kind = type("Named", (One,), {"NAMES": {"torch": Names(rules, metadata={"format": "pt"})}})
    return kind(layer, shape)


def loaded(tmp_path, model, arrays):
    save_file(arrays, tmp_path / "x.safetensors", metadata={"format": "pt"})
    return pretrained.load(model, tmp_path / "x.safetensors")[0]


def back(tmp_path, model, params):
    return load_file(pretrained.save(model, params, {}, tmp_path / "back.safetensors"))


def close(ours, theirs):
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-6 * max(1, np.abs(theirs).max()))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


# Transposed convolutions.


@pytest.mark.parametrize(
    ("inputs", "outputs", "groups"), [(4, 4, 1), (4, 6, 1), (4, 6, 2), (6, 3, 3)]
)
def test_conv_transpose(tmp_path, inputs, outputs, groups):
    """y[o, 2h+a, 2w+b] = sum_i x[i, h, w] weight[i, o, a, b], for the channels of each group."""
    weight, bias = array(inputs, outputs // groups, 2, 2), array(outputs)
    layer = nn.ConvTranspose(outputs, 2, 2, padding="VALID", groups=groups)
    model = named(layer, (1, 3, 3, inputs), torch.conv_transpose("x", "up", groups))
    params = loaded(tmp_path, model, {"up.weight": weight, "up.bias": bias})
    x = array(2, 3, 3, inputs)
    parts = zip(np.split(x, groups, -1), np.split(weight, groups))
    want = [np.einsum("nhwi,ioab->nhawbo", *part).reshape(2, 6, 6, -1) for part in parts]
    close(model(params, x), np.concatenate(want, -1) + bias)
    again = back(tmp_path, model, params)
    np.testing.assert_array_equal(again["up.weight"], weight)
    np.testing.assert_array_equal(again["up.bias"], bias)


def test_convolutions_and_transposed_ones_are_told_apart(tmp_path):
    arrays = {"up.weight": array(4, 4, 2, 2), "up.bias": array(4)}
    up = named(nn.ConvTranspose(4, 2, 2), (1, 4, 4, 4), torch.conv("x", "up"))
    with pytest.raises(ValueError, match=r"right for Conv or .* For PyTorch's, use torch\.conv_t"):
        loaded(tmp_path, up, arrays)
    down = named(nn.Conv(4, 2), (1, 4, 4, 4), torch.conv_transpose("x", "up"))
    with pytest.raises(ValueError, match=r"right for ConvTranspose only.*use torch\.conv;"):
        loaded(tmp_path, down, arrays)


# Recurrent layers.


def recurrent_arrays(prefix, gates, i, f, ends, bias=True):
    arrays = {}
    for seed, (end, width) in enumerate(zip(ends, i)):
        arrays[f"{prefix}weight_ih{end}"] = array(gates * f, width, seed=seed)
        arrays[f"{prefix}weight_hh{end}"] = array(gates * f, f, seed=seed + 50)
        if bias:
            arrays[f"{prefix}bias_ih{end}"] = array(gates * f, seed=seed + 100)
            arrays[f"{prefix}bias_hh{end}"] = array(gates * f, seed=seed + 150)
    return arrays


def lstm(arrays, end, x):
    """PyTorch's nn.LSTM: i, f, g, o = split(W_ih x + b_ih + W_hh h + b_hh)."""
    wi, wh, bi, bh = (
        arrays[f"rnn.{n}{end}"] for n in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    )
    h = c = np.zeros((len(x), wh.shape[1]))
    outputs = []
    for t in range(x.shape[1]):
        i, f, g, o = np.split(x[:, t] @ wi.T + bi + h @ wh.T + bh, 4, -1)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        outputs.append(h)
    return np.stack(outputs, 1)


def gru(arrays, end, x):
    """PyTorch's nn.GRU: n = tanh(W_in x + b_in + r * (W_hn h + b_hn))."""
    wi, wh, bi, bh = (
        arrays[f"rnn.{n}{end}"] for n in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    )
    h = np.zeros((len(x), wh.shape[1]))
    outputs = []
    for t in range(x.shape[1]):
        rx, zx, nx = np.split(x[:, t] @ wi.T + bi, 3, -1)
        rh, zh, nh = np.split(h @ wh.T + bh, 3, -1)
        z, n = sigmoid(zx + zh), np.tanh(nx + sigmoid(rx + rh) * nh)
        h = (1 - z) * n + z * h
        outputs.append(h)
    return np.stack(outputs, 1)


def rnn(arrays, end, x):
    wi, wh, bi, bh = (
        arrays[f"rnn.{n}{end}"] for n in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    )
    h, outputs = np.zeros((len(x), wh.shape[1])), []
    for t in range(x.shape[1]):
        h = np.tanh(x[:, t] @ wi.T + bi + h @ wh.T + bh)
        outputs.append(h)
    return np.stack(outputs, 1)


KINDS = {"lstm": (nn.LSTM, 4, lstm), "gru": (nn.GRU, 3, gru), "rnn": (nn.RNN, 1, rnn)}


@pytest.mark.parametrize("kind", KINDS)
def test_recurrent_layers_in_both_directions(kind, tmp_path):
    layer, gates, formula = KINDS[kind]
    arrays = recurrent_arrays("rnn.", gates, (3, 3), 3, ("_l0", "_l0_reverse"))
    model = named(layer(3, bidirectional=True), (1, 5, 3), getattr(torch, kind)("x", "rnn"))
    params, x = loaded(tmp_path, model, arrays), array(2, 5, 3)
    both = lambda held: np.concatenate(
        [formula(held, "_l0", x), formula(held, "_l0_reverse", x[:, ::-1])[:, ::-1]], -1
    )
    close(model(params, x), both(arrays))
    again = back(tmp_path, model, params)
    assert {key: value.shape for key, value in again.items()} == {
        key: value.shape for key, value in arrays.items()
    }
    close(both(again), both(arrays))


@nn.layer
def tower(scope, x, *, kind, depth):
    for i in range(depth):
        x = kind(scope[f"rnn{i}"], x)
    return x


@pytest.mark.parametrize("kind", KINDS)
def test_several_recurrent_layers(kind, tmp_path):
    layer, gates, formula = KINDS[kind]
    arrays = recurrent_arrays("rnn.", gates, (4, 3, 3), 3, ("_l0", "_l1", "_l2"))
    rules = getattr(torch, kind)("x/rnn{i}", "rnn", layer="{i}")
    model = named(tower(kind=layer(3), depth=3), (1, 5, 4), rules)
    params, x = loaded(tmp_path, model, arrays), array(2, 5, 4)
    want = formula(arrays, "_l2", formula(arrays, "_l1", formula(arrays, "_l0", x)))
    close(model(params, x), want)


@pytest.mark.parametrize("kind", KINDS)
def test_recurrent_cells_and_layers_without_biases(kind, tmp_path):
    layer, gates, _ = KINDS[kind]
    for arrays, number, bias in (
        (recurrent_arrays("rnn.", gates, (3,), 3, ("",)), None, True),
        (recurrent_arrays("rnn.", gates, (3,), 3, ("_l0",), bias=False), 0, False),
    ):
        rules = getattr(torch, kind)("x", "rnn", layer=number)
        model = named(layer(3, use_bias=bias), (1, 5, 3), rules)
        params = loaded(tmp_path, model, arrays)
        assert back(tmp_path, model, params).keys() == arrays.keys()
        kernel = next(value for key, value in arrays.items() if "weight_ih" in key)
        np.testing.assert_array_equal(params["x"]["kernel"], kernel.T)


def test_wrong_rules_for_recurrent_layers(tmp_path):
    arrays = recurrent_arrays("rnn.", 3, (3, 3), 3, ("_l0", "_l0_reverse"))
    with pytest.raises(ValueError, match=r"'x/forward/kernel', an array of a GRU.*use torch\.gru"):
        loaded(
            tmp_path,
            named(nn.GRU(3, bidirectional=True), (1, 5, 3), torch.lstm("x", "rnn")),
            arrays,
        )
    swapped = [
        pretrained.Rule("x/kernel", "rnn.weight_hh_l0", pretrained.DENSE),
        *torch.gru("x", "rnn")[1:],
    ]
    with pytest.raises(ValueError, match="that of another array of the layer"):
        loaded(tmp_path, named(nn.GRU(3), (1, 5, 3), *swapped), arrays)
    turned = torch.gru("x", "rnn")
    turned = [
        pretrained.Rule("x/forward/kernel", "rnn.weight_ih_l0_reverse", pretrained.DENSE),
        *turned,
    ]
    with pytest.raises(ValueError, match="that of another array of the layer"):
        loaded(tmp_path, named(nn.GRU(3, bidirectional=True), (1, 5, 3), *turned), arrays)


def test_an_lstm_with_projections_is_refused(tmp_path):
    arrays = recurrent_arrays("rnn.", 4, (3,), 3, ("_l0",)) | {"rnn.weight_hr_l0": array(2, 3)}
    with pytest.raises(ValueError, match=r"'rnn\.weight_hr_l0': fnet's LSTM has no projection"):
        loaded(tmp_path, named(nn.LSTM(3), (1, 5, 3), torch.lstm("x", "rnn")), arrays)


# Attention.


def attention(arrays, heads, x, source):
    """PyTorch's nn.MultiheadAttention with batch_first."""
    e = x.shape[-1]
    if "a.in_proj_weight" in arrays:
        weights = np.split(arrays["a.in_proj_weight"], 3)
    else:
        weights = [arrays[f"a.{name}_proj_weight"] for name in "qkv"]
    biases = np.split(arrays["a.in_proj_bias"], 3)
    q, k, v = (
        (value @ weight.T + bias).reshape(len(x), -1, heads, e // heads)
        for value, weight, bias in zip((x, source, source), weights, biases)
    )
    logits = np.einsum("bthd,bshd->bhts", q, k) / np.sqrt(e // heads)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    y = np.einsum("bhts,bshd->bthd", weights / weights.sum(-1, keepdims=True), v)
    y = y.reshape(*x.shape)
    return y @ arrays["a.out_proj.weight"].T + arrays["a.out_proj.bias"]


@pytest.mark.parametrize("width", [4, 6])
def test_attention(width, tmp_path):
    """Keys and values of the queries' size are one matrix with them; of another size, three."""
    arrays = {"a.in_proj_weight": array(12, 4)}
    if width != 4:
        arrays = {"a.q_proj_weight": array(4, 4)}
        arrays |= {f"a.{name}_proj_weight": array(4, width, seed=i) for i, name in enumerate("kv")}
    arrays |= {
        "a.in_proj_bias": array(12),
        "a.out_proj.weight": array(4, 4),
        "a.out_proj.bias": array(4),
    }
    model = named(nn.Attention(2), ((1, 3, 4), (1, 5, width)), torch.attention("x", "a"))
    params = loaded(tmp_path, model, arrays)
    x, source = array(2, 3, 4), array(2, 5, width)
    close(model(params, x, source), attention(arrays, 2, x, source))
    again = back(tmp_path, model, params)
    assert again.keys() == arrays.keys()
    for key, value in arrays.items():
        np.testing.assert_array_equal(again[key], value)


def test_attention_with_bias_k_is_refused(tmp_path):
    arrays = {
        "a.in_proj_weight": array(12, 4),
        "a.in_proj_bias": array(12),
        "a.out_proj.weight": array(4, 4),
        "a.out_proj.bias": array(4),
        "a.bias_k": array(1, 1, 4),
        "a.bias_v": array(1, 1, 4),
    }
    with pytest.raises(ValueError, match=r"'a\.bias_k': fnet's Attention has no such array"):
        loaded(tmp_path, named(nn.Attention(2), (1, 3, 4), torch.attention("x", "a")), arrays)


# Weight norm.


def norm_of(v, dim):
    axes = tuple(i for i in range(v.ndim) if i != dim)
    return np.sqrt((v**2).sum(axes, keepdims=True)) if dim is not None else np.sqrt((v**2).sum())


@pytest.mark.parametrize("parametrized", [False, True])
@pytest.mark.parametrize("dim", [0, 1, 2, None])
def test_weight_norm(dim, parametrized, tmp_path):
    v = array(4, 3, 5)
    g = np.abs(array(*np.shape(norm_of(v, dim)))) + 0.1
    names = ("parametrizations.weight.original0", "parametrizations.weight.original1")
    g_key, v_key = names if parametrized else ("weight_g", "weight_v")
    arrays = {f"c.{g_key}": np.asarray(g, np.float32), f"c.{v_key}": v, "c.bias": array(4)}
    rules = torch.weight_norm(torch.conv("x", "c"), dim, parametrized=parametrized)
    model = named(nn.Conv(4, 5), (1, 8, 3), rules)
    params = loaded(tmp_path, model, arrays)
    weight = g * v / norm_of(v, dim)
    close(params["x"]["kernel"], weight.transpose(2, 1, 0))
    again = back(tmp_path, model, params)
    assert {key: value.shape for key, value in again.items()} == {
        key: value.shape for key, value in arrays.items()
    }
    v = again[f"c.{v_key}"]
    close(again[f"c.{g_key}"] * v / norm_of(v, dim), weight)


def test_weight_norm_of_a_row_of_zeros(tmp_path):
    """PyTorch divides v by its norm, so v must not be 0 where the kernel is."""
    model = named(nn.Dense(3), (1, 4), torch.weight_norm(torch.dense("x", "fc")))
    params = {"x": {"kernel": jnp.asarray(array(4, 3)).at[:, 1].set(0), "bias": jnp.zeros(3)}}
    held = back(tmp_path, model, params)
    weight = held["fc.weight_g"] * held["fc.weight_v"] / norm_of(held["fc.weight_v"], 0)
    close(weight, params["x"]["kernel"].T)


def test_weight_norm_of_transposed_convolutions_and_recurrent_layers(tmp_path):
    v, g = array(4, 2, 3), np.abs(array(4, 1, 1)) + 0.1
    rules = torch.weight_norm(torch.conv_transpose("x", "c"))
    model = named(nn.ConvTranspose(2, 3, use_bias=False), (1, 5, 4), rules)
    params = loaded(tmp_path, model, {"c.weight_g": g, "c.weight_v": v})
    close(params["x"]["kernel"], (g * v / norm_of(v, 0)).transpose(2, 0, 1))

    arrays = recurrent_arrays("rnn.", 4, (3,), 3, ("_l0",))
    v = arrays.pop("rnn.weight_hh_l0")
    arrays |= {"rnn.weight_hh_l0_g": 2 * norm_of(v, 0), "rnn.weight_hh_l0_v": v}
    rules = torch.weight_norm(torch.lstm("x", "rnn"), name="weight_hh_l0")
    params = loaded(tmp_path, named(nn.LSTM(3), (1, 5, 3), rules), arrays)
    close(params["x"]["recurrent_kernel"], 2 * v.T)
    with pytest.raises(ValueError, match="expected rules of a layer with a weight 'w'"):
        torch.weight_norm(torch.dense("x", "fc"), name="w")


# Stacks, models of one layer, and layers that a file keeps as one.


def test_a_stack_of_layers(tmp_path):
    arrays = {}
    for i in range(3):
        each = recurrent_arrays("", 3, (4,), 4, ("_l0",))
        arrays |= {f"h.{i}.rnn.{key}": value + i for key, value in each.items()}
    block = nn.Sequential(rnn=nn.GRU(4))
    model = named(nn.Stack(block, 3), (1, 5, 4), torch.gru("x/rnn", "h.{i}.rnn"))
    params = loaded(tmp_path, model, arrays)
    want = x = array(2, 5, 4)
    for i in range(3):
        held = {key.replace(f"h.{i}.", ""): value for key, value in arrays.items()}
        want = gru(held, "_l0", want)
    close(model(params, x), want)


class Bare(nn.Dense, models.Model):
    NAMES: ClassVar = {"torch": Names(torch.dense("", ""))}

    def example(self):
        return jax.ShapeDtypeStruct((1, 4), jnp.float32)


def test_a_model_that_is_a_layer(tmp_path):
    arrays = {"weight": array(3, 4), "bias": array(3)}
    np.testing.assert_array_equal(loaded(tmp_path, Bare(3), arrays)["kernel"], arrays["weight"].T)


def test_several_layers_that_are_one_in_the_file(tmp_path):
    parts = tuple(f"x/{name}" for name in ("query", "key", "value"))
    rules = torch.dense(parts, "qkv"), torch.dense("x/out", "proj")
    arrays = {
        "qkv.weight": array(12, 4),
        "qkv.bias": array(12),
        "proj.weight": array(4, 4),
        "proj.bias": array(4),
    }
    params = loaded(tmp_path, named(nn.Attention(2), (1, 3, 4), *rules), arrays)
    np.testing.assert_array_equal(params["x"]["key"]["kernel"], arrays["qkv.weight"][4:8].T)
    np.testing.assert_array_equal(params["x"]["value"]["bias"], arrays["qkv.bias"][8:])
