"""Models of others brought in with `pretrained.names`, trained, and sent back; and wrong rules.

make verify-pretrained ARGS=entrances
make verify-pretrained ARGS="entrances=U-Net,Conformer wrong_rules"
"""

import functools
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
from safetensors.numpy import load_file
from verifying import check, needed

from fnet import layers as nn
from fnet import training as tr
from fnet.models import pretrained
from fnet.models.pretrained import CONV, DENSE, SAME, Layout, Rule, Spare, flattened
from fnet.models.pretrained import torch as rule_of

TOLERANCE = 1e-5


def relative(ours, theirs):
    """The largest difference of two outputs, relative to the largest value."""
    return max(
        float(np.abs(np.asarray(a) - b).max() / np.abs(b).max())
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    )


def trained(model, params, state, x, key=None):
    """Ten steps of `tr.train`, which move the outputs towards 0.1."""

    def loss(outputs, targets):
        parts = [jnp.square(y - 0.1).reshape(len(y), -1).mean(1) for y in jax.tree.leaves(outputs)]
        return sum(parts) + 0 * targets

    batch = x, jnp.zeros(len(x))
    end = tr.train(
        model, lambda step: batch, loss, optax.adam(1e-3), steps=10, params=params, state=state
    )
    return end.params, end.state


def moved(before, after):
    return max(
        float(jnp.abs(a - b).max()) for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after))
    )


def layout_of(module_output, ours):
    """PyTorch's output in the layout of the model's."""
    if module_output.shape == ours.shape and module_output.ndim < 4:
        return module_output
    if module_output.ndim > 2 and np.moveaxis(module_output, 1, -1).shape == ours.shape:
        return np.moveaxis(module_output, 1, -1)
    return module_output.swapaxes(0, 1)


def torch_entrance(name):
    torch = needed("torch", "PyTorch")
    import safetensors.torch
    from entrance_models import CASES, lively

    if name.startswith("timm"):
        needed("timm", "timm")
        needed("torchvision", "torchvision, which timm imports,")
    module, model, x, options = CASES[name]()
    lively(module)
    proposal = pretrained.names(module, model, x, **options)
    params, state = pretrained.load(model, module, names=proposal)
    inputs = proposal.inputs

    def apart():
        with torch.no_grad():
            theirs = module.eval()(*(x if isinstance(x, tuple) else (x,)))
        ours = jax.tree.leaves(model(params, *inputs, state=state)[0])
        theirs = theirs if isinstance(theirs, tuple) else (theirs,)
        return relative(ours, [layout_of(t.numpy(), y) for t, y in zip(theirs, ours)])

    first, before = apart(), params
    params, state = trained(model, params, state, inputs[0])
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "back.safetensors"
        pretrained.save(model, params, state, file, names=proposal)
        away = apart()
        module.load_state_dict(safetensors.torch.load_file(file), strict=True)
    back = apart()
    assert proposal.proof.equal and max(first, back) < TOLERANCE, (first, back)
    assert away > 100 * TOLERANCE and moved(before, params) > 1e-3
    return len(options), len(proposal.lines), first, back


def nnx_entrance(name):
    nnx = needed("flax.nnx", "Flax")
    constructor, x = nnx_models(nnx)[name]
    module = constructor(rngs=nnx.Rngs(0))
    model, key = nn.from_nnx(constructor), jax.random.key(0)
    params, state = nn.nnx_variables(module)

    def apart():
        module.eval()
        return relative(model(params, x, state=state, key=key)[0], module(x))

    first, before = apart(), params
    params, state = trained(model, params, state, x)
    away = apart()
    nn.update_nnx(module, params, state)
    back = apart()
    assert max(first, back) < TOLERANCE, (first, back)
    assert away > 100 * TOLERANCE and moved(before, params) > 1e-3
    return 3, 0, first, back


def nnx_models(nnx):
    class Images(nnx.Module):
        def __init__(self, *, rngs):
            self.conv = nnx.Conv(3, 8, (3, 3), rngs=rngs)
            self.norm = nnx.BatchNorm(8, rngs=rngs)
            self.head = nnx.Linear(8, 4, rngs=rngs)

        def __call__(self, x):
            return self.head(nnx.relu(self.norm(self.conv(x))).mean((1, 2)))

    class Features(nnx.Module):
        def __init__(self, *, rngs):
            self.layers = nnx.List([nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 4, rngs=rngs)])
            self.dropout = nnx.Dropout(0.3, rngs=rngs)

        def __call__(self, x):
            return self.layers[1](self.dropout(nnx.relu(self.layers[0](x))))

    class Sequences(nnx.Module):
        def __init__(self, *, rngs):
            self.rnn = nnx.RNN(nnx.GRUCell(4, 6, rngs=rngs))
            self.head = nnx.Linear(6, 3, rngs=rngs)

        def __call__(self, x):
            return self.head(self.rnn(x))

    normal = lambda *shape: jax.random.normal(jax.random.key(1), shape)
    return {
        "nnx BatchNorm": (Images, normal(4, 6, 6, 3)),
        "nnx Dropout": (Features, normal(4, 8)),
        "nnx RNN": (Sequences, normal(4, 5, 4)),
    }


def equinox_entrance():
    eqx = needed("equinox", "Equinox")

    class Model(eqx.Module):
        embed: eqx.nn.Embedding
        norms: list
        layers: list

        def __init__(self, key):
            keys = iter(jax.random.split(key, 4))
            self.embed = eqx.nn.Embedding(20, 16, key=next(keys))
            self.norms = [eqx.nn.LayerNorm(16), eqx.nn.LayerNorm(16)]
            self.layers = [eqx.nn.Linear(16, 16, key=next(keys)) for _ in range(3)]

        def __call__(self, tokens):
            x = jax.vmap(self.embed)(tokens)
            for norm, layer in zip(self.norms, self.layers):
                x = x + jax.nn.gelu(jax.vmap(layer)(jax.vmap(norm)(x)))
            return jax.vmap(self.layers[2])(x)

    @nn.layer
    def model(scope, tokens):
        x = nn.Embed(20, 16)(scope["words"], tokens)
        for i in range(2):
            y = nn.LayerNorm()(scope[f"norm{i}"], x)
            x = x + jax.nn.gelu(nn.Dense(16)(scope[f"dense{i}"], y))
        return nn.Dense(16)(scope["dense2"], x)

    module, model = Model(jax.random.key(0)), model()
    module = jax.tree.map(lambda a: a + 0.1 * jax.random.normal(jax.random.key(2), a.shape), module)
    tokens = jax.random.randint(jax.random.key(1), (4, 7), 0, 20)
    place = lambda path: jax.tree_util.keystr(path, simple=True, separator=".")
    arrays = {place(path): leaf for path, leaf in jax.tree.leaves_with_path(module)}
    proposal = pretrained.names(arrays, model, tokens)
    params, state = pretrained.load(model, arrays, names=proposal)
    apart = lambda: relative(model(params, tokens), jax.vmap(module)(tokens))
    first, before = apart(), params
    params, state = trained(model, params, state, tokens)
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "back.safetensors"
        pretrained.save(model, params, state, file, names=proposal)
        away, held = apart(), load_file(file)
        module = jax.tree.map_with_path(lambda path, leaf: jnp.asarray(held[place(path)]), module)
    back = apart()
    assert max(first, back) < TOLERANCE, (first, back)
    assert away > 100 * TOLERANCE and moved(before, params) > 1e-3
    return 3, len(proposal.lines), first, back


ENTRANCES = {
    **dict.fromkeys(
        (
            "U-Net",
            "WaveNet",
            "GRU tagger",
            "Transformer",
            "Conformer",
            "ResNet with a decoder",
            "timm lcnet_035",
            "timm mixer_s32_224",
        ),
        torch_entrance,
    ),
    **dict.fromkeys(("nnx BatchNorm", "nnx Dropout", "nnx RNN"), nnx_entrance),
    "Equinox": lambda name: equinox_entrance(),
}


@check
def entrances(*parts):
    """Twelve models of others: brought in, equal, trained ten steps, sent back, equal."""
    done = 0
    for name in parts or ENTRANCES:
        by_hand, lines, first, back = ENTRANCES[name](name)
        yield (
            f"{name}: {by_hand} lines by hand, {lines} proposed; outputs within {first:.1e}, and "
            f"within {back:.1e} after ten steps of training and the way back"
        )
        assert by_hand <= 5, name
        done += 1
    yield f"{done} of {len(parts or ENTRANCES)} models in and back"


# Models of transformers, for which fnet has rules of its own.


def published(transformers):
    """{family: (model of transformers, input)}, with small configurations."""
    torch = needed("torch", "PyTorch")
    tokens = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(0))
    image = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3}
    small |= {"num_attention_heads": 4}
    text = {"vocab_size": 64, "max_position_embeddings": 16, **small}
    llama = transformers.LlamaConfig(num_key_value_heads=2, tie_word_embeddings=False, **text)
    gpt2 = transformers.GPT2Config(
        vocab_size=64,
        n_positions=16,
        n_embd=16,
        n_layer=3,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    vit = transformers.ViTConfig(image_size=16, patch_size=4, **small)
    return {
        "gpt2": (transformers.GPT2LMHeadModel(gpt2), tokens),
        "llama": (transformers.LlamaForCausalLM(llama), tokens),
        "bert": (transformers.BertModel(transformers.BertConfig(**text)), tokens),
        "vit": (transformers.ViTForImageClassification(vit), image),
    }


@check
def proposed_as_written(*families):
    """Proposals for models of transformers against the rules that fnet has for them."""
    torch, transformers = needed("torch", "PyTorch"), needed("transformers", "transformers")
    from entrance_models import lively

    torch.manual_seed(0)
    for family, (module, x) in published(transformers).items():
        if families and family not in families:
            continue
        lively(module)
        with tempfile.TemporaryDirectory() as folder:
            module.save_pretrained(folder)
            model, params, state = pretrained.load(folder)
        proposal = pretrained.names(module, model, x)
        proposed = pretrained.load(model, module, names=proposal)
        assert jax.tree.all(jax.tree.map(np.array_equal, (params, state), proposed)), family
        count = len(jax.tree.leaves((params, state)))
        yield f"{family}: {len(proposal.lines)} lines, {count} arrays as fnet's own rules read them"


@check
def presets_trained(*families):
    """Models of transformers trained ten steps: equal in transformers after the way back."""
    torch, transformers = needed("torch", "PyTorch"), needed("transformers", "transformers")
    from entrance_models import lively

    torch.manual_seed(0)
    for family, (module, x) in published(transformers).items():
        if (families and family not in families) or family == "bert":  # has no single output
            continue
        lively(module)
        x_fnet = jnp.asarray(x.numpy() if family != "vit" else x.numpy().transpose(0, 2, 3, 1))
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as back:
            module.save_pretrained(folder)
            model, params, state = pretrained.load(folder)
            before = params
            params, state = trained(model, params, state, x_fnet)
            pretrained.save(model, params, state, back, like=folder)
            again = type(module).from_pretrained(back).eval()
        with torch.no_grad():
            theirs = again(x).logits.numpy()
            away = relative(module.eval()(x).logits.numpy(), theirs)
        error = relative(model(params, x_fnet), theirs)
        yield f"{family}: {error:.1e} from transformers after ten steps, which moved it by {away:.1e}"
        assert error < TOLERANCE < away / 100 and moved(before, params) > 1e-3


# Wrong rules whose shapes fit.


def order(axis, *places):
    """A layout of PyTorch's weight [gates * f, in] with the gates in another order."""

    def gates(array):
        parts = np.split(array, len(places), 0)
        return np.concatenate([parts[place] for place in places], 0)

    return Layout("gates", lambda array: np.swapaxes(gates(array), 0, axis), lambda array: array.T)


def vectors(*places):
    """As `order`, for PyTorch's two biases."""

    def both(one, two):
        parts = np.split(one + two, len(places))
        return np.concatenate([parts[place] for place in places])

    return Layout("gates", both, lambda bias: (bias, 0 * bias))


def changed(ours):
    """A layout whose way back has the shape of the right one: CONV's or DENSE's."""
    back = lambda array: (DENSE if array.ndim == 2 else CONV).theirs(array)
    return Layout("wrong", ours, back)


def swapped_pairs(method, one, two, theirs_one, theirs_two):
    """The rules of two layers, each with the arrays of the other."""
    return getattr(rule_of, method)(one, theirs_two), getattr(rule_of, method)(two, theirs_one)


def qkv(*parts, leaf="kernel"):
    return tuple(f"attention/{part}/{leaf}" for part in parts)


def attention_rules(kernels, biases=("query", "key", "value"), layout=DENSE):
    """The rules of the attention of the Conformer, with the parts in another order."""
    return (
        Rule(qkv(*kernels), "self_attn.in_proj_weight", layout),
        Rule(qkv(*biases, leaf="bias"), "self_attn.in_proj_bias"),
    )


def lstm_rules(*places):
    return (
        Rule("rnn/kernel", "rnn.weight_ih_l0", order(1, *places)),
        Rule("rnn/recurrent_kernel", "rnn.weight_hh_l0", order(1, *places)),
        Rule("rnn/bias", ("rnn.bias_ih_l0", "rnn.bias_hh_l0"), vectors(*places)),
    )


def gru_rules(kernel, recurrent):
    """The first GRU of the tagger, forwards."""
    return (
        Rule("gru0/forward/kernel", "rnn.weight_ih_l0", order(1, *kernel)),
        Rule("gru0/forward/recurrent_kernel", "rnn.weight_hh_l0", order(1, *recurrent)),
        *rule_of.gru("gru0", "rnn"),  # of several rules for an array, the first counts
    )


_GROUPS = Layout(  # [2 * in / 2, out / 2, *window], with the groups of the outputs interleaved
    "interleaved groups",
    lambda w: (
        np.concatenate(np.split(w, 2), 1)
        .reshape(8, 2, 8, 3, 3)
        .swapaxes(1, 2)
        .reshape(8, 16, 3, 3)
        .transpose(2, 3, 0, 1)
    ),
    lambda w: np.concatenate(np.split(w.transpose(2, 3, 0, 1), 2, 1)),
)
_HEADS = Layout(
    "heads within features",
    lambda w: w.reshape(3, 4, 4, 16).swapaxes(1, 2).reshape(48, 16).T,
    lambda w: w.T,
)
_SUMMED = Layout(  # the bias of the new gate is not within the product with the reset gate
    "all biases added",
    lambda one, two: np.concatenate([one + two, np.zeros_like(one[:5])]),
    lambda bias: (bias[:15], 0 * bias[:15]),
)

WRONG = {
    "a square convolution, transposed": (
        "U-Net",
        lambda: Rule(
            "decode1/conv2/kernel", "u1.net.3.weight", changed(lambda w: w.transpose(2, 3, 0, 1))
        ),
    ),
    "a convolution, flipped": (
        "U-Net",
        lambda: Rule(
            "decode1/conv2/kernel",
            "u1.net.3.weight",
            changed(lambda w: CONV.ours(w)[::-1, ::-1]),
        ),
    ),
    "height and width exchanged": (
        "U-Net",
        lambda: Rule(
            "decode1/conv2/kernel", "u1.net.3.weight", changed(lambda w: w.transpose(3, 2, 1, 0))
        ),
    ),
    "a ConvTranspose as a Conv": ("U-Net", lambda: rule_of.conv("up1", "up1")),
    "a Conv as a ConvTranspose": (
        "U-Net",
        lambda: rule_of.conv_transpose("decode1/conv2", "u1.net.3"),
    ),
    "a ConvTranspose, transposed": (
        "U-Net",
        lambda: Rule(
            "up1/kernel",
            "up1.weight",
            Layout("wrong", lambda w: w.transpose(2, 3, 1, 0), lambda w: w.transpose(3, 2, 0, 1)),
        ),
    ),
    "two norms of a block exchanged": (
        "U-Net",
        lambda: swapped_pairs("batch_norm", "down2/norm1", "down2/norm2", "d2.net.1", "d2.net.4"),
    ),
    "two equal convolutions exchanged": (
        "U-Net",
        lambda: swapped_pairs("conv", "down1/conv2", "decode1/conv2", "d1.net.3", "u1.net.3"),
    ),
    "mean and variance exchanged": (
        "U-Net",
        lambda: (
            Rule("down1/norm1/mean", "d1.net.1.running_var"),
            Rule("down1/norm1/var", "d1.net.1.running_mean"),
        ),
    ),
    "scale and variance exchanged": (
        "U-Net",
        lambda: (
            Rule("down1/norm1/scale", "d1.net.1.running_var"),
            Rule("down1/norm1/var", "d1.net.1.weight"),
        ),
    ),
    "the groups of a ConvTranspose": (
        "ResNet with a decoder",
        lambda: Rule("up1/kernel", "decoder.0.weight", _GROUPS),
    ),
    "two equal blocks exchanged": (
        "ResNet with a decoder",
        lambda: tuple(
            rule
            for ours, theirs in (("conv", "conv"), ("norm", "bn"))
            for i in (1, 2)
            for rule in swapped_pairs(
                "conv" if ours == "conv" else "batch_norm",
                f"stage0_block0/{ours}{i}",
                f"stage0_block1/{ours}{i}",
                f"layer1.0.{theirs}{i}",
                f"layer1.1.{theirs}{i}",
            )
        ),
    ),
    "a flattened image, channels first": (
        "ResNet with a decoder",
        lambda: rule_of.dense("head", "fc"),
    ),
    "a flattened image of another shape": (
        "ResNet with a decoder",
        lambda: rule_of.dense("head", "fc", flattened(2, 2)),
    ),
    "gates of a GRU exchanged": (
        "GRU tagger",
        lambda: gru_rules((1, 0, 2), (1, 0, 2)),
    ),
    "gates of a GRU exchanged in one kernel": (
        "GRU tagger",
        lambda: gru_rules((0, 1, 2), (1, 0, 2)),
    ),
    "the two biases of a GRU added": (
        "GRU tagger",
        lambda: (
            Rule(
                ("gru1/forward/bias", "gru1/forward/recurrent_bias"),
                ("rnn.bias_ih_l1", "rnn.bias_hh_l1"),
                _SUMMED,
            ),
            *rule_of.gru("gru1", "rnn", layer=1),
        ),
    ),
    "the two directions of a GRU exchanged": (
        "GRU tagger",
        lambda: (
            Rule("gru0/forward/kernel", "rnn.weight_ih_l0_reverse", DENSE),
            Rule("gru0/backward/kernel", "rnn.weight_ih_l0", DENSE),
        ),
    ),
    "gates of an LSTM: f, i, g, o": ("LSTM", lambda: lstm_rules(1, 0, 2, 3)),
    "gates of an LSTM: i, f, o, g": ("LSTM", lambda: lstm_rules(0, 1, 3, 2)),
    "gates of an LSTM: o, f, g, i": ("LSTM", lambda: lstm_rules(3, 1, 2, 0)),
    "the two kernels of an LSTM exchanged": (
        "LSTM",
        lambda: (
            Rule("rnn/kernel", "rnn.weight_hh_l0", DENSE),
            Rule("rnn/recurrent_kernel", "rnn.weight_ih_l0", DENSE),
        ),
    ),
    "one of two biases of an LSTM": (
        "LSTM",
        lambda: (Rule("rnn/bias", "rnn.bias_ih_l0"), Spare("rnn.bias_hh_l0")),
    ),
    "query and key exchanged": (
        "Conformer",
        lambda: attention_rules(("key", "query", "value"), ("key", "query", "value")),
    ),
    "key and value exchanged": (
        "Conformer",
        lambda: attention_rules(("query", "value", "key"), ("query", "value", "key")),
    ),
    "the order of heads": (
        "Conformer",
        lambda: attention_rules(("query", "key", "value"), layout=_HEADS),
    ),
    "a square dense kernel, not transposed": (
        "Conformer",
        lambda: (
            *attention_rules(("query", "key", "value")),
            Rule("attention/out/kernel", "self_attn.out_proj.weight", SAME),
        ),
    ),
    "two layer norms exchanged": (
        "Conformer",
        lambda: swapped_pairs(
            "norm", "attention_norm", "norm", "self_attn_layer_norm", "final_layer_norm"
        ),
    ),
    "scale and bias of a norm exchanged": (
        "Conformer",
        lambda: (
            Rule("norm/scale", "final_layer_norm.bias"),
            Rule("norm/bias", "final_layer_norm.weight"),
        ),
    ),
    "the direction of a weight norm without its norm": (
        "WaveNet",
        lambda: (
            Rule(
                "block0/gates/kernel",
                "blocks.0.filter_gate.parametrizations.weight.original1",
                CONV,
            ),
            Spare("blocks.0.filter_gate.parametrizations.weight.original0"),
        ),
    ),
}


@functools.cache
def case_of(name):
    torch = needed("torch", "PyTorch")
    from entrance_models import CASES, lively

    if name != "LSTM":
        module, model, x, _ = CASES[name]()
        return lively(module), model, x

    class Recurrent(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = torch.nn.LSTM(6, 6, batch_first=True)

        def forward(self, x):
            return self.rnn(x)[0]

    return Recurrent(), nn.Sequential(rnn=nn.LSTM(6)), torch.randn(2, 5, 6)


@check
def wrong_rules(*parts):
    """Thirty wrong rules that fit in shape: refused for their layer, or found by the proof."""
    refused, found = 0, 0
    for name, (case, wrong) in WRONG.items():
        if parts and name not in parts:
            continue
        module, model, x = case_of(case)
        try:
            proposal = pretrained.names(module, model, x, rules=(wrong(),))
        except ValueError as error:
            refused += 1
            yield f"{name}: refused. {error}"
            continue
        assert not proposal.unmatched and not proposal.proof.equal, f"{name} passed:\n{proposal}"
        try:
            pretrained.load(model, module, names=proposal)
        except ValueError as error:
            found += 1
            yield f"{name}: found. {str(error).partition('failed. ')[2].partition('. ')[0]}"
        else:
            raise AssertionError(f"{name} was loaded")
    yield f"{refused} refused and {found} found of {len(parts) or len(WRONG)}"
