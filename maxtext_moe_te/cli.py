"""The command line: `maxtext-moe-te train|run|launch|demo|models|config|patch|enable|disable|status`.

Owns the words it takes out of MaxText's arguments, how errors are shown, and exit statuses; no logic beyond that.
Nothing heavy is imported before a command needs it, and jax not before the overlay's environment is in place.
"""

import argparse
import importlib.util
import logging
import os
import runpy
import sys
import traceback

from maxtext_moe_te import __version__, hook
from maxtext_moe_te.errors import MoeTeError, OptionError, RefusedError, nearest

TRAIN = "maxtext.trainers.pre_train.train"
# Entries of MaxText 0.2.5 whose configuration goes through `pyconfig`, for close matches.
KNOWN_MODULES = (
  TRAIN,
  "maxtext.trainers.pre_train.train_compile",
  "maxtext.trainers.post_train.sft.train_sft",
  "maxtext.trainers.post_train.sft.train_sft_native",
  "maxtext.trainers.post_train.dpo.train_dpo",
  "maxtext.trainers.post_train.rl.train_rl",
  "maxtext.trainers.post_train.distillation.train_distill",
  "maxtext.inference.decode",
)
_ARGS = "what MaxText takes, and among it, anywhere: overlay=NAME|PATH[,…], moe_te.OPTION=VALUE"


def main(argv: list[str] | None = None) -> int:
  """Runs one command.

  Args:
    argv: the words after the program's name; None for those of this process.

  Returns:
    int: the exit status: 0, 2 for an error explained in one line, 130 when interrupted.
  """
  argv = sys.argv[1:] if argv is None else list(argv)
  hook.withdraw()  # what the variable asks for, each command reads by itself
  # argparse sees only our own words: it would take `--help` and friends out of MaxText's.
  own = len(argv) if not argv or argv[0].startswith("-") else 2 if argv[0] == "run" else 1
  if argv in (["train", "-h"], ["train", "--help"]):
    own = 2
  args = _parser().parse_args(argv[:own])
  try:
    if args.command == "demo":
      from maxtext_moe_te.tools import demo

      return demo.main(argv[own:])
    if args.command == "models":
      from maxtext_moe_te.tools import models

      return models.main(argv[own:])
    if args.command == "doctor":
      from maxtext_moe_te.tools import doctor

      return doctor.main(argv[own:])
    if args.command == "patch":
      from maxtext_moe_te.tools import patches

      return patches.main(argv[own:])
    if args.command == "launch":
      from maxtext_moe_te.tools import launch

      return launch.main(argv[own:])
    if args.command in ("enable", "disable", "status"):
      from maxtext_moe_te.tools import enable

      return enable.main(args.command, argv[own:])
    if args.command == "config":
      from maxtext_moe_te.tools import config

      return config.main(argv[own:])
    run(TRAIN if args.command == "train" else args.module, argv[own:])
    return 0
  except KeyboardInterrupt:
    return _leave(130)
  except SystemExit as end:
    if isinstance(end.code, int):
      _leave(end.code)
    raise
  except Exception as error:
    ours = _ours(error)
    if ours is None:
      if _others_wait():
        traceback.print_exc()
        return _leave(1)
      raise
    print("maxtext-moe-te: error:", " ".join(str(ours).split()), file=sys.stderr)
    return _leave(ours.exit_status)


def _others_wait() -> bool:
  """Whether a failed process would not end: JAX's exit waits for the other ranks, an NCCL EP communicator for what they send."""
  jax, nccl_ep = sys.modules.get("jax"), sys.modules.get("maxtext_moe_te.moe.transport.nccl_ep")
  distributed = jax is not None and hasattr(jax, "distributed") and jax.distributed.is_initialized()
  return distributed or (nccl_ep is not None and nccl_ep.bootstrapped() is not None)


def _leave(status: int) -> int:
  """`status`; but a failed rank of a distributed run ends here."""
  if _others_wait():
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
  return status


def run(module: str, words: list[str]) -> None:
  """Runs a MaxText module as `python -m` would, with the plugin active.

  Args:
    module: the module's full name.
    words: MaxText's arguments and, among them, ours.

  Raises:
    MoeTeError: anything that can be explained in one line.
  """
  from maxtext_moe_te import activate, versions
  from maxtext_moe_te.tools import launch

  rest, overlay, options = settle(words)
  versions.check_maxtext(accept_unknown=options.unknown_host)
  _check_module(module)
  if options.capacity_factor and module != TRAIN:
    raise RefusedError(
      found=f"moe_te.capacity_factor={options.capacity_factor:g} with {module}, whose steps are not checked for overflow",
      needed=f"{TRAIN}, or a capacity that nothing exceeds",
      fix="set moe_te.capacity_factor=0",
    )
  if rank := launch.Rank.of_this_process():
    rank.join()
  activate(overlay=overlay, options=options)
  sys.argv = [module, *rest]
  try:
    runpy.run_module(module, run_name="__main__", alter_sys=True)
  except SystemExit as end:
    if end.code:
      raise
  from maxtext_moe_te.moe.transport import nccl_ep

  nccl_ep.finalize()  # left to the interpreter's exit, its communicator keeps the process from ending


def settle(words: list[str]) -> tuple:
  """Reads overlay and options from the words, or the overlay from its variable, and puts the environment in place.

  Args:
    words: MaxText's arguments and, among them, ours.

  Returns:
    tuple: the other words; the `Overlay` or None; the `MoeTeOptions`.

  Raises:
    MoeTeError: anything that can be explained in one line.
  """
  from maxtext_moe_te.settings import overlay as overlays
  from maxtext_moe_te.settings import words as our_words
  from maxtext_moe_te.settings import xla_flags

  asked = our_words.read(words, os.environ.get(hook.VARIABLE))
  log = _configure_logging()
  if asked.spec is not None and not any(word.startswith("overlay=") for word in words):
    log.info("overlay %s, from %s", asked.spec, hook.VARIABLE)
  for line in overlays.apply_environment(asked.overlay, os.environ, asked.options.xla_profile):
    log.info(line)
  for line in xla_flags.enforce(os.environ, strict=asked.options.enabled):
    log.info(line)
  return asked.words, asked.overlay if asked.spec is not None else None, asked.options


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
  commands.add_parser("launch", help="one process per GPU of this host: train or run, in several processes", add_help=False)
  commands.add_parser("demo", help="train a small model on this machine, on real text", add_help=False)
  commands.add_parser("doctor", help="what will fail, be wrong or be slow on this machine, before it starts", add_help=False)
  commands.add_parser("models", help="MaxText's MoE models and how exact each is under the plugin", add_help=False)
  commands.add_parser("config", help="import NVIDIA's launcher YAML; show or compare effective configurations", add_help=False)
  commands.add_parser("patch", help="list, check, apply or revert the source patches for MaxText and TE", add_help=False)
  commands.add_parser("enable", help="let MAXTEXT_MOE_TE_OVERLAY switch the plugin on under MaxText's own command", add_help=False)
  commands.add_parser("disable", help="take that back", add_help=False)
  commands.add_parser("status", help="whether it is, and what MaxText's own command would do now", add_help=False)
  return parser


def _configure_logging():
  log = logging.getLogger("maxtext_moe_te")
  if not log.handlers:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("moe_te: %(message)s"))
    log.addHandler(handler)
  log.setLevel(logging.INFO)
  log.propagate = False
  return log


def _check_module(module):
  try:
    found = None if module.startswith(".") else importlib.util.find_spec(module)
    if found is not None and found.submodule_search_locations is not None:  # a package runs only through its __main__
      found = importlib.util.find_spec(f"{module}.__main__")
  except ValueError:
    found = None
  except ModuleNotFoundError as error:
    if error.name is None or not module.startswith(error.name):
      raise  # a package that MaxText needs is missing
    found = None
  if found is None:
    last = {name.rpartition(".")[2]: name for name in KNOWN_MODULES}
    near = nearest(module, KNOWN_MODULES) or last.get(nearest(module.rpartition(".")[2], last), TRAIN)
    raise OptionError(found=f"there is no module {module}", needed="a MaxText entry point by its full name", fix=f"write {near}")


def _ours(error):
  """The error of ours behind an exception: itself, or what a host's `raise … from` names as its cause."""
  while error is not None and not isinstance(error, MoeTeError):
    error = error.__cause__
  return error
