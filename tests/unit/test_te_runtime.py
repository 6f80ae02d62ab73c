"""What is checked before Transformer Engine's kernels are called: versions at their floors, tools present and absent."""

import os
import sys
import types

import pytest

import maxtext_moe_te
import maxtext_moe_te.host
from maxtext_moe_te.errors import RefusedError, VersionError
from maxtext_moe_te.moe import te_runtime
from maxtext_moe_te.settings.config import MoeTeOptions
from maxtext_moe_te.settings.overlay import Overlay
from maxtext_moe_te.tools import patches


@pytest.fixture
def versions(monkeypatch):
  """Sets the versions that the libraries report."""

  def pretend(cublas=131000, nccl=23203):
    monkeypatch.setattr(te_runtime, "cublaslt_version", lambda: cublas)
    monkeypatch.setattr(te_runtime, "nccl_version", lambda: nccl)

  pretend()
  return pretend


@pytest.mark.parametrize(
  ("capability", "cublas", "text"),
  [
    ("9.0", 130399, "cuBLAS 13.3.99 at run time; needed: 13.4.0 or newer"),
    ("10.0", 130299, "needed: 13.3.0 or newer"),
    ("9.0", 130700, "but not 13.7.0 to 13.8.0"),
    ("10.3", 130800, "but not 13.7.0 to 13.8.0"),
  ],
)
def test_cublas_outside_the_range(versions, capability, cublas, text):
  versions(cublas=cublas)
  with pytest.raises(VersionError, match=text):
    te_runtime.check_grouped_gemm(capability)


@pytest.mark.parametrize(("capability", "cublas"), [("9.0", 130400), ("10.0", 130300), ("10.3", 130801), ("9.0", 131000)])
def test_cublas_inside_the_range(versions, capability, cublas):
  versions(cublas=cublas)
  te_runtime.check_grouped_gemm(capability)


@pytest.mark.parametrize("capability", ["8.0", "8.9", "12.0"])
def test_gpus_without_the_kernel(versions, capability):
  with pytest.raises(RefusedError, match=f"a GPU of compute capability {capability}"):
    te_runtime.check_grouped_gemm(capability)


def test_mxfp8_needs_blackwell():
  te_runtime.check_mxfp8("10.0")
  with pytest.raises(RefusedError, match=r"moe_te\.recipe=mxfp8 on a GPU of compute capability 9\.0"):
    te_runtime.check_mxfp8("9.0")


@pytest.fixture
def tools(versions, monkeypatch, tmp_path):
  """A machine with nvcc, g++ and NCCL 2.32.3's headers; returns its folder."""
  for name in ("nvcc", "g++"):
    (tmp_path / name).write_text("#!/bin/sh\n")
    (tmp_path / name).chmod(0o755)
  (tmp_path / "include").mkdir()
  header = "#define NCCL_MAJOR 2\n#define NCCL_MINOR 32\n#define NCCL_PATCH 3\n"
  (tmp_path / "include" / "nccl.h").write_text(header)
  for name in ("NCCL_EP_JIT_NVCC", "NVCC", "CUDA_HOME", "CUDA_PATH", "NCCL_EP_JIT_BUILD_INCLUDE_DIR"):
    monkeypatch.setenv(name, "")
    monkeypatch.delenv(name)
  monkeypatch.setenv("PATH", str(tmp_path))
  monkeypatch.setenv("NCCL_HOME", str(tmp_path))
  monkeypatch.setattr(te_runtime, "_pip_roots", list)
  return tmp_path


def test_tools_are_found_and_told(tools):
  te_runtime.prepare_nccl_ep()
  assert os.environ["NCCL_EP_JIT_NVCC"] == str(tools / "nvcc")
  assert os.environ["NCCL_EP_JIT_BUILD_INCLUDE_DIR"] == str(tools / "include")


def test_each_missing_tool_is_named(tools, versions, monkeypatch):
  versions(nccl=23002)
  with pytest.raises(VersionError, match=r"NCCL 2\.30\.2 at run time; needed: 2\.32\.3 or newer"):
    te_runtime.prepare_nccl_ep()
  versions(nccl=23300)
  with pytest.raises(VersionError, match=r"no NCCL headers of version 2\.33\.0"):
    te_runtime.prepare_nccl_ep()
  versions()
  (tools / "g++").unlink()
  with pytest.raises(RefusedError, match=r"no g\+\+"):
    te_runtime.prepare_nccl_ep()
  (tools / "nvcc").unlink()
  monkeypatch.delenv("NCCL_EP_JIT_NVCC")
  with pytest.raises(RefusedError, match="no nvcc"):
    te_runtime.prepare_nccl_ep()


def test_cudnn_beside_jax_comes_before_the_systems(monkeypatch, tmp_path):
  monkeypatch.setattr(te_runtime, "_pip_roots", lambda: [tmp_path])
  environment = {}
  assert te_runtime.prefer_pip_cudnn(environment) is None, "none was installed by pip"
  (tmp_path / "cudnn/lib").mkdir(parents=True)
  (tmp_path / "cudnn/lib/libcudnn.so.9").touch()
  assert te_runtime.prefer_pip_cudnn(environment) == tmp_path / "cudnn"
  assert environment == {"CUDNN_HOME": str(tmp_path / "cudnn")}


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("by", ["options", "overlay"])
def test_switched_off_nothing_is_set(monkeypatch, enabled, by):
  chosen = []
  monkeypatch.setattr(te_runtime, "prefer_pip_cudnn", chosen.append)
  seams = types.SimpleNamespace(activate=lambda **kwargs: None)
  monkeypatch.setitem(sys.modules, "maxtext_moe_te.host.seams", seams)
  monkeypatch.setattr(maxtext_moe_te.host, "seams", seams, raising=False)
  given = {"options": MoeTeOptions(enabled=enabled)} if by == "options" else {"overlay": Overlay(("x",), moe_te={"enabled": enabled})}
  maxtext_moe_te.activate(**given)
  assert bool(chosen) == enabled


@pytest.mark.parametrize("name", ["CUDNN_HOME", "CUDNN_PATH"])
def test_a_users_cudnn_stays(monkeypatch, tmp_path, name):
  (tmp_path / "cudnn/lib").mkdir(parents=True)
  (tmp_path / "cudnn/lib/libcudnn.so.9").touch()
  monkeypatch.setattr(te_runtime, "_pip_roots", lambda: [tmp_path])
  environment = {name: "/opt/cudnn"}
  assert te_runtime.prefer_pip_cudnn(environment) is None
  assert environment == {name: "/opt/cudnn"}


def test_a_patched_transformer_engine_is_known(tmp_path, monkeypatch):
  """By a function that the patch adds: the released file does not have it, the patched one has."""
  (series,) = (series for series in patches.load() if series.package == "transformer_engine")
  ((path, hunks),) = series.hunks.items()
  old, new = (b"".join(line for hunk in hunks for line in hunk[i]).decode() for i in (1, 2))
  file = tmp_path / path
  file.parent.mkdir(parents=True)
  (tmp_path / "transformer_engine/__init__.py").touch()
  monkeypatch.syspath_prepend(tmp_path)
  for text, expected in ((old, True), (new, False)):
    file.write_text(text)
    assert te_runtime.makes_empty_constants() is expected
  file.unlink()
  assert te_runtime.makes_empty_constants()
