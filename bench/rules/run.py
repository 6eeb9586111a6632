"""Texts of the rules about the request and the run: configuration, data, memory, crashes, convergence.

Each is ID -> (what is wrong, how to fix it).
"""

from bench.rules.cluster import Texts

CONFIG: Texts = {
    "CFG-01": (
        "the ranks or the batch cannot be split as requested",
        "tp x pp x cp must divide the number of ranks, dp x micro batch must divide recipe.global_batch_size, and tp "
        "must not exceed the GPUs of a node: `runstop plan` lists the valid values",
    ),
    "CFG-02": (
        "the first validation would be after the end of an epoch",
        "set val_check_interval (in steps, CEIL(384 / GBS)) to at most the number of training batches of an "
        "epoch, or set check_val_every_n_epoch=None to count across epochs; then check why the data is so short",
    ),
    "CFG-03": (
        "the model is not evaluated at the samples that the official rules require",
        "llama2_70b_lora: evaluate every CEIL(384 / GBS) steps and skip the first FLOOR(0.125 x GBS + 2) evaluations "
        "(recipe.eval_every_samples=384, recipe.eval_skip=null); llama31_8b: every CEIL(12288 / GBS) steps, skip none",
    ),
    "CFG-04": (
        "MLPerf has no reference convergence point for this global batch size",
        "set recipe.global_batch_size to a size with a reference point (llama2_70b_lora: 8, 16, 32, 128; "
        "llama31_8b: 16, 32, 64, 96, 128), or to a size between two of them",
    ),
    "CFG-05": (
        "a result file with this name exists already",
        "use a new run folder (remove launch.folder), or move the old log to another folder; never append to a log",
    ),
    "CFG-06": (
        "data, tokenizer or checkpoint is missing, incomplete or not accessible",
        "check the path in the evidence on a compute node; set DATADIR and MODEL; compare the numbers of rows and"
        " bytes with the source; for a gated model, accept its licence and set HF_TOKEN",
    ),
    "CFG-07": (
        "a secret is in a script, a plan or a log",
        "revoke the secret; pass secrets as the name of an environment variable or file, never as a value",
    ),
    "CFG-08": (
        "results cannot be written: the disk is full, or the folder is not writable",
        "check `df -h` and `quota -s` on the node, and free disk space; or set LOGDIR to a writable folder",
    ),
    "CFG-09": (
        "the configuration is not valid",
        "correct the key in the evidence; `runstop plan KEY=VALUE…` checks the configuration without starting a run",
    ),
    "CFG-10": (
        "the checkpoint does not fit the model",
        "compare the two shapes in the evidence (the checkpoint's shape comes first). Load the checkpoint of the "
        "configured model, or convert it again for this model. The vocabulary may be padded to another size",
    ),
    "CFG-11": (
        "other users can write to the run folder",
        "use a new run folder (remove launch.folder) below a LOGDIR that only you can write to. Otherwise, other "
        "users could replace files of the run, or add modules that its ranks import",
    ),
    "CFG-12": (
        "rows, weights or the plan have changed, since they were written or between the trials of a run",
        "find out who changed the file in the evidence. Restore the file, or prepare the data again and start a "
        "new run. All trials of a run must read the same rows, weights and plan",
    ),
    "CFG-13": (
        "the estimated time of a trial is longer than its walltime",
        "raise walltime (minutes per trial), or lower task.training.max_steps; the estimate does not include "
        "evaluations",
    ),
    "CFG-14": (
        "a setting differs from the rules of MLPerf's closed division",
        "remove the override of the key in the evidence; to run outside of these rules, set task.division=open",
    ),
}

RUN: Texts = {
    "RUN-01": (
        "a GPU ran out of memory",
        "raise parallel.tp (weights) or parallel.cp (activations), set recipe.recompute=full, or lower "
        "recipe.micro_batch_size; `nvidia-smi` on the node shows whether another process uses GPU memory",
    ),
    "RUN-02": (
        "a rank was killed by the system or by another process",
        "find out what killed the rank (OOM killer, time limit or user): `dmesg -T` on the node shows the OOM "
        "killer; under Slurm, also run `sacct -j JOB -o State,ExitCode,MaxRSS`",
    ),
    "RUN-03": (
        "the host ran out of memory",
        "request all memory of the node (--mem=0), or use less memory: fewer data workers, or fewer ranks that "
        "load a checkpoint at the same time",
    ),
    "RUN-04": (
        "a rank crashed in native code",
        "run again with PYTHONFAULTHANDLER=1 to get the Python stack; compare driver, CUDA and image versions "
        "with a node that works; after a bus error, check whether /dev/shm or a disk is full (`df -h`)",
    ),
    "RUN-05": (
        "the loss is NaN or infinite: training diverged, or data or weights contain NaN",
        "lower recipe.lr or use a longer warm-up, check recipe.clip_grad and the precision; look for NaN in rows and "
        "weights",
    ),
    "RUN-06": (
        "the run does not converge: its evaluations do not reach the target",
        "compare seed, learning rate, batch size, model and data with the benchmark's reference. If the "
        "evaluations still improve, train for more steps. If they never improved, check data, labels and initial "
        "weights",
    ),
    "RUN-07": (
        "the log ends before run_stop, without a reason",
        "if the job still runs, it hangs: `py-spy dump --pid PID` on every rank shows where. If the job has "
        "ended, check `dmesg -T` on the node and, under Slurm, `sacct -j JOB -o State,ExitCode`",
    ),
    "RUN-08": (
        "a program or Python module is missing, or its version does not fit",
        "start the ranks in the image of the recipe, and try `python -c 'import MODULE'` in it; without containers run "
        "`pip install 'runstop[engine]'`; do not use PYTHONPATH and ~/.local (PYTHONNOUSERSITE=1); torch compiles GPU "
        "kernels and needs a C compiler (gcc, or set CC)",
    ),
    "RUN-09": (
        "a GPU kernel failed",
        "run again with CUDA_LAUNCH_BLOCKING=1 to find the place; index errors mean that token ids are outside "
        "the vocabulary; if it is always the same GPU, drain this node",
    ),
    "RUN-10": (
        "a rank reported an error and ended",
        "follow the message of the rank",
    ),
    "RUN-11": (
        "shared memory (/dev/shm) is too small",
        "make /dev/shm larger (Docker: --shm-size=64g or --ipc=host; Kubernetes: an emptyDir of medium Memory), or use "
        "fewer data workers",
    ),
    "RUN-12": (
        "the log does not match the plan",
        "`runstop parse` lists the problems; run the trial again from an unchanged plan",
    ),
    "RUN-13": (
        "a Python exception ended a rank",
        "read the exception in the evidence, and open its file and line (the innermost frame outside of installed"
        " packages). The complete traceback is in the log, above this line",
    ),
    "RUN-14": (
        "a file system failed while the run read or wrote",
        "check the storage, not the run: `dmesg -T` on the node, and then the mounts of the node. A stale file "
        "handle means that another machine deleted or replaced an open file. Remount or repair the file system, "
        "and start the run again",
    ),
    "RUN-15": (
        "a process has reached a limit: open files, threads or processes",
        "raise the limit before the ranks start (`ulimit -n` for files, `ulimit -u` for processes; Slurm copies "
        "the limits of the shell that submits), or use fewer data workers",
    ),
    "RUN-16": (
        "cuBLAS or cuDNN could not start on the GPU",
        "often the GPU memory is full: check `nvidia-smi` on the node, and lower recipe.micro_batch_size. "
        "Otherwise an earlier kernel failed (CUDA_LAUNCH_BLOCKING=1 shows this kernel), or the driver is too old "
        "for the CUDA of the image",
    ),
    "RUN-17": (
        "the ranks stalled: a step, an evaluation or a collective did not end",
        "check the rank or node named in the evidence; rank_logs/trial_K_rank_R.stack shows where each rank waited. "
        "A rank without a stack file was stopped, or its node or network failed. If normal steps vary that much, raise "
        "launch.stall.factor or launch.stall.floor_s",
    ),
    "RUN-18": (
        "a step or an evaluation took much longer than the median",
        "check `dmesg -T` on the nodes, and the monitoring of network, storage and GPU clocks at that time; run the "
        "trial again",
    ),
    "RUN-19": (
        "a local SGD group left the run",
        "check the files rank_logs/trial_K_rank_R.out of this group: a process was killed, or the network was too"
        " slow for recipe.local_sgd.time_limit_s. The other groups continued, and also trained the rows of this "
        "group. A resumed run has all groups again; on one machine, recipe.local_sgd.restarts=1 restarts the "
        "group",
    ),
    "RUN-20": (
        "the program of engine=command ended with an error",
        "read the last lines of the program in rank_logs/; exit code 127 means that the program was not found, "
        "and 137 that it was killed",
    ),
    "RUN-21": (
        "no output of the program of engine=command was read as training",
        "compare the lines of the program in rank_logs/ with engine.command.adapter and engine.command.patterns; "
        "the program must print lines to standard output without a buffer; if it writes them to a file, set "
        "engine.command.file",
    ),
    "RUN-22": (
        "the program of engine=command ended, but processes that it had started still ran",
        "let the program wait for the processes that it starts: their work is not timed and not checked after the"
        " program has ended",
    ),
    "RUN-23": (
        "the program of engine=command ended before it had trained all steps of the plan",
        "pass {max_steps} to the program, or set task.training.max_steps to the number of its steps; find out why"
        " the program ended",
    ),
    "RUN-24": (
        "the run was stopped by Ctrl-C, `cancel` or another signal",
        "`runstop resume RUN` continues the run; if a run must continue after its terminal is closed, start it "
        "with nohup or in tmux",
    ),
    "RUN-25": (
        "a Python module is not installed where the ranks run",
        "install the module in the evidence into the environment or image of the ranks, and try `python -c 'import "
        "MODULE'` there: `pip install 'runstop[engine]'` has the packages of runstop's own engine",
    ),
    "RUN-26": (
        "a rank was persistently slower than the others, which waited for it",
        "computation: check the node in the evidence (`runstop doctor --tier nodes`, `nvidia-smi -q`), and leave "
        "the node out if it stays slow; data loading: copy the rows to a local disk of the node; host contention:"
        " find the other processes on the CPUs of the node, or request more CPUs per rank; evaluation: compare "
        "the rank's share of the rows",
    ),
}
