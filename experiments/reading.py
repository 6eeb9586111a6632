"""Measures how fast logs are read and judged, compared with MLPerf's own tool on the same files in the same run.

python experiments/reading.py [CORPUS]    CORPUS: a folder of published logs; without one, logs of our own writing

Every case runs in a process of its own, best of several times. Times are CPU time, user's and system's, since the clock
on the wall counts what else the machine does; peak memory is the process' maximum resident set.
"""

import logging
import multiprocessing
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from mlperf_logging.compliance_checker import mlp_compliance, mlp_parser
from rich.console import Console
from rich.table import Table

from bench.contract import mllog
from bench.mlperf import reader
from bench.mlperf.result import parse

PURE_MB, NOISE_MB, FOLLOW_S = 100, 1000, 10
NOISE = (
    b"[rank3] 2026-01-01 12:00:00,000 INFO step 1234 | loss 0.9312 | lr 3.2e-4 | 2650.1 tokens/s/GPU | grad norm 0.12\n"
)
NOISE_LINES_A_RECORD = 20_000


def main() -> None:
    console = Console(width=None if sys.stdout.isatty() else 120)
    with tempfile.TemporaryDirectory() as folder:
        logs = sorted(Path(sys.argv[1]).rglob("*.txt")) if sys.argv[1:] else _own_logs(Path(folder))
        pure, noise = _pure(Path(folder, "pure.txt")), _noise(Path(folder, "noise.txt"))
        console.print(_corpus(logs))
        console.print(_large(pure))
        console.print(_noisy(noise))
        console.print(_following(Path(folder, "growing.txt")))
    console.print(f"{os.cpu_count()} CPUs, Python {sys.version.split()[0]}, mlperf_logging 4.1.68")


def _corpus(logs: list[Path]) -> Table:
    size_mb = sum(log.stat().st_size for log in logs) / 1e6
    title = f"{len(logs)} logs, {size_mb:.1f} MB, read and judged"
    return _compared(title, size_mb, "compliance checker", (_official_verdicts, logs), (_own_verdicts, logs))


def _large(pure: Path) -> Table:
    size_mb = pure.stat().st_size / 1e6
    return _compared(
        f"{size_mb:.0f} MB of nothing but MLLOG records, read",
        size_mb,
        "mlp_parser",
        (_official_read, pure),
        (_own_read, pure),
    )


def _compared(title: str, size_mb: float, theirs: str, official: "Case", own: "Case") -> Table:
    table = Table(title=title, title_justify="left")
    for column in ("", "CPU s", "MB/s", "ratio", "peak MiB"):
        table.add_column(column, justify="left" if not column else "right")
    (slow_s, slow_mib), (fast_s, fast_mib) = _measure(*official), _measure(*own)
    table.add_row(f"mlperf_logging, {theirs}", f"{slow_s:.2f}", f"{size_mb / slow_s:,.0f}", "1.0", f"{slow_mib:,.0f}")
    ratio = f"{slow_s / fast_s:.1f}"
    table.add_row("bench", f"{fast_s:.2f}", f"{size_mb / fast_s:,.0f}", ratio, f"{fast_mib:,.0f}")
    return table


def _noisy(noise: Path) -> Table:
    size_mb = noise.stat().st_size / 1e6
    table = Table(
        title=f"{size_mb:,.0f} MB, a record every {NOISE_LINES_A_RECORD:,} lines, in the page cache",
        title_justify="left",
    )
    for column in ("", "CPU s", "MB/s", "peak MiB"):
        table.add_column(column, justify="left" if not column else "right")
    for name, case in (("read and drop, nothing looked at", _touch), ("bench, read", _own_read)):
        seconds, mib = _measure(case, noise)
        table.add_row(name, f"{seconds:.2f}", f"{size_mb / seconds:,.0f}", f"{mib:,.0f}")
    return table


def _following(growing: Path) -> Table:
    table = Table(title=f"following a log for {FOLLOW_S} s, looking five times a second", title_justify="left")
    for column in ("", "MB added", "CPU s", "share of a core"):
        table.add_column(column, justify="left" if not column else "right")
    for name, mb_s in (("a quiet run", 0.001), ("a noisy one", 1.0), ("a flood", 50.0)):
        growing.unlink(missing_ok=True)
        cpu_s, added_mb = _follow(growing, mb_s)
        table.add_row(f"{name}, {mb_s:g} MB/s", f"{added_mb:.2f}", f"{cpu_s:.3f}", f"{cpu_s / FOLLOW_S:.2%}")
    return table


def _follow(growing: Path, mb_s: float) -> tuple[float, float]:
    """Return the CPU time of following, and how much was written meanwhile by another process."""
    writer = multiprocessing.get_context("spawn").Process(target=_write, args=(growing, mb_s))
    writer.start()
    follower, end = reader.Follower(growing), time.monotonic() + FOLLOW_S
    before = time.process_time()
    while time.monotonic() < end:
        follower.poll()
        time.sleep(0.2)
    cpu_s = time.process_time() - before
    writer.join()
    return cpu_s, growing.stat().st_size / 1e6


def _write(growing: Path, mb_s: float) -> None:
    end, record = time.monotonic() + FOLLOW_S, _record(1) + b"\n"
    lines = max(1, round(mb_s * 1e6 * 0.1 / len(NOISE)))
    with open(growing, "ab", buffering=0) as file:
        while time.monotonic() < end:
            file.write(NOISE * lines + record)
            time.sleep(0.1)


Case = tuple[Callable[..., object], object]


def _measure(case: Callable[..., object], argument: object, *, times: int = 5) -> tuple[float, float]:
    """Return the least CPU seconds of several runs, each in a new process, and the most MiB that one of them held."""
    runs = []
    for _ in range(times):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            runs.append(pool.submit(_timed, case, argument).result())
    return min(seconds for seconds, _ in runs), max(mib for _, mib in runs)


def _timed(case: Callable[..., object], argument: object) -> tuple[float, float]:
    start = time.process_time()
    case(argument)
    seconds = time.process_time() - start
    return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _own_verdicts(logs: list[Path]) -> None:
    for log in logs:
        parse(log)


def _official_verdicts(logs: list[Path]) -> None:
    """As its command line does it, without starting Python anew for each file."""
    logging.disable()
    for log in logs:
        ruleset = _ruleset(log)
        mlp_compliance.enqueued_configs.clear()
        checker = mlp_compliance.make_checker("training", ruleset, quiet=True, werror=False)
        mlp_compliance.main(str(log), f"training_{ruleset}/common.yaml", checker)


def _ruleset(log: Path) -> str:
    """Return the rules of the round that the log's folder belongs to; 5.1.0 for our own logs."""
    rounds = {f"v{number}": f"{number}.0" for number in ("3.1", "4.0", "4.1", "5.0", "5.1", "6.0")}
    return next((rounds[part] for part in log.parts if part in rounds), "5.1.0")


def _own_read(log: Path) -> None:
    reader.read(log)


def _official_read(log: Path) -> None:
    mlp_parser.parse_file(str(log), ruleset="5.1.0")


def _touch(log: Path) -> None:
    with open(log, "rb", buffering=0) as file:
        while file.read(1 << 18):
            pass


def _pure(path: Path) -> Path:
    with open(path, "wb") as file:
        number = 0
        while file.tell() < PURE_MB * 1e6:
            file.writelines(_record(number + n) + b"\n" for n in range(1000))
            number += 1000
    return path


def _record(number: int) -> bytes:
    return (
        b':::MLLOG {"namespace": "", "time_ms": %d, "event_type": "POINT_IN_TIME", '
        b'"key": "train_loss", "value": %.10f, '
        b'"metadata": {"file": "/workspace/train.py", "lineno": 273, "samples_count": %d, "lr": 0.0004, "step": %d}}'
    ) % (1_759_904_684_678 + number, 1 + number % 97 / 97, number * 8, number)


def _noise(path: Path) -> Path:
    with open(path, "wb") as file:
        number = 0
        while file.tell() < NOISE_MB * 1e6:
            file.write(NOISE * NOISE_LINES_A_RECORD + _record(number) + b"\n")
            number += 1
    return path


def _own_logs(folder: Path) -> list[Path]:
    """Write logs of the usual shape: set-up, evaluations, forty training records."""
    logs = [folder / f"result_{number}.txt" for number in range(50)]
    for log in logs:
        with mllog.Writer(log) as writer:
            writer.start(mllog.INIT_START)
            for key, value in _settings():
                writer.event(key, value)
            writer.stop(mllog.INIT_STOP)
            writer.start(mllog.RUN_START)
            writer.start(mllog.BLOCK_START, samples_count=0)
            for step in range(10, 400, 10):
                writer.event(mllog.TRAIN_LOSS, 1.0, samples_count=8 * step, step=step)
            writer.stop(mllog.BLOCK_STOP, samples_count=3072)
            for number in range(5):
                writer.event(mllog.EVAL_ACCURACY, 0.93 - 0.002 * number, samples_count=1536 + 384 * number)
            writer.finish(mllog.SUCCESS)
    return logs


def _settings() -> Iterator[tuple[str, object]]:
    yield from (("cache_clear", True), ("submission_benchmark", "llama2_70b_lora"), ("submission_division", "closed"))
    yield from (("submission_org", "example"), ("submission_platform", "1xexample"), ("seed", 1))
    yield from (
        ("global_batch_size", 8),
        ("gradient_accumulation_steps", 1),
        ("train_samples", 3901),
        ("eval_samples", 173),
    )
    yield from (
        ("opt_base_learning_rate", 4e-4),
        ("opt_learning_rate_training_steps", 800),
        ("opt_adamw_weight_decay", 1e-4),
    )
    yield from (("opt_gradient_clip_norm", 0.3), ("lora_rank", 16), ("lora_alpha", 32))


if __name__ == "__main__":
    if shutil.disk_usage(tempfile.gettempdir()).free < (PURE_MB + NOISE_MB + 600) * 1e6:
        sys.exit(f"{tempfile.gettempdir()} has too little room: set TMPDIR to a disk with 2 GB free")
    main()
