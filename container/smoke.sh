#!/bin/sh
# Tries an image, as a user without rights in it:
#   container/smoke.sh IMAGE              without a GPU: the plugin is there and a small model trains 3 steps on the CPU
#   container/smoke.sh IMAGE --gpus all   and on GPUs: the machine is checked, and a model of 2 layers trains 3 steps
set -eu
image=${1:?usage: smoke.sh IMAGE [--gpus all]}
shift

inside() { docker run --rm --user 1000:1000 --env HOME=/tmp --workdir /tmp "$@"; }

inside "$image" maxtext-moe-te --version
inside "$image" maxtext-moe-te patch check
inside "$image" maxtext-moe-te doctor --image
inside --env JAX_PLATFORMS=cpu "$image" maxtext-moe-te demo --steps 3 --output /tmp/demo
if [ $# -gt 0 ]; then
  # shellcheck disable=SC2016 # expanded in the container
  inside "$@" --shm-size 8g "$image" sh -c 'maxtext-moe-te launch --nproc "$(nvidia-smi -L | wc -l)" train \
    "$(python3 -c "import importlib.util as u; print(u.find_spec(\"maxtext\").submodule_search_locations[0])")/configs/base.yml" \
    model_name=qwen3-30b-a3b override_model_config=true base_num_decoder_layers=2 overlay=te-moe-bf16 attention=cudnn_flash_te \
    steps=3 run_name=smoke base_output_directory=/tmp/smoke dataset_type=synthetic enable_checkpointing=false hardware=gpu \
    ici_fsdp_parallelism=1 ici_expert_parallelism=-1 max_target_length=1024 per_device_batch_size=1 packing=false'
fi
echo "smoke.sh: $image is well"
