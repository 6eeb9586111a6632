"""Test that ten runs have the score of the official rules, and that fewer runs have a reason instead."""

import random
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlperf_logging.package_checker import seed_checker
from mlperf_logging.result_summarizer.result_summarizer import _compute_olympic_average

from bench import answers as printed
from bench.cli import main
from bench.console.result import score_sheets
from bench.console.sheet import show
from bench.contract.mllog import Binding
from bench.errors import ConfigError, LogError
from bench.mlperf.result import UNVERIFIED
from bench.mlperf.score import Score, score
from bench.mlperf.trial_set import Trials
from bench.rules import RULES
from helpers import answers, clock
from helpers.examples import in_proportion
from helpers.paths import CORPUS
from helpers.types import MakeLog
from helpers.written_log import INPUTS

SMC = CORPUS / "v4.0/smc/1xSMC-H100-SXM-80GB/llama2_70b_lora"
with_corpus = pytest.mark.skipif(not CORPUS.is_dir(), reason="the public logs are not here")
MakeRuns = Callable[..., Path]
REFERENCE = 3178.6667
"""Mean samples of the reference at the batch size of the logs below."""
AT_3072 = (0.95, 0.94, 0.94, 0.93, 0.92)
"""Evaluations that reach the target after 3,072 samples; one fewer after 2,688, one more after 3,456."""
TEN = range(10)


@pytest.fixture
def runs(written_log: MakeLog, tmp_path: Path) -> MakeRuns:
    """Write a run of 20 minutes, of 21 and so on, each with its own seed; `changes` are by run number."""

    def make(
        numbers: Sequence[int] = TEN,
        changes: dict[int, dict[str, Any]] | None = None,
        *,
        alike: bool = False,
        **all_runs: Any,
    ) -> Path:
        for number in numbers:
            settings = {"evals": AT_3072, "seed": 100 + number} | all_runs | (changes or {}).get(number, {})
            settings["evals"] = [value + (0 if alike else number * 1e-9) for value in settings["evals"]]
            path = written_log(name=f"result_{number}.txt", **settings)
            set_minutes(path, 20 + number)
        return tmp_path

    return make


def set_minutes(path: Path, minutes: int) -> None:
    took_ms = clock.time_ms(path, "run_stop") - clock.time_ms(path, "run_start")
    clock.move(path, "run_stop", minutes * 60_000 - took_ms)


def rules(scored: Score) -> set[str]:
    """Return the broken rules, and check that a set that breaks one has no score."""
    broken = [finding for finding in scored.findings if finding.severity == "error"]
    assert scored.valid == (not broken) == (scored.official_minutes is not None)
    assert (scored.interval_minutes is not None) == scored.valid
    assert {finding.rule for finding in scored.findings} <= RULES.keys()
    answers.one(printed.line(printed.score(scored)))
    return {finding.rule for finding in scored.findings}


@pytest.mark.long
def test_ten_runs_are_a_score(runs: MakeRuns) -> None:
    """Runs of 20 to 29 minutes; those of 20 and 29 do not count."""
    scored = score(runs(changes={9: {"evals": (*AT_3072[:-1], 0.93, 0.92)}}))
    assert rules(scored) == set()
    assert (scored.num_runs, scored.num_runs_required, scored.num_failed) == (10, 10, 0)
    assert (scored.dropped_fastest, scored.dropped_slowest) == ("result_0.txt", "result_9.txt")
    reasons = ("result_0.txt is the fastest, 20.000 min", "result_9.txt is the slowest, 29.000 min")
    assert scored.dropped_reasons == reasons
    assert scored.olympic_minutes == pytest.approx(24.5)
    assert (scored.olympic_samples, scored.samples_distribution) == (3072, {3072: 9, 3456: 1})
    assert scored.rcp_factor == pytest.approx(REFERENCE / 3072)
    assert scored.official_minutes == pytest.approx(24.5 * REFERENCE / 3072)
    assert (scored.rcp.passed, scored.rcp.mean, scored.disagreements) == (True, 3072, ())
    assert [verdict.passed for verdict in scored.compliance] == [True] * 10
    assert scored.interval_minutes is not None
    assert scored.interval_minutes[0] < scored.official_minutes < scored.interval_minutes[1]


@pytest.mark.long
def test_slower_convergence_than_the_reference_is_not_scaled(runs: MakeRuns) -> None:
    scored = score(runs(evals=(*AT_3072[:-1], 0.93, 0.92)))
    assert (scored.rcp_factor, scored.official_minutes) == (1, pytest.approx(24.5))


@pytest.mark.long
def test_one_failed_run_counts_as_the_slowest(runs: MakeRuns) -> None:
    """The official compliance checker passes an aborted run; the RCP checker does not."""
    scored = score(runs(changes={0: {"status": "aborted"}}))
    assert rules(scored) == set()
    assert (scored.num_failed, scored.dropped_fastest, scored.dropped_slowest) == (1, "result_1.txt", "result_0.txt")
    assert "LOG-05" in scored.dropped_reasons[-1]
    assert scored.olympic_minutes == pytest.approx(fmean(range(22, 30)))
    assert scored.rcp.counts[0] is None and scored.rcp.passed
    assert scored.samples_distribution == {3072: 9}
    (disagreement,) = scored.disagreements
    assert re.match(
        r"result_0.txt: invalid \(LOG-05: .* for runstop, but passed for MLPerf's compliance checker 6.1.0",
        disagreement,
    )


@pytest.mark.long
def test_a_run_that_only_the_official_checker_rejects_has_failed(runs: MakeRuns) -> None:
    """Ruleset 6.1.0 requires a key that our checks do not."""
    folder = runs(changes={4: {"micro_batch_size": None}})
    scored = score(folder)
    assert rules(scored) == set()
    assert scored.dropped_slowest == "result_4.txt"
    assert any("valid for runstop, but failed" in text for text in scored.disagreements)
    assert any(
        "failed for runstop, but 3,072 samples for MLPerf's RCP checker" in text for text in scored.disagreements
    )
    assert score(folder, ruleset="5.1.0").num_failed == 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "broken"),
    [
        ({"numbers": range(9)}, {"SCO-01"}),
        ({"numbers": range(11)}, {"SCO-01"}),
        ({"changes": {2: {"status": "aborted"}, 5: {"evals": (0.95, 0.94)}}}, {"SCO-02"}),
        ({"changes": dict.fromkeys((2, 5), {"status": "aborted"})}, {"SCO-02", "SCO-05"}),
        ({"changes": {7: {"seed": 103}}}, {"SCO-03"}),
        ({"changes": {7: {"seed": None}}}, {"SCO-03"}),
        ({"changes": {7: {"global_batch_size": 16}}}, {"SCO-04", "SCO-05"}),
        ({"changes": {7: {"submission_division": "open"}}}, {"SCO-04"}),
        ({"changes": {7: {"submission_benchmark": None}}}, {"SCO-05"}),
        ({"evals": AT_3072[-3:]}, {"SCO-05"}),
        ({"submission_benchmark": None}, {"SCO-02", "SCO-06"}),
        ({"submission_benchmark": "../bert"}, {"SCO-02", "SCO-06"}),
        ({"submission_org": "example (tiny: not a submission)"}, {"SCO-06"}),
    ],
)
def test_broken_rules_of_a_set(runs: MakeRuns, options: dict[str, Any], broken: set[str]) -> None:
    assert rules(score(runs(**options))) == broken


PRECISE = tuple(value + 1.23456e-6 for value in (*AT_3072[:-1], 0.92))


@pytest.mark.long
@pytest.mark.parametrize(
    ("evals", "copies", "reported"),
    [(PRECISE, (), TEN), (AT_3072, (3, 7), (3, 7)), (AT_3072, (), ())],
    ids=["with other times", "with round values", "round values alone"],
)
def test_copies_of_one_run_under_other_seeds_are_no_score(
    runs: MakeRuns, evals: tuple[float, ...], copies: Sequence[int], reported: Sequence[int]
) -> None:
    folder = runs(evals=evals, alike=True)
    for number in copies:
        text = (folder / "result_3.txt").read_text()
        (folder / f"result_{number}.txt").write_text(text.replace('"value": 103', f'"value": {100 + number}'))
    scored = score(folder)
    assert rules(scored) == ({"SCO-07"} if reported else set())
    for finding in scored.findings:
        names = ", ".join(f"result_{number}.txt" for number in reported)
        assert finding.what == f"{names} have the same evaluations: they are copies of one run"


@pytest.mark.long
def test_runs_on_different_rows_are_no_score(runs: MakeRuns, tmp_path: Path) -> None:
    """Whether or not a log is bound to an attempt; logs without checksums are not compared."""
    other = {"after": {"input_sha256": "e" * 64}}
    assert rules(score(runs(changes={7: other}))) == set()
    for name in ("result_3.txt", "result_7.txt"):
        (tmp_path / name).unlink()
    different = {"eval rows": "5" * 64}
    bound = Binding(nonce="0", trial=0, attempt=1)
    scored = score(runs((3, 7), changes={3: {"binding": bound}, 7: {"binding": bound, "inputs": INPUTS | different}}))
    ours = [f.what for f in scored.findings if f.rule == "SCO-04"]
    assert ours == [
        f"the SHA-256 of the eval rows differs between the logs: "
        f"{'2' * 12}… in result_3.txt, {'5' * 12}… in result_7.txt"
    ]


@pytest.mark.long
def test_two_platform_names_are_a_warning(runs: MakeRuns) -> None:
    """A published set of ten H100 runs, one of which calls itself A100, has an official score."""
    scored = score(runs(changes={7: {"submission_platform": "another"}}))
    assert rules(scored) == {"SCO-04"}
    assert scored.official_minutes == pytest.approx(24.5 * REFERENCE / 3072)
    (row,) = [row for row in score_sheets(scored)[1].rows if row[0] == "SCO-04"]
    assert row[1:] == (
        "warning",
        "platform differs between the logs: '1xexample' in result_0.txt, 'another' in result_7.txt",
    )


@pytest.mark.parametrize(("benchmark", "severity"), [("dlrm_dcnv2", "warning"), ("llama2_70b_lora", "error")])
def test_fully_checked_benchmark_needs_a_seed_of_every_run(runs: MakeRuns, benchmark: str, severity: str) -> None:
    """Published sets of dlrm_dcnv2 without seeds have official scores."""
    scored = score(runs(range(2), submission_benchmark=benchmark, target_accuracy=None, seed=None), ruleset="5.1.0")
    problems = [(f.severity, f.what) for f in scored.findings if f.rule == "SCO-03"]
    assert problems == [(severity, "these logs have no valid seed: result_0.txt, result_1.txt")]


@pytest.mark.long
def test_too_fast_convergence_is_reported_with_its_limit(runs: MakeRuns) -> None:
    scored = score(runs(evals=AT_3072[-3:]))
    assert "2,304.0, below the limit 2,960.6" in scored.findings[0].what
    assert (scored.rcp_factor, scored.rcp_min_samples) == (None, pytest.approx(2960.634, abs=1e-3))
    assert scored.olympic_minutes == pytest.approx(24.5)


@pytest.mark.long
def test_the_open_division_has_no_factor(runs: MakeRuns) -> None:
    scored = score(runs(submission_division="open", evals=AT_3072[-3:]))
    assert rules(scored) == set()
    assert (scored.rcp_factor, scored.rcp.passed, scored.official_minutes) == (None, None, pytest.approx(24.5))


@pytest.mark.parametrize(("number", "olympic"), [(1, None), (2, None), (3, 21), (9, 24)])
def test_fewer_runs_have_a_mean_from_three_on(runs: MakeRuns, number: int, olympic: float | None) -> None:
    scored = score(runs(range(number)))
    assert scored.olympic_minutes == (olympic and pytest.approx(olympic))
    assert (scored.dropped_fastest is None) == (olympic is None) == (scored.rcp.passed is None)
    assert olympic is None or f"this limit is for 10 runs, but there are {number}" in scored.rcp.message


@pytest.mark.long
def test_a_log_that_was_appended_to_has_failed(runs: MakeRuns) -> None:
    folder = runs()
    log = folder / "result_3.txt"
    log.write_text(log.read_text() * 2)
    scored = score(folder)
    assert scored.dropped_slowest == "result_3.txt"
    assert "LOG-03" in scored.dropped_reasons[-1]


def test_folder_without_a_score_is_refused(tmp_path: Path, runs: MakeRuns) -> None:
    with pytest.raises(ConfigError, match="this path is not a folder"):
        score(tmp_path / "absent")
    with pytest.raises(LogError, match="no result_"):
        score(tmp_path)
    with pytest.raises(ConfigError, match="the ruleset '7.7' does not exist"):
        score(runs(range(1)), ruleset="7.7")
    (tmp_path / "result_3.txt").mkdir()
    with pytest.raises(LogError, match=r"(?s)is a folder, not a log.*result_3"):
        score(tmp_path)


@pytest.mark.long
@settings(max_examples=in_proportion(25))
@given(st.lists(st.integers(0, 10**20), unique=True, min_size=1, max_size=6), st.randoms())
def test_logs_are_taken_in_the_order_of_their_numbers(
    tmp_path_factory: pytest.TempPathFactory, numbers: list[int], chance: random.Random
) -> None:
    folder = tmp_path_factory.mktemp("runs")
    shuffled = chance.sample(numbers, len(numbers))
    for number in shuffled:
        (folder / f"result_5027-24_{number}.txt").touch()
    names = [Path(result.file).name for result in score(folder).results]
    assert names == [f"result_5027-24_{number}.txt" for number in sorted(numbers)]
    assert score([folder / name for name in chance.sample(names, len(names))]).results == score(folder).results


@given(st.lists(st.floats(0.1, 1e4), max_size=12), st.integers(0, 3), st.sampled_from([1, 4]))
def test_the_olympic_mean_is_the_official_one(values: list[float], num_failed: int, num_dropped: int) -> None:
    some = Trials((), (), "5.1.0")
    vars(some).update(failed=dict.fromkeys(range(num_failed)), num_dropped=num_dropped)
    official = _compute_olympic_average(list(values), num_failed, num_dropped) if num_failed <= num_dropped else None
    assert some.olympic(values) == (official and pytest.approx(official))


@pytest.fixture
def official_seeds(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], bool]]:
    monkeypatch.setattr(seed_checker.logging, "info", lambda *_: None)
    monkeypatch.setattr(seed_checker.logging, "error", lambda *_: None)
    yield lambda folder: seed_checker.SeedChecker("5.1.0").check_seeds(sorted(map(str, folder.glob("result_*"))))


@pytest.mark.long
@pytest.mark.parametrize("seeds", [(1, 2, 3), (1, 2, 1), (1, None, 3), (7, 7, 7), (0, 1, -1), (0, 0, 1)])
def test_seeds_are_judged_as_by_the_package_checker(
    runs: MakeRuns, official_seeds: Callable[[Path], bool], seeds: tuple[int | None, ...]
) -> None:
    folder = runs(range(3), changes={number: {"seed": seed} for number, seed in enumerate(seeds)})
    assert ("SCO-03" in rules(score(folder))) is not official_seeds(folder)


@pytest.mark.long
def test_the_interval_narrows_with_the_runs(runs: MakeRuns) -> None:
    folder = runs()
    wide = score(folder).interval_minutes
    assert wide is not None and wide == score(folder).interval_minutes
    for log in folder.glob("result_*"):
        set_minutes(log, 24)
    alike = score(folder)
    assert alike.interval_minutes == (pytest.approx(alike.official_minutes),) * 2


@pytest.mark.long
def test_interval_contains_nine_of_ten_resamples(runs: MakeRuns) -> None:
    """Compared with numpy's resamples of the same minutes; all runs need equally many samples."""
    scored = score(runs())
    assert scored.interval_minutes is not None and scored.rcp_factor == pytest.approx(REFERENCE / 3072)
    draws = np.sort(np.random.default_rng(1).choice(np.arange(20.0, 30.0), size=(100_000, 10)), axis=1)
    low, high = np.percentile(draws[:, 1:-1].mean(axis=1) * REFERENCE / 3072, [5, 95])
    assert scored.interval_minutes == (pytest.approx(low, abs=0.12), pytest.approx(high, abs=0.12))


@pytest.mark.long
def test_every_resample_has_its_own_factor(runs: MakeRuns) -> None:
    """Five runs of 2,688 samples and five of 3,456, all of 24 minutes: only the factor changes, never below 1."""
    folder = runs(changes={number: {"evals": AT_3072[1:]} for number in range(5)}, evals=(*AT_3072[:-1], 0.93, 0.92))
    for log in folder.glob("result_*"):
        set_minutes(log, 24)
    scored = score(folder)
    rng = np.random.default_rng(1)
    draws = np.sort(rng.choice([2688.0] * 5 + [3456.0] * 5, size=(100_000, 10)), axis=1)[:, 1:-1].mean(axis=1)
    low, high = np.percentile(24 * np.maximum(1, REFERENCE / draws), [5, 95])
    assert low == 24 and high > 26
    assert scored.interval_minutes == (pytest.approx(low), pytest.approx(high, abs=0.35))


@pytest.mark.long
def test_table_shows_unverified_hardware_and_runs(runs: MakeRuns, capsys: pytest.CaptureFixture[str]) -> None:
    folder = runs(changes={0: {"status": "aborted"}}, submission_platform="evil\x1b[2J")
    for sheet in score_sheets(score(folder)):
        show(sheet)
    text = capsys.readouterr().out
    assert f"{UNVERIFIED} GPU count not in the logs, n = 10 runs, 1 failed" in text
    assert "\x1b" not in text
    assert "not counted: result_0.txt failed and counts as the slowest: LOG-05" in " ".join(text.split())


@pytest.mark.long
def test_the_verb_prints_one_strict_object_and_exits_by_validity(
    runs: MakeRuns, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = runs()
    for expected, number in ((0, 10), (1, 9)):
        with pytest.raises(SystemExit) as stop:
            main(["score", str(folder), "--json"])
        output = capsys.readouterr()
        scored = answers.one(output.out)
        assert (stop.value.code, scored["valid"], scored["num_runs"], output.err) == (
            expected,
            not expected,
            number,
            "",
        )
        (folder / "result_9.txt").unlink(missing_ok=True)


@with_corpus
def test_ten_published_runs_have_their_published_score() -> None:
    """Their maker quotes 29.10069 minutes."""
    before = sorted(SMC.iterdir())
    scored = score(SMC)
    assert rules(scored) == set()
    assert scored.ruleset == "4.0.0"
    assert scored.olympic_minutes == pytest.approx(28.12415, abs=5e-6)
    assert scored.rcp_factor == pytest.approx(1.0347222, abs=5e-8)
    assert scored.official_minutes == pytest.approx(29.10069, abs=5e-6)
    assert sorted(SMC.iterdir()) == before


def copied(folder: Path, change: Callable[[str], str]) -> Path:
    folder.mkdir()
    for log in SMC.iterdir():
        (folder / log.name).write_text(change(log.read_text()))
    return folder


@with_corpus
@pytest.mark.parametrize("scale", [0.7, 0.95])
def test_ten_published_runs_with_scaled_times_have_no_score(tmp_path: Path, scale: float) -> None:
    """Each of them tracks 2.08 samples/s, and its times now give 2.2 or 3."""
    scaled = re.compile(r'(?<="time_ms": )\d+')
    folder = copied(
        tmp_path / "scaled",
        lambda text: scaled.sub(lambda time: str(round(1.7e12 + scale * (int(time[0]) - 1.7e12))), text),
    )
    scored = score(folder)
    assert rules(scored) >= {"SCO-02"} and scored.num_failed == 10
    assert all(any(f.rule == "LOG-22" for f in result.findings) for result in scored.results)


@with_corpus
def test_ten_copies_of_a_published_run_have_no_score(tmp_path: Path) -> None:
    original, seeds = min(SMC.iterdir()).read_text(), iter(range(1, 11))
    seed = re.compile(r'(?<="key": "seed", "value": )\d+')
    scored = score(copied(tmp_path / "copies", lambda _: seed.sub(str(next(seeds)), original)))
    assert rules(scored) == {"SCO-07"} and len({result.seed for result in scored.results}) == 10
