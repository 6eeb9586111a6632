"""The names of all files in a run folder.

`bench` and `jobs` take them from here, and the batch script gets those that it needs among its settings. The tasks of a
job array share one run folder, so the files that every task writes carry its number: `facts_3`, `health_3.json`.
"""

import os
from collections.abc import Mapping
from typing import Any

from bench.contract.schema import BackendName

CONFIG = "config.yaml"
PLAN = "plan.json"
LEDGER = "ledger.json"
STATUS = "status.json"
MANIFEST = "manifest.json"
"""The checksums of all files of the result, written last."""
SIGNATURE = "manifest.json.sig"
"""A signature of the manifest, as ssh-keygen -Y sign writes it."""
TAGS = "tags.json"
"""Tags and a note of the user; no part of the result."""
JOB = "job.json"
"""What was submitted to the backend, and all jobs of the run."""
CANCELLED = "cancelled"
"""The key in job.json with the id of a job that its user has cancelled."""
SCRIPT = "job.sbatch"
KUBERNETES_MANIFEST = "kubernetes.yaml"
RANK_LOGS = "rank_logs"
ATTEMPTS = "attempts"
"""Folder of interrupted attempts: attempts/2.1/ is the first attempt of trial 2."""
FACTS = "facts"
HEALTH = "health.json"
PREPARE_LOG = "prepare.txt"
LEDGER_LOCK = ".ledger.lock"
RUN_LOCK = ".run.lock"
"""Locked while a process on this machine drives the run."""
OWNER = ".owner"
"""The id of the job that uses the folder."""
SUBMISSION = ".submission"
"""Written before a run is submitted to a queue, and removed when the job id is in job.json. If it still exists, the
submission was interrupted, and the queue may have an unrecorded job of this run."""
DISK_RESERVE = ".reserve"
"""Reserved space for the final status on a full disk."""
LEFT_OUT = "left_out.json"
"""The nodes that the node check left out (launch.replace_slow), each with the reason, the time and the job."""
USED_NODES = ".nodes"
"""The nodes that the next command of the job uses, if the job has spare nodes: their names, separated by commas."""
SPARE_NODES = ".spares"
"""The nodes of the job that passed the node check and are not used, separated by commas."""
SLOW_NODE = ".slow_node"
"""Written by rank 0 when it ends an attempt because a rank stays slow: the name of the node, and why, on two lines."""
RUNNER_OUTPUT = f"{RANK_LOGS}/runner.out"
"""Output of the process that drives a run without srun."""
RESULTS = "result_*.txt"
JOB_OUTPUTS = "slurm-*.out"
JOB_OUTPUT, ARRAY_OUTPUT = "slurm-%j.out", "slurm-%A_%a.out"
"""In sbatch's spelling: the output of a job, and of an array task."""
RAY_JOB = "ray_job.json"
"""The request to the Ray cluster: the body of POST /api/jobs/."""
RAY_OUTPUT = "ray.out"
"""Output of the drivers of its Ray jobs: which nodes they got, and why they lost them."""
NODE_VARIABLE = "RUNSTOP_NODE"
"""The node's name for users. Set for the processes of a node by backends other than Slurm."""
RESTART_VARIABLE = "RUNSTOP_RESTART"
"""Set for ranks that were started again within an attempt at a trial: how often."""
PORT_IN_USE = "is in use by another program"
"""In the error of rank 0 if its port was taken after it was chosen; the ranks are then started with another port."""
PORT_TRIES = 3
"""How often the ranks of a command are started, at most, each time with another port."""
ATTEMPT_VARIABLE = "RUNSTOP_ATTEMPT"
"""Set for the ranks of a trial: the nonce of the attempt that they were started for."""
ARRAY_TASK_VARIABLE = "RUNSTOP_ARRAY_TASK"
"""Set by the batch script for its ranks: _3 in task 3 of a job array."""
_OLD_ARRAY_TASK_VARIABLE = "BENCH_ELEMENT"
"""Its name in scripts of earlier versions, which `runstop resume` submits again."""

OF_BACKEND: dict[BackendName, tuple[str, ...]] = {
    BackendName.local: (),
    BackendName.ssh: (),
    BackendName.slurm: (SCRIPT, JOB, JOB_OUTPUTS),
    BackendName.ray: (RAY_JOB, JOB, RAY_OUTPUT),
    BackendName.kubernetes: (KUBERNETES_MANIFEST, JOB),
}
"""Files of the runs of each backend."""


def runs_in(shared: Mapping[str, Any]) -> list[str]:
    """Return the names of the run folders in job.json of a shared job, which are next to its folder."""
    names = shared.get("runs")
    return [name for name in names if _is_name(name)] if isinstance(names, list) else []


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and name not in ("", ".", "..") and "/" not in name and "\0" not in name


def array_task(env: Mapping[str, str] = os.environ) -> str:
    """Return `_3` in task 3 of a job array, and an empty text outside of an array."""
    return env.get(ARRAY_TASK_VARIABLE) or env.get(_OLD_ARRAY_TASK_VARIABLE, "")


def facts(array_task: str = "") -> str:
    """Return the folder of the node facts."""
    return f"{FACTS}{array_task}"


def health(array_task: str = "") -> str:
    """Return the file of the node measurements."""
    return f"health{array_task}.json"


def prepare_log(array_task: str = "") -> str:
    """Return the log of the preparation of rows and base checkpoint."""
    return f"prepare{array_task}.txt"


def result(trial: int | str) -> str:
    """Return the log of a trial."""
    return f"result_{trial}.txt"


def adapters(trial: int | str) -> str:
    """Return the folder of a trial's trained adapters."""
    return f"adapters_{trial}"


def checkpoints(trial: int | str) -> str:
    """Return the folder of a trial's checkpoints, from which its next attempt resumes."""
    return f"checkpoints/trial_{trial}"


def program_checkpoints(trial: int | str) -> str:
    """Return the folder in which a user's program keeps its own checkpoints, for its next attempt."""
    return f"program_checkpoints/trial_{trial}"


def loss_figure(trial: int | str) -> str:
    """Return the figure of a trial's losses."""
    return f"loss_{trial}.png"


def interrupted(array_task: str = "") -> str:
    """Return the file with the reason why the batch script was interrupted."""
    return f"interrupted{array_task}.txt"


def label(command: str) -> str:
    """Return a command's name for use in names of files and variables: trial_0."""
    return command.replace(" ", "_")


def rank_error(command: str, rank: int | str) -> str:
    """Return the file with the error of a rank; `*` for all ranks."""
    return f"{RANK_LOGS}/{label(command)}_rank_{rank}.error"


def stack(command: str, rank: int | str) -> str:
    """Return the file with the stack trace of a stalled rank; `*` for all ranks."""
    return f"{RANK_LOGS}/{label(command)}_rank_{rank}.stack"


def flight_record(command: str, rank: str) -> str:
    """Return the last collectives of a stalled rank: with `.json` from us, without from torch, which adds the rank."""
    return f"{RANK_LOGS}/{label(command)}_flight_{rank}"


RAS_ENDING = ".ras"


def ras_report(command: str, rank: int) -> str:
    """Return the report of NCCL's RAS that this rank requested."""
    return f"{RANK_LOGS}/{label(command)}_rank_{rank}{RAS_ENDING}"


def output(command: str) -> str:
    """Return the output file of a command, on backends with one file for all ranks."""
    return f"{RANK_LOGS}/{label(command)}.out"


def rank_output(command: str, rank: int | str) -> str:
    """Return the output file of a rank, on backends with one file per rank; `*` for all ranks."""
    return f"{RANK_LOGS}/{label(command)}_rank_{rank}.out"


def host_errors(host: str) -> str:
    """Return the error output of the process that starts the ranks of a host."""
    return f"{RANK_LOGS}/host_{host}.err"


def caches(trial: int | str) -> str:
    """Return the file in which each node records how it cleared its page cache before a trial."""
    return f"{RANK_LOGS}/trial_{trial}.caches"


def profile(trial: int) -> str:
    """Return the list of kernels of a trial's last warm-up step."""
    return f"{RANK_LOGS}/trial_{trial}.profile"


def telemetry(trial: int | str, node: str) -> str:
    """Return the GPU telemetry of a node during a trial; `*` for all nodes."""
    return f"{RANK_LOGS}/trial_{trial}.gpus_{node}.csv"


def node_power(trial: int | str, node: str) -> str:
    """Return the power of a whole node during a trial, by its own meter; `*` for all nodes."""
    return f"{RANK_LOGS}/trial_{trial}.node_{node}.csv"


def nsys_report(trial: int, rank: int) -> str:
    """Return the report of Nsight Systems of one rank; nsys adds .nsys-rep."""
    return f"{RANK_LOGS}/trial_{trial}.rank_{rank}"


def module_times(trial: int) -> str:
    """Return the time breakdown of a trial's profiled warm-up steps, or of a server's decode steps."""
    return f"{RANK_LOGS}/trial_{trial}.modules.json"


def trace(trial: int) -> str:
    """Return the trace of the same steps in Chrome's format, for Perfetto."""
    return f"{RANK_LOGS}/trial_{trial}.trace.json.gz"


def answers(trial: int | str) -> str:
    """Return the answers of a trial: one row per answer, with its times and tokens."""
    return f"{RANK_LOGS}/trial_{trial}.answers.csv"


def server_output(trial: int | str) -> str:
    """Return the output of a trial's server."""
    return f"{RANK_LOGS}/trial_{trial}.server.out"


def server_model(trial: int | str) -> str:
    """Return the model folder that a run creates for a trial's server."""
    return f"{RANK_LOGS}/trial_{trial}.model"


def server_models_set_aside(trial: int | str) -> str:
    """Return the glob of such folders from killed attempts."""
    return f"{ATTEMPTS}/{trial}.*/trial_{trial}.model"


def requests(trial: int | str, load: str) -> str:
    """Return the requests of a load, one row per request."""
    return f"{RANK_LOGS}/trial_{trial}.{load}.requests.csv"


def loadgen(trial: int | str, load: str) -> str:
    """Return the folder of loadgen's logs of a load."""
    return f"{RANK_LOGS}/trial_{trial}.{load}.loadgen"


def server_traces(trial: int | str) -> str:
    """Return the folder to which the server writes the traces of its profile."""
    return f"{RANK_LOGS}/trial_{trial}.server_traces"


def binding(trial: int | str) -> str:
    """Return the file with the binding of a trial's log, which rank 0 reads."""
    return f"{RANK_LOGS}/trial_{trial}.attempt"


def of_attempt(trial: int) -> tuple[str, ...]:
    """Return the globs of an attempt's files, which are moved away before the next attempt."""
    return result(trial), f"{RANK_LOGS}/trial_{trial}_*", f"{RANK_LOGS}/trial_{trial}.*"


def attempt(trial: int, number: int) -> str:
    """Return the folder to which attempt `number` (from 1) of a trial is moved."""
    return f"{ATTEMPTS}/{trial}.{number}"
