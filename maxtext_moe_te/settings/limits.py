"""How long a rank may take for a step, which `launch` tells each of its processes in a variable of their environment."""

import os
from dataclasses import dataclass
from pathlib import Path

from maxtext_moe_te.errors import OptionError

VARIABLE = "MAXTEXT_MOE_TE_LIMITS"
EXCEEDED = 75  # the exit status of a rank that exceeded one


@dataclass(frozen=True)
class Limits:
  """Seconds, 0 for none.

  Args:
    first_step_s: from the start to the end of the first step: restoring a checkpoint and compiling among it.
    step_s: of a later step, with evaluation or a checkpoint if there is one between two.
    stacks: the file for what the rank was doing.
  """

  first_step_s: float
  step_s: float
  stacks: Path

  def variable(self) -> str:
    """Its text for the environment."""
    return f"{self.first_step_s:g} {self.step_s:g} {self.stacks}"

  @classmethod
  def of_this_process(cls) -> "Limits | None":
    """What `launch` said in the environment, or None.

    Raises:
      OptionError: the variable holds something else.
    """
    text = os.environ.get(VARIABLE, "")
    if not text:
      return None
    try:
      first, later, file = text.split(" ", 2)
      return cls(float(first), float(later), Path(file))
    except ValueError as error:
      raise OptionError(found=f"{VARIABLE}={text}", needed="what launch sets for each of its ranks", fix=f"unset {VARIABLE}") from error
