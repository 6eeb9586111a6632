"""The result of a serving trial, from its log: the latencies and rates of each load, and whether they are valid."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from statistics import fmean
from typing import Any

from bench.contract import codec, mllog
from bench.contract.plan import Plan, Trial
from bench.contract.plan_kinds import ServingPlan, required
from bench.contract.server_times import ServerTimes, parsed
from bench.contract.serving import Arrivals, LatencyLimits, Load
from bench.mlperf.log import Log, finding, number
from bench.mlperf.reader import Event, is_number
from bench.mlperf.result import Result, differing
from bench.results import server_times
from bench.results.cost import with_costs
from bench.results.imported import Summary
from bench.results.measurement import NOTHING_MEASURED, Distribution, Measurement
from bench.rules.finding import Finding, errors

OK = "ok"
"""The status of a request whose answer has the requested length."""
BUNCHED_SHARE, CHUNKS_PER_TOKEN = 0.1, 0.9
"""Token times are not reported above this share of chunks that arrive with the previous one, and below this number of
chunks per token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """The result of one load; times are in seconds, one for each request in order of arrival."""

    load: Load
    arrival_s: tuple[float, ...]
    latency_s: tuple[float | None, ...]
    """From arrival to the last token; None for a request that failed."""
    ttft_s: tuple[float | None, ...]
    tpot_s: tuple[float | None, ...]
    tokens_out: tuple[int | None, ...]
    status: tuple[str, ...]
    details: tuple[str, ...]
    """Messages of some of the failures."""
    together: float | None
    """The share of chunks that arrived with the previous one."""
    chunks_per_token: float | None
    client_s: Mapping[str, float]
    """The client overhead, by name of the statistic."""
    validity: str
    """loadgen's verdict: VALID or INVALID."""
    reason: str
    """loadgen's reason for INVALID."""
    limits: LatencyLimits
    max_client_delay: float
    line: int

    @property
    def num_failed(self) -> int:
        return sum(one != OK for one in self.status)

    @property
    def no_token_times(self) -> str:
        """Why token times are not reported; empty if they are."""
        if self.load.batched_tokens:
            return "this server always sends several tokens per chunk"
        share = self._client_share(self.ttft_s)
        if share is not None and share > self.max_client_delay:
            return f"the client overhead is {100 * share:.0f} % of the TTFT"
        if self.chunks_per_token is not None and self.chunks_per_token < CHUNKS_PER_TOKEN:
            return f"the server sent several tokens per chunk: {self.chunks_per_token:.2f} chunks per token"
        if self.together is not None and self.together > BUNCHED_SHARE:
            return f"{100 * self.together:.0f} % of the chunks arrived together with the previous one"
        return ""

    @property
    def duration_s(self) -> float | None:
        """From the first arrival to the last token."""
        ends = [at + took for at, took in zip(self.arrival_s, self.latency_s, strict=True) if took is not None]
        return max(ends) - self.arrival_s[0] if ends else None

    @property
    def output_throughput(self) -> float | None:
        """Tokens per second of the requests with status ok."""
        tokens = sum(n or 0 for n, one in zip(self.tokens_out, self.status, strict=True) if one == OK)
        return tokens / self.duration_s if self.duration_s and tokens else None

    @property
    def request_throughput(self) -> float | None:
        done = len(self.status) - self.num_failed
        return done / self.duration_s if self.duration_s and done else None

    @property
    def goodput(self) -> float | None:
        """Requests per second that meet every limit; None without limits, or if one cannot be checked."""
        met = self._meeting_limits()
        return None if met is None or not self.duration_s else sum(met) / self.duration_s

    @property
    def meets_limits(self) -> bool | None:
        """Whether 99 % of all requests meet every limit; None without limits, or if one cannot be checked."""
        met = self._meeting_limits()
        return None if met is None else sum(met) >= 0.99 * len(met)

    def _meeting_limits(self) -> list[bool] | None:
        limits = [
            (self.latency_s, self.limits.latency_s, False),
            (self.ttft_s, self.limits.ttft_s, True),
            (self.tpot_s, self.limits.tpot_s, True),
        ]
        set_limits = [(values, limit, of_tokens) for values, limit, of_tokens in limits if limit is not None]
        if not set_limits or (self.no_token_times and any(of_tokens for *_, of_tokens in set_limits)):
            return None
        return [
            one == OK and all(values[n] is not None and (values[n] or 0) <= limit for values, limit, _ in set_limits)
            for n, one in enumerate(self.status)
        ]

    def percentile_s(self, values: Sequence[float | None], share: float) -> float | None:
        """Return a percentile over all requests (nearest rank); None if it is that of a failed request."""
        sound = (
            math.inf if value is None or one != OK else value for value, one in zip(values, self.status, strict=True)
        )
        value_s = sorted(sound)[max(0, math.ceil(share / 100 * len(self.status)) - 1)]
        return None if math.isinf(value_s) else value_s

    @property
    def client_share(self) -> float | None:
        """The client overhead as a share of the latency: the larger of the ratios of the p99 and of the means."""
        return self._client_share(self.latency_s)

    def _client_share(self, values: Sequence[float | None]) -> float | None:
        answered = [value for value, one in zip(values, self.status, strict=True) if value is not None and one == OK]
        shares = []
        for name, delay_s in self.client_s.items():
            whole_s = self.percentile_s(values, 99 if "p99" in name else 50)
            if "mean" in name:
                whole_s = fmean(answered) if answered else None
            shares += [delay_s / whole_s] if whole_s else []
        return max(shares, default=None)


COUNTED = ("short", "long", "prompt", "miscounted")
"""The statuses of answers that do not match the request, such as those of another length."""
SHARES = (50, 60, 90, 99, 100)
"""The latency percentiles that are measurements; 60 is the one in the text of the published report."""


UNITS = {
    "output_throughput": "tokens/s",
    "request_throughput": "requests/s",
    "goodput": "requests/s",
    **{f"latency_p{share}": "s" for share in (50, 60, 90, 99, 100)},
    **{f"{name}_p{share}": "s" for name in ("ttft", "tpot") for share in (50, 99)},
    "knee": "requests/s",
    "time_to_healthy": "s",
    "server_memory": "GiB",
    **server_times.UNITS,
}
"""The units of the measurements of a trial with one load, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingResult:
    """The result of a serving trial."""

    result: Result
    server: str
    model: str
    about: str
    """The server's precision, tensor parallelism and weights, or its URL, as a text."""
    is_random: bool
    """Whether the weights are random: the answers are then meaningless, but their times are not."""
    healthy_s: float | None
    loads: tuple[LoadResult, ...]
    missing: tuple[str, ...]
    """Requested loads without a record."""
    memory_gib: float | None
    """The peak memory of the GPU that used most."""
    no_memory: str
    """Why the memory was not measured."""
    times: ServerTimes | None
    """The profile of the server; None if none was requested."""
    findings: tuple[Finding, ...]

    @property
    def valid(self) -> bool:
        """Whether every load was measured, and all of its requests have status ok."""
        return self.result.valid and bool(self.loads) and not self.problems

    @property
    def measurements(self) -> tuple[Measurement, ...]:
        """The measurements of each load; with several loads, names have the name of the load as a prefix."""
        return with_costs(_measurements(self), self.result)

    def differences(self, plan: Plan, trial: Trial) -> list[str]:
        """Return in what the log differs from the planned trial."""
        measured, planned = [one.load for one in self.loads], required(plan, ServingPlan).loads
        others = [load.name for load in planned if load not in measured and load.name not in self.missing]
        return [
            *(f"{name} is missing in the log, or has other settings than in the plan" for name in others),
            *_other_lengths(self.loads, required(plan, ServingPlan), trial),
            *differing({"seed": (self.result.seed, trial.seed)}),
        ]

    @property
    def problems(self) -> list[str]:
        """Why the trial is not valid, in addition to the findings of the log."""
        nothing = [] if self.loads or self.missing else [NOTHING_MEASURED]
        missing = (f"{name} was not measured" for name in self.missing)
        return [*nothing, *missing, *(finding.titled for finding in errors(self.findings))]

    @property
    def swept(self) -> list[LoadResult]:
        """The loads of a rate sweep, in rising order; empty without several rates."""
        with_rates = [load for load in self.loads if load.load.rate is not None]
        return with_rates if len(with_rates) > 1 else []

    @property
    def knee(self) -> float | None:
        """The highest rate at which 99 % of the requests meet the limits; None unless a higher rate misses them."""
        met = list(takewhile(lambda load: load.meets_limits, self.swept))
        beyond = self.swept[len(met) : len(met) + 1]
        return met[-1].load.rate if met and any(one.meets_limits is False for one in beyond) else None

    @property
    def no_knee(self) -> str:
        """Why the sweep has no knee."""
        if self.swept[0].meets_limits is False:
            return "the limits are not met even at the lowest rate: add lower values to task.serving.rates"
        if all(one.meets_limits for one in self.swept):
            return "the limits are met at every rate: add higher values to task.serving.rates"
        return "the limits could not be checked for one of the rates"


def _other_lengths(loads: Sequence[LoadResult], plan: ServingPlan, trial: Trial) -> Iterator[str]:
    """Yield the loads whose answers have other lengths than the plan has; nothing if all lengths are the same."""
    if plan.lengths is None:
        return
    planned = plan.lengths.trials[trial.index].tokens_out
    for load in loads:
        pairs = zip(load.tokens_out, planned, load.status, strict=False)
        if any(status == OK and tokens != sampled for tokens, sampled, status in pairs):
            yield f"{load.load.name}: answers have other lengths than in the plan"


def _measurements(result: ServingResult) -> Iterator[Measurement]:
    for load in result.loads:
        yield from _of_load(load, f"{load.load.name} " * _many(result))
    for name, unit, value in (
        ("knee", "requests/s", result.knee),
        ("time_to_healthy", "s", result.healthy_s),
        ("server_memory", "GiB", result.memory_gib),
    ):
        if value is not None:
            yield Measurement(name=name, unit=unit, value=value)
    if result.times is not None:
        yield from server_times.of_server(result.times)


def _many(result: ServingResult) -> bool:
    return len(result.loads) > 1


def _of_load(load: LoadResult, prefix: str) -> Iterator[Measurement]:
    n = len(load.status)
    for name, unit, value in (
        ("output_throughput", "tokens/s", load.output_throughput),
        ("request_throughput", "requests/s", load.request_throughput),
        ("goodput", "requests/s", load.goodput),
    ):
        if value is not None:
            yield Measurement(name=f"{prefix}{name}", unit=unit, value=value, n=n)
    stated: list[tuple[str, Sequence[float | None], Sequence[int]]] = [("latency", load.latency_s, SHARES)]
    stated += [] if load.no_token_times else [("ttft", load.ttft_s, (50, 99)), ("tpot", load.tpot_s, (50, 99))]
    for name, values, shares in stated:
        for share in shares:
            seconds = load.percentile_s(values, share)
            if seconds is not None:
                yield Measurement(name=f"{prefix}{name}_p{share}", unit="s", value=seconds, n=n)


def read(log: Log, result: Result) -> ServingResult:
    """Return the result of a serving log."""
    request, server = log.single(mllog.LOADS_REQUESTED), log.single(mllog.SERVER)
    assert request is not None, "the kind of a log is identified by this record"
    names = [name for name in request.value if isinstance(name, str)] if isinstance(request.value, list) else []
    loads = [one for one in (_load(event, request) for event in log.all(mllog.LOAD_MEASURED)) if one is not None]
    by_name = {one.load.name: one for one in loads}
    measured = tuple(by_name[name] for name in names if name in by_name)
    about, memory = (server.metadata if server else {}), log.value(mllog.SERVER_MEMORY)
    memory = memory if isinstance(memory, dict) else {}
    return ServingResult(
        result=result,
        server=str(server.value) if server else "none: the server never became healthy",
        model=str(about.get("model", "")),
        about=_about(about),
        is_random=about.get("weights") == mllog.RANDOM,
        healthy_s=number(about.get("healthy_s")),
        loads=measured,
        missing=tuple(name for name in names if name not in by_name),
        memory_gib=number(memory.get("peak")),
        no_memory=str(memory.get(mllog.NOT_MEASURED, "no record")),
        times=parsed(log.value(mllog.SERVER_TIMES)),
        findings=tuple(finding for one in measured for finding in _findings(one)),
    )


def _about(server: Mapping[str, Any]) -> str:
    if "url" in server:
        return f"at {server['url']}; precision and hardware unknown"
    return f"{server.get('precision', '?')}, tp {server.get('tp', '?')}, {server.get('weights', '?')} weights"


def summaries(result: ServingResult) -> list[Summary]:
    """Return the loads for the comparison with other load generators."""
    return [
        Summary(
            source=result.server,
            load=load.load.name,
            requests=len(load.status),
            failed=load.num_failed,
            output_throughput=load.output_throughput,
            request_throughput=load.request_throughput,
            latency_p50=load.percentile_s(load.latency_s, 50),
            latency_p99=load.percentile_s(load.latency_s, 99),
            ttft_p50=None if load.no_token_times else load.percentile_s(load.ttft_s, 50),
            ttft_p99=None if load.no_token_times else load.percentile_s(load.ttft_s, 99),
            tpot_p50=None if load.no_token_times else load.percentile_s(load.tpot_s, 50),
            tpot_p99=None if load.no_token_times else load.percentile_s(load.tpot_s, 99),
            why_no_tokens=load.no_token_times,
        )
        for load in result.loads
    ]


def distributions(result: ServingResult) -> list[Distribution]:
    """Return the latencies of each load, and the times to the first token if they were measured."""
    return [one for load in result.loads for one in _distributions(load)]


def _distributions(load: LoadResult) -> Iterator[Distribution]:
    stated = [("Latency", "seconds from arrival to the last token", load.latency_s)]
    if not load.no_token_times:
        stated.append(("Time to the first token", "seconds from arrival to the first token", load.ttft_s))
    for what, axis, values in stated:
        answered = (s for s, one in zip(values, load.status, strict=True) if s is not None and one == OK)
        if times := tuple(answered):
            title = f"{what} ({load.load.name})"
            yield Distribution(title=title, axis=axis, values=times, total=len(values))


def _load(event: Event, request: Event) -> LoadResult | None:
    """Return the load of a record; None if the record is damaged."""
    m = event.metadata
    try:
        load = Load(
            name=str(event.value),
            arrivals=Arrivals[m["arrivals"]],
            requests=m["requests"],
            rate=number(m.get("rate")),
            concurrency=None if (most := number(m.get("concurrency"))) is None else int(most),
            batched_tokens=m.get("batched_tokens") or None,
        )
        limits = codec.typed(LatencyLimits, request.metadata["limits"])
        lists = {name: tuple(m[name]) for name in ("arrival_s", "latency_s", "ttft_s", "tpot_s", "tokens_out")}
        status, loadgen = tuple(map(str, m["status"])), m["loadgen"]
        client_s = {str(name): float(value) for name, value in m["client"].items()}
        bound = float(request.metadata["max_client_delay"])
        details = tuple(map(str, m.get("details", ())))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return None
    is_whole = all(len(values) == len(status) == load.requests > 0 for values in lists.values())
    sound = all(value is None or (is_number(value) and value >= 0) for values in lists.values() for value in values)
    if not is_whole or not sound or not isinstance(loadgen, dict) or None in lists["arrival_s"]:
        return None
    return LoadResult(
        load=load,
        status=status,
        details=details,
        together=number(m.get("together")),
        chunks_per_token=number(m.get("chunks_per_token")),
        client_s=client_s,
        validity=str(loadgen.get("result_validity")),
        reason=_reason(loadgen),
        limits=limits,
        max_client_delay=bound,
        line=event.line,
        **lists,
    )


def _reason(loadgen: Mapping[str, Any]) -> str:
    """Return loadgen's reason for INVALID; empty for VALID."""
    if loadgen.get("result_validity") == "VALID":
        return ""
    lines = str(loadgen.get("early_stopping_result") or "").replace("*", "").split("\n")
    messages = [" ".join(line.split()) for line in lines]
    unmet = [
        text
        for key, text in (
            ("result_perf_constraints_met", "the 99th percentile of the latency is above its limit"),
            ("result_min_queries_met", "the load had too few requests"),
            ("result_min_duration_met", "the load was too short"),
        )
        if loadgen.get(key) is False
    ]
    return "; ".join([*unmet, *filter(None, messages)]).rstrip(".") or "no reason given"


def _findings(load: LoadResult) -> Iterator[Finding]:
    """Yield the problems of a load."""
    name, total = load.load.name, len(load.status)
    others = Counter(one for one in load.status if one != OK)
    for rule, what in (("SRV-04", "failed"), ("SRV-05", "have answers that do not match the request")):
        counts = {one: n for one, n in others.items() if (one in COUNTED) == (rule == "SRV-05")}
        if counts:
            kinds = ", ".join(f"{one} ({n})" for one, n in sorted(counts.items()))
            detail = f"; {load.details[0]}" if load.details else ""
            yield finding(
                rule, "error", load.line, f"{name}: {sum(counts.values())} of {total} requests {what}: {kinds}{detail}"
            )
    share = load.client_share
    if share is not None and share > load.max_client_delay:
        delays = ", ".join(f"{key} {1000 * value:.1f} ms" for key, value in load.client_s.items())
        what = f"{name}: the delay of the client itself is {100 * share:.1f} % of the latency ({delays})"
        yield finding("SRV-06", "error", load.line, what)
    if load.validity != "VALID":
        yield finding("SRV-07", "warning", load.line, f"{name}: loadgen reports {load.validity}: {load.reason}")
