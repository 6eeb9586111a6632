"""What a rank finds where it was started, once per rank, before the first trial: `python -m jobs.node_checks.facts PLAN`.

Standard library only, and done within a second. Nothing is judged here (`bench.preflight.nodes` does that) and nothing made up: what
cannot be read is null. Values of environment variables are not kept, only the names of those that steer a job.
"""

import argparse
import json
import os
import platform
import resource
import shutil
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from bench.contract import checkpoint, run_files
from bench.contract import plan as plans
from bench.contract.plan import Plan
from bench.contract.schema import DataSource, Runtime
from jobs.node_checks import hardware
from jobs.ranks import guard
from jobs.ranks.identity import Rank, from_environment, node_name

VERSION = 1
IMAGE = Path("/etc/runstop-image.json")
"""What our images say of themselves."""
ENROOT_LOCK = Path("/.lock")
"""Enroot puts it into every root file system that it starts; its own `enroot list` knows containers by it."""
PACKAGES = (
    *("runstop", "torch", "megatron-core", "mlperf-logging", "numpy", "psutil", "triton", "transformer-engine"),
    *("flash-attn", "apex", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13"),
)
STEERING = ("NCCL_", "GLOO_", "UCX_", "TORCH_", "PYTORCH_", "CUDA_", "OMP_", "PMIX_", "SLURM_", "ENROOT_")
WRITTEN_MIB = 1
"""A full quota still takes an empty file, so this much is written."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m jobs.node_checks.facts", description=__doc__)
    parser.add_argument("plan", type=Path, help="plan.json of a run folder; the facts go to facts/ beside it")
    args = parser.parse_args()
    folder, who = args.plan.resolve().parent, from_environment()
    with guard.guarded(folder / run_files.rank_error(f"facts{run_files.element()}", who.rank)):
        write(collect(plans.load(args.plan), who, folder), folder / run_files.facts(run_files.element()))


def collect(plan: Plan, who: Rank, folder: Path) -> dict[str, Any]:
    """Return what this rank finds, and on local rank 0 what its node is."""
    env = os.environ
    return {
        "version": VERSION,
        "rank": who.rank,
        "local_rank": who.local_rank,
        "world_size": who.world_size,
        "node": node_name(),
        "hostname": socket.gethostname(),
        "attempt": attempt(env),
        "time_ms": time.time_ns() // 1_000_000,
        "software": software(),
        "cuda_visible_devices": env.get("CUDA_VISIBLE_DEVICES"),
        "num_cpus": len(os.sched_getaffinity(0)),
        "memlock_bytes": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],  # -1: unlimited
        "environment": sorted(name for name in env if name.startswith(STEERING)),
        "not_as_planned": sorted(name for name, value in plan.environment.items() if env.get(name) != value),
        "machine": machine(plan, folder) if who.local_rank == 0 else None,
    }


def attempt(env: Mapping[str, str]) -> str | None:
    """Return which start of which job this is: a requeued job shares its run folder with itself. None without Slurm."""
    if "SLURM_JOB_ID" not in env:
        return None
    return ".".join(env.get(f"SLURM_{part}", "0") for part in ("JOB_ID", "RESTART_COUNT", "STEP_ID"))


def software() -> dict[str, Any]:
    """Return what this rank runs in; `image` is our image's own word, and null elsewhere."""
    packages, image, system = {}, None, None
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            packages[name] = metadata.version(name)
    with suppress(OSError):
        image = IMAGE.read_text().strip()
    with suppress(OSError):
        release = platform.freedesktop_os_release()
        system = f"{release['NAME']} {release.get('VERSION', '')}".strip()
    return {
        "image": image,
        "in_enroot": ENROOT_LOCK.exists(),
        "system": system,
        "python": platform.python_version(),
        "executable": sys.executable,
        "packages": packages,
    }


def machine(plan: Plan, folder: Path) -> dict[str, Any]:
    """Return what this node is, and what of the plan it can reach."""
    reached = [
        {"what": what, "path": path, "required": required, "exists": path is not None and Path(path).exists()}
        for what, path, required in paths(plan)
    ]
    return hardware.facts() | {"results": results(folder), "paths": reached}


def results(folder: Path) -> dict[str, Any]:
    """Return the room that the run folder has, and why a file cannot be written there: one is, and removed again."""
    probe, refused = folder / f".write_{node_name()}_{os.getpid()}", None
    try:
        with probe.open("wb") as file:
            file.write(os.urandom(WRITTEN_MIB * 2**20))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        refused = error.strerror
    with suppress(OSError):
        probe.unlink()
    return {"path": str(folder), "free_mib": shutil.disk_usage(folder).free // 2**20, "refused": refused}


def paths(plan: Plan) -> list[tuple[str, str | None, bool]]:
    """Return what the plan reads and mounts, as (what, path, required): what `jobs.tasks.prepare` makes may still be missing."""
    full, c = plans.expanded, plan.config
    roots = {"DATADIR": c.cluster.paths.data, "MODEL": c.cluster.paths.model, "LOGDIR": c.cluster.paths.logs}
    found = [(what, full(path), False) for what, path in roots.items() if path]
    if c.data.source is DataSource.prepared and plan.data_dir:
        found.append(("the prepared rows", full(f"{plan.data_dir}/train_tokens.npy"), True))
    if plan.base is None and plan.base_dir:
        folder = full(plan.base_dir)
        there = folder and checkpoint.located(Path(folder), c.precision)
        found.append(("the checkpoint", there and f"{there}/metadata.json", True))
    if c.container.runtime is Runtime.pyxis:
        found += [("a mount", full(target), True) for target in map(mounted_at, c.container.mounts) if target]
    return found


def mounted_at(mount: str) -> str | None:
    """Return where SRC[:DST[:FLAGS]] appears in the container; None for what is unmounted there."""
    source, target, *_ = [*mount.split(":"), ""]
    return None if source == "umount" else target or source


def write(facts: dict[str, Any], folder: Path) -> None:
    """Write one rank's facts over those of an earlier attempt."""
    folder.mkdir(exist_ok=True)
    save(facts, folder / f"rank_{facts['rank']:04d}.json")


def save(content: dict[str, Any], path: Path) -> None:
    """Replace a JSON file in one step: a reader never meets half of it."""
    part = path.with_name(f".{path.name}.{node_name()}_{os.getpid()}.part")  # ranks that are no world share a name
    part.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    part.replace(path)


if __name__ == "__main__":
    main()
