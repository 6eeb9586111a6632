"""Plans of earlier versions can still be read; the files were written by those versions."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from bench.contract import old_plans, plan_kinds
from bench.contract import plan as plans
from bench.contract.described_model import Described
from bench.contract.plan import Command, Plan
from bench.contract.schema import BackendName, ProfileKind
from bench.contract.training import StartsFrom, Trains
from bench.errors import ConfigError
from bench.planning import compose

HERE = Path(__file__).parent
TRAIN = ["python", "-m", "jobs.tasks.train", "plan.json", "--trial"]


def test_a_local_plan_of_version_2_is_read_with_its_base() -> None:
    plan = plan_kinds.load(HERE / "plan_version_2_local.json")
    assert (plan.version, plan.config.cluster.backend, plan.world.num_ranks) == (5, BackendName.local, 2)
    prepare = Command(
        name="prepare", argv=["python", "-m", "jobs.tasks.prepare", "plan.json"], log="prepare.txt", limit_min=None
    )
    trials = [Command(name=f"trial {k}", argv=[*TRAIN, str(k)], log=f"result_{k}.txt", limit_min=30) for k in (0, 1)]
    assert plan.commands == [prepare, *trials] and plans.trial_commands(plan) == trials
    assert plan.base is not None and (plan.base.version, plan.base.name) == (5, "pretrain_tiny-local")
    assert plan.config.task.training.starts_from is StartsFrom.task
    base = plan.base.config.task.training
    assert (base.trains, base.starts_from) == (Trains.all, StartsFrom.random)
    assert plan.base.config.cluster.backend is BackendName.local
    assert [command.name for command in plan.base.commands] == ["prepare", "trial 0"]
    assert (plan.config.launch.profile, plan.base.config.launch.profile) == (ProfileKind.none, ProfileKind.none)


def test_a_slurm_plan_of_version_2_is_read_and_keeps_its_values() -> None:
    path = HERE / "plan_version_2_slurm.json"
    plan = plan_kinds.load(path)
    assert plan.config.cluster.backend is BackendName.slurm and plan.data_dir == "$DATADIR"
    assert [command.name for command in plan.commands] == ["prepare", "trial 0"], "the script started node facts itself"
    old, new = json.loads(path.read_text()), json.loads(plan_kinds.dumps(plan))
    changed = {key for key in old | new if old.get(key) != new.get(key)}
    assert changed == {"version", "steps", "commands", "max_steps", "config", "cuda_graph", "recompute"}
    assert new["recompute"] == old["recompute"] | {"offloaded_layers": 0}, "activations in host memory are new"
    changed = {key for key in old["config"] | new["config"] if old["config"].get(key) != new["config"].get(key)}
    assert changed == {"task", "recipe", "cluster", "engine", "launch", "data"}, "launch.trackers is new"
    data = (old["config"]["data"], new["config"]["data"])
    assert data[0].items() <= data[1].items(), "settings of files are new"
    clusters = (old["config"]["cluster"], new["config"]["cluster"])
    assert clusters[0].pop("scheduler") == clusters[1].pop("backend")
    rates = clusters[1]["gpu"]["rates"]
    added = {name: rates.pop(name) for name in set(rates) - set(clusters[0]["gpu"]["rates"])}
    assert "host_gbs" in added and not any(added.values()), "new, and unknown for this GPU"
    assert clusters[0] == clusters[1]
    training = plan.config.task.training
    assert (training.trains, training.starts_from) == (Trains.lora, StartsFrom.checkpoint)
    assert (training.target_eval_loss, training.max_steps, plan.max_steps) == (0.925, 1024, 1024)


@pytest.mark.long
def test_a_plan_of_version_3_loses_settings_that_its_kind_does_not_use() -> None:
    """Tasks that do not train had rows and a recipe, which set the tokens of a micro-batch of GEMMs."""
    old = json.loads((HERE / "plan_version_3_kernels.json").read_text())
    plan = plan_kinds.load(HERE / "plan_version_3_kernels.json")
    assert isinstance(plan, plan_kinds.KernelsPlan) and (plan.config.data, plan.config.recipe) == (None, None)
    assert plan.config.task.kernels is not None and plan.config.task.kernels.gemm is not None
    assert plan.config.task.kernels.gemm.model_tokens == old["config"]["data"]["seq_length"] == 4096
    shapes = f"task.kernels.gemm.shapes={old['config']['task']['kernels']['gemm']['shapes']}"  # the task has more now
    assert_same_but_for_sources(plan, compose.compose(["task=gemm", "cluster=dgx1", shapes]))
    trained = plan_kinds.load(HERE / "plan_version_3_training.json")
    assert_same_but_for_sources(trained, compose.compose(["task=lora70b", "cluster=dgx1"]))


def assert_same_but_for_sources(old: Plan, new: Plan) -> None:
    """Compare plans whose texts on the sources of rates may differ, and whose step may be estimated better by now."""
    cluster, expected = old.config.cluster, new.config.cluster
    assert cluster.health and expected.health and cluster.gpu and expected.gpu
    assert cluster.gpu.rates and expected.gpu.rates
    cluster.health.source, cluster.gpu.rates.source = expected.health.source, expected.gpu.rates.source
    if isinstance(old, plan_kinds.TrainingPlan) and isinstance(new, plan_kinds.TrainingPlan):
        old = replace(old, cost=new.cost)
    assert old == new


def test_a_plan_of_version_4_is_read_with_the_new_names_of_its_keys() -> None:
    """Requests, batched tokens and the renamed config keys; test_local_sgd_plan.py has the prediction."""
    for task in ("generate_tiny", "serve_tiny", "kernels_tiny"):
        plan = compose.compose([f"task={task}", "cluster.network_gbs=null"])
        text = plan_kinds.dumps(plan)
        for old, new in (("asked", "requests"), ("bunched", "batched_tokens")):
            if task == "generate_tiny" or old == "bunched":
                text = text.replace(f'"{new}":', f'"{old}":')
        for old, new in old_plans.CONFIG_KEYS.items():
            text = text.replace(f'"{new.rpartition(".")[2]}":', f'"{old.rpartition(".")[2]}":')
        text = text.replace('"version": 5,', '"version": 4,', 1)
        assert text != plan_kinds.dumps(plan) and plan_kinds.loads(text) == plan


def test_a_plan_with_a_described_model_is_read_with_the_old_name_of_its_key() -> None:
    """Plans of version 5 have either name."""
    described = Described(
        **dict.fromkeys(("config_json", "transformers", "architecture", "layer"), ""),
        **dict.fromkeys(("parameters", "active_parameters", "largest_parameter", "layer_weights"), 1),
        **dict.fromkeys(("active_layer_weights", "kv_width", "num_uncounted_layers"), 1),
        **{name: [] for name in ("attention", "projections", "attention_implementations")},
        can_recompute=True,
    )
    plan = plan_kinds.required(plan_kinds.load(HERE / "plan_version_2_local.json"), plan_kinds.TrainingPlan)
    assert plan.base is not None
    plan.config.model.described = plan.base.config.model.described = described
    for version in (4, 5):
        text = plan_kinds.dumps(plan).replace("num_uncounted_layers", "num_untold_layers")
        assert text.count("num_untold_layers") == 2
        assert plan_kinds.loads(text.replace('"version": 5,', f'"version": {version},')) == plan


@pytest.mark.parametrize("old", old_plans.CONFIG_KEYS)
def test_an_old_config_key_composes_with_a_warning(old: str, caplog: pytest.LogCaptureFixture) -> None:
    task, new = ("serve_tiny" if "serving" in old else "kernels_tiny"), old_plans.CONFIG_KEYS[old]
    value = "false" if "of_model" in old or "bunches" in old else "128"
    assert compose.compose([f"task={task}", f"{old}={value}"]) == compose.compose([f"task={task}", f"{new}={value}"])
    assert caplog.messages == [f"{old} was renamed: use {new}"]


@pytest.mark.long
@pytest.mark.parametrize(("written", "meant"), [(True, ProfileKind.kernels), (False, ProfileKind.none)])
def test_a_boolean_profile_is_read_as_its_kind(written: bool, meant: ProfileKind) -> None:
    """In plan.json, in its base, and in config.yaml."""
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
def test_an_old_plan_is_written_as_this_version(name: str) -> None:
    plan = plan_kinds.load(HERE / f"plan_version_2_{name}.json")
    assert plan_kinds.loads(plan_kinds.dumps(plan)) == plan


def test_a_binary_file_is_not_a_plan(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_bytes(b'{"name": "\xfb"}')
    with pytest.raises(ConfigError, match="the plan cannot be read: the file is not a text file"):
        plan_kinds.load(tmp_path / "plan.json")
