"""`python -m bench.launch` as a Hydra application: what it plans, runs and says; a stand-in starts its runs."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import bench
from bench import preflight
from bench.console import plan as plan_sheets
from bench.console import runs as run_sheets
from bench.console import sheet
from bench.contract.plan import Plan
from bench.errors import BenchError, ConfigError, Stopped
from bench.launch import __main__ as launching
from bench.launch import start

WORDS = ("task=pretrain_tiny", "cluster=local", "model.weights=random")
Launch = Callable[..., tuple[int, str, str]]


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Launch]:
    """Run it with these words; return its exit code, and what it printed and said."""
    monkeypatch.setenv("LOGDIR", str(tmp_path))
    monkeypatch.setenv("DATADIR", str(tmp_path))
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    monkeypatch.setenv("BENCH_SWEEP_DIR", "")

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["bench.launch", *words])
        with pytest.raises(SystemExit) as stop:
            launching.main()
        assert isinstance(stop.value.code, int)
        return stop.value.code, *capsys.readouterr()

    yield run


class Starts:
    """In place of `start.run`: makes a folder, unless a queue refuses the job, and ends as the test says."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.plans: list[tuple[Plan, str]] = []
        self.ends: list[int | BaseException] = []

    def run(self, plan: Plan, config_yaml: str, made: list[Path]) -> int:
        self.plans.append((plan, config_yaml))
        made.append(self.folder / f"run{len(self.plans)}")
        end = self.ends.pop(0)
        if not isinstance(end, ConfigError):
            made[-1].mkdir()
        if isinstance(end, BaseException):
            raise end
        return end


@pytest.fixture
def starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Starts:
    made = Starts(tmp_path)
    monkeypatch.setattr(start, "run", made.run)
    monkeypatch.setattr(launching, "summary", lambda folder: folder.name)
    monkeypatch.setattr(run_sheets, "sweep_sheet", lambda rows: rows)
    monkeypatch.setattr(sheet, "show", lambda rows: print(f"sweep of {', '.join(rows)}"))
    return made


def test_every_run_of_a_sweep_is_started_and_the_worst_outcome_counts(launch: Launch, starts: Starts) -> None:
    starts.ends = [
        1,
        BenchError("a rank failed", where="w", fix="f", rule="RUN-02"),
        ConfigError("no", where="w", fix="f"),
    ]
    code, said, error = launch("--multirun", *WORDS, "seed_base=5,6,7")
    assert code == 2 and error == "RUN-02: a rank failed\n  where: w\n  fix:   f\nno\n  where: w\n  fix:   f\n"
    assert said.splitlines()[-1] == "sweep of run1, run2", "the third one has left no folder"
    assert [plan.trials[0].seed for plan, _ in starts.plans] == [5, 6, 7]
    for seed, (_, config_yaml) in zip((5, 6, 7), starts.plans, strict=True):
        assert f"seed_base={seed}" in config_yaml and "task=pretrain_tiny" in config_yaml
        assert f"\nseed_base: {seed}\n" in config_yaml


def test_a_single_run_has_no_table_of_runs_and_its_own_exit_code(launch: Launch, starts: Starts) -> None:
    starts.ends = [0, Stopped(15)]
    assert launch(*WORDS) == (0, "", "")
    assert launch(*WORDS) == (143, "", "")
    assert launch("--version") == (0, f"runstop {bench.__version__}\n", "") and len(starts.plans) == 2


def test_what_cannot_be_planned_starts_nothing_of_its_own_and_the_rest(launch: Launch, starts: Starts) -> None:
    starts.ends = [0]
    code, _, error = launch("--multirun", *WORDS, "parallel.tp=3,1")
    assert code == 2 and error.startswith("tp 3 does not divide") and len(starts.plans) == 1
    code, _, error = launch(*WORDS, "recipe.lrr=1")
    assert code == 2 and error.startswith("no key 'recipe.lrr'") and "did you mean recipe.lr?" in error


def test_a_dry_run_shows_the_plan_and_what_is_found(
    launch: Launch, starts: Starts, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[tuple[str, object]] = []
    monkeypatch.setattr(preflight, "inspect", lambda plan: "found")
    monkeypatch.setattr(plan_sheets, "show_plan", lambda plan, found: shown.append((plan.name, found)))
    assert launch(*WORDS, "launch.dry_run=true") == (0, "", "")
    assert shown == [("pretrain_tiny-local", "found")] and not starts.plans


def test_a_config_that_is_only_shown_is_refused_as_its_run_would_be(monkeypatch: pytest.MonkeyPatch) -> None:
    composed: list[tuple[list[str], Path | None]] = []
    monkeypatch.setattr(launching, "compose", lambda words, *, config_dir: composed.append((words, config_dir)))
    for argv in (["a=b", "--config-dir", "d"], ["--hydra-help"]):
        launching._check_shown(argv)
    assert composed == []
    launching._check_shown(["--cfg", "job", "+a=b", "~c", "--resolve"])
    launching._check_shown(["-c", "job", "-cd", "mine"])
    assert composed == [(["+a=b", "~c"], None), ([], Path("mine"))]
