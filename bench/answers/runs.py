"""Answers about runs, plans and machines."""

from typing import Any

from bench.answers.base import Answer, Evaluation, Part
from bench.contract.cluster import Gpu
from bench.contract.plan import Cost, Memory, Recomputed, World
from bench.fetch.hub import RemoteFile
from bench.images.store import Record
from bench.rules.finding import Finding
from bench.watch.hardware import Hottest


class Run(Answer, kw_only=True, tag="runstop/run/1.0"):
    """One run. Each measured number is the median over the valid trials of the run."""

    run: str
    jobs: tuple[str, ...]
    """The IDs of the jobs. The newest job is last."""
    state: str
    """The state of the active job. If no job is active: the outcome of the run."""
    job_state: str | None
    """The state of the job in the words of the scheduler."""
    is_active: bool
    """Whether a job is queued or running."""
    reason: str
    """Why the run waits or failed."""
    outcomes: tuple[str, ...]
    """The outcome of each trial."""
    exit_code: int | None
    rule: str | None
    """The rule that explains the failure."""
    started: str | None
    """The start of the first valid trial. Without a valid trial: the time of the launch."""
    overrides: str
    """The overrides on the command line."""
    tags: tuple[str, ...]
    note: str
    num_valid: int
    """The number of valid trials."""
    time_to_train_min: float | None
    step_time_ms: float | None
    tokens_s: float | None
    """Tokens per second of all ranks together, during training."""


class Plan(Answer, kw_only=True, tag="runstop/plan/5.0"):
    """The content of the file plan.json. The fields after `config` depend on the kind of the task."""

    version: int
    """The same number as MAJOR."""
    config: dict[str, Any]
    """The whole configuration. The keys are the keys of the command line."""


class Layout(Answer, kw_only=True, tag="runstop/layout/1.0"):
    """One possible split of the model over the ranks. The first line is the best layout."""

    world: World
    micro_batch_size: int
    recompute: Recomputed
    memory: Memory
    cost: Cost | None


class Scaling(Answer, kw_only=True, tag="runstop/scaling/1.1"):
    """The estimated speed of a plan on different numbers of nodes (`--scale`)."""

    task: str
    marked: str
    """Always the word `estimated`."""
    stack: str
    points: tuple[dict[str, Any], ...]
    """One object for each number of nodes (`num_nodes`)."""
    pays_until: int | None
    """The largest number of nodes at which scaling pays. Scaling pays if each added GPU brings at least half the speed
    that a GPU has at the smallest number of nodes."""
    intervals: tuple[dict[str, Any], ...]
    currency: str
    not_calibrated: str
    """Why the estimates have no intervals."""
    power_source: str
    """The source of the power of a GPU."""
    published: tuple[dict[str, Any], ...]
    """Values that other projects measured."""


class TimePart(Part, kw_only=True):
    """A part of the time of a run."""

    part: str
    """training, evaluation, checkpoints, stalls, start, repeated, down, restart, end or other."""
    what: str
    """What is counted."""
    is_restart: bool
    """Whether interruptions caused this part."""
    seconds: float
    share: float
    """The share of the time of the run. The shares add up to 1."""
    gpu_hours: float | None
    """Null on CPUs."""


class TrialTime(Part, kw_only=True):
    """The time of a trial."""

    trial: int
    outcome: str
    """The outcome in the ledger of the run."""
    num_attempts: int
    seconds: dict[str, float]
    """The seconds of each part of the time."""


class Goodput(Answer, kw_only=True, tag="runstop/goodput/1.0"):
    """How the trials of a run spent their wall-clock time."""

    run: str
    wall_s: float
    """The wall-clock time from the first attempt to the end of the last attempt, summed over the trials."""
    effective: float
    """`effective_training_s` divided by `wall_s`."""
    effective_training_s: float
    """The training time, without the steps that a later attempt repeated."""
    parts: tuple[TimePart, ...]
    trials: tuple[TrialTime, ...]
    num_gpus: int | None
    notes: tuple[str, ...]


class TunedSettings(Part, kw_only=True):
    """Settings that `runstop tune` ranked, and their measurements; values are null without enough runs."""

    rank: int
    """The position in the ranking by estimated step time, from 1."""
    name: str
    overrides: tuple[str, ...]
    estimated_step_ms: float | None
    estimated_low_ms: float | None
    estimated_high_ms: float | None
    memory_gib: float
    """The estimated memory of a GPU."""
    capacity_gib: float | None
    outcome: str
    """One of: `fastest`; `slower`; `equivalent`; `undecided`; `failed`; `not measured`."""
    step_times_ms: tuple[float, ...]
    """The median step of each run, in the order of blocks."""
    median_ms: float | None
    low_ms: float | None
    high_ms: float | None
    """`low_ms` and `high_ms` are the bounds of the 95 % interval of the geometric mean over runs."""
    slower_percent: float | None
    """How much longer a step takes than with the settings in `than`, in percent."""
    slower_low_percent: float | None
    slower_high_percent: float | None
    than: str
    reason: str
    """Why it failed."""
    runs: tuple[str, ...]
    """The run folders."""


class Tuning(Answer, kw_only=True, tag="runstop/tuning/1.0"):
    """The fastest settings of a task on a cluster."""

    task: str
    cluster: str
    folder: str
    num_candidates: int
    settings: tuple[TunedSettings, ...]
    """The measured settings. With `--dry-run`: all settings that fit."""
    best: str
    """The name of the fastest settings."""
    is_decided: bool
    """Whether all settings except `best` are slower than `best`, are equivalent to it, or have failed."""
    stopped_by: str
    num_blocks: int
    steps: int
    """The number of measured steps of each run."""
    margin: float
    """Settings whose step times differ by less than this share are equivalent."""
    confidence: float
    """The confidence level of each interval."""
    regret: float | None
    """With the settings of the shortest estimate: how much longer a step takes than with `best`, as a share."""
    estimated_by: str
    overrides_file: str
    command: str


class Script(Answer, kw_only=True, tag="runstop/script/1.0"):
    """The script or manifest of a run."""

    plan: str
    backend: str
    text: str


class Check(Part, kw_only=True):
    """The outcome of a check."""

    what: str
    rules: tuple[str, ...]
    tier: str
    num_findings: int
    seen: str
    """What the check measured."""
    unknown: str
    """Why the check could not decide."""


class Doctor(Answer, kw_only=True, tag="runstop/doctor/1.0"):
    """Whether a plan can run here."""

    plan: str
    tier: str
    """The last group of checks that ran: laptop, login, canary or nodes."""
    passed: bool
    """Whether no finding has the severity `error`."""
    findings: tuple[Finding, ...]
    checks: tuple[Check, ...]


class LogLine(Answer, kw_only=True, tag="runstop/log-line/1.0"):
    """One line of the output of a job or of a rank."""

    file: str
    """The path of the file, or the name of the process."""
    text: str


class Coming(Part, kw_only=True):
    """An upcoming evaluation, and the probability that the evaluation reaches the target."""

    samples: int
    time_to_train_min: float
    """The time to train if this evaluation reaches the target."""
    low_min: float
    high_min: float
    """`low_min` and `high_min` are the range of `time_to_train_min`."""
    probability: float
    """The probability that this evaluation is the first that reaches the target."""
    cumulative: float
    """The probability that this evaluation or an earlier evaluation reaches the target."""


class WatchedTrial(Part, kw_only=True):
    """The state of a trial at one moment. Values that the log does not have are null."""

    name: str
    trial: int
    """The number of the trial in its log, from 1."""
    phase: str
    """waiting, preparing, training, evaluating, measuring, generating or stopped."""
    status: str | None
    outcome: str | None
    """The outcome in the ledger of the run."""
    note: str | None
    """A remark about the log."""
    is_reached: bool
    """Whether the trial has reached its target."""
    benchmark: str | None
    platform: str | None
    seed: int | None
    global_batch_size: int | None
    target: float | None
    started: str | None
    """The time of run_start."""
    stopped: str | None
    """The time of run_stop."""
    last_record: str | None
    """The time of the latest record."""
    samples: int | None
    step: int | None
    train_loss: float | None
    lr: float | None
    not_finite: str | None
    evaluations: tuple[Evaluation, ...]
    points_requested: int | None
    points_name: str
    points_done: int
    last_point: str | None
    answers_requested: int | None
    hottest_gpu: Hottest | None
    elapsed_s: float | None
    silent_s: float | None
    """The time since the latest line of the log."""
    step_time_ms: float | None
    """The recent step time. After the trial has stopped: the step time of the whole trial."""
    step_time_median_ms: float | None
    step_time_trend: float | None
    eval_time_s: float | None
    eval_time_is_estimated: bool
    next_samples: int | None
    next_s: float | None
    """The time until the result of the next evaluation."""
    coming: tuple[Coming, ...]
    samples_range: tuple[float | None, float | None, float | None] | None
    """The forecast of samples to target: low, median and high of a 90 % range."""
    time_to_train_range_min: tuple[float | None, float | None, float | None] | None
    basis: str | None
    """What the forecast is based on, or why there is none."""
    left_s: float | None
    """The remaining time of the time limit."""
    chance_in_time: float | None
    """The probability of reaching the target within the time limit."""
    warnings: tuple[str, ...]


class Progress(Answer, kw_only=True, tag="runstop/progress/1.0"):
    """The state of a run at one moment."""

    time: str | None
    trials: tuple[WatchedTrial, ...]
    """The state of each trial."""
    note: str


class Image(Answer, kw_only=True, tag="runstop/image/1.0"):
    """One image file."""

    file: str
    passed: bool
    findings: tuple[Finding, ...]
    record: Record | None
    """The source and the checksum of the image."""
    size_bytes: int | None
    is_new: bool | None = None
    """Only for `image import`. False if the image was imported before."""


class DownloadPlan(Answer, kw_only=True, tag="runstop/download-plan/1.0"):
    """What a download would fetch."""

    kind: str
    """`model` or `data`."""
    repo: str
    endpoint: str
    revision: str
    is_gated: bool
    folder: str
    total_bytes: int
    present_bytes: int
    missing_bytes: int
    free_bytes: int
    """The free space on the disk of the folder."""
    files: tuple[RemoteFile, ...]


class WrongFile(Part, kw_only=True):
    """A file that has changed since its download."""

    file: str
    what: str


class Download(Answer, kw_only=True, tag="runstop/download/1.0"):
    """A downloaded folder, and whether its files are unchanged."""

    folder: str
    passed: bool
    """Whether the download is complete and no file has changed."""
    kind: str
    repo: str
    endpoint: str
    revision: str
    is_complete: bool
    wrong_files: tuple[WrongFile, ...]


class Calibration(Answer, kw_only=True, tag="runstop/calibration/1.0"):
    """The measured rates of a GPU."""

    file: str
    """The file of the GPU in your config folder."""
    skipped: tuple[str, ...]
    """The models that do not fit into the memory of the GPU."""
    link_error: str | None
    """Why the links between the GPUs were not measured."""
    gpu: Gpu
