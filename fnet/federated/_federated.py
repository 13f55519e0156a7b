"""Rounds of federated averaging (McMahan et al., 2017): what a client computes, and what the server
combines."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from fnet import transforms as ft
from fnet.federated._round import Round
from fnet.training import Mean


@struct.dataclass
class FederatedState:
    """The state of the server in federated averaging. `tr.fit` accepts a `FederatedState` as its
    argument `state`, and one step of `tr.fit` is one round of federated averaging.

    Fields:
      step: the number of completed rounds, an int32 scalar.
      params: the parameters of the server.
      opt_state: the state of the server's optimizer.
      key: the PRNG key for the random choices of each round: the clients, the order of their
        examples, and the clients that do not answer.
      bytes: the number of bytes that the server has sent and received so far, a float32 scalar.

    >>> state = federated.init(jax.random.key(0), {"w": jnp.zeros(3)}, optax.sgd(1.0))
    >>> int(state.step), float(state.bytes)
    (0, 0.0)
    """

    step: jax.Array
    params: Any
    opt_state: Any
    key: jax.Array
    bytes: jax.Array


@dataclasses.dataclass(frozen=True)
class Clients:
    """The data of all clients, padded to the same length.

    Attributes:
      data: the examples, a tree of arrays [clients, longest, ...], where `longest` is the most that
        a client has.
      sizes: the number of examples of each client, an int32 array [clients].

    >>> federated.clients([{"x": np.zeros((3, 2))}, {"x": np.ones((5, 2))}]).sizes.tolist()
    [3, 5]
    """

    data: Any
    sizes: np.ndarray


def clients(parts: Sequence[Any]) -> Clients:
    """Combines the data of clients, which may have different numbers of examples.

    Args:
      parts: one tree of arrays for each client. The first axis of its arrays counts the examples.

    Raises:
      ValueError: there is no client, a client has no examples, or the arrays of a client have
          different lengths.

    >>> data = clients([np.arange(2), np.arange(3)])
    >>> data.data.tolist()
    [[0, 1, 0], [0, 1, 2]]
    """
    if not parts:
        raise ValueError("clients: expected the data of at least one client; got none")
    sizes = []
    for i, part in enumerate(parts):
        lengths = {np.shape(leaf)[0] for leaf in jax.tree.leaves(part)}
        if len(lengths) != 1 or 0 in lengths:
            raise ValueError(
                f"clients: client {i} has arrays of {sorted(lengths)} examples; expected the same "
                "number for each, at least 1"
            )
        sizes.append(lengths.pop())
    longest = max(sizes)
    pad = lambda x: np.concatenate(
        [x, np.zeros((longest - len(x), *np.shape(x)[1:]), np.asarray(x).dtype)]
    )
    return Clients(
        jax.tree.map(lambda *each: np.stack([pad(np.asarray(x)) for x in each]), *parts),
        np.asarray(sizes, np.int32),
    )


def init(key: jax.Array, params: Any, server: optax.GradientTransformation) -> FederatedState:
    """Returns the state of the server before the first round.

    Args:
      key: a PRNG key.
      params: the initial parameters.
      server: the server's optimizer, as for `fedavg`.

    >>> int(federated.init(jax.random.key(0), jnp.zeros(2), optax.sgd(1.0)).step)
    0
    """
    return FederatedState(
        jnp.zeros((), jnp.int32), params, server.init(params), key, jnp.zeros((), jnp.float32)
    )


def no_batches(step: int) -> np.ndarray:
    """Returns an empty batch for `tr.fit`, because the clients have their own data.

    >>> federated.no_batches(0).shape
    (0,)
    """
    return np.zeros(0, np.float32)


class Local(NamedTuple):
    """The local training of a client, as two functions.

    Attributes:
      init: `init(params) -> carry`. The carry is a tuple of what changes during the local training,
        the parameters first.
      step: one update, `step(carry, batch, weight, key, server) -> (carry, metrics)`. `weight`, an
        array [batch], is 1 for an example and 0 for padding, and `server` has the parameters of the
        server.

    >>> def step(carry, batch, weight, key, server):
    ...     return (carry[0] - 0.5 * ((carry[0] - batch) * weight).sum() / weight.sum(),), {}
    >>> local = federated.Local(lambda params: (params,), step)
    """

    init: Callable
    step: Callable


def local(
    loss: Callable,
    optimizer: optax.GradientTransformation,
    *,
    proximal: float = 0.0,
    clip: float | None = None,
    noise: float = 0.0,
) -> Local:
    """Returns a `Local` that trains a client with an Optax optimizer, whose state begins anew in
    each round.

    Args:
      loss: a function `loss(params, batch, weight, key) -> scalar`, the mean over the examples of
        weight 1.
      optimizer: the local optimizer, usually `optax.sgd(rate)`.
      proximal: the coefficient mu of FedProx, which adds mu / 2 |w - w_server|^2 to the loss.
        Default 0.
      clip: the norm to which the gradient of each example is clipped, for differential privacy;
        `noise` is then added to the sum (`optax.contrib.differentially_private_aggregate`). Both
        protect the examples of a client from the server. fnet does not compute the privacy budget.
        Default None: no differential privacy.
      noise: the standard deviation of the noise, as a multiple of `clip`. Default 0.

    Raises:
      ValueError: `proximal` or `noise` is negative, `clip` is not positive, or `noise` is given
          without `clip`.

    >>> loss = lambda w, batch, weight, key: ((w - batch) ** 2 * weight).sum() / weight.sum()
    >>> private = federated.local(loss, optax.sgd(0.1), clip=1.0, noise=0.5)
    """
    if proximal < 0 or noise < 0 or (clip is not None and clip <= 0):
        raise ValueError(
            f"local: expected proximal >= 0, clip > 0 and noise >= 0; got {proximal}, {clip} and "
            f"{noise}"
        )
    if noise and clip is None:
        raise ValueError(
            f"local(noise={noise}): noise needs clip=, the largest norm of the gradient of an "
            f"example"
        )

    def private(params, batch, weight, key):
        one = jnp.ones(1, weight.dtype)
        keys = jax.random.split(key)
        values, grads = ft.per_example(
            lambda w, row: jax.value_and_grad(loss)(w, row, one, keys[0])
        )(params, batch)
        each = lambda g: g * weight.reshape(-1, *[1] * (g.ndim - 1)).astype(g.dtype)  # padding is 0
        aggregate = optax.contrib.differentially_private_aggregate(clip, noise, key=keys[1])
        mean, _ = aggregate.update(jax.tree.map(each, grads), aggregate.init(params))
        scale = len(weight) / jnp.maximum(weight.sum(), 1)
        return (values * weight).sum() / jnp.maximum(weight.sum(), 1), jax.tree.map(
            lambda g: g * scale.astype(g.dtype), mean
        )

    def step(carry, batch, weight, key, server):
        params, opt_state = carry
        if clip is None:
            value, grads = jax.value_and_grad(loss)(params, batch, weight, key)
        else:
            value, grads = private(params, batch, weight, key)
        if proximal:
            grads = jax.tree.map(lambda g, w, s: g + proximal * (w - s), grads, params, server)
        with jax.numpy_dtype_promotion("standard"):
            updates, opt_state = optimizer.update(grads, opt_state, params)
            params = optax.apply_updates(params, updates)
        return (params, opt_state), {
            "loss": Mean(value.astype(jnp.float32) * weight.sum(), weight.sum())
        }

    return Local(lambda params: (params, optimizer.init(params)), step)


def fedavg(
    local_step: Local | Callable,
    data: Clients,
    *,
    server: optax.GradientTransformation,
    sampled: int,
    epochs: int = 1,
    batch_size: int | None = None,
    dropout: float = 0.0,
    method: str = "auto",
    devices: Sequence[jax.Device] | None = None,
) -> Callable:
    """Returns one round of federated averaging as a step for `tr.fit`.

        round = federated.fedavg(local, data, server=optax.sgd(1.0), sampled=10, epochs=5, batch_size=10)

    A round draws `sampled` different clients at random and sends them the parameters w of the
    server. Client k trains for `epochs` epochs on its own n_k examples and answers with w_k. The
    mean of the changes then goes to the server's optimizer, as a gradient:

        delta = sum_k n_k (w_k - w) / sum_k n_k,        w = w + server.update(-delta)

    This optimizer determines the algorithm: `optax.sgd(1.0)` is FedAvg,
    `optax.sgd(1.0, momentum=0.9)` is FedAvgM, `optax.adam(...)` is FedAdam. Other transformations
    that are chained to it apply to the mean of the changes. For FedProx, use
    `local(..., proximal=mu)`. With all clients, `epochs=1` and `batch_size=None`, a round is FedSGD
    and equals one step on a batch of all examples.

    Args:
      local_step: a `Local`, such as the result of `local`, or a function `(params, batch, weight,
        key) -> (params, metrics)`.
      data: the data of all clients.
      server: the Optax optimizer that updates the server's parameters. It gets -delta as the
        gradient.
      sampled: the number of clients in a round.
      epochs: the passes over a client's data, each in a different random order. Default 1.
      batch_size: the examples in a local batch. Default None: all of the client.
      dropout: the probability that a client receives the parameters but does not answer. A NaN or
        infinite loss is no answer, either. Without any answer, the parameters do not change.
        Default 0.
      method: how a device runs its clients: "auto", "vmap", "split" or "loop", as in
        `search.population`. Default "auto".
      devices: the devices over which the clients of a round are distributed, of which `sampled` is
        a multiple. They may belong to several processes (`parallel.initialize`), which must then
        pass the same `data` and the same `state`; each runs the clients of its own devices, and all
        get the same result. Default None: the default device.

    Returns:
      A function `round(state, batch) -> (state, metrics)`, which ignores `batch`. `metrics` has
      those of the local steps, "answers", the number of clients that answered, and "megabytes", the
      size of all parameters that the server sent and received.

    Raises:
      ValueError: an argument is out of range, or this process has none of the devices.

    Source: McMahan et al. (2017), Communication-Efficient Learning of Deep Networks from
    Decentralized Data; Li et al. (2020), Federated Optimization in Heterogeneous Networks; Reddi et
    al. (2021), Adaptive Federated Optimization.

    >>> def local_step(w, batch, weight, key):
    ...     return w - 0.5 * ((w - batch) * weight).sum() / weight.sum(), {}
    >>> data = federated.clients([np.zeros(3, np.float32), np.full(1, 4, np.float32)])
    >>> round = federated.fedavg(local_step, data, server=optax.sgd(1.0), sampled=2)
    >>> state, metrics = round(federated.init(jax.random.key(0), jnp.float32(0), optax.sgd(1.0)))
    >>> float(state.params)                        # the clients reach 0 and 2; they have 3 examples and 1
    0.5
    """
    total = len(data.sizes)
    for name, value, high in (
        ("sampled", sampled, total),
        ("epochs", epochs, 10**6),
        ("batch_size", batch_size or 1, 10**9),
    ):
        if not 1 <= value <= high:
            raise ValueError(f"fedavg({name}={value}): expected a number from 1 to {high}")
    if not 0 <= dropout < 1:
        raise ValueError(f"fedavg(dropout={dropout}): expected a probability in [0, 1)")
    devices = None if devices is None else list(devices)
    if devices is not None and sampled % len(devices):
        raise ValueError(
            f"fedavg: {sampled} clients cannot be divided evenly among {len(devices)} devices"
        )
    if devices is not None and jax.process_index() not in {
        device.process_index for device in devices
    }:
        raise ValueError(
            f"fedavg: process {jax.process_index()} has none of the devices; give each process "
            "one, as in devices=jax.devices()"
        )
    if not isinstance(local_step, Local):
        plain = local_step

        def wrapped(carry, batch, weight, key, server):
            params, metrics = plain(carry[0], batch, weight, key)
            return (params,), metrics

        local_step = Local(lambda params: (params,), wrapped)
    return Round(local_step, data, server, sampled, epochs, batch_size, dropout, method, devices)
