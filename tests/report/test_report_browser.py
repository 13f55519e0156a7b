"""The page of a report in Chromium: controls, keys, widths, dark and light. Skipped without a
browser."""

import pytest
from browser import chromium
from test_report import fit

from fnet import report
from fnet import training as tr

pytestmark = pytest.mark.exhaustive
SHOWN = "[...document.querySelectorAll('.keys')].map(e => e.innerText.replaceAll('\\n', ' | '))"
PATHS = "document.querySelectorAll('.plot .curve').length"
OUTSIDE = """[...document.querySelectorAll('main *')].filter(e => {
  const r = e.getBoundingClientRect();
  return r.width && r.right > innerWidth + 1 && !e.closest('.scroll, pre, nav, svg');
}).map(e => e.outerHTML.slice(0, 120))"""


@pytest.fixture(scope="module")
def page_file(tmp_path_factory):
    """Three seeds of one configuration, and a run of another one."""
    folder = tmp_path_factory.mktemp("runs")
    for name, config in {
        "a": {"rate": 1, "seed": 0},
        "b": {"rate": 1, "seed": 1},
        "c": {"rate": 1, "seed": 2},
        "other": {"rate": 2, "seed": 0},
    }.items():
        fit(folder / name, 30, config={"width": 3} | config)
        tr.save_predictions(
            folder / name, [[0.9, 0.1]] * 3, [0, 1, 1], images=[[[[0.5]] * 4] * 4] * 3
        )
    return report.write([folder / name for name in ("a", "b", "c", "other")])


@pytest.mark.parametrize("width, dark", [(1600, False), (400, True)])
def test_the_report_in_a_browser(page_file, width, dark):
    with chromium() as page:
        page.open(page_file, width, 800, dark)
        assert page.js("document.documentElement.scrollWidth") <= width and page.js(OUTSIDE) == []
        assert "test, 3 seeds of a" in page.js(SHOWN)[0] and "test, other" in page.js(SHOWN)[0]
        curves = page.js(PATHS)
        assert page.js("document.querySelectorAll('.plot .band').length") > 0
        page.click("document.getElementById('bands')")
        assert (
            page.js("document.querySelectorAll('.plot .band').length") == 0
            and page.js(PATHS) > curves
        )
        assert "test, b" in page.js(SHOWN)[0]
        page.click("document.querySelectorAll('#runs button')[3]")
        assert "other" not in page.js(SHOWN)[0]
        page.click("document.querySelector('[data-scale=log]')")
        assert (
            page.js("document.querySelector('[data-scale=log]').getAttribute('aria-pressed')")
            == "true"
        )
        page.click("document.querySelector('.plot')")
        page.js("document.querySelector('.plot').focus()")
        page.press("ArrowRight")
        assert page.js("document.getElementById('tip').innerText").startswith("step ")
        background = page.js("getComputedStyle(document.body).backgroundColor")
        page.click("document.getElementById('theme')")
        assert page.js("getComputedStyle(document.body).backgroundColor") != background
        images = page.js(
            "Promise.all([...document.images].map(i => (i.loading = 'eager', i.decode().then("
            "() => i.naturalWidth))))"
        )
        assert images == [4] * 8
        page.check()
