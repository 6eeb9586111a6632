"""Reaching and checking hosts by ssh; ssh and the Python of a host are small scripts that record their arguments."""

import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.backends import ssh
from bench.backends.nodes import lead as every_node
from bench.backends.nodes import processes, remote
from bench.backends.nodes.processes import PACKAGES
from bench.contract import plan_kinds, run_files
from bench.contract.cluster import Ssh
from bench.contract.plan import Plan
from bench.errors import ConfigError, SubmitError
from bench.planning import compose
from bench.rules import RULES
from bench.rules.check import Finding

HERE = socket.gethostname()
SSH = """#!/bin/sh
for word; do line=$name; name=$word; done
line=$name
echo "$*" >>NOTES
case "$*" in
  -G*bare) exit 255 ;;
  -G*) echo "user me"; echo "hostname 10.0.0.7"; echo "hostnames none" ;;
  *no-key*) echo "me@no-key: Permission denied (publickey)." >&2; echo "shutdown" >&2; exit 255 ;;
  *silent*) exit 9 ;;
  *) exec sh -c "$line" ;;
esac
"""
PYTHON = """#!/bin/sh
echo "$RUNSTOP_NODE $*" >>NOTES
[ "$1" = -c ] && exit
echo Welcome to this host
printf '{"kind": "join", "node": 0, "name": "%s"}\\n' "$RUNSTOP_NODE"
while read -r line; do
  case $line in
    *'"kind": "plan"'*) printf '{"kind": "ready", "is_shared": %s}\\n' "${SHARED:-true}" ;;
    *'"kind": "shutdown", "exit_code": 0}'*) echo "shutdown $RUNSTOP_NODE" >>NOTES; exit ;;
    *'"kind": "shutdown"'*) exit ;;
  esac
done
"""


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    path = tmp_path / "notes"
    (tmp_path / "bin").mkdir()
    for name, text in (("ssh", SSH), ("python-there", PYTHON)):
        (tmp_path / "bin" / name).write_text(text.replace("NOTES", str(path)))
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr(every_node, "POLL_S", 0.005)
    return lambda: path.read_text().splitlines()


def planned(*overrides: str) -> Plan:
    plan = compose.compose(["task=lora_tiny", "cluster=hosts", *overrides])
    plan.config.cluster.ssh = Ssh(python="python-there", options=["-F", "mine"])
    return plan


def on(*hosts: str) -> Plan:
    plan = planned()
    plan.config.cluster.hosts = [*hosts]
    return plan


def at(folder: Path, plan: Plan) -> Path:
    """Return a run's folder with its plan."""
    (folder / run_files.RANK_LOGS).mkdir(parents=True)
    (folder / run_files.PLAN).write_text(plan_kinds.dumps(plan))
    return folder


OPTIONS = (
    "-F mine -o BatchMode=yes -o StrictHostKeyChecking=yes -o ConnectTimeout=10 "
    "-o ServerAliveInterval=5 -o ServerAliveCountMax=3"
)


@pytest.mark.long
def test_packages_that_ranks_need_are_looked_for_on_a_host() -> None:
    def probe(*packages: str) -> "subprocess.CompletedProcess[str]":
        argv = [sys.executable, "-c", ssh.PROBE, *packages]
        env = os.environ | {"PYTHONPATH": str(PACKAGES)}
        return subprocess.run(argv, env=env, capture_output=True, text=True, check=False)

    assert probe("json", "xml.dom").returncode == 0
    assert probe("json").stdout.strip() == socket.gethostbyname(socket.gethostname())
    assert probe("json", "absent", "other").stderr == "No module named absent, other\n"
    assert probe("absent.core").stderr.endswith("No module named 'absent'\n")
    one = ("cluster.num_nodes=1", "cluster.hosts=[rig0]")
    needs = {name: ssh._packages(planned(f"task={name}", *one)) for name in ("attention", "generate_7b")}
    assert needs == {
        "attention": ["psutil", "numpy", "torch"],
        "generate_7b": ["psutil", "numpy", "torch", "megatron.core"],
    }


@pytest.mark.long
def test_a_host_whose_own_name_is_a_loopback_address_is_a_warning() -> None:
    plan, named = planned(), planned("+cluster.environment.GLOO_SOCKET_IFNAME=eth0")
    (one,) = ssh._loopback(plan, "rig0", "127.0.1.1")
    assert (one.rule, one.severity) == ("NCC-08", "warning") and "127.0.1.1" in one.what
    assert [*ssh._loopback(plan, "rig0", "10.0.0.4"), *ssh._loopback(named, "rig0", "127.0.1.1")] == []


def test_ranks_find_the_plans_packages_after_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"rel::/inherited:{PACKAGES}")
    environment = processes.environment({"PYTHONPATH": "/mine:also/rel"}, ("rig0", 1))
    assert environment["PYTHONPATH"] == f"{PACKAGES}:/mine:/inherited"


@pytest.mark.long
def test_a_node_is_started_by_ssh_and_on_this_machine_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(socket, "gethostname", lambda: "rig0.site")
    plan = planned()
    line = (
        f"exec env PYTHONPATH={shlex.quote(str(PACKAGES))} PYTHONSAFEPATH=1 RUNSTOP_NODE={{}} "
        "python-there -m bench.driver '/runs/a b' --node {} --stdio"
    )
    for name in ("rig0", "rig0.site", "localhost"):
        assert ssh.command(plan, Path("/runs/a b"), 3, name) == ["sh", "-c", line.format(name, 3)]
    words = ["ssh", "-T", *OPTIONS.split(), "--", "me@rig1", line.format("me@rig1", 1)]
    assert ssh.command(plan, Path("/runs/a b"), 1, "me@rig1") == words
    contained = planned("container=podman", "container.image=me/bench:1", "cluster.device=cpu")
    *_, line = ssh.command(contained, Path("/runs/a"), 1, "rig1")
    assert line.startswith("exec podman run ") and line.endswith(
        " --env=RUNSTOP_NODE=rig1 --entrypoint= me/bench:1 python -m bench.driver /runs/a --node 1 --stdio"
    )
    ours = planned()
    ours.config.cluster.ssh = None
    assert f" {shlex.quote(sys.executable)} -m bench.driver " in ssh.command(ours, Path("/r"), 0, "rig0")[2]
    assert ssh.on_host(ours, "rig1", "true")[2:-3] == OPTIONS.split()[2:]
    assert ssh.SshBackend().rank_environment(ours) == ours.environment


def test_the_processes_of_nodes_run_until_the_run_ends(notes: Callable[[], list[str]], tmp_path: Path) -> None:
    """Each host's login shell prints a line first; rank 0 listens at the address that ssh has for the first host."""
    plan = on("rig0", HERE)
    run = at(tmp_path / "run", plan)
    with ssh.SshBackend().nodes(plan, run) as nodes:
        assert nodes.names == ["rig0", HERE] and [each.number for each in nodes.members] == [0, 1]
        assert nodes._host == "10.0.0.7"
        assert not any(line.startswith("shutdown") for line in notes())
    first, *rest = notes()
    assert first == f"-G {OPTIONS} -- rig0"
    words = [f"{name} -m bench.driver {run} --node {number} --stdio" for number, name in enumerate(nodes.names)]
    assert {*words, "shutdown rig0", f"shutdown {HERE}"} <= {*rest}
    assert ssh._address("me@bare", plan) == "bare" and ssh._address("me@rig1", plan) == "10.0.0.7"
    assert [(run / run_files.host_errors(name)).read_text() for name in nodes.names] == ["", ""]


def test_a_first_host_without_access_to_the_run_folder_is_refused(
    notes: Callable[[], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARED", "false")
    plan = on("rig0", HERE)
    opening = ssh.SshBackend().nodes(plan, at(tmp_path / "run", plan))
    with pytest.raises(ConfigError, match="HST-09: rank 0 cannot write the log, because the host of rank 0, rig0,"):
        opening.__enter__()
    assert notes().count("shutdown rig0") == 1, "it is shut down"


@pytest.mark.parametrize(
    ("script", "rule", "what", "fix"),
    [
        ("echo 'ssh: Could not resolve hostname rig1: no' >&2; echo later >&2", "HST-06", "ssh: Could not", None),
        ("echo of a shell; echo 'the last line' >&2; echo >&2", None, "the last line", "read "),
        (
            'echo \'{"kind": "ready"}\'; cat >/dev/null',
            None,
            "this node expects the message join, but received 'ready'",
            "read ",
        ),
        ("exit 3", None, "the connection was closed", "read "),
    ],
)
def test_a_host_that_does_not_start_is_reported_with_its_error(
    notes: Callable[[], list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    script: str,
    rule: str | None,
    what: str,
    fix: str | None,
) -> None:
    plan, ended = planned(), []
    run, real = at(tmp_path / "run", plan), remote._end
    monkeypatch.setattr(remote, "_end", lambda process: (real(process), ended.append(process)))
    good = ["env", "RUNSTOP_NODE=rig0", "python-there"]
    opening = remote.opened(plan, run, "10.0.0.7", {"rig0": good, "rig1": ["sh", "-c", script]})
    with pytest.raises(SubmitError) as error:
        opening.__enter__()
    errors = run / run_files.host_errors("rig1")
    assert (error.value.rule, error.value.where) == (rule, "cluster.hosts: rig1")
    assert error.value.what.startswith(f"the host rig1 did not join the run: {what}"), error.value.what
    assert error.value.fix == (RULES[rule].fix if rule else f"{fix}{errors}")
    assert [process.poll() is not None for process in ended] == [True, True] and "shutdown rig0" in notes()


def test_a_process_that_does_not_end_by_itself_is_terminated_and_then_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = (
        ("cat", 0, 15.0),
        ("exec sleep 60", -15, 0.1),
        ('trap "" TERM; echo; while :; do sleep 1; done', -9, 0.01),
    )
    for script, code, ends_s in ways:
        monkeypatch.setattr(remote, "EXIT_TIMEOUT_S", ends_s)
        words = ["sh", "-c", script]
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0, bufsize=0)
        if "echo" in script:
            assert process.stdout is not None and process.stdout.read(1) == b"\n"
        remote._end(process)
        assert process.returncode == code, script
        assert process.stdin is not None and process.stdin.closed and process.stdout is not None
        assert process.stdout.closed


def test_the_last_line_that_matches_a_rule_is_reported() -> None:
    text = "ssh: Could not resolve hostname a: no\n  x: Permission denied (publickey).  \nConnection to b closed.\n\n"
    assert remote.find_rule(text, "y") == ("x: Permission denied (publickey).", "HST-04")
    assert remote.find_rule("RuntimeError: CUDA out of memory\nlast \n \n", "y") == ("last", None)
    assert remote.find_rule(" \n", "y") == ("y", None)


def test_every_host_is_checked_for_starting_ranks(
    notes: Callable[[], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = ssh.SshBackend()
    plan = on("rig0", "no-key", "silent", "localhost")
    assert {tier: [check.what for check in checks] for tier, checks in backend.checks(plan).items()} == {
        "laptop": ["names of the hosts", "container", "groups of GPUs"],
        "login": ["hosts"],
    }
    assert backend.subject(plan, "laptop").answers == {}
    good, refused, silent, local = ssh.reached(backend.subject(plan, "login"))
    assert (good, local) == ("rig0", "localhost")
    assert isinstance(refused, Finding) and isinstance(silent, Finding)
    assert (refused.rule, refused.what) == (
        "HST-04",
        "the host no-key cannot start ranks: me@no-key: Permission denied (publickey).",
    )
    assert (silent.rule, silent.what) == ("HST-07", "the host silent cannot start ranks: exit code 9")
    assert [each.fix for each in (refused, silent)] == [RULES[rule].fix for rule in ("HST-04", "HST-07")]
    assert refused.where == "cluster.hosts" and refused.severity == "error"
    packages = "psutil numpy torch megatron.core"
    line = f"env PYTHONPATH={PACKAGES} PYTHONSAFEPATH=1 python-there -c {shlex.quote(ssh.PROBE)} {packages}"
    assert f"-T {OPTIONS} -- rig0 {line}" in notes() and notes().count(f" -c {ssh.PROBE} {packages}") == 2
    contained = planned("container=podman", "container.image=me/bench:1", "cluster.device=cpu")
    contained.config.cluster.hosts = ["localhost", "rig1"]
    for name in ("sh", "env"):
        (tmp_path / "bin" / name).symlink_to(str(shutil.which(name)))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "bin/podman").write_text(f'#!/bin/sh\necho podman "$@" >>{tmp_path}/notes\nexit 5\n')
    outcomes = list(ssh.reached(backend.subject(contained, "login")))
    assert [str(each.rule) for each in outcomes if isinstance(each, Finding)] == ["HST-08"] * 2
    (tmp_path / "bin/podman").chmod(0o755)
    outcomes = list(ssh.reached(backend.subject(contained, "login")))
    assert [each.what for each in outcomes if isinstance(each, Finding)] == [
        f"the host {name} cannot start ranks: exit code 5" for name in ("localhost", "rig1")
    ]
    assert notes().count("podman version") == 2


def test_a_failed_query_is_an_answer_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = ssh._run(["no-such-ssh", "-T"])
    assert (absent.exit_code, absent.out) == (127, "")
    assert absent.err == "no-such-ssh: command not found on this machine"
    monkeypatch.setattr(ssh, "PROBE_TIMEOUT_S", 0.01)
    late = ssh._run(["sleep", "9"])
    assert (late.exit_code, late.out, late.err) == (1, "", "no answer within 0.01 s")
    monkeypatch.undo()
    failed = ssh._run(["sh", "-c", "cat; echo out; echo err >&2; exit 4"])
    assert (failed.exit_code, failed.out, failed.err) == (4, "out\n", "err\n")


def test_gpu_groups_that_do_not_fit_a_replica_are_reported(tmp_path: Path) -> None:
    plan = planned("parallel.tp=2", "parallel.pp=1", "parallel.cp=2")
    plan.config.cluster.hosts = ["rig0:4x2", "rig1", "rig2:2x4", "rig3:8x1"]
    first, second = ssh.groups(ssh.SshBackend().subject(plan, "laptop"))
    assert (first.rule, first.what) == ("HST-11", "rig0 has groups of 2 GPUs, but a replica of the model needs 4 GPUs")
    assert (first.where, first.fix) == (
        "cluster.hosts",
        "make parallel.tp x pp x cp equal to 2, or remove the groups from cluster.hosts",
    )
    assert second.what.startswith("rig3 has groups of 1 GPUs")
