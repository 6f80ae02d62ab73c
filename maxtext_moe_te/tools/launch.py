"""`maxtext-moe-te launch`: the processes of one host's share of a distributed run, one per GPU.

Owns starting them, their logs, who failed first, and stopping; what they do together is JAX's. Each process is one of JAX's
(`jax.distributed`), so a SIGTERM is its notice of preemption: the ranks agree on a step, and MaxText saves a checkpoint there
with `enable_autocheckpoint=true`.
"""

import argparse
import contextlib
import datetime
import math
import os
import queue
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from maxtext_moe_te.errors import MoeTeError, OptionError
from maxtext_moe_te.settings import limits as limits_of
from maxtext_moe_te.settings import rank as rank_of
from maxtext_moe_te.settings.limits import EXCEEDED, Limits
from maxtext_moe_te.settings.rank import Rank, is_address

ENTRY = (sys.executable, "-m", "maxtext_moe_te")
# Ranks left behind by one that failed: time to say so in their logs, and to end what they are writing.
AFTER_FAILURE_S = 10
POLL_S = 0.1
SHARED_GPU_MEMORY = 0.7  # of a GPU, divided among its ranks; the rest is NCCL's and CUDA's, whose part grows with the ranks


def main(argv: list[str]) -> int:
  """Starts this host's ranks and waits for them.

  Args:
    argv: command line, without the word `launch`.

  Returns:
    int: 0; the status of the rank that failed first, 128 + signal number if one ended it; 128 + signal number when stopped.

  Raises:
    MoeTeError: bad arguments, or a folder for logs that cannot be written.
  """
  arguments = _parse(argv)
  if arguments.doctor:
    status = subprocess.run([*ENTRY, "doctor", *_job(arguments)], check=False).returncode
    if status:
      _say("doctor found what would stop this run; --no-doctor starts it all the same")
      return status
  with _signals() as received, contextlib.ExitStack() as stack:
    ranks = _start(arguments, stack)
    return _watch(ranks, received, arguments.grace)


def _job(arguments) -> list[str]:
  """What the doctor is to judge beside the machine; nothing where ranks share a GPU, which no job on a cluster does."""
  if arguments.ranks_per_gpu > 1:
    return []
  nproc = str(arguments.nproc)
  words = arguments.words[1:] if arguments.command == "run" else arguments.words  # without the module's name
  return ["--nodes", str(arguments.nnodes), "--gpus-per-node", nproc, "--processes-per-node", nproc, *words]


def _parse(argv):
  parser = argparse.ArgumentParser(
    prog="maxtext-moe-te launch",
    usage="maxtext-moe-te launch --nproc N [OPTION …] train|run …",
    description="Starts a distributed run's processes on this host, one per GPU, and watches them.",
    allow_abbrev=False,
  )
  parser.add_argument("--nproc", type=int, required=True, metavar="N", help="processes on this host")
  parser.add_argument("--nnodes", type=int, default=1, metavar="N", help="hosts, each with a launch of its own (%(default)s)")
  parser.add_argument("--node-rank", type=int, default=0, metavar="I", help="this host's number, from 0 (%(default)s)")
  parser.add_argument("--coordinator", metavar="HOST:PORT", help="on host 0, the same for all; not needed with one host")
  parser.add_argument(
    "--ranks-per-gpu", type=int, default=1, metavar="R", help="ranks that share a GPU: slow, to try several with few (%(default)s)"
  )
  parser.add_argument("--logs", type=Path, default=Path("logs"), metavar="DIR", help="folder of rank-NNNN.log (%(default)s)")
  parser.add_argument("--grace", type=float, default=120, metavar="S", help="seconds that stopped ranks get for a checkpoint (%(default)s)")
  parser.add_argument(
    "--first-step-limit", type=float, default=3600, metavar="S", help="end a run whose first step takes longer; 0 for never (%(default)s)"
  )
  parser.add_argument("--step-limit", type=float, default=1800, metavar="S", help="the same for later steps (%(default)s)")
  parser.add_argument("--no-doctor", dest="doctor", action="store_false", help="start without checking the machine first")
  parser.add_argument("command", choices=("train", "run"), help="as without launch")
  parser.add_argument("words", nargs=argparse.REMAINDER, help="its arguments")
  arguments = parser.parse_args(argv)
  for wrong, found, needed, fix in (
    (arguments.nproc < 1, f"--nproc {arguments.nproc}", "one process or more", "write --nproc with the number of GPUs of this host"),
    (arguments.nnodes < 1, f"--nnodes {arguments.nnodes}", "one host or more", "leave --nnodes out for one"),
    (
      not 0 <= arguments.node_rank < arguments.nnodes,
      f"--node-rank {arguments.node_rank} with --nnodes {arguments.nnodes}",
      "a number from 0 to the hosts less one",
      "give each host its own number",
    ),
    (
      arguments.ranks_per_gpu < 1 or arguments.nproc % max(arguments.ranks_per_gpu, 1),
      f"--ranks-per-gpu {arguments.ranks_per_gpu} with --nproc {arguments.nproc}",
      "as many ranks on every GPU",
      "make --nproc a multiple of --ranks-per-gpu",
    ),
    (
      arguments.nnodes > 1 and arguments.coordinator is None,
      f"--nnodes {arguments.nnodes} without --coordinator",
      "an address that all hosts reach",
      "add --coordinator HOST0:PORT",
    ),
    (
      arguments.coordinator is not None and not is_address(arguments.coordinator),
      f"--coordinator {arguments.coordinator}",
      "HOST:PORT",
      "write the name of host 0 and a free port of it",
    ),
    *(
      (
        not 0 <= seconds < math.inf,
        f"{option} {seconds:g}",
        "seconds, or 0 for no limit",
        f"write {option} {default}, or several times as long as a step takes",
      )
      for option, seconds, default in (
        ("--first-step-limit", arguments.first_step_limit, 3600),
        ("--step-limit", arguments.step_limit, 1800),
      )
    ),
    (
      not 0 <= arguments.grace < math.inf,
      f"--grace {arguments.grace:g}",
      "seconds, 0 or more",
      "write --grace 120, or as long as a checkpoint takes",
    ),
  ):
    if wrong:
      raise OptionError(found=found, needed=needed, fix=fix)
  return arguments


@contextlib.contextmanager
def _signals():
  """The signals that ask for a stop, in the order received; instead of what they do by default."""
  received = []
  handlers = {
    number: signal.signal(number, lambda number, _frame: received.append(number))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
  }
  try:
    yield received
  finally:
    for number, handler in handlers.items():
      signal.signal(number, handler)


@dataclass(frozen=True)
class _Started:
  rank: int
  process: subprocess.Popen
  log: Path
  log_start: int  # bytes that were in the log before


def _start(arguments, stack) -> list[_Started]:
  environment = dict(os.environ)
  if arguments.ranks_per_gpu > 1:
    environment.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    environment.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{SHARED_GPU_MEMORY / arguments.ranks_per_gpu:.3g}")
  coordinator = arguments.coordinator or f"127.0.0.1:{_free_port()}"
  command = [*ENTRY, arguments.command, *arguments.words]
  started = []
  stack.callback(lambda: _kill(started))
  for local in range(arguments.nproc):
    rank = arguments.node_rank * arguments.nproc + local
    place = Rank(coordinator, arguments.nnodes * arguments.nproc, rank, local // arguments.ranks_per_gpu)
    path = arguments.logs / f"rank-{rank:04d}.log"
    try:
      arguments.logs.mkdir(parents=True, exist_ok=True)
      log = stack.enter_context(path.open("ab"))
    except OSError as error:
      raise OptionError(
        found=f"{path} cannot be written: {error.strerror}", needed="a folder for the logs", fix="give another --logs"
      ) from error
    begins = log.tell()
    log.write(f"launch: {_now()} rank {rank} of {place.ranks} on {socket.gethostname()}: {shlex.join(command)}\n".encode())
    log.flush()
    limits = Limits(arguments.first_step_limit, arguments.step_limit, path.with_suffix(".stacks").absolute())
    told = {rank_of.VARIABLE: place.variable(), limits_of.VARIABLE: limits.variable()}
    # A process group of its own: Ctrl-C is for us, who stop all ranks in order.
    process = subprocess.Popen(
      command, env=environment | told, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
      process_group=0,
    )  # fmt: skip
    started.append(_Started(rank, process, path, begins))
  _say(f"ranks {started[0].rank} to {started[-1].rank} of {place.ranks} started; logs: {arguments.logs}/rank-*.log")
  return started


def _watch(ranks: list[_Started], received: list[int], grace_s: float) -> int:
  """Waits for all ranks, stops the others when one fails or a signal asks for it, and says how it ended."""
  ended = queue.SimpleQueue()
  for rank in ranks:
    threading.Thread(target=lambda rank=rank: (rank.process.wait(), ended.put(rank)), daemon=True).start()
  running, failed, deadline = {rank.rank for rank in ranks}, None, None
  shown = ranks[0].log.open("rb")
  shown.seek(ranks[0].log_start)
  with shown:
    while running:
      with contextlib.suppress(queue.Empty):
        rank = ended.get(timeout=POLL_S)
        running.discard(rank.rank)
        if rank.process.returncode and failed is None:
          failed = rank
          if running and not received:
            _say(f"rank {rank.rank} {_how(rank)}; stopping the other {len(running)} of this host")
          if rank.process.returncode == EXCEEDED:
            _send(ranks, running, signal.SIGUSR1)  # they write their stacks too
      _copy(shown)
      if deadline is None and (received or failed):
        wait_s = AFTER_FAILURE_S if failed else grace_s
        deadline = time.monotonic() + wait_s
        if not failed:
          _say(f"stopping: up to {wait_s:g} s for a checkpoint; once more to end at once")
        _send(ranks, running, signal.SIGTERM)
      if deadline is not None and (time.monotonic() > deadline or len(received) > 1):
        _send(ranks, running, signal.SIGKILL)
    _copy(shown)
  if received:
    _say("stopped; the same command resumes from the newest checkpoint, if there is one")
    return 128 + received[0]
  if failed is None:
    return 0
  status = failed.process.returncode
  for line in _last_lines(failed):
    print(f"  {line}", file=sys.stderr)
  _say(f"{_now()} the first to fail was rank {failed.rank}, which {_how(failed)}; its log: {failed.log}")
  return status if status > 0 else 128 - status


def _how(rank) -> str:
  status = rank.process.returncode
  return f"ended with status {status}" if status > 0 else f"was killed by {signal.Signals(-status).name}"


def _last_lines(rank, most: int = 10) -> list[str]:
  """The end of a rank's log; of an error that is explained in one line, that line."""
  with rank.log.open("rb") as log:
    log.seek(rank.log_start)
    lines = log.read().decode(errors="replace").splitlines()[1:]
  if rank.process.returncode == MoeTeError.exit_status:
    lines = [line for line in lines if line.startswith("maxtext-moe-te: error:")] or lines
    most = 1
  return lines[-most:]


def _copy(file) -> None:
  """Shows what rank 0 of this host has written since."""
  text = file.read()
  if text:
    with contextlib.suppress(BrokenPipeError):  # when nobody listens any more, the training goes on
      sys.stdout.buffer.write(text)
      sys.stdout.flush()


def _send(ranks, running, number) -> None:
  for rank in ranks:
    if rank.rank in running:
      rank.process.send_signal(number)


def _kill(ranks) -> None:
  """Ends what is left of the ranks' process groups: on an error of ours the ranks, else the workers of their input pipelines."""
  for rank in ranks:
    with contextlib.suppress(ProcessLookupError):
      os.killpg(rank.process.pid, signal.SIGKILL)
    rank.process.wait()


def _free_port() -> int:
  with socket.socket() as sock:
    sock.bind(("127.0.0.1", 0))
    return sock.getsockname()[1]


def _now() -> str:
  return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


def _say(line) -> None:
  with contextlib.suppress(BrokenPipeError):
    print(f"launch: {line}", file=sys.stderr, flush=True)
