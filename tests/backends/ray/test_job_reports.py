"""What Ray says about a job, as runstop shows it: state, reason, exit code and times."""

from types import SimpleNamespace
from typing import Any

import pytest

from bench.backends.protocol import Job, JobState
from bench.backends.ray import client, request
from helpers.clock import in_zone

NOW_S = 1_700_000_000.0


def details(status: str, **changes: Any) -> SimpleNamespace:
    usual: dict[str, Any] = {"start_time": None, "end_time": None, "driver_exit_code": None}
    return SimpleNamespace(**usual | {"status": status, "error_type": None, "message": None} | changes)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (details("PENDING", message="waits"), {"state": JobState.queued, "reason": "waits"}),
        (
            details("RUNNING", message="old", start_time=int(NOW_S * 1000) - 90_500),
            {"state": JobState.running, "elapsed_s": 90, "start": "2023-11-15T03:41:49"},
        ),
        (
            details("SUCCEEDED", start_time=1_000, end_time=61_999, driver_exit_code=0),
            {"state": JobState.completed, "elapsed_s": 60, "exit_code": "0:0", "start": "1970-01-01T05:30:01"},
        ),
        (
            details("FAILED", driver_exit_code=3, error_type="a.b.NODE_LOST", message=" lost\n it "),
            {"state": JobState.failed, "exit_code": "3:0", "reason": "NODE_LOST: lost it"},
        ),
        (details("FAILED", driver_exit_code=-9), {"state": JobState.failed, "exit_code": "0:9"}),
        (details("STOPPED"), {"state": JobState.cancelled}),
        (details("NEW"), {"state": JobState.running}),
    ],
)
def test_a_job_has_the_state_and_the_times_that_ray_reports(
    answer: SimpleNamespace, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client.time, "time", lambda: NOW_S)
    with in_zone("IST-5:30"):
        assert client.as_job("a@b", answer) == Job(id="a@b", native_state=answer.status, **expected)


def test_names_and_addresses_of_jobs() -> None:
    assert request.split(request.job_id("a-1", "http://head:8265/")) == ("a-1", "http://head:8265")
    assert request.page("a-1@http://h:1") == "http://h:1/#/jobs/a-1"
    valid = ("http://h", "https://h:1", "http://h:1/path")
    assert all(request.is_address(text) for text in valid)
    for text in (
        "h:1",
        "ray://h",
        "http://",
        "http:///x",
        "http://a b",
        "http://a@b",
        "http://a?x",
        "http://a#b",
        None,
    ):
        assert not request.is_address(text), text
