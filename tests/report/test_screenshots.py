"""Every kind of page at two widths, in light and dark: nothing is cut, and nothing is dark on dark.

With SCREENSHOTS=FOLDER the pictures are kept there, for a person to look at:
    SCREENSHOTS=/tmp/shots pytest -m slow tests/report/test_screenshots.py
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench import report
from bench.planning import compose
from bench.report import kinds
from bench.report.sets import load
from helpers import answers_log, kernels_log, serving, serving_log, study_results
from helpers.types import MakeLog

pytestmark = [pytest.mark.slow, pytest.mark.starts]
screens = pytest.importorskip("helpers.screens")

_CONTRAST = """
const parts = (color) => color.match(/[\\d.]+/g).slice(0, 3).map((one) => {
  const share = one / 255;
  return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
});
const light = (color) => { const [r, g, b] = parts(color); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
const page = light(getComputedStyle(document.body).backgroundColor);
const ratio = (color) => {
  const [low, high] = [page, light(color)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
};
const texts = [...document.querySelectorAll(".chart text"), ...document.querySelectorAll("main p, main td, main h2")];
return Math.min(...texts.filter((one) => one.textContent.trim() && one.checkVisibility()).map((one) => {
  const style = getComputedStyle(one);
  return ratio(one instanceof SVGElement ? style.fill : style.color);
}));
"""
"""The lowest contrast of a text with the page, as WCAG defines it."""
LEAST_CONTRAST = 3.0
"""WCAG's minimum for large text and graphics."""


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with screens.browser(tmp_path_factory.mktemp("chromium")) as driver:
        yield driver


def training(folder: Path, written_log: MakeLog) -> Path:
    """A set with an invalid trial; its folder has the name of a run."""
    (run := folder / "20261126-075923-lora_tiny-local-c766").mkdir(parents=True)
    for seed, changes in enumerate(({}, {}, {"status": "aborted"})):
        written_log(seed=seed, evals=(0.95, 0.93, 0.9242), **changes).rename(run / f"result_{seed}.txt")
    return report.write(load([run]), folder / "out")


def compared(folder: Path, written_log: MakeLog) -> Path:
    runs = [folder / f"20261126-075923-lora_tiny-with_a_long_name-local-{end}" for end in ("c766", "5ca0")]
    for run in runs:
        run.mkdir(parents=True)
        for seed in range(2):
            written_log(seed=seed, evals=(0.95, 0.93, 0.9242)).rename(run / f"result_{seed}.txt")
    return report.write(load(runs), folder / "out")


def generation(folder: Path, written_log: MakeLog) -> Path:
    (folder / "run").mkdir(parents=True)
    words = ("engine=huggingface", "cluster=dgxh200", "model.weights=random", "cluster.ranks_per_node=1")
    plan: Any = compose.compose(["task=generate_7b", *words, "task.generation.order=one_by_one"])
    answers_log.write(plan, folder / "run/result_0.txt", answers_log.rows(plan), run_s=77.5)
    return kinds.load([folder / "run"]).write(folder / "out", title=None)


def served(folder: Path, written_log: MakeLog) -> Path:
    (folder / "run").mkdir(parents=True)
    plan = serving.planned("task.serving.arrivals=[burst]", "task.serving.rates=[]")
    serving_log.write(plan, folder / "run/result_0.txt", {"burst": [n / 50 for n in range(1, 201)]})
    return kinds.load([folder / "run"]).write(folder / "out", title=None)


def kernels(folder: Path, written_log: MakeLog) -> Path:
    (folder / "run").mkdir(parents=True)
    plan: Any = compose.compose(["task=attention", "cluster=dgxh200"])
    kernels_log.write(plan, folder / "run/result_0.txt")
    return kinds.load([folder / "run"]).write(folder / "out", title=None)


def study(folder: Path, written_log: MakeLog) -> Path:
    report.write_study(study_results.precisions(folder / "study"), folder / "out")
    return folder / "out/index.html"


PAGES: dict[str, Callable[[Path, MakeLog], Path]] = {
    "training": training,
    "compare": compared,
    "generation": generation,
    "serving": served,
    "kernels": kernels,
    "study": study,
}
MAX_BYTES = 3_000_000
"""Of a page with its figures; the plotting library alone has 5 MB."""


@pytest.mark.parametrize("name", PAGES)
def test_nothing_is_cut_and_everything_can_be_read(
    name: str, tmp_path: Path, written_log: MakeLog, chromium: Any
) -> None:
    page = PAGES[name](tmp_path / "page", written_log)
    assert (
        page.stat().st_size < MAX_BYTES
        and "None" not in page.read_text().partition("<main>")[2].partition("<script")[0]
    )
    kept = Path(os.environ.get("SCREENSHOTS", tmp_path / "shots"))
    kept.mkdir(parents=True, exist_ok=True)
    for width in screens.WIDTHS:
        for scheme in screens.SCHEMES:
            cut = screens.show(chromium, page.as_uri(), width=width, scheme=scheme)
            screens.picture(chromium, kept / f"{name}_{width}_{scheme}.png")
            assert cut == [], (width, scheme)
            lowest = chromium.execute_script(_CONTRAST)
            assert lowest >= LEAST_CONTRAST, (width, scheme, lowest)
    assert chromium.get_log("browser") == []
