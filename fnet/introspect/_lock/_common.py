"""The longest common subsequence of two sequences (Myers, 1986, An O(ND) difference algorithm)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

_MOST_DIFFERENCES = 600  # beyond which two sequences count as unrelated


def common(a: Sequence[Hashable], b: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Returns the pairs of indices of a longest common subsequence, or none in the middle of two
    sequences with more differences than `_MOST_DIFFERENCES`.

    >>> common("abcd", "xbd")
    [(1, 1), (3, 2)]
    """
    first = 0
    while first < min(len(a), len(b)) and a[first] == b[first]:
        first += 1
    last = 0
    while last < min(len(a), len(b)) - first and a[-1 - last] == b[-1 - last]:
        last += 1
    inner = _middle(a[first : len(a) - last], b[first : len(b) - last])
    return [
        *((i, i) for i in range(first)),
        *((first + i, first + j) for i, j in inner),
        *((len(a) - i, len(b) - i) for i in range(last, 0, -1)),
    ]


def _middle(a: Sequence[Hashable], b: Sequence[Hashable]) -> list[tuple[int, int]]:
    """`reached[k]` is the furthest index in `a` on the diagonal k = i - j after some number of
    insertions and removals; `history` has it after each number."""
    if not a or not b:
        return []
    reached, history = {1: 0}, []
    for differences in range(min(len(a) + len(b), _MOST_DIFFERENCES) + 1):
        history.append(dict(reached))
        for k in range(-differences, differences + 1, 2):
            inserted = k == -differences or (k != differences and reached[k - 1] < reached[k + 1])
            i = reached[k + 1] if inserted else reached[k - 1] + 1
            while i < len(a) and 0 <= i - k < len(b) and a[i] == b[i - k]:
                i += 1
            reached[k] = i
            if i >= len(a) and i - k >= len(b):
                return _traced(history, len(a), len(b))
    return []


def _traced(history: list[dict[int, int]], i: int, j: int) -> list[tuple[int, int]]:
    """Returns the pairs on the way back from the end of both sequences."""
    pairs = []
    for differences in range(len(history) - 1, -1, -1):
        reached, k = history[differences], i - j
        inserted = k == -differences or (
            k != differences and reached.get(k - 1, -1) < reached.get(k + 1, -1)
        )
        before = k + 1 if inserted else k - 1
        start_i = reached[before] if differences else 0
        start_j = start_i - before if differences else 0
        while i > start_i and j > start_j:
            i, j = i - 1, j - 1
            pairs.append((i, j))
        i, j = start_i, start_j
    return pairs[::-1]
