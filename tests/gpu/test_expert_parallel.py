"""NCCL EP between processes: as many ranks as there are GPUs, or two ranks on one."""

import json
import os
import socket
import subprocess
import sys

import pytest

from tests import helpers, tolerances

pytestmark = [pytest.mark.gpu, pytest.mark.te]


def run_ranks(ranks, *options, one_gpu, timeout=240):
  """Starts the ranks together; returns rank 0's result."""
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
  environment = {**os.environ, "JAX_PLATFORMS": "cuda,cpu", "XLA_FLAGS": ""}
  if one_gpu:
    environment["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    options = (*options, "--one-gpu")
  command = [sys.executable, "-m", "tests.gpu.ep_worker"]
  processes = [
    subprocess.Popen(
      [*command, str(rank), str(ranks), str(port), *options],
      env=environment,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )
    for rank in range(ranks)
  ]
  outputs = []
  try:
    outputs = [process.communicate(timeout=timeout)[0] for process in processes]
  finally:
    for process in processes:
      process.kill()
  assert all(process.returncode == 0 for process in processes), "\n".join(o[-3000:] for o in outputs)
  return json.loads(outputs[0].split("RESULT", 1)[1].splitlines()[0])


@pytest.mark.parametrize("shape", ["check", "uneven"])
def test_two_ranks_on_one_gpu(shape):
  result = run_ranks(2, "--shape", shape, one_gpu=True)
  assert helpers.within("errors", max(result["errors"].values()), tolerances.EXPERT_PARALLEL_BFLOAT16), result
  assert result["rows_equal"]
  assert result["overflow"] == 0
  assert 0 < result["receive_rows_max"] <= result["receive_capacity"]


@pytest.mark.parametrize(("shape", "chunks", "factor"), [("check", 8, "0"), ("check", 4, "1.0"), ("uneven", 3, "1.25")])
def test_parts_in_a_group_made_for_all_tokens(shape, chunks, factor):
  """Each call has a part of the tokens that the group was made for, and a capacity that need not hold them all at once."""
  result = run_ranks(2, "--shape", shape, "--chunks", str(chunks), "--capacity-factor", factor, one_gpu=True)
  assert helpers.within("errors", max(result["errors"].values()), tolerances.EXPERT_PARALLEL_BFLOAT16), result
  assert result["rows_equal"]
  assert result["overflow"] == 0
  assert 0 < result["receive_rows_max"] <= result["receive_capacity"]


@pytest.mark.gpus
def test_one_rank_per_gpu():
  result = run_ranks(2, "--shape", "check", one_gpu=False)
  assert helpers.within("errors", max(result["errors"].values()), tolerances.EXPERT_PARALLEL_BFLOAT16), result
