"""Weights come from an undamaged safetensors file that fits its configuration, or not at all."""

import json

import pytest
from toy_weights import make_dataset, make_folder

from raysim.core.errors import UserError
from raysim.generation.ddpm import ddpm
from raysim.generation.weights_folder import find_folder


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pkl", ".ckpt"])
def test_a_pickle_is_refused_with_the_reason(tmp_path, suffix):
    pickle = tmp_path / f"diffusion_pytorch_model{suffix}"
    pickle.write_bytes(b"\x80\x04.")
    for weights in (pickle, tmp_path):
        with pytest.raises(UserError, match=r"can run any code.*safetensors"):
            find_folder(str(weights))


def test_a_missing_folder_is_refused_with_the_shipped_names(tmp_path):
    with pytest.raises(UserError, match=r"generator.weights: '.*nowhere' does not exist.*digits"):
        find_folder(str(tmp_path / "nowhere"))


def test_a_folder_without_weights_is_refused_with_what_is_in_it(tmp_path):
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(UserError, match=r"a folder without diffusion_.*safetensors \(there is notes.txt\); .*digits"):
        find_folder(str(tmp_path))


@pytest.mark.parametrize("name", ["config.json", "diffusion_pytorch_model.safetensors", "scheduler_config.json"])
@pytest.mark.parametrize("damage", ["missing", "cut", "garbage"])
def test_a_missing_or_damaged_file_is_named(tmp_path, name, damage):
    path = make_folder(tmp_path, make_dataset()) / name
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(content[: len(content) // 2] if damage == "cut" else b"\x00garbage")
    with pytest.raises(UserError, match=name):
        ddpm(make_dataset(), "cpu", weights=str(tmp_path))


def test_a_changed_bit_in_the_weights_is_noticed(tmp_path):
    path = make_folder(tmp_path, make_dataset()) / "diffusion_pytorch_model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(UserError, match="sha256"):
        ddpm(make_dataset(), "cpu", weights=str(tmp_path))


def test_weights_of_another_network_are_refused(tmp_path):
    path = make_folder(tmp_path, make_dataset()) / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "block_out_channels": [32]}))
    with pytest.raises(UserError, match="do not fit each other"):
        ddpm(make_dataset(), "cpu", weights=str(tmp_path))
