"""Count what a GPU executes per logit, from the text of its machine code.

A kernel over queries and keys spends its time in the loop over tiles that need no mask. The units
for matrix products and exponentials work beside the lanes, so what is left to compare is how many
instructions a warp issues in that loop for each logit that each of its lanes holds.
"""

import re
from typing import NamedTuple

# "/*0a30*/  @!P3 BRA 0x22e0 ;" in the one listing; a label or "s_add_i32 s1, s2, s3" in the other.
NVIDIA_LINE = re.compile(r"^[ \t]+/\*([0-9a-f]+)\*/\s+(?:@!?\w+\s+)?(\S.*?)\s*;", re.MULTILINE)
AMD_LINE = re.compile(r"^(?:(\.L\w+):|[ \t]+([a-z]\w*)(?:[ \t]+([^;\n]*))?)", re.MULTILINE)


EXPONENTIALS = ("MUFU.EX2", "v_exp_f32")  # how their names begin


class PerLogit(NamedTuple):
    """What a warp issues in the loop without masks, for each logit that falls to a lane.

    Attributes:
        instructions: all of them; a matrix product, whatever its size, is one.
        exponentials: 1 for the weight, with a soft-cap 1 more, and a little for rows. Twice as
            many say that two lanes work on the same logit, or that the loop was unrolled; for an
            unrolled loop both numbers are of so many tiles.
    """

    instructions: float
    exponentials: float


class Instruction(NamedTuple):
    """One machine instruction.

    Attributes:
        jump: number of the instruction that it may go to, None if it does not branch.
    """

    name: str
    jump: int | None


def read_nvidia(listing: str) -> list[Instruction]:
    """Instructions of what `cuobjdump -sass` prints for one kernel."""
    lines = NVIDIA_LINE.findall(listing)
    places = {int(address, 16): number for number, (address, _) in enumerate(lines)}
    code = []
    for _, text in lines:
        name = text.split()[0]
        target = re.search(r"\b0x([0-9a-f]+)$", text) if name.startswith("BRA") else None
        code.append(Instruction(name, places[int(target[1], 16)] if target else None))
    return code


def read_amd(listing: str) -> list[Instruction]:
    """Instructions of an amdgcn assembly file with one kernel."""
    lines = AMD_LINE.findall(listing)
    places: dict[str, int] = {}
    named: list[tuple[str, str]] = []
    for label, name, operands in lines:
        if label:
            places[label] = len(named)
        else:
            named.append((name, operands.strip()))
    return [
        Instruction(name, places.get(operands) if "branch" in name else None)
        for name, operands in named
    ]


def per_logit(
    code: list[Instruction], logits_per_lane: float, exponentials_per_logit: int = 1
) -> PerLogit | None:
    """Count the loop over tiles without masks; None for a kernel without logits.

    It is found as the shortest stretch, from the target of a backward branch to the branch, that
    has the exponentials of a whole tile. Loops that wait for memory have none, the one over the
    first keys has fewer, and loops that mask or hold others are longer. Every instruction between
    the two is counted, also where a branch may go around it.

    Args:
        logits_per_lane: rows times keys of a tile, over the lanes of the program.
        exponentials_per_logit: the least there can be.
    """
    loops = []
    for end, (_, begin) in enumerate(code):
        if begin is not None and begin <= end:
            names = [instruction.name for instruction in code[begin : end + 1]]
            exponentials = sum(name.startswith(EXPONENTIALS) for name in names)
            if exponentials >= logits_per_lane * exponentials_per_logit:
                loops.append((len(names), exponentials))
    if not loops:
        return None
    instructions, exponentials = min(loops)
    return PerLogit(instructions / logits_per_lane, exponentials / logits_per_lane)
