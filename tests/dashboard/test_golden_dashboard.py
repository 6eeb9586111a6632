"""All pages of the dashboard: golden_dashboard.txt, so that a change shows its effects.

After a change on purpose, run it once with WRITE_DASHBOARD=1, and read the difference.
"""

import json
import os
import re
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from bench.contract import mllog, plan_kinds
from bench.contract.plan_kinds import GenerationPlan
from bench.dashboard.app import app
from bench.planning.compose import compose
from bench.runs import status as statuses
from bench.runs import tags
from bench.runs.command_line import with_overrides
from bench.runs.status import Ending, Status
from helpers import answers_log, golden, planned_log, planted_runs, user_tables
from helpers.clock import Clock, in_zone, turned
from helpers.golden import significant
from helpers.page import Page

GOLDEN = Path(__file__).with_name("golden_dashboard.txt")
TOKEN, HOST = "t0ken-of-this-test", "localhost:8790"
COMPARED = (("fast", "slow"), ("fast", "before", "slow"), ("fast", "answers"), ("fast", "failed"), ("same", "before"))


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with runs that ended in several ways, and one that is training."""
    planned_log.without_this_machine(monkeypatch)
    user_tables.leave_out(monkeypatch)
    clock: Clock = turned(monkeypatch)
    folder = tmp_path / "runs"
    for name, rank, speeds in (
        ("before", 16, (199.0, 201.0)),
        ("fast", 16, (200.0, 202.0)),
        ("same", 16, (199.5, 201.5)),
        ("slow", 32, (100.0, 101.0)),
    ):
        planted_runs.plant(folder / name, clock, *speeds, lora_rank=rank)
        clock.now_s += 3600
    tags.change(folder / "fast", add=["baseline"], remove=[], note="after the new driver")
    statuses.write(folder / "fast", Status(outcome=Ending.valid, exit_code=0))
    plan = compose(["task=lora_tiny", "cluster=local", "cluster.device=cpu"])
    (folder / "failed").mkdir()
    (folder / "failed/config.yaml").write_text(with_overrides("", ["task=lora_tiny", "launch.folder=x", "trials=1"]))
    planted_runs.abort(folder / "failed", plan)
    generation = compose(["task=generate_7b", "cluster=dgx1"])
    assert isinstance(generation, GenerationPlan)
    (folder / "answers").mkdir()
    (folder / "answers/plan.json").write_text(plan_kinds.dumps(generation))
    answers_log.write(generation, folder / "answers/result_0.txt", answers_log.rows(generation), run_s=77.5)
    planted_runs.prove(folder / "answers")
    (folder / "bad\x1bname").mkdir()
    (folder / "bad\x1bname/ledger.json").write_text("[]")
    for path in folder.rglob("*"):
        os.utime(path, (1_800_100_000, 1_800_100_000))
    with planted_runs.under_way(folder / "now") as log:
        log.event(mllog.TRAIN_LOSS, 2.5, samples_count=100)
        monkeypatch.setattr(time, "time_ns", lambda: clock.read_ms()[0] * 10**6)
        with in_zone("UTC"):
            yield folder


def shown(browser: TestClient, path: str, scratch: Path) -> list[str]:
    """Return what a browser shows of a page: its text, its links and its charts; of other answers the text."""
    answer = browser.get(path)
    if "html" not in answer.headers["content-type"]:
        return [f"{path}: {answer.status_code}", *answer.text.splitlines(), ""]
    scratch.write_text(answer.text)
    page = Page(scratch)
    charts = [f"{name}: {json.dumps(significant(chart))}" for name, chart in page.charts.items()]
    texts = re.split(r"\s*\n\s*", page.text.strip())
    return [f"{path}: {answer.status_code}", *texts, f"loads {', '.join(page.loads)}", *charts, ""]


@pytest.mark.long
def test_pages_of_the_dashboard_are_the_golden_ones(root: Path, tmp_path: Path) -> None:
    browser = TestClient(app(root, TOKEN), base_url=f"http://{HOST}", follow_redirects=False)
    assert browser.get(f"/?token={TOKEN}").status_code == 303
    id_of = {name: id for id, name in re.findall(r'<a href="/run/(\w+)">([^<]+)</a>', browser.get("/").text)}
    paths = ["/", "/states", "/history", "/history?task=lora70b", "/history?task=nothing", "/run/nothing", "/report"]
    paths += [f"/{kind}/{id_of[name]}" for name in sorted(id_of) for kind in ("run", "live")]
    paths += [f"/compare?{'&'.join(f'run={id_of[name]}' for name in names)}" for names in COMPARED]
    paths += [f"/compare?run={id_of['fast']}", f"/report?run={id_of['fast']}&run={id_of['answers']}"]
    lines = [line for path in paths for line in shown(browser, path, tmp_path / "page.html")]
    text = "\n".join(lines).replace(str(root), "ROOT").replace(f"?{version('plotly')}", "?VERSION")
    golden.require(text.replace(version("runstop"), "VERSION"), GOLDEN, variable="WRITE_DASHBOARD")
