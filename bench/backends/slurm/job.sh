# ---- From here to the plan, every script is identical. The last function is main. ----

array=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}
job=$array${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID} # the id that Slurm shows for this job or array task
output=${job_output_file/\*/$job} # the file that sbatch's --output names
restarts=${SLURM_RESTART_COUNT:-0}
export RUNSTOP_ARRAY_TASK=${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}
end_reason=    # why this start of the job must end; empty while it may continue
running=       # process id of the command that is running
made_progress= # set when this start has finished work that the next start need not repeat
used_nodes=    # the nodes that commands use, separated by commas; empty: all nodes of the job
slow_nodes=    # the nodes that the next start of the job must not get

# Run a command in the background, so that bash handles a signal at once and passes it on.
run_watched() {
  local code=0
  "$@" &
  running=$!
  [[ -z $end_reason ]] || kill -TERM "$running" 2>/dev/null || true
  wait "$running" || code=$?
  while kill -0 "$running" 2>/dev/null; do
    code=0
    wait "$running" || code=$?
  done
  running=
  return "$code"
}

run_srun() { run_watched env "${rank_environment[@]}" srun "${srun_options[@]}" --chdir="$run" "$@"; }
on_each_node() { run_srun ${used_nodes:+--nodelist="$used_nodes"} --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 "$@"; } # outside the container
in_container() { run_srun ${container[@]+"${container[@]}"} "$@"; } # without a container if the plan has none
on_one_rank() { in_container ${used_nodes:+--nodelist="${used_nodes%%,*}"} --nodes=1 --ntasks=1 --ntasks-per-node=1 ${in_image[@]+"${in_image[@]}"} "$@"; }
on_all_ranks() { in_container ${used_nodes:+--nodelist="$used_nodes"} --nodes="$nodes" --ntasks=$((nodes * ranks_per_node)) --ntasks-per-node="$ranks_per_node" --kill-on-bad-exit=1 "$@"; }
between_commands() { on_one_rank "$python" -m bench.driver.between_commands "$run" "$@"; }

run_plan_command() { # LABEL SRUN_OPTION...: run a command of the plan on every rank
  local -n argv=argv_$1
  shift
  on_all_ranks "$@" ${in_image[@]+"${in_image[@]}"} "${argv[@]}"
}

append_output() { # FILE COMMAND...: append the output of the command to a file
  local file=$1
  shift
  [[ ! -L $file ]] || { echo "CFG-11: $file is a symbolic link; jobs do not write through symbolic links" && return 1; }
  "$@" >>"$file" 2>&1
}

write_file() { # FILE: replace it with standard input, atomically; a symbolic link is replaced, not followed
  local part=.part.$job.$BASHPID
  rm -f -- "$part"
  (set -o noclobber && cat >"$part") && mv -fT -- "$part" "$1" && return
  rm -f -- "$part"
  return 1
}

require() { # WHAT COMMAND...: end the job if the command fails
  local what=$1 code=0
  shift
  [[ -z $end_reason ]] || stop_early
  "$@" || code=$?
  [[ -z $end_reason ]] || stop_early
  ((code)) || return 0
  [[ . -ef $run ]] || finish "$code" "$what failed: the run folder was removed"
  if is_preempted; then
    end_reason="SLU-10: preempted"
  elif ! on_each_node --time=1 true; then # Slurm ends this job when it marks the node down
    wait_for_slurm
    end_reason=${end_reason:-SLU-09: a node does not respond}
  fi
  [[ -z $end_reason ]] || stop_early
  finish "$code" "$what failed"
}

# Slurm marks a node that does not respond down after SlurmdTimeout, ends this job and requeues it. No other job can use
# these nodes meanwhile, so the wait is SlurmdTimeout and one minute, at most 10 minutes.
wait_for_slurm() {
  local timeout_s=300 wait_s
  [[ ! $(scontrol show config 2>/dev/null) =~ SlurmdTimeout\ *=\ *([0-9]+) ]] || timeout_s="${BASH_REMATCH[1]}"
  wait_s=$((timeout_s + 60 < 600 ? timeout_s + 60 : 600))
  echo "$(date '+%F %T') a node does not respond; Slurm marks it down after $timeout_s s (SlurmdTimeout)." \
    "This job waits $wait_s s for Slurm, then requeues itself."
  run_watched sleep "$wait_s" || true
}

on_signal() {
  end_reason=$1
  [[ -z $running ]] || kill -TERM "$running" 2>/dev/null || true
}

job_shows() { [[ $(scontrol --oneliner show job "$job" 2>/dev/null) =~ $1 ]]; }
is_preempted() { job_shows 'PreemptTime=[0-9]'; } # during the grace time only the job steps get SIGTERM
was_requeued() { job_shows 'Restarts=([0-9]+)' && ((BASH_REMATCH[1] > restarts)); }

# End before the work is done. Slurm requeues the job unless a user cancelled it.
stop_early() {
  echo "$(date '+%F %T') $end_reason"
  trap 'exit 143' TERM
  trap '' USR1
  if was_requeued; then
    record_interruption "requeued $(tail -c "+$((output_start + 1))" "$output" | grep -o 'DUE TO [A-Z ]*' | tail -n 1)"
    exit 143
  fi
  if [[ $end_reason == stopped ]]; then
    local final=(interrupted 143 "SLU-08: the job was cancelled" "to continue: runstop resume RUN")
    if job_shows 'Reason=TimeLimit'; then
      final=(failed 143 "SLU-07: the job reached its time limit" "to continue with MIN minutes per trial: runstop resume RUN --walltime MIN")
    fi
    record_interruption "${final[2]}"
    write_status "${final[@]}"
    exit 143
  fi
  [[ -n $made_progress || $end_reason != SLU-07* ]] || finish 1 "$end_reason, and this start of the job has finished nothing"
  record_interruption "$end_reason"
  remove_container
  if requeue; then
    sleep 600 &
    wait
  fi
  finish 1 "$end_reason; Slurm did not requeue this job"
}

requeue() { # a job may be changed only while it waits; the signal that ends this script must not come in between
  [[ -n $slow_nodes ]] || {
    scontrol requeue "$job"
    return
  }
  trap '' TERM
  scontrol requeuehold "$job" || return 1
  scontrol update JobId="$job" ExcNodeList="$(excluded_nodes)" || echo "Slurm may give this job the node $slow_nodes again"
  scontrol release "$job"
  trap 'exit 143' TERM
}

excluded_nodes() { # those that the job excludes already, and the slow ones
  local excluded=
  ! job_shows ' ExcNodeList=([^ (]+)' || excluded=${BASH_REMATCH[1]}, # (null) if there are none
  echo "$excluded$slow_nodes"
}

record_interruption() { # REASON: for the ledger, which then moves the files of this attempt to attempts/
  echo "$1" | write_file "${interrupted_file/\*/$RUNSTOP_ARRAY_TASK}" || true
}

# OUTCOME EXIT_CODE WHAT FIX: the format of bench.runs.status, for when Python cannot be started. Array tasks write none:
# Slurm's states of the tasks show how they ended.
write_status() {
  rm -f "$reserve_file"
  [[ -z $RUNSTOP_ARRAY_TASK ]] || return 0
  printf '{"outcome": "%s", "exit_code": %d, "what": "%s", "fix": "%s"}\n' "$@" | write_file "$status_file"
}

finish() { # EXIT_CODE WHAT: write the final status; success also needs a ledger in which every trial is valid
  local code=0 room
  trap '' TERM USR1
  end_reason=
  room=$(df --output=avail . | tail -n 1) || room=
  rm -f "$reserve_file"
  ((${room:-1025} > 1024)) || set -- "$1" "CFG-08: no space left for results: $2"
  between_commands close --exit-code "$1" --what "$2" --trials "$trials" || code=$?
  if ((code)) && [[ ! -e $status_file ]]; then # Python did not start
    set -- 1 "$2"
    write_status failed 1 "$2" "runstop why RUN" || true
  fi
  remove_container
  exit "$(($1 ? $1 : code))"
}

remove_container() {
  [[ -z $container_name ]] || on_each_node enroot remove --force "pyxis_$container_name" >/dev/null || echo "the container pyxis_$container_name may still exist on these nodes: enroot remove it"
}

warn_old_names() {
  local name old new
  for name in WALLTIME PYTHON; do
    old=BENCH_$name new=RUNSTOP_$name
    [[ -z ${!old-} || -n ${!new-} ]] || echo "$old is deprecated: use $new" >&2
  done
}

refuse() { # WHAT: end before anything was changed
  echo "$1" >&2
  exit 2
}

# Enter the run folder: the first argument of the script, or a folder named after the job.
open_run() {
  warn_old_names
  check_site_variables
  run=${1:-$logs/$name-$array}
  [[ $run == /* ]] || run=$PWD/$run
  [[ $run != *[\"\\[:cntrl:]]* ]] || refuse "CFG-06: the name of the run folder ${run@Q} contains a quote, a backslash or a control character"
  create_folder
  cd -- "$run" || refuse "CFG-11: cannot enter $run: its target does not exist, or it belongs to another user"
  run=$PWD
  check_owner
  mkdir -p -- "$rank_logs_file"
  claim_folder
  [[ -e $script_file ]] || write_file "$script_file" <"$0"
  cmp -s "$0" "$script_file" || refuse "CFG-05: $run was created by another script; to continue that run: sbatch $run/$script_file $run"
  touch "$output"
  output_start=$(stat -c %s "$output")
  echo "job $job, restart $restarts, on $SLURM_JOB_NODELIST; all of its output: $run/$output"
  exec >>"$output" 2>&1
  head -c 262144 /dev/zero | write_file "$reserve_file" || true # reserves space for the final status if the disk fills up
  container_flags
  write_plan
}

check_site_variables() { # $DATADIR and the like go into plan.json and into srun's options
  local site path import_path=
  for site in $site_names; do
    [[ ${!site} != *[\"\\\$\`[:cntrl:]]* ]] ||
      refuse "CFG-06: $site contains a quote, a backslash, a dollar sign, a backtick or a control character"
  done
  unset CDPATH
  [[ ${PYTHONPATH+set} ]] || return 0
  while IFS= read -rd : path; do # nothing may be imported from the run folder: drop empty and relative entries
    [[ $path != /* ]] || import_path+=${import_path:+:}$path
  done <<<"$PYTHONPATH:"
  export PYTHONPATH=$import_path
}

# Another user who can write to the run folder could change or replace it while the job runs, and its name is easy to
# guess. So the folder is created here, or this user must own it and only this user can write to it.
create_folder() {
  local error
  (umask go-w && mkdir -p -- "$(dirname -- "$run")") || refuse "CFG-08: cannot create the parent folder of $run"
  error=$(umask go-w && mkdir -- "$run" 2>&1) || [[ -d $run || -L $run ]] || refuse "CFG-08: $error"
}

check_owner() { # of the current folder, which the path may no longer lead to
  local mode parent_mode
  mode=$(stat -c %a .) # one command substitution per command: bash 5.2 loses the trap of a signal between two of them
  parent_mode=$(stat -c %a ..)
  [[ ! -L $run ]] || refuse "CFG-11: $run is a symbolic link: give the path of the folder itself, not of the link"
  [[ -O . && . -ef $run ]] || refuse "CFG-11: another user owns $run: start your own run"
  ! ((8#$mode & 8#022)) || refuse "CFG-11: other users can write to $run: check that the folder has no files of other users, then: chmod go-w $run"
  ((8#$parent_mode & 8#1000)) || ! ((8#$parent_mode & 8#002)) ||
    refuse "CFG-11: every user can rename $run, because $(dirname -- "$run") is writable by all: use a folder below it that only you can write to"
  [[ ! -L $rank_logs_file && ! -L $output ]] || refuse "CFG-11: $rank_logs_file or $output in $run is a symbolic link"
}

claim_folder() { # one job at a time works in a run folder
  (set -o noclobber && echo "$array" >"$owner_file") 2>/dev/null && return
  local other
  other=$(cat -- "$owner_file" 2>/dev/null) || other=
  [[ ${other:-$array} == "$array" || -z $(squeue --noheader --jobs="$other" 2>/dev/null) ]] || refuse "CFG-05: job $other is using $run"
  echo "$array" | write_file "$owner_file"
}

write_plan() { # with the values of $DATADIR and the like, longer names first
  local text site value
  text=$(print_plan)
  for site in $site_names; do
    value=${!site}
    text=${text//"\$$site"/"$value"}
  done
  echo "$text" | write_file "$plan_file"
}

drop_caches() { # TRIAL: each node reports whether it cleared its page cache; the trial's log includes the reports
  local file="${caches_file/\*/$1}"
  rm -f -- "$file"
  on_each_node bash -c '{ sync && "$@"; } >/dev/null 2>&1 && echo "$SLURMD_NODENAME cleared" || echo "$SLURMD_NODENAME kept"' _ "${drop_command[@]}" >"$file"
}

size_of() { stat -c %s -- "$1" 2>/dev/null || echo 0; }

port_was_in_use() { # FILE SIZE: whether ranks that appended to the file say so; a port that the plan names is not changed
  [[ " ${rank_environment[*]-} " != *" MASTER_PORT="* ]] || return 1
  (($(tail -c "+$(($2 + 1))" -- "$1" | grep -cF -- "$port_in_use")))
}

run_trial() { # NUMBER [TRY]: if the rendezvous port is in use, the trial is tried again, with another port
  local code=0 nonce before try=${2:-1} file="${output_file/\*/trial_$1}"
  ! is_preempted || end_reason="SLU-10: preempted"
  [[ -z $end_reason ]] || stop_early
  read -r nonce </proc/sys/kernel/random/uuid
  export RUNSTOP_ATTEMPT=${nonce//-/} # names this attempt to its ranks, and determines their port
  between_commands begin "$1" --job "$job" --nodes "${used_nodes:-$SLURM_JOB_NODELIST}" --nonce "$RUNSTOP_ATTEMPT" || code=$?
  ((code != 3)) || return 0 # it has its result already
  require "opening trial $1" test "$code" -eq 0
  [[ -z ${drop_command[*]-} ]] || require "dropping caches" drop_caches "$1"
  [[ -z $end_reason ]] || stop_early
  before=$(size_of "$file")
  rm -f -- "$slow_node_file"
  append_output "$file" run_plan_command "trial_$1" --label --time="$trial_min" || code=$?
  if ((code && try < port_tries)) && [[ -z $end_reason ]] && port_was_in_use "$file" "$before"; then
    echo "NCC-05: trial $1: the rendezvous port $port_in_use; trying another port"
    record_interruption "NCC-05: the rendezvous port $port_in_use"
    run_trial "$1" "$((try + 1))"
    return
  fi
  if ((code)) && [[ -z $end_reason ]] && use_spare "$file" "$before"; then
    record_interruption "$lost_why; the next attempt uses a spare node"
    run_trial "$1"
    return
  fi
  require "trial $1" fail_with "$code"
  made_progress=1
  between_commands judge "$1" || true # if this fails, `close` judges the trial
  [[ -z $end_reason ]] || stop_early
}

fail_with() { return "$1"; }

# With spare nodes: after a trial was cut short because a node failed, a rank was killed or a rank stays slow (then its
# rank 0 has named the node), choose other nodes.
use_spare() { # FILE SIZE: the output of the trial, and its size before the trial
  [[ -n $nodes_of_trial && -n $used_nodes && -d $run ]] || return 1
  lost_nodes=$(failed_nodes)
  lost_why="SLU-09: Slurm has marked $lost_nodes as down"
  if [[ -z $lost_nodes && -s $slow_node_file ]]; then
    { read -r lost_nodes && read -r lost_why; } <"$slow_node_file" || return 1
    [[ ,$used_nodes, == *",$lost_nodes,"* ]] || return 1
  elif [[ -z $lost_nodes ]]; then
    lost_nodes=$(tail -c "+$(($2 + 1))" -- "$1" | sed -nE 's/^srun: error: ([[:alnum:]_.-]+): tasks? [0-9,-]+: (Out Of Memory|Killed)( .*)?$/\1/p' | head -n 1)
    lost_why="RUN-02: a rank was killed on $lost_nodes"
  fi
  [[ -n $lost_nodes && -z $end_reason ]] || return 1
  [[ $lost_why != SLU-09* ]] || srun_options+=(--overlap --mem=0) # Slurm keeps the resources of a step that had a failed node
  forget_node "$lost_nodes"
  between_commands spare --job "$job" --lost "$lost_nodes" --why "$lost_why" || return 1
  used_nodes=$(<"$used_nodes_file")
  echo "$(date '+%F %T') $lost_why; the next attempt of the trial uses $used_nodes"
  before_trial node_facts
}

failed_nodes() { # the used nodes that Slurm has removed from this job, separated by commas
  local node left failed=
  left=$(squeue --noheader --jobs="$job" --format=%N) && left=$(scontrol show hostnames "$left") && [[ -n $left ]] || return 0
  for node in ${used_nodes//,/ }; do grep -qxF -- "$node" <<<"$left" || failed+=${failed:+,}$node; done
  echo "$failed"
}

forget_node() { # NODES: use only others for the commands between trials, which need one node that responds
  local node others=
  for node in ${used_nodes//,/ }; do [[ ,$1, == *,$node,* ]] || others+=${others:+,}$node; done
  used_nodes=${others:-$used_nodes}
}

is_prepared() {
  local path
  for path in ${to_prepare[@]+"${to_prepare[@]}"}; do [[ -e $path ]] || return 1; done
}

before_trial() { # LABEL: run a command that the plan has before its trials
  case $1 in
    prepare)
      is_prepared && return
      require "$1" prepare
      made_progress=1
      ;;
    node_check)
      if [[ -n $nodes_of_trial ]]; then check_and_replace; else require "node check" run_plan_command node_check; fi
      ;;
    *) require "${1//_/ }" run_plan_command "$1" ;;
  esac
  [[ $1 != node_facts ]] || require "checking the node facts" between_commands check --nodes "$nodes"
}

# With launch.replace_slow: check the nodes until all that are left are fast, leave out those that are slow, and use as
# many as a trial needs. If too few are left, Slurm starts the job again without the slow ones.
check_and_replace() {
  local check=0 code=0 left
  run_plan_command node_check || check=$?
  [[ -z $end_reason ]] || stop_early
  between_commands replace --job "$job" --exit-code "$check" || code=$?
  [[ -z $end_reason ]] || stop_early
  case $code in
    0) # all are fast
      used_nodes=$(<"$used_nodes_file") nodes=$nodes_of_trial
      ((nodes == SLURM_JOB_NUM_NODES)) || before_trial node_facts
      ;;
    4) # the others are enough
      used_nodes=$(<"$used_nodes_file")
      IFS=, read -ra left <<<"$used_nodes"
      nodes=${#left[@]}
      check_and_replace
      ;;
    5) # the others are too few
      slow_nodes=$(<"$used_nodes_file")
      ((restarts + 1 < max_starts)) || finish "$check" "node check failed: slow nodes were left out in $max_starts starts of this job"
      end_reason="NCC-04: slow, so that the job is requeued without it: $slow_nodes"
      stop_early
      ;;
    *) require "node check" fail_with "$((check ? check : code))" ;;
  esac
}

prepare() { # if the rendezvous port is in use, try again with another port
  local code=0 before try file="${output_file/\*/prepare}"
  for ((try = 1; try <= port_tries; try++)); do
    code=0
    before=$(size_of "$file")
    append_output "$file" run_plan_command prepare --label || code=$?
    if ((!code)) || [[ -n $end_reason ]] || ! port_was_in_use "$file" "$before"; then break; fi
    local -x MASTER_PORT=$((first_port + RANDOM % num_ports))
  done
  return "$code"
}

main() {
  local k
  trap 'on_signal "SLU-07: the time limit is near"' USR1
  trap 'on_signal stopped' TERM
  umask go-w # no other user may change what this job executes or believes
  export SLURM_UMASK && SLURM_UMASK=$(umask) # srun takes the umask of the ranks from it
  open_run "$@"
  require "opening the run" between_commands open --job "$array"
  for k in ${before_trials[@]+"${before_trials[@]}"}; do before_trial "$k"; done
  for k in $trials; do run_trial "$k"; done
  finish 0 "every trial ended"
}
