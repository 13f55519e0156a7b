"""The transforms under which state and effects are tested."""

import jax
import jax.numpy as jnp
import pytest
from checks import sampled

from fnet import transforms as ft


def rewrite(f):
    return ft.rewrite(f, lambda *_: NotImplemented)


TRANSFORMS = {
    "rewrite": rewrite,
    "autocast": lambda f: ft.autocast(f, "bfloat16"),
    "tune": lambda f: ft.tune(f, "cpu"),
    "rematerialize": ft.rematerialize,
    "all, jitted": lambda f: jax.jit(rewrite(ft.rematerialize(ft.tune(f, "cpu")))),
}
each_transform = pytest.mark.parametrize(
    "transform", sampled(TRANSFORMS, ["autocast", "all, jitted"])
)
X = jnp.arange(1.0, 5.0)
