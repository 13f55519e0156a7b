"""The layouts of PyTorch and Equinox: images and convolution kernels have channels first, dense
kernels are [out,
in]."""

import numpy as np


def channels_first(kernel):
    """Transposes a kernel from [*window, in, out] to [out, in, *window]. The result is contiguous."""
    n = kernel.ndim
    return np.ascontiguousarray(kernel.transpose(n - 1, n - 2, *range(n - 2)))


def transposed(batches):
    """Transposes images from [batch, height, width, channels] to [batch, channels, height, width].
    Other arrays are unchanged."""
    return [(x.transpose(0, 3, 1, 2) if x.ndim == 4 else x, y) for x, y in batches]
