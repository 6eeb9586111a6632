# ---- Several runs in one allocation, one after another. Each is started by its own, self-contained script. ----

set -uo pipefail
below=$(dirname -- "$1")
running= # process id of the current run
ending=  # set when this job has received a signal to end
failed=0

forward() { # SIGNAL: pass it to the current run, which ends or requeues this job
  ending=1
  [[ -z $running ]] || kill -s "$1" "$running" 2>/dev/null || true
}

run_all() {
  local run code
  for run in "${runs[@]}"; do
    [[ ! -e $below/$run/$status_file ]] || continue # an earlier start of this job finished this run
    [[ -z $ending ]] || return 143
    echo "$(date '+%F %T') $run"
    bash "$below/$run/$script_file" "$below/$run" &
    running=$! code=0
    wait "$running" || code=$?
    while kill -0 "$running" 2>/dev/null; do # a signal ends `wait`, not the run
      code=0
      wait "$running" || code=$?
    done
    running=
    echo "$(date '+%F %T') $run: exit code $code"
    ((code != 143)) || return 143 # cancelled or requeued
    ((code == 0)) || failed=1
  done
  return "$failed"
}

trap 'forward USR1' USR1
trap 'forward TERM' TERM
run_all
exit $?
