"""Federated averaging: clients train on their own data, and a server averages what they change.

A round is one step of `tr.fit`:

    from fnet import federated

    data = federated.clients(parts)                        # a tree of arrays for each client, of any length
    local = federated.local(loss, optax.sgd(0.1))
    round = federated.fedavg(local, data, server=optax.sgd(1.0), sampled=10, epochs=5, batch_size=10)
    state = federated.init(jax.random.key(0), params, optax.sgd(1.0))
    state = tr.fit(round, state, federated.no_batches, steps=20)
"""

from fnet.federated._federated import (
    Clients,
    FederatedState,
    Local,
    clients,
    fedavg,
    init,
    local,
    no_batches,
)

__all__ = ["Clients", "FederatedState", "Local", "clients", "fedavg", "init", "local", "no_batches"]
