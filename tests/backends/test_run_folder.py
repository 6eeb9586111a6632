"""Where a job writes: a folder of its user's alone, of which nothing is imported and through which no link leads."""

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
from helpers.slurm_stubs import Ran, ran

NOBODY = 65534
LEFT = (".owner", "plan.json", "rank_logs/trial_0.caches")
"""Files that a script writes anew, whatever lies there, and leaves; others are removed, or written where all fails."""
OTHERS = (".reserve", "job.sbatch", "status.json", "interrupted.txt")
ADDED_TO = ("slurm-7.out", "rank_logs", "rank_logs/trial_0.out")
"""What a script adds to, or writes into."""


def plan() -> Plan:
    return compose.compose(["task=lora_tiny", "cluster=slurm_test", "cluster.drop_caches=true"])


def started(root: Path, folder: Path | None = None) -> Ran:
    return ran(script.script(plan()), root, *([folder] if folder else []))


def planted(run: Path) -> None:
    run.mkdir(parents=True)


def belongs_to_another(run: Path) -> None:
    planted(run)
    os.chown(run, NOBODY, NOBODY)


def everybody_may_write(run: Path) -> None:
    planted(run)
    run.chmod(0o777)


def sticky(run: Path) -> None:
    planted(run)
    run.chmod(0o1777)


def the_group_may_write(run: Path) -> None:
    planted(run)
    run.chmod(0o775)


def a_link(run: Path) -> None:
    planted(run.with_name("elsewhere"))
    run.symlink_to(run.with_name("elsewhere"))


def a_link_to_nothing(run: Path) -> None:
    run.parent.mkdir()
    run.symlink_to(run.with_name("elsewhere"))


def can_be_exchanged(run: Path) -> None:
    run.parent.mkdir()
    run.parent.chmod(0o777)


PLANTED: dict[Callable[[Path], None], str] = {
    belongs_to_another: "belongs to somebody else",
    everybody_may_write: "others may write in",
    sticky: "others may write in",
    the_group_may_write: "others may write in",
    a_link: "symbolic link",
    a_link_to_nothing: "leads nowhere",
    can_be_exchanged: "everybody may rename",
}


@pytest.mark.starts
@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user")
@pytest.mark.parametrize("how", PLANTED, ids=lambda how: how.__name__)
@pytest.mark.parametrize("is_named", [False, True], ids=["by its job", "by the user"])
def test_a_job_leaves_a_folder_alone_that_is_not_its_users(
    how: Callable[[Path], None], is_named: bool, tmp_path: Path
) -> None:
    """Job numbers are known beforehand: whoever may write in LOGDIR can be there first."""
    run = tmp_path / "logs" / "lora_tiny-slurm_test-7"
    how(run)
    done = started(tmp_path, Path(f"{run}/") if is_named else None)
    assert (done.code, done.calls) == (2, []) and "CFG-11: " in done.said and PLANTED[how] in done.said, done
    assert [*tmp_path.rglob("*.json"), *tmp_path.rglob("rank_logs"), *tmp_path.rglob(".owner")] == []


@pytest.mark.starts
def test_a_trailing_slash_hides_no_link(tmp_path: Path) -> None:
    a_link(run := tmp_path / "logs" / "mine")
    done = ran(script.script(plan()), tmp_path, f"{run}/")
    assert done.code == 2 and "symbolic link" in done.said and not list(run.iterdir())


@pytest.mark.starts
def test_a_job_makes_its_folder_for_its_user_alone_below_a_shared_one(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs").chmod(0o1777)
    before = os.umask(0)
    try:
        done = started(tmp_path)
    finally:
        os.umask(before)
    run = tmp_path / "logs/lora_tiny-slurm_test-7"
    assert done.code == 0 and run.stat().st_mode & 0o777 == 0o755
    again = started(tmp_path)
    assert again.code == 0 and len(again.calls) == len(done.calls), "the requeued job goes on in it"


@pytest.mark.starts
@pytest.mark.parametrize("name", [*LEFT, *OTHERS, *ADDED_TO])
def test_a_job_writes_through_no_link(name: str, tmp_path: Path) -> None:
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
        assert "CFG-11: " in done.said + (output.read_text() if output.is_file() else "") and done.code
    elif name in LEFT:
        assert done.code == 0 and not (run / name).is_symlink()


@pytest.mark.starts
def test_a_job_says_why_it_was_cut_short_in_a_file_of_its_own(tmp_path: Path) -> None:
    """`cut_short` and `status`, which a signal calls: the same way of writing."""
    text, victim = script.script(plan()), tmp_path / "victim"
    victim.write_text("precious")
    names = ("interrupted_file", "status_file", "reserve_file", "put", "cut_short", "status")
    parts = [re.search(rf"^{name}(\(\) {{.*?^}}|=.*?$)", text, re.M | re.S) for name in names]
    for name in ("interrupted.txt", "status.json", ".reserve"):
        (tmp_path / name).symlink_to(victim)
    bash = "\n".join(
        ["job=7 BENCH_ELEMENT=", *(part[0] for part in parts if part), "cut_short x", "status failed 1 a b"]
    )
    subprocess.run(["bash", "-euc", bash], cwd=tmp_path, check=True)
    assert victim.read_text() == "precious" and (tmp_path / "interrupted.txt").read_text() == "x\n"


MODULE = "open('imported', 'w')\nraise SystemExit(9)\n"


@pytest.mark.starts
@pytest.mark.parametrize("path", ["", f"{ROOT}", f":{ROOT}", f"{ROOT}:", f".:{ROOT}"])
def test_nothing_is_imported_from_the_run_folder(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By ranks, and by what a job asks between its commands, on Slurm and here; whatever PYTHONPATH leaves open."""
    run = tmp_path / "run"
    for name in ("argparse", "json", "bench", "jobs"):
        (run / name).with_suffix(".py").parent.mkdir(exist_ok=True)
        (run / f"{name}.py").write_text(MODULE)
    (run / "plan.json").write_text(plan_kinds.dumps(plan()))
    monkeypatch.setenv("PYTHONPATH", path)
    done = ran(script.script(plan()), tmp_path, **({"PYTHONPATH": path} if path else {}))
    (_, of_job), *_ = done.calls
    assert of_job["PYTHONSAFEPATH"] == "1" and of_job.get("PYTHONPATH", "") == (str(ROOT) if path else "")
    asks = ["-m", "bench.driver.between_commands", str(run), "open", "--job", "7"]
    for environment in ({"PATH": os.environ["PATH"]} | of_job, os.environ | LocalBackend().rank_environment(plan())):
        words = ["-c", "import argparse, json, bench, jobs"] if path else asks
        subprocess.run([sys.executable, *words], cwd=run, env=environment, check=True)
    assert not (run / "imported").exists()


def test_a_launcher_makes_a_folder_for_its_user_alone(tmp_path: Path) -> None:
    made = compose.compose(["task=lora_tiny", "cluster=local", f"launch.folder={tmp_path}/a/run"])
    before = os.umask(0)
    try:
        folder = folders.make(made, "a: 1\n")
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in (folder, folder / "rank_logs")] == [0o755, 0o755]


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user")
@pytest.mark.parametrize("how", PLANTED, ids=lambda how: how.__name__)
def test_a_launcher_leaves_a_folder_alone_that_is_not_its_users(how: Callable[[Path], None], tmp_path: Path) -> None:
    run = tmp_path / "logs" / "run"
    how(run)
    made = compose.compose(["task=lora_tiny", "cluster=local", f"launch.folder={run}"])
    with pytest.raises(ConfigError, match="CFG-11" if how is can_be_exchanged else "CFG-05: this folder exists"):
        folders.make(made, "a: 1\n")
    assert [*tmp_path.rglob("*.json"), *tmp_path.rglob("rank_logs")] == []
    if how is not can_be_exchanged and how is not a_link_to_nothing:
        with pytest.raises(ConfigError, match="CFG-11"):  # what `resume` asks
            folders.require_ours(run)
