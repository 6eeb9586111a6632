"""Look for what would fail later, before anything starts: plan in, findings out."""

import os
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path

from bench.errors import ConfigError
from bench.plan import Plan
from bench.rules import RULES
from bench.schema import DataSource, Scheduler

MIN_FREE_MIB = 200
"""For logs, adapters and figures of a small run."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One rule of `bench.rules` that is broken."""

    rule: str
    what: str
    where: str
    fix: str


def inspect(plan: Plan) -> list[Finding]:
    """Return every broken rule."""
    return [*environment(plan), *inputs(plan), *outputs(plan), *network(plan)]


def require(findings: list[Finding]) -> None:
    """Raise ConfigError on the first finding."""
    for f in findings:
        raise ConfigError(f"{f.rule}: {f.what}", where=f.where, fix=f.fix)


def environment(plan: Plan) -> list[Finding]:
    """Return which of the paths nobody has set."""
    paths, c = plan.config.cluster.paths, plan.config.container
    names = {"DATADIR": paths.data, "LOGDIR": paths.logs}
    if plan.config.task.lora is not None:
        names["MODEL"] = paths.model
    if c.runtime.name != "none":
        names["CONT"] = c.image
    return [
        _broken("CFG-06", f"{name} is not set", f"cluster={plan.config.cluster.name}", f"export {name}=…")
        for name, value in names.items()
        if not value
    ]


def inputs(plan: Plan) -> list[Finding]:
    """Return which data or checkpoint a site should have prepared and did not; only what this machine can see."""
    if plan.config.cluster.scheduler is not Scheduler.local:
        return []
    found = []
    rows = plan.data_dir and Path(plan.data_dir) / "train_tokens.npy"
    if plan.config.data.source is DataSource.prepared and rows and not rows.exists():
        found.append(
            _broken("CFG-06", f"no rows of {plan.config.data.name}", str(rows), "point DATADIR at the prepared rows")
        )
    if plan.base is None and plan.base_dir and not Path(plan.base_dir, "metadata.json").exists():
        found.append(
            _broken(
                "CFG-06",
                f"no megatron-core checkpoint of {plan.config.model.name}",
                plan.base_dir,
                "point MODEL at the folder that holds its metadata.json",
            )
        )
    return found


def outputs(plan: Plan) -> list[Finding]:
    """Return what stands in the way of writing the results."""
    folder = Path(plan.config.launch.folder) if plan.config.launch.folder else None
    logs = folder or (plan.config.cluster.paths.logs and Path(plan.config.cluster.paths.logs))
    if not logs:
        return []
    for trial in plan.trials:
        if folder and (folder / trial.log).exists():
            return [
                _broken(
                    "CFG-05",
                    f"{trial.log} exists, and a second start never adds to it",
                    str(folder / trial.log),
                    "leave launch.folder out for a new folder, or name another one",
                )
            ]
    there = next(p for p in (logs, *logs.parents) if p.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return [_broken("CFG-08", "results cannot be written", str(there))]
    if (free := shutil.disk_usage(there).free // 2**20) < MIN_FREE_MIB:
        return [_broken("CFG-08", f"{free} MiB free, and a run needs {MIN_FREE_MIB}", str(there))]
    return []


def network(plan: Plan) -> list[Finding]:
    """Return whether the port that the config insists on is taken."""
    port = plan.config.cluster.master_port
    if port is None or plan.config.cluster.scheduler is not Scheduler.local:
        return []
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch does: a port just left is free
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return [
                _broken(
                    "NCC-05",
                    f"port {port} cannot be used: {error.strerror}",
                    "cluster.master_port",
                    "choose another, or null to have a free one picked",
                )
            ]
    return []


def _broken(rule: str, what: str, where: str, fix: str | None = None) -> Finding:
    """Return the finding; the fix is the rule's where nothing more exact is known."""
    known = RULES[rule]
    return Finding(known.id, what, where, fix or known.fix)
