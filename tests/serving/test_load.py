"""A load under MLPerf's loadgen, in this process: its settings, its rows, what the client delayed, and how it fails."""

import csv
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.contract.plan_kinds import ServingPlan
from bench.contract.serving import Load
from bench.errors import SubmitError
from bench.mlperf import log as logs
from helpers import serving, stub_server

pytest.importorskip("mlperf_loadgen", reason="pip install 'runstop[serve]'")
from jobs.serving import loadgen, prompts, server
from jobs.serving.answers import Asked
from jobs.serving.client import Exchange

SEED = 5
WORDS = tuple(f"task.serving.{word}" for word in ("requests=6", "tokens_in=16", "tokens_out=8", "request_timeout_s=20"))
ENDED = SimpleNamespace(exit_code=lambda: -9, last_words=lambda: "out of memory", output=Path("server.out"))


def planned(*words: str) -> ServingPlan:
    return serving.planned("task.serving.server.bunches_chunks=false", *WORDS, *words)


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return serving.tokenizer(tmp_path_factory.mktemp("load") / "model")


@pytest.fixture
def stub() -> Iterator[str]:
    with stub_server.in_a_thread("none") as url:
        yield url


@pytest.fixture
def ends_late(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have a load last until the test is over, in loadgen's place."""
    over, begun = threading.Event(), list[threading.Thread]()

    def start(*_: Any) -> None:
        begun.append(threading.current_thread())
        over.wait(30)

    monkeypatch.setattr(loadgen.loadgen, "StartTestWithLogSettings", start)
    yield
    over.set()
    for thread in begun:
        thread.join(30)


def setting(plan: ServingPlan, url: str, folder: Path, tokenizer_folder: Path, *, child: Any = None) -> loadgen.Setting:
    block = plan.config.task.serving
    assert block is not None
    (folder / "rank_logs").mkdir(exist_ok=True)
    own = prompts.tokenizer(tokenizer_folder)
    asked = Asked(tokens_in=block.tokens_in, tokens_out=block.tokens_out, tokenizer=own)
    found = server.Started(url, "tiny", [], 0.0, child)
    return loadgen.Setting(serving=block, server=found, asked=asked, folder=folder, trial=2, seed=SEED)


def texts(count: int = 6) -> list[str]:
    return [" ".join([f"w{number + 1}"] * 16) for number in range(count)]


def of(plan: ServingPlan, name: str) -> Load:
    return next(one for one in plan.loads if one.name == name)


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    ("words", "name", "label", "settings"),
    [
        ("[burst]", "burst", "burst", {"scenario": "Offline", "target_qps": 0.001}),
        ("[one_by_one]", "one by one", "one_by_one", {"scenario": "SingleStream"}),
        (
            "[poisson]",
            "poisson 400/s",
            "poisson_400",
            {"scenario": "Server", "target_qps": 400, "target_latency_ns": 1_500_000_000},
        ),
    ],
)
def test_every_prompt_is_sent_once_when_loadgen_says_so(
    words: str, name: str, label: str, settings: dict[str, Any], stub: str, tmp_path: Path, tokenizer_folder: Path
) -> None:
    rates = "[400]" if "poisson" in words else "[]"
    plan = planned(f"task.serving.arrivals={words}", f"task.serving.rates={rates}", "task.serving.limits.latency_s=1.5")
    found = loadgen.loaded(setting(plan, stub, tmp_path, tokenizer_folder), of(plan, name), texts())
    assert sorted(body.pop("prompt") for body in stub_server.bodies) == texts(), "each once"
    assert stub_server.bodies == [{"model": "tiny", "max_tokens": 8, "temperature": 0.0, "stream": True}] * 6
    assert [answer.number for answer in found.answers] == list(range(6))
    assert {(answer.status, answer.tokens_in, answer.tokens_out) for answer in found.answers} == {("ok", 16, 8)}

    logged, detail = (
        tmp_path / f"rank_logs/trial_2.{label}.requests.csv",
        tmp_path / f"rank_logs/trial_2.{label}.loadgen",
    )
    assert found.files == (logged, detail) and sorted((tmp_path / "rank_logs").iterdir()) == sorted(found.files)
    theirs = logs.read(detail)
    seeds = dict.fromkeys(("qsl_rng_seed", "sample_index_rng_seed", "schedule_rng_seed"), SEED)
    counts = {"min_query_count": 1 if label == "burst" else 6, "max_query_count": 6, "min_duration_ms": 0}
    expected = {"test_mode": "PerformanceOnly", **seeds, **counts, **settings}
    assert {key: theirs.value(f"effective_{key}") for key in expected} == expected
    assert theirs.value("effective_samples_per_query") == (6 if label == "burst" else 1)
    assert theirs.value("qsl_reported_performance_count") == theirs.value("qsl_reported_total_count") == 6
    assert found.loadgen == {key: theirs.value(key) for key in loadgen.VERDICT}
    assert list(found.loadgen)[:2] == ["loadgen_version", "result_validity"]
    ends = [answer.due_s + (answer.last_s or 0) for answer in found.answers]
    dues = [answer.due_s for answer in found.answers]
    assert len(set(dues)) == (1 if label == "burst" else 6) and dues == sorted(dues)
    if label == "one_by_one":
        assert all(due > end for due, end in zip(dues[1:], ends, strict=False))

    for number, (row, answer) in enumerate(zip(rows(logged), found.answers, strict=True)):
        assert (row["request"], row["status"], row["detail"]) == (str(number), "ok", "")
        assert (row["tokens_in"], row["tokens_out"], row["chunks"], row["chunks_together"]) == (
            *("16", "8", "8"),
            str(answer.num_together),
        )
        arrival_s, sent_s, first_s, last_s = (float(row[key]) for key in loadgen.COLUMNS[1:5])
        assert arrival_s == pytest.approx(answer.due_s - dues[0], abs=1e-6)
        assert first_s - arrival_s == pytest.approx(answer.first_s, abs=2e-6)
        assert last_s - arrival_s == pytest.approx(answer.last_s, abs=2e-6)
        assert arrival_s <= sent_s < first_s <= last_s
    shares = {key for key in found.client if 0 <= found.client[key] < 5}
    assert shares == {"sent_p50_s", "sent_p99_s", "loop_p50_s", "loop_p99_s", "loadgen_mean_s"}


def test_a_request_that_failed_has_a_row_with_its_reason_on_one_line(tmp_path: Path, tokenizer_folder: Path) -> None:
    plan = planned("task.serving.arrivals=[burst]", "task.serving.rates=[]", "+task.serving.server.request.user=me")
    with stub_server.in_a_thread("errors", before=8) as url:
        found = loadgen.loaded(setting(plan, url, tmp_path, tokenizer_folder), of(plan, "burst"), texts())
    assert [body["user"] for body in stub_server.bodies] == ["me"] * 6
    written = rows(found.files[0])
    assert sorted(row["status"] for row in written) == ["http 500"] + ["ok"] * 5
    (failed,) = (row for row in written if row["status"] != "ok")
    empty = {"first_token_s": "", "last_token_s": "", "tokens_in": "", "tokens_out": ""}
    kept = {"arrival_s": "0.000000", "chunks": "0", "chunks_together": "0", "detail": "oops"}
    assert failed == failed | empty | kept and float(failed["sent_s"]) >= 0


@pytest.mark.parametrize(
    ("fault", "rule", "what"),
    [
        ("errors", "SRV-04", "a request of the warm-up failed: http 500: oops"),
        ("short", "SRV-05", "a request of the warm-up failed: short: 7 tokens of 8"),
    ],
)
def test_no_load_is_begun_after_a_warm_up_that_failed(
    fault: str, rule: str, what: str, tmp_path: Path, tokenizer_folder: Path
) -> None:
    plan = planned()
    with stub_server.in_a_thread(fault, before=8) as url, pytest.raises(SubmitError, match=what) as refused:
        loadgen.warmed_up(setting(plan, url, tmp_path, tokenizer_folder), texts())
    assert (refused.value.rule, refused.value.where) == (rule, url)
    assert sorted(body["prompt"] for body in stub_server.bodies) == texts()


def test_a_warm_up_sends_all_at_once_and_waits_for_every_answer(
    stub: str, tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loadgen, "POLL_S", 0.001)
    alive = SimpleNamespace(exit_code=lambda: None)
    here = setting(planned(), stub, tmp_path, tokenizer_folder, child=alive)
    loadgen.warmed_up(here, texts())
    assert [body["prompt"] for body in stub_server.bodies] != [] and stub_server.served == 6
    loadgen.warmed_up(here, [])
    assert stub_server.served == 6


@pytest.mark.usefixtures("ends_late")
def test_a_server_that_ends_ends_the_trial_with_where_it_was(
    stub: str, tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loadgen, "POLL_S", 0.001)
    here = setting(planned(), stub, tmp_path, tokenizer_folder, child=ENDED)
    by = "by signal 9; it last printed: out of memory"
    with pytest.raises(SubmitError, match=f"the server ended while it was warmed up, {by}"):
        loadgen.warmed_up(here, texts())
    plan = planned()
    with pytest.raises(SubmitError, match=rf"the server ended under load \(poisson 8/s\), {by}") as ended:
        loadgen.loaded(here, of(plan, "poisson 8/s"), texts())
    assert (ended.value.rule, ended.value.where) == ("SRV-03", "server.out")
    assert not list((tmp_path / "rank_logs").iterdir()), "no rows to be taken for those of a load"


def test_what_fails_in_loadgens_thread_is_told_and_it_is_put_away(
    monkeypatch: pytest.MonkeyPatch, stub: str, tmp_path: Path, tokenizer_folder: Path
) -> None:
    plan, put_away = planned(), list[str]()

    def start(*_: Any) -> None:
        raise RuntimeError("no such scenario")

    monkeypatch.setattr(loadgen.loadgen, "StartTestWithLogSettings", start)
    for name in ("DestroyQSL", "DestroySUT"):
        real = getattr(loadgen.loadgen, name)
        monkeypatch.setattr(loadgen.loadgen, name, lambda one, name=name, real=real: (put_away.append(name), real(one)))
    with pytest.raises(RuntimeError, match="no such scenario"):
        loadgen.loaded(setting(plan, stub, tmp_path, tokenizer_folder), of(plan, "burst"), texts())
    assert put_away == ["DestroyQSL", "DestroySUT"]


def test_the_clients_delay_is_from_due_to_sent_and_loadgens_is_beyond_the_end() -> None:
    """Request n of 200 is sent n ms late, and done a second after it was due; loadgen hears of it 0.25 s later."""
    exchanges = [Exchange(n, "", 10.0 + n, sent_s=10.0 + n + n / 1000, done_s=11.0 + n) for n in range(199, -1, -1)]
    late_s = [n / 64 for n in range(50)]
    found = loadgen.delays(exchanges, late_s, {"result_mean_latency_ns": 1_250_000_000})
    assert found == {
        "sent_p50_s": pytest.approx(0.100),
        "sent_p99_s": pytest.approx(0.198),
        "loop_p50_s": 25 / 64,
        "loop_p99_s": 49 / 64,
        "loadgen_mean_s": 0.25,
    }
    unsent = [Exchange(0, "", 10.0, done_s=10.0)]
    assert loadgen.delays(unsent, [], {"result_mean_latency_ns": None}) == dict.fromkeys(found, 0.0)
    assert loadgen.delays(unsent, [0.5], {"result_mean_latency_ns": 1e9})["loop_p99_s"] == 0.5


def test_of_loadgens_log_the_verdict_is_kept(tmp_path: Path) -> None:
    told = {"result_validity": "INVALID", "early_stopping_met": False, "result_query_count": 24}
    lines = [f":::MLLOG {json.dumps({'key': key, 'value': value})}\n" for key, value in told.items()]
    (tmp_path / "detail").write_text("".join(lines))
    found = loadgen.verdict(tmp_path / "detail")
    given = {"result_validity": "INVALID", "early_stopping_met": False}
    assert found == dict.fromkeys(loadgen.VERDICT) | given and tuple(found) == loadgen.VERDICT
