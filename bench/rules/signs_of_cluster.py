"""Patterns of causes below the training: Pyxis, Enroot, MPI, Slurm, GPUs and their drivers.

The order matters: the first pattern that matches a line wins. `bench.rules.signs` joins these files.
"""

CAUSES: dict[str, tuple[bytes, ...]] = {
    "NCC-08": (rb"[Gg]loo.{0,300}remote=\[127\.(?!0\.0\.1\])",),  # ranks of one node may use 127.0.0.1
    "PYX-01": (rb"_do_option_cb.{0,20}Assertion \W?arg\W? failed",),
    "PYX-02": (
        rb"unrecognized option '--(?:no-)?container-",
        rb"Incompatible (?:Slurm )?plugin.{0,100}version",
        rb"spank_pyxis\.so: cannot open shared object|spank_pyxis\.so: Plugin file not found",
    ),
    "PYX-04": (rb"pyxis: ignoring .{1,60} because neither --container-image nor --container-name is set",),
    "PYX-06": (
        rb"registry-1\.docker\.io/v2/(?:library/)?(?:[\w-]+\.[\w.-]{2,60}(?::\d+)?/"
        rb"|\S{1,300}\.sqsh).{0,300}error code: 40",
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
        rb"pyxis: --container-[\w-]{3,20}(?:: (?:invalid|argument required|empty|flag must|target is)"
        rb"| specified multiple)",
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
        rb"Requested (?:node configuration is not available|time limit is invalid"
        rb"|partition configuration not available)",
        rb"(?:error|failed|failure): .{0,60}(?:Invalid (?:account|qos|partition|feature)"
        rb"|Node count specification invalid|PrologSlurmctld failed)",
    ),
    "SLU-03": (rb"set by two different environment variables",),
    "SLU-06": (
        rb"execve\(\): .{1,300}: No such file or directory",
        rb"(?:error|fatal): .{0,60}[Cc]ould not open std(?:out|err|in) file",
    ),
    "SLU-09": (
        rb"DUE TO NODE FAILURE",
        rb"srun: error: (?:Node failure on |Task launch for .{1,80} failed on node .{1,80}: (?:Communication"
        rb"|Socket timed))",
    ),
    "SLU-11": (rb"fatal: Could not establish a configuration source",),
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
        rb"CUDA-capable device\(s\) is/are busy",
        rb"this rank needs GPU \d+, (?:and|but only) \d+ (?:can be seen|GPUs are visible)",
    ),
}
