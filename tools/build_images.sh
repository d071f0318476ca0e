#!/usr/bin/env bash
# Images of all services, with docker, podman or buildah: what `make images` does.
#
#   REGISTRY=<account>.dkr... TAG=0.1.0 PUSH=1 tools/build_images.sh [service ...]
#
# Each base is pinned by its digest at the time of the build, which is printed and put on the image as a label. Variables:
#   REGISTRY   prefix of the names, with a slash at its end or not; default none
#   TAG        default: the version of the package
#   TARGET     stage of the trainer: cpu (default) or efa; CPU=1 builds the rollout worker for CPU, too
#   EXTRA      further arguments of the build, such as "--build-arg EFA_INSTALLER=..."
#   PUSH=1     push what was built
#   DRY_RUN=1  print the commands only
set -euo pipefail
cd "$(dirname "$0")/.."

builder=${BUILDER:-$(command -v docker || command -v podman || command -v buildah || true)}
if [[ -z $builder && -z ${DRY_RUN:-} ]]; then
    echo "images: none of docker, podman and buildah is here; install one, or set BUILDER" >&2
    exit 1
fi
builder=${builder:-docker}
tag=${TAG:-$(sed -n 's/^__version__ = "\(.*\)"/\1/p' slipstream/__init__.py)}
registry=${REGISTRY:+${REGISTRY%/}/}
read -ra extra <<<"${EXTRA:-}"

run() {
    if [[ -n ${DRY_RUN:-} ]]; then printf '%q ' "$@"; echo; else "$@"; fi
}

pinned() { # NAME:TAG -> NAME:TAG@sha256:..., as it is when nothing here can ask
    local digest=
    if [[ $1 == *@sha256:* || -n ${DRY_RUN:-} ]]; then echo "$1"; return; fi
    if command -v skopeo >/dev/null; then
        digest=$(skopeo inspect --format '{{.Digest}}' "docker://$1")
    elif [[ $builder == *docker ]]; then
        digest=$(docker buildx imagetools inspect --format '{{.Manifest.Digest}}' "$1")
    fi
    echo "$1${digest:+@$digest}"
}

build() { # service
    local service=$1 file=services/$1/Dockerfile name=${registry}slipstream-$1:$tag base arguments=()
    case $service in
        buffer | reward) file=services/Dockerfile arguments+=(--target "$service") ;;
        environment) file=services/Dockerfile arguments+=(--target environment --build-arg EXTRAS=data,tracing) ;;
        trainer) arguments+=(--target "${TARGET:-cpu}") ;;
        rollout) [[ -z ${CPU:-} ]] || arguments+=(--build-arg BASE=python:3.12-slim-bookworm --build-arg EXTRAS=torch,s3,data,tracing) ;;
    esac
    local argument default
    while IFS='=' read -r argument default; do
        [[ $service == rollout && -n ${CPU:-} ]] && default=python:3.12-slim-bookworm
        base=$(pinned "$default")
        arguments+=(--build-arg "$argument=$base" --label "org.opencontainers.image.base.name=$base")
    done < <(sed -n 's/^ARG \([A-Z_]*BASE\)=/\1=/p' "$file")
    run "$builder" build -f "$file" "${arguments[@]}" "${extra[@]}" -t "$name" .
    [[ -z ${PUSH:-} ]] || run "$builder" push "$name"
}

services=("$@")
[[ ${#services[@]} -gt 0 ]] || services=(buffer reward rollout trainer environment)
for service in "${services[@]}"; do build "$service"; done
