"""The launcher on GPUs: two ranks share one, with experts split over them; one killed while the other waits for it in NCCL."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from maxtext_moe_te.tools import launch
from tests.unit.test_launch import alive, finish, ranks_of, wait_for

WORDS = """
model_name=qwen3-30b-a3b override_model_config=true base_num_decoder_layers=2 scan_layers=false base_emb_dim=512 base_moe_mlp_dim=256
base_num_query_heads=4 base_num_kv_heads=4 head_dim=128 num_experts=8 num_experts_per_tok=2 vocab_size=1024 max_target_length=128
per_device_batch_size=1 dtype=bfloat16 attention=dot_product dataset_type=synthetic hardware=gpu log_config=false
enable_tensorboard=false enable_checkpointing=false ici_fsdp_parallelism=1 ici_expert_parallelism=2 run_name=t
"""


@pytest.mark.gpu
@pytest.mark.host
def test_two_ranks_on_one_gpu_train_and_end_together(tmp_path):
  environment = {key: value for key, value in os.environ.items() if key not in ("XLA_FLAGS", "JAX_PLATFORMS")}
  environment["PYTHONPATH"] = os.pathsep.join([str(Path(launch.__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
  command = [
    sys.executable, "-m", "maxtext_moe_te", "launch", "--nproc", "2", "--ranks-per-gpu", "2", "--no-doctor", "--logs", str(tmp_path),
    "train", "overlay=te-moe-bf16", "moe_te.transport=nccl_ep", *WORDS.split(), f"base_output_directory={tmp_path}",
  ]  # fmt: skip

  def start(steps):
    return subprocess.Popen([*command, f"steps={steps}"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

  process = start(5)
  out, err = process.communicate(timeout=300)
  assert process.returncode == 0, err
  assert "completed step: 4," in out

  process = start(100000)
  wait_for(process, "completed step: 4,")
  ranks = ranks_of(process)
  began = time.monotonic()
  os.kill(ranks[1], signal.SIGKILL)
  status, _, err = finish(process)
  assert time.monotonic() - began < 30
  assert status == 128 + signal.SIGKILL and "the first to fail was rank 1, which was killed by SIGKILL" in err
  assert not any(map(alive, ranks.values()))
