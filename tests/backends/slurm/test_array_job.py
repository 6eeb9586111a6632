"""The script of an array of runs: each task puts its own run's script together, and only equal headers share one."""

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.backends.slurm import jobs, script
from bench.contract import atomic_files, plan_kinds
from bench.contract.plan import Plan
from bench.errors import SubmitError
from bench.planning import compose
from bench.runs import run as runs
from helpers.slurm_stubs import ScriptRun, options, run_script

TINY = ("task=pretrain_tiny", "cluster=slurm_test", "model.weights=random")
HEADERS = ("", "cluster.num_nodes=1", "walltime=7", "cluster.slurm.partition=other", "cluster.slurm.account=a")
PLANS = {words: compose.compose([*TINY, *([words] if words else [])]) for words in (*HEADERS, "launch.array=true")}


@pytest.fixture
def array(tmp_path: Path) -> str:
    plans = [compose.compose([*TINY, f"seed_base={seed}"]) for seed in (1, 7)]
    return script.array_job(plans, ["first", "it's second"], name="tiny")


def run_task(text: str, root: Path, task: int) -> ScriptRun:
    """Run one task of an array up to the start of its run's script."""
    (root / "array").mkdir(exist_ok=True)
    shown = text.replace('exec bash "$run/$script_file"', 'env; printf "run %s\\n"')
    assert shown != text
    return run_script(shown, root, root / "array", SLURM_ARRAY_TASK_ID=str(task), SLURM_ARRAY_JOB_ID="7")


@pytest.mark.parametrize(("task", "name", "seed"), [(0, "first", 1), (1, "it's second", 7)])
def test_a_task_runs_exactly_the_script_of_its_run(array: str, tmp_path: Path, task: int, name: str, seed: int) -> None:
    """Also when Slurm starts it again. The script takes the task's id for that of a whole job."""
    rendered = script.script(compose.compose([*TINY, f"seed_base={seed}"]))
    for _ in range(2):
        done = run_task(array, tmp_path, task)
        assert (
            done.code == 0
            and f"run {tmp_path / name}\n" in done.output
            and f"SLURM_ARRAY_JOB_ID=7_{task}\n" in done.output
        )
        assert "SLURM_ARRAY_TASK_ID" not in done.output
        assert (tmp_path / name / "job.sbatch").read_text() == rendered
        assert sorted(path.name for path in (tmp_path / name).iterdir()) == ["job.sbatch"]


def test_a_task_refuses_a_folder_with_another_script(array: str, tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "first/job.sbatch").write_text("touch was_here\n")
    done = run_task(array, tmp_path, 0)
    assert (
        done.code == 2
        and "CFG-05" in done.output
        and "run " not in done.output.partition("CFG-05")[2].partition("\n")[2]
    )


def test_its_header_requests_what_each_run_requests(array: str) -> None:
    alone = options(script.script(compose.compose(list(TINY))))
    assert options(array) == alone | {"job-name": "tiny", "array": "0-1"}


@pytest.mark.parametrize("tool", ["bash -n", "shellcheck"])
def test_bash_and_shellcheck_accept_it(array: str, tmp_path: Path, tool: str) -> None:
    if shutil.which(tool.split()[0]) is None:
        pytest.skip(f"{tool} is not installed")
    (tmp_path / "array.sh").write_text(array)
    done = subprocess.run([*tool.split(), tmp_path / "array.sh"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.long
@given(st.lists(st.sampled_from([*PLANS]), max_size=12))
def test_every_run_is_in_one_array_with_runs_of_its_header(names: list[str]) -> None:
    groups = script.arrays([PLANS[name] for name in names])
    assert sorted(position for group in groups for position in group) == list(range(len(names)))
    for group in groups:
        assert len({names[position] for position in group}) == 1
        assert names[group[0]] != "launch.array=true" or len(group) == 1
    assert len(groups) == len({name for name in names if name != "launch.array=true"}) + names.count(
        "launch.array=true"
    )


def test_an_array_is_cut_where_slurm_would_refuse_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = PLANS[""]
    monkeypatch.setattr(script, "MAX_ARRAY_TASKS", 3)
    assert script.arrays([plan] * 7) == [[0, 1, 2], [3, 4, 5], [6]]
    own = len(script.script(plan)) - len(script.BODY.read_text())
    monkeypatch.setattr(script, "MAX_SCRIPT_BYTES", 2 * own)
    assert script.arrays([plan] * 5) == [[0, 1], [2, 3], [4]]


class Slurm:
    """Two run folders and a folder for their array, with stubs of Slurm's commands."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.bin = root, root / "bin"
        self.bin.mkdir()
        monkeypatch.setenv("PATH", f"{self.bin}:/usr/bin:/bin")
        for name in ("DATADIR", "MODEL", "LOGDIR"):
            monkeypatch.setenv(name, str(root))
        self.plan: Plan = PLANS[""]
        for name in ("a", "b", "array"):
            (root / name).mkdir()
        for name in ("a", "b"):
            (root / name / "plan.json").write_text(plan_kinds.dumps(self.plan))
            jobs.prepare(self.plan, root / name)

    def command(self, name: str, body: str) -> None:
        (self.bin / name).write_text(f"#!/bin/sh\n{body}\n")
        (self.bin / name).chmod(0o755)

    def submit(self) -> str:
        runs = [(self.plan, self.root / name) for name in ("a", "b")]
        return jobs.submit_array(runs, self.root / "array", name="tiny")


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    return Slurm(tmp_path, monkeypatch)


def test_each_run_knows_its_task(slurm: Slurm, tmp_path: Path) -> None:
    slurm.command("sbatch", "echo '41;cluster'")
    slurm.command("squeue", "exit 0")
    assert slurm.submit() == "41"
    ids = [[job["id"] for job in atomic_files.read_object(tmp_path / name / "job.json")["jobs"]] for name in ("a", "b")]
    assert ids == [["41_0"], ["41_1"]] and not list(tmp_path.glob("*/.submission"))
    assert [run.folder.name for run in runs.below(tmp_path)] == ["a", "b"]


def test_a_refused_array_leaves_the_runs_as_they_were(slurm: Slurm, tmp_path: Path) -> None:
    slurm.command("sbatch", "echo 'sbatch: error: Batch job submission failed: Invalid partition' >&2; exit 1")
    slurm.command("squeue", "exit 0")
    before = {path: path.read_bytes() for name in ("a", "b") for path in (tmp_path / name).iterdir()}
    with pytest.raises(SubmitError, match="Invalid partition"):
        slurm.submit()
    assert {path: path.read_bytes() for name in ("a", "b") for path in (tmp_path / name).iterdir()} == before


def test_after_a_lost_answer_each_run_finds_its_task_in_the_queue(slurm: Slurm, tmp_path: Path) -> None:
    slurm.command("sbatch", "echo 'sbatch: error: Unable to contact: timed out' >&2; exit 1")
    slurm.command("squeue", "exit 1")
    with pytest.raises(SubmitError, match="may exist anyway"):
        slurm.submit()
    script_and_folder = f"{tmp_path}/array/job.sbatch {tmp_path}/array"
    slurm.command("squeue", f'case "$*" in *Command*) echo "41|{script_and_folder}|";; esac')
    assert [jobs.submitted(tmp_path / name) for name in ("a", "b")] == [["41_0"], ["41_1"]]
    jobs.record_shared_jobs(tmp_path / "array")
    assert atomic_files.read_object(tmp_path / "b/job.json")["jobs"][0]["id"] == "41_1"
