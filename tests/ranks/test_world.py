"""A process that trains alone is a world of one: it shares, agrees and gathers at once, with what it has itself."""

from __future__ import annotations

import torch

from offload.distributed.agreement import Agreement, AllOrNothing, Collective, all_or_nothing
from offload.distributed.process_group import Communication, Mesh, Ranks
from offload.distributed.world import World
from offload.engine.callbacks import Edit, GradientStats
from offload.swapper.memory.device import DONE


def test_collectives_of_one_process_return_what_it_has() -> None:
    ranks = Ranks(member=5)
    assert (ranks.rank, ranks.size, ranks.shard, ranks.mesh, ranks.members) == (0, 1, 0, Mesh(), (5,))
    assert ranks.share(("a", None)) == [("a", None)] and ranks.collect([7, 8], "look") == [[7, 8]]
    assert ranks.collect_bytes(b"xyz", "look") == [b"xyz"] and ranks.divided([[0], [1]]).members == (5,)
    values, received = torch.arange(6.0), torch.zeros(6)
    ranks.broadcast(values, 0)
    ranks.all_reduce(values).wait()
    assert torch.equal(values, torch.arange(6.0))
    for send in (
        lambda: ranks.exchange(received.view(1, -1), values.view(1, -1), [0]).order_compute(),
        lambda: ranks.gather_parts(received, values).wait(),
        lambda: ranks.gather_sums(received, values).wait(),
        lambda: ranks.swap(received, [6], values, [6], "look"),
    ):
        received.zero_()
        send()
        assert torch.equal(received, values)
    assert ranks.gather(values.view(torch.uint8), [range(24)], DONE) is DONE
    ranks.close("its engine was closed")
    assert not ranks.lost and ranks.sent == Communication()


def test_a_process_agrees_with_itself() -> None:
    agreement, stats = Agreement(), GradientStats(sum_squares=2.5, present=[{1}])
    assert agreement.step(3, 4, 5, lambda: stats) is stats and agreement.mean(0.1) == 0.1
    edits = [Edit(start=2, stop=4, values=torch.ones(2))]
    assert agreement.edit(1, edits) is edits and agreement.add_up([1.5, 2.0]) == [1.5, 2.0]
    with all_or_nothing(agreement, Collective.SAVE, "save") as ranks:
        assert ranks.settle(lambda: "mine") == ["mine"] and ranks.by_first(lambda: 6) == 6
        ranks.same({"tag": "a"})
    agreement.end(remove=True)
    assert not agreement.interrupted


def test_without_a_grid_all_processes_divide_states() -> None:
    world = World()
    assert not world.divides_model and not world.shares_batches and world.parts == () and world.suffix == ""
    assert (world.data_rank, world.data_ranks, world.position, world.tensor_size) == (0, 1, 0, 1)
    stats = GradientStats(sum_squares=1.0, present=[])
    assert world.step(stats, 1, 2, 3) is stats and world.counted_elsewhere([]) == frozenset()


def test_ranks_that_share_a_sequence_have_the_samples_of_one() -> None:
    everyone, pair = Ranks(), Ranks()
    everyone.rank, everyone.size = 5, 6
    pair.size = 2
    world = World(everyone=everyone, ranks=everyone, sequence=pair)
    assert world.shares_batches and (world.data_rank, world.data_ranks) == (2, 3)
    assert AllOrNothing(World().everyone, "look").settle(lambda: 1) == [1]
