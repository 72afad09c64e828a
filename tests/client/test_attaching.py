"""A client's attachments without a daemon: which messages are sent, and when."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from tierd.client.attaching import AGAIN_MAX_S, REFUSALS_MAX, Attachment, Attachments
from tierd.shared_memory.exports import HOST_UUID, Export, ExportKind, PageLayout, Part, Run
from tierd.wire import messages as m


class FakeHandle:
    """A registered handle, until the session breaks."""

    def __init__(self) -> None:
        self.number: int | None = 4


class Side:
    """A client's attachments, and the messages that they have sent."""

    def __init__(self) -> None:
        self.sent: list[m.FromClient] = []
        self.handle = FakeHandle()
        self.on_send: Callable[[m.FromClient], None] = lambda _: None
        self.attachments = Attachments(self._send, itertools.count(100).__next__)
        self.probes: list[bool] = []

    def _send(self, message: m.FromClient, fd: int | None) -> None:
        self.sent.append(message)
        self.on_send(message)

    def make(self, *exports: int) -> Attachment:
        """Of exports that have these descriptors."""
        shown = [
            Export(ExportKind.MEMFD, HOST_UUID, 4096, b"", (Part(0, 4096, fd),)) for fd in exports
        ]
        runs = tuple(Run(at, 0, 64) for at in range(len(exports)))

        def probe(first: bool) -> tuple[int, bytes]:
            self.probes.append(first)
            return 0, bytes(32)

        return Attachment(
            self.handle,
            shown,
            PageLayout(runs, 64, 8),
            events=[],
            gate_fd=9,
            layer_ends=[],
            probe=probe,
        )

    def took(self, kind: type[m.Message]) -> list:
        """Messages of a kind that were sent since the last look, at any."""
        found = [message for message in self.sent if isinstance(message, kind)]
        self.sent.clear()
        return found

    def attach(self, attachment: Attachment, number: int) -> None:
        """It is attached under a number."""
        self.attachments.add(attachment)
        [sent] = self.took(m.Attach)
        assert self.attachments.take(m.Attached(sent.call, number, "direct"), 0.0)
        assert attachment.number == number


@pytest.fixture
def side() -> Side:
    return Side()


def test_second_attachment_does_not_affect_the_first(side: Side) -> None:
    """Each namespace change would attach all pages once more, and forget the attachment before."""
    first, second = side.make(5), side.make(5)
    side.attach(first, 1)
    side.attachments.add(second)
    assert [type(x) for x in side.sent] == [m.Attach], "the export is known already"
    assert first.number == 1


def test_attachments_are_sent_one_at_a_time(side: Side) -> None:
    """After a reconnect all are attached again, and probe one block: the daemon would find the
    bytes of another one there, and refuse."""
    attachments = [side.make(5) for _ in range(4)]
    for attachment in attachments:
        side.attachments.add(attachment)
    side.attachments.remove(attachments[2])
    for number, attachment in enumerate((attachments[0], attachments[1], attachments[3])):
        [attach] = side.took(m.Attach)
        assert len(side.probes) == number + 1
        if number == 1:
            assert side.attachments.refused(attach.call, "no", 0.0)
            assert attachment.refusal == "no"
        else:
            side.attachments.take(m.Attached(attach.call, number, "how"), 0.0)
            assert attachment.number == number
    assert not side.took(m.Attach)
    side.attachments.lost()
    side.attachments.offer(side.handle)
    assert len(side.took(m.Attach)) == 1


def test_session_may_break_while_exports_are_sent(side: Side) -> None:
    """A daemon that dies at that moment would take the engine with it."""

    def breaks(message: m.FromClient) -> None:
        if isinstance(message, m.Part):
            side.handle.number = None
            side.attachments.lost()

    side.on_send = breaks
    attachment = side.make(5, 6)
    side.attachments.add(attachment)
    assert not side.took(m.Attach)
    side.on_send = lambda _: None
    side.handle.number = 7
    side.attachments.offer(side.handle)
    kinds = [type(x) for x in side.sent]
    assert kinds == [m.Export, m.Part, m.Export, m.Part, m.Attach]
    [attach] = side.took(m.Attach)
    assert attach.handle == 7


def test_attachment_removed_early_is_known_until_it_is_detached(side: Side) -> None:
    """An engine would free memory that the daemon is just opening."""
    attachment = side.make(5)
    side.attachments.add(attachment)
    [attach] = side.took(m.Attach)
    side.attachments.remove(attachment)
    assert side.attachments.is_known(attachment)
    assert not side.sent
    side.attachments.take(m.Attached(attach.call, 3, "direct"), 0.0)
    [detach] = side.took(m.Detach)
    assert detach.attachment == 3
    assert side.attachments.is_known(attachment)
    side.attachments.take(m.Detached(detach.call, 3, ""), 0.0)
    assert not side.attachments.is_known(attachment)
    assert side.took(m.DropExport)


def test_attachment_removed_early_and_refused_is_forgotten(side: Side) -> None:
    """A detach would wait for an answer that has come."""
    attachment = side.make(5)
    side.attachments.add(attachment)
    [attach] = side.took(m.Attach)
    side.attachments.remove(attachment)
    assert side.attachments.refused(attach.call, "no", 0.0)
    assert not side.attachments.is_known(attachment)
    assert side.took(m.DropExport)
    side.attachments.try_again(1e9)
    assert not side.sent


def test_daemon_that_cannot_attach_now_is_asked_again(side: Side) -> None:
    """Another engine's crash of the copy process would be taken for a refusal, for ever."""
    attachment = side.make(5)
    side.attachments.add(attachment)
    now_s = 0.0
    for _ in range(REFUSALS_MAX):
        [attach] = side.took(m.Attach)
        side.attachments.take(m.Detached(attach.call, 0, "it is ending"), now_s)
        assert attachment.refusal is None
        assert side.took(m.DropExport)
        side.attachments.try_again(now_s)
        assert not side.sent, "at once"
        now_s += AGAIN_MAX_S
        side.attachments.try_again(now_s)
    [attach] = side.took(m.Attach)
    side.attachments.take(m.Detached(attach.call, 0, "it is ending"), now_s)
    assert attachment.refusal == "it is ending"
    assert side.probes == [True] * (REFUSALS_MAX + 1)


def test_first_refusal_is_permanent(side: Side) -> None:
    """An engine would wait for an attachment that is never accepted."""
    attachment = side.make(5)
    side.attachments.add(attachment)
    [attach] = side.took(m.Attach)
    assert side.attachments.refused(attach.call, "no such GPU", 0.0)
    assert attachment.refusal == "no such GPU"
    side.attachments.try_again(1e9)
    assert not side.took(m.Attach)


def test_end_of_the_copy_process_attaches_again(side: Side) -> None:
    """After a crash of the copy process an engine would copy nothing."""
    attachment = side.make(5)
    side.attach(attachment, 2)
    side.attachments.take(m.Detached(0, 2, "it has ended"), 10.0)
    assert attachment.number is None
    assert side.took(m.DropExport)
    side.attachments.try_again(10.2)
    assert [type(x) for x in side.sent] == [m.Export, m.Part, m.Attach]
    assert side.probes == [True, False]
