"""Texts of the rules about the request and the run: configuration, data, memory, crashes, convergence.

Each is ID -> (what is wrong, what to do).
"""

from bench.rules.cluster import Texts

CONFIG: Texts = {
    "CFG-01": (
        "the ranks or the batch cannot be split as asked",
        "make tp x pp x cp divide the ranks, dp x micro batch divide recipe.global_batch_size, and tp at most a "
        "node's GPUs: "
        "`python -m bench plan` lists the legal values",
    ),
    "CFG-02": (
        "validation is due later than an epoch ends",
        "set val_check_interval (in steps, CEIL(384 / GBS)) to at most the training batches of an epoch, or "
        "check_val_every_n_epoch=None so that it counts across epochs; then see why the data is that short",
    ),
    "CFG-03": (
        "the model is not evaluated when the official rules say",
        "evaluate every CEIL(384 / GBS) steps, leaving out the first FLOOR(0.125 x GBS + 2): "
        "recipe.eval_every_samples=384, "
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
        "look at the path in the evidence from a compute node; set DATADIR and MODEL; compare rows and bytes with "
        "their source; "
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
        "compare the shapes in the evidence (first the checkpoint's, then the model's): load the checkpoint of the "
        "model that "
        "the configuration names, or convert it again for this model; a vocabulary may be padded to another size",
    ),
    "CFG-11": (
        "the run folder is not this user's alone",
        "start in a new folder (leave launch.folder out), below a LOGDIR in which only you may write: others could "
        "exchange files of a run, or put in modules that its ranks would import",
    ),
}

RUN: Texts = {
    "RUN-01": (
        "a GPU ran out of memory",
        "raise parallel.tp (weights) or parallel.cp (activations), set recipe.recompute=full, or lower "
        "recipe.micro_batch_size; "
        "`nvidia-smi` on the node shows whether something else holds memory",
    ),
    "RUN-02": (
        "a rank was killed from outside",
        "find out who ended it: host memory, a time limit or a person. The node's `dmesg -T` names what the kernel "
        "killed; "
        "under Slurm ask `sacct -j JOB -o State,ExitCode,MaxRSS` too",
    ),
    "RUN-03": (
        "the host ran out of memory",
        "ask for all of the node's memory (--mem=0), and for less: fewer data workers, fewer ranks loading a "
        "checkpoint at once",
    ),
    "RUN-04": (
        "a rank crashed in native code",
        "run it again with PYTHONFAULTHANDLER=1 for the Python stack; compare driver, CUDA and image versions with a "
        "node that "
        "works; after a bus error look for a full /dev/shm or disk (`df -h`)",
    ),
    "RUN-05": (
        "the loss is not a number: training diverged, or data or weights hold NaN",
        "lower recipe.lr or warm up longer, check recipe.clip_grad and the precision; look for rows or weights that "
        "are not finite",
    ),
    "RUN-06": (
        "the run does not converge: its evaluations do not reach the target",
        "compare seed, learning rate, batch size, model and data with the benchmark's reference; train for more "
        "steps if the "
        "evaluations still improve; if they never did, look for wrong data, labels or initial weights",
    ),
    "RUN-07": (
        "the log stops in the middle, without a reason",
        "if the job still runs, it hangs: `py-spy dump --pid PID` on every rank shows where; if it is gone, look at "
        "the node's "
        "`dmesg -T` and, under Slurm, at `sacct -j JOB -o State,ExitCode`",
    ),
    "RUN-08": (
        "a program or Python module is missing, or does not fit the others",
        "start the ranks in the image that the recipe was made for, and try `python -c 'import MODULE'` in it; on a "
        "machine "
        "without containers `pip install 'runstop[engine]'`; keep PYTHONPATH and ~/.local out (PYTHONNOUSERSITE=1); "
        "torch "
        "compiles kernels for GPUs and needs a C compiler there (gcc, or CC names another)",
    ),
    "RUN-09": (
        "a GPU kernel failed",
        "run it again with CUDA_LAUNCH_BLOCKING=1 for the place; index errors mean token ids beyond the vocabulary; "
        "if it always "
        "is the same GPU, drain that node",
    ),
    "RUN-10": (
        "a rank ended with an error of its own",
        "do what its message says",
    ),
    "RUN-11": (
        "shared memory (/dev/shm) is too small",
        "mount a larger one (Docker --shm-size=64g or --ipc=host; Kubernetes an emptyDir of medium Memory), or use "
        "fewer data workers",
    ),
    "RUN-12": (
        "the log does not prove what the plan asked for",
        "`python -m bench parse` names each finding; run the trial again from an unchanged plan",
    ),
    "RUN-13": (
        "a Python exception ended a rank",
        "read the exception in the evidence and open the file and line that it names: they are the innermost frame "
        "outside of "
        "installed packages; the whole traceback stands in the log, just above",
    ),
    "RUN-14": (
        "a file system failed while the run read or wrote",
        "look at the storage, not at the run: `dmesg -T` on the node, then its mounts; a stale file handle means "
        "that another "
        "machine deleted or replaced an open file. Remount or repair it, and start the run again",
    ),
    "RUN-15": (
        "a limit of the process is reached: open files, threads or processes",
        "raise it before the ranks start (`ulimit -n` for files, `ulimit -u` for processes; Slurm takes over the "
        "limits of the "
        "shell that submits), or use fewer data workers",
    ),
    "RUN-16": (
        "cuBLAS or cuDNN could not start on the GPU",
        "most often no GPU memory is left: look with `nvidia-smi` on the node, and lower recipe.micro_batch_size; "
        "else an "
        "earlier kernel failed (CUDA_LAUNCH_BLOCKING=1 shows it), or the driver is too old for the image's CUDA",
    ),
    "RUN-17": (
        "the ranks stalled: a step, an evaluation or a collective did not end",
        "look at the rank or node that the evidence names; rank_logs/trial_K_rank_R.stack shows where each rank stood. "
        "A rank without a stack was stopped, or its node or network was gone. If healthy steps vary that much, raise "
        "launch.stall.factor or launch.stall.floor_s",
    ),
    "RUN-18": (
        "a step or an evaluation took many times the median",
        "look at that moment in the nodes' `dmesg -T` and the monitoring of network, storage and GPU clocks; run the "
        "trial again",
    ),
    "RUN-19": (
        "a group of ranks that trains apart has left",
        "look at rank_logs/trial_K_rank_R.out of its ranks: a process that was killed, or a network that was too slow "
        "for recipe.local_sgd.time_limit_s. The others went on with its rows; a run that is resumed has all groups, "
        "and on one machine recipe.local_sgd.restarts=1 starts it again",
    ),
}
