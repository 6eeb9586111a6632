# ---- From here to the plan every script is the same; main is its last function. ----

out=slurm-${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}.out
life=${SLURM_RESTART_COUNT:-0}
ending=  # why this life of the job must end; empty while it may go on
running= # process id of the step that runs

# Run a step in the background: a signal is then taken at once, and stops it.
step() {
  local code=0
  srun --export=ALL --mpi=none --chdir="$run" "${step_options[@]}" "$@" &
  running=$!
  wait "$running" || code=$?
  while kill -0 "$running" 2>/dev/null; do
    code=0
    wait "$running" || code=$?
  done
  running=
  return "$code"
}

ranks() { step --nodes="$nodes" --ntasks=$((nodes * ranks_per_node)) --ntasks-per-node="$ranks_per_node" --kill-on-bad-exit=1 "${container[@]}" "$@"; }
first() { step --nodes=1 --ntasks=1 --ntasks-per-node=1 "${container[@]}" "$@"; }
hosts() { step --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 "$@"; } # outside of any container

into() { # FILE COMMAND...
  local file=$1
  shift
  "$@" >>"$file" 2>&1
}

must() { # WHAT COMMAND...: go on only if it succeeds
  local what=$1 code=0
  shift
  [[ -z $ending ]] || leave
  "$@" || code=$?
  [[ -z $ending ]] || leave
  ((code == 0)) && return
  is_preempted && stop_here "preempted"
  hosts --time=1 true || await_slurm
  finish "$code" "$what failed"
}

stop_here() {
  ending=$1
  leave
}

on_signal() {
  ending=$1
  echo "$(date '+%F %T') $ending"
  [[ -z $running ]] || kill -TERM "$running" 2>/dev/null || true
}

is_preempted() { scontrol show job "$SLURM_JOB_ID" | grep -q 'PreemptTime=[0-9]'; }
was_requeued() { (($(scontrol show job "$SLURM_JOB_ID" | grep -o 'Restarts=[0-9]*' | tail -n 1 | tr -dc 0-9) > life)); }
slurm_says() { tail -c "+$((out_start + 1))" "$out" | grep -o 'DUE TO [A-Z ]*' | tail -n 1 || true; }

# A node that is gone is for Slurm to notice: it ends this life and starts the next one on others.
await_slurm() {
  local patience
  patience=$(($(scontrol show config | awk '$1 == "SlurmdTimeout" { print $3 }') + 60))
  echo "$(date '+%F %T') a node does not answer; waiting $patience s for Slurm's verdict"
  sleep "$patience" &
  running=$!
  wait "$running" || true
  stop_here "${ending:-a node does not answer}"
}

# End this life before the work is done. Slurm starts the next one, unless somebody wanted the job to end.
leave() {
  local said
  said=$(slurm_says)
  trap 'exit 143' TERM
  trap '' USR1
  if was_requeued; then
    cut_short "requeued ${said,,}"
    exit 143
  fi
  case $ending in
    stopped)
      if [[ $said == *"TIME LIMIT"* ]]; then
        status failed 143 "SLU-07: the time limit ended the job" "raise walltime (minutes per trial); then python -m bench resume $run"
      else
        status interrupted 143 "SLU-08: the job was cancelled" "python -m bench resume $run goes on with it"
      fi
      exit 143
      ;;
    *)
      cut_short "$ending"
      if scontrol requeue "$SLURM_JOB_ID"; then
        sleep 600 &
        wait
      fi
      finish 1 "Slurm does not requeue this job, and $ending"
      ;;
  esac
}

cut_short() { # for the ledger: the next life sets aside what this one left
  echo "$1" >"interrupted${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}.txt"
}

status() { # OUTCOME EXIT_CODE WHAT FIX; of an array the elements' states say it
  rm -f .reserve
  [[ -z ${SLURM_ARRAY_TASK_ID:-} ]] || return 0
  printf '{"outcome": "%s", "exit_code": %d, "what": "%s", "fix": "%s"}\n' "$@" >status.part && mv status.part status.json
}

finish() { # EXIT_CODE WHAT: the last word
  trap '' TERM USR1
  local room
  room=$(df --output=avail . | tail -n 1)
  rm -f .reserve
  ((room > 1024)) || set -- "$1" "CFG-08: no space left for results: $2"
  first "$python" -m bench.job . close --exit-code "$1" --what "$2" --trials "${trials[@]}" ||
    status failed "$1" "$2" "python -m bench why $run"
  [[ -z $container_name ]] || hosts enroot remove --force "pyxis_$container_name" >/dev/null 2>&1 || true
  exit "$1"
}

# The folder of this run: named by whoever submitted, or found again after a requeue, or made.
open_run() {
  local made
  made=$(compgen -G "$LOGS/*-$name-${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}" || true)
  run=${1:-${made:-$LOGS/$(date +%Y%m%d-%H%M%S)-$name-${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}}}
  mkdir -p "$run/rank_logs"
  cd "$run"
  touch "$out"
  out_start=$(stat -c %s "$out")
  echo "job $SLURM_JOB_ID, life $life, on $SLURM_JOB_NODELIST; all of its output: $run/$out"
  exec >>"$out" 2>&1
  [[ -e job.sbatch ]] || cp "$0" job.sbatch
  head -c 262144 /dev/zero >.reserve # room for the last word on a disk that fills up
  container_flags
  write_plan
}

write_plan() { # with this job's paths in place of $DATADIR and its like, longer names first
  local text site value
  text=$(the_plan)
  for site in "${site_names[@]}"; do
    value=${!site}
    [[ $value != *[\"\\]* ]] || finish 2 "CFG-06: $site holds a quote or a backslash"
    text=${text//"\$$site"/"$value"}
  done
  echo "$text" >"plan.part$SLURM_JOB_ID"
  mv "plan.part$SLURM_JOB_ID" plan.json
}

drop_caches() { # what each node did with its page cache goes into the trial's log
  hosts bash -c '{ sync && eval "$1"; } >/dev/null 2>&1 && echo "$SLURMD_NODENAME cleared" || echo "$SLURMD_NODENAME kept"' _ "$drop_command" >"rank_logs/trial_$1.caches"
}

trial() {
  local code=0
  first "$python" -m bench.job . begin "$1" --job "$SLURM_JOB_ID" --nodes "$SLURM_JOB_NODELIST" || code=$?
  ((code != 3)) || return 0 # its outcome is known
  must "opening trial $1" test "$code" -eq 0
  [[ -z $drop_command ]] || must "dropping caches" drop_caches "$1"
  must "trial $1" into "rank_logs/trial_$1.out" ranks --label --time="$trial_min" "$python" -m jobs.train plan.json --trial "$1"
  code=0
  first "$python" -m bench.job . judge "$1" || code=$?
  [[ -z $ending ]] || leave
  ((code == 0)) || worst=$code
}

is_prepared() {
  local path
  for path in "${to_prepare[@]}"; do [[ -e $path ]] || return 1; done
}

main() {
  local k worst=0
  trap 'on_signal "the time limit is near"' USR1
  trap 'on_signal stopped' TERM
  open_run "$@"
  must "opening the run" first "$python" -m bench.job . open --job "$SLURM_JOB_ID"
  must "the look at the nodes" ranks "$python" -m jobs.facts plan.json
  must "the check of the nodes" first "$python" -m bench.job . check
  [[ $health == off ]] || must "the health gate" ranks "$python" -m jobs.health plan.json
  is_prepared || must "prepare" into rank_logs/prepare.out ranks --label "$python" -m jobs.prepare plan.json
  for k in "${trials[@]}"; do trial "$k"; done
  finish "$worst" "every trial ended"
}
