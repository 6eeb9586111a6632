"""What is done to the runs of the fault matrix, row by row."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from breaking import Scene, batch_script, fill, ranks, srun_of_trial
from matrix import ONE_TRIAL
from user import Run, User, submitted, until

from bench.backends.slurm import client
from helpers.paths import ROOT

Inflict = Callable[[Scene], object]

# --- Nodes and Slurm


def power_cut(node: str) -> Inflict:
    """Return what cuts a node's power, and brings it back once Slurm has noticed."""

    def cut(scene: Scene) -> None:
        scene.user.cluster.kill_node(node)
        scene.wait_for_requeue()
        scene.user.cluster.start_node(node)

    return cut


def preempt(grace_s: int = 0) -> Inflict:
    """Return what lets an urgent job take both nodes for a second."""

    def take_nodes(scene: Scene) -> None:
        scene.slurm("scontrol", "update", "partition=low", f"gracetime={grace_s}")
        try:
            scene.slurm(*("sbatch", "-p", "batch", "-N2", "--exclusive", "-t1", "--output=/dev/null", "--wrap=sleep 1"))
            scene.wait_for_requeue()
        finally:
            scene.slurm("scontrol", "update", "partition=low", "gracetime=0")

    return take_nodes


def one_after_the_other(*faults: Inflict) -> Inflict:
    """Return what inflicts each fault on an attempt of its own at the second trial."""

    def all_of_them(scene: Scene) -> None:
        for attempt, fault in enumerate(faults, start=1):
            scene.wait_for_training(1, attempts=attempt)
            fault(scene)

    return all_of_them


def limit_soon(scene: Scene) -> None:
    """Leave the job 2 to 3 minutes, so that Slurm warns it within one."""
    ran_s = client.seconds(scene.slurm("squeue", "-h", "-j", scene.run.job, "-o", "%M").strip())
    assert ran_s is not None
    set_limit(scene, ran_s // 60 + 3)


def set_limit(scene: Scene, minutes: int) -> None:
    scene.slurm("scontrol", "update", f"jobid={scene.run.job}", f"timelimit={minutes}")


def near_limit(scene: Scene) -> None:
    """Hold the ranks until Slurm warns the job; the next attempt has all the time that it needs."""
    for pid in ranks(scene.run):
        os.kill(pid, signal.SIGSTOP)
    limit_soon(scene)
    scene.wait_for_requeue()
    set_limit(scene, 60)


def admin(*words: str) -> Inflict:
    """Return a command of Slurm's that gets the job's id."""
    return lambda scene: scene.slurm(*words, scene.run.job)


def suspend(scene: Scene) -> None:
    scene.slurm("scontrol", "suspend", scene.run.job)
    time.sleep(6)
    scene.slurm("scontrol", "resume", scene.run.job)


def kill_daemon(name: str, *, down_s: float) -> Inflict:
    """Return what kills one of Slurm's daemons, and starts it again."""

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
    """Return a run whose launcher follows it; the launcher's process id is kept beside it."""
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


def launch_again(scene: Scene) -> None:
    """Both ways to start another job in the folder are refused."""
    again = scene.user.types(
        *scene.user.overrides, *ONE_TRIAL, f"launch.folder={scene.run.folder}", module="bench.launch", code=2
    )
    assert "CFG-05" in again.stderr
    said = scene.user.home / "second.out"
    second = scene.user.sbatch(scene.run / "job.sbatch", scene.run.folder, output=said)
    scene.user.end(second, "FAILED")
    assert f"CFG-05: job {scene.run.job} works in" in said.read_text()


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
"""The last rank fails in its own code after some records."""
CLOCK = """
import os, pathlib, time

offset = pathlib.Path(os.environ["BENCH_TEST_CLOCK"])
time.time = lambda real=time.time: real() + float(offset.read_text())
time.time_ns = lambda real=time.time_ns: real() + int(float(offset.read_text()) * 1e9)
"""
"""The time of day is off by the seconds in a file; the clock that counts from the boot is not."""


def with_python_that(text: str) -> Callable[[User, Sequence[str]], Run]:
    """Return what launches a run whose Python runs a text, as sitecustomize, whenever it starts."""

    def start(user: User, overrides: Sequence[str]) -> Run:
        folder = user.home / "site"
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(text)
        (folder / "clock").write_text("0")
        path = next(
            (word for word in user.overrides if "PYTHONPATH" in word), f"+cluster.environment.PYTHONPATH={ROOT}"
        )
        own = replace(user, overrides=tuple(word for word in user.overrides if "PYTHONPATH" not in word))
        path = path.replace("PYTHONPATH=", f"PYTHONPATH={folder}:").replace('"', "")
        return own.launch(*overrides, path, f"+cluster.environment.BENCH_TEST_CLOCK={folder}/clock")

    return start


# --- Files


def with_own_cache(user: User, overrides: Sequence[str]) -> Run:
    shutil.copytree(user.cache, user.home / "cache")
    return replace(user, cache=user.home / "cache").launch(*overrides)


def remove_data(scene: Scene) -> None:
    for rows in (scene.user.home / "cache").glob("tiny_report-*"):
        shutil.rmtree(rows)


def on_small_disk(user: User, overrides: Sequence[str]) -> Run:
    assert user.disk
    return replace(user, home=user.disk).launch(*overrides)


def fill_disk(scene: Scene) -> None:
    assert scene.user.disk
    fill(scene.user.disk)


def no_small_disk(user: User) -> str:
    return "" if user.disk else "a small disk needs mount, which is not allowed here"


def halve(name: str) -> Inflict:
    """Return what cuts a file of the run folder in the middle."""

    def cut(scene: Scene) -> None:
        path = scene.run / name
        os.truncate(path, path.stat().st_size // 2)

    return cut


def edit_log_after_the_end(scene: Scene) -> None:
    """The result is what it was, and nobody who is handed the folder takes it for that."""
    scene.user.end(scene.run, "COMPLETED", timeout_s=900)
    scene.user.types("verify", scene.run.folder)
    log = scene.run / "result_0.txt"
    log.write_text(re.sub(r'("key": "eval_accuracy", "value": )\d+\.\d', r"\g<1>0.1", log.read_text()))
    assert "LOG-18" in scene.user.types("verify", scene.run.folder, code=1).stdout


def into_planted_folder(user: User, overrides: Sequence[str]) -> Run:
    """Return a job whose run folder somebody else has made, with links to a file of the user's."""
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


def copy_foreign_log(scene: Scene) -> None:
    """A finished log with the right seed lies in the place of the next trial's before that trial starts."""
    until(lambda: '"run_stop"' in (scene.run / "result_0.txt").read_text(), 900, scene.run)
    text = (scene.run / "result_0.txt").read_text()
    foreign = re.sub(r'("key": "seed", "value": )1\b', r"\g<1>2", text)
    assert foreign != text
    (scene.run / "result_1.txt").write_text(foreign)


def kill_rank_and_remove_status(scene: Scene) -> None:
    os.kill(ranks(scene.run)[-1], signal.SIGKILL)
    scene.user.end(scene.run, "FAILED", timeout_s=900)
    (scene.run / "status.json").unlink()


def from_own_image(user: User, overrides: Sequence[str]) -> Run:
    image = next(word.partition("=")[2] for word in user.overrides if word.startswith("container.image="))
    own = shutil.copy(image, user.home / "own.sqsh")
    words = tuple(f"container.image={own}" if word.endswith(f"={image}") else word for word in user.overrides)
    return replace(user, overrides=words).launch(*overrides)


def replace_image(scene: Scene) -> None:
    """Another file takes the image's place, as if somebody had built it again."""
    other = scene.user.home / "other.sqsh"
    other.write_bytes(bytes(4096))
    other.rename(scene.user.home / "own.sqsh")


def no_container(user: User) -> str:
    return "" if user.overrides else "ranks are in no containers (--containers)"


# --- The clock


def move_clock(seconds: int) -> Inflict:
    """Return what moves the time of day on the job's nodes."""

    def move(scene: Scene) -> None:
        clock = scene.user.home / "site" / "clock"
        new = clock.with_name("new")
        new.write_text(str(seconds))
        new.rename(clock)  # nobody reads half of it

    return move
