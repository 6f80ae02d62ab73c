"""`maxtext-moe-te models`: what the plugin makes of every MoE model file of the installed MaxText.

The numbers are those of the parity test, which writes them to `parity.json` beside this file (`pytest --record-parity`) and fails
when they no longer hold. Imports neither jax nor MaxText.
"""

import argparse
import json
from pathlib import Path

import yaml

from maxtext_moe_te.host import source

PARITY = Path(__file__).with_name("parity.json")


def main(words: list[str]) -> int:
  """Prints the table.

  Args:
    words: see `--help`.

  Returns:
    int: the exit status.

  Raises:
    VersionError: there is no MaxText.
  """
  parser = argparse.ArgumentParser(prog="maxtext-moe-te models", description="MoE models of MaxText and how exact each is.")
  form = parser.add_mutually_exclusive_group()
  form.add_argument("--json", action="store_true", help="as JSON")
  form.add_argument("--markdown", action="store_true", help="as in the README")
  arguments = parser.parse_args(words)
  table = rows(model_files(), json.loads(PARITY.read_text()))
  if arguments.json:
    print(json.dumps(table, indent=2))
  else:
    print(markdown(table) if arguments.markdown else text(table))
  return 0


def model_files() -> list[str]:
  """Names of MaxText's model files with more than one expert."""
  folder = source.root() / "configs" / "models"
  settings = {path.stem: yaml.safe_load(path.read_text()) for path in sorted(folder.glob("*.yml"))}
  return [name for name, values in settings.items() if int(values.get("num_experts", 1)) > 1]


def rows(names: list[str], parity: dict) -> list[dict]:
  """One dict per model: model, router, experts, status, forward and gradient error (None where nothing was measured)."""
  empty = dict(router=None, experts=None, status="unknown: no parity record", forward=None, gradient=None)
  table = []
  for name in names:
    record = parity.get(name, {})
    status = f"refused: {record['refused']}" if "refused" in record else "exact" if record else empty["status"]
    table.append({"model": name, **empty, **{key: record[key] for key in empty if key in record}, "status": status})
  return table


def _cells(row):
  error = "-" if row["forward"] is None else f"{row['forward']:.0e} / {row['gradient']:.0e}"
  return row["model"], row["router"] or "-", error, row["status"]


TITLES = ("model file", "router", "error", "status")
LEGEND = "error: relative, output / worst gradient, against MaxText's own layer, both in float32 at reduced width"


def text(table: list[dict]) -> str:
  """The table for a terminal."""
  lines = [TITLES, *map(_cells, table)]
  widths = [max(map(len, column)) for column in zip(*lines)]
  aligned = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines]
  return "\n".join([*aligned, LEGEND])


def markdown(table: list[dict]) -> str:
  """The table for the README; models with the same router share a line."""
  groups = {}
  for row in table:
    groups.setdefault((row["router"], row["status"]), []).append(row)
  lines = [f"| {' | '.join(TITLES)} |", "|---|---|---|---|"]
  for members in groups.values():
    worst = dict(members[0], model=", ".join(row["model"] for row in members))
    if members[0]["forward"] is not None:
      worst |= {key: max(row[key] for row in members) for key in ("forward", "gradient")}
    lines.append(f"| {' | '.join(_cells(worst))} |")
  return "\n".join([*lines, "", LEGEND[0].upper() + LEGEND[1:] + "."])
