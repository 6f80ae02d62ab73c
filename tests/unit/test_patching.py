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
  if "fingerprints" not in kwargs:
    kwargs["fingerprints"] = {"1.0": patching.fingerprint(target, *kwargs.get("relies_on", ()))}
  return patching.Seam(target=target, replace=replace or (lambda old: lambda *args: "new"), reason="test", **kwargs)


def test_replaces_counts_and_restores_identity(victim, caplog):
  before = {"free": vars(victim)["free"], "call": vars(victim.Layer)["call"], "still": vars(victim.Layer)["still"]}
  seams = [
    seam("victim_module:free"),
    seam("victim_module:Layer.call"),
    seam("victim_module:Layer.still", lambda old: staticmethod(lambda x: old.__func__(x) + 10)),
  ]
  with caplog.at_level(logging.INFO, "maxtext_moe_te"):
    activation = patching.apply_all(seams, host_version="1.0")
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
  with patching.apply_all([seam("victim_module:free")], host_version="1.0") as activation:
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
  seams = [seam("victim_module:free"), seam(target, fingerprints={})]
  with pytest.raises(SeamError) as caught:
    patching.apply_all(seams, host_version="1.0", accept_unknown=True)
  assert str(caught.value).startswith(f"{target} does not exist; needed: the place the plugin replaces.")
  assert victim.free(1) == 2


@pytest.mark.parametrize("fingerprints", [{}, {"1.0": "0" * 64}, {"2.0": "x"}])
def test_changed_source_is_refused_before_any_change(victim, fingerprints):
  seams = [seam("victim_module:free"), seam("victim_module:Layer.call", fingerprints=fingerprints)]
  with pytest.raises(SeamError) as caught:
    patching.apply_all(seams, host_version="1.0")
  assert str(caught.value) == (
    "the source of victim_module:Layer.call is not what the plugin was written against (host version 1.0); "
    "needed: the source recorded for a supported version. Fix: use a supported version or moe_te.unknown_host=true."
  )
  assert victim.free(1) == 2


def test_the_source_as_patched_is_known_too(victim):
  with patching.apply_all(
    [seam("victim_module:free", fingerprints={"1.0": "0" * 64, "1.0 patched": patching.fingerprint("victim_module:free")})],
    host_version="1.0",
  ):
    assert victim.free(1) == "new"


def test_changed_source_can_be_accepted_and_is_warned_about(victim, caplog):
  with patching.apply_all([seam("victim_module:free", fingerprints={})], host_version="1.0", accept_unknown=True):
    assert victim.free(1) == "new"
  assert "victim_module:free: unknown source accepted, nothing vouches for the result" in caplog.messages


def test_failure_while_replacing_restores(victim):
  def broken(old):
    raise RuntimeError("broken")

  with pytest.raises(RuntimeError, match="broken"):
    patching.apply_all([seam("victim_module:free"), seam("victim_module:Layer.call", broken)], host_version="1.0")
  assert victim.free(1) == 2


def test_failure_while_setting_restores(victim, monkeypatch):
  class Refuses(type):
    def __setattr__(cls, name, value):
      raise TypeError("read-only")

  victim.Closed = types.new_class("Closed", (), {"metaclass": Refuses}, lambda body: body.update(call=victim.free))
  with pytest.raises(TypeError, match="read-only"):
    patching.apply_all([seam("victim_module:free"), seam("victim_module:Closed.call")], host_version="1.0")
  assert victim.free(1) == 2


def test_two_seams_for_one_target(victim):
  with pytest.raises(SeamError, match="two seams for victim_module:free"):
    patching.apply_all([seam("victim_module:free")] * 2, host_version="1.0")


def test_undo_refuses_when_somebody_replaced_after_us(victim):
  activation = patching.apply_all([seam("victim_module:free"), seam("victim_module:Layer.call")], host_version="1.0")
  ours, victim.free = victim.free, lambda x: "theirs"
  with pytest.raises(SeamError, match="victim_module:free was replaced by somebody else after the plugin was activated"):
    activation.undo()
  assert victim.Layer().call(1) == "new"
  victim.free = ours
  activation.undo()
  assert victim.Layer().call(1) == 1


def test_activate_once(victim):
  make = lambda: patching.apply_all([seam("victim_module:free")], host_version="1.0")
  first = patching.activate_once("a", make)
  assert patching.activate_once("a", make) is first
  with pytest.raises(SeamError, match="already active with other settings"):
    patching.activate_once("b", make)
  first.undo()
  second = patching.activate_once("b", make)
  assert second is not first and second.active
  second.undo()


def test_fingerprint_ignores_comments_but_not_code(victim, tmp_path):
  text = "def free(x):\n  return x + 1\n"
  for name, source in (("same_victim", text), ("other_victim", text.replace("+ 1", "+ 2"))):
    (tmp_path / f"{name}.py").write_text(source)
  assert patching.fingerprint("victim_module:free") == patching.fingerprint("same_victim:free")
  assert patching.fingerprint("victim_module:free") != patching.fingerprint("other_victim:free")
  with pytest.raises(SeamError, match="victim_module:VALUE has no Python source"):
    patching.fingerprint("victim_module:VALUE")


def test_what_a_seam_relies_on_is_part_of_its_fingerprint(victim):
  alone = patching.fingerprint("victim_module:free")
  with pytest.raises(SeamError, match="the source of victim_module:free is not"):
    patching.apply_all([seam("victim_module:free", relies_on=("victim_module:Layer",), fingerprints={"1.0": alone})], host_version="1.0")


def test_printing_fingerprints(victim, capsys):
  assert patching.main(["victim_module:free", "victim_module:free,victim_module:Layer"]) == 0
  lines = capsys.readouterr().out.splitlines()
  assert lines[0] == f"victim_module:free {patching.fingerprint('victim_module:free')}"
  assert lines[1] == f"victim_module:free {patching.fingerprint('victim_module:free', 'victim_module:Layer')}"
