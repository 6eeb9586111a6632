"""Read GPU telemetry from a log: power, clocks, temperature, throttling, memory and energy.

The records are written by `jobs.ranks.telemetry`. A log may contain anything, so every number is checked.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from bench.contract import mllog
from bench.mlperf import speed
from bench.mlperf.log import Log, finding, number
from bench.mlperf.reader import printable
from bench.rules.finding import Finding


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """A quantity of one GPU between run_start and run_stop."""

    median: float
    max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuTelemetry:
    """The values of one GPU between run_start and run_stop. A value is None if the driver does not report the value."""

    node: str
    gpu: int
    power_w: Level | None
    sm_clock_mhz: Level | None
    memory_clock_mhz: Level | None
    temperature_c: Level | None
    memory_gib: Level | None
    power_limit_w: float | None
    max_sm_clock_mhz: float | None
    throttle: dict[str, float] | None
    """The share of time in which each reason reduced the clocks."""
    energy_j: float | None
    integrated_energy_j: float | None
    """The energy computed from the sampled power. Only set if `energy_j` is from the counter of the GPU."""
    training_energy_j: float | None
    """The energy of training alone, without loading, evaluations and checkpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry:
    """All sampled GPUs of a trial, or of several trials on the same GPUs."""

    gpus: tuple[GpuTelemetry, ...]
    missing: tuple[str, ...]
    """The nodes that were not sampled, each with the reason."""
    refused: dict[str, str]
    """Values that a driver did not report, with the reason."""
    driver: str | None
    steps: float | None
    tokens: float | None
    """Tokens of the steps that the training energy covers."""
    trials: int = 1

    @property
    def num_gpus(self) -> int:
        return len(self.gpus) // self.trials

    def levels(self, name: str) -> list[Level]:
        """Return a quantity of each GPU; empty unless all GPUs have it."""
        levels = [getattr(gpu, name) for gpu in self.gpus]
        return [] if None in levels else levels

    def median(self, name: str) -> float | None:
        """Return the median over GPUs of their medians."""
        levels = self.levels(name)
        return median(level.median for level in levels) if levels else None

    def peak(self, name: str) -> float | None:
        return max((level.max for level in self.levels(name)), default=None)

    @property
    def throttle(self) -> dict[str, float]:
        """The share of time of each reason, as a mean over the GPUs that report it."""
        known = [gpu.throttle for gpu in self.gpus if gpu.throttle is not None]
        names = dict.fromkeys(name for shares in known for name in shares)
        return {name: fmean(shares.get(name, 0.0) for shares in known) for name in names}

    @property
    def throttle_is_known(self) -> bool:
        return any(gpu.throttle is not None for gpu in self.gpus)

    @property
    def power_limit_w(self) -> float | None:
        """Return the lowest limit of a GPU."""
        return min((gpu.power_limit_w for gpu in self.gpus if gpu.power_limit_w is not None), default=None)

    @property
    def energy_j(self) -> float | None:
        """The energy of all GPUs from run_start to run_stop, as a mean over trials; None unless all are known."""
        total = self._sum(gpu.energy_j for gpu in self.gpus)
        return None if total is None else total / self.trials

    @property
    def energy_per_step_j(self) -> float | None:
        return self._training_energy_per(self.steps)

    @property
    def energy_per_token_j(self) -> float | None:
        return self._training_energy_per(self.tokens)

    def _training_energy_per(self, count: float | None) -> float | None:
        total = self._sum(gpu.training_energy_j for gpu in self.gpus)
        return total / count if total is not None and count else None

    def _sum(self, energies: Iterable[float | None]) -> float | None:
        known = list(energies)
        return None if self.missing or not known or None in known else sum(filter(None, known))


def read(log: Log) -> Telemetry | None:
    """Return the GPU telemetry of a log; None without it, as on CPUs."""
    records = [(str(e.metadata.get("node", "?")), e.value) for e in log.all(mllog.GPU_TELEMETRY)]
    known = [(node, value) for node, value in records if isinstance(value, dict)]
    if not known:
        return None
    gpus = tuple(gpu for node, value in known for gpu in _gpus(node, value))
    samples, gbs, tokens = _trained(log), log.integer(mllog.GLOBAL_BATCH_SIZE), speed.sequence_length(log)
    return Telemetry(
        gpus=gpus,
        missing=tuple(_missing(known)),
        refused={str(k): str(v) for _, value in known for k, v in _object(value.get("refused")).items()},
        driver=next((str(value["driver"]) for _, value in known if "driver" in value), None),
        steps=samples / gbs if samples and gbs else None,
        tokens=samples * tokens if samples and tokens else None,
    )


def joined(trials: Sequence[Telemetry]) -> Telemetry | None:
    """Return the telemetry of several trials as one; None without trials."""
    if not trials:
        return None
    counts = {name: [getattr(each, name) for each in trials] for name in ("steps", "tokens")}
    return Telemetry(
        gpus=tuple(gpu for each in trials for gpu in each.gpus),
        missing=tuple(dict.fromkeys(missing for each in trials for missing in each.missing)),
        refused={name: reason for each in trials for name, reason in each.refused.items()},
        driver=trials[0].driver,
        **{name: None if None in each else sum(each) for name, each in counts.items()},
        trials=len(trials),
    )


MAX_DISAGREEMENT = 0.02
"""How far the energy by the integral of power may be from that by the counter, as a share."""


def check(log: Log) -> Iterator[Finding]:
    """Yield the GPU whose two energies differ most, if they differ too much."""
    telemetry = read(log)
    compared = [
        (gpu.integrated_energy_j / gpu.energy_j - 1, gpu)
        for gpu in (telemetry.gpus if telemetry else ())
        if gpu.energy_j and gpu.integrated_energy_j is not None
    ]
    differing = [(share, gpu) for share, gpu in compared if abs(share) > MAX_DISAGREEMENT]
    if not differing:
        return
    share, gpu = max(differing, key=lambda each: abs(each[0]))
    what = (
        f"the energy of {len(differing)} of {len(compared)} GPUs differs by more than {100 * MAX_DISAGREEMENT:g} % "
        f"between the recorded power and the energy counter; GPU {gpu.gpu} of {gpu.node}: "
        f"{gpu.integrated_energy_j:,.0f} J from the power, {gpu.energy_j:,.0f} J on the counter ({100 * share:+.1f} %)"
    )
    yield finding("LOG-27", "warning", log.all(mllog.GPU_TELEMETRY)[0].line, printable(what))


def _missing(known: Sequence[tuple[str, dict[str, Any]]]) -> Iterator[str]:
    for node, value in known:
        if mllog.NOT_MEASURED in value:
            yield printable(f"{node}: {value[mllog.NOT_MEASURED]}")


def _gpus(node: str, record: dict[str, Any]) -> Iterator[GpuTelemetry]:
    gpus = record.get("gpus")
    for gpu in gpus if isinstance(gpus, list) else ():
        if isinstance(gpu, dict) and (index := number(gpu.get("gpu"))) is not None:
            shares = gpu.get("throttle")
            values: dict[str, Any] = {name: _level(gpu.get(name)) for name in LEVELS}
            values |= {name: number(gpu.get(name)) for name in _NUMBERS}
            values["throttle"] = _numbers(shares) if isinstance(shares, dict) else None
            yield GpuTelemetry(node=node, gpu=int(index), **values)


LEVELS = ("power_w", "sm_clock_mhz", "memory_clock_mhz", "temperature_c", "memory_gib")
_NUMBERS = ("power_limit_w", "max_sm_clock_mhz", "energy_j", "integrated_energy_j", "training_energy_j")


def _level(value: Any) -> Level | None:
    level = _numbers(_object(value))
    return Level(median=level["median"], max=level["max"]) if level.keys() >= {"median", "max"} else None


def _object(value: Any) -> dict[Any, Any]:
    return value if isinstance(value, dict) else {}


def _numbers(value: dict[Any, Any]) -> dict[str, float]:
    return {str(key): checked for key, each in value.items() if (checked := number(each)) is not None}


def _trained(log: Log) -> float | None:
    """Return the samples of all training blocks of the log; None if one does not count them."""
    total = 0.0
    blocks = [event for event in log.run if event.key in (mllog.BLOCK_START, mllog.BLOCK_STOP)]
    for before, after in pairwise(blocks):
        if (before.key, after.key) != (mllog.BLOCK_START, mllog.BLOCK_STOP):
            continue
        began, ended = (number(event.metadata.get("samples_count")) for event in (before, after))
        if began is None or ended is None:
            return None
        total += ended - began
    return total
