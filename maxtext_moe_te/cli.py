"""The command line: `maxtext-moe-te train|run|launch|demo|doctor|capacity|models|config|patch|enable|disable|status`.

A table of commands and nothing else: what a run does is in `session`, what the others do in `tools`. Neither is imported before
a command needs it.
"""

import argparse
import importlib
import sys

from maxtext_moe_te import __version__
from maxtext_moe_te.settings import variable
from maxtext_moe_te.settings.entries import KNOWN_MODULES, TRAIN

_ARGS = "what MaxText takes, and among it, anywhere: overlay=NAME|PATH[,…], moe_te.OPTION=VALUE"
# The module of `tools` whose `main` gets the command's words, and the word put before them if any; what the command does.
TOOLS = {
  "launch": ("launch", "one process per GPU of this host: train or run, in several processes"),
  "demo": ("demo", "train a small model on this machine, on real text"),
  "doctor": ("doctor", "what will fail, be wrong or be slow on this machine, before it starts"),
  "capacity": ("capacity", "rows that a rank may receive, what they take in memory, and what a run chooses"),
  "models": ("models", "MaxText's MoE models and how exact each is under the plugin"),
  "config": ("config", "import NVIDIA's launcher YAML; show or compare effective configurations"),
  "patch": ("patches", "list, check, apply or revert the source patches for MaxText and TE"),
  "enable": ("enable enable", f"let {variable.VARIABLE} switch the plugin on under MaxText's own command"),
  "disable": ("enable disable", "take that back"),
  "status": ("enable status", "whether it is, and what MaxText's own command would do now"),
}


def main(argv: list[str] | None = None) -> int:
  """Runs one command.

  Args:
    argv: the words after the program's name; None for those of this process.

  Returns:
    int: the exit status: 0, 2 for an error explained in one line, 130 when interrupted.
  """
  argv = sys.argv[1:] if argv is None else list(argv)
  variable.take_over()  # what the variable asks for, each command reads by itself
  # argparse sees only our own words: it would take `--help` and friends out of MaxText's.
  own = len(argv) if not argv or argv[0].startswith("-") else 2 if argv[0] == "run" else 1
  if argv in (["train", "-h"], ["train", "--help"]):
    own = 2
  args = _parser().parse_args(argv[:own])
  from maxtext_moe_te import session

  if args.command in TOOLS:
    return session.status_of(lambda: _tool(args.command, argv[own:]))
  return session.status_of(lambda: session.run(TRAIN if args.command == "train" else args.module, argv[own:]))


def _tool(command, words):
  module, *before = TOOLS[command][0].split()
  return importlib.import_module(f"maxtext_moe_te.tools.{module}").main([*before, *words])


def _parser():
  parser = argparse.ArgumentParser(
    prog="maxtext-moe-te",
    description="Dropless, fast Mixture-of-Experts training for MaxText on NVIDIA GPUs, through Transformer Engine.",
    allow_abbrev=False,
  )
  parser.add_argument("--version", action="version", version=f"maxtext-moe-te {__version__}")
  commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
  train = commands.add_parser(
    "train", help="MaxText's trainer with the plugin active", usage="maxtext-moe-te train ARGS", epilog=f"ARGS: {_ARGS}."
  )
  train.description = f"The same as: maxtext-moe-te run {TRAIN} ARGS"
  entry = commands.add_parser(
    "run", help="any MaxText module with the plugin active", usage="maxtext-moe-te run MODULE ARGS", epilog=f"ARGS: {_ARGS}."
  )
  entry.add_argument("module", metavar="MODULE", help=f"full name, for example {KNOWN_MODULES[1]}")
  for name, (_, about) in TOOLS.items():
    commands.add_parser(name, help=about, add_help=False)
  return parser
