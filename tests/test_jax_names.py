"""JAX names that are not public: each test fails with a clear message when JAX moves one.

What fnet reads from the parameters of equations is tested in tests/jaxpr/test_calls.py.
"""

import functools
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.interpreters import mlir

import fnet
from fnet import _jax, jaxpr
from fnet._jax import _features, _hijax, _tracing, kernels, processes

MOVED = f"JAX {jax.__version__} moved {{}}: fix fnet/_jax"
TRANSFORMS = {
    "jit": lambda f: jax.jit(f),
    "vmap": lambda f: jax.vmap(f),
    "scan": lambda f: lambda x: lax.scan(lambda c, a: (c, f(a)), 0, x)[1],
    "cond": lambda f: lambda x: lax.cond(True, f, lambda a: a, x),
    "grad": lambda f: jax.grad(lambda x: f(x).sum()),
    "checkpoint": lambda f: lambda x: jax.jit(jax.checkpoint(f))(x),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_trace_state_tells_traces_apart(name):
    outside, inside = _jax.trace_state(), []

    def f(x):
        inside.append((_jax.trace_state(), _jax.trace_state()))
        return x + 1

    TRANSFORMS[name](f)(jnp.ones(3))
    assert inside
    for first, second in inside:
        assert first == second, MOVED.format(
            "get_opaque_trace_state (two calls in one trace differ)"
        )
        assert first != outside, MOVED.format(f"get_opaque_trace_state ({name} is not seen)")
    assert _jax.trace_state() == outside


def test_trace_state_is_plain_in_named_scope():
    outside = _jax.trace_state()
    with jax.named_scope("a"):
        assert _jax.trace_state() == outside, MOVED.format(
            "get_opaque_trace_state (a named scope changes it)"
        )


def test_name_stack_stands_in_equations():
    def f(x):
        with jax.named_scope("outer"), jax.named_scope("inner"):
            return x * x

    eqn = jax.make_jaxpr(f)(1.0).jaxpr.eqns[0]
    assert str(eqn.source_info.name_stack) == "outer/inner", MOVED.format(
        "eqn.source_info.name_stack"
    )


def test_each_entry_into_a_scope_has_an_identity():
    def f(x):
        for _ in range(2):
            with jax.named_scope("a"):
                x = jnp.sin(x)
                with jax.named_scope("b"):
                    x = jnp.cos(x)
        return x

    for g in (f, jax.vmap(f), jax.grad(lambda x: f(x).sum())):
        eqns = [
            eqn
            for eqn in jax.make_jaxpr(g)(jnp.ones(2)).jaxpr.eqns
            if eqn.primitive.name in ("sin", "cos")
        ]
        entries = [_jax.scope_entries(eqn) for eqn in eqns]
        assert {tuple(name for name, _ in each) for each in entries} == {("a",), ("a", "b")}, (
            MOVED.format("NameStack")
        )
        assert len({each[0] for each in entries}) == 2, MOVED.format("the identity of scopes")


def test_equations_are_written_down_again_as_they_are(monkeypatch):
    closed = jax.make_jaxpr(lambda x: jnp.sin(x) * 2.0)(1.0)
    monkeypatch.setattr(
        _tracing, "bind", lambda *_: pytest.fail(MOVED.format("DynamicJaxprTrace or trace_ctx"))
    )

    def f(x):
        (y,) = _jax.bind_again(closed.jaxpr.eqns[0], [x])
        return _jax.bind_again(closed.jaxpr.eqns[1], [y, closed.jaxpr.eqns[1].invars[1].val])[0]

    assert str(jax.make_jaxpr(f)(1.0)) == str(closed)


def test_linearizing_keeps_what_it_has_done(monkeypatch):
    seen, inlined = [], _tracing._inlined
    monkeypatch.setattr(_tracing, "_inlined", lambda *key: seen.append(key) or inlined(*key))
    grad = jax.grad(lambda x: _jax.bind(lax.sin_p, [x], {"accuracy": None})[0])
    assert jax.jit(grad)(0.0) == 1 and seen, MOVED.format("LinearizeTrace or trace_ctx")
    names = [eqn.primitive.name for eqn in jax.make_jaxpr(grad)(0.0).jaxpr.eqns]
    assert "jit" not in names and "pjit" not in names, MOVED.format("jit's inline")


def test_the_inputs_of_an_output_are_found():
    jaxpr = jax.make_jaxpr(lambda x, y: (x + 1, jax.jit(lambda a, b: a)(x, y) * 2, y))(
        1.0, 2.0
    ).jaxpr
    used = [_jax.used_inputs(jaxpr, [i == j for j in range(3)]) for i in range(3)]
    assert used == [[True, False], [True, False], [False, True]], MOVED.format("dce_jaxpr")


def test_a_batching_rule_is_traced():
    @jax.custom_batching.custom_vmap
    def f(x, y):
        return x + y

    f.def_vmap(lambda size, batched, x, y: (x * y, batched[0]))
    params = jax.make_jaxpr(f)(1.0, 2.0).jaxpr.eqns[0].params
    closed, batched = _jax.custom_vmap_rule(params, 3, [True, False], [jnp.ones(3), jnp.ones(())])
    assert [eqn.primitive.name for eqn in closed.jaxpr.eqns] == ["mul"] and batched == [True], (
        MOVED.format("custom_vmap_call's parameters")
    )


def test_operands_vary_alike():
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("devices",))
    spec = jax.sharding.PartitionSpec("devices")
    found = []

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(spec, jax.sharding.PartitionSpec()), out_specs=spec
    )
    def f(x, y):
        found.append([jax.typeof(a) for a in _jax.vary_alike(x, y)])
        return x * y

    jax.eval_shape(f, jnp.ones(2), jnp.ones(1))
    assert found[0][0] == found[0][1], MOVED.format("auto_insert_reshard")


@pytest.mark.filterwarnings("ignore:.with mesh:")
def test_the_mesh_of_with_mesh(monkeypatch):
    mesh, found = jax.sharding.Mesh(jax.devices()[:2], ("devices",)), []
    f = jax.jit(lambda x: found.append(_jax.context_mesh()) or x)
    f(1)
    with mesh:
        f(1)
    assert [each.axis_names for each in found] == [(), ("devices",)], MOVED.format(
        "thread_resources"
    )
    monkeypatch.setattr(_tracing, "_thread_resources", _features.Missing("a", "b"))
    with mesh:
        assert _jax.context_mesh().empty


def test_what_a_value_varies_over():
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("devices",))
    found = []

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=jax.sharding.PartitionSpec("devices"), out_specs=()
    )
    def f(x):
        zeros = [
            _jax.zeros(jax.ShapeDtypeStruct((2,), jnp.float32), axes=frozenset(axes))
            for axes in ((), ("devices",))
        ]
        found.extend(map(_jax.varies_over, (x, jax.typeof(x), jax.lax.psum(x, "devices"), *zeros)))
        return ()

    jax.eval_shape(f, jnp.ones(2))
    assert found == [{"devices"}, {"devices"}, set(), set(), {"devices"}], MOVED.format(
        "manual_axis_type"
    )


def test_keys_of_ones_own_kind():
    halves = lambda bits, width, shape: bits[:1].reshape(shape)
    never = lambda *_: None
    impl = _jax.prng_impl(
        key_shape=(2,),
        seed=never,
        split=never,
        random_bits=halves,
        fold_in=never,
        name="halves",
        tag="h",
    )
    key = jax.random.wrap_key_data(jnp.array([7, 8], jnp.uint32), impl=impl)
    assert jax.random.bits(key, (), "uint32") == 7, MOVED.format("define_prng_impl")


def test_kernels_of_attention():
    x = jnp.ones((2, 128, 4, 16), jnp.bfloat16)
    how = dict(scale=1.0, causal=True, window=None)
    forward = jax.make_jaxpr(lambda x: kernels.cudnn_attention(x, x, x, None, None, **how))(x)
    out, sums = forward.out_avals
    backward = jax.make_jaxpr(
        lambda x, s: kernels.cudnn_attention(x, x, x, None, None, s, x, x, **how)
    )(x, sums)
    assert (out.shape, sums.shape) == ((2, 128, 4, 16), (2, 4, 128)), MOVED.format(
        "cuDNN's attention, forward"
    )
    assert [a.shape for a in backward.out_avals] == [x.shape] * 3, MOVED.format(
        "cuDNN's attention, backward"
    )
    assert kernels.cudnn_version() is None or kernels.cudnn_version() > 80000
    q = jnp.ones((4, 128, 16))
    how = dict(causal=True, window=None, block=128)
    out, sums = jax.eval_shape(lambda q: kernels.splash_attention(q, q, q, None, **how), q)
    grads = jax.eval_shape(
        lambda q, s: kernels.splash_attention(q, q, q, None, q, s, q, **how), q, sums
    )
    assert (out.shape, sums.shape) == (q.shape, (4, 128)), MOVED.format("splash attention, forward")
    assert [a.shape for a in grads] == [q.shape] * 3, MOVED.format("splash attention, backward")


def test_lowering_rules_are_told_devices(monkeypatch):
    asking, seen = _jax.Primitive("asking"), []
    asking.def_abstract_eval(lambda x: x)

    def rule(ctx, x):
        seen.append(kernels.partitioning(ctx))
        return [x]

    mlir.register_lowering(asking, rule)
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("devices",))
    spec = jax.sharding.PartitionSpec("devices")
    placed = jax.ShapeDtypeStruct(
        (4,), jnp.float32, sharding=jax.sharding.NamedSharding(mesh, spec)
    )
    jax.jit(asking.bind).lower(jnp.ones(4))
    jax.jit(asking.bind).lower(placed)
    jax.jit(jax.shard_map(asking.bind, mesh=mesh, in_specs=spec, out_specs=spec)).lower(placed)
    kernels.tell_devices(asking)
    assert (
        asking not in kernels._dispatch.prim_requires_devices_during_lowering
    )  # no CUDA plugin is installed here
    monkeypatch.setattr(kernels, "_cuda_versions", object)
    kernels.tell_devices(asking)
    jax.jit(lambda x: asking.bind(x)).lower(placed)
    assert seen == ["whole", "unknown", "whole", "split"], MOVED.format(
        "the axis context of a lowering rule"
    )


def test_clusters_are_seen(monkeypatch):
    assert processes.cluster_size() is None and processes.notes() is None
    slurm = {
        "SLURM_JOB_ID": 7,
        "SLURM_STEP_NODELIST": "here",
        "SLURM_NTASKS": 3,
        "SLURM_PROCID": 0,
        "SLURM_LOCALID": 0,
    }
    for name, value in slurm.items():
        monkeypatch.setenv(name, str(value))
    assert processes.cluster_size() == 3, MOVED.format("ClusterEnv")
    jax.devices()
    assert processes.backend_is_up(), MOVED.format("backends_are_initialized")


def test_leaving_takes_away_what_waits(monkeypatch):
    gone, held = [], []
    monkeypatch.setattr(processes.atexit, "unregister", gone.append)
    monkeypatch.setattr(processes.ctypes.pythonapi, "Py_IncRef", held.append)
    processes.leave()
    assert [f.__name__ for f in gone] == ["clean_up", "wait_for_tokens"] and len(held) == 1
    state = processes._distributed.global_state
    assert all(hasattr(state, name) for name in ("client", "service", "preemption_sync_manager")), (
        MOVED.format("distributed.global_state")
    )


def test_line_names_the_users_line():
    eqn = jax.make_jaxpr(lambda x: jnp.sin(x))(1.0).jaxpr.eqns[0]
    assert re.fullmatch(r"test_jax_names\.py:\d+ \(.*<lambda>\)", _jax.line(eqn))


def test_public_primitives_are_found_by_name():
    (eqn,) = jax.make_jaxpr(jnp.sin)(1.0).eqns
    name = _jax.public_name(eqn.primitive)
    assert name == "sin_p"
    namespace = {}
    exec(_jax.PUBLIC_PRIMITIVES, namespace)
    assert getattr(namespace["primitives"], name) is eqn.primitive
    assert _jax.public_name(_jax.Primitive("own")) is None


def test_unplaced_tells_calls_with_shardings():
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    plain, placed = (
        jax.make_jaxpr(jax.jit(jnp.sin, in_shardings=each))(1.0).jaxpr.eqns[0]
        for each in (None, where)
    )
    assert not _jax.unplaced(placed.params)
    assert (
        _jax.unplaced(jax.make_jaxpr(jax.jit(jnp.sin))(1.0).jaxpr.eqns[0].params)
        and plain.primitive.name == "jit"
    )


def test_comparisons_of_symbolic_sizes_are_seen():
    (t,) = jax.export.symbolic_shape("t")
    with _jax.symbolic_trace() as unequal:
        answers = t == 64, t != 3.0, t == t, bool(t - 2), t == t * t, t in (7,)
    assert answers == (False, True, True, True, False, False), MOVED.format("_DimExpr.__eq__")
    assert set(map(str, unequal)) == {"t - 64", "t - 3", "t - 2", "- t^2 + t", "t - 7"}
    with _jax.symbolic_trace() as unequal:
        jax.eval_shape(lambda x: x + x, jax.ShapeDtypeStruct((t, 5), "float32"))
    assert unequal == []
    assert "__bool__" not in vars(type(t))


def test_convolutions_accept_symbolic_paddings():
    (t,) = jax.export.symbolic_shape("t")
    kernel = jnp.ones((3, 1, 1))

    def f(x):
        return lax.conv_general_dilated(x, kernel, (2,), [(t, t + 1)]).sum()

    x = jax.ShapeDtypeStruct((1, 1, t), "float32")
    with _jax.symbolic_trace():
        jax.eval_shape(jax.grad(f), x)  # fails if JAX no longer reads `operator.index` there
    with pytest.raises(ValueError, match="padding"):
        jax.eval_shape(f, x)


def test_threefry_computes_the_bits_of_its_paper():
    """The known answer for zeros of Random123 (Salmon et al., 2011)."""
    bits = _jax.threefry_2x32(jnp.zeros(2, jnp.uint32), jnp.zeros(2, jnp.uint32))
    assert [hex(word) for word in bits.tolist()] == ["0x6b200159", "0x99ba4efe"], MOVED.format(
        "jax.extend.random.threefry_2x32"
    )


def test_the_switches_of_the_next_constructs_are_found():
    assert len(_hijax._SWITCHES) >= 3, MOVED.format("jax._src.config.custom_vjp3")
    for switch in _hijax._SWITCHES:
        with switch(True):
            assert switch.value, MOVED.format("the value of a switch")
            with _jax.classic_tracing():
                assert not switch.value, MOVED.format("the context of a switch")
            assert switch.value


def test_a_hiprim_is_found_in_its_equation():
    with jax._src.config.custom_vjp3(True):
        double = jax.custom_vjp(lambda x: 2 * x)
        double.defvjp(lambda x: (2 * x, None), lambda _, c: (c,))
        closed = jax.make_jaxpr(double)(1.0)
    (eqn,) = closed.jaxpr.eqns
    assert closed.jaxpr.is_high and type(_jax.hi_primitive(eqn)).__name__ == "CustomVJPTraced", (
        MOVED.format("call_hi_primitive")
    )
    opened = _jax.without_hi_primitives(closed)
    names = [each.primitive.name for each in jaxpr.equations(opened.jaxpr)]
    assert "custom_vjp_call" in names and "mul" in names and not opened.jaxpr.is_high, names
    assert jax.core.eval_jaxpr(opened.jaxpr, opened.consts, 3.0) == [6.0]
    accumulator = _hijax._ValAccum(jax.typeof(1.0))
    accumulator.accum(jnp.float32(2))
    assert accumulator.freeze() == 2, MOVED.format("ValAccum")


def test_names_that_jax_lacks_disable_one_feature(monkeypatch):
    monkeypatch.setattr(_features, "_missing", {})
    attention = _features.private("jax._src.cudnn.no_such_module", "cuDNN's attention")
    assert not attention and not isinstance(attention, type(None))
    assert _features.private("jax._src.core.trace_state_clean", "anything") is not None
    message = (
        f"cuDNN's attention needs jax._src.cudnn.no_such_module, which JAX {jax.__version__} does "
        "not have; use a version of JAX that fnet was tested with (constraints/)"
    )
    for use in (attention, lambda: attention.MaskType):
        with pytest.raises(NotImplementedError, match=re.escape(message) + "$"):
            use()
    assert _jax.disabled() == (
        f"cuDNN's attention is disabled: JAX {jax.__version__} has no "
        "jax._src.cudnn.no_such_module",
    )


def test_the_tested_versions_have_everything():
    assert kernels.unavailable("cuda") is kernels.unavailable("tpu") is None
    assert jaxpr.unsupported() == (), MOVED.format("a primitive or a private name")


FAKE = """
import sys, importlib.abc
class Without(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.startswith(("jax._src.cudnn", "jax.experimental.pallas.ops.tpu.splash_attention")):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
import jax, jax.numpy as jnp
sys.meta_path.insert(0, Without())
for name in [name for name in sys.modules if name.startswith("jax._src.cudnn")]:
    del sys.modules[name]
from jax.extend.core import primitives
primitives.logistic_p.name = "sigmoid"
import fnet
from fnet import layers as nn, transforms as ft
step = ft.autocast(lambda x: jax.nn.sigmoid(x @ x), "bfloat16")
x = jnp.ones((4, 4))
assert step(x).shape == (4, 4)
print(ft.explain(step, x))
print(ft.explain(ft.tune(lambda x: jax.nn.sigmoid(x @ x), "cpu"), x))
"""


@pytest.mark.exhaustive
def test_without_kernels_and_with_a_renamed_primitive_fnet_works_and_says_so():
    run = subprocess.run([sys.executable, "-c", FAKE], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    for told in run.stdout.split("scope  ")[1:]:
        for line in (
            "cuDNN's attention is disabled",
            "splash attention is disabled",
            "the rules for 'logistic' are disabled",
        ):
            assert line in told


def test_private_names_are_used_in_one_package():
    root = pathlib.Path(fnet.__file__).parent
    # jax.core.Tracer is public and stays; the rest of jax.core comes and goes.
    private = re.compile(
        r"jax\._src|\bjaxlib\.(?!__version__)|jax\.core\.(?!Tracer)|from jax\.core|jax\.extend"
    )
    found = [
        f"{path.relative_to(root)}:{number}"
        for path in sorted(root.rglob("*.py"))
        if path.parent.name != "_jax"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if private.search(line.split("#")[0])
    ]
    assert not found, f"move to fnet/_jax: {found}"


@pytest.mark.exhaustive
def test_exported_programs_contain_no_source_lines():
    from jax import export

    with _jax.without_locations():
        program = export.export(jax.jit(lambda x: jnp.sin(x) + 1))(
            jax.ShapeDtypeStruct((2,), jnp.float32)
        )
    assert "test_jax_names" not in str(program.mlir_module_serialized), MOVED.format(
        "traceback_in_locations_limit"
    )
    plain = export.export(jax.jit(lambda x: jnp.sin(x) + 1))(
        jax.ShapeDtypeStruct((2,), jnp.float32)
    )
    assert "test_jax_names" in str(plain.mlir_module_serialized)  # the test finds them
