"""Answers about what logs say: verdicts, scores, comparisons, studies."""

from collections.abc import Mapping
from typing import Any

import msgspec

from bench.answers.base import Answer, Evaluation, Part
from bench.contract.modules import ModuleTimes
from bench.mlperf.local_sgd import LocalSgdResult
from bench.mlperf.official import Verdict as OfficialVerdict
from bench.mlperf.rcp import RcpVerdict
from bench.mlperf.result import PeakMemory
from bench.mlperf.speed import Spread
from bench.mlperf.telemetry import Telemetry
from bench.results.measurement import Measurement
from bench.results.reference import ReferenceResult
from bench.results.statement import StatementResult
from bench.results.study import Column, PlannedArm, Platform, Publication, Row, Table
from bench.rules.finding import Finding
from bench.runs.verification import Compared


class Span(Part, kw_only=True):
    """One trial of a log. The first trial begins at the first record of the log. Each other trial begins at its
    run_start."""

    first_line: int
    last_line: int
    started: str | None
    stopped: str | None
    time_to_train_min: float | None
    status: str | None
    seed: int | None
    eval_final: float | None


class TrialVerdict(Answer, kw_only=True, tag="runstop/verdict/1.1"):
    """The verdict on one log, and all numbers that the log has. A number that the log does not have is null."""

    file: str
    """The path of the log."""
    kind: str
    """The kind of the task: train, generate, serve or kernels."""
    valid: bool
    """Whether the trial completed its task, by runstop's rules. For training, whether it reached its target."""
    problems: tuple[str, ...]
    """Why the trial is not valid, in words."""
    findings: tuple[Finding, ...]
    """The broken rules."""
    measurements: tuple[Measurement, ...]
    """All measurements with their units."""
    official: tuple[OfficialVerdict, ...] | None
    """The verdicts of MLPerf's own checker (`--official`); null for kinds without official rules."""
    loads: tuple["ServedLoad", ...] | None = None
    """The loads of a serving task."""
    benchmark: str | None
    division: str | None
    org: str | None
    platform: str | None
    status: str | None
    """The status of run_stop: success or aborted."""
    started: str | None
    """The time of run_start."""
    stopped: str | None
    """The time of run_stop."""
    time_to_train_min: float | None
    """From run_start to run_stop. Null if the log has only a part of the trial."""
    has_target: bool
    """Whether the run has a target. Without a target, no number of the log is a time to train."""
    has_random_rows: bool
    """Whether the data was random tokens. Then losses have no meaning."""
    shape_of: str | None
    """If the log has no target: the benchmark with the same amount of work in steps and evaluations."""
    resumed_samples: float | None
    """The number of samples that earlier attempts trained. Null if the log has the complete trial."""
    init_s: float | None
    """From the first init_start to init_stop."""
    evaluations: tuple[Evaluation, ...]
    train_losses: tuple[tuple[float | None, float], ...]
    """Pairs of samples and loss."""
    target: float | None
    higher_is_better: bool
    """Whether higher values are better, as for an accuracy. For a loss, this is false."""
    eval_final: float | None
    """The value of the last evaluation."""
    samples_to_target: float | None
    converged: bool
    """Whether the last evaluation reached the target; false without a target."""
    seed: int | None
    global_batch_size: int | None
    step_time_ms: float | None
    """The median time of an optimizer step."""
    step_time_spread_ms: Spread | None
    """The distribution of the step times."""
    step_times_ms: tuple[tuple[float, float], ...]
    """Pairs of samples and step time."""
    eval_time_s: float | None
    """The median time of an evaluation."""
    eval_times_s: tuple[float, ...]
    steps_time_s: float | None
    """The time of all training steps, without evaluations."""
    epoch_times_s: tuple[float, ...]
    real_token_share: float | None
    """Tokens without padding, as a share of all tokens."""
    throughput_samples_s: float | None
    num_gpus: int | None
    gpu_count_conflict: str
    """Why the GPU count of the log is wrong. Empty without a conflict."""
    tokens_s_gpu: float | None
    """Tokens per second and GPU."""
    tflop_per_sample: float | None
    tflops_gpu: float | None
    mfu: float | None
    """Model FLOPs utilization, 0 to 1."""
    peak_memory_gib: PeakMemory | None
    telemetry: Telemetry | None
    """Power, clocks and temperature of the GPUs; null if they were not sampled."""
    module_times: ModuleTimes | None
    """The time of each module in profiled steps."""
    local_sgd: LocalSgdResult | None
    system: dict[str, Any]
    """The description of the system, from the record SYSJSON of the log."""
    software: dict[str, str]
    """Versions by name."""
    hyperparameters: dict[str, Any]
    inputs: dict[str, str]
    """The checksum of each input that the ranks read."""
    spans: tuple[Span, ...]
    """One entry for each run_start of the log."""


class ServedLoad(Part, kw_only=True):
    """One load of a serving task."""

    load: str
    loadgen: str
    """The verdict of MLPerf's load generator: VALID or INVALID."""
    reason: str
    """The load generator's reason for INVALID."""


class ImportedLoad(Answer, kw_only=True, tag="runstop/imported-load/1.0"):
    """One load in a result file of another load generator: AIPerf, GuideLLM or vLLM."""

    file: str
    source: str
    """The tool."""
    load: str
    requests: int
    failed: int | None
    output_throughput: float | None
    """Tokens per second."""
    request_throughput: float | None
    latency_p50_s: float | None
    latency_p99_s: float | None
    ttft_p50_s: float | None
    """Time to the first token."""
    ttft_p99_s: float | None
    tpot_p50_s: float | None
    """Time per output token after the first."""
    tpot_p99_s: float | None
    why_no_tokens: str
    """Why there are no token times, if known."""


class Clue(Part, kw_only=True):
    """Another rule that matches. Usually it is a consequence."""

    rule: str
    title: str
    evidence: str
    file: str
    line: int


class Diagnosis(Answer, kw_only=True, tag="runstop/diagnosis/1.0"):
    """Why a run failed, was stopped or hangs."""

    run: str
    rule: str | None
    """The ID of the rule, or `unknown`; null if nothing failed."""
    title: str
    evidence: str | None
    """The log line that shows the failure."""
    file: str | None
    line: int | None
    detail: str | None
    """How far the trial got."""
    fix: str | None
    also: tuple[Clue, ...]
    lines: tuple[str, ...]
    """The most informative log lines, if the rule does not name the cause."""


class LogPattern(Part, kw_only=True):
    """A pattern that identifies a rule in a log."""

    weight: str
    """How much the pattern explains: HINT, OUTCOME, END, ECHO, DEATH, CRASH or CAUSE."""
    pattern: str
    """A regular expression."""


class Rule(Answer, kw_only=True, tag="runstop/rule/1.0"):
    """One known problem."""

    rule: str
    title: str
    fix: str
    signs: tuple[LogPattern, ...]


class ScoredTrial(Part, kw_only=True):
    """A trial of a score."""

    file: str
    time_to_train_min: float | None
    samples_to_target: float | None
    seed: int | None
    valid: bool


class Score(Answer, kw_only=True, tag="runstop/score/1.0"):
    """The MLPerf score of the trials of a folder. MLCommons has not verified this score."""

    run: str
    """The folder with the logs."""
    benchmark: str | None
    division: str | None
    org: str | None
    platform: str | None
    num_gpus: int | None
    global_batch_size: int | None
    ruleset: str
    num_runs: int
    num_runs_required: int | None
    """Null for a benchmark that is not in the ruleset."""
    results: tuple[ScoredTrial, ...]
    dropped_fastest: str | None
    dropped_slowest: str | None
    dropped_reasons: tuple[str, ...]
    num_failed: int
    """Trials that did not converge, or whose logs are rejected."""
    olympic_min: float | None
    """The mean time to train in minutes, without the dropped trials."""
    olympic_samples: float | None
    rcp_mean_samples: float | None
    rcp_stdev_samples: float | None
    rcp_min_samples: float | None
    """The lowest mean number of samples that is accepted."""
    rcp_factor: float | None
    """A factor of at least 1. The score is olympic_min times this factor."""
    official_min: float | None
    """olympic_min times rcp_factor; null unless the score is valid."""
    interval_min: tuple[float, float] | None
    """The 90 % interval of official_min from resampled trials."""
    samples_distribution: dict[str, int]
    """How many trials reached the target after how many samples."""
    compliance: tuple[OfficialVerdict, ...]
    rcp: RcpVerdict
    findings: tuple[Finding, ...]
    valid: bool
    disagreements: tuple[str, ...]
    """Differences between the verdict of MLPerf's checker and the verdict of runstop."""


class Trial(Answer, kw_only=True, tag="runstop/trial/1.1"):
    """One trial of a report. If the task does not train, the numbers of the trial are in `measurements`."""

    trial: str
    valid: bool
    measurements: tuple[Measurement, ...] = ()
    """The measurements of tasks that do not train."""
    set: str | None = None
    """The name of the set of trials."""
    file: str | None = None
    benchmark: str | None = None
    hardware: str | None = None
    started: str | None = None
    seed: int | None = None
    time_to_train_min: float | None = None
    samples_to_target: float | None = None
    eval_final: float | None = None
    target: float | None = None
    step_time_ms: float | None = None
    step_time_p10_ms: float | None = None
    step_time_p90_ms: float | None = None
    throughput_samples_s: float | None = None
    tokens_s_gpu: float | None = None
    real_tokens_s_gpu: float | None = None
    """The number of tokens per second and GPU, without padding tokens."""
    steps_time_s: float | None = None
    epoch_time_s: float | None = None
    train_loss: float | None = None
    tflops_gpu: float | None = None
    mfu: float | None = None
    eval_time_s: float | None = None
    evaluation_share: float | None = None
    """The time of the evaluations, as a share of the time from run_start to run_stop."""
    peak_memory_gib: float | None = None
    estimated_memory_gib: float | None = None
    has_target: bool | None = None
    official: bool | None = None
    """Whether MLPerf's own checker passed; null if it has no rules for the log."""
    counted: str | None = None
    """Whether the trial counts in the olympic mean, in words."""
    why: str | None = None
    """Why the trial is not valid."""
    run_cost: float | None = None
    epoch_cost: float | None = None
    cost_per_million_tokens: float | None = None
    currency: str | None = None


class PublishedSystem(Answer, kw_only=True, tag="runstop/published-system/1.0"):
    """One benchmark of one system in the results repository of an MLPerf round (`published`)."""

    folder: str
    """The folder of the logs."""
    benchmark: str
    round: str
    submitter: str
    system: str
    division: str | None
    availability: str | None
    """For example, `Available on-premise`."""
    num_nodes: int | None
    num_gpus: int | None
    accelerator: str | None
    time_to_train_min: float | None
    """The score: the olympic mean times the RCP factor. For a single run: the time of this run. Null if there is no
    score."""
    olympic_min: float | None
    rcp_factor: float | None
    global_batch_size: int | None
    tp: int | None
    pp: int | None
    cp: int | None
    """`tp`, `pp` and `cp` are the sizes of tensor, pipeline and context parallelism. Null if the logs do not have the
    size."""
    num_runs: int
    num_failed: int | None
    samples_to_target: float | None
    """The mean of the runs that reached the target."""
    samples_distribution: dict[str, int]
    """How many runs reached the target after how many samples."""
    eval_interval: int | None
    """Samples between two evaluations."""
    step_time_ms: float | None
    tokens_s_gpu: float | None
    """Tokens per second and GPU during training, without evaluations."""
    valid: bool
    """Whether the logs are a score by the official rules."""
    notes: tuple[str, ...]
    """Reasons for missing values, and differences between sources."""


class Checker(Part, kw_only=True):
    """The verdict of one of MLPerf's checkers."""

    passed: bool
    messages: tuple[str, ...]


class Package(Answer, kw_only=True, tag="runstop/package/1.1"):
    """A package for an MLPerf submission."""

    folder: str
    org: str
    ruleset: str
    division: str
    systems: tuple[str, ...]
    benchmarks: tuple[str, ...]
    files: tuple[str, ...]
    """The paths of the files, relative to `folder`."""
    scaling_factors: dict[str, float]
    todo: tuple[str, ...]
    """The values that the user must fill in."""
    energy_j: dict[str, float]
    """The energy of each entry by MLPerf's rules, before the RCP factor. The keys are folders of the submission. Empty
    if no power was measured."""
    checkers: dict[str, Checker]
    findings: tuple[Finding, ...]
    passed: bool
    """Whether every checker passed without --force."""
    note: str


class Verification(Answer, kw_only=True, tag="runstop/verification/1.0"):
    """Whether the files of a run folder are unchanged since the run."""

    run: str
    passed: bool
    checks: tuple[Compared, ...]


class ComparedValues(msgspec.Struct, kw_only=True):
    """The comparison of two systems: the ratio of the first to the second."""

    names: tuple[str, str]
    measurement: str
    unit: str
    higher_is_better: bool
    pairing: str
    """One of: `paired by block`; `paired in order of time`; `not paired`."""
    margin: float
    """Two systems are equivalent if their ratio is between 1 / (1 + margin) and 1 + margin."""
    confidence: float
    first: tuple[float, ...]
    second: tuple[float, ...]
    """`first` and `second` have one value for each run. If the runs are paired, first[k] and second[k] are a pair."""
    verdict: str
    """One of: `equivalent`; `equivalent, different`; `different`; `undecided`; `not compared`."""
    reason: str
    """Why the values cannot be compared."""
    ratio: float | None
    low: float | None
    high: float | None
    """`low` and `high` are the bounds of the interval of the ratio."""
    bootstrap: tuple[float, float] | None
    p_equivalent: float | None
    spread: float | None
    """The run-to-run standard deviation as a share."""
    num_more: int | None
    """How many more runs an undecided comparison needs."""
    notes: tuple[str, ...]
    text: str
    """The verdict in words."""
    is_better: bool | None
    """Whether the first system is better; null without a significant difference."""


class Comparison(ComparedValues, kw_only=True, tag_field="schema", tag="runstop/comparison/1.0"):
    """The comparison of two sets of runs."""

    runs: tuple[tuple[str, ...], tuple[str, ...]]
    """The run folders of each set."""
    differences: dict[str, tuple[str, str]]
    """Hardware, software and settings that differ, with both values."""


class HistoryRun(Answer, kw_only=True, tag="runstop/history-run/1.0"):
    """A run in the history of a task."""

    task: str
    hardware: str
    settings: str
    """A checksum of all settings."""
    run: str
    started: str | None
    """The time of the first run_start."""
    trials: tuple[int, ...]
    """The numbers of the valid trials."""
    values: dict[str, tuple[float, ...]]
    """For each measurement, the value of each trial."""
    facts: dict[str, str]
    """Hardware and software."""
    tags: tuple[str, ...]
    note: str


class NodeFinding(Part, kw_only=True):
    """A problem of a node that a run found."""

    run: str
    kind: str
    """slow or failure."""
    time: str | None
    rule: str | None
    what: str


class Node(Answer, kw_only=True, tag="runstop/node/1.0"):
    """What all runs found out about a node (`runstop nodes`)."""

    node: str
    backend: str
    runs: tuple[str, ...]
    """The oldest first."""
    passed_checks: int
    """The number of checks of this node that found no problem."""
    findings: tuple[NodeFinding, ...]
    """The oldest first."""
    last_seen: str | None
    is_left_out: bool
    """Whether cluster.avoid=auto leaves out this node."""
    reason: str | None
    """The newest finding in words, if the node is left out."""


class Regression(Answer, kw_only=True, tag="runstop/regression/1.0"):
    """Whether the newest runs of a task are worse than earlier ones."""

    task: str
    hardware: str
    settings: str
    measurement: str
    verdict: str
    """One of: `regression`; `no regression`; `undecided`; `not judged`."""
    text: str
    """The change with its 95 % interval, or why there is none."""
    run: str
    """The newest run."""


class StudyTitle(Answer, kw_only=True, tag="runstop/study-title/1.0"):
    """A study that can be run."""

    name: str
    title: str
    question: str
    source: str


class StudyPlan(Answer, kw_only=True, tag="runstop/study-plan/1.0"):
    """The runs that a study would start (`--dry-run`)."""

    folder: str
    arms: tuple[PlannedArm, ...]
    gpu_hours: dict[str, float | None]
    """The estimated GPU hours of one run of each arm, without start and evaluations."""
    cost: dict[str, float | None]
    """The price of these GPU hours."""
    order: tuple[tuple[str, ...], ...]
    """The arms of each block that would run, in order."""


class Difference(Part, kw_only=True):
    """The comparison of two arms."""

    first: str
    second: str
    measurement: str
    comparison: ComparedValues | None
    reason: str
    """Why there is no comparison."""


class Study(Answer, kw_only=True, tag="runstop/study/1.0"):
    """The tables of a study."""

    name: str
    title: str
    question: str
    source: str
    folder: str
    """The folder of the study."""
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    tables: tuple[Table, ...]
    differences: tuple[Difference, ...]
    publications: tuple[Publication, ...]
    cluster: str
    command: str
    """The command that continues the study."""
    commit: str
    date: str
    """The days of the first and the last run in UTC; empty without runs."""
    hardware: str
    order: tuple[tuple[str, ...], ...]
    margin: float
    notes: tuple[str, ...]
    statements: tuple[StatementResult, ...]
    references: tuple[ReferenceResult, ...]
    device: str
    environment: Mapping[str, str]
    platforms: tuple[Platform, ...]
