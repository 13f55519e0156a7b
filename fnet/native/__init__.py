"""Kernels in C++ for operations that XLA computes slowly on CPUs. `fnet.transforms.tune` uses them.

`library` compiles them with the system's compiler when they are first needed, and keeps them in the
cache folder. Each operation is a primitive whose result is equal to that of JAX's own operation up
to rounding. Where the kernels cannot be used, such as in a program that is exported, differentiated
or divided over devices, the primitive is JAX's own operation.

- `convolution`, `convolution_p`, `form`: convolutions and their gradients.
- `packed_product`, `packed_product_p`, `suits`: products with matrices of 4 or 8 bits.
- `skinny_product`, `skinny_product_p`, `is_skinny`: products of a few rows and a large matrix.
- `recurrence`, `recurrence_p`, `recurrence_form`, `supported`: recurrent layers and their gradients.
- `library`, `Library`, `missing`: the compiled kernels, or the reason why there are none.
"""

from fnet.native._convolution import convolution, convolution_p, form
from fnet.native._library import Library, library, missing
from fnet.native._packed import packed_product, packed_product_p, suits
from fnet.native._recurrent import recurrence, recurrence_form, recurrence_p, supported
from fnet.native._skinny import is_skinny, skinny_product, skinny_product_p

__all__ = [
    "Library",
    "convolution",
    "convolution_p",
    "form",
    "is_skinny",
    "library",
    "missing",
    "packed_product",
    "packed_product_p",
    "recurrence",
    "recurrence_form",
    "recurrence_p",
    "skinny_product",
    "skinny_product_p",
    "suits",
    "supported",
]
