"""README's figures are those of the result files it names."""

import json
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
RESULTS = ROOT / "tests" / "benchmarks" / "results"


def numbers(value) -> set[str]:
  """Every number in a result file, as README would write it."""
  if isinstance(value, dict):
    return set().union(*map(numbers, value.values()), set())
  if isinstance(value, list):
    return set().union(*map(numbers, value), set())
  return {str(value)} if isinstance(value, int | float) else set()


def test_every_figure_of_the_table_is_in_its_file():
  rows = re.findall(r"^\| .*\| `([\w.-]+)` \|$", README, re.M)
  assert len(rows) >= 5
  for line in re.findall(r"^\| .*`[\w.-]+` \|$", README, re.M):
    *cells, file = [cell.strip() for cell in line.strip("|").split("|")]
    known = numbers(json.loads((RESULTS / f"{file.strip('`')}.json").read_text()))
    for cell in cells[1:]:
      assert not cell or cell in known, f"{cell} is not in {file}"


def test_every_figure_of_the_text_is_in_a_file_it_names():
  measured = README.split("### Measured")[1].split("\n## ")[0]
  checked = 0
  for paragraph in measured.split("\n\n"):
    files = [RESULTS / f"{name}.json" for name in re.findall(r"`([\w.-]+)`", paragraph)]
    known = set().union(*(numbers(json.loads(file.read_text())) for file in files if file.exists()))
    # Rates with one decimal and numbers of bytes; not versions, percentages or powers of ten.
    for figure in re.findall(r"(?<![\d.,])(?:\d+\.\d|\d{1,3}(?:,\d{3}){2,})(?![\d.e]| %)", paragraph if known else ""):
      assert figure.replace(",", "") in known, f"{figure} is in none of {[file.name for file in files if file.exists()]}"
      checked += 1
  assert checked >= 12


def test_every_result_says_how_to_repeat_it():
  files = list(RESULTS.glob("*.json"))
  assert files
  for file in files:
    conditions = json.loads(file.read_text())["conditions"]
    assert conditions["command"].startswith(("python -m tests.", "python -m pytest tests/")), file.name
    assert conditions["device"] == "NVIDIA H200"
    assert conditions["packages"]["jax"]
