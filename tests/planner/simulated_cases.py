"""Units, uses and budgets that a simulated pager runs."""

from __future__ import annotations

from typing import Any, NamedTuple

from offload.planner.simulation.simulate import Budgets, Simulation, Use, simulate
from offload.planner.simulation.updater import UpdateCost
from offload.states import Tier
from offload.swapper.policy import Limits
from offload.swapper.table import UnitSize, pieces_of

PAGE = 4096


def unit(pages: int, tier: Tier = Tier.DISK) -> UnitSize:
    return UnitSize(f"{pages} pages", pages * PAGE, tier, pages * PAGE, pieces_of([range(pages * PAGE)]))


def cost(pages: int, tier: Tier = Tier.DISK, spills: bool = False) -> UpdateCost:
    """Returns the cost of updating a bf16 unit all of whose states are in one tier."""
    numel, on_disk = pages * PAGE // 2, tier is Tier.DISK
    sizes = (2 * numel, 10 * numel, 12 * numel) if on_disk else (0, 0, 0)
    return UpdateCost(numel, *sizes, 2 * numel * spills, revocable=on_disk)


# -- any run ------------------------------------------------------------------------------------------


class Case(NamedTuple):
    uses: list[Use]
    sizes: list[UnitSize]
    updates: list[UpdateCost | None]
    tile_numel: int | None
    limits: Limits

    @property
    def moving(self) -> list[int]:
        """Bytes of the units that are not stored on the device."""
        return sorted(size.nbytes for size in self.sizes if not size.device_resident) or [0]

    @property
    def on_disk(self) -> list[int]:
        return sorted(size.nbytes for size in self.sizes if size.tier is Tier.DISK) or [0]

    def run(self, host: int, device: int, steps: int = 3, **options: Any) -> Simulation:
        return simulate(
            [self.uses] * steps,
            self.sizes,
            self.updates,
            Budgets(host, device),
            self.limits,
            tile_numel=self.tile_numel,
            **options,
        )
