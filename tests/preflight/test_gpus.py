"""A run that wants GPUs is told when this machine has too few, and when a node has others."""

from dataclasses import fields
from pathlib import Path

import pytest

from bench import preflight
from bench.backends import local_checks
from bench.contract.node_facts import GpuFacts
from bench.contract.schema import Gpu
from bench.planning import compose
from bench.preflight.nodes import hardware


@pytest.mark.parametrize(
    ("count", "wanted", "what"),
    [
        (0, 2, ["this machine has no NVIDIA GPUs, and 2 ranks want one each"]),
        (1, 2, ["this machine has 1 NVIDIA GPU, and 2 ranks want one each"]),
        (2, 2, []),
    ],
)
def test_gpus_are_counted(
    count: int, wanted: int, what: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("nvidiactl", "nvidia-uvm", *(f"nvidia{n}" for n in range(count))):
        (tmp_path / name).touch()
    monkeypatch.setattr(local_checks, "DEVICES", str(tmp_path))
    plan = compose.compose(["cluster.device=cuda", f"cluster.ranks_per_node={wanted}"])
    assert [f.what for f in preflight.inspect(plan) if f.rule == "HW-03"] == what


def test_a_run_on_cpus_wants_none() -> None:
    assert not local_checks.is_cuda_here(compose.compose(["cluster=local"]))


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
def test_a_gpu_of_another_kind_is_told_by_its_name_and_its_memory(
    name: str | None, memory_mib: int | None, other: str | None
) -> None:
    """Wanted is an H200 of 139.8 GiB; 143771 MiB are 140.4 GiB, and 3 % less than 139.8 are 135.6."""
    wanted = Gpu(name="NVIDIA H200 SXM 141GB", memory_gib=139.8, peak_bf16_tflops=1, peak_fp8_tflops=1, source="")
    sizes = {"name": name, "memory_mib": memory_mib}
    unknown = dict.fromkeys((field.name for field in fields(GpuFacts)), None)
    assert hardware._others(wanted, [GpuFacts(**unknown | sizes | {"index": 1})]) == other
