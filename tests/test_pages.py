"""The Python blocks of README and the pages run, from the top of each page to its end."""

import re
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("page", ["README.md", "docs/export.md", "docs/interop.md", "docs/introspection.md",
                                  "docs/layers.md", "docs/models.md", "docs/parallel.md", "docs/performance.md",
                                  "docs/transforms.md"])
def test_a_page_runs(page):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert blocks
    # Pages are read by users with JAX's defaults; Optax's Adam needs the standard promotion.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        exec(compile("\n".join(blocks), page, "exec"), {"__name__": page})
