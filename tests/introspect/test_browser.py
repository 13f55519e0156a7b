"""The page of a graph in Chromium: clicks, keys, search, zoom, and widths. Skipped without a
browser."""

import jax
import pytest
from browser import chromium
from test_graph import CHIP, MODEL, spec, step_of

from fnet import introspect

pytestmark = pytest.mark.exhaustive
DRAWN = "[...document.querySelectorAll('#view g[data-id]')]"
SHOWN = DRAWN + ".map(e => NODES[e.dataset.id].path || NODES[e.dataset.id].name)"
BOX = DRAWN + ".find(e => NODES[e.dataset.id].path === '{}')"
FOCUSED = "document.activeElement.dataset.id && NODES[document.activeElement.dataset.id].path"
OVERLAPS = """(() => {
  const boxes = [...document.querySelectorAll('#view g[data-id]')].filter(e => !e.querySelector('.frame'));
  const at = boxes.map(e => e.querySelector('rect').getBoundingClientRect());
  const texts = [...document.querySelectorAll('#view g[data-id] > text')].filter(e => {
    const t = e.getBoundingClientRect(), r = e.parentNode.querySelector('rect').getBoundingClientRect();
    return t.left < r.left || t.right > r.right; }).map(e => e.textContent);
  const labels = [...document.querySelectorAll('#view .type')].map(e => [e.getBoundingClientRect(), e.textContent]);
  const apart = (a, b) => a.right <= b.left + 1 || b.right <= a.left + 1 || a.bottom <= b.top + 2 ||
    b.bottom <= a.top + 2;
  const overlaps = (items, what) => items.flatMap(([a, s], i) => items.slice(i + 1).filter(([b]) => !apart(a, b)).map(
    ([b, t]) => what + ' overlap: ' + s + ', ' + t));
  return [...texts.map(t => 'text wider than its box: ' + t),
    ...overlaps(boxes.map((e, i) => [at[i], e.textContent]), 'boxes'), ...overlaps(labels, 'labels')];
})()"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    step, state, batch = step_of(MODEL, spec(2, 5, 8))
    introspect.graph(MODEL, spec(2, 5, 8), folder / "model.html", chip=CHIP, depth=0)
    introspect.graph(jax.jit(step), state, batch, folder / "step.html", chip=CHIP, depth=2)
    return folder


def test_clicks_and_keys(pages):
    with chromium() as page:
        page.open(pages / "model.html")
        assert page.js(SHOWN) == ["input", "0", "blocks", "norm", "head", "result"]
        page.click(BOX.format("blocks"))
        assert {"blocks/attend", "blocks/mlp"} <= set(page.js(SHOWN))
        assert page.js("document.getElementById('details').innerText").startswith("×\nblocks × 3")
        page.click(BOX.format("blocks/attend"))
        assert "blocks/attend/attention" in page.js(SHOWN)
        page.click(BOX.format("blocks"))  # its frame
        assert page.js(SHOWN) == ["input", "0", "blocks", "norm", "head", "result"]
        assert page.js(FOCUSED) == "blocks"
        page.press("ArrowRight")  # expands, as Enter does
        assert "blocks/mlp" in page.js(SHOWN)
        page.press("ArrowRight")
        assert page.js(FOCUSED) == "blocks/attend"
        page.press("ArrowLeft")  # it was left expanded
        page.press("ArrowDown")
        assert page.js(FOCUSED) == "blocks/mlp"
        page.press("Enter")
        assert "blocks/mlp/3" in page.js(SHOWN) and page.js(FOCUSED) == "blocks/mlp"
        page.press("ArrowLeft")
        page.press("ArrowLeft")
        page.press("ArrowLeft")
        assert page.js(SHOWN) == ["input", "0", "blocks", "norm", "head", "result"]
        before = page.js("scale")
        page.press("+")
        assert page.js("scale") > before
        page.press("0")
        page.press("Escape")
        assert page.js("document.getElementById('details').hidden")
        page.press("/")
        for letter in "query":
            page.press(letter)
        page.press("Enter")
        assert page.js(FOCUSED) == "blocks/attend/attention/query"
        page.check()


@pytest.mark.parametrize("name", ["model", "step"])
@pytest.mark.parametrize("width, dark", [(1600, False), (400, True)])
def test_nothing_overlaps_or_is_cut(pages, name, width, dark):
    with chromium() as page:
        page.open(pages / f"{name}.html", width, 800, dark)
        for _ in range(4):
            assert page.js(OVERLAPS) == []
            page.click("document.getElementById('more')")
        assert page.js("document.documentElement.scrollWidth") <= width
        for button in ("as-table", "as-table", "theme", "fit", "in", "out", "less"):
            page.click(f"document.getElementById('{button}')")
        for button in range(page.js("document.querySelectorAll('[data-metric]').length")):
            page.click(f"document.querySelectorAll('[data-metric]')[{button}]")
            assert (
                page.js("document.querySelectorAll('[data-metric][aria-pressed=true]').length") == 1
            )
        page.check()


def test_a_link_opens_a_scope(pages):
    with chromium() as page:
        page.open(pages / "model.html", fragment="#blocks/mlp")
        assert page.js(FOCUSED) == "blocks/mlp" and "blocks/attend" in page.js(SHOWN)
        page.check()
