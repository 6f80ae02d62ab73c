"""The patching mechanism: all checks before the first change, full undo by identity, one activation per process."""

import logging
import sys
import types

import pytest

from maxtext_moe_te.errors import SeamError
from maxtext_moe_te.host import patching

SOURCE = """
def free(x):
  # a comment
  return x + 1

class Layer:
  def call(self, x):
    return x

  @staticmethod
  def still(x):
    return x

class Child(Layer):
  pass

VALUE = 3
"""


@pytest.fixture
def victim(tmp_path, monkeypatch):
  (tmp_path / "victim_module.py").write_text(SOURCE)
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.delitem(sys.modules, "victim_module", raising=False)
  import victim_module

  return victim_module


@pytest.fixture(autouse=True)
def no_activation(monkeypatch):
  monkeypatch.setattr(patching, "_current", None)


def seam(target, replace=None, **kwargs):
  return patching.Seam(target=target, replace=replace or (lambda old: lambda *args: "new"), reason="test", **kwargs)


def test_replaces_counts_and_restores_identity(victim, caplog):
  before = {"free": vars(victim)["free"], "call": vars(victim.Layer)["call"], "still": vars(victim.Layer)["still"]}
  seams = [
    seam("victim_module:free"),
    seam("victim_module:Layer.call"),
    seam("victim_module:Layer.still", lambda old: staticmethod(lambda x: old.__func__(x) + 10)),
  ]
  with caplog.at_level(logging.INFO, "maxtext_moe_te"):
    activation = patching.apply_all(seams)
  assert [victim.free(1), victim.Layer().call(1), victim.Layer.still(1)] == ["new", "new", 11]
  assert activation.calls == {"victim_module:free": 1, "victim_module:Layer.call": 1}
  assert caplog.messages[0].startswith("victim_module:free: victim_module.free -> ")
  assert "test_patching.seam." in caplog.messages[0].partition(" -> ")[2]
  assert len(caplog.messages) == 3
  activation.undo()
  assert vars(victim)["free"] is before["free"]
  assert vars(victim.Layer)["call"] is before["call"]
  assert vars(victim.Layer)["still"] is before["still"]
  assert not activation.active
  activation.undo()


def test_context_manager(victim):
  with patching.apply_all([seam("victim_module:free")]) as activation:
    assert victim.free(1) == "new" and activation.targets == ("victim_module:free",)
  assert victim.free(1) == 2


@pytest.mark.parametrize(
  "target",
  [
    "victim_module:nope",
    "victim_module:Layer.nope",
    "victim_module:Nope.call",
    "victim_module:Child.call",
    "no_such_module:x",
    "victim_module",
  ],
)
def test_missing_target_changes_nothing(victim, target):
  seams = [seam("victim_module:free"), seam(target)]
  with pytest.raises(SeamError) as caught:
    patching.apply_all(seams)
  assert str(caught.value).startswith(f"{target} does not exist; needed: the place the plugin replaces.")
  assert victim.free(1) == 2


# Names the replacement relies on, whether it knows all there may be, the parameters it meets, and what is said of them.
OTHERS = [
  (("self", "x"), False, "self, x, y=None", ""),
  (("self", "x"), True, "self, x", ""),
  (("self", "y"), False, "self, x, y", ""),
  (("self", "y"), False, "self, x", "among them self, y"),
  (("self", "x", "y"), False, "self, y, x", "among them self, x, y"),
  (("self", "x"), True, "self, x, y=None", "no more than self, x"),
  (("self", "x"), True, "self, x, **more", "no more than self, x"),
  ((), False, "*anything", ""),
]


@pytest.mark.parametrize(("passes", "complete", "parameters", "needed"), OTHERS)
def test_other_parameters_are_refused_before_any_change(victim, passes, complete, parameters, needed):
  exec(f"def call({parameters}): pass", vars(victim))
  victim.Layer.call = victim.call
  seams = [seam("victim_module:free"), seam("victim_module:Layer.call", passes=passes, complete=complete)]
  if not needed:
    with patching.apply_all(seams):
      assert victim.free(1) == "new"
    return
  with pytest.raises(SeamError) as caught:
    patching.apply_all(seams)
  assert str(caught.value).startswith("victim_module:Layer.call has the parameters (") and f"needed: {needed}. Fix: " in str(caught.value)
  assert victim.free(1) == 2


def test_what_speaks_against_a_seam_does_before_any_change(victim):
  seen = []

  def check(one, original):
    seen.append((one.target, original))
    if original is vars(victim.Layer)["call"]:
      raise SeamError(found="a", needed="b", fix="c")

  with pytest.raises(SeamError, match="a; needed: b"):
    patching.apply_all([seam("victim_module:free"), seam("victim_module:Layer.call")], check=check)
  assert seen[0] == ("victim_module:free", victim.free) and victim.free(1) == 2


def test_failure_while_replacing_restores(victim):
  def broken(old):
    raise RuntimeError("broken")

  with pytest.raises(RuntimeError, match="broken"):
    patching.apply_all([seam("victim_module:free"), seam("victim_module:Layer.call", broken)])
  assert victim.free(1) == 2


def test_failure_while_setting_restores(victim, monkeypatch):
  class Refuses(type):
    def __setattr__(cls, name, value):
      raise TypeError("read-only")

  victim.Closed = types.new_class("Closed", (), {"metaclass": Refuses}, lambda body: body.update(call=victim.free))
  with pytest.raises(TypeError, match="read-only"):
    patching.apply_all([seam("victim_module:free"), seam("victim_module:Closed.call")])
  assert victim.free(1) == 2


def test_two_seams_for_one_target(victim):
  with pytest.raises(SeamError, match="two seams for victim_module:free"):
    patching.apply_all([seam("victim_module:free")] * 2)


def test_undo_refuses_when_somebody_replaced_after_us(victim):
  activation = patching.apply_all([seam("victim_module:free"), seam("victim_module:Layer.call")])
  ours, victim.free = victim.free, lambda x: "theirs"
  with pytest.raises(SeamError, match="victim_module:free was replaced by somebody else after the plugin was activated"):
    activation.undo()
  assert victim.Layer().call(1) == "new"
  victim.free = ours
  activation.undo()
  assert victim.Layer().call(1) == 1


def test_activate_once(victim):
  make = lambda: patching.apply_all([seam("victim_module:free")])
  first = patching.activate_once("a", make)
  assert patching.activate_once("a", make) is first
  with pytest.raises(SeamError, match="already active with other settings"):
    patching.activate_once("b", make)
  first.undo()
  second = patching.activate_once("b", make)
  assert second is not first and second.active
  second.undo()
