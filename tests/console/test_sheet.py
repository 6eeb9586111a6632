"""The figure of a trial is a readable PNG for any log; its table has reasons for missing numbers."""

import io
import struct
from pathlib import Path

import pytest

from bench.console.sheet import show
from bench.hints import in_this_shell
from bench.mlperf.official import official_verdict
from bench.mlperf.result import UNVERIFIED, parse
from bench.report.figures import loss_figure
from bench.report.tables import TextTable
from bench.report.training import verdict_table
from helpers.screen import terminal
from helpers.types import MakeLog


def table_text(path: Path, figure: Path | None = None) -> str:
    screen = io.StringIO()
    verdicts = [official_verdict(path, ruleset=ruleset) for ruleset in ("5.1.0", "6.1.0")]
    files = [("figure", str(figure), "")] if figure else []
    show(verdict_table(parse(path), verdicts, more=files), file=screen)
    return screen.getvalue()


def row(text: str, name: str) -> str:
    return next(line.removeprefix(f"{name}: ") for line in text.splitlines() if line.startswith(f"{name}: "))


@pytest.mark.long
@pytest.mark.parametrize(
    "changes",
    [{}, {"evals": ()}, {"submission_platform": "$\\frac{", "target_accuracy": None}, {"submission_platform": None}],
)
def test_the_figure_is_a_png_of_sensible_size(written_log: MakeLog, tmp_path: Path, changes: dict[str, object]) -> None:
    loss_figure(parse(written_log(**changes)), tmp_path / "loss.png")
    data = (tmp_path / "loss.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n")
    assert struct.unpack(">II", data[16:24]) == (1200, 720)
    assert 10_000 < len(data) < 300_000


@pytest.mark.parametrize(
    ("platform", "title"),
    [
        ("1xDGX H200", "llama2_70b_lora on 1xDGX H200"),
        ("laptop (lora_tiny: not a submission)", "lora_tiny on laptop (lora_tiny: not a submission)"),
        ("8x (lora70b: random weights, not a submission)", "lora70b on 8x (lora70b: random weights, not a submission)"),
    ],
)
def test_title_of_a_task_that_is_not_the_benchmark(written_log: MakeLog, platform: str, title: str) -> None:
    assert table_text(written_log(submission_platform=platform)).splitlines()[0] == title


def test_the_table_of_a_good_trial(written_log: MakeLog) -> None:
    text = table_text(written_log(), Path("loss.png"))
    assert row(text, "run_start → run_stop (min)") == "0.00"
    assert row(text, "valid trial") == "yes"
    assert row(text, "samples to target") == "2,304"
    assert row(text, "final evaluation") == "0.9200  target 0.925"
    assert row(text, "target reached") == "yes"
    assert (
        row(text, "MLPerf checker 5.1.0, closed division")
        == row(text, "MLPerf checker 6.1.0, closed division")
        == "passed"
    )
    assert row(text, "figure") == "loss.png"
    assert UNVERIFIED in text


def test_a_missing_number_is_blank_with_the_reason(written_log: MakeLog) -> None:
    path = written_log(evals=(0.95,), submission_platform="x\x1b[2J")
    path.write_text("".join(line for line in path.read_text().splitlines(True) if "run_stop" not in line))
    text = table_text(path)
    assert row(text, "run_start → run_stop (min)") == "the log has no run_stop: the time to train is unknown"
    assert row(text, "valid trial").startswith(
        "no  LOG-02: the log has no run_stop: the time to train is unknown; LOG-07 line "
    )
    assert row(text, "samples to target") == "no evaluation that reaches the target logs its samples"
    assert row(text, "target reached") == "no"
    assert row(text, "MLPerf checker 6.1.0, closed division").startswith("failed  ")
    assert "\x1b" not in text


def test_a_task_without_target_or_rules(written_log: MakeLog) -> None:
    text = table_text(written_log(submission_benchmark=None, target_accuracy=None, evals=()))
    assert row(text, "run_start → run_stop (min)").endswith("speed only (no target set)")
    assert not any(
        line.startswith(("target reached", "samples to target", "final evaluation")) for line in text.splitlines()
    )
    assert row(text, "MLPerf checker 6.1.0, closed division").startswith("the log has no submission_benchmark")


def test_several_targets_are_all_named(written_log: MakeLog) -> None:
    text = table_text(written_log(submission_benchmark="stable_diffusion", target_accuracy=None))
    assert row(text, "final evaluation") == "0.9200  target FID ≤ 90 and CLIP ≥ 0.15"
    assert row(text, "target reached") == "no"
    assert row(text, "samples to target") == "no evaluation that reaches the target logs its samples"


@pytest.mark.long
def test_every_evaluation_of_a_usual_run_is_listed(written_log: MakeLog) -> None:
    losses = tuple(0.99 - n / 1000 for n in range(20))
    text = table_text(written_log(evals=losses, name="usual.txt"))
    listed = ", ".join(f"{loss:.4f} at {1152 + 384 * n:,} samples" for n, loss in enumerate(losses, 1))
    assert row(text, "evaluations").endswith(f"; {listed}")
    many = table_text(written_log(evals=tuple(0.99 - n / 1000 for n in range(50)), name="many.txt"))
    assert ", 10 more, " in row(many, "evaluations")


@pytest.mark.parametrize("path", [None, ""], ids=["activated", "not activated, so with full paths"])
def test_a_terminal_never_breaks_a_command(path: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wide command leaves the table, whose cells are wrapped, and is printed on one line below it."""
    out = terminal(monkeypatch, 60)
    if path is not None:
        monkeypatch.setenv("PATH", path)
    fix, last = f"to continue: runstop resume runs/{'a' * 60}", f"to see why: runstop why runs/{'b' * 60}"
    rows = [("rule", "RUN-01", "a GPU ran out of memory"), ("fix", fix, "")]
    show(TextTable("runs/a", rows, caption=f"what to do now\n{last}"), file=out)
    lines = out.text.splitlines()
    assert f"fix: {in_this_shell(fix)}" in lines and in_this_shell(last) in lines and "what to do now" in lines
    assert not any(line.startswith("fix ") for line in lines)


def test_a_name_as_wide_as_the_terminal_leaves_12_columns_for_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "share of these rates with heads of 64, forward and backward"
    out = terminal(monkeypatch, 60)
    show(TextTable("rates", [(name, "0.76 / 0.60", "")]), file=out)
    assert "0.76 / 0.60" in out.text
