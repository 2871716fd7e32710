"""What people find in MLflow of a sweep and its runs: in the store, and on the pages in a real browser.

The tests marked `browser` need Chromium, which they do not start without:
    apt-get install -y chromium chromium-driver && pip install -e '.[browser]' && python -m pytest -m browser
With RAYSIM_SCREENSHOTS=FOLDER each page is also kept as a picture there.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml

from raysim import Result
from raysim.commands import ui as ui_command
from raysim.commands.load_result import load_result
from raysim.commands.sweep.sweep import SweepResult, run_sweep
from raysim.core.errors import UserError
from raysim.engine.session import Session
from raysim.federation.metrics import METRICS
from raysim.lifecycle.kept_model import load_model
from raysim.lifecycle.mlflow_names import FIRST, FIRST_SECTION, OTHER, mlflow_name
from raysim.tracking import links, pages

BASE = {
    "rounds": 3,
    "data": {"name": "digits", "train_samples": 300, "test_samples": 100},
    "partition": {"name": "dirichlet", "clients": 6, "alpha": 0.3, "min_samples": 5},
    "model": {"name": "mlp"},
    "local": {"name": "sgd", "epochs": 1, "batch_size": 16, "lr": 0.1},
    "resources": {"workers": 1},
}
METHODS = [
    {"label": "plain", "local.name": "sgd"},
    {"label": "prox {mu: 0.5}", "local.name": "fedprox", "local.mu": 0.5},
]


@pytest.fixture(scope="module")
def swept(
    session: Session, mlflow_process: Any, empty_store: Path, tmp_path_factory: pytest.TempPathFactory
) -> SweepResult:
    """A sweep of two methods and two seeds, in a store of its own."""
    folder = tmp_path_factory.mktemp("swept")
    shutil.copy(empty_store, folder / "mlflow.db")
    base = {**BASE, "tracking": {"uri": f"sqlite:///{folder}/mlflow.db"}, "output": {"dir": str(folder / "runs")}}
    (folder / "pages.yaml").write_text(yaml.safe_dump({"base": base, "grid": {"method": METHODS, "seed": [0, 1]}}))
    with mlflow_process() as process:
        return run_sweep(folder / "pages.yaml", (), process, session)


@pytest.fixture(scope="module")
def store(swept: SweepResult) -> Any:
    """The client of that store, the sweep's run there, and those of its cells by name."""
    import mlflow

    uri = f"sqlite:///{swept.directory.parents[1]}/mlflow.db"
    client = mlflow.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("pages")
    assert experiment is not None
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    return SimpleNamespace(client=client, uri=uri, parent=runs.pop("sweep pages"), children=runs)


def result_of(swept: SweepResult, row: int = 0) -> Result:
    found = load_result(swept.runs["run_directory"][row])
    assert isinstance(found, Result)
    return found


# In the store


def test_a_sweep_is_a_run_above_its_cells_which_have_short_names_and_a_method(store: Any, swept: SweepResult):
    assert sorted(store.children) == ["plain, seed 0", "plain, seed 1", "prox, seed 0", "prox, seed 1"]
    for name, run in store.children.items():
        assert run.data.tags["mlflow.parentRunId"] == store.parent.info.run_id
        assert (run.data.tags["method"], run.data.tags["sweep"]) == (name.partition(",")[0], "pages")
    assert store.parent.info.status == "FINISHED"
    text = store.parent.data.tags["mlflow.note.content"]
    assert "|  | images | final acc. |" in text and len(re.findall(r"^\| plain \|", text, re.M)) == 2
    kept = {file.path for file in store.client.list_artifacts(store.parent.info.run_id)}
    assert {"table.csv", "runs.csv", "table.txt", "figures"} <= kept


def test_a_run_says_what_it_is(store: Any, swept: SweepResult):
    run, result = store.children["plain, seed 1"], result_of(swept, 1)
    expected = {"dataset": "digits", "clients": "6", "alpha": "0.3", "allocation": "none", "seed": "1"}
    assert expected.items() <= run.data.tags.items()
    assert run.data.tags["mlflow.source.name"] == "pages.yaml" and run.data.tags["mlflow.user"]
    assert run.data.tags["folder"] == result.directory.name
    assert float(run.data.tags["best_accuracy"]) == pytest.approx(result.summary["best_accuracy"], abs=1e-4)
    text = run.data.tags["mlflow.note.content"]
    for fact in ("300 training and 100 test images", "6, dirichlet with alpha 0.3", "3 rounds", "epochs 1",
                 f"**{result.summary['final_accuracy']:.4f}** after round 3", result.summary["model_sha256"],
                 f"raysim run {result.directory}/config.yaml"):  # fmt: skip
        assert fact in text
    (data,) = run.inputs.dataset_inputs
    assert (data.dataset.name, len(data.dataset.digest)) == ("digits", 16)
    others = {r.inputs.dataset_inputs[0].dataset.digest for r in store.children.values()}
    assert others == {data.dataset.digest}


def test_the_first_metrics_are_those_that_matter_and_all_others_are_in_groups(store: Any, swept: SweepResult):
    run = store.children["plain, seed 0"]
    names = set(run.data.metrics) - {name for name in run.data.metrics if name.startswith("system/")}
    first = {"accuracy", "loss", "train_loss"}
    assert {name for name in names if "/" not in name} == first
    columns = {mlflow_name(name) for name in result_of(swept).metrics if name != "round"}
    assert names == columns | {FIRST_SECTION + name for name in first}
    assert {"class/accuracy_3", "client/worst", "seconds/train", "bytes/up"} <= names
    assert not any(name.startswith(OTHER) for name in names)
    assert run.data.metrics["accuracy"] == result_of(swept).summary["final_accuracy"]
    assert {"system/cpu_utilization_percentage", "system/driver/memory_megabytes"} <= set(run.data.metrics)


def test_every_metric_of_the_list_has_a_name_of_its_own_in_mlflow():
    """What varies is replaced by one of its values; names of a plug-in's own choice are in `other/`."""
    names = [re.sub(r"{(\w+)(\|.*?)?}", r"\1", name).replace("_class_class", "_class_3") for name in METRICS]
    found = {name: mlflow_name(name) for name in names if name not in ("round", "{rule's own}", "statistic_mean")}
    assert len(set(found.values())) == len(found)
    assert {name for name, grouped in found.items() if "/" not in grouped} == set(FIRST)
    assert {name for name, grouped in found.items() if grouped.startswith(OTHER)} == {"dropped_per_end"}
    assert mlflow_name("own_statistic") == "other/own_statistic"


def test_the_model_loads_from_mlflow_and_from_the_folder_to_the_same_logits(store: Any, swept: SweepResult):
    import mlflow.pyfunc
    import mlflow.pytorch
    from mlflow.models import Model

    run, result = store.children["prox, seed 0"], result_of(swept, 2)
    mlflow.set_tracking_uri(store.uri)
    (output,) = run.outputs.model_outputs
    assert output.model_id.startswith("m-")
    address = f"runs:/{run.info.run_id}/model"
    images = np.random.default_rng(0).integers(0, 256, (3, 1, 8, 8), dtype=np.uint8)
    with torch.inference_mode():
        ours = load_model(result.directory)(torch.from_numpy(images))
        theirs = mlflow.pytorch.load_model(address)(torch.from_numpy(images))
    assert torch.equal(ours, theirs) and ours.shape == (3, 10)
    served = mlflow.pyfunc.load_model(address)
    assert np.array_equal(served.predict(images), ours.numpy())
    assert served.metadata.signature.inputs.inputs[0].shape == (-1, 1, 8, 8)
    assert Model.load(address).load_input_example().shape == (2, 1, 8, 8)
    assert not (result.directory / ".mlflow_model").exists()


def test_the_table_of_clients_has_a_row_for_each(store: Any, swept: SweepResult):
    result = result_of(swept)
    table = pd.read_csv(store.client.download_artifacts(result.summary["mlflow_run_id"], "per_client.csv"))
    assert table["client"].tolist() == list(range(6)) and table["n_real"].tolist() == result.summary["sizes_K"]
    assert table["rounds"].tolist() == [3] * 6
    assert table["accuracy"].to_numpy() == pytest.approx(result.summary["client_accuracy_K"], abs=1e-4)


# The pages


def test_the_end_of_a_run_tells_its_page(swept: SweepResult):
    summary = result_of(swept).summary
    assert summary["mlflow_page"] == f"http://127.0.0.1:5000/#/experiments/1/runs/{summary['mlflow_run_id']}"


def test_a_port_that_is_taken_and_a_store_that_is_not_there_are_told_before_anything_starts(
    swept: SweepResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=rf"--port = {port}.*in use.*raysim ui --port {port + 1}"):
            ui_command.ui(str(swept.directory), None, port, print)
    with pytest.raises(UserError, match=r"there is no .*gone\.db"):
        ui_command.ui(None, f"sqlite:///{tmp_path}/gone.db", 5000, print)
    with pytest.raises(UserError, match="not the folder of a run"):
        ui_command.ui(str(tmp_path), None, 5000, print)
    said: list[str] = []
    ui_command.ui(None, "http://somewhere:5000", 5000, said.append)
    assert said == ["http://somewhere:5000"]


@pytest.mark.slow
def test_the_page_of_html_begins_with_the_choice_of_model_training():
    """In a process of its own, as MLflow's server, which takes many seconds to load, sets up all of MLflow."""
    asked = "from raysim.tracking.training_pages import app, pages; print(pages.test_client().get('/').text)"
    env = {**os.environ, "_MLFLOW_SERVER_FILE_STORE": "sqlite://", "MLFLOW_DISABLE_TELEMETRY": "true"}
    shown = subprocess.run([sys.executable, "-c", asked], env=env, capture_output=True, text=True, check=True).stdout
    assert re.search(r"<head><script>localStorage\['mlflow.workflowType_v1'\] \?\?= .*machine_learning", shown)
    assert 'id="root"' in shown


@pytest.fixture(scope="module")
def served(swept: SweepResult) -> Iterator[int]:
    """The port at which the store's pages are."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    with pages.served(f"sqlite:///{swept.directory.parents[1]}/mlflow.db", port):
        yield port


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, without a window; kept open over the pages."""
    webdriver = pytest.importorskip("selenium.webdriver")
    from selenium.webdriver.chrome.service import Service

    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.fail("there is no chromium: apt-get install -y chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "disable-gpu", "window-size=1500,1300"):
        options.add_argument(f"--{flag}")
    opened = webdriver.Chrome(options=options, service=Service(driver))
    opened.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": NO_ASSISTANT})
    opened.set_script_timeout(300)
    opened.set_page_load_timeout(300)
    yield opened
    opened.quit()


NO_ASSISTANT = """
localStorage.setItem('mlflow.assistant.fab.autoOpenedOnFirstLoad_v1', 'true');
localStorage.setItem('mlflow.assistant.panelOpen_v1', 'false');
"""


class Page:
    """A page of MLflow in the browser."""

    def __init__(self, browser: Any, port: int) -> None:
        self.browser = browser
        self.base = f"http://127.0.0.1:{port}/"

    def open(self, address: str, until: str, name: str) -> str:
        """Open a page, wait until it shows a text, and return all that it shows."""
        self.browser.get("about:blank")
        self.browser.get(address.replace("http://127.0.0.1:5000/", self.base))
        text = self.wait(lambda: until in self.text(), f"{until!r} on {name}")
        self.keep(name)
        return text

    def text(self) -> str:
        return str(self.browser.execute_script("return document.body.innerText"))

    def wait(self, true: Callable[[], bool], what: str) -> str:
        until = time.monotonic() + 120
        while not true():
            assert time.monotonic() < until, f"{what}: {self.text()}"
            time.sleep(0.3)
        return self.text()

    def click(self, css: str, begins: str, inside: str = "") -> None:
        """Click the first element of a selector whose text begins so, or a part of it, once there is one."""
        find = """
            const found = [...document.querySelectorAll(arguments[0])]
                .find(e => (e.innerText || '').trim().startsWith(arguments[1]));
            return found && arguments[2] ? found.querySelector(arguments[2]) : found;
        """
        self.wait(lambda: self.browser.execute_script(find, css, begins, inside) is not None, f"{css} {begins}")
        self.browser.execute_script(find, css, begins, inside).click()

    def keep(self, name: str) -> None:
        if "RAYSIM_SCREENSHOTS" in os.environ:
            time.sleep(3)  # until charts are drawn
            self.browser.save_screenshot(str(Path(os.environ["RAYSIM_SCREENSHOTS"]) / f"{name}.png"))


@pytest.fixture
def page(browser: Any, served: int) -> Page:
    return Page(browser, served)


@pytest.mark.browser
def test_the_page_of_a_run_says_what_it_is(page: Page, store: Any, swept: SweepResult):
    result = result_of(swept)
    shown = page.open(result.summary["mlflow_page"], "sweep pages", "run")  # the run above it comes last
    for fact in ("Description", "plain, seed 0", "Finished", "pages.yaml", "digits ("):
        assert fact in shown, fact
    for tag, value in (("method", "plain"), ("dataset", "digits"), ("seed", "0")):
        assert re.search(rf"\b{tag}\s*:\s*{value}\b", shown), tag
    assert f"{result.summary['final_accuracy']:.4f} after round 3" in page.text()
    assert "No description" not in shown


@pytest.mark.browser
def test_the_metrics_of_a_run_begin_with_those_that_matter(page: Page, swept: SweepResult):
    address = result_of(swept).summary["mlflow_page"]
    shown = page.open(f"{address}/model-metrics", "train_loss", "metrics")
    places = [shown.index(f"\n{name}\n") for name in ("accuracy and loss", "accuracy", "loss", "train_loss", "bytes")]
    assert places == sorted(places)
    page.open(f"{address}/system-metrics", "cpu_utilization_percentage", "system")


@pytest.mark.browser
def test_the_table_of_clients_is_drawn_as_a_table(page: Page, swept: SweepResult):
    address = result_of(swept).summary["mlflow_page"]
    shown = page.open(f"{address}/artifacts/per_client.csv", "n_synthetic", "clients")
    assert "Previewing the first 6 rows" in shown
    page.open(f"{address}/artifacts", "model", "artifacts")


@pytest.mark.browser
def test_the_runs_of_a_sweep_are_below_it_and_group_by_method(page: Page, store: Any):
    address = links.runs_page(store.uri, store.parent.info.experiment_id)
    shown = page.open(address, "sweep pages", "sweep")
    assert "5 matching runs" in shown and "Evaluation runs" not in shown
    page.click("[role=gridcell]", "#", "button")  # the sign beside the sweep, whose colour has a text
    page.wait(lambda: all(name in page.text() for name in store.children), "the runs below the sweep")
    page.keep("children")
    page.click("button", "Group by")
    page.click("[role=menuitemcheckbox]", "method")
    page.wait(lambda: "Group: prox" in page.text() and "Group: plain" in page.text(), "groups by method")
    page.keep("grouped")
    page.open(f"{address}&compareRunsMode=CHART", "accuracy and loss", "grouped-charts")
    shown = page.open(f"http://127.0.0.1:5000/#/experiments/1/runs/{store.parent.info.run_id}", "Description", "parent")
    assert "2 methods" in shown
    rows = "return [...document.querySelectorAll('table')].map(table => table.innerText)"
    tables = [text for text in page.browser.execute_script(rows) if "final acc." in text]
    assert len(tables) == 1 and re.search(r"^plain\s", tables[0], re.M) and "|" not in tables[0]


@pytest.mark.browser
def test_an_experiment_opened_from_the_start_page_shows_its_runs(page: Page):
    page.browser.get(page.base)
    page.browser.execute_script("localStorage.removeItem('mlflow.workflowType_v1')")  # as in a browser of today
    page.open("http://127.0.0.1:5000/", "Recent Experiments", "start")
    page.click("a", "pages")
    shown = page.wait(lambda: "sweep pages" in page.text(), "the runs of the experiment")
    assert "Evaluation runs" not in shown and "Sessions" not in shown
    assert "workflowType=machine_learning" in page.browser.current_url
