"""Eight models of other people in PyTorch, and the same models written with fnet's layers.

The two sides are written apart: their layers have other names, come in another order, and are
grouped in other ways. `CASES` has for each (module, model, x, options of `pretrained.names`).
"""

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn as tnn
from torch.nn.utils import parametrizations

from fnet import layers as nn

# A U-Net, whose constructor lists its layers in another order than its forward calls them.


class Double(tnn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.net = tnn.Sequential(
            tnn.Conv2d(inputs, outputs, 3, padding=1),
            tnn.BatchNorm2d(outputs),
            tnn.ReLU(inplace=True),
            tnn.Conv2d(outputs, outputs, 3, padding=1),
            tnn.BatchNorm2d(outputs),
            tnn.ReLU(inplace=True),
        )

    def forward(self, x):
        return self.net(x)


class UNet(tnn.Module):
    def __init__(self):
        super().__init__()
        self.up2, self.up1 = tnn.ConvTranspose2d(16, 8, 2, 2), tnn.ConvTranspose2d(8, 8, 2, 2)
        self.d1, self.d2, self.u1 = Double(3, 8), Double(8, 16), Double(16, 8)
        self.mid, self.u2 = Double(16, 16), Double(24, 8)
        self.out = tnn.Conv2d(8, 2, 1)

    def forward(self, x):
        a = self.d1(x)
        b = self.d2(F.max_pool2d(a, 2))
        y = self.u2(torch.cat([self.up2(self.mid(F.max_pool2d(b, 2))), b], 1))
        return self.out(self.u1(torch.cat([self.up1(y), a], 1)))


@nn.layer
def double(scope, x, *, features):
    for i in (1, 2):
        x = nn.Conv(features, 3)(scope[f"conv{i}"], x)
        x = jax.nn.relu(nn.BatchNorm()(scope[f"norm{i}"], x))
    return x


@nn.layer
def unet(scope, x):
    a = double(features=8)(scope["down1"], x)
    b = double(features=16)(scope["down2"], nn.MaxPool(2)(scope["pool1"], a))
    y = double(features=16)(scope["middle"], nn.MaxPool(2)(scope["pool2"], b))
    y = jnp.concatenate([nn.ConvTranspose(8, 2, 2)(scope["up2"], y), b], -1)
    y = nn.ConvTranspose(8, 2, 2)(scope["up1"], double(features=8)(scope["decode2"], y))
    y = double(features=8)(scope["decode1"], jnp.concatenate([y, a], -1))
    return nn.Conv(2, 1)(scope["head"], y)


# A WaveNet, with weight norm in both of PyTorch's forms.


class WaveBlock(tnn.Module):
    def __init__(self, width, dilation):
        super().__init__()
        conv = lambda *args, **options: parametrizations.weight_norm(tnn.Conv1d(*args, **options))
        self.pad = dilation
        self.filter_gate = conv(width, 2 * width, 2, dilation=dilation)
        self.skip, self.res = conv(width, width, 1), conv(width, width, 1)

    def forward(self, x):
        a, b = self.filter_gate(F.pad(x, (self.pad, 0))).chunk(2, 1)
        y = torch.tanh(a) * torch.sigmoid(b)
        return x + self.res(y), self.skip(y)


class WaveNet(tnn.Module):
    def __init__(self, width=8, dilations=(1, 2, 4)):
        super().__init__()
        self.start = tnn.utils.weight_norm(tnn.Conv1d(1, width, 1))
        self.blocks = tnn.ModuleList(WaveBlock(width, dilation) for dilation in dilations)
        self.end = tnn.utils.weight_norm(tnn.Conv1d(width, 5, 1), dim=None)

    def forward(self, x):
        x, total = self.start(x), 0
        for block in self.blocks:
            x, skip = block(x)
            total = total + skip
        return self.end(F.relu(total))


@nn.layer
def wave_block(scope, x, *, dilation):
    width = x.shape[-1]
    y = nn.Conv(2 * width, 2, padding="CAUSAL", dilation=dilation)(scope["gates"], x)
    a, b = jnp.split(y, 2, -1)
    y = jnp.tanh(a) * jax.nn.sigmoid(b)
    return x + nn.Dense(width)(scope["residual"], y), nn.Dense(width)(scope["skip"], y)


@nn.layer
def wavenet(scope, x):
    x, total = nn.Dense(8)(scope["input"], x), 0
    for i, dilation in enumerate((1, 2, 4)):
        x, skip = wave_block(dilation=dilation)(scope[f"block{i}"], x)
        total = total + skip
    return nn.Dense(5)(scope["output"], jax.nn.relu(total))


# A GRU that tags the words of a sentence, in both directions and two layers.


class Tagger(tnn.Module):
    def __init__(self):
        super().__init__()
        self.emb = tnn.Embedding(20, 6)
        self.rnn = tnn.GRU(6, 5, num_layers=2, bidirectional=True, batch_first=True)
        self.cls = tnn.Linear(10, 4)

    def forward(self, tokens):
        return self.cls(self.rnn(self.emb(tokens))[0])


@nn.layer
def tagger(scope, tokens):
    x = nn.Embed(20, 6)(scope["words"], tokens)
    for i in range(2):
        x = nn.GRU(5, bidirectional=True)(scope[f"gru{i}"], x)
    return nn.Dense(4)(scope["tags"], x)


# nn.Transformer, encoder and decoder, with the time as its first axis.


class Translator(tnn.Module):
    def __init__(self, width=16, heads=2, depth=2, time=6):
        super().__init__()
        self.src, self.tgt = tnn.Embedding(20, width), tnn.Embedding(20, width)
        self.pos = tnn.Parameter(torch.randn(time, 1, width))
        self.transformer = tnn.Transformer(width, heads, depth, depth, 32, 0.1)
        self.generator = tnn.Linear(width, 20)

    def forward(self, src, tgt):
        mask = tnn.Transformer.generate_square_subsequent_mask(len(tgt))
        return self.generator(
            self.transformer(self.src(src) + self.pos, self.tgt(tgt) + self.pos, tgt_mask=mask)
        )


@nn.layer
def encode(scope, x):
    x = nn.LayerNorm()(scope["norm1"], x + nn.Attention(2)(scope["attention"], x))
    y = nn.Dense(16)(scope["down"], jax.nn.relu(nn.Dense(32)(scope["up"], x)))
    return nn.LayerNorm()(scope["norm2"], x + y)


@nn.layer
def decode(scope, x, memory):
    x = nn.LayerNorm()(scope["norm1"], x + nn.Attention(2, causal=True)(scope["attention"], x))
    x = nn.LayerNorm()(scope["norm2"], x + nn.Attention(2)(scope["cross"], x, memory))
    y = nn.Dense(16)(scope["down"], jax.nn.relu(nn.Dense(32)(scope["up"], x)))
    return nn.LayerNorm()(scope["norm3"], x + y)


@nn.layer
def translator(scope, tokens):  # [batch, 2, time]
    source, target = tokens[:, 0], tokens[:, 1]
    position = scope.param("position", (6, 16), jax.nn.initializers.normal())[None]
    x = nn.Embed(20, 16)(scope["source"], source) + position
    y = nn.Embed(20, 16)(scope["target"], target) + position
    x = nn.LayerNorm()(scope["encoder_norm"], nn.Stack(encode(), 2)(scope["encoder"], x))
    for i in range(2):
        y = decode()(scope[f"decoder{i}"], y, x)
    return nn.Dense(20)(scope["head"], nn.LayerNorm()(scope["decoder_norm"], y))


# A Conformer block.


class FeedForward(tnn.Module):
    def __init__(self, width):
        super().__init__()
        self.fn = tnn.Sequential(
            tnn.LayerNorm(width),
            tnn.Linear(width, 4 * width),
            tnn.SiLU(),
            tnn.Dropout(0.1),
            tnn.Linear(4 * width, width),
        )

    def forward(self, x):
        return self.fn(x)


class ConvModule(tnn.Module):
    def __init__(self, width):
        super().__init__()
        self.layer_norm = tnn.LayerNorm(width)
        self.sequential = tnn.Sequential(
            tnn.Conv1d(width, 2 * width, 1),
            tnn.GLU(dim=1),
            tnn.Conv1d(width, width, 7, padding=3, groups=width, bias=False),
            tnn.BatchNorm1d(width),
            tnn.SiLU(),
            tnn.Conv1d(width, width, 1),
        )

    def forward(self, x):
        return self.sequential(self.layer_norm(x).transpose(1, 2)).transpose(1, 2)


class Conformer(tnn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.ffn1, self.conv_module, self.ffn2 = (
            FeedForward(width),
            ConvModule(width),
            FeedForward(width),
        )
        self.self_attn_layer_norm = tnn.LayerNorm(width)
        self.self_attn = tnn.MultiheadAttention(width, 4, dropout=0.1, batch_first=True)
        self.final_layer_norm = tnn.LayerNorm(width)

    def forward(self, x):
        x = x + 0.5 * self.ffn1(x)
        y = self.self_attn_layer_norm(x)
        x = x + self.self_attn(y, y, y, need_weights=False)[0]
        x = x + self.conv_module(x)
        return self.final_layer_norm(x + 0.5 * self.ffn2(x))


@nn.layer
def feed_forward(scope, x):
    y = nn.Dense(64)(scope["up"], nn.LayerNorm()(scope["norm"], x))
    return nn.Dense(16)(scope["down"], nn.Dropout(0.1)(scope["dropout"], jax.nn.silu(y)))


@nn.layer
def convolve(scope, x):
    y = nn.Dense(32)(scope["in"], nn.LayerNorm()(scope["norm"], x))
    a, b = jnp.split(y, 2, -1)
    y = nn.DepthwiseConv(7, use_bias=False)(scope["depthwise"], a * jax.nn.sigmoid(b))
    y = jax.nn.silu(nn.BatchNorm()(scope["batch_norm"], y))
    return nn.Dense(16)(scope["out"], y)


@nn.layer
def conformer(scope, x):
    x = x + 0.5 * feed_forward()(scope["feed1"], x)
    y = nn.LayerNorm()(scope["attention_norm"], x)
    x = x + nn.Attention(4, dropout=0.1)(scope["attention"], y)
    x = x + convolve()(scope["convolution"], x)
    return nn.LayerNorm()(scope["norm"], x + 0.5 * feed_forward()(scope["feed2"], x))


# A ResNet that labels an image, and decodes it with transposed convolutions.


class Basic(tnn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = tnn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = tnn.BatchNorm2d(outputs)
        self.conv2 = tnn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = tnn.BatchNorm2d(outputs)
        self.downsample = None
        if stride != 1:
            self.downsample = tnn.Sequential(
                tnn.Conv2d(inputs, outputs, 1, stride, bias=False), tnn.BatchNorm2d(outputs)
            )

    def forward(self, x):
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNetDecoder(tnn.Module):
    def __init__(self):
        super().__init__()
        self.stem = tnn.Conv2d(3, 8, 3, padding=1)
        self.layer1 = tnn.Sequential(Basic(8, 8, 1), Basic(8, 8, 1))
        self.layer2 = tnn.Sequential(Basic(8, 16, 2), Basic(16, 16, 1))
        self.decoder = tnn.Sequential(
            tnn.ConvTranspose2d(16, 16, 3, stride=2, padding=1, output_padding=1, groups=2),
            tnn.GroupNorm(4, 16),
            tnn.ReLU(),
            tnn.ConvTranspose2d(16, 3, 4, stride=2, padding=1),
        )
        self.fc = tnn.Linear(16 * 4 * 4, 4)

    def forward(self, x):
        x = self.layer2(self.layer1(self.stem(x)))
        return self.decoder(x), self.fc(torch.flatten(x, 1))


@nn.layer
def basic(scope, x, *, features, stride=1):
    # The shortcut comes first here, and last there.
    shortcut = x
    if stride > 1:
        shortcut = nn.Conv(features, 1, stride, padding="VALID", use_bias=False)(
            scope["shortcut"], x
        )
        shortcut = nn.BatchNorm()(scope["shortcut_norm"], shortcut)
    y = nn.Conv(features, 3, stride, padding=1, use_bias=False)(scope["conv1"], x)
    y = jax.nn.relu(nn.BatchNorm()(scope["norm1"], y))
    y = nn.Conv(features, 3, use_bias=False)(scope["conv2"], y)
    return jax.nn.relu(shortcut + nn.BatchNorm()(scope["norm2"], y))


@nn.layer
def resnet_decoder(scope, x):
    x = nn.Conv(8, 3)(scope["stem"], x)
    for stage, (features, stride) in enumerate(((8, 1), (16, 2))):
        x = basic(features=features, stride=stride)(scope[f"stage{stage}_block0"], x)
        x = basic(features=features)(scope[f"stage{stage}_block1"], x)
    y = nn.ConvTranspose(16, 3, 2, padding=1, output_padding=1, groups=2)(scope["up1"], x)
    y = jax.nn.relu(nn.GroupNorm(4)(scope["norm"], y))
    y = nn.ConvTranspose(3, 4, 2, padding=1)(scope["up2"], y)
    return y, nn.Dense(4)(scope["head"], x.reshape(len(x), -1))


# Two models of timm that fnet does not have: LCNet and the MLP-Mixer.

_LCNET = (  # (window, stride, features, whether it has squeeze and excitation), at width 0.35
    ((3, 1, 16, False),),
    ((3, 2, 24, False), (3, 1, 24, False)),
    ((3, 2, 48, False), (3, 1, 48, False)),
    ((3, 2, 88, False), *((5, 1, 88, False),) * 5),
    ((5, 2, 176, True), (5, 1, 176, True)),
)


def hard_sigmoid(x):
    return jax.nn.relu6(x + 3) / 6


@nn.layer
def separable(scope, x, *, window, stride, features, squeeze):
    norm = lambda name, y: jax.nn.hard_swish(nn.BatchNorm()(scope[name], y))
    x = nn.DepthwiseConv(window, stride, padding=window // 2, use_bias=False)(scope["depthwise"], x)
    x = norm("depthwise_norm", x)
    if squeeze:
        y = x.mean((1, 2))
        y = jax.nn.relu(nn.Dense(x.shape[-1] // 4)(scope["squeeze"], y))
        x = x * hard_sigmoid(nn.Dense(x.shape[-1])(scope["excite"], y))[:, None, None]
    return norm("norm", nn.Conv(features, 1, use_bias=False)(scope["conv"], x))


@nn.layer
def lcnet(scope, x):
    x = nn.Conv(8, 3, 2, padding=1, use_bias=False)(scope["stem"], x)
    x = jax.nn.hard_swish(nn.BatchNorm()(scope["stem_norm"], x))
    for stage, blocks in enumerate(_LCNET):
        for i, (window, stride, features, squeeze) in enumerate(blocks):
            block = separable(window=window, stride=stride, features=features, squeeze=squeeze)
            x = block(scope[f"stage{stage}_{i}"], x)
    x = jax.nn.hard_swish(nn.Dense(1280)(scope["features"], x.mean((1, 2))))
    return nn.Dense(1000)(scope["classifier"], x)


@nn.layer
def mix(scope, x):  # [batch, tokens, width]
    y = nn.LayerNorm(epsilon=1e-6)(scope["token_norm"], x).swapaxes(1, 2)
    y = jax.nn.gelu(nn.Dense(256)(scope["token_up"], y), approximate=False)
    x = x + nn.Dense(x.shape[1])(scope["token_down"], y).swapaxes(1, 2)
    y = nn.LayerNorm(epsilon=1e-6)(scope["channel_norm"], x)
    y = jax.nn.gelu(nn.Dense(2048)(scope["channel_up"], y), approximate=False)
    return x + nn.Dense(x.shape[-1])(scope["channel_down"], y)


@nn.layer
def mixer(scope, x):
    x = nn.Conv(512, 32, 32, padding="VALID")(scope["patches"], x)
    x = nn.Stack(mix(), 8)(scope["blocks"], x.reshape(len(x), -1, 512))
    x = nn.LayerNorm(epsilon=1e-6)(scope["norm"], x).mean(1)
    return nn.Dense(10)(scope["head"], x)


def lively(module):
    """Gives norms and biases values that are not those of a new module, which hide mistakes."""
    torch.manual_seed(1)
    for each in module.modules():
        if isinstance(each, tnn.modules.batchnorm._BatchNorm):
            each.running_mean.normal_(0, 0.2)
            each.running_var.uniform_(0.5, 2)
    with torch.no_grad():
        for name, value in module.named_parameters():
            if name.endswith(("weight_g", "weight.original0")):
                value.mul_(1 + torch.rand_like(value))
            if value.ndim == 1 or not value.any():
                value.add_(0.2 * torch.randn_like(value))
    return module.eval()


def _image(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _tokens(*shape):
    return torch.randint(0, 20, shape, generator=torch.Generator().manual_seed(0))


def _translator():
    source, target = _tokens(6, 3), _tokens(6, 3).flip(0)
    both = np.stack([source.numpy().T, target.numpy().T], 1)
    return Translator(), translator(), (source, target), {"x_fnet": both}


def _timm(name, **options):
    import timm

    return timm.create_model(name, **options)


CASES = {
    "U-Net": lambda: (UNet(), unet(), _image(2, 3, 16, 16), {}),
    "WaveNet": lambda: (WaveNet(), wavenet(), _image(2, 1, 12), {}),
    "GRU tagger": lambda: (Tagger(), tagger(), _tokens(2, 7), {}),
    "Transformer": _translator,
    "Conformer": lambda: (Conformer(), conformer(), _image(2, 9, 16), {}),
    "ResNet with a decoder": lambda: (ResNetDecoder(), resnet_decoder(), _image(2, 3, 8, 8), {}),
    "timm lcnet_035": lambda: (_timm("lcnet_035"), lcnet(), _image(2, 3, 64, 64), {}),
    "timm mixer_s32_224": lambda: (
        _timm("mixer_s32_224", img_size=64, num_classes=10),
        mixer(),
        _image(2, 3, 64, 64),
        {},
    ),
}
