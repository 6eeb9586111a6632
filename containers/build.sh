#!/usr/bin/env bash
# Build an image from the committed files: containers/build.sh train|huggingface|nemo|rocm|serve SERVER [BUILD OPTIONS...]
# ENGINE=podman or "buildah --storage-driver vfs" replaces docker. Prints the image's name.
set -euo pipefail
cd "$(dirname "$0")/.."
[[ ${1-} =~ ^(train|huggingface|nemo|rocm)$ || (${1-} == serve && -f conf/server/${2-}.yaml) ]] || {
    echo "usage: containers/build.sh train|huggingface|nemo|rocm|serve SERVER [BUILD OPTIONS...]" >&2
    exit 2
}
kind=$1
shift

commit=$(git rev-parse HEAD)
[[ -z $(git status --porcelain) ]] || echo "warning: changes that are not committed are not in the image" >&2
context=$(mktemp -d)
trap 'rm -rf "$context"' EXIT
git archive HEAD | tar -x -C "$context"  # only the files of commit $commit: no keys, no runs, no caches

# shellcheck source=containers/pins.env
. "$context/containers/pins.env"
name=${kind^^}_NAME base=$BASE_IMAGE@$BASE_DIGEST tag=$BASE_TAG
if [[ $kind == rocm ]]; then  # on AMD's PyTorch
    base=$ROCM_IMAGE@$ROCM_DIGEST tag=$ROCM_TAG
elif [[ $kind == serve ]]; then  # on the official image of the server
    base=$(sed -n 's/^image: //p' "$context/conf/server/$1.yaml") tag=$1
    [[ $base ]] || { echo "conf/server/$1.yaml has no image" >&2; exit 2; }
    shift
fi
image=${!name}:$tag-${commit:0:12}
read -ra engine <<< "${ENGINE:-docker}"
"${engine[@]}" build --file "$context/containers/$kind.Dockerfile" --tag "$image" \
    --build-arg BASE="$base" --build-arg COMMIT="$commit" "$@" "$context" >&2
echo "$image"
