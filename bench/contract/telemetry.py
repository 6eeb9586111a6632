"""GPU telemetry of a node during a trial, from NVML or amdsmi: a CSV file with one line per GPU and second.

One process per node writes it, the ranks write a summary to the log, and `watch` reads the latest lines. Values that
the driver does not report are empty. If the node has a power meter of its own, a second file has its readings. Standard
library only: ranks import it.
"""

import csv
import io
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path

from bench.contract import regular_files

EVERY_S = 1.0
"""Interval between two samples."""
REASONS = {
    0x1: "idle",
    0x2: "clocks setting",
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
    0x100: "display clocks setting",
    0x200: "board limit",
    0x400: "reliability",
}
"""Reasons for reduced clocks, by NVML's bits. Source: nvml.h, nvmlClocksEventReason*."""
NO_REASON = "none"
_BETWEEN = "; "
_TAIL_BYTES = 8192
"""More than the samples of one moment need: a line has about 80 bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One GPU at one moment; None: not reported by the driver. The fields are the columns of the file."""

    time_ms: int
    monotonic_ms: int
    """The same clock as monotonic_ms in the log."""
    gpu: int
    """Index by nvidia-smi or amd-smi."""
    power_w: float | None = None
    """Power of the whole board; NVML averages over the last second on A100, H100 and later. AMD's GPUs: the socket."""
    sm_clock_mhz: float | None = None
    """Of AMD's GPUs: the graphics clock."""
    memory_clock_mhz: float | None = None
    temperature_c: float | None = None
    """Of the die. Of AMD's GPUs: its hottest place (junction)."""
    memory_gib: float | None = None
    """Used by all processes."""
    energy_j: float | None = None
    """Since the driver was loaded."""
    throttle: tuple[str, ...] | None = None
    """Reasons for reduced clocks; empty if there are none."""
    pcie_lanes: float | None = None
    """Width of the PCIe link at this moment."""
    ecc_errors: float | None = None
    """Uncorrected memory errors since the driver was loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The power of a whole node at one moment, by a meter at its power supplies. The fields are the columns."""

    time_ms: int
    monotonic_ms: int
    """The same clock as monotonic_ms in the log."""
    power_w: float


COLUMNS = tuple(field.name for field in fields(Sample))
_LEAST_COLUMNS = COLUMNS.index("throttle") + 1
"""Files of earlier versions have no columns after `throttle`."""
WHOLE = ("time_ms", "monotonic_ms", "gpu")
NUMBERS = tuple(name for name in COLUMNS if name not in (*WHOLE, "throttle"))


def reasons(bits: int) -> tuple[str, ...]:
    """Return the names of NVML's bits; unknown bits are shown in hexadecimal."""
    known = tuple(name for bit, name in REASONS.items() if bits & bit)
    rest = bits & ~sum(REASONS)
    return (*known, hex(rest)) if rest else known


def header() -> str:
    """Return the first line of a file."""
    return ",".join(COLUMNS) + "\n"


def lines(samples: Iterable[Sample]) -> str:
    """Return samples as lines of a file."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(
        [_cell(getattr(sample, name)) for name in COLUMNS] for sample in samples
    )
    return text.getvalue()


def read(path: Path) -> Iterator[Sample]:
    """Yield the samples of a file in order; truncated lines are skipped.

    Raises:
        OSError: the file cannot be read.
    """
    with _opened(path) as file:
        yield from _parsed(file)


READING_COLUMNS = tuple(field.name for field in fields(Reading))


def reading_header() -> str:
    return ",".join(READING_COLUMNS) + "\n"


def reading_line(reading: Reading) -> str:
    return f"{reading.time_ms},{reading.monotonic_ms},{_cell(float(reading.power_w))}\n"


def readings(path: Path) -> Iterator[Reading]:
    """Yield the readings of a node's meter in order; truncated lines are skipped.

    Raises:
        OSError: the file cannot be read.
    """
    with _opened(path) as file:
        for cells in _complete(file):
            if len(cells) == len(READING_COLUMNS) and cells[0] != READING_COLUMNS[0]:
                with suppress(ValueError):  # another program has written to the file
                    yield Reading(time_ms=int(cells[0]), monotonic_ms=int(cells[1]), power_w=float(cells[2]))


def node_file(samples: Path) -> Path:
    """Return the file with the node's readings that belongs to a file with the samples of its GPUs."""
    return samples.with_name(samples.name.replace("gpus", "node", 1))


def newest(path: Path) -> list[Sample]:
    """Return the latest sample of each GPU, from the end of a file that may still grow; empty if there is none.

    Raises:
        OSError: the file cannot be read.
    """
    latest = {sample.gpu: sample for sample in recent(path)}
    return [sample for _, sample in sorted(latest.items())]


def recent(path: Path) -> list[Sample]:
    """Return the last samples of all GPUs, about ten seconds of them with eight GPUs.

    Raises:
        OSError: the file cannot be read.
    """
    with regular_files.opened(path) as file:
        file.seek(max(0, file.seek(0, io.SEEK_END) - _TAIL_BYTES))
        tail = file.read().decode(errors="replace").splitlines(keepends=True)
    return list(_parsed(tail[1:]))  # the first line is the header, or truncated


def _opened(path: Path) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BufferedReader(regular_files.opened(path)), newline="", errors="replace")


def _complete(text: Iterable[str]) -> Iterator[list[str]]:
    """Yield the cells of each line that is not truncated."""
    return csv.reader(line for line in text if line.endswith("\n"))


def _parsed(text: Iterable[str]) -> Iterator[Sample]:
    for cells in _complete(text):
        if len(cells) in (_LEAST_COLUMNS, len(COLUMNS)) and cells[0] != COLUMNS[0]:
            with suppress(ValueError):  # another program has written to the file
                yield _sample(dict(zip(COLUMNS, cells, strict=False)))


def _sample(row: dict[str, str]) -> Sample:
    numbers = {name: float(row[name]) if row.get(name) else None for name in NUMBERS}
    throttle = row["throttle"]
    active = None if not throttle else () if throttle == NO_REASON else tuple(throttle.split(_BETWEEN))
    time_ms, monotonic_ms, gpu = (int(row[name]) for name in WHOLE)
    return Sample(time_ms=time_ms, monotonic_ms=monotonic_ms, gpu=gpu, throttle=active, **numbers)


def _cell(value: float | tuple[str, ...] | None) -> str:
    if value is None:
        return ""
    if isinstance(value, tuple):
        return _BETWEEN.join(value) or NO_REASON
    return f"{value:.3f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
