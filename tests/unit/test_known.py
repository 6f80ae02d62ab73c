"""What is known of MaxText's source: whole groups of texts that stood together, and what is said of any other."""

import json
import re

import pytest

from maxtext_moe_te.host import features, known, source
from tests.hosts import trees

GROUP = "group"
TARGETS = ("maxtext.a:f", "maxtext.a:g", "maxtext.b:Layer.h")
OLD = {"a": "def f(): return 1\ndef g():\n  x = 1\n  return x\n", "b": "class Layer:\n  def h(self): return 1\n"}
NEW = {"a": "def f(): return 2\ndef g():\n  x = 2\n  return x\n", "b": "class Layer: pass\n"}


def functions(files):
  return {target: source.of_text(files[target.partition(":")[0][-1]], target) for target in TARGETS}


@pytest.fixture
def judge(monkeypatch):
  """Judges three functions, of which two trees are known: one has all of them, one lacks the third."""
  monkeypatch.setattr(known, "GROUPS", {GROUP: TARGETS})
  text = known.record({"old": functions(OLD), "new": functions(NEW)})
  monkeypatch.setattr(known, "_read", lambda: json.loads(text))
  return lambda files: known._judge(GROUP, tuple(functions(files).values()))


@pytest.mark.parametrize(("files", "tree"), [(OLD, "old"), (NEW, "new")])
def test_a_group_that_stood_together_is_known(judge, files, tree):
  judgement = judge(files)
  assert judgement.known and judgement.nearest == tree and judgement.names == ""
  assert judge({name: f"# a comment\n{text}" for name, text in files.items()}).digest == judgement.digest
  assert judge(OLD).digest != judge(NEW).digest


MIXES = {
  "texts of two trees": (OLD | {"a": OLD["a"].replace("return 1", "return 2")}, "old", "f [+1: def f(): return 2; -1 lines]"),
  "a text that is known to be absent elsewhere": (NEW | {"b": OLD["b"]}, "new", "Layer.h is new"),
  "one that is absent": (OLD | {"b": NEW["b"]}, "old", "Layer.h is gone"),
  "no text that is known": ({"a": "def f(): return 3\n", "b": "\n"}, "new", "f [+1: def f(): return 3; -1 lines]; g is gone"),
  "lines more": (
    OLD | {"a": OLD["a"].replace("  return", "  x = 4\n" * 5 + "  return")}, "old",
    "g [+4: x = 4; +5: x = 4; +6: x = 4; +2 more lines]",
  ),
  "lines less": (OLD | {"a": OLD["a"].replace("  x = 1\n", "")}, "old", "g [-1 lines]"),
  "another order": (OLD | {"a": OLD["a"].replace("  x = 1\n  return x\n", "  return x\n  x = 1\n")}, "old", "g [+3: return x; -1 lines]"),
}  # fmt: skip


@pytest.mark.parametrize("mix", MIXES)
def test_any_other_is_not(judge, mix):
  files, nearest, said = MIXES[mix]
  judgement = judge(files)
  assert not judgement.known and judgement.nearest == nearest
  assert "; ".join(change.diff() for change in judgement.changed) == said


def test_what_was_not_proven_is_not_known(monkeypatch):
  monkeypatch.setattr(known, "GROUPS", {GROUP: TARGETS})
  text = known.record({"old": functions(OLD), "new": functions(NEW)}, lambda tree, group: tree != "old")
  monkeypatch.setattr(known, "_read", lambda: json.loads(text))
  assert not known._judge(GROUP, tuple(functions(OLD).values())).known
  assert known._judge(GROUP, tuple(functions(NEW).values())).known


def test_with_nothing_known_nothing_is(monkeypatch):
  monkeypatch.setattr(known, "GROUPS", {GROUP: TARGETS})
  monkeypatch.setattr(known, "_read", lambda: {"trees": [], "texts": {}})
  judgement = known._judge(GROUP, tuple(functions(OLD).values()))
  assert not judgement.known and [change.diff() for change in judgement.changed] == ["f is new", "g is new", "Layer.h is new"]


@pytest.fixture
def tree(tmp_path, monkeypatch):
  """A copy of the installed MaxText in its place."""
  trees.copy(source.root().parent, tmp_path)
  monkeypatch.setattr(source, "root", lambda package="maxtext": tmp_path / package)
  return tmp_path


@pytest.mark.host
def test_the_installed_release_is_known(tree):
  assert known.unknown() == []
  assert known.standing() == f"source {source.version()} in {tree}/maxtext, known to the plugin"


@pytest.mark.host
def test_a_release_under_another_name_is_known(tree):
  """What it is called decides nothing, neither whether it is known nor what it does; builds of 0.2.5 have many names."""
  does = features.of_host()
  for name in ("0.2.4", "0.2.5.dev3", "0.2.5.post1", "0.2.5+nv26.9", "1.0"):
    (tree / "maxtext/version.py").write_text(f'__version__ = "{name}"\n')
    features._of.cache_clear()
    assert known.standing() == f"source {name} in {tree}/maxtext, known to the plugin"
    assert features.of_host() == does


@pytest.mark.host
def test_one_line_of_permute(tree):
  """The function that changed is named, and the line is shown."""
  trees.edit(tree, "maxtext.layers.moe:RoutedMoE.permute", "use_custom_sort_vjp", "use_custom_sort_vjq")
  (judgement,) = known.unknown()
  assert judgement.group == known.LAYER and judgement.names == "RoutedMoE.permute" and judgement.nearest.startswith(source.version())
  said = known.standing()
  number, line = re.search(
    r"RoutedMoE\.permute \[\+(\d+): (.*?); -1 lines\]; a run compares both by numbers before it starts$", said
  ).groups()
  assert "use_custom_sort_vjq" in line
  assert "use_custom_sort_vjq" in "".join((tree / "maxtext/layers/moe.py").read_text().splitlines()[int(number) - 1 : int(number) + 8])


@pytest.mark.host
def test_a_comment_in_permute_is_nothing(tree):
  trees.edit(tree, "maxtext.layers.moe:RoutedMoE.permute", '"""', '"""Another one. ')
  assert known.unknown() == []


@pytest.mark.host
def test_a_function_that_is_gone(tree):
  path = tree / "maxtext/trainers/pre_train/train.py"
  path.write_text(path.read_text().replace("def loss_fn(", "def loss_function("))
  (judgement,) = known.unknown()
  assert (judgement.group, [change.diff() for change in judgement.changed]) == (known.STEP, ["loss_fn is gone"])
