"""What a rank keeps of torch's flight recorder and of NCCL's RAS, and where."""

import os
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.contract import run_files
from jobs.ranks import flight_recorder

C10D = "torch._C._distributed_c10d"
NAMES = ("TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


def group(backends: str, *, is_initialized: bool = True, is_available: bool = True) -> SimpleNamespace:
    return SimpleNamespace(
        is_available=lambda: is_available,
        is_initialized=lambda: is_initialized,
        get_backend_config=lambda: backends,
    )


def test_torch_writes_its_dumps_to_the_run_folder_unless_the_user_has_set_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    prefix = str(tmp_path / run_files.flight_record("trial 3", ""))
    monkeypatch.setattr(os, "environ", {})
    flight_recorder.enable(tmp_path, "trial 3")
    assert os.environ == dict(zip(NAMES, ("1", prefix, prefix), strict=True))
    monkeypatch.setattr(os, "environ", {NAMES[0]: "0", NAMES[1]: "/mine"})
    flight_recorder.enable(tmp_path, "trial 3")
    assert os.environ == dict(zip(NAMES, ("0", "/mine", prefix), strict=True))


@pytest.mark.parametrize(
    ("torch", "recorders", "text"),
    [
        (group("cpu:gloo,cuda:nccl"), {"_dump_nccl_trace_json": b"nccl", "_dump_fr_trace_json": "all"}, "nccl"),
        (group("cpu:gloo"), {"_dump_nccl_trace_json": b"nccl", "_dump_fr_trace_json": "all"}, "all"),
        (group("cuda:nccl"), {"_dump_fr_trace_json": "all"}, "all"),
        (group("cuda:nccl"), {}, None),
        (group("cuda:nccl", is_initialized=False), {"_dump_fr_trace_json": "all"}, None),
        (group("cuda:nccl", is_available=False), {"_dump_fr_trace_json": "all"}, None),
        (None, {"_dump_fr_trace_json": "all"}, None),
        (group("cpu:gloo"), {"_dump_fr_trace_json": RuntimeError()}, None),
    ],
)
def test_the_last_collectives_of_a_rank_are_written_until_it_continues(
    torch: Any, recorders: dict[str, Any], text: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def recorder(answer: Any) -> Any:
        def dump(*, includeCollectives: bool, onlyActive: bool) -> Any:  # noqa: N803 - as torch names them
            assert (includeCollectives, onlyActive) == (True, False)
            if isinstance(answer, Exception):
                raise answer
            return answer

        return dump

    monkeypatch.setitem(sys.modules, "torch.distributed", torch)
    monkeypatch.setitem(sys.modules, C10D, SimpleNamespace(**{name: recorder(one) for name, one in recorders.items()}))
    flight_recorder.dump(tmp_path, "trial 3", 5)  # without its folder, as on a full disk
    (tmp_path / "rank_logs").mkdir()
    flight_recorder.dump(tmp_path, "trial 3", 5)
    path = tmp_path / run_files.flight_record("trial 3", "5.json")
    assert (path.read_text() if path.exists() else None) == text
    (tmp_path / run_files.ras_report("trial 3", 5)).write_text("x")
    flight_recorder.remove(tmp_path, "trial 3", 5)
    flight_recorder.remove(tmp_path, "trial 3", 5)
    assert not [*(tmp_path / "rank_logs").iterdir()]


@pytest.fixture
def ras() -> Iterator[tuple[int, list[bytes]]]:
    """Return the port of a service that answers in two parts, and the requests that it got."""
    requests: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with server.accept()[0] as connection:
                requests.append(connection.recv(100))
                connection.sendall(b"rank 7 \xff")
                connection.sendall(b"does not respond\n")

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1], requests
    thread.join(5)


def test_the_report_of_ras_is_written_only_with_nccl(
    ras: tuple[int, list[bytes]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    port, requests = ras
    (tmp_path / "rank_logs").mkdir()
    path = tmp_path / run_files.ras_report("trial 3", 5)
    monkeypatch.setenv("NCCL_RAS_ADDR", f"127.0.0.1:{port}")
    monkeypatch.setitem(sys.modules, "torch.distributed", group("cpu:gloo"))
    flight_recorder.ask_ras(tmp_path, "trial 3", 5, timeout_s=5)
    assert not path.exists() and not requests
    monkeypatch.setitem(sys.modules, "torch.distributed", group("cpu:gloo,cuda:nccl"))
    flight_recorder.ask_ras(tmp_path, "trial 3", 5, timeout_s=5)
    assert path.read_text() == "rank 7 \ufffddoes not respond\n" and requests == [b"VERBOSE STATUS\n"]


@pytest.mark.parametrize(
    ("address", "expected"),
    [(None, ("localhost", 28028, 4.0)), ("node1:1234", ("node1", 1234, 4.0)), ("node1:x", None)],
)
def test_the_address_of_ras(
    address: str | None, expected: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed", group("cuda:nccl"))
    monkeypatch.setattr(os, "environ", {} if address is None else {"NCCL_RAS_ADDR": address})
    requests: list[Any] = []

    def refuse(host: str, port: int, *, timeout_s: float) -> str:
        requests.append((host, port, timeout_s))
        raise TimeoutError

    monkeypatch.setattr(flight_recorder, "ras_status", refuse)
    flight_recorder.ask_ras(tmp_path, "trial 3", 5, timeout_s=4.0)
    assert requests == ([] if expected is None else [expected])
    flight_recorder.ask_ras(tmp_path, "trial 3", 5, timeout_s=40.0)
    assert [one[2] for one in requests[1:]] == ([] if expected is None else [15.0])
