"""The image's steps in an environment laid out like MaxText's container, and the script that builds the image with Docker played."""

import hashlib
import os
import re
import shutil
import subprocess
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

from maxtext_moe_te.moe import te_api
from tests import environments

CONTAINER = environments.ROOT / "container"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
  return environments.build(tmp_path_factory.mktemp("dist"))[1]


@pytest.fixture(scope="module")
def image(tmp_path_factory):
  """MaxText's container as far as the steps can see: MaxText editable from its source, some packages without pip's metadata.

  Returns:
    tuple: the interpreter, and the folder of MaxText's source.
  """
  root = tmp_path_factory.mktemp("image")
  python = environments.make(root / "venv", without=("maxtext", "maxtext-*", "*[Yy][Aa][Mm][Ll]-*.dist-info", "absl_py-*.dist-info"))
  source, site = root / "opt" / "maxtext" / "src", environments.site_packages(root / "venv")
  purelib = Path(sysconfig.get_path("purelib"))
  shutil.copytree(purelib / "maxtext", source / "maxtext", ignore=shutil.ignore_patterns("__pycache__"))
  (site / "_maxtext.pth").write_text(f"{source}\n")
  info = next(purelib.glob("maxtext-*.dist-info"))
  (site / info.name).mkdir()
  (site / info.name / "METADATA").write_bytes((info / "METADATA").read_bytes())
  return python, source


def install(image, wheel, **more):
  python, _ = image
  return environments.run(python, CONTAINER / "install.sh", wheel, PYTHON=str(python), **more)


@pytest.mark.host
@pytest.mark.dist
def test_the_steps_of_the_image(image, wheel, tmp_path):
  python, source = image
  cache = tmp_path / "cache" / "nccl-ep"
  released = {path: path.read_bytes() for path in source.rglob("*.py")}
  before = environments.own_files(python.parents[1])

  done = install(image, wheel)
  assert done.returncode == 0, done.stdout + done.stderr
  assert all(path.read_bytes() == content for path, content in released.items()), "STACK=base leaves the image's own software alone"

  done = install(image, wheel, PATCHES="maxtext", NCCL_EP_JIT_CACHE_DIR=str(cache))
  assert done.returncode == 0, done.stdout + done.stderr

  assert cache.stat().st_mode & 0o7777 == 0o1777
  changed = {path for path, content in released.items() if path.read_bytes() != content}
  assert changed, "no patch was applied"
  added = {name: content for name, content in environments.own_files(python.parents[1]).items() if before.get(name) != content}
  assert sum(map(len, added.values())) + sum(path.stat().st_size for path in changed) < 50e6
  site = environments.site_packages(python.parents[1])
  assert all((site / name).stat().st_mode & 0o004 for name in added), "a file that only root can read"
  assert not [name for name in added if not name.startswith(("maxtext_moe_te/", "maxtext_moe_te-"))]

  script = environments.run(python, "maxtext-moe-te", "patch", "check", "maxtext")
  assert script.returncode == 0
  assert script.stdout == (f"maxtext 0.2.5 in {source}: applied\nmaxtext: source 0.2.5 in {source}/maxtext, known to the plugin\n"), (
    "patched, it is known too"
  )

  again = install(image, wheel, PATCHES="maxtext")
  assert again.returncode == 0, again.stdout + again.stderr
  second = environments.own_files(python.parents[1])
  assert {name: second.get(name) for name in added} == added, "the same steps gave other bytes"
  assert environments.run(python, "maxtext-moe-te", "patch", "revert", "maxtext").returncode == 0
  assert {path: path.read_bytes() for path in source.rglob("*.py")} == released


def make_wheel(folder, name, version, files):
  """A wheel of a few files, or of a folder's. Returns its path."""
  path = folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
  info = f"{path.name.removesuffix('-py3-none-any.whl')}.dist-info"
  files = files | {
    f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
    f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
  }
  with zipfile.ZipFile(path, "w") as archive:
    for file, content in files.items():
      archive.writestr(file, content)
    archive.writestr(f"{info}/RECORD", "".join(f"{file},,\n" for file in [*files, f"{info}/RECORD"]))
  return path


@pytest.mark.host
@pytest.mark.dist
def test_the_pinned_stack_stands_beside_the_images_own(image, wheel, tmp_path):
  """The same steps with a set that is MaxText and stand-ins of three packages; the real set is what `make test-te` runs in."""
  python, source = image
  purelib, wheels, stack = Path(sysconfig.get_path("purelib")), tmp_path / "wheels", tmp_path / "stack"
  wheels.mkdir()
  own = {str(path.relative_to(purelib)): path.read_bytes() for path in purelib.glob("maxtext/**/*") if path.is_file()}
  pinned = make_wheel(wheels, "maxtext", "0.2.5", {name: content for name, content in own.items() if "__pycache__" not in name})
  make_wheel(wheels, "nvidia-nccl-cu13", "2.32.3", {"nvidia/nccl/lib/libnccl.so.2": b""})
  make_wheel(wheels, "transformer-engine", "2.20.2", {})
  make_wheel(wheels, "transformer-engine-jax", "2.20.2", {"extension": b""})
  steps = tmp_path / "repository" / "container"
  steps.mkdir(parents=True)
  shutil.copy(CONTAINER / "pinned.sh", steps)
  digest = hashlib.sha256(pinned.read_bytes()).hexdigest()
  (steps.parent / "requirements.lock").write_text(f"maxtext==0.2.5 --hash=sha256:{digest}\n")
  (steps / "pinned.txt").write_text("nvidia-nccl-cu13==2.32.3\ntransformer-engine==2.20.2\n")
  before = environments.own_files(python.parents[1]), {path: path.read_bytes() for path in source.rglob("*.py")}

  offline = dict(PYTHON=str(python), PIP_NO_INDEX="1", PIP_FIND_LINKS=str(wheels))
  done = environments.run(python, steps / "pinned.sh", stack, **offline)
  assert done.returncode == 0, done.stdout + done.stderr
  assert re.search(rf"^pinned.sh: {stack} takes \d+ MB$", done.stdout, re.M)
  site = environments.site_packages(stack)
  assert sorted(path.name for path in site.glob("*.dist-info")) == [
    "maxtext-0.2.5.dist-info", "nvidia_nccl_cu13-2.32.3.dist-info", "transformer_engine-2.20.2.dist-info",
    "transformer_engine_jax-2.20.2.dist-info",
  ]  # fmt: skip
  assert (stack / "cuda" / "libnccl.so.2").resolve() == (site / "nvidia/nccl/lib/libnccl.so.2").resolve()

  for entry in environments.site_packages(python.parents[1]).iterdir():  # what the real set has besides
    if entry.is_symlink() and not (site / entry.name).exists():
      (site / entry.name).symlink_to(entry)
  own_python = stack / "bin" / "python"
  done = environments.run(own_python, CONTAINER / "install.sh", wheel, PYTHON=str(own_python), STACK="pinned", PATCHES="maxtext")
  assert done.returncode == 0, done.stdout + done.stderr
  assert f"maxtext 0.2.5 in {site}: applied" in done.stdout
  assert (environments.own_files(python.parents[1]), {path: path.read_bytes() for path in source.rglob("*.py")}) == before


def test_the_pinned_stack_is_that_of_the_figures():
  """README names what it measured with; `pinned.txt` and `requirements.lock` hold the same."""
  lines = [*(CONTAINER / "pinned.txt").read_text().splitlines(), *(environments.ROOT / "requirements.lock").read_text().splitlines()]
  pinned = dict(re.match(r"([a-z0-9-]+)==([^ ;]+)", line).groups() for line in lines if re.match(r"[a-z0-9-]+==", line))
  measured = " ".join((environments.ROOT / "README.md").read_text().split("### Measured", 1)[1].split())
  for name, package in {
    "JAX": "jax", "Transformer Engine": "transformer-engine", "cuBLAS": "nvidia-cublas", "NCCL": "nvidia-nccl-cu13", "MaxText": "maxtext",
  }.items():  # fmt: skip
    version = re.search(rf"{name} (\d[\d.]*\d)", measured)[1]
    assert f"{pinned[package]}.".startswith(f"{version}."), name
  assert pinned["transformer-engine"] == pinned["transformer-engine-cu13"] == te_api.TESTED
  assert {pinned[package] for package in ("jaxlib", "jax-cuda13-pjrt", "jax-cuda13-plugin")} == {pinned["jax"]}


def test_an_unknown_stack_is_refused(tmp_path):
  done = subprocess.run([CONTAINER / "install.sh", "x.whl"], env=os.environ | {"STACK": "newest"}, capture_output=True, text=True)
  assert done.returncode == 2 and done.stderr == "install.sh: STACK=newest; needed: base or pinned\n"


@pytest.mark.host
@pytest.mark.dist
def test_an_unknown_source_ends_the_build(image, wheel):
  _, source = image
  target = source / "maxtext" / "utils" / "max_utils.py"
  released = target.read_bytes()
  target.write_bytes(released + b"# edited\n")
  try:
    done = install(image, wheel, PATCHES="maxtext")
    assert done.returncode == 2
    assert "max_utils.py" in done.stdout + done.stderr
    assert target.read_bytes() == released + b"# edited\n"
  finally:
    target.write_bytes(released)


# Plays the commands that build.sh runs; says what it was asked, and makes an image of a size.
DOCKER = """#!/bin/sh
echo "docker $*" >> "$RECORD"
case "$*" in
  *imagetools*) echo "$DIGEST" ;;
  *Size*@sha256*) echo 40000000000 ;;
  *Size*) echo "$SIZE" ;;
esac
"""
MAKE = """#!/bin/sh
mkdir -p dist && touch dist/maxtext_moe_te-1.2.3-py3-none-any.whl
"""


@pytest.fixture
def build(tmp_path):
  """Runs build.sh in a copy of the repository's files that it reads."""
  root = tmp_path / "repository"
  shutil.copytree(CONTAINER, root / "container")
  for name, text in (("docker", DOCKER), ("make", MAKE)):
    path = tmp_path / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
  git = ["git", "-c", "user.name=t", "-c", "user.email=t@t"]
  for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "t"]):
    subprocess.run([*git, *words], cwd=root, check=True)

  def run(*words, digest="sha256:" + "0" * 64, size="40030000000", **more):
    record = tmp_path / "record"
    record.unlink(missing_ok=True)
    variables = os.environ | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "RECORD": str(record), "DIGEST": digest, "SIZE": size}
    done = subprocess.run([root / "container" / "build.sh", *words], env=variables | more, capture_output=True, text=True)
    asked = record.read_text().splitlines() if record.exists() else []
    return done, asked, tomllib.loads((root / "container" / "manifest.toml").read_text())

  return run


def test_build_fills_in_the_digest_and_checks_the_size(build):
  digest = "sha256:" + "0" * 64
  done, record, manifest = build()
  assert done.returncode == 0, done.stderr
  base = f"{manifest['base']['image']}:{manifest['base']['tag']}"
  assert manifest["base"]["digest"] == digest
  assert f"build.sh: {base} is {digest}; written to container/manifest.toml, commit it" in done.stdout
  assert "build.sh: maxtext-moe-te:1.2.3 adds 30 MB to its base" in done.stdout
  (command,) = [line for line in record if line.startswith("docker buildx build")]
  assert f"--build-arg BASE={base}@{digest} --build-arg WHEEL=maxtext_moe_te-1.2.3-py3-none-any.whl" in command
  assert re.search(r"--build-arg REVISION=[0-9a-f]{40} --build-arg SOURCE_DATE_EPOCH=\d+ ", command)

  done, record, _ = build()
  assert done.returncode == 0 and not [line for line in record if "imagetools" in line], "a digest that is known was asked for again"


def test_build_refuses_too_large_an_image(build):
  done, _, _ = build(size="40060000000")
  assert done.returncode == 1 and "more than the 50 MB of the manifest" in done.stderr


def test_build_of_the_pinned_stack_says_its_size(build):
  manifest = tomllib.loads((CONTAINER / "manifest.toml").read_text())["pinned"]
  assert 5000 < manifest["added_mb"] <= manifest["most_added_mb"] < 8000
  done, record, _ = build(size=str(40_000_000_000 + manifest["added_mb"] * 10**6), STACK="pinned")
  assert done.returncode == 0, done.stderr
  assert f"build.sh: STACK=pinned adds about {manifest['added_mb']} MB to the base" in done.stdout
  assert f"build.sh: maxtext-moe-te:1.2.3-pinned adds {manifest['added_mb']} MB to its base" in done.stdout
  (command,) = [line for line in record if line.startswith("docker buildx build")]
  assert "--tag maxtext-moe-te:1.2.3-pinned --build-arg STACK=pinned " in command
  done, _, _ = build(size="50000000000", STACK="pinned")
  assert done.returncode == 1 and f"more than the {manifest['most_added_mb']} MB of the manifest" in done.stderr
  done, record, _ = build(STACK="newest")
  assert done.returncode == 2 and "STACK=newest is not known; needed: base or pinned" in done.stderr and not record


def test_build_refuses_what_is_no_digest(build):
  done, record, manifest = build(digest="not found")
  assert done.returncode == 1 and "needed: sha256:" in done.stderr
  assert manifest["base"]["digest"] == "" and not [line for line in record if "buildx build" in line]


def test_build_for_all_platforms_is_pushed(build):
  done, record, _ = build("--push", "registry.example/name", PATCHES="maxtext")
  assert done.returncode == 0, done.stderr
  command = record[-1]
  assert "--tag registry.example/name:1.2.3" in command and "--build-arg PATCHES=maxtext " in command
  assert "--platform linux/amd64,linux/arm64" in command and "rewrite-timestamp=true" in command


def test_the_dockerfile_says_what_the_scripts_say():
  text = (CONTAINER / "Dockerfile").read_text()
  manifest = tomllib.loads((CONTAINER / "manifest.toml").read_text())
  assert f"ARG BASE={manifest['base']['image']}:{manifest['base']['tag']}\n" in text
  arguments = set(re.findall(r"^ARG (\w+)", text, re.M))
  assert arguments == set(re.findall(r"--build-arg (\w+)=", (CONTAINER / "build.sh").read_text()))
  sources = re.findall(r"source=([\w./]+)", text)
  assert sources == ["container/pinned.sh", "container/pinned.txt", "requirements.lock", "container/install.sh", "dist"]
  assert all((CONTAINER.parent / source).is_file() for source in sources[:-1])
  assert set(re.findall(r"^FROM \S+ AS stack-(\w+)", text, re.M)) == {"base", "pinned"} and text.count("--network=none") == 1
  assert "USER" not in re.findall(r"^[A-Z]+", text, re.M), "whoever runs the image is who the cluster says"
