"""Test that a diagnosis cites the log line of the first cause, not a conclusion from it."""

import json
import time
from datetime import datetime
from pathlib import Path

import pytest

from bench import diagnosis
from bench.contract import plan_kinds
from bench.driver import between_commands
from bench.planning import compose
from bench.runs import ledger

PLAN = compose.compose(["task=lora_tiny", "cluster=local", "trials=1"])
STARTED = "job 7, restart 0, on dgx-[0-1]; all of its output: /run/slurm-7.out\n"


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """The run folder of a Slurm job whose first trial was started."""
    folder = tmp_path / "run"
    (folder / "rank_logs").mkdir(parents=True)
    (folder / "plan.json").write_text(plan_kinds.dumps(PLAN))
    (folder / "job.json").write_text(json.dumps({"backend": "slurm", "jobs": [{"id": "7"}]}))
    ledger.create(folder, PLAN)
    ledger.begin(folder, PLAN.trials[0], attempts=3, job="7", nodes="dgx-[0-1]")
    return folder


def close(folder: Path, what: str, exit_code: int = 1) -> None:
    between_commands.close_run(folder, PLAN, exit_code=exit_code, what=what, of_job=[0])


@pytest.mark.parametrize(
    ("what", "line", "rule"),
    [
        ("trial 0 failed", "srun: error: dgx-1: task 1: Killed", "RUN-02"),
        ("SLU-07: the time limit is near, and nothing is done", "2026-11-22 10:22:31 SLU-07: the time limit is near",
         "SLU-07"),
        ("CFG-08: no space left for results: trial 0 failed", "OSError: [Errno 28] No space left on device", "CFG-08"),
        ("CFG-06: the run folder has a quote in its name", "srun: error: dgx-1: task 1: Killed", "CFG-06"),
    ],
)  # fmt: skip
def test_diagnosis_after_the_end_cites_the_same_line(run_folder: Path, what: str, line: str, rule: str) -> None:
    """Also after the logs were deleted. If no log shows the rule, the batch script's message is cited."""
    output = run_folder / "slurm-7.out"
    output.write_text(STARTED + "trial 0, seed 1: starts\n" + line + "\n")
    close(run_folder, what)
    evidence, place = (what, (str(run_folder / "status.json"), 1)) if rule == "CFG-06" else (line, (str(output), 3))
    for _ in range(2):
        explanation = diagnosis.explain([run_folder])
        assert (explanation.rule, explanation.evidence, (explanation.file, explanation.line)) == (rule, evidence, place)
        assert "runstop why" not in str(explanation.fix)
        assert rule == "RUN-02" or not explanation.lines, "no other lines are shown if the cause is known"
        output.unlink(missing_ok=True)
    assert json.loads((run_folder / "status.json").read_text())["while"] == what


def test_cancelled_job_cites_its_output(run_folder: Path) -> None:
    line = "slurmstepd: error: *** JOB 7 ON dgx-0 CANCELLED AT 2026-11-22T11:06:34 ***"
    (run_folder / "slurm-7.out").write_text(f"{STARTED}{line}\n2026-11-22 11:06:34 stopped\n")
    (run_folder / "interrupted.txt").write_text("SLU-08: the job was cancelled\n")
    (run_folder / "job.json").write_text("{}")
    status = {"outcome": "interrupted", "exit_code": 143, "what": "SLU-08: the job was cancelled", "fix": "resume it"}
    (run_folder / "status.json").write_text(json.dumps(status))
    explanation = diagnosis.explain([run_folder])
    assert (explanation.rule, explanation.evidence, explanation.line, explanation.fix) == (
        "SLU-08",
        line,
        2,
        "resume it",
    )


def test_batch_script_without_python_has_no_diagnosis(run_folder: Path) -> None:
    """Its status names the failed trial; the node failure is in the log of the trial."""
    what = {"what": "trial 0 failed", "fix": f"runstop why {run_folder}"}
    (run_folder / "status.json").write_text(json.dumps({"outcome": "failed", "exit_code": 1} | what))
    assert diagnosis.explain([run_folder]).rule == "unknown"
    log = run_folder / "rank_logs/trial_0.out"
    log.write_text("0: step 5\nsrun: error: Node failure on dgx-1\n")
    explanation = diagnosis.explain([run_folder])
    assert (explanation.rule, explanation.evidence, explanation.file, explanation.line) == (
        "SLU-09", "srun: error: Node failure on dgx-1", str(log), 2,
    )  # fmt: skip
    assert "runstop why" not in str(explanation.fix)


def test_refusal_of_the_batch_script_is_in_its_output(tmp_path: Path) -> None:
    """It has written to no run folder, so its output is the only file."""
    line = "CFG-05: job 6 is using /runs/lora_tiny-7"
    (tmp_path / "slurm-7.out").write_text(f"{line}\n")
    explanation = diagnosis.explain([tmp_path])
    assert (explanation.rule, explanation.evidence) == ("CFG-05", line)


PREEMPTED = "slurmstepd: error: *** JOB 7 ON dgx-0 CANCELLED AT 2026-11-22T10:32:36 DUE TO PREEMPTION ***"
NODE_FAILED = (
    "slurmstepd: error: *** JOB 7 ON dgx-0 CANCELLED AT 2026-11-22T10:42:36 DUE TO NODE FAILURE, SEE SLURMCTLD LOG "
    "FOR DETAILS ***"
)
TOO_OFTEN = """\
trial 0 was started 2 times and interrupted each time: requeued DUE TO PREEMPTION, requeued DUE TO NODE FAILURE
  where: /run/ledger.json
  fix:   use nodes without preemption
"""


@pytest.mark.parametrize("job", ["7", "7_0"])
def test_first_of_two_faults_is_the_cause(run_folder: Path, job: str) -> None:
    """A job that was preempted and then lost a node may not restart its trial."""
    starts = [STARTED.replace("job 7, restart 0", f"job {job}, restart {n}") for n in range(3)]
    output = run_folder / "slurm-7.out"
    output.write_text(f"{starts[0]}{PREEMPTED}\n{starts[1]}{NODE_FAILED}\n{starts[2]}{TOO_OFTEN}")
    for _ in range(2):
        explanation = diagnosis.explain([run_folder])
        assert (explanation.rule, explanation.evidence, explanation.line) == ("SLU-10", PREEMPTED, 2)
        assert explanation.fix == "use nodes without preemption"
        (other,) = [clue for clue in explanation.also if clue.rule == "SLU-09"]
        assert (other.text, other.line) == (NODE_FAILED, 4)
        close(run_folder, "opening trial 0 failed")


def test_fault_before_a_restart_is_not_the_cause(run_folder: Path) -> None:
    output = run_folder / "slurm-7.out"
    output.write_text(f"{STARTED}{PREEMPTED}\n{STARTED.replace('restart 0', 'restart 1')}{NODE_FAILED}\n")
    explanation = diagnosis.explain([run_folder])
    assert (explanation.rule, explanation.evidence, explanation.line) == ("SLU-09", NODE_FAILED, 4)
    assert "SLU-10" not in [clue.rule for clue in explanation.also]


@pytest.mark.parametrize(("stamp_a", "stamp_b", "first"), [("10:05", "10:04", "b"), ("10:04", "10:05", "a")])
def test_log_that_failed_first_explains_the_run(tmp_path: Path, stamp_a: str, stamp_b: str, first: str) -> None:
    """With any format of the time stamp."""
    logs = {"a": tmp_path / "a.log", "b": tmp_path / "b.log"}
    logs["a"].write_text(f"[2026-11-22 {stamp_a}:00] torch.OutOfMemoryError: CUDA out of memory.\n")
    logs["b"].write_text(f"2026-11-22T{stamp_b}:00 torch.OutOfMemoryError: CUDA out of memory.\n")
    assert diagnosis.explain([*logs.values()]).file == str(logs[first])


ECHO = "0: RuntimeError: [/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:49839\n"
FAILED = "srun: error: dgx-0: task 0: Exited with exit code 1\n"
TERMINATED = "srun: error: dgx-1: task 1: Exited with exit code 143\n"
ENDS = "srun: launch/slurm: _step_signal: Terminating StepId=7.3\n"


@pytest.mark.parametrize(
    ("lines", "rule"),
    [
        ((TERMINATED, ENDS, FAILED), "RUN-02"),
        ((ECHO, FAILED, TERMINATED, ENDS), "RUN-02"),  # Slurm noticed the other task first
        ((ECHO, TERMINATED, FAILED, ENDS), "RUN-02"),
        ((ECHO, FAILED, ENDS, TERMINATED), "NCC-06"),  # srun ended it
        ((ECHO, FAILED, ENDS.replace("launch/slurm: _step_signal: ", ""), TERMINATED), "NCC-06"),
    ],
)
def test_rank_that_exits_with_143_was_terminated_unless_slurm_ends_its_step(
    run_folder: Path, lines: tuple[str, ...], rule: str
) -> None:
    (run_folder / "rank_logs/trial_0.out").write_text("".join(lines))
    explanation = diagnosis.explain([run_folder])
    assert explanation.rule == rule
    if rule == "RUN-02":
        assert (explanation.evidence, explanation.line) == (TERMINATED.strip(), lines.index(TERMINATED) + 1)


CRASHED = "srun: error: dgx-1: task 1: Segmentation fault\n"


@pytest.mark.parametrize(
    ("lines", "rule"), [((ECHO, CRASHED, ENDS, FAILED), "RUN-04"), ((ECHO, FAILED, ENDS, CRASHED), "NCC-06")]
)
def test_rank_that_crashed_first_explains_earlier_errors_of_other_ranks(
    run_folder: Path, lines: tuple[str, ...], rule: str
) -> None:
    (run_folder / "rank_logs/trial_0.out").write_text("".join(lines))
    assert diagnosis.explain([run_folder]).rule == rule


def test_killed_batch_script_is_the_cause(run_folder: Path) -> None:
    """It writes no status, and its ranks close their log."""
    gone = "0: slurmstepd-dgx-0: error: *** STEP 7.3 ON dgx-0 FAILED (non-zero exit code or other failure mode) ***"
    (run_folder / "rank_logs/trial_0.out").write_text(
        f"srun: Job step aborted: Waiting up to 7 seconds for job step to finish.\n{gone}\n{FAILED}{ENDS}{TERMINATED}"
    )
    explanation = diagnosis.explain([run_folder])
    assert (explanation.rule, explanation.evidence, explanation.line) == ("RUN-02", gone, 2)


@pytest.mark.parametrize(
    "echo",
    ["RuntimeError: [/gloo/transport/tcp/pair.cc:553] Connection closed by peer", "ConnectionResetError: [Errno 104]"],
)
@pytest.mark.parametrize("reports", [True, False])
def test_program_that_failed_first_is_the_cause(run_folder: Path, echo: str, reports: bool) -> None:
    """Of engine=command on every rank. The runner of rank 1 reports later, or was ended before it could."""
    raised = 'Traceback (most recent call last):\n  File "/me/train.py", line 7, in <module>\n'
    ended = (
        "RUN-20: the program of rank {} ended with exit code 1; its last line: {}\n  where: n, argv\n  fix:   read\n"
    )
    lines = (f"{raised}{echo}\n" + ended.format(0, echo), f"{raised}ValueError: no rows\n")
    report = {"time": 1.0, "exit_code": 1, "rule": "RUN-20", "what": ended.format(0, echo)[8:].partition("\n")[0]}
    logs = run_folder / "rank_logs"
    (logs / "trial_0_rank_0.error").write_text(json.dumps(report | {"where": "n, argv", "fix": "read"}))
    (logs / "trial_0_rank_0.out").write_text(lines[0])
    (logs / "trial_0_rank_1.out").write_text(lines[1] + (ended.format(1, "ValueError: no rows") if reports else ""))
    explanation = diagnosis.explain([run_folder])
    assert "ValueError: no rows" in str(explanation.evidence) and str(explanation.file).endswith("rank_1.out")
    assert explanation.rule == ("RUN-20" if reports else "RUN-13")


ABORTED = "srun: Job step aborted: Waiting up to 7 seconds for job step to finish.\n"
GONE = "0: slurmstepd-dgx-0: error: *** STEP 7.3 ON dgx-0 FAILED (non-zero exit code or other failure mode) ***\n"


@pytest.mark.parametrize(
    ("lines", "is_cause"),
    [
        ((GONE, ABORTED, TERMINATED, ENDS, ECHO, FAILED), True),
        ((ABORTED, ECHO, TERMINATED, ENDS, GONE, FAILED), True),
        ((ECHO, TERMINATED, GONE, ABORTED, ENDS, FAILED), True),
        ((ECHO, FAILED, ENDS, GONE, TERMINATED), False),  # the batch script ended after its ranks had failed
    ],
)
def test_killed_batch_script_explains_the_errors_of_its_ranks(
    run_folder: Path, lines: tuple[str, ...], is_cause: bool
) -> None:
    """Slurm terminates one rank, and another one loses its connection and reports that, before or after Slurm does."""
    (run_folder / "rank_logs/trial_0.out").write_text("".join(lines))
    report = {"time": 1.0, "exit_code": 1, "rule": None, "what": f"Traceback (most recent call last):\n{ECHO[3:]}"}
    (run_folder / "rank_logs/trial_0_rank_0.error").write_text(json.dumps(report | {"where": "", "fix": ""}))
    explanation = diagnosis.explain([run_folder])
    assert explanation.rule == ("RUN-02" if is_cause else "NCC-06")
    assert not is_cause or (explanation.evidence, explanation.line) == (GONE.strip(), lines.index(GONE) + 1)


def test_a_rank_that_failed_before_a_restart_is_not_the_cause_after_it(run_folder: Path) -> None:
    restarted = STARTED.replace("restart 0", "restart 1")
    lines = (STARTED, FAILED, restarted, ECHO, TERMINATED, GONE, ABORTED, ENDS)
    (run_folder / "slurm-7.out").write_text("".join(lines))
    explanation = diagnosis.explain([run_folder])
    assert (explanation.rule, explanation.evidence, explanation.line) == ("RUN-02", GONE.strip(), lines.index(GONE) + 1)


@pytest.mark.parametrize(("silent_s", "advice"), [(52, "so it hung"), (2, "walltime=")])
def test_fix_of_a_hung_run_is_not_a_longer_time_limit(run_folder: Path, silent_s: int, advice: str) -> None:
    """It logged a record every second, and then nothing until its time limit of one minute."""
    plan = compose.compose(["task=lora_tiny", "cluster=local", "walltime=1"])
    (run_folder / "plan.json").write_text(plan_kinds.dumps(plan))
    ended = int(time.time())
    last, first = ended - silent_s, ended - 58
    records = [
        (first, "INTERVAL_START", "init_start", None, {}),
        (first, "POINT_IN_TIME", "global_batch_size", 8, {}),
        (first, "POINT_IN_TIME", "opt_learning_rate_training_steps", 80_000, {}),
        (first, "INTERVAL_START", "run_start", None, {}),
        *((at, "POINT_IN_TIME", "train_loss", 1.0, {"samples_count": 40 * (at - first)}) for at in range(first, last)),
    ]
    lines = [
        {"namespace": "", "time_ms": 1000 * at, "event_type": kind, "key": key, "value": value, "metadata": more}
        for at, kind, key, value, more in records
    ]
    (run_folder / "result_0.txt").write_text("".join(f":::MLLOG {json.dumps(line)}\n" for line in lines))
    stamp = datetime.fromtimestamp(ended).isoformat()
    (run_folder / "rank_logs/trial_0.out").write_text(
        f"slurmstepd: error: *** STEP 7.3 ON dgx-0 CANCELLED AT {stamp} DUE TO TIME LIMIT ***\n"
    )
    explanation = diagnosis.explain([run_folder])
    assert explanation.rule == "SLU-07" and advice in str(explanation.fix), explanation.fix
    assert ("walltime=" in str(explanation.fix)) == (advice == "walltime=")


def test_unknown_exception_shows_the_frame_of_user_code(run_folder: Path) -> None:
    """From the error report of the rank, and from the output of all ranks, mixed with lines of other ranks."""
    trace = [
        "Traceback (most recent call last):",
        '  File "/home/me/jobs/train.py", line 12, in step',
        "    return route(tokens)",
        '  File "/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1773, in _call_impl',
        "    return forward_call(*args)",
        "acme.routing.ExpertError: no such expert",
    ]
    output = run_folder / "rank_logs/trial_0.out"
    output.write_text("".join(f"1: {line}\n0: step 7\n" for line in trace))
    for evidence in (f"1: {trace[-1]}", trace[-1]):
        explanation = diagnosis.explain([run_folder])
        assert (explanation.rule, explanation.evidence) == (
            "RUN-13",
            f"{evidence} (at /home/me/jobs/train.py:12 in step)",
        )
        report = {"time": 1.0, "exit_code": 1, "rule": None, "what": "\n".join(trace), "where": "", "fix": ""}
        (run_folder / "rank_logs/trial_0_rank_1.error").write_text(json.dumps(report))
