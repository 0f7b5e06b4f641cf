"""Faults in `offload.engine.distributed` and `.pipeline`, and the tests that must notice them."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        "unpickle a state of the hosts whoever has written it",
        "offload.launch.torchrun",
        "if not hmac.compare_digest(signature, self._signature(state)):",
        "if False:",
        "tests/launch/test_meeting_place.py::test_a_state_that_no_host_has_signed_is_not_unpickled",
    ),
    Mutant(
        "give another host its variables where its users read them",
        "offload.launch.commands",
        "_SETTINGS = (_DEVICES, ",
        '_SETTINGS = (_DEVICES, "MLFLOW_TOKEN", ',
        "tests/launch/test_launch.py::test_variables_reach_other_hosts_without_being_seen",
    ),
    Mutant(
        "begin a collective under the hooks of the forward",
        "offload.distributed.process_group",
        "    with without_saved_tensor_hooks():\n        return start()\n",
        "    return start()\n",
        "tests/ranks/test_ranks.py::test_a_collective_under_way_does_not_keep_the_hooks_of_who_began_it",
    ),
    Mutant(
        "count a parameter that each process has whole once on each",
        "offload.distributed.world",
        "if segment.parameter in self.tied or (self.coordinate and not self.is_sharded(segment.parameter))",
        "if segment.parameter in self.tied",
        "tests/ranks/test_tensor_parallel.py::test_two_divided_ranks_equal_one_rank",
    ),
    Mutant(
        "count a parameter that two stages of a pipeline have in the norm of each",
        "offload.distributed.world",
        "if segment.parameter in self.tied or (self.coordinate and not self.is_sharded(segment.parameter))",
        "if self.coordinate and not self.is_sharded(segment.parameter)",
        "tests/deepspeed/test_deepspeed_pipeline.py::test_tied_layers_in_two_stages_stay_equal_and_train_as_one",
    ),
    Mutant(
        "let what flows between two uses of a weight arrive once more in the second half of a backward",
        "offload.parallel.pipeline",
        "        if len(self.nodes) > 1:",
        "        if False:",
        "tests/ranks/test_zero_bubble.py",
    ),
    Mutant(
        "clip each stage of a pipeline by a norm of its own",
        "offload.distributed.world",
        "sum_squares=sum(facts[process][0] for process in self.row)",
        "sum_squares=known.sum_squares",
        "tests/ranks/test_pipeline.py::test_the_clip_is_that_of_the_whole_model",
    ),
    Mutant(
        "update a parameter of two stages by the gradient of each alone",
        "offload.parallel.stage_run",
        "            dist.all_reduce(values, group=group)\n",
        "",
        "tests/deepspeed/test_deepspeed_pipeline.py::test_tied_layers_in_two_stages_stay_equal_and_train_as_one",
    ),
    Mutant(
        "divide no loss of a pipeline",
        "offload.engine.engine",
        "        divided = loss / self._settings.accumulation\n        self._add_losses",
        "        divided = loss / 1\n        self._add_losses",
        "tests/ranks/test_pipeline.py::test_two_stages_train_as_one_process_bit_for_bit",
    ),
    Mutant(
        "count a micro-batch of a pipeline with the first of its backwards",
        "offload.parallel.stage_run",
        "if len(done) == self._stages:",
        "if len(done) == 1:",
        "tests/ranks/test_pipeline.py::test_several_stages_a_process_are_one_engine",
    ),
    Mutant(
        "each rank weighs its own parts of a parameter alone",
        "offload.distributed.agreement",
        "return [sum(column) for column in",
        "return list(numbers) or [sum(column) for column in",
        "tests/ranks/test_ranks_optimizers.py",
    ),
    Mutant(
        "an edit of a state that other ranks take for the weight",
        "offload.distributed.agreement",
        "Edit(start=start, stop=stop, values=values, state=State(state))",
        "Edit(start=start, stop=stop, values=values)",
        "tests/deepspeed/test_safe_get_set_ranks.py",
    ),
    Mutant(
        "announce a reduction that a series has made already",
        "offload.distributed.agreement",
        "            if self._callbacks.pending_unit() != unit:\n",
        "            if False:\n",
        "tests/ranks/test_ranks_series.py",
    ),
    Mutant(
        "begin a series that ranks expect in other orders",
        "offload.distributed.agreement",
        "all(intent.same(intents[0]) and intent.series == series for intent in intents)",
        "all(intent.same(intents[0]) and intent.series for intent in intents)",
        "tests/ranks/test_ranks_series.py",
    ),
    Mutant(
        "ask before the gathers that are left of a series",
        "offload.distributed.agreement",
        "        self._gather_series(len(self._series))\n",
        "",
        "tests/ranks/test_ranks_series.py",
    ),
    Mutant(
        "let gathering decide what is reduced together",
        "offload.distributed.agreement",
        "    if uses:\n",
        "    if uses and not any(intent.kind is Collective.REDUCE for intent in intents):\n",
        "tests/ranks/test_agreement.py",
    ),
    Mutant(
        "keep the groups of an engine that has ended",
        "offload.distributed.process_group",
        "self._control, self._groups = None, DeviceGroups(None, None)",
        "pass",
        "tests/ranks/test_ranks.py",
    ),
)
