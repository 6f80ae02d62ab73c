"""Which texts of MaxText's functions are known to the plugin: proven by numbers before it was released, in `known.json` beside this file.

The places are in groups. A group is known if all its texts stood together in one source tree that was proven; texts that are known each
but come from different trees are not. `tests/hosts` proves trees and records them.
"""

import difflib
import functools
import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from maxtext_moe_te.host import source

KNOWN = Path(__file__).with_name("known.json")
ABSENT = "absent"

_MOE, _LINEARS, _PYCONFIG = "maxtext.layers.moe", "maxtext.layers.linears", "maxtext.configs.pyconfig"
_TRAIN, _UTILS = "maxtext.trainers.pre_train.train", "maxtext.utils"
LAYER, STEP, CONFIGURATION = "layer", "step", "configuration"
# What the plugin restates or relies on. A place may be absent: then that it is belongs to what is known.
GROUPS = {
  LAYER: (
    *(
      f"{_MOE}:RoutedMoE.{name}"
      for name in (
        "__init__", "__call__", "sparse_matmul", "dense_matmul", "get_topk", "deepseek_routing", "deepseek_scale_weights",
        "expert_group_mask", "apply_ffn_activation", "load_balance_loss", "megatron_seq_aux_loss", "should_update_load_balance", "permute",
        "unpermute", "_logical_to_mesh_axes",
      )
    ),
    *(
      f"{_MOE}:{name}"
      for name in (
        "GateLogit.__init__", "GateLogit.__call__", "RoutedAndSharedMoE.__call__", "random_routing", "calculate_load_balance_updates",
        "calculate_expert_counts", "load_balance_updates_from_counts", "uses_megatron_seq_aux_loss", "megatron_aux_loss_inputs",
        "valid_expert_mask", "_top_2_in_group_sum", "take_along_last_axis_dense_vjp",
      )
    ),
    f"{_LINEARS}:_compute_dot_general_nnx",
    f"{_LINEARS}:normalize_axes",
    f"{_LINEARS}:_convert_to_activation_function",
  ),
  STEP: (
    f"{_TRAIN}:loss_fn",
    f"{_TRAIN}:train_step",
    f"{_TRAIN}:_find_gate_bias",
    f"{_UTILS}.gradient_accumulation:gradient_accumulation_loss_and_grad",
    f"{_UTILS}.maxtext_utils:collect_intermediates_by_suffix",
    f"{_UTILS}.maxtext_utils:get_functional_train_with_signature",
    "maxtext.common.metric_logger:record_activation_metrics",
    "maxtext.models.deepseek:DeepSeekGenericLayer.post_process",
    "maxtext.models.models:Transformer.__call__",
  ),
  CONFIGURATION: tuple(
    f"{_PYCONFIG}:{name}"
    for name in (
      "initialize", "initialize_pydantic", "_initialize_pydantic", "_resolve_or_infer_config", "_load_config", "_merge_logical_axis_rules",
    )
  ),
}  # fmt: skip


@dataclass(frozen=True)
class Change:
  """A place whose text is not that of the nearest known tree.

  Attributes:
    target: the place.
    added: its lines that the known text does not have.
    removed: how many lines of the known text it lacks.
    absent: it does not exist here.
    new: it does not exist there.
  """

  target: str
  added: tuple[source.Line, ...] = ()
  removed: int = 0
  absent: bool = False
  new: bool = False

  @property
  def name(self) -> str:
    """Its path in its module."""
    return self.target.partition(":")[2]

  def diff(self, limit: int = 3) -> str:
    """What changed, in one line: the new lines with their numbers, at most `limit` of them, and how many others are gone."""
    if self.absent:
      return f"{self.name} is gone"
    if self.new:
      return f"{self.name} is new"
    shown = [f"+{line.number}: {line.text}" for line in self.added[:limit]]
    more = len(self.added) - len(shown)
    parts = [*shown, *([f"+{more} more lines"] if more > 0 else []), *([f"-{self.removed} lines"] if self.removed else [])]
    return f"{self.name} [{'; '.join(parts) or 'its lines in another order'}]"


@dataclass(frozen=True)
class Judgement:
  """What is known of one group of places.

  Attributes:
    group: its name.
    digest: of all its texts.
    nearest: the tree that has most of them.
    changed: what is not as there; empty if the group is known.
  """

  group: str
  digest: str
  nearest: str
  changed: tuple[Change, ...]

  @property
  def known(self) -> bool:
    return not self.changed

  @property
  def names(self) -> str:
    """The changed places, for a sentence."""
    return ", ".join(change.name for change in self.changed)


def judge(group: str) -> Judgement:
  """Compares the imported MaxText's texts with the known ones.

  Raises:
    VersionError: there is no MaxText.
  """
  return _judge(group, tuple(source.function(target) for target in GROUPS[group]))


def unknown(groups: Iterable[str] = GROUPS) -> list[Judgement]:
  """The groups of which no known tree has all texts."""
  return [judgement for judgement in map(judge, groups) if not judgement.known]


def standing() -> str:
  """What is known of the imported MaxText, in one line.

  Raises:
    VersionError: there is none.
  """
  here = f"source {source.version()} in {source.root()}"
  changed = unknown()
  if not changed:
    return f"{here}, known to the plugin"
  differences = "; ".join(change.diff() for judgement in changed for change in judgement.changed)
  numbers = any(judgement.group != CONFIGURATION for judgement in changed)
  then = "compares both by numbers before it starts" if numbers else "checks that its configuration arrives as the overlay has it"
  return f"{here}, not known to the plugin: against {changed[0].nearest}, {differences}; a run {then}"


def _judge(group, functions):
  known = _read()
  targets = GROUPS[group]
  digests = dict(zip(targets, (function.digest if function else ABSENT for function in functions)))
  matches = [0] * len(known["trees"])
  for target, digest in digests.items():
    for tree in known["texts"].get(target, {}).get(digest, {}).get("trees", ()):
      matches[tree] += 1
  # Of trees with as many, one as released, and the one recorded last: releases come last.
  best = max(range(len(matches)), key=lambda tree: (matches[tree], not known["trees"][tree].endswith("-patched"), tree), default=None)
  changed = []
  for target, function in zip(targets, functions):
    texts = known["texts"].get(target, {})
    if best is None or best not in texts.get(digests[target], {}).get("trees", ()):
      there = next((text for text in texts.values() if best in text["trees"]), {"lines": None})
      changed.append(_change(target, function, there["lines"]))
  digest = hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()[:16]
  return Judgement(group, digest, known["trees"][best] if best is not None else "", tuple(changed))


def _change(target, function, lines):
  if function is None:
    return Change(target, absent=True)
  if lines is None:
    return Change(target, new=True)
  width = source.LINE_DIGITS
  there = [lines[i : i + width] for i in range(0, len(lines), width)]
  here = [line.digest[:width] for line in function.lines]
  added, removed = [], 0
  for kind, a, b, c, d in difflib.SequenceMatcher(None, there, here, autojunk=False).get_opcodes():
    if kind != "equal":
      added += function.lines[c:d]
      removed += b - a
  return Change(target, tuple(added), removed)


@functools.cache
def _read():
  return json.loads(KNOWN.read_text(encoding="utf-8"))


def record(trees: dict[str, dict[str, source.Function | None]], proven: Callable[[str, str], bool] = lambda tree, group: True) -> str:
  """The text of `known.json`.

  Args:
    trees: name of each tree, releases last, to its function for every place of `GROUPS`, None where it has none.
    proven: whether a group of a tree was; others are left out.
  """
  texts = {target: {} for targets in GROUPS.values() for target in targets}
  for number, (name, functions) in enumerate(trees.items()):
    of_proven = [target for group, targets in GROUPS.items() if proven(name, group) for target in targets]
    for target in of_proven:
      function = functions[target]
      lines = None if function is None else "".join(line.digest[: source.LINE_DIGITS] for line in function.lines)
      entry = texts[target].setdefault(ABSENT if function is None else function.digest, {"trees": [], "lines": lines})
      entry["trees"].append(number)
  body = ",\n".join(f"  {json.dumps(target)}: {json.dumps(entries, separators=(',', ':'))}" for target, entries in texts.items())
  return f'{{"trees": {json.dumps(list(trees))},\n "texts": {{\n{body}\n }}}}\n'
