"""Run a rank under NVIDIA's Nsight Systems, which records chosen training steps (launch.profile=nsys).

The rank replaces its process by `nsys profile … python …`, so that every backend starts the same command. nsys waits
for cudaProfilerStart, which the training loop calls before the first chosen step. It records until cudaProfilerStop.

Source: Nsight Systems' user guide, "CLI Profile Command Switch Options": --capture-range, --capture-range-end.
"""

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.contract import run_files
from bench.contract.plan import Plan
from bench.contract.schema import ProfileKind
from bench.errors import SubmitError
from jobs.ranks.identity import from_environment

INSIDE = "RUNSTOP_UNDER_NSYS"
"""Set for the rank that nsys has started."""
OPTIONS = (
    *("--capture-range=cudaProfilerApi", "--capture-range-end=stop", "--trace=cuda,nvtx"),
    *("--sample=none", "--cpuctxsw=none", "--force-overwrite=true"),
)
"""Without --capture-range-end=stop, nsys would end the rank at cudaProfilerStop."""


def restart(argv: Sequence[str], env: Mapping[str, str] = os.environ) -> None:
    """Replace this process by nsys with the same rank in it, if the plan asks for it; otherwise return.

    argv: the arguments after the module: the plan's file, --trial, the number. The program itself reports an unreadable
    plan and a missing nsys later.
    """
    try:
        plan = Path(argv[0])
        asks = json.loads(plan.read_text())["config"]["launch"]["profile"] == ProfileKind.nsys.name
        trial = int(argv[list(argv).index("--trial") + 1])
    except (OSError, ValueError, LookupError, TypeError):
        return
    if not asks or INSIDE in env or shutil.which("nsys") is None:
        return
    report = plan.resolve().parent / run_files.nsys_report(trial, from_environment(env).rank)
    words = ["nsys", "profile", *OPTIONS, f"--output={report}", sys.executable, *sys.orig_argv[1:]]
    os.execvpe("nsys", words, {**env, INSIDE: "1"})


@dataclass(frozen=True, slots=True)
class Capture:
    """The steps that nsys records; None: none."""

    steps: tuple[int, int] | None = None

    def before(self, step: int) -> None:
        """Start the recording if this is the first chosen step."""
        if self.steps is not None and step == self.steps[0]:
            _call(start=True)

    def after(self, step: int) -> None:
        """Stop the recording if this is the last chosen step; waits for its kernels."""
        if self.steps is not None and step == self.steps[1]:
            _call(start=False)


NOTHING = Capture()


def capture(plan: Plan) -> Capture:
    """Return the steps that are recorded.

    Raises:
        SubmitError: nsys did not start this rank, since it is not installed.
    """
    launch = plan.config.launch
    if launch.profile is not ProfileKind.nsys:
        return NOTHING
    if INSIDE not in os.environ:
        fix = "install Nsight Systems on the nodes, or in the image; or set launch.profile=none"
        raise SubmitError("nsys is not on PATH", where="launch.profile=nsys", fix=fix, rule="RUN-08")
    assert launch.profile_steps is not None, "bench.planning.checks.training requires them"
    first, last = launch.profile_steps
    return Capture((first, last))


def _call(*, start: bool) -> None:
    """Call cudaProfilerStart, or cudaProfilerStop once all kernels have ended; nothing without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return
    torch.cuda.synchronize()
    if start:
        torch.cuda.profiler.start()
    else:
        torch.cuda.profiler.stop()
