"""Faults in the storage of frozen weights as blocks of codes, and the tests that must notice them."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        "let compute wait for the upload of blocks, not for their values",
        "offload.swapper.caches",
        "            entry.uploaded = self._table.changed.without_lock(work)",
        "            self._table.changed.without_lock(work)",
        "tests/accelerators/test_device_engine.py",
    ),
    Mutant(
        "drop the values that less than a block has left",
        "offload.layout.frozen",
        "            values = torch.cat((rest.to(values.dtype), values))\n",
        "            pass\n",
        "tests/kernels/test_kernels_adamw.py",
    ),
    Mutant(
        "convert blocks of a checkpoint as numbers",
        "offload.checkpoint.restore",
        "if run.start >= codes:",
        "if run.start < 0:",
        "tests/frozen/test_frozen_blocks.py",
    ),
    Mutant(
        "join values and blocks of a checkpoint to one run",
        "offload.checkpoint.resharding",
        "(layout.trainable_stop, layout.values_stop))",
        "(layout.trainable_stop,))",
        "tests/frozen/test_frozen_blocks.py",
    ),
    Mutant(
        "read blocks of the second shard of an export over those of the first",
        "offload.model_io.save",
        "        at += part.numel * itemsize\n",
        "",
        "tests/frozen/test_frozen_blocks.py",
    ),
    Mutant(
        "store the adapters of peft that do not train as blocks",
        "offload.layout.frozen",
        'for name in getattr(module, "adapter_layer_names", ()):',
        "for name in ():",
        "tests/frozen/test_frozen_blocks.py",
    ),
)
