"""The transforms and tools of fnet, each applied to a subject and compared with the same subject
without it."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from fnet import compress, cost, export, introspect, parallel
from fnet import training as tr
from fnet import transforms as ft

from .subjects import ROWS, Subject, arrays, batch

STEPS = 3
WHOLE_BATCH = "norm", "custom", "state"  # statistics of the rows of a batch
CELLS: dict[str, Callable[[Subject], None]] = {}
KEY = jax.random.key(0)


def cell(function: Callable) -> Callable:
    CELLS[function.__name__] = function
    return function


def ran(subject: Subject, f: Callable, batches: Callable = batch, steps: int = STEPS) -> dict:
    """The arrays after several calls of f, and what it returned."""
    arguments, outputs = subject.make(KEY), []
    for i in range(steps):
        result = f(*arguments, jnp.asarray(batches(i)))
        arguments = subject.after(arguments, result)
        outputs.append(subject.outputs(result))
    return arrays({"arguments": arguments, "outputs": outputs})


@functools.cache
def wanted(subject: Subject) -> dict:
    return ran(subject, subject.f)


def close(got: dict, want: dict, tolerance: float = 2e-5) -> None:
    assert got.keys() == want.keys(), got.keys() ^ want.keys()
    for name, b in want.items():
        a = got[name]
        assert (a.shape, a.dtype) == (b.shape, b.dtype), name
        if b.dtype.kind in "iub":
            np.testing.assert_array_equal(a, b, name)
        else:
            scale = max(float(np.abs(b).max(initial=0)), 1.0)
            np.testing.assert_allclose(a / scale, b / scale, 0, tolerance, err_msg=name)


def unchanged(subject: Subject, tool: Callable) -> Any:
    """The result of a tool that only analyzes a function, and must not change its modules."""
    arguments = subject.make(KEY)
    before = arrays(arguments)
    result = tool(subject.f, *arguments, jnp.asarray(batch(0)))
    close(arrays(arguments), before, 0)
    return result


def pure(subject: Subject) -> tuple[Callable, Any]:
    """The subject as a function of arrays alone, by the means of its own library."""
    if subject.name.startswith("nnx"):
        graph, state = nnx.split(subject.make(KEY))

        def run(state, x):
            arguments = nnx.merge(graph, state)
            result = subject.f(*arguments, x)
            return subject.outputs(result), nnx.state(arguments)

        return run, state
    dynamic, static = eqx.partition(subject.make(KEY), eqx.is_array)

    def run(dynamic, x):
        result = subject.f(*eqx.combine(dynamic, static), x)
        return eqx.filter(result, eqx.is_array)

    return run, dynamic


# Transforms of functions


@cell
def rewrite(subject):
    close(ran(subject, ft.rewrite(subject.f, lambda *_: NotImplemented)), wanted(subject))


@cell
def autocast(subject):
    f = ft.autocast(subject.f, "bfloat16")
    close(ran(subject, f, steps=1), ran(subject, subject.f, steps=1), 0.1)


@cell
def tune(subject):
    close(ran(subject, ft.tune(subject.f, "cpu")), wanted(subject))


@cell
def tune_in_jit(subject):
    """Inside of the library's own jit, as a part of a larger program."""
    jit = nnx.jit if subject.name.startswith("nnx") else eqx.filter_jit
    close(ran(subject, jit(ft.rewrite(subject.f, lambda *_: NotImplemented))), wanted(subject))


@cell
def rematerialize(subject):
    close(ran(subject, ft.rematerialize(subject.f)), wanted(subject))


@cell
def microbatch(subject):
    """Equal to the function on slice after slice; of modules that are carried, with the state that
    the slice before left."""
    made, x = subject.make(KEY), jnp.asarray(batch(0))
    stateful = subject.name == "eqx model state"
    carry = (1,) if stateful else tuple(range(subject.carries))
    got = ft.microbatch(subject.f, 2, argnums=len(made), carry=carry)(*made, x)

    arguments, outputs = subject.make(KEY), []
    for part in (x[0::2], x[1::2]):
        result = subject.f(*arguments, part)
        if stateful:
            y, state = result
            arguments = arguments[0], state
            outputs.append(y)
        else:
            arguments = subject.after(arguments, result)
            outputs.append(subject.outputs(result))
    mean = jax.tree.map(_mean, *outputs)
    if stateful:
        close(arrays(got), arrays((mean, state)))
        return
    made = subject.after(made, got)
    close(arrays((made, subject.outputs(got))), arrays((arguments, mean)))


@cell
def microbatch_of_gradients(subject):
    """Gradient accumulation: the mean of the gradients of the slices."""
    loss, grad = differentiable(subject)
    arguments, others = subject.make(KEY), subject.make(KEY)
    got = ft.microbatch(grad(loss), 2, argnums=len(arguments))(*arguments, jnp.asarray(batch(0)))
    parts = [grad(loss)(*others, jnp.asarray(batch(0))[i::2]) for i in range(2)]
    close(arrays(got), arrays(jax.tree.map(_mean, *parts)))
    close(arrays(arguments), arrays(others))


def differentiable(subject: Subject) -> tuple[Callable, Callable]:
    """A loss, and the function of the subject's library for its value and gradient."""
    if subject.name.startswith("nnx"):  # takes no *rest
        return lambda model, x: _sum(subject.f(model, x)), nnx.value_and_grad
    return lambda *arguments: _sum(subject.f(*arguments)), eqx.filter_value_and_grad


def _mean(a, b):
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        return a + b
    return (a + b) / 2


@cell
def pmap(subject):
    f = ft.pmap(subject.f, in_axes=None, out_axes=0, devices=jax.devices()[:1])

    def run(*arguments):
        first = lambda x: x[0] if hasattr(x, "dtype") else x
        return jax.tree.map(first, f(*arguments))

    close(ran(subject, run), wanted(subject))


def named(subject: Subject) -> Subject:
    """The subject, with named scopes, which only flax.nnx does not set."""
    if not subject.name.startswith("nnx"):
        return subject

    def make(key):
        model, *rest = subject.make(key)
        return ft.name_scopes(model), *rest

    return dataclasses.replace(subject, make=make)


@cell
def name_scopes(subject):
    if not subject.name.startswith("nnx"):
        ft.name_scopes(*subject.make(KEY)[:1])
    close(ran(named(subject), subject.f), wanted(subject))


@cell
def sites(subject):
    def names(f, *arguments):
        return ft.sites(f)(*arguments).names

    assert unchanged(named(subject), names)


@cell
def capture(subject):
    seen = []

    def run(*arguments):
        result, values = ft.capture(subject.f, ".*")(*arguments)
        seen.append(values)
        return result

    close(ran(named(subject), run), wanted(subject))
    assert len(seen) == STEPS and jax.tree.leaves(seen)


@cell
def intervene(subject):
    """The module goes on with what is put in, and changes as it then does."""
    f = ft.intervene(subject.f, {".*": lambda value, index: value})
    close(ran(named(subject), f), wanted(subject))
    zero = ft.intervene(subject.f, {".*": lambda value, index: jax.tree.map(_zero, value)})
    got = ran(named(subject), zero, steps=1)
    assert any((got[name] != x).any() for name, x in ran(subject, subject.f, steps=1).items())


def _zero(x):
    return jnp.zeros_like(x) if jnp.issubdtype(x.dtype, jnp.inexact) else x


@cell
def capture_cotangents(subject):
    loss = lambda *arguments: _sum(subject.f(*arguments))
    made, other = named(subject).make(KEY), subject.make(KEY)
    x = jnp.asarray(batch(0))
    value, cotangents = ft.capture_cotangents(loss, ".*")(*made, x)
    close(arrays([value, made]), arrays([loss(*other, x), other]))
    assert any(np.asarray(x).any() for x in jax.tree.leaves(cotangents))


@cell
def use_implicit_arrays(subject):
    close(ran(subject, ft.use_implicit_arrays(subject.f)), wanted(subject))


@cell
def explain(subject):
    for transform in (ft.autocast, ft.tune, ft.use_implicit_arrays):
        tool = lambda f, *args, of=transform: ft.explain(of(f), *args)
        assert str(unchanged(subject, tool))


def inference(subject: Subject) -> tuple:
    """The arguments, with the model in inference mode."""
    model, *rest = subject.make(KEY)
    if subject.name.startswith("nnx"):
        model.eval()
    elif "frozen" not in subject.name:  # `inference_mode` takes whole models
        model = eqx.nn.inference_mode(model)
    return model, *rest


@cell
def fold(subject):
    f = lambda arguments, x: subject.outputs(subject.f(*arguments, x))
    got = ft.fold(f, inference(subject))(jnp.asarray(batch(0)))
    want = subject.outputs(subject.f(*inference(subject), jnp.asarray(batch(0))))
    close(arrays(got), arrays(want))


@cell
def loss_scale(subject):
    """The scaled gradient, divided by the scale, is the gradient."""
    opt_state = ft.loss_scale(optax.sgd(0.1), initial=8.0).init({})
    x = jnp.asarray(batch(0))
    loss, grad = differentiable(subject)
    value, got = ft.scaled_value_and_grad(loss)(opt_state, *subject.make(KEY), x)
    _, want = grad(loss)(*subject.make(KEY), x)
    got = jax.tree.map(lambda g: g / 8.0, got)
    close(arrays(got), arrays(want))
    close(arrays([value]), arrays([loss(*subject.make(KEY), x)]))


def _sum(result):
    return jnp.square(jax.tree.leaves(result)[0]).sum()


# Analyses


@cell
def count(subject):
    got = unchanged(subject, cost.count)
    run, state = pure(subject)
    assert got.flops == cost.count(run, state, jnp.asarray(batch(0))).flops


@cell
def roofline(subject):
    tool = functools.partial(cost.roofline, chip="TPU v5e", measure=False)
    assert str(unchanged(subject, tool))


@cell
def depends(subject):
    """Rows depend on themselves alone, unless the model looks at the whole batch."""
    count = len(subject.make(KEY))
    axes = {"rows": ((None,) * count + (0,), 0)}
    f = lambda *arguments: jax.tree.leaves(subject.f(*arguments))[0]
    report = unchanged(subject, lambda _, *args: introspect.depends(f, *args, axes=axes))
    assert ("the same position" in str(report)) == (subject.name.split()[-1] not in WHOLE_BATCH)


@cell
def compare(subject):
    tool = lambda f, *arguments: introspect.compare(f, ft.autocast(f, "bfloat16"), *arguments)
    assert str(unchanged(subject, tool))


@cell
def lock(subject):
    first, second = (unchanged(subject, introspect.lock) for _ in range(2))
    assert first.text == second.text and introspect.diff(first, second).same
    assert " ~ " in first.text


@cell
def summary(subject):
    if subject.name.startswith("nnx"):
        found = unchanged(subject, lambda f, model, *rest: introspect.summary(model, rest[-1]))
    else:
        found = unchanged(subject, introspect.summary)
    assert "Linear" in str(found) or "fc" in str(found) or "rnn" in str(found)


# Compression


@cell
def quantize(subject):
    model, *rest = subject.make(KEY)
    quantized = compress.quantize(model, {".*(kernel|weight)": compress.Int8()})
    plain = compress.materialize(quantized)
    got = ft.use_implicit_arrays(subject.f)(quantized, *rest, jnp.asarray(batch(0)))
    want = subject.f(plain, *rest, jnp.asarray(batch(0)))
    assert compress.size(quantized) < compress.size(model)
    close(arrays(subject.outputs(got)), arrays(subject.outputs(want)), 1e-3)


@cell
def lora(subject):
    model, *rest = subject.make(KEY)
    adapted = compress.lora(KEY, model, {".*(kernel|weight)": 1})
    got = ft.use_implicit_arrays(subject.f)(adapted, *rest, jnp.asarray(batch(0)))
    want = subject.f(*subject.make(KEY), jnp.asarray(batch(0)))
    close(arrays(subject.outputs(got)), arrays(subject.outputs(want)))


@cell
def shrink(subject):
    f = lambda arguments, x: subject.outputs(subject.f(*arguments, x))
    shrunk = compress.shrink(f, inference(subject), jnp.asarray(batch(0)), fraction=0.5)
    y = shrunk.f(shrunk.params, jnp.asarray(batch(0)))
    assert compress.size(shrunk.params) < compress.size(inference(subject)) and len(y) == ROWS


# Parallel, training, export


@cell
def plan(subject):
    made = parallel.plan(subject.f, subject.make, batch(0), devices=jax.devices()[:4])
    step, arguments = made.jit(subject.f), made.init(KEY)
    outputs = []
    for i in range(STEPS):
        result = step(*arguments, batch(i))
        arguments = subject.after(arguments, result)
        outputs.append(subject.outputs(result))
    got = arrays({"arguments": arguments, "outputs": outputs})
    close(got, wanted(subject), 1e-3)  # Adam divides small sums by their size


@cell
def plan_not_attached(subject):
    made = parallel.plan(subject.f, subject.make, batch(0), devices="v5e:2x4", compile=False)
    assert not made.attached and "16.0 GiB" in str(made)


@cell
def fit(subject):
    """Bit for bit what the user's own loop computes, also in two parts with a checkpoint."""
    jit = nnx.jit if subject.name.startswith("nnx") else eqx.filter_jit
    arguments = subject.make(KEY)
    step = jit(subject.f)
    for i in range(4):
        arguments = subject.after(arguments, step(*arguments, batch(i)))
    want = arrays(arguments)
    options = {"log_every": 1, "tune": False, "tensorboard": False, "check_devices": False}
    with tempfile.TemporaryDirectory() as folder:
        options |= {"workdir": folder, "config": {}, "save_every": 1}
        tr.fit(subject.f, subject.make(KEY), batch, steps=2, **options)
        given = subject.make(jax.random.key(1))
        trained = tr.fit(subject.f, given, batch, steps=4, **options)
        restored = tr.restore(folder, like=subject.make(jax.random.key(2)))
    close(arrays(trained), want, 1e-6)
    close(arrays(restored), want, 1e-6)
    if subject.name.startswith("nnx"):
        assert all(a is b for a, b in zip(trained, given, strict=True))


@cell
def program(subject):
    """In inference mode."""
    model, *rest = inference(subject)
    f = lambda arguments, x: subject.outputs(subject.f(*arguments, x))
    spec = export.spec(f"{ROWS}, {batch(0).shape[1]}")
    made = export.program(f, (model, *rest), x=spec)
    got = made.call("predict", batch(1))
    want = jax.tree.leaves(subject.outputs(subject.f(model, *rest, jnp.asarray(batch(1)))))
    close(arrays(got), arrays(want))


@cell
def program_of_the_model(subject):
    model, *_ = inference(subject)
    if subject.name.startswith("nnx"):
        made, x = export.program(model, x=export.spec("b, 6")), batch(1)
    else:
        made, x = export.program(model, x=export.spec("6")), batch(1)[0]
    close(arrays(made.call("predict", x)), arrays([model(x)]))
