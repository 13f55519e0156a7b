"""A round of federated averaging: the clients on each device train, and the weighted sum of the
clients' parameter changes is computed."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fnet import _jax
from fnet.search._identity import digest, program
from fnet.search._population import Population, population
from fnet.training import Mean
from fnet.training.optim._averaging import widened
from fnet.training.record._metrics import as_metrics


class Round:
    """A round of federated averaging, as a step for `tr.fit`.

    A round of federated averaging calls a compiled program for each local step of its clients. A
    compiled loop over the local steps would be slower on CPUs, where convolutions in compiled loops
    are slow.

    With the method "loop", each device trains one client after the other. The parameters of the
    current client stay in the CPU's cache, because the client finishes all of its steps before the
    next client starts.

    Attributes:
      plain: the round of federated averaging as one function that JAX can trace.
      separate: True, which tells `tr.fit` not to compile a round of federated averaging as one
          program. A round calls several compiled programs.
    """

    separate = True

    def __init__(self, local, data, server, sampled, epochs, batch_size, dropout, method, devices):
        self._local, self._server, self._sampled, self._dropout = local, server, sampled, dropout
        self._longest = int(data.sizes.max())
        self._batch = min(batch_size or self._longest, self._longest)
        self._per_epoch = -(-self._longest // self._batch)
        self._steps = epochs * self._per_epoch
        # No client lacks a batch.
        self._full = bool((data.sizes > (self._per_epoch - 1) * self._batch).all())
        every = [None] if devices is None else list(devices)
        self._each = sampled // len(every)  # clients of a device
        arrays = jax.tree.map(jnp.asarray, data.data), jnp.asarray(data.sizes)
        self._places = [
            (i * self._each, device, _put(arrays, device))
            for i, device in enumerate(every)
            if device is None or device.process_index == jax.process_index()
        ]
        self._summed = _over_processes(devices)
        self._step = population(lambda key, hyper: (), self._member, method=method)[1]
        self._chosen: dict[str, Any] | None = None  # the method
        self._choices = {
            "clients": digest(data.sizes),
            "their data": digest(data.data),
            "sampled": sampled,
            "epochs": epochs,
            "batch_size": batch_size,
            "dropout": dropout,
        }
        self._begin_jit, self._close_jit = (
            jax.jit(self._begin, static_argnums=3),
            jax.jit(self._close),
        )
        self._end_jit = jax.jit(self._end)
        self._add = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b), donate_argnums=0)
        self.__name__ = "round"

    def __call__(self, state: Any, batch: Any = None) -> tuple[Any, dict[str, Any]]:
        if not _jax.outermost() or jax.config.jax_disable_jit:
            return self.plain(state, batch)
        chosen = self._chosen or self.prepare(state)
        at_once, total = 1 if chosen["chosen"] == "loop" else self._each, None
        servers = [
            _put((state.params, state.key, state.step), device) for _, device, _ in self._places
        ]
        for begin in range(0, self._each, at_once):
            running = [
                [*self._begin_jit(server, data[1], np.int32(first + begin), at_once), None]
                for server, (first, _, data) in zip(servers, self._places)
            ]
            for at in range(self._steps):  # alternates devices, so that all of them compute
                for one, server, (_, _, data) in zip(running, servers, self._places):
                    one[0], metrics = self._step(one[0], (np.int32(at), data, server[0]))
                    one[2] = metrics if one[2] is None else self._add(one[2], metrics)
            for one, server, (_, _, data) in zip(running, servers, self._places):
                closed = jax.device_put(
                    self._close_jit(*one, server[0], data[1]), state.step.sharding
                )
                total = closed if total is None else self._add(total, closed)
        return self._end_jit(state, self._summed(total))

    def plain(self, state, batch=None):
        data, server = self._places[0][2], (state.params, state.key, state.step)
        clients, answers = self._begin(server, data[1], 0, self._sampled)

        def step(clients, at):
            return self._step.plain(clients, (at, data, state.params))

        clients, metrics = jax.lax.scan(step, clients, jnp.arange(self._steps, dtype=jnp.int32))
        return self._end(state, self._close(clients, answers, metrics, state.params, data[1]))

    def prepare(self, state: Any, batch: Any = None, known: Any = None) -> dict[str, Any]:
        """Selects the method that runs the clients of a round: vmap, split or loop, as in
        `search.population`."""
        self._chosen = self._step.prepare(*self._first(state), known)
        return self._chosen

    def identity(self, state: Any, batch: Any = None) -> dict[str, Any]:
        """Returns a dict that identifies this training, for the comparison with a run that `tr.fit`
        resumes."""
        key = {"key": digest(state.key)} if int(state.step) == 0 else {}
        return self._choices | key | {f"round (jax {jax.__version__})": program(self.plain, state)}

    def explained(self, state: Any, batch: Any = None) -> Any:
        """Returns the `Methods`, for `ft.explain`."""
        return self._step.explained(*self._first(state))

    def _first(self, state):
        """Returns the arguments of the first local training step on the first device of this
        process: the states of the clients on this device (as a `Population`), and the batch."""
        first, device, data = self._places[0]
        server = _put((state.params, state.key, state.step), device)
        return self._begin_jit(server, data[1], np.int32(first), self._each)[0], (
            np.int32(0),
            data,
            server[0],
        )

    def _begin(self, server, sizes, first, count):
        """Returns the initial states of `count` clients of a federated averaging round, beginning
        with client `first`.

        The result is (clients, answers). `clients` is a `Population` (the states of several
        training runs) that contains the initial state of each client. `answers` is a bool array
        [count] that is False for each client that will not answer.
        """
        params, key, step = server
        keys, rows = (
            jax.random.split(jax.random.fold_in(key, step), 3),
            first + jnp.arange(count, dtype=jnp.int32),
        )
        answers = jax.random.uniform(keys[1], (self._sampled,)) >= self._dropout
        hyper = {
            "client": jax.random.permutation(keys[0], len(sizes))[rows],
            "key": jax.random.split(keys[2], self._sampled)[rows],
        }
        members = jax.vmap(lambda _: self._local.init(params))(rows)
        return Population(
            jnp.zeros((), jnp.int32), members, hyper, jnp.zeros(count, bool)
        ), answers[rows]

    def _member(self, carry, batch, hyper):
        """Runs a local step of one client."""
        (at, (data, sizes), server), client, longest = batch, hyper["client"], self._longest
        size, order_key = sizes[client], jax.random.fold_in(hyper["key"], at // self._per_epoch)
        draws = jax.random.uniform(order_key, (longest,))
        # Padding is last.
        order = jnp.argsort(jnp.where(jnp.arange(longest, dtype=jnp.int32) < size, draws, 2.0))
        positions = (at % self._per_epoch) * self._batch + jnp.arange(self._batch, dtype=jnp.int32)
        weight = (positions < size).astype(jnp.float32)
        rows = order[jnp.minimum(positions, longest - 1)]
        mine = jax.tree.map(lambda x: x[client, rows], data)
        key = jax.random.fold_in(jax.random.fold_in(hyper["key"], self._per_epoch + 1), at)
        new, metrics = self._local.step(carry, mine, weight, key, server)
        if self._full:
            return new, metrics
        some = weight.any()  # False after the last batch of a client with little data
        keep = lambda a, b: jnp.where(some, a, b)
        metrics = jax.tree.map(lambda x: jnp.where(some, x, jnp.zeros_like(x)), as_metrics(metrics))
        return jax.tree.map(keep, new, carry), metrics

    def _close(self, clients, answers, metrics, server, sizes):
        """Returns four values: the weighted sum of the clients' parameter changes, the sum of the
        clients' weights, the number of clients that answered, and the sum of the clients'
        metrics."""
        answers = answers & ~clients.diverged
        weights = jnp.where(answers, sizes[clients.hyper["client"]], 0).astype(jnp.float32)

        def change(after, before):
            rows = lambda x: x.reshape(-1, *[1] * before.ndim)
            # 16 bits have no room for sums of weights.
            moved = widened(after) - widened(before)[None]
            moved = jnp.where(rows(answers), moved, 0)  # diverged clients may have NaNs
            return (rows(weights.astype(moved.dtype)) * moved).sum(0)

        sums = {name: Mean(x.total.sum(), x.count.sum()) for name, x in metrics.items()}
        return (
            jax.tree.map(change, clients.members[0], server),
            weights.sum(),
            answers.sum().astype(jnp.float32),
            sums,
        )

    def _end(self, state, sums):
        changes, total, answers, metrics = sums
        mean = lambda x, param: (x / jnp.maximum(total, 1).astype(x.dtype)).astype(param.dtype)
        grads = jax.tree.map(lambda x, param: -mean(x, param), changes, state.params)
        with jax.numpy_dtype_promotion("standard"):
            updates, opt_state = self._server.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
        kept = lambda new, old: jax.tree.map(lambda a, b: jnp.where(total > 0, a, b), new, old)
        size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.params))
        sent = (self._sampled + answers) * size
        return state.replace(
            step=state.step + 1,
            params=kept(params, state.params),
            opt_state=kept(opt_state, state.opt_state),
            bytes=state.bytes + sent,
        ), metrics | {"answers": answers, "megabytes": sent / 1e6}


def _put(tree, device):
    return tree if device is None else jax.device_put(tree, device)


def _over_processes(devices):
    """Returns a function that sums arrays over the processes of `devices`. Each process receives
    the sums."""
    first = {device.process_index: device for device in reversed(devices or ())}
    if len(first) < 2:
        return lambda tree: tree
    mesh = Mesh(np.array([first[i] for i in sorted(first)]), ("processes",))
    rows = NamedSharding(mesh, PartitionSpec("processes"))
    total = jax.jit(
        lambda tree: jax.tree.map(lambda x: x.sum(0), tree),
        out_shardings=NamedSharding(mesh, PartitionSpec()),
    )

    def summed(tree):
        tree = jax.tree.map(
            lambda x: jax.make_array_from_process_local_data(rows, np.asarray(x)[None]), tree
        )
        return jax.tree.map(lambda x: x.addressable_data(0), total(tree))

    return summed
