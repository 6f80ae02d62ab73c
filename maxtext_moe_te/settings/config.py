"""The plugin's own options: their names, defaults and allowed values.

Owns validation only. Whether a choice is possible on this machine is decided where the stage is built.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from maxtext_moe_te.errors import OptionError, nearest
from maxtext_moe_te.settings import xla_flags

CHOICES = {
  "router": ("auto", "jax", "te"),
  "transport": ("auto", "local", "xla", "nccl_ep"),
  "experts": ("auto", "reference", "ragged_dot", "blocked", "te"),
  "recipe": ("bf16", "mxfp8"),
  "cast_weights": ("auto", "step", "layer"),
  "on_overflow": ("exact", "stop", "skip"),
  "padding": ("route", "skip"),
  "selfcheck": ("auto", "always", "never"),
}

# The tensors that MaxText's remat_policy=custom can place, by their keys in its configuration; not the indices, which are small.
OFFLOADABLE = (
  "decoder_layer_input", "context", "query_proj", "key_proj", "value_proj", "qkv_proj", "kv_proj", "query_wa_proj", "kv_wa_proj",
  "mla_q", "mla_kv", "attention_out", "out_proj", "mlpwi", "mlpwi_0", "mlpwi_1", "mlpwo", "moe_x_sorted", "moe_mlpwi_0", "moe_mlpwi_1",
  "moe_mlpwo",
)  # fmt: skip

AUTO = "auto"
MAX_CHUNKS = 1024  # far more than save memory: the weights' gradients are read and written once per part
MAX_CAPACITY_FACTOR = 4096  # an expert axis that large; beyond its size a factor is the worst case


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoeTeOptions:
  """The `moe_te` options. `auto` may choose and logs why; any other value is honoured or the run fails.

  Args:
    enabled: false leaves MaxText's own MoE layer in place; an overlay's MaxText keys still apply.
    router: what computes scores and chooses experts; te is Transformer Engine's kernel, for the rules it computes exactly.
    transport: what carries rows to the ranks that hold their experts.
    experts: what multiplies the rows with the expert weights.
    recipe: precision of Transformer Engine's grouped products; mxfp8 needs Blackwell.
    cast_weights: where float32 expert weights become the compute dtype: step, once in front of the loop over layers, which is
      faster and sums their gradients over devices in the compute dtype, as MaxText does; layer, which sums them in float32. auto
      takes step where no sum is taken, and so no result changes.
    capacity_factor: receive capacity of a rank over that of balanced routing, at least 1; 0 holds whatever the routing. auto takes 0
      where that fits, and otherwise 2, if a step that exceeds it runs again.
    on_overflow: what becomes of a step that exceeds a finite capacity. exact runs the step again, in parts that hold whatever the
      routing, as if the capacity had been enough; stop ends the run, its update not applied; skip leaves its update out, and says so.
    chunks: in how many parts a device's tokens go through dispatch, experts and combine, one after the other. The receive buffers hold
      one part, so the worst case of it is what memory must hold; every part is computed anew in the backward pass. auto takes 1, or as
      many as fit where nothing can run a step again.
    padding: what becomes of tokens of segment 0. route sends them to experts like all others, as MaxText does; skip sends them nowhere,
      so that rows, load, load-balance loss and router bias are those of the real tokens. With an expert axis, skip moves rows with XLA's
      collectives.
    offload: tensors kept in host memory between forward and backward pass, by MaxText's names; a list, or text with commas.
    metrics: report rows per expert, receive demand and overflow from every decoder block, and what they advise.
    load_map: every so many steps a picture of the load of every layer's experts, PNG, in moe_te_load of the run's folder; 0 draws none.
    xla_profile: named sets of XLA flags, of settings/xla_flags.toml; a list, or text with commas. The overlay's own flags win over
      them, and the user's over both.
    selfcheck: where MaxText's source is not known to the plugin, its layer and the plugin's are compared by numbers before the run, at
      reduced width; always does so on known source too, never refuses unknown source.
  """

  enabled: bool = True
  router: str = "auto"
  transport: str = "auto"
  experts: str = "auto"
  recipe: str = "bf16"
  cast_weights: str = "auto"
  capacity_factor: float | str = AUTO
  on_overflow: str = "exact"
  chunks: int | str = AUTO
  padding: str = "route"
  offload: tuple[str, ...] = ()
  metrics: bool = True
  load_map: int = 0
  xla_profile: tuple[str, ...] = ()
  selfcheck: str = "auto"

  def __post_init__(self):
    for field in ("offload", "xla_profile"):
      object.__setattr__(self, field, names(getattr(self, field)))  # hashable, as the options must be
    _check(self.as_dict(), "the arguments of MoeTeOptions")

  @classmethod
  def from_mapping(cls, mapping: Mapping[str, Any], source: str) -> "MoeTeOptions":
    """Options from a mapping of names to values; what it does not name keeps its default.

    Args:
      mapping: option names without the `moe_te.` prefix.
      source: where the mapping comes from, for error messages.

    Raises:
      OptionError: an unknown option, or a value of the wrong type or outside the choices.
    """
    return cls().replace_from(mapping, source)

  def replace_from(self, mapping: Mapping[str, Any], source: str) -> "MoeTeOptions":
    """These options with those in `mapping` replaced; see `from_mapping`."""
    _check(mapping, source)
    return dataclasses.replace(self, **mapping)

  def as_dict(self) -> dict[str, Any]:
    return dataclasses.asdict(self)


def names(value: Any) -> Any:
  """A list, or text with commas, as a tuple; any other value as it is."""
  if isinstance(value, str):
    return tuple(filter(None, (name.strip() for name in value.split(","))))
  return tuple(value) if isinstance(value, list) else value


def _check(mapping, source):
  options = [field.name for field in dataclasses.fields(MoeTeOptions)]
  for key, value in mapping.items():
    if key not in options:
      near = nearest(str(key), options)
      raise OptionError(
        found=f"unknown option moe_te.{key} in {source}",
        needed=f"one of {', '.join(options)}",
        fix=f"write moe_te.{near}" if near else f"remove moe_te.{key}",
      )
    if key == "capacity_factor":
      _check_capacity_factor(value, source)
    elif key == "chunks":
      _check_chunks(value, source)
    elif key == "load_map":
      _check_load_map(value, mapping, source)
    elif key == "xla_profile":
      chosen = names(value)
      profiles = map(str, chosen if isinstance(chosen, tuple) else (value,))
      xla_flags.profile(profiles, f"moe_te.xla_profile={value} in {source}")
    elif key == "offload":
      _check_offload(value, source)
    elif key not in CHOICES and not isinstance(value, bool):
      raise OptionError(
        found=f"moe_te.{key}={value} in {source}",
        needed="true or false",
        fix=f"write moe_te.{key}=true or moe_te.{key}=false",
      )
    if key in CHOICES and value not in CHOICES[key]:
      near = nearest(str(value), CHOICES[key]) or CHOICES[key][0]
      raise OptionError(
        found=f"moe_te.{key}={value} in {source}",
        needed=f"one of {', '.join(CHOICES[key])}",
        fix=f"write moe_te.{key}={near}",
      )


def _check_capacity_factor(value, source):
  if value == AUTO:
    return
  if isinstance(value, bool) or not isinstance(value, int | float) or not (value == 0 or 1 <= value <= MAX_CAPACITY_FACTOR):
    raise OptionError(
      found=f"moe_te.capacity_factor={value} in {source}",
      needed=f"auto, a number from 1 to {MAX_CAPACITY_FACTOR}, or 0 for a capacity that nothing exceeds",
      fix="write moe_te.capacity_factor=0 or, to save memory, moe_te.capacity_factor=2",
    )


def _check_chunks(value, source):
  if value == AUTO:
    return
  if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_CHUNKS:
    raise OptionError(
      found=f"moe_te.chunks={value} in {source}",
      needed=f"auto, or a whole number from 1 to {MAX_CHUNKS}",
      fix="write moe_te.chunks=1 or, to save memory, moe_te.chunks=8",
    )


def _check_load_map(value, mapping, source):
  if isinstance(value, bool) or not isinstance(value, int) or value < 0:
    raise OptionError(
      found=f"moe_te.load_map={value} in {source}",
      needed="a number of steps, or 0 for no picture",
      fix="write moe_te.load_map=0 or, for one every hundred steps, moe_te.load_map=100",
    )
  if value and mapping.get("metrics") is False:
    raise OptionError(
      found=f"moe_te.load_map={value} with moe_te.metrics=false in {source}",
      needed="what the picture shows",
      fix="set moe_te.metrics=true, or remove moe_te.load_map",
    )


def _check_offload(value, source):
  chosen = names(value)
  wrong = [name for name in chosen if name not in OFFLOADABLE] if isinstance(chosen, tuple) else [value]
  if wrong:
    near = nearest(str(wrong[0]), OFFLOADABLE)
    raise OptionError(
      found=f"moe_te.offload with {wrong[0]!r} in {source}",
      needed=f"names among {', '.join(OFFLOADABLE)}",
      fix=f"write {near}" if near else "write for example moe_te.offload=query_proj,value_proj",
    )
