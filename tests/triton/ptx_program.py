"""PTX text as a list of instructions."""

from __future__ import annotations

import re
from dataclasses import dataclass


class PtxError(Exception):
    """A program did what no GPU allows, or what the machine here does not know."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One PTX instruction."""

    text: str
    predicate: str | None
    negated: bool
    parts: tuple[str, ...]  # the opcode split at its dots
    operands: tuple[str, ...]  # vectors and addresses with their brackets

    @staticmethod
    def parse(text: str) -> Instruction:
        match = re.fullmatch(r"(?:@(!?)([%\w]+)\s+)?([\w.:]+)\s*(.*)", text, re.DOTALL)
        if match is None:
            raise PtxError(f"`{text}` is no instruction")
        negation, predicate, opcode, rest = match.groups()
        operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", rest)
        return Instruction(
            text, predicate, negation == "!", tuple(opcode.split(".")), tuple(operands)
        )


class Program:
    """The kernel of a PTX module."""

    def __init__(self, text: str) -> None:
        text = re.sub(r"//[^\n]*|^\s*\.(?:loc|file)\b[^\n]*", "", text, flags=re.MULTILINE)
        header, _, rest = text[text.index(".entry") :].partition("{")
        threads = re.search(r"\.(?:reqntid|maxntid)\s+(\d+)", header)
        if threads is None:
            raise PtxError("the kernel does not say how many threads a CTA has")
        self.threads = int(threads[1])
        self.parameters: list[tuple[str, str]] = [
            (kind, name)
            for kind, name in re.findall(r"\.param \.(\w+)[^,)]*?(\w+)\s*(?=[,)])", header)
        ]  # (type, name)
        self.labels: dict[str, int] = {}
        self.code: list[Instruction] = []
        for statement in self._body(rest).split(";"):
            self._add(statement)

    @staticmethod
    def _body(text: str) -> str:
        """Up to the brace that closes the kernel."""
        depth = 1
        for match in re.finditer(r"[{}]", text):
            depth += 1 if match[0] == "{" else -1
            if depth == 0:
                return text[: match.start()]
        raise PtxError("the kernel does not end")

    def _add(self, statement: str) -> None:
        statement = statement.lstrip("{} \n\t").rstrip()  # the braces of a scope
        while label := re.match(r"(\$\w+):[\s{}]*", statement):
            self.labels[label[1]] = len(self.code)
            statement = statement[label.end() :]
        if statement and not statement.startswith("."):
            self.code.append(Instruction.parse(statement))
