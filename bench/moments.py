"""Losses of a small language model whose moments are fp32, bf16 or 8 bits, over several seeds.

The text is Python's own library, byte by byte. fp32, bf16 and int8 are the kernels' own. bf16 rounded to nearest and
other forms of 8 bits are emulated: after each step the fp32 moments are rounded to what would be stored. A form of 8
bits has one scale for each 256 elements.

Forms with a "master" have bf16 weights by the kernels, with 16 or 8 more bits of the master. The model computes with
the values of these weights, in fp32.

    python -m bench.moments --steps 500 --seeds 5
    python -m bench.moments --forms fp32 int8 --draws 5     int8 five times for each seed, with other random bits
"""

from __future__ import annotations

import argparse
import statistics
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from bench.measure import report
from offload.kernels import AdamWStep, CPUAdamW, Noise, Partition, Segment, noise_stream, split_master, update
from offload.kernels.update import blocks_of

_BLOCK = 256
_EVALUATED = 32
"""Batches of the evaluation."""
Rounded = Callable[[torch.Tensor], torch.Tensor]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--forms", nargs="*", default=list(FORMS))
    parser.add_argument("--draws", type=int, default=1, help="runs of int8 for each seed, each rounded by other bits")
    given = parser.parse_args(arguments)
    text = corpus()
    losses: dict[str, list[float]] = {form: [] for form in given.forms}
    draws: list[list[float]] = []
    for seed in range(given.seeds):  # in turns, so that a run that is ended early has all forms
        for form in given.forms:
            losses[form].append(final_loss(form, seed, given, text))
            print(form, seed, round(losses[form][-1], 4), flush=True)
        if "int8" in given.forms:
            others = [final_loss("int8", seed, given, text, draw) for draw in range(1, given.draws)]
            draws.append([losses["int8"][-1], *others])
            print("int8", seed, "by draw", [round(each, 4) for each in draws[-1]], flush=True)
    report(
        "moments",
        {
            "steps": given.steps,
            "width": given.width,
            "layers": given.layers,
            "losses": losses,
            "means": {form: statistics.mean(each) for form, each in losses.items()},
            # Of each seed: only the random bits of the rounding differ.
            "int8_by_draw": draws,
            "deviations_of_draws": [statistics.pstdev(each) for each in draws],
            "deviations": {form: statistics.pstdev(each) for form, each in losses.items()},
            # Of the same seed: the data, the initial weights and so most of the spread are the same.
            "above_first": {
                form: statistics.mean(one - other for one, other in zip(each, losses[given.forms[0]], strict=True))
                for form, each in losses.items()
            },
        },
    )


def corpus() -> torch.Tensor:
    """Returns the bytes of the modules of Python's library, in the order of their names."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()


def final_loss(form: str, seed: int, given: argparse.Namespace, text: torch.Tensor, draw: int = 0) -> float:
    """Trains a model and returns its loss on text that it has not seen; `draw` changes the rounding of int8 alone."""
    torch.manual_seed(seed)
    sizes = {"n_layer": given.layers, "n_embd": given.width, "n_head": 4, "vocab_size": 256, "n_positions": 128}
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    )
    optimizer = optimizer_of(form, model, seed + 1000 * draw)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=given.steps, cycle_momentum=False)
    chance = torch.Generator().manual_seed(seed)
    border = len(text) * 9 // 10
    for _ in range(given.steps):
        loss(model, text[:border], chance).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        stored = FORMS[form]
        if stored is not None:
            assert isinstance(optimizer, CPUAdamW)
            emulate(optimizer, *stored)
    fixed = torch.Generator().manual_seed(0)  # the same text for all seeds and forms
    with torch.no_grad():
        return statistics.mean(float(loss(model, text[border:], fixed)) for _ in range(_EVALUATED))


def optimizer_of(form: str, model: nn.Module, seed: int) -> torch.optim.Optimizer:
    settings: dict[str, Any] = {"lr": 2e-3, "betas": (0.9, 0.999), "weight_decay": 0.1}
    if form == "int8" or "master" in form:
        low_bits = {"fp32 master": torch.int16, "bf24 master": torch.int8}.get(form.split(",")[0])
        return KernelAdamW(model.parameters(), seed, low_bits, "int8" in form, **settings)
    moments = torch.bfloat16 if form == "bf16" else torch.float32
    return CPUAdamW(model.parameters(), moment_dtype=moments, **settings)


class KernelAdamW(torch.optim.Optimizer):
    """AdamW by the kernel, on fp32 parameters or on the bf16 weights whose values they are."""

    def __init__(
        self,
        parameters: Iterator[nn.Parameter],
        seed: int,
        low_bits: torch.dtype | None,
        codes: bool,
        **settings: Any,
    ) -> None:
        """Stores the form.

        Args:
            parameters: fp32 parameters.
            seed: seed of the roundings.
            low_bits: dtype of the low bits of the masters of bf16 weights; None for fp32 weights.
            codes: True for moments in 8 bits, False for fp32.
            settings: of each group.
        """
        super().__init__(parameters, settings)
        self._seed, self._low_bits, self._codes, self._steps = seed, low_bits, codes, 0
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["partition"] = self._partition(parameter)
                self._show(parameter)

    def _partition(self, parameter: nn.Parameter) -> Partition:
        values, numel = parameter.detach().view(-1), parameter.numel()
        weight = values
        residual: torch.Tensor | None = None
        scales: torch.Tensor | None = None
        if self._low_bits is not None:
            weight, residual = values.bfloat16(), torch.zeros(numel, dtype=self._low_bits)
            split_master(values, weight, residual)
        moments = torch.zeros(numel), torch.zeros(numel)
        if self._codes:
            moments = torch.zeros(numel, dtype=torch.int8), torch.zeros(numel, dtype=torch.uint8)
            scales = torch.zeros(blocks_of(numel), 2)
        return Partition(weight, torch.empty(0), moments, residual, scales=scales)

    def _show(self, parameter: nn.Parameter) -> None:
        """Gives a parameter the values of its weight."""
        weight = self.state[parameter]["partition"].weight
        if weight.data_ptr() != parameter.data_ptr():
            parameter.view(-1).copy_(weight)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._steps += 1
        (group,) = self.param_groups
        step = AdamWStep(
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            eps=1e-8,
            weight_decay=group["weight_decay"],
            step=self._steps,
        )
        for number, parameter in enumerate(group["params"]):
            noise = Noise(noise_stream(self._seed, number, self._steps), 0)
            part = self.state[parameter]["partition"]._replace(grad=parameter.grad.view(-1))
            update(part, [Segment(0, parameter.numel(), step, noise)])
            self._show(parameter)


def loss(model: nn.Module, text: torch.Tensor, chance: torch.Generator) -> torch.Tensor:
    starts = torch.randint(0, len(text) - 128, (8,), generator=chance).tolist()
    ids = torch.stack([text[start : start + 128] for start in starts])
    found: torch.Tensor = model(input_ids=ids, labels=ids).loss
    return found


def emulate(optimizer: CPUAdamW, first: Rounded, second: Rounded) -> None:
    """Rounds all moments to what would be stored of them."""
    for state in optimizer.state.values():
        state["exp_avg"].copy_(first(state["exp_avg"]))
        state["exp_avg_sq"].copy_(second(state["exp_avg_sq"]))


def nearest_bf16(values: torch.Tensor) -> torch.Tensor:
    return values.bfloat16().float()


def in_blocks(values: torch.Tensor, codes: Rounded) -> torch.Tensor:
    """Divides each block by its largest magnitude, applies `codes` to numbers of magnitude 1 at most, and returns."""
    numel = values.numel()
    padded = torch.zeros(-(-numel // _BLOCK) * _BLOCK)
    padded[:numel] = values.flatten()
    blocks = padded.view(-1, _BLOCK)
    scales = blocks.abs().amax(1, keepdim=True)
    found = codes(blocks / scales.clamp_min(torch.finfo(torch.float32).tiny)) * scales
    return found.flatten()[:numel].view(values.shape)


def linear(steps: int, stochastic: bool) -> Rounded:
    """Codes of equal distances, `steps` of them up to 1, rounded to nearest or by chance."""

    def codes(values: torch.Tensor) -> torch.Tensor:
        scaled = values * steps
        rounded = (scaled + torch.rand_like(scaled)).floor() if stochastic else scaled.round()
        return rounded.clamp(-steps, steps) / steps

    return codes


def signed_root(values: torch.Tensor) -> torch.Tensor:
    return values.sign() * values.abs().sqrt()


def signed_square(values: torch.Tensor) -> torch.Tensor:
    return values * values.abs()


def first_moment(stochastic: bool, companded: bool = False) -> Rounded:
    """The first moment in a signed byte; `companded` stores its root, so that small values keep more of their bits."""
    codes = linear(127, stochastic)
    if not companded:
        return lambda values: in_blocks(values, codes)
    return lambda values: signed_square(in_blocks(signed_root(values), codes))


def second_moment(stochastic: bool, least: int, companded: bool = False) -> Rounded:
    """The root of the second moment in an unsigned byte, and `least` at least where it is not zero.

    `companded` stores the fourth root.
    """

    def codes(values: torch.Tensor) -> torch.Tensor:
        return linear(255, stochastic)(values).clamp_min(least / 255) * (values > 0)

    if not companded:
        return lambda values: in_blocks(values.sqrt(), codes).square()
    return lambda values: in_blocks(values.sqrt().sqrt(), codes).square().square()


FORMS: dict[str, tuple[Rounded, Rounded] | None] = {
    "fp32": None,
    "bf16": None,
    "bf16 to nearest": (nearest_bf16, nearest_bf16),
    "int8 to nearest": (first_moment(False), second_moment(False, 0)),
    "int8": None,
    "int8, v from 0": (first_moment(True), second_moment(True, 0)),
    "int8, v from 1": (first_moment(True), second_moment(True, 1)),
    "int8, companded": (first_moment(True, companded=True), second_moment(True, 1, companded=True)),
    "int8, companded to nearest": (first_moment(False, companded=True), second_moment(False, 1, companded=True)),
    "fp32 master": None,
    "fp32 master, int8": None,
    "bf24 master": None,
    "bf24 master, int8": None,
}
"""Forms of the moments by name, with the functions that emulate them; None for those of the kernels."""


if __name__ == "__main__":
    main()
