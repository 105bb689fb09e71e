"""The bytes of a trace file in pieces, decompressed in a thread beside the decoder.

zlib releases the interpreter's lock, so that decompression and decoding take two cores. Memory stays at a few pieces
whatever the size of the file. `json_events.py` reads from it. The limits of a trace are here too, and
the finding about one that cannot be read.
"""

import queue
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from threefold.findings import Finding, FindingsError

MAX_TRACE_BYTES = 2**36  # 64 GiB of JSON after decompression
MAX_RATIO = 300  # of decompressed to compressed bytes; traces reach 40
MIN_BOMB_BYTES = 2**28  # a small file may compress as well as it likes
MAX_EVENT_BYTES = 2**26  # 64 MiB; a real event has some kilobytes
MAX_EVENTS = 40_000_000  # events that are kept
MAX_NAMES = 2_000_000  # different names of kernels, operators and annotations

RULE = "trace-readable"
ADVICE = "record the trace again, and let the profiler finish writing it"


def unreadable(path: Path, problem: str, advice: str = ADVICE) -> FindingsError:
    """The one finding about a trace that is damaged, hostile or of no known kind."""
    return FindingsError([Finding(rule=RULE, at=str(path), problem=problem, advice=advice)])


PIECE_BYTES = 2**23
GZIP_MAGIC = b"\x1f\x8b"


@contextmanager
def text_pieces(path: Path, file: BinaryIO) -> Iterator[Iterator[bytes]]:
    """An iterator over pieces of the file's text. Leaving the block ends the thread."""
    is_gzip = file.read(2) == GZIP_MAGIC
    file.seek(0)
    pieces = _decompressed(path, file) if is_gzip else iter(lambda: file.read(PIECE_BYTES), b"")
    ready: queue.Queue[bytes | BaseException | None] = queue.Queue(maxsize=3)
    leaving = threading.Event()

    def put(item: bytes | BaseException | None) -> bool:
        while not leaving.is_set():
            try:
                ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def produce() -> None:
        try:
            for piece in pieces:
                if not put(piece):
                    return
            put(None)
        except BaseException as error:  # raised where the pieces are consumed
            put(error)

    def consume() -> Iterator[bytes]:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item

    thread = threading.Thread(target=produce, name="trace decompression", daemon=True)
    thread.start()
    try:
        yield consume()
    finally:
        leaving.set()
        thread.join()


def _decompressed(path: Path, file: BinaryIO) -> Iterator[bytes]:
    """The text of a gzip file, which may have several members."""
    num_in = num_out = 0
    data, decoder, is_whole = b"", zlib.decompressobj(31), False
    while True:
        if not data:
            data = file.read(2**20)
            num_in += len(data)
        if not data:
            break
        try:
            piece = decoder.decompress(data, PIECE_BYTES)
        except zlib.error as error:
            raise unreadable(path, f"it is no whole gzip file: {error}") from None
        num_out += len(piece)
        if num_out > MAX_TRACE_BYTES or (num_out > MIN_BOMB_BYTES and num_out > MAX_RATIO * num_in):
            raise unreadable(path, f"{num_in:,} compressed bytes become more than {num_out:,}: no trace does that")
        if piece:
            yield piece
        data, is_whole = decoder.unconsumed_tail, decoder.eof
        if decoder.eof:
            data = decoder.unused_data.lstrip(b"\0")  # there may be padding behind a member
            decoder = zlib.decompressobj(31)
    if not is_whole:
        raise unreadable(path, "it is truncated: the gzip stream ends early")
