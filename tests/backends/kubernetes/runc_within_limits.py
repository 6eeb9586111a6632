#!/usr/bin/env python3
"""Start runc for containerd with limits that this machine allows.

In some sandboxes root lacks CAP_SYS_RESOURCE, so limits above the hard limits and lower OOM scores are refused. They
are reduced to the limits of this machine.
"""

import json
import os
import resource
import sys
from pathlib import Path


def bundle(words: list[str]) -> Path:
    for number, argument in enumerate(words):
        if argument in ("-b", "--bundle"):
            return Path(words[number + 1])
        if argument.startswith("--bundle="):
            return Path(argument.partition("=")[2])
    return Path()


def lower(path: Path) -> None:
    container = json.loads(path.read_text())
    process = container["process"]
    for limit in process.get("rlimits") or []:
        hard = resource.getrlimit(getattr(resource, limit["type"]))[1]
        if hard != resource.RLIM_INFINITY:
            limit["hard"] = min(limit["hard"], hard)
        limit["soft"] = min(limit["soft"], limit["hard"])
    process["oomScoreAdj"] = max(0, process.get("oomScoreAdj") or 0)
    path.write_text(json.dumps(container))


if any(argument in ("create", "run") for argument in sys.argv[1:]):
    lower(bundle(sys.argv[1:]) / "config.json")
os.execv("/usr/sbin/runc", ["runc", *sys.argv[1:]])
