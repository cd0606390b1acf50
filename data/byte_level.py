"""The byte-level alphabet: one printable character for each byte value.

Byte-level tokenizers write tokens in it, so that any bytes, also parts of a character, can stand in
a JSON file (GPT-2, Radford et al. 2019, section 2.2). Bytes that print as a character of Latin-1
stand for themselves, the others take the characters from U+0100 on.
"""

from __future__ import annotations

_PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_HIDDEN = [byte for byte in range(256) if byte not in _PRINTABLE]

SYMBOLS = tuple(
    chr(byte) if byte in _PRINTABLE else chr(0x100 + _HIDDEN.index(byte)) for byte in range(256)
)
_BYTES = {symbol: byte for byte, symbol in enumerate(SYMBOLS)}


def bytes_of(token: str) -> bytes:
    """Raw bytes of a token; one that is not written in the alphabet (an added token) is text."""
    try:
        return bytes(_BYTES[symbol] for symbol in token)
    except KeyError:
        return token.encode()
