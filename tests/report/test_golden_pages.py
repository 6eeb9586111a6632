"""All texts, charts and figures of a report of each kind of task: golden_pages.txt, so that a change shows its effects.

After a change on purpose, run it once with WRITE_PAGES=1, and read the difference.
"""

import json
import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from unittest import mock

import pytest
from matplotlib.figure import Figure

from bench import report
from bench.contract.plan_kinds import GenerationPlan, KernelsPlan
from bench.planning import compose
from bench.report import kinds
from helpers import (
    answers_log,
    golden,
    kernels_log,
    planned_log,
    plotted,
    serving,
    serving_log,
    study_results,
    user_tables,
)
from helpers.clock import Clock, turned
from helpers.golden import significant
from helpers.page import Page
from helpers.planted_runs import plant

GOLDEN = Path(__file__).with_name("golden_pages.txt")
KERNELS = ("attention", "gemm", "collectives", "memcpy")
LATENCY_S: dict[str, dict[str, list[float | None]]] = {
    "burst": {"burst": [4.0, None, 16.0, 8.0, 9.5, 12.25]},
    "poisson": {f"poisson {rate}": [rate + 0.5, rate * 2.0, rate * 2.5, 4.0 * rate] for rate in (1, 2, 4)},
}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    planned_log.without_this_machine(monkeypatch)
    user_tables.leave_out(monkeypatch)
    return turned(monkeypatch)


def training(folder: Path, clock: Clock) -> Iterator[Path]:
    plan = planned_log.planned("llama31_8b")
    yield plant(folder / "fast", clock, 200.0, 202.0)
    yield plant(folder / "slow", clock, 100.0, 101.0, 99.0, lora_rank=32)
    (folder / "planned").mkdir()
    losses = [6.0 - 0.2 * number for number in range(14)]
    yield planned_log.write(plan, folder / "planned/result_0.txt", losses)


def kernels(folder: Path) -> Iterator[Path]:
    for task in KERNELS:
        plan = compose.compose([f"task={task}", "cluster=dgxh200"])
        assert isinstance(plan, KernelsPlan)
        (folder / task).mkdir(parents=True)
        times = {point.name: 50.0 + 7 * number for number, point in enumerate(plan.points)}
        kernels_log.write(plan, folder / task / "result_0.txt", time_us=lambda point, times=times: times[point.name])
        yield folder / task


def generation(folder: Path) -> Path:
    plan = compose.compose(["task=generate_7b", "cluster=dgx1"])
    assert isinstance(plan, GenerationPlan)
    folder.mkdir()
    answers_log.write(plan, folder / "result_0.txt", answers_log.rows(plan), run_s=77.5)
    return folder


def served(folder: Path) -> Iterator[Path]:
    for arrivals, latency_s in LATENCY_S.items():
        rates = "[1,2,4]" if arrivals == "poisson" else "[]"
        plan = serving.planned(
            "cluster.device=cpu", f"task.serving.arrivals=[{arrivals}]", f"task.serving.rates={rates}"
        )
        latencies = dict(zip((load.name for load in plan.loads), latency_s.values(), strict=True))
        (folder / arrivals).mkdir(parents=True)
        serving_log.write(plan, folder / arrivals / "result_0.txt", latencies)
        yield folder / arrivals


def shown(folder: Path, figures: dict[str, Figure]) -> list[str]:
    """Return the page, the tables and the figures of a folder."""
    lines = []
    for path in sorted(folder.rglob("*.*")):
        if path.suffix == ".html":
            page = Page(path)
            lines += [f"{path.name}: {line}" for line in re.split(r"\s*\n\s*", page.text.strip())]
            lines += [f"{path.name}, {name}: {json.dumps(significant(chart))}" for name, chart in page.charts.items()]
        elif path.suffix == ".png":
            lines.append(f"{path.name}: {json.dumps(significant(plotted.described(figures[path.name])), default=str)}")
        else:
            lines += [f"{path.name}: {line}" for line in path.read_text().splitlines()]
    return lines


@pytest.mark.long
def test_pages_are_the_golden_ones(tmp_path: Path, clock: Clock) -> None:
    figures: dict[str, Figure] = {}

    def save(figure: Figure, path: Path, **_: object) -> None:
        figures[path.name] = figure
        path.write_bytes(b"")

    lines = []
    reports = {"training": [*training(tmp_path / "training", clock)], "generation": [generation(tmp_path / "answers")]}
    reports |= {folder.name: [folder] for folder in (*kernels(tmp_path / "kernels"), *served(tmp_path / "serving"))}
    studies = {name: getattr(study_results, name) for name in ("precisions", "scaling")}
    with mock.patch.object(Figure, "savefig", save):
        for name, paths in reports.items():
            kinds.load(paths).write(tmp_path / "pages" / name, title=name)
            lines += [name, *shown(tmp_path / "pages" / name, figures), ""]
        for name, result in studies.items():
            report.write_study(result(tmp_path / "studies" / name), tmp_path / "pages" / name)
            lines += [name, *shown(tmp_path / "pages" / name, figures), ""]
    text = re.sub(r"[0-9a-f]{64}", "CHECKSUM", "\n".join(lines).replace(str(tmp_path), "FOLDER"))
    text = text.replace(f"runstop {version('runstop')}", "runstop VERSION")
    golden.require(text, GOLDEN, variable="WRITE_PAGES")
