"""Selects the dtypes of a computation for a chip, and states the reason."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fnet.hardware import _probe
from fnet.hardware._chip import Chip
from fnet.hardware._detect import detect

LOSS_SCALE = 2.0**15  # with 2^16, a float16 loss above 1 overflows


@dataclasses.dataclass(frozen=True)
class Policy:
    """The dtypes of a mixed-precision computation, and why.

    Attributes:
        param: the dtype in which the parameters are stored.
        compute: the dtype of the operands of matrix products, and of convolutions unless
            `convolution` is given.
        accum: the dtype in which matrix products and convolutions accumulate, and in which
            reductions, norms and softmax are computed.
        output: the dtype of the function's floating-point outputs.
        loss_scale: the initial dynamic loss scale, or None if gradients fit the range of `compute`.
        rules: pairs (pattern of a scope path, dtype) that override `compute`. The first pattern
            that matches decides.
        reason: why these dtypes.
        convolution: the dtype of the operands of convolutions. Default: `compute`.
        activations: the dtype in which GPUs and TPUs store large activations: in the forward pass,
            results of matrix products with at least 2^22 elements that only float32 operations
            read, such as the logits of a large vocabulary. If autocast is applied to the gradient
            function, the gradients of these, too. Weight gradients are not rounded. Default:
            `compute`, as in PyTorch's autocast; `activations="float32"` rounds no activations.
        residual: the dtype of the residual stream of a transformer, meaning sums in the forward
            pass in which one of the two arrays is the result of a matrix product, possibly scaled
            or with a bias. The default "float32" leaves the stream alone. If it equals `compute`,
            for example bfloat16, the stream is computed and stored in it, as in a model whose
            activations all have this dtype. A 16-bit stream needs less memory traffic, but it and
            its gradient are rounded in each layer.

    >>> policy = hw.policy("Tesla T4")
    >>> str(policy.compute), bool(policy.loss_scale)
    ('float16', True)
    """

    param: Any = "float32"
    compute: Any = "float32"
    accum: Any = "float32"
    output: Any = "float32"
    loss_scale: float | None = None
    rules: tuple[tuple[str, Any], ...] = ()
    reason: str = ""
    convolution: Any = None
    activations: Any = None
    residual: Any = "float32"

    def __post_init__(self) -> None:
        for name in ("convolution", "activations"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, self.compute)
        dtypes = ("param", "compute", "accum", "output", "convolution", "activations", "residual")
        for name in dtypes:
            object.__setattr__(self, name, jnp.dtype(getattr(self, name)))
        rules = tuple((pattern, jnp.dtype(dtype)) for pattern, dtype in self.rules)
        object.__setattr__(self, "rules", rules)

    def __str__(self) -> str:
        compute = f"compute {self.compute}"
        if self.convolution != self.compute:
            compute += f" (convolutions {self.convolution})"
        if self.residual != jnp.float32:
            compute += f", residual stream {self.residual}"
        scaling = "no loss scaling"
        if self.loss_scale:
            scaling = f"dynamic loss scaling from {self.loss_scale:g}"
        return (
            f"parameters {self.param}, {compute}, sums {self.accum}, output {self.output}, "
            f"{scaling}: {self.reason}"
        )


class _Family(NamedTuple):
    """The dtypes of a chip family in order of preference. The first dtype is the default of the
    chip family. A policy for chips of several families uses a dtype that all these families have in
    common."""

    name: str
    train: tuple[str, ...]
    why: str
    inference: tuple[str, ...] | None = None
    why_inference: str | None = None


_BF16 = ("bfloat16", "float16", "float32")
_FP8 = "fp8 is available but never the default: it needs scales or calibration"
_MXU = "its matrix units multiply bfloat16 and accumulate in float32; it has no float16"
_FAMILIES = {
    "old": _Family(
        "Kepler and Maxwell", ("float32",), "it has no tensor cores and no float16 arithmetic"
    ),
    "pascal": _Family(
        "Pascal",
        ("float32",),
        "it has no tensor cores, and float16 arithmetic gains nothing for "
        "training (1/64 of the rate on 6.1; twice the rate on 6.0, but sums in float16)",
    ),
    "volta": _Family(
        "Volta",
        ("float16", "float32"),
        "its tensor cores support float16 only, bfloat16 is emulated; "
        "float16's narrow range needs dynamic loss scaling",
        why_inference="its tensor cores support float16 only, bfloat16 is emulated",
    ),
    "turing": _Family(
        "Turing",
        ("float16", "float32"),
        "its tensor cores support float16 and int8; "
        "bfloat16 is emulated; float16's narrow range needs dynamic loss scaling",
        why_inference="its tensor cores support float16 and int8; bfloat16 is emulated, int8 is not a "
        "default",
    ),
    "ampere": _Family(
        "Ampere", _BF16, "its tensor cores support bfloat16 with float32's range: no loss scaling"
    ),
    "ada": _Family(
        "Ada",
        _BF16,
        f"its tensor cores support bfloat16 with float32's range: no loss scaling; {_FP8}",
    ),
    "hopper": _Family(
        "Hopper",
        _BF16,
        f"its tensor cores support bfloat16 with float32's range: no loss scaling; {_FP8}",
    ),
    "blackwell": _Family(
        "Blackwell",
        _BF16,
        "its tensor cores support bfloat16 with float32's range: no loss "
        "scaling; MXFP8 and FP4 are available but never the default",
    ),
    "mi100": _Family(
        "MI100, gfx908",
        _BF16,
        "its matrix cores run bfloat16 at half the rate of float16, but at twice "
        "that of float32, and its range is not narrow",
    ),
    "mi200": _Family(
        "MI200, gfx90a",
        _BF16,
        "its matrix cores run bfloat16 and float16 at one rate but flush 16-bit "
        "subnormals, which affects float16 most",
    ),
    "mi300": _Family(
        "MI300, gfx942",
        _BF16,
        "its matrix cores support bfloat16: no loss scaling; fp8 (FNUZ) is never the default",
    ),
    "mi350": _Family(
        "MI350, gfx950",
        _BF16,
        "its matrix cores support bfloat16: no loss scaling; fp8 (OCP) is never the default",
    ),
    "rdna3": _Family(
        "RDNA3, gfx11",
        ("float16", "float32"),
        "bfloat16 was reported to run at float32's speed (jax "
        "issue 21074); float16 runs on WMMA and needs dynamic loss scaling",
        why_inference="bfloat16 was reported to run at float32's speed (jax issue 21074); float16 runs on "
        "WMMA",
    ),
    "tpu": _Family("TPU", ("bfloat16", "float32"), _MXU),
    "tpu_int8": _Family(
        "TPU", ("bfloat16", "float32"), f"{_MXU}; int8 runs at twice the rate, never the default"
    ),
    "tpu_v6e": _Family(
        "TPU",
        ("bfloat16", "float32"),
        f"{_MXU}; fp8 runs at bfloat16's rate, int8 at twice the rate, neither by default",
    ),
    "tpu_fp8": _Family(
        "TPU", ("bfloat16", "float32"), f"{_MXU} and no int8 rate is listed; {_FP8}"
    ),
    "cpu": _Family(
        "CPU",
        ("float32",),
        "float32 is the safe choice on a CPU; whether bfloat16 is faster here was not measured",
    ),
    "cpu_amx": _Family(
        "CPU with AMX",
        ("float32",),
        "AMX multiplies bfloat16 several times faster than float32, but whether training gains was "
        "not measured here",
        ("bfloat16", "float32"),
        "AMX multiplies bfloat16 about four times faster than float32 (xla issue 10556); not "
        "measured here",
    ),
    "unknown": _Family(
        "unknown", ("float32",), "it is not known what it accelerates, and float32 runs everywhere"
    ),
}
_FROM_NAME = (  # (pattern of a chip's name, family), for chips whose architecture is unknown
    (r"GTX 10\d\d|\bP100|\bP40\b|\bP4\b|TITAN X", "pascal"),
    (r"V100|TITAN V|GV100", "volta"),
    (r"RTX 20\d\d|GTX 16\d\d|TITAN RTX|\bT4\b|Quadro RTX", "turing"),
    (r"RTX 30\d\d|RTX A\d000|\bA(2|10|10G|16|30|40|100|800)\b", "ampere"),
    (r"RTX 40\d\d|\bL(4|20|40|40S)\b|RTX \d000 Ada", "ada"),
    (r"\bG?H(20|100|200|800)\b", "hopper"),
    (r"RTX 50\d\d|\bG?B(100|200|300)\b|RTX PRO .*Blackwell", "blackwell"),
    (r"MI100\b", "mi100"),
    (r"MI2\d\dX?\b", "mi200"),
    (r"MI3[02]\d[AX]?\b", "mi300"),
    (r"MI35\dX?\b", "mi350"),
    (r"RX 7\d\d\d", "rdna3"),
)


def policy(chip: Any = None, mode: str = "train", *, probe: bool | None = None) -> Policy:
    """Selects the dtypes for fast and numerically safe training or inference, and says why.

        fast = ft.autocast(step, hw.policy())      # for the chip of the first JAX device
        print(hw.policy("Tesla T4").reason)

    The dtypes come from a table of chips, except on the CPU of this process: there a probe times
    bfloat16 against float32 in the operations that `transforms.autocast` uses. It takes about one
    second, and its result is stored on the machine (docs/precision.md). Dtypes of fewer than 16
    bits are never selected: fp8, int8 and fp4 need scales or calibration.

    Args:
        chip: a `Chip`, a `jax.Device`, a device kind ("NVIDIA H100 80GB HBM3", "TPU v5 lite"), or a
            sequence of these, for a dtype that all of them accelerate. None (the default) and
            "auto" mean the chip that `detect` finds; "float32", "bfloat16" and "float16" mean this
            dtype on any chip.
        mode: "train" (the default) or "inference", with parameters in the compute dtype.
        probe: whether the CPU may be timed. Default None: yes, unless the environment variable
            FNET_PROBE is 0. It happens only if the CPU is JAX's default backend and there is only
            one process, and not while JAX traces a function.

    Returns:
        A `Policy`. Its `reason` says whether the dtypes are from the table or from a measurement.

    Raises:
        ValueError: an unknown mode, or an empty sequence of chips.

    >>> from fnet import hardware as hw
    >>> hw.policy("TPU v3").reason
    'TPU v3: its matrix units multiply bfloat16 and accumulate in float32; it has no float16'
    """
    if mode not in ("train", "inference"):
        raise ValueError(f"mode: expected 'train' or 'inference', got {mode!r}")
    if isinstance(chip, str) and chip in ("float32", "bfloat16", "float16"):
        return _make(chip, mode, "it was requested")

    given = list(chip) if isinstance(chip, Sequence) and not isinstance(chip, str) else [chip]
    if not given:
        raise ValueError(
            "policy: expected at least one chip, got an empty sequence; pass None to detect the "
            "chip"
        )
    given = [None if each == "auto" else each for each in given]
    chips = _distinct(map(detect, given))
    if len(chips) > 1:
        return _shared(chips, mode)

    (only,) = chips
    if probe is None:
        probe = os.environ.get("FNET_PROBE") != "0"
    if probe and only.kind == "cpu" and all(map(_here, given)):
        return _probed(only, mode)
    (best, *_), why = _options(only, mode)
    return _make(best, mode, f"{_label(only)}: {why}")


def _distinct(chips: Iterable[Chip]) -> list[Chip]:
    return list({(chip.name, chip.architecture): chip for chip in chips}.values())


def _shared(chips: list[Chip], mode: str) -> Policy:
    """Returns the policy with the best dtype that all chips accelerate."""
    preferences = [_options(chip, mode)[0] for chip in chips]
    # Every chip has float32 in its list, so there is always one.
    best = next(
        dtype
        for dtype in ("bfloat16", "float16", "float32")
        if all(dtype in dtypes for dtypes in preferences)
    )
    each = "; ".join(
        f"{_label(chip)} prefers {dtypes[0]}" for chip, dtypes in zip(chips, preferences)
    )
    return _make(best, mode, f"{best} is the best dtype that all of these chips support ({each})")


def _here(given: Any) -> bool:
    """Whether `given` (None, a chip, a device or a string) is the CPU of this process. The result
    is False for every string, even for the name of this CPU."""
    if given is None:
        return True
    if isinstance(given, Chip):  # only the result of `detect` contains the flags of this CPU
        return given == detect(jax.local_devices(backend="cpu")[0])
    return isinstance(given, jax.Device) and given in jax.local_devices(backend="cpu")


def _probed(chip: Chip, mode: str) -> Policy:
    """Returns the policy that the probe measured, or the table's if the probe cannot run."""
    why_not = _probe.unfit()
    measured = _probe.probe(mode) if why_not is None else None
    if measured is None:
        if why_not is None:
            why_not = "not measured, because JAX is tracing a function; call policy before"
        (compute, *_), why = _options(chip, mode)
        return _make(compute, mode, f"{_label(chip)}: {why} ({why_not})")
    compute, convolution, why = _probe.verdict(measured, mode)
    policy = _make(compute, mode, f"{_label(chip)}: {why}")
    return dataclasses.replace(policy, convolution=convolution)


def _options(chip: Chip, mode: str) -> tuple[tuple[str, ...], str]:
    """Returns the dtypes for a chip in order of preference, and the reason for the first."""
    family = _FAMILIES[_family(chip)]
    if mode == "train":
        types, why = family.train, family.why
    else:
        types, why = family.inference or family.train, family.why_inference or family.why
    if not chip.known and _family(chip) not in ("unknown", "cpu"):
        kin = "a TPU" if chip.kind == "tpu" else f"of the {family.name} family"
        why = f"not in the catalog, but {kin}: {why}"
    return types, why


def _make(compute: str, mode: str, reason: str) -> Policy:
    return Policy(
        param="float32" if mode == "train" else compute,
        compute=compute,
        loss_scale=LOSS_SCALE if compute == "float16" and mode == "train" else None,
        reason=reason,
    )


def _label(chip: Chip) -> str:
    family = _FAMILIES[_family(chip)].name
    if family in ("TPU", "CPU", "unknown") or family.lower() in chip.name.lower():
        return chip.name
    return f"{chip.name} ({family})"


def _family(chip: Chip) -> str:
    """Returns the key of the chip's family in `_FAMILIES`."""
    architecture = chip.architecture or ""
    if chip.kind == "tpu":
        return _tpu_family(chip.name)
    if chip.kind == "cpu":
        has_amx = "amx_bf16" in chip.units.get("flags", ()) or architecture == "amx"
        return "cpu_amx" if has_amx else "cpu"
    if architecture.startswith("gfx"):
        return _amd_family(architecture)
    if re.fullmatch(r"\d+\.\d+", architecture) and chip.vendor in ("NVIDIA", "unknown"):
        major, minor = map(int, architecture.split("."))
        return _nvidia_family(major, minor)
    for pattern, family in _FROM_NAME:
        if re.search(pattern, chip.name, re.IGNORECASE):
            return family
    return "unknown"


def _tpu_family(name: str) -> str:
    if "v6" in name:
        return "tpu_v6e"
    if "v5" in name:
        return "tpu_int8"
    if re.search(r"TPU ?v?7|TPU ?v?8", name):
        return "tpu_fp8"
    return "tpu"


def _amd_family(architecture: str) -> str:
    instinct = {"gfx908": "mi100", "gfx90a": "mi200", "gfx942": "mi300", "gfx950": "mi350"}
    if architecture in instinct:
        return instinct[architecture]
    return "rdna3" if architecture.startswith("gfx11") else "unknown"


def _nvidia_family(major: int, minor: int) -> str:
    """Returns the family of a compute capability such as (8, 9)."""
    if major < 6:
        return "old"
    if major == 7:
        return "turing" if minor >= 5 else "volta"
    if major == 8:
        return "ada" if minor == 9 else "ampere"
    return {6: "pascal", 9: "hopper"}.get(major, "blackwell")
