"""Run a plan on this machine: prepare, train each trial, judge its log, write down what happened."""

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.backends import local
from bench.console import trial as trial_sheets
from bench.contract import plan as plans
from bench.contract.plan import Plan, Step
from bench.errors import BenchError, interrupt_exit_code, stopped_by_sigterm
from bench.runs import folder as folders
from bench.runs import ledger
from bench.runs import trial as trials
from bench.runs.folder import short
from bench.watch import follow, sources

if TYPE_CHECKING:
    from rich.console import Console


def run(plan: Plan, config_yaml: str) -> int:
    """Return 0 when every trial's log proves that it did what was asked, 1 when one does not.

    Raises:
        BenchError: a rank failed, or the folder cannot be made; finished trials are kept.
    """
    from rich.console import Console

    folder = folders.make(plan, config_yaml)
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(
        f"{plan.config.task.summary}\n{plan.name} on {plan.world.num_ranks} ranks, results in {short(folder)}"
    )
    status: dict[str, Any] = {"outcome": "failed", "exit_code": 1}
    try:
        ledger.create(folder, plan)
        with stopped_by_sigterm():
            proven = _work(plan, folder, console)
        status = {"outcome": ledger.PROVEN if proven else ledger.NOT_PROVEN, "exit_code": 0 if proven else 1}
    except KeyboardInterrupt as stop:
        status = {"outcome": ledger.INTERRUPTED, "exit_code": interrupt_exit_code(stop)}
        console.print(f"stopped; what was finished is in {short(folder)}")
        raise
    except BenchError as error:
        status = {"outcome": "failed"} | {name: getattr(error, name) for name in ("exit_code", "rule", "what", "fix")}
        raise
    except OSError as error:
        where = str(error.filename or folder)
        fix = "make room, or set LOGDIR"
        raise BenchError(f"cannot write: {error.strerror}", where=where, fix=fix, rule="CFG-08") from error
    finally:
        with suppress(OSError):
            folders.write(folder / folders.STATUS, status)
        if status["exit_code"]:
            console.print(f"to have it explained: python -m bench why {short(folder)}")
        elif plan.config.task.training.target_eval_loss is None:
            console.print(f"beside published systems: python -m bench report {short(folder)}")
        elif plan.trials[1:]:
            console.print(f"what the trials are worth together: python -m bench score {short(folder)}")
    return int(status["exit_code"])


def _work(plan: Plan, folder: Path, console: "Console") -> bool:
    if len(plan.steps) == len(plan.trials):
        console.print("nothing to prepare")
    elif plans.is_prepared(plan):
        console.print("prepared before: rows and base checkpoint are there")
    else:
        console.print("preparing (not timed): rows, then the base checkpoint")
        _follow(plan.base or plan, plan.steps[0], folder, console)
    proven = True
    for trial, step in zip(plan.trials, plans.trial_steps(plan), strict=True):
        ledger.begin(folder, trial, attempts=1)
        try:
            _follow(plan, step, folder, console)
        except BaseException:
            trials.close(folder, plan, trial, failed=True)
            raise
        judged = trials.close(folder, plan, trial, failed=False)
        assert judged is not None
        trial_sheets.show(folder, trial, judged)
        proven = proven and judged.proven
    return proven


def _follow(plan: Plan, step: Step, folder: Path, console: "Console") -> None:
    with local.started(plan, step, folder) as running:
        expected = sources.planned(plan, step)
        follow(folder / step.log, expected, name=step.name, is_alive=running.are_running, console=console)
    running.check()
