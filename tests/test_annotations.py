"""Every parameter of every public function and method has a type, which editors show. mypy checks
them: `make lint`."""

import inspect

import pytest

import fnet

UNTYPED = "fnet.export.standalone._loaded"  # a part of every bundle


def functions(package):
    """(name, function) of the public functions of a package and of the public methods of its
    classes."""
    for name in package.__all__:
        value = getattr(package, name)
        if inspect.isfunction(value) and value.__module__ not in UNTYPED:
            yield name, value
        elif inspect.isclass(value) and value.__module__.startswith("fnet."):
            for attribute, member in vars(value).items():
                function = inspect.unwrap(getattr(member, "fget", member) or member)
                public = attribute in ("__init__", "__call__") or not attribute.startswith("_")
                if (
                    public
                    and inspect.isfunction(function)
                    and function.__module__.startswith("fnet.")
                    and (not attribute.endswith("_init") and function.__module__ not in UNTYPED)
                ):
                    # A field's default is a function, too.
                    yield f"{name}.{attribute}", function


@pytest.mark.parametrize("package", fnet.__all__)
def test_public_parameters_and_results_have_types(package):
    untyped = []
    for name, function in functions(getattr(fnet, package)):
        signature = inspect.signature(function)
        parameters = [
            p.name
            for p in signature.parameters.values()
            if p.annotation is p.empty and p.name not in ("self", "cls", "_cls")
        ]
        result = signature.return_annotation is signature.empty and not name.endswith("__init__")
        if parameters or result:
            untyped.append(f"{name}: {', '.join(parameters + ['result'] * result)}")
    assert not untyped, untyped
