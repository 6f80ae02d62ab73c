"""What a running job learns of its own routing: the smallest capacity factor that would have done, and a picture of the load."""

import collections
import functools
import io
import logging
import math

import jax
import numpy as np
from etils import epath

from maxtext_moe_te.errors import RefusedError
from maxtext_moe_te.host import metrics, overflow
from maxtext_moe_te.settings.config import MoeTeOptions

log = logging.getLogger("maxtext_moe_te")
STEPS = 100  # that advice is of
SOME = 0.02  # of them may run again: each then costs about as much as another step


class Advice:
  """Of the last `STEPS` steps, said once and again when it has changed."""

  def __init__(self):
    self._needed = collections.deque(maxlen=STEPS)
    self._steps = 0
    self._said = ""

  def add(self, needed: float) -> str:
    """What there is to say after a step that needed so many times the rows of balanced routing; "" for nothing."""
    self._needed.append(needed)
    self._steps += 1
    if self._steps % STEPS:
      return ""
    up = lambda factor: max(math.ceil(100 * factor) / 100, 1)
    needed = sorted(self._needed)
    every, most = up(needed[-1]), up(needed[-1 - int(SOME * STEPS)])
    more = sum(up(one) > most for one in needed)
    line = f"a rank was sent at most {every:g} times the rows of balanced routing: moe_te.capacity_factor={every:g} would have held them"
    if more:
      line += f", {most:g} in all but {more} steps"
    if line == self._said:
      return ""
    self._said = line
    return f"in the last {STEPS} steps {line}"


def advising(options: MoeTeOptions):
  """The factory of the seam on `MetricLogger.write_metrics`, to which a step's metrics come when the step has ended.

  Raises:
    RefusedError: a picture is asked for, and there is nothing to draw it with.
  """
  if options.load_map:
    try:
      import matplotlib  # noqa: F401
    except ImportError as error:
      raise RefusedError(
        found=f"moe_te.load_map={options.load_map} without matplotlib",
        needed="what draws the picture",
        fix="pip install 'maxtext-moe-te[plot]', or set moe_te.load_map=0",
      ) from error
  advice = Advice()

  def replace(original):
    @functools.wraps(original)
    def write_metrics(self, of_step, step, *args, **kwargs):
      scalars = (of_step or {}).get("scalar", {})
      if jax.process_index() == 0:
        if overflow.NEEDED in scalars and (line := advice.add(float(scalars[overflow.NEEDED]))):
          log.info(line)
        load = (of_step or {}).get(metrics.LOAD)
        if load is not None and options.load_map and step % options.load_map == 0:
          file = epath.Path(self.config.base_output_directory) / self.config.run_name / "moe_te_load" / f"step-{step:07d}.png"
          file.parent.mkdir(parents=True, exist_ok=True)
          file.write_bytes(picture(np.asarray(load), step))
      return original(self, of_step, step, *args, **kwargs)

    return write_metrics

  return replace


def picture(load: np.ndarray, step: int) -> bytes:
  """A PNG of the load of each layer's experts.

  Args:
    load: float32 [layers, E], rows over those of balanced routing.
    step: for the title.
  """
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.figure import Figure

  layers, experts = load.shape
  figure = Figure(figsize=(min(4 + experts / 12, 16), min(2.5 + layers / 8, 10)), layout="constrained")
  axes = figure.subplots()
  shown = axes.imshow(load, aspect="auto", cmap="RdBu_r", vmin=0, vmax=2, interpolation="nearest")
  axes.set(xlabel="expert", ylabel="MoE layer", title=f"step {step}: rows over balanced routing's, at most {load.max():.1f}")
  figure.colorbar(shown, extend="max")
  file = io.BytesIO()
  FigureCanvasAgg(figure).print_png(file)
  return file.getvalue()
