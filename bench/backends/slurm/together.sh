# ---- Runs that share one allocation, one after another: each by its own script, which alone is the whole run. ----

set -uo pipefail
below=$(dirname -- "$1")
running= # process id of the run at work
ending=  # set once this job was told to end
failed=0

forward() { # SIGNAL: the run at work decides what becomes of it, and of this job
  ending=1
  [[ -z $running ]] || kill -s "$1" "$running" 2>/dev/null || true
}

work() {
  local run code
  for run in "${runs[@]}"; do
    [[ ! -e $below/$run/$status_file ]] || continue # it has its last word, by an earlier start of this job
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
    ((code != 143)) || return 143 # told to end, or requeued
    ((code == 0)) || failed=1
  done
  return "$failed"
}

trap 'forward USR1' USR1
trap 'forward TERM' TERM
work
exit $?
