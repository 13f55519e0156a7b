"""Augmentations: pure, static in shape, each example its own draw."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.ndimage

from fnet import training as tr

KEY = jax.random.key(0)
IMAGES = jax.random.uniform(jax.random.key(1), (32, 8, 10, 3))

CASES = {
    "random_crop": lambda k, x: tr.random_crop(k, x, 2),
    "random_crop_reflect": lambda k, x: tr.random_crop(k, x, 2, mode="reflect"),
    "random_shift": lambda k, x: tr.random_shift(k, x, 1),
    "random_flip": tr.random_flip,
    "cutout": lambda k, x: tr.cutout(k, x, 4),
    "random_affine": lambda k, x: tr.random_affine(k, x),
}


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("name", CASES)
def test_pure_jitted_and_shaped(name):
    f = jax.jit(CASES[name])
    out = f(KEY, IMAGES)
    assert (out.shape, out.dtype) == (IMAGES.shape, IMAGES.dtype)
    np.testing.assert_array_equal(out, f(KEY, IMAGES))
    assert not np.array_equal(out, f(jax.random.key(2), IMAGES))
    same = jnp.broadcast_to(IMAGES[:1], IMAGES.shape)
    assert len(np.unique(np.asarray(f(KEY, same)).reshape(32, -1), axis=0)) > 1


@pytest.mark.quick_cases("cutout")
@pytest.mark.parametrize("name", ["random_crop", "random_flip", "cutout", "random_shift"])
def test_bytes_stay_bytes(name):
    assert CASES[name](KEY, jnp.ones((2, 8, 8, 1), jnp.uint8)).dtype == jnp.uint8


@pytest.mark.exhaustive
def test_crops_are_windows_of_the_padded_image():
    out = np.asarray(tr.random_crop(KEY, IMAGES, 2))
    padded = np.pad(np.asarray(IMAGES), ((0, 0), (2, 2), (2, 2), (0, 0)))
    places = set()
    for image, source in zip(out, padded):
        found = [
            (i, j)
            for i in range(5)
            for j in range(5)
            if np.array_equal(image, source[i : i + 8, j : j + 10])
        ]
        assert found
        places.add(found[0])
    assert len(places) > 8


def test_flip_mirrors_or_does_nothing():
    out, images = np.asarray(tr.random_flip(KEY, IMAGES)), np.asarray(IMAGES)
    flipped = [np.array_equal(o, i[:, ::-1]) for o, i in zip(out, images)]
    kept = [np.array_equal(o, i) for o, i in zip(out, images)]
    assert all(a != b for a, b in zip(flipped, kept))
    assert 6 < sum(flipped) < 26


@pytest.mark.exhaustive
def test_cutout_is_one_square_at_most_this_large():
    hole = np.asarray(tr.cutout(KEY, jnp.ones((64, 8, 8, 2)), 4)) == 0
    np.testing.assert_array_equal(hole[..., 0], hole[..., 1])
    for mask in hole[..., 0]:
        rows, columns = mask.any(1), mask.any(0)
        assert 2 <= rows.sum() <= 4 and 2 <= columns.sum() <= 4  # half may lie outside
        np.testing.assert_array_equal(mask, rows[:, None] & columns[None])
    assert tr.cutout(KEY, IMAGES, 0).tolist() == IMAGES.tolist()


def test_affine_of_nothing_is_the_identity():
    out = tr.random_affine(KEY, IMAGES, degrees=0.0, scale=0.0, shift=0.0)
    np.testing.assert_allclose(out, IMAGES, atol=1e-5)


@pytest.mark.exhaustive
def test_affine_turns_by_up_to_the_angle():
    """Against SciPy: every image is the original turned by some angle in the range."""
    y, x = np.mgrid[:15, :15]
    image = np.exp(-((x - 7) ** 2 / 20 + (y - 7) ** 2 / 4)).astype(np.float32)
    batch = jnp.asarray(np.broadcast_to(image[None, :, :, None], (6, 15, 15, 1)))
    out = np.asarray(tr.random_affine(KEY, batch, degrees=30.0, scale=0.0, shift=0.0))[..., 0]
    best = []
    for turned in out:
        errors = {
            a: np.abs(scipy.ndimage.rotate(image, a, reshape=False, order=1) - turned)[
                2:-2, 2:-2
            ].max()
            for a in np.arange(-31, 31.5, 0.5)
        }
        best.append(min(errors, key=errors.get))
        assert errors[best[-1]] < 0.02
    assert min(best) < -3 and max(best) > 3 and max(map(abs, best)) <= 30


def test_wrong_images():
    with pytest.raises(ValueError, match=r"random_flip takes images of shape .* not \(8, 8\)"):
        tr.random_flip(KEY, jnp.ones((8, 8)))
    with pytest.raises(TypeError, match="needs floating images, not uint8"):
        tr.random_affine(KEY, jnp.ones((2, 8, 8, 1), jnp.uint8))
