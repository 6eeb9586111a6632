"""Write the system description of a submission: recorded values, and empty texts for the user to fill in."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.contract import mllog, node_facts, regular_files, run_files
from bench.contract.node_facts import Machine, Port, RankFacts
from bench.contract.plan import Plan
from bench.contract.schema import Device
from bench.errors import ConfigError
from bench.mlperf import log as logs
from bench.mlperf import reader
from bench.mlperf.gpu_count import NO_DEVICES, as_count
from bench.mlperf.result import Result
from bench.mlperf.system_fields import FIELDS, NEEDED, OF_ACCELERATORS

STATUSES = {
    "onprem": "Available on-premise",
    "cloud": "Available cloud",
    "preview": "Preview",
    "research": "Research, Development, or Internal (RDI)",
}
"""submission_status of a log → status of a system."""

_NOT_THE_SYSTEMS = ("submitter", "division", "system_name")
_PLACEHOLDERS = ("UNKNOWN_", NO_DEVICES)


def describe(result: Result, plan: Plan | None, machines: Sequence[RankFacts] = ()) -> dict[str, str]:
    """Return the system description of a run.

    cluster.system_description takes precedence over the log, the log over the facts of the nodes, and these over the
    rest of the plan. machines: local rank 0 of each node.
    """
    log = logs.read(result.file)
    known: dict[str, Any] = {
        field: value for field, value in result.system.items() if field in FIELDS and field not in _NOT_THE_SYSTEMS
    }
    if not _counts_agree(result):
        known.pop("number_of_nodes", None)
    if result.gpu_count_conflict:
        known.pop("accelerators_per_node", None)
    status = log.text(mllog.SUBMISSION_STATUS)
    if status in STATUSES:
        known["status"] = STATUSES[status]
    logged = {"framework": log.value("software"), "accelerator_model_name": log.text("accelerator")}
    if logged["accelerator_model_name"] == "cpu":
        logged |= {"accelerator_model_name": None, "accelerators_per_node": "0"}
    planned = {} if plan is None else _planned(plan)
    by_hand = {} if plan is None else plan.config.cluster.system_description
    return merged(by_hand, text_of(known), text_of(logged), text_of(node_facts_of(machines)), text_of(planned))


def machines(folder: Path) -> list[RankFacts]:
    """Return the facts of local rank 0 of each node of a run, in the order of ranks; damaged files are skipped."""
    nodes: dict[str, RankFacts] = {}
    for path in sorted(folder.glob(f"{run_files.FACTS}*/rank_*.json")):
        with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            rank = node_facts.loads(regular_files.read_text(path), RankFacts)
            if rank.machine is not None:
                nodes.setdefault(rank.node, rank)
    return list(nodes.values())


def node_facts_of(ranks: Sequence[RankFacts]) -> dict[str, Any]:
    """Return what the first node's facts say of the system; `differences` names what other nodes have instead."""
    if not ranks or (machine := ranks[0].machine) is None:
        return {}
    software = ranks[0].software
    known: dict[str, Any] = {
        "host_processors_per_node": machine.num_sockets,
        "host_processor_model_name": machine.cpu,
        "host_processor_core_count": machine.cores_per_socket,
        "host_processor_vcpu_count": machine.num_cpus,
        "host_processor_frequency": machine.max_cpu_mhz and f"up to {machine.max_cpu_mhz} MHz",
        "host_processor_caches": machine.cpu_caches,
        "host_memory_capacity": f"{machine.memory_gib:.0f} GiB",
        "host_storage_type": ", ".join(dict.fromkeys(disk.kind for disk in machine.disks)),
        "host_storage_capacity": _counted(f"{disk.gib} GiB {disk.kind}" for disk in machine.disks),
        "host_networking": _networking(machine),
        "operating_system": software.system,
        "framework": ", ".join(f"{n} {software.packages[n]}" for n in _FRAMEWORKS if n in software.packages),
        "other_software_stack": ", ".join(_stack(ranks[0])),
    }
    return {field: value for field, value in known.items() if value} | _accelerators(machine)


def differences(ranks: Iterable[RankFacts]) -> dict[str, dict[str, list[str]]]:
    """Return the fields in which nodes differ: each value with the names of its nodes, the first node's value first.

    A value that is unknown on a node does not count, nor do sizes that differ by less than `_SAME_SIZE`, such as the
    memory that the firmware of equal nodes leaves.
    """
    values: dict[str, dict[str, list[str]]] = {}
    for rank in ranks:
        for field, text in text_of(node_facts_of([rank])).items():
            known = values.setdefault(field, {})
            nodes = known.setdefault(next((each for each in known if _are_alike(each, text)), text), [])
            nodes += [] if rank.node in nodes else [rank.node]
    return {field: known for field, known in values.items() if len(known) > 1}


_SAME_SIZE = 0.01
_SIZE = re.compile(r"(\d+)(?= [GM]iB)")


def _are_alike(text: str, other: str) -> bool:
    """Return whether two texts are the same, except for small differences of the sizes in them."""
    (words, sizes), (other_words, other_sizes) = ((_SIZE.sub("", x), _SIZE.findall(x)) for x in (text, other))
    return words == other_words and all(
        abs(int(size) - int(other_size)) <= _SAME_SIZE * max(int(size), int(other_size))
        for size, other_size in zip(sizes, other_sizes, strict=True)
    )


_FRAMEWORKS = ("torch", "megatron-core", "runstop")


def _accelerators(machine: Machine) -> dict[str, Any]:
    if not machine.gpus:
        return {}
    gpu = machine.gpus[0]
    known: dict[str, Any] = {
        "accelerators_per_node": len(machine.gpus),
        "accelerator_model_name": gpu.name,
        "accelerator_memory_capacity": gpu.memory_mib and f"{gpu.memory_mib} MiB",
        "accelerator_memory_configuration": next((kind for kind in _MEMORY if kind in (gpu.name or "")), None),
        "accelerator_frequency": gpu.max_sm_clock_mhz and f"up to {gpu.max_sm_clock_mhz} MHz",
        "accelerator_host_interconnect": gpu.pcie,
        "accelerator_interconnect": _between_gpus(machine),
    }
    return {field: value for field, value in known.items() if value}


_MEMORY = ("HBM3e", "HBM3", "HBM2e", "HBM2", "GDDR6")
"""In the names of some GPUs, such as NVIDIA H100 80GB HBM3."""
_NVLINK = re.compile(r"\bNV(\d+)\b")


def _between_gpus(machine: Machine) -> str | None:
    """Return the links of the GPUs by `nvidia-smi topo -m`; a single GPU has none."""
    if machine.gpus is not None and len(machine.gpus) == 1:
        return "none: one accelerator per node"
    links = [int(count) for count in _NVLINK.findall(machine.gpu_links or "")]
    return f"NVLink, {max(links)} links per GPU" if links else None


def _networking(machine: Machine) -> str:
    """Return the active ports of InfiniBand and RoCE, else the interfaces that are up, with their rates."""
    ports = [f"{port.link or 'InfiniBand'} {port.rate or ''}".strip() for port in machine.infiniband if _is_up(port)]
    if ports:
        return _counted(ports)
    up = (each for each in machine.interfaces if each.state == "up" and each.name != "lo" and each.speed_mbit)
    return _counted(f"Ethernet {(each.speed_mbit or 0) / 1000:g} Gb/s" for each in up)


def _is_up(port: Port) -> bool:
    return "ACTIVE" in (port.state or "")


def _stack(rank: RankFacts) -> Iterator[str]:
    machine, software = rank.machine, rank.software
    if machine is not None and machine.gpus and machine.gpus[0].driver:
        yield f"driver {machine.gpus[0].driver}"
    yield f"python {software.python}"
    yield from (f"{name} {version}" for name, version in software.packages.items() if name not in _FRAMEWORKS)
    if machine is not None:
        yield f"kernel {machine.kernel}"


def _counted(texts: Iterable[str]) -> str:
    """Return equal texts once, with their number: 8x InfiniBand 400 Gb/sec."""
    return ", ".join(f"{count}x {text}" for text, count in Counter(texts).items())


def _counts_agree(result: Result) -> bool:
    """Return whether the run script described all nodes; some scripts describe only one."""
    nodes, per_node = (as_count(result.system.get(name)) for name in ("number_of_nodes", "accelerators_per_node"))
    return nodes is not None and per_node is not None and nodes * per_node == result.num_gpus


def _planned(plan: Plan) -> dict[str, Any]:
    cluster, container = plan.config.cluster, plan.config.container
    known: dict[str, Any] = {"number_of_nodes": plan.world.num_nodes, "status": STATUSES.get(cluster.status)}
    if cluster.device is Device.cuda:
        known["accelerators_per_node"] = plan.world.ranks_per_node
    if cluster.gpu is not None:
        known["accelerator_model_name"] = cluster.gpu.name
        known["accelerator_memory_capacity"] = f"{cluster.gpu.memory_gib:g} GiB"
    if container.image is not None:
        known["other_software_stack"] = f"container image {container.image}"
    return known


def text_of(fields: Mapping[str, Any]) -> dict[str, str]:
    """Return the fields with a value, each as text: {"cuda": "12.6"} becomes "cuda 12.6"."""
    texts = {}
    for field, value in fields.items():
        if isinstance(value, Mapping):
            value = ", ".join(f"{name} {version}" for name, version in value.items())
        if isinstance(value, str | int | float) and not str(value).startswith(_PLACEHOLDERS):
            texts[field] = reader.printable(str(value))
    return texts


def merged(*descriptions: Mapping[str, str]) -> dict[str, str]:
    """Return all fields of a description; the first value that is not empty wins."""
    return {field: next((d[field] for d in descriptions if d.get(field)), "") for field in FIELDS}


def missing(description: Mapping[str, str]) -> list[str]:
    """Return the required fields without a value."""
    needed: Iterable[str] = NEEDED
    if description["accelerators_per_node"] == "0":
        needed = (field for field in needed if field not in OF_ACCELERATORS)
    instead = {"host_processor_core_count"} if description["host_processor_vcpu_count"] else set()
    return [field for field in needed if not description[field] and field not in instead]


def read(path: Path) -> dict[str, str]:
    """Read a description that the user completed.

    Raises:
        ConfigError: it is not a JSON object with fields of a description.
    """
    try:
        fields = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"the system description cannot be read: {error}",
            where=str(path),
            fix="give the path of a JSON file <system>.json",
        ) from error
    if not isinstance(fields, dict) or (strange := fields.keys() - set(FIELDS)):
        reason = f"unknown fields {sorted(strange)}"[:200] if isinstance(fields, dict) else "not a JSON object"
        raise ConfigError(
            f"the file is not a system description: {reason}",
            where=str(path),
            fix='write a JSON object with fields of MLPerf\'s system description, such as {"cooling": "air"}; '
            "for a file with all fields, pack with --force, and copy the description from the package",
        )
    return text_of(fields)
