#!/bin/sh
# The steps of the Dockerfile, apart from it so that they are tested without Docker:
#   install.sh WHEEL
# in an environment that has MaxText, JAX and Transformer Engine. Uses no network and changes none of their versions. Any step that
# fails ends it, and the image is not built.
#
#   PYTHON    the interpreter (python3)
#   STACK     base (the default): the image's own software, from main branches of its day, judged by `doctor` and left alone.
#             pinned: the environment that pinned.sh made, with the source patches.
#   PATCHES   packages whose source patches are applied, or "none"; in place of what STACK says. A tree that the patches were not made
#             for ends the build.
#   NCCL_EP_JIT_CACHE_DIR, JAX_COMPILATION_CACHE_DIR   caches made for every user, if set
set -eu
umask 022

wheel=${1:?usage: install.sh WHEEL}
python=${PYTHON:-python3}
case ${STACK:=base} in
  base) patches=none ;;
  pinned) patches="maxtext transformer_engine" ;;
  *) echo "install.sh: STACK=$STACK; needed: base or pinned" >&2 && exit 2 ;;
esac
patches=${PATCHES:-$patches}
[ "$patches" != none ] || patches=
: "${SOURCE_DATE_EPOCH:=1767225600}" # 2026-01-01; given any, Python's bytecode names its source by hash and not by time
export SOURCE_DATE_EPOCH

# --no-deps: what the plugin needs is in the image, though not all of it is there in pip's eyes; --no-index: nothing else comes in.
"$python" -m pip install --no-index --no-deps --no-cache-dir --disable-pip-version-check --root-user-action ignore "$wheel"

export PYTHONDONTWRITEBYTECODE=1
plugin() { "$python" -m maxtext_moe_te "$@"; }
plugin --version

for package in $patches; do
  plugin patch check "$package"
  plugin patch apply "$package"
done

# NCCL EP compiles its kernels for the shapes of a run, so not here: at the first start, into a folder that every user may write.
for cache in "${NCCL_EP_JIT_CACHE_DIR:-}" "${JAX_COMPILATION_CACHE_DIR:-}"; do
  if [ -n "$cache" ]; then
    mkdir -p "$cache"
    chmod 1777 "$cache"
  fi
done

plugin doctor --image
