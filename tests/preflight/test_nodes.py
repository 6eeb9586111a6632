"""Facts written by real ranks, on nodes that share this machine; test_judged_facts.py modifies them."""

import json
import os
from pathlib import Path

import pytest

from bench.contract import plan_kinds
from bench.contract.checkpoint import CONVERTED, CONVERTED_FP8, CONVERTED_NF4
from bench.contract.plan import Plan
from bench.planning import compose
from bench.preflight import nodes
from helpers import ranks
from helpers.nodes import NUM_NODES, PER_NODE, on_nodes
from jobs.node_checks import facts

pytestmark = pytest.mark.starts

SECRET = "hunter2"
NVIDIA_SMI = r"""#!/bin/sh
case "$1" in
  --query-gpu=index*) printf '%s\n' '0, GPU-ab5e, NVIDIA H200, 580.159.04, 143771, 37, 345, 1980, 0' \
                                    '1, GPU-0f2a, NVIDIA H200, 580.159.04, 143771, 38, 345, 1980, [N/A]' ;;
  *clocks_event*) echo 'Field "clocks_event_reasons.active" is not a valid field to query.'; exit 2 ;;
  *clocks_throttle*) printf '%s\n' 'GPU-ab5e, 0x0000000000000001' 'GPU-0f2a, 0x0000000000000004' ;;
  --query-remapped*) printf '%s\n' 'GPU-ab5e, No, No' 'GPU-0f2a, No, No' ;;
  topo) printf '\t\033[4mGPU0\tGPU1\033[0m\n' ;;
esac
"""
"""What nvidia-smi of driver 580.159.04 printed on two H200, UUIDs cut short; an older one knows no event reasons."""


def composed() -> Plan:
    """Return the plan of two nodes with two H200 each, without a container."""
    sizes = [f"cluster.num_nodes={NUM_NODES}", f"cluster.ranks_per_node={PER_NODE}", "walltime=5", "trials=1"]
    return compose.compose(["task=pretrain_tiny", "cluster=dgxh200", "container=none", *sizes])


def test_facts_of_a_healthy_node_only_report_missing_infiniband(tmp_path: Path) -> None:
    """With a fake nvidia-smi that prints the output of a real one."""
    programs, planned = tmp_path / "bin", composed()
    programs.mkdir()
    (programs / "nvidia-smi").write_text(NVIDIA_SMI)
    (programs / "nvidia-smi").chmod(0o755)
    (tmp_path / "plan.json").write_text(plan_kinds.dumps(planned))
    slurm = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1"}
    env = planned.environment | slurm | {"NCCL_API_KEY": SECRET, "PATH": f"{programs}:{os.environ['PATH']}"}
    assert on_nodes(tmp_path, "jobs.node_checks.facts", "plan.json", **env) == [(0, "")] * 4
    texts = [(tmp_path / "facts" / f"rank_{rank:04d}.json").read_text() for rank in range(4)]
    assert SECRET not in "".join(texts)
    assert len(list((tmp_path / "facts").iterdir())) == 4, "there are other files"
    facts_json = [json.loads(text) for text in texts]
    assert [one["rank"] for one in facts_json if one["machine"]] == [0, 2]
    assert [one["node"] for one in facts_json] == ["dgx-0", "dgx-0", "dgx-1", "dgx-1"]
    assert {one["attempt"] for one in facts_json} == {"7.0.1"}
    gpus = facts_json[0]["machine"]["gpus"]
    assert [gpu["throttle"] for gpu in gpus] == ["0x0000000000000001", "0x0000000000000004"]
    assert [gpu["ecc_uncorrected"] for gpu in gpus] == [0, None], "what is not available is not a number"
    assert facts_json[0]["machine"]["gpu_links"] == "\tGPU0\tGPU1\n"
    assert "127.0.0.1" in {link["name"]: link["addresses"] for link in facts_json[0]["machine"]["interfaces"]}["lo"]
    assert "NCCL_API_KEY" in facts_json[0]["environment"] and not facts_json[0]["not_as_planned"]
    assert facts_json[0]["machine"]["results"]["refused"] is None
    findings = nodes.judge(planned, nodes.load(tmp_path))
    assert [(f.rule, f.severity, f.tier) for f in findings] == [("NCC-02", "warning", "nodes")]


def test_ranks_that_are_all_rank_0_are_reported(tmp_path: Path):
    planned = composed()
    (tmp_path / "plan.json").write_text(plan_kinds.dumps(planned))
    assert [
        code for code, _ in on_nodes(tmp_path, "jobs.node_checks.facts", "plan.json", RANK="0", WORLD_SIZE="1")
    ] == [0] * 4
    messages = [f.what for f in nodes.judge(planned, nodes.load(tmp_path)) if f.rule == "NCC-05"]
    assert messages == [
        "ranks were started with a world size of 1, but the plan has 4 ranks: every process is rank 0",
        "3 of 4 ranks wrote no file about their node: ranks 1-3",
    ]


def test_the_checkpoint_is_checked_at_the_path_that_a_run_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """MODEL may be a Hugging Face folder with converted weights in it; FP8 or NF4 weights are used if possible."""
    monkeypatch.setattr("bench.planning.model_folder.check", lambda plan: None)  # the folders are empty
    overrides = ["task=lora70b", "cluster=dgx2", f"cluster.paths.model={tmp_path}"]
    plan = compose.compose([*overrides, "precision=fp8"])
    assert ("the checkpoint", f"{tmp_path}/metadata.json", True) in facts.paths(plan)
    (tmp_path / "config.json").touch()
    assert ("the checkpoint", f"{tmp_path}/{CONVERTED}/metadata.json", True) in facts.paths(plan)
    (tmp_path / CONVERTED_FP8).mkdir()
    assert ("the checkpoint", f"{tmp_path}/{CONVERTED_FP8}/metadata.json", True) in facts.paths(plan)
    plan = compose.compose([*overrides, "precision=bf16"])
    assert ("the checkpoint", f"{tmp_path}/{CONVERTED}/metadata.json", True) in facts.paths(plan)
    (tmp_path / CONVERTED_NF4).mkdir()
    plan = compose.compose([*overrides, "precision=bf16", "task.training.trains=qlora"])
    assert ("the checkpoint", f"{tmp_path}/{CONVERTED_NF4}/metadata.json", True) in facts.paths(plan)
    plan = compose.compose([*overrides, "task=lora_8b", "engine=huggingface", "recipe.global_batch_size=16"])
    assert ("the checkpoint", f"{tmp_path}/config.json", True) in facts.paths(plan)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_full_disk_is_detected_by_writing(tmp_path: Path):
    planned = composed()
    with ranks.mounted(tmp_path / "small", "size=512k"):
        (tmp_path / "small" / "plan.json").write_text(plan_kinds.dumps(planned))
        on_nodes(tmp_path / "small", "jobs.node_checks.facts", "plan.json", size=(1, 1), WORLD_SIZE="4")
        findings = nodes.judge(planned, nodes.load(tmp_path / "small"))
    assert "this node cannot write results: No space left on device" in [f.what for f in findings if f.rule == "CFG-08"]


def test_a_plan_that_cannot_be_read_ends_a_rank(tmp_path: Path) -> None:
    [(code, output)] = on_nodes(tmp_path, "jobs.node_checks.facts", "plan.json", size=(1, 1))
    assert code == 2 and "the plan cannot be read" in output
