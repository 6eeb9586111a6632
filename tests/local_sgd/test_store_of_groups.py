"""The groups of local SGD, and the store through which their ranks exchange values."""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import DistStoreError, HashStore

from bench.backends.local import free_port
from bench.contract.run_files import RESTART_VARIABLE
from jobs.local_sgd import groups
from jobs.local_sgd.groups import Groups
from jobs.ranks.identity import Rank


def test_the_ranks_of_a_group_and_their_positions() -> None:
    one = Groups(HashStore(), rank=7, number=2, size=3, count=4, active=[0, 2])
    assert (one.position, one.ranks, one.ranks_of(0)) == (1, range(6, 9), range(3))


def test_the_values_of_ranks_that_did_not_send_them_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of groups that do not train are not waited for. Each exchange has its own keys."""
    monkeypatch.setattr(groups, "GATHER_TIMEOUT", timedelta(milliseconds=20))
    store = HashStore()
    ranks = [Groups(store, rank, rank // 2, 2, 3, [0, 2]) for rank in (0, 1, 5)]
    gathered = [one.gather({"rank": one.rank}) for one in ranks]
    assert gathered[-1] == [{"rank": 0}, {"rank": 1}, None, None, None, {"rank": 5}]
    assert ranks[0].gather("again") == ["again", None, None, None, None, None]


def test_a_value_is_read_through_any_connection() -> None:
    store, other = HashStore(), HashStore()
    one = Groups(store, 0, 0, 1, 1, [0])
    one.set("key", [1, 2])
    assert one.get("key") == [1, 2]
    with pytest.raises(DistStoreError, match="(?i)timeout"):
        one.get("key", timedelta(milliseconds=10), other)


@pytest.mark.parametrize("restart", [None, "2"])
def test_a_rank_joins_its_group_and_leaves_it(
    restart: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 waits for all others; if one is missing, it says so and ends."""
    monkeypatch.setattr(groups, "_CURRENT", [])
    monkeypatch.delenv(RESTART_VARIABLE, raising=False)
    if restart is not None:
        monkeypatch.setenv(RESTART_VARIABLE, restart)
    who, plan = Rank(0, 0, 6, "127.0.0.1", free_port()), SimpleNamespace(world=SimpleNamespace(groups=3))
    first: Any = groups.join(plan, who, timeout_s=5)  # type: ignore[arg-type]
    assert groups.current() is first and groups.number() == 0
    assert (first.rank, first.number, first.size, first.count, first.active) == (0, 0, 2, 3, [0, 1, 2])
    assert first.restart_count == int(restart or 0)
    other: Any = groups.join(plan, Rank(5, 1, 6, "127.0.0.1", who.master_port), timeout_s=5)  # type: ignore[arg-type]
    assert (groups.number(), other.number, other.position) == (2, 2, 1)
    groups.shut_down()
    assert groups.current() is None and groups.number() == 0 and first.get("ended/5") is True
    groups.shut_down()
    monkeypatch.setattr(groups, "SHUTDOWN_TIMEOUT", timedelta(milliseconds=50))
    for ended in ([], [1, 2, 3, 4]):
        for rank in ended:
            first.set(f"ended/{rank}", True)
        groups._CURRENT.append(first)
        groups.shut_down()
        message = capsys.readouterr().err
        assert message.startswith("a local SGD group did not shut down: ") == (not ended)
        assert message.count("\n") == (not ended)
    without: Any = SimpleNamespace(world=SimpleNamespace(groups=None))
    assert groups.join(without, who, timeout_s=None) is None and groups.current() is None
