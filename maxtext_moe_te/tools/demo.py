"""`maxtext-moe-te demo`: a small DeepSeek-V3-style model learns real text, on a machine with no GPU.

Owns the text, the training command and the report on it. The model and its training settings are `configs/demo.yml`;
training is the product's own command in a process of its own, so that the demo shows what a user would run.

The text is CPython's reference documentation as every CPython carries it (`pydoc_data.topics`, about half a megabyte of
English, PSF licence). Everything the demo writes lies in one folder: text, checkpoints, metrics, log and picture.
"""

import argparse
import contextlib
import fcntl
import functools
import json
import math
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from pathlib import Path

from maxtext_moe_te.errors import MoeTeError, OptionError, VersionError
from maxtext_moe_te.host import source
from maxtext_moe_te.settings import overlay

RUN_NAME = "demo"
TOKENIZER = "tokenizer.llama2"  # MaxText ships it; 32,000 ids, the fewest of those it ships
WARM_UP_STEPS = 5  # left out of the speed: MaxText times the hand-over of a step, and the first ones do not wait for results
ENDS = 10  # steps averaged for the loss at the end
STOP_SECONDS = 30  # for a stopped training to finish writing a checkpoint
OWN_KEYS = (
  "steps",
  "tokenizer_path",
  "grain_train_files",
  "run_name",
  "base_output_directory",
  "metrics_file",
  "jax_cache_dir",
)
# MaxText's own layer, computing every expert for every token: exact and dropless, and on a CPU faster than its sparse path.
PLAIN = ("moe_te.enabled=false", "sparse_matmul=false", "capacity_factor=-1")


def main(argv: list[str]) -> int:
  """Runs the demo.

  Args:
    argv: command line, without the word `demo`.

  Returns:
    int: 0, 128 + signal number when stopped (130 on Ctrl-C), or the training's exit status.

  Raises:
    MoeTeError: bad arguments, or an output folder that cannot be used.
  """
  arguments = _parse(argv)
  say = functools.partial(_say, sys.stderr if arguments.json else sys.stdout)
  steps = arguments.steps or overlay.load("demo").maxtext["steps"]
  words = [*(PLAIN if arguments.plain else ()), *arguments.word]
  folder = Folder(arguments.output)
  try:
    with folder.open(configuration(steps, words), fresh=arguments.fresh):
      entropy = write_text(folder.text, say)
      status = 0
      if folder.checkpoint() == steps - 1:
        say(f"{folder.root} holds this demo, finished after {steps} steps. `--fresh` starts over.")
      else:
        status = train(folder, training_command(folder, steps, words), say)
      if status == 0:
        report(folder, entropy, say, as_json=arguments.json)
      return status
  except KeyboardInterrupt:
    say("stopped; the same command resumes")
    return 128 + signal.SIGINT


def _say(stream, line):
  with contextlib.suppress(BrokenPipeError):  # when nobody listens any more, the training goes on
    print(line, file=stream, flush=True)


def _parse(argv):
  parser = argparse.ArgumentParser(
    prog="maxtext-moe-te demo",
    description="Trains a small DeepSeek-V3-style model on CPython's reference documentation, on the CPU. "
    "Ctrl-C stops it, the same command resumes it.",
  )
  parser.add_argument("--steps", type=int, metavar="N", help="training steps (default: the overlay's)")
  parser.add_argument("--output", type=Path, default=Path("demo_output"), metavar="DIR", help="folder for all it writes (%(default)s)")
  parser.add_argument("--fresh", action="store_true", help="delete an earlier demo in that folder first")
  parser.add_argument("--plain", action="store_true", help="MaxText's own MoE layer instead of the plugin's, for comparison")
  parser.add_argument("--json", action="store_true", help="print the summary as JSON; progress goes to stderr")
  parser.add_argument("word", nargs="*", metavar="KEY=VALUE", help="more words for the training command, like moe_te.experts=reference")
  arguments = parser.parse_intermixed_args(argv)
  if arguments.steps is not None and arguments.steps <= 0:
    raise OptionError(found=f"--steps {arguments.steps}", needed="a positive number of steps", fix="write --steps 1 or more")
  for word in arguments.word:
    key, equals, _ = word.partition("=")
    if not equals:
      raise OptionError(found=f"the word {word!r}", needed="KEY=VALUE", fix="correct or remove it")
    if key in OWN_KEYS:
      raise OptionError(
        found=f"the word {word}",
        needed="a key that the demo does not set itself",
        fix="write --steps N" if key == "steps" else "remove it; --output DIR says where everything lies",
      )
  return arguments


def configuration(steps: int, words: list[str]) -> dict:
  """What must be the same for a run to be resumed."""
  settings = overlay.load("demo")
  return {
    "steps": steps,
    "words": words,
    "overlay": {"maxtext": settings.maxtext, "moe_te": settings.moe_te},
    "maxtext": source.version(),
  }


class Folder:
  """The demo's output folder: where things lie in it, and whether it may be used.

  Args:
    root: the folder; need not exist.
  """

  def __init__(self, root: Path):
    self.root = root.expanduser().absolute()
    self.configuration = self.root / "demo.json"
    self.lock = self.root / "lock"
    self.text = self.root / "text.array_record"
    self.metrics = self.root / "metrics.jsonl"
    self.log = self.root / "train.log"
    self.picture = self.root / "demo.png"
    self.run = self.root / RUN_NAME  # MaxText's: base_output_directory/run_name

  @contextlib.contextmanager
  def open(self, wanted: dict, *, fresh: bool) -> Iterator[None]:
    """Creates the folder, or checks that it holds a run of the same configuration, and keeps other demos out of it.

    Args:
      wanted: this run's configuration.
      fresh: delete an earlier demo's files first, as is done with one that has no checkpoint; no other file is ever deleted.

    Raises:
      OptionError: the folder cannot be written, holds other things, holds another run, or is in use.
    """
    self._check_path()
    with contextlib.ExitStack() as stack:
      try:
        self._prepare(stack, wanted, fresh)
      except OSError as error:
        raise OptionError(
          found=f"{self.root} cannot be used: {error.strerror or error}",
          needed="a folder that can be written",
          fix="give another --output",
        ) from error
      yield

  def _prepare(self, stack, wanted, fresh):
    self.root.mkdir(parents=True, exist_ok=True)
    if not self.configuration.exists() and any(path != self.lock for path in self.root.iterdir()):
      raise OptionError(found=f"{self.root} holds files that no demo wrote", needed="an empty or a new folder", fix="give another --output")
    lock = stack.enter_context(self.lock.open("w"))
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      raise OptionError(
        found=f"another demo is running in {self.root}", needed="one at a time", fix="wait for it, or give another --output"
      ) from None
    self.lock_descriptor = lock.fileno()
    if fresh:
      self._clear()
    if self.configuration.exists():
      try:
        self._compare(wanted)
        return
      except OptionError:
        if self.checkpoint() is not None:
          raise
        self._clear()  # stopped before its first checkpoint, or refused: there is nothing to resume
    self.configuration.write_text(json.dumps(wanted, indent=2) + "\n")

  def _check_path(self):
    special = sorted(set(str(self.root)) & set("*?[]{};,'\"$#\\\n"))
    if special:
      raise OptionError(
        found=f"{' '.join(special)} in the path {self.root}",
        needed="a path without characters that mean something to MaxText",
        fix="give another --output",
      )

  def _clear(self):
    shutil.rmtree(self.run, ignore_errors=True)
    shutil.rmtree(self.root / "jax_cache", ignore_errors=True)
    # The configuration last: it is what says that a demo wrote the others.
    for path in (self.text, self.metrics, self.log, self.picture, self.configuration):
      path.unlink(missing_ok=True)

  def _compare(self, wanted):
    try:
      found = json.loads(self.configuration.read_text())
    except ValueError:  # cut off by an interruption
      found = {}
    for key, value in wanted.items():
      if found.get(key) != value:
        other = "another configs/demo.yml" if key == "overlay" else f"{key} {found.get(key)}, this one has {value}"
        raise OptionError(
          found=f"{self.root} holds a demo with {other}",
          needed="the same configuration, to resume it",
          fix="add --fresh to start over, or give another --output",
        )

  def checkpoint(self) -> int | None:
    """The step of the newest complete checkpoint, or None."""
    names = [path.name for path in (self.run / "checkpoints").glob("*")]
    return max((int(name) for name in names if name.isdigit()), default=None)

  def steps(self) -> list[dict]:
    """The metrics of each step in order, {"step": …, name: value}.

    A step that was trained again after an interruption appears once, as it was the last time.
    """
    rows = {}
    if self.metrics.exists():
      for line in self.metrics.read_text().splitlines():
        with contextlib.suppress(ValueError):  # a line cut off by an interruption
          row = json.loads(line)
          rows[int(row["step"])] = row
    return [rows[step] for step in sorted(rows)]


def documents(characters: int = 1000) -> Iterator[str]:
  """CPython's reference documentation, each topic cut at blank lines into pieces of about this size.

  Pieces, because whole topics are up to fifty times as long as others and would fill a batch alone.
  """
  from pydoc_data.topics import topics

  for _, text in sorted(topics.items()):
    piece = ""
    for paragraph in text.strip().split("\n\n"):
      piece = f"{piece}\n\n{paragraph}" if piece else paragraph
      if len(piece) >= characters:
        yield piece
        piece = ""
    if piece:
      yield piece


def serialize_example(text: str) -> bytes:
  """`text` as the tf.train.Example with one bytes feature `text` that MaxText's grain pipeline reads, without TensorFlow."""

  def field(number, payload):
    length, varint = len(payload), bytearray()
    while length > 127:
      varint.append(length & 127 | 128)
      length >>= 7
    return bytes([number << 3 | 2, *varint, length]) + payload

  feature = field(1, field(1, text.encode()))  # Feature.bytes_list.value
  return field(1, field(1, field(1, b"text") + field(2, feature)))  # Example.features.feature["text"]


def write_text(path: Path, say) -> float:
  """Writes the text where grain can read it, unless it is there; returns its unigram entropy (nats per token)."""
  try:
    import sentencepiece
    from array_record.python.array_record_module import ArrayRecordWriter
  except ImportError as error:
    raise VersionError(
      found=f"{error.name} is not installed",
      needed="what MaxText's input pipeline needs",
      fix="pip install 'maxtext-moe-te[cpu]'",
    ) from error
  texts = list(documents())
  if not path.exists():
    partial = path.with_suffix(".partial")
    writer = ArrayRecordWriter(str(partial), "group_size:1")
    for text in texts:
      writer.write(serialize_example(text))
    writer.close()
    partial.rename(path)
  model = sentencepiece.SentencePieceProcessor(str(tokenizer_path()))
  tokens = [[model.bos_id(), *model.encode(text), model.eos_id()] for text in texts]
  entropy = unigram_entropy(token for document in tokens for token in document)
  say(
    f"text: CPython's reference documentation (pydoc_data.topics, PSF licence), {sum(map(len, texts)):,} characters, "
    f"{sum(map(len, tokens)):,} tokens; unigram entropy {entropy:.3f} nats/token"
  )
  return entropy


def unigram_entropy(tokens: Iterable[int]) -> float:
  """Nats per token of the best model that looks at no context: what a loss must get under to have learned any."""
  counts = Counter(tokens)
  total = counts.total()
  return -sum(count / total * math.log(count / total) for count in counts.values())


def tokenizer_path() -> Path:
  """The tokenizer's file; MaxText resolves a bare name only in a source checkout."""
  return source.root() / "assets" / "tokenizers" / TOKENIZER


def training_command(folder: Folder, steps: int, words: list[str]) -> list[str]:
  """The product's own training command."""
  return [
    sys.executable, "-m", "maxtext_moe_te.train", str(source.root() / "configs" / "base.yml"), "overlay=demo", *words,
    f"steps={steps}", f"tokenizer_path={tokenizer_path()}", f"grain_train_files={folder.text}", f"run_name={RUN_NAME}",
    f"base_output_directory={folder.root}", f"metrics_file={folder.metrics}", f"jax_cache_dir={folder.root / 'jax_cache'}",
  ]  # fmt: skip


def train(folder: Folder, command: list[str], say) -> int:
  """Runs the training to its end, passing its progress through; everything it says goes to the log.

  The first SIGINT, SIGTERM or SIGHUP stops it, a second one at once.

  Returns:
    int: its exit status, or 128 + the signal's number.
  """
  signals, last = [], deque(maxlen=30)
  before = {
    number: signal.signal(number, lambda number, _frame: signals.append(number))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
  }
  try:
    resumed = folder.checkpoint()
    say(f"training: {shlex.join(command)}")
    beginning = "starts at step 0" if resumed is None else f"resumes after step {resumed}"
    say(f"{beginning}; imports and compilation come first ...")
    # A process group of its own: Ctrl-C is for us, who stop it in order. The lock goes along, so that a training that
    # outlives us keeps the folder.
    process = subprocess.Popen(
      command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
      process_group=0, pass_fds=[folder.lock_descriptor],
    )  # fmt: skip
    reader = threading.Thread(target=_follow, args=(process.stdout, folder.log, last, signals, say))
    reader.start()
    status = _wait(process, signals)
    reader.join()
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)
  if signals:
    rows, checkpoint = folder.steps(), folder.checkpoint()
    done = f"at step {rows[-1]['step']:.0f}" if rows else "before the first step"
    say(f"stopped {done}; the same command resumes" + ("" if checkpoint is None else f" after step {checkpoint}"))
    return 128 + signals[0]
  if status:
    for line in list(last)[-1:] if status == MoeTeError.exit_status else last:
      say(line)
    how = f"failed with status {status}" if status > 0 else f"was killed by signal {-status}"
    say(f"training {how}; its log: {folder.log}")
  return status if status >= 0 else 128 - status


def _wait(process, signals):
  """The status of a process that gets SIGINT at the first of `signals`, and is killed at the second or after some time."""
  deadline = None
  while True:
    with contextlib.suppress(subprocess.TimeoutExpired):
      return process.wait(timeout=0.2)
    if signals and deadline is None:
      process.send_signal(signal.SIGINT)
      deadline = time.monotonic() + STOP_SECONDS
    elif len(signals) > 1 or (deadline and time.monotonic() > deadline):
      process.kill()


def _follow(lines, log, last, signals, say):
  """Copies the training's output to the log and to `last`, and shows its progress until it is stopped."""
  with log.open("a", buffering=1) as file:
    for line in lines:
      file.write(line)
      last.append(line.rstrip())
      _, progress, rest = line.rstrip().partition("completed step:")
      if progress and not signals:
        say(progress + rest)


def report(folder: Folder, entropy: float, say, *, as_json: bool) -> None:
  """Prints the summary and draws the picture."""
  rows = folder.steps()
  if not rows:
    raise OptionError(found=f"no metrics in {folder.metrics}", needed="those that the training wrote", fix="start over with --fresh")
  summary = summarize(rows, entropy)
  summary["checkpoint"] = str(folder.run / "checkpoints" / str(folder.checkpoint()))
  try:
    draw(rows, entropy, folder.picture)
    summary["picture"] = str(folder.picture)
  except ImportError:
    summary["picture"] = None
  if as_json:
    print(json.dumps(summary, indent=2))
    return
  start, end, learned = summary["loss_start"], summary["loss_end"], summary["learned"]
  say(f"loss         {start:.3f} -> {end:.3f} nats/token (mean of the last {summary['loss_end_steps']} steps)")
  say(f"entropy      {entropy:.3f} nats/token is the best without context; the loss is {'' if learned else 'NOT '}below it")
  speed = summary["tokens_per_s"]
  say(f"speed        {speed:,.0f} tokens/s (median)" if speed else f"speed        not measured in {len(rows)} steps")
  if "overflow" in summary:
    most, mean, lost = summary["rows_per_expert_max"], summary["rows_per_expert_mean"], summary["overflow"]
    say(f"rows/expert  at most {most:.0f}, mean {mean:.0f}, in the last step")
    say(f"overflow     {lost:.0f} rows in {len(rows)} steps" + ("" if lost else ": no token was dropped"))
  say(f"checkpoint   {summary['checkpoint']}")
  say(f"picture      {summary['picture'] or 'not drawn: pip install matplotlib'}")


def summarize(rows: list[dict], entropy: float) -> dict:
  """The figures of a run.

  Args:
    rows: metrics of each step, at least one.
    entropy: unigram entropy of the text, nats per token.

  Returns:
    dict: losses in nats per token; speed in tokens per second, None if too few steps; rows per expert of the last step, over
    all layers.
  """
  losses = [row["learning/loss"] for row in rows]
  ends = losses[-min(ENDS, max(len(losses) // 2, 1)) :]
  speeds = [row["perf/per_device_tokens_per_sec"] for row in rows]
  last = rows[-1]
  summary = {
    "steps": len(rows),
    "loss_start": losses[0],
    "loss_end": statistics.fmean(ends),
    "loss_end_steps": len(ends),
    "unigram_entropy": entropy,
    "learned": statistics.fmean(ends) < entropy,
    "tokens_per_s": statistics.median(speeds[WARM_UP_STEPS:]) if len(speeds) > WARM_UP_STEPS else None,
  }
  if "moe_te/overflow" in last:
    for name in ("rows_per_expert_max", "rows_per_expert_mean"):
      summary[name] = max(value for key, value in last.items() if key.startswith(f"moe_te/{name}/"))
    summary["load_max_over_mean"] = last["moe_te/load_max_over_mean"]
    summary["overflow"] = sum(row["moe_te/overflow"] for row in rows)
  return summary


def draw(rows: list[dict], entropy: float, path: Path) -> None:
  """Draws the loss and the load of each expert over steps.

  Raises:
    ImportError: matplotlib is missing.
  """
  import matplotlib

  matplotlib.use("Agg")
  from matplotlib import pyplot

  experts = sorted(key for key in rows[-1] if key.startswith("moe_te/load/"))
  step = [row["step"] for row in rows]
  columns = 2 if experts else 1
  figure, axes = pyplot.subplots(1, columns, figsize=(5.5 * columns, 4), layout="constrained", squeeze=False)
  loss = axes[0, 0]
  loss.plot(step, [row["learning/loss"] for row in rows])
  loss.axhline(entropy, color="tab:red", linestyle="--", label="unigram entropy of the text")
  loss.set(xlabel="step", ylabel="loss (nats/token)", title="loss")
  loss.legend()
  if experts:
    load = axes[0, 1]
    for expert in experts:
      load.plot(step, [100 * row[expert] for row in rows], linewidth=0.8)
    load.axhline(100 / len(experts), color="black", linestyle="--", label="even load")
    load.set(xlabel="step", ylabel="share of all rows (%)", title=f"load of each of {len(experts)} experts")
    load.legend()
  figure.savefig(path, dpi=120)
  pyplot.close(figure)
