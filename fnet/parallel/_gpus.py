"""Descriptions of GPUs that are not attached, for XLA's compiler."""

from __future__ import annotations

from fnet._util import _missing

# {name in the catalog: the properties that XLA reads from a device}. The values are from NVIDIA's
# white papers about the architectures and from CUDA's device query.
CONFIGURATIONS = {
    "H100 SXM5 80GB": """
gpu_device_info {
  threads_per_block_limit: 1024  threads_per_warp: 32  shared_memory_per_block: 49152  shared_memory_per_core: 233472
  threads_per_core_limit: 2048  core_count: 132  fpus_per_core: 128  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535  block_dim_limit_z: 65535  memory_bandwidth: 3352320000000  l2_cache_size: 52428800
  clock_rate_ghz: 1.98  device_memory_size: 84942979072  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }  registers_per_core_limit: 65536  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
""",
    "A100 SXM4 80GB": """
gpu_device_info {
  threads_per_block_limit: 1024  threads_per_warp: 32  shared_memory_per_block: 49152  shared_memory_per_core: 167936
  threads_per_core_limit: 2048  core_count: 108  fpus_per_core: 64  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535  block_dim_limit_z: 65535  memory_bandwidth: 2039040000000  l2_cache_size: 41943040
  clock_rate_ghz: 1.41  device_memory_size: 85100068864  shared_memory_per_block_optin: 166912
  cuda_compute_capability { major: 8 }  registers_per_core_limit: 65536  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "NVIDIA A100-SXM4-80GB"
""",
}


def devices(chip, each: int, machines: int = 1) -> tuple[list | None, str]:
    """Returns (devices to compile for, ""), or (None, the reason why there are no such devices)."""
    if chip.name not in CONFIGURATIONS:
        return None, (
            f"XLA's description of {chip.name} is not included in fnet; included are "
            f"{', '.join(CONFIGURATIONS)}"
        )
    import jax
    from jax.experimental import topologies

    try:
        return list(
            topologies.get_topology_desc(
                platform="cuda",
                target_config=CONFIGURATIONS[chip.name],
                topology=f"1x{machines}x{each}",
            ).devices
        ), ""
    except (NotImplementedError, RuntimeError):
        return None, _missing.message(
            "compiling for CUDA needs",
            f"jax-cuda13-pjrt=={jax.__version__}",
            f"jax-cuda13-plugin=={jax.__version__}",
            options=["--no-deps"],
        )
