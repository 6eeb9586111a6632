"""The token ids of prompts: by the model's own tokenizer, or drawn at random where its weights are."""

import random
from collections.abc import Sequence
from pathlib import Path

from bench.contract import data_files
from bench.contract.generation import Asked
from bench.contract.plan_kinds import GenerationPlan
from bench.errors import ConfigError
from jobs.data import tokenizer


class Prompts:
    """The prompts of a plan, the same on every rank and with every engine.

    Raises:
        ConfigError: there is no tokenizer, or it is not the model's.
    """

    def __init__(self, plan: GenerationPlan, seed: int) -> None:
        self._plan, self._seed, self._tokenizer = plan, seed, None
        if any(one.prompt is not None for one in plan.asked):
            place = data_files.tokenizer_place(plan.config, None)
            file = data_files.find_tokenizer(Path(place or "."))
            self._tokenizer = tokenizer.load(file)
            data_files.check_vocabulary(file, self._tokenizer.num_ids, plan.config.model.vocab_size)

    def tokens(self, one: Asked) -> tuple[int, ...]:
        """Return the tokens of a prompt, behind the one that begins a text.

        Raises:
            ConfigError: it does not go into the model's context with its answer.
        """
        model = self._plan.config.model
        if one.prompt is None or self._tokenizer is None:
            drawn = random.Random(f"{self._seed} {one.index}")  # noqa: S311 - of tokens, not of secrets
            return tuple(drawn.randrange(model.vocab_size) for _ in range(one.prompt_tokens))
        begin = [] if self._tokenizer.bos is None else [self._tokenizer.bos]
        found = (*begin, *self._tokenizer.inner.encode(one.prompt, add_special_tokens=False).ids)
        if len(found) + one.length > model.max_seq_length:
            raise ConfigError(
                f"prompt {one.index} has {len(found)} tokens, its answer {one.length}, and {model.name} takes "
                f"{model.max_seq_length}",
                where="task.generation",
                fix="shorten the prompt, or ask for a shorter answer",
            )
        return found

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of an answer; nothing where prompts are random."""
        return "" if self._tokenizer is None else str(self._tokenizer.inner.decode(list(tokens)))
