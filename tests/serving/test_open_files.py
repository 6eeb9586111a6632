"""Every connection of a load is an open file: the limit is raised as far as it must be, or the load is refused."""

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
def test_open_files_are_allowed_for_every_connection(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, raised: tuple[int, int] | None
) -> None:
    asked = list[tuple[int, tuple[int, int]]]()
    monkeypatch.setattr(server.resource, "getrlimit", lambda which: (soft, hard))
    monkeypatch.setattr(server.resource, "setrlimit", lambda which, limits: asked.append((which, limits)))
    server.allow_connections(1000)
    assert asked == ([] if raised is None else [(resource.RLIMIT_NOFILE, raised)])


def test_more_connections_than_a_site_allows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.resource, "getrlimit", lambda which: (1024, 1511))
    what = "1,000 requests at a time need 1,512 open files, and 1,511 are allowed"
    with pytest.raises(SubmitError, match=what) as refused:
        server.allow_connections(1000)
    assert (refused.value.rule, refused.value.where) == ("RUN-15", "ulimit -n")
