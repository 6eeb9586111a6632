"""bench.submit on a real Slurm: jobs of submitit, and arrays whose tasks end in different ways."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from user import SHORT_RUN, Run, User, training, until

pytestmark = pytest.mark.slurm
ONE_NODE = [*SHORT_RUN, "cluster.num_nodes=1", "task.training.max_steps=20"]
SUBMIT = """
import json, sys, bench
jobs = bench.submit(json.loads(sys.argv[1]))
print(json.dumps([[job.job_id, str(job.paths.folder)] for job in jobs]))
"""
WAIT = """
import json, sys
import bench, submitit
from pathlib import Path
def ended(folder):
    job = bench.job(Path(folder))
    job.wait()
    error = job.exception()
    result = None if error else job.result()
    shown = [result.valid, result.trials[0].result.seed] if result else []
    return [job.state, type(error).__name__, str(error), *shown]
print(json.dumps([ended(folder) for folder in sys.argv[1:]]))
"""


def python(user: User, program: str, *words: str) -> Any:
    """Run a Python program as this user and return the JSON that it prints last, and its stderr."""
    argv = [sys.executable, "-c", program, *words]
    done = subprocess.run(argv, env=user.env, cwd=user.home, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_runs_with_one_header_are_one_array_and_results_come_back(user: User) -> None:
    """Three runs, of which one needs another time limit; each job has the state and the result of its own run."""
    words = [[*ONE_NODE, "seed_base=1"], [*ONE_NODE, "seed_base=7"], [*ONE_NODE, "seed_base=5", "walltime=9"]]
    jobs, printed = python(user, SUBMIT, json.dumps(words))
    ids = [id for id, _ in jobs]
    assert ids[0].partition("_")[::2] == (ids[1].partition("_")[0], "0") and ids[1].endswith("_1") and "_" not in ids[2]
    assert "1 job array: 2 runs and 1 run; their nodes, partitions or time limits differ" in printed
    ended, _ = python(user, WAIT, *(folder for _, folder in jobs))
    assert ended == [["COMPLETED", "NoneType", "None", True, seed] for seed in (1, 7, 5)]
    assert all(user.types("verify", folder).stdout.count(": verified\n") == 1 for _, folder in jobs)
    assert user.types("runs", user.home / "runs", "--json").stdout.count('"state"') >= 3


def test_a_cancelled_task_of_an_array_ends_alone_and_is_resumed(user: User) -> None:
    words = [[*ONE_NODE[:-1], f"task.training.max_steps={steps}", "seed_base=3"] for steps in (20, 2000)]
    jobs, _ = python(user, SUBMIT, json.dumps(words))
    short, long = (Run(Path(folder), id) for id, folder in jobs)
    until(training(long, 0), 300, long)
    user.types("cancel", long.folder)
    ended, _ = python(user, WAIT, str(short.folder), str(long.folder))
    assert ended[0] == ["COMPLETED", "NoneType", "None", True, 3]
    assert ended[1][:2] == ["CANCELLED", "UncompletedJobError"] and "cancelled" in ended[1][2]
    resumed = user.types("resume", long.folder, "--walltime", "9").stdout
    second = Run(long.folder, resumed.split()[1])
    assert "_" not in second.job
    until(lambda: len(second.ledger[0]["attempts"]) == 2, 300, second)
    user.types("cancel", long.folder)


def test_a_run_that_fails_gives_its_reason(user: User) -> None:
    words = [[*ONE_NODE, "recipe.lr=1e30"]]
    [[_, folder]], _ = python(user, SUBMIT, json.dumps(words))
    ended, _ = python(user, WAIT, folder)
    assert ended[0][:2] == ["FAILED", "FailedJobError"] and "RUN-05" in ended[0][2]
