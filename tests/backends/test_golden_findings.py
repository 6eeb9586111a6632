"""What the checks for Kubernetes and for this machine find, each part of each finding: golden_findings.txt.

After a change on purpose, run it once with WRITE_CHECKS=1, and read the difference.
"""

import importlib.util
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.backends import containers, local
from bench.backends.kubernetes.checks import CONFIG_CHECKS
from bench.contract.cluster import Slurm, Toleration, Volume
from bench.contract.plan import Plan
from bench.planning import compose
from bench.rules.check import Checked, Subject, run
from helpers import checked, golden, user_tables

GOLDEN = Path(__file__).with_name("golden_findings.txt")
K, PATHS = "cluster.kubernetes.", "cluster.paths."
DIGEST = "registry.example/runstop@sha256:" + "0" * 64
KUBERNETES: dict[str, dict[str, Any]] = {
    "names": {
        **{f"{K}{name}": "A b" for name in ("namespace", "version", "priority_class", "queue", "service_account")},
        **{f"{K}{name}": "A_b/c d" for name in ("workload_priority_class", "gpu_resource")},
        f"{K}resources": {"cpu_": "1 GB", "example.com/x": "1.5Gi", "memory": "-1"},
        f"{K}node_selector": {"a/b/c": "x", "pool": "a b", "zone": ""},
        f"{K}labels": {"_": "y", "team": "-"},
        f"{K}annotations": {"/a": "any value"},
        f"{K}image_pull_secrets": ["A", "a.b"],
        f"{K}env_from_secrets": ["-a", "a-b"],
        f"{K}networks": ["a/b/c", "team/net@eth1"],
        f"{K}exclude_nodes": ["a b", "node-1.example"],
        "cluster.avoided": {"a/b": "avoid", "node-2": "slow"},
        f"{K}capabilities": ["ipc_lock", "IPC_LOCK"],
        f"{K}tolerations": [
            Toleration(taint="a b", value="c d", effect="Never"),
            Toleration(taint="gpu", value="team", effect="NoExecute"),
            Toleration(taint="spot"),
        ],
    },
    "long names": {f"{K}namespace": "a" * 64, f"{K}service_account": "a" * 254},
    "versions": {f"{K}version": "v1.31.4-eks"},
    "no image": {f"{K}image": None},
    "an image with a tag": {f"{K}image": "registry.example/runstop:1"},
    "an image that is not valid": {f"{K}image": "Not an image"},
    "a container": {"config.container.runtime": "docker", "config.container.name": "docker"},
    "paths that pods cannot use": {f"{PATHS}logs": "runs", f"{PATHS}data": "/$USER/data", f"{PATHS}model": "/a:b"},
    "equal paths": {f"{PATHS}data": "/same", f"{PATHS}model": "/same"},
    "equal paths and volumes": {
        f"{PATHS}data": "/same",
        f"{PATHS}model": "/same",
        f"{K}model": Volume(claim="runstop-data"),
    },
    "a path of runstop": {f"{PATHS}data": "/dev/shm"},
    "no volumes": {f"{K}results": None, f"{K}data": None, f"{K}model": None},
    "a volume that is not needed": {f"{PATHS}logs": None},
    "no results": {f"{PATHS}logs": None, f"{K}results": None},
    "one volume for two": {f"{PATHS}data": "/same", f"{PATHS}model": "/same", f"{K}model": None},
    "volumes": {
        f"{K}results": Volume(claim="A", host_path="b"),
        f"{K}data": Volume(),
        f"{K}model": Volume(host_path="/a", sub_path="../b"),
    },
    "folders in volumes": {
        f"{K}results": Volume(claim="a", sub_path=""),
        f"{K}data": Volume(claim="b", sub_path="/c"),
        f"{K}model": Volume(host_path="/a", sub_path="b/c..d"),
    },
    "another user": {f"{PATHS}logs": "/", f"{K}run_as_user": 7},
    "this user": {f"{PATHS}logs": "/", f"{K}run_as_user": 4321},
    "any user": {f"{PATHS}logs": "/", f"{K}run_as_user": None},
    "Slurm": {"config.launch.array": True, "cluster.slurm": Slurm()},
    "no resource of GPUs": {f"{K}gpu_resource": None},
    "no GPUs": {f"{K}gpu_resource": None, "cluster.device": "cpu"},
    "GPUs of another vendor": {f"{K}gpu_resource": "amd.com/gpu"},
    "GPUs of another vendor on CPUs": {f"{K}gpu_resource": "amd.com/gpu", "cluster.device": "cpu"},
    "GPUs of an unknown vendor": {f"{K}gpu_resource": "example.com/gpu"},
    "GPUs among the resources": {f"{K}resources": {"nvidia.com/gpu": "8"}},
    "GPUs among the resources on CPUs": {f"{K}resources": {"nvidia.com/gpu": "8"}, "cluster.device": "cpu"},
    "memory as large as the shared memory": {f"{K}resources": {"memory": "64Gi"}, f"{K}shm_gib": 64},
    "memory for more": {f"{K}resources": {"memory": "65Gi"}, f"{K}shm_gib": 64},
    "resources of 0": {f"{K}resources": {"memory": "0", "cpu": "0m", "rdma/a": "1m"}},
    "a priority without a queue": {f"{K}workload_priority_class": "high"},
    "a priority and a queue": {f"{K}workload_priority_class": "high", f"{K}queue": "team"},
    "user 0": {f"{K}run_as_user": 0},
    "user 1": {f"{K}run_as_user": 1},
    "port 1023": {f"{K}port": 1023},
    "port 1024": {f"{K}port": 1024},
    "port 65535": {f"{K}port": 65535},
    "port 65536": {f"{K}port": 65536},
    "numbers of 0": {f"{K}shm_gib": 0, f"{K}grace_s": 0, f"{K}keep_h": 0},
    "least numbers": {f"{K}shm_gib": 1, f"{K}grace_s": 1, f"{K}keep_h": 0},
    "a negative time to keep": {f"{K}keep_h": -1},
    "a queue of an old server": {f"{K}queue": "a", f"{K}version": "1.23"},
    "a queue": {f"{K}queue": "a", f"{K}version": "1.24"},
    "JobSet on an old server": {f"{K}object": "jobset", f"{K}version": "1.26", f"{K}queue": "a"},
    "TrainJob on an old server": {f"{K}object": "trainjob", f"{K}version": "1.9"},
    "TrainJob": {f"{K}object": "trainjob", f"{K}version": "1.27"},
    "PyTorchJob on an old server": {f"{K}object": "pytorchjob", f"{K}version": "1.20", f"{K}queue": "a"},
    "further fields": {
        f"{K}pod": {"hostname": "a", "containers": [], "runtimeClassName": "nvidia", "restartPolicy": "Always"},
        f"{K}container": {"image": "a", "workingDir": "/", "resources": {"limits": {"cpu": "1"}, "claims": []}},
    },
}
FIELDS = "schema of pods"
"""This check needs a library."""
PACKAGES: dict[str, tuple[str, ...]] = {
    "training": ("task=lora_tiny", "cluster=local"),
    "training on texts": ("task=finetune_tiny_dolly", "cluster=local"),
    "training on chats": ("task=finetune_chat", "cluster=local", "data.train_rows=10000"),
    "training with Hugging Face": ("task=qlora_7b", "cluster=local", "engine=huggingface"),
    "all parts of Hugging Face": (
        *("task=finetune_7b_dolly", "cluster=local", "engine=huggingface", "cluster.device=cuda"),
        *("engine.huggingface.strategy=deepspeed", "engine.huggingface.attention=flash_attention_2"),
    ),
    "generation": ("task=generate_tiny", "cluster=local"),
    "generation with Hugging Face": ("task=generate_7b", "cluster=local", "engine=huggingface"),
    "kernels with Hugging Face": ("task=gemm", "cluster=local", "engine=huggingface", "cluster.device=cuda"),
    "serving": ("task=serve_tiny", "cluster=local"),
    "serving with vLLM": ("task=serve_8b", "cluster=local", "server=vllm", "cluster.device=cuda"),
    "serving with SGLang": ("task=serve_8b", "cluster=local", "server=sglang", "cluster.device=cuda"),
    "a program": ("task=my_program", "cluster=local", "engine=command", "engine.command.argv=[python,a.py]"),
}


def shown(plan: Plan, checks: Any, usual: dict[str, Checked] | None = None) -> list[str]:
    results = run(checks, Subject(plan, ""), tier="laptop")
    return checked.shown(results) if usual is None else checked.differing(results, usual)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Give this machine four GPUs of NVIDIA, one of AMD, one port of InfiniBand, and no programs."""
    user_tables.leave_out(monkeypatch)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for name in ("bin", "dev", "kfd/0", "kfd/1", "ib/mlx5_0", "net/eth0", "net/lo"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("nvidia0", "nvidia1", "nvidia12", "nvidia3", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    for node, number in enumerate(("0\n", "51140\n")):
        (tmp_path / f"kfd/{node}/gpu_id").write_text(number)
    for name, folder in {"DEVICES": "dev", "KFD_NODES": "kfd", "INFINIBAND": "ib", "INTERFACES": "net"}.items():
        monkeypatch.setattr(local, name, str(tmp_path / folder))


@pytest.mark.long
def test_findings_are_the_golden_ones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)  # without a folder runs
    parts = [kubernetes(), packages(monkeypatch), machine_of_ranks(monkeypatch, tmp_path), programs(tmp_path)]
    parts.append(environments_of_nemo(tmp_path))
    text = "\n".join(line for part in parts for line in part).replace(str(tmp_path), "FOLDER")
    golden.require(text + "\n", GOLDEN, variable="WRITE_CHECKS")


def kubernetes() -> list[str]:
    plan = compose.compose(["task=lora70b", "cluster=kubernetes", f"cluster.kubernetes.image={DIGEST}"])
    checks = [check for check in CONFIG_CHECKS if check.what != FIELDS]
    usual = {one.what: one for one in run(checks, Subject(plan, ""), tier="laptop")}
    lines = ["Kubernetes", *checked.shown(usual.values())]
    for name, settings in KUBERNETES.items():
        changed = checked.changed(plan, settings)
        lines += ["", name, *shown(changed, checks, usual)]
    return lines


def packages(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the packages of each task on a machine without any, and on one with all of them."""
    check = [one for one in local.CHECKS if one.what == "Python packages of the ranks"]
    original = importlib.util.find_spec
    lines = ["", ""]
    for name, words in PACKAGES.items():
        device = [] if "cluster.device=cuda" in words else ["cluster.device=cpu"]  # the same with and without GPUs
        plan = compose.compose([*words, *device, "cluster.paths.data=/no/data"])
        for installed in (None, object()):
            monkeypatch.setattr(importlib.util, "find_spec", lambda name, installed=installed: installed)
            part = [line.replace(sys.executable, "PYTHON") for line in shown(plan, check)]
            lines += [name if installed is None else "  if they are installed:", *part]
            monkeypatch.setattr(importlib.util, "find_spec", original)
    return lines


def machine_of_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Return the findings about GPUs, networks, ports, container engines and NeMo."""
    names = ("GPUs of this machine", "GPUs in CUDA_VISIBLE_DEVICES", "network selected for NCCL", "port")
    names += ("container", "container engine")
    checks = [one for one in local.CHECKS if one.what in names]
    plan = compose.compose(["task=lora_tiny", "cluster=local", "cluster.device=cuda", "cluster.ranks_per_node=4"])
    amd = compose.compose(["task=lora_tiny", "cluster=local", "cluster.device=cuda", "gpu@cluster.gpu=mi300x"])
    words = ["task=generate_7b", "cluster=local", "engine=huggingface", "cluster.device=cuda"]
    split = compose.compose(words)
    usual = {one.what: one for one in run(checks, Subject(plan, ""), tier="laptop")}
    lines = ["", "", "this machine", *checked.shown(usual.values())]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        part = shown(checked.changed(plan, {"cluster.master_port": port}), checks, usual)
        lines += ["a port in use", *(line.replace(str(port), "PORT") for line in part)]
    nccl = {"NCCL_NET": "IB", "NCCL_SOCKET_IFNAME": "ib0"}
    prefixes = {"NCCL_SOCKET_IFNAME": "eth", "NCCL_NET": "Socket"}
    engine, image = "config.container.runtime", "config.container.image"
    cases: dict[str, tuple[Plan, dict[str, Any]]] = {
        "more ranks than GPUs": (plan, {"cluster.ranks_per_node": 5}),
        "one rank": (plan, {"cluster.ranks_per_node": 1}),
        "a rank with several GPUs": (split, {"cluster.ranks_per_node": 1, "config.huggingface.num_gpus": 8}),
        "GPUs of AMD": (amd, {"cluster.ranks_per_node": 2}),
        "one GPU of AMD": (amd, {"cluster.ranks_per_node": 1}),
        "two visible GPUs": (plan, {"environment": plan.environment | {"CUDA_VISIBLE_DEVICES": "0,1,1"}}),
        "no visible GPU": (plan, {"environment": plan.environment | {"CUDA_VISIBLE_DEVICES": ""}}),
        "four visible GPUs": (plan, {"environment": plan.environment | {"CUDA_VISIBLE_DEVICES": "0,1,3,12"}}),
        "networks that are missing": (plan, {"environment": plan.environment | nccl}),
        "networks that exist": (plan, {"environment": plan.environment | prefixes}),
        "podman": (plan, {engine: "podman", image: "a", "config.container.mounts": ["/a:/b:rw", "a"]}),
        "podman without an image": (plan, {engine: "podman", image: None}),
        "Apptainer": (plan, {engine: "apptainer", image: "docker://a"}),
        "Pyxis": (plan, {engine: "pyxis", image: "a"}),
    }
    for name, (base, settings) in cases.items():
        lines += ["", name, *shown(checked.changed(base, settings), checks, usual)]
    for name in ("ib", "dev", "kfd/1"):
        (tmp_path / name).rename(tmp_path / f"no {name.partition('/')[0]}")
    (tmp_path / "dev").mkdir()
    (tmp_path / "bin/podman").touch(mode=0o755)
    settings = {"environment": plan.environment | nccl, engine: "podman", image: "a"}
    lines += ["", "a machine with podman only", *shown(checked.changed(plan, settings), checks, usual)]
    lines += ["", "a machine without GPUs of AMD", *shown(amd, checks, usual)]
    return lines


def environments_of_nemo(tmp_path: Path) -> list[str]:
    plan = compose.compose(["task=lora_7b", "cluster=dgx1", "engine=nemo"])
    cases: dict[str, tuple[str, ...]] = {
        "bare": (),
        "old": ("torch-2.0.dist-info", "nemo_toolkit-1.0.dist-info"),
        "right": (f"{local.NEMO}-{local.VERSION}.dist-info",),
    }
    lines = ["", ""]
    for folder, distributions in cases.items():
        python = tmp_path / folder / "bin/python"
        python.parent.mkdir(parents=True)
        python.touch(mode=0o755)
        for distribution in distributions:
            (tmp_path / folder / "lib/python3.12/site-packages" / distribution).mkdir(parents=True)
    (tmp_path / "empty/bin").mkdir(parents=True)
    (tmp_path / "empty/lib/python3.12/site-packages").mkdir(parents=True)
    (tmp_path / "empty/bin/python").touch(mode=0o755)
    for folder in ("missing", "empty", *cases):
        other = checked.changed(plan, {"config.nemo.python": str(tmp_path / folder / "bin/python")})
        lines += [f"NeMo in the folder {folder}", *shown(other, [local.NEMO_CHECK])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "_own_nemo_version", lambda: None)
        own = shown(checked.changed(plan, {"config.nemo.python": "python"}), [local.NEMO_CHECK])
    return [*lines, "NeMo of this Python", *(line.replace(sys.executable, "PYTHON") for line in own)]


def programs(tmp_path: Path) -> list[str]:
    check = [local.PROGRAM_CHECK]
    words = ("task=my_program", "cluster=local", "engine=command", "engine.command.argv=[python,a.py]")
    plan = compose.compose(list(words))
    (tmp_path / "folder").mkdir()
    for name in ("a.py", "tool"):
        (tmp_path / "folder" / name).touch(mode=0o755)
    lines = ["", ""]
    for argv, folder, path in (
        (["python", "a.py", "b.sh", "c.txt"], None, None),
        (["python", "a.py", "b.sh"], str(tmp_path / "folder"), None),
        (["tool", "{seed}.py"], None, None),
        (["tool"], None, str(tmp_path / "folder")),
        (["{checkpoints}/tool", "a.py"], "{checkpoints}", None),
    ):
        settings = {"config.program.argv": argv, "config.program.folder": folder}
        settings["config.program.environment"] = {"PATH": path} if path else {}
        lines += [f"{argv} in {folder} with PATH={path}", *shown(checked.changed(plan, settings), check)]
    return lines


def test_the_command_line_of_each_container_engine() -> None:
    """The whole line, as a shell reads it; inputs are read-only, and the run folder is writable."""
    plan = compose.compose(["task=lora70b", "cluster=dgx1", "container=none"])
    settings = {
        f"config.container.{name}": value for name, value in {"image": "i:1", "mounts": ["/a:/b:ro", "/c"]}.items()
    }
    settings |= {"cluster.paths.data": "/data", "cluster.paths.model": "/model", "config.container.arguments": ["--x"]}
    lines = {}
    for engine in ("docker", "podman", "apptainer"):
        for device in ("cuda", "cpu"):
            changed = checked.changed(plan, settings | {"config.container.runtime": engine, "cluster.device": device})
            lines[engine, device] = containers.line(changed, Path("/run"), ["python", "-m", "a b"], name="n1")
    mounts = (
        "--mount=type=bind,src=/data,dst=/data,readonly --mount=type=bind,src=/model,dst=/model,readonly "
        "--mount=type=bind,src=/run,dst=/run --mount=type=bind,src=/a,dst=/b,readonly --mount=type=bind,src=/c,dst=/c"
    )
    usual = "--rm --interactive --network=host --ipc=host --security-opt=label=disable"
    infiniband = "$([ ! -e /dev/infiniband ] || echo --device=/dev/infiniband)"
    end = "--workdir=/run --env=PYTHONSAFEPATH=1 --env=RUNSTOP_NODE=n1 --x --entrypoint= i:1 python -m 'a b'"
    user = '--user="$(id -u):$(id -g)" --env=HOME=/tmp'
    keep = '$([ "$(id -u)" = 0 ] || echo --userns=keep-id)'
    docker = f"exec docker run {usual} --ulimit=memlock=-1 --ulimit=stack=67108864 {user} {infiniband}"
    binds = "--bind=/data:/data:ro --bind=/model:/model:ro --bind=/run:/run --bind=/a:/b:ro --bind=/c"
    own = "--pwd=/run --env=PYTHONSAFEPATH=1 --env=RUNSTOP_NODE=n1 --x i:1 python -m 'a b'"
    assert lines == {
        ("docker", "cuda"): f"{docker} --gpus all {mounts} {end}",
        ("docker", "cpu"): f"{docker}  {mounts} {end}",
        ("podman", "cuda"): f"exec podman run {usual} {keep} {infiniband} --device nvidia.com/gpu=all {mounts} {end}",
        ("podman", "cpu"): f"exec podman run {usual} {keep} {infiniband}  {mounts} {end}",
        ("apptainer", "cuda"): f"exec apptainer exec --nv --no-home --writable-tmpfs {binds} {own}",
        ("apptainer", "cpu"): f"exec apptainer exec --no-home --writable-tmpfs {binds} {own}",
    }
