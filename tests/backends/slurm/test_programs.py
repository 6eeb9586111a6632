"""engine=command on a real Slurm: torchrun, TRL and plain scripts on two nodes, in studies with runstop's engines."""

import json
from pathlib import Path

import pytest
from slurm_cluster import Cluster
from user import User

from helpers import answers, three_programs

pytestmark = pytest.mark.slurm
PROGRAM = """
import sys, torch
from torch import distributed
distributed.init_process_group("gloo")
torch.manual_seed(int(sys.argv[1]))
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1, int(sys.argv[2]) + 1):
    loss = (model(torch.ones(8, 64)) - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if distributed.get_rank() == 0:
        print(f"step {step} loss {loss.item():.6f} of {distributed.get_world_size()} ranks", flush=True)
distributed.destroy_process_group()
"""
ENGINE = r"""
name: command
command:
  per: node
  argv: [python, -m, torch.distributed.run, --nnodes, '{num_nodes}', --nproc-per-node, '{ranks_per_node}',
         --node-rank, '{node}', --master-addr, '{master_addr}', --master-port, '{master_port}',
         train.py, '{seed}', '{max_steps}']
  adapter: plain
  patterns: ['step (?P<step>\d+) loss (?P<loss>\S+)']
"""
STUDY = """
title: two programs
question: which one?
source: a test
overrides: [task=pretrain_tiny, model.weights=random, task.training.max_steps=12, recipe.eval_every_samples=96,
            recipe.lr_warmup_steps=1, recipe.log_every_steps=2, data.eval_rows=16, cluster.ranks_per_node=2,
            launch.health=false, walltime=5]
arms:
  runstop: {labels: {program: runstop}, overrides: [engine=megatron]}
  torchrun: {labels: {program: torchrun}, overrides: [engine=ddp]}
runs: 2
columns: [{measurement: step_time, title: step time, unit: ms, higher_is_better: false}]
pairs: [{first: torchrun, second: runstop, measurement: step_time}]
"""


def test_torchrun_on_two_nodes_is_in_one_study_with_our_engine(user: User) -> None:
    site = user.home / "site"
    for name, text in (("engine/ddp", ENGINE), ("study/two", STUDY)):
        (site / f"{name}.yaml").parent.mkdir(parents=True, exist_ok=True)
        (site / f"{name}.yaml").write_text(text)
    (user.home / "train.py").write_text(PROGRAM)
    words = ("study", "two", "cluster=slurm_test", "--config-dir", site, "launch.wait=true", "--json")
    result = answers.one(user.types(*words).stdout)
    values = {row["labels"]["program"]: row["cells"] for row in result["rows"]}
    assert {name: [len(cell["values"]) for cell in cells.values()] for name, cells in values.items()} == {
        "runstop": [2],
        "torchrun": [2],
    }
    assert result["differences"][0]["comparison"]["verdict"] != "not compared"
    [run] = (user.home / "runs/studies").glob("two*/torchrun.1")
    printed = "".join(path.read_text() for path in (run / "rank_logs").glob("*.out"))
    assert "of 4 ranks" in printed, "the workers of both nodes are one process group"


@pytest.mark.slow
@three_programs.needs_trl
def test_the_same_fine_tuning_by_three_programs_on_two_nodes(cluster: Cluster, tmp_path: Path) -> None:
    user = User(cluster, tmp_path / "cache", tmp_path)
    words = (*three_programs.STUDY, "cluster=slurm_test", "launch.wait=true")
    three_programs.check(json.loads(user.types(*words, timeout_s=1500).stdout))
    [run] = (user.home / "runs/studies").glob("three_programs*/TRL.1")
    assert json.loads((run / "plan.json").read_text())["world"]["num_nodes"] == 2
