"""Submitting the runs of a study to a queue; Slurm's commands are stubs that keep a list of jobs."""

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from test_running import STUDY
from test_spec import written

from bench import preflight, studies
from bench.runs import ledger, status
from bench.runs.ledger import Outcome
from bench.runs.status import Ending, Status
from bench.studies import library, run_missing
from helpers import study_runs

PAIR = "pairs: [{first: a, second: b, measurement: step_time}]\n"


class Slurm:
    """sbatch and squeue: each job of the queue is a file with the arguments of its sbatch."""

    def __init__(self, folder: Path) -> None:
        self.queue, self.bin, self.requests = folder / "queue", folder / "bin", folder / "requests"
        self.queue.mkdir()
        self.bin.mkdir()
        counted = f"$(($(find {folder}/queue {folder}/old -type f | wc -l) + 100))"
        self.says("sbatch", f'n={counted}; echo "$*" >{self.queue}/$n; echo $n')
        self.says(
            "squeue",
            f"""for job in {self.queue}/*; do read -r words <"$job"; id=${{job##*/}}
  if [[ $* == *Command* ]]; then echo "$id|/path/job.sbatch ${{words##* }}|"
  else
    for one in $(grep -oE "[=,]$id(_[0-9]+)?\\b" <<<"$*" | tr -d =,); do
      echo "$one|PENDING|Priority||0|0:00|1:00:00|N/A|"
    done
  fi
done""",
        )
        self.says("sacct", "exit 1")
        self.old = folder / "old"
        self.old.mkdir()

    def says(self, command: str, script: str) -> None:
        head = f'#!/bin/bash\nshopt -s nullglob\necho "{command} $*" >>{self.requests}\n'
        (self.bin / command).write_text(f"{head}{script}\n")
        (self.bin / command).chmod(stat.S_IRWXU)

    def jobs(self) -> list[str]:
        """Return the folders that jobs were submitted for, in order; `array` for that of an array."""
        names = [Path(path.read_text().split()[-1]).name for path in sorted(self.queue.iterdir())]
        return ["array" if name.startswith("array-") else name for name in names]

    def forgets(self) -> None:
        for path in self.queue.iterdir():
            path.rename(self.old / path.name)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    result = Slurm(tmp_path)
    monkeypatch.setenv("PATH", f"{result.bin}:{os.environ['PATH']}")
    monkeypatch.setattr(library, "CONF", tmp_path)
    monkeypatch.setattr(preflight, "before_start", lambda plan, words: [])
    for name in ("DATADIR", "MODEL", "LOGDIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    return result


Call = Callable[..., int]


@pytest.fixture
def call(tmp_path: Path, slurm: Slurm) -> Call:
    def call(study: str, *words: str) -> int:
        written(tmp_path, study)
        return run_missing.run_missing(studies.begin("mine", ["cluster=slurm_test", "walltime=10", *words]))

    return call


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "logdir/studies/mine-slurm_test"


def jobs_of(folder: Path) -> dict[str, list[str]]:
    """Return the ids in job.json of each run."""
    paths = sorted(folder.glob("[ab].*/job.json"))
    return {path.parent.name: [one["id"] for one in json.loads(path.read_text())["jobs"]] for path in paths}


def prove(folder: Path) -> None:
    """Write a run folder as a completed job leaves it."""
    (folder / "ledger.json").write_text(json.dumps([{"trial": 0, "seed": 1, "outcome": "valid"}]))
    status.write(folder, Status(outcome=Ending.valid, exit_code=0))


@pytest.mark.long
def test_a_pair_shares_a_job_and_missing_runs_are_in_the_next_job(call: Call, slurm: Slurm, folder: Path) -> None:
    assert call(STUDY + PAIR) == 0 and slurm.jobs() == ["job.1"]
    assert jobs_of(folder) == dict.fromkeys(("a.1", "a.2", "b.1", "b.2"), ["100"])
    script = (folder / "job.1/job.sbatch").read_text()
    (runs,) = [line for line in script.splitlines() if line.startswith("runs=")]
    assert sorted(runs.removeprefix("runs=(").removesuffix(")").split()) == ["a.1", "a.2", "b.1", "b.2"]
    assert {runs.index("a.1") < runs.index("b.1"), runs.index("a.2") < runs.index("b.2")} == {True, False}
    assert "#SBATCH --time=80" in script, "four runs of 5 + 10 + 5 minutes"
    slurm.requests.write_text("")
    assert call(STUDY + PAIR) == 0 and slurm.jobs() == ["job.1"], "queued runs are left alone"
    assert sum(line.startswith("squeue") for line in slurm.requests.read_text().splitlines()) <= 3
    prove(folder / "a.1")
    slurm.forgets()
    assert call(STUDY + PAIR) == 0 and slurm.jobs() == ["job.2"]
    assert jobs_of(folder) == {"a.1": ["100"], **dict.fromkeys(("a.2", "b.1", "b.2"), ["100", "101"])}
    assert ledger.read(folder / "a.1")[0].outcome is Outcome.valid


@pytest.mark.long
@pytest.mark.parametrize(
    ("study", "words", "expected"),
    [
        (STUDY, (), ["array"]),
        (STUDY + PAIR + "jobs: each\n", (), ["array"]),
        (STUDY + "jobs: shared\n", (), ["job.1"]),
        (STUDY.replace("precision=bf16", "cluster.num_nodes=1") + PAIR, (), ["array", "array"]),
        (STUDY + PAIR, ("cluster.slurm.max_walltime_min=79",), ["job.1", "job.2"]),
    ],
)
def test_runs_are_grouped_into_jobs_as_the_study_defines(
    call: Call, slurm: Slurm, folder: Path, study: str, words: tuple[str, ...], expected: list[str]
) -> None:
    """No pair; no shared job; all in one; a pair on different nodes; and a walltime limit that two blocks exceed."""
    assert call(study, *words) == 0 and sorted(slurm.jobs()) == expected
    assert all(len(jobs) == 1 for jobs in jobs_of(folder).values()) and len(jobs_of(folder)) == 4


@pytest.mark.long
def test_an_interrupted_run_of_a_pair_on_other_nodes_is_resumed_and_never_removed(
    call: Call, slurm: Slurm, folder: Path
) -> None:
    study = STUDY.replace("precision=bf16", "cluster.num_nodes=1") + PAIR
    assert call(study) == 0 and slurm.jobs() == ["array", "array"]
    (folder / "a.1/ledger.json").write_text(json.dumps([{"trial": 0, "seed": 1, "outcome": "interrupted"}]))
    slurm.forgets()
    slurm.says("sbatch", "echo 'sbatch: error: Batch job submission failed: no such partition' >&2; exit 1")
    call(study)
    assert (folder / "a.1/ledger.json").exists(), "a refusal removes no run that had a job"


@pytest.mark.long
def test_a_refused_job_leaves_the_runs_for_the_next_call(
    call: Call, slurm: Slurm, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    takes = (slurm.bin / "sbatch").read_text()
    slurm.says("sbatch", "echo 'sbatch: error: Batch job submission failed: no such partition' >&2; exit 1")
    assert call(STUDY + PAIR) == 1 and "no such partition" in capsys.readouterr().err
    assert not list(folder.glob("job.*")) and jobs_of(folder)["a.1"] == []
    (slurm.bin / "sbatch").write_text(takes)
    assert call(STUDY + PAIR) == 0 and slurm.jobs() == ["job.1"] and jobs_of(folder)["b.2"] == ["100"]


@pytest.mark.long
def test_a_submitted_job_without_a_record_is_found(call: Call, slurm: Slurm, folder: Path) -> None:
    """The call was killed before it recorded the job id: no second job is submitted for its runs."""
    call(STUDY + PAIR)
    for path in folder.glob("*/job.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"jobs": []}))
    (folder / "job.1/.submission").write_text("{}")
    assert call(STUDY + PAIR) == 0 and slurm.jobs() == ["job.1"]
    assert jobs_of(folder) == dict.fromkeys(("a.1", "a.2", "b.1", "b.2"), ["100"])


@pytest.mark.long
def test_after_out_of_memory_the_next_smaller_batch_is_queued(call: Call, slurm: Slurm, folder: Path) -> None:
    """Each call reads the outcomes of the jobs; a smaller batch is queued for all blocks, and no batch twice."""
    searched = STUDY.replace("arms:", "max_batch: {limit: 16}\narms:")
    assert call(searched) == 0 and slurm.jobs() == ["array"]
    assert sorted(jobs_of(folder)) == ["a.b16.1", "a.b16.2", "b.b16.1", "b.b16.2"]
    for name in ("a.b16.1", "a.b16.2", "b.b16.2"):
        prove(folder / name)
    study_runs.fail(folder / "b.b16.1", "RUN-01", "out of memory")
    slurm.forgets()
    for _ in range(2):
        assert call(searched) == 0 and slurm.jobs() == ["array"]
        smaller = {name: jobs for name, jobs in jobs_of(folder).items() if "b14" in name}
        assert sorted(smaller) == ["b.b14.1", "b.b14.2"] and sorted(map(len, smaller.values())) == [1, 1]
