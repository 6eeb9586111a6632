"""Run a plan on this machine: prepare, train each trial, judge its log, write down what happened."""

import json
import os
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import mllog, submit
from bench import plan as planning
from bench.errors import BenchError, ConfigError, interrupt_exit_code, stopped_by_sigterm
from bench.parse import Result, parse
from bench.plan import Plan, Step, Trial
from bench.referee import RULESETS, Verdict, official_verdict
from bench.watch import follow, followed

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, slots=True)
class Judged:
    """One trial's log, as we and the referee read it."""

    result: Result
    verdicts: list[Verdict]
    not_as_planned: list[str]

    @property
    def proven(self) -> bool:
        """Whether the log proves that the trial did what its task asks."""
        reached = self.result.target is None or self.result.converged
        passed = not any(verdict.passed is False for verdict in self.verdicts)
        return self.result.valid and reached and passed and not self.not_as_planned


def run(plan: Plan, config_yaml: str) -> int:
    """Return 0 when every trial's log proves that it did what was asked, 1 when one does not.

    Raises:
        BenchError: a rank failed, or the folder cannot be made; finished trials are kept.
    """
    from rich.console import Console

    folder = _make_folder(plan)
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(
        f"{plan.config.task.summary}\n{plan.name} on {plan.world.num_ranks} ranks, results in {_short(folder)}"
    )
    status: dict[str, Any] = {"outcome": "failed", "exit_code": 1}
    try:
        (folder / "config.yaml").write_text(config_yaml)
        (folder / "plan.json").write_text(planning.dumps(plan))
        ledger: list[dict[str, Any]] = [{"trial": t.index, "seed": t.seed, "outcome": "planned"} for t in plan.trials]
        _write(folder / "ledger.json", ledger)
        with stopped_by_sigterm():
            proven = _work(plan, folder, ledger, console)
        status = {"outcome": "proven" if proven else "not proven", "exit_code": 0 if proven else 1}
    except KeyboardInterrupt as stop:
        status = {"outcome": "interrupted", "exit_code": interrupt_exit_code(stop)}
        console.print(f"stopped; what was finished is in {_short(folder)}")
        raise
    except BenchError as error:
        status = {"outcome": "failed", "exit_code": error.exit_code, "what": error.what, "fix": error.fix}
        raise
    except OSError as error:
        where = str(error.filename or folder)
        raise BenchError(f"cannot write: {error.strerror}", where=where, fix="make room, or set LOGDIR") from error
    finally:
        with suppress(OSError):
            _write(folder / "status.json", status)
        if status["exit_code"]:
            console.print(f"to have it explained: python -m bench why {_short(folder)}")
        elif plan.trials[1:]:
            console.print(f"what the trials are worth together: python -m bench score {_short(folder)}")
    return int(status["exit_code"])


def _work(plan: Plan, folder: Path, ledger: list[dict[str, Any]], console: "Console") -> bool:
    prepare, *trial_steps = plan.steps
    if is_prepared(plan):
        console.print("prepared before: rows and base checkpoint are there")
    else:
        console.print("preparing (not timed): rows, then the base checkpoint")
        _follow(plan.base or plan, prepare, folder, console)
    proven = True
    for trial, step in zip(plan.trials, trial_steps, strict=True):
        log = folder / trial.log
        try:
            _follow(plan, step, folder, console)
        except BaseException:
            finished = log.exists() and parse(log).status == mllog.SUCCESS  # what came after run_stop does not undo it
            _record(ledger, trial, _outcome(judge(log, plan, trial)) if finished else {"outcome": "aborted"}, folder)
            raise
        judged = judge(log, plan, trial)
        _record(ledger, trial, _outcome(judged), folder)
        _show(plan, trial, judged, folder)
        proven = proven and judged.proven
    return proven


def _record(ledger: list[dict[str, Any]], trial: Trial, outcome: dict[str, Any], folder: Path) -> None:
    ledger[trial.index] |= outcome
    _write(folder / "ledger.json", ledger)


def _outcome(judged: Judged) -> dict[str, Any]:
    """Return what the ledger keeps of a finished trial."""
    return {
        "outcome": "proven" if judged.proven else "not proven",
        "minutes": judged.result.minutes,
        "samples_to_target": judged.result.samples_to_target,
        "eval_final": judged.result.eval_final,
        "official": {verdict.ruleset: verdict.passed for verdict in judged.verdicts},
        "not_as_planned": judged.not_as_planned,
    }


def is_prepared(plan: Plan) -> bool:
    """Return whether the prepare step would find nothing to do."""
    needed = [plan.data_dir] if plan.base is None else [plan.data_dir, plan.base_dir]
    return all(path is not None and Path(path).is_dir() for path in needed)


def judge(log: Path, plan: Plan | None = None, trial: Trial | None = None) -> Judged:
    """Return what a log proves, what the official checker says of it, and where it is not the log of the planned trial."""
    result = parse(log)
    verdicts = [official_verdict(log, ruleset=ruleset) for ruleset in RULESETS]
    if plan is None or trial is None:
        return Judged(result, verdicts, [])
    planned = {
        "seed": (result.seed, trial.seed),
        "submission_benchmark": (result.benchmark, plan.submission.benchmark),
        "submission_division": (result.division, plan.submission.division),
        "target_accuracy": (result.target, plan.config.task.target_eval_loss),
        "global_batch_size": (result.global_batch_size, plan.batch.global_batch_size),
    }
    differing = [f"{key} is {got}, planned {want}" for key, (got, want) in planned.items() if got != want]
    return Judged(result, verdicts, differing)


def _follow(plan: Plan, step: Step, folder: Path, console: "Console") -> None:
    with submit.ranks(plan, step, folder) as ranks:
        expected = followed.planned(plan, step)
        follow(folder / step.log, expected, name=step.name, is_alive=ranks.are_running, console=console)
    ranks.check()


def _show(plan: Plan, trial: Trial, judged: Judged, folder: Path) -> None:
    from bench import tables
    from bench.report import figures

    figure = folder / f"loss_{trial.index}.png"
    figures.loss_figure(judged.result, figure)
    files = [("log", _short(folder / trial.log), ""), ("figure", _short(figure), "")]
    tables.show(tables.verdict_sheet(judged.result, judged.verdicts, more=files))


def _make_folder(plan: Plan) -> Path:
    """Return a folder that is this run's alone."""
    if plan.config.launch.folder is not None:
        folder = Path(plan.config.launch.folder)
    else:
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{plan.name}-{secrets.token_hex(2)}"
        folder = Path(str(plan.config.cluster.paths.logs)) / name
    try:
        folder.mkdir(parents=True)
        (folder / "rank_logs").mkdir()
    except FileExistsError as error:
        raise ConfigError(
            "CFG-05: this folder exists, and a run never writes into another's",
            where=str(folder),
            fix="leave launch.folder out for a new one",
        ) from error
    except OSError as error:
        raise ConfigError(
            f"CFG-08: the run folder cannot be made: {error.strerror}",
            where=str(folder),
            fix="set LOGDIR to a writable folder",
        ) from error
    return folder


def _write(path: Path, content: Any) -> None:
    """Replace a JSON file in one step: a reader, or a crash, never meets half of it."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1) + "\n")
    part.replace(path)


def _short(path: Path) -> str:
    """Return the path as one would type it here."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
