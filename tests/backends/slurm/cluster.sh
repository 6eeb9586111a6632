#!/usr/bin/env bash
# Boots a real Slurm on this machine, to try runstop without a cluster: nodes dgx-0 and dgx-1 with 8 simulated GPUs
# each, partitions batch and low (preempted and requeued), account test, sacct. Debian, root; no systemd, no GPU.
#
#   sudo -E tests/backends/slurm/cluster.sh up           install what is missing (Debian packages), start, print what env prints
#   eval "$(tests/backends/slurm/cluster.sh env)"        this shell's srun, sbatch, sacct and runstop now use it
#   srun -N2 --gpus-per-node=8 bash -c 'hostname; echo $CUDA_VISIBLE_DEVICES'
#   tests/backends/slurm/cluster.sh status               what runs; exit code 0 when everything does
#   tests/backends/slurm/cluster.sh kill-node dgx-1      cut its power: every process on it dies at once
#   tests/backends/slurm/cluster.sh start-node dgx-1     power it on: jobs that ran on it have failed
#   tests/backends/slurm/cluster.sh down                 cancel the jobs, stop everything, delete its directory
#
# Environment, the same for every command:  RUNSTOP_SLURM_DIR        its state and logs (/tmp/runstop-slurm)
#                                        RUNSTOP_SLURM_PORTS      first of four ports on 127.0.0.1 (17800)
#                                        RUNSTOP_SLURM_NODES      how many nodes, dgx-0 and so on (2); one port for each
# read by up when it starts a cluster:   RUNSTOP_SLURM_PLUGSTACK  a line of plugstack.conf: required /path/spank_pyxis.so
#                                        RUNSTOP_SLURM_EXTRA      lines at the end of slurm.conf, which override earlier ones
set -euo pipefail

for name in DIR PORTS PLUGSTACK EXTRA; do
  old=BENCH_SLURM_$name new=RUNSTOP_SLURM_$name
  [[ -n ${!old-} && -z ${!new-} ]] || continue
  echo "$old is deprecated: use $new" >&2
  export "$new=${!old}"
done
DIR=${RUNSTOP_SLURM_DIR:-/tmp/runstop-slurm}
PORT=${RUNSTOP_SLURM_PORTS:-17800}
DAEMONS=(munged mariadbd slurmdbd slurmctld)
NUM_NODES=${RUNSTOP_SLURM_NODES:-2}
[[ $NUM_NODES =~ ^[1-9]$ ]] || { echo "cluster.sh: RUNSTOP_SLURM_NODES must be 1 to 9: '$NUM_NODES'" >&2; exit 1; }
mapfile -t NODES < <(seq -f 'dgx-%g' 0 $((NUM_NODES - 1)))
PACKAGES=(munge mariadb-server-core slurmdbd slurmctld slurmd slurm-client)
SELF=$(realpath "$0")
PATH=$PATH:/usr/sbin:/sbin
export SLURM_CONF=$DIR/slurm.conf
trap 'exit 130' INT
# shellcheck source=tests/backends/slurm/config.sh
source "$(dirname "$SELF")/config.sh"

say() { printf 'cluster.sh: %s\n' "$*" >&2; }
fail() {  # MESSAGE [LOG]
  say "$1"
  [[ ! -s ${2:-} ]] || { printf '  %s ends with:\n' "$2"; tail -n 12 "$2" | sed 's/^/    /'; } >&2
  exit 1
}

# --- Processes. run/NAME holds a pid and when the kernel started it: another process may have got the same pid.

started_at() {  # PID; fails for ended processes and zombies
  local stat
  { read -r stat <"/proc/$1/stat"; } 2>/dev/null || return 1
  read -ra stat <<<"${stat##*) }"
  [[ ${stat[0]} != [ZX] ]] && echo "${stat[19]}"
}

pid_of() {  # NAME
  local pid when
  read -r pid when 2>/dev/null <"$DIR/run/$1" && [[ -n $when && $(started_at "$pid") == "$when" ]] && echo "$pid"
}
alive() { pid_of "$1" >/dev/null; }

launch() {  # NAME COMMAND...: in a session of its own
  local name=$1
  shift
  setsid "$@" </dev/null &>"$DIR/log/$name.log" 9>&- &
  echo "$! $(started_at $!)" >"$DIR/run/$name"
}

await() {  # NAME COMMAND...: until COMMAND succeeds, as long as NAME lives
  local name=$1 tries
  shift
  for ((tries = 0; tries < 500; tries++)); do
    ! "$@" &>"$DIR/log/awaited" || return 0
    if ! alive "$name" || grep -q fatal "$DIR/log/awaited"; then break; fi
    sleep 0.1
  done
  fail "$name does not start: $(<"$DIR/log/awaited")" "$DIR/log/$name.log"
}

family() {  # PID: itself and everything that descends from it
  local child
  echo "$1"
  # shellcheck disable=SC2013  # the ids are words of one line
  for child in $(cat "/proc/$1/task/"*/children 2>/dev/null); do family "$child"; done
}

halt() {  # NAME: with all its descendants, frozen first so that none can fork, report or clean up meanwhile
  local pid members=() before=none tries
  pid=$(pid_of "$1") || return 0
  while [[ ${members[*]} != "$before" ]]; do
    before=${members[*]}
    mapfile -t members < <(family "$pid")
    kill -STOP "${members[@]}" 2>/dev/null || true
  done
  kill -KILL "${members[@]}" 2>/dev/null || true
  for pid in "${members[@]}"; do  # they may still be writing; what hangs in the kernel is left to it
    for ((tries = 0; tries < 100; tries++)); do
      started_at "$pid" >/dev/null || break
      sleep 0.05
    done
  done
}

need_port() { ! (: <>"/dev/tcp/127.0.0.1/$1") 2>/dev/null || fail "port $1 is in use: choose other ports with RUNSTOP_SLURM_PORTS"; }

# --- Packages

install_packages() {
  local log=$DIR/log/apt.log
  if dpkg-query -Wf '${db:Status-Status} ' "${PACKAGES[@]}" 2>/dev/null |
    grep -qE "^(installed ){${#PACKAGES[@]}}$"; then return; fi
  command -v apt-get >/dev/null || fail "Slurm is not installed and there is no apt-get: install ${PACKAGES[*]}"
  say "installing ${PACKAGES[*]}"
  exec 8>/run/runstop-slurm-install
  flock 8
  if [[ ! -e /usr/sbin/policy-rc.d ]]; then  # Debian packages run it before they start a daemon
    trap 'rm -f /usr/sbin/policy-rc.d' EXIT
    install -m 755 <(printf '#!/bin/sh\nexit 101\n') /usr/sbin/policy-rc.d
  fi
  export DEBIAN_FRONTEND=noninteractive
  [[ -n $(find /var/lib/apt/lists -name '*_Packages*' -mtime -1 2>/dev/null) ]] ||
    apt-get update &>"$log" || fail "apt-get update failed" "$log"
  apt-get install -y --no-install-recommends -o DPkg::Lock::Timeout=300 "${PACKAGES[@]}" </dev/null &>>"$log" ||
    fail "apt-get could not install ${PACKAGES[*]}" "$log"
  exec 8>&-
}

# --- Daemons, in the foreground: what they print is their log

start_munged() {
  (umask 077 && head -c 128 /dev/urandom >"$DIR/munge.key")
  launch munged munged --foreground --force --key-file="$DIR/munge.key" --socket="$DIR/munge.sock" \
    --seed-file="$DIR/munge.seed" --pid-file="$DIR/run/munged.pid" --log-file="$DIR/log/munged.audit"
  await munged munge -S "$DIR/munge.sock" -n
}

start_mariadbd() {  # no passwords and no network: who may enter the directory may use the socket
  local server=(mariadbd --no-defaults --user=root --datadir="$DIR/db" --innodb-flush-log-at-trx-commit=0)
  if [[ ! -e $DIR/db/made ]]; then
    rm -rf "${DIR:?}"/db/*
    { printf 'create database mysql;\nuse mysql;\n' && cat /usr/share/mysql/mysql_system_tables.sql; } |
      "${server[@]}" --bootstrap &>"$DIR/log/mariadbd.log" || fail "MariaDB made no tables" "$DIR/log/mariadbd.log"
    : >"$DIR/db/made"
  fi
  launch mariadbd "${server[@]}" --skip-networking --skip-grant-tables --socket="$DIR/db/socket" \
    --pid-file="$DIR/run/mariadbd.pid"
  await mariadbd test -S "$DIR/db/socket"
}

start_slurmdbd() {
  need_port "$PORT"
  MYSQL_UNIX_PORT=$DIR/db/socket launch slurmdbd slurmdbd -D
  await slurmdbd sacctmgr -n show cluster
  sacctmgr -i >"$DIR/log/sacctmgr.log" 2>&1 <<SETUP || true
add cluster bench
add account test
add user root,${SUDO_USER:-root} account=test
modify user root set defaultaccount=test
SETUP
  [[ $(sacctmgr -n show user root) == *test* ]] || fail "sacctmgr made no account" "$DIR/log/sacctmgr.log"
}

start_slurmctld() {
  need_port $((PORT + 1))
  launch slurmctld slurmctld -D
  await slurmctld scontrol ping
}

# A node is a PID, host name and mount namespace. Where those are not allowed (a plain container), the nodes share the
# host name, and a process that adopts every orphan below it keeps the node together.
start_node() {  # NODE
  alive "$1" || boot_in_shell "$1"
  await "$1" node_ready "$1"
}

boot_in_shell() {  # NODE
  local shell=(unshare --uts --pid --mount --mount-proc --fork --kill-child)
  need_port $((PORT + 2 + ${1#dgx-}))
  if ! "${shell[@]}" true 2>/dev/null; then
    # shellcheck disable=SC2016  # perl's, not the shell's; 36 is PR_SET_CHILD_SUBREAPER
    shell=(perl -e 'syscall(`uname -m` =~ /x86_64/ ? 157 : 167, 36, 1, 0, 0, 0) == 0 or die "prctl: $!"; exec @ARGV')
    if ! grep -qsx ".*# $DIR" /etc/hosts; then
      say "no namespaces here (CAP_SYS_ADMIN is missing): both nodes keep this machine's host name"
      printf "127.0.0.1 %s # $DIR\n" "${NODES[@]}" >>/etc/hosts
    fi
  fi
  scontrol update nodename="$1" state=down reason=boots  # else jobs that ran there would wait for dead processes
  launch "$1" "${shell[@]}" bash "$SELF" boot-node "$1"
}

boot_node() {  # NODE: is the node's first process and buries what slurmd and the steps leave behind
  if [[ $$ == 1 ]]; then
    hostname "$1"
    mount --bind "$DIR/hosts" /etc/hosts
  fi
  slurmd -D -N "$1" &
  wait $!
}

node_ready() {  # NODE
  case $(sinfo -h -p batch -n "$1" -o %T 2>/dev/null) in
    idle | mixed | allocated | completing) return 0 ;;
    down* | drain* | inval*) scontrol update nodename="$1" state=resume || true ;;
  esac
  return 1
}

# --- Commands

enter() {  # VERB: lock the directory, so that one verb at a time works on it
  [[ $EUID == 0 ]] || fail "needs root, as slurmd starts jobs under their users' names: try sudo -E"
  [[ $DIR =~ ^(/[A-Za-z0-9._-]+)+$ && ${#DIR} -le 80 ]] || fail "RUNSTOP_SLURM_DIR must be absolute and plain: '$DIR'"
  [[ $PORT =~ ^[0-9]{4,5}$ ]] || fail "RUNSTOP_SLURM_PORTS must be a port: '$PORT'"
  if [[ $1 == up && -z $(ls -A "$DIR" 2>/dev/null) ]]; then
    mkdir -p "$DIR"/{log,run,dev,spool,state,db} "${NODES[@]/#/$DIR/spool/}"
    chmod 755 "$DIR" && chmod 700 "$DIR/db" && : >"$DIR/.runstop-slurm"
  fi
  [[ $1 != down || -e $DIR ]] || exit 0
  [[ -e $DIR/.runstop-slurm ]] || fail "$DIR contains no cluster: 'up' starts one in a new or empty directory"
  exec 9>>"$DIR/.runstop-slurm"
  flock 9
  [[ $DIR/.runstop-slurm -ef /dev/fd/9 ]] || { [[ $1 == down ]] && exit; fail "'down' has just removed $DIR: try again"; }
}

node_verb() {  # VERB FUNCTION NODE
  [[ " ${NODES[*]} " == *" $3 "* ]] || fail "unknown node '$3': use one of ${NODES[*]}"
  enter "$1"
  print_env >/dev/null
  "$2" "$3"
}

print_env() {
  alive slurmctld || fail "no cluster runs in $DIR: start one with 'up'"
  echo "export SLURM_CONF=$SLURM_CONF"
}

up() {
  local name
  install_packages
  alive slurmctld || write_config
  for name in "${DAEMONS[@]}"; do alive "$name" || "start_$name"; done
  for name in "${NODES[@]}"; do start_node "$name"; done
  print_env
}

down() {
  local jobs hosts name tries
  for ((tries = 0; tries < 100; tries++)); do
    alive slurmctld && jobs=$(squeue -h -o %A 2>/dev/null) && [[ -n $jobs ]] || break
    ((tries)) || xargs scancel <<<"$jobs" || true
    sleep 0.1
  done
  for name in "${DAEMONS[@]}" "${NODES[@]}"; do halt "$name"; done
  if grep -qsx ".*# $DIR" /etc/hosts; then
    hosts=$(grep -vx ".*# $DIR" /etc/hosts)
    echo "$hosts" >/etc/hosts  # in place: it may be a mount
  fi
  rm -rf -- "$DIR"
}

status() {
  local name rc=0
  for name in "${DAEMONS[@]}" "${NODES[@]}"; do
    printf '%-10s %s\n' "$name" "$(pid_of "$name" || echo down)"
    alive "$name" || rc=1
  done
  ! alive slurmctld || { sinfo -N -o '%10N %10P %12T %12G %E' && squeue; } || rc=1
  return $rc
}

case ${1:-help} in
  up | down) enter "$1"; "$1" ;;
  status) status ;;
  env) print_env ;;
  kill-node) node_verb "$1" halt "${2:-}" ;;
  start-node) node_verb "$1" start_node "${2:-}" ;;
  boot-node) boot_node "$2" ;;
  help | -h | --help) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$SELF" ;;
  *) fail "unknown command '$1': use up, down, status, env, kill-node NODE, start-node NODE" ;;
esac
