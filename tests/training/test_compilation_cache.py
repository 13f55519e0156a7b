"""A second process loads the programs that the first one compiled. Programs in damaged files are
compiled again."""

import gc
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fnet import _jax
from fnet import training as tr
from fnet.hardware._onednn import ONEDNN, onednn
from fnet.training.loop import _compilation_cache

RUN = """
import sys
import jax, jax.numpy as jnp, numpy as np, optax
from fnet import training as tr
from fnet.training.loop import _compilation_cache
_compilation_cache.SHORTEST = 0
counts = {"cache_hits": 0, "cache_misses": 0}
def count(event, **_):
    name = event.rpartition("/")[2]
    if name in counts:
        counts[name] += 1
jax.monitoring.register_event_listener(count)
tx = optax.adam(1e-2)
def step(state, batch):
    loss = lambda params: jnp.mean((jnp.tanh(batch["x"] @ params["w"]) - batch["y"]) ** 2)
    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply(tx, grads), {"loss": value}
x = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)
state = tr.TrainState.create({"w": jnp.ones((4, 4))}, tx)
state = tr.fit(step, state, tr.Batches({"x": x, "y": x[:, ::-1]}, batch_size=8), steps=5, workdir=sys.argv[1],
               progress=None)
print(counts["cache_hits"], counts["cache_misses"], np.asarray(state.params["w"]).tobytes().hex())
"""


@pytest.fixture
def enabled():
    """The cache, which the other tests do without."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", True)
    yield
    jax.config.update("jax_enable_compilation_cache", before)


@pytest.fixture
def counted(monkeypatch, enabled):
    """Compiles a function in a folder, and returns whether a program was stored and whether one was
    loaded."""
    monkeypatch.setattr(_compilation_cache, "SHORTEST", 0)

    def compile(folder, scale=3.0, name=None):
        events = []
        listen = lambda event, **_: events.append(event.rpartition("/")[2])
        jax.monitoring.register_event_listener(listen)
        jax.clear_caches()
        try:
            with tr.compilation_cache(folder):
                if name is not None:
                    _compilation_cache._preloaded.discard(name)
                    _compilation_cache.preload(name)
                result = jax.jit(lambda x: jnp.sin(x) * scale)(np.arange(4, dtype=np.float32))
                if name is not None:
                    _compilation_cache.remember(name)
        finally:
            jax.monitoring.unregister_event_listener(listen)
        np.testing.assert_allclose(
            result, np.sin(np.arange(4, dtype=np.float32)) * scale, rtol=1e-6
        )
        return "cache_misses" in events, "cache_hits" in events

    return compile


def run(data, workdir, **more):
    environment = {
        **os.environ,
        "FNET_CACHE": str(data),
        "JAX_ENABLE_COMPILATION_CACHE": "true",
        **more,
    }
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(workdir)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    hits, misses, weights = done.stdout.split()
    return int(hits), int(misses), weights


def test_a_second_process_compiles_nothing_and_gets_equal_bits(tmp_path):
    plain = run(tmp_path / "none", tmp_path / "plain", JAX_ENABLE_COMPILATION_CACHE="false")
    assert plain[:2] == (0, 0) and not (tmp_path / "none").exists()
    first, second = (run(tmp_path / "data", tmp_path / name) for name in ("a", "b"))
    assert first[0] == 0 and first[1] > 0
    assert second[:2] == (first[1], 0)
    assert plain[2] == first[2] == second[2]


@pytest.mark.exhaustive
def test_a_folder_chosen_for_jax_is_used_instead(tmp_path):
    run(
        tmp_path / "data",
        tmp_path / "run",
        JAX_COMPILATION_CACHE_DIR=str(tmp_path / "jax"),
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
    )
    assert any((tmp_path / "jax").iterdir()) and not (tmp_path / "data").exists()


@pytest.mark.exhaustive
def test_a_damaged_program_is_compiled_again(tmp_path, counted):
    assert counted(tmp_path) == (True, False)
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    for damaged in (
        b"",
        whole[:40],
        whole[:-1],
        bytes([whole[0] ^ 1]) + whole[1:],
        whole[:-1] + b"?",
    ):
        file.write_bytes(damaged)
        assert counted(tmp_path) == (True, False)
        assert counted(tmp_path) == (False, True)
    assert counted(tmp_path, 4.0) == (True, False) and len(list(tmp_path.iterdir())) == 2


def test_listed_programs_are_loaded_before_jax_looks_them_up(tmp_path, counted, monkeypatch):
    loaded = []
    load = _jax.compilation._load
    monkeypatch.setattr(
        _jax.compilation, "_load", lambda *args: loaded.append(load(*args)) or loaded[-1]
    )
    assert counted(tmp_path, name="step") == (True, False) and not loaded
    program, listed = sorted(tmp_path.iterdir(), key=lambda file: file.stat().st_size, reverse=True)
    assert counted(tmp_path, name="step") == (False, True)
    counted(tmp_path, name="another step")
    assert [executable is not None for executable, _ in loaded] == [True]

    counted(tmp_path, 4.0, name="step")  # another program under the name
    whole = program.read_bytes()
    program.write_bytes(whole[:-1])
    assert counted(tmp_path, name="another step") == (True, False)
    listed.write_bytes(b"?")
    assert counted(tmp_path, name="step") == (False, True)


def test_a_listed_program_with_other_options_is_not_used(tmp_path, counted, monkeypatch):
    counted(tmp_path, name="step")
    other = jax.jit(lambda x: -x).lower(np.ones(4, np.float32)).compile()
    monkeypatch.setattr(_jax.compilation, "_load", lambda *args: (other.runtime_executable(), 1))
    store = _compilation_cache.Store(tmp_path)
    key = _compilation_cache._listed("step")
    listed = json.loads(store.get(key))
    store.put(
        key,
        json.dumps(
            {name: (options[:-2], device) for name, (options, device) in listed.items()}
        ).encode(),
    )
    assert counted(tmp_path, name="step") == (False, True)  # which also compares the results


def test_garbage_is_collected_after_the_first_step():
    seen = []

    def batches(i):
        seen.append((i, gc.isenabled()))
        return jnp.zeros(2)

    def step(state, batch):
        return state.replace(step=state.step + 1), {"loss": batch.sum()}

    state = tr.TrainState.create({}, optax.identity())
    ended = []
    tr.fit(
        step,
        state,
        batches,
        steps=5,
        progress=None,
        on_step=lambda end: ended.append(gc.isenabled()),
    )
    assert seen[0] == (0, False) and ended == [True] * 5 and gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        tr.fit(lambda state, batch: 1 / 0, state, batches, steps=5, progress=None)
    assert gc.isenabled()
    gc.disable()
    try:
        tr.fit(step, state, batches, steps=1, progress=None)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_programs_of_another_cpu_are_not_loaded(tmp_path, counted, monkeypatch):
    assert counted(tmp_path) == (True, False)
    monkeypatch.setattr(_compilation_cache, "_cpu", lambda: "2 flags: sse4_2")
    assert counted(tmp_path) == (True, False)


def test_a_folder_in_which_others_write_is_not_used(tmp_path, counted):
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o777)
    assert counted(folder) == (False, False) and not any(folder.iterdir())
    folder.chmod(0o700)
    assert counted(folder) == (True, False)
    file = tmp_path / "file"
    file.touch()
    assert counted(file) == (False, False)


def test_a_program_that_cannot_be_written_is_not_kept(tmp_path, counted, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert counted(tmp_path) == (True, False)
    assert not any(tmp_path.iterdir())


def test_a_program_that_cannot_be_serialized_is_not_kept(tmp_path, counted, monkeypatch):
    """JAX alone warns: Error writing persistent compilation cache entry for 'jit_f': MemoryError."""

    def no_memory(*_):
        raise MemoryError("std::bad_alloc")

    monkeypatch.setattr(_jax.compilation, "_write", no_memory)
    assert counted(tmp_path) == (False, False)  # JAX reports a miss while it writes
    assert not any(tmp_path.iterdir())


def test_a_program_that_calls_onednn_runs_without_a_warning(tmp_path, enabled, monkeypatch):
    if not onednn():
        pytest.skip("this XLA does not run bfloat16 convolutions with oneDNN on this CPU")
    monkeypatch.setattr(_compilation_cache, "SHORTEST", 0)
    x, kernel = jnp.ones((1, 8, 8, 16), jnp.bfloat16), jnp.ones((3, 3, 16, 16), jnp.bfloat16)
    with tr.compilation_cache(tmp_path):
        program = jax.jit(
            lambda x: jax.lax.conv_general_dilated(
                x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            ),
            compiler_options=ONEDNN,
        )
        assert program(x)[0, 4, 4, 0] == 9 * 16


def test_the_programs_unused_for_the_longest_time_are_deleted(tmp_path, monkeypatch):
    store = _compilation_cache.Store(tmp_path)
    monkeypatch.setattr(_compilation_cache, "LIMIT", 250)
    for i, name in enumerate("abc"):
        store.put(name, bytes(68))  # 100 bytes with the checksum
        os.utime(store._file(name), (i, i))
    assert store.get("a") is None and store.get("b") == store.get("c") == bytes(68)
    os.utime(store._file("c"), (5, 5))
    store.put("d", bytes(68))
    assert [name for name in "abcd" if store.get(name)] == ["b", "d"]


def test_jax_is_as_before_afterwards(tmp_path, counted):
    seconds = jax.config.jax_persistent_cache_min_compile_time_secs
    with tr.compilation_cache(tmp_path), tr.compilation_cache(tmp_path / "inner"):
        assert jax.config.jax_persistent_cache_min_compile_time_secs == 0
    assert jax.config.jax_persistent_cache_min_compile_time_secs == seconds
    assert not (tmp_path / "inner").exists()
    assert counted(tmp_path) == (True, False)
    files = len(list(tmp_path.iterdir()))
    jax.clear_caches()
    jax.jit(lambda x: jnp.cos(x) * 7)(np.ones(3, np.float32))
    assert len(list(tmp_path.iterdir())) == files


def test_a_jax_without_such_a_cache_compiles(tmp_path, counted, monkeypatch):
    monkeypatch.setattr(
        _jax.compilation,
        "_cache",
        _jax._features.Missing("jax._src.compilation_cache", "the cache"),
    )
    assert counted(tmp_path) == (False, False) and not any(tmp_path.iterdir())
