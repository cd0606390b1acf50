"""The rules that turn the markdown of a play into dialogue."""

import pytest

from data.dialogue import to_dialogue

RULES = {
    "speaker_and_lines": (
        "**ROMEO**  \nBut soft!  \nWhat light?\n",
        "ROMEO:\nBut soft!\nWhat light?\n\n",
    ),
    "headings_go": (
        "# Play\n\n## ACT I\n\n**A**  \nOne.\n\n### SCENE II\n\n**B**  \nTwo.",
        "A:\nOne.\n\nB:\nTwo.\n\n",
    ),
    "text_before_the_first_speaker_goes": ("I come no more\n\n**A**  \nOne.", "A:\nOne.\n\n"),
    "nameless_paragraph_continues": ("**A**  \nOne.\n\n_Sleeps_\n\nTwo.", "A:\nOne.\nTwo.\n\n"),
    "name_below_a_direction": ("_\\[To A]_  \n**A**  \n_\\[Reads]_  \nOne.", "A:\nOne.\n\n"),
    "direction_over_line_ends": (
        "**A**  \nOne.\n\n_Enter B,\nwith C_\n\nTwo.",
        "A:\nOne.\nTwo.\n\n",
    ),
    "direction_inside_a_line": ("**A**  \nOne, _\\[Aside]_ two.", "A:\nOne, two.\n\n"),
    "direction_without_opening_mark": (
        "**A**  \n[Aside]_  \nOne _\\[To B]_  \ntwo.",
        "A:\nOne\ntwo.\n\n",
    ),
    "direction_with_two_opening_marks": ("**A**  \n__\\[Awaking]_  \nOne.", "A:\nOne.\n\n"),
    "direction_never_closed": (
        "**A**  \nHark!\n\n_Burthen _\\[dispersedly, within_\n\nDogs!",
        "A:\nHark!\nDogs!\n\n",
    ),
    "backslashes_go": ("**A**  \nfair,'\\--or", "A:\nfair,'--or\n\n"),
    "procession_goes": (
        "**A**  \nOne.\n\n1\\. Trumpets.  \n2\\. Judges.\n\n10\\. Ladies.\n\nTwo.",
        "A:\nOne.\nTwo.\n\n",
    ),
    "misprints": (
        "**A &amp; B**  \nThese, & c.  \nsea sha$l suck",
        "A & B:\nThese, &c.\nsea shall suck\n\n",
    ),
    "ghosts": (
        "Ghost\n\n**of Prince Edward**  \n_\\[To R]_  \nLet me sit.",
        "Ghost of Prince Edward:\nLet me sit.\n\n",
    ),
    "no_colon_in_a_name": ("**R: & G:**  \nMy lord!", "R & G:\nMy lord!\n\n"),
    "bill_with_digits_goes": (
        "**A**  \nItem, Sack, 5s. 8d.  \nItem, Bread, ob.",
        "A:\nItem, Bread, ob.\n\n",
    ),
    "blanks_are_squeezed": ("**A**  \n  One   two  \n   \n\n\nthree", "A:\nOne two\nthree\n\n"),
    "empty_speech_goes": ("**A**  \n_Exit_\n\n**B**  \nTwo.", "B:\nTwo.\n\n"),
}


@pytest.mark.parametrize(("markdown", "dialogue"), RULES.values(), ids=RULES)
def test_rule(markdown, dialogue):
    assert to_dialogue(markdown) == dialogue
