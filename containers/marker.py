"""Write /etc/runstop-image.json while an image is built: its name, base, commit and installed versions."""

import argparse
import json
import os
import platform
from importlib.metadata import version
from pathlib import Path

PATH = Path("/etc/runstop-image.json")
PINS = Path(__file__).parent / "pins.env"
SET_BY_BASE = {"cuda": "CUDA_VERSION", "nccl": "NCCL_VERSION", "rocm": "ROCM_VERSION"}
"""Variables of NVIDIA's and AMD's images."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--base", required=True, help="as IMAGE@DIGEST")
    parser.add_argument("--commit", required=True)
    parser.add_argument("packages", nargs="+", help="packages whose versions are recorded; a missing one is an error")
    args = parser.parse_args()
    base, _, digest = args.base.partition("@")
    pins = dict(line.split("=", 1) for line in PINS.read_text().splitlines() if line[:1].isupper())
    for of_base in ("BASE", "ROCM"):
        if args.base == f"{pins[f'{of_base}_IMAGE']}@{pins[f'{of_base}_DIGEST']}":
            base = f"{base}:{pins[f'{of_base}_TAG']}"
    set_by_base = {name: os.environ[key] for name, key in SET_BY_BASE.items() if key in os.environ}
    versions = {name: version(name) for name in args.packages}
    marker = {
        "name": args.name,
        "base": base,
        "digest": digest or None,
        "versions": {"python": platform.python_version(), **set_by_base, **versions},
        "commit": args.commit,
    }
    PATH.write_text(json.dumps(marker, indent=1) + "\n")
    PATH.chmod(0o644)


if __name__ == "__main__":
    main()
