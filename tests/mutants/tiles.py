"""Faults in modules that are computed piece by piece, and the tests that must notice them."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_FORWARD = "offload.activations.tiles"
_STATE = "offload.activations.tiles"
_TILES = "tests/activations/test_tiles.py"
_ENGINE = "tests/activations/test_tiles_engine.py"
_TILE_MLP = "tests/activations/test_tile_mlp.py"
_REFUSED = "tests/activations/test_tiles_refused.py"

MUTANTS = (
    Mutant(
        "add gradients of chunks in 16 bits",
        _FORWARD,
        "wide = torch.promote_types(gradient.dtype, torch.float32)",
        "wide = gradient.dtype",
        _TILES,
    ),
    Mutant(
        "add gradients of chunks in memory of autograd",
        _FORWARD,
        "gradient.to(wide, copy=True, memory_format=torch.contiguous_format)",
        "gradient.to(wide)",
        _TILES,
    ),
    Mutant(
        "lose the gradients of all chunks but the last",
        _FORWARD,
        "            total.add_(gradient)",
        "            sums[index] = gradient.clone()",
        _TILES,
    ),
    Mutant(
        "keep a chunk's output beside the next chunk",
        _FORWARD,
        "                del part  # otherwise it would be in memory together with the next chunk\n",
        "",
        _TILES,
    ),
    Mutant(
        "keep the gradient of a chunk beside the next chunk",
        _FORWARD,
        "                    del of_input  # as in the forward\n",
        "",
        _TILES,
    ),
    Mutant(
        "compute a chunk again from the weights of another step",
        _FORWARD,
        "        if version != work.versions[name]:",
        "        if False:",
        _ENGINE,
    ),
    Mutant(
        "take the weights of an engine for those of torch when looking for changes",
        _FORWARD,
        "versions[name] = parameter._version if handle is None else handle.engine.updates(handle.unit)",
        "versions[name] = parameter._version",
        _ENGINE,
    ),
    Mutant(
        "give a tensor of others no gradient without a word",
        _FORWARD,
        "        if leaf is not None and id(leaf) not in known_ids:",
        "        if False:",
        _REFUSED,
    ),
    Mutant(
        "call hooks of parameters for each chunk",
        _FORWARD,
        "        if tensor_hooks_of(parameter):",
        "        if False:",
        _REFUSED,
    ),
    Mutant(
        "save the input of a tiled module after its chunks",
        _FORWARD,
        "    saves = torch.is_grad_enabled() and hidden.requires_grad",
        "    saves = False",
        _TILES,
    ),
    Mutant(
        "bring the weights of a tiled module for each chunk",
        _FORWARD,
        "    if not handles:",
        "    if True:",
        _ENGINE,
    ),
    Mutant(
        "hold weights that have no room together",
        "offload.engine.edits",
        "            except BudgetError:  # each module",
        "            except ZeroDivisionError:  # each module",
        _ENGINE,
    ),
    Mutant(
        "hold weights of a tiled module for good",
        "offload.engine.edits",
        "            while fetched:\n                self._unit_views.release_unit(fetched.pop())\n\n",
        "            pass\n\n",
        _ENGINE,
    ),
    Mutant(
        "draw other numbers for dropout in the backward of a chunk",
        _STATE,
        "        torch.set_rng_state(cpu)\n",
        "",
        _TILES,
    ),
    Mutant(
        "leave the generator of the user where a backward had it",
        _STATE,
        'with torch.random.fork_rng(devices, device_type=kind if devices else "cuda"):',
        "with contextlib.nullcontext():",
        _TILES,
    ),
    Mutant(
        "leave casts without a graph in the cache of autocast",
        _STATE,
        "cache_enabled=False",
        "cache_enabled=True",
        _TILES,
    ),
    Mutant(
        "compute a chunk again in the autocast of the backward",
        _STATE,
        "        for kind, enabled, dtype in casts:\n",
        "        for kind, enabled, dtype in casts if not torch.is_grad_enabled() else ():\n",
        _TILES,
    ),
    Mutant(
        "take a module of the user for an MLP of transformers",
        "offload.activations.tiles",
        ' or not is_class_of(type(module), "transformers")',
        "",
        _TILE_MLP,
    ),
    Mutant(
        "leave the MLPs of a model tiled after its engine",
        "offload.engine.components",
        "            *(extension.remove for extension in reversed(self.extensions)),\n",
        "",
        _TILE_MLP,
    ),
    Mutant(
        "add the bias of a tiled layer once for each part of the input",
        "offload.activations.linear",
        "bias and i == last,",
        "bias,",
        "tests/activations/test_tiled_linear.py",
    ),
    Mutant(
        "draw the weights of a tiled layer for the inputs of a block",
        "offload.activations.linear",
        "bound = self.whole_inputs**-0.5",
        "bound = self.in_features**-0.5",
        "tests/activations/test_tiled_linear.py",
    ),
)
