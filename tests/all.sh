#!/usr/bin/env bash
# All tests, in two processes side by side: those on a real Slurm mostly wait.  tests/all.sh PYTHON
set -u
log=$(mktemp)
trap 'rm -f "$log"' EXIT
"$1" -m pytest tests/slurm >"$log" 2>&1 &
on_slurm=$!
"$1" -m pytest --ignore=tests/slurm
code=$?
wait "$on_slurm" || code=$?
cat "$log"
exit "$code"
