"""XLA_FLAGS: read as XLA reads them, merge, and check against the installed jaxlib and CUDA plugin.

XLA answers a flag it does not like by ending the process without a Python exception, and stops reading at the first word that is
not a flag. What it would do is found out here first, without starting a backend. Flags known by name, and the named sets of them,
are data: xla_flags.toml.
"""

import functools
import importlib.metadata
import importlib.util
import mmap
import os
import re
import struct
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from packaging.version import Version

from maxtext_moe_te.errors import OptionError, OverlayError, RefusedError, nearest

Scalar = bool | int | float | str

MULTI_STREAMING = "xla_gpu_experimental_enable_collective_multi_streaming"
OVERLAP_LIMIT = "xla_gpu_experimental_parallel_collective_overlap_limit"
DOMAINS = "xla_gpu_collective_domain_assignment"
SCHEDULER = "xla_gpu_enable_latency_hiding_scheduler"

_INTEGERS = {"int32": 2**31, "int64": 2**63}
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


@dataclass(frozen=True, kw_only=True)
class Flag:
  """What is known of one flag; the fields are explained in xla_flags.toml."""

  type: str
  meaning: str
  source: str
  since: str = ""
  until: str = ""
  hazard: str = ""
  members: Mapping[str, str] = field(default_factory=dict)
  hazardous: tuple[str, ...] = ()
  minimum: int | None = None


@dataclass(frozen=True, kw_only=True)
class Finding:
  """Something wrong with the flags or the environment, in the words of `errors.MoeTeError`.

  Args:
    fatal: the run would end, or would run with other flags than it was given; if false it is only worth a line.
  """

  found: str
  needed: str
  fix: str
  fatal: bool = True

  def __str__(self):
    return f"{self.found}; needed: {self.needed}. Fix: {self.fix}."


@dataclass(frozen=True, kw_only=True)
class Names:
  """The flag names that each installed library knows.

  Args:
    libraries: "jaxlib 0.12.0.1" and the like, to names. Each of them parses XLA_FLAGS for itself.
    version: of jaxlib.
  """

  libraries: Mapping[str, frozenset[str]]
  version: str

  def lacking(self, flag: str) -> str | None:
    """The first library that does not know a flag, or None."""
    return next((library for library, names in self.libraries.items() if flag not in names), None)


@functools.cache
def _data():
  return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


@functools.cache
def catalogue() -> dict[str, Flag]:
  """The flags known by name."""
  return {name: Flag(**fields) for name, fields in _data()["flags"].items()}


def profiles() -> dict[str, dict[str, Scalar]]:
  """Named sets of flags."""
  return {name: profile["flags"] for name, profile in _data()["profiles"].items()}


def profile(names: str | Iterable[str], source: str = "moe_te.xla_profile") -> dict[str, Scalar]:
  """The flags of some profiles, joined: of a list, or of text with commas.

  Raises:
    OptionError: there is no such profile, or two of them contradict each other.
  """
  known, flags, owner = profiles(), {}, {}
  for name in filter(None, map(str.strip, names.split(","))) if isinstance(names, str) else names:
    if name not in known:
      raise OptionError(
        found=f"{source} names the profile {name}",
        needed=f"names among {', '.join(known)}, joined by commas",
        fix=f"write {nearest(name, known) or next(iter(known))}",
      )
    for flag, value in known[name].items():
      if flags.setdefault(flag, value) != value:
        raise OptionError(
          found=f"{source} names {owner[flag]}, which sets {flag}={as_text(flags[flag])}, and {name}, which sets {as_text(value)}",
          needed="profiles that do not contradict each other",
          fix=f"remove {owner[flag]} or {name}",
        )
      owner.setdefault(flag, name)
  return flags


def check_profile_is_set(names: Iterable[str], environ: Mapping[str, str]) -> None:
  """Holds a caller of `activate` to what only the command line does by itself.

  Raises:
    RefusedError: flags of the profile are not in XLA_FLAGS.
  """
  missing = profile(names).keys() - dict(parse(environ.get("XLA_FLAGS", ""))).keys()
  if missing:
    raise RefusedError(
      found=f"moe_te.xla_profile={','.join(names)} and XLA_FLAGS without {min(missing)}: XLA reads flags once, at its first backend",
      needed="the flags in place before jax starts",
      fix="start the run with maxtext-moe-te train, or call settings.overlay.apply_environment before importing jax",
    )


# Text


def read(text: str) -> tuple[list[tuple[str, str | None]], str]:
  """The flags of an XLA_FLAGS text as XLA reads it.

  Returns:
    tuple: names without dashes and values in order, the value of a bare `--flag` being None; and the part XLA does not read,
    which begins at the first word that is no flag.
  """
  flags, rest = [], text.strip()
  while rest.startswith("-"):
    quoted = re.match(r"""(-[-\w]*)=(["'])((?:\\.|(?!\2).)*)\2?""", rest, re.ASCII | re.DOTALL)
    if quoted:
      word, value = quoted[1], re.sub(r"\\(.)", r"\1", quoted[3])
      rest = rest[quoted.end() :]
    else:
      whole = re.match(r"\S+", rest)[0]
      word, equals, value = whole.partition("=")
      value = value if equals else None
      rest = rest[len(whole) :]
    flags.append((word.removeprefix("--"), value))
    rest = rest.lstrip()
  return flags, rest


def parse(text: str) -> list[tuple[str, str | None]]:
  """The flags that XLA takes from a text; see `read`."""
  return read(text)[0]


def repair(text: str) -> tuple[str, list[str]]:
  """Mends what has only one reading: `--flag false` and `--list=A, B`.

  Returns:
    tuple[str, list[str]]: the text, word for word where nothing was mended, and one line for each change.
  """
  lines = []
  while rest := read(text)[1]:
    head, word, tail = text[: len(text.rstrip()) - len(rest)].rstrip(), *_first_word(rest)
    last = head.rsplit(maxsplit=1)[-1] if head else ""
    if re.fullmatch(r"--\w+", last) and re.fullmatch(r"(?i)true|false|[-+]?\d+", word):
      joint = "="
    elif re.fullmatch(r"--\w+=[\w,+]*,", last) and re.fullmatch(r"[\w,+]+", word):
      joint = ""
    else:
      break
    lines.append(f"XLA_FLAGS: '{last} {word}' read as {last}{joint}{word} (XLA stops reading at a space that no flag follows)")
    text = f"{head}{joint}{word} {tail}".strip()
  return text, lines


def _first_word(text):
  word = text.split(maxsplit=1)[0]
  return word, text[len(word) :].strip()


def format_flags(flags: Mapping[str, Scalar]) -> str:
  """Flags as XLA_FLAGS text; booleans become true and false."""
  return " ".join(f"--{name}={as_text(value)}" for name, value in flags.items())


def merge(flags: Mapping[str, Scalar], user: str, source: str = "the overlay") -> tuple[str, list[str]]:
  """Puts flags before those the user has set, leaving out each one that the user sets himself.

  Args:
    flags: flag names without dashes, and values.
    user: the user's own XLA_FLAGS, kept word for word.
    source: whose flags they are, for the report.

  Returns:
    tuple[str, list[str]]: the merged text, and one report line per flag left out whose value differs.

  Raises:
    OverlayError: XLA_FLAGS names a file, so nothing can be added to it.
  """
  user = user.strip()
  if flags and user and not user.startswith("-"):
    raise OverlayError(
      found=f"XLA_FLAGS={user} names a file of flags and {source} sets flags of its own",
      needed="flags in XLA_FLAGS itself, each starting with --",
      fix="put the flags of that file into XLA_FLAGS",
    )
  theirs = dict(parse(user)) if flags else {}
  added = {name: value for name, value in flags.items() if name not in theirs}
  lost = [
    f"xla flag {name}={as_text(value)} of {source} not used: XLA_FLAGS sets {theirs[name] or 'true'}"
    for name, value in flags.items()
    if name in theirs and (theirs[name] or "true") != as_text(value)
  ]
  return " ".join(filter(None, (format_flags(added), user))), lost


def as_text(value: Scalar) -> str:
  """A YAML scalar as the environment wants it."""
  return str(value).lower() if isinstance(value, bool) else str(value)


# What is installed


def installed_names() -> Names | None:
  """The flag names of the installed jaxlib and, where there is one, CUDA plugin; None without a jaxlib that has them.

  Every flag name is a string of its own in the library, so it is found between two NUL bytes; a name found only as part of a
  longer string is not a flag. Exact for `xla_gpu_` names in the jaxlib releases of tests/xla_flags.json; of the other `xla_`
  names each library holds some twenty that are no flags. Nothing is imported, no backend started.
  """
  common = next((folder / "libjax_common.so" for folder in _folders("jaxlib")), None)
  if common is None or not common.is_file():
    return None
  version = importlib.metadata.version("jaxlib")
  libraries = {f"jaxlib {version}": names_in(common)}
  for folder in _folders("jax_plugins"):
    for library in sorted(folder.glob("xla_cuda*/xla_cuda_plugin.so")):
      libraries[f"CUDA plugin {library.parent.name}"] = names_in(library)
  return Names(libraries=libraries, version=version)


def _folders(package):
  """Where a top-level package lies, found without importing it; a namespace package may lie in several places."""
  spec = importlib.util.find_spec(package)
  return [Path(folder) for folder in spec.submodule_search_locations or ()] if spec else []


@functools.cache
def names_in(library: str | os.PathLike) -> frozenset[str]:
  """The words `xla_…` that stand between NUL bytes among a shared library's constants."""
  with open(library, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
    start, end = _constants(data)
    return frozenset(name.decode() for name in re.findall(rb"(?<=\0)xla_[a-z0-9_]+(?=\0)", data[start:end]))


def _constants(data):
  """Where an ELF file's .rodata lies: about a fifteenth of the library, so that a cold start does not read the rest."""
  if data[:5] != b"\x7fELF\x02":
    return 0, len(data)
  table, size, count, names = struct.unpack_from("<Q", data, 40) + struct.unpack_from("<HHH", data, 58)
  sections = [struct.unpack_from("<IIQQQQ", data, table + size * i) for i in range(count)]
  for name, _, _, _, offset, length in sections:
    at = sections[names][4] + name
    if data[at : at + 8] == b".rodata\0":
      return offset, offset + length
  return 0, len(data)


# Checks


def check(flags: str | Iterable[tuple[str, str | None]], names: Names | None, environ: Mapping[str, str] | None = None) -> list[Finding]:
  """What is wrong with the flags that a run is about to start with.

  Args:
    flags: the XLA_FLAGS text, or its flags as `read` gives them.
    names: what the installed libraries know; None checks no names.
    environ: the rest of the environment, for the variables that the flags depend on; None leaves them out.

  Returns:
    list[Finding]: in the order of the flags; empty if all is well.
  """
  unread, pairs = "", flags
  if isinstance(flags, str):
    try:
      pairs, unread = read(_text(flags))
    except OSError:
      return [_no_file(flags.strip())]
  pairs = list(pairs)
  findings = []
  if unread:
    findings.append(
      Finding(
        found=f"{_first_word(unread)[0]!r} in XLA_FLAGS is no flag, and XLA reads nothing from there on: {_cut(unread)}",
        needed="flags of the form --name=value, without spaces inside",
        fix="write the value after = or remove the word",
      )
    )
  for name, value in pairs:
    if finding := _unknown(name, names) or _malformed(name, value, names) or _hazardous(name, value):
      findings.append(finding)
  findings += _repeated(pairs)
  values = dict(pairs)
  findings += _halves(values)
  findings += check_environment(environ, multi_stream=is_multi_stream(values)) if environ is not None else ()
  return findings


def enforce(environ: Mapping[str, str], *, strict: bool = True) -> list[str]:
  """Checks XLA_FLAGS and the variables beside it, as the next process to start a backend would meet them.

  Args:
    environ: usually `os.environ`.
    strict: refuse what is fatal; if false it is reported like the rest, and the run meets it by itself.

  Returns:
    list[str]: one line for each finding.

  Raises:
    RefusedError: for the first fatal finding.
  """
  text = environ.get("XLA_FLAGS", "")
  names = installed_names() if text.strip() else None
  findings = check(text, names, environ)
  fatal = next((finding for finding in findings if finding.fatal), None)
  if fatal and strict:
    raise RefusedError(found=fatal.found, needed=fatal.needed, fix=fatal.fix)
  unchecked = ["XLA_FLAGS not checked: no jaxlib of a known layout is installed"] if text.strip() and names is None else []
  return unchecked + [str(finding) for finding in findings]


def is_multi_stream(flags: Mapping[str, Scalar | None]) -> bool:
  """Whether flags ask for collectives on more than one stream."""
  return _is_true(flags.get(MULTI_STREAMING, "false")) or bool(flags.get(DOMAINS))


def check_environment(environ: Mapping[str, str], *, multi_stream: bool) -> list[Finding]:
  """The variables that decide with the flags: hardware queues and the size of XLA's memory pool."""
  findings = []
  if environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "").strip() == "1":
    findings.append(
      Finding(
        found="CUDA_DEVICE_MAX_CONNECTIONS=1 puts all streams on one hardware queue"
        + (", and the XLA flags ask for collectives on several streams" if multi_stream else ""),
        needed="8, CUDA's default, or more",
        fix="unset it, or set CUDA_DEVICE_MAX_CONNECTIONS=16",
        fatal=multi_stream,
      )
    )
  new, old = (environ.get(name) for name in MEMORY_FRACTIONS)
  if new and old:
    findings.append(
      Finding(
        found=f"XLA_CLIENT_MEM_FRACTION={new} and XLA_PYTHON_CLIENT_MEM_FRACTION={old} are both set, which JAX refuses",
        needed="one of them",
        fix="unset XLA_PYTHON_CLIENT_MEM_FRACTION, the older name",
      )
    )
  return findings


MEMORY_FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


def _text(flags):
  """The flags themselves, where XLA_FLAGS may name a file of them."""
  flags = flags.strip()
  return Path(flags).read_text(encoding="utf-8", errors="replace") if flags and not flags.startswith("-") else flags


def _no_file(path):
  return Finding(
    found=f"XLA_FLAGS={_cut(path)} does not begin with -- and so is the name of a file, which cannot be read",
    needed="flags that begin with --, or the path of a file of them",
    fix=f"write --{_cut(path)}" if path.startswith("xla_") else "correct the path or the flags",
  )


def _unknown(name, names):
  library = names and names.lacking(name)
  known = catalogue().get(name)
  if not library:
    return None
  every = frozenset.intersection(*names.libraries.values())
  near = nearest(name, [*every] if not known else [])
  if known and known.until and Version(names.version) >= Version(known.until):
    reason, fix = known.meaning.rstrip("."), f"remove --{name}"
  elif known and known.since:
    reason, fix = f"it came with jaxlib {known.since}", f"remove --{name}, or install jaxlib {known.since} or newer"
  else:
    reason, fix = "", f"write --{near}" if near else f"remove --{name}"
  return Finding(
    found=f"{library} has no flag --{name}" + (f" ({reason})" if reason else "") + " and would end the process",
    needed="flags that jaxlib and the CUDA plugin know",
    fix=fix,
  )


def _malformed(name, value, names):
  flag = catalogue().get(name)
  if not flag or not flag.type:
    return None
  needed = None
  if flag.type == "bool":
    if value is not None and value.lower() not in _BOOLEANS:
      needed = "true or false"
  elif value is None:
    needed = f"--{name}=VALUE"
  elif flag.type in _INTEGERS:
    bound = _INTEGERS[flag.type]
    low = -bound if flag.minimum is None else flag.minimum
    if not re.fullmatch(r"[-+]?[0-9]{1,99}", value) or not low <= int(value) < bound:
      needed = f"a whole number from {low} to {bound - 1}" if flag.minimum is not None else f"a whole number that fits {flag.type}"
  elif flag.type in ("list", "choice"):
    words = [word.strip() for word in value.split(",")] if flag.type == "list" else [value]
    signed = [word[:1] in "+-" for word in words if word]
    legal = [word for word, since in flag.members.items() if not since or not names or Version(names.version) >= Version(since)]
    accepted = {word.lower() for word in legal}
    wrong = [word for word in words if word and word.lstrip("+-").lower() not in accepted]
    if wrong or (any(signed) and not all(signed)):
      needed = (f"words among {', '.join(legal)}, joined by commas" if flag.type == "list" else f"one of {', '.join(legal)}") + (
        ", all or none of them with + or -" if any(signed) else ""
      )
  if needed is None:
    return None
  shown = f"--{name}" if value is None else f"--{name}={value}"
  return Finding(found=f"{shown} in XLA_FLAGS has a wrong value", needed=needed, fix=f"correct or remove {shown}")


def _hazardous(name, value):
  flag = catalogue().get(name)
  words = [word.strip().upper() for word in (value or "").split(",")] if flag else []
  for hazard in flag.hazardous if flag else ():
    if hazard in words or f"+{hazard}" in words:
      return Finding(
        found=f"--{name} names {hazard}. {flag.hazard.rstrip('.')}",
        needed=f"the flag without {hazard}",
        fix=f"remove {hazard} from --{name}",
        fatal=False,
      )
  return None


def _repeated(pairs):
  seen = {}
  for name, value in pairs:
    if name in seen and seen[name] != value:
      yield Finding(
        found=f"--{name} is in XLA_FLAGS as {seen[name] or 'true'} and as {value or 'true'}; XLA takes the last",
        needed="each flag once",
        fix=f"remove one of the two --{name}",
        fatal=False,
      )
    seen[name] = value


def _halves(values):
  """Settings that do nothing, or run one after the other what was to overlap, without their other half."""
  streams = _is_true(values.get(MULTI_STREAMING, "false"))
  limit = values.get(OVERLAP_LIMIT) or "1"
  several = re.fullmatch(r"\+?[0-9]{1,99}", limit) is not None and int(limit) >= 2
  if streams != several:
    have, lack = (MULTI_STREAMING, f"--{OVERLAP_LIMIT}=2") if streams else (OVERLAP_LIMIT, f"--{MULTI_STREAMING}=true")
    yield Finding(
      found=f"--{have}={values[have] or 'true'} without {lack}: "
      + ("nothing overlaps" if streams else "collectives overlap in the program and run one after the other on one stream"),
      needed="both or neither",
      fix=f"add {lack}, or remove --{have}",
    )
  if (streams or values.get(DOMAINS)) and not _is_true(values.get(SCHEDULER, "false")):
    yield Finding(
      found=f"--{MULTI_STREAMING if streams else DOMAINS} without --{SCHEDULER}=true: nothing overlaps",
      needed="the latency-hiding scheduler",
      fix=f"add --{SCHEDULER}=true",
      fatal=False,  # an optimization level or a PGLE profile turns it on too
    )


def _is_true(value):
  return value is None or _BOOLEANS.get(as_text(value).lower(), False)


def _cut(text):
  return text if len(text) <= 80 else f"{text[:77]}..."
