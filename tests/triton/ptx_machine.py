"""One CTA of a PTX kernel on the CPU, all its threads in lockstep, with every access checked.

An access to global memory must lie inside one tensor's storage and be aligned to its own size. Two warps that
touch the same byte of shared memory between two barriers, one of them with a store, are a race. Threads
must agree on every branch. What breaks this raises `PtxError`, which names the instruction.

Not seen: races in global memory and between the threads of a warp, and instructions that no portable kernel
here is compiled to (`wgmma`, `cp.async`).
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import torch
from ptx_arithmetic import ARITHMETIC, Values, bits_of, halves, joined, raw, typed
from ptx_program import Instruction, Program, PtxError

WARP = 32
GARBAGE = 0xFFF1F1F1FFF1F1F1  # float32 NaN, and a large bf16 number
PAGE = 4096
LANE = np.arange(WARP)
ROW, PAIR = LANE // 4, 2 * (LANE % 4)  # place of a lane's two numbers in an 8 x 8 matrix
REDUCTIONS = {"add": np.add, "min": np.fmin, "max": np.fmax}


class Memory:
    """Global memory: the storages of tensors, far away from each other."""

    def __init__(self) -> None:
        self.bases: list[int] = []
        self.storages: list[Values] = []  # uint8, shared with the tensors
        self.names: list[str] = []
        self._addresses: dict[int, int] = {}
        self._next = 1 << 20

    def address(self, name: str, tensor: torch.Tensor) -> int:
        """Where a tensor begins; its storage is added when it is first seen."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._addresses:
            self._addresses[storage.data_ptr()] = self._next
            self.bases.append(self._next)
            self.storages.append(torch.empty(0, dtype=torch.uint8).set_(storage).numpy())
            self.names.append(name)
            self._next += -(-storage.nbytes() // PAGE) * PAGE + (1 << 20)
        return self._addresses[storage.data_ptr()] + tensor.data_ptr() - storage.data_ptr()

    def places(self, addresses: Values, size: int) -> list[tuple[int, Values, Values]]:
        """(storage, lanes, int64 offsets in it) of accesses of `size` bytes, all of them checked."""
        found = []
        owners = np.searchsorted(np.array(self.bases, np.uint64), addresses, side="right") - 1
        if (addresses % np.uint64(size)).any():
            wrong = int(addresses[addresses % np.uint64(size) != 0][0])
            raise PtxError(f"{size} bytes at {wrong:#x}, misaligned")
        for owner in np.unique(owners):
            lanes = np.flatnonzero(owners == owner)
            if owner < 0:
                raise PtxError(
                    f"{size} bytes at {int(addresses[lanes[0]]):#x}, before every tensor"
                )
            offsets = (addresses[lanes] - np.uint64(self.bases[owner])).astype(np.int64)
            length, last = len(self.storages[owner]), int(offsets.max())
            if last + size > length:
                where = f"byte {last} of `{self.names[owner]}`, which has {length} bytes"
                raise PtxError(f"{size} bytes out of bounds, at {where}")
            found.append((int(owner), lanes, offsets))
        return found

    def load(self, addresses: Values, size: int) -> Values:  # uint8 [lanes, size]
        data = np.zeros((len(addresses), size), np.uint8)
        for owner, lanes, offsets in self.places(addresses, size):
            data[lanes] = self.storages[owner][offsets[:, None] + np.arange(size)]
        return data

    def store(self, addresses: Values, data: Values) -> None:
        size = data.shape[1]
        for owner, lanes, offsets in self.places(addresses, size):
            self.storages[owner][offsets[:, None] + np.arange(size)] = data[lanes]


class SharedMemory:
    """Shared memory of a CTA and who touched each byte since the last barrier."""

    def __init__(self, size: int) -> None:
        self.bytes = np.zeros(size, np.uint8)
        self.readers = np.zeros(size, np.uint32)  # one bit for each warp
        self.writers = np.zeros(size, np.uint32)

    def barrier(self) -> None:
        self.readers.fill(0)
        self.writers.fill(0)

    def load(self, addresses: Values, warps: Values, size: int) -> Values:  # uint8 [lanes, size]
        where, bits = self._places(addresses, warps, size)
        np.bitwise_or.at(self.readers, where, bits)
        self._check(self.writers[where] & ~bits, where, "reads what another wrote")
        return self.bytes[where]

    def store(self, addresses: Values, warps: Values, data: Values) -> None:
        where, bits = self._places(addresses, warps, data.shape[1])
        others = (self.readers[where] | self.writers[where]) & ~bits
        self._check(others, where, "writes what another read or wrote")
        np.bitwise_or.at(self.writers, where, bits)
        self.bytes[where] = data
        if (self.bytes[where] != data).any():  # the same value from several threads is no race
            raise PtxError("a race: two threads write different values to one shared byte")

    def _places(self, addresses: Values, warps: Values, size: int) -> tuple[Values, Values]:
        if (addresses % size).any():
            raise PtxError(f"{size} bytes of shared memory, misaligned")
        where = addresses.astype(np.int64)[:, None] + np.arange(size)
        if where.size and where.max() >= len(self.bytes):
            raise PtxError(
                f"shared byte {where.max()} is out of bounds, there are {len(self.bytes)}"
            )
        bits = np.broadcast_to(np.uint32(1) << warps.astype(np.uint32)[:, None], where.shape)
        return where, bits

    def _check(self, others: Values, where: Values, deed: str) -> None:
        if others.any():
            byte = int(where[others != 0].min())
            raise PtxError(f"a race: a warp {deed} since the last barrier, at shared byte {byte}")


class Cta:
    """The threads of one program of a grid."""

    def __init__(
        self,
        program: Program,
        memory: Memory,
        parameters: dict[str, int],  # bits of each parameter
        index: int,
        shared_bytes: int,
    ) -> None:
        self.program = program
        self.memory = memory
        self.parameters = parameters
        self.shared = SharedMemory(shared_bytes)
        self.index = index
        self.warps = np.arange(program.threads) // WARP
        self.everyone = np.ones(program.threads, np.bool_)
        self.registers: dict[str, Values] = {
            "%tid.x": np.arange(program.threads, dtype=np.uint32),
            "%ctaid.x": self._constant(index),
            "global_smem": self._constant(0),
        }

    def run(self) -> None:
        """From the first instruction to the return of every thread."""
        at: int | None = 0
        with np.errstate(all="ignore"):
            while at is not None and at < len(self.program.code):
                instruction = self.program.code[at]
                try:
                    at = self._step(instruction, at)
                except (PtxError, KeyError, ValueError) as error:
                    said = error if isinstance(error, PtxError) else f"not known here: {error}"
                    text = " ".join(instruction.text.split())
                    raise PtxError(f"CTA {self.index}: `{text}`: {said}") from error

    def _step(self, instruction: Instruction, at: int) -> int | None:
        """Run one instruction; returns the place of the next one, None after the last."""
        active = self.everyone
        if instruction.predicate is not None:
            active = typed(self.read(instruction.predicate), "pred") != instruction.negated
        kind = instruction.parts[0]
        if kind in ("bra", "ret"):
            if not active.any():
                return at + 1
            if not active.all():
                raise PtxError("the threads do not agree")
            return None if kind == "ret" else self.program.labels[instruction.operands[0]]
        if kind in ARITHMETIC:
            target, *sources = instruction.operands
            result = ARITHMETIC[kind](instruction.parts, *map(self.read, sources))
            self.write(target, result, active)
        elif kind in HANDLERS:
            HANDLERS[kind](self, instruction, active)
        else:
            raise PtxError("this instruction is not known here")
        return at + 1

    def _constant(self, number: int) -> Values:
        return np.full(self.program.threads, number & (2**64 - 1), np.uint64)

    def read(self, operand: str) -> Values:
        """A register, or a constant as 64 bits; garbage if nothing was written to the register."""
        if operand not in self.registers:
            number = re.fullmatch(r"0[fd]([0-9A-Fa-f]+)|(-?(?:0x[0-9A-Fa-f]+|\d+))U?", operand)
            if number is None:
                if not re.fullmatch(r"%[a-z]+\d+", operand):
                    raise PtxError(f"{operand} has no value")
                return self._constant(GARBAGE)
            value = int(number[1], 16) if number[1] else int(number[2], 0)
            self.registers[operand] = self._constant(value)
        return self.registers[operand]

    def write(self, register: str, values: Values, active: Values) -> None:
        if register == "_":
            return
        if not active.all():
            old = self.registers.get(register, self._constant(GARBAGE))
            values = np.where(active, values, old.astype(values.dtype))
        self.registers[register] = values

    def addresses(self, operand: str, bits: int) -> Values:
        total = self._constant(0)
        for term in operand.strip("[] ").split("+"):
            total = total + typed(self.read(term.strip()), "u64")
        return typed(total, f"u{bits}")

    def check_space(self, space: str) -> None:
        if space not in ("global", "shared", "shared::cta"):
            raise PtxError(f"memory of the kind {space} is not known here")

    def load(self, instruction: Instruction, active: Values) -> None:
        """ld of parameters, global and shared memory."""
        target, source = instruction.operands
        space, name = instruction.parts[1], instruction.parts[-1]
        if space == "param":
            value = self._constant(self.parameters[source.strip("[] ")])
            self.write(target, typed(value, name), active)
            return
        targets, size = vector(target), bits_of(name) // 8
        self.check_space(space)
        if space == "global":
            addresses = self.addresses(source, 64)[active]
            data = self.memory.load(addresses, size * len(targets))
        else:
            addresses = self.addresses(source, 32)[active]
            data = self.shared.load(addresses, self.warps[active], size * len(targets))
        every = np.zeros((len(active), size * len(targets)), np.uint8)
        every[active] = data
        for register, column in zip(targets, np.split(every, len(targets), 1), strict=True):
            self.write(register, np.ascontiguousarray(column).view(f"u{size}")[:, 0], active)

    def store(self, instruction: Instruction, active: Values) -> None:
        """st to global and shared memory."""
        target, source = instruction.operands
        name = instruction.parts[-1]
        self.check_space(instruction.parts[1])
        words = [raw(typed(self.read(register), name)) for register in vector(source)]
        data = np.stack(words, 1).view(np.uint8)[active]
        if instruction.parts[1] == "global":
            self.memory.store(self.addresses(target, 64)[active], data)
        else:
            self.shared.store(self.addresses(target, 32)[active], self.warps[active], data)

    def move(self, instruction: Instruction, active: Values) -> None:
        """mov, which also packs and unpacks."""
        target, source = instruction.operands
        name = instruction.parts[-1]
        if target.startswith("{"):
            whole, parts = typed(self.read(source), name), vector(target)
            pieces = whole[:, None].view(f"u{bits_of(name) // 8 // len(parts)}")
            for register, piece in zip(parts, pieces.T, strict=True):
                self.write(register, np.ascontiguousarray(piece), active)
        elif source.startswith("{"):
            parts = vector(source)
            width = bits_of(name) // len(parts)
            pieces = np.stack([typed(self.read(part), f"u{width}") for part in parts], 1)
            self.write(target, pieces.view(f"u{bits_of(name) // 8}")[:, 0], active)
        else:
            self.write(target, raw(typed(self.read(source), name)), active)

    def barrier(self, instruction: Instruction, active: Values) -> None:
        if instruction.parts[1] == "warp":
            return
        if instruction.operands != ("0",) or not active.all():
            raise PtxError("only a barrier of the whole CTA is known here")
        self.shared.barrier()

    def shuffle(self, instruction: Instruction, active: Values) -> None:
        target, source, choice, limit, *_ = instruction.operands
        lanes, which = np.arange(len(active)), self.read(choice).astype(np.int64)
        if (self.read(limit) != WARP - 1).any():
            raise PtxError("only a shuffle within the whole warp is known here")
        if instruction.parts[2] == "bfly":
            chosen = lanes ^ which
        elif instruction.parts[2] == "idx":
            chosen = lanes // WARP * WARP + which % WARP
        else:
            raise PtxError("this shuffle is not known here")
        self.write(target, typed(self.read(source), "b32")[chosen], active)

    def reduce(self, instruction: Instruction, active: Values) -> None:
        """redux: every lane gets the sum, the least or the largest number of its warp."""
        target, source, _ = instruction.operands
        operation, *modifiers, name = instruction.parts[2:]
        if operation not in REDUCTIONS or modifiers not in ([], ["abs"]) or not active.all():
            raise PtxError("this reduction is not known here")
        numbers = typed(self.read(source), name)
        numbers = np.abs(numbers) if modifiers else numbers
        by_warp = REDUCTIONS[operation].reduce(numbers.reshape(-1, WARP), 1, dtype=numbers.dtype)
        self.write(target, raw(np.repeat(by_warp, WARP)), active)

    def multiply_matrices(self, instruction: Instruction, active: Values) -> None:
        """mma of 16 x 16 by 16 x 8 bf16 numbers, with float32 sums; each warp has its own."""
        if instruction.parts[3:] != ("m16n8k16", "row", "col", "f32", "bf16", "bf16", "f32"):
            raise PtxError("this matrix product is not known here")
        results, left, right, sums = map(vector, instruction.operands)
        count = len(active) // WARP
        a, b = np.zeros((count, 16, 16)), np.zeros((count, 16, 8))
        c = np.zeros((count, 16, 8))
        for place, register in enumerate(left):
            rows, columns = ROW + place % 2 * 8, PAIR + place // 2 * 8
            for half, numbers in enumerate(halves(self.read(register))):
                a[:, rows, columns + half] = numbers.reshape(count, WARP)
        for place, register in enumerate(right):
            for half, numbers in enumerate(halves(self.read(register))):
                b[:, PAIR + place * 8 + half, ROW] = numbers.reshape(count, WARP)
        for place, register in enumerate(sums):
            numbers = typed(self.read(register), "f32").reshape(count, WARP)
            c[:, ROW + place // 2 * 8, PAIR + place % 2] = numbers
        product = (np.matmul(a, b) + c).astype(np.float32)
        for place, register in enumerate(results):
            numbers = product[:, ROW + place // 2 * 8, PAIR + place % 2]
            self.write(register, raw(numbers.reshape(-1)), active)

    def check_matrix(self, instruction: Instruction) -> None:
        if not {"m8n8", "b16"} <= set(instruction.parts):
            raise PtxError("only 8 x 8 matrices of 16-bit numbers are known here")

    def matrix_rows(self, operand: str, matrix: int) -> tuple[Values, Values]:
        """Addresses and warps of the eight rows of a matrix: eight lanes hold one address each."""
        by_warp = self.addresses(operand, 32).reshape(-1, WARP)
        rows = by_warp[:, 8 * matrix : 8 * matrix + 8].reshape(-1)
        return rows, np.repeat(np.arange(len(by_warp)), 8)

    def load_matrices(self, instruction: Instruction, active: Values) -> None:
        """ldmatrix: 8 x 8 matrices of 16-bit numbers, two numbers for each lane."""
        target, source = instruction.operands
        self.check_matrix(instruction)
        for matrix, register in enumerate(vector(target)):
            rows, warps = self.matrix_rows(source, matrix)
            numbers = self.shared.load(rows, warps, 16).view(np.uint16).reshape(-1, 8, 8)
            if "trans" in instruction.parts:
                numbers = numbers.swapaxes(1, 2)
            words = joined(numbers[:, ROW, PAIR], numbers[:, ROW, PAIR + 1])
            self.write(register, words.reshape(-1), active)

    def store_matrices(self, instruction: Instruction, active: Values) -> None:
        """stmatrix, the reverse of ldmatrix."""
        target, source = instruction.operands
        self.check_matrix(instruction)
        for matrix, register in enumerate(vector(source)):
            pairs = typed(self.read(register), "u32")[:, None].view(np.uint16)
            numbers = np.zeros((len(active) // WARP, 8, 8), np.uint16)
            for half in range(2):
                numbers[:, ROW, PAIR + half] = pairs[:, half].reshape(-1, WARP)
            if "trans" in instruction.parts:
                numbers = numbers.swapaxes(1, 2)
            rows, warps = self.matrix_rows(target, matrix)
            data = np.ascontiguousarray(numbers).view(np.uint8).reshape(-1, 16)
            self.shared.store(rows, warps, data)

    def add_atomically(self, instruction: Instruction, active: Values) -> None:
        """atom.add of 32 bits in global memory, one thread after the other."""
        if not {"global", "add", "u32"} <= set(instruction.parts):
            raise PtxError("this atomic operation is not known here")
        target, place, source = instruction.operands
        addresses, more = self.addresses(place, 64), typed(self.read(source), "u32")
        old = np.zeros(len(active), np.uint32)
        for thread in np.flatnonzero(active):
            where = addresses[thread : thread + 1]
            old[thread] = self.memory.load(where, 4).view(np.uint32)[0, 0]
            new = old[thread : thread + 1] + more[thread]
            self.memory.store(where, new[:, None].view(np.uint8))
        self.write(target, old, active)


def vector(operand: str) -> list[str]:
    """Registers of an operand."""
    return re.findall(r"[^\s,{}]+", operand)


HANDLERS: dict[str, Callable[[Cta, Instruction, Values], None]] = {
    "atom": Cta.add_atomically,
    "bar": Cta.barrier,
    "barrier": Cta.barrier,
    "ld": Cta.load,
    "ldmatrix": Cta.load_matrices,
    "mma": Cta.multiply_matrices,
    "mov": Cta.move,
    "redux": Cta.reduce,
    "shfl": Cta.shuffle,
    "st": Cta.store,
    "stmatrix": Cta.store_matrices,
}
