"""Compiles a train step of MaxText for one described H200 and prints what its loops over layers carry: compile_cast step|layer.

The word says where expert weights are cast.
"""

import json
import pathlib
import re
import sys
import tempfile

from maxtext_moe_te.tools import described
from tests import helpers

LAYERS, EXPERTS, WIDTH, EXPERT_WIDTH = 3, 8, 256, 384
STACK = f"[{LAYERS},{EXPERTS},{WIDTH},{2 * EXPERT_WIDTH}]"
WORDS = [
  "model_name=qwen3-30b-a3b", "hardware=gpu", "dtype=bfloat16", "matmul_precision=default", f"base_num_decoder_layers={LAYERS}",
  f"num_experts={EXPERTS}", f"base_emb_dim={WIDTH}", f"base_moe_mlp_dim={EXPERT_WIDTH}", "prefuse_moe_weights=true", "param_scan_axis=0",
]  # fmt: skip


def main(choice: str) -> dict:
  devices, _ = described.devices("H200", "1x1x1")
  from maxtext_moe_te.host import step as steps
  from maxtext_moe_te.settings.config import MoeTeOptions

  with tempfile.TemporaryDirectory() as folder:
    words = helpers.tiny_run(pathlib.Path(folder), WORDS)
    step = steps.build(words, options=MoeTeOptions(experts="te", cast_weights=choice), devices=devices[:1])
    text = step.compile(described.COMPILER_OPTIONS).as_text()
  # Of each loop's body, by computation: what it carries is what it takes.
  bodies = [re.search(rf"^%?{re.escape(name)} \((.*?)\) -> ", text, re.M)[1] for name in re.findall(r"body=%?([\w.\-]+)", text)]
  carried = [dtype for body in bodies for dtype in re.findall(r"(\w+)" + re.escape(STACK), body)]
  return {"carried": sorted(set(carried))}


if __name__ == "__main__":
  print("RESULT", json.dumps(main(*sys.argv[1:])))
