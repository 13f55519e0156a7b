"""The policy table: every family's types and reasons, from strings alone."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import pytest

from fnet import hardware as hw

# chip, compute in training, loss scale, compute in inference, a word of the reason
TABLE = [
    ("cpu", "float32", False, "float32", "was not measured"),
    ("Intel Core i7-7700K", "float32", False, "float32", "was not measured"),
    ("Intel Xeon Platinum 8480+ (Sapphire Rapids)", "float32", False, "bfloat16", "AMX"),
    ("NVIDIA GeForce GTX 1080 Ti", "float32", False, "float32", "Pascal"),
    ("Tesla P100-PCIE-16GB", "float32", False, "float32", "Pascal"),
    ("Tesla V100-SXM2-16GB", "float16", True, "float16", "Volta"),
    ("Tesla T4", "float16", True, "float16", "Turing"),
    ("NVIDIA TITAN RTX", "float16", True, "float16", "bfloat16 is emulated"),
    ("NVIDIA A100-SXM4-80GB", "bfloat16", False, "bfloat16", "Ampere"),
    ("NVIDIA GeForce RTX 3090", "bfloat16", False, "bfloat16", "Ampere"),
    ("NVIDIA L4", "bfloat16", False, "bfloat16", "Ada"),
    (
        "NVIDIA H100 80GB HBM3",
        "bfloat16",
        False,
        "bfloat16",
        "no loss scaling; fp8 is available but never the default",
    ),
    ("NVIDIA B200", "bfloat16", False, "bfloat16", "Blackwell"),
    ("NVIDIA GeForce RTX 5090", "bfloat16", False, "bfloat16", "MXFP8"),
    ("AMD Instinct MI100", "bfloat16", False, "bfloat16", "gfx908"),
    ("AMD Instinct MI250X", "bfloat16", False, "bfloat16", "subnormals"),
    ("AMD Instinct MI300X", "bfloat16", False, "bfloat16", "FNUZ"),
    ("AMD Instinct MI355X", "bfloat16", False, "bfloat16", "OCP"),
    ("AMD Radeon RX 7900 XTX", "float16", True, "float16", "RDNA3"),
    ("TPU v2", "bfloat16", False, "bfloat16", "no float16"),
    ("TPU v4", "bfloat16", False, "bfloat16", "no float16"),
    (
        "TPU v5 lite",
        "bfloat16",
        False,
        "bfloat16",
        "int8 runs at twice the rate, never the default",
    ),
    ("TPU v6 lite", "bfloat16", False, "bfloat16", "fp8 runs at bfloat16's rate"),
    ("TPU7x", "bfloat16", False, "bfloat16", "no int8 rate"),
]


@pytest.mark.parametrize(
    ("kind", "train", "scaled", "inference", "word"), TABLE, ids=[row[0] for row in TABLE]
)
def test_the_table(kind, train, scaled, inference, word):
    policy = hw.policy(kind)
    assert policy.compute == train and policy.param == policy.accum == policy.output == jnp.float32
    assert policy.loss_scale == (2.0**15 if scaled else None)
    assert word in policy.reason and policy.rules == ()
    served = hw.policy(kind, "inference")
    assert (
        served.compute == served.param == inference
        and served.loss_scale is None
        and served.output == jnp.float32
    )


def test_nothing_narrower_than_16_bits_for_any_chip():
    for chip in hw.chips.values():
        for mode in ("train", "inference"):
            assert hw.policy(chip, mode).compute in (jnp.float32, jnp.bfloat16, jnp.float16)


@pytest.mark.parametrize(
    ("kind", "compute"),
    [
        ("NVIDIA GeForce GTX 1060 6GB", "float32"),
        ("Quadro RTX 5000", "float16"),
        ("NVIDIA RTX A6000", "bfloat16"),
        ("NVIDIA GeForce RTX 4080", "bfloat16"),
        ("NVIDIA H800", "bfloat16"),
        ("NVIDIA B300", "bfloat16"),
        ("TPU v9", "bfloat16"),
    ],
)
def test_a_chip_that_only_its_name_gives_away(kind, compute):
    policy = hw.policy(kind)
    assert policy.compute == compute and "not in the catalog, but" in policy.reason


def test_an_unknown_chip_computes_in_float32():
    policy = hw.policy("Strange Thing 3000")
    assert policy.compute == jnp.float32
    assert policy.reason == (
        "Strange Thing 3000: it is not known what it accelerates, and float32 runs everywhere"
    )


def test_the_compute_capability_decides_where_the_name_is_new():
    new = types.SimpleNamespace(platform="gpu", device_kind="NVIDIA Z1", compute_capability="7.0")
    assert hw.policy(new).compute == jnp.float16
    assert (
        hw.policy(types.SimpleNamespace(**{**vars(new), "compute_capability": "12.1"})).compute
        == jnp.bfloat16
    )
    assert (
        hw.policy(types.SimpleNamespace(**{**vars(new), "compute_capability": "5.2"})).compute
        == jnp.float32
    )
    assert (
        hw.policy("K80").reason
        == "K80 (Kepler and Maxwell): it has no tensor cores and no float16 arithmetic"
    )


def test_several_chips_share_what_all_run_well():
    assert hw.policy(["TPU v3", "TPU v4"]).compute == jnp.bfloat16
    mixed = hw.policy(["NVIDIA A100-SXM4-40GB", "Tesla T4"])
    assert mixed.compute == jnp.float16 and mixed.loss_scale == 2.0**15
    assert "A100 SXM4 40GB (Ampere) prefers bfloat16; T4 (Turing) prefers float16" in mixed.reason
    assert hw.policy(["TPU v3", "Tesla T4"]).compute == jnp.float32
    assert hw.policy(jax.local_devices()).compute == jnp.float32
    assert hw.policy([hw.chips["TPU v3"]]) == hw.policy("TPU v3")


def test_this_machine_says_that_nothing_was_measured():
    assert "not measured" in hw.policy().reason


def test_errors():
    with pytest.raises(ValueError, match="mode: expected 'train' or 'inference', got 'training'"):
        hw.policy("cpu", "training")
    with pytest.raises(
        ValueError, match="policy: expected at least one chip, got an empty sequence"
    ):
        hw.policy([])


def test_a_policy_is_a_value():
    policy = hw.policy("Tesla T4")
    assert hash(policy) == hash(hw.policy("Tesla T4"))
    ruled = dataclasses.replace(policy, rules=((".*/head", "float32"),))
    assert ruled.rules == ((".*/head", jnp.dtype("float32")),)
    assert str(policy).startswith(
        "parameters float32, compute float16, sums float32, output float32, dynamic loss "
        "scaling from 32768: T4 (Turing): "
    )


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_a_type_is_what_the_caller_decided(name):
    policy = hw.policy(name)
    assert (
        policy.compute == name
        and policy.param == jnp.float32
        and policy.reason == "it was requested"
    )
    assert policy.loss_scale == (2.0**15 if name == "float16" else None)
    assert (
        hw.policy(name, "inference").param == name
        and hw.policy(name, "inference").loss_scale is None
    )
