"""The public names of fnet."""

import importlib
import inspect

import jax

PACKAGES = (
    "layers",
    "transforms",
    "training",
    "parallel",
    "models",
    "models.pretrained",
    "hardware",
    "cost",
    "introspect",
    "compress",
    "export",
    "serve",
    "report",
    "search",
    "federated",
)


def by_package() -> dict[str, list[str]]:
    """Returns {package: names}, without modules and without what is re-exported from JAX."""
    result = {}
    for package in PACKAGES:
        module = importlib.import_module(f"fnet.{package}")
        result[package] = [
            name
            for name in module.__all__
            if not inspect.ismodule(value := getattr(module, name))
            and getattr(jax, name, None) is not value
        ]
    return result


def without_example() -> list[str]:
    """Returns the public names whose docstring has no example."""
    modules = {package: importlib.import_module(f"fnet.{package}") for package in PACKAGES}
    return [
        f"{package}.{name}"
        for package, names in by_package().items()
        for name in names
        if callable(value := getattr(modules[package], name)) and ">>>" not in (value.__doc__ or "")
    ]


def file_names() -> dict[str, str]:
    """Returns {name: file} for functions whose pages would differ from a class's only by case, as
    `plan` and `Plan`."""
    result = {}
    for package in PACKAGES:
        public = importlib.import_module(f"fnet.{package}").__all__
        for name in public:
            if name.islower() and any(other != name and other.lower() == name for other in public):
                result[f"fnet.{package}.{name}"] = f"fnet.{package}.{name}-function"
    return result


if __name__ == "__main__":
    print(
        sum(map(len, by_package().values())),
        "public names; without an example:",
        *without_example(),
    )
