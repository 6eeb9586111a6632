"""Patterns of the errors of ssh, docker and podman on a host.

Sources: output of OpenSSH 9.2 and podman 4.3; docker 27 and NVIDIA's container toolkit.
"""

CAUSES: dict[str, tuple[bytes, ...]] = {
    "HST-05": (rb"Host key verification failed|REMOTE HOST IDENTIFICATION HAS CHANGED|No \S{1,20} host key is known",),
    "HST-04": (rb"Permission denied \((?:publickey|password|keyboard-interactive|gssapi|hostbased)",),
    "HST-06": (
        rb"ssh: (?:connect to host .{1,200} port \d+|Could not resolve hostname)",
        rb"kex_exchange_identification: |Connection (?:closed|reset|timed out).{0,60} port \d+$",
    ),
    "HST-12": (
        rb"unresolvable CDI devices|could not select device driver .{0,40}gpu|setting up CDI devices",
        rb"stat nvidia\.com/gpu=\S{1,40}: no such file|nvidia-container-cli: ",
    ),
    "HST-08": (
        rb"(?:docker|podman): (?:command )?not found|Cannot connect to the Docker daemon",
        rb"Error: (?:initializing source|short-name|creating container|crun|runc|OCI)|Unable to find image '",
        rb"Error: (?:keep-id requires additional UIDs|statfs /dev/mqueue)",
        rb"[Ee]rror response from daemon|OCI runtime (?:attempted|create failed)|Trying to pull .{1,300}\.\.\.Error",
    ),
    "HST-07": (
        rb"No module named '?bench\b|No module named 'bench\.runner'",
        rb"env: .{1,300}: (?:No such file or directory|Permission denied)",
    ),
}
