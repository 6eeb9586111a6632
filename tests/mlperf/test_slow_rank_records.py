"""Records of slow ranks in a log, which may be damaged, and samples of GPUs and nodes in old or damaged files."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.contract import telemetry
from bench.mlperf import slow_ranks

ABOUT = {"node": "dgx-1", "cause": "computation", "own_ms": 1200.5, "usual_ms": 1000, "percent": 16.7}


@pytest.mark.parametrize(
    ("ranks", "about", "expected"),
    [
        (
            [8, 9, 10, 12],
            {"reasons": ["GPU 2 throttled: power brake"]},
            "ranks 8-10, 12 on dgx-1: slow computation (1,200 ms of a step without waiting, others 1,000 ms; 16.7 % of "
            "the run until then); GPU 2 throttled: power brake",
        ),
        (
            [3],
            {"cause": "evaluation", "node": "a\x1b[1m", "percent": None, "reasons": 7},
            "rank 3 on a?[1m: slow evaluation (1,200 ms of an evaluation without waiting, others 1,000 ms)",
        ),
        ([3], {"own_ms": "many"}, None),
        (None, {}, None),
        ([], {}, None),
        (["3"], {}, None),
    ],
)
def test_a_record_is_a_sentence_or_nothing(ranks: Any, about: dict[str, Any], expected: str | None) -> None:
    event: Any = SimpleNamespace(value=ranks, metadata=ABOUT | about)
    assert slow_ranks.described(event) == expected


def test_samples_without_the_newer_columns_are_read(tmp_path: Path) -> None:
    path = tmp_path / "gpus.csv"
    header = "time_ms,monotonic_ms,gpu,power_w,sm_clock_mhz,memory_clock_mhz,temperature_c,memory_gib,energy_j,throttle"
    path.write_text(f"{header}\n1000,20,3,400,1755,3201,63,100,1.5,power brake\n1000,20\n")
    [sample] = telemetry.read(path)
    assert (sample.gpu, sample.throttle, sample.pcie_lanes) == (3, ("power brake",), None)
    assert telemetry.newest(path) == [sample]


def test_a_truncated_reading_of_a_node_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "node.csv"
    path.write_text(f"{telemetry.reading_header()}1000,20,9000.5\n2000,high,1\n2000,30\n3000,40,900")
    assert list(telemetry.readings(path)) == [telemetry.Reading(time_ms=1000, monotonic_ms=20, power_w=9000.5)]
