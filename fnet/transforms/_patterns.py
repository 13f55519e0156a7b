"""Patterns that select sites, the named values of a function, such as "head", r"block\\d+/conv" or
"blocks[3]/mlp"."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from fnet._util._nearest import nearest_to_pattern
from fnet.jaxpr import BLOCK
from fnet.transforms._capture._sites import Site

_UNNAMED = (
    "the function has no named scopes (those of a flax.nnx module come from ft.name_scopes(module))"
)
_INDEX = re.compile(r"\[(-?\d+)\]")


class Match(NamedTuple):
    """A site that a pattern matches.

    Attributes:
        site: the named value.
        name: the name of the value. If the pattern selects iterations of scans, the name of the
            value contains the indices of these iterations, as in "blocks[3]/mlp".
        indices: for each scan around the value, the index of the selected iteration, or None for
            all iterations.
    """

    site: Site
    name: str
    indices: tuple[int | None, ...]


def compiled(who: str, pattern: str) -> re.Pattern:
    """Compiles the regular expression of a rule, such as a rule of `autocast`.

    Raises:
        ValueError: the pattern is not a regular expression.
    """
    try:
        return re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ValueError(
            f"{who}: the pattern {pattern!r} is not a regular expression ({error})"
        ) from None


def matches(who: str, pattern: str, sites: Iterable[Site]) -> list[Match]:
    """Returns the named values that a pattern matches, as a list of `Match` objects.

    Args:
        who: the name of the calling function, for error messages.
        pattern: the pattern.
        sites: all named values of the user's function.

    Raises:
        TypeError: the pattern is not a string.
        ValueError: the pattern matches nothing, or matches a named value inside a while loop or a
            branch of cond. A ValueError is also raised for an ambiguous pattern. For example,
            "mlp[12]" may mean iteration 12 of "mlp", or a regular expression for "mlp1" and "mlp2".
    """
    if not isinstance(pattern, str):
        raise TypeError(
            f"{who}: a pattern must be a string, such as 'blocks/attention'; got a "
            f"{type(pattern).__name__}"
        )
    sites = list(sites)
    try:
        whole = [
            Match(site, site.name, (None,) * len(site.scans))
            for site in sites
            if _fits(pattern, site)
        ]
    except re.error as error:
        raise ValueError(
            f"{who}: the pattern {pattern!r} is not a regular expression ({error})"
        ) from None
    indexed = _indexed(who, pattern, sites) if _INDEX.search(pattern) else []
    if whole and indexed and not any(match.site.name == pattern for match in whole):
        raise ValueError(
            f"{who}: the pattern {pattern!r} is ambiguous: as a regular expression it matches "
            f"{whole[0].name!r}, as an index {indexed[0].name!r}; write \\[ for an index or (1|2) "
            "for a choice"
        )
    found = whole or indexed
    if not found:
        names = [site.name for site in sites if site.obstacle is None]
        raise ValueError(
            f"{who}: the pattern {pattern!r} matches no site; nearest: "
            f"{nearest_to_pattern(pattern, names, 4) or _UNNAMED}. ft.sites(f)(*args) lists all "
            "sites"
        )
    for match in found:
        if match.site.obstacle:
            raise ValueError(
                f"{who}: the site {match.site.name!r} is inside {match.site.obstacle}, where it "
                f"has no single value; apply {who} to the function inside, or use another pattern"
            )
    return found


def _fits(pattern, site) -> bool:
    return pattern in (site.name, site.path) or any(
        re.fullmatch(pattern, name) is not None for name in {site.name, site.path}
    )


def _indexed(who, pattern, sites) -> list[Match]:
    """Returns the matches of a pattern with indices, such as "blocks[3]/mlp" or "blocks[3]"."""
    plain = _INDEX.sub("", pattern)
    given, shift = [], 0  # (the part of the pattern before the index, without indices; the index)
    for found in _INDEX.finditer(pattern):
        given.append((plain[: found.start() - shift], int(found[1])))
        shift += len(found[0])
    matched = []
    for site in sites:
        name = site.name.removesuffix(BLOCK)
        try:
            fits = (
                plain in (name, site.path.removesuffix(BLOCK))
                or re.fullmatch(plain, name) is not None
            )
        except re.error:  # the brackets were a part of a regular expression
            return []
        if fits and (indices := _assigned(given, site)) is not None:
            for (path, length), index in zip(site.scans, indices):
                if index is not None and not -length <= index < length:
                    raise ValueError(
                        f"{who}: the pattern {pattern!r} has the index {index}, and the scan at "
                        f"{path!r} has {length} iterations"
                    )
            indices = tuple(
                None if i is None else i % length for (_, length), i in zip(site.scans, indices)
            )
            matched.append(Match(site, _written(name, site, indices), indices))
    return matched


def _assigned(given, site) -> tuple | None:
    """Finds the scan to which each index in a pattern refers. For example, the index 3 in
    "blocks[3]/mlp" refers to the scan with the path "blocks". Returns a tuple with one element for
    each scan that contains the named value: the index of the selected iteration, or None for all
    iterations. Returns None if an index in the pattern corresponds to none of the scans that
    contain the named value."""
    indices: list[int | None] = [None] * len(site.scans)
    for before, index in given:
        depth = before.count("/") + 1
        here = "/".join(site.path.removesuffix(BLOCK).split("/")[:depth])
        free = [i for i, (path, _) in enumerate(site.scans) if indices[i] is None]
        exact = [i for i in free if site.scans[i][0] == here]
        above = [i for i in free if not site.scans[i][0] or here.startswith(site.scans[i][0] + "/")]
        if not exact and not above:
            return None
        indices[(exact or above)[0]] = index
    return tuple(indices)


def _written(name, site, indices) -> str:
    """Returns the name of a site with the indices of the selected scan iterations.

    In the name "blocks[3]/mlp", for example, the iteration index 3 is inserted after "blocks", the
    path of the scan. If the scan is outside of all named scopes, the iteration index is appended to
    the name of the value. The iteration index is also appended if the path of the scan has more
    components than the name of the value.
    """
    parts, rest = name.split("/"), ""
    behind = [""] * len(parts)
    for (path, _), index in zip(site.scans, indices):
        if index is None:
            continue
        depth = len(path.split("/")) if path else 0
        if 0 < depth <= len(parts):
            behind[depth - 1] += f"[{index}]"
        else:
            rest += f"[{index}]"
    return "/".join(part + index for part, index in zip(parts, behind)) + rest
