"""Containers without Slurm: the shell command that starts them, and a real podman."""

import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bench import preflight
from bench.backends import containers
from bench.backends.nodes import remote
from bench.contract.plan import Plan
from bench.planning import compose
from bench.runs import status as statuses
from helpers import podman, sshd

Spawn = Callable[..., "subprocess.Popen[str]"]
SHORT_RUN = (
    *("model.weights=random", "task.training.max_steps=12", "recipe.log_every_steps=1", "launch.health=false"),
    *("task.training.target_eval_loss=null", "task.benchmark=null", "recipe.eval_every_samples=96"),
    *("recipe.eval_skip=0", "data.eval_rows=16"),
)


def planned(*overrides: str) -> Plan:
    paths = ("cluster.paths.data=/data", "cluster.paths.model=/models", "cluster.paths.logs=/runs")
    return compose.compose(["task=lora_8b", "cluster=hosts", *paths, *overrides])


@pytest.mark.long
def test_the_line_of_podman_mounts_what_pyxis_does_and_gives_all_gpus() -> None:
    plan = planned("container=podman", "container.image=quay.io/me/bench:1", "container.mounts=[/opt/x:/x:ro]")
    assert containers.line(plan, Path("/runs/a b"), ["python", "-m", "bench.driver"], name="rig0") == (
        "exec podman run --rm --interactive --network=host --ipc=host --security-opt=label=disable "
        '$([ "$(id -u)" = 0 ] || echo --userns=keep-id) $([ ! -e /dev/infiniband ] || echo --device=/dev/infiniband) '
        "--device nvidia.com/gpu=all --mount=type=bind,src=/data,dst=/data "
        "--mount=type=bind,src=/models,dst=/models,readonly "
        "'--mount=type=bind,src=/runs/a b,dst=/runs/a b' --mount=type=bind,src=/opt/x,dst=/x,readonly "
        "'--workdir=/runs/a b' --env=PYTHONSAFEPATH=1 --env=RUNSTOP_NODE=rig0 --entrypoint= quay.io/me/bench:1 "
        "python -m bench.driver"
    )


@pytest.mark.long
def test_the_line_of_docker_runs_as_the_user_and_raises_limits() -> None:
    plan = planned("container=docker", "container.image=me/bench:1", "container.arguments=['--shm-size=16g']")
    line = containers.line(plan, Path("/runs/a"), ["true"], name="rig0")
    assert " --gpus all " in line and '--user="$(id -u):$(id -g)" --env=HOME=/tmp' in line
    assert line.endswith("--shm-size=16g --entrypoint= me/bench:1 true") and "--ulimit=memlock=-1" in line
    assert "--gpus" not in containers.line(
        planned("container=docker", "container.image=me/bench:1", "cluster.device=cpu"), Path("/r"), [], name="rig0"
    )


@pytest.mark.long
def test_the_line_of_apptainer_binds_the_same_folders(tmp_path: Path) -> None:
    """Not run in Apptainer: a stub that ends at the image starts the command."""
    plan = planned("container=apptainer", "container.image=/images/a b.sif", "container.mounts=[/opt/x:/x:ro]")
    line = containers.line(plan, Path("/runs/a b"), ["sh", "-c", "echo $RUNSTOP_NODE"], name="rig0")
    assert shlex.split(line)[:-3] == [
        *("exec", "apptainer", "exec", "--nv", "--no-home", "--writable-tmpfs"),
        *("--bind=/data:/data", "--bind=/models:/models:ro", "--bind=/runs/a b:/runs/a b", "--bind=/opt/x:/x:ro"),
        *("--pwd=/runs/a b", "--env=PYTHONSAFEPATH=1", "--env=RUNSTOP_NODE=rig0", "/images/a b.sif"),
    ]
    done = subprocess.run(["sh", "-c", line], env=stub_of_apptainer(tmp_path), capture_output=True, text=True)
    assert done.stdout == "rig0\n", done.stderr
    amd = planned("container=apptainer", "container.image=/i.sif", "gpu@cluster.gpu=mi300x")
    assert " --rocm " in containers.line(amd, Path("/r"), ["true"], name="rig0")


def stub_of_apptainer(folder: Path) -> dict[str, str]:
    """Return an environment whose `apptainer exec` starts the command that follows the image, with its --env."""
    (folder / "apptainer").write_text(
        "#!/bin/sh\n[ $1 = exec ] || exit 9\nshift\n"
        'while case $1 in -*) ;; *) false ;; esac; do case $1 in --env=*) export "${1#--env=}" ;; esac; shift; done\n'
        'shift\nexec "$@"\n'
    )
    (folder / "apptainer").chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("engine", "groups"),
    [
        ("docker", "$(stat -c --group-add=%g /dev/kfd /dev/dri/renderD* | sort -u)"),
        ("podman", "--group-add=keep-groups"),
    ],
)
def test_the_ranks_of_a_container_may_open_amds_devices(engine: str, groups: str) -> None:
    """ROCm's documentation: the compute device, the render nodes, and the groups that own them."""
    plan = planned(f"container={engine}", "container.image=me/bench:1", "gpu@cluster.gpu=mi300x")
    line = containers.line(plan, Path("/runs/a"), ["true"], name="rig0")
    assert f" --device=/dev/kfd --device=/dev/dri --security-opt=seccomp=unconfined {groups} " in line
    assert "nvidia" not in line and "--gpus" not in line


@pytest.mark.long
@pytest.mark.parametrize(
    ("overrides", "rule", "what"),
    [
        (("container=podman", "container.image=null"), "HST-08", "the container image is not set"),
        (
            ("container=pyxis", "container.image=a.sqsh"),
            "PYX-04",
            "backend ssh does not support the container runtime pyxis",
        ),
        (
            ("container=docker", "container.image=a", "container.mounts=[a:/b]"),
            "PYX-12",
            "does not have the form SRC[:DST[:ro]]",
        ),
        (
            ("container=docker", "container.image=a", "container.mounts=['/a:/b:ro+nosuid']"),
            "PYX-12",
            "the mount has the flag 'ro+nosuid', but the only possible flags are ro",
        ),
        (("container=docker", "container.image=a", "container.mounts=['/a,b:/b']"), "PYX-12", "comma"),
        (("container=docker", "container.image=a", "container.mounts=[$NO_SUCH_PLACE]"), "CFG-06", "not set"),
        (
            ("container=apptainer", "container.image=docker://me/bench"),
            "HST-08",
            "the Apptainer image is 'docker://me/bench', but must be the absolute path of a file",
        ),
        (
            ("cluster=dgx2", "container=apptainer", "container.image=bench.sif"),
            "HST-08",
            "is 'bench.sif', but must be the absolute path",
        ),
        (
            ("cluster=dgx2", "container=apptainer", "container.image=/i.sif", "cluster.paths.data=/a:b"),
            "PYX-12",
            "contains a comma or a colon",
        ),
        (("cluster=dgx2", "container=apptainer", "container.image=/i.sif", "container.mounts=[a]"), "PYX-12", "form"),
        (
            ("cluster=dgx2", "container=docker", "container.image=a"),
            "PYX-04",
            "slurm does not support the container runtime docker",
        ),
    ],
)
def test_containers_that_cannot_start_are_refused(overrides: tuple[str, ...], rule: str, what: str) -> None:
    findings = [item for item in preflight.inspect(planned(*overrides)) if item.rule == rule]
    assert any(what in item.what for item in findings), findings


def test_hostile_names_are_quoted() -> None:
    """A shell reads each value literally and runs nothing else."""
    image, mount = "$(touch /tmp/x)`id`;reboot", "/a b;c:/d'e:ro"
    plan = planned("container=docker", "cluster.device=cpu")
    plan.config.container.image, plan.config.container.mounts = "me/bench", [mount]
    plan.config.container.arguments = [image, "--label=$HOME"]
    words = shlex.split(containers.line(plan, Path("/r;x"), ["a;b"], name="rig0"))
    assert {image, "--label=$HOME", "a;b", "--workdir=/r;x"} <= set(words)
    assert "--mount=type=bind,src=/a b;c,dst=/d'e,readonly" in words


@pytest.mark.parametrize(
    "message",
    [
        "Error: keep-id requires additional UIDs or GIDs defined in /etc/subuid and /etc/subgid to function correctly",
        "Error: statfs /dev/mqueue: no such file or directory",
    ],
)
def test_messages_of_rootless_podman_are_explained(message: str) -> None:
    """Messages of podman 4.3.1."""
    assert remote.find_rule(f'time="…" level=error msg="…"\n{message}: %!w(<nil>)\n', "") == (
        f"{message}: %!w(<nil>)",
        "HST-08",
    )


@podman.needs_podman
@pytest.mark.starts
def test_a_container_reads_the_data_and_writes_the_results(tmp_path: Path) -> None:
    data, model, run = (tmp_path / name for name in ("data", "model", "run"))
    for folder in (data, model, run):
        folder.mkdir()
    paths = (f"cluster.paths.data={data}", f"cluster.paths.model={model}")
    plan = planned("cluster.device=cpu", *podman.overrides(tmp_path), *paths)
    script = f"touch {run}/here; touch {model}/there; [ -e /run/.containerenv ] && echo inside; echo $RUNSTOP_NODE"
    line = containers.line(plan, run, ["sh", "-c", script], name="rig7")
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True)
    assert done.stdout.split() == ["inside", "rig7"], done.stderr
    assert (run / "here").exists() and not (model / "there").exists() and "Read-only file system" in done.stderr


@podman.needs_podman
@pytest.mark.starts
@pytest.mark.trains
@pytest.mark.slow
@pytest.mark.parametrize("where", ["here", "on hosts"])
def test_a_run_in_an_image_is_valid(tmp_path: Path, spawn: Spawn, where: str) -> None:
    paths = {name: str(tmp_path / "cache") for name in ("DATADIR", "MODEL", "LOGDIR")}
    (tmp_path / "cache").mkdir()
    words = [*SHORT_RUN, *podman.overrides(tmp_path), f"launch.folder={tmp_path}/run"]
    if where == "here":
        output = ended(spawn, paths, "cluster=local", *words)
    else:
        with sshd.booted(tmp_path / "sshd") as hosts:
            output = ended(spawn, paths, *hosts.overrides, *words)
    status = statuses.read(tmp_path / "run")
    assert status is not None and status.outcome == "valid", output


def ended(spawn: Spawn, paths: dict[str, str], *words: str) -> str:
    process = spawn([sys.executable, "-m", "bench.launch", "task=lora_tiny", *words], paths)
    output = process.communicate(timeout=600)[0]
    assert process.returncode == 0, output
    return output
