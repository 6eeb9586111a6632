"""A generation trial whose second replica omits a token: `python -m tests.helpers.short_answers PLAN --trial K`."""

from collections.abc import Sequence
from dataclasses import replace

from jobs.engines.generation import Answer, Request
from jobs.engines.huggingface.generation import HuggingFaceGenerator
from jobs.ranks.identity import from_environment
from jobs.tasks import generate

_generate = HuggingFaceGenerator.generate


def shortened(self: HuggingFaceGenerator, requests: Sequence[Request], *, seed: int) -> list[Answer]:
    answers = _generate(self, requests, seed=seed)
    if from_environment().rank == 1:
        answers[0] = replace(answers[0], tokens=answers[0].tokens[:-1])
    return answers


if __name__ == "__main__":
    HuggingFaceGenerator.generate = shortened  # type: ignore[method-assign]
    generate.main()
