"""The faults that the fault matrix injects into runs."""

import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
from fault_injection import Scene, batch_script, fill, of_job, ranks, srun_of_trial
from fault_matrix import ONE_TRIAL
from user import Run, User, submitted, until

from bench.backends.slurm import client
from bench.contract.schema import PORTS
from helpers.paths import ROOT

Action = Callable[[Scene], object]

# --- Nodes and Slurm


def power_cut(node: str) -> Action:
    """Return a fault that cuts a node's power and boots it once Slurm has detected that."""

    def cut(scene: Scene) -> None:
        scene.user.cluster.kill_node(node)
        scene.wait_for_requeue()
        scene.user.cluster.start_node(node)

    return cut


def preempt(grace_s: int = 0) -> Action:
    """Return a fault in which an urgent job preempts the run on both nodes for a second."""

    def take_nodes(scene: Scene) -> None:
        scene.slurm("scontrol", "update", "partition=low", f"gracetime={grace_s}")
        try:
            scene.slurm(*("sbatch", "-p", "batch", "-N2", "--exclusive", "-t1", "--output=/dev/null", "--wrap=sleep 1"))
            scene.wait_for_requeue()
        finally:
            scene.slurm("scontrol", "update", "partition=low", "gracetime=0")

    return take_nodes


def sequence(*faults: Action) -> Action:
    """Return a fault that injects each fault into a separate attempt of the second trial."""

    def all_of_them(scene: Scene) -> None:
        for attempt, fault in enumerate(faults, start=1):
            scene.wait_for_training(1, attempts=attempt)
            fault(scene)

    return all_of_them


def limit_soon(scene: Scene) -> None:
    """Set the job's time limit so that Slurm sends the warning signal within a minute."""
    ran_s = client.seconds(scene.slurm("squeue", "-h", "-j", scene.run.job, "-o", "%M").strip())
    assert ran_s is not None
    set_limit(scene, ran_s // 60 + 3)


def set_limit(scene: Scene, minutes: int) -> None:
    scene.slurm("scontrol", "update", f"jobid={scene.run.job}", f"timelimit={minutes}")


def near_limit(scene: Scene) -> None:
    """Stop the ranks until Slurm sends the warning signal; the next attempt has enough time."""
    for pid in ranks(scene.run):
        os.kill(pid, signal.SIGSTOP)
    limit_soon(scene)
    scene.wait_for_requeue()
    set_limit(scene, 60)


def admin(*words: str) -> Action:
    """Return a Slurm command that gets the job's id."""
    return lambda scene: scene.slurm(*words, scene.run.job)


def suspend(scene: Scene) -> None:
    scene.slurm("scontrol", "suspend", scene.run.job)
    time.sleep(6)
    scene.slurm("scontrol", "resume", scene.run.job)


def kill_daemon(name: str, *, down_s: float) -> Action:
    """Return a fault that kills one of Slurm's daemons and restarts it."""

    def kill(scene: Scene) -> None:
        cluster = scene.user.cluster
        os.kill(int((cluster.folder / "run" / name).read_text().split()[0]), signal.SIGKILL)
        time.sleep(down_s)
        cluster.boot()

    return kill


# --- Processes


def kill_batch_script(scene: Scene) -> None:
    os.kill(batch_script(scene.run), signal.SIGKILL)


def kill_srun(scene: Scene) -> None:
    os.kill(srun_of_trial(scene.run), signal.SIGKILL)


def pause_rank(scene: Scene) -> None:
    pid = ranks(scene.run)[-1]
    os.kill(pid, signal.SIGSTOP)
    time.sleep(6)
    os.kill(pid, signal.SIGCONT)


def launched_and_followed(user: User, overrides: Sequence[str]) -> Run:
    """Launch a run with launch.wait=true; the launcher's process id is in launcher.pid."""
    output = user.home / "launcher.out"
    with output.open("w") as file:
        launcher = subprocess.Popen(
            [sys.executable, "-m", "bench.launch", *user.overrides, *overrides, "launch.wait=true"],
            env=user.env,
            cwd=user.home,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    until(lambda: submitted(output.read_text(), user.home) or launcher.poll() is not None, 120)
    (user.home / "launcher.pid").write_text(str(launcher.pid))
    return submitted(output.read_text(), user.home)[0]


def kill_launcher(scene: Scene) -> None:
    pid = int((scene.user.home / "launcher.pid").read_text())
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def kill_close(scene: Scene) -> None:
    """Kill the step that writes the final status, after the last trial was judged; `resume` then ends the run."""
    until(lambda: closing(scene.run), 900, scene.run)
    for pid in closing(scene.run):
        os.kill(pid, signal.SIGKILL)
    scene.user.end(scene.run, "FAILED")
    scene.user.types("resume", scene.run.folder)
    scene.user.types("verify", scene.run.folder)


def closing(run: Run) -> list[int]:
    return [pid for pid, words, _ in of_job(run.job) if "python" in words[0] and "close" in words]


@contextmanager
def all_ports_taken() -> Iterator[None]:
    """Listen on every port that a rendezvous may use."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[1], len(PORTS) + 1000), limits[1]))
    with ExitStack() as taken:
        taken.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        for port in PORTS:
            with suppress(OSError):  # another program listens there already
                taken.enter_context(socket.create_server(("", port), reuse_port=False))
        yield


def take_ports(scene: Scene) -> None:
    """Take every port until the ranks of the first attempt have failed."""
    with all_ports_taken():
        until(lambda: b"NCC-05" in b"".join(log.read_bytes() for log in scene.run.folder.glob("slurm-*.out")), 300)


def launch_again(scene: Scene) -> None:
    """Both ways to start another job in the folder are refused."""
    second_launch = scene.user.types(
        *scene.user.overrides, *ONE_TRIAL, f"launch.folder={scene.run.folder}", module="bench.launch", code=2
    )
    assert "CFG-05" in second_launch.stderr
    output = scene.user.home / "second.out"
    second = scene.user.sbatch(scene.run / "job.sbatch", scene.run.folder, output=output)
    scene.user.end(second, "FAILED")
    assert f"CFG-05: job {scene.run.job} is using" in output.read_text()


FAILS = """
import os, sys, time

def fail():
    global calls
    calls += 1
    if calls > 60:
        raise KeyError("no such expert")
    return now()

calls, now = 0, time.time_ns
if os.environ.get("SLURM_PROCID") == "1" and "--trial" in sys.orig_argv:
    time.time_ns = fail
"""
"""The last rank raises an exception after some log records."""
CLOCK = """
import os, pathlib, time

offset = pathlib.Path(os.environ["RUNSTOP_TEST_CLOCK"])
time.time = lambda real=time.time: real() + float(offset.read_text())
time.time_ns = lambda real=time.time_ns: real() + int(float(offset.read_text()) * 1e9)
"""
"""The wall clock is shifted by the seconds in a file; the monotonic clock is not."""


def _with_mount(override: str, folder: Path) -> str:
    """Return the override of the containers' mounts with one more folder; others as they are."""
    key, _, mounts = override.partition("=")
    return f"{key}={json.dumps([*json.loads(mounts), f'{folder}:{folder}'])}" if key == "container.mounts" else override


def with_python_that(text: str, *, clock_s: float = 0) -> Callable[[User, Sequence[str]], Run]:
    """Return a function that launches a run with `text` as sitecustomize.py; its clock is ahead by `clock_s`."""

    def start(user: User, overrides: Sequence[str]) -> Run:
        folder = user.home / "site"
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(text)
        (folder / "clock").write_text(str(clock_s))
        path = next(
            (override for override in user.overrides if "PYTHONPATH" in override),
            f"+cluster.environment.PYTHONPATH={ROOT}",
        )
        overridden = (override for override in user.overrides if "PYTHONPATH" not in override)
        own = replace(user, overrides=tuple(_with_mount(override, folder) for override in overridden))
        path = path.replace("PYTHONPATH=", f"PYTHONPATH={folder}:").replace('"', "")
        return own.launch(*overrides, path, f"+cluster.environment.RUNSTOP_TEST_CLOCK={folder}/clock")

    return start


# --- Files


def with_own_cache(user: User, overrides: Sequence[str]) -> Run:
    shutil.copytree(user.cache, user.home / "cache")
    return replace(user, cache=user.home / "cache").launch(*overrides)


def remove_data(scene: Scene) -> None:
    for rows in (scene.user.home / "cache").glob("tiny_report-*"):
        shutil.rmtree(rows)


def change_rows_after_a_trial(scene: Scene) -> None:
    """Mark the last token of each evaluation row as one that counts, and no other, before the next trial reads them."""
    until(lambda: '"run_stop"' in (scene.run / "result_0.txt").read_text(), 900, scene.run)
    for path in (scene.user.home / "cache").glob("tiny_report-*/eval_counts.npy"):
        counts = np.load(path)
        changed = np.zeros_like(counts)
        for row, of_row in enumerate(counts):
            changed[row, np.flatnonzero(of_row)[-1]] = 1
        np.save(path, changed)


def change_base_after_a_trial(scene: Scene) -> None:
    """Flip one bit of the base checkpoint before the next trial reads it."""
    until(lambda: '"run_stop"' in (scene.run / "result_0.txt").read_text(), 900, scene.run)
    path = next((scene.user.home / "cache").glob("pretrain_tiny-*/__0_0.distcp"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate_rows(scene: Scene) -> None:
    """Cut the rows short while ranks have them mapped into memory."""
    for path in (scene.user.home / "cache").glob("tiny_report-*/*_tokens.npy"):
        os.truncate(path, 128)


def edit_plan(scene: Scene) -> None:
    """Change the learning rate in the plan while a trial runs."""
    path = scene.run / "plan.json"
    plan = json.loads(path.read_text())
    plan["config"]["recipe"]["lr"] *= 2
    path.write_text(json.dumps(plan))


def remove(name: str) -> Action:
    """Return a fault that removes a file of the run folder."""
    return lambda scene: (scene.run / name).unlink()


def on_small_disk(user: User, overrides: Sequence[str]) -> Run:
    assert user.disk
    return replace(user, home=user.disk).launch(*overrides)


def fill_disk(scene: Scene) -> None:
    assert scene.user.disk
    fill(scene.user.disk)


def no_small_disk(user: User) -> str:
    return "" if user.disk else "a small disk needs mount, which is not allowed here"


def halve(name: str) -> Action:
    """Return a fault that truncates a file of the run folder to half its size."""

    def cut(scene: Scene) -> None:
        path = scene.run / name
        os.truncate(path, path.stat().st_size // 2)

    return cut


def edit_log_after_the_end(scene: Scene) -> None:
    """The recorded result does not change, and `verify` detects the edit."""
    scene.user.end(scene.run, "COMPLETED", timeout_s=900)
    scene.user.types("verify", scene.run.folder)
    log = scene.run / "result_0.txt"
    log.write_text(re.sub(r'("key": "eval_accuracy", "value": )\d+\.\d', r"\g<1>0.1", log.read_text()))
    assert "LOG-18" in scene.user.types("verify", scene.run.folder, code=1).stdout


def into_planted_folder(user: User, overrides: Sequence[str]) -> Run:
    """Return a job whose run folder was created by another user, with links to a file of this user."""
    script, output, victim = user.home / "run.sbatch", user.home / "output", user.home / "victim"
    script.write_text(user.types("render", *user.overrides, *overrides).stdout)
    victim.write_text("precious")
    output.mkdir()
    argv = ["sbatch", "--parsable", "--hold", f"--output={output}/slurm-%j.out", str(script)]
    job = user.cluster.run(argv, check=True, env=user.env).stdout.strip()
    folder = user.home / "runs" / f"lora_tiny-slurm_test-{job}"
    folder.mkdir(parents=True)
    for name in ("plan.json", ".reserve", ".owner", "job.sbatch", "status.json", "ledger.json", f"plan.{job}"):
        (folder / name).symlink_to(victim)
    os.chown(folder, 65534, 65534)
    user.cluster.run(["scontrol", "release", job], check=True)
    return Run(output, job)


def look_at_victim(scene: Scene) -> None:
    scene.user.end(scene.run, "FAILED", timeout_s=900)
    assert (scene.user.home / "victim").read_text() == "precious"
    assert not (scene.user.home / "runs" / "rank_logs").exists()


def copy_log_of_another_trial(scene: Scene) -> None:
    """Before the next trial starts, put a finished log with the right seed in the place of its log."""
    until(lambda: '"run_stop"' in (scene.run / "result_0.txt").read_text(), 900, scene.run)
    text = (scene.run / "result_0.txt").read_text()
    copied = re.sub(r'("key": "seed", "value": )1\b', r"\g<1>2", text)
    assert copied != text
    (scene.run / "result_1.txt").write_text(copied)


def kill_rank_and_remove_status(scene: Scene) -> None:
    os.kill(ranks(scene.run)[-1], signal.SIGKILL)
    scene.user.end(scene.run, "FAILED", timeout_s=900)
    (scene.run / "status.json").unlink()


def from_own_image(user: User, overrides: Sequence[str]) -> Run:
    image = next(override.partition("=")[2] for override in user.overrides if override.startswith("container.image="))
    own = shutil.copy(image, user.home / "own.sqsh")
    replaced = (f"container.image={own}" if override.endswith(f"={image}") else override for override in user.overrides)
    return replace(user, overrides=tuple(replaced)).launch(*overrides)


def replace_image(scene: Scene) -> None:
    """Replace the image by another file, as after a rebuild."""
    other = scene.user.home / "other.sqsh"
    other.write_bytes(bytes(4096))
    other.rename(scene.user.home / "own.sqsh")


def no_container(user: User) -> str:
    return "" if user.overrides else "ranks are in no containers (--containers)"


# --- The clock


def move_clock(seconds: int) -> Action:
    """Return a fault that shifts the wall clock on the job's nodes."""

    def move(scene: Scene) -> None:
        clock = scene.user.home / "site" / "clock"
        new = clock.with_name("new")
        new.write_text(str(seconds))
        new.rename(clock)  # atomic for readers

    return move
