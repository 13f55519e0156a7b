"""U-Nets with free batch, height and width: what halves an image and doubles it again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fnet import export
from fnet import layers as nn

onnxruntime = pytest.importorskip("onnxruntime")

WIDTHS = 8, 16, 32
SIZES = (1, 16, 16), (2, 8, 24), (3, 32, 20), (1, 4, 4), (2, 12, 40)
NORMS = {"batch": nn.BatchNorm(), "layer": nn.LayerNorm(), "group": nn.GroupNorm(4)}


def _smaller(scope, x, how):
    b, h, w, c = x.shape
    if how == "shuffle":
        x = x.reshape(b, h // 2, 2, w // 2, 2, c).transpose(0, 1, 3, 2, 4, 5)
        return x.reshape(b, h // 2, w // 2, 4 * c)
    layers = {
        "stride": nn.Conv(c, 3, 2),
        "average": nn.AvgPool(2),
        "maximum": nn.MaxPool(3, 2, padding="SAME"),
    }
    return layers[how](scope, x)


def _larger(scope, x, how, features):
    b, h, w, c = x.shape
    if how in ("nearest", "bilinear", "cubic"):
        return jax.image.resize(x, (b, 2 * h, 2 * w, c), how)
    if how == "repeat":
        return jnp.repeat(jnp.repeat(x, 2, 1), 2, 2)
    if how == "shuffle":
        x = nn.Conv(4 * features, 1)(scope, x).reshape(b, h, w, 2, 2, features)
        return x.transpose(0, 1, 3, 2, 4, 5).reshape(b, 2 * h, 2 * w, features)
    window = {"transposed 2": 2, "transposed 3": 3, "transposed 4": 4}[how]
    return nn.ConvTranspose(features, window, 2)(scope, x)


class UNet(nn.Layer):
    down: str
    up: str
    middle: str
    norm: str

    def forward(self, scope, x):  # [b, 4h, 4w, 3]
        norm = NORMS[self.norm]

        def block(scope, x, features):
            y = jax.nn.silu(norm(scope["norm1"], nn.Conv(features, 3)(scope["conv1"], x)))
            y = norm(scope["norm2"], nn.Conv(features, 3, dilation=2)(scope["conv2"], y))
            return y + nn.Conv(features, 1)(scope["shortcut"], x)

        skips = []
        for i, features in enumerate(WIDTHS[:-1]):
            x = block(scope[f"down{i}"], x, features)
            skips.append(x)
            x = _smaller(scope[f"smaller{i}"], x, self.down)
        x = block(scope["middle"], x, WIDTHS[-1])
        if self.middle == "attention":
            b, h, w, c = x.shape
            tokens = x.reshape(b, h * w, c)
            x = (tokens + nn.Attention(4)(scope["attention"], tokens)).reshape(b, h, w, c)
        elif self.middle == "gate":
            mean = nn.GlobalAvgPool()(scope["mean"], x)
            x = x * jax.nn.sigmoid(nn.Dense(WIDTHS[-1])(scope["gate"], mean))[:, None, None]
        for i in reversed(range(len(skips))):
            x = _larger(scope[f"larger{i}"], x, self.up, WIDTHS[i])
            x = block(scope[f"up{i}"], jnp.concatenate([x, skips[i]], -1), WIDTHS[i])
        return nn.Conv(2, 1)(scope["head"], x)


MODELS = [
    UNet("maximum", "transposed 2", "gate", "group"),
    UNet("stride", "bilinear", "attention", "batch"),
    UNet("average", "nearest", "attention", "group"),
    UNet("maximum", "repeat", "none", "layer"),
    UNet("shuffle", "shuffle", "attention", "layer"),
    UNet("maximum", "transposed 3", "gate", "batch"),
    UNet("stride", "transposed 4", "none", "group"),
    UNet("average", "cubic", "gate", "layer"),
]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("model", MODELS, ids=lambda m: f"{m.down}-{m.up}-{m.middle}-{m.norm}")
def test_unet_of_free_sizes(model, tmp_path):
    params, state = model.init(jax.random.key(0), jnp.zeros((1, 16, 16, 3)))
    predict = lambda arrays, x: model(arrays["params"], x, state=arrays["state"])[0]
    arrays = {"params": params, "state": state}
    program = export.program(predict, arrays, x=export.spec("b, 4*h, 4*w, 3"))
    program.save(tmp_path / "unet.fnet")
    bundle = export.load(tmp_path / "unet.fnet", check=True)
    program.onnx(tmp_path / "unet.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "unet.onnx")
    for i, (b, h, w) in enumerate(SIZES):
        x = np.random.default_rng(i).normal(size=(b, h, w, 3)).astype(np.float32)
        expected = np.asarray(jax.jit(predict)(arrays, x))
        for y in (bundle(x), *session.run(None, {"x": x})):
            assert y.shape == (b, h, w, 2)
            assert np.abs(y - expected).max() <= 1e-5 * np.abs(expected).max()
