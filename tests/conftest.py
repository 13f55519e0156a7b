"""The conditions every test runs under: eight CPU devices, strict promotion, warnings as errors."""

import collections
import gc
import importlib.metadata
import os
import random
import signal
import sys
import zlib

import pytest

os.environ["JAX_PLATFORMS"] = os.environ.get("JAX_PLATFORMS", "cpu")
# Three quarters of the tests' time would be spent on compiling small programs that run once. These
# options compile them two to eight times as fast. `make test-isa` runs the numerical tests with the
# compiler's default options instead. Processes that tests start with fewer devices take their XLA
# flags from FNET_TEST_XLA_FLAGS.
flags = ""
if os.environ.setdefault("FNET_TEST_COMPILER", "fast") == "fast":
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    flags += " --xla_cpu_parallel_codegen_split_count=1"
    if importlib.metadata.version("jaxlib").startswith("0.10."):  # newer ones have no such option
        flags += " --xla_cpu_use_fusion_emitters=false"
os.environ["FNET_TEST_XLA_FLAGS"] = flags
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + flags + " --xla_force_host_platform_device_count=8"
)
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
os.environ["HF_HUB_OFFLINE"] = "1"  # no test asks a hub other than its own
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # no test depends on what others have compiled
os.environ.setdefault("FNET_PROBE", "0")  # no test waits for, or depends on, what this CPU measures

# Rewriting the assertions of all test modules takes 7 s in each process of pytest, and compiling
# fnet 0.4 s in each process that a test starts, so the bytecode is kept, also where the environment
# disables it.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# With Python's default of 700 new objects, garbage collection takes another 5 % of the time.
gc.set_threshold(20_000, 10, 10)


# The marks `independent`, `causal` and `segments`. Imported after the environment is set, above.
pytest_plugins = ["fnet.introspect.pytest_plugin"]

# A run in the background may have inherited that these are ignored, which the processes of tests
# would inherit too.
signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP"):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="module")
def quickly():
    """Programs that run a few times are compiled fast, with FNET_TEST_COMPILER=default as well."""
    import jax  # once its environment is set

    if os.environ["FNET_TEST_COMPILER"] == "fast":
        yield
        return
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()  # other modules' operations are not to be those compiled here


def pytest_addoption(parser):
    parser.addoption(
        "--part", metavar="K/N", help="of the exhaustive tests, part K of N (from 0), drawn by name"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Marks the cases of `@pytest.mark.quick_cases(n)` as exhaustive, except for n that are drawn
    with a fixed seed, and those of `@pytest.mark.quick_cases("a", "b")`, except for `[a]` and `[b]`.

    Rejects test names with an address: pytest-xdist needs the same names in each process.
    """
    cases = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("quick_cases") and not item.get_closest_marker("exhaustive"):
            cases[item.nodeid.partition("[")[0]].append(item)
    # Names of tests on the command line and --lf collect parts of modules.
    whole = not any("::" in name for name in config.args) and not config.getoption("lf", False)
    for name, every in cases.items():
        chosen = every[0].get_closest_marker("quick_cases").args
        ids = [item.callspec.id for item in every]
        if isinstance(chosen[0], int):
            kept = random.Random(name).sample(range(len(every)), min(chosen[0], len(every)))
        else:
            kept = [i for i in range(len(every)) if ids[i] in chosen]
            if len(kept) < len(chosen) and whole:
                raise pytest.UsageError(f"{name}: expected the cases {chosen}, found {ids}")
        for i, item in enumerate(every):
            if i not in kept:
                item.add_marker(pytest.mark.exhaustive)
    unstable = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if unstable:
        raise pytest.UsageError(
            f"these tests are named after an address: give them ids: {unstable}"
        )
    if config.getoption("--part"):
        k, n = map(int, config.getoption("--part").split("/"))
        left_out = {
            item
            for item in items
            if item.get_closest_marker("exhaustive") and zlib.crc32(item.nodeid.encode()) % n != k
        }
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
