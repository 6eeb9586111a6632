"""How NCCL joined the ranks is read from NCCL's own log, and a run that was joined otherwise than it asks ends."""

import json
import os
from pathlib import Path

import pytest

from bench.contract import mllog, run_files
from bench.contract.plan_kinds import TrainingPlan, required
from bench.errors import SubmitError
from bench.planning import compose
from jobs.ranks import transport
from jobs.ranks.identity import Rank

IB_LOG = """\
node1:4015539:4015652 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/RoCE [1]mlx5_1:1/RoCE [RO]; OOB bond0:10.1.0.6<0>
node1:4015539:4015652 [0] NCCL INFO Using network IB
node1:4015539:4015652 [0] NCCL INFO Channel 00/0 : 0[0] -> 2[0] [receive] via NET/IB/3/GDRDMA
node1:4015540:4015653 [1] NCCL INFO Channel 00/0 : 3[1] -> 2[0] via P2P/CUMEM
"""
"""Lines as NCCL writes them, from public issues of NVIDIA/nccl (1189, 952 and 1817), with other names."""
SOCKET_LOG = """\
node1:926:1151 [7] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.5<0>
node1:926:1151 [7] NCCL INFO Channel 03/0 : 15[7] -> 6[6] [send] via NET/Socket/3
node1:926:1151 [7] NCCL INFO Channel 00/0 : 8[0] -> 15[7] via P2P/IPC/read
"""
SHM_LOG = "node1:3884652:3884740 [7] NCCL INFO Channel 01 : 7[7] -> 2[2] via SHM/direct/direct\n"
NVLINK_LOG = IB_LOG.splitlines(keepends=True)[-1]
NO_LINK_LOG = "node1:926:1151 [1] NCCL INFO Channel 00/0 : 0[0] -> 1[1] [send] via NET/Socket/0\n"
WHO = Rank(rank=0, local_rank=0, world_size=1, master_addr="localhost", master_port=0)


def planned(*settings: str) -> TrainingPlan:
    gpu = ["cluster.device=cuda", "cluster.ranks_per_node=1", "gpu@cluster.gpu=h200"]
    return required(compose.compose([*gpu, *(f"+cluster.environment.{one}" for one in settings)]), TrainingPlan)


def logged(plan: TrainingPlan, nccl: str, folder: Path) -> list[dict[str, object]]:
    (folder / run_files.RANK_LOGS).mkdir()
    pattern = plan.environment.get("NCCL_DEBUG_FILE", "rank_logs/nccl.%h.%p.log")
    name = pattern.replace("%h", os.uname().nodename).replace("%p", str(os.getpid()))
    (folder / name).write_text(nccl)
    with mllog.Writer(folder / "result_0.txt") as log:
        transport.log_used(plan, WHO, folder, log)
    return [json.loads(line.partition(" ")[2]) for line in (folder / "result_0.txt").read_text().splitlines()]


@pytest.mark.parametrize(
    ("settings", "nccl", "net", "local"),
    [
        (["NCCL_NET=IB"], IB_LOG, "IB", "P2P"),
        (["NCCL_NET=Socket", "NCCL_IB_DISABLE=1"], SOCKET_LOG, "Socket", "P2P"),
        (["NCCL_SOCKET_IFNAME=eth0"], SOCKET_LOG, "Socket", "P2P"),
        (["NCCL_P2P_DISABLE=1"], SHM_LOG, "none", "SHM"),
        (["NCCL_P2P_LEVEL=NVL"], NVLINK_LOG, "none", "P2P"),
        (["NCCL_P2P_DISABLE=1", "NCCL_SHM_DISABLE=1", "NCCL_NET=Socket"], NO_LINK_LOG, "Socket", "none"),
    ],
)
def test_the_used_transport_is_logged(settings: list[str], nccl: str, net: str, local: str, tmp_path: Path) -> None:
    plan = planned(*settings)
    assert plan.environment["NCCL_DEBUG"] == "INFO"
    (record,) = logged(plan, nccl, tmp_path)
    metadata = record["metadata"]
    assert isinstance(metadata, dict)
    assert (record["key"], record["value"], metadata["local"]) == (mllog.NCCL_TRANSPORT, net, local)
    assert all(line in nccl for line in metadata["lines"]) and len(metadata["lines"]) == nccl.count("via")


@pytest.mark.parametrize(
    ("setting", "nccl", "what"),
    [
        ("NCCL_NET=IB", SOCKET_LOG, "NCCL_NET requests IB, but NCCL used Socket between nodes"),
        ("NCCL_IB_DISABLE=1", IB_LOG, "NCCL_NET requests Socket, but NCCL used IB between nodes"),
        ("NCCL_P2P_DISABLE=1", SOCKET_LOG, "NCCL_P2P_DISABLE is 1, but NCCL used P2P within a node"),
        ("NCCL_SHM_DISABLE=1", SHM_LOG, "NCCL_SHM_DISABLE is 1, but NCCL used SHM within a node"),
        ("NCCL_P2P_LEVEL=NVL", SHM_LOG, "NCCL_P2P_LEVEL is NVL, but NCCL used SHM instead of NVLink"),
    ],
)
def test_a_run_with_another_transport_ends(setting: str, nccl: str, what: str, tmp_path: Path) -> None:
    with pytest.raises(SubmitError, match=what):
        logged(planned(setting), nccl, tmp_path)


def test_a_run_without_a_request_has_no_nccl_log(tmp_path: Path) -> None:
    plan = planned()
    assert not [name for name in plan.environment if name.startswith("NCCL")]
    assert logged(plan, IB_LOG, tmp_path) == []
