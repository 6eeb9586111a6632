"""The frozen layer with FP32 instead of FP8 and BF16: `python -m tests.helpers.exact plan.json --train | --slope`.

What is left of the hand-written passes is then their algebra, which must be that of autograd to FP32's precision. It is
compared by training, and by the slope of the loss along the gradients, with dropout. The head's passes are those that
only large vocabularies have otherwise.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from bench.contract import layers, mllog
from bench.contract import plan as plans
from bench.contract.schema import Precision
from bench.contract.training import Trains
from jobs.engines.megatron.groups import end_ranks, start_ranks
from jobs.ranks.identity import from_environment
from jobs.tasks.train import Loop, train

if TYPE_CHECKING:
    from jobs.engines.megatron.frozen.torch_ops import TorchOps
    from jobs.engines.megatron.model import ModelAndOptimizer
from bench.contract import plan_kinds

STEP = 3e-3


def main() -> None:
    path = Path(sys.argv[1])
    plan, who = plan_kinds.load(path), from_environment()
    trial = plan.trials[0]
    start_ranks(plan, who)
    layers.FP8_HEAD_VOCABULARY = 1
    from jobs.engines.megatron.engine import MegatronEngine

    engine = MegatronEngine(plan, trial.seed, ops=exact_ops(plan))
    if sys.argv[2] == "--slope":
        slopes(engine.parts)
    else:
        engine.load(Path(str(plan.base_dir)), adapters=False)
        train(Loop(plan, engine, trial, mllog.Writer(path.parent / trial.log if who.rank == 0 else None)))
    end_ranks()


def exact_ops(plan: plans.Plan) -> "TorchOps":
    """Return the operations of a plan's frozen layers, with FP32 in the place of FP8 and BF16."""
    import torch

    from jobs.engines.megatron.frozen.torch_ops import TorchOps

    is_fp8, is_nf4 = plan.config.precision is Precision.fp8, plan.config.task.training.trains is Trains.qlora
    return TorchOps(torch.float32 if is_fp8 else None, torch.float32, is_nf4)


def slopes(engine: "ModelAndOptimizer") -> None:
    """Print, for A and B of each linear, the slope of the loss by its gradient and by two losses along the gradient."""
    import torch

    from jobs.data import rows as rows_of
    from jobs.engines.megatron import loop

    (chunk,) = engine.unwrapped_chunks()
    weights = {name: p for name, p in chunk.named_parameters() if p.requires_grad}
    torch.manual_seed(0)
    for weight in weights.values():
        weight.data.add_(torch.randn_like(weight) / 10)
    plan = engine.plan
    batch = loop.micro_batch(plan, rows_of.synthetic(plan), loop.np.arange(plan.batch.micro_batch_size))
    engine.chunks[0].train()

    def loss() -> torch.Tensor:
        torch.manual_seed(1)  # each pass draws the same dropout masks
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


if __name__ == "__main__":
    main()
