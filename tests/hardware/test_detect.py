"""Which chip a device is: strings, devices that pretend, and CPUs described by files."""

import types

import jax
import pytest

from fnet import hardware as hw
from fnet.hardware._cpu import read_cpu
from fnet.hardware._detect import cpu_chip


def device(kind, platform="gpu", **attributes):
    return types.SimpleNamespace(device_kind=kind, platform=platform, **attributes)


def test_this_machine():
    chip = hw.detect()
    assert chip.kind == "cpu" and chip.jax_devices_per_chip == len(jax.local_devices())
    assert chip.memory_bytes is None or chip.memory_bytes > 2**28
    assert hw.detect(chip) is chip


def test_a_gpu():
    chip = hw.detect(device("NVIDIA H100 80GB HBM3", compute_capability="9.0", core_count=132))
    assert chip.name == "H100 SXM5 80GB" and chip.known and chip.basis("bf16") == "published"


def test_a_mig_slice_has_its_visible_multiprocessors():
    chip = hw.detect(
        device("NVIDIA H100 80GB HBM3 MIG 1g.20gb", compute_capability="9.0", core_count=26)
    )
    assert chip.name == "H100 SXM5 80GB MIG 1g.20gb" and chip.peaks["bf16"] == pytest.approx(
        989.4e12 * 26 / 132
    )
    assert chip.memory_bytes == 20 * 2**30 and chip.basis("bf16") == "estimated"


def test_a_partition_of_an_amd_chip():
    kind = "AMD Instinct MI300X"
    assert (
        hw.detect(device(kind, compute_capability="gfx942:sramecc+:xnack-", core_count=304)).name
        == "MI300X"
    )
    part = hw.detect(device(kind, compute_capability="gfx942", core_count=38))
    assert part.name == "MI300X, 38 of 304 compute units" and part.peaks["bf16"] == pytest.approx(
        1307.4e12 / 8
    )
    assert part.memory_bytes == 24 * 2**30 and "A partition" in part.notes
    whole = hw.detect(device("AMD Instinct MI250X", compute_capability="gfx90a", core_count=110))
    assert whole.name == "MI250X" and whole.jax_devices_per_chip == 2
    radeon = hw.detect(
        device("AMD Radeon RX 7900 XTX", compute_capability="gfx1100", core_count=48)
    )
    assert radeon.peaks["fp32"] == 61.4e12  # RDNA counts pairs of compute units


def test_tpu_devices_per_chip_come_from_the_device():
    assert hw.detect(device("TPU v4", "tpu", num_cores=2)).jax_devices_per_chip == 1
    assert hw.detect(device("TPU v4", "tpu", num_cores=1)).jax_devices_per_chip == 2
    assert hw.detect(device("TPU v3", "tpu", num_cores=1)).jax_devices_per_chip == 2
    assert hw.detect(device("TPU7x", "tpu", num_cores=1)).per_device.peaks["bf16"] == 1153.5e12


@pytest.mark.parametrize(
    ("kind", "platform", "expected"),
    [
        ("NVIDIA H20", "gpu", ("gpu", "NVIDIA")),
        ("TPU v12", "tpu", ("tpu", "Google")),
        ("AMD Instinct MI999", "gpu", ("gpu", "AMD")),
        ("Strange Thing", "npu", ("npu", "unknown")),
    ],
)
def test_an_unknown_chip_is_said_to_be_unknown(kind, platform, expected):
    chip = hw.detect(device(kind, platform))
    assert (
        not chip.known and not chip.peaks and chip.memory_bytes is None and chip.bandwidth is None
    )
    assert (chip.kind, chip.vendor) == expected and chip.name == kind
    assert f"the catalog has no chip '{kind}'" in chip.notes
    assert "not in the catalog: no peak rates" in str(chip)


def cpuinfo(
    n, flags, *, vendor="GenuineIntel", model="Some CPU", family=6, number=1, threads_per_core=1
):
    return (
        "\n\n".join(
            f"processor\t: {i}\nvendor_id\t: {vendor}\ncpu family\t: {family}\nmodel\t\t: "
            f"{number}\nmodel name\t: {model}\n"
            f"cpu MHz\t\t: 2500.0\nphysical id\t: 0\ncore id\t\t: "
            f"{i // threads_per_core}\nflags\t\t: fpu {flags}"
            for i in range(n)
        )
        + "\n"
    )


def machine(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


AVX2 = "avx avx2 fma sse4_2"


def test_hyperthreads_and_affinity(tmp_path):
    root = machine(tmp_path, {"proc/cpuinfo": cpuinfo(8, AVX2, threads_per_core=2)})
    assert read_cpu(root, range(8)).cores == 4 and read_cpu(root, range(8)).threads == 8
    assert read_cpu(root, {0, 1, 2}).cores == 2
    cpu = read_cpu(root, {0})
    assert (cpu.cores, cpu.isa, cpu.clock_ghz, cpu.virtual, cpu.vendor) == (
        1,
        "avx2",
        2.5,
        False,
        "Intel",
    )


def test_cgroup_quotas(tmp_path):
    info = cpuinfo(8, AVX2)
    two = machine(
        tmp_path / "two",
        {
            "proc/cpuinfo": info,
            "proc/self/cgroup": "0::/pod/box\n",
            "sys/fs/cgroup/pod/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/pod/box/cpu.max": "max 100000\n",
            "sys/fs/cgroup/pod/box/memory.max": "1073741824\n",
            "proc/meminfo": "MemTotal:       16000000 kB\n",
        },
    )
    cpu = read_cpu(two, range(8))
    assert cpu.quota == 1.5 and cpu.cores == 1.5 and cpu.memory_bytes == 2**30
    one = machine(
        tmp_path / "one",
        {
            "proc/cpuinfo": info,
            "proc/self/cgroup": "3:cpu,cpuacct:/box\n2:memory:/\n",
            "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us": "300000\n",
            "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_period_us": "100000\n",
            "proc/meminfo": "MemTotal:       1000 kB\n",
        },
    )
    assert read_cpu(one, range(8)).cores == 3 and read_cpu(one, range(2)).cores == 2
    assert read_cpu(one, range(8)).memory_bytes == 1_024_000


@pytest.mark.parametrize(
    ("flags", "options", "isa"),
    [
        ("sse4_2", {}, "sse4"),
        ("avx sse4_2", {}, "avx"),
        (AVX2, {}, "avx2"),
        (AVX2, {"vendor": "AuthenticAMD", "family": 23, "number": 1}, "avx2_zen1"),
        (AVX2, {"vendor": "AuthenticAMD", "family": 23, "number": 0x71}, "avx2"),
        (AVX2 + " avx512f", {"vendor": "AuthenticAMD", "family": 25}, "avx512_zen4"),
        (AVX2 + " avx512f", {"vendor": "AuthenticAMD", "family": 26}, "avx512_zen5"),
        (
            AVX2 + " avx512f",
            {"model": "Intel(R) Xeon(R) Platinum 8370C CPU @ 2.80GHz"},
            "avx512_two_fma",
        ),
        (
            AVX2 + " avx512f",
            {"model": "11th Gen Intel(R) Core(TM) i7-1165G7 @ 2.80GHz"},
            "avx512_one_fma",
        ),
    ],
)
def test_instruction_sets(tmp_path, flags, options, isa):
    assert (
        read_cpu(machine(tmp_path, {"proc/cpuinfo": cpuinfo(1, flags, **options)}), {0}).isa == isa
    )


def test_an_arm_cpu(tmp_path):
    text = "processor\t: 0\nBogoMIPS\t: 50\nFeatures\t: fp asimd sve bf16 i8mm\nCPU implementer\t: 0x41\n"
    cpu = read_cpu(machine(tmp_path, {"proc/cpuinfo": text}), {0})
    assert (cpu.isa, cpu.vendor, cpu.clock_ghz) == ("sve_wide", "ARM", None)
    chip = cpu_chip(cpu)
    assert (
        not chip.known
        and not chip.peaks
        and "The clock of this CPU could not be read" in chip.notes
    )


def test_the_peak_of_a_cpu_is_estimated_from_what_it_says(tmp_path):
    text = cpuinfo(4, AVX2 + " hypervisor", model="Some Xeon @ 3.00GHz", threads_per_core=2)
    chip = cpu_chip(read_cpu(machine(tmp_path, {"proc/cpuinfo": text}), range(4)), devices=8)
    assert chip.known and chip.peaks["fp32"] == 2 * 32 * 3e9 and chip.basis("fp32") == "estimated"
    assert "which may be wrong by a factor of two" in chip.notes and chip.jax_devices_per_chip == 8
    assert "bf16" not in chip.peaks and chip.bandwidth is None


def test_amx_gives_a_16_bit_peak(tmp_path):
    text = cpuinfo(
        2, AVX2 + " avx512f avx512_bf16 amx_bf16 amx_int8", model="Intel(R) Xeon(R) @ 2.00GHz"
    )
    chip = cpu_chip(read_cpu(machine(tmp_path, {"proc/cpuinfo": text}), range(2)))
    assert chip.peaks["bf16"] == 2 * 1024 * 2e9 and chip.peaks["int8"] == 2 * 2048 * 2e9
    assert (
        hw.policy(chip, "train").compute == "float32"
        and hw.policy(chip, "inference").compute == "bfloat16"
    )


def test_a_cpu_of_the_catalog_has_the_share_of_its_available_cores(tmp_path):
    text = cpuinfo(8, AVX2, model="Intel(R) Core(TM) i7-7700K CPU @ 4.20GHz", threads_per_core=2)
    root = machine(tmp_path, {"proc/cpuinfo": text})
    assert cpu_chip(read_cpu(root, range(8))).peaks["fp32"] == pytest.approx(538e9)
    half = cpu_chip(read_cpu(root, range(4)))
    assert half.name == "Intel Core i7-7700K" and half.peaks["fp32"] == pytest.approx(269e9)
    assert half.bandwidth == 38.4e9 and "2 of 4 cores are available" in half.notes


def test_a_machine_that_tells_nothing(tmp_path):
    cpu = read_cpu(tmp_path, {0})
    chip = cpu_chip(cpu)
    assert cpu.cores is None and not chip.known and "could not be read" in chip.notes


def test_what_is_no_device():
    with pytest.raises(
        TypeError, match=r"expected a device, a hardware\.Chip or the name of a chip; got 3"
    ):
        hw.detect(3)
