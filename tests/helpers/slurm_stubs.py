"""Run a job's script as Slurm would, in a folder where Slurm's commands only write down how they were called."""

import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

STUB = """#!/bin/sh
{ printf '%s\\0' ::CALL "${0##*/}" "$@" ::ENV; env -0; } >>"$RECORD"
"""
STUBS = ("srun", "sbatch", "squeue", "scontrol", "enroot")
SITE = {"DATADIR": "data", "MODEL": "model", "LOGDIR": "logs", "CONT": "a.sqsh"}
"""Below the folder of the test."""


@dataclass(frozen=True)
class Ran:
    """What a script did in a folder with nothing but stubs of Slurm's commands."""

    code: int
    said: str
    calls: list[tuple[list[str], dict[str, str]]]
    """Words and environment of each command that was started."""
    root: Path

    def sruns(self) -> list[list[str]]:
        return [argv for argv, _ in self.calls if argv[0] == "srun"]


def ran(text: str, root: Path, *words: object, **more: str) -> Ran:
    """Run a script as Slurm would."""
    (root / "bin").mkdir(exist_ok=True)
    for name in STUBS:
        (root / "bin" / name).write_text(STUB)
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
    return Ran(done.returncode, done.stdout + done.stderr, [_call(one) for one in raw.split("::CALL\0")[1:]], root)


def _call(raw: str) -> tuple[list[str], dict[str, str]]:
    words, _, env = raw.partition("::ENV\0")
    return words.split("\0")[:-1], dict(item.partition("=")[::2] for item in env.split("\0")[:-1])


def options(text: str) -> dict[str, str]:
    """Return what sbatch reads of a script: #SBATCH lines until the first line that is no comment."""
    found: dict[str, str] = {}
    for line in text.split("\n"):
        if not line.startswith("#"):
            return found
        if line.startswith("#SBATCH"):
            (word,) = shlex.split(line.removeprefix("#SBATCH"))
            name, _, value = word.removeprefix("--").partition("=")
            assert name not in found
            found[name] = value
    return found
