"""Pages in a real browser: tooltips of charts, sorting of tables, and no network requests."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench import report
from bench.report.sets import load
from helpers import study_results
from helpers.types import MakeLog

pytestmark = pytest.mark.starts
webdriver = pytest.importorskip("selenium.webdriver")
By = pytest.importorskip("selenium.webdriver.common.by").By
Wait = pytest.importorskip("selenium.webdriver.support.wait").WebDriverWait
screens = pytest.importorskip("helpers.screens")
WAIT_S = 20
"""Timeout, long enough for a busy machine."""

Open = Callable[[Path], Any]


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with screens.browser(tmp_path_factory.mktemp("chromium")) as driver:
        yield driver


@pytest.fixture
def opened(chromium: Any) -> Iterator[Open]:
    """Open a page; at the end of the test, check that it requested only itself and logged no errors."""

    def open_page(path: Path) -> Any:
        chromium.get_log("performance")
        chromium.get(path.as_uri())
        pages.append(path.as_uri())
        return chromium

    pages: list[str] = []
    yield open_page
    messages = [json.loads(entry["message"])["message"] for entry in chromium.get_log("performance")]
    requests = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    of_pages = [url for url in requests if not url.startswith(("data:", "blob:", "chrome:"))]
    assert {url.partition("#")[0] for url in of_pages} == set(pages)
    assert chromium.get_log("browser") == []


def arms(page: Any) -> list[str]:
    """Return the first column of the table of a study from top to bottom."""
    return [row.text.split("\n")[0] for row in page.find_elements(By.CSS_SELECTOR, ".grid tbody td:first-child")]


def heading(page: Any, name: str) -> Any:
    return next(th for th in page.find_elements(By.CSS_SELECTOR, ".grid th") if th.text.startswith(name))


def chart(page: Any, name: str) -> Any:
    """Scroll a chart into view, which draws it, and return it."""
    place = page.find_element(By.CSS_SELECTOR, f'[data-chart="{name}"]')
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", place)
    Wait(page, WAIT_S).until(lambda _: place.find_elements(By.CSS_SELECTOR, ".plot .draglayer"))
    return place


def pointed_at(page: Any, place: Any, x: float, y: float) -> str:
    """Return the tooltip of a chart with the pointer at a value of its axes."""
    at = """const plot = arguments[0].querySelector(".plot"), box = plot.getBoundingClientRect();
        const { xaxis, yaxis, _size: margin } = plot._fullLayout;
        return [box.x + margin.l + xaxis.d2p(arguments[1]), box.y + margin.t + yaxis.d2p(arguments[2])]"""
    left, top = (round(pixels) for pixels in page.execute_script(at, place, x, y))
    pointer = webdriver.ActionChains(page)
    for offset in (2, 0):  # the chart reacts to pointer motion
        pointer.w3c_actions.pointer_action.move_to_location(left + offset, top)
    pointer.perform()
    layer = place.find_element(By.CSS_SELECTOR, ".hoverlayer")
    return str(Wait(page, WAIT_S).until(lambda _: layer.text))


def test_study_page_sorts_by_click_and_shows_tooltips(tmp_path: Path, opened: Open) -> None:
    report.write_study(study_results.precisions(tmp_path / "study"), tmp_path / "out")
    page = opened(tmp_path / "out" / "index.html")
    as_written = ["bf16", "published [P1]", "fp8", "fp32", "int8", "published [P1]", "transformers"]
    assert arms(page) == as_written
    orders = []
    for _ in range(3):
        heading(page, "throughput").click()
        orders.append(arms(page))
    assert orders == [
        ["fp32", "bf16", "published [P1]", "fp8", "int8", "published [P1]", "transformers"],
        ["fp8", "bf16", "published [P1]", "fp32", "int8", "published [P1]", "transformers"],
        as_written,
    ], "ascending, descending, as written; published figures stay with theirs, and what has no number comes last"
    for _ in range(2):
        heading(page, "arm").send_keys("\n")
    assert arms(page) == ["transformers", "int8", "published [P1]", "fp32", "fp8", "bf16", "published [P1]"], (
        "by the keyboard"
    )

    shown = pointed_at(page, chart(page, "bars_1"), 10_000, 0)
    assert "bf16, measured" in shown and "17,326 ± 27 tokens/s/GPU" in shown and "n = 4" in shown
    contents = [link.text for link in page.find_elements(By.CSS_SELECTOR, "#contents a")]
    assert contents[:4] == ["Tables", "Published figures", "Comparisons", "Figures"]


def test_sets_are_compared_on_one_screen(written_log: MakeLog, tmp_path: Path, opened: Open) -> None:
    folders = [tmp_path / name for name in ("before", "<b>after")]
    for folder in folders:
        folder.mkdir()
        for seed in range(2):
            written_log(seed=seed, evals=(0.95, 0.93, 0.9242)).rename(folder / f"result_{seed}.txt")
    page = opened(report.write(load(folders), tmp_path / "out"))
    first, second = (card.rect for card in page.find_elements(By.CSS_SELECTOR, ".sets > section"))
    assert first["y"] == second["y"] < 400 and first["x"] + first["width"] <= second["x"]

    place = chart(page, "evaluations")
    shown = pointed_at(page, place, 2304, 0.9242)
    assert "0.9242" in shown and "<b>after, trial 1" in shown, "names are shown as they are"
    place.find_element(By.XPATH, './/button[text()="by minutes"]').click()
    title = place.find_element(By.CSS_SELECTOR, ".xtitle")
    assert title.text == "minutes since run_start"
    buttons = {button.get_attribute("data-title") for button in page.find_elements(By.CSS_SELECTOR, ".modebar-btn")}
    assert buttons == {"Download plot", "Zoom", "Pan", "Reset axes"}, "none that sends the data away"

    folded = page.find_element(By.CSS_SELECTOR, "main details")
    assert not folded.get_property("open")

    def contents() -> list[str]:
        return [link.text for link in page.find_elements(By.CSS_SELECTOR, "#contents a") if link.text]

    assert contents() == ["Comparison", "Curves", "What differs", "before", "<b>after"], "none of a folded part"
    next(link for link in page.find_elements(By.CSS_SELECTOR, "#contents a") if link.text == "before").click()
    assert folded.get_property("open")
    Wait(page, WAIT_S).until(lambda _: "Problems" in contents())


def test_page_makes_no_network_requests(tmp_path: Path, chromium: Any) -> None:
    """Even with an injected script: the policy allows only the page's own scripts."""
    report.write_study(study_results.precisions(tmp_path / "study"), tmp_path / "out")
    path = tmp_path / "out" / "index.html"
    planted = "<script>document.title = 'planted'</script><img src='http://127.0.0.1:9/x.png'>"
    path.write_text(path.read_text().replace("<h1>", f"{planted}<h1>"))
    chromium.get(path.as_uri())
    assert chromium.title == "BF16 against FP8, 8B LoRA"
    complaints = " ".join(entry["message"] for entry in chromium.get_log("browser"))
    assert complaints.count("Content Security Policy") == 2
