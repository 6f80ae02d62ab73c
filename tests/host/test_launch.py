"""MaxText's own trainer in several processes under the launcher."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from maxtext_moe_te.tools import launch
from tests.unit.test_launch import alive, finish, ranks_of, wait_for

OVERLAY = """
model_name: mixtral-8x7b
base_emb_dim: 64
base_mlp_dim: 48
base_moe_mlp_dim: 48
base_num_query_heads: 4
base_num_kv_heads: 4
head_dim: 16
base_num_decoder_layers: 1
num_experts: 8
vocab_size: 256
max_target_length: 32
per_device_batch_size: 1
ici_fsdp_parallelism: 1
ici_expert_parallelism: -1
dataset_type: synthetic
hardware: cpu
dtype: float32
attention: dot_product
checkpoint_period: 2
async_checkpointing: false
enable_autocheckpoint: true
log_config: false
learning_rate: 0.01
learning_rate_schedule_steps: 1000
warmup_steps_fraction: 0.0
enable_tensorboard: false
env:
  JAX_PLATFORMS: cpu
  DECOUPLE_GCLOUD: "TRUE"
  JAX_DISABLE_MOST_OPTIMIZATIONS: "true"
"""


@pytest.mark.host
@pytest.mark.slow
def test_trains_and_stops_at_a_step_that_is_saved(tmp_path, pytestconfig):
  """Two processes; with `--launch-ranks N`, N of them; one, all and the launcher are killed in turn, and the next start goes on."""
  kill_first = pytestconfig.getoption("launch_ranks")
  count, saved = kill_first or 2, -1
  (tmp_path / "tiny.yml").write_text(OVERLAY)
  environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}  # the tests' own: eight devices
  environment["PYTHONPATH"] = str(Path(launch.__file__).parents[2])
  command = [
    sys.executable, "-m", "maxtext_moe_te", "launch", "--nproc", str(count), "--no-doctor", "--logs", str(tmp_path / "logs"), "train",
    f"overlay={tmp_path}/tiny.yml", "run_name=t", f"base_output_directory={tmp_path}", f"jax_cache_dir={tmp_path}/jax_cache",
    "steps=100000",
  ]  # fmt: skip

  def start(until):
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(process, until)
    ranks = ranks_of(process)
    assert sorted(ranks) == list(range(count))
    return process, ranks

  for victim in ("a rank", "all ranks", "the launcher") if kill_first else ():
    process, ranks = start(f"completed step: {max(saved, 0) + 3},")
    began = time.monotonic()
    for pid in {"a rank": [ranks[count - 1]], "all ranks": ranks.values(), "the launcher": [process.pid]}[victim]:
      os.kill(pid, signal.SIGKILL)
    status, _, err = finish(process)
    assert time.monotonic() - began < 30
    if victim != "the launcher":
      assert status == 128 + signal.SIGKILL
      named = count - 1 if victim == "a rank" else r"\d+"
      assert re.search(rf"the first to fail was rank {named}, which was killed by SIGKILL", err), err
    wait_until(lambda ranks=ranks: not any(map(alive, ranks.values())))
    assert newest(tmp_path) > saved
    saved = newest(tmp_path)

  process, ranks = start(f"completed step: {saved + 2},")
  process.send_signal(signal.SIGTERM)
  status, _, err = finish(process)
  assert status == 128 + signal.SIGTERM, err
  assert not any(map(alive, ranks.values()))
  log = (tmp_path / "logs" / "rank-0000.log").read_text().rpartition("launch: ")[2]
  steps = list(map(int, re.findall(r"completed step: (\d+),", log)))
  assert steps[0] == saved + 1, "it did not resume after the checkpoint"
  assert newest(tmp_path) == steps[-1] + 1, "the step of the stop, after which MaxText reports no metrics, was not saved"
  if kill_first:
    killed = losses(tmp_path / "logs" / "rank-0000.log")
    command[command.index("run_name=t")], command[-1] = "run_name=whole", f"steps={steps[-1] + 1}"
    command[command.index("--logs") + 1] = str(tmp_path / "whole")
    status, _, err = finish(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    whole = losses(tmp_path / "whole" / "rank-0000.log")
    assert status == 0 and killed.keys() == whole.keys(), err
    assert killed == whole and len(set(whole.values())) > 5


def losses(log):
  """What was printed of each step, last."""
  return dict(re.findall(r"completed step: (\d+),.* loss: ([0-9.]+)", log.read_text()))


def wait_until(condition, timeout_s=20):
  end = time.monotonic() + timeout_s
  while not condition():
    assert time.monotonic() < end
    time.sleep(0.1)


def newest(folder):
  """The step of the newest checkpoint."""
  return max(int(path.name) for path in (folder / "t" / "checkpoints").iterdir() if path.name.isdigit())
