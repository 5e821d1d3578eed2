# SPDX-License-Identifier: Apache-2.0
"""Messages: several tensors in one buffer, with an envelope at its end.

gloo raises no error if a message is shorter than the receive buffer, or if another message of the
same size arrives. So on the CPU, tensors are sent as one message with an envelope (MPI's term). The
envelope contains the length of the message, its plan and call, and a digest of its content. A rank
that is out of step gets an error instead of wrong numbers. A receive buffer has room for the
longest message of the grid, because gloo aborts the process if a message is longer than the buffer.

On other devices there is no envelope, because reading it would block the device at every hop. On
these devices, ranks compare calls only when they make a plan, or in `Groups.compare_calls`. A rank
sends its own tensors without a copy, as separate operations of one batch. Received tensors that it
sends on, and sums of partial results, are one message each, to halve the time on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

Shapes = Sequence[tuple[torch.Size, torch.dtype]]
ALIGNMENT = 16  # bytes: vectorised kernels require it for the start of a tensor
ENVELOPE = 5 * 8  # bytes: the length of the message and the fields of `Envelope`, int64 each


class CallTag(NamedTuple):
    """Identity of the call to which a message belongs.

    Attributes:
        plan: Digest of the plan.
        call: Number of the call among all calls on its groups.
        label: Digest of the label and of two flags: whether the call has a sink, and whether it
            keeps keys in host memory.
    """

    plan: int = 0
    call: int = 0
    label: int = 0


NO_CALL = CallTag()  # for messages outside calls, such as measurements


class Envelope(NamedTuple):
    """Identity of a message, which must be equal at sender and receiver. All values are int64.

    Attributes:
        call: Tag of the call to which the message belongs.
        content: Digest of the name of the content, such as pass and chunk.
    """

    call: CallTag
    content: int


class Message(NamedTuple):
    """Tensors that are sent together from one buffer.

    Attributes:
        flat: The whole message, uint8; None if the tensors are never sent as one message.
        tensors: Views of `flat`, or separate tensors if `flat` is None.
        room: Buffer that begins with `flat`, and may be larger; or None.
    """

    flat: torch.Tensor | None
    tensors: tuple[torch.Tensor, ...]
    room: torch.Tensor | None = None


class MessageLayout(NamedTuple):
    """Positions of tensors in a message.

    Attributes:
        length: Bytes without the envelope.
        parts: dtype, shape, strides and offset (in elements of this dtype) of each tensor.
    """

    length: int
    parts: tuple[tuple[torch.dtype, torch.Size, tuple[int, ...], int], ...]


def layout_of(shapes: Shapes) -> MessageLayout:
    """Return the layout of a message with aligned tensors of these shapes and dtypes."""
    start, parts = 0, []
    for shape, dtype in shapes:
        size, strides = 1, []
        for n in reversed(shape):
            strides.insert(0, size)
            size *= n
        parts.append((dtype, shape, tuple(strides), start // dtype.itemsize))
        start += -(-size * dtype.itemsize // ALIGNMENT) * ALIGNMENT
    return MessageLayout(start, tuple(parts))


def empty(shapes: Shapes, device: torch.device, least: int = 0) -> Message:
    """Return an uninitialized message for tensors of these shapes and dtypes.

    Args:
        shapes: Shape and dtype of each tensor.
        device: Device of the message.
        least: Minimum size of the buffer in bytes; used only on the CPU.
    """
    layout = layout_of(shapes)
    return carve(
        torch.empty(room_size(layout, device, least), dtype=torch.uint8, device=device), layout
    )


def room_size(layout: MessageLayout, device: torch.device, least: int = 0) -> int:
    """Return the size in bytes of a buffer for a message; on the CPU, at least `least`."""
    return max(layout.length + ENVELOPE, least) if device.type == "cpu" else layout.length


def carve(buffer: torch.Tensor, layout: MessageLayout) -> Message:
    """Return a message whose tensors are views of the beginning of a buffer."""
    length = layout.length + ENVELOPE if buffer.is_cpu else layout.length
    flat = buffer if length == buffer.numel() else buffer[:length]
    tensors = [
        flat.view(dtype).as_strided(shape, strides, before)
        for dtype, shape, strides, before in layout.parts
    ]
    return Message(flat, tuple(tensors), buffer)


def pack(tensors: Sequence[torch.Tensor], envelope: Envelope) -> Message:
    """Return a message with copies of the tensors and with the envelope."""
    message = empty([(t.shape, t.dtype) for t in tensors], tensors[0].device)
    for target, source in zip(message.tensors, tensors, strict=True):
        target.copy_(source)
    write_envelope_(message, envelope)
    return message


def write_envelope_(message: Message, envelope: Envelope) -> None:
    """Write the envelope at the end of a message on the CPU; do nothing on other devices."""
    if message.flat is not None and message.flat.device.type == "cpu":
        message.flat[-ENVELOPE:] = _bytes(message.flat, envelope)


def mismatch(flat: torch.Tensor, envelope: Envelope) -> str | None:
    """Compare the envelope of a received message with the expected one.

    Returns:
        None if they are equal or the device is not the CPU; otherwise a description of the
        difference.
    """
    if flat.device.type != "cpu" or torch.equal(flat[-ENVELOPE:], _bytes(flat, envelope)):
        return None
    length, plan, call, label, _ = flat[-ENVELOPE:].clone().view(torch.int64).tolist()
    expected = envelope.call
    if length != flat.numel():
        difference = f"received a message of another size than the expected {flat.numel()} bytes"
    elif call != expected.call:
        difference = f"call {expected.call} of this rank received a message of call {call}"
    elif plan != expected.plan:
        difference = f"call {call} has another plan on the sending rank"
    elif label != expected.label:
        difference = (
            f"call {call} has another label or sink (or host memory) on the sending rank, or has "
            "no label and was made by another line of the program"
        )
    else:
        difference = f"call {call} received a message of another pass or chunk"
    return f"{difference}; the ranks do not run the same plans in the same order"


def _bytes(flat: torch.Tensor, envelope: Envelope) -> torch.Tensor:
    fields = [flat.numel(), *envelope.call, envelope.content]
    return torch.tensor(fields, dtype=torch.int64).view(torch.uint8)
