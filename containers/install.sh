#!/usr/bin/env bash
# Install packages into an image without changing packages of the base that are compiled for its GPUs: torch and packages built on it.
set -euo pipefail
HOME=$(mktemp -d)  # leave no files in the home of the build user
export HOME PIP_BREAK_SYSTEM_PACKAGES=1
unset PIP_CONSTRAINT  # a constraint file of the base pins more packages

compiled() {
    python3 -m pip list --format=freeze --disable-pip-version-check |
        grep -iE '^(torch|torchvision|triton|pytorch-triton(-rocm)?|triton-rocm|transformer[-_]engine([-_][a-z0-9]+)*|flash[-_]attn|apex)==' | sort
}

compiled > "$HOME/compiled.txt"
grep -q '^torch==' "$HOME/compiled.txt" || { echo "the base image has no torch" >&2; exit 1; }
python3 -m pip install --no-cache-dir --disable-pip-version-check --root-user-action=ignore --constraint "$HOME/compiled.txt" "$@"
diff "$HOME/compiled.txt" <(compiled) || { echo "torch, or a package built on it, was replaced" >&2; exit 1; }
rm -rf "$HOME"
