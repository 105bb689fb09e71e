"""Reads the part of Python's pickle format that torch writes, as plain data. Nothing is called.

A pickle is a program: an ordinary unpickler imports what it names and calls it. Here a class or function stays a
`Global`, its name, and what would be a call or an object is a `Record` of that name with its arguments and state.
Checkpoints (`engine/run/dcp_format.py`, `dcp_format.py`), memory snapshots and dumps of the flight recorder are read by
it, and take from the records what they know. Time and memory are in proportion to the bytes that are read: numbers are
short, and only texts, numbers and records are keys of dicts.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

PERSISTENT = "persistent id"  # the name of a record that stands for an object kept outside of the pickle
_LONG_BYTES = 16
MAX_OPERATIONS = 2**27  # each takes 0.3 us, and up to 80 bytes


@dataclass(frozen=True, slots=True)
class Global:
    """A class, a function or a value of a module, by its name."""

    name: str


@dataclass(slots=True, eq=False)
class Record:
    """What the pickle would make by calling `name` with `arguments`, and the state it would give to that object."""

    name: str
    arguments: tuple[Any, ...]
    state: Any = None


def read_inert(
    content: bytes, is_known: Callable[[str], bool], kind: str = "a checkpoint", most: int = MAX_OPERATIONS
) -> Any:
    """The value of a pickle. Raises ValueError where it is none, is cut off, has more than `most` operations, or names
    something that is not known."""
    try:
        return _Machine(content, is_known, kind).run(most)
    except (IndexError, KeyError, TypeError, struct.error, UnicodeError) as error:
        raise ValueError(f"no pickle that torch writes: {type(error).__name__}") from None


class _Machine:
    """A stack of values, the positions of marks in it, and a memo. One method for each opcode."""

    def __init__(self, content: bytes, is_known: Callable[[str], bool], kind: str) -> None:
        self.content, self.at, self.is_known, self.kind = content, 0, is_known, kind
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def run(self, most: int) -> Any:
        for _ in range(most):
            opcode = self.content[self.at]
            self.at += 1
            if opcode == 0x2E:  # STOP
                [value] = self.stack
                return value
            if opcode not in _ACTIONS:
                raise ValueError(f"no pickle that torch writes: it has opcode {opcode:#x}")
            _ACTIONS[opcode](self)
        raise ValueError(f"it has more than {most} operations, too many for {self.kind}")

    def take(self, count: int) -> bytes:
        part = self.content[self.at : self.at + count]
        if len(part) < count:
            raise ValueError("the pickle is cut off")
        self.at += count
        return part

    def byte(self) -> int:
        self.at += 1
        return self.content[self.at - 1]

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def line(self) -> str:
        end = self.content.index(b"\n", self.at)
        text = self.content[self.at : end].decode("utf-8")
        self.at = end + 1
        return text

    def marked(self) -> list[Any]:
        """Take all values above the last mark."""
        mark = self.marks.pop()
        values = self.stack[mark:]
        del self.stack[mark:]
        return values

    def fold(self, count: int) -> None:
        """Make a tuple of the last values."""
        if len(self.stack) < count:
            raise IndexError
        self.stack[len(self.stack) - count :] = [tuple(self.stack[len(self.stack) - count :])]

    def push_long(self) -> None:
        count = self.byte()
        if count > _LONG_BYTES:
            raise ValueError(f"it has a number of {count} bytes")
        self.stack.append(int.from_bytes(self.take(count), "little", signed=True))

    def push_global(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str):  # to print nested tuples can take for ever
            raise TypeError
        full = f"{module}.{name}"
        if not self.is_known(full):
            raise ValueError(f"it names {full[:100]}, which is no part of {self.kind}")
        self.stack.append(Global(full))

    def stack_global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.push_global(module, name)

    def call(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if not isinstance(function, Global) or not isinstance(arguments, tuple):
            raise TypeError
        self.stack.append(Record(function.name, arguments))

    def build(self) -> None:
        state, record = self.stack.pop(), self.stack[-1]
        if not isinstance(record, Record) or record.state is not None:
            raise TypeError
        record.state = state

    def append(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, list):
            raise TypeError
        target.extend(values)

    def set_items(self, pairs: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict) or len(pairs) % 2:
            raise TypeError
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            if not isinstance(key, str | int | Record):  # the hash of nested tuples can take for ever
                raise TypeError
            target[key] = value

    def set_last(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.set_items([key, value])


def _puts(value: Callable[[_Machine], Any]) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(value(machine))


def _memoize(index: Callable[[_Machine], int]) -> Callable[[_Machine], None]:
    def remember(machine: _Machine) -> None:
        machine.memo[index(machine)] = machine.stack[-1]

    return remember


# By the numbers of CPython's Lib/pickle.py.
_ACTIONS: dict[int, Callable[[_Machine], Any]] = {
    0x80: lambda m: m.take(1),  # PROTO
    0x95: lambda m: m.take(8),  # FRAME
    0x28: lambda m: m.marks.append(len(m.stack)),  # MARK
    0x4E: _puts(lambda m: None),  # NONE
    0x88: _puts(lambda m: True),  # NEWTRUE
    0x89: _puts(lambda m: False),  # NEWFALSE
    0x4A: _puts(lambda m: m.number("<i")),  # BININT
    0x4B: _puts(lambda m: m.byte()),  # BININT1
    0x4D: _puts(lambda m: m.number("<H")),  # BININT2
    0x8A: _Machine.push_long,  # LONG1
    0x47: _puts(lambda m: m.number(">d")),  # BINFLOAT
    0x42: _puts(lambda m: m.take(m.number("<I"))),  # BINBYTES
    0x43: _puts(lambda m: m.take(m.byte())),  # SHORT_BINBYTES
    0x8C: _puts(lambda m: m.take(m.byte()).decode("utf-8")),  # SHORT_BINUNICODE
    0x58: _puts(lambda m: m.take(m.number("<I")).decode("utf-8")),  # BINUNICODE
    0x29: _puts(lambda m: ()),  # EMPTY_TUPLE
    0x74: _puts(lambda m: tuple(m.marked())),  # TUPLE
    0x85: lambda m: m.fold(1),  # TUPLE1
    0x86: lambda m: m.fold(2),  # TUPLE2
    0x87: lambda m: m.fold(3),  # TUPLE3
    0x5D: _puts(lambda m: []),  # EMPTY_LIST
    0x61: lambda m: m.append([m.stack.pop()]),  # APPEND
    0x65: lambda m: m.append(m.marked()),  # APPENDS
    0x7D: _puts(lambda m: {}),  # EMPTY_DICT
    0x73: _Machine.set_last,  # SETITEM
    0x75: lambda m: m.set_items(m.marked()),  # SETITEMS
    0x63: lambda m: m.push_global(m.line(), m.line()),  # GLOBAL
    0x93: _Machine.stack_global,  # STACK_GLOBAL
    0x52: _Machine.call,  # REDUCE
    0x81: _Machine.call,  # NEWOBJ
    0x62: _Machine.build,  # BUILD
    0x51: _puts(lambda m: Record(PERSISTENT, (m.stack.pop(),))),  # BINPERSID
    0x94: _memoize(lambda m: len(m.memo)),  # MEMOIZE
    0x71: _memoize(lambda m: m.byte()),  # BINPUT
    0x72: _memoize(lambda m: m.number("<I")),  # LONG_BINPUT
    0x68: _puts(lambda m: m.memo[m.byte()]),  # BINGET
    0x6A: _puts(lambda m: m.memo[m.number("<I")]),  # LONG_BINGET
}
