"""The blocks of a transformer: stacked in one scan, or one by one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax

from fnet import layers as nn


class Blocks(nn.Layer):
    """`depth` copies of a block one after the other.

    Args:
        block: the layer; its output has the shape and dtype of its input.
        depth: how many.
        stacked: True: one `nn.Stack`, whose compile time does not grow with the depth; every parameter has an axis of
            length depth in front. False: one after the other, at "0", "1", ...; a decoder's step, which reads every
            weight once, then reads them in place: on a CPU about half as long again as many tokens a second.

    The numbers are the same either way. Options go to every block alike.
    """

    block: nn.Layer
    depth: int
    stacked: bool = True

    def forward(self, scope: nn.Scope, x, **options):
        if self.stacked:
            return nn.Stack(self.block, self.depth)(scope, x, **options)
        for number in range(self.depth):
            x = self.block(scope[str(number)], x, **options)
        return x


def unstack(model: nn.Layer, params: Mapping) -> tuple[nn.Layer, dict]:
    """A model with `stacked=False`, and its parameters taken apart: the form in which it decodes fastest on a CPU.

        model, params = models.unstack(model, params)

    Args:
        model: a GPT, Llama or Bert.
        params: its parameters; those of the blocks are copied.

    Raises:
        TypeError: where the model has no stacked blocks.
    """
    if not getattr(model, "stacked", False):
        raise TypeError(f"unstack takes a model with stacked=True, whose blocks are one nn.Stack; got {model!r}")
    leaves, structure = jax.tree.flatten(params["blocks"])
    apart = {str(i): jax.tree.unflatten(structure, [leaf[i] for leaf in leaves]) for i in range(model.depth)}
    return dataclasses.replace(model, stacked=False), {**params, "blocks": apart}
