"""Categories of characters for BERT's tokenizer. Unlike the categories in Python's unicodedata,
fnet's categories do not depend on the version of Python.

This module follows the Unicode tables of Hugging Face's package `tokenizers`, because published
models were used with this package. The package `tokenizers` uses Unicode 8 for categories, Unicode
9 for decompositions and Unicode 17 for lowercase letters. Python's unicodedata uses one of the
versions 14 to 17 of Unicode, depending on the version of Python.
"""

from __future__ import annotations

import bisect
import functools
import re
import unicodedata

# First and last code points of ranges with punctuation, marks and control characters that are not
# in Unicode 8.
_NEWER = [
    [int(end, 16) for end in each.split("-")]
    for each in """
    5c8-5c9 61d 7fd 890-8e2 9fd-9fe a76 afa-aff b53-b55 c04-c3c c77 c84 d00 d3b-d3c d81 eba ece 180f-1886 1abf-1af0
    1b4e-1b4f 1b7d-1b7f 1df6-1dfb 2e43-2e63 a82c a8c5 a8ff a9bd 10d24-10f89 11070-11074 110c2-110cd 111cf 1123e-11241
    1133b 113bb-1145e 11660-1166c 116b9 1182f-11fff 12ff1-1612f 16d6d-16f4f 16fe2-16fe4 1cf00-1d128 1d25b-1d25c
    1e000-1e6f5 1e944-1e95f""".split()
]
_STARTS = [first for first, *_ in _NEWER]
# Their categories in Unicode 8.
_CHANGED = {"\u166d": "Po", "\U000111c9": "Po", "\u1734": "Mn", "\U0001171e": "Mn"}
# Decomposed only since Unicode 10.
_WHOLE = re.compile(
    "([\U000105c9\U000105e4\U00011383\U00011385\U0001138e\U00011391\U000113c5\U000113c7\U000113c8"
    "\U00011938\U00016121-\U00016128\U00016d68-\U00016d6a])"
)
_LOWER = {
    0x1C89: 0x1C8A,
    0xA7CB: 0x264,
    0xA7CC: 0xA7CD,
    0xA7CE: 0xA7CF,
    0xA7D2: 0xA7D3,
    0xA7D4: 0xA7D5,
    0xA7DA: 0xA7DB,
    0xA7DC: 0x19B,
    **{each: each + 32 for each in range(0x10D50, 0x10D66)},
    **{each: each + 27 for each in range(0x16EA0, 0x16EB9)},
}  # letters of Unicode 15 to 17


@functools.lru_cache(1 << 16)
def category(char: str) -> str:
    """Returns the general category of a character in Unicode 8.

    The category "Lo" is returned for punctuation, marks and control characters that were added
    after Unicode 8.
    """
    if char in _CHANGED:
        return _CHANGED[char]
    at = bisect.bisect_right(_STARTS, ord(char)) - 1
    return "Lo" if at >= 0 and ord(char) <= _NEWER[at][-1] else unicodedata.category(char)


def decomposed(text: str) -> str:
    """Returns the canonical decomposition (NFD) of a text in Unicode 9."""
    return "".join(
        part if at % 2 else unicodedata.normalize("NFD", part)
        for at, part in enumerate(_WHOLE.split(text))
    )


def lower(text: str) -> str:
    """Converts each character of a text to lowercase. Unlike in `str.lower`, the result for a
    character does not depend on its neighbors."""
    return "".join(map(str.lower, text.translate(_LOWER)))
