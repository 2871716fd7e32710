"""Claims about every generator that `raysim list generator` shows; `every_generator` says how each is built here."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import every_generator
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raysim.config.registry import available, parameters, resolve
from raysim.core import rng

GENERATORS = sorted(available("generator"))
every = pytest.mark.parametrize("name", GENERATORS)
few = settings(max_examples=8, deadline=None)
requests = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2**63 - 1)), min_size=1, max_size=20)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    found = tmp_path_factory.mktemp("generators")
    every_generator.prepare(found)
    return found


@pytest.fixture(scope="module")
def built(folder):
    return {name: every_generator.make(name, folder) for name in GENERATORS}


def frozen(values) -> np.ndarray:
    array = np.array(values, dtype=np.int64)
    array.flags.writeable = False
    return array


def images_of(generator, pairs):
    """Images of (label, seed) pairs, asked for with arrays that cannot be written to."""
    return generator.sample(frozen([label for label, _ in pairs]), frozen([seed for _, seed in pairs]))


@every
@few
@given(pairs=requests)
def test_images_are_bytes_in_the_data_sets_shape(name, built, pairs):
    images = images_of(built[name], pairs)
    assert images.shape == (len(pairs), 1, 8, 8) and images.dtype == np.uint8


@every
def test_no_request_gives_no_image(name, built):
    assert built[name].sample(frozen([]), frozen([])).shape == (0, 1, 8, 8)


@every
@few
@given(pairs=requests, others=requests, data=st.data())
def test_an_image_depends_on_its_label_and_seed_alone(name, built, pairs, others, data):
    """In any order, behind others, and alone: the same bytes."""
    together = images_of(built[name], pairs)
    order = data.draw(st.permutations(range(len(pairs))))
    assert (images_of(built[name], [pairs[i] for i in order]) == together[order]).all()
    assert (images_of(built[name], [*others, *pairs])[len(others) :] == together).all()
    one = data.draw(st.integers(0, len(pairs) - 1))
    assert (images_of(built[name], [pairs[one]])[0] == together[one]).all()


@every
def test_labels_and_seeds_change_images(name, built):
    """The run's own seeds, of ten images of each class for one client."""
    kind = resolve("generator", name)
    image_seed = getattr(kind, "image_seed", lambda *key: rng.integer(key[0], rng.SYNTHETIC, *key[1:]))
    pairs = [(c, image_seed(0, 1, c, i)) for c in range(3) for i in range(10)]
    assert all(0 <= seed < 2**63 for _, seed in pairs)
    assert len({image.tobytes() for image in images_of(built[name], pairs)}) == 30


@every
def test_a_second_one_with_the_same_keys_makes_the_same_images(name, built, folder):
    again = every_generator.make(name, folder)
    pairs = [(i % 3, 1000 * i) for i in range(6)]
    assert again.fingerprint() == built[name].fingerprint()
    assert (images_of(again, pairs) == images_of(built[name], pairs)).all()


@pytest.mark.parametrize("hash_seed", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_fingerprints_are_the_same_in_every_process_and_need_neither_ray_nor_mlflow(built, folder, hash_seed):
    """Python orders a set of names anew in each process, and diffusers keeps one as a list in its schedulers."""
    command = [sys.executable, every_generator.__file__, str(folder), *GENERATORS]
    environment = os.environ | {"PYTHONHASHSEED": hash_seed}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=120)
    described, *lines = done.stdout.splitlines()
    assert described == repr(every_generator.sampler()) != repr("")
    assert dict(line.split() for line in lines) == {n: g.fingerprint() for n, g in built.items()}


@every
def test_a_key_that_changes_a_pixel_changes_the_fingerprint(name, built, folder):
    """Each key has another value here, and most of these change pixels."""
    others = every_generator.others_of(name, folder)
    assert sorted(others) == sorted(parameters(resolve("generator", name)).model_fields)
    pairs = [(i % 3, 7919 * i) for i in range(6)]
    before, fingerprints = images_of(built[name], pairs), {built[name].fingerprint()}
    different = 0
    for key, value in others.items():
        other = every_generator.make(name, folder, value if isinstance(value, dict) else {key: value})
        if (images_of(other, pairs) != before).any():
            different += 1
            assert other.fingerprint() not in fingerprints, key
        fingerprints.add(other.fingerprint())
    assert different >= len(others) / 2


@every
def test_a_data_set_that_changes_a_pixel_changes_the_fingerprint(name, built, folder):
    """Other public images, all black: what draws from them gives other pixels, and what does not is the same."""
    toy = every_generator.dataset()
    black = dataclasses.replace(toy, public_images=np.zeros_like(toy.public_images))
    other, pairs = every_generator.make(name, folder, like=black), [(i % 3, 7919 * i) for i in range(6)]
    same = (images_of(other, pairs) == images_of(built[name], pairs)).all()
    assert same or other.fingerprint() != built[name].fingerprint()


@every
def test_it_leaves_torch_as_it_was(name, built):
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    images_of(built[name], [(0, 5), (1, 6)])
    assert torch.equal(torch.get_rng_state(), before) and torch.get_num_threads() == threads
    assert torch.is_grad_enabled()
