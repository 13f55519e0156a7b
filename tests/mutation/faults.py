"""Faults that a programmer might introduce, in every package: one changed expression each."""

from typing import NamedTuple


class Fault(NamedTuple):
    """`before` occurs exactly once in the modules of the package and
    becomes `after`."""

    package: str
    before: str
    after: str
    what: str


FAULTS = (
    Fault(
        "_jax",
        '"donated_invars": False}',
        '"donated_invars": True}',
        "constants of a jit are donated",
    ),
    Fault(
        "_jax",
        "names = outer + eqn.source_info.name_stack",
        "names = eqn.source_info.name_stack",
        "the outer scopes of a rewritten equation are lost",
    ),
    Fault(
        "_jax",
        "splash.SegmentIds(*ids)",
        "splash.SegmentIds(*ids[::-1])",
        "padded keys are attended to (TPU)",
    ),
    Fault(
        "jaxpr",
        'Cost("matmul", 2 * rows * k * columns,',
        'Cost("matmul", rows * k * columns,',
        "a multiplication and an addition count as one FLOP",
    ),
    Fault(
        "axes",
        "(*(lhs[i] for i in batch[0]), *own_left, *own_right)",
        "(*(lhs[i] for i in batch[0]), *own_right, *own_left)",
        "the axes of a product's operands change places in its result",
    ),
    Fault(
        "transforms",
        "axis, size) for body in inside]\n        return [inputs[0] or any(branch)",
        "axis, size) for body in inside]\n        return [any(branch)",
        "a branch chosen by values that differ is called replicated",
    ),
    Fault(
        "jaxpr",
        "if outer.transposes or differentiated:",
        "if differentiated:",
        "an equation inside a transposed scope is called forward",
    ),
    Fault(
        "transforms",
        "jnp.where(index == i, x, old)",
        "jnp.where(index >= i, x, old)",
        "a later iteration of a scan is captured",
    ),
    Fault(
        "jaxpr", "setattr(module, name, value)", "pass", "attributes of nnx modules are not copied"
    ),
    Fault(
        "layers",
        "jnp.where(keep, x / scale, jnp.zeros_like(x))",
        "jnp.where(keep, x, jnp.zeros_like(x))",
        "dropout does not rescale",
    ),
    Fault(
        "layers",
        "low, high = total // 2, total - total // 2",
        "low, high = total - total // 2, total // 2",
        "SAME pads a transposed convolution on the wrong side",
    ),
    Fault(
        "layers",
        "max(0, start - form.window + 1)",
        "max(0, start - form.window + 2)",
        "a block of local attention misses one key",
    ),
    Fault(
        "layers",
        '("index", index + new)',
        '("index", index)',
        "the position in the attention cache stays",
    ),
    Fault(
        "layers",
        "valid = (labels >= 0) & (labels < kernel.shape[1])",
        "valid = labels < kernel.shape[1]",
        "negative labels are not ignored by the cross entropy",
    ),
    Fault(
        "layers",
        "x = jnp.where(weight == 0, jnp.zeros_like(x), x)",
        "x = x * 1",
        "NaN of a row without weight enters batch statistics",
    ),
    Fault(
        "layers",
        "dtype = jnp.float32 if jnp.finfo(x.dtype).bits < 32 else x.dtype",
        "dtype = x.dtype",
        "recurrent layers accumulate in bfloat16",
    ),
    Fault(
        "cost",
        "recomputed = flops if op.recomputed else 0",
        "recomputed = flops",
        "all products count as recomputed",
    ),
    Fault(
        "hardware",
        "peaks=FrozenTable({dtype: peak * share for dtype, peak in whole.peaks.items()})",
        "peaks=whole.peaks",
        "a MIG slice has the peak rates of the whole GPU",
    ),
    Fault(
        "cost",
        "wasted, times = matmul.flops * (1 / fill - 1), matmul.times",
        "wasted, times = matmul.flops * (1 - fill), matmul.times",
        "the waste of partly filled tiles is too small",
    ),
    Fault(
        "hardware",
        'param="float32" if mode == "train" else compute',
        "param=compute",
        "training stores parameters in 16 bits",
    ),
    Fault(
        "cost",
        "work / (vector * share)",
        "work / vector",
        "elementwise work runs at the peak of all chips",
    ),
    Fault(
        "transforms",
        "grown = jnp.where(good >= interval,",
        "grown = jnp.where(good > interval,",
        "the loss scale grows one step late",
    ),
    Fault(
        "transforms",
        "jnp.where(live, weights.of(i, inputs, gate), 0)",
        "weights.of(i, inputs, gate)",
        "NaN in the weight of a slice without rows reaches the result",
    ),
    Fault(
        "transforms",
        "stays = first >= tile",
        "stays = first > tile",
        "ties in a pooling send the gradient to the last element",
    ),
    Fault(
        "transforms",
        "all(f == [len(c)] and not b",
        "all(len(f) == 1 and not b",
        "a product with several contracted axes is transposed",
    ),
    Fault(
        "transforms",
        "inside >= size / 2 and (cheapest is None",
        "inside >= size and (cheapest is None",
        "rematerialization cuts only after whole pieces",
    ),
    Fault(
        "transforms",
        "return _shifted(*primals), tangents[0] + tangents[1]",
        "return _shifted(*primals), tangents[0]",
        "captured cotangents are zero",
    ),
    Fault(
        "transforms",
        "lax.squeeze(x, (axis,))",
        "lax.squeeze(x, (0,))",
        "pmap removes the wrong axis",
    ),
    Fault(
        "transforms",
        'return "follow" if self.policy.compute != np.float16 else "float32"',
        'return "follow"',
        "powers run in float16, where they overflow",
    ),
    Fault(
        "introspect",
        "int(x.size - finite.size)",
        "int(finite.size)",
        "finite values count as not finite",
    ),
    Fault(
        "introspect",
        'return not path or other == path or other.startswith(path + "/")',
        "return other.startswith(path)",
        "a row of the summary includes scopes with the same prefix",
    ),
    Fault(
        "introspect",
        "changed = (x + h * direction)",
        "changed = (x + 2 * h * direction)",
        "finite differences use twice the step",
    ),
    Fault(
        "models",
        "turns = self.original_context * rates.astype(np.float64) / (2 * math.pi)",
        "turns = self.original_context * rates.astype(np.float64) / math.pi",
        "YaRN counts twice the rotations",
    ),
    Fault(
        "models",
        "stride=2 if s > 1 and b == 0 else 1",
        "stride=2 if s > 1 and b == 1 else 1",
        "a ResNet downsamples in its second block",
    ),
    Fault(
        "models",
        "left, top = (round((side - self.size) / 2) for side in (wide, high))",
        "left, top = (side - self.size for side in (wide, high))",
        "images are cropped at the corner",
    ),
    Fault(
        "models",
        "return jnp.where(keys >= least,",
        "return jnp.where(keys > least,",
        "sampling drops the last of the top k tokens",
    ),
    Fault(
        "models",
        "if isinstance(want, bool) or isinstance(have, bool):",
        "if isinstance(want, bool):",
        "config.json may say true where a number is expected",
    ),
    Fault(
        "parallel",
        'return found[1].count(",") + 1',
        'return found[1].count(",")',
        "the ledger counts one device too few in a group",
    ),
    Fault(
        "parallel",
        "shape[i] % chips == 0 and shape[i] and i not in taken",
        "shape[i] % chips == 0 and shape[i]",
        "FSDP splits an axis that a rule has split",
    ),
    Fault(
        "parallel",
        "np.concatenate([x, np.zeros(share - len(x), x.dtype)])",
        "np.concatenate([x, np.ones(share - len(x), x.dtype)])",
        "padded rows have weight",
    ),
    Fault(
        "parallel",
        "state + max(most, 2 * self.gathered),",
        "state + most,",
        "the estimate of ZeRO-1 lacks gathered parameters",
    ),
    Fault(
        "parallel",
        "self.channel.leave(why)",
        "pass",
        "a process without batches does not tell the others",
    ),
    Fault(
        "training",
        "self._permutation(epoch)[offset : offset + missing]",
        "self._permutation(epoch)[:missing]",
        "each batch of an epoch is the first one",
    ),
    Fault(
        "training",
        "(math.isnan(best) or gain > min_delta)",
        "(math.isnan(best) or gain >= min_delta)",
        "early stopping takes an equal value for an improvement",
    ),
    Fault(
        "training",
        "move = 1 - jnp.minimum(self.decay, (1 + t) / (10 + t))",
        "move = 1 - self.decay",
        "the average of parameters has no warmup",
    ),
    Fault(
        "training",
        "generator.integers(0, len(self.tokens) - self.length, self.batch_size)",
        "generator.integers(0, len(self.tokens) - self.length + 1, self.batch_size)",
        "the last window of tokens has no target",
    ),
    Fault(
        "training",
        "return not np.isfinite(np.asarray(leaf.addressable_data(0)).astype(np.complex128)).all()",
        "return not np.isfinite(np.asarray(leaf.addressable_data(0)).astype(np.complex128)).any()",
        "one NaN among numbers is not seen",
    ),
    Fault(
        "training",
        "(rows < length).astype(np.float32)",
        "(rows <= length).astype(np.float32)",
        "an evaluation counts one row of padding",
    ),
    Fault(
        "training",
        'if own != piece["crc32"]:',
        "if own != own:",
        "the checksum of a leaf is not compared",
    ),
    Fault(
        "training",
        "optax.linear_schedule(peak, final * peak, rest)",
        "optax.linear_schedule(peak, final, rest)",
        "the final learning rate is absolute",
    ),
    Fault(
        "training",
        "os._exit(128 + number)",
        "os._exit(number)",
        "a second signal ends with another exit status",
    ),
    Fault(
        "training",
        "if alive or (alive is None and meta.version != first):",
        "if alive:",
        "a lock that another machine renews is taken over",
    ),
    Fault(
        "training",
        "(position + count) // len(order) > position // len(order)",
        "(position + count) // len(order) >= position // len(order)",
        "a stratified split puts all rows in one part",
    ),
    Fault(
        "cli",
        "if not where or not function:",
        "if not where:",
        "fnet plan accepts a module without a function",
    ),
)
