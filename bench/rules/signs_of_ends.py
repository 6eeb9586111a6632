"""Patterns of how ranks and runs end, of what the other ranks then print, and of hints.

The order matters: the first pattern that matches a line wins. `bench.rules.signs` joins these files.
"""

from bench.rules.line_starts import TASKS

CRASHES: dict[str, tuple[bytes, ...]] = {
    "RUN-04": (
        rb"Segmentation fault|\bBus error\b|Fatal Python error: Illegal instruction",
        rb"Signal \d{1,2} \(SIG(?:SEGV|BUS|ILL|FPE)\) received|\bexitcode {0,4}: -(?:11|7|4|8)\b",
        rb"\bfree\(\): invalid (?:pointer|size|next)|double free or corruption|corrupted size vs\. prev_size",
    ),
    "RUN-02": (rb"Signal 9 \(SIGKILL\) received|\bexitcode {0,4}: -9\b",),
}

DEATHS: dict[str, tuple[bytes, ...]] = {
    "RUN-04": (rb"Exited with exit code (?:139|135|132)\b|" + TASKS + rb"(?:Bus error|Illegal instruction)",),
    "RUN-02": (
        rb"\bgot SIG(?:KILL|SEGV|BUS|ABRT|TERM|INT|HUP) during ",
        TASKS + rb"Killed",
        rb"Exited with exit code 137\b|: line \d{1,6}: +\d{1,9} Killed\b",
        TASKS + rb"(?:Terminated|Interrupt|Exited with exit code (?:143|130)\b)",
        rb"Signal 15 \(SIGTERM\) received|\bexitcode {0,4}: -15\b",
    ),
}

ECHOES: dict[str, tuple[bytes, ...]] = {
    "NCC-03": (rb"NET/IB\w?.{0,5}: Got completion .{0,80}(?:status=|error )12\b",),
    "NCC-06": (
        rb"Watchdog caught collective operation timeout|watchdog got stuck for \d"
        rb"|NCCL operations have failed or timed out",
        rb"ProcessGroupNCCL watchdog hang|Heartbeat monitor timed out!",
        rb"NCCL watchdog thread terminated|NCCL communicator was aborted|ncclRemoteError",
        rb"NET/IB\w?.{0,5}: Got completion (?:from peer|with error)|Socket Timeout\b"
        rb"|Timed out waiting \d+ms for (?:recv|send)",
        rb"gloo/transport/\w{1,10}/.{0,100}(?:closed by|timed out|Timed out|Read error)",
    ),
    "NCC-05": (
        rb"waiting for clients\. \d+/\d+ clients joined|failed to connect to .{1,80} after \d+ ?ms"
        rb"|The client socket has timed out",
    ),
    "NCC-07": (
        rb"nccl(?:System|Internal|UnhandledCuda|InvalidUsage)Error|unhandled (?:system|cuda) error|NCCL [Ee]rror",
    ),
    "RUN-04": (
        rb"Fatal Python error: Aborted|Signal 6 \(SIGABRT\) received|\bexitcode {0,4}: -6\b|" + TASKS + rb"Aborted",
        rb"Exited with exit code 134\b",
    ),
    "ENR-10": (
        rb"pyxis: (?:failed to import docker image|failed to create container filesystem|container start"
        rb"|container exited|importer .{1,300} failed)",
        rb"\[ERROR\] Could not process JSON input",
    ),
    "PYX-02": (rb"spank: required plugin \S{0,80}pyxis\.so: (?!task_init)",),
}

ENDS: dict[str, tuple[bytes, ...]] = {
    "RUN-20": (rb"the program of rank \d{1,6} ended with (?:exit code|signal) \d",),
    "SLU-07": (rb"DUE TO TIME LIMIT", rb"took longer than its walltime"),
    # The batch script is gone.
    "RUN-02": (rb"STEP .{1,80} FAILED \(non-zero exit code or other failure mode\) \*\*\*",),
    "RUN-24": (rb"^KeyboardInterrupt\b",),
    "SLU-08": (
        rb"(?:JOB|STEP) .{1,200} CANCELLED AT \S{1,40}(?: DUE (?:TO|to) (?:SIGNAL \w{1,20}|JOB REQUEUE))? \*\*\*",
        rb"srun: (?:interrupt \(one more|sending Ctrl-C to )",
        rb"got signal: (?:2|15)\b|Received (?:2|15) death signal|Received (?:Signals\.)?SIG(?:TERM|INT)\b",
    ),
}

HINTS: dict[str, tuple[bytes, ...]] = {
    "NCC-01": (rb"Bootstrap ?: ?Using (?:\[0\])?(?:lo|docker\d|virbr\d):",),
    "RUN-05": (rb"loss.{0,2}[=:] ?(?:nan|NaN)\b",),
    "KUB-14": (rb"NCCL INFO Bootstrap ?: ?Using (?:\[0\])?(?:cni\d|flannel|cali|tunl|kube-)[\w.]{0,20}:",),
    "NCC-02": (rb"NCCL INFO Using network Socket|NET/IB : No device found",),
    "MPI-02": (rb"PMIX ERROR: ",),
    "SLU-04": (rb"Slurm accounting storage is disabled|Bypassing sacct error",),
    "SLU-06": (rb"couldn't chdir to .{1,300}: No such file or directory: going to /tmp instead",),
}
