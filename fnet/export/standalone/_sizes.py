"""Computes the sizes of axes from expressions of size variables (symbolic sizes). Every bundle
(file of an exported model) contains a copy of this module as sizes.py."""

import ast
import re


def size(expression, sizes):
    """Returns the value of a size: an integer, or an expression such as "floordiv(h + 1, 2)*b^2" of
    the variables in `sizes`.

    >>> size("floordiv(h + 1, 2)*b^2", {"h": 6, "b": 3})
    27
    """
    if isinstance(expression, int):
        return expression
    return _size(ast.parse(expression.replace("^", "**"), mode="eval").body, sizes)


def variables(expression):
    """Returns the names of the variables in a size, in order.

    >>> variables("floordiv(h + 1, 2)*b^2")
    ['h', 'b']
    """
    words = [] if isinstance(expression, int) else re.findall(r"[A-Za-z_]\w*", expression)
    return [name for name in dict.fromkeys(words) if name not in _FUNCTIONS]


def solved(expression, n, sizes):
    """Returns (the only variable in `expression` that `sizes` lacks, its value for which the
    expression equals n). The value is None if it is no integer. The result is None if there is not
    one such variable, or if the expression is not linear in it, which JAX cannot solve either.

    >>> solved("4*h + b", 14, {"b": 2}), solved("4*h", 13, {})
    (('h', 3), ('h', None))
    """
    unknown = [name for name in variables(expression) if name not in sizes]
    if len(unknown) != 1:
        return None
    (name,) = unknown
    zero, one, two = (size(expression, {**sizes, name: value}) for value in (0, 1, 2))
    if one == zero or two - one != one - zero:
        return None
    value, rest = divmod(n - zero, one - zero)
    return name, None if rest else value


def _size(node, sizes):
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.Name):
        return sizes[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_size(node.operand, sizes)
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        return _ARITHMETIC[type(node.op)](_size(node.left, sizes), _size(node.right, sizes))
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in _FUNCTIONS
    ):
        return _FUNCTIONS[node.func.id](*(_size(part, sizes) for part in node.args))
    raise ValueError(f"cannot evaluate the size {ast.unparse(node)!r}")


def _power(x, y):
    if abs(y) > 64:
        raise ValueError(f"cannot evaluate a size with the exponent {y}")
    return x**y


# JAX writes the others as calls.
_ARITHMETIC = {
    ast.Add: lambda x, y: x + y,
    ast.Sub: lambda x, y: x - y,
    ast.Mult: lambda x, y: x * y,
    ast.Pow: _power,
}
_FUNCTIONS = {"floordiv": lambda x, y: x // y, "mod": lambda x, y: x % y, "max": max, "min": min}
