"""Which tests `make test` can leave to `make test-all`: slow ones that run no line of fnet which
few others run."""

import collections
import heapq

ENOUGH = 3  # quick tests of each line of fnet, if it has as many
LONG = 0.3  # seconds; shorter tests stay


def redundant(records):
    """Tests that `ENOUGH` others make unnecessary, by the lines that they run.

    Args:
        records: of `lines`: [(test, seconds, exhaustive, {module: {line}})].

    Returns:
        [(seconds that are saved, test without its case, number of necessary cases, number of
        cases)] of quick tests that would save more than `LONG` seconds, the longest first.
    """
    rows = {
        test: (
            max(seconds, 0.01),
            [(module, line) for module, lines in held.items() for line in lines],
        )
        for test, seconds, exhaustive, held in records
        if not exhaustive
    }
    counts = collections.Counter(line for _, lines in rows.values() for line in lines)
    missing = {line: min(ENOUGH, count) for line, count in counts.items()}
    rate = lambda test: sum(missing[line] > 0 for line in rows[test][1]) / rows[test][0]
    heap = [(-rate(test), test) for test in rows]
    heapq.heapify(heap)
    necessary = set()
    while heap:  # the most missing lines in a second first; rates only decrease
        test = heapq.heappop(heap)[1]
        now = rate(test)
        if now and heap and now < -heap[0][0]:
            heapq.heappush(heap, (-now, test))
        elif now:
            necessary.add(test)
            for line in rows[test][1]:
                missing[line] -= 1
    cases = collections.defaultdict(list)
    for test in rows:
        cases[test.partition("[")[0]].append(test)
    found = [
        (
            sum(rows[test][0] for test in tests if test not in necessary),
            name,
            sum(test in necessary for test in tests),
            len(tests),
        )
        for name, tests in cases.items()
    ]
    return sorted((row for row in found if row[0] > LONG), reverse=True)
