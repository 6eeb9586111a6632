"""The doctor's findings about a site, compared with what the site's Slurm then does."""

import json
import os
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from slurm_cluster import Cluster

from bench import preflight
from bench.backends.slurm import client, script
from bench.backends.slurm.backend import excluding, sbatch_arguments
from bench.contract.plan import Plan
from bench.planning.compose import compose as composed
from bench.preflight import Checked, Finding, doctor
from helpers import answers

pytestmark = pytest.mark.slurm

TINY = ("task=lora_tiny", "cluster=slurm_test", "walltime=5")


@pytest.fixture
def compose(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Plan]:
    """Compose a run as a user on the login node of the cluster does."""
    for name in ("DATADIR", "MODEL", "LOGDIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("SLURM_CONF", cluster.env["SLURM_CONF"])
    return lambda *overrides: composed([*TINY, *overrides])


def arguments(*words: str) -> str:
    return f"cluster.slurm.arguments={json.dumps(words)}"


def login(plan: Plan) -> list[Checked]:
    tiers = list(doctor.examine(plan, "login"))
    assert [one.unknown for tier in tiers for one in tier] == [""] * sum(map(len, tiers)), "no check is unknown"
    return tiers[1]


def findings(checked: list[Checked]) -> list[Finding]:
    """Return the findings except SLU-06: the folders of this machine are in /tmp."""
    return [finding for finding in preflight.findings(checked) if finding.rule != "SLU-06"]


def is_accepted(cluster: Cluster, plan: Plan, folder: Path) -> bool:
    """Return whether Slurm accepts the script that the doctor checked; the job ends with the test."""
    (folder / "job.sbatch").write_text(script.script(plan))
    own = sbatch_arguments(plan, folder)
    return cluster.run(["sbatch", *own, folder / "job.sbatch"]).returncode == 0


WRONG = {
    "partition": (["cluster.slurm.partition=bach"], "SLU-02", "to one of batch, low"),
    "nodes": (["cluster.num_nodes=4"], "SLU-02", "set cluster.num_nodes to 2 or less"),
    "GPU type": (["cluster.slurm.gpu_type=h200"], "SLU-01", "set cluster.slurm.gpu_type to h100"),
    "CPUs": (["cluster.slurm.cpus_per_rank=33"], "SLU-02", "set cluster.slurm.cpus_per_rank to 32 or less"),
    "account": (["cluster.slurm.account=nobody"], "SLU-02", "to one of"),
    "QOS": (["cluster.slurm.qos=gold"], "SLU-02", "to one of normal"),
    "reservation": (["cluster.slurm.reservation=nightly"], "SLU-02", "scontrol show reservation"),
    "time": (["walltime=1440"], "SLU-02", "lower walltime or trials"),
    "feature": ([arguments("--constraint=hbm")], "SLU-02", "shows names and features"),
    "option": ([arguments("--segment=2")], "SLU-02", "unrecognized option '--segment=2'"),
    "all nodes but one": ([arguments("--exclude=dgx-1")], "SLU-02", "scontrol show node"),
}


@pytest.mark.parametrize("case", WRONG)
def test_the_doctor_finds_what_slurm_would_refuse(
    case: str, compose: Callable[..., Plan], cluster: Cluster, tmp_path: Path
) -> None:
    overrides, rule, text = WRONG[case]
    plan = compose(*overrides)
    (problem,) = findings(login(plan))
    assert (problem.rule, problem.severity) == (rule, "error") and text in f"{problem.what} {problem.fix}", problem
    assert not is_accepted(cluster, plan, tmp_path)


RIGHT = {
    "as it is": [],
    "low": ["cluster.slurm.partition=low"],
    "the default partition": ["cluster.slurm.partition=null"],
    "GRES": ["cluster.slurm.gpu_request=gres"],
    "GPUs per node": ["cluster.slurm.gpu_request=gpus_per_node"],
    "an account": ["cluster.slurm.account=test", "cluster.slurm.qos=normal"],
    "whole nodes": ["cluster.slurm.exclusive=true", "cluster.slurm.cpus_per_rank=32"],
    "a trial each": ["launch.array=true", "trials=3"],
    "arguments": [arguments("--time=20", "--comment=a b")],
}


@pytest.mark.parametrize("case", RIGHT)
def test_slurm_accepts_what_the_doctor_passes(
    case: str, compose: Callable[..., Plan], cluster: Cluster, tmp_path: Path
) -> None:
    plan = compose(*RIGHT[case])
    assert findings(login(plan)) == []
    assert is_accepted(cluster, plan, tmp_path)


def test_nodes_that_are_down_are_a_warning(compose: Callable[..., Plan], cluster: Cluster, tmp_path: Path) -> None:
    """sbatch --test-only reports an unavailable configuration, but sbatch accepts the job."""
    plan = compose()
    cluster.run(["scontrol", "update", "nodename=dgx-0", "state=drain", "reason=test"], check=True)
    try:
        (problem,) = findings(login(plan))
        assert (problem.rule, problem.severity) == ("SLU-09", "warning") and "1 of 2" in problem.what
        assert is_accepted(cluster, plan, tmp_path)
    finally:
        cluster.run(["scontrol", "update", "nodename=dgx-0", "state=resume"], check=True)


def test_without_pyxis_a_container_is_refused(compose: Callable[..., Plan], tmp_path: Path) -> None:
    plan = compose("container=pyxis", f"container.image={tmp_path}/a.sqsh")
    checked = [one for tier in doctor.examine(plan, "login") for one in tier]
    assert [finding.rule for finding in findings(checked)] == ["PYX-02", "ENR-07"]
    assert [one.what for one in checked if one.unknown] == ["container flags"]


def test_states_of_real_jobs(cluster: Cluster, compose: Callable[..., Plan]) -> None:
    def sbatch(*argv: str) -> str:
        done = cluster.run(["sbatch", "--parsable", "--output=/dev/null", "--time=5", *argv], check=True)
        return done.stdout.strip()

    failed, array = sbatch("--wrap=exit 3"), sbatch("--array=0-3%1", "--wrap=sleep 60")
    cluster.wait_for_state(failed, "FAILED")
    running = f"{array}_0"
    deadline = time.monotonic() + 30
    while client.states([running])[running].native_state != "RUNNING":
        assert time.monotonic() < deadline
        time.sleep(0.2)
    known = client.states([failed, array, "999999"])
    assert sorted(known) == sorted([failed, *(f"{array}_{k}" for k in range(4))])
    assert (known[failed].exit_code, known[failed].limit_s) == ("3:0", 300)
    assert (known[running].nodes, known[f"{array}_3"].native_state) == ("dgx-0", "PENDING")
    assert client.states([f"{array}_2"])[f"{array}_2"].reason == "JobArrayTaskLimit"
    cluster.run(["scancel", array], check=True)
    deadline = time.monotonic() + 30
    while {job.native_state for job in client.states([array]).values()} != {"CANCELLED"}:
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_a_canary_job_finds_problems_of_the_node(compose: Callable[..., Plan]) -> None:
    fine, broken = compose(), compose("+cluster.environment.PYTHONHOME=/nowhere")
    assert findings([doctor.on_nodes(fine, "canary")]) == []
    (problem,) = findings([doctor.on_nodes(broken, "canary")])
    assert (problem.rule, problem.severity, problem.tier) == (
        "RUN-25",
        "error",
        "canary",
    ) and "encodings" in problem.what


def test_slow_nodes_are_found_and_the_printed_override_excludes_them(compose: Callable[..., Plan]) -> None:
    checked = doctor.on_nodes(compose("cluster.health.node_busbw_gbs=1e6"), "nodes")
    assert {finding.rule for finding in checked.findings} == {"NCC-04"}
    plan = compose(arguments("--comment=x", "--exclude=dgx-7"))
    (override,) = shlex.split(excluding(plan, ["dgx-1"]))
    slurm_config = compose(override).config.cluster.slurm
    assert slurm_config and slurm_config.arguments == ["--comment=x", "--exclude=dgx-7,dgx-1"]


def test_the_exit_code_of_doctor_matches_its_output(
    compose: Callable[..., Plan], cluster: Cluster, tmp_path: Path
) -> None:
    """`compose` sets the paths; on a login node the doctor runs the login tier."""
    doctor_verb = [sys.executable, "-m", "bench", "doctor", *TINY]
    environment = {name: os.environ[name] for name in ("DATADIR", "MODEL", "LOGDIR")}
    there = replace(cluster, env=cluster.env | environment)
    fine, broken = there.run(doctor_verb), there.run([*doctor_verb, "cluster.slurm.qos=gold", "--json"])
    assert fine.returncode == 0 and "sbatch --test-only: passed  to start at " in fine.stdout, fine
    report = answers.one(broken.stdout)
    assert broken.returncode == 1 and not report["passed"] and report["tier"] == "login"
    assert [finding["where"] for finding in report["findings"] if finding["severity"] == "error"] == [
        "cluster.slurm.qos"
    ]
