"""Model compression: quantization, LoRA, and pruning of channels, heads and hidden units.

    from fnet import compress

    params = compress.quantize(params, {"blocks/.*": compress.Int4(group=32), "embed": compress.Int8(axes=-1)})
    params = compress.lora(key, params, {"blocks/attention/.*": 8})
    logits = ft.use_implicit_arrays(model)(params, x)

    shrunk = compress.shrink(model, params, x, fraction=0.5)
    logits = shrunk.f(shrunk.params, x)

`quantize` and `lora` return a tree of parameters in which some leaves are implicit arrays
(`ImplicitArray`). An implicit array represents a parameter that is computed from several plain
arrays. For example, a quantized matrix is computed from codes and scales. An implicit array is a
pytree, and its leaves are the plain arrays. A tree with implicit arrays, such as quantized
parameters, can be sharded and saved like a tree of plain arrays. For a model f,
`ft.use_implicit_arrays(f)` is a function that also accepts implicit arrays as parameters, and that
can be compiled and differentiated.
"""

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
