#!/usr/bin/env bash
# Builds the Kubernetes 1.20.2 that the tests boot, from Debian's own source package, and installs its dependencies.
#
#   sudo -E tests/backends/kubernetes/build.sh      Debian 12, root; 6 minutes or more on two cores, once; 340 MB stay
#
# Environment: RUNSTOP_KUBERNETES  where the programs go (~/.cache/runstop/kubernetes-1.20.2)
set -euo pipefail

VERSION=1.20.2
TARGET=${RUNSTOP_KUBERNETES:-$HOME/.cache/runstop/kubernetes-$VERSION}
PROGRAMS=(kube-apiserver kube-controller-manager kube-scheduler kubelet)
# The parts of a cluster other than Kubernetes itself.
CLUSTER_PACKAGES=(etcd-server containerd runc containernetworking-plugins iptables conntrack openssl)
BUILD_PACKAGES=(dpkg-dev golang-1.19-go rsync)

say() { printf 'build.sh: %s\n' "$*" >&2; }

install_packages() {
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends -o Dpkg::Use-Pty=0 \
    -o DPkg::Options::=--force-confold "${CLUSTER_PACKAGES[@]}" "${BUILD_PACKAGES[@]}" >/dev/null
}

fetch_source() { # into the current folder; apt reads the mirror that this machine uses, but its sources, not packages
  local mirror
  # shellcheck disable=SC2016  # these are apt's variables
  mirror=$(apt-get indextargets --format '$(REPO_URI) $(RELEASE)' 'Created-By: Packages' |
    awk '$2 == "bookworm" && $1 ~ /debian\/?$/ { print $1; exit }')
  mkdir -p lists/partial
  echo "deb-src [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror bookworm main" >sources.list
  local apt=(apt-get -q -o "Dir::Etc::sourcelist=$PWD/sources.list" -o Dir::Etc::sourceparts=-
    -o "Dir::State::lists=$PWD/lists" -o APT::Sandbox::User=root)
  "${apt[@]}" update
  "${apt[@]}" source --download-only "kubernetes=$VERSION*" || "${apt[@]}" source --download-only kubernetes
  apt-get download -q golang-github-modern-go-reflect2-dev
}

unpack() {
  mkdir -p gopath/src/k8s.io reflect2
  dpkg-source --no-check -x kubernetes_*.dsc gopath/src/k8s.io/kubernetes >/dev/null
  dpkg -x golang-github-modern-go-reflect2-dev_*.deb reflect2
  # The vendored reflect2 1.0.1 does not know the maps of Go 1.18 and later: an API server with it crashes after minutes.
  local vendored=gopath/src/k8s.io/kubernetes/vendor/github.com/modern-go/reflect2
  rm -rf "$vendored"
  cp -r reflect2/usr/share/gocode/src/github.com/modern-go/reflect2 "$vendored"
  grep -q mapiterinit "$vendored/go_above_118.go"
}

generate_openapi() { # the one generated file that the source package lacks
  go build -o "$WORK/openapi-gen" k8s.io/kubernetes/vendor/k8s.io/kube-openapi/cmd/openapi-gen
  local packages
  packages=$(grep -rl --include='*.go' '+k8s:openapi-gen=' pkg staging/src/k8s.io |
    grep -vE 'zz_generated|/generators/|/testdata/|openapi-gen/|_test.go|sample-|/kube-openapi/|code-generator' |
    xargs -n1 dirname | sort -u |
    sed 's#^staging/src/#k8s.io/kubernetes/vendor/#; s#^pkg/#k8s.io/kubernetes/pkg/#' | paste -sd,)
  "$WORK/openapi-gen" -i "$packages" -p k8s.io/kubernetes/pkg/generated/openapi -O zz_generated.openapi \
    -h hack/boilerplate/boilerplate.generatego.txt -r "$WORK/violations" --output-base "$WORK/gopath/src"
}

compile() {
  local flags="-s -w" package program
  for package in vendor/k8s.io/component-base/version vendor/k8s.io/client-go/pkg/version; do
    for value in gitVersion=v$VERSION gitMajor=1 gitMinor=20 gitTreeState=clean; do
      flags+=" -X k8s.io/kubernetes/$package.$value"
    done
  done
  for program in "${PROGRAMS[@]}"; do
    say "compiling $program"
    go build -p "$(nproc)" -trimpath -ldflags "$flags" -o "$WORK/bin/$program" "k8s.io/kubernetes/cmd/$program"
  done
}

compile_pause() { # what holds the namespaces of a pod: it waits, and reaps nothing
  mkdir -p "$WORK/pause"
  cat >"$WORK/pause/main.go" <<'GO'
package main

import (
	"os"
	"os/signal"
	"syscall"
)

func main() {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM)
	<-signals
}
GO
  go build -trimpath -ldflags "-s -w" -o "$WORK/bin/pause" "$WORK/pause/main.go"
}

[[ $(id -u) == 0 ]] || { say "needs root, to install Debian packages"; exit 1; }
say "installing ${CLUSTER_PACKAGES[*]} ${BUILD_PACKAGES[*]}"
install_packages
if [[ -x $TARGET/kubelet && -x $TARGET/pause ]]; then say "$TARGET has been built already"; exit 0; fi
WORK=$(mktemp -d "${TMPDIR:-/tmp}/kubernetes-build.XXXXXX")
trap 'rm -rf "$WORK"' EXIT
cd "$WORK"
fetch_source >fetched.log 2>&1 || { cat fetched.log >&2; exit 1; }
unpack
export PATH=/usr/lib/go-1.19/bin:$PATH GOPATH=$WORK/gopath GOCACHE=$WORK/gocache
export GO111MODULE=off GOPROXY=off CGO_ENABLED=0
compile_pause
cd gopath/src/k8s.io/kubernetes
generate_openapi >"$WORK/openapi.log" 2>&1 || { cat "$WORK/openapi.log" >&2; exit 1; }
compile
mkdir -p "$(dirname "$TARGET")"
rm -rf "$TARGET.new"
cp -r "$WORK/bin" "$TARGET.new"
mv "$TARGET.new" "$TARGET"   # whole, or not at all
say "done: $TARGET"
