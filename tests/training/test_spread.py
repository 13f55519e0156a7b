"""The copy of the initial state that `fit` donates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fnet.training.loop._spread import Spread

mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
LEAVES = {
    "array": lambda: jnp.arange(64.0),
    "committed": lambda: jax.device_put(jnp.arange(64.0), jax.devices()[2]),
    "sharded": lambda: jax.device_put(jnp.arange(64.0), NamedSharding(mesh, P("data"))),
    "weakly typed": lambda: jnp.asarray(2.0),
    "key": lambda: jax.random.key(3),
    "numpy": lambda: np.arange(64.0, dtype=np.float32),
}


@pytest.mark.parametrize("kind", LEAVES)
def test_the_copy_of_a_leaf(kind):
    leaf = LEAVES[kind]()
    copy = Spread(None).state(leaf)
    assert isinstance(copy, jax.Array) and copy.dtype == leaf.dtype
    for name in "weak_type", "committed", "sharding":
        assert getattr(copy, name, None) == getattr(leaf, name, getattr(copy, name, None)), name
    if kind == "numpy":
        leaf[:] = -1
        assert float(copy[3]) == 3.0
    else:
        jax.jit(lambda x: x, donate_argnums=0, keep_unused=True)(copy).block_until_ready()
        assert not leaf.is_deleted()
        data = jax.random.key_data(leaf) if kind == "key" else leaf
        np.testing.assert_array_equal(
            data, jax.random.key_data(LEAVES[kind]()) if kind == "key" else LEAVES[kind]()
        )


def test_copies_need_no_compiled_program(caplog):
    state = {str(n): jnp.zeros(n + 1000) for n in range(3)}
    with jax.log_compiles(), caplog.at_level("WARNING"):
        Spread(None).state(state)
    assert "ompil" not in caplog.text
