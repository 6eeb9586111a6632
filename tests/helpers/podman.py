"""A real podman on this machine, and an empty image: what ranks need of this machine is mounted into it."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from helpers.paths import ROOT

IMAGE = "localhost/runstop-test:1"
needs_podman = pytest.mark.skipif(
    shutil.which("podman") is None or shutil.which("runc") is None or os.geteuid() != 0,
    reason="no podman and runc here, or not root: make packages installs them",
)
LINKS = {"lib": "usr/lib", "lib64": "usr/lib64", "bin": "usr/bin", "sbin": "usr/sbin"}
FOLDERS = ("usr", "etc", "tmp", "work", "root", "home", "opt", "proc", "dev", "sys", "run", "var")
RUNTIME = """#!{python}
# Where a test may not raise limits (no CAP_SYS_RESOURCE), containers are started without any.
import json, os, sys
from pathlib import Path
words = sys.argv[1:]
if "create" in words:
    file = Path(words[words.index("--bundle") + 1], "config.json")
    config = json.loads(file.read_text())
    config["process"].pop("rlimits", None)
    config["process"].pop("oomScoreAdj", None)
    file.write_text(json.dumps(config))
os.execv({runc!r}, ["runc", *words])
"""


def overrides(tmp: Path) -> list[str]:
    """Make the image; return what has ranks run in it: this Python and this checkout, mounted read-only."""
    with tarfile.open(tmp / "image.tar", "w") as image:
        for name, target in LINKS.items():
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, target
            image.addfile(link)
        for name in FOLDERS:
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o755
            image.addfile(folder)
    path = f"ENV PATH={Path(sys.executable).parent}:/usr/bin:/bin"
    subprocess.run(["podman", "import", "--quiet", "--change", path, str(tmp / "image.tar"), IMAGE], check=True)
    runtime = tmp / "runtime"
    runtime.write_text(RUNTIME.format(python=sys.executable, runc=shutil.which("runc")))
    runtime.chmod(0o755)
    mounts = [f"{place}:{place}:ro" for place in mounted()]
    arguments = [f"--runtime={runtime}", f"--env=PYTHONPATH={ROOT}"]
    named = ("container=podman", f"container.image={IMAGE}", f"container.mounts={json.dumps(mounts)}")
    return [*named, f"container.arguments={json.dumps(arguments)}"]


def mounted() -> list[str]:
    """Return the folders of this machine that hold Python, its packages and this checkout, none within another."""
    needed = {"/usr", "/etc", str(ROOT), str(Path(sys.prefix).resolve()), str(Path(sys.base_prefix).resolve())}
    return sorted(path for path in needed if not any(path.startswith(f"{other}/") for other in needed))
