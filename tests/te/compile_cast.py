"""Compiles a train step of MaxText for one described H200 and prints what its loops over layers carry: compile_cast step|layer.

The word says where expert weights are cast.
"""

import json
import os
import re
import sys
import tempfile

from maxtext_moe_te.tools import described

LAYERS, EXPERTS, WIDTH, EXPERT_WIDTH = 3, 8, 256, 384
STACK = f"[{LAYERS},{EXPERTS},{WIDTH},{2 * EXPERT_WIDTH}]"
WORDS = dict(
  model_name="qwen3-30b-a3b", override_model_config="true", base_emb_dim=WIDTH, base_num_decoder_layers=LAYERS,
  base_moe_mlp_dim=EXPERT_WIDTH, base_mlp_dim=EXPERT_WIDTH, base_num_query_heads=4, base_num_kv_heads=4, head_dim=64,
  num_experts=EXPERTS, num_experts_per_tok=2, vocab_size=4096, max_target_length=256, per_device_batch_size=2, dtype="bfloat16",
  weight_dtype="float32", megablox="false", sparse_matmul="true", attention="dot_product", hardware="gpu",
  prefuse_moe_weights="true", param_scan_axis=0, run_name="cast", skip_jax_distributed_system="true", log_config="false",
  enable_checkpointing="false",
)  # fmt: skip


def main(choice: str) -> dict:
  devices, _ = described.devices("H200", "1x1x1")
  from maxtext.configs import pyconfig

  from maxtext_moe_te.host import step as steps
  from maxtext_moe_te.settings.config import MoeTeOptions

  base = os.path.join(os.path.dirname(pyconfig.__file__), "base.yml")
  with tempfile.TemporaryDirectory() as folder:
    words = [base, f"base_output_directory={folder}", *(f"{key}={value}" for key, value in WORDS.items())]
    step = steps.build(words, options=MoeTeOptions(experts="te", cast_weights=choice), devices=devices[:1])
    text = step.compile({"xla_gpu_autotune_level": 0, "xla_gpu_enable_cub_radix_sort": False}).as_text()
  # Of each loop's body, by computation: what it carries is what it takes.
  bodies = [re.search(rf"^%?{re.escape(name)} \((.*?)\) -> ", text, re.M)[1] for name in re.findall(r"body=%?([\w.\-]+)", text)]
  carried = [dtype for body in bodies for dtype in re.findall(r"(\w+)" + re.escape(STACK), body)]
  return {"carried": sorted(set(carried))}


if __name__ == "__main__":
  print("RESULT", json.dumps(main(*sys.argv[1:])))
