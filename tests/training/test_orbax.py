"""Checkpoints that Orbax has written are read bit for bit, and Orbax reads those of `to_orbax`."""

import json
import pathlib
import re
import shutil
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.training import train_state
from orbax.checkpoint import v1
from several import processes

from fnet import training as tr

SCRIPT = pathlib.Path(__file__).with_name("orbax_processes.py")


def mesh(*shape):
    names = ("x", "y")[: len(shape)]
    devices = jax.devices()[: int(np.prod(shape))]
    return jax.make_mesh(shape, names, devices=devices)


def sharded(array, *shape, spec=("x",)):
    return jax.device_put(array, jax.NamedSharding(mesh(*shape), jax.P(*spec)))


def leaf_bits(leaf):
    """The type, the dtype, the shape and the bytes of a leaf."""
    if isinstance(leaf, str | bool | int | float) or leaf is None:
        return type(leaf).__name__, repr(leaf)
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return "key", str(jax.random.key_impl(leaf)), np.asarray(jax.random.key_data(leaf)).tolist()
    array = np.asarray(leaf)
    kind = "jax" if isinstance(leaf, jax.Array) else "numpy"
    return kind, array.dtype.name, array.shape, array.tobytes()


def bits(tree):
    flat = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is None)[0]
    return {jax.tree_util.keystr(path): leaf_bits(leaf) for path, leaf in flat}


def names(tree):
    """The same, with the names that Orbax gives to fields and elements."""
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf_bits(leaf)
        for path, leaf in flat
    }


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def everything():
    """Every kind of leaf and container that Orbax saves."""
    return {
        "sharded": sharded(normal(16, 4), 8),
        "columns": sharded(normal(4, 8), 2, 4, spec=("x", "y")),
        "zeros": sharded(np.zeros((8, 2), np.float32), 8),
        "half": jnp.asarray(normal(5), jnp.bfloat16),
        "nan": jnp.asarray([np.nan, -0.0, np.inf]),
        "float8": jnp.asarray([1.5, -2], jnp.float8_e4m3fn),
        "int4": jnp.asarray([-8, 7, 3], jnp.int4),
        "flags": jnp.asarray([True, False]),
        "scalar": jnp.int32(4),
        "host": np.arange(6, dtype=np.float64).reshape(2, 3)[:, ::-1],
        "complex": np.array([1 + 2j], np.complex128),
        "step": 2**53 + 1,
        "rate": 0.1,
        "done": True,
        "name": "größer",
        "key": jax.random.key(7),
        "keys": jax.random.split(jax.random.key(8, impl="rbg"), 3),
        "none": None,
        "empty": {"dict": {}, "list": [], "tuple": ()},
        "layers": [{"kernel": jnp.ones(2)}, {"kernel": jnp.zeros(2)}],
        "a/b": jnp.ones(1),
        "a": {"b": jnp.zeros(1)},
        "c/d": {"e": "text", "f": "more"},
        "ü .x": jnp.ones(3),
    }


def save(tree, path, **how):
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**how)) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(tree))


@pytest.mark.quick_cases("False-True", "True-False")
@pytest.mark.parametrize("zarr3", [False, True])
@pytest.mark.parametrize("ocdbt", [False, True])
def test_forms_of_the_files(tmp_path, ocdbt, zarr3):
    tree = everything()
    save(tree, tmp_path / "saved", use_ocdbt=ocdbt, use_zarr3=zarr3)
    assert (tmp_path / "saved" / "manifest.ocdbt").exists() == ocdbt
    read = tr.from_orbax(tmp_path / "saved")
    assert bits(read) == bits(tree)
    assert read["empty"] == {"dict": {}, "list": [], "tuple": ()}


def test_the_api_v1(tmp_path):
    tree = everything()
    v1.save(tmp_path / "saved", tree)
    assert (tmp_path / "saved" / "orbax.checkpoint").exists()
    assert bits(tr.from_orbax(tmp_path / "saved")) == bits(tree)


def test_standard_checkpointer_and_manager(tmp_path):
    """The last step is the default; an unfinished save does not count."""
    trees = {step: {"w": jnp.full(3, step), "step": step} for step in (9, 10)}
    with ocp.StandardCheckpointer() as checkpointer:
        for step, tree in trees.items():
            checkpointer.save(tmp_path / "plain" / f"step_{step}", tree)
    with ocp.CheckpointManager(tmp_path / "managed") as manager:
        for step, tree in trees.items():
            manager.save(step, args=ocp.args.StandardSave(tree))
    with v1.training.Checkpointer(tmp_path / "v1") as checkpointer:
        for step, tree in trees.items():
            checkpointer.save(step, tree)
    for kind in ("plain", "managed", "v1"):
        for unfinished in ("11.orbax-checkpoint-tmp", "11.orbax-checkpoint-tmp-1706300000000000"):
            (tmp_path / kind / unfinished / "default").mkdir(parents=True)
        assert bits(tr.from_orbax(tmp_path / kind)) == bits(trees[10])
        assert bits(tr.from_orbax(str(tmp_path / kind), step=9)) == bits(trees[9])
        with pytest.raises(FileNotFoundError, match=r"no step 11 here, there are steps \[9, 10\]"):
            tr.from_orbax(tmp_path / kind, step=11)
    assert bits(tr.from_orbax(tmp_path / "managed" / "9")) == bits(trees[9])
    assert bits(tr.from_orbax(tmp_path / "managed" / "9" / "default")) == bits(trees[9])


def test_scalars_of_numpy_keep_their_dtype(tmp_path):
    """Orbax saves them as Python numbers."""
    save({"x": np.float32(0.1), "i": np.int8(-3), "f": np.float64(0.1)}, tmp_path / "saved")
    wanted = {"x": np.asarray(np.float32(0.1)), "i": np.asarray(np.int8(-3)), "f": 0.1}
    assert bits(tr.from_orbax(tmp_path / "saved")) == bits(wanted)


def test_the_order_of_a_list(tmp_path):
    """It does not depend on the order in a JSON file, in which "10" may come before "2"."""
    save([jnp.asarray(i) for i in range(11)], tmp_path / "saved")
    path = tmp_path / "saved" / "_METADATA"
    path.write_text(json.dumps(json.loads(path.read_text()), sort_keys=True))
    assert [int(leaf) for leaf in tr.from_orbax(tmp_path / "saved")] == list(range(11))
    assert int(tr.from_orbax(tmp_path / "saved", part="10")) == 10


def test_one_array(tmp_path):
    v1.save(tmp_path / "saved", jnp.arange(3))
    read = tr.from_orbax(tmp_path / "saved")
    assert leaf_bits(read) == leaf_bits(jnp.arange(3))
    assert leaf_bits(tr.from_orbax(tmp_path / "saved", like=read)) == leaf_bits(read)


def test_items(tmp_path):
    state, ema = {"w": jnp.ones(3)}, {"w": jnp.zeros(2)}
    with ocp.CheckpointManager(tmp_path) as manager:
        composite = ocp.args.Composite(
            state=ocp.args.StandardSave(state),
            ema=ocp.args.StandardSave(ema),
            notes=ocp.args.JsonSave({"loss": 1.0}),
        )
        manager.save(3, args=composite)
    assert bits(tr.from_orbax(tmp_path, item="ema")) == bits(ema)
    assert bits(tr.from_orbax(tmp_path / "3", item="state")) == bits(state)
    with pytest.raises(tr.CheckpointError, match=r"choose a tree with item=: 'ema', 'state'"):
        tr.from_orbax(tmp_path)
    with pytest.raises(tr.CheckpointError, match=r"no tree 'notes' here; the trees are: 'ema'"):
        tr.from_orbax(tmp_path, item="notes")
    with pytest.raises(ValueError, match="is one tree, without steps and items"):
        tr.from_orbax(tmp_path / "3" / "ema", item="ema")
    with pytest.raises(ValueError, match="is one checkpoint, without steps: leave out step=3"):
        tr.from_orbax(tmp_path / "3", step=3)


# Training loops of Flax.

BATCH = jnp.asarray(normal(8, 3)), jnp.asarray(normal(8, 2, seed=1))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(3, 4, rngs=rngs), nnx.Linear(4, 2, rngs=rngs)])
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return self.layers[1](self.dropout(self.norm(self.layers[0](x))))


def nnx_loop(seed, steps):
    model = Net(nnx.Rngs(seed))
    optimizer = nnx.Optimizer(model, optax.adamw(0.01), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x, y):
        grads = nnx.grad(lambda model: jnp.square(model(x) - y).mean())(model)
        optimizer.update(model, grads)

    with jax.numpy_dtype_promotion("standard"):
        for _ in range(steps):
            step(model, optimizer, *BATCH)
    return model, optimizer


def test_nnx(tmp_path):
    """A loop that continues from the files takes the same steps as one that was not interrupted."""
    model, optimizer = nnx_loop(0, 2)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", nnx.state((model, optimizer)))
        checkpointer.save(tmp_path / "pure", nnx.to_pure_dict(nnx.state(model)))
    graph, other = nnx.split(nnx_loop(1, 0))
    restored = tr.from_orbax(tmp_path / "state", like=other)
    assert jax.tree.structure(restored) == jax.tree.structure(other)
    assert bits(restored) == bits(nnx.state((model, optimizer))) != bits(other)
    nnx.merge(graph, restored)  # accepts the types of the variables
    abstract = nnx.eval_shape(lambda: nnx.state(nnx_loop(1, 0)[0]))
    read = tr.from_orbax(tmp_path / "state", part="0", like=abstract)
    assert bits(read) == bits(nnx.state(model))
    pure = nnx.to_pure_dict(nnx.state(model))  # its lists are dicts with integers as keys
    assert names(tr.from_orbax(tmp_path / "pure")) == names(pure)
    assert bits(tr.from_orbax(tmp_path / "pure", like=pure)) == bits(pure)
    with pytest.raises(tr.CheckpointError, match=r"nnx\.to_pure_dict"):
        tr.from_orbax(tmp_path / "pure", like=nnx.state(model))


class Dense(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(nn.relu(nn.Dense(4)(x)))


def linen_state(seed=0, steps=0):
    model = Dense()
    params = model.init(jax.random.key(seed), BATCH[0])["params"]
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.01))
    state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    @jax.jit
    def step(state, x, y):
        loss = lambda params: jnp.square(state.apply_fn({"params": params}, x) - y).mean()
        return state.apply_gradients(grads=jax.grad(loss)(state.params))

    with jax.numpy_dtype_promotion("standard"):
        for _ in range(steps):
            state = step(state, *BATCH)
    return state


def test_linen(tmp_path):
    trained, fresh = linen_state(0, 3), linen_state(1)
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=ocp.args.StandardSave(linen_state()))
        manager.save(3, args=ocp.args.StandardSave(trained))
    plain = tr.from_orbax(tmp_path)
    assert names(plain) == names(trained)
    assert plain["opt_state"][0] is None  # optax.EmptyState
    restored = tr.from_orbax(tmp_path, like=fresh)  # whose step is a Python int
    assert jax.tree.structure(restored) == jax.tree.structure(fresh)
    assert type(restored.step) is int and restored.step == 3
    assert names(restored) | {"step": 0} == names(trained) | {"step": 0}
    abstract = jax.eval_shape(lambda: trained)
    assert bits(tr.from_orbax(tmp_path, like=abstract)) == bits(trained)
    first = tr.from_orbax(tmp_path, step=0, like=abstract)  # saved as an int, wanted as an array
    assert first.step.dtype == jnp.int32 and int(first.step) == 0
    assert bits(tr.from_orbax(tmp_path, part="params", like=fresh.params)) == bits(trained.params)


def test_the_layout_of_maxtext(tmp_path):
    """A step's folder with `items`: {"params": {"params": ...}, "opt_state", "step"}, sharded,
    beside the state of a data iterator."""
    params = {
        "decoder": {"layers": {"mlp": sharded(normal(8, 2, 4), 4, 2, spec=("x", None, "y"))}},
        "token_embedder": {"embedding": sharded(normal(16, 4, seed=1), 8)},
    }
    variables = {"params": params}
    tx = optax.adamw(0.01)
    state = train_state.TrainState(
        step=jnp.int32(100), apply_fn=None, params=variables, tx=tx, opt_state=tx.init(variables)
    )
    with ocp.CheckpointManager(tmp_path / "checkpoints", item_names=("items", "iter")) as manager:
        composite = ocp.args.Composite(
            items=ocp.args.PyTreeSave(state), iter=ocp.args.JsonSave({"next": 3})
        )
        manager.save(100, args=composite)
    read = tr.from_orbax(tmp_path / "checkpoints")
    assert sorted(read) == ["opt_state", "params", "step"] and names(read) == names(state)
    assert bits(tr.from_orbax(tmp_path / "checkpoints", part="params/params")) == bits(params)
    restored = tr.from_orbax(tmp_path / "checkpoints" / "100" / "items", like=state)
    assert bits(restored) == bits(state)
    same = jax.tree.map(lambda a, b: a.sharding == b.sharding, restored.params, state.params)
    assert jax.tree.leaves(same) == [True, True]


# The target.


def test_other_shardings(tmp_path):
    """From eight devices to 2x4, to four and to one, without a copy on another device."""
    tree = {"w": sharded(normal(16, 8), 8), "key": jax.random.key(1)}
    save(tree, tmp_path / "saved")
    for shape, spec in (((2, 4), ("y", "x")), ((4,), (None, "x")), ((1,), ("x",)), ((8,), ())):
        sharding = jax.NamedSharding(mesh(*shape), jax.P(*spec))
        struct = jax.ShapeDtypeStruct((16, 8), jnp.float32, sharding=sharding)
        read = tr.from_orbax(tmp_path / "saved", like={"w": struct, "key": jax.random.key(0)})
        assert read["w"].sharding == sharding and bits(read) == bits(tree)
    sharding = jax.NamedSharding(mesh(3), jax.P("x"))
    with pytest.raises(ValueError, match=r"'w': .*3"):
        struct = jax.ShapeDtypeStruct((16, 8), jnp.float32, sharding=sharding)
        tr.from_orbax(tmp_path / "saved", like=tree | {"w": struct})


def test_a_target_on_all_devices_for_what_was_not_on_any(tmp_path):
    """Such as the step of a state that was put on a mesh, and float64 from NumPy, which is rounded
    once: this number is a tie in float32."""
    values = np.full(8, 1 + 2**-11 + 2**-40)
    save({"step": 3, "w": values}, tmp_path / "saved")
    put = {"step": sharded(jnp.int32(0), 8, spec=()), "w": sharded(np.zeros(8, np.float16), 8)}
    read = tr.from_orbax(tmp_path / "saved", like=put, cast=True)
    assert bits(read) == bits({"step": jnp.int32(3), "w": jnp.asarray(values.astype(np.float16))})
    assert [read[name].sharding for name in put] == [leaf.sharding for leaf in put.values()]


def test_the_types_of_the_target(tmp_path):
    tree = {"w": jnp.ones(3), "n": np.arange(3.0), "weak": jnp.asarray(2.0), "i": 5}
    save(tree, tmp_path / "saved")
    like = {"w": np.zeros(3, np.float32), "n": np.zeros(3), "weak": jnp.asarray(0.0), "i": 0}
    read = tr.from_orbax(tmp_path / "saved", like=like)
    assert {name: type(leaf) for name, leaf in read.items() if name != "weak"} == {
        "w": np.ndarray,
        "n": np.ndarray,
        "i": int,
    }
    assert read["weak"].weak_type and not read["weak"].committed


def test_every_difference_is_named(tmp_path):
    save(everything() | {"big": 2**40}, tmp_path / "saved")
    like = everything() | {"big": 0}
    del like["half"]
    like |= {
        "more": jnp.ones(2),
        "sharded": jnp.ones((16, 5)),
        "int4": jnp.ones(3, jnp.int8),
        "key": jnp.zeros(2, jnp.uint32),
        "keys": jax.random.split(jax.random.key(0), 3),
        "rate": jnp.float32(0),
        "name": 3,
    }
    with pytest.raises(tr.CheckpointError, match="is of something else") as error:
        tr.from_orbax(tmp_path / "saved", like=like)
    assert [line.strip() for line in str(error.value).splitlines()[1:]] == [
        "'half': bfloat16[5] in the checkpoint, not in the target",
        "'int4': int4[3] in the checkpoint, the target has int8[3]",
        "'key': uint32[2] (PRNG key, threefry2x32) in the checkpoint, the target has uint32[2]",
        "'keys': uint32[3, 4] (PRNG key, rbg) in the checkpoint, the target has uint32[3, 2] "
        "(PRNG key, threefry2x32)",
        "'more': not in the checkpoint, the target has float32[2]",
        "'name': a Python str in the checkpoint, the target has a Python int",
        "'rate': a Python float in the checkpoint, the target has float32[]",
        "'sharded': float32[16, 4] in the checkpoint, the target has float32[16, 5]",
    ]
    with pytest.raises(tr.CheckpointError, match="'big' is 1099511627776, which int32 cannot hold"):
        tr.from_orbax(tmp_path / "saved", like=everything() | {"big": jnp.int32(0)})
    with pytest.raises(TypeError, match="'big' is a function"):
        tr.from_orbax(tmp_path / "saved", like=everything() | {"big": read_by_orbax})


def test_under_a_mesh(tmp_path):
    """The mesh of the program, whose axes are explicit, changes nothing."""
    tree = {"w": normal(8, 2), "v": sharded(normal(8, 2), 8), "key": jax.random.key(0)}
    save(tree, tmp_path / "saved")
    with jax.set_mesh(mesh(8)):
        read = tr.from_orbax(tmp_path / "saved")
        again = tr.from_orbax(tmp_path / "saved", like=tree)
        tr.to_orbax(again, tmp_path / "ours")
    assert bits(read) == bits(again) == bits(tree)
    assert again["v"].sharding == tree["v"].sharding
    assert bits(tr.from_orbax(tmp_path / "ours")) == bits(tree)


def test_cast(tmp_path):
    values = normal(16, 4)
    save({"w": sharded(values, 8), "b": values, "step": 3}, tmp_path / "saved")
    sharding = jax.NamedSharding(mesh(4), jax.P("x"))
    like = {
        "w": jax.ShapeDtypeStruct((16, 4), jnp.bfloat16, sharding=sharding),
        "b": jnp.zeros((16, 4), jnp.float16),
        "step": 0.0,
    }
    with pytest.raises(tr.CheckpointError, match=r"'w': float32\[16, 4\] in the checkpoint"):
        tr.from_orbax(tmp_path / "saved", like=like)
    read = tr.from_orbax(tmp_path / "saved", like=like, cast=True)
    assert read["w"].sharding == sharding and read["step"] == 3.0
    wanted = {"w": values.astype(ml_dtypes.bfloat16), "b": values.astype(np.float16)}
    for name, array in wanted.items():
        assert np.asarray(read[name]).tobytes() == array.tobytes()
    save({"z": np.ones(2, np.complex64)}, tmp_path / "complex")
    with pytest.raises(tr.CheckpointError, match=r"'z': complex64\[2\] in the checkpoint"):
        tr.from_orbax(tmp_path / "complex", like={"z": jnp.ones(2)}, cast=True)


def test_a_part_reads_nothing_else(tmp_path):
    save(
        {"params": {"w": normal(4)}, "opt": [{"m": normal(4)}, {}]}, tmp_path / "s", use_ocdbt=False
    )
    shutil.rmtree(tmp_path / "s" / "opt.0.m")
    (tmp_path / "s" / "opt.0.m").mkdir()
    shutil.copy(tmp_path / "s" / "params.w" / ".zarray", tmp_path / "s" / "opt.0.m")
    assert bits(tr.from_orbax(tmp_path / "s", part="params")) == bits({"w": normal(4)})
    assert tr.from_orbax(tmp_path / "s", part="opt/1") == {}
    with pytest.raises(tr.CheckpointError, match="damaged: 'opt/0/m' cannot be read"):
        tr.from_orbax(tmp_path / "s")
    with pytest.raises(
        tr.CheckpointError, match="no part 'opt/2' in this tree; at this place there is '0', '1'"
    ):
        tr.from_orbax(tmp_path / "s", part="opt/2")


# Damage.


def damaged(tmp_path, source):
    """The copies of a checkpoint without one file, or with half of it: (what, path)."""
    files = sorted(file for file in source.rglob("*") if file.is_file())
    for file in files:
        for what in ("lost", "cut"):
            copy = tmp_path / "damaged"
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(source, copy)
            target = copy / file.relative_to(source)
            raw = target.read_bytes()
            if what == "lost":
                target.unlink()
            elif not raw:
                continue
            else:
                target.write_bytes(raw[: len(raw) // 2])
            yield f"{what} {file.relative_to(source)}", copy


HARMLESS = {"_CHECKPOINT_METADATA", "commit_success.txt", "_sharding"}


@pytest.mark.quick_cases("False-True")
@pytest.mark.parametrize("zarr3", [False, True])
@pytest.mark.parametrize("ocdbt", [False, True])
def test_no_lost_or_cut_file_is_read_as_values(tmp_path, ocdbt, zarr3):
    tree = {"w": sharded(normal(8, 300), 2), "z": sharded(np.zeros((8, 300)), 2), "b": jnp.ones(3),
            "key": jax.random.key(0), "n": normal(3), "i": 3, "s": "text"}  # fmt: skip
    save(tree, tmp_path / "saved", use_ocdbt=ocdbt, use_zarr3=zarr3)
    raised = set()
    for what, copy in damaged(tmp_path, tmp_path / "saved"):
        try:
            assert bits(tr.from_orbax(copy)) == bits(tree), what
        except tr.CheckpointError as error:
            assert "damaged" in str(error) or "no tree of Orbax" in str(error)
            raised.add(what)
            continue
        if not ocdbt:
            assert what.split("/")[-1].split()[-1] in HARMLESS, what
    assert {"lost _METADATA", "cut _METADATA", "lost _strings.json"} <= raised
    assert {"lost array_metadatas/process_0", "cut array_metadatas/process_0"} <= raised
    if not ocdbt:
        chunk = "w/c/1/0" if zarr3 else "w/1.0"
        assert {f"lost {chunk}", f"cut {chunk}"} <= raised


def test_the_damaged_leaf_is_named(tmp_path):
    save(
        {"a": normal(4), "layers": [{"w": sharded(normal(4), 4)}]}, tmp_path / "s", use_ocdbt=False
    )
    (tmp_path / "s" / "layers.0.w" / "2").unlink()
    with pytest.raises(
        tr.CheckpointError, match=r"s: this checkpoint is damaged: 'layers/0/w' cannot"
    ):
        tr.from_orbax(tmp_path / "s")


def test_old_files_without_chunks_of_zeros(tmp_path):
    """Their lost chunks look like zeros, which the user is told."""
    save({"w": sharded(normal(4, 2), 4), "b": normal(3)}, tmp_path / "s", use_ocdbt=False)
    description = json.loads((tmp_path / "s" / "_METADATA").read_text())
    del description["store_array_data_equal_to_fill_value"]
    (tmp_path / "s" / "_METADATA").write_text(json.dumps(description))
    whole = tr.from_orbax(tmp_path / "s")
    assert bits(whole) == bits({"w": jnp.asarray(normal(4, 2)), "b": normal(3)})
    (tmp_path / "s" / "w" / "2.0").unlink()
    with pytest.warns(tr.CheckpointWarning, match=r"chunks are missing of 'w'$"):
        assert not np.asarray(tr.from_orbax(tmp_path / "s")["w"])[2].any()


def test_what_is_no_checkpoint_of_orbax(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no such folder"):
        tr.from_orbax(tmp_path / "none")
    with pytest.raises(tr.CheckpointError, match=r"no tree of Orbax here"):
        tr.from_orbax(tmp_path)
    (tmp_path / "checkpoint_3").write_bytes(b"msgpack")
    with pytest.raises(tr.CheckpointError, match=r"is a file; .* flax.serialization"):
        tr.from_orbax(tmp_path / "checkpoint_3")
    with tr.Checkpoints(tmp_path / "run" / "checkpoints") as checkpoints:
        checkpoints.save(1, {"w": jnp.ones(3)})
    with pytest.raises(tr.CheckpointError, match=r"a run of fnet: use tr\.load"):
        tr.from_orbax(tmp_path / "run")
    (tmp_path / "steps" / "5").mkdir(parents=True)
    save({"w": jnp.ones(1)}, tmp_path / "steps" / "4")
    with pytest.raises(
        tr.CheckpointError, match=r"5: no tree of Orbax .*; there are steps \[4, 5\]"
    ):
        tr.from_orbax(tmp_path / "steps")
    (tmp_path / "old" / "checkpoint").mkdir(parents=True)
    with pytest.raises(tr.CheckpointError, match="PyTreeCheckpointer"):
        tr.from_orbax(tmp_path / "old")


# Files of ours.


def read_by_orbax(path):
    with warnings.catch_warnings(action="ignore"):  # of shardings, and of load_pytree's new name
        with ocp.StandardCheckpointer() as checkpointer:
            yield checkpointer.restore(path)
        yield v1.load(path)
        yield v1.load_pytree(path)


def test_orbax_reads_ours(tmp_path):
    tree = everything()
    assert tr.to_orbax(tree, tmp_path / "new" / "flax") is None
    for read in read_by_orbax(tmp_path / "new" / "flax"):
        assert bits(read) == bits(tree)
        assert read["sharded"].sharding == tree["sharded"].sharding
    assert bits(tr.from_orbax(tmp_path / "new" / "flax")) == bits(tree)
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["flax"]


@pytest.mark.exhaustive
def test_containers_of_ours(tmp_path):
    model, optimizer = nnx_loop(0, 1)
    tx = optax.adam(0.1)
    for number, tree in enumerate(
        (
            tr.TrainState.create({"w": jnp.ones(3)}, tx, ema=0.9),
            nnx.state((model, optimizer)),
            linen_state(0, 1),
            [(jnp.ones(1), np.ones(2)), {3: jnp.ones(2)}],
        )
    ):
        path = tmp_path / str(number)
        tr.to_orbax(tree, path)
        assert bits(tr.from_orbax(path, like=tree)) == bits(tree)
        with ocp.StandardCheckpointer() as checkpointer:
            assert bits(checkpointer.restore(path, tree)) == bits(tree)
            assert names(checkpointer.restore(path)) == names(tree)


def test_a_snapshot_of_a_run(tmp_path):
    tx = optax.sgd(0.5, momentum=0.9)
    state = tr.TrainState.create({"w": jnp.ones(3)}, tx, state={"mean": jnp.ones(2)}, ema=0.9)

    def step(state, batch):
        return state.apply(tx, {"w": batch}), {}

    tr.fit(step, state, lambda i: jnp.ones(3) * i, steps=3, workdir=tmp_path / "run", config={},
           tensorboard=False)  # fmt: skip
    snapshot = tr.load(tmp_path / "run")
    tr.to_orbax(snapshot, tmp_path / "flax")
    wanted = {"step": 3, "params": snapshot.params, "state": snapshot.state, "ema": snapshot.ema}
    for read in read_by_orbax(tmp_path / "flax"):
        assert bits(read) == bits(wanted)


DTYPES = sorted(
    {
        np.dtype(kind).name
        for kind in vars(ml_dtypes).values()
        if isinstance(kind, type) and issubclass(kind, np.generic)
    }
    | set("bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64".split())
    | {"complex64", "complex128"}
)


@pytest.mark.exhaustive
def test_every_dtype_survives_or_is_refused(tmp_path):
    refused = set()
    for name in DTYPES:
        dtype = np.dtype(getattr(ml_dtypes, name, name))
        tree = {"x": np.array([1, 0, 1]).astype(dtype), "y": np.ones((), dtype)}
        try:
            tr.to_orbax(tree, tmp_path / name)
        except TypeError as error:
            assert str(error).startswith(
                f"Orbax cannot save this tree:\n  'x' is {name}[3]: convert"
            )
            assert not list(tmp_path.glob(f"{name}*"))
            refused.add(name)
            continue
        assert bits(tr.from_orbax(tmp_path / name)) == bits(tree)
    assert refused <= {name for name in DTYPES if hasattr(ml_dtypes, name)}
    assert {"uint4", "uint2"} <= refused and not refused & {"int4", "bfloat16", "float8_e4m3fn"}


def test_what_orbax_cannot_save_is_refused_before_anything_is_written(tmp_path):
    tree = {
        "empty": jnp.ones((0, 3)),
        "big": 2**64,
        "complex": 1j,
        "bytes": b"x",
        "~": "text",
        "struct": jax.ShapeDtypeStruct((2,), jnp.float32),
        "a.b": jnp.ones(1),
        "a": {"b": jnp.ones(2)},
        "fine": jnp.ones(1),
    }
    with pytest.raises(TypeError) as error:
        tr.to_orbax(tree, tmp_path / "flax")
    assert [line.strip() for line in str(error.value).splitlines()] == [
        "Orbax cannot save this tree:",
        "'a.b' and 'a/b' would have the same files: rename one",
        "'big' is 18446744073709551616, which has more than 64 bits",
        "'bytes' is a bytes: a checkpoint holds arrays of numbers, Python numbers and PRNG keys",
        "'complex' is a Python complex: make it a NumPy array",
        "'empty' has no elements: float32[0, 3]; leave it out",
        "'struct' is a ShapeDtypeStruct without values",
        "'~' is a string, in whose name Orbax allows no '~': rename it",
    ]
    with pytest.raises(TypeError, match="one leaf without a container"):
        tr.to_orbax(jnp.ones(3), tmp_path / "flax")
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_replaced_and_nothing_unfinished_stays(tmp_path, monkeypatch):
    tr.to_orbax({"w": jnp.ones(3)}, tmp_path / "flax")
    with pytest.raises(FileExistsError, match="to_orbax replaces nothing; choose another path"):
        tr.to_orbax({"w": jnp.zeros(3)}, tmp_path / "flax")
    assert tr.from_orbax(tmp_path / "flax")["w"].tolist() == [1, 1, 1]

    def fails(*args, **kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "finalize", fails)
    with pytest.raises(tr.CheckpointError, match=r"could not write this \(OSError: No space left"):
        tr.to_orbax({"w": jnp.ones(3)}, tmp_path / "full")
    assert [file.name for file in tmp_path.iterdir()] == ["flax"]


def test_a_save_after_a_killed_one(tmp_path):
    (tmp_path / "flax.orbax-checkpoint-tmp" / "d").mkdir(parents=True)
    with pytest.raises(tr.CheckpointError, match="Orbax has not finished this save"):
        tr.from_orbax(tmp_path / "flax.orbax-checkpoint-tmp")
    tr.to_orbax({"w": jnp.ones(3)}, tmp_path / "flax")
    assert tr.from_orbax(tmp_path / "flax")["w"].tolist() == [1, 1, 1]


def test_a_changed_bit_in_ours(tmp_path):
    """Orbax reads it without an error, `from_orbax` does not."""
    tree = {"w": jnp.asarray(normal(64, 64)), "name": "text"}
    tr.to_orbax(tree, tmp_path / "flax")
    data = max((file for file in (tmp_path / "flax").rglob("*") if file.is_file()),
               key=lambda file: file.stat().st_size)  # fmt: skip
    raw = bytearray(data.read_bytes())
    raw[len(raw) // 2] ^= 4
    data.write_bytes(raw)
    with ocp.StandardCheckpointer() as checkpointer:
        assert bits(checkpointer.restore(tmp_path / "flax")) != bits(tree)
    for like in (None, tree, {"w": sharded(normal(64, 64), 8), "name": ""}):
        with pytest.raises(tr.CheckpointError, match=r"damaged \('w' does not have the checksum"):
            tr.from_orbax(tmp_path / "flax", like=like)
    assert tr.from_orbax(tmp_path / "flax", part="name") == "text"
    strings = tmp_path / "flax" / "_strings.json"
    strings.write_text(strings.read_text().replace("text", "test"))
    with pytest.raises(tr.CheckpointError, match=r"damaged \('name' does not have the checksum"):
        tr.from_orbax(tmp_path / "flax", part="name")


# Several processes.


def test_two_processes_write_and_one_reads(tmp_path):
    """Files of Orbax and of `to_orbax`, which both processes read, too."""
    came = processes(SCRIPT, 2, str(tmp_path))
    harmed = [each.pop("harmed") for each in came]
    assert came == [{"read": True, "shards": 2, "plain": True}] * 2
    assert harmed == [
        "process 1 could not read this checkpoint; its own error states the reason",
        "this checkpoint is damaged: 'rows' cannot be read",
    ]
    from orbax_processes import values

    for name in ("orbax", "ours", "v1"):
        read = tr.from_orbax(tmp_path / name)
        assert (tmp_path / name).joinpath(*["state"][: name == "v1"], "ocdbt.process_1").exists()
        for leaf, array in values().items():
            assert leaf_bits(read[leaf])[1:] == leaf_bits(jnp.asarray(array))[1:], (name, leaf)
        assert leaf_bits(read["key"]) == leaf_bits(jax.random.key(3))
    for read in read_by_orbax_elsewhere(tmp_path / "ours"):
        assert np.asarray(read["rows"]).tobytes() == values()["rows"].tobytes()


def read_by_orbax_elsewhere(path):
    """As NumPy arrays: here are other devices than those that wrote."""
    handler = ocp.PyTreeCheckpointHandler()
    with ocp.Checkpointer(handler) as checkpointer:
        metadata = checkpointer.metadata(path).item_metadata.tree
        how = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), metadata)
        yield checkpointer.restore(path, args=ocp.args.PyTreeRestore(restore_args=how))


def test_nothing_in_a_file_is_executed(tmp_path):
    """A type that the files name is a text: no module of it is imported."""
    save({"opt": optax.adam(0.1).init(jnp.ones(2))}, tmp_path / "s")
    path = tmp_path / "s" / "_METADATA"
    text = path.read_text()
    assert not re.search("optax|ScaleByAdam|pickle", text)
    description = json.loads(text)
    description["value_metadata_tree"] = json.dumps(
        {"category": "namedtuple", "module": "antigravity", "clazz": "X", "entries": []}
    )
    path.write_text(json.dumps(description))
    import sys

    assert sorted(tr.from_orbax(tmp_path / "s")["opt"][0]) == ["count", "mu", "nu"]
    assert "antigravity" not in sys.modules
