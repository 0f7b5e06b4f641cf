"""Faults in what stands on the engine (command line, rows, Trainer, reports), and the tests that must notice them."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        "end a run without saving its model",
        "offload.cli.commands.train_run",
        "job.save_model()",
        "pass",
        "tests/test_cli_finetune.py",
    ),
    Mutant(
        "a boundary that Accelerate knows and the engine does not",
        "offload.hf.accelerator",
        "self.engine.set_gradient_accumulation_boundary(bool(self.sync_gradients))",
        "pass",
        "tests/test_accelerate.py",
    ),
    Mutant(
        "leave a schedule where it was at a step that was skipped",
        "offload.hf.accelerator",
        "return bool(self.optimizer.overflow)",
        "return False",
        "tests/test_accelerate.py",
    ),
    Mutant(
        "what config and arguments say differently counts as the config has it",
        "offload.hf.auto_values",
        "elif not _equal(block[last], value):",
        "elif False:",
        "tests/test_trainer_wrong.py",
    ),
    Mutant(
        "take a schedule's learning rates from the arguments after a load",
        "offload.hf.trainer",
        "self.lr_scheduler.load_state_dict(",
        "dict(",
        "tests/test_trainer_checkpoints.py",
    ),
    Mutant(
        "train from scratch where a folder has weights",
        "offload.finetune.model",
        "    if files:",
        "    if False:",
        "tests/test_cli_finetune.py",
    ),
    Mutant(
        "keep what was trained before a resume twice",
        "offload.report.log",
        "            for late in [each for each in found if each >= step]:",
        "            for late in ():",
        "tests/test_report.py",
    ),
    Mutant(
        "documents of a row see each other",
        "offload.finetune.packing",
        "positions[number, start:stop] = np.arange(len(piece.ids))",
        "positions[number, start:stop] = np.arange(start, stop)",
        "tests/test_rows.py",
    ),
    Mutant(
        "learn the first token of a document by the one before",
        "offload.finetune.packing",
        "labels[number, start + 1 : stop] = np.where(piece.learned, piece.ids, _IGNORED)[1:]",
        "labels[number, start:stop] = np.where(piece.learned, piece.ids, _IGNORED)",
        "tests/test_rows.py",
    ),
    Mutant(
        "learn the prompt as well",
        "offload.finetune.packing",
        "[False] * len(prompt)",
        "[True] * len(prompt)",
        "tests/test_rows.py",
    ),
    Mutant(
        "each pass over the rows in the same order",
        "offload.finetune.packing",
        "np.random.SeedSequence((self._seed, epoch))",
        "np.random.SeedSequence((self._seed, 0))",
        "tests/test_rows.py",
    ),
    Mutant(
        "rows of a batch regardless of the micro-batch",
        "offload.finetune.packing",
        "((step - 1) * self._accumulation + micro_batch)",
        "(step - 1)",
        "tests/test_rows.py",
    ),
    Mutant(
        "save over what lies in a folder",
        "offload.finetune.output",
        "if folder.exists() and not may_be_there and any(",
        "if False and any(",
        "tests/test_cli_finetune.py",
    ),
    Mutant(
        "a run that goes on saves over a stranger's folder",
        "offload.finetune.job",
        "Path(mine.output), may_be_there=False)",
        "Path(mine.output), may_be_there=True)",
        "tests/test_cli_finetune.py",
    ),
    Mutant(
        "evaluate with dropout",
        "offload.finetune.loop",
        "    engine.eval()\n    try:",
        "    try:",
        "tests/test_cli_evaluation.py",
    ),
    Mutant(
        "take another job for one that is done",
        "offload.finetune.job",
        "        if others:\n",
        "        if False:\n",
        "tests/test_cli_jobs.py",
    ),
    Mutant(
        "learn from what is held out",
        "offload.finetune.token_stream",
        "kept[block * length : (block + 1) * length] = False",
        "kept[block * length : (block + 1) * length] = True",
        "tests/test_cli_evaluation.py",
    ),
    Mutant(
        "have biases and norms decay",
        "offload.finetune.options",
        "if parameter.ndim <= 1]",
        "if parameter.ndim < 0]",
        "tests/test_cli_merge.py",
    ),
)
