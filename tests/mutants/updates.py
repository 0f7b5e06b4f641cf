"""Faults in updates, their tiles and what they apply, and the tests that must notice them."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        "number the elements of each rank's moments from zero",
        "offload.engine.update_strategy",
        "self._noise_seed, unit, count), part.start + start)",
        "self._noise_seed, unit, count), start)",
        "tests/optim/test_narrow_states.py::test_two_ranks_round_as_one",
    ),
    Mutant(
        "round the moments of every step by the same bits",
        "offload.engine.update_strategy",
        "kernels.noise_stream(self._noise_seed, unit, count)",
        "kernels.noise_stream(self._noise_seed, unit, 1)",
        "tests/optim/test_narrow_states.py::test_the_bits_are_those_of_seed_unit_update_and_element",
    ),
    Mutant(
        "begin the random bits of each tile anew",
        "offload.engine.update_strategy",
        "self.noise.after(first - self.start)",
        "self.noise",
        "tests/optim/test_narrow_states.py::test_tiles_of_any_size_give_the_same_bits",
    ),
    Mutant(
        "forget the loss scale when gradients are applied",
        "offload.engine.update_strategy",
        "if clip else 1.0) / loss_scale",
        "if clip else 1.0)",
        "tests/optim/test_loss_scale.py",
    ),
    Mutant(
        "drop the clip",
        "offload.engine.update_strategy",
        "if clip else 1.0",
        "if False else 1.0",
        "tests/models/test_pytorch_parity.py",
    ),
    Mutant(
        "skip one unit's update",
        "offload.engine.update_strategy",
        "            if positions:\n",
        "            if positions and unit != 2:\n",
        "tests/models/test_pytorch_parity.py",
    ),
    Mutant(
        "use weights that the device has not updated yet",
        "offload.optimizers.fused",
        "done.wait()  # blocks",
        "pass  # blocks",
        "tests/accelerators/test_device_streams.py",
    ),
    Mutant(
        "drop the bias correction",
        "offload.optimizers.fused",
        "        step=count,\n        grad_scale=grad_scale,\n        decoupled",
        "        step=1_000_000,\n        grad_scale=grad_scale,\n        decoupled",
        "tests/models/test_pytorch_parity.py",
    ),
    Mutant(
        "let LAMB read moments that it has made already",
        "offload.engine.update",
        "if passed < job.steps.passes - 1 and state in job.steps.drafts:",
        "if False:",
        "tests/optim/test_optimizers.py",
    ),
    Mutant(
        "commit a step whose updates have not begun",
        "offload.engine.update",
        "if self._queued or self.offers.unsettled or self._commit_step is None",
        "if self.offers.unsettled or self._commit_step is None",
        "tests/store/test_commits.py",
    ),
    Mutant(
        "a state that is set is the weight",
        "offload.engine.update_strategy",
        "self._set(tile, start, stop, edit.state,",
        "self._set(tile, start, stop, State.WEIGHT,",
        "tests/deepspeed/test_safe_get_set.py",
    ),
    Mutant(
        "skip the wait for a tile's reads",
        "offload.engine.update",
        "for read in tile.reads:",
        "for read in ():",
        "tests/swapper/test_placements.py",
    ),
    Mutant(
        "skip the wait for a write before its lease is clean",
        "offload.engine.update",
        "                    write.wait()\n",
        "                    pass\n",
        "tests/swapper/test_placements.py",
    ),
    Mutant(
        "begin an update while the dropped one of its unit is in flight",
        "offload.engine.update",
        "            if any(job.lane is lane for job in self.offers.draining):\n                return None\n",
        "",
        "tests/updates/test_update_under_backward.py",
    ),
    Mutant(
        "confirm an update under the backward whatever the step decided",
        "offload.engine.update",
        "if job is not None and job.update == update:",
        "if job is not None:",
        "tests/updates/test_update_under_backward.py",
    ),
    Mutant(
        "update under the backward into the slot of the last commit",
        "offload.engine.update",
        " and writes_other_slot",
        "",
        "tests/updates/test_update_under_backward.py",
    ),
    Mutant(
        "wait for reads while states in memory could be updated",
        "offload.layout.update_lanes",
        "if Lane.STREAMED not in begun or not reads_ended:",
        "if Lane.STREAMED not in begun:",
        "tests/updates/test_lanes.py",
    ),
    Mutant(
        "read states only in their turn behind those in memory",
        "offload.engine.update",
        "return Lane.MEMORY if in_memory and not self._writes_to_store(unit) else Lane.STREAMED",
        "return Lane.STREAMED",
        "tests/updates/test_lanes.py::test_states_in_memory_are_updated_while_others_are_read",
    ),
)
