"""Log NCCL's transport from its own log, and end a run that does not use the requested one."""

import os
from pathlib import Path

from bench.contract import mllog, transport
from bench.contract.plan import Plan
from bench.contract.schema import Device
from bench.errors import SubmitError
from jobs.ranks import process_group
from jobs.ranks.identity import Rank


def log_used(plan: Plan, who: Rank, folder: Path, log: mllog.Writer) -> None:
    """Log the transport that NCCL uses, after its first collectives; nothing if the run requests none.

    Raises:
        SubmitError: NCCL used another transport.
    """
    if plan.config.cluster.device is not Device.cuda or not transport.has_settings(plan.environment):
        return
    own = transport.read(_own_log(plan, folder))
    used = transport.together(filter(None, process_group.gathered(who, own)))
    log.event(
        mllog.NCCL_TRANSPORT,
        ",".join(used.nets) or "none",
        local=",".join(used.local) or "none",
        interfaces=used.devices,
        lines=list(used.lines),
    )
    if wrong := transport.contradiction(transport.requested(plan.environment), used):
        raise SubmitError(
            wrong,
            where="cluster.environment",
            fix="set the NCCL variables to a network that all nodes have; the record nccl_transport in the log shows "
            "the network that NCCL chose",
            rule="NCC-02",
        )


def _own_log(plan: Plan, folder: Path) -> str:
    """Return NCCL's log of this process; empty if there is none."""
    pattern = plan.environment.get("NCCL_DEBUG_FILE", transport.LOG)
    name = pattern.replace("%h", os.uname().nodename).replace("%p", str(os.getpid()))
    host = os.uname().nodename.partition(".")[0]
    short = pattern.replace("%h", host).replace("%p", str(os.getpid()))
    for path in (folder / name, folder / short):
        if path.is_file():
            return path.read_text(errors="replace")
    return ""
