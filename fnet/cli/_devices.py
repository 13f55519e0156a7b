"""`fnet devices`: shows the chips of this machine and the dtypes that fnet selects for them, or
checks what they compute."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from fnet.cli._chips import figures
from fnet.cli._console import console, facts
from fnet.hardware._chip import Chip


def define(commands: Any) -> None:
    """Adds the command `devices` to the parser of `fnet`."""
    devices = commands.add_parser(
        "devices",
        help="show the chips of this machine and the policy with its reason; a "
        "CPU is probed for about a second, once (not with FNET_PROBE=0)",
    )
    either = devices.add_mutually_exclusive_group()
    either.add_argument(
        "--check",
        action="store_true",
        help="compare the results of twenty operations on each device with NumPy's, in a few "
        "seconds; exit code 1 if a result is wrong",
    )
    either.add_argument(
        "--measure",
        action="store_true",
        help="measure the rates of matrix products and of a copy, for a few seconds",
    )


def run(args: argparse.Namespace) -> int:
    """Shows the devices of JAX on this machine."""
    import jax

    from fnet import hardware as hw

    try:
        found = jax.local_devices()
    except (RuntimeError, AssertionError) as error:
        print(f"fnet devices: {no_device(error)}", file=sys.stderr)
        return 2
    if args.check:
        return check(found)
    out = console()
    groups: dict[Chip, list[Any]] = {}
    for device in found:
        groups.setdefault(hw.detect(device), []).append(device)
    for chip, devices in groups.items():
        chips = max(1, len(devices) // chip.jax_devices_per_chip)
        out.print(
            f"{chips} x {chip.name}" if chips > 1 else chip.name, style="bold", highlight=False
        )
        rows = [
            (
                "kind",
                f"{chip.kind}, {chip.vendor}"
                + (f", {chip.architecture}" if chip.architecture else ""),
            )
        ]
        if args.measure:
            chip = hw.measure(devices[0])
        each = f", {chip.jax_devices_per_chip} to a chip" if chip.jax_devices_per_chip > 1 else ""
        rows.append(
            (
                "JAX devices",
                f"{len(devices)}{each} ({devices[0].platform}: {devices[0].device_kind})",
            )
        )
        rows += figures(chip)
        if chip.notes:
            rows.append(("note", chip.notes))
        for mode in ("train", "inference"):
            policy = hw.policy(devices[0], mode)  # a CPU is probed once, as the reason states
            dtypes = str(policy).removesuffix(f": {policy.reason}")
            rows.append((f"policy, {mode}", f"{dtypes}\nbecause {policy.reason}"))
        facts(out, rows)
    out.print(
        f"jax {jax.__version__}, {jax.process_count()} process(es), default backend "
        f"{jax.default_backend()}",
        highlight=False,
    )
    return 0


def check(devices: Sequence[Any]) -> int:
    """Checks the devices. If they are right, `fit` does not check them again."""
    from fnet import hardware as hw
    from fnet.hardware._device_check import remember

    checked = hw.check_devices(devices)
    remember(devices, checked)
    print(checked)
    for result in checked.failed:
        print(f"fnet devices: {result.device}: {result}", file=sys.stderr)
    if checked.wrong:
        print(f"fnet devices: {checked.report()}", file=sys.stderr)
    return 0 if checked.right else 1


def no_device(error: Exception) -> str:
    """Returns the message for the error that `jax.devices` raises when no backend starts."""
    platforms = os.environ.get("JAX_PLATFORMS", "")
    why = (str(error).splitlines() or [f"no backend of JAX_PLATFORMS={platforms!r} starts"])[0]
    return f"JAX finds no device: {why}"
