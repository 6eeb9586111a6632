"""Hardware, software and settings of a trial, from its log, its plan and the facts of its nodes."""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.contract import codec, mllog, run_files
from bench.contract.node_facts import GpuFacts
from bench.contract.plan import Plan
from bench.errors import LogError
from bench.mlperf.log import Log
from bench.mlperf.result import Result
from bench.preflight.nodes import Facts, load
from bench.results import cost
from bench.results.measurement import MACHINE_KEYS, hardware_facts
from bench.runs import manifest
from bench.texts import counted

_NODES = "number of nodes"
_REQUESTS = (mllog.ANSWERS_REQUESTED, mllog.KERNELS_REQUESTED, mllog.LOADS_REQUESTED, mllog.SERVER, mllog.STRATEGY)
"""Records of a log whose lists and metadata are settings."""
_NOT_SETTINGS_OF_REQUESTS = (
    *("file", "lineno", mllog.MONOTONIC_MS, "healthy_s"),
    *("bytes_per_token", "bandwidth_gbs", "bytes_per_step", "rank_bytes"),
)
"""Metadata of these records that are measured or estimated, and so are no settings."""
_OF_A_LOAD = ("arrivals", "rate", "requests", "tokens_in", "tokens_out")
_PORT = re.compile(r"(--port[ =])\d+")
_LONGEST = 60
_NOT_SETTINGS = (
    *("cluster.price_per_gpu_hour", "cluster.currency"),
    *("launch.", "trials", "walltime", "seed_base", "cluster.paths.", "cluster.org", "cluster.platform"),
    *(
        "cluster.status",
        "cluster.slurm",
        "cluster.health",
        "cluster.master_port",
        "cluster.avoid",
        "cluster.spare_nodes",
    ),
)
"""Prefixes of keys that do not affect the measurements."""
_TEXTS = ("summary", "source", "description")


def of_trial(result: Result, folder: Path, trial: int) -> dict[str, str]:
    """Return the hardware and software of a trial by name; unknown values are left out."""
    logged, known_price = result.hyperparameters, cost.price(result)
    known = {
        "accelerator": logged.get("accelerator"),
        "GPUs": result.num_gpus,
        "ranks": logged.get("num_ranks"),
        "processor": logged.get("host_processor_model_name"),
        **dict(_of_nodes(folder, trial)),
        **hardware_facts(result),
        **({f"price of a GPU hour ({known_price.currency})": f"{known_price.per_gpu_hour:g}"} if known_price else {}),
        "operating system": logged.get("operating_system"),
        **result.software,
        **_of_program(result),
        "commit": logged.get("commit"),
        "image": logged.get("image"),
        **_of_image(folder),
    }
    return {name: str(value) for name, value in known.items() if value not in (None, "")}


def hardware(facts: Mapping[str, str]) -> str:
    """Return the hardware as a text; only runs on equal hardware are compared with each other."""
    if "GPUs" in facts:
        text = f"{facts['GPUs']} × {facts.get('accelerator', 'GPU')}"
    else:
        ranks = counted(int(facts["ranks"]), "rank") if facts.get("ranks", "").isdigit() else "unknown ranks"
        text = f"{ranks} on {facts.get('processor', facts.get('accelerator', 'unknown'))}"
    return f"{text}, {facts[_NODES]} nodes" if facts.get(_NODES, "1") != "1" else text


def _of_nodes(folder: Path, trial: int) -> Iterator[tuple[str, str]]:
    """Yield the facts that the ranks collected on their nodes, if they did."""
    array_task = "" if (folder / run_files.facts()).is_dir() else f"_{trial}"
    with suppress(LogError):
        facts = load(folder, array_task=array_task)
        if facts.ranks:
            yield _NODES, str(len({rank.node for rank in facts.ranks}))
            yield "nodes", _all(rank.node for rank in facts.ranks)
            yield from facts.ranks[0].software.packages.items()
        yield from _of_gpus([gpu for machine in facts.machines.values() for gpu in machine.gpus or ()])
        yield from _of_health(facts)


def _of_gpus(gpus: list[GpuFacts]) -> Iterator[tuple[str, str]]:
    """Yield facts in which GPUs of the same name can differ."""
    yield "driver", _all(gpu.driver for gpu in gpus)
    yield "highest SM clock (MHz)", _all(gpu.max_sm_clock_mhz for gpu in gpus)
    yield "throttled before the run", _all(gpu.throttle for gpu in gpus)


def _of_health(facts: Facts) -> Iterator[tuple[str, str]]:
    if facts.health is not None and "nccl" in facts.health.software:
        yield "NCCL", facts.health.software["nccl"]


def _of_program(result: Result) -> dict[str, str]:
    """Return the files of the user's program with their checksums: an edited script is another program."""
    own = {name: sha256 for name, sha256 in result.inputs.items() if name.startswith("program ")}
    return {name: f"sha256 {sha256:.12}…" for name, sha256 in own.items()}


def _all(values: Iterable[Any]) -> str:
    """Return the different known values, sorted and joined."""
    return ", ".join(sorted({str(value) for value in values if value is not None}))


def _of_image(folder: Path) -> dict[str, Any]:
    known = manifest.read(folder)
    if known is None or known.image is None:
        return {}
    return {"container image": known.image.get("name"), "image sha256": known.image.get("sha256")}


def logged_settings(log: Log, result: Result) -> dict[str, str]:
    """Return the settings in a log: single values, and the requests to engines, kernels and servers."""
    no_settings = (*MACHINE_KEYS, mllog.COMPILE_TIME, mllog.PRICE_PER_GPU_HOUR, mllog.CURRENCY)
    settings = {key: str(value) for key, value in result.hyperparameters.items() if key not in no_settings}
    return settings | dict(_of_requests(log)) | dict(_of_loads(log))


def _of_requests(log: Log) -> Iterator[tuple[str, str]]:
    for key in _REQUESTS:
        event = log.single(key)
        if event is None:
            continue
        if isinstance(event.value, list):
            yield key, _listed(event.value)
        for name, value in codec.flat(event.metadata):
            if name not in _NOT_SETTINGS_OF_REQUESTS:
                yield f"{key}.{name}", _anywhere(value)


def _of_loads(log: Log) -> Iterator[tuple[str, str]]:
    request = log.single(mllog.LOADS_REQUESTED)
    varies = request is not None and "lengths" in request.metadata  # then the distribution is the setting
    names = [name for name in _OF_A_LOAD if not (varies and name in ("tokens_in", "tokens_out"))]
    for event in log.all(mllog.LOAD_MEASURED):
        for name in names:
            value = event.metadata.get(name)
            of_each = value if isinstance(value, list) else [value]
            if text := _all(of_each):
                yield f"{event.value}.{name}", text


def _listed(values: Sequence[Any]) -> str:
    """Return a list as text; a long list is cut and gets a checksum."""
    text = ", ".join(map(str, values))
    checksum = hashlib.sha256(text.encode(errors="replace")).hexdigest()[:8]
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}… ({len(values)}, checksum {checksum})"


def _anywhere(value: Any) -> str:
    """Return a value without the parts that differ from run to run: folders of files, and port numbers."""
    parts = value if isinstance(value, list) else [value]
    return _PORT.sub(r"\1…", " ".join(_name(str(part)) for part in parts))


def _name(text: str) -> str:
    """Return a text; of an absolute path the last part, and of a file that the run itself wrote the suffix."""
    path = Path(text)
    if not path.is_absolute():
        return text
    return f"…{path.suffix}" if path.parent.name == run_files.RANK_LOGS else path.name


def planned_settings(plan: Plan | None) -> dict[str, str]:
    """Return the settings in a plan that affect the measurements, with the resolved parallelism."""
    if plan is None:
        return {}
    split = {f"parallel.{name}": getattr(plan.world, name) for name in ("tp", "pp", "cp", "sp")}
    config = dict(codec.flat(codec.plain(plan.config))) | split
    return {
        name: str(value)
        for name, value in config.items()
        if not name.startswith(_NOT_SETTINGS) and name.rpartition(".")[2] not in _TEXTS
    }
