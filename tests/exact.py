"""The FP8 layer with FP32 numbers where FP8 and BF16 ones were: `python -m tests.exact plan.json --trial 0 | --slope`.

What is then left of the hand-written passes is their algebra, which must be that of autograd to FP32's precision: trained
with, or by the slope of the loss along random directions, with dropout.
"""

import sys
from pathlib import Path

import torch

from jobs.megatron import cpu

cpu.install()  # before what looks for a GPU

from bench import plan as planning  # noqa: E402
from jobs import train  # noqa: E402
from jobs.megatron import model  # noqa: E402
from jobs.megatron.fp8 import layer, linear, quantized, reference  # noqa: E402
from jobs.rank import from_environment  # noqa: E402

STEP = 3e-3


def main() -> None:
    cpu.install = lambda: None  # once is enough
    layer.ops, layer.turned = reference, reference.turned
    for module, names in {reference: ("FP8", "BF16"), linear: ("FP8",), quantized: ("FP8",)}.items():
        for name in names:
            setattr(module, name, torch.float32)
    model._dtype = lambda plan: torch.float32
    if sys.argv[2] == "--slope":
        slopes(planning.load(Path(sys.argv[1])))
    else:
        train.main()


def slopes(plan: planning.Plan) -> None:
    """Print, for A and B of each linear, the slope of the loss by its gradient and by two losses along the gradient."""
    train.start_ranks(plan, from_environment())
    from jobs.megatron import data

    layer._seeds = lambda: [11, 12]  # each pass drops the same numbers
    engine = model.build(plan, 1)
    (chunk,) = engine.bare_chunks()
    weights = {name: p for name, p in chunk.named_parameters() if p.requires_grad}
    torch.manual_seed(0)
    for weight in weights.values():
        weight.data.add_(torch.randn_like(weight) / 10)
    batch = data.micro_batch(plan, data.synthetic(plan), data.np.arange(plan.batch.micro_batch_size))
    engine.chunks[0].train()

    def loss() -> torch.Tensor:
        return chunk(batch.tokens, batch.position_ids, None, labels=batch.labels).mean()

    loss().backward()
    gradients = {name: p.main_grad.clone() for name, p in weights.items()}
    for kind in ("linear_qkv.lora_a", "linear_qkv.lora_b", "linear_proj.lora_a", "linear_proj.lora_b"):
        chosen = [name for name in weights if name.endswith(kind)]
        norm = torch.stack([gradients[name].square().sum() for name in chosen]).sum().sqrt()
        losses = []
        with torch.no_grad():
            for sign in (STEP, -2 * STEP, STEP):
                for name in chosen:
                    weights[name].add_(gradients[name] / norm, alpha=sign)
                losses.append(loss().item())
        print("slope", kind, norm.item(), (losses[0] - losses[1]) / (2 * STEP))
    train.end_ranks()


if __name__ == "__main__":
    main()
