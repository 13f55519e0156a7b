"""Model compression: quantization, LoRA, pruning and distillation.

    from fnet import compress

    params = compress.quantize(params, {"blocks/.*": compress.Int4(group=32), "embed": compress.Int8(axes=-1)})
    params = compress.lora(key, params, {"blocks/attention/.*": 8})
    logits = ft.use_implicit_arrays(model)(params, x)

    shrunk = compress.shrink(model, params, x, fraction=0.5)
    logits = shrunk.f(shrunk.params, x)

`quantize` and `lora` return the tree of parameters with implicit arrays (`ImplicitArray`) among its
leaves. Each stands for one array and stores others, such as codes and scales. It is a pytree of
these, so you can shard and save the tree as usual. `ft.use_implicit_arrays(f)` is f for such
parameters, and can be compiled and differentiated."""

from fnet.compress._advise import Advice, Advised, advise
from fnet.compress._calibrate import InputStatistics, calibrate
from fnet.compress._distil import distillation_loss, hidden_loss
from fnet.compress._fake import FakeQuantized, convert, fake_quantize
from fnet.compress._formats import NF4, Float8, Int4, Int8
from fnet.compress._lora import LowRank, lora, merge
from fnet.compress._masks import PruneState, prune
from fnet.compress._quantize import Quantized, materialize, quantize, size
from fnet.compress._shrink._shrink import ShrinkReport, Shrunk, shrink
from fnet.jaxpr import ImplicitArray

__all__ = [
    "NF4",
    "Advice",
    "Advised",
    "FakeQuantized",
    "Float8",
    "ImplicitArray",
    "InputStatistics",
    "Int4",
    "Int8",
    "LowRank",
    "PruneState",
    "Quantized",
    "ShrinkReport",
    "Shrunk",
    "advise",
    "calibrate",
    "convert",
    "distillation_loss",
    "fake_quantize",
    "hidden_loss",
    "lora",
    "materialize",
    "merge",
    "prune",
    "quantize",
    "shrink",
    "size",
]
