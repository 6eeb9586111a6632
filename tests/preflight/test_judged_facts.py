"""What is said of nodes by the facts of their ranks: everything that is found, word for word, and nothing else."""

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
    made = planned()
    cluster = replace(made.config.cluster, device=Device.cpu)
    return replace(made, config=replace(made.config, cluster=cluster))


def with_environment(**environment: str) -> Plan:
    return replace(planned(), environment=planned().environment | environment)


def judged(everyone: Everyone, plan: Plan | None = None, health: node_facts.Health | None = None) -> list[Finding]:
    return nodes.judge(plan or planned(), Facts("/runs/7/facts", everyone, health, read_ms=NOW_MS))


def found(*findings: Finding) -> list[Finding]:
    return [replace(finding, tier="nodes") for finding in findings]


def ranks(*of: int, **changes: Any) -> Change:
    """Return what changes some ranks."""
    return lambda everyone: tuple(replace(one, **changes) if one.rank in of else one for one in everyone)


def software(*of: int, **changes: Any) -> Change:
    return ranks(*of, software=replace(RANK.software, **changes))


def machine(*of: int, **changes: Any) -> Change:
    """Return what changes the nodes of some ranks."""
    return ranks(*of, machine=replace(MACHINE, **changes))


def gpu(**changes: Any) -> Change:
    """Return what changes the second node's second GPU."""
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
SHARED = "put it on a file system that every node sees, at the same path"
LOGS = "read their output in the job's log; if there is none, put LOGDIR on a file system that every node shares"
SAME = "let every node have the same environment: a shared one, or a container"
PER_NODE = "ask for GPUs per node, not per task: cluster.slurm.gpu_request"
OTHER_NODES = "choose the cluster= that describes these nodes, or other nodes"
UNLIMITED = "have `ulimit -l` set to unlimited for what starts them: slurmd, or the nodes' containerd"
BROKEN_GPU = "dgx-1, GPU 1"
CASES: dict[str, tuple[Change, list[Finding]]] = {
    "all is well": (lambda everyone: everyone, []),
    "ranks are missing": (
        lambda everyone: everyone[:1] + everyone[3:],
        found(broken("NCC-05", "no facts of 2 of 4 ranks: 1-2", "/runs/7/facts", fix=LOGS)),
    ),
    "ranks are missing here and there": (
        lambda everyone: everyone[1:3],
        found(broken("NCC-05", "no facts of 2 of 4 ranks: 0, 3", "/runs/7/facts", fix=LOGS)),
    ),
    "two ranks are of a smaller world": (
        ranks(2, 3, world_size=2),
        found(broken("NCC-05", "ranks were started as a world of 2, and the plan is for 4", "dgx-1")),
    ),
    "each rank is alone": (
        ranks(1, 2, 3, rank=0, world_size=1),
        found(
            broken(
                "NCC-05",
                "ranks were started as a world of 1, and the plan is for 4: each considers itself rank 0",
                "dgx-0, dgx-1",
            ),
            broken("NCC-05", "no facts of 3 of 4 ranks: 1-3", "/runs/7/facts", fix=LOGS),
        ),
    ),
    "other software": (
        both(software(3, python="3.9", packages={"nccl": "2"}), software(0, system=None, packages={"torch": "1"})),
        found(
            broken(
                "RUN-08",
                "not all ranks run the same: system is Debian 12 on dgx-0, dgx-1, None on dgx-0; "
                "python is 3.11 on dgx-0, dgx-1, 3.9 on dgx-1; nccl is none on dgx-0, dgx-1, 2 on dgx-1; "
                "torch is 2.13.0 on dgx-0, dgx-1, 1 on dgx-0, none on dgx-1",
                "dgx-0, dgx-1",
                fix=SAME,
            )
        ),
    ),
    "the rows are nowhere": (
        path("the rows", "/a", required=True, on=(False, False)),
        found(broken("CFG-06", "the rows is missing on every node", "/a on dgx-0, dgx-1")),
    ),
    "rows that are still to be made": (path("the rows", "/a", required=False, on=(False, False)), []),
    "rows on one node": (
        path("the rows", "/a", required=False, on=(True, False)),
        found(broken("CFG-06", "the rows is on only 1 of 2 nodes", "/a on dgx-1", fix=SHARED)),
    ),
    "a mount of no path": (
        path("a mount", None, required=True, on=(False, True)),
        found(broken("PYX-07", "a mount is on only 1 of 2 nodes", "a mount on dgx-0", fix=SHARED)),
    ),
    "read-only results": (
        machine(2, results=Results("/r", 0, "Read-only file system")),
        found(broken("CFG-08", "results cannot be written: Read-only file system", "/r on dgx-1")),
    ),
    "a full disk": (
        machine(2, results=Results("/r", 199, None)),
        found(broken("CFG-08", "199 MiB free, and a run needs 200", "/r on dgx-1")),
    ),
    "no nvidia-smi": (
        both(machine(0, gpus=None, gpus_refused="it hangs"), machine(2, gpus=None, gpus_refused="there is no such")),
        found(
            broken("HW-03", "the GPUs cannot be inspected: it hangs", "dgx-0"),
            warned("HW-03", "the GPUs cannot be inspected: there is no such", "dgx-1"),
        ),
    ),
    "a GPU too few": (machine(2, gpus=(GPU,)), found(broken("HW-03", "1 GPUs for 2 ranks", "dgx-1"))),
    "a GPU too many": (machine(2, gpus=(GPU, GPU, GPU)), []),
    "another GPU": (
        gpu(name="NVIDIA H100 80GB HBM3"),
        found(
            broken(
                "HW-03",
                "GPU 1 is NVIDIA H100 80GB HBM3 with 140.4 GiB, and the plan is for NVIDIA H200 SXM 141GB",
                "dgx-1",
                fix=OTHER_NODES,
            )
        ),
    ),
    "a little less memory": (gpu(memory_mib=138_861), []),
    "a little more memory": (gpu(memory_mib=147_449), []),
    "too much memory": (
        gpu(memory_mib=147_450),
        found(
            broken(
                "HW-03",
                "GPU 1 is NVIDIA H200 with 144.0 GiB, and the plan is for NVIDIA H200 SXM 141GB",
                "dgx-1",
                fix=OTHER_NODES,
            )
        ),
    ),
    "half a GPU of unknown name": (
        gpu(memory_mib=71_885, name=None),
        found(
            broken(
                "HW-03",
                "GPU 1 is None with 70.2 GiB, and the plan is for NVIDIA H200 SXM 141GB",
                "dgx-1",
                fix=OTHER_NODES,
            )
        ),
    ),
    "too little memory": (
        gpu(memory_mib=138_860),
        found(
            broken(
                "HW-03",
                "GPU 1 is NVIDIA H200 with 135.6 GiB, and the plan is for NVIDIA H200 SXM 141GB",
                "dgx-1",
                fix=OTHER_NODES,
            )
        ),
    ),
    "unknown memory": (gpu(memory_mib=None), []),
    "GPUs per task": (
        ranks(*ALL, cuda_visible_devices="-1,0"),
        found(
            *(
                broken(
                    "HW-03",
                    f"CUDA_VISIBLE_DEVICES lets rank {rank} see 1 GPUs; its local rank is 1",
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
        found(
            broken("HW-03", "CUDA_VISIBLE_DEVICES lets rank 2 see 0 GPUs; its local rank is 0", "dgx-1", fix=PER_NODE)
        ),
    ),
    "another driver": (
        machine(0, gpus=(replace(GPU, driver="550"), replace(GPU, driver=None))),
        found(
            warned("HW-03", "the nodes have different drivers: 580.1 on dgx-1, 550 on dgx-0", "dgx-0"),
        ),
    ),
    "faults of a GPU": (
        gpu(ecc_uncorrected=2, rows_failed="Yes", rows_pending="1", throttle="0x00000000000000E9"),
        found(
            broken("HW-01", "2 uncorrected ECC errors", BROKEN_GPU),
            broken("HW-01", "remapping a row of its memory failed", BROKEN_GPU),
            broken(
                *("HW-01", "a row of its memory waits to be remapped", BROKEN_GPU),
                fix="have the GPU reset: the row is remapped then",
            ),
            warned(
                "HW-01",
                "its clocks are throttled: hardware slowdown, software thermal slowdown, hardware thermal slowdown, "
                "power brake",
                BROKEN_GPU,
            ),
        ),
    ),
    "what nvidia-smi does not know": (gpu(ecc_uncorrected=None, rows_failed="N/A", rows_pending="0", throttle="?"), []),
    "an older nvidia-smi": (gpu(ecc_uncorrected=0, rows_failed="", rows_pending=None, throttle=None), []),
    "a port is down": (
        machine(2, infiniband=(UP, DOWN)),
        found(warned("NCC-03", "mlx5_1:1: not up here, but up on other nodes", "dgx-1")),
    ),
    "no port is up here": (
        machine(2, infiniband=(DOWN,), infiniband_devices=False),
        found(broken("NCC-03", "no InfiniBand port is up here, and 2 are up on other nodes", "dgx-1")),
    ),
    "no port is up anywhere": (
        machine(0, 2, infiniband=(replace(UP, state=None),)),
        found(warned("NCC-02", "no InfiniBand port is up on any node", "dgx-0, dgx-1")),
    ),
    "ports without devices, and little memory to lock": (
        both(machine(2, infiniband_devices=False), ranks(2, memlock_bytes=65_536), ranks(3, memlock_bytes=8_388_608)),
        found(
            warned(
                *("NCC-02", "InfiniBand is up, and its devices (/dev/infiniband) cannot be used by the ranks"),
                "dgx-1",
            ),
            warned(
                "NCC-03",
                "ranks may lock only 64 KiB of memory, and InfiniBand locks its buffers",
                "dgx-1",
                fix=UNLIMITED,
            ),
        ),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_all_that_is_wrong_is_said_and_nothing_else(case: str) -> None:
    change, expected = CASES[case]
    assert judged(change(SOUND)) == expected


def test_without_the_facts_of_any_rank_that_is_all_that_is_said() -> None:
    (only,) = judged(())
    assert only.what == "no facts of 4 of 4 ranks: 0-3"


def test_a_run_on_cpus_is_not_judged_by_gpus_and_infiniband() -> None:
    change = both(gpu(ecc_uncorrected=2), machine(0, gpus=(), infiniband=()), ranks(*ALL, cuda_visible_devices=""))
    assert judged(change(SOUND), on_cpus()) == []


def test_without_a_gpu_in_the_plan_any_will_do() -> None:
    made = planned()
    cluster = replace(made.config.cluster, gpu=None)
    any_gpu = replace(made, config=replace(made.config, cluster=cluster))
    assert judged(gpu(name="NVIDIA L4", memory_mib=23_034)(SOUND), any_gpu) == []


NETWORKS: dict[str, tuple[dict[str, str], list[tuple[str, str, str]]]] = {
    "NCCL's by its beginning": ({"NCCL_SOCKET_IFNAME": "et"}, []),
    "NCCL's that is down": (
        {"NCCL_SOCKET_IFNAME": "ib"},
        [("NCC-01", "error", "NCCL_SOCKET_IFNAME=ib, and only lo, eth0 are up")] * 2,
    ),
    "NCCL's by its whole name": (
        {"NCCL_SOCKET_IFNAME": "=et"},
        [("NCC-01", "error", "NCCL_SOCKET_IFNAME==et, and only lo, eth0 are up")] * 2,
    ),
    "all but some": ({"NCCL_SOCKET_IFNAME": "^lo,docker"}, []),
    "all but those that are up": (
        {"NCCL_SOCKET_IFNAME": "^lo,eth"},
        [("NCC-01", "error", "NCCL_SOCKET_IFNAME=^lo,eth, and only lo, eth0 are up")] * 2,
    ),
    "Gloo's by its beginning": (
        {"GLOO_SOCKET_IFNAME": "et"},
        [("NCC-01", "error", "GLOO_SOCKET_IFNAME=et, and only lo, eth0 are up")] * 2,
    ),
    "Gloo's, one of two": ({"GLOO_SOCKET_IFNAME": "eth1,eth0"}, []),
    "the loopback": (
        {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"},
        [
            ("NCC-01", "warning", f"{name} is the loopback, which no other node can reach")
            for name in ("NCCL_SOCKET_IFNAME==lo", "GLOO_SOCKET_IFNAME=lo")
            for _ in range(2)
        ],
    ),
    "the loopback beside another": ({"GLOO_SOCKET_IFNAME": "lo,eth0"}, []),
    "an adapter that is not there": (
        {"NCCL_IB_HCA": "mlx4"},
        [("NCC-02", "warning", "no InfiniBand port is up on any node")],
    ),
    "an adapter that is there": ({"NCCL_IB_HCA": "=mlx5_1"}, []),
}


@pytest.mark.parametrize("case", NETWORKS)
def test_networks_are_looked_for_as_their_library_does(case: str) -> None:
    environment, expected = NETWORKS[case]
    seen = judged(SOUND, with_environment(**environment))
    assert [(one.rule, one.severity, one.what) for one in seen] == expected
    if len(seen) > 1:
        assert [one.where for one in seen] == ["dgx-0", "dgx-1"] * (len(seen) // 2)


def test_infiniband_is_missed_where_a_run_asks_for_it_or_has_several_nodes() -> None:
    without = machine(0, 2, infiniband=())(SOUND)
    asked = found(
        broken(
            *("NCC-02", "NCCL_NET=IB, and no InfiniBand or RoCE port is up on any node", "dgx-0, dgx-1"),
            fix="leave NCCL_NET out, or use nodes that have such ports",
        )
    )
    assert judged(without, with_environment(NCCL_NET="IB")) == asked
    for other in ({"NCCL_NET": "Socket"}, {"NCCL_IB_DISABLE": "1"}):
        assert judged(without, with_environment(**other)) == []
    alone = replace(planned(), world=replace(planned().world, num_nodes=1, num_ranks=2))
    one_node = ranks(0, 1, world_size=2)(without[:2])
    assert judged(one_node, alone) == []
    lonely = replace(alone, environment={"NCCL_NET": "IB", "GLOO_SOCKET_IFNAME": "lo"})
    assert [(one.rule, one.severity) for one in judged(one_node, lonely)] == [("NCC-02", "error")]


@pytest.fixture
def contained(tmp_path: Path) -> Iterator[tuple[Plan, Path]]:
    """The plan of a run in an image, of which there is a record."""
    image = tmp_path / f"lora-sha256-{'0' * 12}.sqsh"
    record = dict.fromkeys(field.name for field in fields(store.Record))
    known = {"version": store.VERSION, "marker": {"name": "lora70b", "commit": "abc"}}
    image.with_suffix(".json").write_text(json.dumps(record | known))
    made = planned()
    container = planned("container=pyxis").config.container
    config = replace(made.config, container=replace(container, image=str(image)))
    yield replace(made, config=config), image


def test_ranks_in_no_image_or_in_another_one_are_named(contained: tuple[Plan, Path]) -> None:
    made, image = contained
    right = json.dumps({"commit": "abc", "name": "lora70b"})
    inside = software(*ALL, in_enroot=True, image=right)
    assert judged(inside(SOUND), made) == []
    older = software(2, in_enroot=True, image='{"name": "lora70b"}')
    outside = both(inside, older, software(3, in_enroot=False), ranks(0, 1, not_as_planned=("A", "B")))
    host, other, different, variables = judged(outside(SOUND), made)
    assert host == found(broken("PYX-03", "ranks run on the host, outside of any Enroot container", "dgx-1"))[0]
    what = "ranks run in lora70b of commit ?, and the plan is for lora70b of commit abc"
    fix = "give --container-name the job id, and remove older ones"
    assert [other] == found(broken("PYX-03", what, "dgx-1", fix=fix))
    assert (different.rule, different.what) == (
        "PYX-03",
        "not all ranks run the same: image is lora70b of commit abc on dgx-0, lora70b of commit ? on dgx-1, "
        "an image without a description on dgx-1",
    )
    assert different.fix == broken("PYX-03", "", "").fix
    assert [variables] == found(warned("PYX-09", "A, B: not what the plan sets", "dgx-0"))
    nameless = software(*ALL, in_enroot=True, image="an older one")
    assert [one.what for one in judged(nameless(SOUND), made)] == [
        "ranks run in an older one, and the plan is for lora70b of commit abc"
    ]
    image.with_suffix(".json").unlink()
    assert judged(nameless(SOUND), made) == [], "nobody knows what the image is"


def test_what_the_health_check_found_is_passed_on() -> None:
    slow = HealthFinding("NCC-04", "287.0 GB/s", "dgx-1", "leave it out")
    health = health_report(findings=(slow,), slow_nodes=("dgx-1", "dgx-0"))
    assert judged(SOUND, health=health) == found(broken("NCC-04", slow.what, slow.where, fix=slow.fix))
    assert nodes.slow_nodes(Facts("", SOUND, health, NOW_MS)) == ["dgx-1", "dgx-0"]
    assert nodes.slow_nodes(Facts("", SOUND, None, NOW_MS)) == []


def test_of_a_job_that_was_requeued_the_last_attempt_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_message_names_eight_nodes_at_most_once_each() -> None:
    names = [f"n{number}" for number in range(8)]
    assert listed([*names, "n0"]) == ", ".join(names)
    assert listed([*names, "n8", "n9"]) == f"{', '.join(names)} and 2 more"
    assert grouped([("a", "n0"), ("b", "n1"), ("b", "n2")]) == {"b": ["n1", "n2"], "a": ["n0"]}
