"""HuggingFaceEngine: implements `jobs.engines.Engine` with the functions of this package."""

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from bench.contract import mllog
from bench.contract.codec import plain
from bench.contract.engine import Strategy
from bench.contract.plan_kinds import TrainingPlan
from bench.contract.schema import Precision
from jobs.data.rows import Rows
from jobs.engines import Fact, WarmUpTimes, rank_state
from jobs.engines.huggingface import adapters, folders, placement, training_state, weights
from jobs.engines.huggingface import model as models
from jobs.engines.huggingface.loop import Loop, mean_loss
from jobs.engines.huggingface.packages import settings
from jobs.engines.huggingface.placement import Placement
from jobs.profiles import Profile
from jobs.ranks import process_group
from jobs.weights import checkpoint_writer
from jobs.weights.checkpoint_reader import Reader

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def warm_up_facts(loop: Loop, times: list[WarmUpTimes]) -> list[Fact]:
    """Return log entries on strategy, attention, BF16 and compilation after a warm-up; all ranks call this together."""
    plan, chosen = loop.plan, settings(loop.plan)
    held = [0] * plan.world.num_ranks
    torch.distributed.all_gather_object(held, training_state.weight_bytes(loop.placement.model))
    about = plain(chosen) | {"activation_checkpointing": models.is_checkpointed(plan), "rank_bytes": held}
    name = about.pop("strategy")
    facts: list[Fact] = [(mllog.STRATEGY, name, {"engine": plan.config.engine.name.name} | about)]
    if times:
        requested = chosen.attention.name
        facts.append((mllog.ATTENTION_BACKEND, loop.observed.attention(requested), {"requested": requested}))
    if plan.config.precision is Precision.bf16:
        facts.append((mllog.BF16_MODE, chosen.bf16_mode.name, _dtypes(loop)))
    if chosen.compile and times[1:]:
        facts.append((mllog.COMPILE_TIME, times[0].step_s - times[-1].step_s, {}))
    return facts


def _dtypes(loop: Loop) -> dict[str, Any]:
    """Return the data types of trained weights, of the gradients that the optimizer reads, and of its state."""
    trained = next(iter(adapters.trainable(loop.placement.model).values()))
    weights, state = _name(trained.dtype), loop.placement.shards()[0].state
    types = {"weights": weights, "gradients": weights}
    types |= {"master": _name(state["master"].dtype), "moments": _name(state["exp_avg"].dtype)}
    if settings(loop.plan).strategy in (Strategy.fsdp2, Strategy.fsdp2_hybrid):
        types["reduced"] = "bfloat16"
    return types


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class _Sources:
    """Where the weights of the base and of the adapters come from: a checkpoint, or random numbers."""

    def __init__(self, random: weights.Source) -> None:
        self.base, self.adapters = random, random

    def read(self, name: str, shape: weights.Shape) -> Tensor:
        return (self.adapters if adapters.is_adapter(name) else self.base).read(name, shape)


class _Strategy(Protocol):
    """A module of this package that distributes a model over the ranks."""

    def place(
        self, plan: TrainingPlan, model: "PreTrainedModel", source: weights.Source, device: torch.device
    ) -> Placement: ...


class HuggingFaceEngine:
    """This rank's part of the model and its optimizer; see `jobs.engines.Engine`.

    Weights are allocated when the model is first used: then it is distributed over the ranks.
    """

    def __init__(self, plan: TrainingPlan, seed: int) -> None:
        self.plan, self._seed, self._device = plan, seed, process_group.device()
        self._strategy: _Strategy
        self._seed_all(seed)
        if settings(plan).strategy is Strategy.deepspeed:
            from jobs.engines.huggingface import zero

            self._strategy, self._model = zero, zero.build(plan)
        else:
            self._strategy, self._model = placement, models.build(plan)
        self._sources = _Sources(weights.RandomWeights(plan, seed, self._device))
        self._facts: list[Fact] = []

    @cached_property
    def placement(self) -> Placement:
        """The model, distributed over the ranks by its strategy."""
        placed = self._strategy.place(self.plan, self._model, self._sources, self._device)
        if settings(self.plan).compile:
            for layer in models.layers(placed.model):
                layer.compile()
        return placed

    @cached_property
    def loop(self) -> Loop:
        return Loop(self.plan, self.placement, self._device)

    def load(self, folder: Path, *, adapters: bool) -> None:
        assert "placement" not in self.__dict__, "weights are loaded before the model is placed on the ranks"
        if adapters:
            self._sources.adapters = weights.Adapters(folder, self.plan)
        else:
            self._sources.base = weights.open_folder(folder, self.plan)

    def save(self, folder: Path, *, adapters: bool) -> None:
        (folders.save_adapters if adapters else folders.save_model)(self.plan, self.placement.model, folder)

    def state_bytes(self) -> int:
        return training_state.state_bytes(self.placement.shards())

    def snapshot(self) -> training_state.Snapshot:
        return training_state.take_snapshot(self.plan, self.placement.shards())

    def complete(self, folder: Path, about: dict[str, Any]) -> None:
        checkpoint_writer.complete(folder, about)

    def load_state(self, folder: Path, *, step: int, seed: int, same_layout: bool) -> None:
        reader = Reader(folder)
        training_state.fill(self.placement.model, weights.MasterWeights(reader), self._device, only_trained=True)
        training_state.load(reader, self.placement.shards())
        self.placement.restart(step)
        if same_layout:
            rank_state.restore_generators(reader, rank_state.generators())
        else:
            self._seed_all(seed + step)

    def warm_up(self, iterations: int, seed: int, *, profile: Profile | None) -> WarmUpTimes | None:
        times = self.loop.warm_up(iterations, profile)
        self.placement.restart()
        self._seed_all(seed)
        self._facts = warm_up_facts(self.loop, times)
        return times[-1] if times else None

    def facts(self) -> list[Fact]:
        return self._facts

    def train_step(self, rows: Rows, indices: np.ndarray, step: int) -> Tensor:
        return self.loop.train_step(rows, indices, step)

    def mean_loss(self, share: Tensor) -> float:
        return mean_loss(share, self.plan.batch.global_batch_size, self.plan)

    def evaluate(self, rows: Rows) -> float:
        return self.loop.evaluate(rows)

    def _seed_all(self, seed: int) -> None:
        """Seed this rank's generators; replicas draw different dropout masks."""
        torch.manual_seed(seed + 1000 * torch.distributed.get_rank())
