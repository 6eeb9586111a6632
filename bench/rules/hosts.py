"""Texts of the rules about nodes without Slurm: runs started through ssh, another scheduler or by hand."""

HOSTS: dict[str, tuple[str, str]] = {
    "HST-01": (
        "the connection to a node was lost: its process was killed, the machine stopped, or the network failed",
        "check the machine named in the evidence, then run `runstop resume RUN`",
    ),
    "HST-02": (
        "a node did not join the run in time",
        "check that the node was started, read the output of the node, and test its connection to the port of node 0",
    ),
    "HST-03": (
        "a node and the lead node have different tokens",
        "set the same RUNSTOP_TOKEN on all nodes, and a different --node on each node; check that no other "
        "program listens on this port",
    ),
    "HST-04": (
        "ssh login without a password is refused",
        "put your public key into ~/.ssh/authorized_keys on the host, and load the key into ssh-agent; "
        "`ssh -o BatchMode=yes HOST true` must succeed",
    ),
    "HST-05": (
        "the host's ssh key is unknown, or has changed",
        "get the correct fingerprint from the host's admin and compare, then add the key: ssh-keyscan HOST >> "
        "~/.ssh/known_hosts. If the host was reinstalled, remove its old key first: ssh-keygen -R HOST",
    ),
    "HST-06": (
        "ssh cannot connect to the host",
        "check that the host is up, its name is correct and port 22 is open: `ssh -v HOST true`; ~/.ssh/config may set "
        "another port or address",
    ),
    "HST-07": (
        "runstop or its Python is not installed on the host",
        "put the checkout and the Python environment at the same path on every host, or set cluster.ssh.python",
    ),
    "HST-08": (
        "docker or podman cannot start the image",
        "run the command in the evidence on this host; `docker pull IMAGE` or `podman pull IMAGE` shows whether "
        "access is allowed; rootless podman needs newuidmap, and ranges for this user in /etc/subuid and "
        "/etc/subgid",
    ),
    "HST-09": (
        "the run folder is not on a file system that all nodes share",
        "put LOGDIR on a file system that is mounted on every node, and start the run on the first host",
    ),
    "HST-10": (
        "prepared data or weights are on one node and missing on another",
        "copy the folder to the same path on every host, or put DATADIR and MODEL on a shared file system",
    ),
    "HST-11": (
        "a GPU group of a host is not one replica of the model",
        "set parallel.tp x pp x cp to the number of GPUs per group: rig0:2x4 is two groups of four GPUs",
    ),
    "HST-12": (
        "no GPU is visible in the container",
        "podman: `nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml` on the host; docker: install NVIDIA's "
        "container toolkit and run `nvidia-ctk runtime configure`",
    ),
    "HST-13": (
        "the names of the hosts are not set",
        "set the names on the command line, in quotes: 'cluster.hosts=[HOST1,HOST2]', with the names that `ssh "
        "HOST1` accepts; for another number of hosts, also set cluster.num_nodes",
    ),
}
