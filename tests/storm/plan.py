"""What a storm draws from a seed. A plan is data: it prints as what makes it again, and `simpler` takes parts away."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from offload.losses import chunk_loss_of
from tests.storm.division import PLANS, SCHEDULES, Division
from tests.support import models
from tests.support.drives.rot import KINDS as ROT
from tests.support.modules.matrix_models import Words
from tests.support.oracle import PLACEMENTS, Job
from tests.support.ranks import pipelines, tensor_parallel
from tests.support.ranks.rank_jobs import language_rows_loss, rows_loss

# -- models -------------------------------------------------------------------------------------------


class _Model(NamedTuple):
    """A model of the storm, and what can be done with it."""

    make: Callable[[], nn.Module]
    loss: Callable[[Any, int, int], torch.Tensor]
    optimizers: tuple[str, ...]
    layer_major: bool = False


_ELEMENTWISE = ("AdamW", "AdamW", "AdamW", "Adam", "Lion", "Lamb", "Adagrad", "SGD", "torch.optim.RMSprop")
_KERNELS_BY_ELEMENT = ("AdamW", "AdamW", "Adam", "Lion", "Adagrad", "SGD")
"""Optimizers that need no whole parameter."""
MODELS = {
    "gpt2": _Model(models.gpt2, language_rows_loss, _ELEMENTWISE, layer_major=True),
    "dropout": _Model(models.gpt2_dropout, language_rows_loss, _ELEMENTWISE, layer_major=True),
    "llama": _Model(models.llama, language_rows_loss, _ELEMENTWISE, layer_major=True),
    "mixtral": _Model(models.mixtral, language_rows_loss, _ELEMENTWISE, layer_major=True),
    "tied, frozen and unused": _Model(models.Mixture, rows_loss, _ELEMENTWISE),
    "recomputation": _Model(models.Recomputed, rows_loss, _ELEMENTWISE),
    "adapters": _Model(models.lora, language_rows_loss, ("AdamW",)),
    "matrices": _Model(Words, rows_loss, ("Muon", "SinkGD", "AdamW")),
}
DIVISIBLE = {
    "layers": _Model(tensor_parallel.Net, rows_loss, _KERNELS_BY_ELEMENT),
    "stages": _Model(pipelines.whole, rows_loss, _KERNELS_BY_ELEMENT),
}
"""Models that torch divides."""
_LANGUAGE = ("gpt2", "dropout", "llama", "mixtral", "adapters")
"""Models whose sequences ranks can share."""
KINDS = ("stage", "node", "sequence", "tensor", "pipeline")
"""What ranks do that first divided states in stage 3 alone."""
_RATES = {"Lion": 1e-4, "Lamb": 1e-2, "Adagrad": 1e-2, "SGD": 0.05, "Muon": 2e-2}
_PARAMS: dict[str, tuple[tuple[str, Any], ...]] = {"SGD": (("momentum", 0.9),), "Muon": (("adam_lr", 3e-3),)}
_ALL_CODES = "weights nontrainable_weights gradients"
_KERNELS = ("AdamW", "Adam", "Lion", "Lamb", "Adagrad", "SGD")
"""Optimizers whose moments have narrow forms."""


def seeded(plan: Plan, model: Any, step: int, micro: int) -> torch.Tensor:
    """Returns a loss that depends on weights, step and micro-batch alone, however often the step is begun."""
    # For devices that it could find, torch would note the call, with its stack: more time than a small layer takes.
    seed = torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed
    seed(1_000 * step + micro)
    return plan.division.loss(known(plan.model).loss)(model, step, micro)


def known(name: str) -> _Model:
    """Returns the model of a name."""
    return MODELS[name] if name in MODELS else DIVISIBLE[name]


def chunked(model: nn.Module) -> nn.Module:
    """Returns a language model of transformers whose loss comes in chunks."""
    chunk_loss_of(model, chunk_tokens=7)
    return model


# -- the plan -----------------------------------------------------------------------------------------


class Deed(NamedTuple):
    """Something that the loop does in a step, beside training."""

    step: int
    what: str


CALM = ("evaluate", "look", "edit", "save", "state_dict", "cache", "sleep")
"""Done between two steps. Edits are values that depend on the step alone, so they may be done again."""
WILD = ("load", "raise in forward", "raise in backward", "raise before step", "forward alone")
"""Done once in a life, or once in a run; the step that an error has ended is begun again."""


class Fault(NamedTuple):
    """What ends or disturbs a life."""

    what: str
    """"kill", "power", "error", "full", "interrupt", or a kind of rot."""
    after: int
    """Requests to drives, and deeds of the loop, before it."""
    delay: float = 0.0
    """Seconds from there on."""


class Plan(NamedTuple):
    """A run and its weather."""

    seed: int
    model: str
    dtype: str
    optimizer: str
    steps: int
    accumulation: int
    clip: float
    placement: tuple[str, str]
    options: dict[str, Any]
    """Of the block "offload"; those that change bits are those of the calm run too."""
    host: float | None = None
    """How far the host budget is above the least, in times of it; None for the default."""
    device: float | None = None
    """The same of the device's budget."""
    drives: int = 1
    ranks: int = 1
    stage: int = 3
    """Of ZeRO."""
    shard_size: int = -1
    """Ranks of a replica."""
    node: int = 1
    """Ranks of a node, which keeps a secondary partition of the weights."""
    division: Division = Division()
    """What ranks divide beside states."""
    quantized: str = ""
    """What ranks send as codes."""
    chunked: bool = False
    """Whether the loss is computed in chunks of tokens."""
    pieces: bool = False
    """Whether gradients, tiles and what streams come in tiny pieces."""
    late_io: float = 0.0
    """Seconds by which a request is late at most."""
    late_compute: float = 0.0
    """Seconds by which a layer is late at most: meanwhile updates and commits go on."""
    late_device: float | None = None
    """The chance that a copy is not carried out when it could be; None for a device without streams."""
    deeds: tuple[Deed, ...] = ()
    faults: tuple[Fault, ...] = ()
    """One for each life but the last."""

    def job(self) -> Job:
        """Returns what is trained."""
        make = known(self.model).make
        whole = (lambda: chunked(make())) if self.chunked else make
        return Job(
            self.division.model(whole),
            lambda model, step, micro: seeded(self, model, step, micro),
            steps=self.steps,
            accumulation=self.accumulation,
            lr=_RATES.get(self.optimizer, 1e-3),
            clip=self.clip,
            dtype=self.dtype,
            optimizer=self.optimizer,
            params=_PARAMS.get(self.optimizer, ()),
            stage=self.stage,
            shard_size=self.shard_size,
            node=self.node,
            quantized=self.quantized,
            sequence=self.division.parts if self.division.what == "sequence" else 1,
        )

    def calm(self) -> Plan:
        """Returns the run that must have the same bits: all in memory, nothing late, nothing wrong.

        It has the same pieces, since the squares of a norm are added up piece by piece.
        """
        kept = {key: value for key, value in self.options.items() if key in ("moments", "master", "units")}
        return self._replace(
            placement=("none", "none"),
            options={**kept, **({"schedule": "micro_batch_major"} if self.division.what != "pipeline" else {})},
            host=None,
            device=None,
            drives=1,
            late_io=0.0,
            late_compute=0.0,
            late_device=None,
            deeds=tuple(deed for deed in self.deeds if deed.what in ("evaluate", "look", "edit")),
            faults=(),
        )


def draw(seed: int, kind: str = "") -> Plan:
    """Returns the plan of a seed.

    Args:
        seed: the seed.
        kind: one of `KINDS`, which the plan is then of; else one plan of several ranks in some is of one of them.
    """
    chance = random.Random(seed)
    name = chance.choice(list(MODELS))
    model = MODELS[name]
    optimizer = chance.choice(model.optimizers)
    dtype = chance.choice(["fp32", "bf16", "bf16", "fp16"])
    ranks = max(chance.choice([1, 1, 1, 1, 2]), 2 if kind else 1)
    accumulation = chance.choice([1, 1, 2, 3])
    steps = chance.randint(3, 7)
    faults = tuple(_fault(chance, ranks) for _ in range(chance.choice([0, 1, 1, 2, 3])))
    budgets = [None, None, 0.0, 0.2, 1.0] if ranks == 1 else [None]
    late_device = chance.choice([None, 0.5, 0.9, 1.0]) if ranks == 1 else None
    placement = chance.choice([*PLACEMENTS, ("nvme", "nvme"), ("nvme", "nvme"), ("cpu", "nvme")])
    options = _options(chance, model, optimizer, dtype, placement)
    # The late device knows neither threads of micro-batches nor recomputation by hooks, nor products in an update.
    one_thread = not model.layer_major or (options["schedule"] == "micro_batch_major" and "activations" not in options)
    if not one_thread or optimizer not in _KERNELS:
        late_device = None
    later = random.Random(f"later {seed}")  # what came later leaves plans of earlier seeds as they were
    quantized = later.choice(["", "", "weights", "gradients", _ALL_CODES]) if ranks > 1 else ""
    plan = Plan(
        seed=seed,
        model=name,
        dtype=dtype,
        optimizer=optimizer,
        steps=steps,
        accumulation=accumulation,
        clip=chance.choice([0.0, 0.3, 1.0]),
        placement=placement,
        options=options,
        host=chance.choice(budgets),
        device=chance.choice([*budgets, *([5.0] if ranks == 1 else [])]),
        drives=chance.choice([1, 1, 2]),
        ranks=ranks,
        # In stage 3 this order adds micro-batches up before ranks, and the calm run adds them after the ranks.
        stage=1 if ranks > 1 and options.get("schedule") == "layer_major" else 3,
        pieces=chance.random() < 0.5,
        late_io=chance.choice([0.0, 0.001, 0.005]),
        late_device=late_device,
        quantized=quantized,
        chunked=model.layer_major and later.random() < 0.3,
        shard_size=later.choice([-1, 1]) if ranks > 1 and not quantized else -1,
        deeds=tuple(sorted(_deed(chance, steps, ranks) for _ in range(chance.randint(0, 5)))),
        faults=faults,
    )
    latest = random.Random(f"latest {seed}")
    plan = plan._replace(late_compute=latest.choice([0.0, 0.0, 0.002, 0.005]))
    if ranks > 1:
        kind = kind or latest.choice(["", "", *KINDS])
        plan = _OF_KIND[kind](plan, latest) if kind else plan
    rotten = random.Random(f"rotten {seed}")
    # The last one: the run may not go on where both of its last commits have bytes that are damaged.
    if plan.ranks == 1 and "nvme" in plan.placement and rotten.random() < 0.4:
        rot = Fault(rotten.choice(ROT), int(10 ** rotten.uniform(0, 2.7)))
        plan = plan._replace(faults=(*plan.faults[:1], rot))
    return plan


# -- what ranks divide --------------------------------------------------------------------------------


def _in_a_stage(plan: Plan, chance: random.Random) -> Plan:
    """Returns a plan in another stage of ZeRO."""
    turns = plan.options.get("schedule") == "layer_major"
    return plan._replace(stage=chance.choice([0, 0, 1] if turns else [0, 0, 1, 2]))


def _with_nodes(plan: Plan, chance: random.Random) -> Plan:
    """Returns a plan of four ranks as two nodes, with room on the device for few units or for many."""
    options = _in_one_order(plan.options)
    return _budgeted(plan, chance)._replace(ranks=4, node=2, stage=3, shard_size=-1, options=options)


def _of_sequences(plan: Plan, chance: random.Random) -> Plan:
    """Returns a plan whose ranks share sequences."""
    name = chance.choice(_LANGUAGE)
    plan = _of_model(_budgeted(plan, chance), name, MODELS[name], chance)
    ranks, stage = chance.choice([2, 2, 4]), chance.choice([3, 3, 1])
    return plan._replace(
        ranks=ranks,
        stage=stage,
        shard_size=-1,
        node=2 if ranks == 4 and stage == 3 and chance.random() < 0.5 else 1,
        division=Division("sequence", chance.choice([2, ranks])),
        options={**_in_one_order(plan.options), **({"units": ["MixtralExperts"]} if name == "mixtral" else {})},
        chunked=chance.random() < 0.3,
    )


def _of_layers(plan: Plan, chance: random.Random) -> Plan:
    """Returns a plan whose ranks compute layers together."""
    plan = _of_model(_budgeted(plan, chance), "layers", DIVISIBLE["layers"], chance)
    ranks = chance.choice([2, 2, 4])
    return plan._replace(
        ranks=ranks,
        stage=chance.choice([3, 3, 1, 0]),
        shard_size=chance.choice([-1, -1, 1]),
        division=Division("tensor", chance.choice([2, ranks]), chance.choice(PLANS)),
    )


def _of_stages(plan: Plan, chance: random.Random) -> Plan:
    """Returns a plan whose ranks are stages of a pipeline of two, beside another pipeline where there are four."""
    plan = _of_model(_budgeted(plan, chance), "stages", DIVISIBLE["stages"], chance)
    ranks, stage, shard_size = chance.choice([2, 2, 4]), chance.choice([3, 3, 1, 0]), chance.choice([-1, -1, 1])
    schedule = chance.choice(list(SCHEDULES))
    # An error in the middle of a schedule leaves the other stages in it: their user ends the run. And torch's V of two
    # stages a rank has no evaluation.
    possible = {*CALM, "raise before step"} - ({"evaluate"} if schedule == "ZBVZeroBubble" else set())
    return plan._replace(
        ranks=ranks,
        stage=stage,
        shard_size=shard_size,
        division=Division("pipeline", 2, schedule),
        accumulation=chance.choice([2, 4]),
        deeds=tuple(deed for deed in plan.deeds if deed.what in possible),
    )


_OF_KIND = dict(zip(KINDS, (_in_a_stage, _with_nodes, _of_sequences, _of_layers, _of_stages), strict=True))


def _in_one_order(options: dict[str, Any]) -> dict[str, Any]:
    """Returns options without turns of micro-batches, which add up otherwise in stage 3, and for which parts cannot."""
    return {**options, "schedule": "micro_batch_major"} if "schedule" in options else options


def _budgeted(plan: Plan, chance: random.Random) -> Plan:
    budgets = [None, 0.0, 0.2, 1.0]
    return plan._replace(device=chance.choice(budgets), host=chance.choice([None, *budgets]))


def _of_model(plan: Plan, name: str, model: _Model, chance: random.Random) -> Plan:
    """Returns a plan that trains another model."""
    optimizer = chance.choice(model.optimizers)
    options = _options(chance, model, optimizer, plan.dtype, plan.placement)
    return plan._replace(model=name, optimizer=optimizer, options=options, quantized="", chunked=False)


def _fault(chance: random.Random, ranks: int) -> Fault:
    kinds = ["kill", "kill", "power", "error", "full", "interrupt"] if ranks == 1 else ["kill", "error", "interrupt"]
    return Fault(chance.choice(kinds), int(10 ** chance.uniform(0, 2.7)), chance.choice([0.0, 0.0, 0.003]))


def _deed(chance: random.Random, steps: int, ranks: int) -> Deed:
    kinds = [*CALM, *WILD] if ranks == 1 else [*CALM, *WILD[1:]]  # ranks would have to share that a load was done
    return Deed(chance.randrange(steps), chance.choice(kinds))


def _options(
    chance: random.Random, model: _Model, optimizer: str, dtype: str, placement: tuple[str, str]
) -> dict[str, Any]:
    options: dict[str, Any] = {"durability": chance.choice(["auto", "step", "step", "none", {"every": 2}])}
    if options["durability"] == {"every": 2} and "nvme" not in placement:
        options["durability"] = "step"
    if model.layer_major:
        options["schedule"] = chance.choice(["micro_batch_major", "layer_major", "auto"])
        options["activations"] = chance.choice([None, None, "device", "cpu", "nvme", "auto"])
    if optimizer in _KERNELS:
        options["speculate"] = chance.choice([True, False, "auto"])
        options["moments"] = chance.choice([None, None, "bf16", "int8"])
        if dtype == "bf16":
            options["master"] = chance.choice(["fp32", "fp32", "bf24"])
    return {key: value for key, value in options.items() if value is not None}


# -- simpler plans ------------------------------------------------------------------------------------


def simpler(plan: Plan) -> Iterator[Plan]:
    """Yields plans with one thing less, those first that take the most away."""
    for index in range(len(plan.faults)):
        yield plan._replace(faults=plan.faults[:index] + plan.faults[index + 1 :])
    for index in range(len(plan.deeds)):
        yield plan._replace(deeds=plan.deeds[:index] + plan.deeds[index + 1 :])
    plain: dict[str, Any] = {
        "shard_size": -1,
        "quantized": "",
        "chunked": False,
        "node": 1,
        "division": Division(),
        "stage": 3,
        "ranks": 1,
        "late_compute": 0.0,
        "late_device": None,
        "late_io": 0.0,
        "pieces": False,
        "drives": 1,
        "host": None,
        "device": None,
        "accumulation": 1,
        "dtype": "fp32",
        "clip": 0.0,
        "model": "gpt2",
        "optimizer": "AdamW",
    }
    if plan.options.get("schedule") == "layer_major":
        del plain["stage"]  # in stage 3 ranks add up otherwise than the calm run
    for name, value in plain.items():
        if getattr(plan, name) != value:
            yield plan._replace(**{name: value})
    for key in plan.options:
        yield plan._replace(options={name: value for name, value in plan.options.items() if name != key})
    last = max((deed.step for deed in plan.deeds), default=0)
    if plan.steps > max(2, last + 1):
        yield plan._replace(steps=plan.steps - 1)
