"""NVIDIA's launcher YAML, and job scripts with `--maxtext-arg`s, as overlays for the MaxText this plugin is written for.

Owns what the launcher's words mean here; every one of them is accounted for. Which keys MaxText knows is handed in. The rules come
from NVIDIA's published DeepSeek-V3 configuration and from public job scripts that call its launcher, whose own source is not public.
"""

import re
import shlex
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import yaml

from maxtext_moe_te.errors import OverlayError, nearest
from maxtext_moe_te.settings import xla_flags
from maxtext_moe_te.settings.overlay import parse_yaml

_LAUNCHER = "the launcher's own: the job decides it"
_FORK = "a key of NVIDIA's fork of MaxText, whose part the plugin plays"
_TE_BLOCK = "belongs to MaxText's te_moe_block, which the plugin replaces"

# Key to why it has no counterpart.
_DROPPED = {
  "nodes": _LAUNCHER,
  "use_segment": _LAUNCHER,
  "te_ep_overflow_check_every_n_steps": "the plugin checks every step of a run with a finite capacity",
  "retry_when_tokens_dropped": "no token is dropped",
  "moe_dropless_fallback": "no token is dropped",
  "te_use_gmm": _FORK,
  "use_te_ep": _FORK,
  "use_hybrid_ep": _FORK,
  "te_router_and_permutation_impl": _FORK,
  "moe_permutation_group_align_size": _FORK,
  "override_model_config": "an overlay may replace keys of the model YAML without it",
  "base_config": "the run's own YAML names it",
}
# Key to MaxText's name for the same.
_RENAMED = {
  "zero_one": "shard_optimizer_over_data",
  "batch_size": "per_device_batch_size",
  **{
    f"{network}_{short}": f"{network}_{axis}_parallelism"
    for network in ("ici", "dcn")
    for axis, shorts in {
      "data": ("data", "dp"),
      "fsdp": ("fsdp",),
      "tensor": ("tensor", "tp"),
      "expert": ("expert", "ep"),
      "pipeline": ("pipeline", "pp"),
      "context": ("context", "cp"),
    }.items()
    for short in shorts
  },
}
# Tensors of the routed experts. Under te_moe_block nothing has these names but the dense and shared layers' mlpwi_0 and mlpwo.
_EXPERT_TENSORS = ("mlpwi_0", "mlpwo", "moe_x_sorted", "moe_mlpwi_0", "moe_mlpwi_1", "moe_mlpwo")
_SECTIONS = {"xla_flags": "xla_flags", "env": "env", "env_vars": "env", "environment": "env"}
_ENVIRONMENT = re.compile(r"(XLA|JAX|NCCL|NVTE|CUDA|CUDNN|TF|UCX|NVSHMEM|PYTHON|M)_\w+")  # of a job script's exports, those for the run


@dataclass(frozen=True, kw_only=True)
class Change:
  """What became of one setting.

  Args:
    key: as the file has it.
    action: kept, renamed, dropped or added.
    becomes: what stands in the overlay, as KEY=VALUE; empty if dropped.
    reason: why.
  """

  key: str
  action: str
  becomes: str
  reason: str


@dataclass
class Imported:
  """An overlay's content, and the account of how it came about."""

  maxtext: dict[str, Any] = field(default_factory=dict)
  moe_te: dict[str, Any] = field(default_factory=dict)
  env: dict[str, Any] = field(default_factory=dict)
  xla_flags: dict[str, Any] = field(default_factory=dict)
  changes: list[Change] = field(default_factory=list)

  def text(self, about: str) -> str:
    """The overlay as YAML."""
    content = {"about": about, **self.maxtext}
    content |= {name: section for name in ("moe_te", "env", "xla_flags") if (section := getattr(self, name))}
    return yaml.safe_dump(content, sort_keys=False, width=120, allow_unicode=True)


def import_texts(texts: dict[str, str], known: Collection[str]) -> Imported:
  """Turns files into one overlay; of two that set a key, the later wins.

  Args:
    texts: name to content: YAML, or a job script.
    known: the keys of MaxText's configuration.

  Raises:
    OverlayError: a file holds no settings.
  """
  result = Imported()
  for name, text in texts.items():
    items = list(_items(name, text))
    if not items:
      raise OverlayError(
        found=f"{name} holds no settings",
        needed="KEY: VALUE lines, or a job script that calls NVIDIA's launcher or MaxText",
        fix="give the file with the MaxText keys",
      )
    for kind, key, value in items:
      _place(result, kind, key, value, known)
  if result.moe_te.get("experts") == "te":
    _keep_expert_tensors_off(result)
  _add_slices(result)
  return result


def _place(result, kind, key, value, known):
  """Puts one setting where it belongs; kind is maxtext, env, xla_flags, launcher or base."""
  if kind == "launcher":
    result.changes.append(_drop(key, _LAUNCHER if value is None else value))
  elif isinstance(value, str) and "$" in value:
    result.changes.append(_drop(key, f"{value} is known only to the shell; set it yourself"))
  elif kind in ("xla_flags", "env"):
    value = "" if value is None else value
    if not isinstance(value, str | int | float):
      raise OverlayError(found=f"{key}: {value}", needed="text, a number, true or false", fix=f"correct {key} in the file")
    if kind == "env":
      _put(result, "env", key, key, xla_flags.as_text(value), "an environment variable, not a MaxText key")
      return
    bare = value.strip("'\"") if isinstance(value, str) else value
    reason = "without the quotes inside the value, which would end the process" if bare != value else "set in XLA_FLAGS before JAX starts"
    _put(result, "xla_flags", key, key.removeprefix("--"), bare, reason)
  elif key in ("custom_remat_config", "custom_remat_enabled"):
    _place_remat(result, key, value, known)
  elif rule := _RULES.get(key):
    rule(result, key, value)
  elif key in _DROPPED:
    result.changes.append(_drop(key, _DROPPED[key]))
  else:
    name = _RENAMED.get(key, key)
    if name in known:
      _put(result, "maxtext", key, name, value, "MaxText's name for it" if name != key else "a MaxText key")
    else:
      near = nearest(key, known)
      reason = f"MaxText has no such key{f'; the nearest is {near}' if near else ''}"
      result.changes.append(_drop(key, reason))


def _put(result, section, key, name, value, reason):
  """Sets a value. Of two lines that set the same name, the one that adds nothing is struck."""
  prefix = "" if section == "maxtext" else f"{section}."
  action = "added" if key is None else "kept" if key == name and section != "moe_te" else "renamed"
  change = Change(key=key or name, action=action, becomes=f"{prefix}{name}={xla_flags.as_text(value)}", reason=reason)
  earlier = next((at for at, other in enumerate(result.changes) if other.becomes.startswith(f"{prefix}{name}=")), None)
  if earlier is not None:
    other = result.changes[earlier]
    if other.becomes == change.becomes and other.action == "kept":
      result.changes.append(_drop(change.key, f"{other.key} says the same"))
      return
    same = other.becomes == change.becomes
    result.changes[earlier] = _drop(other.key, f"{change.key} says the same" if same else f"{change.key} sets it again, further down")
  getattr(result, section)[name] = value
  result.changes.append(change)


def _drop(key, reason):
  return Change(key=key, action="dropped", becomes="", reason=reason)


def _te_moe_block(result, key, value):
  if value is True:
    _put(result, "moe_te", key, "experts", "te", "the plugin's layer in its place, on the same kernels")
  else:
    result.changes.append(_drop(key, "the plugin's layer runs either way"))


def _te_gmm_quantization(result, key, value):
  recipe = {"te_mxfp8": "mxfp8", "te_no_quant": "bf16", "": "bf16"}.get(str(value))
  if recipe:
    _put(result, "moe_te", key, "recipe", recipe, "precision of the expert products" + (", on Blackwell only" if recipe == "mxfp8" else ""))
  else:
    result.changes.append(_drop(key, f"{value} is no recipe of the plugin; bf16 is its default"))


def _ragged_buffer_factor(result, key, value):
  factor = _number(key, value)
  factor = factor if factor >= 1 else 0.0
  reason = "receive capacity over that of balanced routing; a step beyond it runs again" if factor else "the worst case fits"
  _put(result, "moe_te", key, "capacity_factor", factor, reason)


def _capacity_factor(result, key, value):
  name, reason = "capacity_factor", "no token is dropped; receive capacity is moe_te.capacity_factor"
  result.maxtext[name] = -1.0
  action = "kept" if _number(key, value) == -1 else "renamed"
  result.changes.append(Change(key=f"{key}={value}", action=action, becomes=f"{name}=-1.0", reason=reason))


def _sparse_matmul(result, key, value):
  del value
  _put(result, "maxtext", key, "sparse_matmul", True, "MaxText's only dropless path")


def _number(key, value):
  if isinstance(value, bool) or not isinstance(value, int | float):
    raise OverlayError(found=f"{key}: {value}", needed="a number", fix=f"correct {key} in the file")
  return value


def _pgle(result, key, value):
  if value is True:
    _put(result, "env", key, "JAX_ENABLE_PGLE", "true", "JAX's own switch; MaxText has none")
  else:
    result.changes.append(_drop(key, "off is JAX's default"))


_RULES = {
  "te_moe_block": _te_moe_block,
  "te_gmm_quantization": _te_gmm_quantization,
  "ragged_buffer_factor": _ragged_buffer_factor,
  "capacity_factor": _capacity_factor,
  "sparse_matmul": _sparse_matmul,
  "pgle": _pgle,
}


def _place_remat(result, key, value, known):
  if key == "custom_remat_enabled":
    if value is True:
      _put(result, "maxtext", key, "remat_policy", "custom", "MaxText's switch for placing tensors by name")
    else:
      result.changes.append(_drop(key, "remat_policy says it"))
    return
  if not isinstance(value, dict):
    raise OverlayError(found=f"{key}: {value}", needed="a map from tensors to remat, device or offload", fix=f"correct {key} in the file")
  for name, place in ((str(name), place) for name, place in value.items()):
    if name in known:
      _put(result, "maxtext", f"custom_remat_config.{name}", name, place, "MaxText has these keys at the top level")
    else:
      reason = f"MaxText places no tensor of this name{f'; the nearest is {near}' if (near := nearest(name, known)) else ''}"
      result.changes.append(_drop(f"custom_remat_config.{name}", reason))


def _keep_expert_tensors_off(result):
  """What te_moe_block could not name would now be kept: hundreds of GiB of routed rows for a large model."""
  for at, change in enumerate(result.changes):
    name, _, place = change.becomes.partition("=")
    if name in _EXPERT_TENSORS and place in ("device", "offload"):
      result.maxtext[name] = "remat"
      reason = f"{place} would keep every routed row: the plugin's experts have a tensor of this name, te_moe_block's have none"
      result.changes[at] = Change(key=f"{change.key}={place}", action="renamed", becomes=f"{name}=remat", reason=reason)


def _add_slices(result):
  slices = 1
  for name, value in result.maxtext.items():
    if name.startswith("dcn_") and isinstance(value, int) and value > 0:
      slices *= value
  if slices > 1 and "num_slices" not in result.maxtext:
    _put(result, "maxtext", None, "num_slices", slices, "the dcn axes need it, and on GPUs MaxText finds 1")


# Files


def _items(name, text):
  if re.match(r"#!.*sh\b", text) or name.endswith((".sh", ".sbatch", ".slurm")):
    yield from _script(text)
  else:
    yield from _launcher_yaml(name, text)


def _launcher_yaml(name, text):
  if "\n```" in text:  # a documentation page: its blocks
    text = "\n".join(re.findall(r"^```[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
  content = parse_yaml(text, name, "YAML, or a job script that ends in .sh")
  if not isinstance(content, dict):
    return
  for key, value in content.items():
    key = str(key)
    if key.lower() in _SECTIONS and isinstance(value, dict):
      for inner, deep in value.items():
        yield from _variable(str(inner), deep) if _SECTIONS[key.lower()] == "env" else [("xla_flags", str(inner), deep)]
    elif key.lower() == "xla_flags":
      yield from _variable("XLA_FLAGS", value)
    elif key.startswith("xla_"):
      yield "xla_flags", key, value
    elif re.fullmatch(r"[A-Z][A-Z0-9_]+", key):
      yield from _variable(key, value)
    else:
      yield "maxtext", key, value


def _variable(name, value):
  """What an environment variable sets."""
  if name == "XLA_FLAGS":
    yield from _flags(" ".join(map(str, value)) if isinstance(value, list) else str(value or ""))
  elif name.startswith("M_"):
    yield "maxtext", name.removeprefix("M_").lower(), _scalar(value) if isinstance(value, str) else value
  else:
    yield "env", name, value


def _script(text):
  for line in re.sub(r"\\\n", " ", text).splitlines():
    try:
      words = shlex.split(line, comments=True)
    except ValueError:
      continue  # shell syntax, no command of ours
    if words[:1] == ["export"]:
      for word in words[1:]:
        name, equals, value = word.partition("=")
        if equals and _ENVIRONMENT.fullmatch(name):
          yield from _variable(name, value)
        elif equals:
          yield "launcher", name, "a variable of the job script"
    elif any(word == "--maxtext-arg" or word.startswith("--maxtext-arg=") or word.endswith("launcher.py") for word in words):
      yield from _launcher_words(words)
    elif any(re.search(r"(?i)maxtext\S*train", word) for word in words):
      yield from (("maxtext", key, _scalar(value)) for key, equals, value in (word.partition("=") for word in words) if equals)


def _launcher_words(words):
  start = next((at for at, word in enumerate(words) if word.endswith("launcher.py")), 0) + 1
  rest = [word for word in words[start:] if word not in ("$@", "${@}")]
  if rest and not rest[0].startswith("-"):
    yield "launcher", rest.pop(0), "a preset of the launcher: import its YAML too, before this file"
  while rest:
    option, equals, value = rest.pop(0).partition("=")
    if not equals:
      value = rest.pop(0) if rest and not rest[0].startswith("--") else None
    name = option.removeprefix("--").replace("-", "_")
    negated, plain = name.startswith("no_"), name.removeprefix("no_")
    if name in ("maxtext_arg", "xla_flag", "env") and value:
      key, _, inner = value.partition("=")
      yield from _variable(key, inner) if name == "env" else [("maxtext" if name == "maxtext_arg" else "xla_flags", key, _scalar(inner))]
    elif plain in ("pgle", "scan_layers") and value is None:
      yield "maxtext", plain, not negated
    elif name in _RENAMED or name in ("quantization", "profiler", "steps"):
      yield "maxtext", name, _scalar(value or "")
    else:
      yield "launcher", option, None


def _flags(text):
  mended, _ = xla_flags.repair(text)
  flags, unread = xla_flags.read(mended)
  yield from (("xla_flags", name, True if value is None else _scalar(value)) for name, value in flags)
  if unread:
    yield "launcher", f"XLA_FLAGS … {unread}", "XLA stops reading at the first word that is no flag"


def _scalar(text):
  """The value of a word: what YAML makes of it, or the word itself."""
  try:
    return parse_yaml(text, "a word") if text else text
  except OverlayError:
    return text
