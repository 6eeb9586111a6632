"""The same run on a real Slurm: submitted by bench.launch, by plain sbatch, as an array, several at once."""

import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from slurm_cluster import Cluster
from user import SHORT_RUN, Run, User, submitted, training, until

from helpers import answers

pytestmark = pytest.mark.slurm
QUICK = "recipe.lr=3e-3"
"""The target is reached at the first evaluation; the closed division leaves this rate open."""


@pytest.fixture(scope="module", autouse=True)
def three_trials(request: pytest.FixtureRequest, busy_user: User) -> Run | None:
    """Start the longest run of this file; it runs in the background of the other tests."""
    if not any(item.function is test_three_trials_over_two_nodes_are_valid for item in request.session.items):
        return None
    return busy_user.launch(*SHORT_RUN, "task.training.max_steps=20", "trials=3", "launch.health=true")


def minutes_to_target(log: Path) -> float:
    """Return the minutes between run_start and run_stop, read without this project."""
    times = {entry["key"]: float(entry["time_ms"]) for entry in logged(log)}
    return (times["run_stop"] - times["run_start"]) / 60_000


def logged(log: Path) -> list[dict[str, Any]]:
    lines = (line.partition(":::MLLOG ")[2] for line in log.read_text().splitlines())
    return [json.loads(line) for line in lines if line]


def test_launch_wait_follows_the_job_and_plain_sbatch_gives_the_same_result(user: User, tmp_path: Path) -> None:
    """Two ranks a node, with TP inside it. One node drops its caches, the other one cannot: the log says so of each."""
    drops = "cluster.drop_caches='grep dgx-0 /proc/sys/kernel/hostname'"
    overrides = (*SHORT_RUN, "task.training.max_steps=20", "cluster.ranks_per_node=2", "parallel.tp=2", drops)
    done = user.types(*overrides, "launch.wait=true", module="bench.launch")
    run = submitted(done.stdout, user.home)[0]
    assert "valid trial: yes" in done.stdout
    assert run.outcomes == ["valid"] and "RUNNING" in done.stderr
    assert sorted(path.name for path in (run / "facts").iterdir()) == [f"rank_000{rank}.json" for rank in range(4)]
    cleared = [entry for entry in logged(run / "result_0.txt") if entry["key"] == "cache_clear"]
    assert sorted((entry["metadata"]["node"], entry["value"]) for entry in cleared) == [
        ("dgx-0", True),
        ("dgx-1", False),
    ]
    assert "nothing to cancel: the run has ended (valid)" in user.types("cancel", run.folder, code=2).stderr
    assert "all trials have finished" in user.types("resume", run.folder, code=2).stderr
    script = tmp_path / "short.sbatch"
    script.write_text(user.types("render", *overrides).stdout)
    by_hand = user.sbatch(script)
    user.end(by_hand, "COMPLETED")
    assert [by_hand.ledger[0][key] for key in ("seed", "outcome", "eval_final")] == [
        1,
        "valid",
        run.ledger[0]["eval_final"],
    ]
    checked = user.types("verify", run.folder, by_hand.folder).stdout
    assert checked.count(": verified\n") == 2 and checked.count("job.sbatch, its plan\tthe same plan\tas expected") == 2


def test_a_sweep_is_one_array_with_a_task_for_each_run(user: User) -> None:
    short = (*SHORT_RUN, "cluster.num_nodes=1", "task.training.max_steps=20")
    done = user.types("--multirun", *short, "seed_base=1,7", module="bench.launch")
    runs = submitted(done.stdout, user.home)
    assert "1 job array: 2 runs" in done.stderr
    assert [run.job.partition("_")[2] for run in runs] == ["0", "1"]
    for run in runs:
        user.end(run, "COMPLETED")
    assert [run.ledger[0]["seed"] for run in runs] == [1, 7]


def test_a_cancelled_run_can_be_resumed(user: User) -> None:
    """The finished trial stays as it is; the interrupted one gets a new attempt and a log of its own."""
    run = user.launch(*SHORT_RUN, "cluster.num_nodes=1", "task.training.max_steps=100", "trials=2")
    until(training(run, 1), 300, run)
    kept = (run / "result_0.txt").read_bytes()
    user.types("cancel", run.folder)
    user.end(run, "CANCELLED")
    assert run.status["outcome"] == "interrupted" and user.why(run)["rule"] == "SLU-08"
    output = user.types("resume", run.folder.relative_to(user.home), "--walltime", 7, "--sbatch=--comment=again").stdout
    resumed = Run(run.folder, re.findall(r"job (\d+)", output)[0])
    shown = user.cluster.run(["scontrol", "show", "job", resumed.job]).stdout
    assert "TimeLimit=00:17:00" in shown and "Comment=again" in shown  # 5 min, and 7 + 5 for the remaining trial
    user.end(resumed, "COMPLETED")
    assert run.outcomes == ["valid"] * 2 and run.status["outcome"] == "valid"
    assert (run / "result_0.txt").read_bytes() == kept
    assert [attempt["outcome"] for attempt in run.ledger[1]["attempts"]] == ["interrupted", "valid"]
    assert '"run_stop"' in (run / "attempts/1.1/result_1.txt").read_text()


def test_two_hundred_jobs_are_listed_with_two_queries(
    user: User, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many jobs there are, one squeue and one sacct answer for all of them."""
    user.cluster.run(["scontrol", "update", "partition=low", "state=down"], check=True)
    try:
        run = user.launch(*SHORT_RUN, "cluster.slurm.partition=low", "launch.force=true")
        for number in range(199):
            folder = run.folder.with_name(f"copy-{number}")
            folder.mkdir()
            done = user.cluster.run(
                ["sbatch", "--parsable", "-p", "low", "--output=/dev/null", "--wrap=true"], check=True
            )
            job = {"jobs": [{"id": done.stdout.strip(), "submitted": time.time()}]}
            (folder / "job.json").write_text(json.dumps(job))
        path, calls = counting(tmp_path, "squeue", "sacct")
        monkeypatch.setitem(user.cluster.env, "PATH", f"{path}:{user.cluster.env['PATH']}")
        rows = answers.read(user.types("runs", "--limit", 200, "--json").stdout)
        assert len(rows) == 200 and all(row["job_state"] == "PENDING" for row in rows)
        assert len(calls.read_text().splitlines()) <= 2
    finally:
        user.cluster.run(["scancel", "-p", "low"], check=True)
        user.cluster.run(["scontrol", "update", "partition=low", "state=up"], check=True)


def counting(tmp_path: Path, *commands: str) -> tuple[Path, Path]:
    """Return a folder for PATH with these commands of Slurm, and a file that gets a line whenever one is called."""
    calls, path = tmp_path / "calls", tmp_path / "bin"
    calls.touch()
    path.mkdir()
    for command in commands:
        real = shutil.which(command)
        (path / command).write_text(f'#!/bin/sh\necho {command} >>{calls}\nexec {real} "$@"\n')
        (path / command).chmod(0o755)
    return path, calls


def test_three_trials_over_two_nodes_are_valid(user: User, three_trials: Run) -> None:
    """The nodes are measured, three seeds trained for some steps, one rank a node, each judged."""
    require_valid(user, three_trials)


@pytest.mark.slow
def test_three_trials_over_two_nodes_make_a_score(user: User) -> None:
    """The same, trained to the target, and scored."""
    run = user.launch("cluster=slurm_test", "task=lora_tiny", "trials=3", "cluster.ranks_per_node=1", QUICK)
    require_valid(user, run)
    assert all(entry["official"] == {"5.1.0": True, "6.1.0": True} for entry in run.ledger)
    score = answers.one(user.types("score", run.folder, "--json", code=1).stdout)
    counted = [score[key] for key in ("num_runs", "num_failed", "num_runs_required", "valid")]
    assert counted == [3, 0, 10, False], "a score takes ten"
    middle = sorted(minutes_to_target(run / f"result_{trial}.txt") for trial in range(3))[1]
    assert score["olympic_min"] == pytest.approx(middle)


def require_valid(user: User, run: Run) -> None:
    """Require that three trials of a run ended valid, on nodes that were measured."""
    user.end(run, "COMPLETED", timeout_s=900)
    assert run.status["outcome"] == "valid" and run.outcomes == ["valid"] * 3, run.output()
    assert [entry["seed"] for entry in run.ledger] == [1, 2, 3]
    assert (run / "health.json").exists()


@pytest.mark.slow
def test_a_kernels_task_is_valid_on_two_nodes(cluster: Cluster, tmp_path: Path) -> None:
    """It reads no rows and needs no checkpoint: DATADIR and MODEL are neither mounted nor checked."""
    few = ("task.kernels.repeats=3", "task.kernels.point_s=0.01", "task.kernels.sustained_s=0.05")
    user = User(cluster, tmp_path / "no_cache", tmp_path)
    done = user.types(
        *("task=kernels_tiny", "cluster=slurm_test", "cluster.ranks_per_node=1", *few, "launch.wait=true"),
        module="bench.launch",
    )
    run = submitted(done.stdout, user.home)[0]
    assert run.outcomes == ["valid"], run.output()
    assert "points measured: 36 of 36" in done.stdout and "all-reduce of 2 ranks" in done.stdout
    measured = [entry["value"] for entry in logged(run / "result_0.txt") if entry["key"] == "kernel_measured"]
    assert len(measured) == 36 and not (tmp_path / "no_cache").exists()
