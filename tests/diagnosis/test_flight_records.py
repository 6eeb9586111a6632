"""The flight records of a hang: which rank did not enter which collective, by records in torch's own format."""

import json
import os
import pickle
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from bench.diagnosis import explain, flight_recorder
from jobs.ranks import flight_recorder as recorder

TIMEOUT = "[rank0]:[E1120 ProcessGroupNCCL.cpp:629] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL()\n"
Call = tuple[str, int, bool]
"""The group, the name of a collective's number, and whether it is over."""


def record(*calls: Call, name: str = "nccl:all_reduce", size: int = 16) -> dict[str, Any]:
    """Return a record as torch 2.13 writes it, with the fields that are read and some others."""
    entries = [
        {
            "collective_seq_id": number,
            "input_sizes": [[size]],
            "is_p2p": False,
            "p2p_seq_id": 0,
            "pg_id": 0,
            "process_group": [group, "default_pg" if group == "0" else f"DATA_PARALLEL_{group}"],
            "profiling_name": name,
            "record_id": place,
            "retired": is_over,
            "state": "completed" if is_over else "started",
            "time_created_ns": 1000 + place,
        }
        for place, (group, number, is_over) in enumerate(calls)
    ]
    return {"version": "2.10", "entries": entries, "pg_config": {}, "pg_status": {}}


def cited(folder: Path, records: dict[int, Any]) -> str | None:
    (folder / "rank_logs").mkdir()
    for rank, content in records.items():
        path = folder / f"rank_logs/trial_0_flight_{rank}"
        if rank % 2:
            path.write_bytes(pickle.dumps(content, protocol=2))
        else:
            path.with_name(f"{path.name}.json").write_text(json.dumps(content))
    return flight_recorder.cited(folder)


def of_first(content: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return a record with changes of its first entry."""
    return content | {"entries": [content["entries"][0] | changes, *content["entries"][1:]]}


LATER, EARLIER = record(("0", 7, True), ("3", 4, False)), record(("0", 7, True), ("3", 3, True))


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        (
            {0: LATER, 1: EARLIER, 2: LATER, 3: LATER},
            "rank 1 did not enter collective 4 (all_reduce) of group DATA_PARALLEL_3, in which ranks 0, 2, 3 waited",
        ),
        (
            {0: record(("0", 2, False)), 1: record(("0", 2, False))},
            "ranks 0, 1 entered collective 2 (all_reduce) of all ranks, but it did not end",
        ),
        (
            {0: record(("0", 2, False)), 1: record(("0", 2, False), name="nccl:all_gather", size=8)},
            "ranks called different collectives as number 2 of all ranks: all_gather of [[8]], all_reduce of [[16]]",
        ),
        ({0: record(("0", 2, True)), 1: record(("0", 2, True))}, None),
        (
            {0: record(("0", 5, False)), 1: record(("0", 4, False)), 2: record(("0", 5, False))},
            "rank 1 did not enter collective 5 (all_reduce) of all ranks, in which ranks 0, 2 waited",
        ),
        (
            {rank: record(("0", 3, False) if rank else ("0", 2, True)) for rank in range(11)},
            "rank 0 did not enter collective 3 (all_reduce) of all ranks, in which "
            "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 2 more waited",
        ),
        ({0: of_first(record(("0", 2, False)), is_p2p=True)}, None),
        ({0: of_first(record(("0", 2, False)), state="completed")}, None),
        ({0: {"entries": [7, {}, {"is_p2p": False}]}, 1: [3]}, None),
    ],
    ids=["missing", "network", "mismatch", "no hang", "in another one", "many", "point to point", "over", "damaged"],
)
def test_the_rank_that_others_wait_for_is_named(tmp_path: Path, records: dict[int, Any], expected: str | None) -> None:
    assert cited(tmp_path, records) == (None if expected is None else f"flight recorder: {expected}")


def test_a_rank_in_a_later_group_waits_for_the_one_that_came_first(tmp_path: Path) -> None:
    """Ranks 0 and 1 wait in their own group, rank 2 in the group of all, which rank 3 has not entered."""
    own = record(("0", 5, True), ("1", 9, False))
    of_all = record(("0", 5, True), ("2", 8, True), ("0", 6, False))
    text = cited(tmp_path, {0: own, 1: own, 2: of_all, 3: record(("0", 5, True), ("2", 8, True))})
    assert text is not None and "ranks 0, 1, 3 did not enter collective 6" in text and "rank 2 waited" in text


def test_the_group_that_waits_for_the_longest_time_is_named(tmp_path: Path) -> None:
    """Rank 0 waits for rank 1, which waits for rank 2 since an earlier time."""
    last = record(("0", 1, True), ("0", 2, True), ("1", 2, True), ("1", 3, False))
    text = cited(tmp_path, {0: last, 1: record(("1", 2, True), ("2", 6, False)), 2: record(("2", 5, True))})
    assert text is not None and "rank 2 did not enter collective 6 (all_reduce) of group DATA_PARALLEL_2" in text


def test_of_two_records_of_a_rank_the_one_of_our_ranks_is_read(tmp_path: Path) -> None:
    cited(tmp_path, {1: EARLIER, 2: LATER})
    for rank, theirs in ((1, pickle.dumps(EARLIER)), (2, pickle.dumps(EARLIER))):
        (tmp_path / f"rank_logs/flight_{rank}").write_bytes(theirs)
        (tmp_path / f"rank_logs/trial_0_flight_{rank}.json").write_text(json.dumps(LATER))
    assert flight_recorder.records(tmp_path) == {1: LATER, 2: LATER}


class Harmful:
    """A pickle that runs a command when it is read."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


def test_a_pickle_that_runs_code_is_not_read(tmp_path: Path) -> None:
    harmful = {"entries": [Harmful(f"touch {tmp_path}/harmed")]}
    assert cited(tmp_path, {1: harmful, 2: record(("0", 1, False))}) is not None
    assert not (tmp_path / "harmed").exists()
    assert list(flight_recorder.records(tmp_path)) == [2]


def test_why_cites_it_and_ras_for_a_hang(tmp_path: Path) -> None:
    (tmp_path / "slurm-1.out").write_text(TIMEOUT)
    cited(tmp_path, {0: LATER, 1: EARLIER})
    (tmp_path / "rank_logs/trial_0_rank_0.ras").write_text(RAS)
    explanation = explain([tmp_path])
    assert explanation.rule == "NCC-06" and explanation.detail == (
        "flight recorder: rank 1 did not enter collective 4 (all_reduce) of group DATA_PARALLEL_3, in which rank 0 "
        "waited; NCCL RAS: INCOMPLETE, Missing communicator data from 1 job process, Process 4123 on node 10.0.0.3 "
        "managing GPU 5, MISMATCH, Communicator ranks have different collective operation counts"
    )


RAS = """\
NCCL version 2.27.7 compiled with CUDA 12.8

Communicators... (0.00s)
=============
Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    0         1         2         8         8        16   RUNNING  INCOMPLETE

Errors
======

INCOMPLETE
  Missing communicator data from 1 job process
  Process 4123 on node 10.0.0.3 managing GPU 5

Warnings
========

MISMATCH
  Communicator ranks have different collective operation counts
"""


def test_ras_answers_a_request_in_its_text_protocol() -> None:
    """A server in place of NCCL's, which answers and closes the connection."""
    requests: list[bytes] = []
    with socket.create_server(("localhost", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                requests.append(connection.recv(100))
                connection.sendall(RAS.encode())

        thread = threading.Thread(target=answer)
        thread.start()
        assert recorder.ras_status("localhost", server.getsockname()[1]) == RAS
        thread.join()
    assert requests == [b"VERBOSE STATUS\n"]
