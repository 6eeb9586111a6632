"""A real Slurm of four nodes on this machine, one rank each: a slow node or link is found, left out, and the run ends.

One node is slowed by a CPU quota of its cgroup, one link by a delay in the programs at its two ends.
"""

import contextlib
import json
import os
import secrets
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from slurm_cluster import Cluster, running
from user import SHORT_RUN, Run, User, until

from helpers import answers

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
SLOW = "dgx-2"
QUOTA_PERCENT = 4
PERIOD_US = 100_000
SIZES = ("cluster.health.min_mib=16", "cluster.health.max_mib=16")
TRAINED = (
    *("task=pretrain_tiny", *SHORT_RUN, "task.training.max_steps=20", "recipe.lr_warmup_steps=5"),
    *("launch.health=true", *SIZES),
)
WORDS = (
    *(*TRAINED, "cluster.num_nodes=3", "recipe.global_batch_size=12", "recipe.eval_every_samples=120"),
    "launch.replace_slow=true",
)
DELAY = """
import builtins, os, subprocess, sys, time

imports, node, ends = builtins.__import__, os.environ.get("SLURMD_NODENAME"), {"dgx-1", "dgx-2"}


def importing(name, *arguments, **options):
    module = imports(name, *arguments, **options)
    distributed = sys.modules.get("torch.distributed")
    if hasattr(distributed, "batch_isend_irecv") and not hasattr(distributed, "is_delayed"):
        distributed.is_delayed = True
        delay(distributed)
    return module


def delay(distributed):
    listed = ["scontrol", "show", "hostnames", os.environ["SLURM_STEP_NODELIST"]]
    names = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split()
    exchange, reduce = distributed.batch_isend_irecv, distributed.all_reduce

    def late_exchange(ops):
        if {node, names[ops[0].peer]} == ends:
            time.sleep(0.2)
        return exchange(ops)

    def late_reduce(tensor, *arguments, group=None, **options):
        ranks = range(len(names)) if group is None else distributed.get_process_group_ranks(group)
        if node in ends and ends <= {names[rank] for rank in ranks} and tensor.numel() > 1:
            time.sleep(0.2)
        return reduce(tensor, *arguments, group=group, **options)

    distributed.batch_isend_irecv, distributed.all_reduce = late_exchange, late_reduce


if node in ends:
    builtins.__import__ = importing
"""


SLOW_STEPS = """
import builtins, os, sys, time

imports = builtins.__import__


def importing(name, *arguments, **options):
    module = imports(name, *arguments, **options)
    loop = sys.modules.get("jobs.engines.megatron.loop")
    if builtins.__import__ is importing and hasattr(loop, "_forward_step"):
        builtins.__import__ = imports
        step = loop.train_step
        loop.train_step = lambda *words, **more: (time.sleep(0.5), step(*words, **more))[1]
    return module


if os.environ.get("SLURMD_NODENAME") == "dgx-1":
    builtins.__import__ = importing
"""


@pytest.fixture(scope="module")
def four_nodes() -> Iterator[Cluster]:
    if os.geteuid() != 0:
        pytest.skip("a real Slurm needs root: slurmd starts jobs under their users' names")
    with running(num_nodes=4) as booted:
        yield booted


@pytest.fixture(scope="module")
def first_user(four_nodes: Cluster, tmp_path_factory: pytest.TempPathFactory) -> User:
    return User(four_nodes, tmp_path_factory.mktemp("cache"), tmp_path_factory.mktemp("first"))


@pytest.fixture
def user(first_user: User, tmp_path: Path) -> User:
    return replace(first_user, home=tmp_path)


@pytest.fixture(scope="module")
def floor(first_user: User) -> str:
    """Half of the bus bandwidth of the four nodes when none of them is slow."""
    run = first_user.launch(*TRAINED, "cluster.num_nodes=4")
    first_user.end(run, "COMPLETED", timeout_s=900)
    report = json.loads((run / "health.json").read_text())
    return f"cluster.health.busbw_gbs={report['allreduce'][0]['busbw_gbs'] / 2:.4f}"


@contextlib.contextmanager
def cpu_quota(cluster: Cluster, node: str, percent: int) -> Iterator[None]:
    """Limit all processes of a node to a share of one core."""
    one, two = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
    group = (one if one.is_dir() else two) / f"runstop-{secrets.token_hex(4)}"
    try:
        group.mkdir()
        if one.is_dir():
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(PERIOD_US * percent // 100))
        else:
            (group / "cpu.max").write_text(f"{PERIOD_US * percent // 100} {PERIOD_US}")
    except OSError as error:
        pytest.skip(f"no cgroup can be created: {error}")
    members = family((cluster.folder / "run" / node).read_text().split()[0])
    for pid in members:
        (group / "cgroup.procs").write_text(pid)
    try:
        yield
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                (group.parent / "cgroup.procs").write_text(pid)
        group.rmdir()


def family(pid: str) -> list[str]:
    """Return a process and its descendants."""
    children = [child for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()]
    return [pid, *(one for child in children for one in family(child))]


def attempt_of(run: Run, user: User) -> dict[str, Any]:
    """Return the attempt of the valid trial, after checks that hold for every run without the slow node."""
    user.end(run, "COMPLETED", timeout_s=900)
    (entry,) = run.ledger
    (attempt,) = entry["attempts"]
    assert entry["outcome"] == "valid" and used_nodes(run) == {"dgx-0", "dgx-1", "dgx-3"}, run.output()
    assert list(attempt["left_out"]) == [SLOW] and attempt["left_out"][SLOW].startswith("NCC-04: all ranks together")
    (bad,) = answers.read(user.types("nodes", "--bad", "--json").stdout)
    assert (bad["node"], bad["is_left_out"]) == (SLOW, True)
    return dict(attempt)


def test_a_node_with_a_cpu_quota_is_replaced_by_a_spare(user: User, floor: str) -> None:
    with cpu_quota(user.cluster, SLOW, QUOTA_PERCENT):
        run = user.launch(*WORDS, floor, "cluster.spare_nodes=1")
        attempt = attempt_of(run, user)
    assert attempt["nodes"] == "dgx-0,dgx-1,dgx-3"
    assert user.why(run)["rule"] is None


def test_an_end_of_a_slow_link_is_replaced_by_a_spare(user: User, floor: str, tmp_path: Path) -> None:
    (tmp_path / "delay").mkdir()
    (tmp_path / "delay/sitecustomize.py").write_text(DELAY)
    path = f"+cluster.environment.PYTHONPATH='{tmp_path}/delay:{os.environ.get('PYTHONPATH', '')}'"
    run = user.launch(*WORDS, floor, "cluster.spare_nodes=1", path)
    assert attempt_of(run, user)["nodes"] == "dgx-0,dgx-1,dgx-3"
    report = json.loads((run / "health_before_1.json").read_text())
    assert [(part["kind"], part["nodes"]) for part in report["search"]["parts"]] == [("link", ["dgx-1", "dgx-2"])]


def test_without_spares_the_job_is_requeued_without_the_slow_node(user: User, floor: str) -> None:
    with cpu_quota(user.cluster, SLOW, QUOTA_PERCENT):
        run = user.launch(*WORDS, floor)
        attempt_of(run, user)
    shown = user.cluster.run(["scontrol", "show", "job", run.job]).stdout
    assert f"ExcNodeList={SLOW}" in shown and "Restarts=1" in shown


def test_a_trial_whose_rank_is_killed_continues_on_the_spare_in_the_same_job(user: User) -> None:
    steps = ("task.training.max_steps=80", "task.training.checkpoint_every_steps=5")
    run = user.launch(*WORDS, "cluster.health.busbw_gbs=0.001", "cluster.spare_nodes=1", *steps)
    until(lambda: len([*run.folder.glob("checkpoints/trial_0/step_*[0-9]")]) > 1, 900, run)
    kill_rank(user.cluster, "dgx-1")
    user.end(run, "COMPLETED", timeout_s=900)
    (entry,) = run.ledger
    first, second = entry["attempts"]
    assert (first["outcome"], second["outcome"], entry["outcome"]) == ("interrupted", "valid", "valid")
    assert (first["job"], first["nodes"]) == (run.job, "dgx-0,dgx-1,dgx-2")
    assert (second["job"], second["nodes"]) == (run.job, "dgx-0,dgx-2,dgx-3")
    assert second["left_out"] == {"dgx-1": "RUN-02: a rank was killed on dgx-1"} and second["checkpoint"] >= 10
    records = logged(run / "result_0.txt")
    (resumed,) = (record for record in records if record["key"] == "resumed")
    began, stopped = first_start(run), next(one["time_ms"] for one in records if one["key"] == "run_stop")
    assert resumed["metadata"]["first_run_start_ms"] == began and resumed["metadata"]["lost_s"] > 0
    assert entry["minutes"] == pytest.approx((stopped - began) / 60_000)
    assert used_nodes(run) == {"dgx-0", "dgx-2", "dgx-3"}


def test_a_rank_that_becomes_slow_while_training_is_replaced_by_the_spare(user: User, tmp_path: Path) -> None:
    """Each step of dgx-1 takes half a second longer, until the ranks end the attempt and name the node."""
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow/sitecustomize.py").write_text(SLOW_STEPS)
    words = (
        f"+cluster.environment.PYTHONPATH='{tmp_path}/slow:{os.environ.get('PYTHONPATH', '')}'",
        *("cluster.health.busbw_gbs=0.001", "cluster.spare_nodes=1", "task.training.max_steps=600"),
        *("task.training.checkpoint_every_steps=1000", "recipe.eval_every_samples=7200"),
    )
    run = user.launch(*WORDS, *words)
    user.end(run, "COMPLETED", timeout_s=900)
    (entry,) = run.ledger
    first, second = entry["attempts"]
    assert (first["outcome"], second["outcome"], entry["outcome"]) == ("interrupted", "valid", "valid")
    assert (first["nodes"], second["nodes"]) == ("dgx-0,dgx-1,dgx-2", "dgx-0,dgx-2,dgx-3")
    assert first["job"] == second["job"] == run.job
    why = "RUN-26: rank 1 on dgx-1 stayed slow ("
    assert first["cause"].startswith(why) and second["left_out"]["dgx-1"].startswith(why)
    (resumed,) = (record for record in logged(run / "result_0.txt") if record["key"] == "resumed")
    assert resumed["value"] == second["checkpoint"] >= 100, "saved when the attempt ended: 1000 steps had no checkpoint"
    assert resumed["metadata"]["replayed_samples"] == 0
    (bad,) = answers.read(user.types("nodes", "--bad", "--json").stdout)
    assert bad["node"] == "dgx-1"
    assert user.why(run)["rule"] is None


def used_nodes(run: Run) -> set[str]:
    """Return the nodes whose facts were collected last."""
    facts = [json.loads(path.read_text()) for path in sorted((run / "facts").glob("rank_*.json"))]
    newest = max(facts, key=lambda one: int(one["time_ms"]))["attempt"]
    return {one["node"] for one in facts if one["attempt"] == newest}


def logged(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line.partition(":::MLLOG ")[2]) for line in log.read_text().splitlines()]


def first_start(run: Run) -> int:
    """Return the time of run_start of the first attempt."""
    records = logged(run / "attempts/0.1/result_0.txt")
    return next(int(record["time_ms"]) for record in records if record["key"] == "run_start")


def kill_rank(cluster: Cluster, node: str) -> None:
    """Kill the rank on a node."""
    members = family((cluster.folder / "run" / node).read_text().split()[0])
    (rank, *_) = (pid for pid in members if b"jobs.tasks.train" in Path(f"/proc/{pid}/cmdline").read_bytes())
    os.kill(int(rank), signal.SIGKILL)
