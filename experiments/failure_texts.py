"""What failed runs print, by cause: the texts from which experiments/grade_why.py composes logs.

They were written from the formats of PyTorch, NCCL, CUDA's driver, Slurm, Pyxis, Kubernetes, Ray, vLLM and ssh, not
from the patterns of `why`, which their author knew. Names in braces are drawn for each log. A block with a traceback is
printed by one rank; a text with `@job` in front is printed by the launcher, without the label of a rank.
"""

TRACE = """Traceback (most recent call last):
  File "{path}/train.py", line {line}, in <module>
    main()
  File "{path}/trainer.py", line {pid}, in step
    loss = self.model(batch)
"""
"""Before an exception; drawn texts make each one different."""

CAUSES: dict[str, tuple[str, ...]] = {
    "RUN-01": (
        TRACE
        + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {gib} GiB. GPU {gpu} has a total capacity "
        "of 79.11 GiB of which 1.20 GiB is free. Including non-PyTorch memory, this process has 77.90 "
        "GiB memory in use.",
        TRACE
        + "torch.AcceleratorError: CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported "
        "at some other API call, so the stacktrace below might be incorrect.",
        "{node}:{pid}:{pid} [{gpu}] include/alloc.h:{line} NCCL WARN Cuda failure 2 'out of memory'",
        TRACE
        + "torch.OutOfMemoryError: HIP out of memory. Tried to allocate {gib} GiB. GPU {gpu} has a total capacity "
        "of 191.98 GiB of which 0 bytes is free.",
    ),
    "RUN-02": (
        "@job srun: error: {node}: task {rank}: Killed",
        "@job Root Cause (first observed failure):\n[0]:\n  time      : 2026-11-25_10:11:12\n  host      : {node}\n"
        "  rank      : {rank} (local_rank: {gpu})\n  exitcode  : -9 (pid: {pid})\n  error_file: <N/A>\n"
        "  traceback : Signal 9 (SIGKILL) received by PID {pid}",
    ),
    "RUN-03": (
        "@job slurmstepd: error: Detected 1 oom_kill event in StepId={job}.0. Some of the step tasks "
        "have been OOM Killed.",
        "@job [{pid}.{line}] Memory cgroup out of memory: Killed process {pid} (python) total-vm:81234567kB, "
        "anon-rss:66123456kB, file-rss:12kB",
        TRACE
        + "RuntimeError: [enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: "
        "you tried to allocate 68719476736 bytes. Error code 12 (Cannot allocate memory)",
        TRACE + "numpy._core._exceptions._ArrayMemoryError: Unable to allocate {gib} GiB for an array with shape "
        "({pid}, 8192) and data type float32",
        TRACE + "OSError: [Errno 12] Cannot allocate memory",
    ),
    "RUN-04": (
        "[{node}:{pid}] *** Process received signal ***\n[{node}:{pid}] Signal: Segmentation fault (11)\n"
        "[{node}:{pid}] Signal code: Address not mapped (1)\n[{node}:{pid}] Failing at address: 0x10",
        "Fatal Python error: Segmentation fault\n\nCurrent thread 0x00007f1a (most recent call first):\n"
        '  File "{path}/ops.py", line {line} in forward',
        "free(): invalid pointer\n@job srun: error: {node}: task {rank}: Aborted (core dumped)",
        "@job srun: error: {node}: task {rank}: Segmentation fault (core dumped)",
    ),
    "RUN-05": (
        TRACE + "ValueError: Loss is nan, stopping training",
        TRACE + "RuntimeError: Rank {rank}, node {node}, device {gpu}, iteration {line}: Unexpected result nan "
        "(message='found NaN in local forward loss calculation')",
        "the training loss is nan at step {line}, but must be a finite number\n"
        "  where: recipe.lr, recipe.clip_grad, precision\n"
        "  fix:   lower recipe.lr, or look for NaN and infinity in the rows and weights",
    ),
    "RUN-08": (
        TRACE + "ImportError: {path}/transformer_engine_torch.cpython-312-x86_64-linux-gnu.so: undefined symbol: "
        "_ZN3c104cuda9SetDeviceEab",
        "@job bash: line 1: torchrun: command not found",
        "python3: error while loading shared libraries: libcupti.so.12: cannot open shared object file: "
        "No such file or "
        "directory",
        TRACE + "ImportError: cannot import name 'flash_attn_varlen_func' from 'flash_attn' (unknown location)",
    ),
    "RUN-25": (TRACE + "ModuleNotFoundError: No module named 'flash_attn'",),
    "PYX-03": (TRACE + "ModuleNotFoundError: No module named 'torch'",),
    "RUN-09": (
        "/pytorch/aten/src/ATen/native/cuda/Loss.cu:245: nll_loss_forward_reduce_cuda_kernel_2d: block: "
        "[0,0,0], thread: "
        "[{gpu},0,0] Assertion `t >= 0 && t < n_classes` failed.\n"
        + TRACE
        + "torch.AcceleratorError: CUDA error: device-side assert triggered",
        TRACE + "torch.AcceleratorError: CUDA error: an illegal memory access was encountered\nSearch for "
        "`cudaErrorIllegalAddress' in https://docs.nvidia.com/cuda/ for more information.",
        "{node}:{pid}:{pid} [{gpu}] misc/strongstream.cc:{line} NCCL WARN Cuda failure 'unspecified launch failure'\n"
        + TRACE
        + "RuntimeError: CUDA error: unspecified launch failure",
    ),
    "RUN-11": (
        "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).\n"
        + TRACE
        + "RuntimeError: DataLoader worker (pid {pid}) is killed by signal: Bus error. It is possible "
        "that dataloader's "
        "workers are out of shared memory. Please try to raise your shared memory limit.",
        "{node}:{pid}:{pid} [{gpu}] misc/shmutils.cc:{line} NCCL WARN Error: failed to extend "
        "/dev/shm/nccl-{pid}abc to {pid}956 bytes, error: No space left on device (28)",
    ),
    "RUN-13": (
        TRACE + "KeyError: 'input_ids'",
        TRACE + "RuntimeError: The size of tensor a ({line}) must match the size of tensor b ({pid}) at non-singleton "
        "dimension 1",
        TRACE + "AttributeError: 'NoneType' object has no attribute 'shape'",
        TRACE + "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)",
    ),
    "RUN-14": (
        TRACE + "OSError: [Errno 116] Stale file handle: '{path}/rows.npy'",
        TRACE + "OSError: [Errno 5] Input/output error",
        TRACE + "OSError: [Errno 107] Transport endpoint is not connected: '{path}'",
    ),
    "RUN-15": (
        TRACE + "OSError: [Errno 24] Too many open files",
        TRACE + "RuntimeError: can't start new thread",
        "OpenBLAS blas_thread_init: pthread_create failed for thread {gpu} of 64: Resource temporarily unavailable",
    ),
    "RUN-16": (
        TRACE + "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        TRACE + "RuntimeError: cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
    ),
    "RUN-17": (
        "rank {rank} on {node} did not respond and wrote no stack; no progress for {line} s in training "
        "after step {pid} "
        "(usual: 0.35 s)\n  where: rank_logs/trial_0_rank_*.stack\n  fix:   check {node}",
    ),
    "HW-01": (
        TRACE + "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered",
        "@job [{pid}.{line}] NVRM: Xid (PCI:0000:41:00): 79, pid={pid}, name=python, GPU has fallen off the bus.",
        "@job [{pid}.{line}] NVRM: Xid (PCI:0000:41:00): 95, pid={pid}, Uncontained: LTC TAG (0x2,0x0). RST: Yes",
        "@job Unable to determine the device handle for GPU{gpu}: 0000:41:00.0: Unknown Error",
    ),
    "HW-02": (
        "{node}:{pid}:{pid} [{gpu}] transport/nvls.cc:{line} NCCL WARN Failed to bind NVLink SHARP "
        "(NVLS) Multicast memory "
        "of size 2097152 : CUDA error 401 'the operation cannot be performed in the present state'",
        TRACE + "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized",
        "@job [{pid}.{line}] NVRM: Xid (PCI:0000:41:00): 74, pid={pid}, NVLink: fatal error detected on "
        "link 3(0x10000)",
    ),
    "HW-03": (
        TRACE
        + "RuntimeError: The NVIDIA driver on your system is too old (found version 11040). Please update your GPU "
        "driver",
        TRACE + "RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU",
        TRACE + "torch.AcceleratorError: CUDA error: invalid device ordinal",
    ),
    "HW-04": ("@job Failed to initialize NVML: Driver/library version mismatch\n@job NVML library version: 570.86",),
    "HW-05": (
        TRACE + "AssertionError: Device compute capability 8.9 or higher required for FP8 execution.",
        TRACE + "RuntimeError: CUDA error: no kernel image is available for execution on the device",
    ),
    "NCC-01": (
        "{node}:{pid}:{pid} [{gpu}] bootstrap.cc:{line} NCCL WARN Bootstrap : no socket interface found",
        TRACE + "RuntimeError: [enforce fail at /pytorch/third_party/gloo/gloo/transport/tcp/device.cc:83] "
        "ifa != nullptr. Unable to find address for: ib7",
    ),
    "NCC-03": (
        "{node}:{pid}:{line} [{gpu}] transport/net_ib.cc:{line} NCCL WARN NET/IB : mlx5_{gpu}:1 Got async event : port "
        "error",
        "{node}:{pid}:{line} [{gpu}] misc/ibvwrap.cc:{line} NCCL WARN Call to ibv_modify_qp failed with "
        "error Connection "
        "timed out",
    ),
    "NCC-05": (
        TRACE
        + "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. "
        "port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use",
        TRACE + "torch.distributed.DistNetworkError: The client socket has timed out after 600000ms while trying to "
        "connect to ({ip}, 29500).",
        TRACE + "torch.distributed.DistStoreError: Timed out after 901 seconds waiting for clients. {gpu}/16 clients "
        "joined.",
    ),
    "NCC-08": (
        TRACE
        + "RuntimeError: Gloo connectFullMesh failed with [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:{line}]"
        " no error: timed out connecting: SO_ERROR: Connection refused, remote=[127.0.1.1]:{pid}",
    ),
    "SLU-02": (
        "@job sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified",
        "@job srun: error: Unable to allocate resources: Requested node configuration is not available",
    ),
    "SLU-07": (
        "@job slurmstepd: error: *** JOB {job} ON {node} CANCELLED AT 2026-11-25T10:11:12 DUE TO TIME LIMIT ***",
    ),
    "SLU-08": ("@job slurmstepd: error: *** JOB {job} ON {node} CANCELLED AT 2026-11-25T10:11:12 ***",),
    "SLU-09": (
        "@job slurmstepd: error: *** STEP {job}.0 ON {node} CANCELLED AT 2026-11-25T10:11:12 DUE TO NODE FAILURE, SEE "
        "SLURMCTLD LOG FOR DETAILS ***",
        "@job srun: error: Node failure on {node}",
    ),
    "SLU-10": (
        "@job slurmstepd: error: *** JOB {job} ON {node} CANCELLED AT 2026-11-25T10:11:12 DUE TO PREEMPTION ***",
    ),
    "PYX-02": ("@job srun: unrecognized option '--container-image=nvcr.io#nvidia/pytorch:25.10-py3'",),
    "PYX-07": (
        "@job slurmstepd: error: pyxis: container start failed with error code: 1\n"
        "@job slurmstepd: error: pyxis:     enroot-mount: failed to mount: {path} at /enroot/data: No such file or "
        "directory",
    ),
    "ENR-01": (
        "@job slurmstepd: error: pyxis:     [ERROR] URL https://nvcr.io/proxy_auth?scope=repository:acme/lora:pull "
        "returned error code: 401 Unauthorized",
    ),
    "ENR-03": (
        "@job slurmstepd: error: pyxis:     [ERROR] Not enough space left in /tmp/enroot: needs 34 GB",
        "@job slurmstepd: error: pyxis:     Write failed because No space left on device\n"
        "@job slurmstepd: error: pyxis:     FATAL ERROR: Probably out of space on output filesystem",
    ),
    "ENR-07": ("@job slurmstepd: error: pyxis:     [ERROR] No such file or directory: {path}/image.sqsh",),
    "CFG-01": (
        TRACE + "AssertionError: global batch size (128) is not divisible by micro batch size (2) times data parallel "
        "size (24)",
        TRACE + "RuntimeError: world_size (12) is not divisible by 8",
    ),
    "CFG-06": (
        TRACE + "FileNotFoundError: [Errno 2] No such file or directory: '{path}/train_000.npy'",
        TRACE
        + "huggingface_hub.errors.GatedRepoError: 401 Client Error. (Request ID: Root=1-abc)\nCannot access gated "
        "repo for url https://huggingface.co/meta-llama/Llama-2-70b-hf/resolve/main/config.json.",
        TRACE + "safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge",
        TRACE + "AssertionError: One or both of the .idx and .bin files cannot be found at the path prefix "
        "{path}/c4_text_document",
        TRACE
        + "OSError: Incorrect path_or_model_id: '{path}/llama'. Please provide either the path to a local folder or "
        "the repo_id of a model on the Hub.",
    ),
    "CFG-08": (
        TRACE + "OSError: [Errno 28] No space left on device: '{path}/checkpoint.pt'",
        TRACE + "OSError: [Errno 122] Disk quota exceeded",
        TRACE + "RuntimeError: [enforce fail at inline_container.cc:{line}] . PytorchStreamWriter failed writing file "
        "data/{gpu}: file write failed",
    ),
    "CFG-10": (
        TRACE + "RuntimeError: Error(s) in loading state_dict for GPTModel:\n\tsize mismatch for "
        "embedding.word_embeddings.weight: copying a param with shape torch.Size([32000, 8192]) from "
        "checkpoint, the shape "
        "in current model is torch.Size([32128, 8192]).",
    ),
    "KUB-01": (
        '@job Warning  Failed  2m  kubelet  Failed to pull image "acme/lora:7": rpc error: code = NotFound\n'
        "@job Warning  Failed  2m  kubelet  Error: ImagePullBackOff",
    ),
    "KUB-03": (
        "@job     Last State:     Terminated\n@job       Reason:       OOMKilled\n@job       Exit Code:    137",
    ),
    "KUB-04": ("@job Warning  Evicted  3m  kubelet  The node was low on resource: ephemeral-storage. Threshold: 1Gi",),
    "KUB-13": ("@job Warning  NodeNotReady  4m  node-controller  Node is not ready",),
    "RAY-04": (TRACE + "ray.exceptions.ActorDiedError: The actor died because its node has died. Node Id: {pid}abc",),
    "RAY-05": (
        TRACE
        + "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.\nMemory on the "
        "node (IP: {ip}, ID: {pid}ab) where the task ran was 120.1GB / 125.0GB (0.96), which exceeds the threshold",
    ),
    "HST-04": ("@job me@{node}: Permission denied (publickey,password).",),
    "HST-05": ("@job Host key verification failed.",),
    "HST-06": ("@job ssh: connect to host {node} port 22: Connection timed out",),
    "SRV-08": (
        TRACE
        + "ValueError: To serve at least one request with the models's max seq len (131072), (16.00 GiB KV cache is "
        "needed, which is larger than the available KV cache memory ({gib} GiB).",
    ),
}
"""By the rule that names the cause."""

NOT_KNOWN = (
    "the simulation diverged in cell {pid}: giving up",
    "stop: licence server {ip} does not answer",
    "checksum of shard {line} differs, aborting",
)
"""Failures that no rule describes: the right answer is `unknown`."""

AFTERWARDS = (
    "[rank{rank}]:[E1125 10:32:31.{pid} ProcessGroupNCCL.cpp:{line}] [Rank {rank}] Watchdog caught "
    "collective operation "
    "timeout: WorkNCCL(SeqNum={pid}, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600081 "
    "milliseconds before timing out.",
    "[rank{rank}]:[E1125 10:32:32.{pid} ProcessGroupNCCL.cpp:{line}] [PG ID 0 PG GUID 0 Rank "
    "{rank}] Process group watchdog "
    "thread terminated with exception: NCCL error: remote process exited or there was a network "
    "error, NCCL version 2.27.7",
    "{node}:{pid}:{line} [{gpu}] misc/socket.cc:{line} NCCL WARN socketProgress: Connection closed by remote peer "
    "{node}<{pid}>",
    TRACE
    + "torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:"
    "{line}, remote process exited or there was a network error, NCCL version 2.27.7\nncclRemoteError: A call failed "
    "possibly due to a network error or a remote process exiting prematurely.",
    TRACE
    + "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:{line}] Connection closed by peer [{ip}]:"
    "{pid}",
    TRACE + "BrokenPipeError: [Errno 32] Broken pipe",
    TRACE + "ConnectionResetError: [Errno 104] Connection reset by peer",
    TRACE + "torch.distributed.DistNetworkError: failed to recv, got 0 bytes",
    "@job torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n@job {path}/train.py FAILED",
    "@job W1125 10:33:{gpu}0.000 {pid} torch/distributed/elastic/multiprocessing/api.py:{line}] "
    "Sending process {pid} closing "
    "signal SIGTERM",
)
"""What other ranks print, and launchers, after a rank has failed. At any time, also before the cause is on disk."""
AFTER_SLURM = (
    "@job srun: error: {node}: task {rank}: Exited with exit code 1",
    "@job srun: Terminating StepId={job}.0",
    "@job slurmstepd: error: *** STEP {job}.0 ON {node} CANCELLED AT 2026-11-25T10:34:31 ***",
)
"""What Slurm prints at the end of a failed step, in this order."""

HEALTHY = (
    "{node}:{pid}:{pid} [{gpu}] NCCL INFO Bootstrap : Using eth0:{ip}<0>",
    "{node}:{pid}:{pid} [{gpu}] NCCL INFO NET/Plugin: Could not find: libnccl-net.so. Using internal network plugin.",
    "{node}:{pid}:{pid} [{gpu}] NCCL INFO NCCL_IB_TIMEOUT set by environment to 22.",
    "{path}/site-packages/torch/cuda/__init__.py:734: UserWarning: Can't initialize NVML",
    "iteration {line}/ 5000 | consumed samples: {pid} | elapsed time per iteration (ms): 842.1 | lm "
    "loss: 1.{pid}E+00 | "
    "number of skipped iterations: 0 | number of nan iterations: 0 |",
    "INFO: max memory allocated 71.2 GiB, reserved 74.0 GiB, 0 errors, 0 failed requests",
    "[W1125 10:01:07.{pid} Utils.hpp:136] Warning: Environment variable NCCL_ASYNC_ERROR_HANDLING is deprecated; use "
    "TORCH_NCCL_ASYNC_ERROR_HANDLING instead (function operator())",
    "Import of quick_gelu failed, falling back to torch (this is not an error)",
    "{{'loss': 1.{line}, 'grad_norm': 0.4{pid}, 'learning_rate': 3.1e-05, 'epoch': 0.{gpu}}}",
    "Loading checkpoint shards: 100%|##########| 15/15 [00:{gpu}1<00:00,  1.41it/s]",
    "retry {gpu} of 5: read of {path}/rows.npy took 3.1 s",
)
