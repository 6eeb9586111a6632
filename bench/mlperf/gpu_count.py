"""Read how many GPUs a trial used from its log, and check that number."""

import re
from typing import Any

from bench.contract import mllog
from bench.mlperf.log import Log
from bench.mlperf.reader import printable


def num_gpus(log: Log, system: dict[str, Any]) -> int | None:
    """Return the GPU count of the SYSJSON record, else of our own records; None on CPUs, or if neither is logged."""
    nodes, per_node = (as_count(system.get(name)) for name in ("number_of_nodes", "accelerators_per_node"))
    if nodes and per_node:
        return nodes * per_node
    if log.value("accelerator") in (None, "cpu"):
        return None
    ranks = log.integer(mllog.NUM_GPUS) or log.integer("num_ranks")
    return ranks if ranks and ranks > 0 else None


NO_DEVICES = "No devices were found"
"""The output of nvidia-smi without a GPU. A run script stores it as the name of the accelerator, and counts one GPU."""


def conflict(log: Log, system: dict[str, Any]) -> str:
    """Return why the GPU count in the SYSJSON record is wrong; empty if there is no conflict.

    A run script may have found no GPU, may describe one node of many, or all GPUs of a node although the run used only
    some. The name of the platform then has another number. Such names are `8xDGX`,
    `1xXE7745x4H200-NVL-141GB`, `1xSR680aV3-8xH200_SXM` and `GX2560M7_H100_SXM_80GBx4`.
    """
    nodes, per_node = (as_count(system.get(name)) for name in ("number_of_nodes", "accelerators_per_node"))
    if not nodes or not per_node:
        return ""
    if NO_DEVICES in str(system.get("accelerator_model_name")):
        return "the run script found no devices on its node"
    platform = log.text(mllog.SUBMISSION_PLATFORM) or ""
    for pattern, counted, what in ((_NODES_OF_NAME, nodes, "nodes"), (_GPUS_OF_NAME, per_node, "GPUs per node")):
        named = pattern.search(platform)
        if named and int(next(filter(None, named.groups()))) != counted:
            return (
                f"the run script counted {counted} {what}, but the name of the platform is {printable(platform)[:60]}"
            )
    return ""


_NODES_OF_NAME = re.compile(r"^(\d{1,6})x")
_GPUS_OF_NAME = re.compile(
    r"(?<=x)(\d{1,2})(?=[A-Z]{1,3}\d{2,4})|(?<=-)(\d{1,2})(?=x[A-Z]{1,3}\d{2,4})|(?<=x)(\d{1,2})$"
)


def as_count(text: Any) -> int | None:
    """Return a count of a SYSJSON record, whose values are texts; None for anything else."""
    return int(text) if isinstance(text, str) and re.fullmatch(r"[0-9]{1,7}", text) else None
