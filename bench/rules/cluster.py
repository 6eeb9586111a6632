"""Texts of the rules about what runs below the training: Slurm and Pyxis, Enroot, MPI, NCCL, hardware.

Each is ID -> (what is wrong, what to do); `bench.rules` is the registry. Sources: the code of Slurm 21.08 to 26.05,
Pyxis 0.24 and Enroot 4.1, and public issues of Pyxis, Enroot, NCCL and PyTorch.
"""

Texts = dict[str, tuple[str, str]]

PYXIS: Texts = {
    "PYX-01": (
        "this Slurm aborts on container flags that take no argument",
        "set container.flags=environment; by hand: PYXIS_CONTAINER_WRITABLE=1, PYXIS_CONTAINER_MOUNT_HOME=0, "
        "PYXIS_CONTAINER_REMAP_ROOT=1 (Pyxis 0.21 or later), or have Slurm upgraded to 25.11.5 or built without "
        "--enable-developer",
    ),
    "PYX-02": (
        "the Pyxis plugin is missing on this node, or was built for another Slurm",
        "have Pyxis rebuilt against the installed Slurm, on login and compute nodes; `srun --help | grep "
        "container-image` shows it",
    ),
    "PYX-03": (
        "the ranks do not run in the image",
        "name the image on the srun line (--container-image), not in #SBATCH; `srun … cat /etc/os-release` must show "
        "the image's "
        "system on every node. Without containers, `pip install 'runstop[engine]'` brings what is missing",
    ),
    "PYX-04": (
        "container flags are ignored, because no image is named",
        "add --container-image or --container-name to the same srun: without it the command runs on the host",
    ),
    "PYX-05": (
        "a container flag that takes no value was given one",
        "write --container-writable alone: a word behind it is run as the program",
    ),
    "PYX-06": (
        "the image's name is read as another registry's",
        "write `#` behind a registry (nvcr.io#nvidia/pytorch:TAG, quoted), and begin a file's name with / or ./",
    ),
    "PYX-07": (
        "what should be mounted does not exist on a node",
        "`srun -N NODES ls -d SOURCE` for every source; create it, or correct container.mounts, DATADIR, MODEL and "
        "LOGDIR",
    ),
    "PYX-08": (
        "the named container is there already, or is not there",
        "put the job id into --container-name, and give --container-image with its first use",
    ),
    "PYX-09": (
        "the image's environment wins over the job's",
        "name the variables in --container-env=A,B",
    ),
    "PYX-10": (
        "Slurm's commands do not exist inside the container",
        "call srun, sbatch and scontrol from the batch script, outside; keep container flags out of #SBATCH lines",
    ),
    "PYX-11": (
        "the working directory does not exist in the container",
        "correct --container-workdir, or mount the folder at that path",
    ),
    "PYX-12": (
        "a container option is malformed or contradicts another",
        "correct the option named in the evidence; mounts are SRC:DST[:FLAG+FLAG], without blanks, commas or colons "
        "in paths",
    ),
}

SLURM: Texts = {
    "SLU-01": (
        "this site's Slurm wants GPUs asked for in another way",
        "set cluster.slurm.gpu_request (gpus_per_node, gres, gres_typed, none) to what `scontrol show node | grep "
        "Gres` shows",
    ),
    "SLU-02": (
        "Slurm refuses the request, or would let it wait for ever: partition, account, QOS, nodes or time limit",
        "`python -m bench doctor` names the part that does not fit; by hand: `scontrol show partition`, "
        "`sacctmgr show assoc user=$USER`, and `sbatch --test-only FILE` until it takes it",
    ),
    "SLU-03": (
        "CPUs per task are asked for in two ways, or not at all",
        "give --cpus-per-task on srun too (srun does not inherit it), and unset SRUN_CPUS_PER_TASK or "
        "SLURM_CPUS_PER_TASK",
    ),
    "SLU-04": (
        "there is no accounting to ask how a job ended",
        "have slurmdbd set up; until then trust only what the job itself wrote down",
    ),
    "SLU-05": (
        "a failure was hidden by the script around it",
        "use `set -euo pipefail` and PIPESTATUS, and let the script end with the exit code of the work",
    ),
    "SLU-06": (
        "the job's folder or program is not visible on the compute node",
        "submit from a file system that every node sees, and put scripts, LOGDIR and images there; /tmp and /dev/shm "
        "are each "
        "machine's own",
    ),
    "SLU-07": (
        "the time limit ended the run",
        "raise walltime (minutes per trial; `python -m bench resume RUN --walltime MIN`), or find out what made the "
        "run slow",
    ),
    "SLU-08": (
        "the run was cancelled",
        "start it again; under Slurm `sacct -j JOB -o State%40` says who cancelled it",
    ),
    "SLU-09": (
        "a node failed",
        "exclude the node named in the evidence (--exclude) and start again; tell the admins: `sinfo -R` gives the "
        "reason",
    ),
    "SLU-10": (
        "another job preempted this one",
        "start it again in a partition or QOS that is not preempted",
    ),
}

ENROOT: Texts = {
    "ENR-01": (
        "the registry refuses the image: no credentials, or wrong ones",
        "list `machine nvcr.io login $oauthtoken password KEY`, and the same for authn.nvidia.com, in "
        "$ENROOT_CONFIG_PATH/.credentials (mode 0600); Docker Hub's machines are registry-1.docker.io and "
        "auth.docker.io",
    ),
    "ENR-02": ("a registry token is stale", "delete its file in the .tokens folder of ENROOT_CACHE_PATH"),
    "ENR-03": (
        "Enroot has no room for the image",
        "point ENROOT_TEMP_PATH, ENROOT_CACHE_PATH and ENROOT_DATA_PATH at a local disk with three times the image's "
        "size free",
    ),
    "ENR-04": (
        "users may not create containers on this node",
        "have user.max_user_namespaces raised, and kernel.apparmor_restrict_unprivileged_userns set to 0 where it "
        "exists",
    ),
    "ENR-05": (
        "the container's file system is read-only",
        "add --container-writable, or mount a writable folder for what is written (HF_HOME, TRITON_CACHE_DIR, "
        "MPLCONFIGDIR)",
    ),
    "ENR-06": (
        "an Enroot hook fails: the container cannot be set up",
        "run `nvidia-container-cli info` on the node; drivers, and what NVIDIA_REQUIRE_CUDA of the image asks for, "
        "must fit",
    ),
    "ENR-07": (
        "the image's file is not on the compute node, or made for another CPU",
        "put the .sqsh on a file system that every node sees, and begin its name with /; `file` on a binary in it "
        "names the CPU",
    ),
    "ENR-08": (
        "the image's file is damaged or half-written",
        "import it again under another name and rename it when it is complete; `unsquashfs -s FILE` must succeed",
    ),
    "ENR-09": (
        "Enroot's run folders cannot be made on the node",
        "have /run/pyxis and /run/user/UID made by the prolog",
    ),
    "ENR-10": (
        "the image cannot be imported",
        "check name and tag: `enroot import docker://REGISTRY#IMAGE:TAG` on the node; then point CONT at the "
        "imported .sqsh",
    ),
    "ENR-11": (
        "the image's file has no record that fits it: somebody else made, renamed or exchanged it",
        "import it with `python -m bench image import`, which names it by its digest and records where it came from",
    ),
}

MPI: Texts = {
    "MPI-01": (
        "this Slurm has no such MPI plugin",
        "set SLURM_MPI_TYPE to one that `srun --mpi=list` shows (pmix, else pmi2)",
    ),
    "MPI-02": (
        "PMIx of the container and of the host do not understand each other",
        "use --mpi=pmi2, or an image whose PMIx is as new as Slurm's; unset PMIX_* and try PMIX_MCA_psec=native, "
        "PMIX_MCA_gds=hash",
    ),
    "MPI-03": (
        "overlapping TP communication needs MPI",
        "start with srun --mpi=pmix, or set TP_COMM_OVERLAP=False",
    ),
}

NCCL: Texts = {
    "NCC-01": (
        "the network interface that NCCL or Gloo should use is not there",
        "set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to an interface that `ip -br addr` shows on every node, or "
        "unset them",
    ),
    "NCC-02": (
        "NCCL found no InfiniBand and uses TCP sockets, which are 4 to 5 times slower between nodes",
        "look for /dev/infiniband in the container and for NCCL_IB_DISABLE, NCCL_IB_HCA; `ibstat` on each node must "
        "show active ports",
    ),
    "NCC-03": (
        "InfiniBand fails",
        "compare `ibstat` of the nodes and look for link errors with `ibqueryerrors`: a port error is a link that "
        "went down, and "
        "status 12 a peer that does not answer. Set NCCL_IB_HCA to ports that are up everywhere, raise `ulimit -l` "
        "to unlimited",
    ),
    "NCC-04": (
        "a node or a link is slow",
        "run all_reduce_perf on pairs of nodes and leave out the one that is slow with every partner",
    ),
    "NCC-05": (
        "the ranks do not meet as one world: the port is taken, rank 0 is not there, or each takes itself for rank 0",
        "start all ranks with one srun (or torchrun) and set MASTER_ADDR; cluster.master_port=null picks a free port",
    ),
    "NCC-06": (
        "ranks waited in vain for another one: a collective timed out",
        "find the rank that did not come: the one with fewest collectives, or no messages; "
        "TORCH_NCCL_TRACE_BUFFER_SIZE=2000 and "
        "NCCL_DEBUG=INFO name it; then look at its node",
    ),
    "NCC-07": (
        "NCCL fails",
        "run it again with NCCL_DEBUG=INFO: the first NCCL WARN line says which call failed on which node",
    ),
}

HARDWARE: Texts = {
    "HW-01": (
        "a GPU is broken",
        "have the node drained; `nvidia-smi -q -d ECC,ROW_REMAPPER,PERFORMANCE` and `dmesg -T | grep Xid` name the GPU",
    ),
    "HW-02": (
        "the NVLink fabric is not ready",
        "have nvidia-fabricmanager (NVL72: IMEX) started on the node in the driver's version, and the GPUs reset "
        "after it",
    ),
    "HW-03": (
        "there is no GPU, or no driver that fits",
        "run `nvidia-smi` in the same srun and container; ask for GPUs (SLU-01); the driver must be as new as the "
        "image's CUDA",
    ),
    "HW-04": (
        "the NVIDIA libraries and the loaded kernel module have different versions",
        "the driver was upgraded under a running module, or the container brings driver libraries of its own: compare "
        "`cat /proc/driver/nvidia/version` with the library's version, and have the node drained and rebooted",
    ),
    "HW-05": (
        "this GPU's compute capability does not fit what it is asked to run",
        "FP8 needs compute capability 8.9 or higher (H100, H200, L40S or newer): choose precision=bf16, or a newer "
        "GPU; for "
        "`no kernel image` take a torch or an image that was built for this GPU",
    ),
    "HW-06": (
        "the clocks of the nodes differ",
        "have the time of these nodes synchronised (`chronyc tracking`, `timedatectl`): log lines of two nodes cannot "
        "be compared, and from 5 min on MUNGE refuses credentials",
    ),
}
