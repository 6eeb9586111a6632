# ---- From here to the plan every script is the same; main is its last function. ----

array=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}
job=$array${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID} # as Slurm calls this job, or this element of an array
out=${job_output_file/\*/$job} # as the header's and sbatch's --output name it
restarts=${SLURM_RESTART_COUNT:-0}
export BENCH_ELEMENT=${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}
ending=  # why this start of the job must end; empty while it may go on
running= # process id of what is waited for
gain=    # what this start has done that the next one need not do again

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

start() { watched env "${rank_environment[@]}" srun "${srun_options[@]}" --chdir="$run" "$@"; }
hosts() { start --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 "$@"; } # outside of any container
inside() { start ${container[@]+"${container[@]}"} "$@"; } # the container, where there is one
first() { inside --nodes=1 --ntasks=1 --ntasks-per-node=1 "$@"; }
ranks() { inside --nodes="$nodes" --ntasks=$((nodes * ranks_per_node)) --ntasks-per-node="$ranks_per_node" --kill-on-bad-exit=1 "$@"; }
ask() { first "$python" -m bench.driver.between_commands "$run" "$@"; }

command_of() { # LABEL SRUN_OPTION...: run a command of the plan on every rank
  local -n argv=argv_$1
  shift
  ranks "$@" "${argv[@]}"
}

into() { # FILE COMMAND...
  local file=$1
  shift
  [[ ! -L $file ]] || { echo "CFG-11: $file is a symbolic link, and no job writes through one" && return 1; }
  "$@" >>"$file" 2>&1
}

put() { # FILE: standard input takes its place, whole and under a new name first: no link is followed
  local part=.part.$job.$BASHPID
  rm -f -- "$part"
  (set -o noclobber && cat >"$part") && mv -fT -- "$part" "$1" && return
  rm -f -- "$part"
  return 1
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
  elif ! hosts --time=1 true; then # a node that is gone is for Slurm to notice: it ends this job
    wait_for_verdict
    ending=${ending:-SLU-09: a node does not answer}
  fi
  [[ -z $ending ]] || leave
  finish "$code" "$what failed"
}

# Slurm calls a silent node down after SlurmdTimeout, ends this job and starts it again elsewhere. Nobody else can use
# these nodes meanwhile, so the wait is no longer than that and a minute, and never above 10 minutes.
wait_for_verdict() {
  local timeout_s=300 wait_s
  [[ ! $(scontrol show config 2>/dev/null) =~ SlurmdTimeout\ *=\ *([0-9]+) ]] || timeout_s="${BASH_REMATCH[1]}"
  wait_s=$((timeout_s + 60 < 600 ? timeout_s + 60 : 600))
  echo "$(date '+%F %T') a node does not answer; Slurm calls it down after $timeout_s s (SlurmdTimeout)." \
    "This job waits $wait_s s for that, and then requeues itself."
  watched sleep "$wait_s" || true
}

on_signal() {
  ending=$1
  [[ -z $running ]] || kill -TERM "$running" 2>/dev/null || true
}

slurm_says() { [[ $(scontrol --oneliner show job "$job" 2>/dev/null) =~ $1 ]]; }
is_preempted() { slurm_says 'PreemptTime=[0-9]'; } # Slurm gives it a grace time, and TERM only to its steps
was_requeued() { slurm_says 'Restarts=([0-9]+)' && ((BASH_REMATCH[1] > restarts)); }

# End before the work is done. Slurm starts the job again, unless somebody wanted the job to end.
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
  [[ -n $gain || $ending != SLU-07* ]] || finish 1 "$ending, and this start of the job has finished nothing"
  cut_short "$ending"
  remove_container
  if scontrol requeue "$job"; then
    sleep 600 &
    wait
  fi
  finish 1 "$ending, and Slurm does not requeue this job"
}

cut_short() { # for the ledger: the next attempt sets aside what this one left
  echo "$1" | put "${interrupted_file/\*/$BENCH_ELEMENT}" || true
}

# OUTCOME EXIT_CODE WHAT FIX: what bench.runs.status writes and reads, where no Python can be started to write it. Of an
# array the elements' states say it.
status() {
  rm -f "$reserve_file"
  [[ -z $BENCH_ELEMENT ]] || return 0
  printf '{"outcome": "%s", "exit_code": %d, "what": "%s", "fix": "%s"}\n' "$@" | put "$status_file"
}

finish() { # EXIT_CODE WHAT: the last word; nothing failed is not yet success, which the ledger must prove
  local code=0 room
  trap '' TERM USR1
  ending=
  room=$(df --output=avail . | tail -n 1) || room=
  rm -f "$reserve_file"
  ((${room:-1025} > 1024)) || set -- "$1" "CFG-08: no space left for results: $2"
  ask close --exit-code "$1" --what "$2" --trials "$trials" || code=$?
  if ((code)) && [[ ! -e $status_file ]]; then # it could not even be asked
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
  check_site
  run=${1:-$logs/$name-$array}
  [[ $run == /* ]] || run=$PWD/$run
  [[ $run != *[\"\\[:cntrl:]]* ]] || refuse "CFG-06: the run folder ${run@Q} has a quote, a backslash or a control character in its name"
  make_folder
  cd -- "$run" || refuse "CFG-11: $run cannot be entered: it leads nowhere, or belongs to somebody else"
  run=$PWD
  require_ours
  mkdir -p -- "$rank_logs_file"
  claim
  [[ -e $script_file ]] || put "$script_file" <"$0"
  cmp -s "$0" "$script_file" || refuse "CFG-05: another script made $run; sbatch its $script_file to go on with it"
  touch "$out"
  out_start=$(stat -c %s "$out")
  echo "job $job, restart $restarts, on $SLURM_JOB_NODELIST; all of its output: $run/$out"
  exec >>"$out" 2>&1
  head -c 262144 /dev/zero | put "$reserve_file" || true # room for the last word on a disk that fills up
  container_flags
  write_plan
}

check_site() { # the values of $DATADIR and the like go into plan.json and into srun's options
  local site path import_path=
  for site in $site_names; do
    [[ ${!site} != *[\"\\\$\`[:cntrl:]]* ]] ||
      refuse "CFG-06: $site holds a quote, a backslash, a dollar sign, a backtick or a control character"
  done
  unset CDPATH
  [[ ${PYTHONPATH+set} ]] || return 0
  while IFS= read -rd : path; do # an empty or relative entry would be the run folder, of which nothing is imported
    [[ $path != /* ]] || import_path+=${import_path:+:}$path
  done <<<"$PYTHONPATH:"
  export PYTHONPATH=$import_path
}

# A folder in which others may write could be changed or exchanged by them while the job works, and where jobs write is
# easily guessed. The folder is made here, or it belongs to this user and nobody else may write in it.
make_folder() {
  local error
  (umask go-w && mkdir -p -- "$(dirname -- "$run")") || refuse "CFG-08: the folder of $run cannot be made"
  error=$(umask go-w && mkdir -- "$run" 2>&1) || [[ -d $run || -L $run ]] || refuse "CFG-08: $error"
}

require_ours() { # of the folder that was entered, whatever its path leads to by now
  local mode parent_mode
  mode=$(stat -c %a .) parent_mode=$(stat -c %a ..)
  [[ ! -L $run ]] || refuse "CFG-11: $run is a symbolic link: name the folder itself"
  [[ -O . && . -ef $run ]] || refuse "CFG-11: $run belongs to somebody else; start a run of your own"
  ! ((8#$mode & 8#022)) || refuse "CFG-11: others may write in $run: look for what is not yours in it, then chmod go-w $run"
  ((8#$parent_mode & 8#1000)) || ! ((8#$parent_mode & 8#002)) ||
    refuse "CFG-11: everybody may rename $run: take a folder in $(dirname -- "$run") in which only you may write"
  [[ ! -L $rank_logs_file && ! -L $out ]] || refuse "CFG-11: $rank_logs_file or $out in $run is a symbolic link"
}

claim() { # one job at a time works in a folder
  (set -o noclobber && echo "$array" >"$owner_file") 2>/dev/null && return
  local other
  other=$(cat -- "$owner_file" 2>/dev/null) || other=
  [[ ${other:-$array} == "$array" || -z $(squeue --noheader --jobs="$other" 2>/dev/null) ]] || refuse "CFG-05: job $other works in $run"
  echo "$array" | put "$owner_file"
}

write_plan() { # with this job's paths in place of $DATADIR and its like, longer names first
  local text site value
  text=$(the_plan)
  for site in $site_names; do
    value=${!site}
    text=${text//"\$$site"/"$value"}
  done
  echo "$text" | put "$plan_file"
}

drop_caches() { # what each node did with its page cache goes into the trial's log
  local file="${caches_file/\*/$1}"
  rm -f -- "$file"
  hosts bash -c '{ sync && "$@"; } >/dev/null 2>&1 && echo "$SLURMD_NODENAME cleared" || echo "$SLURMD_NODENAME kept"' _ "${drop_command[@]}" >"$file"
}

trial() {
  local code=0
  ! is_preempted || ending="SLU-10: preempted"
  [[ -z $ending ]] || leave
  ask begin "$1" --job "$job" --nodes "$SLURM_JOB_NODELIST" || code=$?
  ((code != 3)) || return 0 # its outcome is known
  must "opening trial $1" test "$code" -eq 0
  [[ -z ${drop_command[*]-} ]] || must "dropping caches" drop_caches "$1"
  must "trial $1" into "${output_file/\*/trial_$1}" command_of "trial_$1" --label --time="$trial_min"
  gain=1
  ask judge "$1" || true # if it cannot, `close` will
  [[ -z $ending ]] || leave
}

is_prepared() {
  local path
  for path in ${to_prepare[@]+"${to_prepare[@]}"}; do [[ -e $path ]] || return 1; done
}

before_trial() { # LABEL: run what the plan has before its trials
  case $1 in
    prepare)
      is_prepared && return
      must "$1" into "${output_file/\*/$1}" command_of "$1" --label
      gain=1
      ;;
    *) must "${1//_/ }" command_of "$1" ;;
  esac
  [[ $1 != node_facts ]] || must "the check of the nodes" ask check
}

main() {
  local k
  trap 'on_signal "SLU-07: the time limit is near"' USR1
  trap 'on_signal stopped' TERM
  open_run "$@"
  must "opening the run" ask open --job "$array"
  for k in ${before_trials[@]+"${before_trials[@]}"}; do before_trial "$k"; done
  for k in $trials; do trial "$k"; done
  finish 0 "every trial ended"
}
