"""The output file of a job in its run folder: job.sh and Slurm write it, and a requeued job appends to it."""

import io
import re
from pathlib import Path

from bench.contract import regular_files
from bench.contract.run_files import JOB_OUTPUTS

_TAIL_BYTES = 1 << 20
_CANCELLED = re.compile(r"\*\*\* JOB \S+ ON \S+ CANCELLED AT \S+ (DUE TO [A-Z ]+)")
"""What slurmstepd writes when Slurm ends a job."""


def requeue_cause(run: Path, *, job: str, first_line: str) -> str | None:
    """Return why Slurm requeued a job, in the words of job.sh, for an attempt that the previous start of the job began.

    None if the output does not show the cause, or if another start of the job began the attempt.

    first_line: what the job prints when it begins an attempt of this trial.
    """
    try:
        with regular_files.opened(run / JOB_OUTPUTS.replace("*", job)) as file:
            file.seek(max(0, file.seek(0, io.SEEK_END) - _TAIL_BYTES))
            tail = file.read(_TAIL_BYTES).decode(errors="replace")
    except OSError:
        return None
    _, began, after = tail.rpartition(f"\n{first_line}\n")
    of_attempt, *later_starts = re.split(rf"^job {re.escape(job)}, restart \d+, on ", after, flags=re.MULTILINE)
    causes = _CANCELLED.findall(of_attempt)
    return f"requeued {causes[-1].strip()}" if began and len(later_starts) == 1 and causes else None
