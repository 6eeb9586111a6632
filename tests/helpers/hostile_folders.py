"""Run folders as a hostile author leaves them: devices in the place of files, false values, names of other jobs."""

import fcntl
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import IO

from bench.backends.slurm import script
from bench.mlperf import result as results
from bench.planning import compose
from bench.runs import ledger, manifest
from bench.runs import status as statuses
from bench.runs.status import Ending, Status
from helpers.clock import Clock
from helpers.planted_runs import plant

ESCAPES = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\r\n"
OTHER_USER_ID = 65534
Damage = Callable[[Path], None]
_held: list[IO[str]] = []
"""Files whose locks this process holds."""


def honest(folder: Path, clock: Clock) -> Path:
    """Write a run on Slurm that has ended with a valid trial; every verb reads it without an error."""
    plan, config_yaml = compose.for_run(["task=lora_tiny", "cluster=slurm_test"])
    log = plant(folder, clock, 100.0, plan=plan) / "result_0.txt"
    ledger.end(folder, 0, ledger.Outcome.valid, minutes=results.parse(log).minutes)
    (folder / "rank_logs").mkdir()
    (folder / "rank_logs/trial_0.out").write_text("step 1\n")
    (folder / "slurm-7.out").write_text("job 7, attempt 0, on dgx-1\n")
    (folder / "job.sbatch").write_text(script.script(plan))
    (folder / "config.yaml").write_text(config_yaml)
    (folder / "job.json").write_text(json.dumps({"backend": "slurm", "jobs": [{"id": "7", "submitted": 1.0}]}))
    statuses.write(folder, Status(outcome=Ending.valid, exit_code=0))
    manifest.write(folder)
    return folder


def _replace(name: str, by: Damage) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        by(folder / name)

    return damage


def _sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


def _socket(path: Path) -> None:
    """A socket by a short path: addresses have at most 107 bytes."""
    here = Path.cwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(path.name)
    finally:
        os.chdir(here)


def _write(name: str, text: str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)

    return damage


def _job(**content: object) -> Damage:
    return _write("job.json", json.dumps(content))


def _unended(damage: Damage) -> Damage:
    """The same in a run that has not ended, so that its backend is queried."""

    def both(folder: Path) -> None:
        for name in ("status.json", "manifest.json", "ledger.json", "result_0.txt", "slurm-7.out"):
            (folder / name).unlink()
        (folder / "rank_logs/trial_0.out").unlink()
        damage(folder)

    return both


def _lock(text: str) -> Damage:
    """A local run whose lock names a process, and is held."""

    def damage(folder: Path) -> None:
        (folder / "job.json").unlink(missing_ok=True)
        lock = (folder / ".run.lock").open("w")
        lock.write(text.replace("HOST", socket.gethostname()))
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        _held.append(lock)

    return damage


def release() -> None:
    while _held:
        _held.pop().close()


def _plan(change: Callable[[dict], object]) -> Damage:  # type: ignore[type-arg]
    def damage(folder: Path) -> None:
        plan = json.loads((folder / "plan.json").read_text())
        change(plan)
        (folder / "plan.json").write_text(json.dumps(plan))

    return damage


def _owned(name: str) -> Damage:
    def damage(folder: Path) -> None:
        if os.geteuid() == 0:
            os.chown(folder / name, OTHER_USER_ID, OTHER_USER_ID)

    return damage


def _mode(name: str, mode: int) -> Damage:
    return lambda folder: (folder / name).chmod(mode)


def _modules(folder: Path) -> None:
    for name in ("argparse", "json", "typing", "yaml"):
        (folder / f"{name}.py").write_text("import os\nos._exit(42)\n")


NO_FILES: dict[str, Damage] = {
    "a pipe": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a terabyte of zeros": _sparse,
    "a folder": lambda path: path.mkdir(),
    "a socket": _socket,
}
READ = ("job.json", "plan.json", "ledger.json", "status.json", "manifest.json", "config.yaml", "job.sbatch")
READ += ("result_0.txt", "rank_logs/trial_0.out", "slurm-7.out", ".run.lock")
DEEP = "[" * 100_000

HOSTILE: dict[str, Damage] = {
    **{f"{name} is {what}": _replace(name, by) for name in READ for what, by in NO_FILES.items()},
    "a pipe as the lock of the ledger": _replace(".ledger.lock", os.mkfifo),
    "a pipe as the rows of telemetry": _replace("rank_logs/trial_0.gpus_a.csv", os.mkfifo),
    "a pipe as the error of a rank": _replace("rank_logs/trial_0_rank_0.error", os.mkfifo),
    "a pipe as the signature": _replace("manifest.json.sig", os.mkfifo),
    "a link to a secret as a log": _replace("result_0.txt", lambda path: path.symlink_to("/etc/shadow")),
    "rank_logs is a link": _replace("rank_logs.old", lambda path: path.symlink_to("/etc")),
    "Ray at the author's server": _unended(_job(backend="ray", jobs=[{"id": "x@http://127.0.0.1:9"}])),
    "Ray with an address of the author": _unended(_job(backend="ray", jobs=[], address="http://127.0.0.1:9")),
    "Ray that imports a module": _unended(_job(backend="ray", jobs=[{"id": "x@evilmod://a"}], address="evilmod://a")),
    "Ray that sends a password": _unended(_job(backend="ray", jobs=[{"id": "x@http://u:p@127.0.0.1:9"}])),
    "Kubernetes elsewhere": _unended(_job(backend="kubernetes", jobs=[{"id": "job/default/a@else"}])),
    "a backend with escapes": _unended(_job(backend=ESCAPES, jobs=[])),
    "an id with escapes": _unended(_job(backend="slurm", jobs=[{"id": f"7{ESCAPES}"}])),
    "an id that is an option": _unended(_job(backend="slurm", jobs=[{"id": "--user=root"}])),
    "the job of another run": _unended(_job(backend="slurm", jobs=[{"id": "8"}])),
    "ids of other types": _unended(_job(backend="slurm", jobs=[1, None, {"id": ["7"]}, {"id": {}}], arguments=7)),
    "jobs are no list": _unended(_job(backend="slurm", jobs={"id": "7"})),
    "shared with a folder above": _unended(_job(backend="slurm", jobs=[{"id": "7"}], shared="../..", runs=["../.."])),
    "deep job.json": _write("job.json", DEEP),
    "a lock that names init": _lock("HOST 1"),
    "a lock that names all processes": _lock("HOST -1"),
    "a lock that names the group": _lock("HOST 0"),
    "a lock that names the reader": _lock(f"HOST {os.getppid()}"),
    "a lock with a number too large": _lock("HOST 99999999999999999999"),
    "a lock with rubbish": _lock(ESCAPES),
    "a lock of another host": _lock(f"{ESCAPES.strip()} 7"),
    "deep ledger": _write("ledger.json", DEEP),
    "a ledger with escapes": _write("ledger.json", json.dumps([{"trial": 0, "outcome": ESCAPES}])),
    "a ledger with reasons with escapes": _write(
        "ledger.json", json.dumps([{"trial": 0, "outcome": "invalid", "not_as_planned": [ESCAPES], "attempts": 7}])
    ),
    "a ledger of numbers": _write("ledger.json", json.dumps([{"trial": 10**400, "outcome": "valid"}, 7])),
    "deep status": _write("status.json", DEEP),
    "a status with escapes": _write(
        "status.json",
        json.dumps(dict.fromkeys(("what", "fix", "while", "evidence", "file"), ESCAPES) | {"outcome": "failed"}),
    ),
    "a status of other types": _write("status.json", json.dumps({"outcome": ["failed"], "exit_code": {}})),
    "deep plan": _write("plan.json", DEEP),
    "a plan with escapes": _plan(lambda plan: plan["config"]["task"].update(name=ESCAPES, summary=ESCAPES)),
    "a plan whose log is elsewhere": _plan(lambda plan: plan["trials"][0].update(log="/etc/passwd")),
    "a plan whose log is a device": _plan(lambda plan: plan["trials"][0].update(log="/dev/zero")),
    "deep manifest": _write("manifest.json", DEEP),
    "a manifest of files elsewhere": _write(
        "manifest.json", json.dumps({"files": {"../../../etc/passwd": {"bytes": 1, "sha256": "0"}}, "folders": ["/"]})
    ),
    "names with escapes": _write(f"rank_logs/{ESCAPES.strip()}.out", f"{ESCAPES}\n"),
    "a log with a name with escapes": _write(f"result_{ESCAPES.strip()}.txt", f":::MLLOG {ESCAPES}\n"),
    "a log with escapes": _write(
        "result_0.txt",
        ":::MLLOG "
        + json.dumps({"time_ms": 1, "event_type": "INTERVAL", "key": "seed", "value": ESCAPES, "metadata": {}}),
    ),
    "an error of a rank with escapes": _write(
        "rank_logs/trial_0_rank_0.error", json.dumps({"what": ESCAPES, "fix": ESCAPES, "rule": "RUN-01", "time": "x"})
    ),
    "tags with escapes": _write("tags.json", json.dumps({"tags": [ESCAPES, "ok", 7, {}], "note": ESCAPES})),
    "tags of other types": _write("tags.json", json.dumps({"tags": {"a": 1}, "note": ["x"]})),
    "deep tags": _write("tags.json", DEEP),
    "a pipe as the tags": _replace("tags.json", os.mkfifo),
    "a command line of other types": _write("config.yaml", '# launched: {"overrides": [1], "config_dir": 7}\n'),
    "a deep command line": _write("config.yaml", f"# launched: {DEEP}\n"),
    "a command line that names a program": _write(
        "config.yaml", '# launched: {"overrides": ["engine=command", "a=\\u001b[2J"], "config_dir": "/nosuch"}\n'
    ),
    "YAML that constructs": _write("config.yaml", "a: !!python/object/apply:os._exit [42]\n"),
    "Python modules": _modules,
    "the folder of another user": _owned("."),
    "a script of another user": _owned("job.sbatch"),
    "a plan of another user": _owned("plan.json"),
    "a folder that all can write to": _mode(".", 0o777),
    "a script that all can write to": _mode("job.sbatch", 0o666),
    "a ledger that a group can write to": _mode("ledger.json", 0o664),
    "logs that all can write to": _mode("rank_logs", 0o777),
    "a plan that cannot be read": _mode("plan.json", 0o000),
}
"""What a hostile author changes in an honest folder."""

UNOWNED = tuple(name for name in HOSTILE if name.endswith(("of another user", "can write to")))
"""Folders with which a user who is not their only author must not act."""
