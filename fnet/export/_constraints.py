"""Sizes and constraints in Python's notation, as JAX's parser reads them."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

_BINARY = {ast.Add: "{} + {}", ast.Sub: "{} - {}", ast.Mult: "{}*{}"}
_CALLS = {ast.Mod: "mod({}, {})", ast.FloorDiv: "floordiv({}, {})"}
_COMPARED = {
    ast.Eq: "{} == {}",
    ast.LtE: "{} <= {}",
    ast.GtE: "{} >= {}",
    ast.Lt: "{} + 1 <= {}",
    ast.Gt: "{} >= {} + 1",
}
_NAMED = ("mod", "floordiv", "max", "min")


def sizes(shape: str) -> str:
    """Returns a shape with `mod` and `floordiv` in place of % and //. What cannot be read is left
    for JAX's parser.

    >>> sizes("b, h // 2 + 1")
    'b, floordiv(h, 2) + 1'
    """
    if "%" not in shape and "//" not in shape:
        return shape
    try:
        tree = ast.parse(f"({shape},)", mode="eval").body
        assert isinstance(tree, ast.Tuple)
        return ", ".join(map(_size, tree.elts))
    except (SyntaxError, ValueError):
        return shape


def constraints(text: str) -> tuple[str, ...]:
    """Returns the constraints that a text lists. What is no comparison in Python's notation is left
    for JAX's parser.

    >>> constraints("8 <= h < 64, h % 4 == 0")
    ('8 <= h', 'h + 1 <= 64', 'mod(h, 4) == 0')
    """
    try:
        tree = ast.parse(f"({text},)", mode="eval").body
        assert isinstance(tree, ast.Tuple)
        return tuple(pair for node in tree.elts for pair in _pairs(node))
    except (SyntaxError, ValueError):
        return (text,)


def several(where: str | Iterable[str]) -> tuple[str, ...]:
    """Returns the constraints of one text or of several."""
    texts = (where,) if isinstance(where, str) else where
    return tuple(each for text in texts for each in constraints(text))


def _pairs(node: ast.expr) -> Iterator[str]:
    """Yields the comparisons of neighbors in a < b <= c."""
    if not isinstance(node, ast.Compare):
        raise ValueError
    sides = [_size(side) for side in (node.left, *node.comparators)]
    for operator, left, right in zip(node.ops, sides, sides[1:]):
        if type(operator) not in _COMPARED:
            raise ValueError
        yield _COMPARED[type(operator)].format(left, right)


def _size(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name):
            return name
        case ast.Constant(value=int(value)):
            return str(value)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return f"-1*{_factor(operand)}"
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _CALLS:
            return _CALLS[type(operator)].format(_size(left), _size(right))
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return f"{_size(left)} - {_factor(right)}"
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return f"{_factor(left)}*{_factor(right)}"
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return f"{_size(left)} + {_size(right)}"
        case ast.Call(func=ast.Name(id=name), args=[left, right], keywords=[]) if name in _NAMED:
            return f"{name}({_size(left)}, {_size(right)})"
    raise ValueError(f"{ast.unparse(node)} is no size")


def _factor(node: ast.expr) -> str:
    """A size as a factor. JAX's notation has no parentheses, so a sum must be multiplied out."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        raise ValueError(f"multiply out {ast.unparse(node)}")
    return _size(node)
