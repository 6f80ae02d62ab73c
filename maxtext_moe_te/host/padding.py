"""Padding for `moe_te.padding=skip`: the segment ids that a decoder layer is called with, brought to the MoE layer inside it.

MaxText hands them to every decoder layer, for its attention, and no further. A layer is wrapped where it is traced, in the body of a
scan and under remat alike, so what is handed on belongs to the same trace as what the MoE layer computes with.
"""

import contextvars
import functools

import jax

from maxtext_moe_te.errors import RefusedError
from maxtext_moe_te.host import parts, rules_from_config, source
from maxtext_moe_te.host.patching import Seam
from maxtext_moe_te.settings.config import MoeTeOptions

_MODELS = "maxtext.models"
# The class whose call reaches the MoE layer of each decoder block, with its arguments (inputs, decoder_segment_ids, …).
LAYERS = {
  "deepseek": f"{_MODELS}.deepseek:DeepSeekMoELayer",
  "deepseek4": f"{_MODELS}.deepseek4:DeepSeek4DecoderLayer",
  "envy": f"{_MODELS}.envy:EnvyDecoderLayer",
  "gemma4": f"{_MODELS}.gemma4:Gemma4DecoderLayer",
  "gpt_oss": f"{_MODELS}.gpt_oss:GptOssDecoderLayer",
  "llama4": f"{_MODELS}.llama4:Llama4DecoderLayer",
  "mixtral": f"{_MODELS}.mixtral:MixtralDecoderLayer",
  "qwen3_5": f"{_MODELS}.qwen3_5:Qwen3_5DecoderLayer",
  "qwen3_custom_moe": f"{_MODELS}.qwen3_custom:Qwen3CustomMoeDecoderLayer",
  "qwen3_moe": f"{_MODELS}.qwen3:Qwen3MoeDecoderLayer",
  "qwen3_next": f"{_MODELS}.qwen3:Qwen3NextDecoderLayer",
}
PADDING = 0  # the segment id of padding, as MaxText's input pipelines and loss have it

_NO_LAYER = object()
_segment_ids = contextvars.ContextVar("segment ids of the decoder layer that is being traced", default=_NO_LAYER)


def seams() -> list[Seam]:
  """One for every decoder layer with an MoE layer that the imported MaxText has."""
  return [
    Seam(
      target=f"{layer}.__call__",
      replace=noting,
      passes=("self", "inputs", "decoder_segment_ids"),
      reason="the last place that has the segment ids, which say what is padding",
    )
    for layer in LAYERS.values()
    if source.function(f"{layer}.__call__")
  ]


def noting(original):
  """A decoder layer's `__call__`, whose segment ids the MoE layer inside it finds."""

  @functools.wraps(original)
  def __call__(self, inputs, decoder_segment_ids, *args, **kwargs):
    token = _segment_ids.set(decoder_segment_ids)
    try:
      return original(self, inputs, decoder_segment_ids, *args, **kwargs)
    finally:
      _segment_ids.reset(token)

  return __call__


def real_tokens(shape: tuple[int, ...]) -> jax.Array | None:
  """Which tokens of the MoE layer that is being traced are not padding.

  Args:
    shape: [B,S,D], of its inputs.

  Returns:
    bool [B,S], or None where the model was called without segment ids, as in decoding: then no token is padding.

  Raises:
    RefusedError: no decoder layer called it, or its tokens are not those that the segment ids are of.
  """
  ids = _segment_ids.get()
  if ids is _NO_LAYER:
    raise RefusedError(
      found="moe_te.padding=skip, and an MoE layer called by no decoder layer that the plugin knows",
      needed="a decoder layer that is given segment ids",
      fix="set moe_te.padding=route",
    )
  if ids is None:
    parts.log_once("moe_te.padding=skip: a model called without segment ids, so none of its tokens is padding")
    return None
  if ids.shape != shape[:2]:
    raise RefusedError(
      found=f"moe_te.padding=skip, and segment ids of shape {list(ids.shape)} for tokens of shape {list(shape[:2])}",
      needed="one for each token",
      fix="set moe_te.padding=route",
    )
  return ids != PADDING


def check(options: MoeTeOptions, config) -> None:
  """Refuses, before anything is built, `padding=skip` for a model whose layers are not reached.

  Raises:
    RefusedError: naming its decoder block.
  """
  block = rules_from_config.block_name(config)
  if options.padding == "skip" and not (block in LAYERS and source.function(f"{LAYERS[block]}.__call__")):
    raise RefusedError(
      found=f"moe_te.padding=skip with decoder_block={block}, whose layers bring no segment ids to their MoE layer",
      needed=f"one of {', '.join(LAYERS)}, in a MaxText that has it",
      fix="set moe_te.padding=route",
    )
