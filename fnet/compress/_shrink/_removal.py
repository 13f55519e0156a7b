"""Selects the indices (such as channels) to prune, given a fraction to keep or a maximum of FLOPs
or seconds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from fnet import cost
from fnet import hardware as hw
from fnet.compress._shrink._groups import Call, Cut, Group, cuts
from fnet.jaxpr import is_array, wraps

_STEPS = 8  # iterations of the bisection: the fraction is found to 1 / 256


def shrunk_function(f: Callable, found: Mapping[str, Cut]) -> Callable:
    """Returns a function that computes f for pruned arguments. `found` states which indices remain
    in each pruned array, {key of the array: `Cut`}."""

    @wraps(f)
    def shrunk(*args, **kwargs):
        return Call(f, args, kwargs, found).evaluate(found)

    return shrunk


class Removal:
    """Selects the indices to remove from the parameters of a call, and estimates the FLOPs and the
    time without these indices.

    Args:
        free: the groups of parameter axes that can be pruned. The same indices are removed from all
            axes of a group.
        fractions: the fractions that the user specified with `keep`, {identifier of a group of
            axes: fraction of the indices to keep}. The identifier of a group of axes is the integer
            `Group.atom`.
        ranks: the order of the indices, {identifier of a group of axes: all indices, the most
            important first}.
        chip: the chip for which the method `seconds` estimates the time of the function, or None.
            If a chip is given, the sizes of pruned axes are rounded up to multiples of the tile
            sizes of the chip's matrix units. If `chip` is None, the sizes of pruned axes are not
            rounded to tile sizes.
    """

    def __init__(
        self,
        f: Callable,
        args: tuple,
        kwargs: dict,
        call: Call,
        free: list[Group],
        fractions: Mapping[int, float],
        ranks: Mapping[int, np.ndarray],
        chip: hw.Chip | None,
    ):
        self._f, self._types, self._call = f, jax.tree.map(_type, (args, kwargs)), call
        self._free, self._fractions, self._ranks, self.chip = free, fractions, ranks, chip
        self._tiles = {
            group.atom: 1 if chip is None else _tile(call, group, chip) for group in free
        }

    def kept(self, fraction: float) -> dict[int, np.ndarray]:
        """Returns {identifier of a group of axes: the indices that remain}, for the groups from
        which indices are removed. `fraction` is the fraction of indices to keep in each group for
        which the user did not specify a fraction."""
        found = {}
        for group in self._free:
            tile = self._tiles[group.atom]
            count = math.ceil(self._fractions.get(group.atom, fraction) * group.size - 1e-9)
            count = max(1, -(-count // tile)) * tile
            if count < group.size:
                found[group.atom] = np.sort(self._ranks[group.atom][:count])
        return found

    def largest(self, name: str, limit: float) -> float:
        """Returns the largest fraction of the indices (such as channels) that can be kept so that
        the pruned function needs at most `limit` FLOPs or seconds. `name` is "flops" or
        "seconds"."""
        units = {
            "flops": "FLOPs",
            "seconds": f"s at the roofline of {self.chip and self.chip.name}",
        }[name]
        cost = lambda fraction: getattr(self, name)(self.kept(fraction))
        if (whole := cost(1)) <= limit:
            raise ValueError(
                f"shrink: {name}={limit:.4g} removes nothing: the function needs {whole:.4g} "
                f"{units}"
            )
        if (least := cost(0)) > limit:
            raise ValueError(
                f"shrink: {name}={limit:.4g} cannot be reached: with the fewest indices"
                f"{' that fill the tiles' if self.chip else ''} the function needs {least:.4g} "
                f"{units}"
            )
        low, high = 0.0, 1.0
        for _ in range(_STEPS):
            middle = (low + high) / 2
            low, high = (middle, high) if cost(middle) <= limit else (low, middle)
        return low

    def flops(self, kept: Mapping[int, np.ndarray]) -> int:
        return cost.count(*self._program(kept)).flops

    def seconds(self, kept: Mapping[int, np.ndarray]) -> float:
        found = cost.roofline(
            *self._program(kept), chip=self.chip, devices=1, measure=False
        ).total.seconds
        if found is None:
            raise ValueError(
                f"shrink: the time on {self.chip.name} cannot be estimated, because its peak rates "
                "are unknown; pass chip=, or the result of hardware.measure()"
            )
        return found

    def _program(self, kept):
        found, (args, kwargs) = cuts(self._call, kept), self._types
        function = shrunk_function(self._f, found)
        smaller = lambda path, x: (
            found[key].type(x) if (key := jax.tree_util.keystr(path)) in found else x
        )
        return lambda args, kwargs: function(*args, **kwargs), *jax.tree.map_with_path(
            smaller, (args, kwargs)
        )


def _type(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype) if is_array(x) else x


def _tile(call, group, chip) -> int:
    """Returns a number n. If the number of remaining indices of `group` is a multiple of n, the
    axes of `group` fill whole tiles (blocks) of the chip's matrix units."""
    unit = 1
    for i, axis, position in group.members:
        sizes = [call.program.atoms.size(atom) for atom in call.program.factors(i)[axis]]
        tile = cost.tile_size(chip, call.leaves[i].array.dtype)
        unit = max(
            unit, tile // math.gcd(tile, math.prod(sizes[:position] + sizes[position + 1 :]))
        )
    return unit
