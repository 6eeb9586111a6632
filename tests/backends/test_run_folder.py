"""Run folders belong to one user only; nothing is imported from them, and jobs follow no symbolic links in them."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.backends.local import LocalBackend
from bench.backends.slurm import script
from bench.contract import plan_kinds
from bench.contract.plan import Plan
from bench.errors import ConfigError
from bench.planning import compose
from bench.runs import folder as folders
from helpers.paths import ROOT
from helpers.slurm_stubs import ScriptRun, run_script

OTHER_USER_ID = 65534
LEFT = (".owner", "plan.json", "rank_logs/trial_0.caches")
"""Files that a script replaces and keeps; OTHERS are removed, or written only after a failure."""
OTHERS = (".reserve", "job.sbatch", "status.json", "interrupted.txt")
ADDED_TO = ("slurm-7.out", "rank_logs", "rank_logs/trial_0.out")
"""Files and folders that a script appends to."""


def plan() -> Plan:
    return compose.compose(["task=lora_tiny", "cluster=slurm_test", "cluster.drop_caches=true"])


def started(root: Path, folder: Path | None = None) -> ScriptRun:
    return run_script(script.script(plan()), root, *([folder] if folder else []))


def created(run: Path) -> None:
    run.mkdir(parents=True)


def owned_by_another_user(run: Path) -> None:
    created(run)
    os.chown(run, OTHER_USER_ID, OTHER_USER_ID)


def writable_by_all(run: Path) -> None:
    created(run)
    run.chmod(0o777)


def sticky(run: Path) -> None:
    created(run)
    run.chmod(0o1777)


def writable_by_group(run: Path) -> None:
    created(run)
    run.chmod(0o775)


def symbolic_link(run: Path) -> None:
    created(run.with_name("elsewhere"))
    run.symlink_to(run.with_name("elsewhere"))


def dangling_link(run: Path) -> None:
    run.parent.mkdir()
    run.symlink_to(run.with_name("elsewhere"))


def parent_writable_by_all(run: Path) -> None:
    run.parent.mkdir()
    run.parent.chmod(0o777)


UNSAFE_FOLDERS: dict[Callable[[Path], None], str] = {
    owned_by_another_user: "another user owns",
    writable_by_all: "other users can write to",
    sticky: "other users can write to",
    writable_by_group: "other users can write to",
    symbolic_link: "symbolic link",
    dangling_link: "its target does not exist",
    parent_writable_by_all: "every user can rename",
}


@pytest.mark.starts
@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user")
@pytest.mark.parametrize("how", UNSAFE_FOLDERS, ids=lambda how: how.__name__)
@pytest.mark.parametrize("is_named", [False, True], ids=["by its job", "by the user"])
def test_jobs_refuse_unsafe_run_folders(how: Callable[[Path], None], is_named: bool, tmp_path: Path) -> None:
    """Job ids can be guessed, so another user who may write in LOGDIR can create the folder first."""
    run = tmp_path / "logs" / "lora_tiny-slurm_test-7"
    how(run)
    done = started(tmp_path, Path(f"{run}/") if is_named else None)
    assert (done.code, done.calls) == (2, []) and "CFG-11: " in done.output and UNSAFE_FOLDERS[how] in done.output, done
    assert [*tmp_path.rglob("*.json"), *tmp_path.rglob("rank_logs"), *tmp_path.rglob(".owner")] == []


@pytest.mark.starts
def test_a_trailing_slash_does_not_hide_a_symbolic_link(tmp_path: Path) -> None:
    symbolic_link(run := tmp_path / "logs" / "mine")
    done = run_script(script.script(plan()), tmp_path, f"{run}/")
    assert done.code == 2 and "symbolic link" in done.output and not list(run.iterdir())


@pytest.mark.starts
def test_jobs_create_a_private_folder_in_a_shared_one(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs").chmod(0o1777)
    before = os.umask(0)
    try:
        done = started(tmp_path)
    finally:
        os.umask(before)
    run = tmp_path / "logs/lora_tiny-slurm_test-7"
    assert done.code == 0 and run.stat().st_mode & 0o777 == 0o755
    requeued = started(tmp_path)
    assert requeued.code == 0 and len(requeued.calls) == len(done.calls), "the requeued job continues in it"


@pytest.mark.starts
@pytest.mark.parametrize("name", [*LEFT, *OTHERS, *ADDED_TO])
def test_jobs_do_not_write_through_symbolic_links(name: str, tmp_path: Path) -> None:
    run, victim = tmp_path / "logs/run", tmp_path / "victim"
    (run / "rank_logs").mkdir(parents=True)
    if name == "rank_logs":
        (run / name).rmdir()
        victim.mkdir()
    else:
        victim.write_text("precious")
    (run / name).symlink_to(victim)
    done = started(tmp_path, run)
    assert list(victim.iterdir()) == [] if victim.is_dir() else victim.read_text() == "precious"
    output = run / "slurm-7.out"
    if name in ADDED_TO:
        assert "CFG-11: " in done.output + (output.read_text() if output.is_file() else "") and done.code
    elif name in LEFT:
        assert done.code == 0 and not (run / name).is_symlink()


@pytest.mark.starts
def test_interruption_and_status_replace_symbolic_links(tmp_path: Path) -> None:
    """`record_interruption` and `write_status` replace files as the other functions do."""
    text, victim = script.script(plan()), tmp_path / "victim"
    victim.write_text("precious")
    names = ("interrupted_file", "status_file", "reserve_file", "write_file", "record_interruption", "write_status")
    parts = [re.search(rf"^{name}(\(\) {{.*?^}}|=.*?$)", text, re.M | re.S) for name in names]
    for name in ("interrupted.txt", "status.json", ".reserve"):
        (tmp_path / name).symlink_to(victim)
    bash = "\n".join(
        [
            "job=7 RUNSTOP_ARRAY_TASK=",
            *(part[0] for part in parts if part),
            "record_interruption x",
            "write_status failed 1 a b",
        ]
    )
    subprocess.run(["bash", "-euc", bash], cwd=tmp_path, check=True)
    assert victim.read_text() == "precious" and (tmp_path / "interrupted.txt").read_text() == "x\n"


MODULE = "open('imported', 'w')\nraise SystemExit(9)\n"


@pytest.mark.starts
@pytest.mark.parametrize("path", ["", f"{ROOT}", f":{ROOT}", f"{ROOT}:", f".:{ROOT}"])
def test_nothing_is_imported_from_the_run_folder(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by ranks nor by the steps between commands, for any PYTHONPATH."""
    run = tmp_path / "run"
    for name in ("argparse", "json", "bench", "jobs"):
        (run / name).with_suffix(".py").parent.mkdir(exist_ok=True)
        (run / f"{name}.py").write_text(MODULE)
    (run / "plan.json").write_text(plan_kinds.dumps(plan()))
    monkeypatch.setenv("PYTHONPATH", path)
    done = run_script(script.script(plan()), tmp_path, **({"PYTHONPATH": path} if path else {}))
    (_, of_job), *_ = done.calls
    assert of_job["PYTHONSAFEPATH"] == "1" and of_job.get("PYTHONPATH", "") == (str(ROOT) if path else "")
    step = ["-m", "bench.driver.between_commands", str(run), "open", "--job", "7"]
    for environment in ({"PATH": os.environ["PATH"]} | of_job, os.environ | LocalBackend().rank_environment(plan())):
        words = ["-c", "import argparse, json, bench, jobs"] if path else step
        subprocess.run([sys.executable, *words], cwd=run, env=environment, check=True)
    assert not (run / "imported").exists()


def test_launchers_create_a_private_folder(tmp_path: Path) -> None:
    plan = compose.compose(["task=lora_tiny", "cluster=local", f"launch.folder={tmp_path}/a/run"])
    before = os.umask(0)
    try:
        folder = folders.make(plan, "a: 1\n")
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in (folder, folder / "rank_logs")] == [0o755, 0o755]


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user")
@pytest.mark.parametrize("how", UNSAFE_FOLDERS, ids=lambda how: how.__name__)
def test_launchers_refuse_unsafe_run_folders(how: Callable[[Path], None], tmp_path: Path) -> None:
    run = tmp_path / "logs" / "run"
    how(run)
    plan = compose.compose(["task=lora_tiny", "cluster=local", f"launch.folder={run}"])
    with pytest.raises(
        ConfigError, match="CFG-11" if how is parent_writable_by_all else "CFG-05: the run folder exists already"
    ):
        folders.make(plan, "a: 1\n")
    assert [*tmp_path.rglob("*.json"), *tmp_path.rglob("rank_logs")] == []
    if how is not parent_writable_by_all and how is not dangling_link:
        with pytest.raises(ConfigError, match="CFG-11"):  # `resume` calls it
            folders.require_ours(run)
