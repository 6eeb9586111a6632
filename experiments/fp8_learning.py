"""Whether FP8 learns as BF16 does: LoRA on a Llama of 1.0B parameters that is trained on the spot, three seeds of each.

    python experiments/fp8_learning.py [--json FILE]   on one GPU
    python experiments/fp8_learning.py --quick         tiny, in a minute on one CPU core, where FP8 is emulated

A base is pre-trained in BF16 on the grammar's reports, then adapted to its summaries. The seeds draw adapters, order of
rows and dropout; adapters and order are the same in both precisions. Then one micro-batch goes forward and back without
dropout in FP32, BF16 and FP8, and the gradients of the adapters are compared, once for the adapters at the start of
training and once for those that the first run left. The latter were trained on other base weights than the rounded
ones, so rounding alone makes a difference; FP32 with the same rounded weights leaves that out. The report goes to
stdout and progress to stderr; FILE has all numbers so far at any time.
"""

import argparse
import json
import math
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from statistics import fmean, median, stdev
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from bench.contract.checkpoint import model_of
from bench.contract.plan import Plan
from bench.planning import compose
from bench.planning.commands import ENVIRONMENT
from jobs.engines.megatron.groups import end_ranks, start_ranks
from jobs.ranks.identity import Rank
from jobs.ranks.timing import finite
from jobs.tasks.prepare import prepare_rows_of

if TYPE_CHECKING:
    from torch import Tensor

    from jobs.engines.megatron.model import ModelAndOptimizer

SEEDS = (1, 2, 3)
PRECISIONS = ("bf16", "fp8")
UNRELATED = (2 / len(SEEDS)) ** 0.5 * (2 / math.pi) ** 0.5
"""The mean distance between two means of as many normal numbers as seeds, in their sd."""
LEARNED = 10
"""A fall of the loss below so many times the noise shows nothing."""
START_B = 1e-3
"""B is zero when training starts, so A has no gradient. B gets random numbers of this sd, which change little."""
Pairs = tuple[tuple[str, str], ...]
PAIRS: Pairs = (("fp8", "bf16"), ("fp8", "fp32"), ("fp8", "rounded"), ("bf16", "fp32"))
"""Whose gradients are compared with whose; rounded: FP32, with weights as FP8 has them."""

Weights = dict[str, "Tensor"]
Curve = dict[int, float]
"""Evaluation loss in nats by training step; step 0 is before any training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A model and how long it is trained; a batch is rows of 96 tokens, and no row is seen twice."""

    model: dict[str, int]
    batch: int
    base_steps: int
    base_lr: float
    steps: int
    lr: float
    eval_every: int


FULL = Size(
    model={
        "num_layers": 16,
        "hidden_size": 2048,
        "ffn_hidden_size": 8192,
        "num_attention_heads": 16,
        "num_query_groups": 8,
    },
    batch=32,
    base_steps=240,
    base_lr=3e-4,
    steps=150,
    lr=4e-4,
    eval_every=15,
)
QUICK = Size(model={"num_layers": 2}, batch=16, base_steps=120, base_lr=3e-3, steps=40, lr=2e-3, eval_every=10)


class Record:
    """What is known so far, kept in a file as it grows."""

    def __init__(self, path: Path | None, start: float) -> None:
        self.path, self.start = path, start
        self.content: dict[str, Any] = {"elapsed_s": {}, "curves": {name: {} for name in PRECISIONS}}

    def keep(self, **content: Any) -> None:
        self.content |= content
        if self.path:
            self.path.write_text(json.dumps(self.content, indent=1) + "\n")

    def say(self, text: str) -> None:
        print(f"[{time.perf_counter() - self.start:6.1f} s] {text}", file=sys.stderr, flush=True)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the body."""
        start = time.perf_counter()
        yield
        self.spent(name, start)

    def spent(self, name: str, start: float) -> None:
        seconds = time.perf_counter() - start
        self.say(f"{name}: {seconds:.1f} s in all")
        self.content["elapsed_s"][name] = round(seconds, 1)
        self.keep()


def main() -> None:
    start = time.perf_counter()
    size, path = arguments()
    record = Record(path, start)
    with TemporaryDirectory() as folder:
        plans = composed(size, Path(folder))
        begin(plans["base"], plans["bf16"])
        record.spent("set up", start)
        with record.phase("base"):
            weights = base_weights(plans["base"], record)
        record.keep(setting=setting(size, plans["base"], weights))
        adapters = [adapted(plans[name], seed, weights, record) for name in PRECISIONS for seed in SEEDS]
        with record.phase("gradients"):
            record.keep(gradients=compared(all_gradients(plans, weights, adapters[0])))
    record.keep(verdict=verdict(record.content["curves"]))
    record.spent("all", start)
    print(report(record.content))
    end_ranks()


def arguments() -> tuple[Size, Path | None]:
    """Return what the command line asks for; a rank's environment is set before torch looks at it."""
    os.environ.update(ENVIRONMENT | os.environ)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model and few steps")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where all numbers go")
    for field in ("batch", "base_steps", "base_lr", "steps", "lr", "eval_every"):
        usual, quick = getattr(FULL, field), getattr(QUICK, field)
        name, help_text = f"--{field.replace('_', '-')}", f"{usual}; {quick} when quick"
        parser.add_argument(name, type=type(usual), metavar="X", help=help_text)
    given = vars(parser.parse_args())
    if not given["quick"] and not has_gpu():
        parser.error("no GPU here; --quick needs none")
    size, path = QUICK if given.pop("quick") else FULL, given.pop("json")
    return replace(size, **{field: value for field, value in given.items() if value is not None}), path


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def composed(size: Size, folder: Path) -> dict[str, Plan]:
    """Return the plans: of the base, of LoRA in each precision, and without dropout where gradients are compared."""
    here = (
        *one_rank(folder),
        *(f"model.{name}={value}" for name, value in size.model.items()),
        f"recipe.global_batch_size={size.batch}",
        "recipe.eval_skip=0",
    )
    base = schedule(size, size.base_steps, size.base_lr, size.base_steps // 8)
    lora = [
        *here,
        "task=lora_tiny",
        "task.training.starts_from=checkpoint",
        "task.training.base=null",
        "task.training.target_eval_loss=null",
    ]
    lora += schedule(size, size.steps, size.lr, size.eval_every)
    plans = {"base": compose.compose([*here, "task=pretrain_tiny", "precision=bf16", *base])}
    for name in PRECISIONS:
        plans[name] = compose.compose([*lora, f"precision={name}"])
    for name in ("fp32", *PRECISIONS):
        plans[f"{name} undropped"] = compose.compose([*lora, f"precision={name}", "task.training.lora.dropout=0"])
    return plans


def one_rank(folder: Path) -> tuple[str, ...]:
    """Return the overrides for one GPU or CPU of this machine, with all files in a folder."""
    return (
        f"cluster.device={'cuda' if has_gpu() else 'cpu'}",
        "cluster.ranks_per_node=1",
        *(f"cluster.paths.{name}={folder}" for name in ("data", "model", "logs")),
    )


def schedule(size: Size, steps: int, lr: float, eval_every: int) -> tuple[str, ...]:
    return (
        f"task.training.max_steps={steps}",
        f"recipe.lr={lr}",
        f"recipe.eval_every_samples={eval_every * size.batch}",
        f"data.train_rows={steps * size.batch}",
    )


def begin(*plans: Plan) -> None:
    """Join the process group of one, and make the rows of the plans."""
    start_ranks(plans[0], Rank(rank=0, local_rank=0, world_size=1, master_addr="127.0.0.1", master_port=0))
    for plan in plans:
        prepare_rows_of(plan)


def base_weights(plan: Plan, record: Record) -> Weights:
    """Return the pre-trained weights in BF16."""
    engine = built(plan, SEEDS[0], {})
    learn(engine, SEEDS[0], record, "base", lambda curve: record.keep(base=curve))
    return held(engine)


def trained(plan: Plan, seed: int, record: Record) -> Weights:
    """Return the weights after training from scratch; the record gets the curve."""
    from jobs.engines.megatron import model

    name = f"{plan.config.precision.name}, seed {seed}"
    curves = record.content["curves"][plan.config.precision.name]
    with record.phase(name):
        engine = model.build(plan, seed)
        learn(engine, seed, record, name, lambda curve: curves.update({str(seed): curve}))
        return held(engine)


def adapted(plan: Plan, seed: int, weights: Weights, record: Record) -> Weights:
    """Return the adapters after training; the record gets the curve."""
    from jobs.engines.megatron.lora import is_adapter

    name = plan.config.precision.name
    with record.phase(f"{name}, seed {seed}"):
        engine = built(plan, seed, weights)
        curves = record.content["curves"]
        learn(engine, seed, record, f"{name}, seed {seed}", lambda curve: curves[name].update({str(seed): curve}))
        return {key: tensor for key, tensor in held(engine).items() if is_adapter(key)}


def built(plan: Plan, seed: int, weights: Weights) -> "ModelAndOptimizer":
    """Return the plan's engine with these weights, and with random ones where none is named."""
    from jobs.engines.megatron import model

    engine = model.build(plan, seed)
    (chunk,) = engine.unwrapped_chunks()
    unexpected = chunk.load_state_dict(weights, strict=False).unexpected_keys
    assert not unexpected, unexpected
    engine.optimizer.reset()
    return engine


def held(engine: "ModelAndOptimizer") -> Weights:
    """Return a copy of the weights."""
    from torch import Tensor

    (chunk,) = engine.unwrapped_chunks()
    return {name: x.clone() for name, x in chunk.state_dict().items() if isinstance(x, Tensor)}


def learn(engine: "ModelAndOptimizer", seed: int, record: Record, name: str, keep: Callable[[Curve], None]) -> None:
    """Train as planned; `keep` gets the curve each time that it grows."""
    from jobs.data import rows as rows_of
    from jobs.engines.megatron import loop

    plan, curve, since = engine.plan, Curve(), time.perf_counter()
    max_steps = plan.max_steps
    train_rows, eval_rows, order = (
        rows_of.load(plan, "train"),
        rows_of.load(plan, "eval"),
        rows_of.train_order(plan, seed),
    )
    for step in range(max_steps + 1):
        if step:
            loop.train_step(engine, train_rows, next(order), step)
        if step == 0 or step in plan.evaluation.at_steps:
            curve[step] = finite(loop.evaluate(engine, eval_rows), "evaluation", step)
            keep(curve)
            record.keep()
            now = time.perf_counter()
            left = f", {(now - since) * (max_steps / step - 1):.0f} s left" if step else ""
            record.say(f"{name}: step {step}, evaluation loss {curve[step]:.4f}{left}")


def all_gradients(plans: dict[str, Plan], base: Weights, trained: Weights) -> dict[str, dict[str, Weights]]:
    """Return the adapters' gradients: by what computed them, at which point, of which weight."""
    import torch

    engine = built(plans["fp8 undropped"], SEEDS[0], base)
    random_weights = {name: x for name, x in held(engine).items() if name in trained}
    moved = {name: torch.randn_like(x) * START_B for name, x in random_weights.items() if name.endswith("lora_b")}
    points = {"start": random_weights | moved, "end": trained}
    content = {name: gradients(plans[f"{name} undropped"], base, points) for name in ("fp32", *PRECISIONS)}
    return content | {"rounded": gradients(plans["fp32 undropped"], base | rounded(engine), points)}


def rounded(engine: "ModelAndOptimizer") -> Weights:
    """Return the weights that an FP8 engine multiplies with, in FP32."""
    (chunk,) = engine.unwrapped_chunks()
    linears = {name: part.quantized for name, part in chunk.named_modules() if hasattr(part, "quantized")}
    return {f"{name}.weight": weight.values.float() * weight.scale[:1] for name, weight in linears.items()}


def gradients(plan: Plan, base: Weights, points: dict[str, Weights]) -> dict[str, Weights]:
    """Return the adapters' gradients of one micro-batch in FP32, by point and name."""
    import numpy as np

    from jobs.data import rows as rows_of
    from jobs.engines.megatron import loop

    engine, content = built(plan, SEEDS[0], base), {}
    (wrapped,), (chunk,) = engine.chunks, engine.unwrapped_chunks()
    batch = loop.micro_batch(plan, rows_of.load(plan, "train"), np.arange(plan.batch.micro_batch_size))
    for point, adapters in points.items():
        chunk.load_state_dict(adapters, strict=False)
        wrapped.train()
        wrapped.zero_grad_buffer()
        losses_BS = wrapped(batch.tokens, batch.position_ids, None, labels=batch.labels)
        (batch.summed(losses_BS) / plan.batch.micro_batch_size).backward()
        content[point] = {name: p.main_grad.clone() for name, p in chunk.named_parameters() if p.requires_grad}
    return content


def compared(content: dict[str, dict[str, Weights]], pairs: Pairs = PAIRS) -> list[dict[str, Any]]:
    """Return, for each point and weight, the difference of its gradients: |g - h| / |h| and the cosine."""
    rows = []
    for point, exact in content["fp32"].items():
        for name in exact:
            _, _, layer, _, linear, tensor = name.split(".")
            row = {"point": point, "layer": int(layer), "tensor": f"{linear}.{tensor}"}
            row |= {f"{one}_norm": gradients[point][name].norm().item() for one, gradients in content.items()}
            for one, other in pairs:
                g, h = content[one][point][name], content[other][point][name]
                row[f"{one}_{other}_error"] = ((g - h).norm() / h.norm()).item()
                row[f"{one}_{other}_cosine"] = ((g * h).sum() / (g.norm() * h.norm())).item()
            rows.append(row)
    return rows


def compared_evaluations(curves: dict[str, dict[str, Curve]]) -> list[dict[str, Any]]:
    """Return what the seeds did at each evaluation: mean, least and most of each precision, and how they differ.

    sd is that of the seeds of one precision, from the variances of both.
    """
    rows = []
    for step in next(iter(curves["bf16"].values())):
        losses = {name: [curve[step] for curve in curves[name].values()] for name in PRECISIONS}
        means = {name: fmean(values) for name, values in losses.items()}
        sd = fmean(stdev(values) ** 2 for values in losses.values()) ** 0.5
        rows.append({"step": step, "losses": losses, "difference": means["fp8"] - means["bf16"], "sd": sd} | means)
    return rows


def verdict(curves: dict[str, dict[str, Curve]]) -> dict[str, Any]:
    """Return whether the mean curves differ by less than seeds of one precision do, and whether anything was learned.

    Before training nothing is drawn that counts (B is zero), so that evaluation says nothing about noise.
    """
    before, *rows = compared_evaluations(curves)
    difference, sd = fmean(abs(row["difference"]) for row in rows), fmean(row["sd"] for row in rows)
    fall = {name: before[name] - rows[-1][name] for name in PRECISIONS}
    return {
        "mean_abs_difference": difference,
        "mean_difference": fmean(row["difference"] for row in rows),
        "mean_sd": sd,
        "ratio": difference / sd,
        "num_evaluations": len(rows),
        "num_within_sd": sum(abs(row["difference"]) <= row["sd"] for row in rows),
        "fall": fall,
        "learned": min(fall.values()) > LEARNED * sd,
        "agree": difference <= sd,
    }


def setting(size: Size, base: Plan, weights: Weights) -> dict[str, Any]:
    """Return what was run on what."""
    import megatron.core
    import torch

    on_gpu = has_gpu()
    return {
        "date": date.today().isoformat(),
        "command": shlex.join(["python", *sys.argv]),
        "hardware": torch.cuda.get_device_name() if on_gpu else f"{platform.machine()} CPU, where FP8 is emulated",
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version() if on_gpu else None,
        "megatron_core": megatron.core.__version__,
        "python": platform.python_version(),
        "num_parameters": sum(x.numel() for x in weights.values()),
        **asdict(size),
        "model": model_of(base.config.model),
    }


def report(content: dict[str, Any]) -> str:
    """Return the report in Markdown."""
    s = content["setting"]
    first, *_, last = content["base"].values()
    parts = [
        f"# FP8 against BF16: LoRA on {s['num_parameters']:,} parameters",
        f"{s['hardware']}; torch {s['torch']}, cuDNN {s['cudnn']}, megatron-core {s['megatron_core']}, Python "
        f"{s['python']}; {s['date']}; `{s['command']}`",
        "Model: " + ", ".join(f"{name} {value}" for name, value in s["model"].items()) + ".",
        f"Rows of 96 tokens, {s['batch']} a step. "
        f"Base in BF16: {s['base_steps']} steps at learning rate {s['base_lr']:g}, its "
        f"evaluation loss {first:.3f} → {last:.3f} nats. LoRA (rank 16, alpha 32, dropout 0.1, on qkv and proj): "
        f"{s['steps']} steps at learning rate {s['lr']:g}, clipped at 0.3. n = {len(SEEDS)} seeds.",
        table(["phase", "s"], [[name, f"{seconds:.1f}"] for name, seconds in content["elapsed_s"].items()]),
        "## Evaluation loss, nats",
        curve_table(compared_evaluations(content["curves"])),
        verdict_text(content["verdict"]),
    ]
    for point, title in (
        ("start", f"B random, of sd {START_B:g}, as training starts"),
        ("end", "as BF16 trained them"),
    ):
        parts.append(f"## Gradients g of the adapters, {title}: |g - h| / |h|, and cosine")
        parts.append(gradient_table([row for row in content["gradients"] if row["point"] == point]))
    return "\n\n".join(parts)


def verdict_text(v: dict[str, Any]) -> str:
    """Return the verdict in words."""
    if not v["learned"]:
        verdict = "nothing was learned, so nothing is shown"
    else:
        verdict = "FP8 and BF16 agree within noise" if v["agree"] else "FP8 and BF16 do not agree within noise"
    return (
        f"**Verdict: {verdict}.** Over {v['num_evaluations']} evaluations the means differ by "
        f"{v['mean_abs_difference']:.4f} on average ({v['mean_difference']:+.4f} with the sign), and seeds of one "
        f"precision by {v['mean_sd']:.4f} (sd): a ratio of {v['ratio']:.2f}, where 1 is the limit, and two means of "
        f"{len(SEEDS)} independent runs of one precision would give about {UNRELATED:.2f}. At "
        f"{v['num_within_sd']} of {v['num_evaluations']} evaluations the difference is within "
        f"the sd. The loss fell by {v['fall']['bf16']:.3f} in BF16 and by {v['fall']['fp8']:.3f} in FP8."
    )


def curve_table(rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        cells = [str(row["step"])]
        for name in PRECISIONS:
            cells += [f"{row[name]:.4f}", f"{min(row['losses'][name]):.4f}..{max(row['losses'][name]):.4f}"]
        is_noisy = row["step"] > 0
        cells += [f"{row['difference']:+.4f}", f"{row['sd']:.4f}" if is_noisy else ""]
        cells.append(f"{abs(row['difference']) / row['sd']:.2f}" if is_noisy else "")
        lines.append(cells)
    head = ["step", "BF16 mean", "min..max", "FP8 mean", "min..max", "FP8 - BF16", "sd over seeds", "ratio"]
    return table(head, lines)


def gradient_table(rows: list[dict[str, Any]], pairs: Pairs = PAIRS) -> str:
    keys = [f"{one}_{other}_{what}" for one, other in pairs for what in ("error", "cosine")]

    def cells(row: dict[str, Any]) -> list[str]:
        return [f"{row[key]:.4f}" if key.endswith("error") else f"{row[key]:.5f}" for key in keys]

    lines = [[str(row["layer"]), row["tensor"], f"{row['fp32_norm']:.2e}", *cells(row)] for row in rows]
    worst = {key: (max if key.endswith("error") else min)(row[key] for row in rows) for key in keys}
    lines.append(["median", "", "", *cells({key: median(row[key] for row in rows) for key in keys})])
    lines.append(["worst", "", "", *cells(worst)])
    named = {"fp8": "FP8", "bf16": "BF16", "fp32": "FP32", "rounded": "FP32 of rounded weights"}
    titles = [title for one, other in pairs for title in (f"{named[one]} to {named[other]}", "cosine")]
    return table(["layer", "tensor", "norm, FP32", *titles], lines)


def table(head: list[str], lines: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *lines))


if __name__ == "__main__":
    main()
