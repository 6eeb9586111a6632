"""engine=nemo: the commands of a plan, what is refused, and whether the environment is there."""

import sys
from pathlib import Path

import pytest

from bench.backends import local
from bench.contract import plan_kinds
from bench.contract.plan import Plan
from bench.contract.plan_kinds import TrainingPlan
from bench.errors import ConfigError
from bench.planning import compose
from bench.rules.check import CannotTellError, Finding, Subject

NEMO = ("engine=nemo", "engine.nemo.python=/opt/nemo/bin/python")
GPT = ("task=pretrain_gpt3_126m", "cluster=dgx1")
LORA = ("task=lora_7b", "cluster=dgx1", "model.weights=random", "parallel.tp=2", "parallel.pp=1")


def planned(*overrides: str) -> Plan:
    return compose.compose([*NEMO, *overrides])


@pytest.mark.long
def test_trials_run_in_nemos_environment_and_other_commands_in_ours() -> None:
    plan = planned("task=lora_tiny", "cluster=local")
    prepare, trial = plan.commands
    assert prepare.argv == ["python", "-m", "jobs.tasks.prepare", "plan.json"]
    assert trial.argv == ["/opt/nemo/bin/python", "-m", "jobs.nemo.train", "plan.json", "--trial", "0"]
    assert plan.base is not None and plan.base.config.engine.name.name == "megatron"
    assert "adapters_0/" in plan.files
    assert plan_kinds.loads(plan_kinds.dumps(plan)) == plan


@pytest.mark.long
def test_in_a_container_the_images_interpreter_runs_everything() -> None:
    assert {command.argv[0] for command in planned(*GPT, "container=pyxis").commands} == {"python"}


@pytest.mark.long
def test_kernels_do_not_depend_on_nemo() -> None:
    assert planned("task=gemm", "cluster=dgx1").commands[-1].argv[:3] == ["python", "-m", "jobs.tasks.kernels"]


@pytest.mark.long
def test_null_settings_are_chosen_within_nemos_limits() -> None:
    plan = planned("task=pretrain_7b", "cluster=dgx1", "parallel.tp=8")
    assert isinstance(plan, TrainingPlan)
    assert (plan.world.cp, plan.world.vpp, plan.cuda_graph, plan.cost) == (1, 1, False, None)
    recomputed = plan.recompute
    assert (recomputed.qkv_layers, recomputed.fc1_layers, recomputed.offloaded_layers) == (0, 0, 0)
    assert not planned("task=lora_tiny", "cluster=local", "parallel.tp=2", "parallel.sp=null").world.sp


@pytest.mark.parametrize(
    ("overrides", "where"),
    [
        ((*LORA, "precision=fp8"), "precision"),
        ((*LORA, "parallel.cp=2"), "parallel.cp"),
        (("task=pretrain_7b", "cluster=dgx1", "parallel.pp=2", "parallel.vpp=2"), "parallel.vpp"),
        (("task=lora_tiny", "cluster=local", "parallel.tp=2", "parallel.sp=true"), "parallel.sp"),
        (("task=qlora_7b", "cluster=dgx1", "model.weights=random"), "task.training.trains"),
        ((*LORA, "model=llama31_8b"), "model.rope_scaling_factor"),
        ((*GPT, "model.norm=RMSNorm"), "model"),
        ((*GPT, "task.training.starts_from=checkpoint"), "task.training"),
        ((*GPT, "recipe.moments=bf16"), "recipe.moments"),
        ((*GPT, "recipe.offload_moments=true"), "recipe.offload_moments"),
        ((*GPT, "task.training.checkpoint_every_steps=5"), "task.training.checkpoint_every_steps"),
        ((*GPT, "launch.profile=modules"), "launch.profile"),
        ((*GPT, "engine.nemo.python=nemo/bin/python"), "engine.nemo.python, NEMO_PYTHON"),
        ((*GPT, "engine.name=megatron"), "engine.name, engine.nemo"),
    ],
)
def test_settings_that_nemo_does_not_support_are_refused(overrides: tuple[str, ...], where: str) -> None:
    with pytest.raises(ConfigError) as refused:
        planned(*overrides)
    assert refused.value.where == where


def looked(python: Path | str) -> list[Finding | str]:
    plan = compose.compose(["engine=nemo", "task=lora_tiny", "cluster=local", f"engine.nemo.python={python}"])
    return list(local.environment(Subject(plan, "")))


def test_preflight_checks_the_nemo_version(tmp_path: Path) -> None:
    python, packages = tmp_path / "bin/python", tmp_path / "lib/python3.11/site-packages"
    [missing] = looked(python)
    assert isinstance(missing, Finding) and missing.what == f"{python} does not exist, or is not an executable file"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    with pytest.raises(CannotTellError):
        looked(python)
    packages.mkdir(parents=True)
    for version, what in ((None, "is not installed"), ("3.0.0", "3.0.0 is installed, but the recipes need 2.7.3")):
        if version:
            (packages / f"nemo_toolkit-{version}.dist-info").mkdir()
        [finding] = looked(python)
        assert isinstance(finding, Finding) and what in finding.what and finding.rule == "RUN-08"
    (packages / "nemo_toolkit-3.0.0.dist-info").rename(packages / "nemo_toolkit-2.7.3.dist-info")
    assert looked(python) == [f"nemo-toolkit 2.7.3 of {python}"]
