"""`runstop launch` as a Hydra application with few keys: plans, exit codes and output; no run is started."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

import bench
from bench import preflight
from bench.console import plan as plan_sheets
from bench.console import runs as run_sheets
from bench.console import sheet
from bench.contract.plan import Plan
from bench.errors import BenchError, ConfigError, Stopped
from bench.launch import __main__ as launching
from bench.launch import start
from bench.planning import compose

CONFIG = """
defaults: [_self_, override hydra/job_logging: none, override hydra/hydra_logging: none]
seed_base: 1
launch: {dry_run: false}
hydra: {output_subdir: null, run: {dir: .}, sweep: {dir: "${oc.env:RUNSTOP_SWEEP_DIR}"}, job: {chdir: false}}
"""
Launch = Callable[..., tuple[int, str, str]]


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Launch]:
    """Return a function that runs the command and returns its exit code, stdout and stderr."""
    plan = compose.compose(["task=pretrain_tiny", "cluster=local"])
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/launch.yaml").write_text(CONFIG)

    def plan_of(config: Any, overrides: list[str], *, config_dir: Path | None, bad_nodes: Any) -> Plan:
        if config.seed_base == 3:
            raise ConfigError(f"no plan with {overrides}", where="w", fix="f")
        named = replace(plan, name=f"seed {config.seed_base}")
        named.config.launch.dry_run = config.launch.dry_run
        return named

    monkeypatch.setattr(launching, "CONF", tmp_path / "conf")
    monkeypatch.setattr(launching, "typed", lambda config: config)
    monkeypatch.setattr(launching, "completed", lambda config, _: config)
    monkeypatch.setattr(launching, "plan_of", plan_of)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    monkeypatch.setenv("RUNSTOP_SWEEP_DIR", "")

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["bench.launch", *words])
        with pytest.raises(SystemExit) as stop:
            launching.main()
        assert isinstance(stop.value.code, int)
        return stop.value.code, *capsys.readouterr()

    yield run


class Starts:
    """Replaces `start.run`: creates a folder unless a queue refuses the job, and ends as the test requires."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.plans: list[tuple[Plan, str]] = []
        self.ends: list[int | BaseException] = []

    def run(self, plan: Plan, config_yaml: str, created: list[Path], words: list[str]) -> int:
        self.plans.append((plan, config_yaml))
        created.append(self.folder / f"run{len(self.plans)}")
        end = self.ends.pop(0)
        if not isinstance(end, ConfigError):
            created[-1].mkdir()
        if isinstance(end, BaseException):
            raise end
        return end


@pytest.fixture
def starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Starts:
    starts = Starts(tmp_path)
    monkeypatch.setattr(start, "run", starts.run)
    monkeypatch.setattr(launching, "summary", lambda folder: folder.name)
    monkeypatch.setattr(run_sheets, "sweep_sheet", lambda rows: rows)
    monkeypatch.setattr(sheet, "show", lambda rows: print(f"sweep of {', '.join(rows)}"))
    return starts


@pytest.mark.long
def test_every_run_of_a_sweep_is_started_and_the_highest_exit_code_is_returned(
    launch: Launch, starts: Starts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One cannot be planned, one fails, and a queue refuses the last one."""

    def planned(codes: list[int]) -> list[tuple[Plan, Any, list[str]]]:
        plan = compose.compose(["task=pretrain_tiny", "cluster=local"])
        return [(plan, OmegaConf.create({"seed_base": seed}), []) for seed in range(3)]

    failed = BenchError("a rank failed", where="w", fix="f", rule="RUN-02")
    starts.ends = [1, failed, ConfigError("refused", where="w", fix="f")]
    with monkeypatch.context() as patch:
        patch.setattr(launching, "_planned", planned)
        code, printed, error = launch()
    assert (code, printed) == (2, "sweep of run1, run2\n"), "the last one has no folder"
    assert [line for line in error.splitlines() if line[0] != " "] == ["RUN-02: a rank failed", "refused"]
    starts.ends, starts.folder = [0], starts.folder / "conf"
    code, printed, error = launch("--multirun", "seed_base=3,5")
    assert (code, printed.splitlines()[-1:]) == (2, []) and error.startswith("no plan with ['seed_base=3']\n  where: w")
    plan, config_yaml = starts.plans[-1]
    assert plan.name == "seed 5" and "seed_base=5" in config_yaml and "\nseed_base: 5\n" in config_yaml


@pytest.mark.long
def test_a_single_run_has_no_table_of_runs_and_its_own_exit_code(launch: Launch, starts: Starts) -> None:
    starts.ends = [Stopped(15)]
    assert launch() == (143, "", "")
    code, _, error = launch("seed_bse=1")
    assert code == 2 and error.startswith("unknown key 'seed_bse'") and "did you mean seed_base=1?" in error
    assert launch("--version") == (0, f"runstop {bench.__version__}\n", "") and len(starts.plans) == 1


@pytest.mark.long
def test_a_dry_run_shows_the_plan_and_the_findings(
    launch: Launch, starts: Starts, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[tuple[str, object]] = []
    findings = [preflight.broken("CFG-13", "it takes too long", "walltime", severity="warning")]
    monkeypatch.setattr(preflight, "inspect", lambda plan, words: findings)
    monkeypatch.setattr(plan_sheets, "show_plan", lambda plan, findings: shown.append((plan.name, findings)))
    assert launch("launch.dry_run=true") == (0, "", "")
    assert shown == [("seed 1", findings)] and not starts.plans
    findings.append(preflight.broken("CFG-06", "there are no rows", "here"))
    assert launch("launch.dry_run=true") == (2, "", "") and not starts.plans


def test_cfg_reports_the_same_errors_as_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    composed: list[tuple[list[str], Path | None]] = []
    monkeypatch.setattr(launching, "compose", lambda words, *, config_dir: composed.append((words, config_dir)))
    for argv in (["a=b", "--config-dir", "d"], ["--hydra-help"]):
        launching._check_shown(argv)
    assert composed == []
    launching._check_shown(["--cfg", "job", "+a=b", "~c", "--resolve"])
    launching._check_shown(["-c", "job", "-cd", "mine"])
    assert composed == [(["+a=b", "~c"], None), ([], Path("mine"))]
