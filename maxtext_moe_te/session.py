"""A run under the plugin, from its words to its exit status.

Owns what the command line and the import hook both do: reading overlay and options, putting the environment in place before jax
is imported, activating, running an entry point of MaxText, and showing what went wrong. Nothing heavy is imported before `activate`.
"""

import ctypes
import importlib.util
import logging
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Callable

from maxtext_moe_te.errors import MoeTeError, OptionError, in_one_line, nearest
from maxtext_moe_te.host import source
from maxtext_moe_te.settings import entries, variable, xla_flags
from maxtext_moe_te.settings import overlay as overlays
from maxtext_moe_te.settings import words as our_words
from maxtext_moe_te.settings.limits import Limits
from maxtext_moe_te.settings.rank import Rank


def settle(words: list[str]) -> tuple:
  """Reads overlay and options from the words, or the overlay from its variable, and puts the environment in place.

  Args:
    words: MaxText's arguments and, among them, ours.

  Returns:
    tuple: the other words; the `Overlay` or None; the `MoeTeOptions`.

  Raises:
    MoeTeError: anything that can be explained in one line.
  """
  asked = our_words.read(words, os.environ.get(variable.VARIABLE))
  log = _configure_logging()
  if asked.spec is not None and not any(word.startswith("overlay=") for word in words):
    log.info("overlay %s, from %s", asked.spec, variable.VARIABLE)
  for line in overlays.apply_environment(asked.overlay, os.environ, asked.options.xla_profile):
    log.info(line)
  for line in xla_flags.enforce(os.environ, strict=asked.options.enabled):
    log.info(line)
  return asked.words, asked.overlay if asked.spec is not None else None, asked.options


def activate(overlay=None, options=None):
  """Replaces MaxText's MoE computation in this process; see `maxtext_moe_te.activate`."""
  from maxtext_moe_te.moe import te_runtime

  source.root()  # without a MaxText the next lines would end in a traceback
  variable.take_over()  # who activates the plugin himself decides on the overlay
  if options.enabled if options else (overlay.moe_te if overlay else {}).get("enabled", True):  # off is plain MaxText
    te_runtime.prefer_pip_cudnn(os.environ)  # before anything imports Transformer Engine
  from maxtext_moe_te.host import seams  # imports MaxText and jax, so not before it is asked for

  return seams.activate(overlay=overlay, options=options)


def run(module: str, words: list[str]) -> None:
  """Runs a MaxText module as `python -m` would, with the plugin active.

  Args:
    module: the module's full name.
    words: MaxText's arguments and, among them, ours.

  Raises:
    MoeTeError: anything that can be explained in one line.
  """
  rest, overlay, options = settle(words)
  _check_module(module)
  for line in entries.lines_at_start(module, options):
    logging.getLogger("maxtext_moe_te").info(line)
  from maxtext_moe_te.host import watchdog

  if rank := Rank.of_this_process():
    if entries.has_train_loop(module):
      watchdog.watch(Limits.of_this_process(), rank.rank)
    join(rank)
  activate(overlay=overlay, options=options)
  sys.argv = [module, *rest]
  try:
    runpy.run_module(module, run_name="__main__", alter_sys=True)
  except SystemExit as end:
    if end.code:
      raise
  finally:
    watchdog.stop()
  from maxtext_moe_te.moe.transport import nccl_ep

  nccl_ep.finalize()  # left to the interpreter's exit, its communicator keeps the process from ending


def join(rank: Rank) -> None:
  """Joins JAX's distributed system as this rank. Before MaxText does; it then finds that done."""
  # A rank must not outlive the process that watches it, whatever ends that.
  ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
  import jax

  alone = rank.coordinator.startswith("127.0.0.1:")
  jax.distributed.initialize(
    rank.coordinator,
    num_processes=rank.ranks,
    process_id=rank.rank,
    local_device_ids=[rank.device],
    cluster_detection_method="deactivate",
    coordinator_bind_address=rank.coordinator if alone else None,
  )


def status_of(call: Callable[[], int | None]) -> int:
  """Runs one command and shows what stops it.

  Args:
    call: the command; it returns its exit status, or None for 0.

  Returns:
    int: that; 2 for an error explained in one line; 130 when interrupted.
  """
  try:
    with in_one_line():
      return call() or 0
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


def _ours(error):
  """The error of ours behind an exception: itself, or what a host's `raise … from` names as its cause."""
  while error is not None and not isinstance(error, MoeTeError):
    error = error.__cause__
  return error


def _others_wait() -> bool:
  """Whether a failed process would not end: JAX's exit waits for the other ranks, an NCCL EP communicator for what they send."""
  jax, nccl_ep = sys.modules.get("jax"), sys.modules.get("maxtext_moe_te.moe.transport.nccl_ep")
  distributed = jax is not None and hasattr(jax, "distributed") and jax.distributed.is_initialized()
  return distributed or (nccl_ep is not None and nccl_ep.bootstrapped() is not None)


def _leave(status: int) -> int:
  """`status`; but a failed rank of a distributed run ends here."""
  if _others_wait():
    if saving := sys.modules.get("maxtext_moe_te.host.saving"):
      saving.wait()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
  return status


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
  if module.partition(".")[0] == source.PACKAGE:
    source.root()
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
    known = entries.KNOWN_MODULES
    last = {name.rpartition(".")[2]: name for name in reversed(known)}  # where names end alike, the first of the table
    near = nearest(module, known) or last.get(nearest(module.rpartition(".")[2], last), entries.TRAIN)
    raise OptionError(found=f"there is no module {module}", needed="a MaxText entry point by its full name", fix=f"write {near}")
