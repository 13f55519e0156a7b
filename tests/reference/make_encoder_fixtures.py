"""Writes encoders.npz: the outputs of transformers' and timm's own small encoders and vision
models.

    make verify-pretrained                                      # installs .venv-verify
    .venv-verify/bin/python tests/reference/make_encoder_fixtures.py [CLASS ...]

Each case of encoder_families.py whose class is new within its family: its config.json, the keys and
shapes of its file, and its outputs in float32, computed in float64. Weights are drawn from their
keys (tests/drawn.py).
With names of classes, the other cases of the file are kept.
"""

import json
import sys
import tempfile

import encoder_families as families
import numpy as np


def main(classes):
    path = families.HERE / "encoders.npz"
    arrays = dict(np.load(path)) if classes else {}
    for family, cases in families.CASES.items():
        for name, options in {name: (name, options) for name, options in reversed(cases)}.values():
            if classes and name not in classes:
                continue
            with tempfile.TemporaryDirectory() as folder:
                model, shapes = families.made(name, options, folder)
                config = families.config_of(folder)
                inputs = families.inputs_of(config)
                for i, value in enumerate(families.outputs(model, inputs)):
                    arrays[f"{family}/{name}/output{i}"] = value.astype(np.float32)
                if name == "Dinov2Model":
                    wide = families.inputs_of(config | dict(image_size=[40, 56]))
                    arrays["interpolated"] = families.outputs(model, wide)[0].astype(np.float32)
            arrays[f"{family}/{name}/config"] = np.array(json.dumps(config))
            arrays[f"{family}/{name}/shapes"] = np.array(json.dumps(shapes))
            arrays[f"{family}/{name}/checksum"] = np.array(
                families.drawn.checksum(families.drawn.weights(shapes))
            )
    np.savez_compressed(path, **arrays)
    print(f"{path.name}: {len(arrays)} arrays, {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
