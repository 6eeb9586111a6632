# ---- From here to the plan every script is the same; main is its last function. ----

array=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}
job=$array${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID} # as Slurm calls this job, or this element of an array
out=slurm-$job.out
life=${SLURM_RESTART_COUNT:-0}
ending=  # why this life of the job must end; empty while it may go on
running= # process id of what is waited for
gain=    # what this life has done that the next one need not do again

# Run a command in the background: a signal is then taken at once, and ends it.
watched() {
  local code=0
  "$@" &
  running=$!
  [[ -z $ending ]] || kill -TERM "$running" 2>/dev/null || true
  wait "$running" || code=$?
  while kill -0 "$running" 2>/dev/null; do
    code=0
    wait "$running" || code=$?
  done
  running=
  return "$code"
}

step() { watched srun "${step_options[@]}" --chdir="$run" "$@"; }
hosts() { step --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 "$@"; } # outside of any container
inside() { step ${container[@]+"${container[@]}"} "$@"; } # the container, where there is one
first() { inside --nodes=1 --ntasks=1 --ntasks-per-node=1 "$@"; }
ranks() { inside --nodes="$nodes" --ntasks=$((nodes * ranks_per_node)) --ntasks-per-node="$ranks_per_node" --kill-on-bad-exit=1 "$@"; }
ask() { first "$python" -m bench.launch.in_job "$run" "$@"; }

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
  ((code)) || return 0
  [[ . -ef $run ]] || finish "$code" "the run folder was removed, and $what failed"
  if is_preempted; then
    ending="SLU-10: preempted"
  elif ! hosts --time=1 true; then # a node that is gone is for Slurm to notice: it ends this life
    echo "$(date '+%F %T') a node does not answer; waiting for Slurm's verdict"
    watched sleep 900 || true
    ending=${ending:-SLU-09: a node does not answer}
  fi
  [[ -z $ending ]] || leave
  finish "$code" "$what failed"
}

on_signal() {
  ending=$1
  [[ -z $running ]] || kill -TERM "$running" 2>/dev/null || true
}

slurm_says() { [[ $(scontrol --oneliner show job "$job" 2>/dev/null) =~ $1 ]]; }
is_preempted() { slurm_says 'PreemptTime=[0-9]'; } # Slurm gives it a grace time, and TERM only to its steps
was_requeued() { slurm_says 'Restarts=([0-9]+)' && ((BASH_REMATCH[1] > life)); }

# End this life before the work is done. Slurm starts the next one, unless somebody wanted the job to end.
leave() {
  echo "$(date '+%F %T') $ending"
  trap 'exit 143' TERM
  trap '' USR1
  if was_requeued; then
    cut_short "requeued $(tail -c "+$((out_start + 1))" "$out" | grep -o 'DUE TO [A-Z ]*' | tail -n 1)"
    exit 143
  fi
  if [[ $ending == stopped ]]; then
    local said=(interrupted 143 "SLU-08: the job was cancelled" "python -m bench resume $run goes on with it")
    if slurm_says 'Reason=TimeLimit'; then
      said=(failed 143 "SLU-07: the time limit ended the job" "python -m bench resume $run --walltime MIN, minutes per trial")
    fi
    cut_short "${said[2]}"
    status "${said[@]}"
    exit 143
  fi
  [[ -n $gain || $ending != SLU-07* ]] || finish 1 "$ending, and this life of the job has finished nothing"
  cut_short "$ending"
  remove_container
  if scontrol requeue "$job"; then
    sleep 600 &
    wait
  fi
  finish 1 "$ending, and Slurm does not requeue this job"
}

cut_short() { # for the ledger: the next life sets aside what this one left
  echo "$1" >"interrupted${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}.txt" || true
}

status() { # OUTCOME EXIT_CODE WHAT FIX; of an array the elements' states say it
  rm -f .reserve
  [[ -z ${SLURM_ARRAY_TASK_ID:-} ]] || return 0
  printf '{"outcome": "%s", "exit_code": %d, "what": "%s", "fix": "%s"}\n' "$@" >status.part && mv status.part status.json
}

finish() { # EXIT_CODE WHAT: the last word; nothing failed is not yet success, which the ledger must prove
  local code=0 room
  trap '' TERM USR1
  ending=
  room=$(df --output=avail . | tail -n 1) || room=
  rm -f .reserve
  ((${room:-1025} > 1024)) || set -- "$1" "CFG-08: no space left for results: $2"
  ask close --exit-code "$1" --what "$2" --trials "$trials" || code=$?
  if ((code)) && [[ ! -e status.json ]]; then # it could not even be asked
    set -- 1 "$2"
    status failed 1 "$2" "python -m bench why $run" || true
  fi
  remove_container
  exit "$(($1 ? $1 : code))"
}

remove_container() {
  [[ -z $container_name ]] || hosts enroot remove --force "pyxis_$container_name" >/dev/null || echo "the container pyxis_$container_name may be left on these nodes"
}

refuse() { # WHAT: nothing was touched
  echo "$1" >&2
  exit 2
}

# The folder of this run: named by whoever submitted, or after the job.
open_run() {
  run=${1:-$LOGS/$name-$array}
  [[ $run != *[\"\\]* ]] || refuse "CFG-06: the run folder $run has a quote or a backslash in its name"
  mkdir -p "$run/rank_logs"
  cd "$run"
  run=$PWD
  claim
  [[ -e job.sbatch ]] || { cp "$0" "script.$job" && mv "script.$job" job.sbatch; }
  cmp -s "$0" job.sbatch || refuse "CFG-05: another script made $run; sbatch its job.sbatch to go on with it"
  touch "$out"
  out_start=$(stat -c %s "$out")
  echo "job $job, life $life, on $SLURM_JOB_NODELIST; all of its output: $run/$out"
  exec >>"$out" 2>&1
  head -c 262144 /dev/zero >.reserve || true # room for the last word on a disk that fills up
  container_flags
  write_plan
}

claim() { # one job at a time works in a folder
  (set -o noclobber && echo "$array" >.owner) 2>/dev/null && return
  local other
  other=$(<.owner)
  [[ $other == "$array" || -z $(squeue --noheader --jobs="$other" 2>/dev/null) ]] || refuse "CFG-05: job $other works in $run"
  echo "$array" >.owner
}

write_plan() { # with this job's paths in place of $DATADIR and its like, longer names first
  local text site value
  text=$(the_plan)
  for site in $site_names; do
    value=${!site}
    [[ $value != *[\"\\]* ]] || finish 2 "CFG-06: $site holds a quote or a backslash"
    text=${text//"\$$site"/"$value"}
  done
  echo "$text" >"plan.$job"
  mv "plan.$job" plan.json
}

drop_caches() { # what each node did with its page cache goes into the trial's log
  hosts bash -c '{ sync && eval "$1"; } >/dev/null 2>&1 && echo "$SLURMD_NODENAME cleared" || echo "$SLURMD_NODENAME kept"' _ "$drop_command" >"rank_logs/trial_$1.caches"
}

trial() {
  local code=0
  ! is_preempted || ending="SLU-10: preempted"
  [[ -z $ending ]] || leave
  ask begin "$1" --job "$job" --nodes "$SLURM_JOB_NODELIST" || code=$?
  ((code != 3)) || return 0 # its outcome is known
  must "opening trial $1" test "$code" -eq 0
  [[ -z $drop_command ]] || must "dropping caches" drop_caches "$1"
  must "trial $1" into "rank_logs/trial_$1.out" ranks --label --time="$trial_min" "$python" -m jobs.tasks.train "$run/plan.json" --trial "$1"
  gain=1
  ask judge "$1" || true # if it cannot, `close` will
  [[ -z $ending ]] || leave
}

is_prepared() {
  local path
  for path in ${to_prepare[@]+"${to_prepare[@]}"}; do [[ -e $path ]] || return 1; done
}

main() {
  local k
  trap 'on_signal "SLU-07: the time limit is near"' USR1
  trap 'on_signal stopped' TERM
  open_run "$@"
  must "opening the run" ask open --job "$array"
  must "the look at the nodes" ranks "$python" -m jobs.node_checks.facts "$run/plan.json"
  must "the check of the nodes" ask check
  [[ $health == off ]] || must "the health gate" ranks "$python" -m jobs.node_checks.health "$run/plan.json"
  if ! is_prepared; then
    must "prepare" into rank_logs/prepare.out ranks --label "$python" -m jobs.tasks.prepare "$run/plan.json"
    gain=1
  fi
  for k in $trials; do trial "$k"; done
  finish 0 "every trial ended"
}
