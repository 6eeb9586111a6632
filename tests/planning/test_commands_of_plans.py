"""Commands, files and variables of plans: commands_of_plans.txt, so that a change shows all plans it changes.

After a change on purpose, run it once with WRITE_PLANS=1, and read the difference.
"""

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.contract.plan import Plan
from bench.planning import commands, compose
from helpers import golden, user_tables

GOLDEN = Path(__file__).with_name("commands_of_plans.txt")
CPU = "cluster=local cluster.device=cpu"
PROGRAM = f"task=my_program {CPU} trials=2"
PLANNED = (
    f"task=lora_tiny {CPU} trials=2",
    f"task=pretrain_tiny {CPU} walltime=null task.training.checkpoint_every_steps=9 seed_base=5",
    f"task=pretrain_tiny {CPU} data.source=random",
    f"task=pretrain_tiny {CPU} engine=nemo",
    f"task=pretrain_tiny {CPU} engine=huggingface",
    "task=lora_7b cluster=dgx1 engine=nemo engine.nemo.python=/nemo/python container=none",
    "task=lora_7b cluster=dgx1 engine=huggingface +cluster.environment.NCCL_DEBUG=INFO",
    "task=lora70b cluster=dgx1 launch.array=true parallel={tp:4,pp:1,cp:1}",
    "task=pretrain_7b cluster=dgx1 cluster.health=null trials=3 parallel={tp:1,pp:1,cp:1}",
    "task=pretrain_7b cluster=dgx2 launch.health=false parallel={tp:2,pp:1,cp:1}",
    "task=generate_tiny cluster=kubernetes_test",
    f"task=serve_tiny {CPU}",
    f"task=kernels_tiny {CPU} trials=2",
    f"{PROGRAM} engine.command.argv=[a,'{{seed}}']",
    f"{PROGRAM} engine.command.argv=[a,'{{seed}}','{{data}}','{{checkpoints}}'] data=tiny_report "
    "engine.command.per=rank",
    f"{PROGRAM} engine.command.argv=[a,'{{seed}}'] data=tiny_report task.training.starts_from=task "
    "task.training.base=pretrain_tiny",
    "task=my_program cluster=dgx1 engine.command.argv=[a] +cluster.environment.NCCL_P2P_DISABLE=1",
)
PROBED = ((1, False), (2, True))
"""Nodes of a job that checks its nodes, and whether it also measures them."""


def shown(plan: Plan) -> Iterator[str]:
    yield f"  name {plan.name}, {plan.walltime_min} min"
    yield from (f"  trial {trial.index}: seed {trial.seed}, {trial.log}" for trial in plan.trials)
    for command in plan.commands:
        yield f"  {command.name}: {shlex.join(command.argv)}, log {command.log}, limit {command.limit_min} min"
    yield f"  files: {', '.join(plan.files)}"
    yield f"  environment: {', '.join(f'{name}={value}' for name, value in plan.environment.items())}"


def lines() -> Iterator[str]:
    for request in PLANNED:
        yield request
        yield from shown(compose.compose([token.replace("'", '"') for token in request.split()]))
    plan = compose.compose(["task=pretrain_7b", "cluster=dgx2", "cluster.spare_nodes=1", "launch.replace_slow=true"])
    for num_nodes, health in PROBED:
        probe = commands.probe(plan, num_nodes=num_nodes, health=health)
        launch, cluster = probe.config.launch, probe.config.cluster
        yield f"probe of {num_nodes} nodes, health={health}"
        yield from shown(probe)
        yield f"  health {launch.health}, replace_slow {launch.replace_slow}, spare nodes {cluster.spare_nodes}"
        yield f"  {probe.world}"


@pytest.mark.long
def test_commands_are_the_golden_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    user_tables.leave_out(monkeypatch)
    golden.require("\n".join([*lines(), ""]), GOLDEN, variable="WRITE_PLANS")


@pytest.mark.long
def test_a_job_that_checks_its_nodes_is_one_job() -> None:
    plan = compose.compose(["task=lora_tiny", "cluster=dgx1", "launch.array=true", "trials=2"])
    assert plan.config.launch.array
    assert not commands.probe(plan, num_nodes=1, health=True).config.launch.array
