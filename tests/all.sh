#!/usr/bin/env bash
# All tests of the gate, in streams that go on side by side, since each of them waits a lot.  tests/all.sh PYTHON
# Runs on a real Slurm go on from the beginning. The fast tests take all cores; after them come those that train or ask
# a Slurm of their own, in two streams of about equal length: in more, ranks would wait for each other's turns.
set -u
unset PYTHONDONTWRITEBYTECODE # if nobody kept it, hundreds of processes would each compile all that they import
python=$1
gate="not slow and not faults"
queued=(tests/slurm/test_{runs,failures,pyxis,scripts,faults}.py) # the last one reads what went on beside the others
started=(tests/launch tests/report tests/slurm/test_doctor.py)
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
code=0

beside() { # NAME ARGUMENT...: a stream in the background, shown when it has ended
  local name=$1
  shift
  "$python" -m pytest -m "$gate and (trains or slurm)" --durations=20 "$@" >"$logs/$name" 2>&1 &
  streams[$!]=$name
}

shown() {
  local pid
  for pid in "${!streams[@]}"; do
    wait "$pid" || code=$?
    cat "$logs/${streams[$pid]}"
  done
}

declare -A streams
beside queued "${queued[@]}"
"$python" -m pytest -q -n auto --dist worksteal -m "$gate and not trains" --ignore=tests/slurm || code=$?
beside started "${started[@]}"
beside trained --ignore=tests/slurm "${started[@]/#/--ignore=}"
shown
exit "$code"
