"""What a worker process takes and what it leaves alone."""

import os

import pytest
import torch

from raysim.engine.worker import Worker


def test_a_worker_without_a_share_of_a_gpu_hides_every_gpu(monkeypatch: pytest.MonkeyPatch):
    """Ray itself would show all of them to an actor that owns none."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    threads = torch.get_num_threads()
    try:
        assert Worker("cpu", 1).device == "cpu"
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)
