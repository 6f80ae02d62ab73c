"""`maxtext-moe-te config import|show|diff`: a launcher's settings as an overlay; what a run is really configured with, and why.

Configurations are resolved by MaxText itself, on the CPU of this machine and without other processes: what MaxText derives from the
number of devices is that of one.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import sys
from pathlib import Path

from maxtext_moe_te.errors import OverlayError
from maxtext_moe_te.host import source
from maxtext_moe_te.settings import importer, xla_flags
from maxtext_moe_te.settings import overlay as overlays
from maxtext_moe_te.settings import words as our_words
from maxtext_moe_te.settings.variable import VARIABLE
from maxtext_moe_te.tools import files

_WORDS = "what MaxText takes, with overlay=NAME|PATH[,…] and moe_te.OPTION=VALUE among it"
_EVERY_RUN = ("base.yml", "MaxText's default", "MaxText derives it", "default")  # shown with --all
_SECTIONS = ("maxtext", "moe_te", "env", "xla_flags")
MOST_WIDTH = 60


def main(words: list[str]) -> int:
  """Runs one of the three; see `--help`.

  Returns:
    int: the exit status.

  Raises:
    MoeTeError: anything that can be explained in one line.
  """
  commands = {"import": _import, "show": _show, "diff": _diff}
  parser = argparse.ArgumentParser(prog="maxtext-moe-te config", description="Overlays and effective configurations.")
  parser.add_argument("command", choices=commands, metavar="import|show|diff", help="followed by --help: what it takes")
  return commands[parser.parse_args(words[:1]).command](words[1:])


def _parser(command, description):
  parser = argparse.ArgumentParser(prog=f"maxtext-moe-te config {command}", description=description, allow_abbrev=False)
  parser.add_argument("--json", action="store_true", help="as JSON")
  return parser


# import


def _import(words):
  parser = _parser("import", "NVIDIA's launcher YAML, or a job script with --maxtext-arg, as an overlay; every setting is accounted for.")
  parser.add_argument("files", nargs="+", metavar="FILE", help="of several, the later wins")
  parser.add_argument("-o", "--output", metavar="OVERLAY.yml", help="where to write the overlay; to standard output if not given")
  args = parser.parse_intermixed_args(words)
  imported = importer.import_texts({name: _text(name) for name in args.files}, _maxtext().known_keys())
  overlay = imported.text(f"imported from {', '.join(Path(name).name for name in args.files)}{_mesh(imported.maxtext)}")
  overlays.parse(overlay, f"what {', '.join(args.files)} would become")
  if args.output is not None:
    _write(args.output, overlay, args.files)
  changes = [dataclasses.asdict(change) for change in imported.changes]
  if args.json:
    print(json.dumps({"overlay": overlay, "changes": changes}, indent=2))
    return 0
  if args.output is None:
    print(overlay, end="")
  rows = [(change["action"], change["key"], change["becomes"] or "-", change["reason"]) for change in changes]
  counts = {action: sum(row[0] == action for row in rows) for action in ("kept", "renamed", "dropped", "added")}
  print("\n".join(_aligned(rows)), ", ".join(f"{count} {action}" for action, count in counts.items()), sep="\n", file=sys.stderr)
  return 0


def _text(name):
  try:
    return Path(name).read_text(encoding="utf-8")
  except (OSError, UnicodeDecodeError) as error:
    raise OverlayError(found=f"{name} cannot be read: {error}", needed="a text file", fix="correct the path") from error


def _write(name, overlay, inputs):
  if not name.endswith((".yml", ".yaml")):
    fix = f"write {name or 'mine'}.yml"
    raise OverlayError(found=f"--output {name}", needed="a name that ends in .yml, by which overlay= knows a path", fix=fix)
  try:
    if os.path.exists(name) and any(os.path.samefile(name, file) for file in inputs):
      raise OverlayError(found=f"--output {name} is the file to import", needed="another file", fix="give --output a name of its own")
    files.replace(Path(name), overlay.encode())
  except OSError as error:
    raise OverlayError(found=f"{name} cannot be written: {error}", needed="a file that can be", fix="correct --output") from error


def _mesh(values):
  """The GPUs that the mesh axes ask for, in words."""
  axes = {}
  for key, value in values.items():
    network, _, axis = key.removesuffix("_parallelism").partition("_")
    if network in ("ici", "dcn") and key.endswith("_parallelism") and isinstance(value, int):
      axes[axis] = axes.get(axis, 1) * value
  axes = {axis: size for axis, size in axes.items() if size > 1}
  gpus = 1
  for size in axes.values():
    gpus *= size
  return f": {gpus} GPUs, {' x '.join(f'{axis} {size}' for axis, size in axes.items())}" if axes else ""


# show and diff


def _show(words):
  parser = _parser("show", "The effective configuration of a run, and where each value comes from.")
  parser.add_argument("--all", action="store_true", help="also what MaxText's base.yml and defaults give every run")
  parser.add_argument("words", nargs="*", metavar="WORD", help=_WORDS)
  args = parser.parse_intermixed_args(words)
  found = resolve(args.words, os.environ.get(VARIABLE))
  if not args.all:
    for section in _SECTIONS:
      found[section] = {key: value for key, value in found[section].items() if value["source"] not in _EVERY_RUN}
  if args.json:
    print(json.dumps(found, indent=2))
    return 0
  for section in _SECTIONS:
    rows = [(key, _shown(value["value"]), _because(value)) for key, value in sorted(found[section].items())]
    if rows:
      print(f"{section}:", *(f"  {line}" for line in _aligned(rows)), sep="\n")
  if found["joined"]:
    print("joined:", *(f"  {line}" for line in found["joined"]), sep="\n")
  for finding in found["findings"]:
    print("!", finding)
  return 0


def _diff(words):
  parser = _parser("diff", "What differs between the effective configurations that two overlays give the same run.")
  for name in ("a", "b"):
    parser.add_argument(name, metavar=name.upper(), help="NAME|PATH[,…] as after overlay=, or - for none")
  parser.add_argument("words", nargs="*", metavar="WORD", help=_WORDS)
  args = parser.parse_intermixed_args(words)
  a, b = (resolve([*args.words, *([f"overlay={spec}"] if spec != "-" else [])], None) for spec in (args.a, args.b))
  differences = {}
  for section in _SECTIONS:
    for key in sorted(a[section].keys() | b[section].keys()):
      one, two = a[section].get(key), b[section].get(key)
      if one is None or two is None or one["value"] != two["value"]:
        differences[key if section == "maxtext" else f"{section}.{key}"] = {"a": one, "b": two}
  if args.json:
    print(json.dumps(differences, indent=2))
    return 0
  cell = lambda side: f"{_shown(side['value'])} ({_because(side)})" if side else "-"
  rows = [("", args.a, args.b), *((key, cell(pair["a"]), cell(pair["b"])) for key, pair in differences.items())]
  print("\n".join(_aligned(rows)) if differences else "no difference")
  return 0


def resolve(words: list[str], variable: str | None) -> dict:
  """What a run with these words, and this text of the variable that names an overlay, would be configured with.

  Returns:
    dict: for each of maxtext, moe_te, env and xla_flags a map from name to {"value", "source"}, with "asked" where MaxText made
    something else of what stands in the source; "joined", what a run would log of overlay, model and words that disagree; and
    "findings", one line for each thing wrong with the flags.

  Raises:
    MoeTeError: the run would be refused before its model is looked at.
  """
  asked = our_words.read(words, variable)
  overlay, options = asked.overlay, asked.options
  theirs = dict(os.environ)
  environ = dict(theirs)
  overlays.apply_environment(overlay, environ, options.xla_profile)
  with contextlib.redirect_stdout(sys.stderr), _same_environment():  # MaxText prints, and sets XLA_FLAGS
    values, plan = _maxtext().explain(["", *asked.words], overlay, options)
  source = {where: _overlay_name(path) for where, path in overlay.sources.items()}
  paths = {f"overlay {path}": _overlay_name(path) for path in overlay.sources.values()}
  found = {"maxtext": {}, "moe_te": {}, "env": {}, "xla_flags": {}, "joined": list(plan.lines)}
  for key, value in values.items():
    shown = {"value": value.value, "source": paths.get(value.source, value.source)}
    found["maxtext"][key] = shown if value.asked is None else {**shown, "asked": value.asked}
  for name, value in options.as_dict().items():
    where = "the command line" if name in asked.given else source.get(f"moe_te.{name}", "default")
    found["moe_te"][name] = {"value": list(value) if isinstance(value, tuple) else value, "source": where}
  for name, value in overlay.env.items():
    found["env"][name] = {
      "value": environ.get(name),
      "source": source[f"env.{name}"] if environ.get(name) == value and name not in theirs else "the environment",
    }
  their_flags = dict(xla_flags.parse(theirs.get("XLA_FLAGS", "")))
  for name, value in xla_flags.parse(environ.get("XLA_FLAGS", "")):
    where = "XLA_FLAGS" if name in their_flags else source.get(f"xla_flags.{name}", f"profile {','.join(options.xla_profile)}")
    found["xla_flags"][name] = {"value": "true" if value is None else value, "source": where}
  found["findings"] = [str(finding) for finding in xla_flags.check(environ.get("XLA_FLAGS", ""), xla_flags.installed_names(), environ)]
  return found


@contextlib.contextmanager
def _same_environment():
  """The environment afterwards as it was before."""
  before = dict(os.environ)
  try:
    yield
  finally:
    for name in os.environ.keys() - before.keys():
      del os.environ[name]
    os.environ.update(before)


def _maxtext():
  """The module that asks MaxText. On the CPU, for nothing here needs a GPU, and a started backend would take most of its memory."""
  os.environ["JAX_PLATFORMS"] = "cpu"
  os.environ.setdefault("DECOUPLE_GCLOUD", "TRUE")  # nothing here needs a bucket
  source.root()
  with contextlib.redirect_stdout(sys.stderr):
    from maxtext_moe_te.host.configuration import explain

  return explain


def _overlay_name(path):
  """An overlay as the user would write it."""
  names = {str(packaged): name for name, packaged in overlays.packaged().items()}
  return f"overlay {names.get(path, path)}"


def _because(value):
  return f"{value['source']}, as {_shown(value['asked'])}" if "asked" in value else value["source"]


def _shown(value):
  return value if isinstance(value, str) and value else json.dumps(value)


def _aligned(rows):
  """Lines with their cells in columns; a cell longer than `MOST_WIDTH` moves those after it in its line alone."""
  widths = [max((len(cell) for cell in column if len(cell) <= MOST_WIDTH), default=0) for column in zip(*rows)]
  return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
