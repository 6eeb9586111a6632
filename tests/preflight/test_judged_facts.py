"""Findings about nodes from the facts of their ranks: complete lists with exact messages."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from bench.contract import node_facts
from bench.contract.node_facts import (
    HealthFinding,
    NeededPath,
    RankFacts,
    Results,
)
from bench.contract.plan import Plan
from bench.contract.schema import Device
from bench.errors import LogError
from bench.images import store
from bench.planning import compose
from bench.preflight import nodes
from bench.preflight.nodes.load import Facts, grouped, listed
from bench.rules.finding import Finding, broken
from helpers.facts import DOWN, GPU, MACHINE, NOW_MS, RANK, SOUND, UP
from helpers.nodes import health_report

Everyone = tuple[RankFacts, ...]
Change = Callable[[Everyone], Everyone]
ALL, ALONE = (0, 1, 2, 3), (2,)


@cache
def planned(*overrides: str) -> Plan:
    sizes = ("cluster.num_nodes=2", "cluster.ranks_per_node=2", "walltime=5", "trials=1")
    return compose.compose(["task=pretrain_tiny", "cluster=dgxh200", "container=none", *sizes, *overrides])


def on_cpus() -> Plan:
    plan = planned()
    cluster = replace(plan.config.cluster, device=Device.cpu)
    return replace(plan, config=replace(plan.config, cluster=cluster))


def with_environment(**environment: str) -> Plan:
    return replace(planned(), environment=planned().environment | environment)


def judged(everyone: Everyone, plan: Plan | None = None, health: node_facts.Health | None = None) -> list[Finding]:
    return nodes.judge(plan or planned(), Facts("/runs/7/facts", everyone, health, read_ms=NOW_MS))


def tiered(*findings: Finding) -> list[Finding]:
    return [replace(finding, tier="nodes") for finding in findings]


def ranks(*numbers: int, **changes: Any) -> Change:
    """Return a change of some ranks."""
    return lambda everyone: tuple(replace(one, **changes) if one.rank in numbers else one for one in everyone)


def software(*numbers: int, **changes: Any) -> Change:
    return ranks(*numbers, software=replace(RANK.software, **changes))


def machine(*numbers: int, **changes: Any) -> Change:
    """Return a change of the nodes of some ranks."""
    return ranks(*numbers, machine=replace(MACHINE, **changes))


def gpu(**changes: Any) -> Change:
    """Return a change of the second node's second GPU."""
    return machine(2, gpus=(GPU, replace(GPU, index=1, **changes)))


def both(*changes: Change) -> Change:
    def change(everyone: Everyone) -> Everyone:
        for one in changes:
            everyone = one(everyone)
        return everyone

    return change


def path(what: str, name: str | None, *, required: bool, on: tuple[bool, bool]) -> Change:
    needed = partial(NeededPath, what, name, required)
    return both(machine(0, paths=(needed(on[0]),)), machine(2, paths=(needed(on[1]),)))


warned = partial(broken, severity="warning")
SHARED = "put this path on a shared file system that all nodes mount at the same path"
LOGS = "read the output of these ranks in the job's log; if there is no output, put LOGDIR on a shared file system"
SAME = "use the same Python environment on all nodes: a shared folder, or a container"
PER_NODE = "set cluster.slurm.gpu_request to a value that requests GPUs per node instead of per task"
OTHER_NODES = "set cluster= to the config of these nodes, or run on other nodes"
UNLIMITED = "ask the admins to set `ulimit -l` to unlimited for slurmd or containerd, which starts the ranks"
BROKEN_GPU = "dgx-1, GPU 1"
CASES: dict[str, tuple[Change, list[Finding]]] = {
    "all is well": (lambda everyone: everyone, []),
    "ranks are missing": (
        lambda everyone: everyone[:1] + everyone[3:],
        tiered(broken("NCC-05", "2 of 4 ranks wrote no file about their node: ranks 1-2", "/runs/7/facts", fix=LOGS)),
    ),
    "ranks are missing here and there": (
        lambda everyone: everyone[1:3],
        tiered(broken("NCC-05", "2 of 4 ranks wrote no file about their node: ranks 0, 3", "/runs/7/facts", fix=LOGS)),
    ),
    "two ranks are of a smaller world": (
        ranks(2, 3, world_size=2),
        tiered(broken("NCC-05", "ranks were started with a world size of 2, but the plan has 4 ranks", "dgx-1")),
    ),
    "each rank is alone": (
        ranks(1, 2, 3, rank=0, world_size=1),
        tiered(
            broken(
                "NCC-05",
                "ranks were started with a world size of 1, but the plan has 4 ranks: every process is rank 0",
                "dgx-0, dgx-1",
            ),
            broken("NCC-05", "3 of 4 ranks wrote no file about their node: ranks 1-3", "/runs/7/facts", fix=LOGS),
        ),
    ),
    "other software": (
        both(software(3, python="3.9", packages={"nccl": "2"}), software(0, system=None, packages={"torch": "1"})),
        tiered(
            broken(
                "RUN-08",
                "the ranks have different software: system is Debian 12 on dgx-0, dgx-1, None on dgx-0; "
                "python is 3.11 on dgx-0, dgx-1, 3.9 on dgx-1; nccl is none on dgx-0, dgx-1, 2 on dgx-1; "
                "torch is 2.13.0 on dgx-0, dgx-1, 1 on dgx-0, none on dgx-1",
                "dgx-0, dgx-1",
                fix=SAME,
            )
        ),
    ),
    "the rows are nowhere": (
        path("the rows", "/a", required=True, on=(False, False)),
        tiered(broken("CFG-06", "the rows is missing on every node", "/a on dgx-0, dgx-1")),
    ),
    "rows that are still to be plan": (path("the rows", "/a", required=False, on=(False, False)), []),
    "rows on one node": (
        path("the rows", "/a", required=False, on=(True, False)),
        tiered(broken("CFG-06", "the rows is missing on 1 of 2 nodes", "/a on dgx-1", fix=SHARED)),
    ),
    "a mount of no path": (
        path("a mount", None, required=True, on=(False, True)),
        tiered(broken("PYX-07", "a mount is missing on 1 of 2 nodes", "a mount on dgx-0", fix=SHARED)),
    ),
    "read-only results": (
        machine(2, results=Results("/r", 0, "Read-only file system")),
        tiered(broken("CFG-08", "this node cannot write results: Read-only file system", "/r on dgx-1")),
    ),
    "a full disk": (
        machine(2, results=Results("/r", 199, None)),
        tiered(broken("CFG-08", "only 199 MiB of disk space are free, but a run needs 200 MiB", "/r on dgx-1")),
    ),
    "no nvidia-smi": (
        both(
            machine(0, gpus=None, gpus_refused="it hangs"),
            machine(2, gpus=None, gpus_refused="amdsmi is not installed"),
        ),
        tiered(
            broken("HW-03", "runstop cannot query the GPUs of this node: it hangs", "dgx-0"),
            warned("HW-03", "runstop cannot query the GPUs of this node: amdsmi is not installed", "dgx-1"),
        ),
    ),
    "a GPU too few": (
        machine(2, gpus=(GPU,)),
        tiered(broken("HW-03", "the node has only 1 GPU for 2 ranks", "dgx-1")),
    ),
    "a GPU too many": (machine(2, gpus=(GPU, GPU, GPU)), []),
    "another GPU": (
        gpu(name="NVIDIA H100 80GB HBM3"),
        tiered(
            broken(
                "HW-03",
                "GPU 1 is NVIDIA H100 80GB HBM3 with 140.4 GiB, but the plan is for NVIDIA H200 SXM 141GB",
                "dgx-1",
                fix=OTHER_NODES,
            )
        ),
    ),
    "a little less memory": (gpu(memory_mib=138_861), []),
    "a little more memory": (gpu(memory_mib=147_449), []),
    "too much memory": (
        gpu(memory_mib=147_450),
        tiered(
            broken(
                "HW-03",
                "GPU 1 is NVIDIA H200 with 144.0 GiB, but the plan is for NVIDIA H200 SXM 141GB",
                "dgx-1",
                fix=OTHER_NODES,
            )
        ),
    ),
    "half a GPU of unknown name": (
        gpu(memory_mib=71_885, name=None),
        tiered(
            broken(
                "HW-03",
                "GPU 1 is None with 70.2 GiB, but the plan is for NVIDIA H200 SXM 141GB",
                "dgx-1",
                fix=OTHER_NODES,
            )
        ),
    ),
    "too little memory": (
        gpu(memory_mib=138_860),
        tiered(
            broken(
                "HW-03",
                "GPU 1 is NVIDIA H200 with 135.6 GiB, but the plan is for NVIDIA H200 SXM 141GB",
                "dgx-1",
                fix=OTHER_NODES,
            )
        ),
    ),
    "unknown memory": (gpu(memory_mib=None), []),
    "GPUs per task": (
        ranks(*ALL, cuda_visible_devices="-1,0"),
        tiered(
            *(
                broken(
                    "HW-03",
                    f"rank {rank} uses GPU 1, but CUDA_VISIBLE_DEVICES of this rank has only 1 GPU",
                    node,
                    fix=PER_NODE,
                )
                for rank, node in ((1, "dgx-0"), (3, "dgx-1"))
            )
        ),
    ),
    "GPUs that nothing hides": (ranks(*ALL, cuda_visible_devices=None), []),
    "no GPU is shown": (
        ranks(2, cuda_visible_devices="NoDevFiles"),
        tiered(
            broken(
                "HW-03",
                "rank 2 uses GPU 0, but CUDA_VISIBLE_DEVICES of this rank has only 0 GPUs",
                "dgx-1",
                fix=PER_NODE,
            )
        ),
    ),
    "another driver": (
        machine(0, gpus=(replace(GPU, driver="550"), replace(GPU, driver=None))),
        tiered(
            warned("HW-03", "the nodes have different GPU drivers: 580.1 on dgx-1, 550 on dgx-0", "dgx-0"),
        ),
    ),
    "faults of a GPU": (
        gpu(ecc_uncorrected=2, rows_failed="Yes", rows_pending="1", throttle="0x00000000000000E9"),
        tiered(
            broken("HW-01", "the GPU has 2 uncorrected ECC errors", BROKEN_GPU),
            broken("HW-01", "the GPU could not remap a damaged row of its memory", BROKEN_GPU),
            broken(
                *(
                    "HW-01",
                    "a row of the GPU memory is damaged, and only a reset of the GPU remaps this row",
                    BROKEN_GPU,
                ),
                fix="ask the admins to reset the GPU",
            ),
            warned(
                "HW-01",
                "the clocks of the GPU are throttled: hardware slowdown, software thermal slowdown, hardware thermal "
                "slowdown, power brake",
                BROKEN_GPU,
            ),
        ),
    ),
    "what nvidia-smi does not know": (gpu(ecc_uncorrected=None, rows_failed="N/A", rows_pending="0", throttle="?"), []),
    "an older nvidia-smi": (gpu(ecc_uncorrected=0, rows_failed="", rows_pending=None, throttle=None), []),
    "a port is down": (
        machine(2, infiniband=(UP, DOWN)),
        tiered(warned("NCC-03", "the InfiniBand port mlx5_1:1 is down on this node, but up on other nodes", "dgx-1")),
    ),
    "no port is up here": (
        machine(2, infiniband=(DOWN,), infiniband_devices=False),
        tiered(broken("NCC-03", "no InfiniBand port is up on this node, but 2 ports are up on other nodes", "dgx-1")),
    ),
    "no port is up anywhere": (
        machine(0, 2, infiniband=(replace(UP, state=None),)),
        tiered(warned("NCC-02", "no InfiniBand port is up on any node", "dgx-0, dgx-1")),
    ),
    "ports without devices, and little memory to lock": (
        both(machine(2, infiniband_devices=False), ranks(2, memlock_bytes=65_536), ranks(3, memlock_bytes=8_388_608)),
        tiered(
            warned(
                *("NCC-02", "InfiniBand ports are up, but the ranks cannot access the devices in /dev/infiniband"),
                "dgx-1",
            ),
            warned(
                "NCC-03",
                "ranks may lock only 64 KiB of memory (ulimit -l), but InfiniBand locks its buffers",
                "dgx-1",
                fix=UNLIMITED,
            ),
        ),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_exactly_the_existing_problems_are_reported(case: str) -> None:
    change, expected = CASES[case]
    assert judged(change(SOUND)) == expected


def test_without_any_facts_this_is_the_only_problem() -> None:
    (only,) = judged(())
    assert only.what == "4 of 4 ranks wrote no file about their node: ranks 0-3"


def test_a_run_on_cpus_is_not_judged_by_gpus_and_infiniband() -> None:
    change = both(gpu(ecc_uncorrected=2), machine(0, gpus=(), infiniband=()), ranks(*ALL, cuda_visible_devices=""))
    assert judged(change(SOUND), on_cpus()) == []


def test_without_a_gpu_in_the_plan_every_type_is_accepted() -> None:
    plan = planned()
    cluster = replace(plan.config.cluster, gpu=None)
    any_gpu = replace(plan, config=replace(plan.config, cluster=cluster))
    assert judged(gpu(name="NVIDIA L4", memory_mib=23_034)(SOUND), any_gpu) == []


NETWORKS: dict[str, tuple[dict[str, str], list[tuple[str, str, str]]]] = {
    "NCCL's by its beginning": ({"NCCL_SOCKET_IFNAME": "et"}, []),
    "NCCL's that is down": (
        {"NCCL_SOCKET_IFNAME": "ib"},
        [
            (
                "NCC-01",
                "error",
                "NCCL_SOCKET_IFNAME=ib selects no active interface of this node; the active interfaces are lo, eth0",
            )
        ]
        * 2,
    ),
    "NCCL's by its whole name": (
        {"NCCL_SOCKET_IFNAME": "=et"},
        [
            (
                "NCC-01",
                "error",
                "NCCL_SOCKET_IFNAME==et selects no active interface of this node; the active interfaces are lo, eth0",
            )
        ]
        * 2,
    ),
    "all but some": ({"NCCL_SOCKET_IFNAME": "^lo,docker"}, []),
    "all but those that are up": (
        {"NCCL_SOCKET_IFNAME": "^lo,eth"},
        [
            (
                "NCC-01",
                "error",
                "NCCL_SOCKET_IFNAME=^lo,eth selects no active interface of this node; the active interfaces are lo, "
                "eth0",
            )
        ]
        * 2,
    ),
    "Gloo's by its beginning": (
        {"GLOO_SOCKET_IFNAME": "et"},
        [
            (
                "NCC-01",
                "error",
                "GLOO_SOCKET_IFNAME=et selects no active interface of this node; the active interfaces are lo, eth0",
            )
        ]
        * 2,
    ),
    "Gloo's, one of two": ({"GLOO_SOCKET_IFNAME": "eth1,eth0"}, []),
    "the loopback": (
        {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"},
        [
            ("NCC-01", "warning", f"{name} is the loopback interface, which other nodes cannot reach")
            for name in ("NCCL_SOCKET_IFNAME==lo", "GLOO_SOCKET_IFNAME=lo")
            for _ in range(2)
        ],
    ),
    "the loopback and another interface": ({"GLOO_SOCKET_IFNAME": "lo,eth0"}, []),
    "an adapter that is not there": (
        {"NCCL_IB_HCA": "mlx4"},
        [("NCC-02", "warning", "no InfiniBand port is up on any node")],
    ),
    "an adapter that is there": ({"NCCL_IB_HCA": "=mlx5_1"}, []),
}


@pytest.mark.parametrize("case", NETWORKS)
def test_interfaces_are_matched_as_nccl_and_gloo_do(case: str) -> None:
    environment, expected = NETWORKS[case]
    seen = judged(SOUND, with_environment(**environment))
    assert [(one.rule, one.severity, one.what) for one in seen] == expected
    if len(seen) > 1:
        assert [one.where for one in seen] == ["dgx-0", "dgx-1"] * (len(seen) // 2)


def test_missing_infiniband_is_reported_if_requested_or_with_several_nodes() -> None:
    without = machine(0, 2, infiniband=())(SOUND)
    problems = tiered(
        broken(
            *("NCC-02", "NCCL_NET=IB is set, but no InfiniBand or RoCE port is up on any node", "dgx-0, dgx-1"),
            fix="remove NCCL_NET, or use nodes with InfiniBand or RoCE",
        )
    )
    assert judged(without, with_environment(NCCL_NET="IB")) == problems
    for other in ({"NCCL_NET": "Socket"}, {"NCCL_IB_DISABLE": "1"}):
        assert judged(without, with_environment(**other)) == []
    alone = replace(planned(), world=replace(planned().world, num_nodes=1, num_ranks=2))
    one_node = ranks(0, 1, world_size=2)(without[:2])
    assert judged(one_node, alone) == []
    lonely = replace(alone, environment={"NCCL_NET": "IB", "GLOO_SOCKET_IFNAME": "lo"})
    assert [(one.rule, one.severity) for one in judged(one_node, lonely)] == [("NCC-02", "error")]


@pytest.fixture
def contained(tmp_path: Path) -> Iterator[tuple[Plan, Path]]:
    """The plan of a run in an image that has a record."""
    image = tmp_path / f"lora-sha256-{'0' * 12}.sqsh"
    record = dict.fromkeys(field.name for field in fields(store.Record))
    known = {"version": store.VERSION, "marker": {"name": "lora70b", "commit": "abc"}}
    image.with_suffix(".json").write_text(json.dumps(record | known))
    plan = planned()
    container = planned("container=pyxis").config.container
    config = replace(plan.config, container=replace(container, image=str(image)))
    yield replace(plan, config=config), image


@pytest.mark.long
def test_ranks_outside_the_image_or_in_another_one_are_reported(contained: tuple[Plan, Path]) -> None:
    plan, image = contained
    right = json.dumps({"commit": "abc", "name": "lora70b"})
    inside = software(*ALL, in_enroot=True, image=right)
    assert judged(inside(SOUND), plan) == []
    older = software(2, in_enroot=True, image='{"name": "lora70b"}')
    outside = both(inside, older, software(3, in_enroot=False), ranks(0, 1, not_as_planned=("A", "B")))
    host, other, different, variables = judged(outside(SOUND), plan)
    assert (
        host
        == tiered(broken("PYX-03", "ranks must run in an Enroot container, but run directly on the host", "dgx-1"))[0]
    )
    what = "ranks run in lora70b (commit ?), but the image of the plan is lora70b (commit abc)"
    fix = "put the job id into --container-name, and remove older containers of this name"
    assert [other] == tiered(broken("PYX-03", what, "dgx-1", fix=fix))
    assert (different.rule, different.what) == (
        "PYX-03",
        "the ranks have different software: image is lora70b (commit abc) on dgx-0, lora70b (commit ?) on dgx-1, "
        "an image without a description on dgx-1",
    )
    assert different.fix == broken("PYX-03", "", "").fix
    assert [variables] == tiered(
        warned("PYX-09", "these variables have different values in the container and in the plan: A, B", "dgx-0")
    )
    nameless = software(*ALL, in_enroot=True, image="an older one")
    assert [one.what for one in judged(nameless(SOUND), plan)] == [
        "ranks run in an older one, but the image of the plan is lora70b (commit abc)"
    ]
    image.with_suffix(".json").unlink()
    assert judged(nameless(SOUND), plan) == [], "without a record the image is unknown"


def test_findings_of_the_health_check_are_included() -> None:
    slow = HealthFinding("NCC-04", "287.0 GB/s", "dgx-1", "leave it out")
    health = health_report(findings=(slow,), slow_nodes=("dgx-1", "dgx-0"))
    assert judged(SOUND, health=health) == tiered(broken("NCC-04", slow.what, slow.where, fix=slow.fix))
    assert nodes.slow_nodes(Facts("", SOUND, health, NOW_MS)) == ["dgx-1", "dgx-0"]
    assert nodes.slow_nodes(Facts("", SOUND, None, NOW_MS)) == []


def test_only_the_last_attempt_of_a_requeued_job_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "facts").mkdir()
    for one in SOUND:
        attempt, time_ms = ("7.1.0", NOW_MS) if one.rank < 3 else ("7.0.0", NOW_MS - 60_000)
        text = node_facts.dumps(replace(one, attempt=attempt, time_ms=time_ms))
        (tmp_path / "facts" / f"rank_{3 - one.rank}.json").write_text(text)
    assert [one.rank for one in nodes.load(tmp_path).ranks] == [0, 1, 2]
    assert nodes.load(tmp_path).folder == str(tmp_path / "facts")
    monkeypatch.setattr(time, "time_ns", lambda: NOW_MS * 1_000_000 + 999_999)
    assert nodes.load(tmp_path).read_ms == NOW_MS
    assert asdict(nodes.load(tmp_path).machines["dgx-1"]) == asdict(MACHINE)
    for attempt, slow in (("7.0.2", []), ("7.1.2", ["dgx-1"])):
        health = replace(health_report(), attempt=attempt, slow_nodes=("dgx-1",))
        (tmp_path / "health.json").write_text(node_facts.dumps(health))
        assert nodes.slow_nodes(nodes.load(tmp_path)) == slow, "another step of the same start counts"
    (tmp_path / "facts" / "rank_0.json").write_text('{"rank": 0')
    with pytest.raises(LogError, match=r"cannot be read: .*delimiter(.|\n)*rank_0\.json(.|\n)*start the job again"):
        nodes.load(tmp_path)


def test_a_message_lists_at_most_eight_distinct_nodes() -> None:
    names = [f"n{number}" for number in range(8)]
    assert listed([*names, "n0"]) == ", ".join(names)
    assert listed([*names, "n8", "n9"]) == f"{', '.join(names)} and 2 more"
    assert grouped([("a", "n0"), ("b", "n1"), ("b", "n2")]) == {"b": ["n1", "n2"], "a": ["n0"]}
