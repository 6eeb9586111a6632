"""Answer requests with transformers' `generate`: as it comes, or with a static cache and a compiled model."""

import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import CompileConfig, GenerationConfig, PreTrainedModel, StaticCache
from transformers.generation import BaseStreamer

from bench.contract import mllog
from bench.contract.engine import Strategy
from bench.contract.generation import Order, WeightPrecision
from bench.contract.plan_kinds import GenerationPlan
from jobs.engines import Fact
from jobs.engines.generation import Answer, Request
from jobs.engines.huggingface import model as models
from jobs.engines.huggingface import placement, training_state, weights
from jobs.engines.huggingface.packages import settings
from jobs.ranks import process_group

PAD = 0
"""Stands before the shorter prompts of a batch; the attention mask leaves it out."""


class HuggingFaceGenerator:
    """A whole replica in this process; see `jobs.engines.generation.Generator`.

    Weights that were drawn or loaded take memory when the model is first used.
    """

    def __init__(self, plan: GenerationPlan, seed: int) -> None:
        assert plan.config.task.generation is not None
        self._plan, self._task, self._device = plan, plan.config.task.generation, process_group.device()
        self._is_compiled = settings(plan).compile
        self._source: weights.Source = weights.Drawn(plan, seed, self._device)
        self._caches: dict[int, StaticCache] = {}
        self._longest, self._compile_s = 0, 0.0

    def load(self, folder: Path) -> None:
        assert "_model" not in self.__dict__, "weights are loaded before the model is made"
        self._source = weights.of_folder(folder, self._plan)

    def warm_up(self, requests: Sequence[Request]) -> None:
        """Answer the first tokens of a batch of each size; what is compiled runs twice, to tell how long that took.

        On a GPU a cache that grows is taken to its full length: attention is prepared anew for each length of keys,
        79 ms each on an H200 (docs/results/2026-11-23-generation.md).
        """
        self._longest = max(len(one.prompt) + one.length for one in requests)
        is_whole = self._device.type == "cuda" and not self._is_compiled
        for batch in {len(batch): batch for batch in reversed(self._batches(requests))}.values():
            tokens = self._longest if is_whole else self._task.warmup_tokens
            first = [Request(one.prompt, min(one.length, tokens)) for _, one in batch]
            first_s = self._seconds(first)
            if self._is_compiled:
                self._compile_s += max(0.0, first_s - self._seconds(first))

    def facts(self) -> list[Fact]:
        chosen, weight = settings(self._plan), next(self._model.parameters())
        about = {
            "engine": self._plan.config.engine.name.name,
            "attention": chosen.attention.name,
            "compile": self._is_compiled,
            "cache": "static" if self._is_compiled else "dynamic",
            "dtype": str(weight.dtype).removeprefix("torch."),
        }
        found: list[Fact] = [(mllog.STRATEGY, chosen.strategy.name, about)]
        return [*found, (mllog.COMPILE_TIME, self._compile_s, {})] if self._is_compiled else found

    def generate(self, requests: Sequence[Request], *, seed: int) -> list[Answer]:
        since_s = time.perf_counter()
        torch.manual_seed(seed)
        answers: dict[int, Answer] = {}
        for batch in self._batches(requests):
            found = self._answered([one for _, one in batch], since_s)
            answers |= {index: answer for (index, _), answer in zip(batch, found, strict=True)}
        return [answers[index] for index in range(len(requests))]

    @cached_property
    def _model(self) -> PreTrainedModel:
        """The model with its weights, which knows no token that ends an answer."""
        plan, model = self._plan, models.bare(self._plan)
        models.cast(model, models.FP32 if plan.weights is WeightPrecision.fp32 else models.BF16)
        if plan.weights is WeightPrecision.nf4:
            models.replace_linears(model)
        if settings(plan).strategy is Strategy.balanced and self._device.type == "cuda":
            placement.spread(plan, model, self._source, self._device)
        else:
            models.give_memory(model, self._device)
            training_state.fill(model, self._source, self._device)
        model.generation_config = GenerationConfig()
        return model.eval().requires_grad_(False)

    def _batches(self, requests: Sequence[Request]) -> list[list[tuple[int, Request]]]:
        """Return the requests with their places, cut into batches; with the longest first, those of one are alike."""
        most = 1 if self._task.order is Order.one_by_one else self._task.max_batch or len(requests)
        every = sorted(enumerate(requests), key=lambda one: -one[1].length)
        return [every[first : first + most] for first in range(0, len(every), most)]

    def _seconds(self, requests: Sequence[Request]) -> float:
        since_s = time.perf_counter()
        return max(answer.done_s for answer in self._answered(requests, since_s))

    def _answered(self, requests: Sequence[Request], since_s: float) -> list[Answer]:
        """Return the answers of one static batch, which goes on until its longest is done."""
        width, clock = max(len(one.prompt) for one in requests), _Clock()
        padded = [(PAD,) * (width - len(one.prompt)) + one.prompt for one in requests]
        masks = [[0] * (width - len(one.prompt)) + [1] * len(one.prompt) for one in requests]
        tokens_BS = torch.tensor(padded, device=self._device)
        made_BS = self._model.generate(
            tokens_BS,
            attention_mask=torch.tensor(masks, device=self._device),
            generation_config=self._settings(max(one.length for one in requests)),
            streamer=clock,
            **self._cache(len(requests)),
        )
        rows, times_s = made_BS[:, width:].tolist(), [moment_s - since_s for moment_s in clock.times_s[1:]]
        return [
            Answer(tuple(row[: one.length]), times_s[0], times_s[min(one.length, len(row)) - 1])
            for one, row in zip(requests, rows, strict=True)
        ]

    def _settings(self, length: int) -> GenerationConfig:
        """Return what `generate` is told; a token that ends an answer is not named, so that none ends one early."""
        sampling, is_drawn = self._task.sampling, self._task.sampling.temperature > 0
        drawn = {"temperature": sampling.temperature, "top_k": sampling.top_k or 0, "top_p": sampling.top_p or 1.0}
        compiled = CompileConfig()
        compiled._compile_all_devices = True
        return GenerationConfig(
            max_new_tokens=length,
            do_sample=is_drawn,
            pad_token_id=PAD,
            compile_config=compiled if self._is_compiled else None,
            **(drawn if is_drawn else {}),
        )

    def _cache(self, batch_size: int) -> dict[str, Any]:
        """Return the static cache of batches of this size, emptied; nothing where transformers chooses one."""
        if not self._is_compiled:
            return {}
        if batch_size not in self._caches:
            self._caches[batch_size] = StaticCache(config=self._model.config, max_cache_len=self._longest)
        self._caches[batch_size].reset()
        return {"past_key_values": self._caches[batch_size]}


class _Clock(BaseStreamer):
    """Notes when each token of a batch is in host memory; `generate` hands in the prompts first."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times_s.append(time.perf_counter())

    def end(self) -> None: ...
