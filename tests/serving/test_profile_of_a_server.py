"""The profile of a server whose answers and files the test sets, by a clock of the test."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.contract import mllog, run_files, server_times
from bench.contract.schema import Device, ProfileKind
from bench.errors import SubmitError
from helpers import written_records

pytest.importorskip("mlperf_loadgen", reason="pip install 'runstop[serve]'")
from jobs.profiles import server_trace
from jobs.serving import profile
from jobs.serving.client import Exchange
from jobs.serving.profile import Recorded


class Served:
    """A server: at each look at it, the next event happens. Times are those of the waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, *, has_endpoints: bool = False) -> None:
        self.now_s, self.looks, self.folder = 0.0, 0, folder
        self.events: dict[int, Callable[[], object]] = {}
        self.sent: list[Exchange] = []
        self.posted: list[str] = []
        self.device, self.has_trace = "cuda", True
        self.read_paths: list[Path] = []
        self._done: Any = None
        monkeypatch.setattr(profile, "require_alive", lambda child, when: self._look(child, when))
        clock = SimpleNamespace(sleep=self._sleep, monotonic=lambda: self.now_s, perf_counter=lambda: self.now_s)
        monkeypatch.setattr(profile, "time", clock)
        monkeypatch.setattr(profile, "Client", self._client)
        monkeypatch.setattr(profile, "DIRECTLY", SimpleNamespace(open=self._post))
        monkeypatch.setattr(server_trace, "read", self._read)
        monkeypatch.setattr(server_trace, "server_times", lambda trace, **counts: (trace.device, counts))
        monkeypatch.setattr(server_trace, "kernel_list", lambda trace: [{"name": "gemm"}])
        self.setting: Any = SimpleNamespace(
            serving=SimpleNamespace(
                server=SimpleNamespace(profile=SimpleNamespace(has_endpoints=has_endpoints)), request_timeout_s=60.0
            ),
            server=SimpleNamespace(url="http://here:1", child="child"),
            body=lambda: {"model": "m"},
            exchange=lambda number, prompt, due_s: Exchange(number, prompt, due_s),
        )

    def _look(self, child: str, when: str) -> None:
        assert (child, when) == ("child", "during the profile")
        self.looks += 1
        self.events.get(self.looks, int)()

    def _sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def _client(self, url: str, body: dict[str, Any], *, timeout_s: float) -> "Served":
        assert (url, body, timeout_s) == ("http://here:1", {"model": "m"}, 60.0)
        return self

    def __enter__(self) -> "Served":
        return self

    def __exit__(self, *error: object) -> None: ...

    def send(self, exchange: Exchange, done: Callable[[Exchange], object]) -> None:
        self.sent.append(exchange)
        self._done = done

    def _post(self, request: Any, timeout: float) -> "Served":
        assert (request.get_method(), timeout) == ("POST", 600.0)
        self.posted.append(request.full_url)
        if "refused" in self.posted[-1]:
            raise OSError("no route")
        return self

    def _read(self, paths: list[Path]) -> tuple[Path, Any] | None:
        self.read_paths = sorted(paths)
        return (paths[0], SimpleNamespace(device=self.device)) if self.has_trace else None

    def tokens(self, *numbers: int) -> Callable[[], None]:
        """Return an event: these requests each receive that many tokens."""

        def happen() -> None:
            for exchange, number in zip(self.sent, numbers, strict=True):
                exchange.parts += [(self.now_s, b"x")] * number

        return happen

    def done(self, *places: int, http: int = 200, failure: str = "") -> Callable[[], None]:
        def happen() -> None:
            for place in places:
                self.sent[place].http, self.sent[place].failure = http, failure
                self._done(self.sent[place])

        return happen

    def writes(self, name: str, text: str = "{}") -> Callable[[], object]:
        return lambda: (self.folder / name).write_text(text)

    def record(self, device: Device = Device.cuda) -> Recorded:
        config = SimpleNamespace(cluster=SimpleNamespace(device=device), model=SimpleNamespace(num_layers=32))
        return profile.record(SimpleNamespace(config=config), self.setting, ["a", "b"], self.folder)  # type: ignore[arg-type]


@pytest.mark.parametrize("early", [False, True])
def test_the_profile_begins_with_the_first_tokens_and_ends_eight_tokens_later(
    early: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Or when a request is done. It is written once each process has its trace, and no file grows any more."""
    served = Served(monkeypatch, tmp_path)
    served.events = {
        1: served.tokens(3, 0),
        2: served.tokens(0, 1),
        3: served.writes("started_1"),
        4: served.done(1) if early else served.tokens(7, 7),
        5: served.done(0) if early else served.tokens(1, 0),
        6: served.writes("recorded_1.trace.json.gz"),
        7: served.writes("recorded_1.trace.json.gz", "longer"),
        8: served.writes("recorded_1.trace.json.gz", "longer"),
        9: served.done(0, 1),
    }
    seen: list[tuple[int, bool, bool]] = []
    look = served._look

    def looked(child: str, when: str) -> None:
        look(child, when)
        seen.append((served.looks, (tmp_path / "start").exists(), (tmp_path / "stop").exists()))

    monkeypatch.setattr(profile, "require_alive", looked)
    recorded = served.record()
    assert recorded.times == ("cuda", {"num_layers": 32, "running": 2})
    assert recorded.kernels == [{"name": "gemm"}] and recorded.trace.name == "recorded_1.trace.json.gz"
    assert [started for _, started, _ in seen[:3]] == [False, False, True]
    assert [stopped for _, _, stopped in seen[3:6]] == [False, False, True]
    last = 8 if early else 9
    assert served.looks == last and served.now_s == pytest.approx(0.02 * (last - 3) + 0.5 * 3)
    assert [one.prompt for one in served.sent] == ["a", "b"]


def test_a_request_that_is_done_first_is_not_running(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The endpoints of a server begin and end its profile; any trace is then one of it."""
    served = Served(monkeypatch, tmp_path, has_endpoints=True)
    (tmp_path / "deep").mkdir()
    first = [served.tokens(5, 0), served.done(0)]
    served.events = {
        1: lambda: [event() for event in first],
        2: served.tokens(0, 8),
        3: served.writes("deep/one.json"),
        5: served.writes("two.json.gz"),
        6: served.done(1),
    }
    recorded = served.record()
    assert served.posted == ["http://here:1/start_profile", "http://here:1/stop_profile"]
    assert recorded.times == ("cuda", {"num_layers": 32, "running": 0})
    assert served.read_paths == [tmp_path / "deep/one.json", tmp_path / "two.json.gz"]
    served.device = "cpu"
    served.events, served.looks, served.sent = {1: lambda: [event() for event in first], 2: served.done(1)}, 0, []
    assert served.record(Device.cpu).times == ("cpu", {"num_layers": 32, "running": 0})


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"failure": "reset"}, "a request failed while runstop profiled the server: reset"),
        ({"http": 500}, "a request failed while runstop profiled the server: HTTP 500"),
        ({"has_trace": False}, "the server wrote traces, but these traces have no compute kernel"),
        ({"device": "cpu"}, "the server runs on a GPU, but its traces have no kernel of a GPU"),
        ({"url": "http://refused:1"}, "the server refused http://refused:1/start_profile: no route"),
    ],
)
def test_a_profile_that_fails(
    change: dict[str, Any], complaint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    served = Served(monkeypatch, tmp_path, has_endpoints=True)
    (tmp_path / "one.json").write_text("{}")
    how = {name: change.pop(name) for name in ("failure", "http") if name in change}
    served.events = {1: served.tokens(1, 1), 2: served.done(0, 1, **how)}
    if "url" in change:
        served.setting.server.url = change["url"]
        monkeypatch.setattr(profile, "Client", lambda *each, **more: served)
    for name, value in change.items():
        setattr(served, name, value)
    with pytest.raises(SubmitError, match=complaint) as raised:
        served.record()
    assert "trial_K.server.out" in raised.value.fix


@pytest.mark.parametrize(
    ("events", "complaint", "at_s"),
    [
        ([], "no process of the server has started torch.profiler", 10.04),
        (["started_1"], "the server wrote no trace within 600 s", 600.56),
    ],
)
def test_a_server_that_writes_nothing(
    events: list[str], complaint: str, at_s: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    served = Served(monkeypatch, tmp_path)
    served.events = {1: served.tokens(1, 1), 3: served.tokens(9, 9)}
    if events:
        served.events[2] = served.writes(events[0])
    with pytest.raises(SubmitError, match=complaint):
        served.record()
    assert served.now_s == pytest.approx(at_s, abs=0.02)


@pytest.mark.parametrize("name", ["server.json", "server.json.gz"])
def test_a_profile_is_kept_in_the_run_folder(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its trace is compressed once."""
    trace, run = tmp_path / name, tmp_path / "run"
    raw = gzip.compress(b"kernels") if name.endswith("gz") else b"kernels"
    trace.write_bytes(raw)
    (run / "rank_logs").mkdir(parents=True)
    monkeypatch.setattr(server_times, "plain", lambda times: {"device": times})
    with mllog.Writer(run / "log") as log:
        profile.write(Recorded(times="cuda", kernels=[{"name": "gemm"}], trace=trace), log, run, 3)  # type: ignore[arg-type]
    kept, kernels = run / run_files.trace(3), run / run_files.module_times(3)
    assert gzip.decompress(kept.read_bytes()) == b"kernels" and trace.exists() != name.endswith("gz")
    assert json.loads(kernels.read_text()) == {"times": {"device": "cuda"}, "kernels": [{"name": "gemm"}]}
    first, second, third = written_records.of_log(run / "log")
    assert first.startswith(f'. attached_file "{run_files.module_times(3)}"')
    assert second.startswith(f'. attached_file "{run_files.trace(3)}"')
    assert third == '. server_times {"device": "cuda"}'


def test_only_the_profile_of_modules_is_one_of_a_server() -> None:
    for kind in ProfileKind:
        plan: Any = SimpleNamespace(config=SimpleNamespace(launch=SimpleNamespace(profile=kind)))
        assert profile.is_requested(plan) == (kind is ProfileKind.modules)
