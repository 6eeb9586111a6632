"""Read a round's results repository of MLPerf Training into one table of systems.

The layout is SUBMITTER/systems/SYSTEM.json and SUBMITTER/results/SYSTEM/BENCHMARK/result_*.txt, as in
github.com/mlcommons/training_results_v5.1. A part of a repository is enough. Minutes are scored from the logs, as
`bench.mlperf.score` does; `scaling.json` and `summary.json` of the repository are only compared with them.
"""

import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from bench.contract import atomic_files, mllog
from bench.errors import BenchError, ConfigError
from bench.mlperf import gpu_count, system_tables
from bench.mlperf.benchmarks import BENCHMARKS
from bench.mlperf.reader import clean, is_number
from bench.mlperf.result import Result
from bench.mlperf.score import Score, score
from bench.mlperf.system_tables import System
from bench.rules.finding import errors

_ROUND = re.compile(r"v\d+\.\d+")
_SAME_FACTOR = 1e-6
_SAME_MINUTES = 0.01
"""Summaries round the minutes."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One benchmark of one system of a round; a field is None if neither logs nor system description have it."""

    folder: str
    """Of the logs."""
    benchmark: str
    round: str
    submitter: str
    system: str
    division: str | None
    availability: str | None
    """The status of the system description, such as Available on-premise."""
    num_nodes: int | None
    num_gpus: int | None
    accelerator: str | None
    global_batch_size: int | None
    tp: int | None
    pp: int | None
    cp: int | None
    num_runs: int
    num_failed: int | None
    olympic_minutes: float | None
    rcp_factor: float | None
    minutes: float | None
    """The score; for a single valid run its minutes; None otherwise."""
    mean_samples: float | None
    samples: tuple[tuple[int, int], ...]
    """(samples at the evaluation that reached the target, runs)."""
    eval_interval: int | None
    step_time_s: float | None
    tokens_s_gpu: float | None
    valid: bool
    """Whether the logs are a score by the official rules."""
    notes: tuple[str, ...]
    """Why a number is missing, and where sources differ."""

    @property
    def why_not_listed(self) -> str:
        """Why the entry cannot be a row of a table of published systems; empty if it can."""
        if self.division != "closed":
            return f"it is of the {self.division} division" if self.division else "its division is not known"
        if self.num_gpus is None or not self.accelerator:
            return "its accelerators are not known"
        return "" if self.minutes is not None else "it has no score"

    def as_system(self) -> System:
        """Return the row of a table of published systems; only for an entry that can be listed."""
        assert self.num_gpus is not None and self.accelerator and self.minutes is not None
        same = (
            *("benchmark", "round", "submitter", "system", "num_nodes", "global_batch_size", "tp", "pp", "cp"),
            *("num_runs", "num_failed", "olympic_minutes", "rcp_factor", "mean_samples", "eval_interval", "samples"),
            *("step_time_s", "tokens_s_gpu"),
        )
        return System(
            num_gpus=self.num_gpus,
            accelerator=self.accelerator,
            official_minutes=self.minutes,
            **{name: getattr(self, name) for name in same},
        )


@dataclass(frozen=True)
class Repository:
    """A results repository of one round."""

    folder: Path
    round: str
    benchmarks: Sequence[str]

    @cached_property
    def folders(self) -> list[Path]:
        """The folders with logs of the benchmarks, by submitter and system."""
        folders = (
            folder
            for benchmark in self.benchmarks
            for folder in self.folder.glob(f"*/results/*/{benchmark}")
            if any(folder.glob("result_*.txt"))
        )
        return sorted(folders, key=lambda folder: (self.benchmarks.index(folder.name), folder))

    @cached_property
    def summary(self) -> dict[tuple[str, str, str], float]:
        """The minutes of the repository's own summaries, by benchmark, submitter and system."""
        return {
            (benchmark, str(row.get("submitter")), str(row.get("system"))): row[benchmark]
            for file in (*self.folder.glob("summary*.json"), *self.folder.glob("*/summary*.json"))
            for row in _rows(file)
            for benchmark in self.benchmarks
            if is_number(row.get(benchmark))
        }

    def entries(self) -> Iterator[Entry]:
        """Yield the entry of each folder with logs. Logs that cannot be read give an entry without minutes."""
        for place, folder in enumerate(self.folders, 1):
            _log.info("%s (%d of %d)", folder, place, len(self.folders))
            yield _entry(self, folder)


def opened(folder: Path, *, benchmarks: Sequence[str], round_: str | None = None) -> Repository:
    """Return the repository of a round in a folder.

    Raises:
        ConfigError: it is no such folder, its round is not known, or it has no logs of these benchmarks.
    """
    whole = "give the folder of a cloned repository, such as training_results_v5.1"
    if not folder.is_dir():
        what = "this path is not a folder" if folder.exists() else "this folder does not exist"
        raise ConfigError(what, where=str(folder), fix=whole)
    if (folder / "HEAD").is_file() and (folder / "objects").is_dir():
        fix = f"run `git clone {folder} training_results_vX.Y`, and give the new folder"
        raise ConfigError("this git repository has no checked-out files", where=str(folder), fix=fix)
    if (folder / "results").is_dir() and (folder / "systems").is_dir():
        what = "this is the folder of one submitter, but the table of a round needs all submitters"
        raise ConfigError(what, where=str(folder), fix=f"give the parent folder: {folder.resolve().parent}")
    name = round_ or (match[0] if (match := _ROUND.search(folder.resolve().name)) else "")
    if not _ROUND.fullmatch(name):
        what = "the name of the folder does not contain a round, such as v5.1"
        if round_ is not None:
            what = f"{round_!r:.40} is not the name of a round, such as v5.1"
        raise ConfigError(what, where=str(folder), fix="add --round, such as --round v5.1")
    repository = Repository(folder, name, benchmarks)
    if not repository.folders:
        what = f"this folder has no logs of {' or '.join(benchmarks)} (SUBMITTER/results/SYSTEM/BENCHMARK/result_*.txt)"
        has = sorted({path.name for path in folder.glob("*/results/*/*") if path.is_dir()})
        fix = f"this folder has logs of {', '.join(has)}; to score one folder: runstop score FOLDER" if has else whole
        raise ConfigError(what, where=str(folder), fix=fix)
    return repository


def write(file: Path, entries: Sequence[Entry], *, source: str) -> int:
    """Write the entries that can be listed as a table of published systems, and return how many there are.

    Raises:
        ConfigError: no entry can be listed, or the file cannot be written.
    """
    listed = [entry.as_system() for entry in entries if not entry.why_not_listed]
    if not listed:
        first_reason = f"{entries[0].folder}: {entries[0].why_not_listed}"
        fix = "give a repository with complete sets of logs; the notes of the table on the screen explain each system"
        raise ConfigError(
            f"no system can be listed in the table; first reason: {first_reason}", where=str(file), fix=fix
        )
    notes = (
        f"Source: {clean(source)}. Computed from the logs by runstop; not verified by MLCommons.",
        "official_minutes = olympic_minutes x rcp_factor (MLPerf's RCP checker). With num_runs 1 there is no score.",
        "samples: runs by the samples at the evaluation that reached the target. tp, pp, cp: empty if not in the logs.",
    )
    system_tables.write(file, system_tables.text(listed, notes=notes))
    return len(listed)


def _entry(repository: Repository, folder: Path) -> Entry:
    submitter, system, benchmark = folder.parents[2].name, folder.parent.name, folder.name
    described = folder.parents[2] / "systems" / f"{system}.json"
    description, notes = atomic_files.read_object(described), []
    if not description:
        notes.append(f"there is no readable system description {described.name}")
    base: dict[str, Any] = {
        "folder": str(folder),
        "benchmark": benchmark,
        "round": repository.round,
        "submitter": clean(submitter),
        "system": clean(system),
        "availability": _words(description.get("status")),
    }
    try:
        scored = score(folder)
    except BenchError as error:
        return Entry(**base, **_hardware(description, None), **_NO_LOGS, notes=(*notes, f"no numbers: {error.what}"))
    notes += _differences(repository, folder, scored, description)
    notes += [finding.what for finding in errors(scored.findings)]
    if scored.benchmark != benchmark:
        notes.append(f"the logs are of {scored.benchmark or 'several benchmarks'}, not of {benchmark}")
    hardware = _hardware(description, scored)
    return Entry(**base, **hardware, **_numbers(scored, num_gpus=hardware["num_gpus"]), notes=tuple(notes))


_NO_LOGS: dict[str, Any] = {
    **dict.fromkeys(("global_batch_size", "tp", "pp", "cp", "num_failed", "olympic_minutes", "rcp_factor", "minutes")),
    **dict.fromkeys(("mean_samples", "eval_interval", "step_time_s", "tokens_s_gpu")),
    "num_runs": 0,
    "samples": (),
    "valid": False,
}


def _hardware(description: Mapping[str, Any], scored: Score | None) -> dict[str, Any]:
    """Return division and hardware: of the system description, else of the logs."""
    logged = next((result.system for result in scored.results if result.system), {}) if scored else {}
    if any(result.gpu_count_conflict for result in (scored.results if scored else ())):
        logged = {}
    nodes = _count(description, "number_of_nodes") or _count(logged, "number_of_nodes")
    per_node = _count(description, "accelerators_per_node") or _count(logged, "accelerators_per_node")
    model = _words(description.get("accelerator_model_name")) or _words(logged.get("accelerator_model_name"))
    return {
        "division": _words(description.get("division")) or (scored and scored.division),
        "num_nodes": nodes,
        "num_gpus": nodes * per_node if nodes and per_node else (scored and scored.num_gpus),
        "accelerator": model,
    }


def _numbers(scored: Score, *, num_gpus: int | None) -> dict[str, Any]:
    """Return what the logs say."""
    valid = [result for result in scored.results if result.valid]
    samples = [result.samples_to_target for result in valid if result.samples_to_target is not None]
    speeds = [result.throughput_samples_s for result in valid if result.throughput_samples_s]
    gbs, known = scored.global_batch_size, BENCHMARKS.get(scored.benchmark or "")
    row = known.sequence_length if known else None
    single = valid[0].minutes if len(scored.results) == len(valid) == 1 else None
    return {
        "global_batch_size": gbs,
        "tp": _logged(scored.results, mllog.TENSOR_PARALLELISM),
        "pp": _logged(scored.results, mllog.PIPELINE_PARALLELISM),
        "cp": _logged(scored.results, mllog.CONTEXT_PARALLELISM),
        "num_runs": scored.num_runs,
        "num_failed": scored.num_failed,
        "olympic_minutes": scored.olympic_minutes,
        "rcp_factor": scored.rcp_factor,
        "minutes": scored.official_minutes if single is None else single,
        "mean_samples": fmean(samples) if samples else None,
        "samples": tuple(scored.samples_distribution.items()),
        "eval_interval": _interval(valid),
        "step_time_s": gbs / median(speeds) if gbs and speeds else None,
        "tokens_s_gpu": median(speeds) * row / num_gpus if speeds and row and num_gpus else None,
        "valid": scored.valid,
    }


def _interval(results: Sequence[Result]) -> int | None:
    """Return the most frequent number of samples between two evaluations."""
    gaps = Counter(
        round(after.samples - before.samples)
        for result in results
        for before, after in pairwise(result.evaluations)
        if before.samples is not None and after.samples is not None
    )
    return gaps.most_common(1)[0][0] if gaps else None


def _logged(results: Sequence[Result], key: str) -> int | None:
    """Return the value that all logs have; None if they differ or lack it."""
    values = {value if is_number(value := result.hyperparameters.get(key)) else None for result in results}
    value = values.pop() if len(values) == 1 else None
    return None if value is None else int(value)


def _differences(repository: Repository, folder: Path, scored: Score, description: Mapping[str, Any]) -> Iterator[str]:
    """Yield where the logs, the system description, scaling.json and the summary differ."""
    for name in ("number_of_nodes", "accelerators_per_node"):
        logged = {count for result in scored.results if (count := _count(result.system, name)) is not None}
        own = _count(description, name)
        if own is not None and logged - {own}:
            counts = ", ".join(map(str, sorted(logged)))
            yield f"{name} is {counts} in the logs, but {own} in the system description, which is used"
    no_devices = (gpu_count.NO_DEVICES in str(result.system.get("accelerator_model_name")) for result in scored.results)
    if any(no_devices):
        yield "a log's own record of the system lists no devices"
    stored = atomic_files.read_object(folder / "scaling.json").get("scaling_factor", 1.0)
    factor = scored.rcp_factor
    if factor is not None and is_number(stored) and abs(stored - factor) > _SAME_FACTOR:
        yield f"scaling.json has the factor {stored:.6f}, but MLPerf's RCP checker computes {factor:.6f}, which is used"
    key = (folder.name, folder.parents[2].name, folder.parent.name)
    named = _words(description.get("system_name"))
    printed = repository.summary.get(key) or repository.summary.get((key[0], key[1], named or ""))
    if printed is not None and (
        scored.official_minutes is None or abs(printed - scored.official_minutes) > _SAME_MINUTES
    ):
        ours = "no score" if scored.official_minutes is None else f"{scored.official_minutes:.3f} min"
        yield f"the repository's summary has {printed:.3f} min, but the logs have {ours}"


def _rows(file: Path) -> list[dict[str, Any]]:
    content = atomic_files.read(file)
    return [row for row in content if isinstance(row, dict)] if isinstance(content, list) else []


def _count(record: Mapping[str, Any], name: str) -> int | None:
    """Return a count of a system description, which is a text in most and a number in some."""
    text = str(record.get(name, "")).strip()
    return int(text) if re.fullmatch(r"[1-9][0-9]{0,6}", text) else None


def _words(value: Any) -> str | None:
    return clean(value.strip()) if isinstance(value, str) and value.strip() else None
