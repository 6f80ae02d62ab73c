"""The Transformer Engine parts, compiled to real GPU code for GPUs that are not there: which kernels appear, and how much memory."""

import json
import subprocess
import sys

import pytest

from maxtext_moe_te.tools import described

pytestmark = [pytest.mark.te]

# Scanned layers under full rematerialization: forward, forward again, and per product two gradients.
GROUPED = {"te_grouped_gemm_v2_ffi": 7}
EXPERT_PARALLEL = {
  "te_ep_prepare_ffi": 2,
  "te_ep_dispatch_ffi": 2,
  "te_ep_combine_ffi": 1,
  "te_ep_dispatch_bwd_ffi": 1,
  "te_ep_combine_bwd_ffi": 1,
}
CASES = {
  ("H100", "local"): GROUPED,
  ("H100", "expert4"): GROUPED | EXPERT_PARALLEL,
  ("H100", "unscanned"): {"te_grouped_gemm_v2_ffi": 18},
  ("H100", "router"): GROUPED | {"te_fused_topk_with_score_function_forward_ffi": 2, "te_fused_topk_with_score_function_backward_ffi": 1},
  ("GB200", "local"): GROUPED,
  ("GB200", "expert4"): GROUPED | EXPERT_PARALLEL,
  ("GB200", "local-mxfp8"): GROUPED,
  ("GB200", "expert4-mxfp8"): GROUPED | EXPERT_PARALLEL,
}


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
  return described.environment(tmp_path_factory.mktemp("stub"))


def compiled(environment, *words, module="tests.te.compile_layer"):
  command = [sys.executable, "-m", module, *words]
  done = subprocess.run(command, env=environment, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr[-3000:]
  return json.loads(done.stdout.split("RESULT", 1)[1])


@pytest.mark.parametrize("gpu,case", CASES)
def test_kernels(environment, gpu, case):
  result = compiled(environment, gpu, case)
  calls = {name: count for name, count in result["calls"].items() if name.startswith("te_") and "quantize" not in name}
  assert calls == CASES[gpu, case]
  assert any("quantize" in name for name in result["calls"]) == case.endswith("mxfp8")
  assert "te_grouped_gemm_ffi" not in result["calls"], "the kernel that waits for the host"
  # Rows and hidden rows of one layer and their gradients, four times over.
  assert result["temporary_bytes"] < 4 * 2 * (8 * 256 * 4 + 16 * 128) * (2 * 256 + 6 * 512) + 2**28


@pytest.mark.host
@pytest.mark.parametrize("choice,dtype", [("step", "bf16"), ("layer", "f32")])
def test_stacks_of_expert_weights_and_gradients(environment, choice, dtype):
  """With one cast per step, XLA leaves no float32 stack of expert weights or of their gradients in the loops over layers."""
  assert compiled(environment, choice, module="tests.te.compile_cast")["carried"] == [dtype]


@pytest.mark.host
def test_what_is_selected_is_not_written_first(environment):
  """A step that keeps its state where it overflows writes and holds what the step alone does."""
  result = compiled(environment, module="tests.te.compile_exact")
  for quantity in ("written", "peak"):
    assert result["exact"][quantity] < 1.001 * result["alone"][quantity], result


def test_mxfp8_refuses_odd_widths():
  import jax
  import jax.numpy as jnp

  from maxtext_moe_te.errors import RefusedError
  from maxtext_moe_te.moe.experts import te

  shapes = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((256, 100), (4, 100, 128))]
  with pytest.raises(RefusedError, match="input width 100 on one rank, in MXFP8; needed: a multiple of 128"):
    te.grouped_matmul_mxfp8(*shapes, jax.ShapeDtypeStruct((4,), jnp.int32))
