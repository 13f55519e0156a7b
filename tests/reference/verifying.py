"""What the checks of verify_pretrained.py and verify_text.py share."""

import importlib

from fnet.models import pretrained

CHECKS = {}


class Skip(Exception):
    """What this check needs is not here."""


def check(function):
    """Puts a check into the table."""
    CHECKS[function.__name__] = function
    return function


def weights(name):
    """Where the weights of a name lie."""
    try:
        return pretrained.find(name)
    except FileNotFoundError as error:
        raise Skip(str(error)) from None


def needed(module, what):
    """The module, where it is installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise Skip(f"{what} is not installed ({error.name})") from None
