"""Rendering of untrusted Jinja templates: no access to Python, and limits on iterations and on the
sizes of values."""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Mapping
from typing import Any

import jinja2
from jinja2 import ext, nodes, sandbox, utils, visitor

LARGEST = 1 << 24  # characters of a text and elements of a list, several times the longest contexts
STEPS = 1 << 17  # iterations of loops and calls of macros, together
_BITS = 1 << 12  # bits of an integer
_WIDTH = re.compile(r"\d{6}|\*")  # the width of a field in a format string that is not allowed


class Rejected(jinja2.TemplateError):
    """The error that a template raises with `raise_exception`."""


class Limit(jinja2.TemplateError):
    """A template exceeds a limit."""


def render(template: str, variables: Mapping[str, Any]) -> str:
    """Renders a template in the same way as transformers renders chat templates.

    Raises:
        Rejected: the template calls `raise_exception`.
        Exception: the template is invalid, exceeds a limit, or fails for another reason. The
            exception may be of any type.
    """
    if len(template) > LARGEST >> 4:
        raise Limit(f"it has {len(template):,} characters, more than {LARGEST >> 4:,}")
    environment = _Environment()
    return environment.from_string(_Counted().visit(environment.parse(template))).render(variables)


class _Generation(ext.Extension):
    """The Jinja block `{% generation %} ... {% endgeneration %}`, which marks answers that a model
    is trained on."""

    tags = {"generation"}  # noqa: RUF012    Jinja's API

    def parse(self, parser):
        line = next(parser.stream).lineno
        return nodes.Scope(
            parser.parse_statements(("name:endgeneration",), drop_needle=True)
        ).set_lineno(line)


class _Counted(visitor.NodeTransformer):
    """Adds limits to a Jinja template: on loop iterations, on macro calls, and on the length of
    text joined by `~`."""

    def visit_For(self, node):
        node = self.generic_visit(node)
        call = nodes.Call(nodes.EnvironmentAttribute("step"), [], [], None, None)
        node.body = [nodes.ExprStmt(call).set_lineno(node.lineno), *node.body]
        return node

    visit_Macro = visit_CallBlock = visit_For

    def visit_Concat(self, node):
        values = self.generic_visit(node).nodes
        return nodes.Call(nodes.EnvironmentAttribute("joined"), values, [], None, None).set_lineno(
            node.lineno
        )


class _Dict:
    """The object `dict` in templates. In templates, `dict` supports `dict(...)` and
    `dict.fromkeys`, but no other attributes of `dict`."""

    def __call__(self, *args, **kwargs):
        return dict(*args, **kwargs)

    def fromkeys(self, *args):
        return dict.fromkeys(*args)


class _Namespace(utils.Namespace):
    """The class `namespace` in templates. In templates, `namespace` rejects names of attributes
    that start with an underscore, because Python itself reads some of these attributes."""

    def __init__(
        *args, **kwargs
    ):  # without a named argument, so that a template can write namespace(self=1)
        self, values = args[0], dict(*args[1:], **kwargs)
        utils.Namespace.__init__(self)
        for name, value in values.items():
            self[name] = value

    def __setitem__(self, name, value):
        if str(name).startswith("_"):
            raise sandbox.SecurityError(f"a namespace cannot have the attribute {name!r}")
        super().__setitem__(name, value)


class _Environment(sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset("+ * ** %".split())

    def __init__(self):
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, ext.loopcontrols]
        )
        self.filters["tojson"] = _tojson
        self.filters = {name: _limited(name, function) for name, function in self.filters.items()}
        self.globals.update(
            raise_exception=_raise_exception,
            strftime_now=_strftime_now,
            dict=_Dict(),
            namespace=_Namespace,
        )
        self.globals.pop("lipsum")
        self.steps = 0

    def step(self):
        self.steps += 1
        if self.steps > STEPS:
            raise Limit(f"it runs more than {STEPS:,} iterations")

    @staticmethod
    def concat(parts):
        parts = list(parts)
        _check(sum(map(len, parts)))
        return "".join(parts)

    def joined(self, *parts):
        return self.concat(map(str, parts))

    def call_binop(self, context, operator, left, right):
        sizes = [
            value.bit_length()
            if type(value) is int
            else len(value)
            if hasattr(value, "__len__")
            else 0
            for value in (left, right)
        ]
        if operator == "%" and isinstance(left, str):
            _check_format(left)
        elif type(left) is int and type(right) is int and operator in ("*", "**"):
            bits = sum(sizes) if operator == "*" else sizes[0] * abs(right)
            if bits > _BITS:
                raise Limit(f"it computes an integer of {bits:,} bits")
        elif operator == "*":
            for value, times in (left, right), (right, left):
                if hasattr(value, "__len__") and isinstance(times, int):
                    _check(len(value) * max(times, 0))
        elif operator == "+" and hasattr(left, "__len__"):
            _check(sum(sizes))
        return super().call_binop(context, operator, left, right)

    def call(self, context, function, /, *args, **kwargs):
        method = getattr(function, "__wrapped__", function)
        text, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(text, str):
            _check_call(name, (text, *args), kwargs)
        result = super().call(context, function, *args, **kwargs)
        _check(len(result) if isinstance(result, str | list | tuple) else 0)
        return result


def _limited(name, function):
    """Returns a filter that calls `function`, with limits on its arguments and its result."""

    @functools.wraps(
        function
    )  # copies the attribute that states whether the first argument is Jinja's context
    def limited(*args, **kwargs):
        _check_call(name, args[hasattr(function, "jinja_pass_arg") :], kwargs)
        result = function(*args, **kwargs)
        _check(len(result) if isinstance(result, str | list | tuple) else 0)
        return result

    return limited


def _check_call(name, args, kwargs):
    """Raises `Limit` if a string method or a filter would return too large a value for the given
    arguments."""
    for value in (*args, *kwargs.values()):
        _check(value if type(value) is int else 0)
    if name in ("format", "format_map"):
        _check_format(str(args[0]))
    if name == "replace" and len(args) > 2:
        text, old, new = map(str, args[:3])
        _check(len(text) + text.count(old) * len(new))
    if name == "join" and len(args) > 1:
        _check(
            max(
                len(value) if hasattr(value, "__len__") else sandbox.MAX_RANGE for value in args[:2]
            )
            * min(
                len(value) if hasattr(value, "__len__") else sandbox.MAX_RANGE for value in args[:2]
            )
        )


def _check_format(text):
    if _WIDTH.search(text):
        raise Limit(f"the format {text[:80]!r} has too wide a field")


def _check(size):
    if size > LARGEST:
        raise Limit(f"it creates a value of more than {LARGEST:,} characters or elements")


def _tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    """Converts a value to JSON, without the HTML escapes of Jinja's own filter."""
    return json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message):
    raise Rejected(message)


def _strftime_now(form):
    return datetime.datetime.now().strftime(form)
