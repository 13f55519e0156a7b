"""Every name of JAX's that is not public stands here, and nowhere else.

Each has a test in tests/test_jax_names.py that fails in words when JAX moves it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import inspect
import re
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# From jax._src rather than jax.extend.core, whose import loads Pallas and costs 60 ms.
from jax._src import ad_util, api, clusters, core, dispatch, distributed, source_info_util, xla_bridge
from jax._src.config import _check_vma
from jax._src.core import Jaxpr, Literal, Primitive, auto_insert_reshard, get_opaque_trace_state
from jax._src.cudnn import fused_attention_stablehlo as fused
from jax._src.interpreters import ad, partial_eval
from jax._src.lib import cuda_versions
from jax._src.sharding_impls import UNSPECIFIED, ShardingContext, SPMDAxisContext

try:
    from jax._src.core import ClosedJaxpr
except ImportError:    # jax >= 0.12: one class for both
    ClosedJaxpr = Jaxpr

__all__ = ["CustomJvp", "CustomVjp", "Literal", "Primitive", "SubJaxpr", "again", "backend_is_up", "bind", "close",
           "cluster_size", "consts_as_inputs", "cudnn_attention", "cudnn_version", "custom_vmap_rule",
           "equation_context", "hoisted", "leave", "notes", "origin", "partitioning", "prng_impl", "scan_parts",
           "scope_path", "splash_attention", "sub_jaxprs", "tell_devices", "trace_state", "unplaced", "varies_over",
           "vary_alike"]


def trace_state():
    """A token that equals another one only within the same trace.

    Two calls give equal tokens exactly when no jax transform (scan, cond, vmap, jit, ...) was entered or left
    between them.
    """
    return get_opaque_trace_state()


def vary_alike(*arrays):
    """Operands that all vary over the same axes of a mesh, as inside shard_map those of one operation must."""
    return auto_insert_reshard(*arrays)


def varies_over(x) -> frozenset:
    """The axes of a mesh over which a value varies, inside a shard_map that keeps track of it."""
    return core.typeof(x).manual_axis_type.varying


def prng_impl(**options):
    """A kind of random keys, for `jax.random.wrap_key_data(..., impl=...)`: `jax.extend.random.define_prng_impl`."""
    # Late: jax.extend loads Pallas.
    from jax.extend import random

    return random.define_prng_impl(**options)


# Processes: whether there are several, what they tell each other, and how one ends that others have left.

def cluster_size() -> int | None:
    """How many processes the cluster has that JAX sees around this one; None where it sees none."""
    for kind in clusters.ClusterEnv._cluster_types:
        if not kind.opt_in_only_method and kind.is_env_present():
            return kind.get_process_count()
    return None


def backend_is_up() -> bool:
    """Whether JAX has asked for devices, after which processes can no longer find each other."""
    return xla_bridge.backends_are_initialized()


def notes():
    """The store in which the processes of a run leave each other short texts, kept by the first of them."""
    return distributed.global_state.client


def leave() -> None:
    """Lets this process end by itself, without waiting for processes that are gone.

    Else JAX stands before a barrier at the exit until its time-out, and then aborts. What holds the connection is never
    freed, since freeing it waits as well.
    """
    atexit.unregister(api.clean_up)
    atexit.unregister(dispatch.wait_for_tokens)
    state = distributed.global_state
    for held in (state, state.client, state.service, state.preemption_sync_manager):
        if held is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))


# Traversal: which jaxprs an equation holds, and how often each runs.

class SubJaxpr(NamedTuple):
    """A jaxpr inside an equation.

    Attributes:
      kind: "call" (runs once, its inputs are the equation's, one to one: jit, closed_call, remat, custom_jvp,
        custom_vjp), "scan", "while_cond", "while_body", "branch" (of a cond), "shard_map", "solve" (the forward
        solve of a custom_linear_solve), or "other" (held by a primitive that is not known here).
      jaxpr: the open jaxpr, with `eqns`, `invars`, `constvars`, `outvars`.
      consts: values of `constvars`.
      times: how often it runs: the length of a scan, the shards of a shard_map, None for a loop of unknown length.
    """

    kind: str
    jaxpr: Any
    consts: tuple
    times: int | None


_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr", "remat2": "jaxpr",
          "checkpoint": "jaxpr", "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}
_COMBINERS = ("update_jaxpr", "select_jaxpr", "scatter_jaxpr")     # a scalar function that says how two numbers combine


def sub_jaxprs(eqn: Any) -> tuple[SubJaxpr, ...]:
    """The jaxprs inside an equation, with what they are; none for an ordinary operation."""
    name, params = eqn.primitive.name, eqn.params
    if name in _CALLS:
        return (_sub("call", params[_CALLS[name]], 1),)
    if name == "scan":
        return (_sub("scan", params["jaxpr"], params["length"]),)
    if name == "while":
        return (_sub("while_cond", params["cond_jaxpr"], None), _sub("while_body", params["body_jaxpr"], None))
    if name == "cond":
        return tuple(_sub("branch", branch, 1) for branch in params["branches"])
    if name == "shard_map":
        shards = 1
        for axis in params["newly_manual_axes"]:
            shards *= params["mesh"].shape[axis]
        return (_sub("shard_map", params["jaxpr"], shards),)
    if name == "custom_linear_solve":
        return (_sub("solve", params["jaxprs"].solve, 1),)
    if name in ("reduce", "reduce_window", "select_and_scatter"):
        return ()
    found = []
    for key, value in params.items():
        if key not in _COMBINERS:
            for item in value if isinstance(value, (tuple, list)) else (value,):
                if hasattr(getattr(item, "jaxpr", item), "eqns"):
                    found.append(_sub("other", item, 1))
    return tuple(found)


def scan_parts(eqn: Any) -> tuple[int, int, int]:
    """How many of a scan equation's inputs are constants, carries and slices."""
    params = eqn.params
    if "ft_in" in params:    # jax >= 0.11
        consts, carry, xs = (len(part) for part in params["ft_in"].unpack())
        return consts, carry, xs
    consts, carry = params["num_consts"], params["num_carry"]
    return consts, carry, len(eqn.invars) - consts - carry


def _sub(kind: str, jaxpr: Any, times: int | None) -> SubJaxpr:
    return SubJaxpr(kind, getattr(jaxpr, "jaxpr", jaxpr), tuple(getattr(jaxpr, "consts", ())), times)


# Rewriting: equations evaluated again, with their names and context, and jaxprs put back into them.

_TRANSFORM = re.compile(r"[A-Za-z_]+\(|\)")


def scope_path(eqn: Any, outer: str = "") -> str:
    """The named scopes of an equation below `outer`, joined by "/", without the marks that jvp, transpose and vmap
    leave, so that forward and backward pass have one path."""
    inner = _TRANSFORM.sub("", str(eqn.source_info.name_stack)).strip("/")
    return f"{outer}/{inner}" if outer and inner else outer or inner


def origin(eqn: Any) -> tuple:
    """What `scope_path` and `equation_context` read of an equation, to tell equations that share it."""
    info = eqn.source_info
    return id(info.name_stack), id(info.traceback), id(eqn.ctx)


def line(eqn: Any) -> str:
    """The user's line that made an equation, "model.py:58 (forward)"; "" where none is known."""
    frame = source_info_util.user_frame(eqn.source_info.traceback)
    return "" if frame is None else f"{frame.file_name.rpartition('/')[2]}:{frame.start_line} ({frame.function_name})"


@contextlib.contextmanager
def equation_context(eqn: Any):
    """Operations done inside carry the equation's names, source line and JAX context (mesh, compute type, ...)."""
    names = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with source_info_util.user_context(eqn.source_info.traceback, name_stack=names), eqn.ctx.manager:
        yield


def again(eqn: Any, arrays: list) -> list:
    """The outputs of an equation evaluated once more on these arrays.

    While JAX only writes equations down, one whose inputs have the types it was traced with is written down as it is,
    without asking again what comes of it: half the time of binding it.
    """
    trace, primitive = core.trace_ctx.trace, eqn.primitive
    if type(trace) is partial_eval.DynamicJaxprTrace and not eqn.effects:
        info = source_info_util.current()
        inputs = [partial_eval.DynamicJaxprTracer(trace, v.aval, v, info) if isinstance(v, Literal) and x is v.val
                  else trace.to_jaxpr_tracer(x, info) if isinstance(x, core.Tracer) else None
                  for x, v in zip(arrays, eqn.invars)]
        if all(x is not None and x.aval == v.aval for x, v in zip(inputs, eqn.invars)):
            return trace.emit_eqn(inputs, [v.aval for v in eqn.outvars], primitive, eqn.params, eqn.effects, info,
                                  eqn.ctx)
    return bind(primitive, arrays, primitive.get_bind_params(eqn.params))


def bind(primitive: Any, arrays: list, params: dict) -> list:
    """The outputs of a primitive.

    While JAX linearizes, each primitive is linearized anew, unless it stands in a jit, for which JAX keeps the result:
    a third of the time. The jit is an inlined one, of which nothing is left.
    """
    outputs = None
    if type(core.trace_ctx.trace) is ad.LinearizeTrace:
        with contextlib.suppress(TypeError):    # parameters that have no hash
            outputs = _inlined(primitive, frozenset(params.items()))
    outputs = primitive.bind(*arrays, **params) if outputs is None else outputs(*arrays)
    return list(outputs) if primitive.multiple_results else [outputs]


@functools.lru_cache(4096)
def _inlined(primitive, params):
    return jax.jit(lambda *arrays: primitive.bind(*arrays, **dict(params)), inline=_EARLY)


_EARLY = jax.Inline.JAX_EARLY if hasattr(jax, "Inline") else True


def close(jaxpr: Any) -> Any:
    """A jaxpr with its constants; some equations hold it without any."""
    return jaxpr if hasattr(jaxpr, "consts") else ClosedJaxpr(jaxpr, ())


def opened(closed: Any) -> Any:
    """The jaxpr inside, where one is nothing but a jit without shardings."""
    while len(closed.jaxpr.eqns) == 1 and closed.jaxpr.eqns[0].primitive.name == "jit":
        jaxpr, eqn = closed.jaxpr, closed.jaxpr.eqns[0]
        if (jaxpr.constvars or eqn.invars != jaxpr.invars or eqn.outvars != jaxpr.outvars
                or not unplaced(eqn.params)):
            break
        closed = eqn.params["jaxpr"]
    return closed


def unplaced(params: dict) -> bool:
    """Whether a call has no shardings of its own."""
    placed = [*params.get("in_shardings", ()), *params.get("out_shardings", ())]
    return all(sharding is UNSPECIFIED for sharding in placed)


def outermost() -> bool:
    """Whether no transformation of JAX's is under way."""
    return core.trace_state_clean()


def consts_as_inputs(closed: Any) -> Any:
    """The open jaxpr whose first inputs are the constants."""
    jaxpr = closed.jaxpr
    invars, info = [*jaxpr.constvars, *jaxpr.invars], jaxpr.debug_info
    if info.arg_names is not None and len(info.arg_names) != len(invars):
        info = info._replace(arg_names=("",) * (len(invars) - len(info.arg_names)) + tuple(info.arg_names))
    return Jaxpr((), invars, jaxpr.outvars, jaxpr.eqns, jaxpr.effects, info)


def hoisted(params: dict, closed: Any) -> tuple[dict, list]:
    """(parameters of a jit equation, values) with the jaxpr's constants as its first inputs."""
    count = len(closed.consts)
    first = {"in_shardings": UNSPECIFIED, "in_layouts": None, "donated_invars": False}
    changes = {name: (value,) * count + tuple(params[name]) for name, value in first.items()}
    return {**changes, "jaxpr": ClosedJaxpr(consts_as_inputs(closed), ())}, list(closed.consts)


class CustomJvp:
    """The rule of a custom_jvp equation."""

    def __init__(self, params: dict):
        self._fun, self._consts = params["jvp_jaxpr_fun"], params["num_consts"]

    def jaxpr(self, zeros: list[bool]) -> tuple[Any, list[bool]]:
        """(the jaxpr from primals and moving tangents to outputs and moving slopes, which slopes are zero).

        `zeros` says which tangents are zero; constants that the function closed over come first and never move.
        """
        jaxpr, consts, zeros_out = self._fun.call_wrapped(*zeros[self._consts:])
        return ClosedJaxpr(jaxpr, consts), list(zeros_out)

    @property
    def consts(self) -> int:
        return self._consts


class CustomVjp:
    """The rules of a custom_vjp equation."""

    def __init__(self, params: dict):
        self._params, self.consts = params, params["num_consts"]
        self._types = [v.aval for v in params["call_jaxpr"].jaxpr.invars] if hasattr(
            params["call_jaxpr"], "jaxpr") else [v.aval for v in params["call_jaxpr"].invars]

    def forward(self) -> tuple[Any, int]:
        """(the jaxpr from the inputs to saved residuals and outputs, how many residuals it saves)."""
        jaxpr, consts = self._params["fwd_jaxpr_thunk"].call_wrapped(*[True] * (len(self._types) - self.consts))
        self._saved = ClosedJaxpr(jaxpr, consts)
        _, tree, forwarded = self._params["out_trees"]()
        self._forwarded = forwarded
        return self._saved, tree.num_leaves - sum(i is not None for i in forwarded)

    def backward(self) -> tuple[Any, list[bool]]:
        """(the jaxpr from inputs, saved residuals and cotangents to slopes, which inputs have one); after `forward`.

        Traced at the original types, which the user's rule is held to. A residual that is a Python number in the
        forward jaxpr stays one.
        """
        count = len(self._forwarded) - sum(i is not None for i in self._forwarded)
        saved, outputs = self._saved.jaxpr.outvars[:count], self._saved.jaxpr.outvars[count:]
        live = []

        def run(inputs, residuals, cotangents):
            rest = iter([v.val if isinstance(v, Literal) else x for v, x in zip(saved, residuals)])
            full = [next(rest) if i is None else inputs[i] for i in self._forwarded]
            slopes = self._params["bwd"].call_wrapped(*full, *_cotangents(outputs, cotangents))
            if isinstance(slopes, tuple) and len(slopes) == 2 and isinstance(slopes[0], (list, tuple)):
                slopes = slopes[0]    # jax >= 0.12 logs beside them
            live[:] = [not isinstance(s, ad_util.Zero) for s in slopes]
            return [s for s, moving in zip(slopes, live) if moving]

        closed = jax.make_jaxpr(run)(self._types, [_aval(v) for v in saved],
                                     [v.aval for v in outputs if jnp.issubdtype(v.aval.dtype, jnp.inexact)])
        return closed, [False] * self.consts + live


def custom_vmap_rule(params: dict, size: int, batched: list, types: list) -> tuple[Any, list[bool]]:
    """(the jaxpr of a custom_vmap equation's batching rule for inputs of these types, which outputs are batched)."""
    flags, tree = [], params["in_tree"]

    def rule(*arrays):
        outputs, which = params["rule"](size, list(jax.tree.unflatten(tree, batched)),
                                        *jax.tree.unflatten(tree, arrays))
        flags[:] = jax.tree.leaves(which)
        return jax.tree.leaves(outputs)

    return jax.make_jaxpr(rule)(*types), flags


def _aval(atom):
    return jax.typeof(jnp.asarray(atom.val)) if isinstance(atom, Literal) else atom.aval


def _cotangents(outputs, given):
    """Cotangents of all outputs; those that are no floats have none to speak of."""
    rest = iter(given)
    return [next(rest) if jnp.issubdtype(v.aval.dtype, jnp.inexact) else np.zeros(v.aval.shape, jax.dtypes.float0)
            for v in outputs]


# Kernels of attention that JAX has, below the functions that differentiate them.

def tell_devices(*primitives: Any) -> None:
    """Has JAX tell the lowering rules of these primitives the devices of a program, as it tells its own that XLA cannot
    partition. It then wants to know the devices, and one mesh for the whole program: hence only where they may be
    several GPUs, there or compiled for.
    """
    absent = "jax.experimental.topologies" in sys.modules
    if absent or (xla_bridge.backends_are_initialized() and jax.default_backend() == "gpu"):
        dispatch.prim_requires_devices_during_lowering.update(primitives)


def partitioning(ctx: Any) -> str:
    """How the equation whose lowering rule received `ctx` will run.

    Returns:
        "portable": the program is exported, or lowered for several platforms, and may run on any of them. "whole": on
        one device, or on the shards of a shard_map. "split": XLA partitions it. "unknown": XLA partitions it, over
        devices that are not known yet.
    """
    if ctx.module_context.lowering_parameters.for_export or len(ctx.module_context.platforms) > 1:
        return "portable"
    context = ctx.module_context.axis_context
    if isinstance(context, ShardingContext):
        return "whole" if context.num_devices == 1 else "unknown" if context.device_assignment is None else "split"
    if isinstance(context, SPMDAxisContext):
        return "whole" if set(context.manual_axes) == set(context.mesh.axis_names) else "split"
    return "whole"


def cudnn_version() -> int | None:
    """The version of cuDNN that JAX runs with, 90100 for 9.1.0; None where there is none."""
    return None if cuda_versions is None else cuda_versions.cudnn_get_version()


def cudnn_attention(q, k, v, bias, lengths, *rest, scale, causal, window, residuals=True) -> list:
    """cuDNN's flash attention of 16-bit q [b, t, h, d] and k, v [b, s, g, d].

    Without `rest`: out and, with `residuals`, the logarithm of the sum of exponentials [b, h, t]. With that and out and
    the gradient of out as `rest`: the gradients of q, k and v.
    """
    name = "dot_product_attention_bwd" if rest else "dot_product_attention_fwd"
    kinds = fused.MaskType
    kind = ((kinds.NO_MASK, kinds.CAUSAL), (kinds.PADDING, kinds.PADDING_CAUSAL))[lengths is not None][causal]
    given = {"scale": scale, "seed": 42, "dropout_rate": 0.0, "variadic_args": (bias is not None, False),
             "mask_type": kind, "layout": fused.AttentionLayout.BTNH.value, "sliding_window_length": window,
             "is_training": residuals}
    # What a later version adds is optional and off.
    rule = inspect.signature(getattr(fused, f"_{name}_cuda_lowering")).parameters.values()
    operands = {"ctx", "query", "key", "value", "bias", "q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets",
                "page_table_k", "page_table_v", "activation", "fwd_output", "grad_output"}
    params = {p.name: given.get(p.name) for p in rule if p.name not in operands and p.kind is not p.VAR_POSITIONAL}
    none = jnp.zeros(0, q.dtype)
    queries = none if lengths is None else jnp.full(len(q), q.shape[1], jnp.int32)
    return getattr(fused, f"_{name}_p").bind(q, k, v, none if bias is None else bias, queries,
                                             none if lengths is None else lengths, none, none, none, none, *rest,
                                             **params)


def splash_attention(q, k, v, lengths, *rest, causal, window, block, residuals=True, interpret=False) -> Any:
    """The Pallas kernels of splash attention on TPUs for one row of a batch: q [h, t, d], k, v [g, s, d], unscaled.

    Without `rest`: out and, with `residuals`, the logarithm of the sum of exponentials [h, t]. With those and the
    gradient of out as `rest`: the gradients of q, k and v.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as splash  # loads Pallas, which only TPUs need
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels

    shape = q.shape[1], k.shape[1]
    mask = (splash.LocalMask(shape, (window - 1, 0 if causal else window - 1), 0) if window is not None
            else splash.CausalMask(shape) if causal else splash.FullMask(shape))
    sizes = kernels.BlockSizes(block_q=block, block_kv=block, block_q_dkv=block, block_kv_dkv=block,
                               block_q_dq=block, block_kv_dq=block)
    kernel = splash.make_splash_mha(splash.MultiHeadMask([mask] * len(q)), block_sizes=sizes, head_shards=1,
                                    q_seq_shards=1, save_residuals=residuals and not rest, interpret=interpret)
    ids = None
    if lengths is not None:
        keys = jnp.arange(k.shape[1], dtype=jnp.int32) < lengths
        ids = splash.SegmentIds(jnp.ones(q.shape[1], jnp.int32), keys.astype(jnp.int32))
    with _check_vma(False):    # the kernels do not say what their results vary over, in a lowering rule nobody asks
        return _splash(kernels, kernel, q, k, v, ids, *rest)


def _splash(kernels, kernel, q, k, v, ids, *rest):
    if not rest:
        results = kernel(q, k, v, ids)
        return (results[0], *results[1]) if kernel.kwargs["save_residuals"] else (results,)
    out, logsumexp, gradient = rest
    how = dict(kernel.kwargs)
    args = [how[name] for name in inspect.signature(kernels._splash_attention_bwd).parameters if name in how]
    kept = q, k, v, ids, None, out, logsumexp, kernel.dq_mask_info, kernel.dkv_mask_info
    return tuple(kernels._splash_attention_bwd(*args, kept, gradient)[3:6])
