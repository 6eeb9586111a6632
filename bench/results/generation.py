"""The result of a generation trial, from its log: every requested answer, and its times."""

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
from bench.results.cost import with_costs
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
"""The units of the measurements, by name."""
SLACK_S = 0.05
"""How much later than run_stop an answer may end by the clock of its replica, since replicas start after a barrier."""
SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """One answer. Times count from the submission of its batch, start_s from the start of its replica's clock."""

    index: int
    replica: int
    prompt_tokens: int
    tokens: int
    start_s: float
    first_s: float
    done_s: float

    @property
    def token_s(self) -> float | None:
        """The time per token after the first one; None for an answer of one token."""
        return (self.done_s - self.first_s) / (self.tokens - 1) if self.tokens > 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class OfLength:
    """The answers of one length."""

    length: int
    count: int
    answer_s: float
    """The median, as of the next two."""
    first_s: float
    token_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult:
    """The result of a generation trial."""

    result: Result
    requested_lengths: tuple[int, ...]
    """The requested number of new tokens of each answer, by index."""
    about: dict[str, Any]
    """The metadata of the request in the log."""
    engine: dict[str, Any]
    """Engine and strategy in the log; empty if they are not logged."""
    answers: tuple[Answered, ...]
    """The answers with the requested number of tokens."""
    problems: tuple[str, ...]
    """Why the trial is not valid, in addition to the findings of the log."""
    total_s: float | None
    """From run_start to run_stop."""
    num_gpus: int | None
    """None on CPUs."""
    peak_memory_gib: float | None
    telemetry: Telemetry | None

    @property
    def valid(self) -> bool:
        """Whether every answer has the requested number of tokens."""
        return self.result.valid and bool(self.answers) and not self.problems and self.total_s is not None

    @property
    def measurements(self) -> tuple[Measurement, ...]:
        """The whole time first, then rates, and what the GPUs did meanwhile; nothing of a trial that is not valid."""
        return with_costs(_measurements(self), self.result) if self.valid else ()

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
    """Return the result of a generation log."""
    request, strategy = log.single(mllog.ANSWERS_REQUESTED), log.single(mllog.STRATEGY)
    assert request is not None, "the kind of a log is identified by this record"
    lengths = request.value if isinstance(request.value, list) else []
    requested = tuple(length for length in lengths if isinstance(length, int) and length > 0)
    total_min, is_gpu = compliance.minutes(log), log.value("accelerator") not in (None, "cpu")
    total_s = None if not total_min else 60 * total_min
    answers, problems = _judged(log, requested, total_s)
    if len(requested) != len(lengths) or not requested:
        problems = (f"{mllog.ANSWERS_REQUESTED} does not list the requested lengths of the answers", *problems)
    peak = log.value(mllog.PEAK_MEMORY)
    return GenerationResult(
        result=result,
        requested_lengths=requested,
        about=dict(request.metadata),
        engine={} if strategy is None else {mllog.STRATEGY: strategy.value, **strategy.metadata},
        answers=answers,
        problems=problems,
        total_s=total_s,
        num_gpus=log.integer(mllog.NUM_GPUS) or log.integer("num_ranks") if is_gpu else None,
        peak_memory_gib=number(peak.get("allocated")) if isinstance(peak, dict) else None,
        telemetry=telemetry.read(log),
    )


def _judged(log: Log, requested: Sequence[int], total_s: float | None) -> tuple[tuple[Answered, ...], tuple[str, ...]]:
    """Return the answers with the requested length, and the problems of the others."""
    record = log.single(mllog.ANSWERS)
    rows = record.value if record is not None and isinstance(record.value, list) else []
    by_index: dict[int, Answered] = {}
    problems = (
        []
        if record is not None
        else [f"the log has {len(log.all(mllog.ANSWERS))} records {mllog.ANSWERS}, but must have one"]
    )
    for row in rows:
        one = _answered(row)
        if one is None or one.index in by_index or one.index >= len(requested):
            problems.append(f"the record of an answer is not valid: {row!r:.80}")
            continue
        by_index[one.index] = one
        if one.tokens != requested[one.index]:
            problems.append(f"answer {one.index} has {one.tokens} tokens, but {requested[one.index]} were requested")
        elif total_s is not None and one.start_s + one.done_s > total_s + SLACK_S:
            problems.append(
                f"answer {one.index} ended at {one.start_s + one.done_s:.3f} s, after run_stop at {total_s:.3f} s"
            )
    missing = [index for index in range(len(requested)) if index not in by_index] if record is not None else []
    problems += [f"answer {index} is missing" for index in missing]
    sound = tuple(one for index, one in sorted(by_index.items()) if one.tokens == requested[index])
    return sound, tuple(problems)


def _answered(row: Any) -> Answered | None:
    """Return the answer of a row; None if the row is damaged."""
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
    """Return the times of the answers by length, the shortest first."""
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


def _other_settings(result: GenerationResult, plan: GenerationPlan, trial: Trial) -> list[str]:
    task = plan.config.task.generation
    assert task is not None
    planned = {"replicas": plan.world.dp, "tp": plan.world.tp, "weights": plan.weights.name, "order": task.order.name}
    planned |= {"batching": task.batching.name, "max_batch": task.max_batch, "model": plan.config.model.name}
    planned |= {name: getattr(task.sampling, name) for name in ("temperature", "top_k", "top_p")}
    pairs = {name: (result.about.get(name), value) for name, value in planned.items()}
    pairs["seed"] = (result.result.seed, trial.seed)
    start = mllog.RANDOM if plan.base_dir is None else "checkpoint"
    pairs[mllog.INITIAL_WEIGHTS] = (result.result.hyperparameters.get(mllog.INITIAL_WEIGHTS), start)
    return differing(pairs)


def _other_answers(result: GenerationResult, plan: GenerationPlan) -> Iterator[str]:
    if list(result.requested_lengths) != [one.length for one in plan.requests]:
        yield "the requested lengths of the answers differ from the plan"
    replica_of = {one.index: one.replica for one in plan.requests}
    others = [one.index for one in result.answers if replica_of.get(one.index) != one.replica]
    yield from (f"answer {index} comes from another replica than in the plan" for index in others[:1])


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
