"""Whether FP8 trains whole models as BF16 does: a Llama of 0.3B parameters from scratch, three seeds of each precision.

    python experiments/fp8_pretraining.py [--json FILE]   on one GPU
    python experiments/fp8_pretraining.py --quick         tiny, in a minute on one CPU core, where FP8 is emulated

The comparison and the criterion for equality are fixed in advance: every run trains on the same number of
tokens (`FULL`), rows of the grammar's reports, each seen once. The seeds draw the weights and the order of the rows.
The precisions agree if the mean curves of evaluation loss differ by no more than the seeds of one precision do (their
sd, mean over the evaluations). Then one micro-batch goes forward and back in FP32, BF16 and FP8, with the weights that
the first BF16 run left, and the gradients of every linear are compared. The report goes to stdout and progress to
stderr; FILE has all numbers so far at any time.
"""

import argparse
import os
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from fp8_learning import (
    PRECISIONS,
    SEEDS,
    Record,
    Size,
    Weights,
    begin,
    compared,
    compared_evaluations,
    curve_table,
    gradient_table,
    has_gpu,
    one_rank,
    schedule,
    setting,
    table,
    trained,
    verdict,
    verdict_text,
)

from bench.contract.plan import Plan
from bench.planning import compose
from bench.planning.commands import ENVIRONMENT
from jobs.engines.megatron.groups import end_ranks

if TYPE_CHECKING:
    from jobs.engines.megatron.model import ModelAndOptimizer

SEQ_LENGTH = 768
WARM_UP_SHARE = 0.1
PAIRS = (("fp8", "fp32"), ("bf16", "fp32"))
FULL = Size(
    model={
        "num_layers": 24,
        "hidden_size": 1024,
        "ffn_hidden_size": 2816,
        "num_attention_heads": 16,
        "num_query_groups": 16,
        "vocab_size": 512,
        "max_seq_length": SEQ_LENGTH,
    },
    batch=32,
    base_steps=0,
    base_lr=0.0,
    steps=300,
    lr=6e-4,
    eval_every=30,
)
QUICK = replace(FULL, model={"num_layers": 2, "max_seq_length": SEQ_LENGTH}, batch=4, steps=20, lr=2e-3, eval_every=5)


def main() -> None:
    start = time.perf_counter()
    size, path = arguments()
    record = Record(path, start)
    with TemporaryDirectory() as folder:
        plans = {name: composed(size, name, Path(folder)) for name in ("fp32", *PRECISIONS)}
        begin(plans["bf16"])
        record.spent("set up", start)
        ends = [trained(plans[name], seed, record) for name in PRECISIONS for seed in SEEDS]
        record.keep(setting=setting(size, plans["bf16"], ends[0]))
        with record.phase("gradients"):
            content = {name: {"end": gradients(plan, ends[0])} for name, plan in plans.items()}
            record.keep(gradients=compared(content, PAIRS))
    record.keep(verdict=verdict(record.content["curves"]))
    record.spent("all", start)
    print(report(record, size))
    end_ranks()


def arguments() -> tuple[Size, Path | None]:
    """Return what the command line asks for; a rank's environment is set before torch looks at it."""
    os.environ.update(ENVIRONMENT | os.environ)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model and few steps")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where all numbers go")
    given = parser.parse_args()
    if not given.quick and not has_gpu():
        parser.error("no GPU here; --quick needs none")
    return QUICK if given.quick else FULL, given.json


def composed(size: Size, precision: str, folder: Path) -> Plan:
    """Return the plan of pre-training in a precision; all plans read the same rows."""
    return compose.compose(
        [
            *one_rank(folder),
            *(f"model.{name}={value}" for name, value in size.model.items()),
            "task=pretrain_tiny",
            f"precision={precision}",
            f"data.seq_length={SEQ_LENGTH}",
            f"recipe.global_batch_size={size.batch}",
            f"recipe.lr_warmup_steps={round(WARM_UP_SHARE * size.steps)}",
            *schedule(size, size.steps, size.lr, size.eval_every),
        ]
    )


def gradients(plan: Plan, weights: Weights) -> Weights:
    """Return the gradients of one micro-batch by the names of the linears' weights."""
    import numpy as np

    from jobs.data import rows as rows_of
    from jobs.engines.megatron import loop, model

    engine = model.build(plan, SEEDS[0])
    replace_weights(engine, weights)
    (wrapped,), (chunk,) = engine.chunks, engine.unwrapped_chunks()
    wrapped.train()
    wrapped.zero_grad_buffer()
    batch = loop.micro_batch(plan, rows_of.load(plan, "train"), np.arange(plan.batch.micro_batch_size))
    losses_BS = wrapped(batch.tokens, batch.position_ids, None, labels=batch.labels)
    (batch.summed(losses_BS) / plan.batch.micro_batch_size).backward()
    return {name: p.main_grad.clone() for name, p in chunk.named_parameters() if "linear_" in name and p.dim() == 2}


def replace_weights(engine: "ModelAndOptimizer", weights: Weights) -> None:
    (chunk,) = engine.unwrapped_chunks()
    unexpected = chunk.load_state_dict(weights, strict=False).unexpected_keys
    assert not unexpected, unexpected
    engine.refresh_weights()


def report(record: Record, size: Size) -> str:
    """Return the report in Markdown."""
    content, s = record.content, record.content["setting"]
    tokens = size.steps * size.batch * SEQ_LENGTH
    rows = compared_evaluations(content["curves"])
    return "\n\n".join(
        [
            f"# FP8 against BF16: pre-training {s['num_parameters']:,} parameters",
            f"{s['hardware']}; torch {s['torch']}, cuDNN {s['cudnn']}, megatron-core {s['megatron_core']}, Python "
            f"{s['python']}; {s['date']}; `{s['command']}`",
            "Model: " + ", ".join(f"{name} {value}" for name, value in s["model"].items()) + ".",
            f"Rows of {SEQ_LENGTH} tokens, {size.batch} a step, {size.steps} steps: {tokens / 1e6:.1f} million tokens "
            f"a run, at learning rate {size.lr:g} with {WARM_UP_SHARE:.0%} warm-up and a cosine. n = {len(SEEDS)} "
            f"seeds.",
            table(["phase", "s"], [[name, f"{seconds:.1f}"] for name, seconds in content["elapsed_s"].items()]),
            "## Evaluation loss, nats",
            curve_table(rows),
            verdict_text(content["verdict"]),
            "## Gradients g of the linears, with the weights of the first BF16 run: |g - h| / |h|, and cosine",
            gradient_table(content["gradients"], PAIRS),
        ]
    )


if __name__ == "__main__":
    main()
