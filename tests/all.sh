#!/usr/bin/env bash
# All tests of the gate: runs on a real Slurm, which mostly wait, beside the others.  tests/all.sh PYTHON
# The others first go without training, on all cores, and then those that train or ask a Slurm of their own, one after
# the other: ranks that share cores with other ranks wait for each other's turns.
set -u
gate="not slow and not faults"
waiting=(tests/slurm/test_{runs,failures,pyxis,scripts,faults}.py) # the last one reads what went on beside the others
log=$(mktemp)
trap 'rm -f "$log"' EXIT
"$1" -m pytest -m "$gate" --durations=20 "${waiting[@]}" >"$log" 2>&1 &
slurm=$!
code=0
"$1" -m pytest -q -n auto --dist worksteal -m "$gate and not trains" --ignore=tests/slurm || code=$?
"$1" -m pytest -m "$gate and (trains or slurm)" --durations=20 "${waiting[@]/#/--ignore=}" || code=$?
wait "$slurm" || code=$?
cat "$log"
exit "$code"
