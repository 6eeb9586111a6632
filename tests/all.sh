#!/usr/bin/env bash
# Run all tests of the gate in parallel streams, at most four at a time.  tests/all.sh PYTHON
# The longest streams start first: runs on a real Slurm, the fast tests that import torch (in one process, since the
# import is slow), all other fast tests on all cores. When one ends, a stream that trains or boots its own Slurm starts.
# With the argument `fast`, only tests that do not train, start programs or take long, and fewer examples of each
# property (few of tests/helpers/examples.py): tests/all.sh PYTHON fast
set -u
python=$1
gate="not slow and not faults" examples=half
[ "${2-}" != fast ] || gate="not slow and not slurm and not starts and not long and not faults" examples=few
slurm=tests/backends/slurm
queued=($slurm/test_{runs,failures,submitit,pyxis,scripts,faults}.py) # the last one reads the results of jobs that run while the others run
started=(tests/launch tests/report $slurm/test_doctor.py)
with_torch=(tests/{engines,kernels,local_sgd,nemo,node_checks,profiles,ranks,tasks,weights})
with_torch+=(tests/planning/test_{experts,huggingface_memory}.py)
with_torch+=(tests/data/test_{chat_template,packing,sentencepiece,sources}.py tests/contract/test_new_folder.py)
with_torch+=(tests/launch/test_own_model.py tests/command/test_your_program.py)
with_torch+=(tests/serving/test_{model_folder,prompts,server_profile}.py)
on_nodes='^tests/(backends|data|driver|node_checks|profiles|studies)/' # their ranks wait for each other
mapfile -t elsewhere < <(grep -rl --include='test_*.py' mark.trains tests | grep -vE '^tests/(launch|report|backends/slurm)/')
mapfile -t nodes < <(printf '%s\n' "${elsewhere[@]}" | grep -E "$on_nodes")
mapfile -t trained < <(printf '%s\n' "${elsewhere[@]}" | grep -vE "$on_nodes")
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
unset PYTHONDONTWRITEBYTECODE # or hundreds of processes would each compile all that they import
"$python" -m compileall -q bench jobs tests/helpers
code=0
declare -A streams=()

start_stream() { # NAME MARKS ARGUMENT...: start a stream in the background, once fewer than four are running
  local name=$1 marks=$2
  shift 2
  [ "${#streams[@]}" -lt 4 ] || show_next
  "$python" -m pytest -m "$gate and $marks" --hypothesis-profile="$examples" --durations=20 "$@" >"$logs/$name" 2>&1 &
  streams[$!]=$name
}

show_next() { # wait for the next stream to end, and print its output
  local pid
  wait -n -p pid "${!streams[@]}" || code=$?
  cat "$logs/${streams[$pid]}"
  unset "streams[$pid]"
}

[ "${2-}" = fast ] || start_stream queued "(trains or slurm)" "${queued[@]}"
start_stream torch "not trains" "${with_torch[@]}"
start_stream fast "not trains and not slurm" -q -n auto --dist worksteal "${with_torch[@]/#/--ignore=}"
if [ "${2-}" != fast ]; then
  start_stream started "(trains or slurm)" "${started[@]}"
  start_stream trained trains "${trained[@]}"
  start_stream nodes trains "${nodes[@]}"
fi
while [ "${#streams[@]}" -gt 0 ]; do show_next; done
programs=${RUNSTOP_KUBERNETES:-$HOME/.cache/runstop/kubernetes-1.20.2}
if [ "${2-}" != fast ] && [ ! -x "$programs/kubelet" ]; then
  printf '\n*** NOT RUN: every test on a real Kubernetes. There is none in %s\n' "$programs"
  printf '*** To build it, once: sudo -E tests/backends/kubernetes/build.sh\n'
fi
exit "$code"
