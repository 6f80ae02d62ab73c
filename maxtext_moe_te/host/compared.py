"""The comparisons of `selfcheck`: how far ours is from MaxText's own, quantity by quantity. Run as a module, its comparing process."""

import json
import logging
import math
import re
import sys
import tempfile

import jax
import jax.numpy as jnp
from maxtext.configs import pyconfig, types
from maxtext.layers import moe

from maxtext_moe_te.host import known, one_layer, selfcheck
from maxtext_moe_te.settings.config import MoeTeOptions

_BASE = pyconfig.__file__.replace("pyconfig.py", "base.yml")
_BATCH = 8


def errors(request: dict) -> dict[str, float | None]:
  """Relative errors by quantity; None where one is not finite. See `selfcheck.request_of`."""
  found = {}
  if known.LAYER in request["groups"]:
    found |= {f"layer {name}": error for name, error in _of_layer(request).items()}
  if known.STEP in request["groups"]:
    for microbatches in (1, 2):
      found |= {f"step {microbatches} {name}": error for name, error in of_steps(request, microbatches).items()}
  return found


def _differences(ours, theirs):
  if ours.keys() != theirs.keys():
    raise ValueError(f"other quantities: {sorted(ours.keys() ^ theirs.keys())}")
  found = {name: one_layer.relative_error(ours[name], theirs[name]) for name in theirs}
  return {name: error if math.isfinite(error) else None for name, error in found.items()}


def _parallelism(mesh):
  """Words for a mesh with these axes."""
  words = {key: "1" for key in types.MaxTextConfig.model_fields if re.fullmatch("(ici|dcn)_[a-z_]+_parallelism", key)}
  return words | {f"ici_{axis}_parallelism": str(size) for axis, size in mesh.items()}


def _config(words):
  return pyconfig.initialize(["selfcheck", _BASE, "run_name=selfcheck", "base_output_directory=unused", *_joined(words)])


def _joined(words):
  return [f"{key}={value}" for key, value in words.items()]


def _of_layer(request):
  """MaxText's own layer on one device against ours on the mesh."""
  variants = [{}]
  if request["block"] == "deepseek4":
    variants.append({"is_hash_routing": True})
  found = {}
  for layer in variants:
    results = []
    for mesh_axes, call in (({}, moe.RoutedMoE.__call__), (request["mesh"], one_layer.our_call())):
      devices = math.prod(mesh_axes.values())
      config = _one_device(devices, request["layer"] | _parallelism(mesh_axes))
      mesh = one_layer.mesh_of(config, devices)
      module = one_layer.routed_moe(config, mesh, **layer)
      x, cotangent = one_layer.inputs(config, batch=_BATCH)
      more = {}
      if request["block"] == "gemma4":
        more["gate_inputs"] = jax.random.normal(jax.random.key(7), x.shape)
      if layer:
        more["input_ids"] = jax.random.randint(jax.random.key(8), x.shape[:2], 0, config.vocab_size)
        table = jax.random.randint(jax.random.key(9), module.tid2eid.value.shape, 0, config.num_experts)
        module.tid2eid.value = table.astype(jnp.float32)
      results.append(one_layer.run(config, mesh, call, module, x, cotangent, **more))
    theirs, ours = results
    found |= {("hashed " if layer else "") + name: error for name, error in _differences(ours, theirs).items()}
  return found


def _one_device(devices, words):
  """The configuration for so many of this process's devices."""
  return _config(words | {"compile_topology": "described", "internal_compile": "true", "internal_compile_num_devices": str(devices)})


def of_steps(request: dict, microbatches: int, steps: int = 1) -> dict[str, float | None]:
  """Train steps without the plugin, and from the state before each the same step with it: loss, every gradient, router biases after it.

  MaxText's own run on one device, on its sparse path: on several, older sources take the first one's balance loss for that of all, and an
  expert axis needs a collective that CPUs lack. Its dense path is no reference: there the router bias enters the balance loss.

  Args:
    request: see `selfcheck.request_of`.
    microbatches: over which a step sums its gradients.
    steps: how many.
  """
  from maxtext_moe_te.host import step  # imports MaxText's trainer, which a layer does not need

  mesh = request["mesh"]
  devices = math.prod(mesh.values())
  batch = max(_BATCH, devices) * microbatches
  words = request["model"] | {"gradient_accumulation_steps": str(microbatches)}
  found = {}
  with tempfile.TemporaryDirectory() as folder:

    def built(axes, options):
      size = math.prod(axes.values())
      more = words | _parallelism(axes) | {"per_device_batch_size": str(batch // size)}
      standing = [_BASE, "run_name=selfcheck", f"base_output_directory={folder}"]
      made = step.build([*standing, *_joined(more)], options=options, devices=jax.devices()[:size], keep_gradients=True)
      return made, made.compile({})

    theirs, their_step = built({}, MoeTeOptions(enabled=False))
    ours, our_step = built(mesh, MoeTeOptions(**request["options"]))
    state = theirs.initialize()
    for number in range(steps):
      start = _placed(state, ours.state)  # copied: a step takes the memory of its state
      with theirs.context():
        state, metrics = their_step(state, theirs.random_batch(number))
      with ours.context():
        reached, our_metrics = our_step(start, ours.random_batch(number))
      of_step = _differences(_quantities(step, reached, our_metrics), _quantities(step, state, metrics))
      found |= {f"{name}{f' {number}' if steps > 1 else ''}": error for name, error in of_step.items()}
  return found


def _placed(state, shapes):
  """A copy of a state, split over the devices as another's shapes say."""
  leaves, wanted = jax.tree.leaves(state), jax.tree.leaves(shapes)
  if [leaf.shape for leaf in leaves] != [leaf.shape for leaf in wanted]:
    raise ValueError("other parameters with the plugin than without it")
  placed = [jax.device_put(jnp.copy(leaf), other.sharding) for leaf, other in zip(leaves, wanted)]
  return jax.tree.unflatten(jax.tree.structure(shapes), placed)


def _quantities(step, state, metrics):
  gradients = {f"d_{name}": array for name, array in step.gradients(state).items()}
  return gradients | _biases(state) | {"loss": metrics["scalar"]["learning/loss"]}


def _biases(state):
  """The router biases, which no gradient moves."""
  leaves = jax.tree_util.tree_leaves_with_path(state)
  named = {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
  return {name: leaf for name, leaf in named.items() if "gate" in name and "bias" in name and "kept_gradients" not in name}


def main() -> int:
  """The comparing process: a request from standard input, {"errors": …} or {"failure": …} after the word SELFCHECK."""
  request = json.load(sys.stdin)
  try:
    with selfcheck.comparing():
      answer = {"errors": errors(request)}
  except Exception as error:
    text = " ".join(str(error).split())[:400]
    answer = {"failure": f"{type(error).__name__}: {text}"}
    logging.getLogger("maxtext_moe_te").exception("self-check")
  print(selfcheck.ANSWER, json.dumps(answer), flush=True)
  return 0


if __name__ == "__main__":
  sys.exit(main())
