"""systems/<system>.json from the facts of the nodes, and the config. What is unknown is listed."""

from dataclasses import replace
from pathlib import Path

import pytest

from bench.contract import node_facts
from bench.contract.node_facts import Disk
from bench.errors import ConfigError
from bench.mlperf.package import system
from bench.planning import compose
from helpers import facts

NODE = replace(
    facts.MACHINE,
    cpu="Example 8480C",
    num_cpus=224,
    num_sockets=2,
    cores_per_socket=56,
    max_cpu_mhz=3800,
    cpu_caches="L2 2048K",
    memory_gib=2015.4,
    disks=(
        Disk("nvme0n1", "NVMe SSD", 3576, "x"),
        Disk("nvme1n1", "NVMe SSD", 3576, "x"),
        Disk("sda", "HDD", 900, None),
    ),
    gpus=tuple(replace(facts.GPU, index=n, name="NVIDIA H100 80GB HBM3", pcie="PCIe gen 5 x16") for n in range(2)),
    gpu_links="     GPU0 GPU1\nGPU0  X   NV18\nGPU1 NV18  X\n",
)
DESCRIBED = {
    "host_processors_per_node": "2",
    "host_processor_model_name": "Example 8480C",
    "host_processor_core_count": "56",
    "host_processor_vcpu_count": "224",
    "host_processor_frequency": "up to 3800 MHz",
    "host_processor_caches": "L2 2048K",
    "host_memory_capacity": "2015 GiB",
    "host_storage_type": "NVMe SSD, HDD",
    "host_storage_capacity": "2x 3576 GiB NVMe SSD, 1x 900 GiB HDD",
    "host_networking": "2x InfiniBand 400 Gb/sec (4X NDR)",
    "operating_system": "Debian 12",
    "framework": "torch 2.13.0",
    "other_software_stack": "driver 580.1, python 3.11, kernel 6.8",
    "accelerators_per_node": "2",
    "accelerator_model_name": "NVIDIA H100 80GB HBM3",
    "accelerator_memory_capacity": "143771 MiB",
    "accelerator_memory_configuration": "HBM3",
    "accelerator_frequency": "up to 1980 MHz",
    "accelerator_host_interconnect": "PCIe gen 5 x16",
    "accelerator_interconnect": "NVLink, 18 links per GPU",
}


def test_a_system_is_described_by_the_facts_of_its_nodes(tmp_path: Path) -> None:
    (tmp_path / "facts").mkdir()
    for rank in facts.SOUND:
        machine = rank.machine and NODE
        file = tmp_path / f"facts/rank_{rank.rank:04d}.json"
        file.write_text(node_facts.dumps(replace(rank, machine=machine)))
    (tmp_path / "facts/rank_0009.json").write_text("{}")
    machines = system.machines(tmp_path)
    assert [rank.node for rank in machines] == ["dgx-0", "dgx-1"]
    described = system.text_of(system.node_facts_of(machines))
    assert described == DESCRIBED
    left = system.missing(system.merged(described))
    assert {"host_networking_topology", "host_memory_configuration", "cooling"} < set(left)
    assert len(left) == 8, "and submitter, division, status, system_name, number_of_nodes, which the pack verb knows"


def test_nodes_that_differ_are_named_field_by_field() -> None:
    first, second = (replace(rank, machine=NODE) for rank in facts.SOUND if rank.machine is not None)
    assert system.differences([first, second, first]) == {}
    nearly = replace(second, machine=replace(NODE, memory_gib=2009.0))
    unread = replace(second, machine=replace(NODE, cpu=None))
    assert system.differences([first, nearly, unread]) == {}, "equal nodes leave different amounts of memory"
    other = replace(NODE, memory_gib=1007.6, disks=NODE.disks[:2], kernel="6.9")
    assert system.differences([first, second, replace(second, node="dgx-2", machine=other)]) == {
        "host_memory_capacity": {"2015 GiB": ["dgx-0", "dgx-1"], "1008 GiB": ["dgx-2"]},
        "host_storage_type": {"NVMe SSD, HDD": ["dgx-0", "dgx-1"], "NVMe SSD": ["dgx-2"]},
        "host_storage_capacity": {
            "2x 3576 GiB NVMe SSD, 1x 900 GiB HDD": ["dgx-0", "dgx-1"],
            "2x 3576 GiB NVMe SSD": ["dgx-2"],
        },
        "other_software_stack": {
            "driver 580.1, python 3.11, kernel 6.8": ["dgx-0", "dgx-1"],
            "driver 580.1, python 3.11, kernel 6.9": ["dgx-2"],
        },
    }


def test_facts_of_an_older_version_and_of_a_node_without_gpus_say_less() -> None:
    older = replace(facts.RANK, machine=replace(facts.MACHINE, gpus=None, infiniband=()))
    described = system.node_facts_of([older])
    assert "host_processors_per_node" not in described and "accelerators_per_node" not in described
    assert system.node_facts_of([]) == {}
    alone = system.node_facts_of([replace(older, machine=replace(NODE, gpus=NODE.gpus[:1], gpu_links=None))])
    assert alone["accelerator_interconnect"] == "none: one accelerator per node"


@pytest.mark.long
def test_a_config_describes_what_no_program_can_read() -> None:
    plan = compose.compose(["task=llama31_8b", "cluster=dgxh200", "+cluster.system_description={cooling: liquid}"])
    assert plan.config.cluster.system_description == {"cooling": "liquid"}
    with pytest.raises(
        ConfigError, match=r"'colour' is not a field of MLPerf's system description(?s:.*)use only the fields submitter"
    ):
        compose.compose(["task=llama31_8b", "cluster=dgxh200", "+cluster.system_description={colour: red}"])
