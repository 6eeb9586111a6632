"""Trains and generates with Qwen3-8B and with Llama-3.1-8B on one GPU, with random weights, and compares their rates.

    python experiments/model_families.py FOLDER [--gpu h200] [--models llama31_8b qwen3_8b] [--rounds 2]

Trained is LoRA in FP8 on rows of 4,096 tokens; generated is one answer at a time in BF16. The runs alternate between
the models. A model's rate is tokens/s times the FLOPs of a token in training, and tokens/s times the bytes of weights
and KV cache that a token needs in generation. The last lines are the rates relative to those of the first model.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

STEPS = 24
MACHINE = (
    *("cluster=local", "cluster.device=cuda", "cluster.ranks_per_node=1", "launch.health=false"),
    "model.weights=random",
)
RUNS = {
    "training": (
        *("task=lora_8b", "precision=fp8", f"task.training.max_steps={STEPS}", "recipe.log_every_steps=2"),
        *("recipe.global_batch_size=8", "recipe.eval_every_samples=192", "recipe.eval_skip=0", "data.eval_rows=8"),
    ),
    "generation": ("task=generate_8b", "precision=bf16", "task.generation.order=one_by_one"),
}
RATES = {"training": "tflops_gpu", "generation": "bandwidth_share"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for the run folders")
    parser.add_argument("--gpu", default="h200", help="of conf/gpu")
    parser.add_argument(
        "--models", nargs="+", default=["llama31_8b", "qwen3_8b"], help="of conf/model; the first is the base"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--kinds", nargs="+", choices=list(RUNS), default=list(RUNS))
    args = parser.parse_args()
    rates: dict[tuple[str, str], list[float]] = {}
    for kind in args.kinds:
        for number in range(args.rounds):
            for model in args.models:
                result = run(kind, model, args.gpu, args.folder / f"{kind}_{model}_{number}")
                rates.setdefault((kind, model), []).append(result[RATES[kind]])
                print(f"{kind} {model} round {number}: {shown(kind, result)}", flush=True)
    for kind in args.kinds:
        base = statistics.fmean(rates[kind, args.models[0]])
        for model in args.models[1:]:
            share = 100 * statistics.fmean(rates[kind, model]) / base
            print(f"{kind}: {model} reaches {share:.1f} % of {args.models[0]}, n = {args.rounds}")


def run(kind: str, model: str, gpu: str, folder: Path) -> dict[str, Any]:
    """Launch a run; return the fields of its result."""
    command = ["-m", "bench.launch", *MACHINE, f"gpu@cluster.gpu={gpu}", *RUNS[kind], f"model={model}"]
    subprocess.run([sys.executable, *command, f"cluster.paths.logs={folder}"], check=False)
    (log,) = folder.rglob("result_0.txt")
    parsed = subprocess.run(
        [sys.executable, "-m", "bench", "parse", "--json", str(log)], check=False, capture_output=True, text=True
    )
    fields: dict[str, Any] = json.loads(parsed.stdout)
    return fields | {one["name"]: one["value"] for one in fields.get("measurements", [])}


def shown(kind: str, result: dict[str, Any]) -> str:
    """Return a run's rate and speed in a few words."""
    names = (RATES[kind], "step_time", "throughput_per_gpu", "peak_memory")
    return ", ".join(f"{name} {result[name]:.4g}" for name in names if isinstance(result.get(name), float))


if __name__ == "__main__":
    main()
