#!/bin/sh
# Builds the image from manifest.toml, from the repository's root or anywhere in it:
#   container/build.sh                          for this machine's platform, into the local Docker; then its size is checked
#   container/build.sh --push REGISTRY/NAME     for every platform of the manifest, pushed under the version's tag
# STACK=pinned container/build.sh … adds the set of packages that README's figures were measured with, and is several GB larger; STACK=base,
# the default, takes the image's own. PATCHES="maxtext" container/build.sh … patches that alone, PATCHES=none nothing: see install.sh.
set -eu
cd "$(dirname "$0")/.."

field() { python3 -c 'import sys, tomllib; value = tomllib.load(open("container/manifest.toml", "rb"))
for key in sys.argv[1].split("."): value = value[key]
print(",".join(value) if isinstance(value, list) else value)' "$1"; }

push=
case "${1:-}" in
  '') name=$(field image.name) ;;
  --push) push=yes name=${2:?usage: build.sh --push REGISTRY/NAME} ;;
  *) echo "build.sh: $1 is not known; needed: nothing, or --push REGISTRY/NAME" >&2 && exit 2 ;;
esac

case ${STACK:=base} in
  base) suffix='' most=$(field image.most_added_mb) ;;
  pinned) suffix=-pinned most=$(field pinned.most_added_mb)
    echo "build.sh: STACK=pinned adds about $(field pinned.added_mb) MB to the base" ;;
  *) echo "build.sh: STACK=$STACK is not known; needed: base or pinned" >&2 && exit 2 ;;
esac

base=$(field base.image):$(field base.tag)
digest=$(field base.digest)
if [ -z "$digest" ]; then
  digest=$(docker buildx imagetools inspect "$base" --format '{{.Manifest.Digest}}')
  case $digest in
    sha256:*) ;;
    *) echo "build.sh: the registry names '$digest' as the digest of $base; needed: sha256:…" >&2 && exit 1 ;;
  esac
  sed -i "s/^digest = \"\"/digest = \"$digest\"/" container/manifest.toml
  echo "build.sh: $base is $digest; written to container/manifest.toml, commit it"
fi

make --no-print-directory dist
wheel=$(basename "$(ls dist/*.whl)")
version=$(echo "$wheel" | cut -d- -f2)
: "${SOURCE_DATE_EPOCH:=$(git log -1 --format=%ct)}"

tag=$name:$version$suffix
set -- --file container/Dockerfile --tag "$tag" --build-arg STACK="$STACK" \
  --build-arg BASE="$base@$digest" --build-arg WHEEL="$wheel" --build-arg VERSION="$version" \
  --build-arg REVISION="$(git rev-parse HEAD)" --build-arg SOURCE_DATE_EPOCH="$SOURCE_DATE_EPOCH" \
  --build-arg PATCHES="${PATCHES:-}" --provenance=false
if [ -n "$push" ]; then
  docker buildx build "$@" --platform "$(field image.platforms)" --output type=image,push=true,rewrite-timestamp=true .
  exit
fi
docker buildx build "$@" --load .

bytes() { docker image inspect --format '{{.Size}}' "$1"; }
docker image inspect "$base@$digest" >/dev/null 2>&1 || docker pull --quiet "$base@$digest"
added=$((($(bytes "$tag") - $(bytes "$base@$digest")) / 1000000))
echo "build.sh: $tag adds $added MB to its base"
if [ "$added" -gt "$most" ]; then
  echo "build.sh: that is more than the $most MB of the manifest" >&2
  exit 1
fi
