"""A buffer of a copy is used again when its requests have ended; after an error none of them is in flight."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import pytest

from offload.errors import IoError
from offload.fileio.buffered_copy import WriteBehind, flow


class Request:
    """A request that ends when somebody waits for it, or fails then."""

    def __init__(self, fails: bool = False) -> None:
        self._fails, self.waited = fails, 0

    def done(self) -> bool:
        return bool(self.waited)

    def wait(self) -> int:
        self.waited += 1
        if self._fails:
            raise IoError("file", 0, 0, errno.EIO, "write")
        return 1


def test_a_buffer_is_filled_again_when_its_writes_have_ended() -> None:
    buffers = [memoryview(bytearray(1)) for _ in range(3)]
    requests: list[Request] = []
    with WriteBehind(buffers) as behind:
        for index in range(7):
            buffer, writes = behind.take()
            assert buffer is buffers[index % 3] and not writes
            assert [request.waited for request in requests] == [1] * max(index - 2, 0) + [0] * min(index, 2)
            requests.append(Request())
            writes.append(requests[-1])  # type: ignore[arg-type]
    assert all(request.waited for request in requests)


@pytest.mark.parametrize("failing", range(4))
def test_the_error_of_a_write_comes_once_and_after_all_writes(failing: int) -> None:
    requests = [Request(fails=index == failing) for index in range(4)]
    raised = 0

    def write() -> None:
        nonlocal raised
        with WriteBehind([memoryview(bytearray(1)) for _ in range(2)]) as behind:
            for request in requests:
                try:
                    _, writes = behind.take()
                except IoError:
                    raised += 1
                    raise
                writes.append(request)  # type: ignore[arg-type]

    with pytest.raises(IoError) as caught:
        write()
    assert caught.value.errno == errno.EIO and raised == (failing < 2), "at the next use of the buffer, or at the end"
    begun = failing + 2 if failing < 2 else 4
    assert all(request.waited for request in requests[:begun])


def test_an_error_elsewhere_is_the_one_that_is_raised() -> None:
    request = Request(fails=True)

    def convert() -> None:
        with WriteBehind([memoryview(bytearray(1))]) as behind:
            behind.take()[1].append(request)  # type: ignore[arg-type]
            raise ValueError("of a conversion")

    with pytest.raises(ValueError, match="of a conversion"):
        convert()
    assert request.waited


def test_reads_that_began_before_one_that_cannot_are_awaited() -> None:
    begun: list[Request] = []

    def begin(item: int, _: memoryview) -> Iterator[Request]:
        for part in range(3):
            if (item, part) == (1, 2):
                raise IoError("file", 0, 0, errno.EBADF, "read")
            begun.append(Request())
            yield begun[-1]

    with pytest.raises(IoError, match="cannot read file"):
        flow([memoryview(bytearray(1)) for _ in range(4)], range(3), begin, lambda *_: (), lambda *_: None)
    assert len(begun) == 5 and all(request.waited == 1 for request in begun)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_chunks_are_ended_in_their_order_whatever_the_buffers(count: int) -> None:
    ended: list[int] = []

    def end(item: int, _: memoryview) -> tuple[()]:
        ended.append(item)
        return ()

    flow([memoryview(bytearray(1)) for _ in range(count)], range(9), lambda *_: [Request()], end, lambda *_: None)
    assert ended == list(range(9))
