"""The trials of tasks that train nothing, read for one page: all of a kind, each log once."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from bench.errors import ConfigError
from bench.mlperf import log as logs
from bench.mlperf import reader
from bench.mlperf import result as results
from bench.mlperf.result import Result
from bench.report.sets import sets_in
from bench.results import GenerationResult, KernelsResult, ServingResult, of_kind

K = TypeVar("K", KernelsResult, GenerationResult, ServingResult)
_WORK: dict[type, str] = {
    KernelsResult: "measure kernels",
    GenerationResult: "generate",
    ServingResult: "load a server",
}


@dataclass(frozen=True, slots=True)
class ReadTrial(Generic[K]):
    """The log of one trial, read."""

    name: str
    result: Result
    found: K
    """What it measured, by the kind of its task."""

    @property
    def is_proven(self) -> bool:
        return self.result.valid and self.found.proven


def load(paths: Sequence[Path]) -> list[ReadTrial[Any]]:
    """Return the trials of logs, run folders and folders of such folders, in their order; none if their tasks train.

    Raises:
        ConfigError: some are of one kind, and some of another.
        LogError: a log cannot be read.
    """
    trials: list[ReadTrial[Any]] = []
    others: list[str] = []
    for path in itertools.chain.from_iterable(map(sets_in, paths)):
        for file in sorted(path.glob("result_*.txt")) if path.is_dir() else [path]:
            log = logs.read(file) if file.is_file() else None
            found = None if log is None else of_kind(log)
            if log is None or found is None or (trials and type(found) is not type(trials[0].found)):
                others.append(str(path))
                continue
            name = f"{file.parent.name}/{file.stem}" if path.is_dir() else str(file)
            trials.append(ReadTrial(name, results.result(log, str(file), reader.system(file)), found))
    if trials and others:
        raise ConfigError(
            f"runs that {_WORK[type(trials[0].found)]}, and runs that do not, are not shown on one page",
            where=", ".join(dict.fromkeys(others)),
            fix="report them apart",
        )
    return trials
