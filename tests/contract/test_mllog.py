"""What is written comes back, whatever is glued around it; nothing read raises."""

import itertools
import json
import math
import os
import resource
import subprocess
import threading
import time
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from bench.contract import mllog
from bench.contract.mllog import Binding, Writer
from bench.errors import ConfigError, LogError
from bench.mlperf import compliance
from bench.mlperf import log as logs
from bench.mlperf.reader import Event, Follower, Garbled, Scanner, read, system
from helpers.examples import in_proportion

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
RECORDS = st.lists(st.tuples(st.text(), VALUES, st.dictionaries(st.text(), VALUES, max_size=3)), max_size=4)
quick = settings(
    max_examples=in_proportion(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def record(**changes: object) -> str:
    fields: dict[str, object] = {"time_ms": 5, "event_type": "POINT_IN_TIME", "key": "seed", "value": 7, "metadata": {}}
    return f":::MLLOG {json.dumps(fields | changes)}"


def read_bytes(path: Path, data: bytes) -> tuple[list[Event], list[Garbled]]:
    path.write_bytes(data)
    return read(path)


@pytest.mark.long
@quick
@given(records=RECORDS)
def test_read_returns_what_was_written(tmp_path: Path, records: list[tuple[str, object, dict[str, object]]]) -> None:
    log = tmp_path / "log"
    log.unlink(missing_ok=True)
    records = [item for item in records if item[0] != mllog.RUN_STOP]
    with Writer(log) as writer:
        for key, value, metadata in records:
            writer.event(key, value, **metadata)
    events, garbled = read(log)
    assert not garbled
    assert [(e.key, e.value, e.line) for e in events] == [(r[0], r[1], n) for n, r in enumerate(records, 1)]
    assert all(r[2].items() <= e.metadata.items() for e, r in zip(events, records, strict=True))


PIECES = st.binary(max_size=30) | st.sampled_from(
    [
        b":::MLLOG",
        b":::MLLOG ",
        b" {",
        b"\n",
        b"\r",
        b"\xff",
        b"0: ",
        record().encode(),
        record(value="\u00fc").encode() + b"\n",
    ]
)
NOISY = st.lists(PIECES, max_size=14).map(b"".join)
"""Logs as hostile as they come: records whole, torn and glued, in anything."""


@quick
@given(data=NOISY, cuts=st.lists(st.integers(0, 400), max_size=6))
def test_any_content_can_be_read_in_any_chunks(tmp_path: Path, data: bytes, cuts: list[int]) -> None:
    whole = Scanner()
    expected = [*whole.feed(data), *whole.finish()]
    pieces, records = Scanner(), []
    for start, end in itertools.pairwise([0, *sorted(cuts), len(data)]):
        records += pieces.feed(data[start:end])
    assert repr([*records, *pieces.finish()]) == repr(expected)
    events, garbled = read_bytes(tmp_path / "log", data)
    assert repr(sorted([*events, *garbled], key=repr)) == repr(sorted(expected, key=repr))


@quick
@given(data=NOISY, cut=st.integers(0, 500))
def test_a_log_cut_anywhere_yields_the_first_of_its_events(tmp_path: Path, data: bytes, cut: int) -> None:
    events, _ = read_bytes(tmp_path / "log", data)
    first, _ = read_bytes(tmp_path / "log", data[:cut])
    assert repr(first) == repr(events[: len(first)])


@quick
@given(lines=st.lists(PIECES.map(lambda piece: piece.replace(b"\n", b"")), min_size=1, max_size=8), data=st.data())
def test_a_damaged_line_does_not_affect_others(tmp_path: Path, lines: list[bytes], data: st.DataObject) -> None:
    hurt = data.draw(st.integers(0, len(lines) - 1))
    damaged = [*lines]
    damaged[hurt] = data.draw(PIECES).replace(b"\n", b"")
    before, after = (read_bytes(tmp_path / "log", b"\n".join(text))[0] for text in (lines, damaged))
    assert repr([e for e in before if e.line != hurt + 1]) == repr([e for e in after if e.line != hurt + 1])


@pytest.mark.long
def test_memory_does_not_grow_with_noise(tmp_path: Path) -> None:
    noise = b"step 7 loss 0.93\r" * 400_000
    (tmp_path / "log").write_bytes(noise + record().encode() + noise + b"\n" + noise)
    tracemalloc.start()
    events, _ = read(tmp_path / "log")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(events) == 1
    assert peak < 8 * 2**20 < (tmp_path / "log").stat().st_size


@pytest.mark.parametrize(
    ("damaged", "seeds"),
    [
        ("0: " + record(), [7]),
        ("NCCL INFO" + record(), [7]),
        ("  3%|#  | 1/9\r" + record() + "\r", [7]),
        ("\x1b[32m" + record() + "\x1b[0m", [7]),
        (record() + " and more {", [7]),
        (record() + record(value=8), [7, 8]),
        (record()[:40] + record(value=8), [8]),
        (record().replace(" {", "{", 1), [7]),
        (record(value=":::MLLOG {"), [":::MLLOG {"]),
        (record(value="ü"), ["ü"]),
        (record(value="<>").replace("<>", "50 µs") + " and more" + record(value=8), ["50 µs", 8]),
    ],
)
@pytest.mark.parametrize("newline", ["\n", "\r\n", ""])
def test_a_record_is_found_within_other_output(tmp_path: Path, damaged: str, seeds: list[object], newline: str) -> None:
    events, _ = read_bytes(tmp_path / "log", (damaged + newline).encode())
    assert [event.value for event in events] == seeds


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (record()[:-5], "delimiter"),
        (":::MLLOG 7", "not a JSON object"),
        (":::MLLOG {}", "no time_ms, event_type, key, value, metadata"),
        (record(time_ms="5"), "must be a number of milliseconds"),
        (record(time_ms=10**400), "must be a number of milliseconds"),
        (record(key=None), "is not a text"),
        (record(metadata=None), "must be an object"),
        (':::MLLOG {"value":' + "[" * 100_000, "recursion"),
        (":::MLLOG", "not a JSON object"),
        (':::MLLOG {"value": "' + "x" * 2**20, "Unterminated string"),
    ],
)
def test_a_token_without_a_record_is_reported_with_its_line(tmp_path: Path, text: str, reason: str) -> None:
    events, garbled = read_bytes(tmp_path / "log", f"noise\n{text}\n{record()}".encode())
    assert [event.line for event in events] == [3]
    assert [record.line for record in garbled] == [2]
    assert reason in garbled[0].reason
    assert garbled[0].text.startswith(":::MLLOG")


@pytest.mark.parametrize("text", ["+ grep ':::MLLOG' result.txt", ":::MLLOGGER {}", "(:::MLLOG)"])
def test_a_mention_of_the_token_is_not_a_record(tmp_path: Path, text: str) -> None:
    assert read_bytes(tmp_path / "log", text.encode()) == ([], [])


def test_binary_data_around_a_record_is_ignored(tmp_path: Path) -> None:
    line = b"\xfe\xff" + record(value="\u00fc").encode() + b"\xe2\x82" + record(value=8).encode() + b"\xff"
    line = line.replace(b"POINT", b"P\xffOINT", 1)
    events, garbled = read_bytes(tmp_path / "log", line)
    assert [(event.value, event.event_type) for event in events] == [
        ("\u00fc", "P\ufffdOINT_IN_TIME"),
        (8, "POINT_IN_TIME"),
    ]
    assert not garbled


def test_the_system_record_is_found_ahead_of_the_trial(tmp_path: Path) -> None:
    (tmp_path / "log").write_text('x\n:::SYSJSON {torn\n0: :::SYSJSON {"number_of_nodes": "2"}\'\n' + record())
    assert system(tmp_path / "log") == {"number_of_nodes": "2"}
    assert system(tmp_path / "absent") == {}


def test_nan_in_a_log_is_read_as_nan(tmp_path: Path) -> None:
    events, _ = read_bytes(tmp_path / "log", b"\xff\xfe" + record(value=math.nan).encode())
    assert math.isnan(events[0].value)


def test_the_error_of_a_missing_log_names_it(tmp_path: Path) -> None:
    with pytest.raises(LogError, match="No such file"):
        read(tmp_path / "absent")


def test_a_pipe_is_refused_without_blocking(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(LogError, match="can be read only once"):
        read(tmp_path / "pipe")
    assert Follower(tmp_path / "pipe").poll() == []


def test_a_record_has_the_time_since_boot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CLOCK_BOOTTIME continues while a machine is suspended, as the wall clock does."""
    began = time.clock_gettime(time.CLOCK_BOOTTIME)
    monkeypatch.setattr(time, "time_ns", lambda: 5_000_000)
    with Writer(tmp_path / "log") as writer:
        writer.event("seed", 7)
    (event,), _ = read(tmp_path / "log")
    ended = time.clock_gettime(time.CLOCK_BOOTTIME)
    assert event.time_ms == 5
    assert int(began * 1000) <= event.metadata["monotonic_ms"] <= ended * 1000


def test_the_line_has_the_official_format(tmp_path: Path) -> None:
    with Writer(tmp_path / "log") as writer:
        writer.start(mllog.BLOCK_START, samples_count=0)
    line = json.loads((tmp_path / "log").read_text().removeprefix(":::MLLOG "))
    assert list(line) == ["namespace", "time_ms", "event_type", "key", "value", "metadata"]
    assert line["event_type"] == "INTERVAL_START"
    assert line["metadata"].pop("lineno") > 0
    assert isinstance(line["metadata"].pop("monotonic_ms"), int)
    assert line["metadata"] == {"file": "tests/contract/test_mllog.py", "samples_count": 0}


@pytest.mark.parametrize("value", [math.nan, [math.inf], object(), {1: {2j}}])
def test_a_value_that_json_cannot_represent_is_refused(tmp_path: Path, value: object) -> None:
    with Writer(tmp_path / "log") as writer, pytest.raises(ValueError, match="lora_rank = .* cannot be logged"):
        writer.event(mllog.LORA_RANK, value)
    assert (tmp_path / "log").read_bytes() == b""


def test_a_second_start_does_not_append(tmp_path: Path) -> None:
    with Writer(tmp_path / "log") as writer:
        writer.event(mllog.SEED, 1)
    with pytest.raises(ConfigError, match="CFG-05"):
        Writer(tmp_path / "log")
    assert len(read(tmp_path / "log")[0]) == 1


def test_a_full_disk_raises_an_error(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Writer(tmp_path / "log") as writer:
        resource.setrlimit(resource.RLIMIT_FSIZE, (300, hard))
        try:
            with pytest.raises(OSError, match="File too large"):
                for _ in range(9):
                    writer.event(mllog.SEED, 1)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_run_stop_is_written_once_after_run_start_and_before_close(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "log")
    assert not writer.finish(mllog.ABORTED)
    writer.start(mllog.RUN_START)
    with pytest.raises(ValueError, match=r"finish\(\)"):
        writer.stop(mllog.RUN_STOP)
    with pytest.raises(ValueError, match="cannot be logged"):
        writer.finish(mllog.SUCCESS, loss=math.nan)
    assert writer.finish(mllog.SUCCESS, samples_count=8)
    assert not writer.finish(mllog.ABORTED)
    writer.close()
    assert not writer.finish(mllog.ABORTED)
    stop = read(tmp_path / "log")[0][-1]
    assert (stop.key, stop.event_type, stop.metadata["status"]) == ("run_stop", "INTERVAL_END", "success")


@pytest.mark.parametrize("status", [mllog.ABORTED, mllog.SUCCESS])
def test_an_aborted_log_has_no_records_after_its_end(tmp_path: Path, status: str) -> None:
    """One thread ends the process while another one still trains."""
    writer = Writer(tmp_path / "log")
    writer.start(mllog.RUN_START)
    if status == mllog.SUCCESS:
        writer.finish(mllog.SUCCESS)
    writer.abort()
    writer.event(mllog.TRAIN_LOSS, 1.0, step=3)
    writer.close()
    events, _ = read(tmp_path / "log")
    assert [event.key for event in events] == ["run_start", "run_stop"] and events[-1].metadata["status"] == status


def test_threads_do_not_mix_lines_or_repeat_run_stop(tmp_path: Path) -> None:
    with Writer(tmp_path / "log") as writer:
        writer.start(mllog.RUN_START)
        wrote: list[bool] = []

        def work() -> None:
            for step in range(50):
                writer.event(mllog.TRAIN_LOSS, 1.5, step=step, text="x" * 500)
            wrote.append(writer.finish(mllog.ABORTED))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    events, garbled = read(tmp_path / "log")
    assert not garbled
    assert len(events) == len((tmp_path / "log").read_bytes().splitlines()) == 4 * 50 + 2
    assert sorted(wrote) == [False, False, False, True]


def test_follower_keeps_a_partial_line_until_it_is_complete(tmp_path: Path) -> None:
    log, follower = tmp_path / "log", Follower(tmp_path / "log")
    assert follower.poll() == []
    line = f"noise\n{record()}\n".encode()
    with open(log, "ab", buffering=0) as file:
        for part, expected in [(line[:30], []), (line[30:-1], [2]), (b"\n", []), (line * 2, [4, 6])]:
            file.write(part)
            assert [event.line for event in follower.poll()] == expected


def test_follower_reads_a_replaced_log_to_its_end_first(tmp_path: Path) -> None:
    log, follower = tmp_path / "log", Follower(tmp_path / "log")
    log.write_text(record(value=1) + "\n")
    assert [event.value for event in follower.poll()] == [1]
    with open(log, "a") as old:
        old.write(record(value="\u00fc")[:-1])
    log.rename(tmp_path / "log.1")
    assert follower.poll() == [], "the file that was open may still grow"
    with open(tmp_path / "log.1", "a") as old:
        old.write("}")
    log.write_text(record(value=3) + "\n")
    assert [event.value for event in follower.poll()] == ["\u00fc", 3]
    assert follower.restarts == 1


def test_follower_restarts_if_a_log_is_truncated(tmp_path: Path) -> None:
    log, follower = tmp_path / "log", Follower(tmp_path / "log")
    log.write_text(f"noise\n{record(value=1)}\n")
    follower.poll()
    log.write_text(record(value=2) + "\n")
    assert [(event.value, event.line) for event in follower.poll()] == [(2, 1)]
    assert follower.restarts == 1


def test_a_partial_write_is_completed(tmp_path: Path) -> None:
    """Each write takes seven bytes at most, as that of a disk that fills up may."""
    log = mllog.Writer(tmp_path / "result_0.txt")
    whole = log._file.write
    log._file = SimpleNamespace(  # type: ignore[assignment]
        write=lambda line: whole(line[:7]), close=log._file.close, closed=False
    )
    log.start(mllog.RUN_START)
    log.close()
    (line,) = (tmp_path / "result_0.txt").read_text().splitlines()
    assert line.endswith("}") and '"run_start"' in line


def bound_log(path: Path, *, losses: int = 2) -> bytes:
    """Write the log of an attempt, with a record behind run_stop, and return it."""
    with Writer(path, Binding(nonce="f" * 32, trial=3, attempt=2)) as log:
        log.start(mllog.RUN_START)
        for number in range(losses):
            log.event(mllog.TRAIN_LOSS, 0.5 + number)
        log.finish(mllog.SUCCESS)
        log.event(mllog.PEAK_MEMORY, {"allocated": 1.5})
    return path.read_bytes()


def test_a_bound_log_starts_with_its_attempt_and_ends_with_a_checksum(tmp_path: Path) -> None:
    whole = bound_log(tmp_path / "log")
    lines = whole.splitlines(keepends=True)
    events = read(tmp_path / "log")[0]
    assert [e.key for e in events] == (
        ["run_attempt", "run_start", "train_loss", "train_loss", "run_stop", "log_sha256"]
        + ["peak_memory_gib", "log_sha256"]
    )
    about = (tmp_path / "log").stat()
    known = {"trial": 3, "attempt": 2, "inode": about.st_ino, "uid": about.st_uid}
    assert events[0].value == "f" * 32 and known.items() <= events[0].metadata.items()
    for place in (5, 7):
        before = b"".join(lines[:place])
        independent = subprocess.run(["sha256sum"], input=before, capture_output=True, check=True).stdout.decode()
        assert (events[place].value, events[place].metadata["bytes"]) == (independent.split()[0], len(before))


@pytest.mark.parametrize("loses", [False, True])
@settings(max_examples=in_proportion(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_changed_byte_or_a_truncated_log_is_detected(tmp_path: Path, loses: bool, data: st.DataObject) -> None:
    """Any byte before the last record; a tail that is gone with run_stop leaves a log without an end.

    Just behind the first checksum the log is what it was when run_stop had been written, which is whole.
    """
    log = tmp_path / "log"
    log.unlink(missing_ok=True)
    whole = bound_log(log)
    assert [f.rule for f in compliance.judge(logs.read(log)) if f.rule == "LOG-18"] == []
    at = data.draw(st.integers(0, len(whole) - 1 if loses else whole.rindex(b":::MLLOG") - 1))
    if loses:
        assume(at != whole.index(b"\n", whole.index(b'"log_sha256"')) + 1)
        log.write_bytes(whole[:at])
    else:
        log.write_bytes(whole[:at] + bytes([whole[at] ^ data.draw(st.integers(1, 255))]) + whole[at + 1 :])
    rules = {finding.rule for finding in compliance.judge(logs.read(log))}
    ends_before = loses and at < whole.index(b'"log_sha256"')
    assert "LOG-18" in rules or (ends_before and {"LOG-01", "LOG-02", "LOG-18"} & rules)


def test_the_checksum_covers_what_was_written(tmp_path: Path) -> None:
    """Each write takes seven bytes at most."""
    log = Writer(tmp_path / "log", Binding(nonce="f" * 32, trial=0, attempt=1))
    whole = log._file.write
    log._file = SimpleNamespace(  # type: ignore[assignment]
        write=lambda line: whole(line[:7]), close=log._file.close, closed=False
    )
    log.start(mllog.RUN_START)
    log.finish(mllog.SUCCESS)
    log.event(mllog.PEAK_MEMORY, {"allocated": 1.5})
    log.close()
    assert not [finding for finding in compliance.judge(logs.read(tmp_path / "log")) if finding.rule == "LOG-18"]


def test_a_log_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "log").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="CFG-05"):
        Writer(tmp_path / "log")
    assert not (tmp_path / "elsewhere").exists()


def test_an_attached_file_has_its_checksum_and_ranks_without_a_log_attach_nothing(tmp_path: Path) -> None:
    (tmp_path / "requests").write_text("0.1\n")
    with Writer(None) as nothing:
        nothing.attach(tmp_path / "none")
    with Writer(tmp_path / "log") as log:
        log.attach(tmp_path / "requests")
    (event,) = read(tmp_path / "log")[0]
    digest = subprocess.run(["sha256sum", tmp_path / "requests"], capture_output=True, check=True).stdout.decode()
    assert (event.key, event.value) == ("attached_file", "requests")
    assert {"bytes": 4, "sha256": digest.split()[0]}.items() <= event.metadata.items()


@pytest.mark.parametrize("name", ["/etc/passwd", "../log", "a" * 300, "\0", "", 7, None])
def test_an_attached_name_outside_the_folder_is_not_followed(tmp_path: Path, name: object) -> None:
    (tmp_path / "log").write_text(record(key="attached_file", value=name, metadata={"bytes": 1, "sha256": ""}) + "\n")
    rules = [finding.rule for finding in compliance.judge(logs.read(tmp_path / "log"))]
    assert rules.count("LOG-18") == (name not in ("a" * 300, "\0")), "a missing file is not checked here"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (("answers_asked", {}), (mllog.ANSWERS_REQUESTED, {})),
        (("kernels_asked", {}), (mllog.KERNELS_REQUESTED, {})),
        (("loads_asked", {}), (mllog.LOADS_REQUESTED, {})),
        (("attention_backend", {"asked": "sdpa"}), (mllog.ATTENTION_BACKEND, {"requested": "sdpa"})),
        (("kernel_measured", {"ran": "torch"}), (mllog.KERNEL_MEASURED, {"implementation": "torch"})),
        (("load_measured", {"bunched": True}), (mllog.LOAD_MEASURED, {"batched_tokens": True})),
    ],
)
def test_names_of_earlier_versions_are_read_as_the_new_ones(
    tmp_path: Path, old: tuple[str, dict[str, object]], new: tuple[str, dict[str, object]]
) -> None:
    key, metadata = old
    record = {"namespace": "", "time_ms": 1, "event_type": "POINT_IN_TIME", "key": key, "value": 1}
    (tmp_path / "log").write_text(f":::MLLOG {json.dumps(record | {'metadata': metadata})}\n")
    ((event,), garbled) = read(tmp_path / "log")
    assert (event.key, event.metadata, event.line, garbled) == (*new, 1, [])
