"""Plans that earlier versions wrote: two of version 2, kept as that version's own code printed them."""

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from bench.contract import plan as plans
from bench.contract import plan_kinds
from bench.contract.plan import Command
from bench.contract.schema import BackendName, ProfileKind
from bench.contract.training import StartsFrom, Trains
from bench.errors import ConfigError
from bench.planning import compose

HERE = Path(__file__).parent
TRAIN = ["python", "-m", "jobs.tasks.train", "plan.json", "--trial"]


def test_a_local_plan_of_version_2_is_read_with_its_base() -> None:
    plan = plan_kinds.load(HERE / "plan_version_2_local.json")
    assert (plan.version, plan.config.cluster.backend, plan.world.num_ranks) == (4, BackendName.local, 2)
    prepare = Command(
        name="prepare", argv=["python", "-m", "jobs.tasks.prepare", "plan.json"], log="prepare.txt", limit_min=None
    )
    trials = [Command(name=f"trial {k}", argv=[*TRAIN, str(k)], log=f"result_{k}.txt", limit_min=30) for k in (0, 1)]
    assert plan.commands == [prepare, *trials] and plans.trial_commands(plan) == trials
    assert plan.base is not None and (plan.base.version, plan.base.name) == (4, "pretrain_tiny-local")
    assert plan.config.task.training.starts_from is StartsFrom.task
    base = plan.base.config.task.training
    assert (base.trains, base.starts_from) == (Trains.all, StartsFrom.random)
    assert plan.base.config.cluster.backend is BackendName.local
    assert [command.name for command in plan.base.commands] == ["prepare", "trial 0"]
    assert (plan.config.launch.profile, plan.base.config.launch.profile) == (ProfileKind.none, ProfileKind.none)


def test_a_slurm_plan_of_version_2_is_read_and_keeps_what_it_holds() -> None:
    path = HERE / "plan_version_2_slurm.json"
    plan = plan_kinds.load(path)
    assert plan.config.cluster.backend is BackendName.slurm and plan.data_dir == "$DATADIR"
    assert [command.name for command in plan.commands] == ["prepare", "trial 0"], "node facts were the script's own"
    old, new = json.loads(path.read_text()), json.loads(plan_kinds.dumps(plan))
    changed = {key for key in old | new if old.get(key) != new.get(key)}
    assert changed == {"version", "steps", "commands", "max_steps", "config", "cuda_graph", "recompute"}
    assert new["recompute"] == old["recompute"] | {"offloaded_layers": 0}, "activations in host memory are new"
    changed = {key for key in old["config"] | new["config"] if old["config"].get(key) != new["config"].get(key)}
    assert changed == {"task", "recipe", "cluster", "engine", "launch", "data"}, "launch.trackers is new"
    data = (old["config"]["data"], new["config"]["data"])
    assert data[0].items() <= data[1].items(), "how rows are made of files is new"
    clusters = (old["config"]["cluster"], new["config"]["cluster"])
    assert clusters[0].pop("scheduler") == clusters[1].pop("backend")
    rates = clusters[1]["gpu"]["rates"]
    added = {name: rates.pop(name) for name in set(rates) - set(clusters[0]["gpu"]["rates"])}
    assert "host_gbs" in added and not any(added.values()), "new, and not known of this GPU"
    assert clusters[0] == clusters[1]
    training = plan.config.task.training
    assert (training.trains, training.starts_from) == (Trains.lora, StartsFrom.checkpoint)
    assert (training.target_eval_loss, training.max_steps, plan.max_steps) == (0.925, 1024, 1024)


def test_a_plan_of_version_3_loses_what_its_kind_does_not_use() -> None:
    """Tasks that train nothing had rows and a recipe, which said of how many tokens a micro-batch of GEMMs is."""
    old = json.loads((HERE / "plan_version_3_kernels.json").read_text())
    plan = plan_kinds.load(HERE / "plan_version_3_kernels.json")
    assert isinstance(plan, plan_kinds.KernelsPlan) and (plan.config.data, plan.config.recipe) == (None, None)
    assert plan.config.task.kernels is not None and plan.config.task.kernels.gemm is not None
    assert plan.config.task.kernels.gemm.model_tokens == old["config"]["data"]["seq_length"] == 4096
    assert plan == compose.compose(["task=gemm", "cluster=dgx1"])
    trained = plan_kinds.load(HERE / "plan_version_3_training.json")
    assert trained == compose.compose(["task=lora70b", "cluster=dgx1"])


@pytest.mark.parametrize(("written", "meant"), [(True, ProfileKind.kernels), (False, ProfileKind.none)])
def test_a_profile_that_was_a_switch_is_read_as_its_kind(written: bool, meant: ProfileKind) -> None:
    """In plan.json, its base's too, and in config.yaml."""
    plan = json.loads(plan_kinds.dumps(plan_kinds.load(HERE / "plan_version_2_local.json")))
    for one in (plan, plan["base"]):
        one["config"]["launch"]["profile"] = written
        one["version"] = 3
    read = plan_kinds.loads(json.dumps(plan))
    assert read.base is not None
    assert (read.config.launch.profile, read.base.config.launch.profile) == (meant, meant)
    config = compose.unplanned([])
    config_yaml = OmegaConf.to_yaml(OmegaConf.structured(config)).replace(
        "profile: none", f"profile: {written}".lower()
    )
    assert compose.read(config_yaml).launch.profile is meant


@pytest.mark.parametrize("name", ["local", "slurm"])
def test_what_was_read_is_written_as_this_version(name: str) -> None:
    plan = plan_kinds.load(HERE / f"plan_version_2_{name}.json")
    assert plan_kinds.loads(plan_kinds.dumps(plan)) == plan


def test_a_plan_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_bytes(b'{"name": "\xfb"}')
    with pytest.raises(ConfigError, match="the plan cannot be read: it is not text"):
        plan_kinds.load(tmp_path / "plan.json")
