"""Rendezvous and device of ranks, with mocks for the torch calls that wait for other ranks or a GPU."""

import socket
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.contract.plan import Plan
from bench.contract.schema import Device
from bench.errors import SubmitError
from helpers import ranks
from jobs.local_sgd import groups
from jobs.ranks import process_group
from jobs.ranks.identity import Rank

FIRST, SECOND = Rank(0, 0, 2, "dgx-0", 4711), Rank(1, 1, 2, "dgx-0", 4711)


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Plan:
    monkeypatch.setattr(process_group, "node_name", lambda: "dgx-0")
    return ranks.compose(Path("unused"), "cluster.ranks_per_node=2")


@pytest.fixture
def met(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """Record the rendezvous arguments."""
    noted: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr("torch.distributed.init_process_group", lambda name, **how: noted.append((name, how)))
    return noted


def test_rendezvous_at_rank_0_with_gloo_or_nccl(
    plan: Plan, met: list[tuple[str, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank uses the GPU with its local rank."""
    used: list[torch.device] = []
    monkeypatch.setattr("torch.cuda.set_device", used.append)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert process_group.join(plan, SECOND) == torch.device("cpu") and used == []
    where: dict[str, Any] = {"init_method": "tcp://dgx-0:4711", "rank": 1, "world_size": 2}
    assert met == [("gloo", where | {"timeout": None})]
    plan.config.cluster.device = Device.cuda
    assert process_group.join(plan, SECOND, timeout_s=7) == torch.device("cuda", 1)
    process_group.join(plan, SECOND, also_on_cpu=True)
    assert [name for name, _ in met] == ["gloo", "nccl", "cpu:gloo,cuda:nccl"] and used == [torch.device("cuda", 1)] * 2
    assert met[1][1]["timeout"] == timedelta(seconds=7)


def test_errors_without_a_gpu_or_without_the_other_ranks(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, **how: Any) -> None:
        raise torch.distributed.DistNetworkError("the client socket has timed out\nat some place")

    monkeypatch.setattr("torch.distributed.init_process_group", refuse)
    with pytest.raises(SubmitError) as refused:
        process_group.join(plan, SECOND)
    assert refused.value.what == "rendezvous at dgx-0:4711 failed: the client socket has timed out"
    assert (refused.value.rule, refused.value.where) == ("NCC-05", "rank 1 on dgx-0")
    with pytest.raises(SubmitError, match="^NCC-05: 3 ranks were started, but the plan needs 2\n") as refused:
        process_group.join(plan, Rank(2, 2, 3, "dgx-0", 4711))
    assert (refused.value.rule, refused.value.where) == ("NCC-05", "rank 2 on dgx-0")
    plan.config.cluster.device = Device.cuda
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(SubmitError, match="^HW-03: this rank needs GPU 1, but only 1 GPUs are visible\n") as refused:
        process_group.join(plan, SECOND)
    assert refused.value.rule == "HW-03"


def test_a_port_that_is_in_use_is_named(plan: Plan) -> None:
    """torch's own error, of a real socket."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            SubmitError, match=f"^NCC-05: port {port} is in use by another program on dgx-0\n"
        ) as refused:
            process_group.join(plan, Rank(0, 0, 2, "127.0.0.1", port))
    assert "start the run again: it uses a new port" in refused.value.fix


def test_each_local_sgd_group_has_its_own_process_group(
    plan: Plan, met: list[tuple[str, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = torch.distributed.HashStore()
    group = SimpleNamespace(number=3, restart_count=2, store=store, position=1, size=4)
    calls: list[Any] = []
    monkeypatch.setattr(groups, "join", lambda plan, who, timeout_s: calls.append((who, timeout_s)) or group)
    process_group.join(plan, FIRST, timeout_s=9, local_sgd=True)
    ((_, how),) = met
    assert calls == [(FIRST, 9)] and (how["rank"], how["world_size"]) == (1, 4) and "init_method" not in how
    how["store"].set("key", "value")
    assert store.get("group 3, restart 2/key") == b"value"


def test_values_of_all_ranks_are_gathered_by_group_or_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(values: list[Any], value: Any) -> None:
        assert values == [value] * 2
        values[:] = [value, "another"]

    monkeypatch.setattr(process_group, "node_name", lambda: "dgx-0")
    monkeypatch.setattr("torch.distributed.all_gather_object", gather)
    monkeypatch.setattr(groups, "current", lambda: None)
    assert process_group.gathered(Rank(0, 0, 1, "", 0), "own") == ["own"]
    assert process_group.node_names(FIRST) == ["dgx-0", "another"]
    monkeypatch.setattr(groups, "current", lambda: SimpleNamespace(gather=lambda value: [value, None]))
    assert process_group.gathered(FIRST, 7) == [7, None]


def test_the_device_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr("torch.cuda.current_device", lambda: 3)
    assert process_group.device() == torch.device("cuda", 3)
    monkeypatch.setattr("torch.distributed.get_backend_config", lambda: "cpu:gloo,cuda:gloo")
    assert process_group.device() == torch.device("cpu")
