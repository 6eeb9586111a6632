"""Fixes and problems that are computed from records: times, samples, pauses and evaluations, with their limits."""

import json
import os
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from bench.contract.plan import Plan
from bench.contract.run_files import RANK_LOGS
from bench.diagnosis import fixes, flight_recorder, trial_state
from bench.diagnosis.fixes import Reached
from bench.diagnosis.log_scan import Clue
from bench.mlperf import reader
from bench.mlperf import result as results
from bench.mlperf.reader import Event
from bench.mlperf.result import Result
from bench.planning import compose
from bench.rules.signs import Weight
from helpers import checked
from helpers.types import MakeLog

AGAIN = "so it hung: start it again, and when it hangs again, run `py-spy dump --pid PID` for every rank to see where"


@pytest.fixture
def result(written_log: MakeLog) -> Result:
    """Return a result of 2,304 samples at a global batch size of 8, of at most 800 steps, with target 0.925."""
    return results.parse(written_log())


@pytest.fixture
def plan() -> Plan:
    return compose.compose(["task=lora_tiny", "cluster=local", "walltime=30"])


def event(minute: float, key: str = "train_loss", **metadata: Any) -> Event:
    return Event(round(minute * 60_000), "POINT_IN_TIME", key, 1.0, metadata, 1)


def test_samples_pace_and_times_are_those_of_the_records(result: Result) -> None:
    result = replace(result, run_start_ms=2 * 60_000)
    events = [event(1, "init_start"), event(2, "run_start"), event(4, samples_count=100), event(7, samples_count=250)]
    assert fixes.reached([*events, event(9, "other", samples_count=9999)], result) == Reached(250, 50.0, 8.0, 1.0)
    assert fixes.reached([event(2, "train_loss ", samples_count=8)], result) == Reached(8, None, 0.0, 0.0)
    assert fixes.reached([event(2.5, samples_count=1)], result) == Reached(1, 2.0, 0.0, -0.5)
    assert fixes.reached([event(3, samples_count=0)], result) == Reached(0, None, 0.0, -1.0)
    assert fixes.reached([event(3, "other", samples_count=1), event(4, samples_count="x")], result) is None
    assert fixes.reached(events, replace(result, run_start_ms=None)) is None


def test_how_far_a_trial_got_is_one_line(result: Result) -> None:
    reached = Reached(1600, 50.25, 8, 1)
    assert fixes.total_samples(result) == 6400
    last = "last evaluation 0.92, target 0.925"
    assert fixes.how_far(reached, result) == f"1,600 samples of at most 6,400, 50.2 samples/min, {last}"
    assert fixes.how_far(replace(reached, pace_samples_min=None), result) == f"1,600 samples of at most 6,400, {last}"
    assert fixes.how_far(None, result) == f"samples not in the log, {last}"
    bare = replace(result, evaluations=[], target=None, hyperparameters={})
    assert fixes.how_far(reached, bare) == "1,600 samples, 50.2 samples/min, no evaluation"


def test_a_time_limit_is_enough_for_all_steps_and_five_minutes(result: Result, plan: Plan) -> None:
    """6,400 samples at 100 a minute are 64 minutes, after 2 minutes of start: 71 with the margin."""
    reached = Reached(3200, 100.0, 34.4, 2.0)
    enough = (
        "set walltime=71 (minutes per trial) to reach the last step (6,400 samples) at this pace; the log of this run "
        "covers 34 min. A run that reaches its target earlier needs less"
    )
    assert fixes.enough_time(reached, result, None) == fixes.enough_time(reached, result, plan) == enough
    just = checked.changed(plan, {"config.walltime": 70})
    assert fixes.enough_time(reached, result, just) == enough
    had = checked.changed(plan, {"config.walltime": 71})
    own = f"at its pace the run needs 71 min, and its time limit was 71 min, {AGAIN}"
    assert fixes.enough_time(reached, result, had) == own
    fraction = replace(reached, before_min=1.5)
    assert (fixes.enough_time(fraction, result, had) or "").startswith("at its pace the run needs 71 min")
    assert fixes.enough_time(replace(reached, samples=6400), result, None) is not None
    for other in (replace(reached, samples=6401), replace(reached, pace_samples_min=None), None):
        assert fixes.enough_time(other, result, None) is None
    assert fixes.enough_time(reached, replace(result, hyperparameters={}), None) is None


def test_a_run_that_was_silent_for_ten_times_its_longest_pause_hung(plan: Plan) -> None:
    now = datetime(2026, 11, 21, 12, 0)
    ended = "slurmstepd: error: *** STEP 7.0 ON a CANCELLED AT 2026-11-21T12:00:00 DUE TO TIME LIMIT ***"

    def advice(*minutes_before: float, walltime: int = 30, evidence: str = ended) -> str | None:
        events = [event(now.timestamp() / 60 - minutes) for minutes in minutes_before]
        return fixes.hung(events, evidence, checked.changed(plan, {"config.walltime": walltime}))

    def silent(seconds: int, longest: int) -> str:
        start = f"the run logged nothing in its last {seconds:,} s; before that its longest pause was {longest} s"
        return f"{start}, {AGAIN}. A longer time limit does not help"

    assert advice(30, 29, 28, 10) is None, "18 min, and 10 is not 10 times as long"
    assert advice(30, 29, 28, 27, 20.0, walltime=200) is None
    assert advice(30, 29, 28.5, 20, walltime=100) is None
    assert advice(23, 22, 21, 20, walltime=23) == silent(1200, 60)
    assert advice(33, 32, 31, 30, walltime=23) == silent(1200, 60), "by the walltime: 23 - 3 min"
    assert advice(13, 12, 11, 10, walltime=23) == silent(600, 60), "exactly 10 times as long"
    assert advice(13, 12, 11, 9.9, walltime=23) is None
    assert advice(0.52, 0.51, 0.505, walltime=23) == silent(30, 1)
    assert advice(0.51, 0.5, 0.495, walltime=23) is None, "half a minute at least"
    assert advice(20, 19) is None and advice(23, 22, 21, 20, evidence="DUE TO TIME LIMIT") is None
    assert fixes.hung([event(1)] * 3, ended, None) is None


def test_a_missing_module_has_the_command_that_installs_it(plan: Plan) -> None:
    def fix(module: str, rule: str = "RUN-25") -> str | None:
        clue = Clue(rule, Weight.CAUSE, "f", 1, f"ModuleNotFoundError: No module named '{module}'")
        return fixes.of_this_run(clue, plan).fix

    where = "on the machine of the ranks, in their Python environment or image: pip install"
    assert fix("yaml.x") == f"{where} yaml"
    assert fix("flash_attn.ops") == f"{where} flash-attn --no-build-isolation"
    assert fix("megatron.core") == fix("torch") == f"{where} 'runstop[engine]'"
    assert fix("yaml", "RUN-13") is None
    clue = Clue("PYX-03", Weight.CAUSE, "f", 1, "No module named 'torch'")
    own = "run `pip install 'runstop[engine]'` in the environment of the ranks: it installs torch and megatron-core"
    assert fixes.of_this_run(clue, plan) == replace(clue, rule="RUN-25", fix=own)
    inside = checked.changed(plan, {"config.container.runtime": "pyxis"})
    assert fixes.of_this_run(clue, inside) == clue == fixes.of_this_run(clue, None)


def test_a_log_is_fresh_for_ten_minutes_or_ten_pauses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, now_min = tmp_path / "log", 30_000_000
    path.touch()
    monkeypatch.setattr(trial_state.time, "time", lambda: 60.0 * now_min)

    def is_fresh(*ages: float, file_age_min: float = 0) -> bool:
        os.utime(path, (60 * (now_min - file_age_min),) * 2)
        return trial_state.is_fresh(path, [event(now_min - age) for age in ages])

    assert not is_fresh()
    assert is_fresh(9.9) and not is_fresh(10.1)
    assert is_fresh(12, 11, 9.9) and not is_fresh(12, 11, 10.1)
    assert is_fresh(21.5, 19.5) and not is_fresh(22.5, 20.5), "ten times two minutes"
    assert not is_fresh(1, file_age_min=10.1), "the file is older"
    assert trial_state.quiet_min(path, [event(now_min + 5)]) == pytest.approx(10.1)
    os.utime(path, (60 * (now_min + 10),) * 2)
    assert trial_state.quiet_min(path, [event(now_min + 5)]) == 0.0, "clocks differ"


@pytest.mark.parametrize(
    ("losses", "is_flat"),
    [
        ((1.0, 1.0, 1.1, 1.2, 1.3), True),
        ((1.0, 1.1, 1.2, 1.3), False),
        ((1.0, 1.1, 1.2, 1.3, 0.99), False),
        ((0.9, 1.0, 1.1, 1.2, 1.3, 0.95), True),
        ((1.0, 0.9, 1.0, 1.1, 1.2), False),
    ],
)
def test_four_evaluations_without_a_lower_loss_are_flat(
    losses: tuple[float, ...], is_flat: bool, result: Result
) -> None:
    first = result.evaluations[0]
    flat = replace(result, evaluations=[replace(first, value=loss) for loss in losses])
    assert trial_state.is_flat(flat) == is_flat
    assert not trial_state.is_flat(replace(flat, benchmark="rnnt"))


def test_the_end_of_a_log_names_what_is_wrong(written_log: MakeLog) -> None:
    path = written_log(evals=(0.95, 0.93), status="aborted")
    result, events = results.parse(path), reader.read(path)[0]
    (clue,) = trial_state.judge(result, events, is_running=False)
    assert (clue.rule, clue.weight, clue.file) == ("LOG-05", Weight.OUTCOME, str(path))
    trained = replace(result, hyperparameters={**result.hyperparameters, "opt_learning_rate_training_steps": 252})
    (clue,) = trial_state.judge(trained, events, is_running=False)
    assert clue.rule == "RUN-06", "1,920 of 2,016 samples are 95 %"
    more = replace(result, hyperparameters={**result.hyperparameters, "opt_learning_rate_training_steps": 253})
    assert [one.rule for one in trial_state.judge(more, events, is_running=False)] == ["LOG-05"]
    cut = path.read_text().rpartition(":::MLLOG")[0]
    path.write_text("".join(line + "\n" for line in cut.splitlines() if '"run_stop"' not in line))
    result, events = results.parse(path), reader.read(path)[0]
    assert list(trial_state.judge(result, events, is_running=True)) == []
    for age_min, text in ((3.0, "3 min ago"), (2 * 1440 - 1, "2,879 min ago"), (2 * 1440 + 1, "2 days ago")):
        os.utime(path, (time.time() - 60 * age_min,) * 2)
        (clue,) = trial_state.judge(result, events, is_running=False)
        assert (clue.rule, clue.line) == ("RUN-07", events[-1].line)
        assert clue.text == f"the last record is {events[-1].key}, {text}"
    named = list(trial_state.problem_clues(["SRV-01: bad", "no rule"], "f"))
    assert [(one.rule, one.text, one.line) for one in named] == [("SRV-01", "SRV-01: bad", 1), ("RUN-12", "no rule", 1)]


def entered(number: int, name: str = "nccl:all_reduce", *, group: str = "0", since: int = 1, **more: Any) -> Any:
    own = {"process_group": [group, "default_pg"], "collective_seq_id": number, "profiling_name": name}
    own |= {"input_sizes": [[4]], "retired": False, "state": "started", "time_created_ns": since, "is_p2p": False}
    return own | more


def cited(folder: Path, **ranks: list[Any]) -> str | None:
    (folder / RANK_LOGS).mkdir(exist_ok=True)
    for old in (folder / RANK_LOGS).iterdir():
        old.unlink()
    for rank, entries in ranks.items():
        (folder / RANK_LOGS / f"flight_{rank[1:]}.json").write_text(json.dumps({"entries": entries}))
    return flight_recorder.cited(folder)


def test_flight_records_name_ranks_collectives_and_groups(tmp_path: Path) -> None:
    done, waits = entered(6, retired=True), entered(7)
    assert cited(tmp_path) is None and cited(tmp_path, r0=[done], r1=[done]) is None
    blamed = "flight recorder: rank 1 did not enter collective 7 (all_reduce) of all ranks, in which rank 0 waited"
    assert cited(tmp_path, r0=[done, waits], r1=[done]) == blamed
    assert cited(tmp_path, r0=[waits, done], r1=[done]) == blamed, "records in another order"
    assert cited(tmp_path, r0=[waits, {"is_p2p": False}], r1=[done, entered(9, is_p2p=True)]) == blamed
    assert cited(tmp_path, r0=[waits], r1=[entered(6, state="completed")]) == blamed
    together = "flight recorder: ranks 0, 1 entered collective 7 (all_reduce) of all ranks, but it did not end"
    assert cited(tmp_path, r0=[waits], r1=[waits]) == together
    other = entered(7, "all_gather", input_sizes=[[8]])
    start = "flight recorder: ranks called different collectives as number 7 of all ranks"
    assert cited(tmp_path, r0=[waits], r1=[other]) == f"{start}: all_gather of [[8]], all_reduce of [[4]]"
    many = {f"r{rank}": [done] for rank in range(1, 10)}
    listed = "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 1 more"
    assert (cited(tmp_path, r0=[waits], **many) or "").startswith(f"flight recorder: {listed} did not enter")
    del many["r9"]
    assert "ranks 1, 2, 3, 4, 5, 6, 7, 8 did not" in (cited(tmp_path, r0=[waits], **many) or "")
    tp = {"group": "1", "process_group": ["1", "TENSOR"]}
    early, late = entered(1200, since=1, **tp), entered(7, since=2)
    assert "collective 1,200 (all_reduce) of group TENSOR, but" in (cited(tmp_path, r0=[late, early]) or "")
    assert cited(tmp_path, r0=[late, early], r1=[done]) == blamed, "a rank is to blame in the other group"
    unnamed = entered(7, process_group=["5", ""])
    assert "of group 5, but it did not end" in (cited(tmp_path, r0=[unnamed]) or "")
