"""Generate with transformers' `generate`: with its defaults, or with a static cache and a compiled model."""

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
from jobs.engines.huggingface import placement, quantized, training_state, weights
from jobs.engines.huggingface.packages import settings
from jobs.ranks import process_group

PAD = 0
"""Pads the shorter prompts of a batch on the left; the attention mask excludes it."""


class HuggingFaceGenerator:
    """A full replica in this process; see `jobs.engines.generation.Generator`.

    Weights are allocated when the model is first used.
    """

    def __init__(self, plan: GenerationPlan, seed: int) -> None:
        assert plan.config.task.generation is not None
        self._plan, self._task, self._device = plan, plan.config.task.generation, process_group.device()
        self._is_compiled = settings(plan).compile
        self._source: weights.Source = weights.RandomWeights(plan, seed, self._device)
        self._caches: dict[int, StaticCache] = {}
        self._longest, self._compile_s = 0, 0.0

    def load(self, folder: Path) -> None:
        assert "_model" not in self.__dict__, "weights are loaded before the model is built"
        self._source = weights.open_folder(folder, self._plan)

    def warm_up(self, requests: Sequence[Request]) -> None:
        """Generate the first tokens of one batch of each size; a compiled model runs twice, to time the compilation.

        On a GPU a dynamic cache is filled to its full length: attention is set up for each new number of keys, which
        takes 79 ms on an H200 (docs/results/2026-11-23-generation.md).
        """
        self._longest = max(len(one.prompt) + one.length for one in requests)
        is_full_length = self._device.type == "cuda" and not self._is_compiled
        for batch in {len(batch): batch for batch in reversed(self._batches(requests))}.values():
            tokens = self._longest if is_full_length else self._task.warmup_tokens
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
        facts: list[Fact] = [(mllog.STRATEGY, chosen.strategy.name, about)]
        return [*facts, (mllog.COMPILE_TIME, self._compile_s, {})] if self._is_compiled else facts

    def generate(self, requests: Sequence[Request], *, seed: int) -> list[Answer]:
        since_s = time.perf_counter()
        torch.manual_seed(seed)
        answers: dict[int, Answer] = {}
        for batch in self._batches(requests):
            batch_answers = self._generate_batch([one for _, one in batch], since_s)
            answers |= {index: answer for (index, _), answer in zip(batch, batch_answers, strict=True)}
        return [answers[index] for index in range(len(requests))]

    @cached_property
    def _model(self) -> PreTrainedModel:
        """The model with its weights, and without an end-of-sequence token."""
        plan, model = self._plan, models.build_base(self._plan)
        models.cast(model, models.FP32 if plan.weights is WeightPrecision.fp32 else models.BF16)
        if plan.weights is WeightPrecision.nf4:
            quantized.replace_linears(model)
        if settings(plan).strategy is Strategy.balanced and self._device.type == "cuda":
            placement.distribute_layers(plan, model, self._source, self._device)
        else:
            models.allocate(model, self._device)
            training_state.fill(model, self._source, self._device)
        model.generation_config = GenerationConfig()
        return model.eval().requires_grad_(False)

    def _batches(self, requests: Sequence[Request]) -> list[list[tuple[int, Request]]]:
        """Return batches of (index, request), longest first, so that the requests of a batch have similar lengths."""
        most = 1 if self._task.order is Order.one_by_one else self._task.max_batch or len(requests)
        every = sorted(enumerate(requests), key=lambda one: -one[1].length)
        return [every[first : first + most] for first in range(0, len(every), most)]

    def _seconds(self, requests: Sequence[Request]) -> float:
        since_s = time.perf_counter()
        return max(answer.done_s for answer in self._generate_batch(requests, since_s))

    def _generate_batch(self, requests: Sequence[Request], since_s: float) -> list[Answer]:
        """Return the answers of one static batch, which runs until its longest answer is complete."""
        width, clock = max(len(one.prompt) for one in requests), _Clock()
        padded = [(PAD,) * (width - len(one.prompt)) + one.prompt for one in requests]
        masks = [[0] * (width - len(one.prompt)) + [1] * len(one.prompt) for one in requests]
        tokens_BS = torch.tensor(padded, device=self._device)
        output_BS = self._model.generate(
            tokens_BS,
            attention_mask=torch.tensor(masks, device=self._device),
            generation_config=self._settings(max(one.length for one in requests)),
            streamer=clock,
            **self._cache(len(requests)),
        )
        rows, times_s = output_BS[:, width:].tolist(), [moment_s - since_s for moment_s in clock.times_s[1:]]
        return [
            Answer(tuple(row[: one.length]), times_s[0], times_s[min(one.length, len(row)) - 1])
            for one, row in zip(requests, rows, strict=True)
        ]

    def _settings(self, length: int) -> GenerationConfig:
        """Return the settings of `generate`, without an end-of-sequence token: no answer ends early."""
        sampling, is_sampled = self._task.sampling, self._task.sampling.temperature > 0
        options = {"temperature": sampling.temperature, "top_k": sampling.top_k or 0, "top_p": sampling.top_p or 1.0}
        compiled = CompileConfig()
        compiled._compile_all_devices = True
        return GenerationConfig(
            max_new_tokens=length,
            do_sample=is_sampled,
            pad_token_id=PAD,
            compile_config=compiled if self._is_compiled else None,
            **(options if is_sampled else {}),
        )

    def _cache(self, batch_size: int) -> dict[str, Any]:
        """Return the static cache for batches of this size, emptied; {} if transformers chooses the cache."""
        if not self._is_compiled:
            return {}
        if batch_size not in self._caches:
            self._caches[batch_size] = StaticCache(config=self._model.config, max_cache_len=self._longest)
        self._caches[batch_size].reset()
        return {"past_key_values": self._caches[batch_size]}


class _Clock(BaseStreamer):
    """Records when each token of a batch is in host memory. The first call of `put` is for the prompts."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times_s.append(time.perf_counter())

    def end(self) -> None: ...
