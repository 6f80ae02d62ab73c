"""MaxText trains 20 steps on GPUs: with Transformer Engine's parts on one GPU and over two ranks of NCCL EP, against MaxText's own layer.

All runs start together, so that their start-up overlaps; with one GPU its two ranks share it.
"""

import concurrent.futures
import json
import sys

import pytest

from tests import tolerances
from tests.benchmarks import end_to_end

pytestmark = [pytest.mark.gpu, pytest.mark.te, pytest.mark.host]

STEPS = 20
MODELS = {
  "deepseek3": dict(
    model_name="deepseek3-tiny", first_num_dense_layers=1, q_lora_rank=64, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=32,
    v_head_dim=32, max_position_embeddings=256, original_max_position_embeddings=256, n_routing_groups=4, topk_routing_group=2,
    routed_bias_update_rate=0.001,
  ),
  "qwen3": dict(model_name="qwen3-30b-a3b"),
  "mixtral": dict(model_name="mixtral-8x7b"),
}  # fmt: skip
REDUCED = dict(
  attention="dot_product", base_emb_dim=256, base_mlp_dim=256, base_moe_mlp_dim=256, base_num_query_heads=8, base_num_kv_heads=8,
  head_dim=32, base_num_decoder_layers=3, num_experts=16, num_experts_per_tok=4, vocab_size=512, max_target_length=256,
  learning_rate=1e-3, warmup_steps_fraction=0.1, scan_layers="true",
)  # fmt: skip
BATCH = 8  # sequences, over all ranks
ONE = dict(skip_jax_distributed_system="true", ici_fsdp_parallelism=1, per_device_batch_size=BATCH)
TWO = dict(ici_expert_parallelism=2, ici_fsdp_parallelism=1, per_device_batch_size=BATCH // 2)
PLAIN, PLUGIN = "maxtext.trainers.pre_train.train", "maxtext_moe_te.train"
RUNS = {
  "plain": (PLAIN, 1, ONE),
  "plain-float32": (PLAIN, 1, ONE | dict(dtype="float32", matmul_precision="highest")),
  "te": (PLUGIN, 1, ONE | {"moe_te.experts": "te"}),
  "te-mesh": (PLUGIN, 2, TWO | {"moe_te.experts": "te", "moe_te.transport": "nccl_ep"}),
}


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
  """(model, run) -> 20 losses, or what was printed if there are fewer."""
  folder = tmp_path_factory.mktemp("runs")

  def train(model, run):
    module, ranks, more = RUNS[run]
    words = end_to_end.COMMON | MODELS[model] | REDUCED | more | dict(steps=STEPS)
    outputs, rows = end_to_end.run_ranks(module, words, ranks, folder / f"{model}-{run}", timeout=280, share_memory=True)
    return [row["learning/loss"] for row in rows] if len(rows) == STEPS and not outputs.hung else outputs.tail()

  keys = [(model, run) for model in MODELS for run in RUNS]
  with concurrent.futures.ThreadPoolExecutor(len(keys)) as pool:
    results = dict(zip(keys, pool.map(lambda key: train(*key), keys)))
  print("LOSSES", json.dumps({"/".join(key): value for key, value in results.items()}), file=sys.stderr)
  return results


@pytest.mark.parametrize("run", ["te", "te-mesh"])
@pytest.mark.parametrize("model", MODELS)
def test_losses_are_maxtexts(losses, model, run):
  ours, plain = losses[model, run], losses[model, "plain"]
  assert isinstance(ours, list), ours
  assert isinstance(plain, list), plain
  assert ours == pytest.approx(plain, rel=tolerances.BFLOAT16_TRAINING_LOSS)
  assert plain[-1] < plain[0] - 0.1, "the model did not move, so equal losses would show nothing"


@pytest.mark.parametrize("model", MODELS)
def test_the_tolerance_is_bfloat16s(losses, model):
  """MaxText's own bfloat16 differs from its float32 by a good part of the tolerance, so the tolerance is no wider than the noise."""
  differences = [abs(a - b) / b for a, b in zip(losses[model, "plain"], losses[model, "plain-float32"])]
  assert max(differences) > tolerances.BFLOAT16_TRAINING_LOSS / 10
