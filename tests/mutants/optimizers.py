"""Faults in the optimizers with a rule for matrices, and the tests that must notice them."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        "a matrix gets no unscaled gradient",
        "offload.engine.optim.matrices.updates",
        ".copy_(gradient).mul_(step.grad_scale)",
        ".copy_(gradient)",
        "tests/test_muon.py",
    ),
    Mutant(
        "the length of Muon's step is that of the transposed matrix",
        "offload.engine.optim.matrices.updates",
        "step.length((rows, columns))",
        "step.length((columns, rows))",
        "tests/test_muon.py",
    ),
    Mutant(
        "Muon moves a matrix by the momentum where Nesterov's is asked for",
        "offload.engine.optim.matrices.updates",
        "scaled.lerp_(momentum, step.momentum) if step.nesterov else momentum",
        "momentum",
        "tests/test_muon.py",
    ),
    Mutant(
        "the low bits of a matrix stay behind",
        "offload.engine.optim.matrices.updates",
        "            split(master, states)",
        "            states[State.WEIGHT].copy_(master)",
        "tests/test_muon.py",
    ),
    Mutant(
        "Muon trains embeddings as matrices",
        "offload.layout.optimizers.matrices",
        " and id(parameter) not in ends",
        "",
        "tests/test_muon.py",
    ),
    Mutant(
        "SinkGD balances the rows alone",
        "offload.engine.optim.matrices.directions",
        "((1, columns), (0, rows))",
        "((1, columns),)",
        "tests/test_sinkgd.py",
    ),
    Mutant(
        "a matrix becomes one that AdamW trains, on the states of a matrix",
        "offload.engine.optim.optimizer",
        "if self.rule.name in MATRIX_RULES and then != now:",
        "if False:",
        "tests/test_muon.py",
    ),
    Mutant(
        "an optimizer of torch that needs a closure is made",
        "offload.layout.optimizers.of_torch",
        "if short in _REFUSED:",
        "if False:",
        "tests/test_named_torch_optimizers.py",
    ),
)
