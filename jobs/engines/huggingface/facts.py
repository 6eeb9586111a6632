"""What the log says of how a trial was computed: read off the model and its optimizer, not off the settings."""

from typing import Any

import torch

from bench.contract import mllog
from bench.contract.codec import plain
from bench.contract.huggingface import Strategy
from bench.contract.schema import Precision
from jobs.engines import Fact, WarmUpTimes
from jobs.engines.huggingface import adapters, shards
from jobs.engines.huggingface import model as models
from jobs.engines.huggingface.loop import Loop
from jobs.engines.huggingface.packages import settings


def of(loop: Loop, times: list[WarmUpTimes]) -> list[Fact]:
    """Return strategy, attention and BF16 of a loop that has warmed up; all ranks ask together."""
    plan, chosen = loop.plan, settings(loop.plan)
    held = [0] * plan.world.num_ranks
    torch.distributed.all_gather_object(held, shards.num_bytes(loop.placement.model))
    about = plain(chosen) | {"activation_checkpointing": models.is_checkpointed(plan), "rank_bytes": held}
    name = about.pop("strategy")
    found: list[Fact] = [(mllog.STRATEGY, name, {"engine": plan.config.engine.name.name} | about)]
    if times:
        asked = chosen.attention.name
        found.append((mllog.ATTENTION_BACKEND, loop.observed.attention(asked), {"asked": asked}))
    if plan.config.precision is Precision.bf16:
        found.append((mllog.BF16_MODE, chosen.bf16_mode.name, _types(loop)))
    if chosen.compile and times[1:]:
        found.append((mllog.COMPILE_TIME, times[0].step_s - times[-1].step_s, {}))
    return found


def _types(loop: Loop) -> dict[str, Any]:
    """Return the types of what is trained; gradients are those that the update takes."""
    trained = next(iter(adapters.trained(loop.placement.model).values()))
    weights, state = _name(trained.dtype), loop.placement.shards()[0].state
    types = {"weights": weights, "gradients": weights}
    types |= {"master": _name(state["master"].dtype), "moments": _name(state["exp_avg"].dtype)}
    if settings(loop.plan).strategy in (Strategy.fsdp2, Strategy.fsdp2_hybrid):
        types["reduced"] = "bfloat16"
    return types


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
