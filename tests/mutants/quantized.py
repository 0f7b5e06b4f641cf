"""Faults in the storage of weights that other libraries have quantized, and the tests that must notice them."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        "convert bytes of quantized weights as numbers",
        "offload.layout.flat_layout",
        "for segment in self.segments if segment.form or segment.inner), default=self.numel)",
        "for segment in self.segments if segment.form), default=self.numel)",
        "tests/frozen/test_quantized_files.py",
    ),
    Mutant(
        "read codes by the code book of another checkpoint",
        "offload.checkpoint.manager",
        "return segment.form, segment.inner, segment.kind",
        "return segment.form, segment.inner",
        "tests/frozen/test_quantized_files.py",
    ),
    Mutant(
        "round the scales beside codes of integers",
        "offload.layout.frozen",
        "ids |= {id(weight) for weight in own} if codes else opaque_ids",
        "ids |= {id(e) for e in own if id(e) in opaque_ids or e.dtype not in _VALUES}",
        "tests/frozen/test_quantized_subclasses.py",
    ),
    Mutant(
        "take a copy that may be made for a view",
        "offload.engine.opaque",
        "            if made is not NotImplemented:\n",
        "            if False:\n",
        "tests/frozen/test_quantized_subclasses.py",
    ),
    Mutant(
        "leave the buffers of a model parameters after an error",
        "offload.engine.opaque",
        "            module._buffers[name] = buffer\n",
        "            pass\n",
        "tests/frozen/test_quantized_subclasses.py",
    ),
)
