"""Write the system description of a submission: recorded values, and empty texts for the user to fill in."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bench.contract import mllog
from bench.contract.plan import Plan
from bench.contract.schema import Device
from bench.errors import ConfigError
from bench.mlperf import log as logs
from bench.mlperf import reader
from bench.mlperf.gpu_count import NO_DEVICES
from bench.mlperf.result import Result

_NEEDED = (
    *("submitter", "division", "status", "system_name", "number_of_nodes"),
    *("host_processors_per_node", "host_processor_model_name", "host_processor_core_count", "host_memory_capacity"),
    *("host_storage_type", "host_storage_capacity", "host_networking", "host_networking_topology"),
    *("host_memory_configuration", "accelerators_per_node", "accelerator_model_name", "accelerator_host_interconnect"),
    *("accelerator_memory_configuration", "accelerator_memory_capacity", "accelerator_interconnect", "cooling"),
    *("framework", "other_software_stack", "operating_system"),
)
_OPTIONAL = (
    *("host_processor_vcpu_count", "host_processor_frequency", "host_processor_caches", "host_processor_interconnect"),
    *("accelerator_frequency", "accelerator_on-chip_memories", "accelerator_interconnect_topology"),
    *("hw_notes", "sw_notes"),
)
FIELDS = (*_NEEDED, *_OPTIONAL)
"""The fields of a description. All are text: the official checker concatenates them.

Sources: the system description checker of mlperf-logging 4.1.68, which is the same for all rulesets. Which fields need
a meaningful answer is from MLCommons' submission rules, section "<system_desc_id>.json metadata" (cores may be given as
vCPUs instead).
"""
_OF_ACCELERATORS = tuple(field for field in _NEEDED if field.startswith("accelerator_"))

STATUSES = {
    "onprem": "Available on-premise",
    "cloud": "Available cloud",
    "preview": "Preview",
    "research": "Research, Development, or Internal (RDI)",
}
"""submission_status of a log → status of a system."""

_NOT_THE_SYSTEMS = ("submitter", "division", "system_name")
_PLACEHOLDERS = ("UNKNOWN_", NO_DEVICES)


def describe(result: Result, plan: Plan | None) -> dict[str, str]:
    """Return the system description of a run; values in the log take precedence over the plan."""
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
    return merged(text_of(known), text_of(logged), text_of(planned))


def _counts_agree(result: Result) -> bool:
    """Return whether the run script described all nodes; some scripts describe only one."""
    counts = (result.system.get("number_of_nodes"), result.system.get("accelerators_per_node"))
    if not all(isinstance(count, str) and count.isdecimal() for count in counts):
        return False
    return int(str(counts[0])) * int(str(counts[1])) == result.num_gpus


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
    needed: Iterable[str] = _NEEDED
    if description["accelerators_per_node"] == "0":
        needed = (field for field in needed if field not in _OF_ACCELERATORS)
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
            f"the system description cannot be read: {error}", where=str(path), fix="give the path of a <system>.json"
        ) from error
    if not isinstance(fields, dict) or (strange := fields.keys() - set(FIELDS)):
        named = f"unknown fields {sorted(strange)}"[:200] if isinstance(fields, dict) else "not a JSON object"
        raise ConfigError(
            f"the file is not a system description: {named}",
            where=str(path),
            fix="copy a <system>.json that runstop pack has written, and edit the copy",
        )
    return text_of(fields)
