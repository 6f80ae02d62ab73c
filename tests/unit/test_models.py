"""`maxtext-moe-te models`: the table, its README copy, and what it does without MaxText."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from maxtext_moe_te import cli
from maxtext_moe_te.errors import VersionError
from maxtext_moe_te.host import source
from maxtext_moe_te.tools import models

README = Path(__file__).parents[2] / "README.md"
PARITY = {
  "a": {"router": "top 2", "experts": "silu(g) u", "forward": 2e-7, "gradient": 3e-7},
  "b": {"router": "top 2", "experts": "silu(g) u", "forward": 5e-8, "gradient": 8e-7},
  "c": {"router": "top 1", "experts": "silu(g) u", "refused": "weights with scales"},
}


def test_rows():
  table = models.rows(["a", "c", "new"], PARITY)
  assert [row["status"] for row in table] == ["exact", "refused: weights with scales", "unknown: no parity record"]
  assert (table[0]["forward"], table[1]["forward"], table[2]["router"]) == (2e-7, None, None)


def test_text_and_markdown():
  table = models.rows(["a", "b", "c"], PARITY)
  assert models.text(table).splitlines()[2] == "b           top 2   5e-08 / 8e-07  exact"
  assert "| a, b | top 2 | 2e-07 / 8e-07 | exact |" in models.markdown(table), "the worst of models that share a line"


def test_without_maxtext(monkeypatch, capsys):
  def root():
    raise VersionError(**source.MISSING)

  monkeypatch.setattr(source, "root", root)
  assert cli.main(["models"]) == 2
  out = capsys.readouterr()
  assert out.out == ""
  assert re.fullmatch(r"maxtext-moe-te: error: maxtext cannot be imported; needed: .*\n", out.err)


@pytest.mark.host
def test_json_of_the_installed_maxtext():
  code = "import sys; from maxtext_moe_te import cli; cli.main(['models', '--json']); assert 'jax' not in sys.modules"
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
  table = {row["model"]: row for row in json.loads(done.stdout)}
  assert table["mixtral-8x7b"]["status"] == "exact"
  assert table["deepseek3-671b-batchsplit"]["status"].startswith("refused: use_batch_split_schedule=true")
  assert not [name for name, row in table.items() if row["status"].startswith("unknown")]
  assert max(row["gradient"] or 0 for row in table.values()) < 1e-4


@pytest.mark.host
def test_the_readme_says_the_same():
  table = models.markdown(models.rows(models.model_files(), json.loads(models.PARITY.read_text())))
  block = README.read_text().partition("<!-- models:begin -->\n")[2].partition("<!-- models:end -->")[0]
  assert block.strip() == table, "paste what `maxtext-moe-te models --markdown` prints between the markers in README.md"
