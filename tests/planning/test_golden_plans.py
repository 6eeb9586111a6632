"""What `runstop plan` shows and estimates for each task: golden_plans.txt, so that a change shows all plans it changes.

After a change on purpose, run it once with WRITE_PLANS=1, and read the difference.
"""

import json
from pathlib import Path

import pytest

from bench.console import plan as plan_sheet
from bench.contract.plan import Plan
from bench.errors import ConfigError
from bench.planning import compose
from helpers import golden, user_tables
from helpers.golden import significant

GOLDEN = Path(__file__).with_name("golden_plans.txt")
CLUSTERS = ("dgx2", "dgxh200")
LAYOUT = "parallel={{tp: {}, pp: {}, cp: {}}}"
HUGGING_FACE = ("task=finetune_7b_dolly", "cluster=dgx1", "engine=huggingface")
OTHERS = (
    ("task=lora70b", "cluster=dgx8", LAYOUT.format(4, 2, 2), "precision=fp8"),
    ("task=lora70b", "cluster=dgxh200", LAYOUT.format(1, 1, 1), "precision=fp8"),
    ("task=lora70b", "cluster=dgx2", LAYOUT.format(4, 4, 1), "parallel.vpp=2", "recipe.global_batch_size=16"),
    ("task=pretrain_70b", "cluster=dgx8", LAYOUT.format(8, 4, 1), "parallel.vpp=4"),
    ("task=pretrain_7b", "cluster=dgxh200", LAYOUT.format(2, 2, 2), "parallel.distributed_optimizer=false"),
    ("task=pretrain_7b", "cluster=dgxh200", "precision=fp8", "parallel.overlap=false"),
    ("task=pretrain_7b", "cluster=dgx2", LAYOUT.format(2, 1, 4), "data.seq_length=32768"),
    ("task=llama31_8b", "cluster=dgx8", LAYOUT.format(2, 2, 2)),
    ("task=pretrain_7b", "cluster=dgx2", "model=mixtral_8x7b", "parallel.ep=8"),
    ("task=pretrain_7b", "cluster=dgx1", "+cluster.environment.NCCL_P2P_DISABLE=1"),
    ("task=pretrain_7b_local_sgd", "cluster=net_1_gbit"),
    (*HUGGING_FACE, "engine.huggingface.strategy=fsdp2"),
    (*HUGGING_FACE, "engine.huggingface.strategy=deepspeed", "engine.huggingface.zero_stage=3"),
    (*HUGGING_FACE, "engine.huggingface.strategy=fsdp2", "recipe.recompute=full"),
    ("task=lora_7b", "cluster=dgx1", "engine=huggingface"),
    ("task=qlora_7b", "cluster=dgx1", "engine=huggingface"),
    ("task=lora_7b", "cluster=dgx1", "engine=nemo"),
    ("task=generate_70b", "cluster=dgxh200", "precision=fp8"),
    ("task=generate_70b", "cluster=dgxh200", "parallel.tp=2"),
    ("task=generate_7b", "cluster=dgx1", "engine=huggingface"),
    ("task=serve_70b", "cluster=dgxh200", "server=vllm"),
    ("task=serve_8b", "cluster=dgx1", "server=sglang"),
    ("task=serve_tiny", "cluster=local", "cluster.device=cpu"),
    ("task=lora70b", "cluster=kubernetes"),
    ("task=lora70b", "cluster=kuberay"),
)


def shown(plan: Plan) -> list[str]:
    """Return the rows of a plan, and all that it calculates."""
    calculated = {
        name: significant(getattr(plan, name))
        for name in plan.__dataclass_fields__
        if name not in ("version", "config", "base", "commands", "files", "environment", "trials")
    }
    rows = [f"  {name}: {value}" for name, value in plan_sheet.rows(plan)]
    return rows + [f"  {name} = {json.dumps(value, default=str)}" for name, value in calculated.items()]


@pytest.mark.long
def test_plans_are_the_golden_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    user_tables.leave_out(monkeypatch)
    tasks = sorted(path.stem for path in (compose.CONF / "task").glob("*.yaml"))
    cases = [(f"task={task}", f"cluster={cluster}") for task in tasks for cluster in CLUSTERS]
    lines = []
    for words in (*cases, *OTHERS):
        try:
            part = shown(compose.compose(list(words)))
        except ConfigError as error:
            part = [f"  refused: {line}" for line in str(error).splitlines()]
        lines += [" ".join(words), *part, ""]
    text = "\n".join(lines)
    golden.require(text, GOLDEN, variable="WRITE_PLANS")
