"""The FP8 layer with FP32 numbers where FP8 and BF16 ones were: `python -m tests.helpers.exact plan.json --trial 0 | --slope`.

What is then left of the hand-written passes is their algebra, which must be that of autograd to FP32's precision: trained
with, or by the slope of the loss along random directions, with dropout.
"""

import sys
from pathlib import Path

import torch

from jobs.engines.megatron import cpu_patch

cpu_patch.install()  # before what looks for a GPU

from bench.contract import plan as plans  # noqa: E402
from jobs.engines.megatron import groups, model  # noqa: E402
from jobs.engines.megatron.fp8 import layer, linear, quantize, torch_ops  # noqa: E402
from jobs.ranks.identity import from_environment  # noqa: E402
from jobs.tasks import train  # noqa: E402

STEP = 3e-3


def main() -> None:
    cpu_patch.install = lambda: None  # once is enough
    layer.ops, layer.turned = torch_ops, torch_ops.turned
    for module, names in {torch_ops: ("FP8", "BF16"), linear: ("FP8",), quantize: ("FP8",)}.items():
        for name in names:
            setattr(module, name, torch.float32)
    model._dtype = lambda plan: torch.float32
    if sys.argv[2] == "--slope":
        slopes(plans.load(Path(sys.argv[1])))
    else:
        train.main()


def slopes(plan: plans.Plan) -> None:
    """Print, for A and B of each linear, the slope of the loss by its gradient and by two losses along the gradient."""
    groups.start_ranks(plan, from_environment())
    from jobs.data import rows as rows_of
    from jobs.engines.megatron import batches

    layer._seeds = lambda: [11, 12]  # each pass drops the same numbers
    engine = model.build(plan, 1)
    (chunk,) = engine.bare_chunks()
    weights = {name: p for name, p in chunk.named_parameters() if p.requires_grad}
    torch.manual_seed(0)
    for weight in weights.values():
        weight.data.add_(torch.randn_like(weight) / 10)
    batch = batches.micro_batch(plan, rows_of.synthetic(plan), batches.np.arange(plan.batch.micro_batch_size))
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
    groups.end_ranks()


if __name__ == "__main__":
    main()
