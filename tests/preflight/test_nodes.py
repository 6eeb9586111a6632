"""Facts are written by real ranks, on nodes that share this machine, and then damaged: each damage is one rule."""

import dataclasses
import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.contract import node_facts
from bench.contract import plan as plans
from bench.contract.checkpoint import CONVERTED, CONVERTED_FP8, CONVERTED_NF4
from bench.contract.node_facts import Interface, Port
from bench.contract.plan import Plan
from bench.errors import LogError
from bench.images import store
from bench.planning import compose
from bench.preflight import nodes
from helpers import ranks
from helpers.nodes import NUM_NODES, PER_NODE, health_report, on_nodes
from jobs.node_checks import facts

pytestmark = pytest.mark.starts

SECRET = "hunter2"
NVIDIA_SMI = r"""#!/bin/sh
case "$1" in
  --query-gpu=index*) printf '%s\n' '0, GPU-ab5e, NVIDIA H200, 580.159.04, 143771, 37, 345, 1980, 0' \
                                    '1, GPU-0f2a, NVIDIA H200, 580.159.04, 143771, 38, 345, 1980, [N/A]' ;;
  *clocks_event*) echo 'Field "clocks_event_reasons.active" is not a valid field to query.'; exit 2 ;;
  *clocks_throttle*) printf '%s\n' 'GPU-ab5e, 0x0000000000000001' 'GPU-0f2a, 0x0000000000000004' ;;
  --query-remapped*) printf '%s\n' 'GPU-ab5e, No, No' 'GPU-0f2a, No, No' ;;
  topo) printf '\t\033[4mGPU0\tGPU1\033[0m\n' ;;
esac
"""
"""What nvidia-smi of driver 580.159.04 printed on two H200, UUIDs cut short; an older one knows no event reasons."""
PORTS = [
    dataclasses.asdict(Port(f"mlx5_{n}:1", "4: ACTIVE", "5: LinkUp", "InfiniBand", "400 Gb/sec (4X NDR)"))
    for n in range(2)
]

Everyone = list[dict[str, Any]]


def composed(*overrides: str) -> Plan:
    """Return the plan of two nodes with two H200 each, without a container unless the overrides name one."""
    sizes = [f"cluster.num_nodes={NUM_NODES}", f"cluster.ranks_per_node={PER_NODE}", "walltime=5", "trials=1"]
    return compose.compose(["task=pretrain_tiny", "cluster=dgxh200", "container=none", *sizes, *overrides])


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Everyone:
    """What real ranks wrote, by rank; with a nvidia-smi that says what a real one said."""
    folder, programs = (tmp_path_factory.mktemp(name) for name in ("run", "bin"))
    (programs / "nvidia-smi").write_text(NVIDIA_SMI)
    (programs / "nvidia-smi").chmod(0o755)
    made = composed()
    (folder / "plan.json").write_text(plans.dumps(made))
    slurm = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1"}
    env = made.environment | slurm | {"NCCL_API_KEY": SECRET, "PATH": f"{programs}:{os.environ['PATH']}"}
    assert on_nodes(folder, "jobs.node_checks.facts", "plan.json", **env) == [(0, "")] * 4
    texts = [(folder / "facts" / f"rank_{rank:04d}.json").read_text() for rank in range(4)]
    assert SECRET not in "".join(texts)
    assert len(list((folder / "facts").iterdir())) == 4, "something was left behind"
    return [json.loads(text) for text in texts]


def judged(tmp: Path, everyone: Everyone, made: Plan) -> list[nodes.Finding]:
    """Write the facts as ranks would, and judge them."""
    (tmp / "facts").mkdir()
    for one in everyone:
        (tmp / "facts" / f"rank_{one['rank']:04d}.json").write_text(json.dumps(one))
    return nodes.judge(made, nodes.load(tmp))


def test_sound_facts_are_complete_and_break_no_rule_but_that_of_missing_infiniband(tmp_path: Path, found: Everyone):
    assert [one["rank"] for one in found if one["machine"]] == [0, 2]
    assert [one["node"] for one in found] == ["dgx-0", "dgx-0", "dgx-1", "dgx-1"]
    assert {one["attempt"] for one in found} == {"7.0.1"}
    gpus = found[0]["machine"]["gpus"]
    assert [gpu["throttle"] for gpu in gpus] == ["0x0000000000000001", "0x0000000000000004"]
    assert [gpu["ecc_uncorrected"] for gpu in gpus] == [0, None], "what is not available is not a number"
    assert found[0]["machine"]["gpu_links"] == "\tGPU0\tGPU1\n"
    assert "127.0.0.1" in {link["name"]: link["addresses"] for link in found[0]["machine"]["interfaces"]}["lo"]
    assert "NCCL_API_KEY" in found[0]["environment"] and not found[0]["not_as_planned"]
    assert found[0]["machine"]["results"]["refused"] is None
    findings = judged(tmp_path, found, composed())
    assert [(f.rule, f.severity, f.tier) for f in findings] == [("NCC-02", "warning", "nodes")]


def machine(key: str, value: Any, *, of: int = 2) -> Callable[[Everyone], object]:
    """Return the damage that gives the node of rank `of` another value."""
    return lambda everyone: everyone[of]["machine"].update({key: value})


def gpu(**changes: Any) -> Callable[[Everyone], object]:
    return lambda everyone: everyone[2]["machine"]["gpus"][1].update(changes)


def every(part: str, key: str, value: Any, *, of: tuple[int, ...] = (2, 3)) -> Callable[[Everyone], object]:
    """Return the damage that changes a value of several ranks."""
    return lambda everyone: [(one[part] if part else one).update({key: value}) for one in everyone if one["rank"] in of]


def ports_down(everyone: Everyone) -> None:
    for one, ports in ((everyone[0], PORTS), (everyone[2], PORTS[:1])):
        one["machine"]["infiniband"] = ports


def path(what: str, *, required: bool, on: tuple[bool, bool]) -> Callable[[Everyone], object]:
    def damage(everyone: Everyone) -> None:
        for one, exists in zip((everyone[0], everyone[2]), on, strict=True):
            one["machine"]["paths"].append({"what": what, "path": "/a", "required": required, "exists": exists})

    return damage


ALL = (0, 1, 2, 3)
DAMAGES = {
    "a rank is missing": (lambda everyone: everyone.pop(), "NCC-05", "error", "1 of 4 ranks: 3"),
    "ranks are alone": (every("", "world_size", 1), "NCC-05", "error", "considers itself rank 0"),
    "python differs": (
        every("software", "python", "3.9.1"),
        "RUN-08",
        "error",
        r"python is .* on dgx-0, 3.9.1 on dgx-1",
    ),
    "torch differs": (every("software", "packages", {"torch": "1"}), "RUN-08", "error", r"torch is .*1 on dgx-1"),
    "rows are missing": (
        path("the rows", required=True, on=(False, False)),
        "CFG-06",
        "error",
        "is missing on every node",
    ),
    "a root is not shared": (path("DATADIR", required=False, on=(True, False)), "CFG-06", "error", "1 of 2 nodes"),
    "a mount is missing": (path("a mount", required=True, on=(True, False)), "PYX-07", "error", "1 of 2 nodes"),
    "read-only results": (
        machine("results", {"path": "/r", "free_mib": 9999, "refused": "Read-only file system"}),
        "CFG-08",
        "error",
        "Read-only",
    ),
    "a full disk": (
        machine("results", {"path": "/r", "free_mib": 3, "refused": None}),
        "CFG-08",
        "error",
        "3 MiB free",
    ),
    "no nvidia-smi": (machine("gpus", None), "HW-03", "error", "cannot be inspected"),
    "a GPU is missing": (lambda everyone: everyone[2]["machine"]["gpus"].pop(), "HW-03", "error", "1 GPUs for 2 ranks"),
    "another GPU": (gpu(name="NVIDIA H100 80GB HBM3"), "HW-03", "error", "H100 80GB HBM3 with 140.4 GiB"),
    "half a GPU": (gpu(memory_mib=71885), "HW-03", "error", "with 70.2 GiB"),
    "GPUs per task": (every("", "cuda_visible_devices", "0", of=ALL), "HW-03", "error", "rank 1 see 1 GPUs"),
    "another driver": (gpu(driver="550.1"), "HW-03", "warning", "550.1 on dgx-1"),
    "ECC errors": (gpu(ecc_uncorrected=2), "HW-01", "error", "2 uncorrected"),
    "rows to remap": (gpu(rows_pending="Yes"), "HW-01", "error", "waits to be remapped"),
    "rows not remapped": (gpu(rows_failed="Yes"), "HW-01", "error", "failed"),
    "a hot GPU": (gpu(throttle="0x0000000000000048"), "HW-01", "warning", "hardware slowdown, hardware thermal"),
    "a port is down": (ports_down, "NCC-03", "warning", "mlx5_1:1"),
    "no port is up": (machine("infiniband", PORTS), "NCC-03", "error", "2 are up on other nodes"),
}


@pytest.mark.parametrize(("damage", "rule", "severity", "words"), DAMAGES.values(), ids=list(DAMAGES))
def test_each_damage_is_named(tmp_path: Path, found: Everyone, damage: Any, rule: str, severity: str, words: str):
    everyone = json.loads(json.dumps(found))
    damage(everyone)
    findings = [f for f in judged(tmp_path, everyone, composed()) if (f.rule, f.severity) == (rule, severity)]
    assert any(re.search(words, finding.what) for finding in findings), findings
    assert all(finding.where and finding.fix for finding in findings)


@pytest.mark.parametrize(
    ("setting", "is_there"),
    [
        ("NCCL_SOCKET_IFNAME=ib", False),
        ("NCCL_SOCKET_IFNAME=et", True),
        ("NCCL_SOCKET_IFNAME='=et'", False),
        ("NCCL_SOCKET_IFNAME='^lo,docker'", True),
        ("NCCL_SOCKET_IFNAME='^lo,eth'", False),
        ("GLOO_SOCKET_IFNAME=et", False),
        ("GLOO_SOCKET_IFNAME='eth1,eth0'", True),
    ],
)
def test_an_interface_is_looked_for_as_its_library_does(tmp_path: Path, found: Everyone, setting: str, is_there: bool):
    everyone = json.loads(json.dumps(found))
    for one in (everyone[0], everyone[2]):
        links = {"lo": "unknown", "eth0": "up", "ib0": "down"}
        one["machine"]["interfaces"] = [
            dataclasses.asdict(Interface(name, state, None, ())) for name, state in links.items()
        ]
    findings = judged(tmp_path, everyone, composed(f"+cluster.environment.{setting}"))
    assert [f.where for f in findings if f.rule == "NCC-01"] == ([] if is_there else ["dgx-0", "dgx-1"])


def test_infiniband_needs_its_devices_and_memory_to_lock(tmp_path: Path, found: Everyone):
    everyone = json.loads(json.dumps(found))
    for one in everyone:
        one["memlock_bytes"] = 65536
    for one in (everyone[0], everyone[2]):
        one["machine"] |= {"infiniband": PORTS, "infiniband_devices": one["rank"] == 0}
    findings = judged(tmp_path, everyone, composed())
    assert [(f.rule, f.where) for f in findings] == [("NCC-02", "dgx-1"), ("NCC-03", "dgx-0"), ("NCC-03", "dgx-1")]


@pytest.mark.parametrize(
    ("setting", "severities"), [("NCCL_NET=IB", ["error"]), ("NCCL_NET=Socket", []), ("NCCL_IB_DISABLE=1", [])]
)
def test_a_network_that_a_run_asks_for_must_be_there_and_others_need_not(
    tmp_path: Path, found: Everyone, setting: str, severities: list[str]
):
    findings = judged(tmp_path, found, composed(f"+cluster.environment.{setting}"))
    assert [f.severity for f in findings if f.rule == "NCC-02"] == severities


def test_ranks_outside_of_the_image_are_named(tmp_path: Path, found: Everyone):
    asked, other = {"name": "lora70b", "commit": "abc"}, {"name": "lora70b", "commit": "old"}
    image = tmp_path / f"lora-sha256-{'0' * 12}.sqsh"
    record = dict.fromkeys(field.name for field in dataclasses.fields(store.Record))
    image.with_suffix(".json").write_text(json.dumps(record | {"version": store.VERSION, "marker": asked}))
    made = composed("container=pyxis", f"container.image={image}")

    everyone = json.loads(json.dumps(found))
    for one, marker in zip(everyone, (asked, asked, other, None), strict=True):
        one["software"] |= {"in_enroot": one["rank"] != 3, "image": marker and json.dumps(marker)}
        one["not_as_planned"] = ["OMP_NUM_THREADS"] if one["rank"] == 0 else []
    said = [(f.rule, f.what, f.where) for f in judged(tmp_path, everyone, made) if f.rule.startswith("PYX")]
    assert said[0] == ("PYX-03", "ranks run on the host, outside of any Enroot container", "dgx-1")
    assert said[1] == (
        "PYX-03",
        "ranks run in lora70b of commit old, and the plan is for lora70b of commit abc",
        "dgx-1",
    )
    assert said[2][0] == "PYX-03" and "lora70b of commit abc on dgx-0" in said[2][1]
    assert said[3] == ("PYX-09", "OMP_NUM_THREADS: not what the plan sets", "dgx-0")


def test_what_an_earlier_attempt_of_the_job_wrote_does_not_count(tmp_path: Path, found: Everyone):
    everyone = json.loads(json.dumps(found))
    for one in everyone[:3]:
        one["attempt"], one["time_ms"] = "7.1.0", one["time_ms"] + 60_000
    slow = replace(health_report(), attempt="7.0.2", slow_nodes=("dgx-1",))
    (tmp_path / "health.json").write_text(node_facts.dumps(slow))
    findings = judged(tmp_path, everyone, composed())
    assert [f.what for f in findings if f.rule == "NCC-05"] == ["no facts of 1 of 4 ranks: 3"]
    assert nodes.slow_nodes(nodes.load(tmp_path)) == []
    (tmp_path / "health.json").write_text(node_facts.dumps(replace(slow, attempt="7.1.2")))
    assert nodes.slow_nodes(nodes.load(tmp_path)) == ["dgx-1"], "another step of the same start"


def test_ranks_that_each_take_themselves_for_rank_0(tmp_path: Path):
    made = composed()
    (tmp_path / "plan.json").write_text(plans.dumps(made))
    assert [
        code for code, _ in on_nodes(tmp_path, "jobs.node_checks.facts", "plan.json", RANK="0", WORLD_SIZE="1")
    ] == [0] * 4
    said = [f.what for f in nodes.judge(made, nodes.load(tmp_path)) if f.rule == "NCC-05"]
    assert said == [
        "ranks were started as a world of 1, and the plan is for 4: each considers itself rank 0",
        "no facts of 3 of 4 ranks: 1-3",
    ]


def test_the_checkpoint_is_looked_for_where_a_run_loads_it(tmp_path: Path):
    """MODEL may be a Hugging Face folder with its conversions in it; one in FP8 or NF4 is taken where it can be."""
    asked = ["task=lora70b", "cluster=dgx2", f"cluster.paths.model={tmp_path}"]
    plan = compose.compose([*asked, "precision=fp8"])
    assert ("the checkpoint", f"{tmp_path}/metadata.json", True) in facts.paths(plan)
    (tmp_path / "config.json").touch()
    assert ("the checkpoint", f"{tmp_path}/{CONVERTED}/metadata.json", True) in facts.paths(plan)
    (tmp_path / CONVERTED_FP8).mkdir()
    assert ("the checkpoint", f"{tmp_path}/{CONVERTED_FP8}/metadata.json", True) in facts.paths(plan)
    plan = compose.compose([*asked, "precision=bf16"])
    assert ("the checkpoint", f"{tmp_path}/{CONVERTED}/metadata.json", True) in facts.paths(plan)
    (tmp_path / CONVERTED_NF4).mkdir()
    plan = compose.compose([*asked, "precision=bf16", "task.training.trains=qlora"])
    assert ("the checkpoint", f"{tmp_path}/{CONVERTED_NF4}/metadata.json", True) in facts.paths(plan)
    plan = compose.compose([*asked, "task=lora_8b", "engine=huggingface", "recipe.global_batch_size=16"])
    assert ("the checkpoint", f"{tmp_path}/config.json", True) in facts.paths(plan)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_disk_without_room_is_found_by_writing(tmp_path: Path):
    made = composed()
    with ranks.mounted(tmp_path / "small", "size=512k"):
        (tmp_path / "small" / "plan.json").write_text(plans.dumps(made))
        on_nodes(tmp_path / "small", "jobs.node_checks.facts", "plan.json", size=(1, 1), WORLD_SIZE="4")
        findings = nodes.judge(made, nodes.load(tmp_path / "small"))
    assert "results cannot be written: No space left on device" in [f.what for f in findings if f.rule == "CFG-08"]


def test_a_plan_that_cannot_be_read_and_facts_that_cannot_be(tmp_path: Path, found: Everyone):
    [(code, said)] = on_nodes(tmp_path, "jobs.node_checks.facts", "plan.json", size=(1, 1))
    assert code == 2 and "the plan cannot be read" in said
    (tmp_path / "facts").mkdir()
    (tmp_path / "facts" / "rank_0000.json").write_text(json.dumps(found[0])[:-9])
    with pytest.raises(LogError, match=r"cannot be read.*truncated"):
        nodes.load(tmp_path)
