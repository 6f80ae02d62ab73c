"""LoRA under the plugin: Qwix adds adapters to products of modules, and the expert weights are no module's product.

MaxText's own sparse path has none for them either, and says nothing.
"""

import functools
import logging
import re

from flax import nnx
from maxtext.layers import moe

from maxtext_moe_te.errors import RefusedError

log = logging.getLogger("maxtext_moe_te")
WEIGHTS = ("wi", "wi_0", "wi_1", "wo")


def checking(original):
  """`lora_utils.apply_lora_to_model`, which refuses a path that names what gets no adapter."""

  @functools.wraps(original)
  def apply_lora_to_model(model, mesh, mt_config):
    if mt_config.lora.enable_lora and not mt_config.lora_input_adapters_path and mt_config.lora.lora_module_path:
      check(model, mt_config.lora.lora_module_path)
    return original(model, mesh, mt_config)

  return apply_lora_to_model


def check(model: nnx.Module, pattern: str) -> None:
  """Refuses a `lora_module_path` that names expert weights; says so of one that only covers them, such as `decoder/.*`.

  Raises:
    RefusedError: naming them.
  """
  modules = {"/".join(map(str, path)): module for path, module in nnx.iter_modules(model)}
  matches = functools.partial(re.fullmatch, pattern)
  # `wi_0` may mean the shared experts and dense layers, whose `wi_0` are modules.
  elsewhere = {path.rpartition("/")[2] for path, module in modules.items() if matches(path) and not isinstance(module, moe.RoutedMoE)}
  covered = False
  for path, module in modules.items():
    if not isinstance(module, moe.RoutedMoE):
      continue
    for place in (path, *(f"{path}/{name}" for name in WEIGHTS if hasattr(module, name))):
      folder, _, name = place.rpartition("/")
      if matches(place) and not matches(f"{folder}/another") and name not in elsewhere:
        raise RefusedError(
          found=f"lora.lora_module_path={pattern}, which names {place}: expert weights get no adapters",
          needed="modules with a product of their own, such as those of the attention, or the router's gate",
          fix=f"take the experts out of lora.lora_module_path, keeping {path}/gate if the router is to be adapted",
        )
      covered = covered or bool(matches(place))
  if covered:
    log.info("LoRA makes no adapters for expert weights, which lora.lora_module_path=%s covers", pattern)
