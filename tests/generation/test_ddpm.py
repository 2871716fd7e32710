"""The `ddpm` generator: image i depends on its seed alone, and whatever cannot give the right pixels is refused."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler, UNet2DModel
from toy_weights import make_dataset, make_folder

from raysim.core.errors import RunError, UserError
from raysim.generation.ddpm import ddpm
from raysim.generation.sampling import one_thread, to_uint8
from raysim.generation.weights_folder import SHIPPED, shipped_names

SAMPLERS = ["ddim", "ddpm", "dpmsolver++", "unipc"]
SHAPES = [(1, 8, 8), (3, 5, 5)]


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """(generator factory, split) for 8 x 8 images of three classes."""
    dataset = make_dataset()
    folder = make_folder(tmp_path_factory.mktemp("toy"), dataset)

    def make(**keys):
        return ddpm(dataset, "cpu", **{"weights": str(folder), "steps": 2, "batch_size": 32, **keys})

    return make


@pytest.fixture(scope="module")
def digits_split():
    from raysim.data.datasets import digits

    return digits()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_image_i_is_bitwise_the_same_in_any_batch_and_at_any_position(tmp_path, monkeypatch, sampler, shape):
    """20 images at once, in batches of 1 and of 7, in reverse, behind 37 others, all padded to 32: as floats too."""
    dataset = make_dataset(*shape)
    weights = str(make_folder(tmp_path, dataset))
    generator = ddpm(dataset, "cpu", weights=weights, sampler=sampler, steps=3, guidance=1.5, batch_size=20)
    labels_B, seeds_B = np.arange(20) % 3, np.arange(20) * 977 + 5
    together = generator.sample(labels_B, seeds_B)
    others = np.arange(37)
    behind = generator.sample(np.concatenate([others % 3, labels_B]), np.concatenate([others, seeds_B]))
    assert np.array_equal(behind[37:], together)
    assert len({image.tobytes() for image in together}) == 20

    monkeypatch.setattr("raysim.generation.ddpm.to_uint8", lambda x: x.clone().numpy())

    def floats(rows: np.ndarray) -> np.ndarray:
        with torch.inference_mode(), one_thread(torch.device("cpu")):
            return generator._sample_batch(labels_B[rows], seeds_B[rows])

    reference = floats(np.arange(20))
    assert reference.dtype == np.float32
    for rows in (np.arange(20)[::-1], np.roll(np.arange(20), 7), np.arange(7), np.arange(7, 14), np.array([3]),
                 np.array([19])):
        assert np.array_equal(floats(rows), reference[rows])


def test_shipped_network_gives_the_same_floats_at_every_position(digits_split):
    """Before rounding to pixels: row i of a permuted batch has the bits that its row had, at all 64 positions."""
    generator = ddpm(digits_split, "cpu", steps=1)
    noise = torch.randn(64, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(64) % 10
    with torch.inference_mode():
        torch.set_num_threads(1)
        reference = generator._predict(noise, 500, labels)
        for shift in range(1, 64, 3):
            order = torch.roll(torch.arange(64), shift)
            assert torch.equal(generator._predict(noise[order], 500, labels[order]), reference[order])


def test_images_do_not_depend_on_the_number_of_threads_which_is_left_as_it_was(toy):
    generator, before = toy(guidance=1.5), torch.get_num_threads()
    images = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        images.append(generator.sample(np.arange(9) % 3, np.arange(9)))
        assert torch.get_num_threads() == threads
    torch.set_num_threads(before)
    assert np.array_equal(images[0], images[1]) and np.array_equal(images[0], images[2])


def test_sampling_neither_reads_nor_moves_the_global_random_state(toy):
    generator = toy(sampler="ddpm")
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = generator.sample(np.array([0, 1]), np.array([3, 4]))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert np.array_equal(generator.sample(np.array([0, 1]), np.array([3, 4])), first)


def test_no_labels_give_no_images(toy):
    assert toy().sample(np.zeros(0, np.int64), np.zeros(0, np.int64)).shape == (0, 1, 8, 8)


def test_values_outside_the_range_are_clamped_before_they_become_bytes():
    """(x + 1) 127.5: -2.55, 0, 127.5, 255, 257.55; a half rounds to the even neighbour, 128; none wraps round."""
    assert to_uint8(torch.tensor([-1.02, -1, 0, 1, 1.02])).tolist() == [0, 0, 128, 255, 255]


def test_values_that_are_not_finite_are_an_error_not_pixels():
    with pytest.raises(RunError, match="NaN"):
        to_uint8(torch.tensor([0.0, float("nan")]))


def test_the_label_and_the_seed_each_change_the_image(toy):
    images = toy().sample(np.array([0, 1, 0]), np.array([7, 7, 8]))
    assert not np.array_equal(images[0], images[1])
    assert not np.array_equal(images[0], images[2])


def test_the_class_table_has_a_row_more_than_there_are_classes(toy):
    generator = toy()
    assert generator.unet.class_embedding.num_embeddings == 4
    assert (generator.classes, generator.null_class) == (3, 3)


def answer_with_the_label(x, t, labels, return_dict):
    return (labels.float()[:, None, None, None].expand_as(x),)


def test_guidance_extrapolates_from_the_null_class(toy):
    """A network that answers with its label: null class 3, label 1, g = 2: 3 + 2 (1 - 3) = -1."""
    for guidance, expected in ((2.0, -1.0), (1.0, 1.0), (0.0, 3.0), (0.5, 2.0)):
        generator = toy(guidance=guidance)
        generator.unet = answer_with_the_label
        assert generator._predict(torch.zeros(32, 1, 8, 8), 0, torch.ones(32, dtype=torch.int64)).unique() == expected


@pytest.mark.parametrize(("guidance", "passes"), [(1.0, 1), (0.0, 1), (1.5, 2)])
def test_the_network_sees_one_shape_only_and_no_guidance_costs_one_pass(toy, guidance, passes):
    """33 images are two batches of 32, of two steps each."""
    generator, shapes = toy(guidance=guidance, steps=2), []
    generator.unet.register_forward_pre_hook(lambda _, inputs: shapes.append(tuple(inputs[0].shape)))
    generator.sample(np.zeros(33, np.int64), np.arange(33))
    assert shapes == [(32, 1, 8, 8)] * 4 * passes


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8])
def test_labels_of_any_integer_type_give_the_same_images(toy, dtype):
    reference = toy().sample(np.array([0, 2]), np.array([1, 2]))
    assert np.array_equal(toy().sample(np.array([0, 2], dtype), np.array([1, 2])), reference)


@pytest.mark.parametrize("labels", [np.array([0.0, 1.0]), np.array([True, False]), np.array([[0, 1]])])
def test_labels_that_are_not_a_row_of_integers_are_refused(toy, labels):
    with pytest.raises(UserError, match="labels must be whole numbers"):
        toy().sample(labels, np.arange(2))


def test_labels_outside_the_classes_are_named(toy):
    with pytest.raises(UserError, match=r"labels \[-1, 3\] .* 0 to 2"):
        toy().sample(np.array([0, 3, -1]), np.arange(3))


def test_one_seed_an_image(toy):
    with pytest.raises(ValueError, match="2 integers"):
        toy().sample(np.array([0, 1]), np.arange(3))


def reference_ddim(generator: ddpm, folder: Path, label: int, seed: int, batch: int) -> torch.Tensor:
    """The plain diffusers loop, in the generator's padded shape."""
    scheduler = DDIMScheduler.from_pretrained(folder)
    scheduler.set_timesteps(generator.sampler.steps)
    x = torch.randn(1, 1, 8, 8, generator=torch.Generator().manual_seed(seed)).expand(batch, 1, 8, 8)
    labels = torch.full((batch,), label)
    with torch.inference_mode():
        for t in scheduler.timesteps:
            predicted = generator.unet(x, t, labels, return_dict=False)[0]
            x = scheduler.step(predicted, t, x, use_clipped_model_output=True, return_dict=False)[0]
    return x[:1]


@pytest.mark.parametrize("prediction", ["v_prediction", "epsilon"])
@pytest.mark.parametrize("steps", [4, 20])
def test_ddim_equals_the_diffusers_loop_where_the_steps_divide_the_timesteps(tmp_path, prediction, steps):
    dataset = make_dataset()
    folder = make_folder(tmp_path, dataset, prediction)
    generator = ddpm(dataset, "cpu", weights=str(folder), steps=steps, guidance=1.0, batch_size=16)
    expected = to_uint8(reference_ddim(generator, folder, label=2, seed=11, batch=16))
    assert np.abs(generator.sample(np.array([2]), np.array([11])).astype(int) - expected).max() <= 1


@pytest.mark.parametrize(
    ("shape", "named"),
    [((3, 8, 8, 3), "1 channels.*3 channels"), ((1, 16, 16, 3), r"\[8, 8\] pixels.*\[16, 16\]"),
     ((1, 8, 8, 5), "3 classes.*5 classes")],
)
def test_weights_for_other_images_are_refused_and_both_sides_named(tmp_path, shape, named):
    folder = make_folder(tmp_path, make_dataset())
    with pytest.raises(UserError, match=named):
        ddpm(make_dataset(*shape), "cpu", weights=str(folder))


def test_weights_that_number_the_same_classes_otherwise_are_refused(tmp_path):
    """Cats would be made for dogs; other names altogether say nothing about the order."""
    dataset = replace(make_dataset(), class_names=("cat", "cow", "dog"))
    folder = make_folder(tmp_path, dataset)
    card = json.loads((folder / "card.json").read_text())
    for names, fits in ((["cat", "cow", "dog"], True), (["0", "1", "2"], True), (["cat", "dog", "cow"], False)):
        (folder / "card.json").write_text(json.dumps({**card, "class_names": names}))
        if fits:
            ddpm(dataset, "cpu", weights=str(folder))
        else:
            with pytest.raises(UserError, match=r"numbers its classes cat, dog, cow, .* 'toy' cat, cow, dog"):
                ddpm(dataset, "cpu", weights=str(folder))


@pytest.mark.parametrize(
    ("theirs", "ours", "note"),
    [
        (["cat", "dog", "cow"], ["cat", "dog", "cow"], None),
        (["Cat", "dog", "cow"], ["cat", "dog", "cow"], None),
        (["0", "1", "2"], ["0", "1", "2"], None),
        (["0", "1", "2"], ["class_0", "class_1", "class_2"], None),
        (["car", "dog", "cow"], ["automobile", "dog", "cow"], "images are made of class 0 car for automobile"),
        (["0", "1", "2"], ["cat", "dog", "cow"], "the weights only number the classes, .* are 0 cat, 1 dog, 2 cow"),
        (None, ["cat", "dog", "cow"], "the weights only number the classes"),
        (["cat", "dog", "cow"], ["0", "1", "2"], "the data set only number.* are 0 cat, 1 dog, 2 cow"),
    ],
)
def test_weights_whose_classes_have_other_names_get_a_note(tmp_path, theirs, ours, note):
    """Label c makes an image of what the weights call c, whatever the data set calls it."""
    dataset = replace(make_dataset(), class_names=tuple(ours))
    folder = make_folder(tmp_path, dataset)
    card = json.loads((folder / "card.json").read_text())
    (folder / "card.json").write_text(json.dumps({**card, "class_names": theirs}))
    unknown, *found = ddpm.notes(dataset, np.ones((1, 3), int), weights=str(folder))
    assert "do not say which images" in unknown and len(found) == (note is not None)
    assert note is None or re.search(note, found[0])


def test_guidance_needs_a_null_class(tmp_path):
    dataset = make_dataset()
    folder = make_folder(tmp_path, dataset, null=False)
    with pytest.raises(UserError, match=r"generator.guidance = 1.5: .*null class"):
        ddpm(dataset, "cpu", weights=str(folder), guidance=1.5)
    assert ddpm(dataset, "cpu", weights=str(folder), guidance=1.0, steps=1).sample(np.array([2]), np.array([0])).any()


def test_a_network_without_class_labels_is_refused(tmp_path):
    """Its images would ignore the label: diffusers' own error would come from inside the network."""
    folder = make_folder(tmp_path, make_dataset())
    unet = UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, block_out_channels=(16,), layers_per_block=1,
        down_block_types=("DownBlock2D",), up_block_types=("UpBlock2D",), norm_num_groups=8, add_attention=False,
    )
    unet.save_pretrained(folder)
    (folder / "card.json").unlink()
    with pytest.raises(UserError, match="takes no class labels"):
        ddpm(make_dataset(), "cpu", weights=str(folder))


def test_a_folder_without_a_card_is_read_with_one_more_row_as_the_null_class(tmp_path):
    folder = make_folder(tmp_path, make_dataset())
    (folder / "card.json").unlink()
    assert ddpm(make_dataset(), "cpu", weights=str(folder)).null_class == 3


def test_the_fingerprint_changes_with_whatever_changes_pixels_and_with_nothing_else(toy, tmp_path):
    reference = toy().fingerprint()
    assert toy().fingerprint() == reference
    assert toy(batch_size=17).fingerprint() == reference, "17 is padded to 32 as well"
    changes = [{"sampler": "unipc"}, {"steps": 3}, {"guidance": 2.0}, {"batch_size": 64}, {"spacing": "leading"},
               {"precision": "bf16"}]
    prints = [toy(**change).fingerprint() for change in changes]
    dataset = make_dataset()
    folder = make_folder(tmp_path, dataset, "epsilon")
    prints.append(ddpm(dataset, "cpu", weights=str(folder), steps=2, batch_size=32).fingerprint())
    assert len({reference, *prints}) == len(changes) + 2


def test_bf16_changes_little(toy):
    labels_B, seeds_B = np.arange(8) % 3, np.arange(8)
    full, half = (toy(precision=p, steps=4).sample(labels_B, seeds_B).astype(int) for p in ("float32", "bf16"))
    assert np.abs(full - half).max() > 0 and np.abs(full - half).mean() < 4


@pytest.mark.parametrize("name", shipped_names())
def test_diffusers_itself_loads_the_shipped_folders_which_are_small(name):
    folder = SHIPPED / name
    card = json.loads((folder / "card.json").read_text())
    unet = UNet2DModel.from_pretrained(folder, use_safetensors=True)
    assert DDIMScheduler.from_pretrained(folder).config.prediction_type == "v_prediction"
    ours = ddpm(make_dataset(card["channels"], *card["image_size"], card["classes"]), "cpu", weights=name).unet
    pairs = zip(unet.state_dict().values(), ours.state_dict().values(), strict=True)
    assert all(torch.equal(a.float(), b) for a, b in pairs)
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 3_000_000


def test_shipped_weights_make_digits_that_real_ones_recognise(digits_split):
    """100 images, 10 steps: the nearest of the real class means is the asked class for at least 80 (chance: 10)."""
    labels_B = np.arange(100) % 10
    images = ddpm(digits_split, "cpu", steps=10).sample(labels_B, np.arange(100))
    real, labels_N = digits_split.train_images.reshape(-1, 64).astype(float), digits_split.train_labels_N
    means = np.stack([real[labels_N == c].mean(0) for c in range(10)])
    nearest = ((images.reshape(-1, 1, 64) - means) ** 2).sum(2).argmin(1)
    assert (nearest == labels_B).sum() >= 80
