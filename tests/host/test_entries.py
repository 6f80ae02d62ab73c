"""The table of MaxText's entry points: every one is in it, and what it promises is what the module's source says."""

import importlib.util
import pathlib
import re

import pytest

from maxtext_moe_te.errors import RefusedError
from maxtext_moe_te.settings import entries
from maxtext_moe_te.settings.config import MoeTeOptions

pytestmark = pytest.mark.host

FOLDERS = ("trainers", "inference", "checkpoint_conversion", "training_engine", "utils")
# How an entry point gets a model for which a group is made.
MAKES_MODELS = (
  r"from_pretrained|create_models_and_meshes|setup_train_loop|pre_train(\.train)? import|[mM]ax[eE]ngine|inference_microbenchmark"
)


def root():
  return pathlib.Path(importlib.util.find_spec("maxtext").submodule_search_locations[0])


def test_every_entry_point_is_in_the_table():
  found = set()
  for path in (path for folder in FOLDERS for path in (root() / folder).rglob("*.py")):
    if re.search(r"^def main\(|^if __name__ == .__main__.", path.read_text(), re.MULTILINE):
      found.add("maxtext." + ".".join(path.relative_to(root()).with_suffix("").parts))
  assert found - set(entries.ENTRIES) == set(), "not in the table"
  assert len(found) > 40


def test_a_group_is_made_where_the_table_says_so():
  for module, entry in entries.ENTRIES.items():
    path = root() / f"{module.removeprefix('maxtext.').replace('.', '/')}.py"
    if path.exists() and entry.group:
      assert re.search(MAKES_MODELS, path.read_text()), module


def test_what_is_said_at_the_start():
  start = lambda name, **options: entries.lines_at_start(f"maxtext.{name}", MoeTeOptions(**options))
  assert start("trainers.pre_train.train") == start("checkpoint_conversion.to_maxtext") == start("of.tomorrow") == []
  assert start("trainers.post_train.dpo.train_dpo") == ["no MoE metrics: train_dpo has no train step that takes them"]
  assert start("trainers.post_train.dpo.train_dpo", metrics=False) == []
  (line,) = start("trainers.pre_train.train_compile")
  assert line.startswith("train_compile: it makes no NCCL EP group")
  assert start("trainers.pre_train.train_compile", transport="xla") == []


@pytest.mark.parametrize(
  ("module", "options", "text"),
  [
    (
      "utils.layerwise_quantization",
      {},
      "maxtext.utils.layerwise_quantization under the plugin: it quantizes the weights of MaxText's own MoE layer, by running that layer; "
      "needed: MaxText's own layer. Fix: write moe_te.enabled=false.",
    ),
    (
      "trainers.pre_train.train_compile",
      dict(transport="nccl_ep"),
      "moe_te.transport=nccl_ep with maxtext.trainers.pre_train.train_compile, which makes no NCCL EP group; needed: an entry point that "
      "runs what it traces. Fix: set moe_te.transport=auto.",
    ),
  ],
)
def test_refused(module, options, text):
  with pytest.raises(RefusedError) as refused:
    entries.lines_at_start(f"maxtext.{module}", MoeTeOptions(**options))
  assert str(refused.value) == text
  assert entries.lines_at_start(f"maxtext.{module}", MoeTeOptions(**options, enabled=False)) == []
