"""Progress is a fold over events; on a terminal it is a picture, in a pipe plain lines."""

import io
from collections.abc import Callable
from functools import reduce
from pathlib import Path

import pytest
from rich.console import Console

from bench import mllog
from bench.watch import Goal, Progress, advance, follow, next_evaluation, seconds_left

GOAL = Goal(title="lora_tiny [local]", max_samples=1536, eval_samples=(384, 768, 1152, 1536), target=0.925)
MakeLog = Callable[..., Path]


def progress_of(path: Path, *, until: str | None = None) -> Progress:
    events = mllog.read(path)[0]
    keys = [event.key for event in events]
    return reduce(advance, events[: keys.index(until) + 1 if until else None], Progress())


def test_progress_follows_the_log(written_log: MakeLog) -> None:
    path = written_log()
    assert Progress().phase == "starting"
    assert progress_of(path, until="init_start").phase == "preparing"
    early = progress_of(path, until="tracked_stats")
    assert (early.phase, early.step, early.samples, early.train_loss, early.lr) == ("training", 48, 384, 1.05, 4e-4)
    assert (next_evaluation(early, GOAL), seconds_left(early, GOAL)) == (384, (1536 - 384) / 2.5)
    assert progress_of(path, until="eval_start").phase == "evaluating"
    end = progress_of(path)
    assert (end.phase, end.samples, end.eval_loss, end.eval_samples) == ("stopped: success", 1152, 0.92, 1152)
    assert (next_evaluation(end, GOAL), seconds_left(end, GOAL)) == (1536, None)


def test_what_is_not_logged_is_not_shown(written_log: MakeLog) -> None:
    assert seconds_left(Progress(), GOAL) is None
    assert next_evaluation(Progress(eval_samples=1536), GOAL) is None
    output = watch_output(written_log(evals=()), terminal=True)
    assert "loss" not in output
    assert "left" not in output


def watch_output(path: Path, *, terminal: bool) -> str:
    alive = iter([True, False])
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=terminal, width=100, color_system="standard")
    follow(path, GOAL, is_alive=lambda: next(alive), console=console)
    return screen.getvalue()


def test_a_pipe_gets_plain_lines(written_log: MakeLog) -> None:
    lines = watch_output(written_log(), terminal=False).splitlines()
    assert lines == [
        "384 of 1,536 samples  step 48  train loss 1.0500  lr 4.00e-04",
        "eval loss 0.9500 at 384 samples, target 0.925 not reached, next at 768",
        "eval loss 0.9300 at 768 samples, target 0.925 not reached, next at 1,152",
        "eval loss 0.9200 at 1,152 samples, target 0.925 reached",
    ]


def test_a_terminal_keeps_each_evaluation_above_the_picture(written_log: MakeLog) -> None:
    output = watch_output(written_log(), terminal=True)
    assert "lora_tiny [local]" in output
    assert "eval loss 0.9500 at 384 samples, target 0.925 not reached, next at 768" in output
    assert "2.50 samples/s" in output
    assert output.rstrip().endswith("\x1b[?25h")


@pytest.mark.parametrize("terminal", [True, False])
def test_what_is_written_last_is_shown(written_log: MakeLog, tmp_path: Path, terminal: bool) -> None:
    screen = io.StringIO()

    def is_alive() -> bool:
        written_log()
        return False

    console = Console(file=screen, force_terminal=terminal, width=100)
    follow(tmp_path / "result_0.txt", GOAL, is_alive=is_alive, console=console)
    assert "eval loss 0.9200" in screen.getvalue()


def test_an_interrupt_passes_and_the_cursor_comes_back(tmp_path: Path) -> None:
    screen = io.StringIO()

    def is_alive() -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        follow(tmp_path / "log", GOAL, is_alive=is_alive, console=Console(file=screen, force_terminal=True))
    assert screen.getvalue().rstrip().endswith("\x1b[?25h")
