"""What a trial of a generation task measured, from its log alone: every answer that was asked for, and its times."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from bench.contract import mllog
from bench.contract.plan import Plan, Trial
from bench.contract.plan_kinds import GenerationPlan, required
from bench.mlperf import compliance, telemetry
from bench.mlperf.log import Log, number
from bench.mlperf.result import Result, differing
from bench.mlperf.speed import Spread, spread
from bench.mlperf.telemetry import Telemetry
from bench.results.measurement import Measurement, of_telemetry

UNITS = {
    "generation_time": "s",
    "time_per_token": "s",
    "generation_throughput": "tokens/s",
    "time_to_first_token": "s",
    "answer_time": "s",
    "time_per_output_token": "s",
    "bandwidth_share": "",
}
"""Of a trial's measurements, by name."""
SLACK_S = 0.05
"""By how much an answer may end behind run_stop by its replica's clock: replicas start when they have met."""
SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """One answer. Times count from when its batch was handed in, start_s from when its replica's clock started."""

    index: int
    replica: int
    prompt_tokens: int
    tokens: int
    start_s: float
    first_s: float
    done_s: float

    @property
    def token_s(self) -> float | None:
        """The time of a token behind the first one; None for an answer of one token."""
        return (self.done_s - self.first_s) / (self.tokens - 1) if self.tokens > 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class OfLength:
    """The answers of one length."""

    length: int
    count: int
    answer_s: float
    """Medians, as the next two."""
    first_s: float
    token_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult:
    """What the log says of the answers that were asked for."""

    result: Result
    asked: tuple[int, ...]
    """New tokens of each answer, by its index."""
    about: dict[str, Any]
    """How they were asked for, as the log has it."""
    engine: dict[str, Any]
    """What gave them, and how it computes, as the log has it; empty where it does not say."""
    answers: tuple[Answered, ...]
    """Those that were given as they were asked for."""
    problems: tuple[str, ...]
    """What keeps the log from proving that the task was done."""
    total_s: float | None
    """From run_start to run_stop."""
    num_gpus: int | None
    """None on CPUs."""
    peak_memory_gib: float | None
    telemetry: Telemetry | None

    @property
    def valid(self) -> bool:
        """Whether every answer was given, with as many tokens as were asked for."""
        return self.result.valid and bool(self.answers) and not self.problems and self.total_s is not None

    @property
    def measurements(self) -> tuple[Measurement, ...]:
        """The whole time first, then rates, and what the GPUs did meanwhile; nothing of a trial that is not valid."""
        return tuple(_measurements(self)) if self.valid else ()

    def differences(self, plan: Plan, trial: Trial) -> list[str]:
        """Return in what the log differs from the planned trial."""
        planned = required(plan, GenerationPlan)
        return [*_other_settings(self, planned, trial), *_other_answers(self, planned)]

    @property
    def tokens(self) -> int:
        return sum(answer.tokens for answer in self.answers)

    @property
    def one_stream_token_s(self) -> float | None:
        """The median time of a token behind the first one, where each replica answers one request at a time."""
        times_s = [one.token_s for one in self.answers if one.token_s is not None]
        return median(times_s) if times_s and self.about.get("order") == "one_by_one" else None

    @property
    def bandwidth_share(self) -> float | None:
        """The bytes that a token of one stream needs, over its time, over the memory bandwidth of the GPU."""
        read, rate_gbs = (number(self.about.get(key)) for key in ("bytes_per_token", "bandwidth_gbs"))
        token_s = self.one_stream_token_s
        return read / token_s / (rate_gbs * 1e9) if read and rate_gbs and token_s else None


def read(log: Log, result: Result) -> GenerationResult:
    """Return what the log of such a task says."""
    asked, strategy = log.single(mllog.ANSWERS_ASKED), log.single(mllog.STRATEGY)
    assert asked is not None, "the table of kinds knows the log by this record"
    lengths = asked.value if isinstance(asked.value, list) else []
    wanted = tuple(length for length in lengths if isinstance(length, int) and length > 0)
    total_min, is_gpu = compliance.minutes(log), log.value("accelerator") not in (None, "cpu")
    total_s = None if not total_min else 60 * total_min
    answers, problems = _judged(log, wanted, total_s)
    if len(wanted) != len(lengths) or not wanted:
        problems = (f"{mllog.ANSWERS_ASKED} does not say how long the answers should be", *problems)
    peak = log.value(mllog.PEAK_MEMORY)
    return GenerationResult(
        result=result,
        asked=wanted,
        about=dict(asked.metadata),
        engine={} if strategy is None else {mllog.STRATEGY: strategy.value, **strategy.metadata},
        answers=answers,
        problems=problems,
        total_s=total_s,
        num_gpus=log.integer(mllog.NUM_GPUS) or log.integer("num_ranks") if is_gpu else None,
        peak_memory_gib=number(peak.get("allocated")) if isinstance(peak, dict) else None,
        telemetry=telemetry.of(log),
    )


def _judged(log: Log, asked: Sequence[int], total_s: float | None) -> tuple[tuple[Answered, ...], tuple[str, ...]]:
    """Return the answers that are as they were asked for, and what is wrong with the others."""
    record = log.single(mllog.ANSWERS)
    rows = record.value if record is not None and isinstance(record.value, list) else []
    found: dict[int, Answered] = {}
    problems = [] if record is not None else [f"the log has {len(log.all(mllog.ANSWERS))} records of its answers"]
    for row in rows:
        one = _answered(row)
        if one is None or one.index in found or one.index >= len(asked):
            problems.append(f"{row!r:.80} is no record of an answer")
            continue
        found[one.index] = one
        if one.tokens != asked[one.index]:
            problems.append(f"answer {one.index} has {one.tokens} tokens, and {asked[one.index]} were asked for")
        elif total_s is not None and one.start_s + one.done_s > total_s + SLACK_S:
            problems.append(
                f"answer {one.index} ended after {one.start_s + one.done_s:.3f} s, and run_stop came at {total_s:.3f}"
            )
    missing = [index for index in range(len(asked)) if index not in found] if record is not None else []
    problems += [f"answer {index} was not given" for index in missing]
    sound = tuple(one for index, one in sorted(found.items()) if one.tokens == asked[index])
    return sound, tuple(problems)


def _answered(row: Any) -> Answered | None:
    """Return the answer of a row; None for one that is damaged."""
    if not isinstance(row, list) or len(row) != len(Answered.__dataclass_fields__):
        return None
    counts, times = row[:4], [number(value) for value in row[4:]]
    if not all(type(count) is int and count >= 0 for count in counts) or any(time_s is None for time_s in times):
        return None
    start_s, first_s, done_s = (float(time_s or 0.0) for time_s in times)
    if not (0 <= start_s < math.inf and 0 < first_s <= done_s < math.inf):
        return None
    index, replica, prompt_tokens, tokens = counts
    return Answered(
        index=index,
        replica=replica,
        prompt_tokens=prompt_tokens,
        tokens=tokens,
        start_s=start_s,
        first_s=first_s,
        done_s=done_s,
    )


def by_length(result: GenerationResult) -> list[OfLength]:
    """Return what answers of each length took, the shortest first."""
    lengths: dict[int, list[Answered]] = {}
    for one in result.answers:
        lengths.setdefault(one.tokens, []).append(one)
    return [_of_length(length, lengths[length]) for length in sorted(lengths)]


def _of_length(length: int, answers: Sequence[Answered]) -> OfLength:
    token_times_s = [one.token_s for one in answers if one.token_s is not None]
    return OfLength(
        length=length,
        count=len(answers),
        answer_s=median(one.done_s for one in answers),
        first_s=median(one.first_s for one in answers),
        token_s=median(token_times_s) if token_times_s else None,
    )


def _other_settings(found: GenerationResult, plan: GenerationPlan, trial: Trial) -> list[str]:
    task = plan.config.task.generation
    assert task is not None
    wanted = {"replicas": plan.world.dp, "tp": plan.world.tp, "weights": plan.weights.name, "order": task.order.name}
    wanted |= {"batching": task.batching.name, "max_batch": task.max_batch, "model": plan.config.model.name}
    wanted |= {name: getattr(task.sampling, name) for name in ("temperature", "top_k", "top_p")}
    pairs = {name: (found.about.get(name), want) for name, want in wanted.items()}
    pairs["seed"] = (found.result.seed, trial.seed)
    start = mllog.RANDOM if plan.base_dir is None else "checkpoint"
    pairs[mllog.INITIAL_WEIGHTS] = (found.result.hyperparameters.get(mllog.INITIAL_WEIGHTS), start)
    return differing(pairs)


def _other_answers(found: GenerationResult, plan: GenerationPlan) -> Iterator[str]:
    if list(found.asked) != [one.length for one in plan.asked]:
        yield "the lengths of its answers are not those of the plan"
    replica_of = {one.index: one.replica for one in plan.asked}
    others = [one.index for one in found.answers if replica_of.get(one.index) != one.replica]
    yield from (f"answer {index} was given by another replica" for index in others[:1])


def _measurements(result: GenerationResult) -> Iterator[Measurement]:
    assert result.total_s is not None
    rate = result.tokens / result.total_s
    yield Measurement(name="generation_time", unit="s", value=result.total_s)
    yield Measurement(name="time_per_token", unit="s", value=result.total_s / result.tokens)
    yield Measurement(name="generation_throughput", unit="tokens/s", value=rate)
    if result.num_gpus:
        yield Measurement(name="throughput_per_gpu", unit="tokens/s/GPU", value=rate / result.num_gpus)
    yield from _spread("time_to_first_token", spread([one.first_s for one in result.answers]))
    yield from _spread("answer_time", spread([one.done_s for one in result.answers]))
    token_times_s = [one.token_s for one in result.answers if one.token_s is not None]
    yield from _spread("time_per_output_token", spread(token_times_s))
    if result.bandwidth_share is not None:
        yield Measurement(name="bandwidth_share", unit="", value=result.bandwidth_share)
    for one in by_length(result):
        name = f"answer_time of {one.length} tokens"
        yield Measurement(name=name, unit="s", value=one.answer_s, n=one.count)
    if result.peak_memory_gib is not None:
        yield Measurement(name="peak_memory", unit="GiB", value=result.peak_memory_gib)
    if result.telemetry is not None:
        yield from of_telemetry(result.telemetry)


def _spread(name: str, values: Spread | None) -> Iterator[Measurement]:
    if values is not None:
        yield Measurement(name=name, unit="s", value=values.median, n=values.count, p10=values.p10, p90=values.p90)
