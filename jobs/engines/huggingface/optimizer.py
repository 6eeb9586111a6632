"""AdamW with the settings of a plan: torch's, or DeepSpeed's for optimizer states in host memory."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import AdamW, Optimizer

from bench.contract.plan import Plan

MOMENTS = ("exp_avg", "exp_avg_sq")


def adamw(plan: Plan, trained: list[Parameter]) -> AdamW:
    """Return torch's AdamW with weight decay on matrices only. The learning rate is set in every step."""
    r = plan.config.training_recipe
    return AdamW(
        parameter_groups(plan, trained), lr=r.lr, betas=(r.adam_beta1, r.adam_beta2), eps=r.adam_eps, fused=True
    )


def parameter_groups(plan: Plan, trained: list[Parameter]) -> list[dict[str, Any]]:
    """Return the parameters in groups with and without weight decay; empty groups are left out."""
    matrices = [p for p in trained if len(getattr(p, "ds_shape", p.shape)) > 1]
    others = [p for p in trained if len(getattr(p, "ds_shape", p.shape)) <= 1]
    both = ((matrices, plan.config.training_recipe.weight_decay), (others, 0.0))
    return [{"params": params, "weight_decay": decay} for params, decay in both if params]


@torch.no_grad()
def restart(optimizer: Optimizer, updated: Iterable[Tensor], num_steps: int = 0) -> None:
    """Set the step count, and create missing moments; with 0 steps, zero all moments.

    updated: the tensors that the optimizer updates; they are not always in its parameter groups between two steps.
    """
    for parameter in updated:
        state = optimizer.state[parameter]
        for name in MOMENTS:
            if name not in state:
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            elif not num_steps:
                state[name].zero_()
        if isinstance(optimizer, AdamW):
            state["step"] = torch.full((), float(num_steps), device=parameter.device)
        else:
            state["step"] = num_steps


def set_rate(optimizer: Any, lr: float) -> None:
    """Set the learning rate of the next update."""
    for group in optimizer.param_groups:
        group["lr"] = lr
