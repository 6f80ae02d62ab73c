"""The patch for Transformer Engine on the installed one's own file."""

import importlib.util
import pathlib
import shutil

import pytest

from maxtext_moe_te import cli
from maxtext_moe_te.tools import patches

pytestmark = pytest.mark.te


def test_applied_and_reverted(tmp_path):
  (series,) = (series for series in patches.load() if series.package == "transformer_engine")
  folder = pathlib.Path(next(iter(importlib.util.find_spec("transformer_engine").submodule_search_locations)))
  for path in series.before:
    (tmp_path / path).parent.mkdir(parents=True)
    shutil.copy(folder.parent / path, tmp_path / path)
  before = {path: (tmp_path / path).read_bytes() for path in series.before}
  for action in ("check", "apply", "apply", "check"):
    assert cli.main(["patch", action, "transformer_engine", "--root", str(tmp_path)]) == 0
  after = {path: (tmp_path / path).read_bytes() for path in series.before}
  assert after != before
  for path, content in after.items():
    compile(content, path, "exec")
  assert cli.main(["patch", "revert", "transformer_engine", "--root", str(tmp_path)]) == 0
  assert {path: (tmp_path / path).read_bytes() for path in series.before} == before
