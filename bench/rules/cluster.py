"""Texts of the rules about the system below the training: Slurm and Pyxis, Enroot, MPI, NCCL, hardware.

Each is ID -> (what is wrong, how to fix it); `bench.rules` is the registry. Sources: the code of Slurm 21.08 to 26.05,
Pyxis 0.24 and Enroot 4.1, and public issues of Pyxis, Enroot, NCCL and PyTorch.
"""

Texts = dict[str, tuple[str, str]]

PYXIS: Texts = {
    "PYX-01": (
        "this Slurm version crashes on container flags without an argument",
        "set container.flags=environment; by hand: PYXIS_CONTAINER_WRITABLE=1, PYXIS_CONTAINER_MOUNT_HOME=0, "
        "PYXIS_CONTAINER_REMAP_ROOT=1 (Pyxis 0.21 or later); or ask the admins to upgrade Slurm to 25.11.5 or to build "
        "it without --enable-developer",
    ),
    "PYX-02": (
        "the Pyxis plugin is missing on this node, or was built for another Slurm version",
        "ask the admins to rebuild Pyxis for the installed Slurm, on login and compute nodes; if Pyxis works, "
        "`srun --help | grep container-image` prints a line",
    ),
    "PYX-03": (
        "the ranks do not run in the image",
        "put --container-image on the srun line, not in #SBATCH; `srun … cat /etc/os-release` must print the image's "
        "system on every node. Without containers, `pip install 'runstop[engine]'` installs the missing packages",
    ),
    "PYX-04": (
        "Pyxis ignores the container flags, because no image is given",
        "add --container-image or --container-name to the same srun; without an image, the command runs on the host",
    ),
    "PYX-05": (
        "a container flag has a value, but this flag takes no value",
        "write --container-writable alone: srun takes the next word as the program to run",
    ),
    "PYX-06": (
        "Enroot looks for the image in the wrong registry",
        "write `#` after the registry (nvcr.io#nvidia/pytorch:TAG, quoted); start the path of an image file with / or "
        "./",
    ),
    "PYX-07": (
        "the source of a mount does not exist on a node",
        "run `srun -N NODES ls -d SOURCE` for every source; create the missing one, or correct container.mounts, "
        "DATADIR, MODEL and LOGDIR",
    ),
    "PYX-08": (
        "the named container exists already, or does not exist",
        "put the job id into --container-name, and pass --container-image at its first use",
    ),
    "PYX-09": (
        "the environment variables of the image override those of the job",
        "list the variables in --container-env=A,B",
    ),
    "PYX-10": (
        "Slurm's commands do not exist inside the container",
        "call srun, sbatch and scontrol from the batch script, outside the container; remove container flags from "
        "#SBATCH lines",
    ),
    "PYX-11": (
        "the working directory does not exist in the container",
        "correct --container-workdir, or mount a folder at that path",
    ),
    "PYX-12": (
        "a container option is malformed, or two options contradict each other",
        "correct the option or the mount; mounts are SRC:DST[:FLAG+FLAG], without blanks, commas or colons in paths",
    ),
}

SLURM: Texts = {
    "SLU-01": (
        "this cluster's Slurm needs another GPU request option",
        "set cluster.slurm.gpu_request (gpus_per_node, gres, gres_typed, none) to match `scontrol show node | grep "
        "Gres`",
    ),
    "SLU-02": (
        "Slurm rejects the request, or the job would wait forever: partition, account, QOS, nodes or time limit",
        "`runstop doctor` names the wrong part; by hand: `scontrol show partition`, `sacctmgr show assoc "
        "user=$USER`, and `sbatch --test-only FILE` until Slurm accepts the script",
    ),
    "SLU-03": (
        "CPUs per task are set twice with different values, or not at all",
        "also pass --cpus-per-task to srun, because srun does not inherit it; unset SRUN_CPUS_PER_TASK or "
        "SLURM_CPUS_PER_TASK",
    ),
    "SLU-04": (
        "Slurm accounting is not available, so the end state of a job is unknown",
        "ask the admins to set up slurmdbd; without it, only the files of the job show how the job ended",
    ),
    "SLU-05": (
        "the script hides a failure of a command",
        "use `set -euo pipefail` and PIPESTATUS, and end the script with the exit code of the work",
    ),
    "SLU-06": (
        "the job's folder or program is not visible on the compute node",
        "submit from a file system that is mounted on every node, and put scripts, LOGDIR and images there; /tmp and "
        "/dev/shm are local to each node",
    ),
    "SLU-07": (
        "the time limit ended the run",
        "raise walltime (minutes per trial; `runstop resume RUN --walltime MIN`), or find out why the run was slow",
    ),
    "SLU-08": (
        "the run was cancelled, or stopped by a signal",
        "`runstop resume RUN` continues the run; under Slurm, `sacct -j JOB -o State%40` shows who cancelled the job",
    ),
    "SLU-09": (
        "a node failed",
        "exclude the node in the evidence (--exclude), start again, and inform the admins; `sinfo -R` shows the reason",
    ),
    "SLU-10": (
        "another job preempted this one",
        "start the run again in a partition or QOS without preemption",
    ),
    "SLU-11": (
        "Slurm's commands find no configuration on this machine",
        "run runstop on the cluster's login node; if this is the login node, set SLURM_CONF to the path of slurm.conf",
    ),
}

ENROOT: Texts = {
    "ENR-01": (
        "the registry refuses access to the image: credentials are missing or wrong",
        "write `machine nvcr.io login $oauthtoken password KEY`, and the same line for authn.nvidia.com, into "
        "$ENROOT_CONFIG_PATH/.credentials (mode 0600); for Docker Hub the machines are registry-1.docker.io and "
        "auth.docker.io",
    ),
    "ENR-02": (
        "a registry token has expired",
        "delete the file of this token in the .tokens folder of ENROOT_CACHE_PATH",
    ),
    "ENR-03": (
        "there is not enough disk space for the image on the node",
        "set ENROOT_TEMP_PATH, ENROOT_CACHE_PATH and ENROOT_DATA_PATH to a local disk; its free space must be "
        "three times the size of the image",
    ),
    "ENR-04": (
        "users may not create containers on this node",
        "ask the admins to raise user.max_user_namespaces; if kernel.apparmor_restrict_unprivileged_userns "
        "exists, it must be 0",
    ),
    "ENR-05": (
        "the container's file system is read-only",
        "add --container-writable, or mount a writable folder for the files that the run writes (HF_HOME, "
        "TRITON_CACHE_DIR, MPLCONFIGDIR)",
    ),
    "ENR-06": (
        "an Enroot hook failed, so the container was not created",
        "run `nvidia-container-cli info` on the node; the driver must satisfy NVIDIA_REQUIRE_CUDA of the image",
    ),
    "ENR-07": (
        "the image file is not on the compute node, or was built for another CPU architecture",
        "put the .sqsh file on a file system that is mounted on every node, and start its path with /; to see its"
        " CPU architecture, run `file` on a program inside of it",
    ),
    "ENR-08": (
        "the image file is damaged or incomplete",
        "import the image again under another name, and rename it when the import is complete; `unsquashfs -s "
        "FILE` must succeed",
    ),
    "ENR-09": (
        "Enroot cannot create its runtime folders on the node",
        "ask the admins to create /run/pyxis and /run/user/UID in the prolog",
    ),
    "ENR-10": (
        "the image cannot be imported",
        "check the name and the tag with `enroot import docker://REGISTRY#IMAGE:TAG` on the node; then set CONT "
        "to the imported .sqsh file",
    ),
    "ENR-11": (
        "the image file does not match its record: it was created by another tool, renamed or replaced",
        "import the file with `runstop image import`; this command names the file by its digest, and records its "
        "source",
    ),
}

MPI: Texts = {
    "MPI-01": (
        "this Slurm does not have the requested MPI plugin",
        "set cluster.slurm.mpi to a type that `srun --mpi=list` lists, such as pmix or pmi2; if the program does not "
        "start MPI, to none (the default). In your own scripts, set `srun --mpi`",
    ),
    "MPI-02": (
        "the PMIx versions of the container and of the host are not compatible",
        "set cluster.slurm.mpi=pmi2 (`srun --mpi=pmi2`), or use an image with the PMIx version of Slurm; unset "
        "PMIX_*, and try PMIX_MCA_psec=native and PMIX_MCA_gds=hash",
    ),
    "MPI-03": (
        "tensor-parallel communication overlap needs MPI",
        "set cluster.slurm.mpi=pmix (`srun --mpi=pmix`), or TP_COMM_OVERLAP=False",
    ),
}

NCCL: Texts = {
    "NCC-01": (
        "the network interface for NCCL or Gloo does not exist",
        "set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to an interface that `ip -br addr` shows on every node, or"
        " unset both variables",
    ),
    "NCC-02": (
        "NCCL does not find InfiniBand and uses TCP sockets, which are 4 to 5 times slower between nodes",
        "check that the container has /dev/infiniband; check NCCL_IB_DISABLE and NCCL_IB_HCA; `ibstat` must show "
        "active ports on each node",
    ),
    "NCC-03": (
        "an InfiniBand operation failed",
        "compare the output of `ibstat` on the nodes, and look for link errors with `ibqueryerrors`. A port error"
        " means that a link went down, and status 12 means that the remote port does not answer. Set NCCL_IB_HCA "
        "to ports that are up on all nodes, and set `ulimit -l` to unlimited",
    ),
    "NCC-04": (
        "a node or a link is slow",
        "run all_reduce_perf on pairs of nodes, and exclude the node that is slow in every pair",
    ),
    "NCC-05": (
        "the ranks could not form one process group: the port is in use, rank 0 is missing, or several ranks are "
        "rank 0",
        "start all ranks with one srun (or torchrun), and set MASTER_ADDR; cluster.master_port=null selects a "
        "free port",
    ),
    "NCC-06": (
        "a collective timed out: at least one rank did not take part",
        "find the rank that did not take part, and check its node: flight records in rank_logs/ show which rank it is. "
        "For another program set TORCH_FR_BUFFER_SIZE=2000 (before torch 2.9: TORCH_NCCL_TRACE_BUFFER_SIZE), "
        "TORCH_NCCL_DUMP_ON_TIMEOUT=1 and NCCL_DEBUG=INFO. If the evidence has an address 127.*, see NCC-08",
    ),
    "NCC-07": (
        "an NCCL call failed",
        "run again with NCCL_DEBUG=INFO; the first NCCL WARN line shows the call that failed, and the node",
    ),
    "NCC-08": (
        "Gloo uses the loopback interface, because the host's name resolves to 127.*; other nodes cannot reach "
        "this address",
        "set cluster.environment.GLOO_SOCKET_IFNAME to the interface that reaches the other nodes (`ip -br "
        "addr`), or correct the host's name in /etc/hosts",
    ),
}

HARDWARE: Texts = {
    "HW-01": (
        "a GPU has a hardware error",
        "ask the admins to drain the node; `nvidia-smi -q -d ECC,ROW_REMAPPER,PERFORMANCE` and `dmesg -T | grep Xid` "
        "show which GPU",
    ),
    "HW-02": (
        "the NVLink fabric is not ready",
        "ask the admins to start nvidia-fabricmanager (NVL72: IMEX) on the node in the version of the driver, and"
        " then to reset the GPUs",
    ),
    "HW-03": (
        "no GPU is visible, or the driver does not fit",
        "run `nvidia-smi` in the same srun and container; request GPUs (SLU-01); the driver must support the CUDA "
        "version of the image",
    ),
    "HW-04": (
        "the NVIDIA libraries and the loaded kernel module have different versions",
        "the driver was upgraded without a reboot, or the container has its own driver libraries: compare "
        "`cat /proc/driver/nvidia/version` with the library's version, and ask the admins to drain and reboot the node",
    ),
    "HW-05": (
        "this GPU's compute capability does not support the requested precision or kernel",
        "FP8 needs compute capability 8.9 or higher (H100, H200, L40S or newer): choose precision=bf16, or a newer "
        "GPU; for `no kernel image` use a torch or an image that was built for this GPU",
    ),
    "HW-06": (
        "the clocks of the nodes differ",
        "ask the admins to synchronise the clocks of these nodes (`chronyc tracking`, `timedatectl`): log lines of two "
        "nodes cannot be compared, and above 5 min MUNGE rejects credentials",
    ),
    "HW-07": (
        "runstop was not run on this kind of GPU",
        "begin with a short run (task.training.max_steps=20) and compare its losses with those on another GPU",
    ),
    "HW-08": (
        "the memory of the GPU is unknown, so the plan cannot be compared with it",
        "set gpu@cluster.gpu to the kind of GPU; `runstop calibrate` writes a file for a GPU that has none",
    ),
    "HW-09": (
        "there are more ranks than CPU cores",
        "set cluster.ranks_per_node to the number of cores or less",
    ),
}
