"""Times one layer on this GPU, forward and backward, for each kind of frozen base, against GEMMs and roofline.

    python experiments/frozen_layer.py [--only NAME] [--programs N …]

Layers of Llama-2-70B, of Llama-3.1-8B and of Qwen3-8B (each in NF4, BF16, FP8), 4096 tokens, LoRA of rank 16 on qkv and
proj. The six layers of Llama took less than 40 s. The weights of NF4 are dequantised twice a step, while other GEMMs
run, by as many programs as --programs says (several: one line each).
"""

import argparse
import time
import warnings
from dataclasses import dataclass, replace

import torch

from bench.contract.plan import Plan
from bench.planning import compose
from bench.planning.estimates.parameters import linear_weights
from jobs.ranks.identity import Rank

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what megatron-core imports is full of deprecated calls
    from jobs.engines.megatron import groups, model
    from jobs.engines.megatron.frozen import nf4_kernels
    from jobs.engines.megatron.frozen.nf4_kernels import dequantize
    from jobs.weights import nf4

TOKENS, LAYERS, STEPS = 4096, 2, 10
"""Two layers, so that the weights of one are dequantised while the other computes."""
MODELS = {"70b": "model=llama2_70b", "8b": "model=llama31_8b", "qwen3": "model=qwen3_8b"}
BASES = {
    "nf4": ("precision=bf16", "task.training.trains=qlora"),
    "bf16": ("precision=bf16",),
    "fp8": ("precision=fp8",),
}
ROOF_TFLOPS = {"nf4": 794.5, "bf16": 794.5, "fp8": 1453.0}
"""The best GEMMs measured on Hopper. Source: ml-engineering's MAMF tables."""
ATTENTION_TFLOPS = 650.0, 520.0
"""Forward and backward, causal."""


@dataclass(frozen=True)
class Timed:
    """Milliseconds of one layer, and its peak memory."""

    forward_ms: float
    backward_ms: float
    peak_gib: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="one layer, such as 70b-nf4")
    parser.add_argument("--programs", type=int, nargs="+", default=[nf4_kernels.PROGRAMS])
    args = parser.parse_args()
    groups.start_ranks(planned("8b", "bf16"), Rank(0, 0, 1, "127.0.0.1", 61999))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {TOKENS} tokens, rank 16 on qkv and proj")
    print(f"{'layer':10}{'forward ms':>12}{'backward ms':>13}{'roof ms':>9}{'ratio':>7}{'GEMMs TFLOP/s':>15}{'GiB':>7}")
    for name in [f"{size}-{base}" for size in MODELS for base in BASES]:
        if args.only in (None, name):
            for nf4_kernels.PROGRAMS in args.programs if name.endswith("nf4") else args.programs[:1]:
                report(name, *name.split("-"))
    for programs in args.programs:
        report_dequantisation(programs)
    groups.end_ranks()


def planned(size: str, base: str) -> Plan:
    """Return the plan of a small model of such layers with random weights."""
    one = ("cluster.device=cuda", "cluster.ranks_per_node=1", f"model.num_layers={LAYERS}", f"data.seq_length={TOKENS}")
    alone = ("recipe.micro_batch_size=1", "task.training.lora.rank=16")
    return replace(compose.compose([MODELS[size], *one, *alone, *BASES[base]]), base=None, base_dir=None)


def report(name: str, size: str, base: str) -> None:
    """Print the line of a layer."""
    plan = planned(size, base)
    timed, m = timed_layer(plan), plan.config.model
    gemms = 2 * TOKENS * linear_weights(m)
    attention = 2 * TOKENS * TOKENS * m.q_size
    attention_ms = attention / 1e9 / ATTENTION_TFLOPS[0] + 2.5 * attention / 1e9 / ATTENTION_TFLOPS[1]
    roof_ms = 2 * gemms / 1e9 / ROOF_TFLOPS[base] + attention_ms
    total_ms = timed.forward_ms + timed.backward_ms
    rate = 2 * gemms / 1e9 / (total_ms - attention_ms)
    label = f"{name} {nf4_kernels.PROGRAMS}" if base == "nf4" else name
    print(
        f"{label:10}{timed.forward_ms:12.3f}{timed.backward_ms:13.3f}{roof_ms:9.3f}{total_ms / roof_ms:7.2f}"
        f"{rate:15.0f}{timed.peak_gib:7.1f}",
        flush=True,
    )


def timed_layer(plan: Plan) -> Timed:
    """Return the median times of a layer in a model of LAYERS."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    parts = model.build(plan, seed=1)
    (chunk,) = parts.unwrapped_chunks()
    chunk.train()
    x = torch.randn(TOKENS, 1, plan.config.model.hidden_size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    freqs = chunk.rotary_pos_emb(TOKENS)
    times = []
    for _ in range(3 + STEPS):
        marks = [now_s()]
        hidden, x.grad = x, None
        for layer in chunk.decoder.layers:
            hidden, _ = layer(hidden, attention_mask=None, rotary_pos_emb=freqs)
        marks.append(now_s())
        hidden.backward(torch.ones_like(hidden))
        marks.append(now_s())
        times.append([1e3 * (end - start) / LAYERS for start, end in zip(marks, marks[1:], strict=False)])
    forward_ms, backward_ms = torch.tensor(times[3:]).median(0).values.tolist()
    return Timed(forward_ms, backward_ms, torch.cuda.max_memory_allocated() / 2**30)


def now_s() -> float:
    """Return the time when the GPU has done what was launched."""
    torch.cuda.synchronize()
    return time.perf_counter()


def report_dequantisation(programs: int) -> None:
    """Print the rate at which the kernel alone dequantises 70B's largest weight, and that of a copy."""
    weight = nf4.quantize(torch.randn(2 * 28672, 8192, device="cuda", dtype=torch.bfloat16))
    out = torch.empty(2 * 28672 * 8192, device="cuda", dtype=torch.bfloat16)
    size = out.numel() * (2 + 4.127 / 8)
    copied = out.clone()
    for name, run, num_bytes in (
        (f"dequantise, {programs} programs", lambda: dequantize(weight, out, programs=programs), size),
        ("copy", lambda: copied.copy_(out), 4 * out.numel()),
    ):
        run()
        start_s = now_s()
        for _ in range(20):
            run()
        seconds = (now_s() - start_s) / 20
        print(f"{name}: {1e3 * seconds:.3f} ms, {num_bytes / seconds / 1e9:.0f} GB/s")


if __name__ == "__main__":
    main()
