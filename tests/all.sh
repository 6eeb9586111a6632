#!/usr/bin/env bash
# All tests, in three processes side by side, since those on a real Slurm mostly wait:  tests/all.sh PYTHON
set -u
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
"$1" -m pytest tests/slurm/test_failures.py >"$logs/failures" 2>&1 &
failures=$!
"$1" -m pytest tests/slurm --ignore=tests/slurm/test_failures.py >"$logs/slurm" 2>&1 &
slurm=$!
"$1" -m pytest --ignore=tests/slurm
code=$?
wait "$failures" || code=$?
wait "$slurm" || code=$?
cat "$logs/failures" "$logs/slurm"
exit "$code"
