#!/usr/bin/env bash
# Build an image from what is committed: containers/build.sh train|nemo [MORE FOR THE BUILD...]
# ENGINE=podman or "buildah --storage-driver vfs" takes the place of docker. Prints the image's name.
set -euo pipefail
cd "$(dirname "$0")/.."
[[ ${1-} == train || ${1-} == nemo ]] || { echo "usage: containers/build.sh train|nemo [MORE FOR THE BUILD...]" >&2; exit 2; }
kind=$1
shift

commit=$(git rev-parse HEAD)
[[ -z $(git status --porcelain) ]] || echo "what is not committed stays out of the image" >&2
context=$(mktemp -d)
trap 'rm -rf "$context"' EXIT
git archive HEAD | tar -x -C "$context"  # nothing but commit $commit: no keys, no runs, no caches

# shellcheck source=containers/pins.env
. "$context/containers/pins.env"
name=${kind^^}_NAME
image=${!name}:$BASE_TAG-${commit:0:12}
read -ra engine <<< "${ENGINE:-docker}"
"${engine[@]}" build --file "$context/containers/$kind.Dockerfile" --tag "$image" \
    --build-arg BASE="$BASE_IMAGE@$BASE_DIGEST" --build-arg COMMIT="$commit" "$@" "$context" >&2
echo "$image"
