#!/usr/bin/env bash
# All tests of the gate, in two processes that take about as long: runs on a real Slurm, which mostly wait, beside the
# others.  tests/all.sh PYTHON
# The first of them trains for minutes while the others do not yet (conftest.py): ranks that share cores with other
# ranks wait for each other's turns.
set -u
gate="not slow and not faults"
waiting=(tests/slurm/test_{runs,failures,pyxis,scripts}.py)
log=$(mktemp)
trap 'rm -f "$log"' EXIT
"$1" -m pytest -m "$gate" --durations=20 "${waiting[@]}" >"$log" 2>&1 &
first=$!
"$1" -m pytest -m "$gate" --durations=20 "${waiting[@]/#/--ignore=}"
code=$?
wait "$first" || code=$?
cat "$log"
exit "$code"
