"""Token ids of prompts: from the model's tokenizer, or random with random weights."""

import random
from collections.abc import Sequence
from pathlib import Path

from bench.contract import data_files
from bench.contract.generation import GenerationRequest
from bench.contract.plan_kinds import GenerationPlan
from bench.errors import ConfigError
from jobs.data import tokenizer


class Prompts:
    """The prompts of a plan, equal on every rank and with every engine.

    Raises:
        ConfigError: there is no tokenizer, or it is not the model's.
    """

    def __init__(self, plan: GenerationPlan, seed: int) -> None:
        self._plan, self._seed, self._tokenizer = plan, seed, None
        self.file: Path | None = None
        if any(one.prompt is not None for one in plan.requests):
            place = data_files.tokenizer_place(plan.config, None)
            file = data_files.find_tokenizer(Path(place or "."))
            self._tokenizer, self.file = tokenizer.load(file), file
            data_files.check_vocabulary(file, self._tokenizer.num_ids, plan.config.model.vocab_size)

    def tokens(self, one: GenerationRequest) -> tuple[int, ...]:
        """Return the tokens of a prompt, with BOS if the tokenizer has one.

        Raises:
            ConfigError: prompt and answer do not fit in the model's context.
        """
        model = self._plan.config.model
        if one.prompt is None or self._tokenizer is None:
            generator = random.Random(f"{self._seed} {one.index}")  # noqa: S311 - not for secrets
            return tuple(generator.randrange(model.vocab_size) for _ in range(one.prompt_tokens))
        begin = [] if self._tokenizer.bos is None else [self._tokenizer.bos]
        ids = (*begin, *self._tokenizer.inner.encode(one.prompt, add_special_tokens=False).ids)
        if len(ids) + one.length > model.max_seq_length:
            raise ConfigError(
                f"prompt {one.index} has {len(ids)} tokens and the requested answer {one.length} tokens, but "
                f"{model.name} supports {model.max_seq_length} tokens in total",
                where="task.generation",
                fix="shorten the prompt, or request a shorter answer",
            )
        return ids

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of an answer; empty if prompts are random."""
        return "" if self._tokenizer is None else str(self._tokenizer.inner.decode(list(tokens)))
