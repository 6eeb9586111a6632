"""What a pod does before the runner starts: whether there is anything to do, and where the first pod is."""

import json
import socket
import threading
import time
from pathlib import Path

import pytest

from bench.backends.kubernetes import entry, printing

JOB = "job/default/a"


def write(run: Path, *, jobs: list[str], outcome: str | None, exit_code: int = 1) -> None:
    (run / "job.json").write_text(json.dumps({"jobs": [{"id": id} for id in jobs]}))
    if outcome:
        (run / "status.json").write_text(json.dumps({"outcome": outcome, "exit_code": exit_code}))


@pytest.mark.parametrize(
    ("jobs", "outcome", "exit_code", "ends_with"),
    [
        ([JOB], "proven", 0, 0),
        ([JOB], "not proven", 1, 1),
        ([JOB], "failed", 2, 2),
        ([JOB], "interrupted", 143, None),
        ([JOB], None, 0, None),
        (["job/default/b", JOB], "failed", 1, 1),
        (["job/default/b"], "failed", 1, None),
    ],
)
def test_a_pod_ends_at_once_where_its_own_job_has_said_the_last_word(
    tmp_path: Path, jobs: list[str], outcome: str | None, exit_code: int, ends_with: int | None
) -> None:
    write(tmp_path, jobs=jobs, outcome=outcome, exit_code=exit_code)
    assert entry.exit_code_of_ended(tmp_path, JOB) == ends_with


def test_the_first_pod_is_found_once_it_answers_whatever_an_earlier_one_has_left(tmp_path: Path) -> None:
    run, found = tmp_path / "run", list[str]()
    with socket.create_server(("127.0.0.2", 0)) as later:
        port = later.getsockname()[1]
        entry._announce(run, "127.0.0.1", port)  # nobody listens there any more
        token = entry._token(run)
        looking = threading.Thread(target=lambda: found.append(entry._announced(run, [], is_by_file=True)))
        looking.start()
        time.sleep(0.2)
        assert found == []
        entry._announce(run, "127.0.0.2", port)
        looking.join(60)
    assert found == ["127.0.0.2"]
    assert entry._token(run) == token and len(token) == 64, "pods that have read it are let in by the next one too"
    assert (run / entry.LEAD).stat().st_mode & 0o077 == 0


def test_the_first_pod_prints_each_line_of_the_logs_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rank_logs").mkdir()
    (tmp_path / "rank_logs/runner.out").write_text("the runner prints this by itself\n")
    log = tmp_path / "result_0.txt"
    places = dict[Path, int]()
    log.write_text("one\nhalf")
    assert [*printing.added(tmp_path, places)] == [b"result_0.txt: one\n"]
    log.write_text("one\nhalf of it\n")
    (tmp_path / "rank_logs/0.err").write_text("hf_" + "a" * 34 + "\n")
    second, first = printing.added(tmp_path, places)
    assert first == b"result_0.txt: half of it\n" and second.startswith(b"0.err: [masked: ")
    log.write_text("new\n")  # the next attempt's
    with printing.printed(tmp_path):
        pass
    assert capfd.readouterr().out.splitlines()[-1] == "result_0.txt: new"
