"""`pretrained.names`: which layer is which, the lines for it, and the proof."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_torch as tt
from safetensors.numpy import load_file, save_file

from fnet import layers as nn
from fnet.models import pretrained
from fnet.models.pretrained import Names, torch
from fnet.models.weights.proposal import _align


@pytest.fixture(autouse=True)
def tiny_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", tt.torch)


def array(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def affine(prefix, *shape, bias=True):
    held = {f"{prefix}.weight": array(*shape)}
    return held | ({f"{prefix}.bias": array(shape[0])} if bias else {})


def rules_in(proposal):
    """The rules of the printed lines."""
    held = {"pretrained": pretrained}
    exec(str(proposal), held)
    return held["NAMES"]["torch"].rules


@nn.layer
def mlp(scope, x):
    return nn.Dense(3)(scope["head"], jax.nn.relu(nn.Dense(8)(scope["fc"], x)))


# Lines.


def test_printed_lines_are_rules_that_load(tmp_path):
    arrays = {**affine("layers.0", 8, 4), **affine("layers.2", 3, 8)}
    proposal = pretrained.names(arrays, mlp(), jnp.ones((1, 4)))
    assert not proposal.unmatched and not proposal.unread and proposal.proof is None
    params, state = pretrained.load(mlp(), arrays, names=proposal)
    np.testing.assert_array_equal(params["fc"]["kernel"], arrays["layers.0.weight"].T)
    printed = Names(rules_in(proposal), inputs=(jnp.ones((1, 4)),))
    again, _ = pretrained.load(mlp(), arrays, names=printed)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, params, again))
    file = pretrained.save(mlp(), params, state, tmp_path / "x.safetensors", names=proposal)
    back = load_file(file)
    assert back.keys() == arrays.keys()
    assert all(np.array_equal(back[key], value) for key, value in arrays.items())
    from_file = pretrained.names(file, mlp(), jnp.ones((1, 4)))
    assert from_file.lines == proposal.lines


@nn.layer
def tower(scope, x, *, depth=3, stacked=False):
    block = nn.Sequential(norm=nn.LayerNorm(), fc=nn.Dense(4))
    if stacked:
        return nn.Stack(block, depth)(scope["blocks"], x)
    for i in range(depth):
        x = block(scope[f"block{i}"], x)
    return x


def tower_arrays(first=0):
    arrays = {}
    for i in range(first, first + 3):
        arrays |= affine(f"h.{i}.mlp", 4, 4) | affine(f"h.{i}.ln", 4)
    return arrays


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("stacked", [False, True])
def test_repeated_layers_are_one_line(stacked, first):
    proposal = pretrained.names(tower_arrays(first), tower(stacked=stacked), jnp.ones((1, 4)))
    path = "blocks" if stacked else "block{i}"
    number = "{i+1}" if first else "{i}"
    assert proposal.lines == (
        f'pretrained.torch.norm("{path}/norm", "h.{number}.ln")',
        f'pretrained.torch.dense("{path}/fc", "h.{number}.mlp")',
    )
    params, _ = pretrained.load(tower(stacked=stacked), tower_arrays(first), names=proposal)
    kernel = params["blocks"]["fc"]["kernel"][1] if stacked else params["block1"]["fc"]["kernel"]
    np.testing.assert_array_equal(kernel, tower_arrays(first)[f"h.{first + 1}.mlp.weight"].T)


def test_stacks_in_stacks_and_the_experts_of_a_mixture():
    block = nn.Sequential(inner=nn.Stack(nn.Sequential(fc=nn.Dense(4)), 2), norm=nn.LayerNorm())
    arrays = {}
    for i in range(3):
        arrays |= affine(f"h.{i}.ln", 4)
        arrays |= affine(f"h.{i}.mlp.0", 4, 4) | affine(f"h.{i}.mlp.1", 4, 4)
    stacked = nn.Sequential(blocks=nn.Stack(block, 3))
    assert pretrained.names(arrays, stacked, jnp.ones((1, 4))).lines == (
        'pretrained.torch.dense("blocks/inner/fc", "h.{i}.mlp.{j}")',
        'pretrained.torch.norm("blocks/norm", "h.{i}.ln")',
    )
    experts = {**affine("gate", 3, 4, bias=False)}
    for i in range(3):
        for name, shape in (("w1", (4, 4)), ("w2", (4, 4)), ("w3", (4, 4))):
            experts |= affine(f"experts.{i}.{name}", *shape, bias=False)
    own = (pretrained.Rule("moe/down", "experts.{i}.w2.weight", pretrained.DENSE),)
    mixture = nn.Sequential(moe=nn.MixtureOfExperts(3, 4))
    proposal = pretrained.names(experts, mixture, jnp.ones((1, 2, 4)), rules=own)
    assert proposal.lines == (
        'pretrained.Rule("moe/gate", "experts.{i}.w1.weight", layout=pretrained.DENSE)',
        'pretrained.Rule("moe/up", "experts.{i}.w3.weight", layout=pretrained.DENSE)',
        'pretrained.torch.dense("moe/router", "gate")',
    )


def test_a_stack_whose_layers_the_file_does_not_number():
    names = {"h.0": "a.7", "h.1": "b", "h.2": "c"}
    arrays = {names[key[:3]] + key[3:]: value for key, value in tower_arrays().items()}
    proposal = pretrained.names(arrays, tower(stacked=True), jnp.ones((1, 4)))
    assert set(proposal.unmatched) == {
        f"blocks/{name}" for name in ("norm/scale", "norm/bias", "fc/kernel", "fc/bias")
    }


def test_attention_in_three_forms():
    x, layer = jnp.ones((1, 3, 8)), nn.Sequential(attention=nn.Attention(2))
    out = affine("attn.out_proj", 8, 8)
    whole = {"attn.in_proj_weight": array(24, 8), "attn.in_proj_bias": array(24), **out}
    assert pretrained.names(whole, layer, x).lines == (
        'pretrained.torch.attention("attention", "attn")',
    )
    fused = {**affine("attn.qkv", 24, 8), **affine("attn.proj", 8, 8)}
    assert pretrained.names(fused, layer, x).lines == (
        'pretrained.torch.dense(("attention/query", "attention/key", "attention/value"), "attn.qkv")',
        'pretrained.torch.dense("attention/out", "attn.proj")',
    )
    # The order of the file is not that of the calls, so the names decide.
    apart = {}
    for name in ("k", "v", "q", "out"):
        apart |= affine(f"attn.{name}_proj", 8, 8)
    assert pretrained.names(apart, layer, x).lines == tuple(
        f'pretrained.torch.dense("attention/{ours}", "attn.{theirs}_proj")'
        for ours, theirs in (("query", "q"), ("key", "k"), ("value", "v"), ("out", "out"))
    )


def test_attention_over_keys_of_another_size():
    @nn.layer
    def model(scope, x, source):
        return nn.Attention(2)(scope["cross"], x, source)

    arrays = {
        "attn.q_proj_weight": array(8, 8),
        "attn.k_proj_weight": array(8, 6),
        "attn.v_proj_weight": array(8, 6),
        "attn.in_proj_bias": array(24),
        **affine("attn.out_proj", 8, 8),
    }
    proposal = pretrained.names(arrays, model(), (jnp.ones((1, 3, 8)), jnp.ones((1, 5, 6))))
    assert proposal.lines == ('pretrained.torch.attention("cross", "attn")',)
    params, _ = pretrained.load(model(), arrays, names=proposal)
    np.testing.assert_array_equal(
        params["cross"]["value"]["kernel"], arrays["attn.v_proj_weight"].T
    )


def test_layouts_are_part_of_the_lines():
    @nn.layer
    def model(scope, x):  # [batch, height, width, 4]
        x = nn.ConvTranspose(6, 2, 2, groups=2)(scope["up"], x)
        shift = scope.param("shift", (5,), jax.nn.initializers.zeros)
        x = nn.Dense(5)(scope["pointwise"], x) + shift[None, None, None]
        return nn.Conv(3, 3, use_bias=False)(scope["normed"], x)

    arrays = {
        "up.weight": array(4, 3, 2, 2),
        "up.bias": array(6),
        **affine("one", 5, 6, 1, 1),
        "shift": array(1, 5, 1, 1),
        "conv.weight_g": np.abs(array(1, 5, 1, 1)),
        "conv.weight_v": array(3, 5, 3, 3),
    }
    proposal = pretrained.names(arrays, model(), jnp.ones((1, 4, 4, 4)))
    assert proposal.lines == (
        'pretrained.Rule("shift", "shift", layout=pretrained.reshaped((5,), (1, 5, 1, 1)))',
        'pretrained.torch.conv_transpose("up", "up", groups=2)',
        'pretrained.torch.dense("pointwise", "one", layout=pretrained.pointwise(2))',
        'pretrained.torch.weight_norm(pretrained.torch.conv("normed", "conv"), dim=1)',
    )
    params, _ = pretrained.load(model(), arrays, names=proposal)
    np.testing.assert_array_equal(params["pointwise"]["kernel"], arrays["one.weight"][..., 0, 0].T)
    printed = Names(rules_in(proposal), inputs=(jnp.ones((1, 4, 4, 4)),))
    again, _ = pretrained.load(model(), arrays, names=printed)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, params, again))


def test_recurrent_layers_and_their_numbers():
    @nn.layer
    def model(scope, x):
        for i in range(2):
            x = nn.LSTM(4, bidirectional=True)(scope[f"lstm{i}"], x)
        return x

    arrays = {}
    for i, width in enumerate((3, 8)):
        for end in ("", "_reverse"):
            arrays[f"rnn.weight_ih_l{i}{end}"] = array(16, width)
            arrays[f"rnn.weight_hh_l{i}{end}"] = array(16, 4)
            arrays |= {f"rnn.bias_{kind}_l{i}{end}": array(16) for kind in ("ih", "hh")}
    proposal = pretrained.names(arrays, model(), jnp.ones((1, 5, 3)))
    assert proposal.lines == (
        'pretrained.torch.lstm("lstm0", "rnn")',
        'pretrained.torch.lstm("lstm1", "rnn", layer=1)',
    )


def test_tied_arrays_and_arrays_that_no_layer_needs(tmp_path):
    @nn.layer
    def model(scope, tokens):
        embed, at = nn.Embed(7, 4), scope["embed"]
        return embed.attend(at, nn.Dense(4)(scope["fc"], embed(at, tokens)))

    table = array(7, 4)
    arrays = {"wte.weight": table, **affine("fc", 4, 4), "lm_head.weight": table}
    arrays["position_ids"] = np.arange(5)
    proposal = pretrained.names(arrays, model(), jnp.ones((1, 3), int))
    assert 'pretrained.Tied("lm_head.weight", "embed/embedding", write=True)' in proposal.lines
    assert 'pretrained.Spare("position_ids")' in proposal.lines
    assert "written back as they are: position_ids" in str(proposal)
    trees = pretrained.load(model(), arrays, names=proposal)
    back = load_file(pretrained.save(model(), *trees, tmp_path / "x.safetensors", names=proposal))
    assert back.keys() == arrays.keys()
    np.testing.assert_array_equal(back["lm_head.weight"], table)
    np.testing.assert_array_equal(back["position_ids"], np.arange(5))


# What is left over, and lines of the user.


def test_what_is_left_over_is_listed_and_not_loaded():
    arrays = {**affine("layers.0", 8, 4), **affine("layers.2", 5, 8), "gamma": array(9)}
    proposal = pretrained.names(arrays, mlp(), jnp.ones((1, 4)))
    assert proposal.unmatched == {"head/kernel": (8, 3), "head/bias": (3,)}
    assert proposal.unread == {"layers.2.weight": (5, 8), "layers.2.bias": (5,), "gamma": (9,)}
    assert "# no layer of the source fits 'head/kernel' (8, 3)" in str(proposal)
    with pytest.raises(ValueError, match=r"incomplete: no layer of the source fits 'head/kernel'"):
        pretrained.load(mlp(), arrays, names=proposal)


def test_lines_of_the_user_come_first():
    arrays = {**affine("a", 4, 4), **affine("b", 4, 4), **affine("c", 4, 4), "extra": array(2)}
    model = nn.Sequential(x=nn.Dense(4), y=nn.Dense(4), z=nn.Dense(4))
    own = torch.dense("x", "c"), pretrained.Spare("extra")
    proposal = pretrained.names(arrays, model, jnp.ones((1, 4)), rules=own)
    assert proposal.lines == (
        'pretrained.torch.dense("y", "a")',
        'pretrained.torch.dense("z", "b")',
    )
    assert "*rules,  # yours, 3" in str(proposal)
    params, _ = pretrained.load(model, arrays, names=proposal)
    np.testing.assert_array_equal(params["x"]["kernel"], arrays["c.weight"].T)
    with pytest.raises(TypeError, match=r"expected rules such as torch\.conv"):
        pretrained.names(arrays, model, jnp.ones((1, 4)), rules=("x",))


def test_layers_that_only_their_order_tells_apart():
    arrays = {**affine("a", 4, 4), **affine("b", 4, 4)}
    model = nn.Sequential(x=nn.Dense(4), y=nn.Dense(4))
    proposal = pretrained.names(arrays, model, jnp.ones((1, 4)))
    assert proposal.unclear == (("x", "y"),)
    assert "told apart by their order alone: 'x' and 'y'" in str(proposal)


def test_blocks_are_the_same_if_their_layers_are():
    """conv2 of both blocks has one shape, conv1 has not."""
    arrays = {
        **affine("late.a", 4, 6),
        **affine("late.b", 4, 4),
        **affine("early.a", 4, 3),
        **affine("early.b", 4, 4),
    }

    @nn.layer
    def model(scope, x):
        for name in ("first", "second"):
            x = nn.Sequential(one=nn.Dense(4), two=nn.Dense(4))(scope[name], x)
            x = jnp.concatenate([x, x[:, :2]], -1)
        return x

    proposal = pretrained.names(arrays, model(), jnp.ones((1, 3)))
    assert 'pretrained.torch.dense("first/two", "early.b")' in proposal.lines


def test_words_that_mean_the_same():
    like = lambda *names: _align._likeness(*map(_align._parsed, names))
    assert like("block/query", "layer.q_proj") > like("block/query", "layer.k_proj")
    assert like("stage1/shortcut", "layer1.downsample.0") > like("stage1/shortcut", "layer1.conv1")
    assert like("blocks[3]/fc1", "h.3.mlp.fc1") > like("blocks[3]/fc1", "h.2.mlp.fc1")


def test_sources_that_are_none():
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module, its state_dict"):
        pretrained.names([1, 2], mlp(), jnp.ones((1, 4)))
    with pytest.raises(TypeError, match=r"has no example\(\) of its inputs; pass an input"):
        pretrained.names({}, mlp())


# Proofs.


class Branches(tt.Module):
    """Two branches of the same shapes, whose definition is not in the order of the calls."""

    def __init__(self):
        self.b, self.out = tt.Linear(4, 4), tt.Linear(4, 4)
        self.norm, self.a = tt.LayerNorm(4), tt.Linear(4, 4)

    def forward(self, x):
        a, b = self.a(x), self.b(x)
        y = tt.Tensor(np.tanh(a.array) * b.array)
        return self.out(self.norm(y))


@nn.layer
def branches(scope, x):
    right = nn.Dense(4)(scope["p"], x)
    left = jnp.tanh(nn.Dense(4)(scope["q"], x))
    return nn.Dense(4)(scope["s"], nn.LayerNorm()(scope["r"], left * right))


def test_a_proof_exchanges_layers_until_all_agree():
    """p and q have one input, so only what follows shows that they are exchanged."""
    module, x = Branches(), array(2, 4)
    proposal = pretrained.names(module, branches(), x)
    assert proposal.proof.equal and proposal.unclear == ()
    assert 'pretrained.torch.dense("p", "b")' in proposal.lines
    assert 'pretrained.torch.dense("q", "a")' in proposal.lines
    params, _ = pretrained.load(branches(), module, names=proposal)
    np.testing.assert_allclose(branches()(params, x), module(tt.Tensor(x)).array, atol=1e-6)
    assert "equal: the output differs by" in str(proposal)
    assert all(each.training for each in module.modules())


@pytest.mark.parametrize(
    ("wrong", "first", "own"),
    [
        ((torch.dense("p", "a"), torch.dense("q", "b")), "r", "agrees, so its input is another"),
        ((torch.dense("s", "out", pretrained.SAME),), "s", "differs by"),
    ],
    ids=["exchanged", "not transposed"],
)
def test_a_proof_names_the_first_layer_that_differs(wrong, first, own):
    module = Branches()
    proposal = pretrained.names(module, branches(), array(2, 4), rules=wrong)
    assert not proposal.unmatched and not proposal.proof.equal
    with pytest.raises(ValueError, match=rf"The first layer that differs is '{first}', .*{own}"):
        pretrained.load(branches(), module, names=proposal)
    pretrained.load(branches(), module, names=proposal.names)  # on one's own responsibility


def test_prove_compares_another_module():
    module, x = Branches(), array(2, 4)
    proposal = pretrained.names(module, branches(), x)
    other = Branches()
    assert proposal.prove(other, x).equal
    other.norm.weight = tt.normal(4)
    assert proposal.prove(other, x).equal

    class Another(Branches):
        def forward(self, x):
            return self.out(super().forward(x))

    with pytest.raises(ValueError, match="The outputs differ by"):
        proposal.prove(Another(), x)


def test_equal_arrays_of_a_new_module_hide_no_exchange():
    """Two new norms are the same function, until the weights come."""

    class New(tt.Module):
        def __init__(self):
            self.second, self.fc = tt.LayerNorm(4), tt.Linear(4, 4)
            self.first, self.zero = tt.LayerNorm(4), tt.Linear(4, 4)
            for norm in (self.first, self.second):
                norm.weight.array[:], norm.bias.array[:] = 1, 0
            self.zero.weight.array[:], self.zero.bias.array[:] = 0, 0

        def forward(self, x):
            return self.zero(self.second(self.fc(self.first(x))))

    @nn.layer
    def model(scope, x):
        x = nn.Dense(4)(scope["dense"], nn.LayerNorm()(scope["a"], x))
        return nn.Dense(4)(scope["last"], nn.LayerNorm()(scope["b"], x))

    module, x = New(), array(2, 4)
    before = {key: value.array.copy() for key, value in module.state_dict().items()}
    proposal = pretrained.names(module, model(), x)
    assert proposal.proof.equal
    assert 'pretrained.torch.norm("a", "first")' in proposal.lines
    after = module.state_dict()
    assert all(np.array_equal(after[key].array, value) for key, value in before.items())
    wrong = torch.norm("a", "second"), torch.norm("b", "first")
    found = pretrained.names(module, model(), x, rules=wrong)
    assert found.proof.problem.startswith("The first layer that differs is 'a', from 'second'")


class Images(tt.Module):
    def __init__(self):
        self.conv, self.fc = tt.Conv2d(3, 4, 3), tt.Linear(4 * 6, 5)

    def forward(self, x):
        y = self.conv(x).array
        return self.fc(tt.Tensor(y.reshape(len(y), -1)))


@nn.layer
def images(scope, x):
    x = nn.Conv(4, 3)(scope["stem"], x)
    return nn.Dense(5)(scope["head"], x.reshape(len(x), -1))


def test_images_have_their_channels_last_and_flattened_ones_too():
    module, x = Images(), array(2, 3, 2, 3)
    proposal = pretrained.names(module, images(), x)
    assert proposal.inputs[0].shape == (2, 2, 3, 3)
    assert proposal.lines == (
        'pretrained.torch.conv("stem", "conv")',
        'pretrained.torch.dense("head", "fc", layout=pretrained.flattened(2, 3))',
    )
    assert proposal.proof.equal
    params, _ = pretrained.load(images(), module, names=proposal)
    ours = images()(params, x.transpose(0, 2, 3, 1))
    np.testing.assert_allclose(ours, module(tt.Tensor(x)).array, atol=1e-5)
    assert not pretrained.names(module, images(), x, x_fnet=x).proof.equal  # channels first


class Tagger(tt.Module):
    def __init__(self):
        self.words, self.rnn, self.fc = tt.Embedding(9, 4), tt.GRU(4, 4), tt.Linear(4, 3)

    def forward(self, tokens):
        return self.fc(self.rnn(self.words(tokens))[0])


@nn.layer
def tagger(scope, tokens):
    x = nn.GRU(4)(scope["gru"], nn.Embed(9, 4)(scope["embed"], tokens))
    return nn.Dense(3)(scope["tags"], x)


def test_time_comes_first_in_recurrent_layers_of_pytorch():
    tokens = np.random.default_rng(0).integers(0, 9, (5, 2))
    proposal = pretrained.names(Tagger(), tagger(), tokens, x_fnet=tokens.T)
    assert proposal.proof.equal, proposal
    assert 'pretrained.torch.gru("gru", "rnn")' in proposal.lines
    rnn, x = tt.GRU(4, 4), array(5, 2, 4)
    assert pretrained.names(rnn, nn.Sequential(x=nn.GRU(4)), x).inputs[0].shape == (2, 5, 4)


def test_gates_in_another_order_are_found():
    def gates(array):
        r, z, n = np.split(array, 3)
        return np.concatenate([z, r, n]).T

    swapped = pretrained.Layout("gates", gates, lambda array: array.T)
    wrong = [pretrained.Rule("gru/recurrent_kernel", "rnn.weight_hh_l0", swapped)]
    tokens = np.random.default_rng(0).integers(0, 9, (5, 2))
    rules = (*wrong, *torch.gru("gru", "rnn"))
    proposal = pretrained.names(Tagger(), tagger(), tokens, x_fnet=tokens.T, rules=rules)
    assert proposal.proof.problem.startswith("The first layer that differs is 'gru', from 'rnn'")
    assert "or the order of gates" in proposal.proof.problem


def test_arrays_that_no_layer_shows():
    class Net(tt.Module):
        def __init__(self):
            self.before, self.after, self.fc = tt.normal(4), tt.normal(4), tt.Linear(4, 4)

        def forward(self, x):
            y = self.fc(tt.Tensor(x.array + self.before.array))
            return tt.Tensor(y.array + self.after.array)

    @nn.layer
    def model(scope, x):
        shift = lambda name: scope.param(name, (4,), jax.nn.initializers.zeros)[None]
        return nn.Dense(4)(scope["dense"], x + shift("late")) + shift("early")

    proposal = pretrained.names(Net(), model(), array(2, 4))
    assert proposal.proof.equal  # although their names suggest the opposite
    assert 'pretrained.Rule("late", "before")' in proposal.lines
    assert "Seen in the output alone: late, early" in str(proposal.proof)
    wrong = pretrained.Rule("late", "after"), pretrained.Rule("early", "before")
    problem = pretrained.names(Net(), model(), array(2, 4), rules=wrong).proof.problem
    assert problem.startswith("The first layer that differs is 'dense', from 'fc'")
    assert problem.endswith("Not seen, and perhaps wrong before it: late, early")


def test_options_that_no_layer_of_fnet_has():
    class MultiheadAttention(tt.Linear):
        add_zero_attn = True

    class Wrapped(tt.Module):
        def __init__(self):
            self.attention = MultiheadAttention(4, 4)

    with pytest.raises(ValueError, match="'attention' is a MultiheadAttention with add_zero_attn"):
        pretrained.names(Wrapped(), mlp(), array(2, 4))


def test_buffers_are_no_weights(tmp_path):
    """A mask is written back as it is; an array that is trained is not passed over."""

    class Net(tt.Module):
        buffers = ("mask",)

        def __init__(self):
            self.fc, self.mask = tt.Linear(4, 4), tt.Tensor(np.ones((4, 4), np.float32))

        def forward(self, x):
            return self.fc(tt.Tensor(x.array @ (self.mask.array * np.eye(4, dtype=np.float32))))

    model, module, x = nn.Sequential(fc=nn.Dense(4)), Net(), array(2, 4)
    proposal = pretrained.names(module, model, x)
    assert proposal.proof.equal and proposal.lines[1] == 'pretrained.Spare("mask")'
    trees = pretrained.load(model, module, names=proposal)
    back = load_file(pretrained.save(model, *trees, tmp_path / "x.safetensors", names=proposal))
    np.testing.assert_array_equal(back["mask"], np.ones((4, 4)))
    Net.buffers = ()
    assert pretrained.names(module, model, x).unread == {"mask": (4, 4)}


class NormAndTanh(tt.LayerNorm):
    """A class of the user's, which returns more than the norm."""

    __module__ = "mine"

    def forward(self, x):
        return tt.Tensor(np.tanh(super().forward(x).array))


def test_a_layer_that_does_more_than_its_name_says():
    class Net(tt.Module):
        def __init__(self):
            self.norm, self.fc = NormAndTanh(4), tt.Linear(4, 4)

        def forward(self, x):
            return self.fc(self.norm(x))

    @nn.layer
    def model(scope, x):
        return nn.Dense(4)(scope["fc"], jnp.tanh(nn.LayerNorm()(scope["norm"], x)))

    proposal = pretrained.names(Net(), model(), array(2, 4))
    assert proposal.proof.equal
    assert "Seen in the output alone: norm" in str(proposal.proof)


def test_names_are_not_those_of_the_config(tmp_path):
    """load and save with names= work for any layer, and need no NAMES."""
    arrays = {**affine("layers.0", 8, 4), **affine("layers.2", 3, 8)}
    names = Names(
        (torch.dense("fc", "layers.0"), torch.dense("head", "layers.2")), inputs=(jnp.ones((1, 4)),)
    )
    save_file(arrays, tmp_path / "x.safetensors")
    params, _ = pretrained.load(mlp(), tmp_path / "x.safetensors", names=names)
    np.testing.assert_array_equal(params["fc"]["kernel"], arrays["layers.0.weight"].T)
    del arrays["layers.0.bias"]
    with pytest.raises(ValueError, match=r"the arrays does not match .* the rules in names="):
        pretrained.load(mlp(), arrays, names=names)
    with pytest.raises(TypeError, match=r"expected a model with NAMES .* Pass the rules in names="):
        pretrained.load(mlp(), arrays)
    nnx = pytest.importorskip("flax.nnx")
    with pytest.raises(TypeError, match=r"got NnxLayer\. nn\.nnx_variables\(module\) reads"):
        pretrained.save(nn.from_nnx(nnx.Linear, 4, 3), {}, {}, tmp_path / "y.safetensors")
