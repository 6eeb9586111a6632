"""Test that clock jumps, decreasing counts and unexplained time are reported, and that published logs have none."""

import json
import re
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from bench.contract import mllog
from bench.mlperf.reader import Event, read
from bench.mlperf.result import parse
from bench.runs import trial
from helpers import clock
from helpers.examples import in_proportion
from helpers.paths import CORPUS, ROOT
from helpers.written_log import ONCE

WriteTrial = Callable[..., Path]
EVERY, FIRST = 48, 192
"""Steps between evaluations, and before the first one: the rules' for batch size 8."""


@pytest.fixture
def written_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WriteTrial:
    """Write a trial as our task does, with its own clock; `slow` sets the seconds of steps and evaluations."""

    def write(
        *, step_s: float = 2.5, eval_s: float = 20.0, slow: dict[object, float] | None = None, blocks: int = 3
    ) -> Path:
        path, now, usual = tmp_path / "result_0.txt", clock.turned(monkeypatch), slow or {}
        path.unlink(missing_ok=True)
        with mllog.Writer(path) as log:
            log.start(mllog.INIT_START)
            for key, value in ONCE.items():
                now.now_s += 1
                log.event(key, value)
            log.stop(mllog.INIT_STOP)
            log.start(mllog.RUN_START)
            done, times = 0, []
            for number in range(blocks):
                log.start(mllog.BLOCK_START, samples_count=8 * done, step=done)
                for step in range(done + 1, FIRST + EVERY * number + 1):
                    times.append(usual.get(step, step_s))
                    now.now_s += times[-1]
                    if step % 10 == 0:
                        place = {"samples_count": 8 * step, "step": step}
                        log.event(mllog.TRAIN_LOSS, 1.3, **place)
                        log.event(mllog.TRACKED_STATS, {mllog.STEP_TIMES: times}, **place)
                        times = []
                    done = step
                place = {"samples_count": 8 * done, "step": done}
                log.stop(mllog.BLOCK_STOP, **place)
                log.start(mllog.EVAL_START, **place)
                now.now_s += usual.get(f"evaluation {number + 1}", eval_s)
                log.event(mllog.EVAL_ACCURACY, 0.94 - 0.01 * number, **place)
                log.stop(mllog.EVAL_STOP, **place)
            log.finish(mllog.SUCCESS, **place)
            log.event(mllog.PEAK_MEMORY, {"allocated": 120.5})
        return path

    return write


def problems(path: Path) -> list[tuple[str, str]]:
    return [(finding.rule, finding.severity) for finding in parse(path).findings]


def message(path: Path) -> str:
    (finding,) = parse(path).findings
    return finding.what


def moved(path: Path, moves: Callable[[int], float], *, first_line: int = 1) -> Path:
    """Change only time_ms, starting at a line."""
    lines = path.read_text().splitlines(keepends=True)
    for n in range(first_line - 1, len(lines)):
        lines[n] = re.sub(r'(?<="time_ms": )\d+', lambda time: str(round(moves(int(time[0])))), lines[n])
    path.write_text("".join(lines))
    return path


def shifted(path: Path, seconds: float, *, first_line: int) -> Path:
    return moved(path, lambda time_ms: time_ms + 1000 * seconds, first_line=first_line)


def without_monotonic(path: Path) -> Path:
    """Remove the monotonic times, as in logs of older versions."""
    path.write_text(re.sub(r', "monotonic_ms": -?\d+', "", path.read_text()))
    assert "monotonic" not in path.read_text()
    return path


def other_log(path: Path) -> Path:
    """Remove all keys that only our own logs have."""
    text = re.sub(r'.*"(?:initial_weights|data_source|peak_memory_gib)".*\n', "", without_monotonic(path).read_text())
    path.write_text(re.sub(r'"value": \{"step_times": .*?\}', '"value": {"throughput": 3.2}', text))
    return path


def line_of(path: Path, key: str, *, nth: int = 0) -> int:
    return [n for n, line in enumerate(path.read_text().splitlines(), 1) if f'"key": "{key}"' in line][nth]


def test_correct_trial_has_no_finding(written_trial: WriteTrial) -> None:
    path = written_trial()
    assert problems(path) == [] and trial.judge(path).valid
    assert "monotonic_ms" not in parse(path).hyperparameters
    assert problems(without_monotonic(path)) == []
    assert problems(other_log(path)) == []


EXAMPLES = settings(
    max_examples=in_proportion(30), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@EXAMPLES
@given(data=st.data(), seconds=st.floats(2, 1e6) | st.floats(-1e6, -2))
def test_clock_jump_of_two_seconds_or_more_makes_a_trial_invalid(
    written_trial: WriteTrial, data: st.DataObject, seconds: float
) -> None:
    """In a trial of 14,400 s, with 500 s between two log lines."""
    path = written_trial(step_s=50.0)
    first_line = data.draw(st.integers(2, line_of(path, "run_stop")))
    shifted(path, seconds, first_line=first_line)
    result = parse(path)
    assert not result.valid
    (what,) = [finding.what for finding in result.findings if finding.rule == "LOG-19"]
    how = f"the wall clock was set {'forward' if seconds > 0 else 'back'} by "
    assert what.startswith(how) and f"between lines {first_line - 1} and {first_line} (" in what
    assert float(what.removeprefix(how).split(" s ")[0].replace(",", "")) == pytest.approx(abs(seconds), abs=0.06)


@pytest.mark.long
@EXAMPLES
@given(ppm=st.floats(-100, 100))
@example(ppm=100.0)
@example(ppm=-100.0)
def test_slewed_clock_is_not_reported(written_trial: WriteTrial, ppm: float) -> None:
    """100 ppm are 2.9 s of this trial, which is more than a clock may jump."""
    path = written_trial(step_s=100.0)
    start = clock.time_ms(path, "init_start")
    moved(path, lambda time_ms: time_ms + (time_ms - start) * ppm * 1e-6)
    assert problems(path) == []


def test_clock_jump_is_reported_with_lines_and_both_times(written_trial: WriteTrial) -> None:
    """By hand: 288 steps of 2.5 s and 3 evaluations of 20 s take 780 s."""
    path = written_trial()
    stop = line_of(path, "eval_stop")
    shifted(path, -8, first_line=stop)
    assert not trial.judge(path).valid
    assert message(path) == (
        f"the wall clock was set back by 8.0 s between lines {stop - 1} and {stop} (0 ms according to the monotonic "
        "clock); "
        "the run took 780.0 s on the monotonic clock, but 772.0 s according to time_ms"
    )


@pytest.mark.parametrize(
    ("step_s", "jump_s", "is_found"),
    [
        (0.03, 0.95, True),
        (0.03, 0.06, True),
        (0.03, 0.015, False),
        (2.5, 0.9, True),
        (2.5, 0.7, False),
        (50, 0.9, False),
    ],
)
def test_clock_may_jump_by_a_thousandth_of_the_run(
    written_trial: WriteTrial, step_s: float, jump_s: float, is_found: bool
) -> None:
    """Runs of 9.2 s, 780 s and 14,460 s; the wall clock is set forward after run_start was logged."""
    path = written_trial(step_s=step_s, eval_s=0.2 if step_s < 1 else 20.0)
    shifted(path, jump_s, first_line=line_of(path, "run_start") + 1)
    assert problems(path) == ([("LOG-19", "error")] if is_found else [])


def test_clock_jump_before_the_run_may_be_a_second(written_trial: WriteTrial) -> None:
    path = written_trial(step_s=0.03, eval_s=0.2)
    assert problems(shifted(path, 0.95, first_line=line_of(path, "init_stop"))) == []


def test_clock_jump_after_the_run_is_ignored(written_trial: WriteTrial) -> None:
    path = written_trial()
    assert problems(shifted(path, -8, first_line=line_of(path, mllog.PEAK_MEMORY))) == []


def test_decrease_of_a_millisecond_is_an_error_in_our_log(written_trial: WriteTrial) -> None:
    path = written_trial()
    stop = line_of(path, "eval_stop", nth=1)
    shifted(path, -0.001, first_line=stop)
    assert problems(path) == [("LOG-19", "error")]
    assert message(path) == f"time_ms decreases by 1 ms between lines {stop - 1} and {stop}"


def test_largest_of_several_decreases_is_reported(written_trial: WriteTrial) -> None:
    path = written_trial()
    shifted(path, -0.001, first_line=line_of(path, "eval_stop"))
    largest = line_of(path, "eval_stop", nth=1)
    shifted(path, -0.003, first_line=largest)
    assert message(path).startswith(f"time_ms decreases by 3 ms between lines {largest - 1} and {largest}")


def test_single_records_without_a_monotonic_time_are_reported(written_trial: WriteTrial) -> None:
    path = written_trial()
    lines = path.read_text().splitlines(keepends=True)
    late = line_of(path, "eval_accuracy") - 1
    path.write_text("".join([*lines[:late], *(re.sub(r', "monotonic_ms": \d+', "", line) for line in lines[late:])]))
    assert problems(path) == [("LOG-19", "error")]
    assert "records have no monotonic_ms, but other records have it" in message(path)


def test_records_in_the_wrong_order_without_a_monotonic_time_are_checked(
    written_trial: WriteTrial,
) -> None:
    path = written_trial()
    shifted(path, 30, first_line=line_of(path, "eval_stop"))
    lines = path.read_text().splitlines(keepends=True)
    start = lines.pop(line_of(path, "run_start") - 1)
    path.write_text("".join([*lines, re.sub(r', "monotonic_ms": \d+', "", start)]))
    assert {"LOG-04", "LOG-19"} <= dict(problems(path)).keys()


def test_decreasing_monotonic_time_is_reported(written_trial: WriteTrial) -> None:
    """Both clocks decrease where the records of two logs are joined."""
    path = written_trial()
    clock.move(path, "run_stop", -30_000)
    assert ("LOG-19", "error") in problems(path)
    assert any(finding.what.startswith("monotonic_ms decreases by 30.0 s") for finding in parse(path).findings)


@pytest.mark.parametrize("make", [without_monotonic, other_log])
def test_a_second_half_40_s_earlier_is_an_error_without_a_monotonic_time(
    written_trial: WriteTrial, make: Callable[[Path], Path]
) -> None:
    path = make(written_trial())
    half = line_of(path, "eval_accuracy", nth=1)
    shifted(path, -40, first_line=half)
    assert ("LOG-19", "error") in problems(path) and not parse(path).valid
    (what,) = [finding.what for finding in parse(path).findings if finding.rule == "LOG-19"]
    assert what == f"time_ms decreases by 20.0 s between lines {half - 1} and {half}"  # the evaluation took 20 s


def test_two_hours_more_are_an_error_in_our_log_and_a_warning_in_others(written_trial: WriteTrial) -> None:
    path = without_monotonic(written_trial())
    shifted(path, 7200, first_line=line_of(path, "train_loss", nth=3))
    assert ("LOG-20", "error") in problems(path)
    assert "training took 7,895.0 s, but its steps add up to 695.0 s" in message(path)
    assert problems(other_log(path)) == [("LOG-20", "warning")]
    assert "(until sample 320) took 7,225.0 s; at the median speed of this log it would take 25.0 s" in message(path)


@pytest.mark.parametrize(
    ("key", "nth", "seconds", "what"),
    [
        (
            "train_loss",
            12,
            7200,
            "training on 80 samples (until sample 1,040) took 7,225.0 s; "
            "at the median speed of this log it would take 25.0 s",
        ),
        (
            "train_loss",
            12,
            -15,
            "training on 80 samples (until sample 1,040) took 10.0 s; "
            "at the median speed of this log it would take 25.0 s",
        ),
        ("eval_accuracy", 1, 7200, "evaluation 2 took 7,220.0 s, but the median of all evaluations is 20.0 s"),
        (
            "block_start",
            2,
            7200,
            "7,200.0 s of 8,400.0 s between run_start and run_stop are neither training nor evaluation",
        ),
        (
            "train_loss",
            30,
            8,
            "a block of training took 128.0 s according to time_ms, but 120.0 s according to its logged throughput",
        ),
        ("train_loss", 30, 5, None),
    ],
    ids=["training", "fast training", "evaluation", "neither", "tracked throughput", "nothing"],
)
def test_unusual_pace_is_reported_in_other_logs(
    written_trial: WriteTrial, key: str, nth: int, seconds: float, what: str | None
) -> None:
    """432 steps of 2.5 s and 6 evaluations of 20 s take 1,200 s."""
    path = other_log(written_trial(blocks=6))
    shifted(path, seconds, first_line=line_of(path, key, nth=nth))
    findings = [finding for finding in parse(path).findings if finding.rule != "EVL-01"]
    assert {(finding.rule, finding.severity) for finding in findings} == ({("LOG-20", "warning")} if what else set())
    assert not what or findings[0].what.startswith(what)


@pytest.mark.parametrize("tracked", ["throughput", "train_step_time", "validation_time", "train_step_time by step"])
@pytest.mark.parametrize(("scale", "is_found"), [(0.3, True), (0.7, True), (0.95, True), (0.98, False), (1.4, False)])
def test_times_that_the_tracked_speed_contradicts_are_an_error(
    written_trial: WriteTrial, tracked: str, scale: float, is_found: bool
) -> None:
    """3.2 samples/s are steps of 2.5 s, and an evaluation takes 20 s. Evaluations may be measured within 10 %."""
    path = other_log(written_trial(blocks=4))
    own = {"throughput": 3.2, "train_step_time": 2.5, "validation_time": 20.0, "train_step_time by step": 25.0}
    text = path.read_text().replace('"throughput": 3.2', f'"{tracked.removesuffix(" by step")}": {own[tracked]}')
    if tracked.endswith("by step"):  # as in logs of llama31_405b, whose records count no samples
        text = re.sub(r'"samples_count": \d+, "step"', '"step"', re.sub(r".*train_loss.*\n", "", text))
    path.write_text(text)
    begin = clock.time_ms(path, "init_start")
    before = parse(path)
    moved(path, lambda time_ms: begin + scale * (time_ms - begin))
    severities = [f.severity for f in parse(path).findings if f.rule == "LOG-22"]
    assert severities == (["error"] if is_found and (scale, tracked) != (0.95, "validation_time") else [])
    assert not [f for f in before.findings if f.rule in ("LOG-20", "LOG-22")]


def test_unusual_gap_is_reported_in_a_log_without_samples(written_trial: WriteTrial) -> None:
    path = other_log(written_trial())
    path.write_text(re.sub(r'"samples_count": \d+, ', "", path.read_text()))
    loss = line_of(path, "train_loss", nth=12)
    shifted(path, 7200, first_line=loss)
    (finding,) = [finding for finding in parse(path).findings if finding.rule == "LOG-20"]
    assert (finding.severity, finding.line) == ("warning", loss)
    assert (
        finding.what
        == "the log has no record in the 7,225.0 s before this train_loss; the second longest pause is 25.0 s"
    )


def late(path: Path, *, lines: Iterable[int], seconds: float) -> Path:
    """Move single lines."""
    texts = path.read_text().splitlines(keepends=True)
    for n in lines:
        texts[n - 1] = re.sub(r'(?<="time_ms": )\d+', lambda t: str(int(t[0]) + round(1000 * seconds)), texts[n - 1])
    path.write_text("".join(texts))
    return path


def test_records_of_other_logs_may_be_late_or_from_several_clocks(written_trial: WriteTrial) -> None:
    one = other_log(written_trial())
    late(one, lines=[line_of(one, "train_loss", nth=9)], seconds=-30)
    assert ("LOG-19", "warning") in problems(one) and parse(one).valid
    several = other_log(written_trial())
    at = [line_of(several, "tracked_stats", nth=n) for n in (2, 5, 9)]
    late(several, lines=[n + extra for n in at for extra in (0, 1)], seconds=-26)
    assert ("LOG-19", "warning") in problems(several) and parse(several).valid
    near = other_log(written_trial())
    assert problems(late(near, lines=[line_of(near, "tracked_stats", nth=3)], seconds=-1.0)) == []


def test_evaluations_at_the_end_of_other_logs_have_the_times_of_their_checkpoints(written_trial: WriteTrial) -> None:
    """As in logs of bert by Intel; a clock that is set back after some of the evaluations is still an error."""
    path = other_log(written_trial())
    lines = [line for line in path.read_text().splitlines(keepends=True) if '"eval_st' not in line]
    evaluated = [line for line in lines if '"eval_accuracy"' in line]
    others = [line for line in lines if '"eval_accuracy"' not in line]
    stop = next(n for n, line in enumerate(others) if '"run_stop"' in line)
    path.write_text("".join([*others[:stop], *evaluated, *others[stop:]]))
    assert ("LOG-19", "warning") in problems(path) and ("LOG-19", "error") not in problems(path)
    path.write_text("".join(lines))
    shifted(path, -40, first_line=line_of(path, "eval_accuracy", nth=2))
    assert ("LOG-19", "error") in problems(path)


def test_order_of_evaluations_after_the_run_is_not_reported(written_trial: WriteTrial) -> None:
    path = other_log(written_trial())
    text = path.read_text().replace("llama2_70b_lora", "stable_diffusion")
    path.write_text(re.sub(r'(accuracy", "value": .*"samples_count": )1920', r"\g<1>4", text))
    assert "LOG-04" not in dict(problems(path))


@pytest.mark.parametrize("key", ["eval_accuracy", "train_loss", "tracked_stats"])
def test_counts_must_increase_in_our_log(written_trial: WriteTrial, key: str) -> None:
    path = written_trial()
    lines = path.read_text().splitlines(keepends=True)
    before, repeated = line_of(path, key, nth=1), line_of(path, key, nth=2)
    counts = re.search(r'"samples_count": \d+, "step": \d+', lines[before - 1])
    assert counts
    lines[repeated - 1] = re.sub(r'"samples_count": \d+, "step": \d+', counts[0], lines[repeated - 1])
    path.write_text("".join(lines))
    (finding,) = [finding for finding in parse(path).findings if finding.rule == "LOG-04"]
    assert (finding.severity, finding.line) == ("error", repeated)
    samples = re.findall(r"\d+", counts[0])[0]
    assert (
        finding.what
        == f"samples_count of {key} does not increase: {int(samples):,} at line {before}, then {int(samples):,}"
    )
    assert "LOG-04" not in dict(problems(other_log(path))), "published logs repeat counts"


def test_decreasing_count_is_reported_in_other_logs(written_trial: WriteTrial) -> None:
    path = other_log(written_trial())
    path.write_text(path.read_text().replace('"samples_count": 400,', '"samples_count": 4,'))
    assert ("LOG-04", "warning") in problems(path)


@pytest.mark.parametrize(
    ("listed", "step_s", "severity"), [(2.5, 2.5, None), (2.5, 2.6, None), (2.5, 2.9, "error"), (2.5, 2.4, "error")]
)
def test_steps_and_training_take_the_same_time(
    written_trial: WriteTrial, listed: float, step_s: float, severity: str | None
) -> None:
    """The host may take 0.1 s more in each of 278 steps, but not 0.4 s; steps are never longer than training."""
    path = written_trial(step_s=step_s)
    path.write_text(path.read_text().replace(f" {step_s}", f" {listed}").replace(f"[{step_s}", f"[{listed}"))
    assert problems(path) == ([("LOG-20", severity)] if severity else [])
    if severity:
        assert f"training took {278 * step_s:,.1f} s, but its steps add up to 695.0 s" in message(path)


def test_suspended_machine_is_reported_as_unexplained_time(written_trial: WriteTrial) -> None:
    """Both clocks run while a laptop sleeps; the clock that times steps does not."""
    path = written_trial(slow={30: 3602.5})
    path.write_text(path.read_text().replace("3602.5", "2.5"))
    assert problems(path) == [("LOG-20", "error")]
    assert f"between lines {line_of(path, 'block_start')} and " in message(path)


@pytest.mark.parametrize(
    ("slow", "what"),
    [
        ({200: 402.0}, "step 200 took 402.0 s, but the median is 0.2 s; in total 77% of the 519.4 s between"),
        (
            {77: 30.0, 201: 60.0},
            "step 201 took 60.0 s, but the median is 0.2 s, and 1 more are much slower than the median; in total 43%",
        ),
        (
            {"evaluation 2": 402.0},
            "evaluation 2 took 402.0 s, but the median is 20 s; in total 80% of the 499.6 s between",
        ),
        ({n: 0.048 + 0.001 * (n % 103) for n in range(1, 289)} | {88: 5.8}, None),
        (dict.fromkeys(range(1, 289), 5.0), None),
        ({"evaluation 2": 60.0}, None),
    ],
)
def test_step_or_evaluation_far_above_the_median_is_reported(
    written_trial: WriteTrial, slow: dict[object, float], what: str | None
) -> None:
    path = written_trial(step_s=0.2, eval_s=20.0, slow=slow)
    assert problems(path) == ([("RUN-18", "warning")] if what else [])
    assert trial.judge(path).valid, "a pause is true time"
    if what:
        (finding,) = parse(path).findings
        assert what in finding.what
        key, nth = ("eval_start", 1) if what.startswith("evaluation") else ("tracked_stats", 19 if 200 in slow else 20)
        assert finding.line == line_of(path, key, nth=nth)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "docs/results").glob("*/result_*.txt")), ids=lambda path: path.parent.name
)
def test_steps_of_our_own_trials_add_up_to_their_time(path: Path) -> None:
    result = parse(path)
    assert result.step_times_ms and {finding.rule for finding in result.findings} == {"LOG-16"}


with_corpus = pytest.mark.skipif(not CORPUS.is_dir(), reason="the public logs are not available")


@with_corpus
def test_published_logs_have_none_of_these_findings() -> None:
    records = json.loads((CORPUS / "truth.json").read_text())
    clocks = {"LOG-19", "LOG-20", "LOG-22", "RUN-18"}
    by_file = {
        record["file"]: [f for f in parse(CORPUS / record["file"]).findings if f.rule in clocks] for record in records
    }
    assert len(by_file) == 74 and {file: findings for file, findings in by_file.items() if findings} == {}


@with_corpus
def test_published_logs_with_scaled_times_are_not_valid(tmp_path: Path) -> None:
    """All with a tracked speed, but two of retinanet and ssd, whose samples are not known, and one of unet3d."""
    judged = set()
    for record in json.loads((CORPUS / "truth.json").read_text()):
        text = (CORPUS / record["file"]).read_text(errors="replace")
        path = tmp_path / "log"
        path.write_text(text)
        if parse(path).minutes and re.search('"(throughput|train_step_time|validation_time)": ', text):
            moved(path, lambda time_ms: 1.7e12 + 0.7 * (time_ms - 1.7e12))
            judged.add((record["submission_benchmark"], parse(path).valid))
    assert {name for name, valid in judged if valid} == {"retinanet", "ssd", "unet3d"}
    assert {name for name, valid in judged if not valid} >= {"llama2_70b_lora", "llama31_8b", "llama31_405b", "bert"}


@with_corpus
@pytest.mark.parametrize("seconds", [-40, 7200])
def test_shift_of_the_second_half_of_a_published_log_is_reported(tmp_path: Path, seconds: int) -> None:
    """All of llama2_70b_lora; an error if a decrease of the times is visible."""
    for record in json.loads((CORPUS / "truth.json").read_text()):
        path, copy = CORPUS / record["file"], tmp_path / "log"
        events, _ = read(path)
        keys = [event.key for event in events]
        if "llama2_70b_lora" not in record["file"] or not {"run_start", "run_stop", "eval_start"} <= set(keys):
            continue
        begin, end = keys.index("run_start"), keys.index("run_stop")
        copy.write_bytes(path.read_bytes())
        shifted(copy, seconds, first_line=events[(begin + end) // 2].line)
        rules = {finding.rule: finding.severity for finding in parse(copy).findings}
        assert rules.keys() & {"LOG-19", "LOG-20"}, record["file"]
        if fall_ms(read(copy)[0][begin : end + 1]) > 1000:
            assert rules["LOG-19"] == "error" and not parse(copy).valid, record["file"]


def fall_ms(events: list[Event]) -> int:
    return max(before.time_ms - after.time_ms for before, after in pairwise(events))
