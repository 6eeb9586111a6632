"""Write the power of runs as MLPerf lays it out: power/result_K/node_x.txt, and sw_x.txt for switches.

Power comes from what was recorded while a trial ran: the readings of each node's own power meter, or those of a meter
that the user recorded (`--meter`). The power of the GPUs alone is not the power of a node, so it is only packed for a
package that is marked as not for submission.

Sources: MLCommons' "MLPerf Training - Power Measurement Rules" (what is measured, and how often), and these files of
mlperf-logging 4.1.68: power_measurement.py (records), power_checker.py (names and numbers of files),
result_summarizer.py (energy).
"""

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from bench.contract import regular_files, run_files, telemetry
from bench.contract.telemetry import Sample
from bench.errors import ConfigError
from bench.mlperf.gpu_count import as_count
from bench.mlperf.official import num_dropped
from bench.mlperf.package.entry import Entry, Run
from bench.mlperf.result import Result
from bench.rules.finding import Finding, Severity, broken

MAX_GAP_S = 1.5
"""The rules require a sample at least once a second. Samples are taken every second, some tens of milliseconds early or
late; a longer gap is a missing sample."""
MIN_READINGS = 60
"""The rules require at least so many power samples for each run."""
METER_COLUMNS = ("time_ms", "node", "power_w")
_MOST_SHOWN = 5


class Scope(StrEnum):
    """What was measured."""

    node = "node"
    """The whole node, at its power supplies, as the rules require."""
    gpus = "gpus"
    """The GPUs only."""


Series = list[tuple[int, float]]
"""Moments in milliseconds since 1970, and watts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerRequest:
    """Which power to pack, and what telemetry cannot know."""

    scope: Scope = Scope.node
    meters: tuple[Path, ...] = ()
    """CSV files with the columns time_ms, node and power_w, which replace the recorded readings of the nodes."""
    current: str = "AC"
    """AC or DC: on which side of the power supplies the meter is."""
    efficiency: float = 1.0
    """Output over input of the power supplies, if the meter is on their input; the energy is multiplied by it."""
    switches_w: tuple[float, ...] = ()
    """The estimate of each switch: its maximum specified power, times the share of it that the run uses."""


@dataclass(frozen=True, slots=True)
class RunPower:
    """The power of one run."""

    result: Result
    nodes: tuple[Series, ...]
    """One series per node, from the last moment before run_start to the first after run_stop."""

    def energy_j(self, request: PowerRequest) -> float | None:
        """Return the energy as MLPerf's result summarizer computes it; None without run time or readings."""
        start, stop = self.result.run_start_ms, self.result.run_stop_ms
        if start is None or stop is None or any(len(series) < 2 for series in self.nodes):
            return None
        energy = 0.0
        for series in self.nodes:
            summed = sum(power_w * (now - before) for (before, _), (now, power_w) in pairwise(series))
            energy += request.efficiency * summed * (stop - start) / (series[-1][0] - series[0][0]) / 1000
        return energy + sum(request.switches_w) * (stop - start) / 1000


Measured = list[tuple[Entry, list[RunPower]]]
"""The power of each run of each entry."""


def measure(entries: Sequence[Entry], request: PowerRequest) -> tuple[Measured, list[Finding]]:
    """Return the power of each run, in the order of entries and runs, and why it is not as the rules require.

    Raises:
        ConfigError: a meter's file is not valid.
    """
    by_meter = _metered(request.meters)
    measured: Measured = []
    findings: list[Finding] = []
    for entry in entries:
        findings += _entry_findings(entry, request)
        of_runs = [_of_run(run, result, by_meter, request) for run in entry.runs for result in run.results]
        measured.append((entry, [power for power, _ in of_runs]))
        findings += [problem for _, problems in of_runs for problem in problems]
    return measured, findings


def write(submission: Path, measured: Measured, request: PowerRequest) -> dict[str, float]:
    """Write power/ into each folder results/<system>/<benchmark> of a submission; return the energies by folder."""
    energies_j = {}
    for entry, powers in measured:
        folder = f"results/{entry.system}/{entry.benchmark}"
        _write_entry(submission / folder, powers, request)
        if (energy_j := _score_j(entry, powers, request)) is not None:
            energies_j[folder] = energy_j
    return energies_j


def _write_entry(folder: Path, powers: Sequence[RunPower], request: PowerRequest) -> None:
    for number, power in enumerate(powers):
        here = folder / "power" / f"result_{number}"
        here.mkdir(parents=True)
        for index, series in enumerate(power.nodes):
            (here / f"node_{index}.txt").write_text("".join(_node_lines(series, f"node_{index}", request)))
        start, stop = power.result.run_start_ms, power.result.run_stop_ms
        for index, power_w in enumerate(request.switches_w):
            lines = _switch_lines(power_w, start or 0, stop or 0, f"sw_{index}")
            (here / f"sw_{index}.txt").write_text("".join(lines))


def _score_j(entry: Entry, powers: Sequence[RunPower], request: PowerRequest) -> float | None:
    """Return the mean energy of the runs that count in the olympic mean of the times; None if one is unknown."""
    timed = [(p.result.minutes, p.energy_j(request)) for p in powers if p.result.valid and p.result.minutes is not None]
    energies = [energy for _, energy in sorted(timed, key=lambda each: each[0])]
    dropped, failed = num_dropped(entry.benchmark), len(powers) - len(timed)
    counted = energies[dropped : len(energies) - (dropped - failed)] if failed <= dropped else []
    known = [energy for energy in counted if energy is not None]
    return fmean(known) if known and len(known) == len(counted) else None


def require_valid(request: PowerRequest) -> None:
    """Raise ConfigError for a value that is not possible."""
    if not 0 < request.efficiency <= 1:
        raise ConfigError(
            f"the efficiency of the power supplies is {request.efficiency:g}, but must be above 0 and at most 1",
            where="--psu-efficiency",
            fix="set --psu-efficiency to the output power divided by the input power, such as 0.94",
        )
    if bad := [watts for watts in request.switches_w if not 0 < watts < float("inf")]:
        raise ConfigError(
            f"the power of a switch is {bad[0]:g} W, but must be above 0 and finite",
            where="--switch-watts",
            fix="write the power of each switch in watts, such as --switch-watts 350 350",
        )
    if request.meters and request.scope is Scope.gpus:
        fix = "set --power node, or remove --meter"
        raise ConfigError("--meter gives the power of nodes, but --power is gpus", where="--meter", fix=fix)


def _metered(paths: Sequence[Path]) -> dict[str, Series]:
    """Return the readings of the user's meters by node, in the order of time.

    Raises:
        ConfigError: a file cannot be read, or a line is not a reading.
    """
    nodes: dict[str, Series] = {}
    for path in paths:
        try:
            text = regular_files.read_text(path, follows_links=True)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the readings of a meter cannot be read: {error}", where=str(path), fix=_FIX) from error
        rows = csv.DictReader(text.splitlines())
        if missing := [name for name in METER_COLUMNS if name not in (rows.fieldnames or ())]:
            raise ConfigError(f"the file has no column {', '.join(missing)}", where=str(path), fix=_FIX)
        for row in rows:
            try:
                time_ms, node, power_w = int(row["time_ms"]), row["node"], float(row["power_w"])
                if not (node and 0 <= power_w < float("inf")):
                    raise ValueError
            except (TypeError, ValueError):
                what = f"line {rows.line_num} is not a reading: {','.join(map(str, row.values()))!r:.80}"
                raise ConfigError(what, where=f"{path}:{rows.line_num}", fix=_FIX) from None
            nodes.setdefault(node, []).append((time_ms, power_w))
    return {node: sorted(series) for node, series in nodes.items()}


_FIX = "write a CSV file with the columns time_ms (since 1970), node and power_w, and one line per node and second"


def _entry_findings(entry: Entry, request: PowerRequest) -> Iterator[Finding]:
    entry_name = f"{entry.benchmark} on {entry.system}"
    if request.scope is Scope.gpus:
        what = f"{entry_name}: the package contains only GPU power, but MLPerf requires the power of whole nodes"
        yield broken("PCK-06", what, entry_name)
    nodes = max((_num_nodes(run) or 1 for run in entry.runs), default=1)
    if nodes > 1 and not request.switches_w:
        yield broken("PCK-09", f"{entry_name}: the runs use {nodes} nodes, but --switch-watts is missing", entry_name)


def _num_nodes(run: Run) -> int | None:
    if run.plan is not None:
        return run.plan.world.num_nodes
    return as_count(run.results[0].system.get("number_of_nodes"))


def _of_run(
    run: Run, result: Result, by_meter: dict[str, Series], request: PowerRequest
) -> tuple[RunPower, list[Finding]]:
    """Return the power of a run within its time, and what is missing."""
    known = by_meter or _recorded(run, result, request.scope)
    start, stop = result.run_start_ms, result.run_stop_ms
    if start is None or stop is None:
        return RunPower(result, ()), []  # the log is not valid, which another rule reports
    cut = {node: _within(series, start, stop) for node, series in known.items()}
    power = RunPower(result, tuple(cut.values()))
    findings = [
        broken("PCK-07", f"{result.file}: {what}", result.file)
        for what in _uncovered(cut, start, stop, expected=_num_nodes(run), scope=request.scope)
    ]
    if not findings:
        findings += _disagreements(power, request)
    return power, findings


def _recorded(run: Run, result: Result, scope: Scope) -> dict[str, Series]:
    """Return what the run itself recorded, by node."""
    log = Path(result.file)
    trial = log.stem.removeprefix("result_")
    pattern = (run_files.node_power if scope is Scope.node else run_files.telemetry)(trial, "*")
    before, after = Path(pattern).name.split("*")
    series = {}
    for file in sorted(run.folder.glob(pattern)):
        node = file.name.removeprefix(before).removesuffix(after)
        try:
            series[node] = _readings(file) if scope is Scope.node else _summed(list(telemetry.read(file)))
        except OSError as error:
            what = f"the recorded power cannot be read: {error.strerror}"
            raise ConfigError(what, where=str(file), fix="restore the file, or pack without --power") from error
    return series


def _readings(file: Path) -> Series:
    return [(reading.time_ms, reading.power_w) for reading in telemetry.readings(file)]


def _summed(samples: Sequence[Sample]) -> Series:
    """Return the power of all GPUs at each moment; without that of one GPU the moment is left out, as a gap."""
    moments: list[dict[int, Sample]] = []
    for sample in samples:
        if not moments or sample.gpu in moments[-1]:
            moments.append({})
        moments[-1][sample.gpu] = sample
    gpus = {sample.gpu for sample in samples}
    return [
        (max(sample.time_ms for sample in moment.values()), sum(sample.power_w or 0.0 for sample in moment.values()))
        for moment in moments
        if moment.keys() == gpus and all(sample.power_w is not None for sample in moment.values())
    ]


def _within(series: Series, start: int, stop: int) -> Series:
    """Return the readings from the last one until run_start to the first one from run_stop on."""
    first = max((n for n, (time_ms, _) in enumerate(series) if time_ms <= start), default=0)
    last = min((n for n, (time_ms, _) in enumerate(series) if time_ms >= stop), default=len(series) - 1)
    return series[first : last + 1]


def _uncovered(nodes: dict[str, Series], start: int, stop: int, *, expected: int | None, scope: Scope) -> Iterator[str]:
    """Yield what the rules require and the readings do not have."""
    what = "the power of a node" if scope is Scope.node else "the power of the GPUs of a node"
    if not nodes or (expected is not None and len(nodes) < expected):
        yield f"{what} was recorded on {len(nodes)} of {expected or 'an unknown number of'} nodes"
    for node, series in list(nodes.items())[:_MOST_SHOWN]:
        if not series or series[0][0] > start:
            late = f"{(series[0][0] - start) / 1000:.1f} s after run_start" if series else "never"
            yield f"the readings of node {node} begin {late}" if series else f"node {node} has no reading"
        if series and series[-1][0] < stop:
            yield f"the readings of node {node} end {(stop - series[-1][0]) / 1000:.1f} s before run_stop"
        gaps = [(now - before, before) for (before, _), (now, _) in pairwise(series) if now - before > 1000 * MAX_GAP_S]
        if gaps:
            longest, before = max(gaps)
            yield (
                f"the readings of node {node} have {len(gaps)} gaps of more than {MAX_GAP_S:g} s; the longest is "
                f"{longest / 1000:.1f} s, {max(0, before - start) / 1000:.1f} s after run_start"
            )
        elif series and len(series) < min(MIN_READINGS, (stop - start) / 1000):
            yield f"node {node} has {len(series)} readings in {(stop - start) / 1000:.1f} s"
        if stop - start < 1000 * (MIN_READINGS - 1):
            yield (
                f"it took {(stop - start) / 1000:.1f} s, but the rules require {MIN_READINGS} power samples for "
                f"each run"
            )


def _disagreements(power: RunPower, request: PowerRequest) -> Iterator[Finding]:
    """Yield that the GPUs used more energy than their nodes, and that two measurements of the GPUs disagree."""
    result = power.result
    of_gpus, of_nodes = result.telemetry.energy_j if result.telemetry else None, power.energy_j(request)
    if request.scope is Scope.node and of_gpus is not None and of_nodes is not None and of_nodes < of_gpus:
        what = f"{result.file}: the nodes used {of_nodes:,.0f} J, less than their GPUs, which used {of_gpus:,.0f} J"
        yield broken("PCK-08", what, result.file)
    severity: Severity = "error" if request.scope is Scope.gpus else "warning"
    for finding in result.findings:
        if finding.rule == "LOG-27":
            yield broken("LOG-27", f"{result.file}: {finding.what}", result.file, severity=severity, line=finding.line)


def _node_lines(series: Series, host: str, request: PowerRequest) -> Iterator[str]:
    """Yield the records of a node: the start, the efficiency of its power supplies, its readings, and the stop."""
    if not series:
        return
    first, last = series[0][0], series[-1][0]
    yield _line(first, "INTERVAL_START", "power_measurement_start", None, host=host)
    efficiency = {"host": host, "measurement_type": request.current}
    yield _line(first, "POINT_IN_TIME", "conversion_eff", request.efficiency, **efficiency)
    for time_ms, power_w in series:
        yield _line(time_ms, "POINT_IN_TIME", "power_reading", power_w, host=host)
    yield _line(last, "INTERVAL_END", "power_measurement_stop", None, host=host)


def _switch_lines(power_w: float, start_ms: int, stop_ms: int, host: str) -> Iterator[str]:
    yield _line(start_ms, "INTERVAL_START", "power_measurement_start", None, host=host)
    yield _line(start_ms, "POINT_IN_TIME", "interconnect_power_est", power_w, host=host)
    yield _line(stop_ms, "INTERVAL_END", "power_measurement_stop", None, host=host)


def _line(time_ms: int, event_type: str, key: str, value: float | None, **metadata: str) -> str:
    record = {"namespace": "", "time_ms": time_ms, "event_type": event_type, "key": key, "value": value}
    return f":::MLLOG {json.dumps(record | {'metadata': metadata}, allow_nan=False)}\n"
