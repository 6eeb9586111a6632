"""Checks that this machine has enough GPUs, and that nodes have the planned type of GPU."""

from dataclasses import fields
from pathlib import Path

import pytest

from bench import preflight
from bench.backends import local
from bench.backends.local import LocalBackend
from bench.backends.nodes.lead import started
from bench.contract.node_facts import GpuFacts
from bench.contract.plan import Command
from bench.contract.run_files import RANK_LOGS
from bench.contract.schema import Gpu
from bench.planning import compose
from bench.preflight.nodes import hardware


@pytest.mark.parametrize(
    ("count", "needed", "what"),
    [
        (0, 2, ["this machine has no NVIDIA GPUs, but 2 ranks need 2 GPUs"]),
        (1, 2, ["this machine has 1 NVIDIA GPU, but 2 ranks need 2 GPUs"]),
        (2, 2, []),
    ],
)
def test_gpus_are_counted(
    count: int, needed: int, what: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("nvidiactl", "nvidia-uvm", *(f"nvidia{n}" for n in range(count))):
        (tmp_path / name).touch()
    monkeypatch.setattr(local, "DEVICES", str(tmp_path))
    plan = compose.compose(["cluster.device=cuda", f"cluster.ranks_per_node={needed}"])
    assert [f.what for f in preflight.inspect(plan) if f.rule == "HW-03"] == what


@pytest.mark.long
def test_amd_gpus_are_counted_in_the_drivers_topology(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node without a GPU, the CPUs, has the id 0. The devices of NVIDIA's driver do not count."""
    for node, gpu_id in enumerate(("0", "51140")):
        (tmp_path / str(node)).mkdir()
        (tmp_path / f"{node}/gpu_id").write_text(f"{gpu_id}\n")
    monkeypatch.setattr(local, "KFD_NODES", str(tmp_path))
    plan = compose.compose(["cluster.device=cuda", "cluster.ranks_per_node=2", "gpu@cluster.gpu=mi300x"])
    problems = {f.rule: f.what for f in preflight.inspect(plan) if f.rule.startswith("HW")}
    assert problems == {
        "HW-03": "this machine has 1 AMD GPU, but 2 ranks need 2 GPUs",
        "HW-07": "runstop's kernels, image and telemetry were never tested on the GPU AMD Instinct MI300X",
    }


@pytest.mark.parametrize(
    ("visible", "cpu", "seen", "what"),
    [
        ("2,3", False, "2,3", []),
        ("GPU-8d1f,GPU-77aa,GPU-0c3e", False, "GPU-8d1f,GPU-77aa,GPU-0c3e", []),
        ("5", False, "5", ["CUDA_VISIBLE_DEVICES=5 makes 1 GPU visible, but 2 ranks need 2 GPUs"]),
        ("4,4", False, "4,4", ["CUDA_VISIBLE_DEVICES=4,4 makes 1 GPU visible, but 2 ranks need 2 GPUs"]),
        ("1,-1,2", False, "1", ["CUDA_VISIBLE_DEVICES=1 makes 1 GPU visible, but 2 ranks need 2 GPUs"]),
        ("", False, "", ["CUDA_VISIBLE_DEVICES= makes 0 GPUs visible, but 2 ranks need 2 GPUs"]),
        (None, False, None, []),
        ("5", True, "-1", []),
    ],
)
def test_ranks_get_the_gpus_that_the_user_names(
    visible: str | None, cpu: bool, seen: str | None, what: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(8):
        (tmp_path / f"nvidia{n}").touch()
    monkeypatch.setattr(local, "DEVICES", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    plan = compose.compose(["cluster.device=cpu" if cpu else "cluster.device=cuda", "cluster.ranks_per_node=2"])
    assert LocalBackend().rank_environment(plan).get("CUDA_VISIBLE_DEVICES") == seen
    assert [f.what for f in preflight.inspect(plan) if f.rule == "HW-03"] == what


def test_ranks_see_the_gpus_that_a_user_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank of a plan with GPUs prints what it sees."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")
    plan = compose.compose(["cluster.device=cuda", "cluster.ranks_per_node=1"])
    argv = ["python", "-c", "import os; print('sees', os.environ['CUDA_VISIBLE_DEVICES'])"]
    command = Command(name="see", argv=argv, log=None, limit_min=None)
    with LocalBackend().nodes(plan, tmp_path) as nodes, started(nodes, command, tmp_path, port=1) as running:
        while running.are_running():
            pass
    running.check()
    assert "sees 6,7" in "".join(path.read_text() for path in (tmp_path / RANK_LOGS).glob("*_rank_*.out"))


def test_a_run_on_cpus_needs_no_gpus() -> None:
    assert not local.needs_gpus(compose.compose(["cluster=local"]))


@pytest.mark.parametrize(
    ("name", "memory_mib", "other"),
    [
        ("NVIDIA H200", 143771, None),
        ("NVIDIA H200", None, None),
        ("NVIDIA H200", 139776, None),
        ("NVIDIA H200", 138240, "GPU 1 is NVIDIA H200 with 135.0 GiB"),
        ("NVIDIA H100 80GB HBM3", 143771, "GPU 1 is NVIDIA H100 80GB HBM3 with 140.4 GiB"),
        (None, 143771, "GPU 1 is None with 140.4 GiB"),
    ],
)
def test_a_different_gpu_is_detected_by_name_and_memory(
    name: str | None, memory_mib: int | None, other: str | None
) -> None:
    """The plan has an H200 with 139.8 GiB. 143771 MiB are 140.4 GiB; 3 % less than 139.8 GiB are 135.6 GiB."""
    planned = Gpu(name="NVIDIA H200 SXM 141GB", memory_gib=139.8, peak_bf16_tflops=1, peak_fp8_tflops=1, source="")
    sizes = {"name": name, "memory_mib": memory_mib}
    unknown = dict.fromkeys((field.name for field in fields(GpuFacts)), None)
    assert hardware._different_gpu(planned, [GpuFacts(**unknown | sizes | {"index": 1})]) == other


@pytest.mark.parametrize(
    ("seen", "is_another"), [("NVIDIA GeForce RTX 4090", False), ("NVIDIA GeForce RTX 3090", True)]
)
def test_gpus_with_equal_memory_are_distinguished_by_model_number(seen: str, is_another: bool) -> None:
    planned = Gpu(name="NVIDIA GeForce RTX 4090", memory_gib=23.65, peak_bf16_tflops=1, source="")
    unknown = dict.fromkeys((field.name for field in fields(GpuFacts)), None)
    facts = GpuFacts(**unknown | {"name": seen, "memory_mib": 24564, "index": 0})
    assert (hardware._different_gpu(planned, [facts]) is not None) is is_another


@pytest.mark.parametrize(
    ("setting", "adapters", "rules"),
    [
        ("NCCL_NET=IB", [], ["NCC-02"]),
        ("NCCL_NET=IB", ["mlx5_0"], []),
        ("NCCL_SOCKET_IFNAME=ib", ["mlx5_0"], ["NCC-01"]),
        ("NCCL_SOCKET_IFNAME=eth", [], []),
        ("NCCL_NET=Socket", [], []),
    ],
)
def test_a_network_that_is_configured_for_nccl_must_exist_on_this_machine(
    setting: str, adapters: list[str], rules: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, devices in (("INFINIBAND", adapters), ("INTERFACES", ["lo", "eth0"])):
        (tmp_path / name).mkdir()
        for device in devices:
            (tmp_path / name / device).touch()
        monkeypatch.setattr(local, name, str(tmp_path / name))
    plan = compose.compose(["cluster.device=cuda", f"+cluster.environment.{setting}"])
    assert [f.rule for f in preflight.inspect(plan) if f.rule.startswith("NCC")] == rules


def test_one_process_with_several_gpus_needs_all_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(local, "DEVICES", str(tmp_path))
    huggingface = ["engine=huggingface", "engine.huggingface.strategy=balanced", "engine.huggingface.num_gpus=4"]
    plan = compose.compose(["cluster.device=cuda", "cluster.ranks_per_node=1", *huggingface])
    (what,) = [f.what for f in preflight.inspect(plan) if f.rule == "HW-03"]
    assert what == "this machine has 1 NVIDIA GPU, but 1 rank needs 4 GPUs"


def test_missing_packages_of_the_huggingface_engine_are_reported_with_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_is_installed", lambda name: name not in ("deepspeed", "flash_attn"))
    words = ["engine=huggingface", "engine.huggingface.strategy=deepspeed", "precision=bf16", "cluster.device=cuda"]
    plan = compose.compose([*words, "engine.huggingface.attention=flash_attention_2", "cluster.ranks_per_node=1"])
    (finding,) = [f for f in preflight.inspect(plan) if f.rule == "RUN-08"]
    assert finding.what == "cannot import deepspeed, flash_attn"
    assert finding.fix.startswith("pip install 'runstop[huggingface]'; pip install flash-attn")


@pytest.mark.long
def test_packages_to_prepare_rows_are_required_until_the_rows_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_is_installed", lambda name: name not in ("tokenizers", "pyarrow"))
    plans = {
        task: compose.compose([f"task={task}", "cluster=local", f"cluster.paths.data={tmp_path}"])
        for task in ("finetune_tiny_dolly", "pretrain_7b", "lora_tiny")
    }
    problems = {task: [f for f in preflight.inspect(plan) if f.rule == "RUN-08"] for task, plan in plans.items()}
    assert [f.what for f in problems["finetune_tiny_dolly"]] == ["cannot import tokenizers"]
    assert [f.what for f in problems["pretrain_7b"]] == ["cannot import tokenizers, pyarrow"]
    assert {f.fix for f in problems["pretrain_7b"]} == {"pip install 'runstop[data]'"} and not problems["lora_tiny"]
    Path(plans["finetune_tiny_dolly"].data_dir).mkdir()
    assert not [f for f in preflight.inspect(plans["finetune_tiny_dolly"]) if f.rule == "RUN-08"]
