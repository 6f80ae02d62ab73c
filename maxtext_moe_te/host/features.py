"""What the imported MaxText does, where its versions differ: read from its source, never from a version number.

Each answer is read from the text of one function. Where that text is unknown to the plugin, numbers decide whether the answer was right
(`selfcheck`).
"""

import functools
import re
from dataclasses import dataclass

from maxtext_moe_te.host import source

_MOE = "maxtext.layers.moe"


@dataclass(frozen=True, kw_only=True)
class Features:
  """Attributes:
  balance_loss_divides_by_k: `load_balance_loss` divides the rows of an expert by K.
  balance_loss_has_bias: the router bias enters the balance loss.
  bias_free_weights: beginnings of the model names whose router bias stays out of the combine weights.
  scales_tiled_gradients: the backward pass of num_vocab_tiling multiplies with the cotangent of the loss.
  sums_counts: under gradient accumulation layers hand over rows per expert, which become one bias update per step.
  te_moe_block: it has a Transformer Engine MoE path, and a call at which an expert-parallel group is made for it.
  optimizer_takes_mesh: `get_optimizer` has a parameter `mesh`.
  """

  balance_loss_divides_by_k: bool
  balance_loss_has_bias: bool
  bias_free_weights: tuple[str, ...]
  scales_tiled_gradients: bool
  sums_counts: bool
  te_moe_block: bool
  optimizer_takes_mesh: bool


def of_host() -> Features:
  """The features of the MaxText that `import maxtext` takes.

  Raises:
    VersionError: there is none.
  """
  return _of(source.root())


@functools.lru_cache(maxsize=8)
def _of(root):
  del root  # the key: `_text` asks for the same
  balance = re.search(r"\.softmax\((\w+)\.astype", _text(f"{_MOE}:RoutedMoE.permute"))
  names = re.search(r"model_name\.startswith\(\(?([^)]*)\)", _text(f"{_MOE}:GateLogit.__call__"))
  return Features(
    balance_loss_divides_by_k="num_experts_per_tok" in _text(f"{_MOE}:RoutedMoE.load_balance_loss"),
    balance_loss_has_bias=balance is not None and balance.group(1) == "gate_logits",
    bias_free_weights=tuple(re.findall(r"[\w.-]+", names.group(1))) if names else (),
    # A source without this function has no tiling that could be wrong.
    scales_tiled_gradients=not (tiled := _text("maxtext.utils.vocabulary_tiling:vocab_tiling_nnx_loss"))
    or re.search(r"hidden_states \*= \w*cotangent", tiled) is not None,
    sums_counts="load_balance_updates_from_counts" in _text("maxtext.utils.gradient_accumulation:gradient_accumulation_loss_and_grad"),
    te_moe_block=bool(_text("maxtext.utils.max_utils:maybe_bootstrap_te_moe")),
    optimizer_takes_mesh=re.match(r"def get_optimizer\([^)]*\bmesh\b", _text("maxtext.optimizers.optimizers:get_optimizer")) is not None,
  )


def _text(target):
  function = source.function(target)
  return function.text if function else ""
