#!/usr/bin/env bash
# Boots a real Kubernetes 1.20 on this machine, to try runstop without a cluster: etcd, API server, controllers and
# scheduler, and two nodes, node-1 and node-2, each with a containerd and a kubelet. Debian 12, root; no GPU, no DNS.
#
#   sudo -E tests/backends/kubernetes/build.sh          once: builds what it needs
#   sudo -E tests/backends/kubernetes/cluster.sh up     start it, and print what env prints
#   eval "$(tests/backends/kubernetes/cluster.sh env)"  this shell's kubectl and runstop now use it
#   tests/backends/kubernetes/cluster.sh stop NAME      end one program: apiserver, kubelet-2, … (start NAME brings it back)
#   tests/backends/kubernetes/cluster.sh down           end everything; the nodes' image stores stay in the cache
#
# Environment: RUNSTOP_KUBERNETES       the programs (~/.cache/runstop/kubernetes-1.20.2)
#              RUNSTOP_KUBERNETES_DIR   its state and logs (/tmp/runstop-kubernetes)
#              RUNSTOP_KUBERNETES_PORT  first of three ports on 127.0.0.1 (16440)
set -euo pipefail

PROGRAMS=${RUNSTOP_KUBERNETES:-$HOME/.cache/runstop/kubernetes-1.20.2}
DIR=${RUNSTOP_KUBERNETES_DIR:-/tmp/runstop-kubernetes}
PORT=${RUNSTOP_KUBERNETES_PORT:-16440}
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
NODES=(1 2)
PROGRAMS_IN_ORDER=(etcd apiserver controllers scheduler containerd-1 containerd-2 kubelet-1 kubelet-2)
PATH=$PATH:/usr/sbin:/sbin
export KUBECONFIG=$DIR/kubeconfig
export AWS_EC2_METADATA_DISABLED=true # or the kubelet looks for a cloud

say() { printf 'cluster.sh: %s\n' "$*" >&2; }
fail() { # MESSAGE [LOG]
  say "$1"
  [[ ! -s ${2:-} ]] || { printf '  %s ends with:\n' "$2"; tail -n 15 "$2" | sed 's/^/    /'; } >&2
  exit 1
}

address() { echo "10.245.77.$1"; } # of a node; on the loopback device, so that no other machine can reach it
store() { echo "$PROGRAMS/containerd-$1"; } # the images of a node, which outlive the cluster

# --- Processes. run/NAME holds a pid and when the kernel started it: a pid alone may be somebody else's by now.

started_at() { # PID
  local stat
  { read -r stat <"/proc/$1/stat"; } 2>/dev/null || return 1
  read -ra stat <<<"${stat##*) }"
  [[ ${stat[0]} != [ZX] ]] && echo "${stat[19]}"
}
pid_of() { # NAME
  local pid when
  read -r pid when 2>/dev/null <"$DIR/run/$1" && [[ -n $when && $(started_at "$pid") == "$when" ]] && echo "$pid"
}
launch() { # NAME COMMAND...
  local name=$1
  shift
  setsid "$@" </dev/null &>>"$DIR/log/$name.log" &
  echo "$! $(started_at $!)" >"$DIR/run/$name"
}
halt() { # NAME [SIGNAL]
  local pid tries
  pid=$(pid_of "$1") || return 0
  kill "-${2:-TERM}" "$pid" 2>/dev/null || true
  for ((tries = 0; tries < 100; tries++)); do
    pid_of "$1" >/dev/null || return 0
    sleep 0.1
  done
  kill -KILL "$pid" 2>/dev/null || true
}
await() { # NAME COMMAND...: until COMMAND succeeds, as long as NAME lives
  local name=$1 tries
  shift
  for ((tries = 0; tries < 600; tries++)); do
    ! "$@" &>"$DIR/log/awaited" || return 0
    pid_of "$name" >/dev/null || break
    sleep 0.1
  done
  fail "$name does not come up: $(<"$DIR/log/awaited")" "$DIR/log/$name.log"
}

# --- Files.

write_secrets() {
  (umask 077 && openssl genrsa -out "$DIR/sa.key" 2048 2>/dev/null)
  openssl rsa -in "$DIR/sa.key" -pubout -out "$DIR/sa.pub" 2>/dev/null
  local admin user
  admin=$(openssl rand -hex 16) user=$(openssl rand -hex 16)
  (umask 077 && printf '%s,admin,admin,system:masters\n%s,somebody,somebody,\n' "$admin" "$user" >"$DIR/tokens.csv")
  write_kubeconfig "$KUBECONFIG" "$admin"
  write_kubeconfig "$DIR/kubeconfig-somebody" "$user" # a user without any right
}

write_kubeconfig() { # FILE TOKEN
  (umask 077 && cat >"$1") <<YAML
apiVersion: v1
kind: Config
clusters: [{name: test, cluster: {server: "https://127.0.0.1:$((PORT + 2))", certificate-authority: $DIR/certs/apiserver.crt}}]
users: [{name: user, user: {token: $2}}]
contexts: [{name: test, context: {cluster: test, user: user}}]
current-context: test
YAML
}

write_node() { # K
  mkdir -p "$DIR/node-$1/cni" "$(store "$1")"
  cat >"$DIR/node-$1/cni/10-pods.conflist" <<JSON
{"cniVersion": "0.4.0", "name": "pods", "plugins": [{"type": "ptp", "ipMasq": false, "ipam": {
 "type": "host-local", "subnet": "10.244.$1.0/24", "dataDir": "$DIR/node-$1/addresses", "routes": [{"dst": "10.244.0.0/16"}]}}]}
JSON
  cat >"$DIR/node-$1/containerd.toml" <<TOML
version = 2
root = "$(store "$1")"
state = "$DIR/node-$1/containerd"
[grpc]
  address = "$DIR/node-$1/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "localhost/pause:test"
  restrict_oom_score_adj = true
  disable_apparmor = true
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        BinaryName = "$HERE/runc_within_limits.py"
        SystemdCgroup = false
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "$DIR/node-$1/cni"
TOML
  cat >"$DIR/node-$1/kubelet.yaml" <<YAML
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
cgroupDriver: cgroupfs
cgroupRoot: /
cgroupsPerQOS: false
enforceNodeAllocatable: []
failSwapOn: false
oomScoreAdj: 0
address: $(address "$1")
readOnlyPort: 0
healthzPort: 0
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
imageGCHighThresholdPercent: 100
evictionHard: {}
makeIPTablesUtilChains: false
resolvConf: ""
nodeStatusUpdateFrequency: 2s
YAML
}

isolate_logs() { # K: the programs of a node see only its own pods in /var/log/pods: a kubelet deletes logs of unknown pods
  local mounts=$DIR/namespaces/$1
  [[ ! -e $mounts ]] || return 0
  mkdir -p "$DIR/namespaces" "$DIR/node-$1/pods" /var/log/pods
  mountpoint -q "$DIR/namespaces" || { mount --bind "$DIR/namespaces" "$DIR/namespaces" && mount --make-private "$DIR/namespaces"; }
  touch "$mounts"
  unshare --mount="$mounts" --propagation slave mount --bind "$DIR/node-$1/pods" /var/log/pods
}

# --- Programs.

start() { # NAME
  local k=${1##*-} server=https://127.0.0.1:$((PORT + 2))
  local on_node=(nsenter --mount="$DIR/namespaces/$k")
  case $1 in
    etcd)
      launch etcd etcd --data-dir "$DIR/etcd" --unsafe-no-fsync --log-level error \
        --listen-client-urls "http://127.0.0.1:$PORT" --advertise-client-urls "http://127.0.0.1:$PORT" \
        --listen-peer-urls "http://127.0.0.1:$((PORT + 1))"
      ;;
    apiserver)
      launch apiserver "$PROGRAMS/kube-apiserver" --etcd-servers="http://127.0.0.1:$PORT" --cert-dir="$DIR/certs" \
        --bind-address=127.0.0.1 --advertise-address=127.0.0.1 --secure-port=$((PORT + 2)) --insecure-port=0 \
        --service-account-key-file="$DIR/sa.pub" --service-account-signing-key-file="$DIR/sa.key" \
        --service-account-issuer=https://kubernetes.default.svc --service-cluster-ip-range=10.96.77.0/24 \
        --token-auth-file="$DIR/tokens.csv" --authorization-mode=RBAC --disable-admission-plugins=ServiceAccount \
        --endpoint-reconciler-type=none --kubelet-preferred-address-types=InternalIP \
        --default-not-ready-toleration-seconds=5 --default-unreachable-toleration-seconds=5
      await apiserver curl -fsSk -H "Authorization: Bearer $(cut -d, -f1 "$DIR/tokens.csv" | head -n 1)" "$server/readyz"
      ;;
    controllers)
      launch controllers "$PROGRAMS/kube-controller-manager" --kubeconfig="$KUBECONFIG" --leader-elect=false \
        --service-account-private-key-file="$DIR/sa.key" --bind-address=127.0.0.1 --port=0 --secure-port=0 \
        --controllers='*,-nodeipam,-cloud-node-lifecycle' --node-monitor-grace-period=8s --node-monitor-period=2s
      ;;
    scheduler)
      launch scheduler "$PROGRAMS/kube-scheduler" --kubeconfig="$KUBECONFIG" --leader-elect=false --port=0 \
        --secure-port=0 --bind-address=127.0.0.1
      ;;
    containerd-*)
      launch "$1" "${on_node[@]}" containerd --config "$DIR/node-$k/containerd.toml"
      await "$1" ctr --address "$DIR/node-$k/containerd.sock" version
      ;;
    kubelet-*)
      launch "$1" "${on_node[@]}" "$PROGRAMS/kubelet" --config="$DIR/node-$k/kubelet.yaml" --kubeconfig="$KUBECONFIG" \
        --container-runtime=remote --container-runtime-endpoint="unix://$DIR/node-$k/containerd.sock" \
        --hostname-override="node-$k" --node-ip="$(address "$k")" --root-dir="$DIR/node-$k/kubelet" \
        --cert-dir="$DIR/node-$k/pki"
      ;;
    *) fail "no program $1: ${PROGRAMS_IN_ORDER[*]}" ;;
  esac
}

are_ready() { [[ $(kubectl get nodes --no-headers 2>/dev/null | grep -c ' Ready') == "${#NODES[@]}" ]]; }

up() {
  local program k
  [[ -x $PROGRAMS/kubelet && -x $PROGRAMS/pause ]] || fail "no Kubernetes in $PROGRAMS: sudo -E $HERE/build.sh builds it"
  [[ $(id -u) == 0 ]] || fail "needs root: nodes make containers"
  mkdir -p "$DIR/run" "$DIR/log"
  [[ -e $KUBECONFIG ]] || write_secrets
  for k in "${NODES[@]}"; do
    ip address replace "$(address "$k")/32" dev lo
    write_node "$k"
    isolate_logs "$k"
  done
  for program in "${PROGRAMS_IN_ORDER[@]}"; do pid_of "$program" >/dev/null || start "$program"; done
  await kubelet-2 are_ready
}

down() {
  local k program
  if pid_of apiserver >/dev/null; then
    kubectl delete jobs,pods --all --all-namespaces --grace-period=0 --force &>/dev/null || true
    for k in "${NODES[@]}"; do remove_containers "$k"; done
  fi
  for program in kubelet-2 kubelet-1 scheduler controllers apiserver etcd containerd-2 containerd-1; do halt "$program"; done
  umount --recursive --lazy "$DIR/namespaces" 2>/dev/null || true # the nodes' own mounts end with their programs
  for k in "${NODES[@]}"; do
    ip address del "$(address "$k")/32" dev lo 2>/dev/null || true
  done
  rm -rf "$DIR"
}

remove_containers() { # K: those that are left once their pods are gone
  local tries ctr=(ctr --address "$DIR/node-$1/containerd.sock" --namespace k8s.io)
  for ((tries = 0; tries < 100; tries++)); do
    [[ -n $("${ctr[@]}" tasks list --quiet) ]] || return 0
    sleep 0.1
  done
  "${ctr[@]}" tasks list --quiet | xargs -r -n1 "${ctr[@]}" tasks kill --signal SIGKILL || true
}

case ${1:-} in
  up) up && "$0" env ;;
  env) printf 'export KUBECONFIG=%q\n' "$KUBECONFIG" ;;
  down) down ;;
  start) start "$2" ;;
  stop) halt "$2" "${3:-TERM}" ;;
  *) sed -n '2,/^set/p' "$0" | sed '$d; s/^# \{0,1\}//' && exit 2 ;;
esac
