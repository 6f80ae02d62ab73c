"""Checkpoints that are being written in the background, for a process that is about to end."""

import functools
import sys
import threading
import weakref

LIMIT_S = 120.0
_managers: list[weakref.ref] = []


def remembering(original):
  """`checkpointing.save_checkpoint`, whose manager may still be writing when the process fails."""

  @functools.wraps(original)
  def save_checkpoint(checkpoint_manager, *args, **kwargs):
    if all(known() is not checkpoint_manager for known in _managers):
      _managers.append(weakref.ref(checkpoint_manager))
    return original(checkpoint_manager, *args, **kwargs)

  return save_checkpoint


def wait(limit_s: float = LIMIT_S) -> bool:
  """Waits for what is being written, but no longer than `limit_s`: another rank that it takes may be gone.

  Returns:
    bool: whether all of it is written.
  """
  from maxtext.common import checkpointing

  for manager in filter(None, (known() for known in _managers)):
    writing = threading.Thread(target=lambda manager=manager: checkpointing.wait_until_finished(manager), daemon=True)
    writing.start()
    writing.join(0.5)
    if writing.is_alive():
      print(f"maxtext-moe-te: a checkpoint is being written; waiting up to {limit_s:g} s for it", file=sys.stderr, flush=True)
      writing.join(limit_s)
      if writing.is_alive():
        print("maxtext-moe-te: it was not written in time; the one before is the newest", file=sys.stderr, flush=True)
        return False
  return True
