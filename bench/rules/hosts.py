"""Texts of the rules about nodes without Slurm: those that ssh, another scheduler or a person starts."""

HOSTS: dict[str, tuple[str, str]] = {
    "HST-01": (
        "a node of the run is gone: its process was killed, its machine stopped, or the network between them did",
        "look at the machine that the evidence names, then `python -m bench resume RUN`",
    ),
    "HST-02": (
        "a node has not joined the run in time",
        "see whether it was started and what it says, and whether it reaches the port of node 0",
    ),
    "HST-03": (
        "a node and its lead do not share the run's token",
        "give all of them the same RUNSTOP_TOKEN, and each its own --node; see what else listens at that port",
    ),
    "HST-04": (
        "ssh is not let in without a password",
        "put your public key into ~/.ssh/authorized_keys of the host, and have ssh-agent hold the key; "
        "`ssh -o BatchMode=yes HOST true` must succeed",
    ),
    "HST-05": (
        "ssh does not know the host's key, or knows another one",
        "compare the fingerprint with the one that the host's admin names, then enter it: ssh-keyscan HOST >> "
        "~/.ssh/known_hosts. Of a host that was installed anew remove the old one first: ssh-keygen -R HOST",
    ),
    "HST-06": (
        "ssh does not reach the host",
        "see whether it is up, its name is right and port 22 is open: `ssh -v HOST true`; ~/.ssh/config may name port "
        "and address",
    ),
    "HST-07": (
        "the host does not have this package, or has no such Python",
        "put checkout and environment at the same path on every host, or set cluster.ssh.python",
    ),
    "HST-08": (
        "docker or podman cannot start the image",
        "run the evidence's command there by hand; `docker pull IMAGE` or `podman pull IMAGE` shows whether it may; "
        "podman of a user who is not root needs newuidmap, and this user's ranges in /etc/subuid and /etc/subgid",
    ),
    "HST-09": (
        "the run folder is not shared by the nodes, and must be",
        "put LOGDIR on a file system that every node sees, and start the run on the first host",
    ),
    "HST-10": (
        "what was prepared on one node is missing on another one",
        "copy the folder to the same path on every host, or put DATADIR and MODEL on a file system that all see",
    ),
    "HST-11": (
        "the hosts' groups of GPUs are not the replicas of the model",
        "in rig0:2x4 each of two groups has four GPUs: let parallel.tp x pp x cp be four",
    ),
    "HST-12": (
        "the container has no GPUs",
        "podman: `nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml` on the host; docker: install NVIDIA's "
        "container toolkit and run `nvidia-ctk runtime configure`",
    ),
}
