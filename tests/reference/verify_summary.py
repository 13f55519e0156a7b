"""`introspect.summary` against torchinfo, for the same networks in PyTorch; a part of
verify_pretrained.py."""

import jax
from verifying import check, needed

from fnet import introspect, models


def macs(summary):
    """Multiplications of products and convolutions, in units of torchinfo's "mult-adds"."""
    return summary.total.forward.matmul // 2


@check
def summaries_against_torchinfo():
    """introspect.summary counts the parameters and multiplications that torchinfo counts."""
    torch = needed("torch", "PyTorch")
    torchinfo = needed("torchinfo", "torchinfo")
    import torch_networks

    def of_torch(network, kinds, **options):
        """(parameters by module and in all, mult-adds of some kinds of modules without their
        biases)"""
        info = torchinfo.summary(network.eval(), verbose=0, depth=9, **options)
        rows = [row for row in info.summary_list if row.is_leaf_layer]
        biases = sum(
            row.module.bias.numel()
            * row.output_size[0]
            * (1 if row.class_name == "Linear" else row.output_size[2] * row.output_size[3])
            for row in rows
            if row.class_name in kinds and row.module.bias is not None
        )
        adds = sum(row.macs for row in rows if row.class_name in kinds)
        return info.total_params, adds - biases

    summary = introspect.summary(
        models.MobileNetV2(classes=1000), jax.ShapeDtypeStruct((2, 96, 96, 3), "float32")
    )
    parameters, adds = of_torch(
        torch_networks.MobileNetV2(), ("Conv2d", "Linear"), input_size=(2, 3, 96, 96)
    )
    assert summary.total.parameters == parameters == 3_504_872, (
        summary.total.parameters,
        parameters,
    )
    assert macs(summary) == adds, (macs(summary), adds)
    yield f"MobileNetV2: {parameters:,} parameters and {adds:,} multiplications for 2 images of 96 pixels, as torchinfo"

    summary = introspect.summary(
        models.GPT(1000, 64, 3, 4, context=32), jax.ShapeDtypeStruct((2, 32), "int32")
    )
    tokens = torch.zeros((2, 32), dtype=torch.int64)
    parameters, _ = of_torch(torch_networks.GPT(1000, 64, 3, 4, 32), (), input_data=tokens)
    assert summary.total.parameters == parameters, (summary.total.parameters, parameters)
    yield f"GPT: {parameters:,} parameters, as torchinfo"
