"""A rank that hangs ends, and leaves what it was doing: a step of a distributed run that waits for another rank would wait for ever."""

import contextlib
import faulthandler
import functools
import os
import signal
import sys
import threading
import time

from maxtext_moe_te.errors import MoeTeError
from maxtext_moe_te.settings.limits import EXCEEDED, Limits

POLL_S = 1.0
# With a rank ends what others wait for: first they write their stacks too. Rank 0 ends last, and with it JAX's coordinator.
FOR_THE_OTHERS_S = 5.0


class Watchdog:
  """Watches this process's steps.

  Args:
    limits: how long they may take.
    rank: this process's.
    clock, wait: seconds, and waits some.
    end: ends the process with a status; from a thread, while the main one hangs.
  """

  def __init__(self, limits: Limits, rank: int, clock=time.monotonic, wait=time.sleep, end=os._exit):
    self._limits, self._rank, self._clock, self._wait, self._end = limits, rank, clock, wait, end
    self._step: int | None = None  # the last one that was issued, after the one before it had ended
    self._since = clock()
    self._stopped = threading.Event()
    limits.stacks.parent.mkdir(parents=True, exist_ok=True)
    self._file = limits.stacks.open("a")  # open from the start: a process that hangs may not be able to
    # In C: a handler of Python's would wait for the main thread.
    faulthandler.register(signal.SIGUSR1, file=self._file, all_threads=True, chain=False)

  def start(self) -> None:
    threading.Thread(target=self._watch, name="moe_te watchdog", daemon=True).start()

  def stop(self) -> None:
    """No more steps are expected."""
    if self._stopped.is_set():
      return
    self._stopped.set()
    faulthandler.unregister(signal.SIGUSR1)
    self._file.close()
    with contextlib.suppress(FileNotFoundError):
      if not self._limits.stacks.stat().st_size:
        self._limits.stacks.unlink()

  def beat(self, step: int) -> None:
    """A step was issued."""
    self._step, self._since = step, self._clock()

  def overdue(self) -> str:
    """What exceeded its limit, or ""."""
    first = self._step is None
    limit, took = self._limits.first_step_s if first else self._limits.step_s, self._clock() - self._since
    if not limit or took <= limit:
      return ""
    what = "no step had been issued" if first else f"after step {self._step} was issued, no other had been"
    return f"rank {self._rank}: {what} for {took:.0f} s (limit {limit:g} s)"

  def expire(self, found: str) -> None:
    """Writes the stacks of all threads, says why, and ends the process."""
    self._file.write(f"{found}\n")
    self._file.flush()
    faulthandler.dump_traceback(file=self._file, all_threads=True)
    self._file.flush()
    option = "--first-step-limit" if self._step is None else "--step-limit"
    error = MoeTeError(
      found=found,
      needed="a step in time, or a longer limit",
      fix=f"see where the ranks wait in {self._limits.stacks.parent}/*.stacks, or, if steps are only slow, launch with a larger {option}",
    )
    print("maxtext-moe-te: error:", error, file=sys.stderr, flush=True)
    self._wait(FOR_THE_OTHERS_S * (2 if self._rank == 0 else 1))
    self._end(EXCEEDED)

  def _watch(self):
    while not self._stopped.wait(POLL_S):
      if found := self.overdue():
        self.expire(found)
        return


_current: Watchdog | None = None


def watch(limits: Limits | None, rank: int) -> None:
  """Starts a watchdog for this process if there are limits."""
  global _current
  if limits is not None and (limits.first_step_s or limits.step_s):
    _current = Watchdog(limits, rank)
    _current.start()


def stop() -> None:
  """Ends it."""
  global _current
  if _current is not None:
    _current.stop()
    _current = None


def beating(original):
  """`MetricLogger.buffer_and_write_metrics`, which MaxText's loops call after each step, once the one before has ended."""

  @functools.wraps(original)
  def buffer_and_write_metrics(self, metrics, step, *args, **kwargs):
    result = original(self, metrics, step, *args, **kwargs)
    if _current is not None:
      _current.beat(int(step))
    return result

  return buffer_and_write_metrics
