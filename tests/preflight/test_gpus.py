"""A run on this machine that wants GPUs is told when there are too few."""

from pathlib import Path

import pytest

from bench import preflight
from bench.backends import local_checks
from bench.planning import compose


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
