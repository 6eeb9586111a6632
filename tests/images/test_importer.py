"""Imports through Enroot as a user runs them: wrong credentials, interrupts, full disks, two at once."""

import fcntl
import gzip
import hashlib
import io
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest

from bench.images import store
from helpers import answers

pytestmark = [
    pytest.mark.starts,
    pytest.mark.skipif(shutil.which("mksquashfs") is None, reason="squashfs-tools are not installed"),
]
Bench = Callable[..., "subprocess.Popen[str]"]
needs_enroot = pytest.mark.skipif(shutil.which("enroot") is None, reason="Enroot is not installed")

SECRET = "nvapi-0123456789"

FAILING = {
    "no access": 'echo "[ERROR] URL https://nvcr.io/proxy_auth returned error code: 401 Unauthorized" >&2; exit 1',
    "killed": 'head -c 5000 "$REAL" > "$out"; kill -9 $$',
    "half": 'head -c 5000 "$REAL" > "$out"',
    "nothing": "exit 0",
    "disk full": 'mksquashfs "$MANY" "$out" -no-progress -noappend -exit-on-error >&2',
    "slow": 'echo "[INFO] Creating squashfs filesystem..." >&2; head -c 5000 "$REAL" > "$out"; sleep 60 & wait',
}
"""What an Enroot does, in the end, that does not succeed; its words are the real one's."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "images"


@pytest.fixture
def image_file(tmp_path: Path) -> Path:
    """A real image of a program of this machine."""
    (tmp_path / "root/usr/bin").mkdir(parents=True)
    shutil.copy("/bin/bash", tmp_path / "root/usr/bin/bash")
    subprocess.run(["mksquashfs", tmp_path / "root", tmp_path / "real.sqsh", "-quiet", "-no-progress"], check=True)
    return tmp_path / "real.sqsh"


@pytest.fixture
def bench(tmp_path: Path, image_file: Path, spawn: Bench) -> Bench:
    """Start `runstop image` with all of Enroot's folders in the test's folder; `how` selects Enroot's failure."""
    environment = {
        f"ENROOT_{name}_PATH": str(tmp_path / name) for name in ("CONFIG", "CACHE", "DATA", "RUNTIME", "TEMP")
    }
    environment |= {"REAL": str(image_file), "MANY": "/usr/bin"}
    (tmp_path / "TEMP").mkdir()
    (tmp_path / "CONFIG").mkdir()

    def start(
        *argv: str, how: str | None = None, wrapped: tuple[str, ...] = (), **more: str
    ) -> "subprocess.Popen[str]":
        path = os.environ["PATH"]
        if how is not None:
            path = f"{enroot(tmp_path, FAILING[how])}:{path}"
        argv = (*wrapped, sys.executable, "-m", "bench", "image", *argv)
        return spawn(argv, environment | {"PATH": path} | more)

    return start


def enroot(tmp_path: Path, end: str) -> Path:
    """Return a folder with a fake Enroot that runs the script `end`."""
    (tmp_path / "bin").mkdir(exist_ok=True)
    script = tmp_path / "bin/enroot"
    script.write_text(
        f"""#!/bin/bash
[[ $1 == version ]] && {{ echo 4.1.2; exit; }}
while [[ $1 != --output ]]; do shift; done
out=$2
echo $$ > {tmp_path}/enroot.pid
{end}
"""
    )
    script.chmod(0o755)
    return script.parent


def finished(process: "subprocess.Popen[str]") -> tuple[int, str]:
    out, _ = process.communicate(timeout=60)
    return process.returncode, out


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != store.LOCK)


@pytest.mark.parametrize(
    ("how", "rule", "words"),
    [
        ("no access", "ENR-01", "the registry refuses access to the image"),
        ("killed", "ENR-10", "exit code -9"),
        ("half", "ENR-08", "the file is truncated: it has 5,000 of"),
        ("nothing", "ENR-10", "exit code 0, no output"),
    ],
)
def test_a_failed_import_reports_the_reason_and_leaves_no_file(
    bench, folder: Path, how: str, rule: str, words: str
) -> None:
    code, out = finished(bench("import", "nvcr.io/nvidia/pytorch:1", "--dir", str(folder), how=how))
    assert code == 1 and f"\n{rule}: " in out and words in out and "fix:" in out
    assert left(folder) == []


@pytest.mark.parametrize("how", ["disk full", None])
def test_a_full_disk_is_reported_and_leaves_no_file(bench, folder: Path, image_file: Path, how: str | None) -> None:
    """Once while Enroot writes, once before a file is copied; on its own tmpfs."""
    source = "nvcr.io/nvidia/pytorch:1" if how else str(image_file)
    mounted = f'mount -t tmpfs -o size=1m none "{folder}" && "$@"; code=$?; ls -A "{folder}"; exit $code'
    folder.mkdir()
    wrapped = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mounted, "sh")
    if subprocess.run([*wrapped, "true"], capture_output=True).returncode:
        pytest.skip("this machine has no user namespaces")
    code, out = finished(bench("import", source, "--dir", str(folder), how=how, wrapped=wrapped))
    assert code == (1 if how else 2)
    assert "\nENR-03: there is not enough disk space" in out if how else "ENR-03: only 0.00 GiB are free" in out
    assert ".part" not in out and ".sqsh\n" not in out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_stops_enroot_and_leaves_no_file(bench, tmp_path: Path, folder: Path, number: int) -> None:
    process = bench("import", "nvcr.io/nvidia/pytorch:1", "--dir", str(folder), how="slow")
    wait_for(lambda: bool(list(folder.glob(".import-*.part"))))
    enroot_pid = int((tmp_path / "enroot.pid").read_text())
    process.send_signal(number)
    code, out = finished(process)
    assert code == 128 + number and "interrupted: no image was imported" in out
    assert left(folder) == []
    wait_for(lambda: not psutil.pid_exists(enroot_pid))  # its new parent must still reap it


def test_after_a_kill_the_next_import_waits_for_the_running_enroot(
    bench, tmp_path: Path, folder: Path, image_file: Path
) -> None:
    first = bench("import", "nvcr.io/nvidia/pytorch:1", "--dir", str(folder), how="slow")
    wait_for(lambda: bool(list(folder.glob(".import-*.part"))))
    first.kill()
    second = bench("import", str(image_file), "--dir", str(folder))
    assert second.stdout is not None and "another import" in second.stdout.readline()
    assert store.is_locked(folder)
    os.killpg(int((tmp_path / "enroot.pid").read_text()), signal.SIGKILL)
    code, out = finished(second)
    assert code == 0 and out.startswith("imported\n")
    code, out = finished(bench("list", "--dir", str(folder)))
    assert "its import was killed" in out


def test_the_second_of_two_concurrent_imports_reuses_the_image(bench, folder: Path, image_file: Path) -> None:
    folder.mkdir()
    with (folder / store.LOCK).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        both = [bench("import", str(image_file), "--dir", str(folder), "--json") for _ in range(2)]
        waiting = [process.stdout.readline() for process in both if process.stdout]
    results = [finished(process) for process in both]
    assert all("another import" in line for line in waiting) and [code for code, _ in results] == [0, 0]
    imports = [answers.one(out) for _, out in results]
    assert sorted(one["is_new"] for one in imports) == [False, True]
    assert imports[0]["record"] == imports[1]["record"] and len(left(folder)) == 3


@pytest.mark.parametrize(
    ("source", "machines", "missing"),
    [
        ("nvcr.io/nvidia/pytorch:1", [], "nvcr.io, authn.nvidia.com"),
        ("nvcr.io/nvidia/pytorch:1", ["nvcr.io"], "authn.nvidia.com"),
        ("nvcr.io/nvidia/pytorch:1", ["nvcr.io", "authn.nvidia.com"], None),
        ("ubuntu:24.04", ["nvcr.io"], "registry-1.docker.io, auth.docker.io"),
    ],
)
def test_missing_credentials_are_reported_and_no_secret_is_printed(
    bench, tmp_path: Path, folder: Path, source: str, machines: list[str], missing: str | None
) -> None:
    file = tmp_path / "CONFIG/.credentials"
    file.touch(0o600)
    file.write_text("".join(f"machine {name} login $oauthtoken password {SECRET}\n" for name in machines))
    code, out = finished(bench("import", source, "--dir", str(folder), how="no access"))
    assert code == 1 and SECRET not in out and "oauthtoken password nv" not in out
    assert re.findall(r"no credentials for (.+), so only", out) == ([missing] if missing else [])


def test_credentials_that_others_may_read_are_reported(bench, tmp_path: Path, folder: Path) -> None:
    (tmp_path / "CONFIG/.credentials").write_text("machine nvcr.io login a password b\n")
    (tmp_path / "CONFIG/.credentials").chmod(0o644)
    assert (
        "ENR-01: other users can read"
        in finished(bench("import", "nvcr.io/a/b:1", "--dir", str(folder), how="no access"))[1]
    )


def test_missing_programs_are_reported(bench, tmp_path: Path, folder: Path, image_file: Path) -> None:
    (tmp_path / "bare").mkdir()
    code, out = finished(bench("import", str(image_file), "--dir", str(folder), PATH=str(tmp_path / "bare")))
    assert code == 2 and "unsquashfs is not on PATH" in out and "squashfs-tools" in out
    for program in ("mksquashfs", "unsquashfs"):
        (tmp_path / "bare" / program).symlink_to(str(shutil.which(program)))
    code, out = finished(bench("import", "nvcr.io/a/b:1", "--dir", str(folder), PATH=str(tmp_path / "bare")))
    assert code == 2 and "enroot is not on PATH" in out


# the real Enroot and a registry on the loopback interface


@pytest.fixture
def registry(image_file: Path) -> Iterator[tuple[str, str]]:
    """Serve one image, runstop/tiny:1, with one program in it; yields the registry's name and the image's digest."""
    blobs: dict[str, bytes] = {}

    def add(content: bytes) -> dict[str, object]:
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        blobs[digest] = content
        return {"digest": digest, "size": len(content)}

    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        tar.add(image_file.parent / "root/usr", "usr")
    kind = "application/vnd.oci.image"
    config = {"architecture": {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()], "os": "linux", "config": {}}
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{kind}.manifest.v1+json",
        "config": {"mediaType": f"{kind}.config.v1+json", **add(json.dumps(config).encode())},
        "layers": [{"mediaType": f"{kind}.layer.v1.tar+gzip", **add(gzip.compress(layer.getvalue()))}],
    }
    digest = str(add(json.dumps(manifest).encode())["digest"])
    blobs["1"] = blobs[digest]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = blobs.get(self.path.rsplit("/", 1)[-1])
            self.send_response(200 if content else 404)
            self.send_header("Content-Type", str(manifest["mediaType"]) if "manifests" in self.path else "binary/x")
            self.send_header("Content-Length", str(len(content or b"")))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content or b"")

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever).start()
    yield f"localhost:{server.server_port}", digest
    server.shutdown()
    server.server_close()


@needs_enroot
def test_enroot_imports_from_a_registry_by_tag_and_by_digest(bench, folder: Path, registry: tuple[str, str]) -> None:
    name, digest = registry
    for source, full in ((f"{name}/runstop/tiny:1", ":1"), (f"docker://{name}#runstop/tiny@{digest}", f"@{digest}")):
        code, out = finished(bench("import", source, "--dir", str(folder), "--json", ENROOT_ALLOW_HTTP="y"))
        assert code == 0
        imported = answers.one(out.splitlines()[-1])
        assert imported["is_new"] and imported["record"]["source"] == f"docker://{name}#runstop/tiny{full}"
        assert imported["record"]["importer"].startswith("enroot ")
        assert store.faults(Path(imported["file"])) == []
        assert '"is_new": false' in finished(bench("import", source, "--dir", str(folder), "--json"))[1]
    code, out = finished(bench("import", f"{name}/runstop/tiny:2", "--dir", str(folder), ENROOT_ALLOW_HTTP="y"))
    assert code == 1 and "ENR-10" in out and "404 Not Found" in out
    assert len(left(folder)) == 6
