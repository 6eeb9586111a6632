"""The names of all files in a run folder, each written down once.

`bench` and `jobs` take them from here, and the batch script gets those that it needs among its settings. Elements of a
job array share one run folder, so what every element writes carries its number: `facts_3`, `health_3.json`.
"""

import os
from collections.abc import Mapping

from bench.contract.schema import BackendName

CONFIG = "config.yaml"
PLAN = "plan.json"
LEDGER = "ledger.json"
STATUS = "status.json"
MANIFEST = "manifest.json"
"""The checksums of all files that make up the result, written after everything else."""
JOB = "job.json"
"""What was handed to the backend, and every job that worked on the run."""
SCRIPT = "job.sbatch"
KUBERNETES_MANIFEST = "kubernetes.yaml"
RANK_LOGS = "rank_logs"
ATTEMPTS = "attempts"
"""Folder of what was cut short: attempts/2.1/ is the first attempt of trial 2."""
FACTS = "facts"
HEALTH = "health.json"
PREPARE_LOG = "prepare.txt"
LEDGER_LOCK = ".ledger.lock"
RUN_LOCK = ".run.lock"
"""Locked by the process that drives a run on its own machine, for as long as it does."""
OWNER = ".owner"
"""The id of the job that works in the folder."""
SUBMISSION = ".submission"
"""Written before a run is handed to a queue, and removed once the queue's answer stands in job.json. Where the answer
is lost it stays, and says that the queue may have a job of this run that nobody has noted."""
RESERVE = ".reserve"
"""Space kept for the last word on a disk that fills up."""
RUNNER_OUTPUT = f"{RANK_LOGS}/runner.out"
"""What the process printed that led a run without srun."""
RESULTS = "result_*.txt"
JOB_OUTPUTS = "slurm-*.out"
JOB_OUTPUT, ELEMENT_OUTPUT = "slurm-%j.out", "slurm-%A_%a.out"
"""In sbatch's spelling: the output of a job, and of an element of an array."""
RAY_JOB = "ray_job.json"
"""What was asked of a Ray cluster: the body of its POST /api/jobs/."""
RAY_OUTPUT = "ray.out"
"""What the drivers of its Ray jobs say: which nodes they took, and why they lost them."""
NODE_VARIABLE = "RUNSTOP_NODE"
"""Set by whoever starts the processes of a node without Slurm: the name that users know it by."""
LIFE_VARIABLE = "RUNSTOP_LIFE"
"""Set for ranks that were started again within an attempt at a trial: how often."""
ELEMENT_VARIABLE = "BENCH_ELEMENT"
"""Set by the batch script for its ranks: _3 in element 3 of a job array."""

OF_BACKEND: dict[BackendName, tuple[str, ...]] = {
    BackendName.local: (),
    BackendName.ssh: (),
    BackendName.slurm: (SCRIPT, JOB, JOB_OUTPUTS),
    BackendName.ray: (RAY_JOB, JOB, RAY_OUTPUT),
    BackendName.kubernetes: (KUBERNETES_MANIFEST, JOB),
}
"""What only the runs of one backend have."""


def element(env: Mapping[str, str] = os.environ) -> str:
    """Return `_3` in element 3 of a job array; elsewhere nothing."""
    return env.get(ELEMENT_VARIABLE, "")


def facts(element: str = "") -> str:
    """Return the folder of what ranks found on their nodes."""
    return f"{FACTS}{element}"


def health(element: str = "") -> str:
    """Return the file of what was measured on the nodes."""
    return f"health{element}.json"


def prepare_log(element: str = "") -> str:
    """Return the log of preparing rows and base checkpoint."""
    return f"prepare{element}.txt"


def result(trial: int | str) -> str:
    """Return the log of a trial."""
    return f"result_{trial}.txt"


def adapters(trial: int | str) -> str:
    """Return the folder of the adapters that a trial trained."""
    return f"adapters_{trial}"


def checkpoints(trial: int | str) -> str:
    """Return the folder of the checkpoints from which the next attempt of a trial goes on."""
    return f"checkpoints/trial_{trial}"


def loss_figure(trial: int | str) -> str:
    """Return the figure of a trial's losses."""
    return f"loss_{trial}.png"


def interrupted(element: str = "") -> str:
    """Return where the batch script says why it ended before its work was done."""
    return f"interrupted{element}.txt"


def label(command: str) -> str:
    """Return the name of a command as part of a file's or a variable's: trial_0."""
    return command.replace(" ", "_")


def rank_error(command: str, rank: int | str) -> str:
    """Return where a rank of a command says why it failed; `*` for every rank."""
    return f"{RANK_LOGS}/{label(command)}_rank_{rank}.error"


def stack(command: str, rank: int | str) -> str:
    """Return where a rank of a command that has stalled says where it stands; `*` for every rank."""
    return f"{RANK_LOGS}/{label(command)}_rank_{rank}.stack"


def output(command: str) -> str:
    """Return where the ranks of a command print to, on backends that do not keep a file for each rank."""
    return f"{RANK_LOGS}/{label(command)}.out"


def rank_output(command: str, rank: int | str) -> str:
    """Return where one rank of a command prints to, on backends that keep a file for each; `*` for every rank."""
    return f"{RANK_LOGS}/{label(command)}_rank_{rank}.out"


def host_errors(host: str) -> str:
    """Return where the process that starts ranks on a host says what went wrong."""
    return f"{RANK_LOGS}/host_{host}.err"


def caches(trial: int | str) -> str:
    """Return where each node says what it did with its page cache before a trial."""
    return f"{RANK_LOGS}/trial_{trial}.caches"


def profile(trial: int) -> str:
    """Return the list of kernels of a trial's last warm-up step."""
    return f"{RANK_LOGS}/trial_{trial}.profile"


def telemetry(trial: int | str, node: str) -> str:
    """Return the samples of a node's GPUs while a trial ran; `*` for every node."""
    return f"{RANK_LOGS}/trial_{trial}.gpus_{node}.csv"


def module_times(trial: int) -> str:
    """Return where the time of a trial's profiled warm-up steps goes."""
    return f"{RANK_LOGS}/trial_{trial}.modules.json"


def trace(trial: int) -> str:
    """Return the trace of the same steps, in Chrome's format; Perfetto shows it."""
    return f"{RANK_LOGS}/trial_{trial}.trace.json.gz"


def answers(trial: int | str) -> str:
    """Return what a trial has generated: one row for each answer, with its times and tokens."""
    return f"{RANK_LOGS}/trial_{trial}.answers.csv"


def server_output(trial: int | str) -> str:
    """Return what the server of a trial prints."""
    return f"{RANK_LOGS}/trial_{trial}.server.out"


def server_model(trial: int | str) -> str:
    """Return the folder that the server of a trial loads, where it is made for it."""
    return f"{RANK_LOGS}/trial_{trial}.model"


def server_models_set_aside(trial: int | str) -> str:
    """Return the pattern of such folders that attempts left behind when they were killed."""
    return f"{ATTEMPTS}/{trial}.*/trial_{trial}.model"


def requests(trial: int | str, load: str) -> str:
    """Return the rows of a load, one for each request."""
    return f"{RANK_LOGS}/trial_{trial}.{load}.requests.csv"


def loadgen(trial: int | str, load: str) -> str:
    """Return what MLPerf's loadgen logs of a load."""
    return f"{RANK_LOGS}/trial_{trial}.{load}.loadgen"


def binding(trial: int | str) -> str:
    """Return the file in which rank 0 finds what to bind a trial's log to."""
    return f"{RANK_LOGS}/trial_{trial}.attempt"


def of_attempt(trial: int) -> tuple[str, ...]:
    """Return what one attempt of a trial writes, as patterns: all of it is set aside before the next one."""
    return result(trial), f"{RANK_LOGS}/trial_{trial}_*", f"{RANK_LOGS}/trial_{trial}.*"


def attempt(trial: int, number: int) -> str:
    """Return where attempt `number` (from 1) of a trial is set aside."""
    return f"{ATTEMPTS}/{trial}.{number}"
