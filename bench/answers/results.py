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
    """One trial of a log."""

    first_line: int
    last_line: int
    started: str | None
    stopped: str | None
    time_to_train_min: float | None
    status: str | None
    seed: int | None
    eval_final: float | None


class TrialVerdict(Answer, kw_only=True, tag="runstop/verdict/1.1"):
    """The verdict on one log, and the numbers in the log."""

    file: str
    kind: str
    """The kind of the task: train, generate, serve or kernels."""
    valid: bool
    """Whether the trial is valid by runstop's rules."""
    problems: tuple[str, ...]
    """Why the trial is not valid."""
    findings: tuple[Finding, ...]
    measurements: tuple[Measurement, ...]
    """All measurements with their units."""
    official: tuple[OfficialVerdict, ...] | None
    """The verdicts of MLPerf's own checker, with the option `--official`."""
    loads: tuple["ServedLoad", ...] | None = None
    """The loads of a serving task."""
    benchmark: str | None
    division: str | None
    org: str | None
    platform: str | None
    status: str | None
    """The status in the record run_stop: success or aborted."""
    started: str | None
    """The time of the record run_start."""
    stopped: str | None
    """The time of the record run_stop."""
    time_to_train_min: float | None
    """Null if the log has only a part of the trial."""
    has_target: bool
    """Whether the training has a target."""
    has_random_rows: bool
    """Whether the training data is random tokens."""
    shape_of: str | None
    """The MLPerf benchmark whose steps and evaluations have the same size as those of the run. Only set if the run has
    no target."""
    resumed_samples: float | None
    """The number of samples that earlier attempts trained. Null if the log has the complete trial."""
    init_s: float | None
    """The time from the first record init_start to the record init_stop."""
    evaluations: tuple[Evaluation, ...]
    train_losses: tuple[tuple[float | None, float], ...]
    """Each item is a pair: a number of samples, and the loss."""
    target: float | None
    higher_is_better: bool
    """Whether higher values are better, as for an accuracy."""
    eval_final: float | None
    """The value of the last evaluation."""
    samples_to_target: float | None
    converged: bool
    """Whether the last evaluation reached the target."""
    seed: int | None
    global_batch_size: int | None
    step_time_ms: float | None
    """The median time of an optimizer step."""
    step_time_spread_ms: Spread | None
    """The distribution of the step times."""
    step_times_ms: tuple[tuple[float, float], ...]
    """Each item is a pair: a number of samples, and a step time."""
    eval_time_s: float | None
    """The median time of an evaluation."""
    eval_times_s: tuple[float, ...]
    steps_time_s: float | None
    """The time of all training steps, without evaluations."""
    epoch_times_s: tuple[float, ...]
    real_token_share: float | None
    """The share of tokens that are not padding."""
    throughput_samples_s: float | None
    num_gpus: int | None
    gpu_count_conflict: str
    """Why the GPU count in the log is wrong."""
    tokens_s_gpu: float | None
    tflop_per_sample: float | None
    tflops_gpu: float | None
    mfu: float | None
    """Model FLOPs utilization, from 0 to 1."""
    peak_memory_gib: PeakMemory | None
    telemetry: Telemetry | None
    """Power, clocks and temperature of the GPUs."""
    module_times: ModuleTimes | None
    """The time of each module in profiled steps."""
    local_sgd: LocalSgdResult | None
    system: dict[str, Any]
    """The description of the system, from the record SYSJSON of the log."""
    software: dict[str, str]
    """The versions of the software, by name."""
    hyperparameters: dict[str, Any]
    inputs: dict[str, str]
    """The checksum of each input that the ranks read."""
    spans: tuple[Span, ...]
    """One object for each record run_start of the log."""


class ServedLoad(Part, kw_only=True):
    """One load of a serving task."""

    load: str
    loadgen: str
    """The verdict of MLPerf's load generator: VALID or INVALID."""
    reason: str
    """The load generator's reason for INVALID."""


class ImportedLoad(Answer, kw_only=True, tag="runstop/imported-load/1.0"):
    """One load in a result file of another load generator: AIPerf, GuideLLM or vLLM. `ttft` is the time to the first
    token. `tpot` is the time per output token after the first token."""

    file: str
    source: str
    """The name of the load generator."""
    load: str
    requests: int
    failed: int | None
    output_throughput: float | None
    """Output tokens per second."""
    request_throughput: float | None
    latency_p50_s: float | None
    latency_p99_s: float | None
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    tpot_p50_s: float | None
    tpot_p99_s: float | None
    why_no_tokens: str
    """Why the token times are missing, if the reason is known."""


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
    """The ID of the rule, or `unknown`. Null if nothing failed."""
    title: str
    evidence: str | None
    """The log line that shows the failure."""
    file: str | None
    line: int | None
    detail: str | None
    """How far the trial got."""
    fix: str | None
    also: tuple[Clue, ...]
    """Other rules that match. Usually, they are consequences of the failure."""
    lines: tuple[str, ...]
    """The most informative log lines. Only set if the rule does not name the cause."""


class LogPattern(Part, kw_only=True):
    """A pattern that identifies a rule in a log."""

    weight: str
    """How much the pattern explains: HINT, OUTCOME, END, ECHO, DEATH, CRASH or CAUSE."""
    pattern: str
    """A regular expression."""


class Rule(Answer, kw_only=True, tag="runstop/rule/1.0"):
    """One known problem, and how to fix the problem."""

    rule: str
    title: str
    fix: str
    signs: tuple[LogPattern, ...]
    """The patterns that identify the problem in a log."""


class ScoredTrial(Part, kw_only=True):
    """A trial of a score."""

    file: str
    time_to_train_min: float | None
    samples_to_target: float | None
    seed: int | None
    valid: bool


class Score(Answer, kw_only=True, tag="runstop/score/1.0"):
    """The MLPerf score of the trials in a folder. MLCommons has not verified this score. A reference convergence point
    (RCP) is the number of samples that MLPerf's reference needs to reach the target."""

    run: str
    """The folder with the logs of the trials."""
    benchmark: str | None
    division: str | None
    org: str | None
    platform: str | None
    num_gpus: int | None
    global_batch_size: int | None
    ruleset: str
    num_runs: int
    num_runs_required: int | None
    """The number of runs that the ruleset requires."""
    results: tuple[ScoredTrial, ...]
    dropped_fastest: str | None
    dropped_slowest: str | None
    dropped_reasons: tuple[str, ...]
    num_failed: int
    """The number of trials that did not converge, and of trials whose log was rejected."""
    olympic_min: float | None
    """The mean time to train, without the dropped fastest and slowest trials."""
    olympic_samples: float | None
    rcp_mean_samples: float | None
    rcp_stdev_samples: float | None
    rcp_min_samples: float | None
    """The lowest mean number of samples that MLPerf accepts."""
    rcp_factor: float | None
    """The score is `olympic_min` multiplied by this factor. The factor is at least 1."""
    official_min: float | None
    """The score. Null if the score is not valid."""
    interval_min: tuple[float, float] | None
    """The bounds of the 90 % interval of `official_min`."""
    samples_distribution: dict[str, int]
    """For each number of samples: how many trials reached the target after this number."""
    compliance: tuple[OfficialVerdict, ...]
    rcp: RcpVerdict
    findings: tuple[Finding, ...]
    valid: bool
    disagreements: tuple[str, ...]
    """Differences between the verdicts of MLPerf's checker and of runstop."""


class Trial(Answer, kw_only=True, tag="runstop/trial/1.1"):
    """One trial of a report."""

    trial: str
    valid: bool
    measurements: tuple[Measurement, ...] = ()
    """The measurements of a trial that does not train."""
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
    """Tokens per second and GPU, without padding tokens."""
    steps_time_s: float | None = None
    epoch_time_s: float | None = None
    train_loss: float | None = None
    tflops_gpu: float | None = None
    mfu: float | None = None
    eval_time_s: float | None = None
    evaluation_share: float | None = None
    """The share of evaluations in the time from run_start to run_stop."""
    peak_memory_gib: float | None = None
    estimated_memory_gib: float | None = None
    has_target: bool | None = None
    official: bool | None = None
    """Whether MLPerf's own checker passed. Null if MLPerf has no rules for the log."""
    counted: str | None = None
    """The trial in the olympic mean: `counted`, `dropped: fastest`, `dropped: slowest`, or empty without a mean."""
    why: str | None = None
    """Why the trial is not valid."""
    run_cost: float | None = None
    epoch_cost: float | None = None
    cost_per_million_tokens: float | None = None
    currency: str | None = None


class PublishedSystem(Answer, kw_only=True, tag="runstop/published-system/1.0"):
    """The results of one system for one benchmark of an MLPerf round."""

    folder: str
    """The folder of the logs."""
    benchmark: str
    round: str
    submitter: str
    system: str
    division: str | None
    availability: str | None
    num_nodes: int | None
    num_gpus: int | None
    accelerator: str | None
    time_to_train_min: float | None
    """The score. If there is only one run: the time of this run."""
    olympic_min: float | None
    rcp_factor: float | None
    global_batch_size: int | None
    tp: int | None
    """The size of tensor parallelism."""
    pp: int | None
    """The size of pipeline parallelism."""
    cp: int | None
    """The size of context parallelism."""
    num_runs: int
    num_failed: int | None
    samples_to_target: float | None
    """The mean over the runs that reached the target."""
    samples_distribution: dict[str, int]
    """For each number of samples: how many runs reached the target after this number."""
    eval_interval: int | None
    """The number of samples between two evaluations."""
    step_time_ms: float | None
    tokens_s_gpu: float | None
    """Tokens per second and GPU during training, without evaluations."""
    valid: bool
    """Whether the logs give a valid score by MLPerf's rules."""
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
    """The energy of each entry, not multiplied by the RCP factor. The keys are folders of the submission."""
    checkers: dict[str, Checker]
    findings: tuple[Finding, ...]
    passed: bool
    """Whether every checker passed without `--force`."""
    note: str


class Verification(Answer, kw_only=True, tag="runstop/verification/1.0"):
    """Whether the files of a run folder are unchanged since the run."""

    run: str
    passed: bool
    checks: tuple[Compared, ...]


class ComparedValues(msgspec.Struct, kw_only=True):
    """The comparison of two systems."""

    names: tuple[str, str]
    measurement: str
    unit: str
    higher_is_better: bool
    pairing: str
    """One of: `paired by block`; `paired in order of time`; `not paired`."""
    margin: float
    """The largest difference that still counts as equal, as a share. If `ratio` is significantly between
    1 / (1 + margin) and 1 + margin, the verdict is `equivalent`."""
    confidence: float
    first: tuple[float, ...]
    """One value for each run of the first system."""
    second: tuple[float, ...]
    """One value for each run of the second system. If the runs are paired, second[k] and first[k] are a pair."""
    verdict: str
    """One of: `equivalent`; `equivalent, different`; `different`; `undecided`; `not compared`. A
    significant difference within the margin is `equivalent, different`."""
    reason: str
    """Why the values cannot be compared."""
    ratio: float | None
    """The ratio of the first system to the second system."""
    low: float | None
    """The lower bound of the interval of `ratio`."""
    high: float | None
    """The upper bound of the interval of `ratio`."""
    bootstrap: tuple[float, float] | None
    """The bounds of the bootstrap interval of `ratio`."""
    p_equivalent: float | None
    """The p-value of the hypothesis that `ratio` is outside the margin."""
    spread: float | None
    """The standard deviation between runs of the same system, as a share."""
    num_more: int | None
    """The number of additional runs that an undecided comparison needs."""
    notes: tuple[str, ...]
    text: str
    """The verdict in words."""
    is_better: bool | None
    """Whether the first system is better. Null if the difference is not significant."""


class Comparison(ComparedValues, kw_only=True, tag_field="schema", tag="runstop/comparison/1.0"):
    """The comparison of two systems."""

    runs: tuple[tuple[str, ...], tuple[str, ...]]
    """The run folders of each system."""
    differences: dict[str, tuple[str, str]]
    """The hardware, software and settings that differ. Each value is a pair: the first and the second system."""


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
    """The hardware and software."""
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
    """One node, and all problems that runs found on this node."""

    node: str
    backend: str
    runs: tuple[str, ...]
    """The runs on the node. The oldest run is first."""
    passed_checks: int
    """The number of checks that found no problem."""
    findings: tuple[NodeFinding, ...]
    """The problems of the node. The oldest problem is first."""
    last_seen: str | None
    is_left_out: bool
    """Whether `cluster.avoid=auto` leaves out this node."""
    reason: str | None
    """The newest problem in words, if the node is left out."""


class Regression(Answer, kw_only=True, tag="runstop/regression/1.0"):
    """Whether the newest runs of a task are worse than earlier runs."""

    task: str
    hardware: str
    settings: str
    measurement: str
    verdict: str
    """One of: `regression`; `no regression`; `undecided`; `not judged`."""
    text: str
    """The change with its 95 % interval, or why there is no interval."""
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
    """For each arm: the estimated GPU hours of one run, without the start and the evaluations."""
    cost: dict[str, float | None]
    """The price of `gpu_hours`."""
    order: tuple[tuple[str, ...], ...]
    """For each block: the arms that would run, in this order."""


class Difference(Part, kw_only=True):
    """The comparison of two arms."""

    first: str
    second: str
    measurement: str
    comparison: ComparedValues | None
    reason: str
    """Why there is no comparison."""


class Study(Answer, kw_only=True, tag="runstop/study/1.0"):
    """The results of a study. An arm is one of the variants that the study compares."""

    name: str
    title: str
    question: str
    source: str
    folder: str
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
    """The days of the first and the last run."""
    hardware: str
    order: tuple[tuple[str, ...], ...]
    margin: float
    notes: tuple[str, ...]
    statements: tuple[StatementResult, ...]
    references: tuple[ReferenceResult, ...]
    device: str
    environment: Mapping[str, str]
    platforms: tuple[Platform, ...]
