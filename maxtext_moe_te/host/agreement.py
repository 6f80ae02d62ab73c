"""One verdict for all processes of a run: what one of them cannot do, none does, and the line that says so names the node.

Verdicts travel through the key-value store of JAX's coordinator, which every process of a run is connected to: no device, no
backend and no collective is needed, and a process that does not answer is named instead of waited for. All processes must ask the
same questions in the same order.
"""

import collections
import json
import socket
import time
from collections.abc import Callable
from typing import NamedTuple

from jax._src import distributed

from maxtext_moe_te import errors
from maxtext_moe_te.errors import MoeTeError, RefusedError

TIMEOUT_S = 300  # as long as JAX waits for processes to start; they reach a question as far apart as their disks are fast

_asked = collections.Counter()
_hosts: dict[int, str] = {}


class Verdict(NamedTuple):
  """Attributes: process: its index. host: its node's name. reason: what it has against the topic, or ""."""

  process: int
  host: str
  reason: str


def agree(reason: str, topic: str, *, timeout_s: float = TIMEOUT_S) -> list[Verdict]:
  """Tells all processes of the run what this one has against something, and waits for what they have.

  Args:
    reason: any text; "" for nothing.
    topic: what is asked, in a few words, the same in all processes.
    timeout_s: how long to wait for the last of them.

  Returns:
    list: the verdict of each process, in order; one in a run of one process, which exchanges nothing.

  Raises:
    RefusedError: a process gave none.
  """
  state, own = distributed.global_state, socket.gethostname()
  if state.client is None or state.num_processes == 1:
    return [Verdict(0, own, reason)]
  folder = f"maxtext_moe_te/{topic}/{_asked[topic]}"
  _asked[topic] += 1
  state.client.key_value_set(f"{folder}/{state.process_id}", json.dumps([own, reason]))
  end, verdicts = time.monotonic() + timeout_s, []
  for process in range(state.num_processes):
    left_ms = max(int((end - time.monotonic()) * 1000), 1)
    try:
      host, text = json.loads(state.client.blocking_key_value_get(f"{folder}/{process}", left_ms))
    except RuntimeError as error:  # of jaxlib: the time is up, or the coordinator is gone
      where = f" on {_hosts[process]}" if process in _hosts else ""
      raise RefusedError(
        found=f"process {process}{where} of {state.num_processes} has not said within {timeout_s:g} s whether it can use {topic}",
        needed="all processes of the run, of one configuration",
        fix=f"look at the end of the log of process {process}",
      ) from error
    _hosts[process] = host
    verdicts.append(Verdict(process, host, text))
  return verdicts


def together(check: Callable[[], object], topic: str, *, timeout_s: float = TIMEOUT_S) -> MoeTeError | None:
  """Runs a check in every process, and gives all of them the first error that any of them got.

  Args:
    check: raises a `MoeTeError` where something is missing.
    topic, timeout_s: see `agree`.

  Returns:
    MoeTeError: of the same class and text everywhere; its `found` names the node where there are several processes. None if all passed.

  Raises:
    RefusedError: a process gave no verdict.
  """
  error = None
  try:
    check()
  except MoeTeError as caught:
    error = caught
  verdicts = agree(json.dumps([type(error).__name__, error.fields]) if error else "", topic, timeout_s=timeout_s)
  failed = [verdict for verdict in verdicts if verdict.reason]
  if not failed or len(verdicts) == 1:
    return error
  kind, fields = json.loads(failed[0].reason)
  others = f", and {len(failed) - 1} more of {len(verdicts)} processes refuse" if len(failed) > 1 else ""
  fields["found"] = f"{fields['found']} on {failed[0].host} (process {failed[0].process}{others})"
  return getattr(errors, kind)(**fields)
