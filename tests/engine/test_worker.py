"""What a worker process takes and what it leaves alone."""

import os

import numpy as np
import pytest
import torch

from raysim.core.errors import RunError
from raysim.core.records import Partition
from raysim.data.datasets import digits
from raysim.engine.messages import Plugin, WorkerSetup
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


def test_a_worker_that_cannot_train_as_the_others_do_says_so_before_it_trains_with_other_bits(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    threads = torch.get_num_threads()
    dataset, one = digits(), np.zeros(1, bool)
    rows = np.arange(9)
    partition = Partition(rows, np.array([0, 9]), dataset.train_labels_N[:9], 10, one, one, np.zeros(1))
    plugins = Plugin("model", "linear", {}), Plugin("local", "sgd", {"batch_size": 1000})
    try:
        worker = Worker("cpu", 1)
        monkeypatch.setattr(worker, "where", lambda: ("10.0.0.7", "node"))
        monkeypatch.setattr("raysim.engine.worker.check_versions", lambda *_: None)
        worker.configure(WorkerSetup(0, *plugins), dataset, partition)
        refused = r"10\.0\.0\.7 cannot train several clients at once.*batches of 1,000 images"
        with pytest.raises(RunError, match=refused):
            worker.configure(WorkerSetup(0, *plugins, batch_trainer="vmap"), dataset, partition)
    finally:
        torch.set_num_threads(threads)
