"""MaxText's own tests with the plugin active, held to what they say without it.

    python tests/hosts/upstream.py CHECKOUT [FILE …]

CHECKOUT is a folder with the `tests` of MaxText's repository, of a text near that of the MaxText that is imported; FILE stands in
tests/unit. Every test that passes on plain MaxText has to pass under the plugin too. Exit status 1 if one does not.
"""

import argparse
import collections
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

# What reads configurations, or builds and runs models that have MoE layers.
FILES = (
  "pyconfig_test.py",
  "configs_test.py",
  "configs_value_test.py",
  "flop_calculation_test.py",
  "train_nnx_test.py",
  "nnx_decoders_test.py",
  "envy_test.py",
  "decoder_layer_model_mode_test.py",
)
LAYER = "maxtext.layers.moe:RoutedMoE.__call__"


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("checkout", type=Path)
  parser.add_argument("files", nargs="*", default=FILES)
  parser.add_argument("--one", metavar="RESULT.json", help=argparse.SUPPRESS)  # a run in this process, for the two below
  parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.one:
    return _one(args)
  results = {}
  with tempfile.TemporaryDirectory() as folder:
    for name in ("plain", "plugin"):
      print(f"== {name}", flush=True)
      result = Path(folder) / f"{name}.json"
      command = [sys.executable, __file__, str(args.checkout), *args.files, "--one", str(result)]
      subprocess.run([*command, *(["--plain"] if name == "plain" else [])], check=False)
      results[name] = json.loads(result.read_text())
      print(f"{name}: {dict(collections.Counter(found for found, _ in results[name].values()))}", flush=True)
  worse = {
    test: results["plugin"].get(test, ("not run", ""))
    for test, (found, _) in results["plain"].items()
    if found == "passed" and results["plugin"].get(test, ("not run", ""))[0] != "passed"
  }
  for test, (found, why) in worse.items():
    print(f"{found} under the plugin: {test}\n    {why}")
  print(f"{len(worse)} that pass on plain MaxText do not under the plugin")
  return 1 if worse else 0


def _one(args):
  import pytest

  result = Path(args.one).resolve()
  os.environ.setdefault("DECOUPLE_GCLOUD", "TRUE")
  os.environ.setdefault("JAX_PLATFORMS", "cpu")
  os.environ["MAXTEXT_REPO_ROOT"] = str(args.checkout.resolve())  # where they look for configurations
  os.chdir(args.checkout)
  sys.path[0] = os.getcwd()  # their package `tests`, not ours
  report = _Report(active=not args.plain)
  files = [str(Path("tests/unit") / name) for name in args.files]
  status = pytest.main([*files, "-q", "-p", "no:cacheprovider", "--no-header", "--tb=line"], plugins=[report])
  result.write_text(json.dumps(report.found))
  return status


class _Report:
  """A pytest plugin: activates ours before the tests are imported, and keeps what became of each."""

  def __init__(self, *, active):
    self.active, self.found = active, {}

  def pytest_collection(self):
    if self.active:
      import maxtext_moe_te

      self.activation = maxtext_moe_te.activate()

  def pytest_terminal_summary(self, terminalreporter):
    if self.active:
      terminalreporter.write_line(f"the plugin's layer was called {self.activation.calls[LAYER]} times")

  def pytest_runtest_logreport(self, report):
    if report.when == "call" or report.outcome != "passed":
      text = report.longreprtext.strip().splitlines()[-1:] if report.outcome == "failed" else []
      self.found[report.nodeid] = (report.outcome, "".join(text)[:300])


if __name__ == "__main__":
  sys.exit(main())
