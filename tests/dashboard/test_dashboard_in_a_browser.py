"""The dashboard as its own process, in a real browser: live curves, a comparison by click, the end by Ctrl-C."""

import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bench.contract import mllog
from bench.contract.mllog import Writer
from helpers.clock import Clock, turned
from helpers.paths import ROOT
from helpers.planted_runs import plant, under_way

pytestmark = [pytest.mark.slow, pytest.mark.starts]
screens = pytest.importorskip("helpers.screens")
By = pytest.importorskip("selenium.webdriver.common.by").By
Wait = pytest.importorskip("selenium.webdriver.support.wait").WebDriverWait


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return turned(monkeypatch)


@pytest.fixture
def root(tmp_path: Path, clock: Clock) -> Path:
    for name, speeds in (("fast", (200.0, 202.0)), ("slow", (100.0, 101.0))):
        plant(tmp_path / "runs" / name, clock, *speeds)
    return tmp_path / "runs"


@contextmanager
def dashboard(root: Path, *words: str) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """Start the dashboard; yield the printed address, and the process."""
    command = [sys.executable, "-m", "bench", "dashboard", str(root), *words]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as started:
        try:
            assert started.stdout is not None and started.stderr is not None
            address = re.search(r"http://127\.0\.0\.1:\d+/\?token=\S+", started.stdout.readline())
            assert address, started.stderr.read()
            yield address[0], started
        finally:
            started.kill()


def train(log: Writer, clock: Clock, samples: int) -> None:
    clock.now_s += 10
    log.event(mllog.TRAIN_LOSS, 100 / samples, samples_count=samples)


def test_curves_of_a_run_under_way_grow_and_runs_are_compared_by_click(
    root: Path, tmp_path: Path, clock: Clock
) -> None:
    with under_way(root / "now") as log, dashboard(root) as (url, _), screens.browser(tmp_path / "b") as page:
        page.get(url)
        assert "token" not in page.current_url, "the token leaves the address"
        page.find_element(By.LINK_TEXT, "now").click()

        def has_points(count: int) -> Any:
            script = "return document.querySelector('[data-chart=training_losses] .plot')?._fullData?.[0]?.x?.length"
            return Wait(page, screens.WAIT_S).until(lambda _: page.execute_script(script) == count)

        train(log, clock, 80)
        assert has_points(1), "a chart that was not there when the page was opened"
        train(log, clock, 160)
        train(log, clock, 240)
        assert has_points(3)
        assert "trained" in page.find_element(By.ID, "trials").text

        page.find_element(By.LINK_TEXT, "Runs").click()
        assert not page.find_element(By.ID, "compare").is_enabled()
        page.find_element(By.ID, "filter").send_keys("fast")
        shown = [row for row in page.find_elements(By.CSS_SELECTOR, "#runs tbody tr") if row.is_displayed()]
        assert len(shown) == 1
        page.find_element(By.ID, "filter").clear()
        page.find_element(By.ID, "filter").send_keys(" ")
        for name in ("fast", "slow"):
            page.find_element(By.CSS_SELECTOR, f'[aria-label="Compare {name}"]').click()
        page.find_element(By.ID, "compare").click()
        assert "slower than fast" in page.find_element(By.CSS_SELECTOR, ".lead").text
        errors = [entry["message"] for entry in page.get_log("browser") if entry["level"] == "SEVERE"]
        assert errors == [], "none, such as of the security policy"


def test_two_run_at_once_and_end_by_ctrl_c(root: Path) -> None:
    with dashboard(root) as (first, one), dashboard(root) as (second, other):
        assert first.partition("/?")[0] != second.partition("/?")[0], "another free port"
        for url in (first, second):
            opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
            assert opener.open(url, timeout=60).status == 200
            with pytest.raises(urllib.error.HTTPError, match="403"):
                urllib.request.urlopen(url[:-3], timeout=60)
        one.send_signal(signal.SIGINT)
        other.send_signal(signal.SIGTERM)
        for ended in (one, other):
            out, err = ended.communicate(timeout=120)
            assert (ended.returncode, err) == (0, "") and out.endswith("the dashboard has ended\n")
