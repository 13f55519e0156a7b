#!/bin/sh
# Pillow converts gray PNG images of 16 bits to 8 bits by clipping, which makes them white. It scales colors of 16 bits.
set -eu
python=${PYTHON:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/environment"
"$folder/environment/bin/python" -m pip install --quiet --disable-pip-version-check "pillow==13.0.0"
cd "$folder"
environment/bin/python - <<'PYTHON'
import io
import struct
import sys
import zlib

import PIL
from PIL import Image

levels = [n * 4369 for n in range(16)]      # from 0, black, to 65535, white


def png(colors, channels):
    """Returns the bytes of a PNG image with one row and 16 bits for each channel."""
    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    row = b"\0" + b"".join(struct.pack(">H", level) * channels for level in levels)
    header = struct.pack(">IIBBBBB", len(levels), 1, 16, colors, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(row)) + chunk(b"IEND", b"")


def converted(file, mode):
    image = Image.open(io.BytesIO(file)).convert(mode)
    return list(image.tobytes()[::len(image.getbands())])


print(f"Python {sys.version.split()[0]}, Pillow {PIL.__version__}")
print("gray levels of 16 bits are clipped at 255, although the same levels in red, green and blue are scaled to 0..255")
gray, color = png(0, 1), png(2, 3)
results = {mode: converted(gray, mode) for mode in ("L", "RGB")}
print("levels in the file:      ", levels)
for mode, result in results.items():
    print(f"gray, convert({mode!r}):".ljust(25), result)
print("color, convert('RGB'):   ", converted(color, "RGB"))
scaled = converted(color, "RGB") == list(range(0, 256, 17))
wrong = scaled and all(result == [0] + [255] * 15 for result in results.values())
print("as described" if wrong else "CHANGED: no longer as described")
sys.exit(not wrong)
PYTHON
