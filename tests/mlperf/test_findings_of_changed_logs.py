"""What runstop says about a log after one change of it, whole: two logs, many changes, one golden file."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.contract import mllog
from bench.mlperf.result import parse
from helpers import golden
from helpers.written_log import ONCE

FINDINGS = Path(__file__).with_name("findings_of_changed_logs.txt")
Records = list[dict[str, Any]]
GBS, EVERY, FIRST = 8, 48, 192
"""Rows of a step; steps between evaluations, and before the first one, as the rules require."""
OTHERS = {name: value for name, value in ONCE.items() if name not in ("initial_weights", "data_source")}


class Log:
    """The records of a log of six blocks, each of which a clock has moved."""

    def __init__(self, once: dict[str, Any], *, ours: bool) -> None:
        self.records: Records = []
        self.now_ms, self.ours = 1_790_000_000_000, ours
        for key, value in once.items():
            self.add(key, value)

    def add(self, key: str, value: Any = None, kind: str = "POINT_IN_TIME", **metadata: Any) -> None:
        clock = {mllog.MONOTONIC_MS: self.now_ms - 1_700_000_000_000} if self.ours else {}
        record = {"namespace": "", "time_ms": self.now_ms, "event_type": kind, "key": key, "value": value}
        self.records.append(record | {"metadata": metadata | clock})

    def wait(self, seconds: float) -> None:
        self.now_ms += round(1000 * seconds)


def written(
    *,
    once: dict[str, Any] | None = None,
    ours: bool = False,
    trained_s: dict[int, float] | None = None,
    evaluated_s: dict[int, float] | None = None,
    rate: float = 3.2,
    own_evaluation_s: float | None = 20.0,
    idle_s: float = 0.0,
    blocks: int = 6,
) -> Records:
    """Return the records of a run whose blocks train at 3.2 samples/s, with the times of some blocks changed."""
    log = Log({"cache_clear": True, "init_start": None}, ours=ours)
    for key, value in (once or (ONCE if ours else OTHERS)).items():
        if key != "cache_clear":
            log.add(key, value)
    log.wait(600)
    log.add("init_stop", None, "INTERVAL_END")
    log.add("run_start", None, "INTERVAL_START")
    done = 0
    for number in range(blocks):
        log.add("block_start", None, "INTERVAL_START", samples_count=GBS * done)
        steps = EVERY if done else FIRST
        done += steps
        place = {"samples_count": GBS * done, "step": done}
        took_s = (trained_s or {}).get(number, 2.5 * steps)
        log.wait(took_s)
        stats = {"step_times": [took_s / steps] * steps} if ours else {"throughput": rate}
        if own_evaluation_s and not ours:
            stats["validation_time"] = own_evaluation_s
        log.add("tracked_stats", stats, **place)
        log.add("block_stop", None, "INTERVAL_END", **place)
        log.add("eval_start", None, "INTERVAL_START", **place)
        log.wait((evaluated_s or {}).get(number, 20.0))
        log.add("eval_accuracy", 0.94 - 0.01 * number if number < blocks - 1 else 0.924, **place)
        log.add("eval_stop", None, "INTERVAL_END", **place)
        log.wait(idle_s)
    log.add("run_stop", None, "INTERVAL_END", status="success", **place)
    return log.records


def nth(records: Records, key: str, number: int = 0) -> int:
    return [at for at, record in enumerate(records) if record["key"] == key][number]


def without(records: Records, key: str) -> Records:
    return [record for record in records if record["key"] != key]


def with_value(records: Records, key: str, value: Any, number: int = 0) -> Records:
    at = nth(records, key, number)
    return [*records[:at], records[at] | {"value": value}, *records[at + 1 :]]


def with_metadata(records: Records, key: str, number: int = 0, **metadata: Any) -> Records:
    at = nth(records, key, number)
    return [*records[:at], records[at] | {"metadata": records[at]["metadata"] | metadata}, *records[at + 1 :]]


def doubled(records: Records, key: str, value: Any = None) -> Records:
    at = nth(records, key)
    twin = records[at] if value is None else records[at] | {"value": value}
    return [*records[: at + 1], twin, *records[at + 1 :]]


def moved(records: Records, key: str, other: str, number: int = 0) -> Records:
    """Return the records with one record directly before the first record of another key."""
    at = nth(records, key, number)
    rest = records[:at] + records[at + 1 :]
    before = nth(rest, other)
    return [*rest[:before], records[at], *rest[before:]]


def set_clock(records: Records, key: str, by_ms: int, number: int = 0, *, last: int | None = None) -> Records:
    """Return the records with time_ms changed from one record on, or in as many records as `last` says."""
    at = nth(records, key, number)
    end = len(records) if last is None else at + last
    return [
        record | {"time_ms": record["time_ms"] + by_ms} if at <= place < end else record
        for place, record in enumerate(records)
    ]


def changes_of_values() -> Iterator[tuple[str, Callable[[Records], Records]]]:
    wrong: dict[str, tuple[Any, ...]] = {
        "submission_benchmark": (None, 3, "bert", "llama2_70b_lra", "something"),
        "submission_division": (3, "ajar", "open"),
        "submission_org": ("", "PLACEHOLDER org"),
        "config_filename": ("", "PLACEHOLDER"),
        "seed": (1.5, "7", 7.0),
        "global_batch_size": (0, -8, 1.5, "8", 16, 7, True),
        "gradient_accumulation_steps": (0, 1.5),
        "micro_batch_size": (0, 1, 1.5),
        "tensor_parallelism": (0, 2),
        "train_samples": (3900, "3901"),
        "eval_samples": (172,),
        "lora_rank": (15,),
        "lora_alpha": (32.0, 33),
        "opt_adamw_weight_decay": (1e-4 * (1 + 1e-8), 1e-4 * (1 + 1e-10)),
        "opt_gradient_clip_norm": (1,),
        "lowest_numerical_precision_in_attn": ("fp7", "nvfp4"),
        "target_accuracy": (0.924, 0.926, "0.925", None),
        "eval_accuracy": ("0.9", None, float("nan"), 0.9),
    }
    for key, values in wrong.items():
        for value in values:
            yield f"{key} = {value!r}", lambda records, key=key, value=value: with_value(records, key, value)
    last = -1
    for value in (0.925, 0.9251, 0, -1.0, "0.9"):
        yield (
            f"the last eval_accuracy = {value!r}",
            lambda records, value=value: with_value(records, "eval_accuracy", value, last),
        )


def changes_of_records() -> Iterator[tuple[str, Callable[[Records], Records]]]:
    keys = dict.fromkeys(
        (*ONCE, "init_start", "init_stop", "run_start", "block_start", "block_stop", "eval_start", "eval_stop")
    )
    for key in (*keys, "eval_accuracy", "tracked_stats", "run_stop"):
        yield f"without {key}", lambda records, key=key: without(records, key)
    for key in ("init_stop", "run_start", "run_stop", "seed", "submission_benchmark", "target_accuracy", "lora_rank"):
        yield f"{key} twice", lambda records, key=key: doubled(records, key)
    for key, value in (("seed", 8), ("lora_rank", 8), ("submission_benchmark", "bert"), ("micro_batch_size", 2)):
        yield f"{key} twice, then {value}", lambda records, key=key, value=value: doubled(records, key, value)
    for key, other in (
        *(("init_stop", "init_start"), ("submission_division", "run_start"), ("run_start", "init_stop")),
        *(("block_start", "run_start"), ("run_stop", "run_start"), ("eval_accuracy", "run_start")),
        *(("run_stop", "block_start"), ("eval_accuracy", "block_start"), ("run_start", "init_start")),
    ):
        yield f"{key} before {other}", lambda records, key=key, other=other: moved(records, key, other)
    for key in ("block_start", "block_stop", "eval_start", "eval_stop", "eval_accuracy"):
        yield (
            f"{key} without samples_count",
            lambda records, key=key: with_metadata(records, key, 1, samples_count=None),
        )
        yield f"{key} with samples_count -1", lambda records, key=key: with_metadata(records, key, samples_count=-1)
    for status in ("aborted", None, 3):
        yield f"status {status}", lambda records, status=status: with_metadata(records, "run_stop", status=status)
    for number, samples in ((0, 1528), (0, 8), (1, 1536), (1, 1928), (2, 1928), (5, 3464), (5, 384), (5, 3457), (3, 0)):
        yield (
            f"samples_count of evaluation {number + 1} = {samples}",
            lambda records, number=number, samples=samples: with_metadata(
                records, "eval_accuracy", number, samples_count=samples
            ),
        )
    for weights, source in (("random", "random"), ("checkpoint", "random"), ("random", "prepared")):
        yield (
            f"{weights} weights and {source} rows",
            lambda records, weights=weights, source=source: [
                {**records[0], "key": "data_source", "value": source},
                {**records[0], "key": "initial_weights", "value": weights},
                *without(without(records, "data_source"), "initial_weights"),
            ],
        )


def changes_of_clocks() -> Iterator[tuple[str, Callable[[Records], Records]]]:
    for key, number in (("run_start", 0), ("block_stop", 2), ("eval_accuracy", 2), ("run_stop", 0)):
        for by_ms in (-3_000_000, -1001, -1000, -50, -19, 30, 1000, 5000):
            yield (
                f"time_ms {by_ms:+} from {key} {number + 1} on",
                lambda records, key=key, number=number, by_ms=by_ms: set_clock(records, key, by_ms, number),
            )
            yield (
                f"time_ms {by_ms:+} of {key} {number + 1} alone",
                lambda records, key=key, number=number, by_ms=by_ms: set_clock(records, key, by_ms, number, last=1),
            )
    for minutes in (29.9, 30, 239.9, 240):
        by_ms = round(60_000 * (minutes - 10))
        yield (
            f"initialization of {minutes} min",
            lambda records, by_ms=by_ms: set_clock(records, "init_stop", by_ms),
        )


TIMES: dict[str, dict[str, Any]] = {
    **{f"block 4 trains for {s} s": {"trained_s": {3: s}} for s in (55, 59, 61, 109, 110, 114, 126, 127, 250, 1200)},
    **{f"block 4 trains for {s} s": {"trained_s": {3: s}} for s in (1300, 2000)},
    **{f"evaluation 4 takes {s} s": {"evaluated_s": {3: s}} for s in (1, 9, 11, 79, 81, 201, 450, 900)},
    **{f"{n} blocks, the last evaluation takes 900 s": {"evaluated_s": {n - 1: 900.0}, "blocks": n} for n in (2, 3, 4)},
    **{f"{n} blocks, the last trains for 3000 s": {"trained_s": {n - 1: 3000.0}, "blocks": n} for n in (2, 3, 4)},
    **{f"{s} s after each evaluation": {"idle_s": s} for s in (9, 10, 60, 61, 80)},
    **{f"a throughput of {rate}": {"rate": rate} for rate in (3.5, 3.2, 3.11, 3.105, 3.0, 1.6)},
    **{f"a validation_time of {s} s": {"own_evaluation_s": s} for s in (None, 10, 21.9, 22, 22.1, 40)},
    **{f"{n} blocks": {"blocks": n} for n in (1, 2, 3)},
}


def findings_of(records: Records, path: Path) -> list[str]:
    path.write_text("".join(f":::MLLOG {json.dumps(record)}\n" for record in records))
    return [
        f"  {one.severity} {one.rule} line {one.line}: {one.what}"
        for one in parse(path).findings
        if one.rule != "LOG-18"
    ]


@pytest.mark.long
def test_the_findings_of_every_change_are_those_of_the_golden_file(tmp_path: Path) -> None:
    """Each block has the change and its findings, without those of the unchanged log."""
    lines, path = [], tmp_path / "result_0.txt"
    for name, ours in (("a log of another program", False), ("our own log", True)):
        base = written(ours=ours)
        usual = findings_of(base, path)
        lines += [f"{name}, unchanged", *usual]
        listed = [(f"{name}: {what}", findings_of(change(base), path)) for what, change in changes_of_clocks()]
        listed += [(f"{name}: {what}", findings_of(written(ours=ours, **times), path)) for what, times in TIMES.items()]
        if not ours:
            changes = (*changes_of_values(), *changes_of_records())
            listed += [(f"{name}: {what}", findings_of(change(base), path)) for what, change in changes]
        for what, findings in listed:
            lines += [what, *[one for one in findings if one not in usual]]
    golden.require("\n".join(lines) + "\n", FINDINGS, variable="WRITE_FINDINGS")


RESULTS = Path(__file__).with_name("results_of_changed_logs.json")


def test_the_numbers_of_a_log_are_those_of_the_golden_file(tmp_path: Path) -> None:
    changed: dict[str, dict[str, Any]] = {
        "another program": {},
        "ours": {"ours": True},
        "ours, one slow block and two slow evaluations": {
            "ours": True,
            "trained_s": {3: 250.0},
            "evaluated_s": {1: 30.0, 2: 50.0},
            "idle_s": 7.0,
        },
        "one block": {"blocks": 1},
    }
    results = {}
    for name, changes in changed.items():
        findings_of(written(**changes), path := tmp_path / "result_0.txt")
        numbers = golden.significant(parse(path))
        results[name] = {key: value for key, value in numbers.items() if key not in ("file", "hyperparameters")}
    text = json.dumps(results, indent=1, ensure_ascii=False, default=str)
    golden.require(f"{text}\n", RESULTS, variable="WRITE_FINDINGS")
