"""Source of MaxText that the plugin does not know: what a run makes of the numbers, and the numbers themselves on changed copies."""

import json
import os
import re
import subprocess
import types

import pytest

from maxtext_moe_te.errors import RefusedError, SeamError
from maxtext_moe_te.host import known, selfcheck, source
from maxtext_moe_te.host.selfcheck import Verdict
from maxtext_moe_te.settings.config import MoeTeOptions
from tests import helpers
from tests.hosts import trees

pytestmark = pytest.mark.host

EQUAL = Verdict(True, {"layer y": 1e-7, "layer d_wi_0": 2e-6, "layer d_inputs": 3e-7}, 21.4)
OTHER = Verdict(False, {"layer y": 0.125, "layer d_wi_0": 2e-6}, 20)
NEVER, ALWAYS = MoeTeOptions(selfcheck="never"), MoeTeOptions(selfcheck="always")
# A line of the router that changes numbers, and a local variable's name.
SPOILED = ("maxtext.layers.moe:RoutedMoE.get_topk", "jax.nn.softmax(top_k_weights.astype(jnp.float32), axis=-1)",
           "jax.nn.softmax(2 * top_k_weights.astype(jnp.float32), axis=-1)")  # fmt: skip
RENAMED = ("maxtext.layers.moe:RoutedMoE.permute", "flatten_selected_experts", "flat_selected_experts")


@pytest.fixture(scope="module")
def config():
  return helpers.maxtext_config("mixtral-8x7b")


@pytest.fixture
def cache(tmp_path, monkeypatch):
  monkeypatch.setenv(selfcheck.CACHE_VARIABLE, str(tmp_path / "cache"))
  return tmp_path / "cache" / "selfcheck"


@pytest.fixture
def copy(tmp_path, monkeypatch, cache):
  """Puts a copy of the installed MaxText, with text in one of its functions replaced, in the place of it."""

  def make(target=None, old="", new=""):
    folder = trees.copy(source.root().parent, tmp_path / "tree")
    while target and old in trees.functions(folder)[target].text:
      trees.edit(folder, target, old, new)
    monkeypatch.setattr(source, "root", lambda package=source.PACKAGE: folder / package)
    return folder

  return make


@pytest.fixture
def asked(monkeypatch):
  """Puts a verdict in the place of the comparing process; the requests that it got."""
  requests = []

  def answer(verdict):
    monkeypatch.setattr(selfcheck, "_run", lambda request: (requests.append(request), verdict)[1])
    return requests

  return answer


def refused(kind, config, options=MoeTeOptions()):
  with pytest.raises(kind) as caught:
    selfcheck.settle(config, options)
  return str(caught.value)


def test_known_source_goes_at_once(config, cache, asked):
  requests = asked(OTHER)
  assert selfcheck.settle(config, MoeTeOptions()) == "" and selfcheck.settle(config, NEVER) == ""
  assert requests == [] and not cache.exists()


def test_always_compares_known_source_too(config, cache, asked):
  requests = asked(EQUAL)
  line = selfcheck.settle(config, ALWAYS)
  assert line == f"self-check of MaxText {source.version()}: known; equal by numbers (largest relative error 2.0e-06, layer d_wi_0; 21 s)"
  assert requests[0]["groups"] == [known.LAYER, known.STEP]
  asked(OTHER)
  (cache / next(name for name in os.listdir(cache) if name.endswith(".json"))).unlink()
  assert "layer y is off by 1.2e-01 (bound 1e-05); needed" in refused(RefusedError, config, ALWAYS)


def test_unknown_source(config, copy, asked):
  copy(*RENAMED)
  requests = asked(EQUAL)
  line = selfcheck.settle(config, MoeTeOptions())
  wanted = f"self-check of MaxText {source.version()}: RoutedMoE.permute not known to the plugin; equal by numbers (largest relative error "
  assert line == f"{wanted}2.0e-06, layer d_wi_0; 21 s)"
  assert requests[0]["groups"] == [known.LAYER], "a step is not compared for a layer's function"
  said = refused(SeamError, config, NEVER)
  assert re.search(r"is not known to the plugin: RoutedMoE\.permute \[\+\d+: .*flat_selected_experts.*\]; needed: a text that was", said)
  assert said.endswith("Fix: set moe_te.selfcheck=auto.") and len(requests) == 1


def test_a_dense_model_and_a_plugin_that_is_off_are_not_compared(config, copy, asked, monkeypatch):
  copy(*RENAMED)
  requests = asked(OTHER)
  assert selfcheck.settle(config, MoeTeOptions(enabled=False)) == ""
  with selfcheck.comparing():
    assert selfcheck.settle(config, MoeTeOptions()) == ""
  monkeypatch.setitem(config._flat_config, "num_experts", 1)
  assert selfcheck.settle(config, MoeTeOptions()) == "" and requests == []


def test_a_verdict_is_kept_for_the_texts_and_settings_it_was_taken_on(config, copy, asked, monkeypatch):
  folder = copy(*RENAMED)
  requests = asked(EQUAL)
  selfcheck.settle(config, MoeTeOptions())
  assert selfcheck.settle(config, MoeTeOptions()).endswith("; 21 s, kept from an earlier run)") and len(requests) == 1
  request = selfcheck.request_of(config, MoeTeOptions(), (known.LAYER,))
  assert selfcheck.kept(request).equal
  monkeypatch.setitem(config._flat_config, "steps", 77)  # nothing that the layer reads
  selfcheck.settle(config, MoeTeOptions())
  assert len(requests) == 1
  monkeypatch.setitem(config._flat_config, "num_experts_per_tok", 3)
  selfcheck.settle(config, MoeTeOptions())
  assert len(requests) == 2 and requests[1]["layer"]["num_experts_per_tok"] == "3"
  trees.edit(folder, "maxtext.layers.moe:RoutedMoE.unpermute", "return", "unused = 1; return")
  selfcheck.settle(config, MoeTeOptions())
  assert len(requests) == 3, "other texts"
  monkeypatch.setattr(selfcheck, "_own_digest", lambda: "another plugin")
  selfcheck.settle(config, MoeTeOptions())
  assert len(requests) == 4
  for path in (folder.parent / "cache" / "selfcheck").glob("*.json"):
    path.write_text("{")  # cut off
  selfcheck.settle(config, MoeTeOptions())
  assert len(requests) == 5


NUMBERS = {
  "other numbers": (OTHER, "layer y is off by 1.2e-01 (bound 1e-05)"),
  "not finite": (Verdict(False, {"layer y": 1e-3, "layer d_wi_0": None}, 20), "layer d_wi_0 is not finite"),
}


@pytest.mark.parametrize("case", NUMBERS)
def test_numbers_that_differ(config, copy, asked, case):
  verdict, amount = NUMBERS[case]
  folder = copy(*RENAMED)
  requests = asked(verdict)
  for _ in range(2):  # and when it is kept
    said = refused(RefusedError, config)
    where = f"({folder}/maxtext): {amount}; changed against {source.version()}"
    assert said.startswith("the plugin computes something else than MaxText's own layer in MaxText ") and where in said
    assert re.search(r"RoutedMoE\.permute \[\+\d+: .*flat_selected_experts", said)
    assert said.endswith("Fix: set moe_te.enabled=false to run MaxText's own layer, or undo that change.")
  assert len(requests) == 1


def done(stdout="", stderr="", status=0):
  return lambda *args, **kwargs: types.SimpleNamespace(stdout=stdout, stderr=stderr, returncode=status)


def slow(command, timeout, **kwargs):
  raise subprocess.TimeoutExpired(command, timeout)


CHILDREN = {
  "dies": (done(stderr="a\nb\nKilled", status=-9), "the comparing process ended with status -9 (b | Killed)"),
  "says nothing": (done(), "the comparing process ended with status 0 ()"),
  "fails": (done(f"{selfcheck.ANSWER} {json.dumps({'failure': 'ValueError: no'})}"), "ValueError: no"),
  "is slow": (slow, f"the comparison had not ended after {selfcheck.TIMEOUT_S} s"),
}


@pytest.mark.parametrize("child", CHILDREN)
def test_without_numbers_nothing_is_accepted(config, copy, monkeypatch, child):
  """Nor is it kept: what kept the numbers from being taken may be over."""
  run, why = CHILDREN[child]
  folder = copy(*RENAMED)
  monkeypatch.setattr(selfcheck.subprocess, "run", run)
  said = refused(RefusedError, config)
  assert said.startswith("the plugin could not be compared with MaxText's own layer in MaxText ") and f": {why}; changed against" in said
  assert not list((folder.parent / "cache").rglob("*.json"))


def test_no_quantity_is_no_proof(config, copy, monkeypatch):
  copy(*RENAMED)
  monkeypatch.setattr(selfcheck.subprocess, "run", done(f'{selfcheck.ANSWER} {{"errors": {{}}}}'))
  refused(RefusedError, config)


@pytest.mark.slow
def test_a_changed_router_is_refused_by_its_numbers(config, copy):
  """The comparing process imports the changed copy, and no other."""
  copy(*SPOILED)
  said = refused(RefusedError, config)
  number = re.search(r"layer \w+ is off by (\S+) \(bound", said) or pytest.fail(said)
  assert float(number[1]) > 1e-3 and re.search(r"changed against \S+: RoutedMoE\.get_topk \[\+\d+: .*2 \* top_k_weights", said)


@pytest.mark.slow
def test_a_renamed_variable_is_accepted_by_its_numbers(config, copy):
  copy(*RENAMED)
  line = selfcheck.settle(config, MoeTeOptions())
  assert re.search(r"RoutedMoE\.permute not known to the plugin; equal by numbers \(largest relative error \d\.\de-0[6-9], ", line), line
