#!/usr/bin/env bash
# All tests, in two processes side by side: those of failures on a real Slurm mostly wait.  tests/all.sh PYTHON
set -u
log=$(mktemp)
trap 'rm -f "$log"' EXIT
"$1" -m pytest tests/slurm/test_failures.py >"$log" 2>&1 &
failures=$!
"$1" -m pytest --ignore=tests/slurm/test_failures.py
code=$?
wait "$failures" || code=$?
cat "$log"
exit "$code"
