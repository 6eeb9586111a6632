#!/usr/bin/env bash
# All tests of the gate, in streams that go on side by side, since each of them waits a lot.  tests/all.sh PYTHON
# Runs on a real Slurm go on from the beginning, and so do the fast tests: those that import torch in one process, since
# that takes a while, the others on all cores. After them come those that train or ask a Slurm of their own, in two
# streams of about equal length: in more, ranks would wait for each other's turns.
set -u
python=$1
gate="not slow and not faults"
queued=(tests/slurm/test_{runs,failures,pyxis,scripts,faults}.py) # the last one reads what went on beside the others
started=(tests/launch tests/report tests/slurm/test_doctor.py)
with_torch=(tests/{engines,node_checks,ranks,tasks,weights})
mapfile -t trained < <(grep -rl --include='test_*.py' mark.trains tests | grep -vE '^tests/(launch|report|slurm)/')
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
unset PYTHONDONTWRITEBYTECODE # or hundreds of processes would each compile all that they import
"$python" -m compileall -q bench jobs tests/helpers
code=0

beside() { # NAME MARKS ARGUMENT...: a stream in the background, shown when it has ended
  local name=$1 marks=$2
  shift 2
  "$python" -m pytest -m "$gate and $marks" --durations=20 "$@" >"$logs/$name" 2>&1 &
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
beside queued "(trains or slurm)" "${queued[@]}"
beside torch "not trains" "${with_torch[@]}"
"$python" -m pytest -q -n auto --dist worksteal -m "$gate and not trains" --ignore=tests/slurm \
  "${with_torch[@]/#/--ignore=}" || code=$?
beside started "(trains or slurm)" "${started[@]}"
beside trained trains "${trained[@]}"
shown
exit "$code"
