"""Points of kernels, requests of generation and lengths of serving: golden_requests.txt, as plans list them.

After a change on purpose, run it once with WRITE_REQUESTS=1, and read the difference.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.planning import compose
from helpers import golden, user_tables

GOLDEN = Path(__file__).with_name("golden_requests.txt")
CPU = ("cluster=local", "cluster.device=cpu")
KERNELS = (
    ("task=kernels_tiny", *CPU, "cluster.ranks_per_node=3", "task.kernels.collectives.sizes_bytes=[1200,12000000]"),
    ("task=kernels_tiny", *CPU, "cluster.ranks_per_node=1", "parallel.tp=2", "task.kernels.collectives=null"),
    ("task=memcpy", "cluster=dgxh200"),
    ("task=memcpy", "cluster=dgxh200", "cluster.ranks_per_node=1"),
    ("task=collectives", "cluster=dgxh200", "task.kernels.collectives.sizes_bytes=[3232,1048576,3221225472]"),
    ("task=collectives", "cluster=dgx2", "task.kernels.collectives.sizes_bytes=[1024]"),
    ("task=attention", "cluster=dgxh200", "parallel.tp=2", "task.kernels.attention.seq_lengths=[512,16384]"),
    ("task=gemm", "cluster=dgxh200", "task.kernels.gemm.from_model=true", "parallel.tp=4"),
)
GENERATED = (
    ("task=generate_70b", "cluster=dgxh200"),
    ("task=generate_tiny", *CPU, "cluster.ranks_per_node=3"),
    ("task=generate_tiny", *CPU, "cluster.ranks_per_node=3", "task.generation.max_batch=2"),
    ("task=generate_tiny", *CPU, "cluster.ranks_per_node=2", "task.generation.order=one_by_one"),
    ("task=generate_7b", "cluster=dgx1", "parallel.groups=16", "parallel.tp=1", "parallel.share_gpu=true"),
    ("task=generate_7b", "cluster=dgx1", "precision=bf16", "task.generation.nf4=true"),
)
BOTH = "{mean: 40, sigma: 0.7, min: 4, max: 200}"
SERVED = (
    ("task=serve_tiny", *CPU, "trials=2", f"task.serving.lengths={{prompt: {BOTH}, answer: {BOTH}}}"),
    ("task=serve_tiny", *CPU, "task.serving.lengths.file=pairs.csv", "task.serving.requests=12"),
    ("task=serve_tiny", *CPU, "task.serving.lengths.file=pairs.jsonl", "task.serving.requests=12"),
)


def points() -> Iterator[str]:
    for words in KERNELS:
        yield " ".join(words)
        plan: Any = compose.compose(words)
        for one in plan.points:
            rates = f"work {one.work:.7g}, rate in {one.unit}, peak {one.peak}, best known {one.limit}"
            yield f"  {one.name}: {one.sizes}, {one.variant}, ranks {one.ranks}, {rates}"


def requests() -> Iterator[str]:
    for words in GENERATED:
        yield " ".join(words)
        plan: Any = compose.compose(words)
        yield f"  {plan.world.dp} replicas of {plan.world.tp}, {plan.weights.name}"
        by_replica = [[one for one in plan.requests if one.replica == replica] for replica in range(plan.world.dp)]
        yield from (f"  {[(one.index, one.prompt_tokens, one.length) for one in some]}" for some in by_replica)
        memory, cost = plan.memory, plan.cost
        yield f"  {memory.weights_gib:.7g} + {memory.kv_cache_gib:.7g} + {memory.workspace_gib:.7g} GiB"
        yield f"  {cost and f'{cost.bytes_per_token:.7g} bytes at {cost.bandwidth_gbs} GB/s, {cost.token_s:.7g} s'}"


def lengths() -> Iterator[str]:
    for words in SERVED:
        yield " ".join(words)
        plan: Any = compose.compose(words)
        yield f"  {plan.lengths.sha256}"
        for trial in plan.lengths.trials:
            for each in (trial.tokens_in, trial.tokens_out):
                digest = hashlib.sha256(str(each).encode()).hexdigest()[:8]
                yield f"  {each[:12]}, {len(each)} from {min(each)} to {max(each)}, SHA-256 {digest}"
        yield f"  {plan.memory.request_gib:.7g} GiB for a request, {plan.loads}"


@pytest.mark.long
def test_requests_of_plans_are_the_golden_ones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    user_tables.leave_out(monkeypatch)
    monkeypatch.chdir(tmp_path)
    pairs = [(3, 5), (7, 11), (200, 40)]
    rows = "".join(f"{prompt},{answer}\n" for prompt, answer in pairs)
    Path("pairs.csv").write_text(f"prompt_tokens,answer_tokens\n{rows}")
    records = (f'{{"prompt_tokens": {prompt}, "answer_tokens": {answer}}}\n' for prompt, answer in pairs)
    Path("pairs.jsonl").write_text("".join(records))
    golden.require("\n".join([*points(), *requests(), *lengths(), ""]), GOLDEN, variable="WRITE_REQUESTS")
