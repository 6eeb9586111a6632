"""The numbered rules: what can be wrong with a run, and what to do. One registry, by id, for before, in and after the run.

`bench.preflight` finds them broken before a run, `bench.mlperf.compliance` in its log, and `bench.diagnosis` recognises them afterwards by
their signs. An id keeps its meaning for ever; it goes into logs, tickets and ledgers.
"""

from dataclasses import dataclass

from bench.rules import cluster, signs
from bench.rules.signs import Sign


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that can be wrong."""

    id: str
    title: str
    """What is wrong, in one line."""
    fix: str
    """What to do about it."""
    signs: tuple[Sign, ...] = ()
    """What it leaves in a log."""


CONFIG = {
    "CFG-01": (
        "the ranks or the batch cannot be split as asked",
        "make tp x pp x cp divide the ranks, dp x micro batch divide recipe.global_batch_size, and tp at most a node's GPUs: "
        "`python -m bench plan` lists the legal values",
    ),
    "CFG-02": (
        "validation is due later than an epoch ends",
        "set val_check_interval (in steps, CEIL(384 / GBS)) to at most the training batches of an epoch, or "
        "check_val_every_n_epoch=None so that it counts across epochs; then see why the data is that short",
    ),
    "CFG-03": (
        "the model is not evaluated when the official rules say",
        "evaluate every CEIL(384 / GBS) steps, leaving out the first FLOOR(0.125 x GBS + 2): recipe.eval_every_samples=384, "
        "recipe.eval_skip=null",
    ),
    "CFG-04": (
        "there is no reference convergence point for this global batch size",
        "choose recipe.global_batch_size from 8 up, best one that has a point (llama2_70b_lora: 8, 16, 32, 128)",
    ),
    "CFG-05": (
        "a result with this name exists already",
        "start in a new folder (leave launch.folder out), or move the old log away; never append to it",
    ),
    "CFG-06": (
        "data, tokenizer or checkpoint is missing, incomplete or not accessible",
        "look at the path in the evidence from a compute node; set DATADIR and MODEL; compare rows and bytes with their source; "
        "for a gated model accept its licence and pass HF_TOKEN",
    ),
    "CFG-07": (
        "a secret stands in a script, a plan or a log",
        "revoke it; pass secrets by the name of an environment variable or file, never by value",
    ),
    "CFG-08": (
        "results cannot be written: the disk is full, or the folder is not writable",
        "`df -h` and `quota -s` on the node, make room; or set LOGDIR to a folder that the job may write",
    ),
    "CFG-09": (
        "the configuration was refused",
        "correct the key named in the evidence; `python -m bench plan KEY=VALUE…` checks it without starting anything",
    ),
    "CFG-10": (
        "the checkpoint does not fit the model",
        "compare the shapes in the evidence (first the checkpoint's, then the model's): load the checkpoint of the model that "
        "the configuration names, or convert it again for this model; a vocabulary may be padded to another size",
    ),
}

RUN = {
    "RUN-01": (
        "a GPU ran out of memory",
        "raise parallel.tp (weights) or parallel.cp (activations), set recipe.recompute=full, or lower recipe.micro_batch_size; "
        "`nvidia-smi` on the node shows whether something else holds memory",
    ),
    "RUN-02": (
        "a rank was killed from outside",
        "find out who ended it: host memory, a time limit or a person. The node's `dmesg -T` names what the kernel killed; "
        "under Slurm ask `sacct -j JOB -o State,ExitCode,MaxRSS` too",
    ),
    "RUN-03": (
        "the host ran out of memory",
        "ask for all of the node's memory (--mem=0), and for less: fewer data workers, fewer ranks loading a checkpoint at once",
    ),
    "RUN-04": (
        "a rank crashed in native code",
        "run it again with PYTHONFAULTHANDLER=1 for the Python stack; compare driver, CUDA and image versions with a node that "
        "works; after a bus error look for a full /dev/shm or disk (`df -h`)",
    ),
    "RUN-05": (
        "the loss is not a number: training diverged, or data or weights hold NaN",
        "lower recipe.lr or warm up longer, check recipe.clip_grad and the precision; look for rows or weights that are not finite",
    ),
    "RUN-06": (
        "the run does not converge: its evaluations do not reach the target",
        "compare seed, learning rate, batch size, model and data with the benchmark's reference; train for more steps if the "
        "evaluations still improve; if they never did, look for wrong data, labels or initial weights",
    ),
    "RUN-07": (
        "the log stops in the middle, without a reason",
        "if the job still runs, it hangs: `py-spy dump --pid PID` on every rank shows where; if it is gone, look at the node's "
        "`dmesg -T` and, under Slurm, at `sacct -j JOB -o State,ExitCode`",
    ),
    "RUN-08": (
        "a program or Python module is missing, or does not fit the others",
        "start the ranks in the image that the recipe was made for, and try `python -c 'import MODULE'` in it; on a machine "
        "without containers `pip install 'runstop[engine]'`; keep PYTHONPATH and ~/.local out (PYTHONNOUSERSITE=1); torch "
        "compiles kernels for GPUs and needs a C compiler there (gcc, or CC names another)",
    ),
    "RUN-09": (
        "a GPU kernel failed",
        "run it again with CUDA_LAUNCH_BLOCKING=1 for the place; index errors mean token ids beyond the vocabulary; if it always "
        "is the same GPU, drain that node",
    ),
    "RUN-10": (
        "a rank ended with an error of its own",
        "do what its message says",
    ),
    "RUN-11": (
        "shared memory (/dev/shm) is too small",
        "mount a larger one (Docker --shm-size=64g or --ipc=host; Kubernetes an emptyDir of medium Memory), or use fewer data workers",
    ),
    "RUN-12": (
        "the log does not prove what the plan asked for",
        "`python -m bench parse` names each finding; run the trial again from an unchanged plan",
    ),
    "RUN-13": (
        "a Python exception ended a rank",
        "read the exception in the evidence and open the file and line that it names: they are the innermost frame outside of "
        "installed packages; the whole traceback stands in the log, just above",
    ),
    "RUN-14": (
        "a file system failed while the run read or wrote",
        "look at the storage, not at the run: `dmesg -T` on the node, then its mounts; a stale file handle means that another "
        "machine deleted or replaced an open file. Remount or repair it, and start the run again",
    ),
    "RUN-15": (
        "a limit of the process is reached: open files, threads or processes",
        "raise it before the ranks start (`ulimit -n` for files, `ulimit -u` for processes; Slurm takes over the limits of the "
        "shell that submits), or use fewer data workers",
    ),
    "RUN-16": (
        "cuBLAS or cuDNN could not start on the GPU",
        "most often no GPU memory is left: look with `nvidia-smi` on the node, and lower recipe.micro_batch_size; else an "
        "earlier kernel failed (CUDA_LAUNCH_BLOCKING=1 shows it), or the driver is too old for the image's CUDA",
    ),
}

LOG = {
    "LOG-01": ("the clock never starts", "log run_start when initialisation is over, before any data is read"),
    "LOG-02": ("the clock never stops", "find out what ended the run, and run it again: there is no time to score"),
    "LOG-03": (
        "the clock starts or stops more than once, as in a log that was appended to",
        "write each trial to a file of its own, opened exclusively (never `>>` or `tee -a`), and run this one again",
    ),
    "LOG-04": (
        "events stand in the wrong order",
        "log init_start, init_stop, run_start, run_stop in this order, on one rank",
    ),
    "LOG-05": (
        "the run does not say that it succeeded",
        "find out why it was aborted; only a run that succeeded has a time",
    ),
    "LOG-06": (
        "nothing was evaluated",
        "train past the first evaluation: raise max_steps, or see what ended the run before",
    ),
    "LOG-07": ("the last evaluation misses the target", "train longer or tune; the run counts as not converged"),
    "LOG-08": (
        "a value is not a finite number",
        "find the step where it first was none; lower the learning rate or clip",
    ),
    "LOG-09": (
        "a record is garbled",
        "let one rank write the log, unbuffered, to a file that nothing else prints to; never edit a log",
    ),
    "LOG-10": ("a required key is missing", "log every key that the benchmark's rule file asks for"),
    "LOG-11": ("a key that stands once stands several times", "log it on one rank, once"),
    "LOG-12": (
        "the target is easier than the official one",
        "set task.training.target_eval_loss to the official target",
    ),
    "LOG-13": ("an evaluation stands outside run_start to run_stop", "evaluate only while the clock runs"),
    "LOG-14": (
        "initialisation takes longer than is allowed",
        "make checkpoint loading and compilation faster: 30 min, open 240",
    ),
    "LOG-15": (
        "the seed is missing, not a whole number, or not the only one",
        "log one whole number as seed, another for each run",
    ),
    "LOG-16": (
        "the weights are random, so the log proves a speed, and neither a time to train nor a score",
        "`python -m bench report` compares the speed; for a time to train set model.weights=checkpoint",
    ),
    "REC-01": (
        "a value that the rules fix is another one",
        "set it to the value of the rules, or submit to the open division",
    ),
    "REC-02": (
        "the data does not have the rows of the rules",
        "prepare the data again, and train and evaluate on all of it",
    ),
    "REC-03": ("the submitter or the platform is not named", "set cluster.org and cluster.platform"),
    "EVL-01": (
        "evaluations do not stand where the rules have them",
        "evaluate every CEIL(384 / GBS) steps from the first one due; see CFG-03",
    ),
    "EVL-02": ("the target was reached at an evaluation that the rules do not have", "evaluate only when it is due"),
    "EVL-03": ("an evaluation does not say after how many samples", "log samples_count with every eval_accuracy"),
}

SCORE = {
    "SCO-01": ("there are not as many runs as a score takes", "run the missing trials with seeds of their own"),
    "SCO-02": (
        "more runs failed than may count as the slowest",
        "see `python -m bench why` for each; run those trials again",
    ),
    "SCO-03": ("runs share a seed", "run one of them again with another seed (seed_base)"),
    "SCO-04": ("the runs were not made alike", "score only runs of one plan together"),
    "SCO-05": (
        "the runs do not converge like the reference",
        "compare hyperparameters and data with the reference's; see RUN-06",
    ),
    "SCO-06": (
        "there are no official rules for these runs",
        "score a benchmark and batch size that the official rules know",
    ),
    "PCK-01": ("a benchmark has not as many runs as its rules want", "run the missing trials with seeds of their own"),
    "PCK-02": ("a log does not prove a valid trial", "leave that run out, or run the trial again"),
    "PCK-03": ("the task was not made to be submitted", "choose a task of the benchmark, such as task=lora70b"),
    "PCK-04": ("the runs of one benchmark were not made alike", "pack only runs of one plan together"),
    "PCK-05": ("the log names another organization", "pack with --org as logged, or set cluster.org and run again"),
}

_TEXTS = cluster.PYXIS | cluster.SLURM | cluster.ENROOT | cluster.MPI | cluster.NCCL
_TEXTS |= cluster.HARDWARE | CONFIG | RUN | LOG | SCORE

RULES: dict[str, Rule] = {
    id: Rule(id, title, fix, tuple(sign for sign in signs.SIGNS if sign.rule == id))
    for id, (title, fix) in _TEXTS.items()
}
