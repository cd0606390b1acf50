r"""The plays as dialogue: markdown in, `NAME:` and the lines spoken out.

The markdown comes from one pinned release, so the rules below are the ones its 37 plays need and no
more: the result holds nothing but letters, space, newline and ``!&',-.:;?``.
"""

from __future__ import annotations

import re

CONVERTER_VERSION = 1  # raise it when the output changes: prepared text of older versions is redone

_SPEAKER = re.compile(r"\*\*(.+)\*\*")
# Richard III announces its ghosts in two pieces: "Ghost", then "**of Prince Edward**".
_GHOST = re.compile(r"^(Ghosts?)\n\n\*\*(of .+)\*\*", re.MULTILINE)
# Directions stand between underscores, also over line ends. Some lack the opening mark; some have
# it twice, which pairs the marks and leaves a direction without one; one in The Tempest is never
# closed. A single pass from the left keeps speech between two directions out of it.
_DIRECTION = re.compile(
    r"_Burthen _\\\[dispersedly, within_"
    r"|_[^_]*_"
    r"|\\?\[[^\]_]*\]_"
)
# Henry VIII lists the order of a procession in numbered paragraphs, which nobody speaks.
_PROCESSION = re.compile(r"\d+\\\.")
# A tavern bill in Henry IV, Part 1: the only digits that are spoken.
_BILL = re.compile(r"Item, .*\d")
_MISPRINTS = (("&amp;", "&"), ("& c.", "&c."), ("sha$l", "shall"))


def to_dialogue(markdown: str) -> str:
    """Turn the markdown of a play into speeches, each followed by one blank line."""
    return "".join(
        f"{speaker}:\n" + "\n".join(lines) + "\n\n"
        for speaker, lines in _speeches(markdown)
        if lines
    )


def _speeches(markdown: str) -> list[tuple[str, list[str]]]:
    """The speakers and their lines in order; what stands before the first speaker is left out."""
    for misprint, correction in _MISPRINTS:
        markdown = markdown.replace(misprint, correction)
    markdown = _GHOST.sub(r"**\1 \2**", markdown)
    speeches: list[tuple[str, list[str]]] = []
    for paragraph in re.split(r"\n\s*\n", markdown):
        if _PROCESSION.match(paragraph):
            continue
        for line in _spoken_lines(paragraph):
            if speaker := _SPEAKER.fullmatch(line):
                speeches.append((speaker[1].replace(":", ""), []))
            elif speeches:
                speeches[-1][1].append(line)
    return speeches


def _spoken_lines(paragraph: str) -> list[str]:
    """The lines of a paragraph without headings, directions and superfluous blanks."""
    text = "\n".join(line for line in paragraph.split("\n") if not line.startswith("#"))
    text = _DIRECTION.sub(" ", text).replace("\\", "")
    lines = (" ".join(line.split()) for line in text.split("\n"))
    return [line for line in lines if line and not _BILL.match(line)]
