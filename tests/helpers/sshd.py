"""Two hosts without a scheduler on this machine: an sshd each, keys of their own, and what ssh needs to reach them."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
needs_sshd = pytest.mark.skipif(
    not Path(SSHD).exists() or shutil.which("ssh") is None, reason="no sshd here: make packages installs openssh-server"
)
ADDRESSES = {"rig0": "127.0.0.1", "rig1": "127.0.0.2"}


@dataclass(frozen=True)
class Hosts:
    """The hosts rig0 and rig1, as the user's ssh knows them."""

    config: Path
    known_hosts: Path
    pids: dict[str, int]

    @property
    def overrides(self) -> list[str]:
        """Two nodes of one rank on the CPU."""
        where = ["cluster=hosts", f"cluster.hosts=[{','.join(ADDRESSES)}]", f"cluster.ssh.options=[-F,{self.config}]"]
        return [*where, "cluster.device=cpu", "cluster.ranks_per_node=1", "cluster.gpu=null", "cluster.org=runstop"]


@contextmanager
def booted(folder: Path) -> Iterator[Hosts]:
    """Start an sshd for each host, which lets this user in by a new key."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    _key(folder / "user")
    shutil.copy(folder / "user.pub", folder / "authorized_keys")
    processes, config, known = {}, "", ""
    for name, address in ADDRESSES.items():
        _key(folder / name)
        port = _free_port(address)
        processes[name] = _sshd(folder, name, address, port)
        config += f"Host {name}\n  HostName {address}\n  Port {port}\n"
        known += f"[{address}]:{port} {(folder / f'{name}.pub').read_text()}"
    identity = f"  IdentityFile {folder}/user\n  IdentitiesOnly yes\n  UserKnownHostsFile {folder}/known_hosts\n"
    (folder / "config").write_text(
        f"{config}Host *\n{identity}  GlobalKnownHostsFile /dev/null\n  StrictHostKeyChecking no\n"
    )
    (folder / "known_hosts").write_text(known)
    try:
        yield Hosts(folder / "config", folder / "known_hosts", {name: p.pid for name, p in processes.items()})
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


def _key(path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", path.name, "-f", str(path)], check=True)


def _sshd(folder: Path, name: str, address: str, port: int) -> "subprocess.Popen[bytes]":
    (folder / f"{name}.conf").write_text(
        f"ListenAddress {address}:{port}\nHostKey {folder}/{name}\nPidFile none\nUsePAM no\nStrictModes no\n"
        f"AuthorizedKeysFile {folder}/authorized_keys\nPasswordAuthentication no\nPermitRootLogin prohibit-password\n"
    )
    process = subprocess.Popen([SSHD, "-D", "-f", f"{folder}/{name}.conf", "-E", f"{folder}/{name}.log"])
    until_s = time.monotonic() + 20
    while time.monotonic() < until_s:
        with socket.socket() as probe:
            if probe.connect_ex((address, port)) == 0:
                return process
        time.sleep(0.02)
    raise AssertionError((folder / f"{name}.log").read_text())


def _free_port(address: str) -> int:
    with socket.socket() as free:
        free.bind((address, 0))
        return int(free.getsockname()[1])
