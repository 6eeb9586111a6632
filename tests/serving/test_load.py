"""A load with MLPerf's loadgen in this process: settings, rows, client delays and failures."""

import csv
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.contract.plan_kinds import ServingPlan
from bench.contract.serving import Load, lengths_of
from bench.errors import SubmitError
from bench.mlperf import log as logs
from helpers import serving, stub_server

pytest.importorskip("mlperf_loadgen", reason="pip install 'runstop[serve]'")
from jobs.serving import loadgen, prompts, server
from jobs.serving.client import Exchange

SEED = 5
WORDS = tuple(
    f"task.serving.{option}" for option in ("requests=6", "tokens_in=16", "tokens_out=8", "request_timeout_s=20")
)
ENDED = SimpleNamespace(exit_code=lambda: -9, last_line=lambda: "out of memory", output=Path("server.out"))


def planned(*words: str) -> ServingPlan:
    return serving.planned("task.serving.server.batches_tokens=false", *WORDS, *words)


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return serving.tokenizer(tmp_path_factory.mktemp("load") / "model")


@pytest.fixture
def stub() -> Iterator[str]:
    with stub_server.in_a_thread("none") as url:
        yield url


@pytest.fixture
def ends_late(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replace loadgen by a load that lasts until the end of the test."""
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
    lengths = lengths_of(block, plan.lengths, 0)
    actual = server.RunningServer(url, "tiny", [], 0.0, child)
    same: dict[str, Any] = {"serving": block, "server": actual, "folder": folder}
    return loadgen.Setting(tokenizer=own, lengths=lengths, trial=2, seed=SEED, **same)


def texts(count: int = 6) -> list[str]:
    return [" ".join([f"w{number + 1}"] * 16) for number in range(count)]


def load_of(plan: ServingPlan, name: str) -> Load:
    return next(one for one in plan.loads if one.name == name)


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    ("words", "name", "label", "settings"),
    [
        ("[burst]", "burst", "burst", {"scenario": "Offline", "target_qps": 0.001}),
        ("[concurrent]", "concurrency 2", "concurrency_2", {"scenario": "Offline", "target_qps": 0.001}),
        ("[one_by_one]", "one by one", "one_by_one", {"scenario": "SingleStream"}),
        (
            "[poisson]",
            "poisson 400/s",
            "poisson_400",
            {"scenario": "Server", "target_qps": 400, "target_latency_ns": 1_500_000_000},
        ),
    ],
)
def test_every_prompt_is_sent_once_when_loadgen_issues_it(
    words: str, name: str, label: str, settings: dict[str, Any], stub: str, tmp_path: Path, tokenizer_folder: Path
) -> None:
    rates = "[400]" if "poisson" in words else "[]"
    at_once = ("task.serving.concurrency=[2,3]",) if "concurrent" in words else ()
    limit = "task.serving.limits.latency_s=1.5"
    plan = planned(f"task.serving.arrivals={words}", f"task.serving.rates={rates}", limit, *at_once)
    actual = loadgen.run_load(setting(plan, stub, tmp_path, tokenizer_folder), load_of(plan, name), texts())
    assert sorted(body.pop("prompt") for body in stub_server.bodies) == texts(), "each once"
    assert stub_server.bodies == [{"model": "tiny", "max_tokens": 8, "temperature": 0.0, "stream": True}] * 6
    assert [answer.number for answer in actual.answers] == list(range(6))
    assert {(answer.status, answer.tokens_in, answer.tokens_out) for answer in actual.answers} == {("ok", 16, 8)}

    logged, detail = (
        tmp_path / f"rank_logs/trial_2.{label}.requests.csv",
        tmp_path / f"rank_logs/trial_2.{label}.loadgen",
    )
    assert actual.files == (logged, detail) and sorted((tmp_path / "rank_logs").iterdir()) == sorted(actual.files)
    theirs = logs.read(detail)
    seeds = dict.fromkeys(("qsl_rng_seed", "sample_index_rng_seed", "schedule_rng_seed"), SEED)
    is_offline = settings["scenario"] == "Offline"
    counts = {"min_query_count": 1 if is_offline else 6, "max_query_count": 6, "min_duration_ms": 0}
    expected = {"test_mode": "PerformanceOnly", **seeds, **counts, **settings}
    assert {key: theirs.value(f"effective_{key}") for key in expected} == expected
    assert theirs.value("effective_samples_per_query") == (6 if is_offline else 1)
    assert theirs.value("qsl_reported_performance_count") == theirs.value("qsl_reported_total_count") == 6
    assert actual.loadgen == {key: theirs.value(key) for key in loadgen.VERDICT}
    assert list(actual.loadgen)[:2] == ["loadgen_version", "result_validity"]
    ends = [answer.due_s + (answer.last_s or 0) for answer in actual.answers]
    dues = [answer.due_s for answer in actual.answers]
    assert len(set(dues)) == (1 if label == "burst" else 6) and dues == sorted(dues)
    if label == "concurrency_2":
        spans = [(answer.due_s, end) for answer, end in zip(actual.answers, ends, strict=True)]
        in_flight = [sum(due <= at < end for due, end in spans) for at, _ in spans]
        assert max(in_flight) == 2 and actual.client["loadgen_mean_s"] < 0.5
    if label == "one_by_one":
        assert all(due > end for due, end in zip(dues[1:], ends, strict=False))

    for number, (row, answer) in enumerate(zip(rows(logged), actual.answers, strict=True)):
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
    shares = {key for key in actual.client if 0 <= actual.client[key] < 5}
    assert shares == {"sent_p50_s", "sent_p99_s", "loop_p50_s", "loop_p99_s", "loadgen_mean_s"}


def test_a_failed_request_has_a_row_with_its_reason(tmp_path: Path, tokenizer_folder: Path) -> None:
    plan = planned("task.serving.arrivals=[burst]", "task.serving.rates=[]", "+task.serving.server.request.user=me")
    with stub_server.in_a_thread("errors", before=8) as url:
        actual = loadgen.run_load(setting(plan, url, tmp_path, tokenizer_folder), load_of(plan, "burst"), texts())
    assert [body["user"] for body in stub_server.bodies] == ["me"] * 6
    written = rows(actual.files[0])
    assert sorted(row["status"] for row in written) == ["http 500"] + ["ok"] * 5
    (failed,) = (row for row in written if row["status"] != "ok")
    empty = {"first_token_s": "", "last_token_s": "", "tokens_in": "", "tokens_out": ""}
    kept = {"arrival_s": "0.000000", "chunks": "0", "chunks_together": "0", "detail": "oops"}
    assert failed == failed | empty | kept and float(failed["sent_s"]) >= 0


@pytest.mark.parametrize(
    ("fault", "rule", "what"),
    [
        ("errors", "SRV-04", "a warm-up request failed: http 500: oops"),
        ("short", "SRV-05", "a warm-up request failed: short: 7 instead of 8 tokens"),
    ],
)
def test_no_load_starts_after_a_failed_warm_up(
    fault: str, rule: str, what: str, tmp_path: Path, tokenizer_folder: Path
) -> None:
    plan = planned()
    with stub_server.in_a_thread(fault, before=8) as url, pytest.raises(SubmitError, match=what) as refused:
        loadgen.warm_up(setting(plan, url, tmp_path, tokenizer_folder), texts())
    assert (refused.value.rule, refused.value.where) == (rule, url)
    assert sorted(body["prompt"] for body in stub_server.bodies) == texts()


def test_a_warm_up_sends_all_requests_at_once_and_waits(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stub answers none before all have arrived, so that requests one after the other would reach their timeout."""
    monkeypatch.setattr(loadgen, "POLL_S", 0.001)
    alive = SimpleNamespace(exit_code=lambda: None)
    with stub_server.in_a_thread("together") as url:
        here = setting(planned("task.serving.request_timeout_s=5"), url, tmp_path, tokenizer_folder, child=alive)
        loadgen.warm_up(here, texts())
        assert (stub_server.served, stub_server.answered) == (6, 6)
        assert sorted(body["prompt"] for body in stub_server.bodies) == sorted(texts())
        loadgen.warm_up(here, [])
        assert stub_server.served == 6


@pytest.mark.usefixtures("ends_late")
def test_a_server_that_ends_fails_the_trial(
    stub: str, tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loadgen, "POLL_S", 0.001)
    here = setting(planned(), stub, tmp_path, tokenizer_folder, child=ENDED)
    by = "by signal 9; last line of its output: out of memory"
    with pytest.raises(SubmitError, match=f"the server ended during the warm-up, {by}"):
        loadgen.warm_up(here, texts())
    plan = planned()
    with pytest.raises(SubmitError, match=rf"the server ended under load \(poisson 8/s\), {by}") as ended:
        loadgen.run_load(here, load_of(plan, "poisson 8/s"), texts())
    assert (ended.value.rule, ended.value.where) == ("SRV-03", "server.out")
    assert not list((tmp_path / "rank_logs").iterdir()), "no rows of an incomplete load"


def test_an_error_in_loadgens_thread_is_raised_and_loadgen_is_destroyed(
    monkeypatch: pytest.MonkeyPatch, stub: str, tmp_path: Path, tokenizer_folder: Path
) -> None:
    plan, destroyed = planned(), list[str]()

    def start(*_: Any) -> None:
        raise RuntimeError("no such scenario")

    monkeypatch.setattr(loadgen.loadgen, "StartTestWithLogSettings", start)
    for name in ("DestroyQSL", "DestroySUT"):
        real = getattr(loadgen.loadgen, name)
        monkeypatch.setattr(
            loadgen.loadgen, name, lambda one, name=name, real=real: (destroyed.append(name), real(one))
        )
    with pytest.raises(RuntimeError, match="no such scenario"):
        loadgen.run_load(setting(plan, stub, tmp_path, tokenizer_folder), load_of(plan, "burst"), texts())
    assert destroyed == ["DestroyQSL", "DestroySUT"]


def test_delays_of_the_client_and_of_loadgen() -> None:
    """Request n of 200 is sent n ms late, and done a second after it was due; loadgen is notified 0.25 s later."""
    exchanges = [Exchange(n, "", 10.0 + n, sent_s=10.0 + n + n / 1000, done_s=11.0 + n) for n in range(199, -1, -1)]
    late_s = [n / 64 for n in range(50)]
    actual = loadgen.delays(exchanges, late_s, {"result_mean_latency_ns": 1_250_000_000})
    assert actual == {
        "sent_p50_s": pytest.approx(0.100),
        "sent_p99_s": pytest.approx(0.198),
        "loop_p50_s": 25 / 64,
        "loop_p99_s": 49 / 64,
        "loadgen_mean_s": 0.25,
    }
    unsent = [Exchange(0, "", 10.0, done_s=10.0)]
    assert loadgen.delays(unsent, [], {"result_mean_latency_ns": None}) == dict.fromkeys(actual, 0.0)
    assert loadgen.delays(unsent, [0.5], {"result_mean_latency_ns": 1e9})["loop_p99_s"] == 0.5


def test_the_verdict_of_loadgens_log(tmp_path: Path) -> None:
    logged = {"result_validity": "INVALID", "early_stopping_met": False, "result_query_count": 24}
    lines = [f":::MLLOG {json.dumps({'key': key, 'value': value})}\n" for key, value in logged.items()]
    (tmp_path / "detail").write_text("".join(lines))
    actual = loadgen.verdict(tmp_path / "detail")
    given = {"result_validity": "INVALID", "early_stopping_met": False}
    assert actual == dict.fromkeys(loadgen.VERDICT) | given and tuple(actual) == loadgen.VERDICT


def test_requests_have_their_own_lengths(stub: str, tmp_path: Path, tokenizer_folder: Path) -> None:
    (tmp_path / "pairs.csv").write_text("prompt_tokens,answer_tokens\n5,3\n16,8\n9,4\n")
    words = ("task.serving.arrivals=[burst]", "task.serving.rates=[]")
    plan = planned(*words, f"task.serving.lengths.file={tmp_path / 'pairs.csv'}")
    assert plan.lengths is not None
    sampled = plan.lengths.trials[0]
    assert len(set(sampled.totals)) == 3, "each pair was sampled"
    sent = setting(plan, stub, tmp_path, tokenizer_folder)
    different = prompts.random_prompts(sent.tokenizer, lengths=sampled.tokens_in, seed=SEED)
    result = loadgen.run_load(sent, load_of(plan, "burst"), different)
    measured = [(answer.status, answer.tokens_in, answer.tokens_out) for answer in result.answers]
    assert measured == [("ok", *pair) for pair in zip(sampled.tokens_in, sampled.tokens_out, strict=True)]
    swapped = replace(sent, lengths=replace(sampled, tokens_out=[n + 1 for n in sampled.tokens_out]))
    exchange = Exchange(0, "", 0.0, http=200, max_tokens=1)
    assert swapped.spec(0).tokens_out == swapped.spec(6).tokens_out == sampled.tokens_out[0] + 1
    assert swapped.judged(exchange).status != "ok"
