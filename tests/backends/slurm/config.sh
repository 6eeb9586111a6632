#!/usr/bin/env bash
# Writes the configuration of cluster.sh's Slurm. cluster.sh sources this file and sets DIR, PORT and NODES.

write_config() {
  local host gpu node
  host=$(uname -n | cut -d. -f1)
  # A GPU needs a device file, or Slurm counts none and sets no CUDA_VISIBLE_DEVICES; a link to /dev/null works.
  for gpu in {0..7}; do ln -sfn /dev/null "$DIR/dev/nvidia$gpu"; done
  echo "NodeName=dgx-[0-$((${#NODES[@]} - 1))] Name=gpu Type=h100 File=$DIR/dev/nvidia[0-7] Flags=nvidia_gpu_env" >"$DIR/gres.conf"
  echo "${RUNSTOP_SLURM_PLUGSTACK:-}" >"$DIR/plugstack.conf"
  printf '127.0.0.1 %s\n' localhost "$host" "${NODES[@]}" >"$DIR/hosts"
  cat >"$DIR/slurm.conf" <<CONF
ClusterName=bench
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$((PORT + 1))
SlurmUser=root
StateSaveLocation=$DIR/state
SlurmdSpoolDir=$DIR/spool/%n
SlurmctldPidFile=$DIR/run/slurmctld.pid
SlurmdPidFile=$DIR/run/%n.pid
PlugStackConfig=$DIR/plugstack.conf
# cred_expire is also how long a requeued job is held back.
AuthInfo=socket=$DIR/munge.sock,cred_expire=5
# No cgroups: they are rarely writable where tests run.
ProctrackType=proctrack/linuxproc
JobAcctGatherType=jobacct_gather/linux
# Failures are noticed soon (MessageTimeout: how often a dead node is called), and jobs that have ended stay visible.
MessageTimeout=6
SlurmdTimeout=10
KillWait=5
ReturnToService=2
# Ranks meet at a port that follows from the job id, and other clusters may run on this machine.
FirstJobId=$PORT
MinJobAge=3600
# The nodes claim more than this machine has.
SlurmdParameters=config_overrides
NodeName=DEFAULT CPUs=64 SocketsPerBoard=2 CoresPerSocket=32 RealMemory=1000000 Gres=gpu:h100:8
$(for node in "${NODES[@]}"; do echo "NodeName=$node NodeHostname=$node NodeAddr=127.0.0.1 Port=$((PORT + 2 + ${node#dgx-}))"; done)
PartitionName=DEFAULT Nodes=ALL DefaultTime=10 MaxTime=24:00:00
PartitionName=batch Default=YES PriorityTier=10
PartitionName=low PriorityTier=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=1000
GresTypes=gpu
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=2,bf_interval=2,default_queue_depth=1000
# As on a managed cluster: an unknown account, or more than the partition gives, is refused at once.
AccountingStorageEnforce=associations,qos
EnforcePartLimits=ALL
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort=$PORT
AccountingStoragePass=$DIR/munge.sock
AccountingStorageTRES=gres/gpu
AccountingStoreFlags=job_comment,job_script
${RUNSTOP_SLURM_EXTRA:-}
CONF
  install -m 600 /dev/stdin "$DIR/slurmdbd.conf" <<CONF
AuthInfo=socket=$DIR/munge.sock
DbdHost=$host
DbdAddr=127.0.0.1
DbdPort=$PORT
SlurmUser=root
PidFile=$DIR/run/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm
CONF
}
