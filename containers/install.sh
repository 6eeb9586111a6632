#!/usr/bin/env bash
# Install packages into an image, and leave alone what its base has compiled for its GPUs: torch and what is built on it.
set -euo pipefail
HOME=$(mktemp -d)  # nothing stays in the home of whoever builds
export HOME PIP_BREAK_SYSTEM_PACKAGES=1
unset PIP_CONSTRAINT  # the base's own, where it has one, pins more than that

compiled() {
    python3 -m pip list --format=freeze --disable-pip-version-check |
        grep -iE '^(torch|torchvision|triton|pytorch-triton|transformer[-_]engine([-_][a-z0-9]+)*|flash[-_]attn|apex)==' | sort
}

compiled > "$HOME/compiled.txt"
grep -q '^torch==' "$HOME/compiled.txt" || { echo "the base image has no torch" >&2; exit 1; }
python3 -m pip install --no-cache-dir --disable-pip-version-check --root-user-action=ignore --constraint "$HOME/compiled.txt" "$@"
diff "$HOME/compiled.txt" <(compiled) || { echo "torch, or what is built on it, is not the base's any more" >&2; exit 1; }
rm -rf "$HOME"
