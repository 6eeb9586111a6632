"""Hosts without a scheduler: two real sshd on this machine."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from bench import preflight
from bench.backends import ssh
from bench.contract import cluster
from bench.contract.cluster import Host
from bench.diagnosis import explain
from bench.errors import ConfigError
from bench.launch import resume
from bench.planning import compose
from bench.rules import RULES
from bench.runs import run as runs
from bench.runs import status as statuses
from helpers import sshd
from helpers.sshd import Hosts

SHORT_RUN = (
    *("model.weights=random", "task.training.max_steps=12", "recipe.log_every_steps=1", "launch.health=false"),
    *("task.training.target_eval_loss=null", "task.benchmark=null", "recipe.eval_every_samples=96"),
    *("recipe.eval_skip=0", "data.eval_rows=16"),
)
Spawn = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def rigs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with sshd.booted(tmp_path_factory.mktemp("sshd")) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("rig0", Host("rig0")),
        ("me@rig0.site", Host("me@rig0.site")),
        ("rig0.IRONBYTE:2x4", Host("rig0.IRONBYTE", 2, 4)),
    ],
)
def test_hosts_are_written_as_users_and_documents_write_them(text: str, host: Host) -> None:
    assert cluster.parsed(text) == host and host.num_ranks in (None, 8)


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["cluster.hosts=['-oProxyCommand=x',rig1]"], "is not a valid host"),
        (["cluster.hosts=['rig0;reboot',rig1]"], "is not a valid host"),
        (["cluster.hosts=['rig0:2x0',rig1]"], "is not a valid host"),
        (["cluster.hosts=[rig0,rig0]"], "the list of hosts contains a host more than once: "),
        (["cluster.hosts=[rig0]"], "lists 1 hosts, but cluster.num_nodes is 2"),
        (["cluster.hosts=[rig0,rig1]", "cluster.num_nodes=3"], "lists 2 hosts, but cluster.num_nodes is 3"),
        (["cluster.hosts=[rig0,rig1,rig2]"], "lists 3 hosts, but the config has cluster.num_nodes=2"),
        (["cluster.hosts=[rig0,rig0]", "cluster.num_nodes=1"], "contains a host more than once"),
        (["cluster.hosts=['rig0:2x4','rig1:1x4']", "cluster.num_nodes=3"], "lists 2 hosts"),
        (["cluster.hosts=['rig0:1x4','rig1:1x4']"], "has 4 GPUs .*, but cluster.ranks_per_node is 8"),
        (["cluster=local", "cluster.hosts=[rig0]"], "cluster.hosts needs backend ssh"),
    ],
)
def test_uneven_hosts_are_refused(words: list[str], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        compose.compose(["task=lora_tiny", "cluster=hosts", *words])


@pytest.mark.long
@pytest.mark.parametrize("num_nodes", [1, 2, 3])
def test_fewer_nodes_use_the_first_hosts(num_nodes: int) -> None:
    listed = ["cluster.hosts=['rig0:2x4','rig1:2x4',rig2]", f"cluster.num_nodes={num_nodes}"]
    listed.append("recipe.global_batch_size=96")
    plan, config_yaml = compose.for_run(["task=pretrain_7b", "cluster=hosts", *listed])
    assert [cluster.parsed(text).name for text in plan.config.cluster.hosts or []] == ["rig0", "rig1", "rig2"][
        :num_nodes
    ]
    assert plan.world.num_ranks == 8 * num_nodes
    assert compose.as_planned(compose.read(config_yaml)).cluster == plan.config.cluster, "as verify compares them"


def test_groups_of_gpus_are_the_replicas_of_the_model() -> None:
    """As the document writes them: rig0:2x4 rig1:2x4 are four replicas on four GPUs each."""
    grouped = ["task=lora_8b", "cluster=hosts", "cluster.hosts=['rig0:2x4','rig1:2x4']", "parallel.pp=1"]
    fitting, other = (compose.compose([*grouped, f"parallel.tp={tp}", "parallel.cp=1"]) for tp in (4, 2))
    assert (fitting.world.num_ranks, fitting.world.dp) == (16, 4)
    rules = [[item.rule for item in preflight.inspect(plan)].count("HST-11") for plan in (fitting, other)]
    assert rules == [0, 2], "one of each host"


def findings(rigs: Hosts, *overrides: str) -> list[str]:
    """Return the errors that the doctor finds on the hosts."""
    plan = compose.compose(["task=lora_tiny", *rigs.overrides, *overrides])
    checks = ssh.SshBackend().subject(plan, "login")
    return [
        f"{item.rule} {item.what}"
        for item in ssh.reached(checks)
        if not isinstance(item, str) and item.severity == "error"
    ]


@sshd.needs_sshd
@pytest.mark.starts
def test_unusable_hosts_are_reported_before_the_start(rigs: Hosts, tmp_path: Path) -> None:
    assert findings(rigs) == []
    options = "cluster.ssh.options=[-F,{},{}]"
    no_key = options.format(rigs.config, "'-oPreferredAuthentications=password'")
    assert [line[:6] for line in findings(rigs, no_key)] == ["HST-04", "HST-04"]
    no_hosts = options.format(rigs.config, "'-oUserKnownHostsFile=/dev/null'")
    assert [line[:6] for line in findings(rigs, no_hosts)] == ["HST-05", "HST-05"]
    (unknown,) = findings(rigs, "cluster.hosts=[rig0,no-such-host.invalid]")
    assert unknown.startswith("HST-06 the host no-such-host.invalid cannot start ranks: ssh: Could not resolve")
    assert [line[:6] for line in findings(rigs, "cluster.ssh.python=/no/python")] == ["HST-07", "HST-07"]
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare], check=True)
    missing = findings(rigs, f"cluster.ssh.python={bare}/bin/python")
    assert [line.partition(": ")[2] for line in missing] == [missing[0].partition(": ")[2]] * 2
    assert missing[0].startswith("HST-07") and "No module named" in missing[0], missing
    packages = ":".join(path for path in sys.path if path.endswith("site-packages"))
    planned = f"+cluster.environment.PYTHONPATH='{packages}'"
    assert findings(rigs, f"cluster.ssh.python={bare}/bin/python", planned) == []
    if shutil.which("docker") is None or subprocess.run(["docker", "version"], capture_output=True).returncode:
        in_docker = findings(rigs, "container=docker", "container.image=absent")
        assert [line[:6] for line in in_docker] == ["HST-08", "HST-08"], "neither a client nor a daemon"


@sshd.needs_sshd
@pytest.mark.starts
@pytest.mark.trains
def test_a_run_over_two_hosts_is_driven_from_here(rigs: Hosts, cache: Path, tmp_path: Path, spawn: Spawn) -> None:
    process = launch(spawn, rigs, cache, tmp_path, *SHORT_RUN)
    output = process.communicate(timeout=600)[0]
    run = tmp_path / "run"
    assert process.returncode == 0, output
    assert "node facts: 2 nodes, rig0, rig1" in output
    status = statuses.read(run)
    assert status is not None and status.outcome == "valid"
    assert len(list(run.glob("facts/rank_*.json"))) == 2
    with pytest.raises(ConfigError, match="there is nothing to resume"):
        resume.resume(run)


@sshd.needs_sshd
@pytest.mark.starts
@pytest.mark.trains
@pytest.mark.faults
@pytest.mark.parametrize("ending", ["a lost connection", "Ctrl-C", "runstop cancel", "the starter is killed"])
def test_all_ranks_end_when_a_run_over_hosts_ends(
    rigs: Hosts, cache: Path, tmp_path: Path, spawn: Spawn, ending: str
) -> None:
    process = launch(spawn, rigs, cache, tmp_path, *SHORT_RUN, "task.training.max_steps=4000")
    run = tmp_path / "run"
    while not ("train_loss" in (run / "result_0.txt").read_text() if (run / "result_0.txt").exists() else False):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)
    every = [child for pid in rigs.pids.values() for child in psutil.Process(pid).children(recursive=True)]
    ranks = [child for child in every if "jobs.tasks.train" in child.cmdline()]
    assert len(ranks) == 2
    match ending:
        case "a lost connection":
            psutil.Process(rigs.pids["rig1"]).children()[0].kill()
        case "Ctrl-C":
            os.killpg(process.pid, signal.SIGINT)
        case "runstop cancel":
            assert resume.cancel(run) == str(run)
        case "the starter is killed":
            process.kill()
    output = process.communicate(timeout=120)[0]
    _, left = psutil.wait_procs(ranks, timeout=60)
    assert not left and "Traceback" not in output
    if ending != "the starter is killed":
        code = {"a lost connection": 1, "Ctrl-C": 130, "runstop cancel": 143}[ending]
        assert process.returncode == code and runs.find(run).state_name == ("failed" if code == 1 else "interrupted")
        assert explain([run]).rule == ("HST-01" if code == 1 else "RUN-24")


def launch(spawn: Spawn, rigs: Hosts, cache: Path, tmp_path: Path, *overrides: str) -> "subprocess.Popen[str]":
    paths = {"DATADIR": str(cache), "MODEL": str(cache), "LOGDIR": str(tmp_path / "runs")}
    arguments = ["task=lora_tiny", *rigs.overrides, f"launch.folder={tmp_path}/run", *overrides]
    return spawn([sys.executable, "-m", "bench.launch", *arguments], paths)


def test_every_rule_about_hosts_has_a_fix() -> None:
    assert len([rule for rule in RULES.values() if rule.id.startswith("HST-") and rule.fix]) == 13
