"""The environment of a run (chip, devices, jaxlib), and the rewrite rules of `tune` that are
selected for its chip. Checkpoints contain the environment and the rewrite rules, so that a run can
be resumed exactly."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jaxlib

from fnet import hardware as hw
from fnet.transforms._tune._tune import RULES


def facts(state: Any) -> dict[str, Any]:
    """Returns the chip, the numbers of devices and processes, and the jaxlib version."""
    arrays = [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array)]
    devices = {device for leaf in arrays for device in leaf.sharding.device_set}
    here = [
        device for device in devices if device.process_index == jax.process_index()
    ] or jax.local_devices()
    chip = hw.detect(min(here, key=lambda device: device.id))
    return {
        "chip": chip.name,
        "kind": chip.kind,
        "devices": len(devices),
        "processes": jax.process_count(),
        "jaxlib": jaxlib.__version__,
    }


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Describes changes of a run's environment that may change how results are rounded. Returns ""
    if nothing in the environment has changed."""
    words = {
        "chip": "the chip",
        "devices": "the number of devices",
        "processes": "the number of processes",
        "plan": "the plan",
        "jaxlib": "jaxlib",
    }
    if before.get("invariant") and now.get("invariant"):  # of these, by `ft.invariant`
        for name in ("devices", "processes", "plan"):
            del words[name]
    changed = [
        f"{what} was {before[name]}, is {now[name]}"
        for name, what in words.items()
        if name in before and before[name] != now[name]
    ]
    return "; ".join(changed)


def chosen(tuned: Callable) -> list[str]:
    """Returns the names of the rewrite rules that `transforms.tune` has selected."""
    return sorted(rule.name for rule in tuned.tuned[2])


def rules(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, bool] | None:
    """Returns the rewrite rules of `tune` with which the run was started, a dict {name: whether the
    rule is used}. Returns None if the run was started on another kind of chip or without `tune`."""
    kept = before.get("tune")
    if before.get("kind") != now["kind"] or not isinstance(kept, list):
        return None
    return {rule.name: rule.name in kept for rule in RULES.get(now["kind"], ())}
