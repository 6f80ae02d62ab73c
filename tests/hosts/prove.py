"""Proves one source tree of MaxText by numbers: `python -m tests.hosts.prove TREE`, a line of JSON on standard output.

The layer of one model of every kind is compared with MaxText's own, some on a mesh; and a train step, with one microbatch and with two, of
the kinds that MaxText's step treats differently. What the plugin refuses in that tree is said, and is no proof of its places.
"""

import argparse
import importlib.machinery
import importlib.util
import json
import os
import sys
import time
import unittest.mock
from pathlib import Path

LAYERS = {
  "mixtral-8x7b": {}, "qwen3-30b-a3b": {}, "gpt-oss-20b": {}, "llama4-17b-16e": {"num_experts_per_tok": "1"}, "gemma4-26b": {},
  "deepseek2-16b": {}, "deepseek3-671b": {"n_routing_groups": "4", "topk_routing_group": "2"}, "deepseek4-tiny": {}, "envy-test": {},
  "qwen3-next-80b-a3b": {},
}  # fmt: skip
STEPS = ("mixtral-8x7b", "deepseek3-671b")
TENSORFLOW = ("tensorflow", "tensorflow.python", "tensorflow_datasets", "tensorflow_text")
MESH = {"expert": 2, "fsdp": 2}
ON_MESH = ("mixtral-8x7b", "deepseek3-671b")


def main() -> int:
  parser = argparse.ArgumentParser(prog="python -m tests.hosts.prove")
  parser.add_argument("tree", type=Path, help="the folder that holds `maxtext`")
  parser.add_argument("--models", nargs="*", default=list(LAYERS))
  parser.add_argument("--steps", nargs="*", default=list(STEPS))
  arguments = parser.parse_args()
  stand_in(arguments.tree)
  print(json.dumps({"tree": arguments.tree.name, **prove(arguments.models, arguments.steps)}), flush=True)
  return 0


def stand_in(tree: Path) -> None:
  """Has this process import MaxText from a tree, on 4 CPU devices."""
  os.environ |= {"DECOUPLE_GCLOUD": "TRUE", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
  sys.path.insert(0, str(tree))
  if importlib.util.find_spec("tensorflow") is None:
    # Older trees import it to hide GPUs from it, and read no data with it here.
    sys.modules |= {name: unittest.mock.MagicMock(__spec__=importlib.machinery.ModuleSpec(name, None)) for name in TENSORFLOW}


def prove(models, steps) -> dict:
  """Worst relative error over its bound, by comparison; what was refused or failed, and why."""
  start = time.monotonic()
  from maxtext_moe_te.errors import MoeTeError
  from maxtext_moe_te.host import compared, known, selfcheck, source

  worst, refused = {}, {}

  def hold(name, model, groups, mesh):
    try:
      with selfcheck.comparing():
        errors = compared.errors(request(model, groups, mesh))
    except MoeTeError as error:
      refused[name] = str(error)
    except Exception as error:
      refused[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    else:
      of_bound = {quantity: float("inf") if e is None else e / selfcheck.bound(quantity) for quantity, e in errors.items()}
      quantity = max(of_bound, key=of_bound.get)
      worst[name] = [quantity, errors[quantity], of_bound[quantity]]

  for model in models:
    for mesh in ({}, MESH) if model in ON_MESH else ({},):
      hold(f"layer {model}{' on a mesh' if mesh else ''}", model, [known.LAYER], mesh)
  for model in steps:
    hold(f"step {model}", model, [known.STEP], MESH)
  return {
    "version": source.version(),
    "worst": worst,
    "refused": refused,
    "equal": bool(worst) and all(of_bound <= 1 for _, _, of_bound in worst.values()),
    "seconds": round(time.monotonic() - start),
  }


def request(model: str, groups: list[str], mesh: dict[str, int]) -> dict:
  """What `selfcheck` would compare for a run of this model.

  Raises:
    RefusedError: the plugin refuses the model in this tree.
  """
  from maxtext_moe_te.errors import RefusedError
  from maxtext_moe_te.host import rules_from_config, selfcheck
  from maxtext_moe_te.settings.config import MoeTeOptions

  config = configuration(model)
  if (refusal := rules_from_config.refusal(config)) is not None:
    raise RefusedError(**refusal.fields)
  return selfcheck.request_of(config, MoeTeOptions(), tuple(groups)) | {"mesh": mesh}


def configuration(model: str):
  """MaxText's configuration of a run of this model, of few experts so that many models fit in a minute."""
  from maxtext.configs import pyconfig, types

  from maxtext_moe_te.host import features, rules_from_config

  words = {
    "model_name": model, "override_model_config": "true", "run_name": "prove", "base_output_directory": "unused", "hardware": "cpu",
    "skip_jax_distributed_system": "true", "log_config": "false", "dataset_type": "synthetic", "attention": "dot_product",
    "tokenizer_path": "unused", "tokenizer_type": "sentencepiece", "num_experts": "16", "num_experts_per_tok": "4", "sparse_matmul": "true",
    "load_balance_loss_weight": "0.01", "vocab_size": "256", **LAYERS[model],
  }  # fmt: skip
  if model.startswith(rules_from_config.BIAS_FREE_WEIGHTS):
    words["routed_bias_update_rate"] = "0.001"
    if features.of_host().balance_loss_has_bias:  # refused together with a router bias
      words["load_balance_loss_weight"] = "0.0"
  words |= dict.fromkeys(("pure_nnx", "enable_nnx", "pure_nnx_decoder"), "true")  # older trees' default is Linen, which is refused
  words = {key: value for key, value in words.items() if key in types.MaxTextConfig.model_fields or key == "base_output_directory"}
  base = pyconfig.__file__.replace("pyconfig.py", "base.yml")
  resolve = lambda: pyconfig.initialize(["prove", base, *(f"{key}={value}" for key, value in words.items())])
  try:
    return resolve()
  except (ValueError, SystemExit):
    if words.pop("routed_bias_update_rate", None) is None:  # older trees do not take it with DeepSeek-V4
      raise
    return resolve()


if __name__ == "__main__":
  sys.exit(main())
