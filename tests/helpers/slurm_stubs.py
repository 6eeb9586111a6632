"""Run a job's script as Slurm would, with stubs of Slurm's commands that record their calls."""

import shlex
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

STUB = """#!/bin/sh
{ printf '%s\\0' ::CALL "${0##*/}" "$@" ::ENV; env -0; } >>"$RECORD"
"""
STUBS = ("srun", "sbatch", "squeue", "scontrol", "enroot")
SITE = {"DATADIR": "data", "MODEL": "model", "LOGDIR": "logs", "CONT": "a.sqsh"}
"""Below the folder of the test."""


@dataclass(frozen=True)
class ScriptRun:
    """The exit code, output and recorded calls of a script."""

    code: int
    output: str
    calls: list[tuple[list[str], dict[str, str]]]
    """Arguments and environment of each command that was started."""
    root: Path

    def sruns(self) -> list[list[str]]:
        return [argv for argv, _ in self.calls if argv[0] == "srun"]


def run_script(text: str, root: Path, *words: object, acts: Mapping[str, str] | None = None, **more: str) -> ScriptRun:
    """Run a script as Slurm would. `acts` has what a command does after its call was recorded, in sh."""
    (root / "bin").mkdir(exist_ok=True)
    for name in STUBS:
        (root / "bin" / name).write_text(STUB + (acts or {}).get(name, ""))
        (root / "bin" / name).chmod(0o755)
    (root / "slurm_script").write_text(text)
    (root / "cwd").mkdir(exist_ok=True)
    record = root / "record"
    record.unlink(missing_ok=True)
    env = {name: str(root / value) for name, value in SITE.items()}
    env |= {"PATH": f"{root}/bin:/usr/bin:/bin", "HOME": str(root / "cwd"), "RECORD": str(record)}
    env |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "dgx-[0-1]", **more}
    argv = ["bash", str(root / "slurm_script"), *map(str, words)]
    done = subprocess.run(argv, cwd=root / "cwd", env=env, capture_output=True, text=True, errors="replace", timeout=60)
    raw = record.read_bytes().decode() if record.exists() else ""
    return ScriptRun(
        done.returncode, done.stdout + done.stderr, [_call(one) for one in raw.split("::CALL\0")[1:]], root
    )


def _call(raw: str) -> tuple[list[str], dict[str, str]]:
    words, _, env = raw.partition("::ENV\0")
    return words.split("\0")[:-1], dict(item.partition("=")[::2] for item in env.split("\0")[:-1])


def options(text: str) -> dict[str, str]:
    """Return the options that sbatch reads: #SBATCH lines until the first line that is not a comment."""
    parsed: dict[str, str] = {}
    for line in text.split("\n"):
        if not line.startswith("#"):
            return parsed
        if line.startswith("#SBATCH"):
            (option,) = shlex.split(line.removeprefix("#SBATCH"))
            name, _, value = option.removeprefix("--").partition("=")
            assert name not in parsed
            parsed[name] = value
    return parsed
