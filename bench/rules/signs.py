"""What each rule leaves in a log: texts of PyTorch, NCCL, Lightning, megatron-core, Slurm, Pyxis, Enroot, the kernel, and ours.

Patterns see one line (a few thousand bytes of a longer one), without escape sequences, and name what only a failure prints.
Where several fit one line, the first one listed wins.
"""

from dataclasses import dataclass
from enum import IntEnum


class Weight(IntEnum):
    """How much a sign explains: a higher one wins wherever it stands, then the earlier one."""

    HINT = 1
    """Runs that are fine print it too: it counts in a run that failed, where nothing else does."""
    OUTCOME = 2
    """What the MLPerf records say of how it went; `bench.diagnosis.trial_state` finds these."""
    END = 3
    """How a run was ended, whatever the reason."""
    ECHO = 4
    """What ranks say when another one is gone."""
    DEATH = 5
    """A rank that died without a word of its own."""
    CAUSE = 6
    """It names what is at fault."""


EVENTS = (Weight.END, Weight.ECHO, Weight.DEATH)
"""Each can follow from another one: within a file the first explains the rest."""


@dataclass(frozen=True, slots=True)
class Sign:
    """One way in which a rule shows."""

    rule: str
    weight: Weight
    pattern: bytes


_LINE = rb"^(?: {0,6}\d{1,6}: ?|\[\S{1,80}\]:? ?){0,3}"
"""The start of a line, with what srun -l and torch put before it."""
_TASKS = rb"^.{0,20}srun: error: .{1,80}: tasks? [\d,-]{1,200}: "

CAUSES: dict[str, tuple[bytes, ...]] = {
    "PYX-01": (rb"_do_option_cb.{0,20}Assertion \W?arg\W? failed",),
    "PYX-02": (
        rb"unrecognized option '--(?:no-)?container-",
        rb"Incompatible (?:Slurm )?plugin.{0,100}version",
        rb"spank_pyxis\.so: cannot open shared object|spank_pyxis\.so: Plugin file not found",
    ),
    "PYX-04": (rb"pyxis: ignoring .{1,60} because neither --container-image nor --container-name is set",),
    "PYX-06": (
        rb"registry-1\.docker\.io/v2/(?:library/)?(?:[\w-]+\.[\w.-]{2,60}(?::\d+)?/|\S{1,300}\.sqsh).{0,300}error code: 40",
    ),
    "PYX-07": (
        rb"pyxis: --container-mounts: (?:source path does not exist|cannot stat source path)",
        rb"enroot-mount: failed to mount: .{1,400}: No such file or directory",
    ),
    "PYX-08": (
        rb"pyxis: error: .{1,20} flag was passed to --container-name but",
        rb"pyxis: error: a container with name .{1,200} does not exist",
        rb"\[ERROR\] File already exists: .{0,300}pyxis_",
    ),
    "PYX-10": (
        rb"\b(?:srun|scontrol|sbatch): (?:command )?not found",
        rb"FileNotFoundError: .{0,80}'(?:srun|scontrol|sbatch)'",
    ),
    "PYX-11": (rb"pyxis: couldn't chdir to ",),
    "PYX-12": (
        rb"pyxis: (?:both --|mount (?:source|target) must be)",
        rb"pyxis: --container-[\w-]{3,20}(?:: (?:invalid|argument required|empty|flag must|target is)| specified multiple)",
    ),
    "ENR-01": (
        rb"(?:returned error code|requested URL returned error): 40[13]\b",
        rb"\[ERROR\] Could not parse authentication realm",
    ),
    "ENR-03": (
        rb"\[ERROR\] Not enough space left in ",
        rb"Write failed because No space left|[Pp]robably out of space on output filesystem",
        rb"(?:pyxis|enroot|mksquashfs).{0,300}No space left on device",
    ),
    "ENR-04": (rb"failed to (?:create|unshare) user namespace", rb"enroot-nsenter: failed to "),
    "ENR-06": (
        rb"\[ERROR\] Command not found: ",
        rb"hooks\.d/\S{1,100} exited with return code",
        rb"nvidia-container-cli: \w{1,20} error",
    ),
    "ENR-07": (
        rb"No such file or directory: .{0,400}\.sqsh",
        rb"\.sqsh'?: No such file or directory",
        rb"Exec format error",
    ),
    "ENR-08": (
        rb"\[ERROR\] Invalid image format: ",
        rb"[Cc]an't find a (?:valid )?SQUASHFS superblock",
        rb"SQUASHFS error: |FATAL ERROR: ?[Ff]ailed to read",
    ),
    "ENR-09": (
        rb"pyxis: .{0,20}couldn't mkdir \S{1,200}: ",
        rb"cannot create directory .{0,5}/run/(?:user|pyxis|enroot)",
    ),
    "ENR-10": (rb"returned error code: 404", rb"\[ERROR\] Invalid image reference: "),
    "MPI-01": (
        rb"[Ii]nvalid MPI (?:plugin )?(?:type|name)",
        rb"plugin name for mpi/|cannot create mpi context for mpi/",
    ),
    "MPI-02": (
        rb"OPAL ERROR: Unreachable in file (?:pmix|ext)",
        rb"OMPI was not built with SLURM's PMI",
        rb"PMI[Xx].{0,80}version mismatch|version mismatch.{0,60}PMI[Xx]",
        rb"(?:pmix_init|PMIX_Init|PMIx_Init|pmix_\w{1,20}_open) failed",
        rb"mpi/pmix.{0,120}Bad request|nspace .{0,3}slurm\.pmix\..{0,40} has only \d+ ranks",
        rb"Framework: psec\b|PMIX ERROR: (?:NOT-FOUND|PMIX TEMPORARILY UNAVAILABLE|UNPACK|PMIX_ERR_UNPACK)",
    ),
    "SLU-01": (rb"[Ii]nvalid (?:generic resource|GRES)|Requested GRES option unsupported",),
    "SLU-02": (
        rb"More processors requested than permitted|Job violates accounting/QOS policy",
        rb"Requested (?:node configuration is not available|time limit is invalid|partition configuration not available)",
        rb"(?:error|failed|failure): .{0,60}(?:Invalid (?:account|qos|partition|feature)|Node count specification invalid|PrologSlurmctld failed)",
    ),
    "SLU-03": (rb"set by two different environment variables",),
    "SLU-06": (
        rb"execve\(\): .{1,300}: No such file or directory",
        rb"(?:error|fatal): .{0,60}[Cc]ould not open std(?:out|err|in) file",
    ),
    "SLU-09": (
        rb"DUE TO NODE FAILURE",
        rb"srun: error: (?:Node failure on |Task launch for .{1,80} failed on node .{1,80}: (?:Communication|Socket timed))",
    ),
    "SLU-10": (rb"CANCELLED AT \S{1,40} DUE TO PREEMPTION",),
    "HW-02": (
        rb"system not yet initialized|CUDA_ERROR_SYSTEM_NOT_READY|cudaErrorSystemNotReady",
        rb"transport/nvls\.cc:\d+ NCCL WARN|NVRM: Xid .{0,60}: 74\b",
        rb"(?:[Ff]abric ?[Mm]anager|IMEX).{0,60}(?:fail|not running|not ready|inactive)",
        rb"NVLink.{0,40}(?:fatal|uncorrectable|inactive)",
    ),
    "HW-01": (
        rb"uncorrectable (?:NVLink|ECC) error|[Dd]ouble[ -][Bb]it ECC|GPU has fallen off the bus",
        rb"(?:NVRM: Xid .{0,60}: |\b[Xx][Ii][Dd][ :=]{1,2})(?:48|6[34]|79|9[245]|119|120|140)\b",
        rb"Unable to determine the device handle for GPU|[Rr]ow[ -][Rr]emap\w{0,5} (?:failed|failure)",
    ),
    "HW-04": (
        rb"NVML: Driver/library version mismatch|NVRM: API mismatch: ",
        rb"unsupported display driver / cuda driver combination|cudaErrorSystemDriverMismatch",
    ),
    "HW-05": (
        rb"[Cc]ompute capability .{0,60}required for FP8|only supported on .{0,20}devices with compute capability",
        rb"FP8 .{0,60}requires? .{0,40}compute capability|fp8e4nv not supported in this architecture",
        rb"no kernel image is available for execution|sm_\d+ is not compatible with the current PyTorch installation",
    ),
    "HW-03": (
        rb"NVIDIA driver on your system is too old|forward compatibility was attempted on non supported HW",
        rb"no CUDA-capable device is detected|No CUDA GPUs are available|Found no NVIDIA driver",
        rb"CUDA driver version is insufficient|NVIDIA-SMI has failed because|invalid device ordinal",
        rb"CUDA-capable device\(s\) is/are busy|this rank needs GPU \d+, and \d+ can be seen",
    ),
    "RUN-01": (
        rb"(?:CUDA|HIP) out of memory|CUDA [Ee]rror: out of memory|Cuda failure (?:\d+ )?'out of memory'",
        _LINE + rb"(?:torch\.|torch\.cuda\.)?OutOfMemoryError\b",
        rb"CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation|CU(?:BLAS|DNN)_STATUS_ALLOC_FAILED|NCCL WARN Failed to CUDA [cm]alloc",
    ),
    "RUN-16": (rb"CU(?:BLAS|DNN)_STATUS_NOT_INITIALIZED",),
    "RUN-11": (
        rb"insufficient shared memory \(shm\)|workers are out of shared memory",
        rb"NCCL WARN Error.{0,5} (?:while creating shared memory segment|failed to extend) /dev/shm/",
        rb"unable to (?:write to|open|mmap|resize).{0,40}/torch_.{0,100}(?:No space left|Cannot allocate)",
        rb"/dev/shm.{0,200}(?:No space left|too small)",
    ),
    "RUN-03": (
        rb"Detected [1-9]\d{0,8} oom[-_]kill|oom-kill:constraint|invoked oom-killer|[Oo]ut of memory: Kill|oom_reaper: reaped",
        _TASKS + rb"Out Of Memory",
        rb"exceeded (?:job |step )?memory limit.{0,80}being killed",
        _LINE + rb"MemoryError\b",
        rb"DefaultCPUAllocator: .{0,40}(?:can't|not enough)|std::bad_alloc|\[Errno 12\] Cannot allocate memory",
    ),
    "RUN-14": (
        rb"Stale (?:NFS )?file handle|\[Errno 116\]",
        rb"\[Errno (?:5|121)\] |: Input/output error|\bI/O error, dev |Buffer I/O error on dev",
        rb"Cannot send after transport endpoint shutdown",
    ),
    "RUN-15": (
        rb"Too many open files|received 0 items of ancdata|can't start new thread",
        rb"(?:fork|pthread_create|Thread creation).{0,80}Resource temporarily unavailable",
    ),
    "CFG-08": (
        rb"No space left on device|Disk quota exceeded",
        rb"PermissionError: \[Errno 13\]|/(?:results?|logs?|runs?)/\S{0,300}: Permission denied",
        rb"(?:tee|cannot (?:create|touch|write|open|move)|mkdir).{0,300}: Permission denied|cannot write: ",
    ),
    "ENR-05": (rb"Read-only file system",),
    "CFG-02": (
        rb"val_check_interval.{0,40} must be less than or equal to the number of the training batches",
        rb"evaluation every \d+ steps is \d+ samples, longer than the data's",
    ),
    "CFG-10": (
        rb"size mismatch for .{1,300}: copying a param with shape|Global shape mismatch for loaded",
        rb"(?:Missing|Unexpected) key\(s\) in state_dict: ",
    ),
    "CFG-05": (rb"FileExistsError: .{0,300}result_\d",),
    "CFG-06": (
        rb"Cannot access gated repo|GatedRepoError|trying to access a gated repo|RepositoryNotFoundError|LocalEntryNotFoundError",
        rb"40[13] Client Error.{0,120}huggingface|Repository Not Found for url",
        rb"is not a local folder and is not a valid model identifier|We couldn't connect to 'https://huggingface",
        rb"Can't load tokenizer for|[Uu]nable to load vocabulary|is not a distributed checkpoint|not a checkpoint of ",
        _LINE
        + rb"FileNotFoundError: .{0,300}(?:data|train|valid|eval|token|model|ckpt|checkpoint|\.npy|\.idx|\.bin|\.json)",
        rb"no (?:prepared )?rows of |(?:train|eval) rows of .{1,60} cannot be read|holds rows .{1,80}; the plan says",
        rb"mountcheck.{0,300}(?:fail|mismatch|unexpected|error)|srcIndex < srcSelectDimSize|index out of range in self",
    ),
    "CFG-01": (
        rb"world[ _]size \((?:[2-9]|\d{2,7})\).{0,40} is not divisible by",
        rb"global batch size .{0,40}not divisible by|ranks cannot be split into replicas",
    ),
    "CFG-09": (
        _LINE + rb"(?:hydra|omegaconf)\.errors\.\w{1,60}",
        rb"Could not override '|Key '.{1,80}' is not in struct|Could not find '\w{1,40}/.{1,80}'",
    ),
    "NCC-01": (
        rb"[Nn]o socket interface found|No interface found in the same subnet",
        rb"NCCL WARN .{0,80}onnect to .{1,80} (?:failed ?:|returned) .{0,60}(?:No route to host|Network is unreachable)",
        rb"Unable to find (?:address|interface) for: ",
        rb"NCCL WARN .{0,80}onnect to (?:172\.17\.0\.1|192\.168\.122\.1)<",
    ),
    "NCC-05": (
        rb"Address already in use|EADDRINUSE|address already in use",
        rb"^ {0,6}[1-9]\d{0,6}: .{0,200}GLOBAL_RANK: 0, MEMBER: 1/",
        rb"^ {0,6}[1-9]\d{0,6}: .{0,60}\brank[ :=]{1,3}(?:0 of 1|0/1|0,? world[ _]size[ :=]{1,2}1)\b",
        rb"world[ _]size \(1\).{0,40} is not divisible by|\d+ ranks were started, and the plan is for \d+",
    ),
    "NCC-03": (
        rb"NCCL WARN Call to ibv_\w{1,40} failed|async fatal event on ",
        rb"Got async (?:error )?event ?: (?:port error|local catastrophic error|.{0,40}work queue .{0,20}error)",
    ),
    "RUN-05": (
        rb"the (?:training|evaluation) loss is (?:nan|-?inf)",
        rb"found NaN in |number of nan iterations: {1,4}[1-9]|loss returned in `training_step` is (?:nan|tensor\((?:nan|-?inf))",
        rb"\b[Ll]oss is (?:NaN|nan|inf|Inf)\b",
    ),
    "RUN-09": (
        rb"CUDA [Ee]rror: (?:an illegal memory access|unspecified launch failure|device-side assert|misaligned address|an illegal instr)",
        rb"NVRM: Xid .{0,60}: (?:13|31)\b",
    ),
    "PYX-03": (
        _LINE + rb"ModuleNotFoundError: No module named '(?:torch|transformer_engine|megatron|nemo|apex|lightning|"
        rb"pytorch_lightning|mlperf_common|mlperf_logging|flash_attn)\b",
    ),
    "RUN-08": (
        _LINE + rb"(?:ModuleNotFoundError|ImportError): ",
        rb"FileNotFoundError: .{0,80}'(?:\S{0,80}/)?(?:cc|gcc|g\+\+|c\+\+|clang(?:\+\+)?|nvcc|ninja)'",
        rb"error while loading shared libraries: |can't open file '.{1,300}': \[Errno 2\]|/usr/bin/env: .{1,40}: No such file",
        rb"^.{0,200}(?:line \d{1,6}|bash|sh): .{1,100}: (?:command not found|not found)$",
        rb"Failed to find C compiler\.|No working C\+\+ compiler found|CUDA_HOME environment variable is not set",
        rb"(?:gcc|g\+\+|clang)\S{0,10}: fatal error: cannot execute|Ninja is required to load C\+\+ extensions",
    ),
}

DEATHS: dict[str, tuple[bytes, ...]] = {
    "RUN-04": (
        rb"Segmentation fault|\bBus error\b|Fatal Python error: Illegal instruction",
        rb"Signal \d{1,2} \(SIG(?:SEGV|BUS|ILL|FPE)\) received|\bexitcode {0,4}: -(?:11|7|4|8)\b",
        rb"Exited with exit code (?:139|135|132)\b|" + _TASKS + rb"(?:Bus error|Illegal instruction)",
    ),
    "RUN-02": (
        rb"Signal 9 \(SIGKILL\) received|\bexitcode {0,4}: -9\b",
        rb"\bgot SIG(?:KILL|SEGV|BUS|ABRT|TERM|INT|HUP) during ",
        _TASKS + rb"Killed",
        rb"Exited with exit code 137\b|: line \d{1,6}: +\d{1,9} Killed\b",
        _TASKS + rb"(?:Terminated|Exited with exit code 143\b)",
        rb"Signal 15 \(SIGTERM\) received|\bexitcode {0,4}: -15\b",
    ),
}

ECHOES: dict[str, tuple[bytes, ...]] = {
    "NCC-03": (rb"NET/IB\w?.{0,5}: Got completion .{0,80}(?:status=|error )12\b",),
    "NCC-06": (
        rb"Watchdog caught collective operation timeout|watchdog got stuck for \d|NCCL operations have failed or timed out",
        rb"ProcessGroupNCCL watchdog hang|Heartbeat monitor timed out!",
        rb"NCCL watchdog thread terminated|NCCL communicator was aborted|ncclRemoteError",
        rb"NET/IB\w?.{0,5}: Got completion (?:from peer|with error)|Socket Timeout\b|Timed out waiting \d+ms for (?:recv|send)",
        rb"gloo/transport/\w{1,10}/.{0,100}(?:closed by|timed out|Timed out|Read error)",
    ),
    "NCC-05": (
        rb"waiting for clients\. \d+/\d+ clients joined|failed to connect to .{1,80} after \d+ ?ms|The client socket has timed out",
    ),
    "NCC-07": (
        rb"nccl(?:System|Internal|UnhandledCuda|InvalidUsage)Error|unhandled (?:system|cuda) error|NCCL [Ee]rror",
    ),
    "RUN-04": (
        rb"Fatal Python error: Aborted|Signal 6 \(SIGABRT\) received|\bexitcode {0,4}: -6\b|" + _TASKS + rb"Aborted",
        rb"Exited with exit code 134\b",
    ),
    "ENR-10": (
        rb"pyxis: (?:failed to import docker image|failed to create container filesystem|container start|container exited|importer .{1,300} failed)",
        rb"\[ERROR\] Could not process JSON input",
    ),
    "PYX-02": (rb"spank: required plugin \S{0,80}pyxis\.so: (?!task_init)",),
}

ENDS: dict[str, tuple[bytes, ...]] = {
    "SLU-07": (rb"DUE TO TIME LIMIT", rb"took longer than its walltime"),
    "SLU-08": (
        rb"(?:JOB|STEP) .{1,200} CANCELLED AT \S{1,40}(?: DUE (?:TO|to) (?:SIGNAL \w{1,20}|JOB REQUEUE))? \*\*\*",
        rb"srun: (?:interrupt \(one more|sending Ctrl-C to )|^KeyboardInterrupt\b",
        rb"got signal: (?:2|15)\b|Received (?:2|15) death signal|Received (?:Signals\.)?SIG(?:TERM|INT)\b",
    ),
}

HINTS: dict[str, tuple[bytes, ...]] = {
    "NCC-01": (rb"Bootstrap ?: ?Using (?:\[0\])?(?:lo|docker\d|virbr\d):",),
    "RUN-05": (rb"loss.{0,2}[=:] ?(?:nan|NaN)\b",),
    "NCC-02": (rb"NCCL INFO Using network Socket|NET/IB : No device found",),
    "MPI-02": (rb"PMIX ERROR: ",),
    "SLU-04": (rb"Slurm accounting storage is disabled|Bypassing sacct error",),
    "SLU-06": (rb"couldn't chdir to .{1,300}: No such file or directory: going to /tmp instead",),
}

_FAMILIES = {
    Weight.CAUSE: CAUSES,
    Weight.DEATH: DEATHS,
    Weight.ECHO: ECHOES,
    Weight.END: ENDS,
    Weight.HINT: HINTS,
}
SIGNS: tuple[Sign, ...] = tuple(
    Sign(rule, weight, pattern)
    for weight, family in _FAMILIES.items()
    for rule, patterns in family.items()
    for pattern in patterns
)
