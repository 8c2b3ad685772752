"""Copies records from the host pool into slots: the loop that meets the bus.

A record is cut into pieces of one access (16 bytes, or 4 where the record is no multiple of 16).
All pieces of all records of a plan form one line, piece by piece next to each other, and thread t
of n takes pieces t, t + n, t + 2n, ...: neighbouring threads read neighbouring bytes, so a warp
asks the bus for whole lines, and no thread idles at a record's end.

A read over the bus takes microseconds, so each thread asks for several pieces (`unroll`) before it
waits for the first one. Bytes moved: record_bytes per record over the bus, as many into the slots.

It deliberately does not know why these records are wanted, nor who else copies.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from minihisparse.kernels.device import (
    cuda,
    device_function,
    int64,
    ld4_host,
    ld16_host,
    st4,
    st16,
    uint32,
)


@cache
def copy_function(record_bytes_are_16s: bool, unroll: int = 3) -> Callable:
    """A function for kernels that copies records, made for one width of access."""
    WIDE, UNROLL = record_bytes_are_16s, unroll
    PIECE_BYTES = 16 if WIDE else 4
    WORDS = PIECE_BYTES // 4

    @device_function
    def copy_records(
        num_records,  # how many records the plan has
        host_rows,  # int32 [>= num_records]: where each one comes from
        slots,  # int32 [>= num_records]: where it goes
        host_address,  # of host row 0
        slot_address,  # of slot 0
        record_bytes,
        thread,  # this thread's number among those that copy this plan
        num_threads,
    ):
        pieces_per_record = record_bytes // PIECE_BYTES
        num_pieces = num_records * pieces_per_record
        piece = thread
        # Divided once; after that, record and offset are stepped along with the piece.
        record = int64(uint32(thread) // uint32(pieces_per_record))
        offset = thread - record * pieces_per_record
        record_step = int64(uint32(num_threads) // uint32(pieces_per_record))
        offset_step = num_threads - record_step * pieces_per_record
        words = cuda.local.array((UNROLL, WORDS), uint32)
        targets = cuda.local.array(UNROLL, int64)
        while piece < num_pieces:
            for u in range(UNROLL):
                targets[u] = 0
                if piece < num_pieces:
                    source = host_address + host_rows[record] * record_bytes + offset * PIECE_BYTES
                    targets[u] = slot_address + slots[record] * record_bytes + offset * PIECE_BYTES
                    if WIDE:
                        a, b, c, d = ld16_host(source)
                        words[u, 0] = a
                        words[u, 1] = b
                        words[u, 2] = c
                        words[u, 3] = d
                    else:
                        words[u, 0] = ld4_host(source)
                piece += num_threads
                record += record_step
                offset += offset_step
                if offset >= pieces_per_record:  # once at most: offset_step is less
                    offset -= pieces_per_record
                    record += 1
            for u in range(UNROLL):
                if targets[u] != 0:
                    if WIDE:
                        st16(targets[u], words[u, 0], words[u, 1], words[u, 2], words[u, 3])
                    else:
                        st4(targets[u], words[u, 0])

    return copy_records
