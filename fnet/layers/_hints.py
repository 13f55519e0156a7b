"""Hints for users of other libraries: names of PyTorch, Keras and Flax, and their equivalents in
fnet."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fnet._util._nearest import did_you_mean

_STEP = "jax.value_and_grad(loss)(params, batch) returns the gradients, and Optax updates the parameters"
_NAMES = {  # names of modules and functions of PyTorch, Keras and Flax -> the form in fnet
    "Linear": "nn.Dense(features)",
    "LazyLinear": "nn.Dense(features)",
    **dict.fromkeys(
        ("Conv1d", "Conv2d", "Conv3d", "Conv1D", "Conv2D", "Conv3D"),
        "nn.Conv(features, kernel_size), with inputs [batch, *space, channels]",
    ),
    **dict.fromkeys(
        ("ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d", "Conv2DTranspose"),
        "nn.ConvTranspose(features, kernel_size)",
    ),
    **dict.fromkeys(
        ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "BatchNormalization"), "nn.BatchNorm()"
    ),
    "LayerNormalization": "nn.LayerNorm()",
    **dict.fromkeys(
        ("MaxPool1d", "MaxPool2d", "MaxPool3d", "MaxPooling2D", "max_pool"), "nn.MaxPool(window)"
    ),
    **dict.fromkeys(
        ("AvgPool1d", "AvgPool2d", "AvgPool3d", "AveragePooling2D", "avg_pool"),
        "nn.AvgPool(window)",
    ),
    **dict.fromkeys(("AdaptiveAvgPool2d", "GlobalAveragePooling2D"), "nn.GlobalAvgPool()"),
    "Dropout2d": "nn.Dropout(rate, broadcast=(1, 2))",
    "Embedding": "nn.Embed(vocab_size, features)",
    **dict.fromkeys(("MultiheadAttention", "MultiHeadAttention"), "nn.Attention(heads)"),
    "scaled_dot_product_attention": "nn.dot_product_attention",
    **{
        name: f"the function jax.nn.{name.lower()}"
        for name in (
            "ReLU",
            "ReLU6",
            "GELU",
            "SiLU",
            "ELU",
            "CELU",
            "SELU",
            "Softplus",
            "Softmax",
            "Sigmoid",
            "Tanh",
        )
    },
    "LeakyReLU": "the function jax.nn.leaky_relu",
    "LogSoftmax": "the function jax.nn.log_softmax",
    **{
        name: f"the function jax.nn.{name}"
        for name in ("relu", "gelu", "silu", "softmax", "sigmoid", "tanh")
    },
    **dict.fromkeys(("Module", "Model"), "a subclass of nn.Layer, or a function with @nn.layer"),
    "compact": "nn.Layer, whose forward(scope, x) creates layers where they are used",
    **dict.fromkeys(("Parameter", "Param"), "scope.param(name, shape, init) in forward"),
    **dict.fromkeys(
        ("ModuleList", "ModuleDict"), "a tuple of layers as a field, or nn.Sequential or nn.Stack"
    ),
    "CrossEntropyLoss": "optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()",
    "BCEWithLogitsLoss": "optax.sigmoid_binary_cross_entropy(logits, labels).mean()",
    "MSELoss": "optax.squared_error(predictions, targets).mean()",
    "Identity": "the function lambda x: x",
    "functional": "jax.nn",
    "init": "jax.nn.initializers",
    "Rngs": "jax.random.key(seed)",
}
_METHODS = {  # methods of models in other libraries -> the form in fnet
    "parameters": "the parameters are the dict params of params, state = model.init(key, x)",
    "named_parameters": "the parameters are the dict params; jax.tree.leaves_with_path(params) lists them",
    "state_dict": "the arrays are the dicts params and state; models.pretrained.save writes them",
    "load_state_dict": "pass the arrays to the call: model(params, x); models.pretrained.load reads them",
    "eval": "a call is inference unless it has train=True: model(params, x)",
    "train": "pass train=True to the call: model(params, x, state=state, key=key, train=True)",
    "zero_grad": "gradients are values, not attributes: grads = jax.grad(loss)(params, batch)",
    "backward": _STEP,
    "grad": _STEP,
    "fit": "tr.train or tr.fit runs the training loop",
    "compile": "use jax.jit",
    **dict.fromkeys(
        ("to", "cuda", "cpu", "half", "float"),
        "jax.device_put moves params to a device, and ft.autocast selects the dtype",
    ),
    "apply": "call the model: model(params, x)",
    "predict": "call the model: model(params, x)",
    "requires_grad_": "differentiate only with respect to the parameters to train: nn.partition",
    "register_buffer": "use scope.state(name, shape, init) in forward",
    "summary": "print(model.spec(x)) lists shapes, and nn.count_parameters counts parameters",
    "weights": "the parameters are the dict params of params, state = model.init(key, x)",
}


def missing_name(name: str, known: Iterable[str]) -> AttributeError:
    """Returns the error for a name that `fnet.layers` does not have."""
    if name in _NAMES:
        return AttributeError(f"fnet.layers has no {name!r}; use {_NAMES[name]}", name=name)
    meant = did_you_mean(name, known)
    return AttributeError(
        f"module 'fnet.layers' has no attribute {name!r}" + (f"; {meant}" if meant else ""),
        name=name,
    )


def missing_attribute(layer: Any, name: str) -> AttributeError:
    """Returns the error for an attribute that a layer does not have."""
    kind = type(layer).__name__
    hint = f"; {_METHODS[name]}" if name in _METHODS else ""
    return AttributeError(f"{kind!r} object has no attribute {name!r}{hint}", name=name, obj=layer)


def assigned(layer: Any, name: str, fields: Iterable[str]) -> str:
    """Returns the error message for an assignment to an attribute of a layer."""
    kind = type(layer).__name__
    if name in fields:
        return f"cannot assign to field {name!r}: {kind} is immutable; use dataclasses.replace(layer, {name}=...)"
    return (
        f"cannot assign {kind}.{name}: a layer is immutable; declare options as fields of the "
        f"class, and create layers in forward, e.g. nn.Dense(10)(scope[{name!r}], x)"
    )


def check_inputs(name: str, inputs: Iterable) -> None:
    """Raises an error for tensors of other libraries, which JAX would convert silently or reject
    with a long message.

    Raises:
        TypeError: an input is a tensor of PyTorch or TensorFlow.
    """
    for x in inputs:
        library = type(x).__module__.partition(".")[0]
        if library in ("torch", "tensorflow"):
            raise TypeError(
                f"{name}: expected NumPy or JAX arrays, got a {library} tensor; convert it, e.g. "
                f"jnp.asarray({'x.detach().cpu().numpy()' if library == 'torch' else 'x.numpy()'})"
            )
