"""Sample the lengths of the requests of a serving task: from a file of pairs, or from two lognormal distributions."""

import csv
import hashlib
import io
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.contract.schema import Config
from bench.contract.serving import Lengths, LogNormal, RequestLengths, SampledLengths
from bench.errors import ConfigError
from bench.planning.text_files import TextFile

PROMPT, ANSWER = "prompt_tokens", "answer_tokens"
"""The keys of a pair."""
MOST_SAMPLED = 50_000
"""Limit for the requests of all trials together: the plan contains their lengths, and a batch script the plan."""
WHERE = "task.serving.lengths"
FIX = (
    f'write one JSON object per line into a .jsonl file, such as {{"{PROMPT}": 512, "{ANSWER}": 64}}, or a .csv file '
    f"with the header {PROMPT},{ANSWER}"
)
FILE = TextFile(
    name="file of lengths", setting=f"{WHERE}.file", max_bytes=16 * 2**20, shorten="use fewer pairs", fix=FIX
)

Pair = tuple[int, int]


def check(lengths: Lengths, config: Config) -> None:
    """Raise ConfigError for settings from which no lengths can be sampled; `sampled` checks the pairs of a file."""
    serving, context = config.task.serving, config.model.max_seq_length
    assert serving is not None
    if serving.requests * config.trials > MOST_SAMPLED:
        raise ConfigError(
            f"task.serving.requests x trials is {serving.requests * config.trials:,}, but a plan can contain the "
            f"lengths of at most {MOST_SAMPLED:,} requests",
            where=f"task.serving.requests, trials, {WHERE}",
            fix="lower task.serving.requests or trials",
        )
    distributions = {"prompt": lengths.prompt, "answer": lengths.answer}
    if lengths.file is not None:
        if any(one.is_set for one in distributions.values()):
            raise ConfigError(
                "a file of lengths and a distribution of lengths are set, but only one of the two can be used",
                where=WHERE,
                fix=f"set either {WHERE}.file, or {WHERE}.prompt and {WHERE}.answer",
            )
        return
    total = 0
    for name, one in distributions.items():
        if unset := [key for key in ("mean", "sigma", "min", "max") if getattr(one, key) is None]:
            raise ConfigError(
                f"{WHERE}.{name} needs mean, sigma, min and max, but these keys are not set: {', '.join(unset)}",
                where=f"{WHERE}.{name}",
                fix=f"set all four keys, such as {WHERE}.{name}={{mean:200,sigma:1,min:4,max:{context // 2}}}",
            )
        total += _checked(one, f"{WHERE}.{name}").highest
    fix = f"lower {WHERE}.prompt.max or {WHERE}.answer.max"
    _check_context(total, config, "the longest possible request", fix)


def _check_context(total: int, config: Config, request: str, fix: str) -> None:
    max_tokens = config.model.max_seq_length
    if total > max_tokens:
        raise ConfigError(
            f"{request} has {total:,} tokens, but {config.model.name} supports only {max_tokens:,} tokens",
            where=WHERE,
            fix=f"{fix}: a prompt and its answer may have {max_tokens:,} tokens together",
        )


@dataclass(frozen=True, slots=True)
class _Stated:
    """A distribution with all of its numbers."""

    mean: float
    sigma: float
    lowest: int
    highest: int

    def sampled(self, generator: random.Random) -> int:
        """Sample a number of tokens. The mean of a lognormal distribution is exp(mu + sigma^2 / 2)."""
        value = generator.lognormvariate(math.log(self.mean) - self.sigma**2 / 2, self.sigma)
        return round(min(self.highest, max(self.lowest, value)))


def _stated(one: LogNormal) -> _Stated:
    assert one.mean is not None and one.sigma is not None and one.min is not None and one.max is not None
    return _Stated(one.mean, one.sigma, one.min, one.max)


def _checked(one: LogNormal, where: str) -> _Stated:
    stated = _stated(one)
    lowest, highest = stated.lowest, stated.highest
    if not 1 <= lowest <= highest:
        raise ConfigError(
            f"min is {lowest:,} and max is {highest:,}, but the limits must satisfy 1 <= min <= max",
            where=f"{where}.min, {where}.max",
            fix="set limits such as min=4 and max=1024",
        )
    if not lowest <= stated.mean <= highest:
        raise ConfigError(
            f"mean is {stated.mean:g}, but must be from min to max, which is {lowest:,} to {highest:,}",
            where=f"{where}.mean",
            fix="change mean, or change min and max",
        )
    if not 0 <= stated.sigma <= 10:
        raise ConfigError(
            f"sigma is {stated.sigma:g}, but must be from 0 to 10",
            where=f"{where}.sigma",
            fix="set sigma to the standard deviation of the logarithm of the lengths, such as 1",
        )
    return stated


def sampled(config: Config, seeds: Sequence[int]) -> SampledLengths | None:
    """Return the lengths of the requests of each trial; None if all requests have the same.

    They depend only on the seed, the file or the distributions, and the position of the request. So all loads of a
    trial, and all runs with the same seed, have the same lengths, and fewer requests have the first of these lengths.

    Raises:
        ConfigError: the file of pairs cannot be read, or one of its pairs is not valid or too long for the model.
    """
    serving = config.task.serving
    assert serving is not None
    lengths = serving.lengths
    if not lengths.vary:
        return None
    pairs, sha256 = ([], None) if lengths.file is None else _pairs(Path(lengths.file))
    for number, pair in enumerate(pairs, start=1):
        _check_context(sum(pair), config, f"pair {number} of {lengths.file}", "remove pairs that are too long")
    return SampledLengths(sha256=sha256, trials=[_of_trial(lengths, pairs, serving.requests, seed) for seed in seeds])


def _of_trial(lengths: Lengths, pairs: list[Pair], count: int, seed: int) -> RequestLengths:
    generator = random.Random(seed)
    if pairs:
        chosen = [pairs[generator.randrange(len(pairs))] for _ in range(count)]
    else:
        prompt, answer = _stated(lengths.prompt), _stated(lengths.answer)
        chosen = [(prompt.sampled(generator), answer.sampled(generator)) for _ in range(count)]
    return RequestLengths(tokens_in=[prompt for prompt, _ in chosen], tokens_out=[answer for _, answer in chosen])


def _pairs(path: Path) -> tuple[list[Pair], str]:
    """Return the pairs of a file and its SHA-256."""
    text, content = FILE.read(path)
    if path.suffix not in (".jsonl", ".csv"):
        raise ConfigError(
            f"the name of the file of lengths ends in {path.suffix!r}, but must end in .jsonl or .csv",
            where=str(path),
            fix=FIX,
        )
    records = _json_lines(text, path) if path.suffix == ".jsonl" else _csv_rows(text, path)
    pairs = [(_count(one, PROMPT, where), _count(one, ANSWER, where)) for one, where in records]
    if not pairs:
        raise ConfigError("the file contains no lengths of prompts and answers", where=str(path), fix=FIX)
    return pairs, hashlib.sha256(content).hexdigest()


def _json_lines(text: str, path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    for record, where in FILE.json_lines(text, path):
        if not isinstance(record, dict):
            raise ConfigError(f"the line must be a JSON object, but is {record!r:.60}", where=where, fix=FIX)
        yield record, where


def _csv_rows(text: str, path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    rows = csv.DictReader(io.StringIO(text, newline=""))
    try:
        for row in rows:
            yield ({key: _as_number(value) for key, value in row.items()}, f"{path}, line {rows.line_num}")
    except csv.Error as error:
        raise ConfigError(
            f"the file is not valid CSV: {error}", where=f"{path}, line {rows.line_num}", fix=FIX
        ) from error


def _as_number(text: Any) -> Any:
    digits = text.strip() if isinstance(text, str) else ""
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 19 else text


def _count(record: dict[str, Any], key: str, where: str) -> int:
    if key not in record:
        raise ConfigError(f"{key} is missing", where=where, fix=FIX)
    value = record[key]
    if type(value) is not int or value < 1:
        raise ConfigError(
            f"{key} is {value!r:.60}, but must be a whole number of tokens, at least 1", where=where, fix=FIX
        )
    return value
