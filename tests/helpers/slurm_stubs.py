"""Stubs of Slurm's commands: a queue for submissions, and a job's script that runs as Slurm would run it."""

import shlex
import stat
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


class Slurm:
    """Stubs of sbatch, squeue and scancel on PATH; each queued job is a file with its arguments."""

    def __init__(self, folder: Path) -> None:
        self.bin, self.queue, self.calls = folder / "bin", folder / "queue", folder / "calls"
        self.bin.mkdir()
        self.queue.mkdir()
        self.calls.touch()
        self.stub("sbatch", "echo 100", queues=True)
        self.stub(
            "squeue",
            f"""for job in {self.queue}/*; do
  read -r arguments <"$job"; id=${{job##*/}}
  if [[ $* == *Command* ]]; then echo "$id|/path/job.sbatch ${{arguments##* }}|"
  elif [[ $* == *"$id"* ]]; then echo "$id|PENDING|Priority||0|0:00|1:00:00|N/A|"; fi
done""",
        )
        self.stub("scancel", f"rm {self.queue}/$1")
        self.stub("sacct", "exit 1")

    def stub(self, command: str, script: str, *, queues: bool = False) -> None:
        """Replace a command by a script; with `queues`, the job is queued first, before the call is counted."""
        queued = f'echo "$*" >{self.queue}/100' if queues else ":"
        head = f'#!/bin/bash\nshopt -s nullglob\n{queued}\necho "{command} $*" >>{self.calls}\n'
        (self.bin / command).write_text(f"{head}{script}\n")
        (self.bin / command).chmod(stat.S_IRWXU)

    def clear_queue(self) -> None:
        for job in self.queue.iterdir():
            job.unlink()

    def num_calls(self, command: str) -> int:
        return sum(line.startswith(f"{command} ") for line in self.calls.read_text().splitlines())
