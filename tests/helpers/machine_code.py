"""Hopper's machine code of Triton and Gluon kernels as they are launched, made without a GPU."""

import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

HOPPER = GPUTarget("cuda", 90, 32)
NVDISASM = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
TYPES = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
}


class Compiled:
    """Stands in for a kernel: a launch compiles it for the arguments, and computes nothing.

    Of each launch there is the binary and the shared memory that it needs.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.cubins, self.shared_bytes = kernel, [], []

    def __getitem__(self, grid):
        return self._launch

    def _launch(self, *arguments, num_warps=4, **options):
        names = [parameter.name for parameter in self.kernel.params]
        given = dict(zip(names, arguments, strict=False)) | options
        constant = {p.name for p in self.kernel.params if p.is_constexpr or given[p.name] is None}
        source = (GluonASTSource if self.kernel.is_gluon() else ASTSource)(
            fn=self.kernel,
            signature={n: "constexpr" if n in constant else _type(given[n]) for n in names},
            constexprs={(i,): given[n] for i, n in enumerate(names) if n in constant},
            attrs={
                (i,): [["tt.divisibility", 16]]
                for i, p in enumerate(self.kernel.params)
                if _aligned(given[p.name]) and not p.do_not_specialize
            },
        )
        compiled = triton.compile(source, target=HOPPER, options={"num_warps": num_warps})
        self.cubins.append(compiled.asm["cubin"])
        self.shared_bytes.append(compiled.metadata.shared)  # pyright: ignore


def _aligned(value: Any) -> bool:
    """Whether Triton compiles for a pointer or an integer that is a multiple of 16."""
    return isinstance(value, Tensor) or (type(value) is int and value % 16 == 0)


def _type(value: Tensor | TensorDescriptor | int | float) -> str:
    if isinstance(value, TensorDescriptor):
        dtype = TYPES[value.base.dtype].removeprefix("*")
        return f"tensordesc<{dtype}{list(value.block_shape)},{value.layout!r}>"
    if isinstance(value, Tensor):
        return TYPES[value.dtype]
    return "i32" if isinstance(value, int) else "fp32"


def disassembled(cubin: bytes, folder: Path) -> str:
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    command = [NVDISASM, "-c", path]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def instructions(text: str) -> Counter[str]:
    """How often each instruction occurs in disassembled code, without its modifiers. Registers that
    are spilled are STL and LDL, wgmma is HGMMA."""
    lines = (re.match(r"\s*/\*\w{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z]\w*)", x) for x in text.splitlines())
    return Counter(x[1] for x in lines if x)


def unset_addresses(text: str) -> list[str]:
    """Additions of a constant to a register that nothing has written before, in the order in which
    the instructions lie: what ptxas 12.8 makes of some operands' addresses."""
    written: set[str] = set()
    found = []
    for line in text.splitlines():
        instruction = re.match(r"\s*/\*\w{4,}\*/\s+(?:@!?U?P\w+ )?(\S+) (.*?) ;", line)
        if instruction is None:
            continue
        name, arguments = instruction[1], instruction[2].split(", ")
        added = re.fullmatch(r"U?IADD3", name) and re.search(
            r"(?<!\w)(U?R\d+), 0x\w+, U?RZ$", instruction[2]
        )
        if added and added[1] not in written:
            found.append(line.strip())
        first = re.fullmatch(r"(U?R)(\d+)", arguments[0])
        if first:
            registers = range(int(first[2]), int(first[2]) + _width(name))
            written |= {f"{first[1]}{i}" for i in registers}
    return found


def overwritten(text: str) -> list[str]:
    """Instructions that write a register which a product in flight reads: one taken from registers,
    until its group of products has been waited for."""
    groups: list[set[int]] = [set()]
    found = []
    for line in text.splitlines():
        if "HGMMA" in line:
            if product := re.search(r"HGMMA\S* R\d+, R(\d+), gdesc", line):
                groups[-1] |= set(range(int(product[1]), int(product[1]) + 4))
            if "gsb0" in line:
                groups.append(set())
        elif wait := re.search(r"WARPGROUP.DEPBAR.LE gsb0, 0x(\w+)", line):
            groups = groups[len(groups) - 1 - min(int(wait[1], 16), len(groups) - 1) :]
        elif written := re.search(r"\*/\s+(?:@!?U?P\w+ )?(?!ST)([A-Z]\S*) R(\d+)", line):
            width = 4 if "128" in written[1] else 2 if re.search("64|WIDE|CS2R", written[1]) else 1
            if set.union(*groups) & set(range(int(written[2]), int(written[2]) + width)):
                found.append(line.strip())
    return found


def loops(text: str, products: int) -> list[str]:
    """The instructions of the innermost loops that have so many products."""
    labels: dict[str, int] = {}
    lines: list[str] = []
    found, begin = [], -1
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(lines)
        elif re.match(r"\s*/\*\w{4,}\*/", line):
            lines.append(line)
            target = re.search(r"BRA.*(\.L_x_\d+)", line)
            first = labels.get(target[1], -1) if target else -1
            body = "\n".join(lines[first:])
            if first > begin and instructions(body)["HGMMA"] == products:
                found.append(body)
                begin = first
    return found


def _width(instruction: str) -> int:
    """At most so many registers does it write."""
    if "MMA" in instruction:
        return 128
    if re.search(r"128|M88", instruction):
        return 4
    return 2 if re.search(r"64|WIDE|CS2R", instruction) else 1
