"""What `launch` tells each of its processes, in a variable of their environment: its place in the distributed run."""

import os
from dataclasses import dataclass

from maxtext_moe_te.errors import OptionError

VARIABLE = "MAXTEXT_MOE_TE_RANK"


@dataclass(frozen=True)
class Rank:
  """One process of a distributed run.

  Args:
    coordinator: HOST:PORT of JAX's coordination service, which rank 0 runs.
    ranks: processes in the run.
    rank: this one's number.
    device: index of its GPU among those visible; nothing on a machine without GPUs.
  """

  coordinator: str
  ranks: int
  rank: int
  device: int

  def variable(self) -> str:
    """Its text for the environment."""
    return f"{self.coordinator} {self.ranks} {self.rank} {self.device}"

  @classmethod
  def of_this_process(cls) -> "Rank | None":
    """What `launch` said in the environment, or None.

    Raises:
      OptionError: the variable holds something else.
    """
    text = os.environ.get(VARIABLE, "")
    if not text:
      return None
    words = text.split()
    if len(words) != 4 or not is_address(words[0]) or not all(map(str.isdecimal, words[1:])) or int(words[2]) >= int(words[1]):
      raise OptionError(found=f"{VARIABLE}={text}", needed="what launch sets for each of its ranks", fix=f"unset {VARIABLE}")
    return cls(words[0], *map(int, words[1:]))


def is_address(text: str) -> bool:
  """Whether it is HOST:PORT."""
  host, _, port = text.rpartition(":")
  return bool(host) and port.isdecimal() and 0 < int(port) < 2**16
