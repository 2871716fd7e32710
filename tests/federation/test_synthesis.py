"""Phase 1: the same images whoever makes them, none made twice, and nothing that was made is lost."""

import errno
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raysim import Result
from raysim.federation.synthesis import image_keys
from raysim.generation.image_cache import ImageCache

Run = Callable[..., Result]


@pytest.fixture
def config(small: dict[str, Any]) -> dict[str, Any]:
    """68 synthetic digits for 6 clients, one round, so that nearly all of it is phase 1."""
    generator = {"name": "ddpm", "steps": 2, "batch_size": 16}
    return {**small, "rounds": 1, "allocation": {"name": "fedeas", "beta": 5}, "generator": generator}


def budget(config: dict[str, Any], beta: float) -> dict[str, Any]:
    return {**config, "allocation": {"name": "fedeas", "beta": beta}}


def uncached(config: dict[str, Any]) -> dict[str, Any]:
    return {**config, "output": {**config["output"], "cache": None}}


def segments(config: dict[str, Any]) -> list[Path]:
    return sorted(Path(config["output"]["cache"]).glob("*/*/*.seg"))


def image_notes(result: Result) -> list[str]:
    """What the summary says of images, but for whose images the weights were trained on."""
    return [note for note in result.summary["notes"] if "image" in note and "were trained on" not in note]


def test_keys_are_in_the_order_of_client_class_and_index():
    keys_M3 = image_keys(np.array([[0, 2], [1, 0]]))
    assert keys_M3.tolist() == [[0, 1, 0], [0, 1, 1], [1, 0, 0]]


def test_images_are_the_same_with_and_without_cache_and_for_one_and_three_workers(run: Run, config: dict[str, Any]):
    first = run(config).summary
    assert first["n_synthetic_made"] == first["n_synthetic"] > 50
    for workers in (1, 3):
        other = run({**uncached(config), "resources": {"workers": workers}}).summary
        assert other["synthetic_sha256"] == first["synthetic_sha256"]
        assert other["model_sha256"] == first["model_sha256"]
        assert other["n_synthetic_made"] == first["n_synthetic"]


def test_images_are_the_same_where_a_process_of_their_own_puts_them_together(
    run: Run, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    """Where it keeps them in the cache, where they come from there, and without one; in blocks of 16 images."""
    first = run(uncached(config)).summary
    monkeypatch.setattr("raysim.federation.synthesis.OWN_PROCESS_BYTES", 0)
    monkeypatch.setattr("raysim.federation.image_blocks.BLOCK_BYTES", 16 * 64)
    for made, base in ((first["n_synthetic"], config), (0, config), (first["n_synthetic"], uncached(config))):
        other = run(base).summary
        assert other["synthetic_sha256"] == first["synthetic_sha256"]
        assert other["model_sha256"] == first["model_sha256"]
        assert other["n_synthetic_made"] == made


def test_batches_of_1_7_and_16_images_are_one_generator_because_all_are_padded_to_16(run: Run, config: dict[str, Any]):
    """The same bits without a cache; with one, what batches of 16 made serves a run that asks for batches of 7."""

    def batches(size: int, base: dict[str, Any]) -> dict[str, Any]:
        return {**base, "generator": {**config["generator"], "batch_size": size}}

    first = run(config).summary
    for size in (1, 7):
        other = run(batches(size, uncached(config))).summary
        assert other["synthetic_sha256"] == first["synthetic_sha256"]
        assert other["n_synthetic_made"] == first["n_synthetic"]
    assert run(batches(7, config)).summary["n_synthetic_made"] == 0


def test_a_run_whose_images_are_all_cached_asks_no_worker_for_a_generator(
    run: Run, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    """On CPU the driver knows the fingerprint: phase 1 waits neither for a worker nor for its imports."""
    from raysim.engine.pool import Pool

    run(config)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("phase 1 called a worker")

    monkeypatch.setattr(Pool, "call_any", refuse)
    assert run(config).summary["n_synthetic_made"] == 0


def test_a_second_run_makes_none_and_a_larger_budget_only_the_difference(run: Run, config: dict[str, Any]):
    first = run(config).summary
    again = run(config).summary
    assert again["n_synthetic_made"] == 0 and again["synthetic_sha256"] == first["synthetic_sha256"]
    larger = run(budget(config, 6)).summary
    assert larger["n_synthetic_made"] == larger["n_synthetic"] - first["n_synthetic"] > 0
    assert larger["synthetic_sha256"] == run(uncached(budget(config, 6))).summary["synthetic_sha256"]
    assert run(config, seed=1).summary["n_synthetic_made"] > 0


def test_the_run_says_how_many_images_come_from_the_cache_and_how_large_it_is(
    run: Run, config: dict[str, Any], capsys: pytest.CaptureFixture[str]
):
    n = run(config).summary["n_synthetic"]
    assert f"{n:,} synthetic images: 0 from the cache" in capsys.readouterr().out
    run(config)
    size = sum(path.stat().st_size for path in segments(config)) / 1e6
    shown = capsys.readouterr().out
    assert f"{n:,} synthetic images: {n:,} from the cache" in shown and f"({size:,.1f} MB), 0 to make" in shown


def test_a_damaged_segment_is_found_deleted_made_again_and_told(run: Run, config: dict[str, Any]):
    first = run(config).summary
    path = segments(config)[0]
    raw = path.read_bytes()
    path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 255]))
    again = run(config)
    assert again.summary["synthetic_sha256"] == first["synthetic_sha256"]
    assert 0 < again.summary["n_synthetic_made"] <= first["n_synthetic"]
    assert image_notes(again) == [f"damaged cache file {path.name} deleted; its images are made again"]
    third = run(config)
    assert third.summary["n_synthetic_made"] == 0 and not image_notes(third)


def test_a_full_disk_in_mid_generation_is_told_once_and_keeps_what_was_made(
    run: Run, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    """Every answer is saved at once here; the first save works, the others do not."""
    monkeypatch.setattr("raysim.federation.image_blocks.FLUSH_S", -1.0)
    add, saved = ImageCache.add, []

    def fill_the_disk(self: ImageCache, keys_M3: np.ndarray, images: np.ndarray) -> None:
        if saved:
            raise OSError(errno.ENOSPC, "No space left on device")
        saved.append(len(images))
        add(self, keys_M3, images)

    with monkeypatch.context() as patch:
        patch.setattr(ImageCache, "add", fill_the_disk)
        result = run(config)
    n = result.summary["n_synthetic"]
    (note,) = image_notes(result)
    assert note.startswith(f"{n - saved[0]:,} images could not be kept") and "No space left" in note
    assert result.summary["synthetic_sha256"] == run(uncached(config)).summary["synthetic_sha256"]
    assert run(config).summary["n_synthetic_made"] == n - saved[0]


def test_what_a_full_disk_refused_is_saved_when_there_is_room_again(
    run: Run, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("raysim.federation.image_blocks.FLUSH_S", -1.0)
    add, calls = ImageCache.add, []

    def first_refused(self: ImageCache, keys_M3: np.ndarray, images: np.ndarray) -> None:
        calls.append(len(images))
        if len(calls) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        add(self, keys_M3, images)

    with monkeypatch.context() as patch:
        patch.setattr(ImageCache, "add", first_refused)
        result = run(config)
    assert len(calls) > 1 and not image_notes(result)
    assert run(config).summary["n_synthetic_made"] == 0


def test_a_cache_that_cannot_be_made_is_done_without(run: Run, config: dict[str, Any], tmp_path: Path):
    (tmp_path / "file").write_text("")
    result = run({**config, "output": {**config["output"], "cache": str(tmp_path / "file" / "cache")}})
    (note,) = image_notes(result)
    assert "output.cache" in note and "Not a directory" in note
    assert result.summary["n_synthetic_made"] == result.summary["n_synthetic"]


def test_an_interrupted_generation_keeps_what_was_made(
    run: Run, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    """The driver is stopped at the third report of progress; what had arrived is not made again."""
    from raysim.ui.display import Display

    reports = []

    def stop(self: Display, done: int, total: int, text: str = "") -> None:
        reports.append(done)
        if len(reports) == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Display, "advance", stop)
        with pytest.raises(KeyboardInterrupt):
            run({**config, "resources": {"workers": 1}})  # which is ended, as it is at work
    result = run(config).summary
    assert result["n_synthetic_made"] == result["n_synthetic"] - reports[-1] < result["n_synthetic"]
    assert result["synthetic_sha256"] == run(uncached(config)).summary["synthetic_sha256"]


def test_what_a_worker_made_is_in_the_cache_before_it_counts_as_saved_and_is_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Killed at any moment, a driver has lost what it has not written, and has written nothing twice or half.

    Three answers of 2 images; at each write the pixels are already in place, and the cache holds what came before.
    """
    from without_ray import assembly, pixels_of

    monkeypatch.setattr("raysim.federation.image_blocks.FLUSH_S", -1.0)
    keys_M3 = image_keys(np.array([[6]]))
    expected = np.arange(1, 7, dtype=np.uint8).reshape(6, 1, 1, 1)
    images = assembly(keys_M3, ImageCache.open(tmp_path, "ab" * 32, 0, (1, 1, 1)), monkeypatch)
    add, written = ImageCache.add, []

    def watch(self: ImageCache, keys: np.ndarray, pixels: np.ndarray) -> None:
        assert np.array_equal(pixels, expected[keys[:, 2]])
        assert cached(tmp_path, keys_M3)[0].sum() == len(written)
        add(self, keys, pixels)
        written.extend(keys[:, 2].tolist())

    monkeypatch.setattr(ImageCache, "add", watch)
    for rows in ([4, 5], [0, 1], [2, 3]):
        images.take(np.array(rows), expected[rows])
        assert written[-2:] == rows
    images.save()
    assert written == [4, 5, 0, 1, 2, 3]
    again = assembly(keys_M3, ImageCache.open(tmp_path, "ab" * 32, 0, (1, 1, 1)), monkeypatch)
    again.find()
    again.build()
    assert np.array_equal(pixels_of(again), expected) and np.array_equal(pixels_of(images), expected)


def cached(folder: Path, keys_M3: np.ndarray) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """(for each key whether a cache of grey images of one pixel has it, the images, its notes)."""
    cache = ImageCache.open(folder, "ab" * 32, 0, (1, 1, 1))
    found_M, images = np.zeros(len(keys_M3), bool), np.zeros((len(keys_M3), 1, 1, 1), np.uint8)
    for path, rows, places in cache.find(keys_M3):
        found_M[rows], images[rows] = True, cache.images(path, places)
    return found_M, images, cache.notes


def test_two_runs_that_write_at_once_share_the_cache(tmp_path: Path):
    """Each of two writers adds and reads 40 batches of the same images; both end with all of them."""
    keys_M3 = image_keys(np.array([[200]]))
    pixels = (np.arange(200) % 256).astype(np.uint8)[:, None, None, None]
    found: list[bool] = []

    def write() -> None:
        cache = ImageCache.open(tmp_path, "ab" * 32, 0, (1, 1, 1))
        for i in range(0, 200, 5):
            cache.add(keys_M3[i : i + 5], pixels[i : i + 5])
            cache.merge()
        written.wait()  # a writer's merge would take away what the other has just found
        found_M, images, notes = cached(tmp_path, keys_M3)
        found.append(bool(found_M.all()) and np.array_equal(images, pixels) and not (notes or cache.notes))

    written = threading.Barrier(2, timeout=60)
    threads = [threading.Thread(target=write) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert found == [True, True]


def test_the_oracle_hands_out_held_out_images_and_counts_repeats(run: Run, config: dict[str, Any]):
    """72 public digits of 1,438 (5 %) are 7 a class; clients ask for up to 30 of a class."""
    data = {**config["data"], "public_frac": 0.05}
    generous = {**config, "data": data, "generator": {"name": "oracle"}, "allocation": {"name": "uniform", "total": 60}}
    assert not image_notes(run(generous))
    result = run({**generous, "allocation": {"name": "uniform", "total": 1800}})
    assert result.summary["n_synthetic"] == result.summary["n_synthetic_made"] + 60 == 1800
    (note,) = image_notes(result)
    assert note.startswith("oracle: ") and "of 1,800 images are repeats within a client" in note


def test_shared_images_are_not_changed_by_training_and_their_quality_can_be_measured(
    session, unrendered: None, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    """Checksum of every client's shared images before and after three rounds with crop and normalisation.

    PyTorch warns where it is handed an array that may not be written to; the workers' logs hold no such warning.
    """
    import ray

    import raysim
    from raysim.core.records import Synthetic, sha256
    from raysim.data.datasets import digits
    from raysim.engine.object_store import images_of
    from raysim.federation.synthesis import Synthesis, sample_of
    from raysim.generation import quality
    from raysim.lifecycle.directory import RunDirectory
    from raysim.lifecycle.image_quality import measure_run
    from raysim.ui.display import Display

    made: list[Any] = []
    make = Synthesis.make

    def keep(*arguments: Any) -> Any:
        made.append(make(*arguments))
        made.append({k: sha256(images) for k, images in owned(made[0]).items()})
        return made[0]

    def owned(synthetic: Synthetic) -> dict[int, np.ndarray]:
        return {k: images_of(synthetic.of(k)) for k in np.flatnonzero(synthetic.quota_KC.any(axis=1)).tolist()}

    monkeypatch.setattr(Synthesis, "make", keep)
    monkeypatch.setattr(quality, "STEPS", 20)
    result = raysim.run({**config, "rounds": 3, "data": {**config["data"], "augment": ["crop"]}}, session=session)
    synthetic, before = made
    assert before and before == {k: sha256(images) for k, images in owned(synthetic).items()}
    assert not any(images.flags.writeable for images in owned(synthetic).values())
    logs = Path(ray.nodes()[0]["RayletSocketName"]).parents[1] / "logs"
    written = [path.read_text(errors="replace") for path in logs.glob("worker-*.err")]
    assert written and not any("not writable" in text for text in written)

    images, labels_M = sample_of(synthetic, 10**6)
    assert np.array_equal(images, np.concatenate([*owned(synthetic).values()]))
    assert np.array_equal(np.bincount(labels_M, minlength=10), synthetic.quota_KC.sum(axis=0))
    assert len(sample_of(synthetic, 20)[0]) == len(sample_of(synthetic, 20)[1]) == 20
    directory = RunDirectory(result.directory)
    measured = measure_run(digits(), synthetic, 0, directory, Display(live=False))
    assert measured is not None and measured["images"] == len(images)
    assert directory.read_json("quality.json") == measured
    assert (directory.figures / "real_and_synthetic.png").exists() and (directory.figures / "quality.png").exists()
