"""Every connection is an open file: the limit is raised as needed, or the load is refused."""

import resource

import pytest

from bench.errors import SubmitError
from jobs.serving import server

UNLIMITED = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("soft", "hard", "raised"),
    [
        (1024, 4096, (1512, 4096)),
        (1511, 1512, (1512, 1512)),
        (1512, 1512, None),
        (1024, UNLIMITED, (1512, UNLIMITED)),
        (UNLIMITED, UNLIMITED, None),
    ],
)
def test_the_limit_of_open_files_is_raised(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, raised: tuple[int, int] | None
) -> None:
    limits_set = list[tuple[int, tuple[int, int]]]()
    monkeypatch.setattr(server.resource, "getrlimit", lambda which: (soft, hard))
    monkeypatch.setattr(server.resource, "setrlimit", lambda which, limits: limits_set.append((which, limits)))
    server.allow_connections(1000)
    assert limits_set == ([] if raised is None else [(resource.RLIMIT_NOFILE, raised)])


def test_connections_above_the_hard_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.resource, "getrlimit", lambda which: (1024, 1511))
    what = "1,000 parallel requests need 1,512 open files, but the limit is 1,511"
    with pytest.raises(SubmitError, match=what) as refused:
        server.allow_connections(1000)
    assert (refused.value.rule, refused.value.where) == ("RUN-15", "ulimit -n")
