"""Collect the facts of a node, once per rank, before the first trial: `python -m jobs.node_checks.facts PLAN`.

It needs only the standard library and takes less than a second. The facts are judged by `bench.preflight.nodes`; what
cannot be read is null. Of the environment variables that affect a job only the names are kept, never the values.
"""

import argparse
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

from bench.contract import checkpoint, node_facts, plan_kinds, plan_paths, run_files
from bench.contract.node_facts import FileTime, Health, Machine, NeededPath, RankFacts, Results, Software
from bench.contract.plan import Plan
from bench.contract.schema import DataSource, Runtime
from jobs.node_checks import hardware
from jobs.ranks import guard
from jobs.ranks.identity import Rank, from_environment, node_name

IMAGE = Path("/etc/runstop-image.json")
"""The description file in images of runstop."""
ENROOT_LOCK = Path("/.lock")
"""Enroot creates it in every root file system that it starts; `enroot list` recognises containers by it."""
PACKAGES = (
    *("runstop", "torch", "megatron-core", "mlperf-logging", "numpy", "psutil", "triton", "transformer-engine"),
    *("transformers", "accelerate", "peft", "deepspeed", "bitsandbytes", "nemo-toolkit", "amdsmi"),
    *("flash-attn", "apex", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13"),
)
AFFECTING_PREFIXES = (
    *("NCCL_", "RCCL_", "GLOO_", "UCX_", "TORCH_", "PYTORCH_", "CUDA_", "HIP_", "ROCR_", "HSA_", "OMP_", "PMIX_"),
    *("SLURM_", "ENROOT_"),
)
WRITTEN_MIB = 1
"""The size of the probe file: even a full quota accepts an empty one."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m jobs.node_checks.facts", description=__doc__)
    parser.add_argument(
        "plan", type=Path, help="plan.json of a run folder; the facts are written to facts/ in the same folder"
    )
    args = parser.parse_args()
    folder, who = args.plan.resolve().parent, from_environment()
    with guard.guarded(folder / run_files.rank_error(f"facts{run_files.array_task()}", who.rank)):
        write(collect(plan_kinds.load(args.plan), who, folder), folder / run_files.facts(run_files.array_task()))


def collect(plan: Plan, who: Rank, folder: Path) -> RankFacts:
    """Return the facts of this rank; local rank 0 also describes the machine."""
    env = os.environ
    return RankFacts(
        rank=who.rank,
        local_rank=who.local_rank,
        world_size=who.world_size,
        node=node_name(),
        hostname=socket.gethostname(),
        attempt=attempt(env),
        time_ms=time.time_ns() // 1_000_000,
        software=software(),
        cuda_visible_devices=env.get("CUDA_VISIBLE_DEVICES"),
        num_cpus=len(os.sched_getaffinity(0)),
        memlock_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        environment=tuple(sorted(name for name in env if name.startswith(AFFECTING_PREFIXES))),
        not_as_planned=tuple(sorted(name for name, value in plan.environment.items() if env.get(name) != value)),
        machine=machine(plan, folder) if who.local_rank == 0 else None,
    )


def attempt(env: Mapping[str, str]) -> str | None:
    """Return the attempt, since all attempts of a requeued job share one run folder; None without Slurm."""
    if "SLURM_JOB_ID" not in env:
        return None
    return ".".join(env.get(f"SLURM_{part}", "0") for part in ("JOB_ID", "RESTART_COUNT", "STEP_ID"))


def software() -> Software:
    """Return the image, the system and the packages of this rank."""
    packages = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            packages[name] = metadata.version(name)
    return Software(
        image=hardware.text(IMAGE),
        in_enroot=ENROOT_LOCK.exists(),
        system=hardware.operating_system(),
        python=platform.python_version(),
        executable=sys.executable,
        packages=packages,
    )


def machine(plan: Plan, folder: Path) -> Machine:
    """Return the hardware of this node, and which of the plan's paths exist on it."""
    needed = (
        NeededPath(what, path, required, exists=path is not None and Path(path).exists())
        for what, path, required in paths(plan)
    )
    return hardware.machine(results=results(folder), paths=tuple(needed))


def results(folder: Path) -> Results:
    """Return the free space of the run folder, and the error if a probe file cannot be written; the probe is removed.

    The probe's time stamp is from the file server's clock, which is the same for all nodes.
    """
    probe, refused, clock = folder / f".write_{node_name()}_{os.getpid()}", None, None
    content, before_ms = os.urandom(WRITTEN_MIB * 2**20), time.time_ns() // 1_000_000
    try:
        with probe.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            file_ms = os.fstat(file.fileno()).st_mtime_ns // 1_000_000
            clock = FileTime(before_ms, file_ms, after_ms=time.time_ns() // 1_000_000)
    except OSError as error:
        refused = error.strerror
    with suppress(OSError):
        probe.unlink()
    return Results(path=str(folder), free_mib=shutil.disk_usage(folder).free // 2**20, refused=refused, clock=clock)


def paths(plan: Plan) -> list[tuple[str, str | None, bool]]:
    """Return the paths that the plan reads and mounts, as (what, path, required).

    A path that `jobs.tasks.prepare` creates is not required: it may still be missing.
    """
    full, c = plan_paths.expanded, plan.config
    roots = {"DATADIR": c.cluster.paths.data, "MODEL": c.cluster.paths.model, "LOGDIR": c.cluster.paths.logs}
    listed = [(what, full(path), False) for what, path in roots.items() if path]
    if c.data and c.data.source is DataSource.prepared and plan.inputs.rows:
        listed.append(("the prepared rows", full(f"{plan.inputs.rows}/train_tokens.npy"), True))
    if c.data and c.data.source is DataSource.megatron and plan.inputs.rows:
        for name in (c.data.files, c.data.eval_files):
            listed.append((f"tokens of {name}", full(f"{plan.inputs.rows}/{name}.bin"), True))
    if plan.inputs.checkpoint and not plan.inputs.checkpoint_is_created:
        folder = full(plan.inputs.checkpoint)
        listed.append(("the checkpoint", folder and str(checkpoint.first_file(Path(folder), c)), True))
    if c.container.runtime is Runtime.pyxis:
        listed += [("a mount", full(target), True) for target in map(mounted_at, c.container.mounts) if target]
    return listed


def mounted_at(mount: str) -> str | None:
    """Return the path of a mount SRC[:DST[:FLAGS]] in the container; None for umount."""
    source, target, *_ = [*mount.split(":"), ""]
    return None if source == "umount" else target or source


def write(facts: RankFacts, folder: Path) -> None:
    """Write one rank's facts; those of an earlier attempt are overwritten."""
    folder.mkdir(exist_ok=True)
    save(facts, folder / f"rank_{facts.rank:04d}.json")


def save(content: RankFacts | Health, path: Path) -> None:
    """Replace a JSON file atomically."""
    # Ranks that were started independently are all rank 0, so the temporary name contains node and process id.
    part = path.with_name(f".{path.name}.{node_name()}_{os.getpid()}.part")
    part.write_text(node_facts.dumps(content))
    part.replace(path)


if __name__ == "__main__":
    main()
