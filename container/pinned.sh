#!/bin/sh
# The pinned stack of STACK=pinned, apart from the Dockerfile so that it is tested without Docker:
#   pinned.sh FOLDER
# makes FOLDER, an environment of its own beside the image's software, none of which it changes or uses but Python, pip and g++:
# requirements.lock, pinned.txt, and the JAX extension of Transformer Engine, compiled against them (minutes). FOLDER/cuda gathers their
# libraries, to be put first in LD_LIBRARY_PATH. Needs the network.
#
#   PYTHON   the interpreter (python3), with pip
#   TE_JAX   what pip is asked for as the extension (transformer-engine-jax of pinned.txt's Transformer Engine); a wheel saves compiling
set -eu
umask 022

folder=${1:?usage: pinned.sh FOLDER}
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
: "${SOURCE_DATE_EPOCH:=1767225600}" # as in install.sh
export SOURCE_DATE_EPOCH NVTE_FRAMEWORK=jax NVTE_BUILD_USE_NVIDIA_WHEELS=1
unset PYTHONPATH

"$python" -m venv --without-pip "$folder"
add() {
  "$python" -m pip --python "$folder/bin/python" install --no-deps --no-cache-dir --disable-pip-version-check --root-user-action ignore "$@"
}
add --require-hashes -r "$here/../requirements.lock"
add -r "$here/pinned.txt"
add --no-build-isolation "${TE_JAX:-transformer-engine-jax==$(sed -n 's/^transformer-engine==//p' "$here/pinned.txt")}"

mkdir "$folder/cuda"
for library in "$folder"/lib/python3*/site-packages/nvidia/*/lib/*.so*; do
  ln -s "$library" "$folder/cuda/"
done
echo "pinned.sh: $folder takes $(du -sm "$folder" | cut -f1) MB"
