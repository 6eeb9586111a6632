"""How fast transformers trains the same model on this GPU, as most users would: the ratio's other side.

    python experiments/huggingface_training.py --model llama2_7b [--seq 4096] [--batch 1] [--compile] [--checkpointing]
    python experiments/huggingface_training.py --model llama31_8b --lora 16

Random weights in BF16, AdamW fused with BF16 moments (PEFT's adapters in FP32), SDPA attention, no data loading: one
batch of random tokens. It prints the median of the steps by the GPU's clock, and one line of JSON.
"""

import argparse
import json
import statistics
import warnings
from typing import Any

import torch

from bench.contract import families
from bench.contract.model import Model
from bench.planning import compose


def main() -> None:
    args = arguments()
    warnings.filterwarnings("ignore")
    model = llama(compose.compose(["task=pretrain_tiny", f"model={args.model}"]).config.model)
    if args.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if args.lora:
        model = adapted(model, args.lora)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5, fused=True)
    vocab_size = model.config.vocab_size
    forward = torch.compile(model) if args.compile else model
    times_ms = [step_ms(forward, optimizer, args, vocab_size) for _ in range(args.warm_up + args.steps)]
    times_ms = times_ms[args.warm_up :]
    tokens = args.batch * args.seq
    numbers = {
        "model": args.model,
        "options": {key: value for key, value in vars(args).items() if key != "model"},
        "step_ms": round(statistics.median(times_ms), 2),
        "least_ms": round(min(times_ms), 2),
        "most_ms": round(max(times_ms), 2),
        "n": len(times_ms),
        "tokens_s": round(1000 * tokens / statistics.median(times_ms)),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": __import__("transformers").__version__,
    }
    print(
        f"transformers, {args.model}: {numbers['tokens_s']:,} tokens/s, {numbers['step_ms']} ms per {tokens}-token step"
    )
    print(json.dumps(numbers))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama2_7b", help="of conf/model; a Llama")
    parser.add_argument("--seq", type=int, default=4096, help="tokens of a row")
    parser.add_argument("--batch", type=int, default=1, help="rows of a step")
    parser.add_argument("--steps", type=int, default=10, help="steps that are timed")
    parser.add_argument("--warm-up", type=int, default=3, help="steps before them")
    parser.add_argument("--lora", type=int, metavar="RANK", help="train PEFT's adapters on q, k, v and o instead")
    parser.add_argument("--compile", action="store_true", help="torch.compile the model")
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing")
    return parser.parse_args()


def llama(m: Model) -> Any:
    """Return transformers' Llama with random BF16 weights on the GPU."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **families.of_model(m).config_of(m), attn_implementation="sdpa", use_cache=False, dtype=torch.bfloat16
    )
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        model = LlamaForCausalLM(config)
        torch.set_default_dtype(torch.float32)
    return model.train()


def adapted(model: Any, rank: int) -> Any:
    """Return the model with PEFT's adapters on the projections of attention."""
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.1, target_modules=targets))


def step_ms(model: Any, optimizer: torch.optim.Optimizer, args: argparse.Namespace, vocab_size: int) -> float:
    """Return the milliseconds of one step by the GPU's clock."""
    tokens = torch.randint(vocab_size, (args.batch, args.seq), device="cuda")
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


if __name__ == "__main__":
    main()
