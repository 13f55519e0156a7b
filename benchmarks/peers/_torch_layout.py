"""PyTorch's layouts, which Equinox shares: images and kernels channels first, dense kernels [out, in]."""

import numpy as np


def channels_first(kernel):
    """[*window, in, out] to [out, in, *window], contiguous."""
    n = kernel.ndim
    return np.ascontiguousarray(kernel.transpose(n - 1, n - 2, *range(n - 2)))


def transposed(batches):
    """Images [batch, height, width, channels] to [batch, channels, height, width]; everything else as it is."""
    return [(x.transpose(0, 3, 1, 2) if x.ndim == 4 else x, y) for x, y in batches]
