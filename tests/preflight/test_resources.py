"""The memory and the cores of this machine, compared with what the ranks need."""

from pathlib import Path

import pytest

from bench import preflight
from bench.contract import host_memory
from bench.contract.plan import Plan
from bench.planning.compose import compose
from bench.preflight import resources

GIB = 2**30


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 64 GiB and 4 cores, without a limit by a control group; its folder has the files of the kernel."""
    (tmp_path / "cgroup").write_text("0::/\n")
    (tmp_path / "memory.max").write_text("max\n")
    monkeypatch.setattr(host_memory, "OWN_GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(host_memory, "GROUPS", tmp_path)
    monkeypatch.setattr(host_memory, "total_bytes", lambda: 64 * GIB)
    monkeypatch.setattr(resources.os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.setenv("LOGDIR", str(tmp_path / "runs"))
    return tmp_path


def rules(plan: Plan) -> dict[str, str]:
    return {str(one.rule): one.what for one in preflight.inspect(plan)}


def test_the_memory_of_all_ranks_is_compared_with_that_of_the_machine(machine: Path) -> None:
    seven = ["task=pretrain_7b", "cluster=local", "cluster.device=cpu", "model.weights=random"]
    what = rules(compose(seven))["RUN-03"]
    assert "of memory, but this machine has 64.0 GiB" in what
    assert "RUN-03" not in rules(compose(["task=lora_tiny"]))
    (machine / "memory.max").write_text("1000000\n")
    assert "but this machine has 0.0 GiB" in rules(compose(["task=lora_tiny"]))["RUN-03"]


def test_the_base_task_needs_its_memory_too(machine: Path) -> None:
    plan = compose(["task=lora_tiny"])
    own, base = (resources._needed_gib(one) for one in (plan, plan.base))  # type: ignore[attr-defined]
    assert own < base
    (machine / "memory.max").write_text(str(round((own + base) / 2 * GIB)))
    assert rules(plan)["RUN-03"].startswith("the ranks of the base task need ")


@pytest.mark.long
def test_more_ranks_than_cores_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "HW-09" not in rules(compose(["cluster.ranks_per_node=4"]))
    assert rules(compose(["cluster.ranks_per_node=8"]))["HW-09"].startswith("8 ranks share 4 CPU cores")
    monkeypatch.setattr(resources.os, "sched_getaffinity", lambda pid: {0})
    assert "HW-09" not in rules(compose(["task=lora_tiny"])), "two ranks are the default of every machine"


def test_a_gpu_without_a_known_memory_is_a_warning() -> None:
    on_gpu = ["task=lora_8b", "cluster.device=cuda", "cluster.ranks_per_node=1", "model.weights=random"]
    assert rules(compose(on_gpu))["HW-08"].endswith("but runstop does not know the memory of the GPU")
    assert "HW-08" not in rules(compose([*on_gpu, "gpu@cluster.gpu=h200"]))


def test_settings_of_the_recipe_are_advised_only_where_they_can_suffice(machine: Path) -> None:
    """Two ranks, whose states alone need half of the machine each, or a little more."""
    plan = compose(["task=pretrain_tiny", "recipe.micro_batch_size=4"])
    memory = plan.memory  # type: ignore[attr-defined]
    states = memory.total_gib - memory.activations_gib - memory.workspace_gib
    assert plan.config.cluster.ranks_per_node == 2
    for share, advice in ((0.99, "choose a smaller model"), (1.01, "set recipe.micro_batch_size=1")):
        (machine / "memory.max").write_text(str(round(2 * share * states * GIB)))
        (finding,) = (one for one in preflight.inspect(plan) if one.rule == "RUN-03")
        assert finding.fix.startswith(advice)


def test_a_server_needs_the_memory_of_its_own_ranks() -> None:
    plan = compose(["task=serve_tiny", "cluster.ranks_per_node=8"])
    assert resources._needed_gib(plan) == plan.estimated_memory_gib[0]
