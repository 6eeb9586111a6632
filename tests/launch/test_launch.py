"""Runs as users start them: wrong input, interrupts, killed processes, two runs at once."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from bench.contract import mllog
from bench.diagnosis import explain
from bench.errors import ConfigError
from bench.launch import resume
from bench.mlperf import reader
from bench.mlperf.result import parse
from bench.runs import goodput
from bench.runs.goodput import Part
from bench.runs.verification import verify
from helpers.ranks import mounted

pytestmark = pytest.mark.starts

SHORT_RUN = (
    "task.training.max_steps=4",
    "recipe.eval_every_samples=16",
    "recipe.eval_skip=0",
    "task.training.target_eval_loss=100",
)
"""Four steps with an evaluation at the second; any loss reaches the target."""

UNMEASURED = ("launch.health=false",)
"""Without the node check of the default run, for which two ranks import torch."""

Launch = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows and base checkpoint for every run of this module, prepared once by two runs that start at the same time."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def launch(cache: Path, tmp_path: Path, spawn: Launch) -> Launch:
    """Start `runstop launch` on a cache and a results folder of the test."""

    def start(*overrides: str, **environment: str) -> "subprocess.Popen[str]":
        paths = {"DATADIR": str(cache), "MODEL": str(cache), "LOGDIR": str(tmp_path / "runs")}
        return spawn([sys.executable, "-m", "bench.launch", *overrides], paths | environment)

    return start


WRONG = {
    "unknown task": (["task=lora70"], "task=lora70 does not exist", "did you mean lora70b?"),
    "typo in a key": (["recipe.lrr=1"], "unknown key 'recipe.lrr'", "did you mean recipe.lr=1?"),
    "typo added": (
        ["+task.training.max_step=1"],
        "unknown key 'task.training.max_step'",
        "did you mean task.training.max_steps=1?",
    ),
    "typo added at the root": (["+trial=1"], "unknown key 'trial'", "did you mean trials=1?"),
    "typo shown only": (["--cfg", "job", "+trial=1"], "unknown key 'trial'", "did you mean trials=1?"),
    "wrong type": (["recipe.lr=fast"], "'fast'", "recipe.lr"),
    "tp 3": (["parallel.tp=3"], "tp 3 does not divide", "set parallel.tp to one of 1, 2"),
    "no DATADIR": (["task=lora70b", "cluster=dgx1"], "DATADIR is not set", "export DATADIR="),
    "no rows": (
        ["task=lora70b", "parallel={tp: 1, cp: 1, sp: false}"],
        "no prepared rows of gov_report",
        "set DATADIR to the prepared rows",
    ),
    "one of a sweep": (["--multirun", "launch.dry_run=true", "parallel.tp=1,3"], "tp 3 does not divide", "to one of"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_refused_with_what_where_and_fix(launch: Launch, tmp_path: Path, case: str) -> None:
    overrides, what, fix = WRONG[case]
    empty = {"DATADIR": ""} if case == "no DATADIR" else {}
    process = launch(*overrides, **empty)
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 2, output
    assert what in output and fix in output
    assert "Traceback" not in output and re.search(r"\n  where: .*\n  fix:   ", output)
    assert not (tmp_path / "runs").exists(), "nothing was started"


def test_dry_run_touches_nothing(launch: Launch, tmp_path: Path) -> None:
    process = launch("task=lora70b", "cluster=dgx2", "launch.dry_run=true")
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 2, "a launch without CONT would be refused"
    assert "16 = dp 8 x tp 2 x pp 1 x cp 1, sp (tp, pp, cp, sp automatic)" in output and "CONT is not set" in output
    assert list(tmp_path.iterdir()) == []


def test_a_closed_pipe_gives_no_traceback(launch: Launch) -> None:
    process = launch("launch.dry_run=true", PYTHONUNBUFFERED="1")
    assert process.stdout is not None and process.stdout.readline().startswith("lora_tiny-local: ")
    process.stdout.close()
    assert process.wait(timeout=300) in (0, 141), "0 if it had printed everything before"


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_read_only_results_folder_is_refused(launch: Launch, tmp_path: Path) -> None:
    with mounted(tmp_path / "ro", "ro"):
        process = launch(LOGDIR=str(tmp_path / "ro"))
        output = process.communicate(timeout=300)[0]
    assert process.returncode == 2 and "CFG-08" in output and "set LOGDIR" in output


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_small_disk_is_refused(launch: Launch, tmp_path: Path) -> None:
    with mounted(tmp_path / "small", "size=1m"):
        process = launch(LOGDIR=str(tmp_path / "small"))
        output = process.communicate(timeout=300)[0]
    assert process.returncode == 2 and "CFG-08: only 1 MiB of disk space are free, but the run needs" in output


def test_a_port_in_use_is_refused(launch: Launch) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        process = launch(f"cluster.master_port={taken.getsockname()[1]}")
        output = process.communicate(timeout=300)[0]
    assert process.returncode == 2 and "NCC-05" in output and "or to null for any free port" in output


def test_a_folder_with_results_is_refused(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "result_0.txt").write_text("somebody's result")
    process = launch(f"launch.folder={tmp_path}")
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 2 and "CFG-05: the log result_0.txt already exists" in output
    assert (tmp_path / "result_0.txt").read_text() == "somebody's result"


@pytest.mark.trains
def test_the_default_run_is_valid_and_a_second_one_shares_its_preparation(launch: Launch, tmp_path: Path) -> None:
    """The README's run from an empty cache, and at the same time one with a meaningless target."""
    default = launch(f"launch.folder={tmp_path}/default")
    short = launch(*SHORT_RUN, f"launch.folder={tmp_path}/short")
    output, output_short = (process.communicate(timeout=1500)[0] for process in (default, short))
    trained = [any(e.key == mllog.TRAIN_LOSS for e in reader.read(log)[0]) for log in tmp_path.glob("*/prepare.txt")]
    assert sorted(trained) == [False, True], "one run trains the base, the other waits for it"
    assert (default.returncode, short.returncode) == (0, 1), output + output_short
    assert all(f"MLPerf checker {version}, open division: passed" in output for version in ("5.1.0", "6.1.0"))
    assert "LOG-12" in output_short, "a target of 100 is no llama2_70b_lora"
    result = parse(tmp_path / "default" / "result_0.txt")
    assert result.valid and result.converged and result.samples_to_target >= 1536
    assert "not a submission" in str(result.org) and "not a submission" in str(result.platform)
    assert json.loads((tmp_path / "default" / "status.json").read_text())["outcome"] == "valid"
    assert (
        json.loads((tmp_path / "default" / "ledger.json").read_text())[0]["samples_to_target"]
        == result.samples_to_target
    )
    assert (tmp_path / "default" / "loss_0.png").read_bytes().startswith(b"\x89PNG")
    assert all(verify(tmp_path / name).passed for name in ("default", "short"))
    shutil.copy(tmp_path / "short" / "result_0.txt", tmp_path / "default" / "result_0.txt")
    compared = verify(tmp_path / "default").compared
    assert {"result_0.txt", "result_0.txt, attempt"} <= {each.what for each in compared if each.passed is False}


ENDINGS = {
    "Ctrl-C": (signal.SIGINT, "group", 130, "interrupted", "RUN-24"),
    "SIGTERM": (signal.SIGTERM, "launcher", 143, "interrupted", "RUN-24"),
    "a rank is killed": (signal.SIGKILL, "rank", 1, "failed", "RUN-02"),
}


@pytest.mark.trains
@pytest.mark.parametrize(
    "ending", [pytest.param(name, marks=pytest.mark.slow if name == "SIGTERM" else ()) for name in ENDINGS]
)
def test_a_stopped_run_logs_aborted_and_leaves_no_process(launch: Launch, tmp_path: Path, ending: str) -> None:
    signum, whom, exit_code, outcome, rule = ENDINGS[ending]
    process = launch(*UNMEASURED, f"launch.folder={tmp_path}/run", "recipe.log_every_steps=1")
    wait_for(lambda: "train_loss" in text(tmp_path / "run" / "result_0.txt"), process)
    pids = descendants(process.pid)
    assert len(pids) >= 2, "one process per rank"
    if whom == "group":
        os.killpg(process.pid, signum)
    else:
        os.kill(process.pid if whom == "launcher" else rank_1(pids), signum)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == exit_code, output
    assert "Traceback" not in output and "runstop why" in output
    assert explain([tmp_path / "run"]).rule == rule
    assert not [pid for pid in pids if alive(pid)]
    last, checksum = reader.read(tmp_path / "run" / "result_0.txt")[0][-2:]
    assert (last.key, last.metadata["status"]) == (mllog.RUN_STOP, "aborted")
    assert checksum.key == mllog.LOG_SHA256 and verify(tmp_path / "run").passed
    assert json.loads((tmp_path / "run" / "status.json").read_text())["outcome"] == outcome
    assert json.loads((tmp_path / "run" / "ledger.json").read_text())[0]["outcome"] == "aborted"


@pytest.mark.trains
def test_a_stalled_rank_is_named_by_the_others_and_ends_the_run(launch: Launch, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = launch(*UNMEASURED, f"launch.folder={run}", "recipe.log_every_steps=1", "launch.stall.floor_s=10")
    wait_for(lambda: "train_loss" in text(run / "result_0.txt"), process)
    pids = descendants(process.pid)
    os.kill(rank_1(pids), signal.SIGSTOP)
    output = process.communicate(timeout=200)[0]
    assert process.returncode == 1 and "Traceback" not in output, output
    blamed = f"rank 1 on {socket.gethostname()} did not respond and wrote no stack; no progress for "
    status, cause = json.loads(text(run / "status.json")), explain([run])
    assert (status["rule"], cause.rule) == ("RUN-17", "RUN-17")
    assert status["evidence"].startswith(f"RUN-17: {blamed}") and str(cause.evidence).startswith(f"RUN-17: {blamed}")
    assert [path.name for path in run.glob("rank_logs/*.stack")] == ["trial_0_rank_0.stack"]
    assert not [pid for pid in pids if alive(pid)]
    last = reader.read(run / "result_0.txt")[0][-2]  # the seal follows it
    assert (last.key, last.metadata["status"]) == (mllog.RUN_STOP, "aborted")
    assert goodput.of_run(run).seconds[Part.stalls] >= 5, "half of floor_s at least"


@pytest.mark.trains
def test_ranks_do_not_outlive_a_killed_launcher(launch: Launch, tmp_path: Path) -> None:
    process = launch(*UNMEASURED, f"launch.folder={tmp_path}/run", "recipe.log_every_steps=1")
    wait_for(lambda: "train_loss" in text(tmp_path / "run" / "result_0.txt"), process)
    pids = descendants(process.pid)
    process.kill()
    psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=120)
    assert not [pid for pid in pids if alive(pid)]
    assert reader.read(tmp_path / "run" / "result_0.txt")[0][-2].metadata["status"] == "aborted"


@pytest.mark.trains
def test_a_local_run_can_be_resumed(launch: Launch, spawn: Launch, tmp_path: Path) -> None:
    """Cancelled in its second trial: the first trial is kept, the second one gets a new attempt and a new log."""
    run = tmp_path / "run"
    few = ("task.training.max_steps=40", "data.eval_rows=16", "trials=2")
    quick = (*UNMEASURED, "model.weights=random", *few, "recipe.log_every_steps=1")
    process = launch(*quick, f"launch.folder={run}")
    wait_for(lambda: "train_loss" in text(run / "result_1.txt"), process)
    with pytest.raises(ConfigError, match="is running"):
        resume.resume(run)
    assert resume.cancel(run) == str(run) and process.wait(timeout=120) == 143
    kept = (run / "result_0.txt").read_bytes()
    with pytest.raises(ConfigError, match="--exclude=dgx-7 is an option for a job queue"):
        resume.resume(run, arguments=["--exclude=dgx-7"])
    assert json.loads(text(run / "status.json"))["outcome"] == "interrupted", "a refused resume changes nothing"
    resumed = spawn([sys.executable, "-m", "bench", "resume", str(run)], {})
    output = resumed.communicate(timeout=300)[0]
    assert resumed.returncode == 0 and "trial 0, seed 1: already finished" in output, output
    entries = json.loads(text(run / "ledger.json"))
    assert [entry["outcome"] for entry in entries] == ["valid", "valid"]
    assert [attempt["outcome"] for attempt in entries[1]["attempts"]] == ["aborted", "valid"]
    assert (run / "result_0.txt").read_bytes() == kept
    assert '"aborted"' in text(run / "attempts/1.1/result_1.txt")
    assert json.loads(text(run / "status.json"))["outcome"] == "valid"
    whole, restarted = (trial.seconds for trial in goodput.of_run(run).trials)
    assert not any(whole[part] for part in goodput.RESTARTS) and all(restarted[part] for part in goodput.RESTARTS)
    assert whole[Part.training] > 0 and restarted[Part.training] > 0
    with pytest.raises(ConfigError, match="there is nothing to resume"):
        resume.resume(run)


def wait_for(condition: Callable[[], bool], process: "subprocess.Popen[str]") -> None:
    """Wait until the condition holds, as long as the process lives."""
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)


def text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def descendants(pid: int) -> list[int]:
    """Return the processes that a process started, and those that they started."""
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def rank_1(pids: list[int]) -> int:
    """Return the process that trains as rank 1; rank 0 could not finish its log if it were killed."""
    processes = [psutil.Process(pid) for pid in pids]
    return next(p.pid for p in processes if "jobs.tasks.train" in p.cmdline() and p.environ().get("RANK") == "1")


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
