"""Test the official reference check on sets of our logs: any content, no files left in the folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from mlperf_logging.rcp_checker import rcp_checker

from bench.mlperf.rcp import rcp_record, rcp_verdict
from helpers.types import MakeLog

LORA = "llama2_70b_lora"
AT_3072 = (0.95, 0.94, 0.94, 0.93, 0.92)


@pytest.fixture(autouse=True)
def quiet(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Nothing is printed, whatever the log."""
    yield
    assert tuple(capfd.readouterr()) == ("", "")


@pytest.mark.parametrize("ruleset", ["4.0.0", "4.1.0", "5.0.0", "5.1.0", "6.0.0", "6.1.0"])
@pytest.mark.parametrize(
    ("gbs", "mean", "min_mean"),
    [
        (8, 3178.667, 2960.634),
        (9, 3285.333, 3061.403),
        (16, 4032.0, 3732.957),
        (18, 4161.143, 3862.120),
        (48, 6098.286, 5716.422),
        (64, 7131.429, 6705.382),
        (72, 7648.0, 7199.863),
        (128, 11264.0, 10649.843),
    ],
)
def test_reference_points_are_the_official_ones(ruleset: str, gbs: int, mean: float, min_mean: float) -> None:
    point = rcp_record(LORA, gbs, ruleset)
    assert point is not None
    assert (point.mean, point.min_mean) == (pytest.approx(mean, abs=1e-3), pytest.approx(min_mean, abs=1e-3))
    assert (point.unit, point.interpolated) == ("samples_count", gbs not in (8, 16, 128))


def test_a_point_that_was_pruned_is_interpolated() -> None:
    """The reference runs at 32 need 6,037 samples, more than their neighbours suggest."""
    point = rcp_record(LORA, 32, "5.1.0")
    assert point is not None and point.interpolated
    assert point.mean == pytest.approx(4032 + (11264 - 4032) * (32 - 16) / (128 - 16))


def test_tolerance_of_a_benchmark_is_used() -> None:
    """From 5.0.0 on, llama31_405b may converge 46,080 samples (one evaluation) faster than the statistic accepts."""
    point = rcp_record("llama31_405b", 1152, "5.1.0")
    checker = rcp_checker.RCP_Checker("training", "5.1.0", "llama31_405b", False)
    assert point is not None
    assert point.min_mean == pytest.approx(checker._find_rcp(1152, "pruned_rcps")["Min Epochs"] - 46080)


@pytest.mark.parametrize(
    ("benchmark", "gbs", "ruleset"),
    [
        (LORA, 7, "5.1.0"),
        (LORA, 129, "5.1.0"),
        (LORA, 0, "5.1.0"),
        (LORA, 8, "3.1.0"),
        ("../x", 8, "5.1.0"),
        ("", 8, "9"),
    ],
)
def test_there_is_no_reference_beyond_the_points(benchmark: str, gbs: int, ruleset: str) -> None:
    assert rcp_record(benchmark, gbs, ruleset) is None


@pytest.mark.long
def test_the_reference_check_leaves_the_folder_alone(written_log: MakeLog, tmp_path: Path) -> None:
    """The official checker writes or deletes scaling.json next to the logs."""
    logs = [written_log(name=f"log {number}", evals=AT_3072) for number in range(10)]
    (tmp_path / "scaling.json").write_text("mine")
    before = sorted(tmp_path.iterdir())
    verdict = rcp_verdict(logs, benchmark=LORA, ruleset="5.1.0")
    assert (verdict.passed, verdict.message, verdict.counts) == (True, "RCP found", (3072,) * 10)
    assert (verdict.mean, verdict.factor) == (3072, pytest.approx(1.034722, abs=1e-6))
    assert verdict.record == rcp_record(LORA, 8, "5.1.0")
    assert (sorted(tmp_path.iterdir()), (tmp_path / "scaling.json").read_text()) == (before, "mine")


@pytest.mark.parametrize(
    ("changes", "passed", "message"),
    [
        ({"global_batch_size": 9}, True, "RCP Interpolation"),
        ({"global_batch_size": 4}, True, "slower convergence on smaller batch size"),
        ({"global_batch_size": 256}, False, "Missing RCP"),
        ({"global_batch_size": "8"}, False, "stopped: TypeError"),
        ({"global_batch_size": None}, False, "Could not detect global_batch_size"),
        ({"evals": ()}, False, "stopped: "),
        ({"status": "aborted"}, False, "Insufficient convergence"),
        ({"submission_benchmark": None}, False, "stopped: KeyError"),
        ({"submission_benchmark": "../../evil", "evals": (), "status": "aborted"}, False, "have different batch sizes"),
        ({"submission_benchmark": [LORA]}, False, "stopped: "),
    ],
)
def test_record_that_stops_the_reference_check_is_a_failure(
    written_log: MakeLog, changes: dict[str, object], passed: bool, message: str
) -> None:
    logs = [written_log(name=str(number), **{"evals": (*AT_3072, 0.92), **changes}) for number in range(3)]
    verdict = rcp_verdict(logs, benchmark=LORA, ruleset="5.1.0")
    assert (verdict.passed, verdict.factor is not None) == (passed, passed)
    assert message in verdict.message


def test_without_a_reference_or_enough_runs_there_is_no_verdict(written_log: MakeLog) -> None:
    log = written_log(evals=AT_3072)
    for benchmark in (None, "", "../../evil", "bert", "minigo"):
        assert rcp_verdict([log] * 10, benchmark=benchmark, ruleset="6.1.0").passed is None
    for number in range(3):
        assert rcp_verdict([log] * number, benchmark=LORA, ruleset="6.1.0").passed is None
    assert rcp_verdict([log] * 3, benchmark=LORA, ruleset="6.1.0").passed
