"""Patterns of causes in the training: memory, storage, configuration, network, the loss, missing modules.

The order matters: the first pattern that matches a line wins. `bench.rules.signs` joins these files.
"""

from bench.rules.line_starts import LINE, TASKS

CAUSES: dict[str, tuple[bytes, ...]] = {
    "RUN-01": (
        rb"(?:CUDA|HIP) out of memory|CUDA [Ee]rror: out of memory|Cuda failure (?:\d+ )?'out of memory'",
        LINE + rb"(?:torch\.|torch\.cuda\.)?OutOfMemoryError\b",
        rb"CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation|CU(?:BLAS|DNN)_STATUS_ALLOC_FAILED"
        rb"|NCCL WARN Failed to CUDA [cm]alloc",
    ),
    "RUN-16": (rb"CU(?:BLAS|DNN)_STATUS_NOT_INITIALIZED",),
    "RUN-11": (
        rb"insufficient shared memory \(shm\)|workers are out of shared memory",
        rb"NCCL WARN Error.{0,5} (?:while creating shared memory segment|failed to extend) /dev/shm/",
        rb"unable to (?:write to|open|mmap|resize).{0,40}/torch_.{0,100}(?:No space left|Cannot allocate)",
        rb"/dev/shm.{0,200}(?:No space left|too small)",
    ),
    "RUN-03": (
        rb"Detected [1-9]\d{0,8} oom[-_]kill|oom-kill:constraint|invoked oom-killer|[Oo]ut of memory: Kill"
        rb"|oom_reaper: reaped",
        TASKS + rb"Out Of Memory",
        rb"exceeded (?:job |step )?memory limit.{0,80}being killed",
        LINE + rb"MemoryError\b",
        rb"DefaultCPUAllocator: .{0,40}(?:can't|not enough)|std::bad_alloc|\[Errno 12\] Cannot allocate memory"
        rb"|ArrayMemoryError: Unable to allocate ",
    ),
    "RUN-14": (
        rb"Stale (?:NFS )?file handle|\[Errno 116\]",
        rb"\[Errno (?:5|121)\] |: Input/output error|\bI/O error, dev |Buffer I/O error on dev",
        rb"Cannot send after transport endpoint shutdown|Transport endpoint is not connected",
    ),
    "RUN-15": (
        rb"Too many open files|received 0 items of ancdata|can't start new thread",
        rb"(?:fork|pthread_create|Thread creation).{0,80}Resource temporarily unavailable",
    ),
    "CFG-06": (
        # Weights, rows and their folders cannot be read; files that a run writes are CFG-08's.
        rb"PermissionError: \[Errno 13\](?!.{0,300}(?:result_\d|rank_logs|/runs/|adapters))"
        rb".{0,300}(?:\.(?:npy|idx|bin|jsonl?|parquet|safetensors|model|distcp|arrow|gz|pt)'"
        rb"|/(?:data|datasets?|models?|checkpoints?|weights)(?:/|'))",
        rb"SafetensorError: |mmap length is greater than file size|Parquet magic bytes not found",
        rb"PytorchStreamReader failed|invalid load key, |No data left in file",
        rb"Cannot access gated repo|GatedRepoError|trying to access a gated repo|RepositoryNotFoundError"
        rb"|LocalEntryNotFoundError",
        rb"40[13] Client Error.{0,120}huggingface|Repository Not Found for url",
        rb"is not a local folder and is not a valid model identifier|We couldn't connect to 'https://huggingface"
        rb"|Incorrect path_or_model_id: |\.idx and \.bin files cannot be found",
        rb"Can't load tokenizer for|[Uu]nable to load vocabulary|is not a distributed checkpoint|not a checkpoint of ",
        LINE
        + rb"FileNotFoundError: .{0,300}(?:data|train|valid|eval|token|model|ckpt|checkpoint|\.npy|\.idx|\.bin|\.json)",
        rb"no (?:prepared )?rows of |(?:train|eval) rows of .{1,60} cannot be read|holds rows .{1,80}; the plan says",
        rb"mountcheck.{0,300}(?:fail|mismatch|unexpected|error)|srcIndex < srcSelectDimSize|index out of range in self",
    ),
    "CFG-08": (
        rb"No space left on device|Disk quota exceeded|PytorchStreamWriter failed writing",
        rb"PermissionError: \[Errno 13\]|/(?:results?|logs?|runs?)/\S{0,300}: Permission denied",
        rb"(?:tee|cannot (?:create|touch|write|open|move)|mkdir).{0,300}: Permission denied|cannot write: ",
    ),
    "ENR-05": (rb"Read-only file system",),
    "CFG-02": (
        rb"val_check_interval.{0,40} must be less than or equal to the number of the training batches",
        rb"evaluation interval has \d+ samples \(\d+ steps\), but the",
        rb"evaluation interval of \d+ steps is \d+ samples, more than the",  # earlier versions
        rb"evaluation every \d+ steps is \d+ samples, longer than the data's",  # earlier versions
    ),
    "CFG-10": (
        rb"size mismatch for .{1,300}: copying a param with shape|Global shape mismatch for loaded",
        rb"(?:Missing|Unexpected) key\(s\) in state_dict: ",
    ),
    "CFG-05": (rb"FileExistsError: .{0,300}result_\d",),
    "CFG-01": (
        rb"world[ _]size \((?:[2-9]|\d{2,7})\).{0,40} is not divisible by",
        rb"global batch size .{0,40}not divisible by|ranks cannot be split into replicas",
    ),
    "CFG-09": (
        LINE + rb"(?:hydra|omegaconf)\.errors\.\w{1,60}",
        rb"Could not override '|Key '.{1,80}' is not in struct|Could not find '\w{1,40}/.{1,80}'",
    ),
    "NCC-01": (
        rb"[Nn]o socket interface found|No interface found in the same subnet",
        rb"NCCL WARN .{0,80}onnect to .{1,80} (?:failed ?:|returned) .{0,60}(?:No route to host"
        rb"|Network is unreachable)",
        rb"Unable to find (?:address|interface) for: ",
        rb"NCCL WARN .{0,80}onnect to (?:172\.17\.0\.1|192\.168\.122\.1)<",
    ),
    "NCC-05": (
        rb"Address already in use|EADDRINUSE|address already in use",
        rb"^ {0,6}[1-9]\d{0,6}: .{0,200}GLOBAL_RANK: 0, MEMBER: 1/",
        rb"^ {0,6}[1-9]\d{0,6}: .{0,60}\brank[ :=]{1,3}(?:0 of 1|0/1|0,? world[ _]size[ :=]{1,2}1)\b",
        rb"world[ _]size \(1\).{0,40} is not divisible by",
        rb"\d+ ranks were started, (?:and the plan is for|but the plan needs) \d+",
    ),
    "NCC-03": (
        rb"NCCL WARN Call to ibv_\w{1,40} failed|async fatal event on ",
        rb"Got async (?:error )?event ?: (?:port error|local catastrophic error|.{0,40}work queue .{0,20}error)",
    ),
    "RUN-05": (
        rb"the (?:training|evaluation) loss is (?:nan|-?inf)",
        rb"found NaN in |number of nan iterations: {1,4}[1-9]|loss returned in `training_step` is (?:nan"
        rb"|tensor\((?:nan|-?inf))",
        rb"\b[Ll]oss is (?:NaN|nan|inf|Inf)\b",
    ),
    "RUN-17": (rb"no progress for [\d,]{1,12} s in \w[\w ]{0,30} after (?:step|sample) \d",),
    "RUN-09": (
        rb"CUDA [Ee]rror: (?:an illegal memory access|unspecified launch failure|device-side assert"
        rb"|misaligned address|an illegal instr)",
        rb"NVRM: Xid .{0,60}: (?:13|31)\b",
    ),
    "PYX-03": (
        LINE + rb"ModuleNotFoundError: No module named '(?:torch|transformer_engine|megatron|nemo|apex|lightning|"
        rb"pytorch_lightning|mlperf_common|mlperf_logging)\b",
    ),
    "RUN-25": (LINE + rb"ModuleNotFoundError: No module named '",),
    "RUN-08": (
        LINE + rb"(?:ModuleNotFoundError|ImportError): ",
        rb"FileNotFoundError: .{0,80}'(?:\S{0,80}/)?(?:cc|gcc|g\+\+|c\+\+|clang(?:\+\+)?|nvcc|ninja)'",
        rb"error while loading shared libraries: |can't open file '.{1,300}': \[Errno 2\]"
        rb"|/usr/bin/env: .{1,40}: No such file",
        rb"^.{0,200}(?:line \d{1,6}|bash|sh): .{1,100}: (?:command not found|not found)$",
        rb"Failed to find C compiler\.|No working C\+\+ compiler found|CUDA_HOME environment variable is not set",
        rb"(?:gcc|g\+\+|clang)\S{0,10}: fatal error: cannot execute|Ninja is required to load C\+\+ extensions",
    ),
}
