"""Mutants: every small change of the code that a program can make by itself, from which a seed
draws some.

    python -m tests.mutation --generate=150 --since=COMMIT fnet/export fnet/training/optim/_optimizers.py

Candidates are the lines of fnet/ that changed since COMMIT, and all lines of the named modules and
folders. The seed is the hash of the checked-out commit, so nobody chooses the mutants, and whoever
checks out the commit gets the same ones.
"""

import ast
import itertools
import random
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

COMPARISONS = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Is: "is not",
    ast.IsNot: "is",
}
OPERATORS = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "+",
    ast.Div: "*",
    ast.FloorDiv: "*",
    ast.Mod: "//",
    ast.Pow: "*",
    ast.BitAnd: "|",
    ast.BitOr: "&",
}
CHECKS = {
    "all",
    "any",
    "isinstance",
    "issubclass",
    "hasattr",
    "callable",
    "array_equal",
    "allclose",
    "bool",
}


class Mutant(NamedTuple):
    """The text between two offsets of a module becomes `after`."""

    path: str  # relative to the repository
    start: int
    end: int
    line: int
    kind: str
    before: str
    after: str

    def text(self, whole: str) -> str:
        return whole[: self.start] + self.after + whole[self.end :]

    @property
    def package(self) -> str:
        return Path(self.path).parts[1].removesuffix(".py")

    @property
    def what(self) -> str:
        before, after = (" ".join(text.split())[:60] for text in (self.before, self.after))
        return f"{self.path}:{self.line} {self.kind}: {before} -> {after}"


def mutants(path: str, whole: str) -> list[Mutant]:
    """All mutants of a module. A few of them do not compile, or change nothing but the form of the
    text."""
    tree = ast.parse(whole)
    lines = whole.splitlines(keepends=True)
    starts = list(itertools.accumulate((len(line) for line in lines), initial=0))

    def offset(number, column):  # ast counts bytes
        return starts[number - 1] + len(lines[number - 1].encode()[:column].decode())

    def span(first, last):
        return offset(first.lineno, first.col_offset), offset(last.end_lineno, last.end_col_offset)

    def source(node):
        return whole[slice(*span(node, node))]

    rows = []

    def add(node, kind, after, last=None):
        start, end = span(node, last or node)
        rows.append(Mutant(path, start, end, node.lineno, kind, whole[start:end], after))

    for node in _code(tree):
        _mutate(node, source, add)
    return rows


def _code(tree):
    """The nodes of all code that runs: no annotations, docstrings, decorators or texts of error
    messages."""
    stack = [tree]
    while stack:
        node = stack.pop()
        yield node
        for name, value in ast.iter_fields(node):
            skipped = name in (
                "annotation",
                "returns",
                "decorator_list",
                "bases",
                "keywords",
            ) and not isinstance(node, ast.Call)
            if skipped or isinstance(node, (ast.Raise, ast.JoinedStr, ast.Import, ast.ImportFrom)):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and not _is_text(child):
                    stack.append(child)


def _is_text(node):
    if isinstance(node, ast.Expr):
        node = node.value
    return isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes))


def _mutate(node, source, add):
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            add(node, "comparison", f"({source(left)} {COMPARISONS[type(op)]} {source(right)})")
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            add(node, "operator", f"({source(left)} {OPERATORS[type(op)]} {source(right)})")
        case ast.BoolOp(op=op, values=values):
            word = "or" if isinstance(op, ast.And) else "and"
            add(node, "and/or", f"({f' {word} '.join(f'({source(value)})' for value in values)})")
            add(node, "dropped operand", f"({source(values[0])})")
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            add(node, "not", f"({source(operand)})")
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            add(node, "sign", f"({source(operand)})")
        case ast.Constant(value=bool() as value):
            add(node, "constant", str(not value))
        case ast.Constant(value=int() as value):
            add(node, "constant", str(value + 1))
        case ast.Constant(value=float() as value):
            add(node, "constant", repr(value * 2 + (value == 0)))
        case ast.If(test=test) | ast.IfExp(test=test):
            add(test, "branch never taken", "False")
            add(test, "branch always taken", "True")
        case ast.Call(args=[first, second, *_]) if not isinstance(
            first, ast.Starred
        ) and not isinstance(second, ast.Starred):
            add(first, "swapped arguments", f"{source(second)}, {source(first)}", last=second)
        case ast.Return(value=value) if _is_check(value):
            add(value, "a check that returns True", "True")
        case ast.Raise() | ast.AugAssign() | ast.Expr(value=ast.Call()):
            add(node, "dropped statement", "pass")


def _is_check(value):
    if isinstance(value, (ast.Compare, ast.BoolOp)):
        return True
    if isinstance(value, ast.UnaryOp):
        return isinstance(value.op, ast.Not)
    name = value.func if isinstance(value, ast.Call) else None
    return getattr(name, "id", getattr(name, "attr", None)) in CHECKS


def _differs(row, whole):
    try:
        return ast.dump(ast.parse(row.text(whole))) != ast.dump(ast.parse(whole))
    except SyntaxError:
        return False


def changed(root: Path, since: str) -> dict[str, set[int]]:
    """The lines of fnet/ that were added or changed since a commit, {path: {line}}."""
    done = subprocess.run(
        ["git", "diff", "-U0", since, "--", "fnet/*.py"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    rows: dict[str, set[int]] = {}
    path = ""
    for line in done.stdout.splitlines():
        if line.startswith("+++ "):
            path = line.removeprefix("+++ b/")
        elif hunk := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            first, number = int(hunk[1]), int(hunk[2] or 1)
            rows.setdefault(path, set()).update(range(first, first + number))
    return {path: numbers for path, numbers in rows.items() if (root / path).exists()}


def drawn(root: Path, number: int, since: str, names: list[str]) -> list[Mutant]:
    """`number` mutants, at most one of each line, drawn with the hash of the commit as the seed."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True
    )
    lines = changed(root, since)
    for name in names:
        place = root / name
        for path in place.rglob("*.py") if place.is_dir() else [place]:
            lines[str(path.relative_to(root))] = set(range(1, path.read_text().count("\n") + 1))
    texts = {path: (root / path).read_text() for path in sorted(lines)}
    candidates = [
        row
        for path, text in texts.items()
        for row in mutants(path, text)
        if row.line in lines[path]
    ]
    random.Random(commit.stdout.strip()).shuffle(candidates)
    rows: dict[tuple, Mutant] = {}
    for row in candidates:
        if (
            len(rows) < number
            and (row.path, row.line) not in rows
            and _differs(row, texts[row.path])
        ):
            rows[row.path, row.line] = row
    return list(rows.values())
