"""Thirty programs with one planted fault each, for `introspect.reduce`.

    python -m tests.introspect.reduce_faults [name ...]

prints for each whether the fault was found: the same predicate, the operation and the layer where
it was planted, in a process without fnet; and the equations and lines of the script, and the time.
Where diffrax is installed (`.venv-programs` of `make verify-programs`), three more are in its
solves.
"""

import os

if __name__ == "__main__":
    _FLAG = "--xla_force_host_platform_device_count=8"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}"

import dataclasses
import functools
import importlib.util
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fnet import introspect, models
from fnet import transforms as ft

LAYER = 10  # the eleventh of twelve


@dataclasses.dataclass(frozen=True)
class Fault:
    """A program that fails.

    Attributes:
        name: the program, and what is wrong with it.
        failing: the predicate.
        operations: the primitives of which one is in the script of a fault that was found.
        layer: the end of the path of its layer; "" for a program without names.
        build: returns (f, args, options of `reduce`).
        iteration: the iteration of the innermost loop in which it fails, or None.
    """

    name: str
    failing: str
    operations: tuple[str, ...]
    layer: str
    build: Callable[[], tuple[Callable, tuple, dict]]
    iteration: int | None = None


def _draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


# Faults in the value of a layer.


def _log(x):
    return jnp.log(jnp.maximum(x, 0))


def _sqrt(x):
    return jnp.sqrt(x)


def _quotient(x):
    return x / (x - x)


def _overflow(x):
    return jnp.exp(1000 * jnp.abs(x) + 100)


def _half(x):
    wide = jnp.abs(x.astype(jnp.float16)) + jnp.float16(1000)
    return (wide * jnp.float16(2000)).astype(x.dtype)


def _cancelled(x):
    """A variance as the difference of two large means."""
    shifted = 1000 + x
    mean = shifted.mean(-1, keepdims=True)
    return x + ((shifted * shifted).mean(-1, keepdims=True) - mean * mean)


# GPT-2 small: 12 layers of 12 heads and 768 features, with few tokens.


@functools.cache
def _gpt() -> tuple:
    model = models.GPT(vocab_size=256, width=768, depth=12, heads=12, context=16)
    tokens = np.random.default_rng(0).integers(0, 256, (1, 9)).astype(np.int32)
    params, _ = jax.jit(lambda key: model.init(key, tokens))(jax.random.key(0))
    return model, params, tokens


def _in_gpt(fault: Callable, site: str, *, gradient: bool = False) -> Callable:
    def build() -> tuple[Callable, tuple, dict]:
        model, params, tokens = _gpt()
        change = lambda value, index: jnp.where(index[0] == LAYER, fault(value), value)
        faulty = ft.intervene(model, {site: change})

        def loss(params, tokens):
            logits = faulty(params, tokens[:, :-1])
            chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1)
            return -chosen.mean()

        return (jax.value_and_grad(loss) if gradient else loss), (params, tokens), {}

    return build


def _rewritten(primitive: str, wrong: Callable) -> Callable:
    """A copy of `ft.tune` with a wrong rule for one primitive."""

    def rule(name, scope, inputs, equation):
        if name != primitive:
            return NotImplemented
        outputs = wrong(equation, *inputs)
        return NotImplemented if outputs is None else [outputs]

    return lambda f: ft.rewrite(f, rule)


def _gpt_rule(primitive: str, wrong: Callable) -> Callable:
    def build() -> tuple[Callable, tuple, dict]:
        model, params, tokens = _gpt()
        loss = lambda params, tokens: jax.nn.logsumexp(model(params, tokens)).mean()
        return loss, (params, tokens), {"transform": _rewritten(primitive, wrong)}

    return build


# ResNet-50 on a small image.


@functools.cache
def _resnet() -> tuple:
    model = models.ResNet.preset("resnet50")
    images = _draw(1, 64, 64, 3)
    params, state = jax.jit(lambda key: model.init(key, images))(jax.random.key(0))
    return model, params, state, images


def _in_resnet(fault: Callable, site: str, *, gradient: bool = False) -> Callable:
    def build() -> tuple[Callable, tuple, dict]:
        model, params, state, images = _resnet()
        forward = lambda params, images: model(params, images, state=state)[0]
        faulty = ft.intervene(forward, {site: lambda value, index: fault(value)})
        loss = lambda params, images: jnp.square(faulty(params, images)).mean()
        return (jax.value_and_grad(loss) if gradient else loss), (params, images), {}

    return build


def _resnet_rule(primitive: str, wrong: Callable) -> Callable:
    def build() -> tuple[Callable, tuple, dict]:
        model, params, state, images = _resnet()
        forward = lambda params, images: model(params, images, state=state)[0]
        return forward, (params, images), {"transform": _rewritten(primitive, wrong)}

    return build


def _slow_convolution(x):
    """A convolution of integers, for which XLA has no fast form on a CPU."""
    whole = jnp.concatenate([8 * x, 8 * x], -1).astype(jnp.int32)
    kernel = jnp.ones((3, 3, whole.shape[-1], whole.shape[-1]), jnp.int32)
    numbers = ("NHWC", "HWIO", "NHWC")
    slow = lax.conv_general_dilated(whole, kernel, (1, 1), "SAME", dimension_numbers=numbers)
    return x + 0.001 * slow[..., : x.shape[-1]].astype(x.dtype)


def _memory(x):
    """All pairs of elements at once."""
    flat = x.reshape(-1)[:6000]
    pairs = jnp.sort(flat[:, None] * flat[None, :], axis=0)
    return x + 1e-9 * pairs.sum()


# A solver of differential equations with adaptive steps, as in diffrax.


def _solve(fault: Callable) -> Callable:
    def build() -> tuple[Callable, tuple, dict]:
        def field(weights, t, y):
            with jax.named_scope("field"):
                slope = jnp.tanh(y @ weights) - y
                return fault(slope, t)

        def solve(weights, y):
            def step(carry):
                t, y, dt = carry
                with jax.named_scope("solver"):
                    first = field(weights, t, y)
                    second = field(weights, t + dt, y + dt * first)
                    new = y + dt / 2 * (first + second)
                    apart = jnp.sqrt(jnp.mean(jnp.square(dt * (second - first))))
                    factor = jnp.clip(0.9 * jnp.sqrt(1e-2 / (apart + 1e-8)), 0.5, 2.0)
                    return t + dt, new, jnp.minimum(dt * factor, 2.0 - (t + dt) + 1e-3)

            start = (jnp.float32(0), y, jnp.float32(0.01))
            return lax.while_loop(lambda carry: carry[0] < 2, step, start)[1]

        return solve, (_draw(6, 6), _draw(4, 6, seed=1)), {}

    return build


def _late(fault: Callable) -> Callable:
    """A fault after t = 1."""
    return lambda x, t: jnp.where(t > 1, fault(x), x)


def _solve_rule(primitive: str, wrong: Callable) -> Callable:
    def build() -> tuple[Callable, tuple, dict]:
        f, args, _ = _solve(lambda x, t: x)()
        return f, args, {"transform": _rewritten(primitive, wrong)}

    return build


# Solves by diffrax, which `make test` does not install.


def _diffrax(fault: Callable, *, gradient: bool = False, **options: Any) -> Callable:
    def build() -> tuple[Callable, tuple, dict]:
        import diffrax

        def field(t, y, weights):
            with jax.named_scope("field"):
                return fault(jnp.tanh(y @ weights) - y, t)

        def solve(weights, y):
            term, solver = diffrax.ODETerm(field), diffrax.Tsit5()
            adaptive = diffrax.PIDController(rtol=1e-3, atol=1e-3)
            solution = diffrax.diffeqsolve(
                term,
                solver,
                t0=0.0,
                t1=2.0,
                dt0=0.1,
                y0=y,
                args=weights,
                stepsize_controller=adaptive if options else diffrax.ConstantStepSize(),
                throw=False,
            )
            return jnp.square(solution.ys).mean()

        f = jax.value_and_grad(solve) if gradient else solve
        return f, (_draw(6, 6), _draw(4, 6, seed=1)), options

    return build


# A model of flax.nnx.


class _Net(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(3, 8, (3, 3), rngs=rngs)
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.head = nnx.Linear(8, 5, rngs=rngs)

    def __call__(self, x):
        x = jax.nn.relu(self.conv(x))
        x = self.norm(x)
        return self.head(x.mean((1, 2)))


def _in_nnx(fault: Callable, layer: str, *, gradient: bool = False) -> Callable:
    def build() -> tuple[Callable, tuple, dict]:
        net = ft.name_scopes(_Net(nnx.Rngs(0)))

        def loss(net, x):
            with jax.named_scope(layer):
                return jnp.square(fault(net(x))).mean()

        f = nnx.value_and_grad(loss) if gradient else loss
        return f, (net, _draw(2, 8, 8, 3)), {}

    return build


def _nnx_rule(primitive: str, wrong: Callable) -> Callable:
    def build() -> tuple[Callable, tuple, dict]:
        net = ft.name_scopes(_Net(nnx.Rngs(0)))
        call = lambda net, x: net(x)
        return call, (net, _draw(2, 8, 8, 3)), {"transform": _rewritten(primitive, wrong)}

    return build


# Programs that XLA divides wrongly over several devices (see fnet/jaxpr/_misdivided.py).


def _mesh(*sizes: int) -> Mesh:
    count = int(np.prod(sizes))
    axes = "ab"[: len(sizes)]
    return Mesh(
        np.array(jax.devices()[:count]).reshape(sizes),
        tuple(axes),
        axis_types=(AxisType.Auto,) * len(sizes),
    )


def _grouped() -> tuple[Callable, tuple, dict]:
    mesh = _mesh(2, 2)
    put = lambda x, *axes: jax.device_put(x, NamedSharding(mesh, P(*axes)))
    numbers = ("NHWC", "HWIO", "NHWC")

    def loss(kernel, x):
        with jax.named_scope("block/conv"):
            y = lax.conv_general_dilated(
                x, kernel, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=4
            )
        return jnp.square(jax.nn.gelu(y)).mean()

    args = put(_draw(3, 3, 1, 4)), put(_draw(4, 8, 8, 4), "a")
    return jax.value_and_grad(loss), args, {}


def _pooled() -> tuple[Callable, tuple, dict]:
    mesh = _mesh(4)
    x = jax.device_put(_draw(1, 8, 8, 1), NamedSharding(mesh, P(None, "a")))

    def loss(x):
        with jax.named_scope("pool"):
            y = lax.reduce_window(x, -np.inf, lax.max, (1, 3, 3, 1), (1, 1, 1, 1), "SAME")
        return (jnp.tanh(y) * 2).sum()

    return jax.grad(loss), (x,), {}


def _padded() -> tuple[Callable, tuple, dict]:
    split = NamedSharding(_mesh(4), P("a"))
    whole = NamedSharding(_mesh(4), P())
    x = jax.device_put(np.arange(12, dtype=np.float32), split)
    cotangent = jax.device_put(np.arange(1, 7, dtype=np.float32), whole)

    def every_other(x):
        with jax.named_scope("stride"):
            return x[1::2]

    def gradient(x, cotangent):
        (found,) = jax.vjp(every_other, x)[1](cotangent)
        return jnp.sin(lax.with_sharding_constraint(found, split))

    return gradient, (x, cotangent), {}


def _cropped() -> tuple[Callable, tuple, dict]:
    split = NamedSharding(_mesh(2), P("a"))
    whole = NamedSharding(_mesh(2), P())
    x = jax.device_put(np.arange(1, 9, dtype=np.float32), whole)

    def shifted(x):
        with jax.named_scope("shift"):
            return lax.pad(x, np.float32(0), ((-1, 1, 0),))

    return lambda x: lax.with_sharding_constraint(shifted(x), split) * 2, (x,), {}


def _scaled(equation, *inputs):
    """The result of an equation, 1 % too large."""
    outputs = equation.primitive.bind(*inputs, **equation.params)
    return outputs * np.asarray(1.01, outputs.dtype) if jnp.ndim(outputs) else None


def _doubled(equation, *inputs):
    return 2 * jnp.tanh(inputs[0])


FINITE, WIDE = "not finite", "differs from float64"
PLAIN, ONE = "differs from plain JAX", "differs from one device"
HALF = ("mul", "convert_element_type", "add")
VARIANCE = ("sub", "mul", "reduce_sum", "div", "add")
FAULTS = (
    Fault("gpt: log(0)", FINITE, ("log",), "blocks/fc", _in_gpt(_log, "blocks/fc"), LAYER),
    Fault(
        "gpt, gradient: log(0)",
        FINITE,
        ("log",),
        "blocks/proj",
        _in_gpt(_log, "blocks/proj", gradient=True),
        LAYER,
    ),
    Fault(
        "gpt: root of a negative number",
        FINITE,
        ("sqrt",),
        "blocks/attention/out",
        _in_gpt(_sqrt, "blocks/attention/out"),
        LAYER,
    ),
    Fault(
        "gpt: 0 / 0", FINITE, ("div",), "blocks/norm2", _in_gpt(_quotient, "blocks/norm2"), LAYER
    ),
    Fault("gpt: exp", FINITE, ("exp",), "blocks/fc", _in_gpt(_overflow, "blocks/fc"), LAYER),
    Fault("gpt: float16", FINITE, HALF, "blocks/proj", _in_gpt(_half, "blocks/proj"), LAYER),
    Fault(
        "gpt: float16, against float64",
        WIDE,
        HALF,
        "blocks/proj",
        _in_gpt(_half, "blocks/proj"),
        LAYER,
    ),
    Fault("gpt: wrong rule for tanh", PLAIN, ("tanh",), "blocks", _gpt_rule("tanh", _doubled)),
    Fault(
        "gpt: wrong rule for a root", PLAIN, ("rsqrt",), "blocks/norm1", _gpt_rule("rsqrt", _scaled)
    ),
    Fault("resnet: log(0)", FINITE, ("log",), "conv2", _in_resnet(jnp.log, "stage3/block2/conv2")),
    Fault(
        "resnet, gradient: root",
        FINITE,
        ("sqrt",),
        "conv1",
        _in_resnet(_sqrt, "stage2/block1/conv1", gradient=True),
    ),
    Fault("resnet: 0 / 0", FINITE, ("div",), "conv3", _in_resnet(_quotient, "stage4/block0/conv3")),
    Fault("resnet: float16", FINITE, HALF, "conv1", _in_resnet(_half, "stage1/block0/conv1")),
    Fault(
        "resnet: slow convolution",
        "slower than 20x",
        ("conv_general_dilated",),
        "stem/conv",
        _in_resnet(_slow_convolution, "stem/conv"),
    ),
    Fault(
        "resnet: wrong rule for convolutions",
        PLAIN,
        ("conv_general_dilated",),
        "conv",
        _resnet_rule("conv_general_dilated", _scaled),
    ),
    Fault(
        "resnet: memory",
        "uses more than 100 MB",
        ("sort", "mul", "broadcast_in_dim"),
        "conv1",
        _in_resnet(_memory, "stage2/block1/conv1"),
    ),
    Fault("solve: log", FINITE, ("log",), "field", _solve(_late(_log))),
    Fault("solve: root", FINITE, ("sqrt",), "field", _solve(_late(_sqrt))),
    Fault("solve: 0 / 0", FINITE, ("div",), "field", _solve(_late(_quotient))),
    Fault("solve: exp", FINITE, ("exp",), "field", _solve(_late(_overflow))),
    Fault("solve: float16", FINITE, HALF, "field", _solve(_late(_half))),
    Fault("solve: wrong rule for tanh", PLAIN, ("tanh",), "field", _solve_rule("tanh", _scaled)),
    Fault("nnx: log(0)", FINITE, ("log",), "loss", _in_nnx(_log, "loss")),
    Fault("nnx, gradient: root", FINITE, ("sqrt",), "loss", _in_nnx(_sqrt, "loss", gradient=True)),
    Fault("nnx: cancellation", WIDE, VARIANCE, "loss", _in_nnx(_cancelled, "loss")),
    Fault(
        "nnx: wrong rule for products",
        PLAIN,
        ("dot_general",),
        "head",
        _nnx_rule("dot_general", _scaled),
    ),
    Fault("mesh: grouped convolution", ONE, ("conv_general_dilated",), "block/conv", _grouped),
    Fault("mesh: max pooling", ONE, ("select_and_scatter_add",), "pool", _pooled),
    Fault("mesh: gaps", ONE, ("pad",), "stride", _padded),
    Fault("mesh: shift", ONE, ("pad",), "shift", _cropped),
)


DIFFRAX = (
    Fault("diffrax: log", FINITE, ("log",), "field", _diffrax(_late(_log))),
    Fault(
        "diffrax, gradient: root",
        FINITE,
        ("sqrt",),
        "field",
        _diffrax(_late(_sqrt), gradient=True),
    ),
    Fault(
        "diffrax, adaptive: wrong rule for tanh",
        PLAIN,
        ("tanh",),
        "field",
        _diffrax(lambda x, t: x, transform=_rewritten("tanh", _scaled)),
    ),
)


def reduced(fault: Fault, folder: str) -> introspect.Reduced:
    f, args, options = fault.build()
    return introspect.reduce(f, args, fault.failing, folder, **options)


def missed(fault: Fault, found: introspect.Reduced) -> str:
    """Returns what is not as planted, or ""."""
    if not found.reproduced:
        return "does not fail without fnet"
    if not set(fault.operations) & set(found.operations):
        return f"other operations: {', '.join(found.operations)}"
    if fault.layer not in found.layer:
        return f"another layer: {found.layer!r}"
    if fault.iteration is not None:
        last = found.iterations[-1] if found.iterations else "none"
        return "" if last.startswith(f"iteration {fault.iteration} ") else f"another {last}"
    return ""


def main(names: list[str]) -> None:
    installed = importlib.util.find_spec("diffrax") is not None
    if not installed:
        print("diffrax is not installed, so its faults are left out")
    every = FAULTS + DIFFRAX if installed else FAULTS
    chosen = [fault for fault in every if not names or any(each in fault.name for each in names)]
    rows = []
    print(f"{'fault':38}{'equations':>10}{'lines':>7}{'seconds':>9}  found")
    for fault in chosen:
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            try:
                found = reduced(fault, folder)
                wrong = missed(fault, found)
                size = len(found.operations), found.lines
            except Exception as failed:
                wrong, size = f"{type(failed).__name__}: {str(failed)[:120]}", (0, 0)
        seconds = time.perf_counter() - start
        rows.append((wrong, *size, seconds))
        print(f"{fault.name:38}{size[0]:10}{size[1]:7}{seconds:9.0f}  {wrong or 'yes'}", flush=True)
    print(
        f"found {sum(not row[0] for row in rows)} of {len(rows)}, median equations "
        f"{statistics.median(row[1] for row in rows):g}, most lines {max(row[2] for row in rows)}, "
        f"longest {max(row[3] for row in rows):.0f} s"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
