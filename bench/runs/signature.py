"""Sign the manifest of a run, and check who signed it, with OpenSSH's ssh-keygen.

The manifest has the checksum of every file of the result, so its signature covers them. The namespace `runstop` keeps a
signature that was made for another purpose from being accepted. Source: ssh-keygen(1), -Y sign, -Y verify.
"""

import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.contract import atomic_files, regular_files
from bench.contract.run_files import MANIFEST, SIGNATURE
from bench.errors import BenchError, ConfigError, written
from bench.runs import verification
from bench.runs.folder import short
from bench.runs.verification import Compared, Verification

NAMESPACE = "runstop"
MAX_BYTES = 1 << 16
"""Of a signature."""


def sign(folder: Path, key: Path) -> Path:
    """Sign the manifest of a run that is unchanged since it ended; return the file with the signature.

    `key` is a private key, or a public key whose private key is in ssh-agent.

    Raises:
        ConfigError: the folder has no run, it has changed, it is signed already, or the key cannot be used.
    """
    if os.path.lexists(folder / SIGNATURE):
        fix = f"to sign the run again, delete {SIGNATURE} first"
        raise ConfigError("the run is already signed", where=str(folder / SIGNATURE), fix=fix)
    if not regular_files.is_regular(key):
        fix = "give a private key, such as ~/.ssh/id_ed25519; if ssh-agent has the private key, give the public key"
        raise ConfigError("this key file does not exist, or is not a regular file", where=str(key), fix=fix)
    data = _manifest(folder)
    if not verification.verify(folder, data).passed:
        fix = f"restore the changed files; to list them: runstop verify {short(folder)}"
        raise ConfigError(
            "the run cannot be signed: files differ from the manifest, or the manifest is missing",
            where=str(folder),
            fix=fix,
        )
    done = _ssh_keygen(["-Y", "sign", "-f", str(key), "-n", NAMESPACE], data)
    if done.returncode:
        raise ConfigError(f"the key cannot be used: {_last_line(done)}", where=str(key), fix="give another key")
    with written(folder), atomic_files.create(folder / SIGNATURE) as file:
        file.write(done.stdout.decode())
    return folder / SIGNATURE


def verify(folder: Path, *, allowed_signers: Path, revoked: Path | None = None) -> Verification:
    """Check a run folder as `verification.verify` does, and that an allowed signer signed its manifest.

    `allowed_signers` has a line `NAME KEY` for each signer; `revoked` is a list of public keys, or a KRL.

    Raises:
        ConfigError: the folder has no run, or a file of keys cannot be read.
    """
    files = [(allowed_signers, "allowed signers", "ALLOWED SIGNERS")]
    for path, keys, section in files + ([(revoked, "revoked keys", "KEY REVOCATION LISTS")] if revoked else []):
        if not path.is_file():
            raise ConfigError(
                f"the file with the {keys} does not exist, or is not a regular file",
                where=str(path),
                fix=f"give the path of an existing file; `man ssh-keygen` describes its format under {section}",
            )
    data = _manifest(folder)
    checked = verification.verify(folder, data)
    signer, why = _signer(folder, data, allowed_signers, revoked)
    expected = f"signed by a signer in {allowed_signers.name}"
    rows = [
        Compared(what=SIGNATURE, expected=expected, actual=why or expected, passed=signer is not None),
        *([Compared(what="signed by", expected="", actual=signer, passed=None)] if signer else []),
    ]
    return Verification(folder=checked.folder, compared=(*rows, *checked.compared))


def _manifest(folder: Path) -> bytes:
    """Return the manifest, which is read once: it is checked and signed as one text. Empty if there is none."""
    try:
        return regular_files.read_bytes(folder / MANIFEST)
    except OSError:
        return b""


def _signer(folder: Path, data: bytes, allowed: Path, revoked: Path | None) -> tuple[str | None, str]:
    """Return the name and the key of the signer; or None, and why the signature is not accepted."""
    if not os.path.lexists(folder / SIGNATURE):
        return None, "missing: the run is not signed"
    try:
        signature = regular_files.read_bytes(folder / SIGNATURE, max_bytes=MAX_BYTES)
    except OSError as error:
        return None, f"cannot be read: {error.strerror}"
    with tempfile.NamedTemporaryFile(prefix="runstop-") as file:  # ssh-keygen reads what is checked, and nothing else
        file.write(signature)
        file.flush()
        of_signature = ["-s", file.name]
        listed = _ssh_keygen(["-Y", "find-principals", "-f", str(allowed), *of_signature], b"")
        names = listed.stdout.decode(errors="replace").replace(",", "\n").split()  # a line may have several
        if listed.returncode or not names:
            return (
                None,
                f"{allowed.name} does not have the signer's key, or {SIGNATURE} is not a signature: "
                f"{_last_line(listed)}",
            )
        more = ["-r", str(revoked)] if revoked else []
        words = ["-Y", "verify", "-f", str(allowed), "-n", NAMESPACE, *of_signature, *more]
        for name in names:
            done = _ssh_keygen([*words, "-I", name], data)
            if done.returncode == 0:
                return f"{name}: {_last_line(done)}", ""
    return None, f"not accepted: {_last_line(done)}"


def _ssh_keygen(words: Sequence[str], data: bytes) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(["ssh-keygen", *words], input=data, capture_output=True, check=False)
    except FileNotFoundError as error:
        fix = "install OpenSSH 8.2 or later: apt install openssh-client"
        raise BenchError("ssh-keygen is not installed on this machine", where="PATH", fix=fix) from error


def _last_line(done: subprocess.CompletedProcess[bytes]) -> str:
    """Return the last line of ssh-keygen's output."""
    lines = (done.stdout + b"\n" + done.stderr).decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), f"exit code {done.returncode}")
