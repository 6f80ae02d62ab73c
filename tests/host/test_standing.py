"""One verdict on MaxText's source: `status`, `patch check`, the doctor and a run say the same of the same copy."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from maxtext_moe_te.host import selfcheck, source
from maxtext_moe_te.settings.variable import VARIABLE
from tests.host.test_patched import WORDS
from tests.host.test_selfcheck import SPOILED
from tests.hosts import trees

pytestmark = pytest.mark.host

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def copy(tmp_path):
  """A copy of the installed MaxText; text in one of its functions replaced."""

  def make(target=None, old="", new=""):
    folder = trees.copy(source.root().parent, tmp_path / "tree")
    while target and old in trees.functions(folder)[target].text:
      trees.edit(folder, target, old, new)
    return folder

  return make


def command(tree, *words, status=0, variable=""):
  """(standard output, standard error) of a command of ours, with the copy first on Python's path."""
  environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
  environment |= {"PYTHONPATH": f"{tree}{os.pathsep}{REPOSITORY}", VARIABLE: variable, selfcheck.CACHE_VARIABLE: str(tree.parent / "cache")}
  done = subprocess.run([sys.executable, "-m", "maxtext_moe_te", *words], env=environment, cwd=tree, capture_output=True, text=True)
  assert done.returncode == status, done.stdout[-2000:] + done.stderr[-3000:]
  return done.stdout, done.stderr


def machine_findings(tree, *words, status=0):
  """(severity, found) of what the doctor finds in MaxText's source."""
  report = json.loads(command(tree, "doctor", "--json", *words, status=status)[0])
  assert report["machine"]["packages"]["maxtext"] == source.version()
  found = [(finding["severity"], finding["found"]) for finding in report["findings"]]
  return [(severity, text) for severity, text in found if "MaxText" in text]


def test_known_source(copy):
  tree = copy()
  line = f"source {source.version()} in {tree}/maxtext, known to the plugin"
  assert f"maxtext: {line}\n" in command(tree, "patch", "check", "maxtext")[0]
  out, _ = command(tree, "status", variable="dropless")
  assert f"MaxText: {line}; patches clean\n" in out and out.endswith(("overlay dropless\n", "plain MaxText\n"))
  assert machine_findings(tree) == [("note", f"MaxText: {line}")]


def test_what_the_metadata_say_is_shown_beside_it(copy):
  """They are of another copy."""
  tree = copy()
  info = tree / "maxtext-9.9.dist-info"
  info.mkdir()
  (info / "METADATA").write_text("Metadata-Version: 2.1\nName: maxtext\nVersion: 9.9\n")
  assert f"maxtext {source.version()} (metadata: 9.9), " in command(tree, "doctor")[0]


def test_source_that_is_not_known(copy):
  """Before a run, all that looks without one names the function and its line."""
  tree = copy(*SPOILED)
  out, _ = command(tree, "patch", "check", "maxtext", "--json")
  line = json.loads(out)[0]["source"]
  assert line.startswith(f"source {source.version()} in {tree}/maxtext, not known to the plugin: against {source.version()}")
  assert "RoutedMoE.get_topk [+" in line and "2 * top_k_weights" in line
  assert f"maxtext: {line}\n" in command(tree, "patch", "check", "maxtext")[0]
  assert f"MaxText: {line}; patches clean\n" in command(tree, "status")[0]
  assert machine_findings(tree) == [("warning", f"MaxText: {line}")]


@pytest.mark.slow
def test_the_doctor_of_a_job_and_its_run_go_by_the_same_numbers(copy):
  """The doctor takes them, in a minute; they are kept for the run."""
  tree = copy(*SPOILED)
  ((severity, found),) = machine_findings(tree, *WORDS, status=1)
  assert severity == "error" and found.startswith("the plugin computes something else than MaxText's own layer in MaxText ")
  assert "RoutedMoE.get_topk [+" in found
  words = [str(tree / "maxtext/configs/base.yml"), f"base_output_directory={tree.parent}", *WORDS]
  _, err = command(tree, "train", *words, status=2)
  assert err.splitlines()[-1].startswith(f"maxtext-moe-te: error: {found}; needed: "), err
  (kept,) = (tree.parent / "cache/selfcheck").glob("*.json")
  kept.write_text(json.dumps(dict(equal=True, errors={"layer y": 2e-7}, seconds=20)))
  numbers = "equal by numbers (largest relative error 2.0e-07, layer y; 20 s, kept from an earlier run)"
  line = f"self-check of MaxText {source.version()}: RoutedMoE.get_topk not known to the plugin; {numbers}"
  assert machine_findings(tree, *WORDS) == [("note", line)]


def test_start_up_cost():
  """What the plugin adds to MaxText's start: its own imports, the seams and one wrapped configuration, in seconds."""
  script = textwrap.dedent("""
    import time
    from maxtext.configs import pyconfig
    from maxtext.trainers.pre_train import train
    words = ["x", pyconfig.__file__.replace("pyconfig.py", "base.yml"), "model_name=mixtral-8x7b", "hardware=cpu",
             "skip_jax_distributed_system=true", "run_name=t", "base_output_directory=unused", "log_config=false"]
    def timed(f):
      start = time.process_time(); f(); return time.process_time() - start  # not the clock: the machine may be busy
    pyconfig.initialize(words)
    plain = min(timed(lambda: pyconfig.initialize(words)) for _ in range(3))
    def activate():
      import maxtext_moe_te
      maxtext_moe_te.activate()
    added = timed(activate)
    added += min(timed(lambda: pyconfig.initialize(words)) for _ in range(3)) - plain
    print("added", added)
  """)
  out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
  assert float(out.split("added")[-1]) < 1.0
