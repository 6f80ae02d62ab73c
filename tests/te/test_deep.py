"""A MaxText step with Transformer Engine, compiled for H200s that are not there: offloaded bytes exactly where they must be."""

import dataclasses
import importlib.util
import json
import pathlib

import pytest

from maxtext_moe_te.tools import deep
from tests import environments

pytestmark = [pytest.mark.te, pytest.mark.host]

LAYERS, BATCH, SEQUENCE, HEADS, KV_HEADS, HEAD_DIM, BFLOAT16 = 3, 2, 256, 8, 4, 64, 2
WORDS = dict(
  model_name="mixtral-8x7b", override_model_config="true", base_emb_dim=256, base_num_decoder_layers=LAYERS, base_moe_mlp_dim=512,
  base_mlp_dim=512, base_num_query_heads=HEADS, base_num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, num_experts=8, vocab_size=4096,
  max_target_length=SEQUENCE, per_device_batch_size=BATCH, dtype="bfloat16", weight_dtype="bfloat16", megablox="false",
  sparse_matmul="true", attention="cudnn_flash_jax", dcn_data_parallelism=2, ici_fsdp_parallelism=4, hardware="gpu",
)  # fmt: skip


def compiled(profiles=(), **changes):
  base = pathlib.Path(next(iter(importlib.util.find_spec("maxtext").submodule_search_locations))) / "configs" / "base.yml"
  words = (str(base), *(f"{key}={value}" for key, value in (WORDS | changes).items()))
  return deep.compile_step(deep.Request(words=words, gpu="H200", topology="2x4x1", profiles=profiles))


def test_tensors_that_the_run_offloads_by_itself():
  """The first product, both halves, carries several names and is moved once; what MaxText's own keys offload is what is looked at."""
  result = compiled(remat_policy="custom", mlpwi_0="offload", moe_mlpwi_0="offload", base_num_decoder_layers=2)
  first_product = 2 * BATCH * SEQUENCE * 2 * 2 * 512 * BFLOAT16  # layers x tokens x experts of each x both halves' width
  assert result["asked"] and set(result["names"]) == {"mlpwi_0", "moe_mlpwi_0"}
  assert result["expected_host_bytes"] == first_product
  assert result["variants"]["offload"]["host_bytes"] == pytest.approx(first_product, rel=0.01)


def test_host_bytes_and_streams():
  result = compiled(profiles=("multistream-domain",))
  queries_and_values = LAYERS * BATCH * SEQUENCE * (HEADS + KV_HEADS) * HEAD_DIM * BFLOAT16
  variants = result["variants"]
  assert result["expected_host_bytes"] == queries_and_values
  assert variants["offload"]["host_bytes"] == pytest.approx(queries_and_values, rel=0.01)
  assert variants["device"]["host_bytes"] == 0
  saved = variants["device"]["device_temporary_bytes"] - variants["offload"]["device_temporary_bytes"]
  assert saved > queries_and_values / 2
  assert variants["offload"]["transformer_engine_calls"]["te_grouped_gemm_v2_ffi"] == 7
  plain, domain = variants["offload"]["streams"], variants["multistream-domain"]["streams"]
  assert plain["in_domain"] == 0 and not plain["overlapped"]
  assert 0 < domain["in_domain"] < domain["collectives"], "those between the two domains are not in one"
  assert domain["eligible"] > 0


def test_without_transformer_engine_the_rest_is_compiled(tmp_path):
  """In an environment with the CUDA wheels of JAX alone: what stands in is said, and offloaded bytes are where they must be."""
  python = environments.make(tmp_path / "venv", without=("transformer_engine*",))
  words = WORDS | dict(attention="cudnn_flash_te", base_num_decoder_layers=2, ici_fsdp_parallelism=2, ici_expert_parallelism=2)
  config = {"num_experts": 8, "attention": "cudnn_flash_te", "axis_sizes": {"expert": 2}}
  request = deep.Request(words=("BASE", *(f"{key}={value}" for key, value in words.items())), topology="2x4x1", profiles=())
  code = (
    "import importlib.util, json, sys; from maxtext_moe_te.settings.config import MoeTeOptions; from maxtext_moe_te.tools import deep\n"
    "request, config = json.loads(sys.argv[1]); base = importlib.util.find_spec('maxtext').submodule_search_locations[0]\n"
    "request = deep.Request(**request | {'words': tuple(request['words']), 'profiles': ()})\n"
    "request = deep.without_engine(request, config, MoeTeOptions(experts='te').as_dict())\n"
    "request = deep.dataclasses.replace(request, words=(f'{base}/configs/base.yml', *request.words[1:]))\n"
    "print('RESULT', json.dumps(deep.compile_step(request)))"
  )
  asked = json.dumps([dataclasses.asdict(request), config])
  done = environments.run(python, python, "-c", code, asked, PYTHONPATH=str(environments.ROOT))
  assert done.returncode == 0, done.stderr[-3000:]
  result = json.loads(done.stdout.split("RESULT", 1)[1])
  stand_ins = "moe_te.experts=ragged_dot, moe_te.transport=xla, attention=cudnn_flash_jax"
  assert result["stand_ins"] == f"{stand_ins} [Transformer Engine is not installed]" and result["attention"] == "cudnn_flash_jax"
  assert 0 < result["expected_host_bytes"] == pytest.approx(result["variants"]["offload"]["host_bytes"], rel=0.01)
  assert not any(figures["transformer_engine_calls"] for figures in result["variants"].values())
