"""The ledger: every collective of programs that say which they hold, bytes and times by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from fnet import parallel

N = 8
MESH = jax.make_mesh((N,), ("d",), axis_types=(AxisType.Auto,))
RING = [(i, (i + 1) % N) for i in range(N)]


def compiled(f, *args, **options):
    mapped = jax.shard_map(f, mesh=MESH, in_specs=P("d"), out_specs=P("d"), check_vma=False)
    return jax.jit(mapped).lower(*args, **options).compile()


# name -> (function of [16] on each of 8 chips, collective, bytes it makes, bytes sent)
SINGLE = {
    "psum": (lambda x: lax.psum(x, "d"), "all-reduce", 64, 2 * 7 / 8 * 64),
    "all_gather": (lambda x: lax.all_gather(x, "d", tiled=True)[:16], "all-gather", 512, 7 * 64),
    "psum_scatter": (
        lambda x: jnp.tile(lax.psum_scatter(x, "d", tiled=True), 8),
        "reduce-scatter",
        8,
        7 * 8,
    ),
    "all_to_all": (
        lambda x: lax.all_to_all(x.reshape(8, 2), "d", 0, 0).reshape(-1),
        "all-to-all",
        64,
        7 / 8 * 64,
    ),
    "ppermute": (lambda x: lax.ppermute(x, "d", RING), "collective-permute", 64, 64),
    "int8": (
        lambda x: lax.ppermute(x.astype(jnp.int8), "d", RING).astype(x.dtype),
        "collective-permute",
        16,
        16,
    ),
    "groups": (
        lambda x: lax.psum(x, "d", axis_index_groups=[[0, 1], [2, 3], [4, 5], [6, 7]]),
        "all-reduce",
        64,
        64,
    ),
}


@pytest.mark.parametrize("name", SINGLE)
def test_each_collective(name):
    f, collective, size, sent = SINGLE[name]
    found = parallel.ledger(compiled(f, jnp.ones(N * 16)))
    (transfer,) = found.transfers
    assert transfer.collective == collective and transfer.bytes == size and transfer.times == 1
    assert transfer.group == (2 if name == "groups" else N)
    assert transfer.sent == found.sent == pytest.approx(sent)
    assert found.bytes == {collective: size}


def test_loops_are_multiplied_in():
    def f(x):
        step = lambda x, _: (lax.psum(jnp.sin(x), "d"), None)
        outer = lambda x, _: (lax.scan(step, x, None, length=5)[0], None)
        return lax.psum(lax.scan(outer, x, None, length=3)[0], "d")

    found = parallel.ledger(compiled(f, jnp.ones(N * 16)))
    assert sorted(transfer.times for transfer in found.transfers) == [1, 15]
    assert found.bytes == {"all-reduce": 16 * 64}


def test_scopes_are_those_of_both_passes():
    def loss(w, x):
        with jax.named_scope("block"):
            h = jnp.tanh(x @ w)
        return jnp.square(h).mean()

    rows, whole = NamedSharding(MESH, P("d")), NamedSharding(MESH, P())
    step = (
        jax.jit(jax.grad(loss), out_shardings=whole)
        .lower(
            jax.ShapeDtypeStruct((4, 4), jnp.float32, sharding=whole),
            jax.ShapeDtypeStruct((16, 4), jnp.float32, sharding=rows),
        )
        .compile()
    )
    found = parallel.ledger(step)
    assert [(t.collective, t.scope, t.bytes) for t in found.transfers] == [
        ("all-reduce", "block", 64)
    ]
    assert str(found).splitlines()[0] == "0.000 MiB sent by each chip in a step"
    assert "all-reduce      1     0.000  block" in str(found)
    assert parallel.ledger(step.as_text()) == found


def test_one_chip_sends_nothing():
    found = parallel.ledger(jax.jit(jnp.sin).lower(jnp.ones(3)).compile())
    assert found.transfers == () and found.sent == 0 and str(found) == "nothing is sent"


STARTED = """HloModule jit_f, num_partitions=4

%wrapped (p: f32[2]) -> f32[8] {
  %p = f32[2]{0} parameter(0)
  ROOT %inner = f32[8]{0} all-gather(%p), replica_groups=[2,2]<=[4], dimensions={0}
}

ENTRY %main (x: f32[2]) -> f32[8] {
  %x = f32[2]{0} parameter(0)
  %g = (f32[2]{0}, f32[8]{0}) all-gather-start(%x), replica_groups=[1,4]<=[4], dimensions={0}
  %h = f32[8]{0} all-gather-done(%g)
  %q = (f8e4m3fn[6]{0}, f8e4m3fn[6]{0}, u32[], u32[]) collective-permute-start(%y), source_target_pairs={{0,1}}
  %s = ((f32[2]{0}), f32[8]{0}, s32[]) async-start(%x), calls=%wrapped
  %c = f32[2] all-reduce(%x), metadata={op_name="jit(f)/transpose(jvp(block))/(up/dot:down/reduce_sum)" id=3}
  %d = f32[2] all-reduce(%x), metadata={op_name="jit(f)/(transpose(jvp(up))/dot:down/reduce_sum)" id=3}
  %r = (s4[4]{0}, s4[4]{0}) all-reduce-start(%a, %b), to_apply=%add
}
"""


def test_collectives_that_are_started():
    found = parallel.ledger(STARTED)
    assert [(t.collective, t.bytes, t.group, t.scope) for t in found.transfers] == [
        ("all-gather", 32, 4, ""),
        ("collective-permute", 6, 4, ""),
        ("all-gather", 32, 2, ""),
        ("all-reduce", 8, 4, "block"),
        ("all-reduce", 8, 4, ""),
        ("all-reduce", 4, 4, ""),
    ]


def test_errors():
    with pytest.raises(
        ValueError,
        match="ledger: expected the HLO of a compiled program; got text that begins with",
    ):
        parallel.ledger("module @jit_f {\n}")


@pytest.mark.parametrize(
    ("groups", "size"),
    [
        ("{{0,1},{2,3}}", 2),
        ("[4,2]<=[8]", 2),
        ("mesh['data'=4,'tensor'=2] {'tensor'}", 2),
        ("mesh['data'=4,'tensor'=2] {'data','tensor'}", 8),
        ("mesh['axis_0'=8] {'axis_0':(1)4}", 4),
    ],
)
def test_groups_as_xla_writes_them(groups, size):
    text = (
        "HloModule m, num_partitions=8\n\nENTRY %main (x: f32[8]) -> f32[8] {\n  %x = f32[8] "
        "parameter(0)\n"
        f"  ROOT %y = f32[8] all-reduce(%x), channel_id=1, replica_groups={groups}, "
        "to_apply=%add\n}\n"
    )
    (transfer,) = parallel.ledger(text).transfers
    assert transfer.group == size


PIECES = """HloModule m, num_partitions=4

%all-reduce-scatter (p: f32[64]) -> f32[16] {
  %p = f32[64] parameter(0)
  ROOT %r = f32[64] all-reduce(%p), channel_id=3, replica_groups={{0,1,2,3}}, to_apply=%add
}

%begin (p: f32[8]) -> f32[32] {
  %g = f32[32] all-gather(%p), channel_id=7, replica_groups={{0,1,2,3}}
  ROOT %c = f32[32] custom-call(%g), custom_call_target="AsyncCollectiveStart"
}

%piece (p: f32[8]) -> f32[32] {
  ROOT %g.1 = f32[32] all-gather(%p), channel_id=7, replica_groups={{0,1,2,3}}
}

%condition (i: s32[]) -> pred[] {
  %turns = s32[]{:T(128)} constant(6)
  %i = s32[] parameter(0)
  ROOT %less = pred[]{:T(512)} compare(%i, %turns), direction=LT
}

%body (i: s32[]) -> s32[] {
  %f = f32[32] fusion(%i), calls=%piece
  ROOT %s = f32[4] all-reduce(%f), channel_id=9, replica_groups={{0,1,2,3}}, to_apply=%add
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %a = f32[32] fusion(%x), calls=%begin
  %w = s32[] while(%x), condition=%condition, body=%body
  ROOT %z = f32[16] fusion(%x), kind=kCustom, calls=%all-reduce-scatter
}
"""


def test_tpus_programs():
    """A transfer begun before a loop and carried on inside is one, lengths of loops stand in their
    conditions, and an all-reduce that is cut up is a reduce-scatter."""
    found = {
        each.collective: (each.bytes, each.times) for each in parallel.ledger(PIECES).transfers
    }
    assert found == {"all-gather": (128, 1), "all-reduce": (16, 6), "reduce-scatter": (64, 1)}


def test_collectives_of_shard_map_share_a_channel_but_are_several():
    """JAX writes channel 1 for each of them."""
    text = PIECES.replace("channel_id=7", "channel_id=1").replace("channel_id=9", "channel_id=1")
    gathered = [each for each in parallel.ledger(text).transfers if each.collective == "all-gather"]
    assert [(each.bytes, each.times) for each in gathered] == [(128, 1), (128, 6)]
