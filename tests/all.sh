#!/usr/bin/env bash
# All tests of the gate, in streams, four at a time, since each of them waits a lot.  tests/all.sh PYTHON
# The longest ones come first: runs on a real Slurm, the fast tests that import torch (in one process, since that takes
# a while), all other fast tests on all cores. As each of them ends, those that train or ask a Slurm of their own begin.
# With `fast` behind it, only tests that neither train nor start programs nor take long, and fewer examples of each
# property (few of tests/helpers/examples.py): tests/all.sh PYTHON fast
set -u
python=$1
gate="not slow and not faults" examples=untimed
[ "${2-}" != fast ] || gate="not slow and not slurm and not starts and not long" examples=few
slurm=tests/backends/slurm
queued=($slurm/test_{runs,failures,pyxis,scripts,faults}.py) # the last one reads what went on beside the others
started=(tests/launch tests/report $slurm/test_doctor.py)
with_torch=(tests/{engines,kernels,local_sgd,nemo,node_checks,profiles,ranks,tasks,weights})
with_torch+=(tests/planning/test_huggingface_memory.py)
on_nodes='^tests/(backends|data|driver|node_checks|profiles|studies)/' # their ranks wait for each other
mapfile -t elsewhere < <(grep -rl --include='test_*.py' mark.trains tests | grep -vE '^tests/(launch|report|backends/slurm)/')
mapfile -t nodes < <(printf '%s\n' "${elsewhere[@]}" | grep -E "$on_nodes")
mapfile -t trained < <(printf '%s\n' "${elsewhere[@]}" | grep -vE "$on_nodes")
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
export COMPOSED_CONFIGS="$logs/composed" # what Hydra has composed for one process, the others read (cached_configs.py)
mkdir "$COMPOSED_CONFIGS"
unset PYTHONDONTWRITEBYTECODE # or hundreds of processes would each compile all that they import
"$python" -m compileall -q bench jobs tests/helpers
code=0
declare -A streams=()

beside() { # NAME MARKS ARGUMENT...: a stream in the background, begun when fewer than four others go on
  local name=$1 marks=$2
  shift 2
  [ "${#streams[@]}" -lt 4 ] || shown
  "$python" -m pytest -m "$gate and $marks" --hypothesis-profile="$examples" --durations=20 "$@" >"$logs/$name" 2>&1 &
  streams[$!]=$name
}

shown() { # wait for the next stream that ends, and show what it said
  local pid
  wait -n -p pid "${!streams[@]}" || code=$?
  cat "$logs/${streams[$pid]}"
  unset "streams[$pid]"
}

[ "${2-}" = fast ] || beside queued "(trains or slurm)" "${queued[@]}"
beside torch "not trains" "${with_torch[@]}"
beside fast "not trains and not slurm" -q -n auto --dist worksteal "${with_torch[@]/#/--ignore=}"
if [ "${2-}" != fast ]; then
  beside started "(trains or slurm)" "${started[@]}"
  beside trained trains "${trained[@]}"
  beside nodes trains "${nodes[@]}"
fi
while [ "${#streams[@]}" -gt 0 ]; do shown; done
exit "$code"
