"""`runstop tune` on a queue: the runs of a block share a job, and the next block waits for it; Slurm is a stub."""

from pathlib import Path

import pytest
from test_queued import Slurm, slurm

from bench import tuning
from bench.studies import run_missing
from helpers import study_runs

__all__ = ["slurm"]


@pytest.mark.long
def test_each_block_is_one_job_on_the_same_nodes(slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[list[str]] = []

    def sleep(seconds: float) -> None:
        jobs.extend([slurm.jobs()] if slurm.jobs() else [])
        for folder in tmp_path.glob("logdir/studies/tune-*/*.*/plan.json"):
            if not (folder.parent / "result_0.txt").exists():
                is_first = folder.parent.name.startswith("dp_2_micro-batch_4")
                study_runs.prove(folder.parent, [0.1 if is_first else 0.2] * 25)
        slurm.forgets()

    monkeypatch.setattr(run_missing.time, "sleep", sleep)
    words = ("task=lora_tiny", "cluster=slurm_test", "cluster.num_nodes=1", "cluster.ranks_per_node=2", "walltime=10")
    result = tuning.tune(tuning.Request(overrides=words, best=2), say=lambda _: None)
    assert jobs == [["job.1"], ["job.2"]]
    assert result.best == "dp 2 micro-batch 4" and result.is_decided and result.num_blocks == 2
